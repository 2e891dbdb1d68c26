"""Changes proposed to other projects, applied to a copy of their installed source."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from assets import model_path

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs" / "upstream" / "lm_eval_entry_points.patch"
TASK = """
task: stories
dataset_path: json
dataset_kwargs: {data_files: {test: stories.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: ["was a little girl", "girl little a was"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_models_of_lm_eval_by_entry_points(tmp_path):
    """The tests of the patch, and plain `lm_eval --model calibjax` on a small model."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")
    if shutil.which("patch") is None:
        pytest.skip("no `patch` to apply it with")
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "lm_eval", ignore=shutil.ignore_patterns("tasks", "*.pyc"))
    (tmp_path / "lm_eval" / "tasks").mkdir()  # without its 20,000 definitions
    for file in (Path(spec.origin).parent / "tasks").glob("*.py"):
        shutil.copy(file, tmp_path / "lm_eval" / "tasks")
    (tmp_path / "stories.yaml").write_text(TASK)
    (tmp_path / "stories.jsonl").write_text(json.dumps({"start": "Once upon a time, there"}) + "\n")
    subprocess.run(["patch", "-p1", "-s", "-i", PATCH], cwd=tmp_path, check=True)
    # As installed: the metadata that pip writes from pyproject.toml.
    point = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    info = tmp_path / "calibjax_of_this_tree-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: calibjax-of-this-tree\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[lm_eval.models]\ncalibjax = {point['calibjax']}\n")

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/models"]
    done = subprocess.run(tests, **run)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "5 passed" in done.stdout
    command = ["-m", "lm_eval", "--model", "calibjax", "--model_args", f"pretrained={model_path('stories260K')}"]
    command += ["--tasks", "stories", "--include_path", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], **run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\|stories\s*\|.*\|acc\s*\|.*\|\s*1", done.stdout), done.stdout
