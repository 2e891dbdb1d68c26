"""The Python of the README and the guides runs as it stands, but for the two paths that only its reader knows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from assets import model_path

import calibjax
from calibjax.train import options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = ("answers.md", "distributed.md", "guides/calibrate.md", "guides/hugging_face.md", "recalibration.md")
"""Pages of docs/ with Python; they use the head that the README saves."""


def blocks_of(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def runner(tmp_path):
    """Executes a block of a page with a small text and a real model in place of the reader's paths."""
    model, data = model_path("stories260K"), tmp_path / "data.jsonl"
    words = ["Once", "upon", "a", "time", "there", "was", "a", "little", "cat", "who", "liked", "to", "play", "outside"]
    rows = [" ".join(words[(row + step) % len(words)] for step in range(20 + 3 * row)) for row in range(24)]
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))

    def run(page, block, namespace):
        code = block.replace("path/to/model", str(model)).replace("runs/x", str(tmp_path / "x"))
        exec(compile(code.replace("data.jsonl", str(data)), page, "exec"), namespace)

    return run


@pytest.mark.slow
def test_python_blocks_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "AUTO", options.AUTO[:1])
    run = runner(tmp_path)
    blocks, namespace = blocks_of(README), {}
    assert len(blocks) == 4
    assert blocks[0].strip().count("\n") <= 10
    by_block = []
    for block in blocks:
        run("README.md", block, namespace)
        by_block.append(dict(namespace))
    assert re.search(r"^ats +\.?\d", capsys.readouterr().out, flags=re.MULTILINE)
    assert float(abs(namespace["gradient"]).max()) > 0
    # The blocks compute what `evaluate` prints.
    lm, held_out, fitted = (namespace[name] for name in ("lm", "held_out", "fitted"))
    rows = calibjax.evaluate(lm, held_out, fitted.heads).document["methods"]
    assert held_out.segment_ids.max() > 1
    assert not held_out.where.all()
    assert float(namespace["value"]) == pytest.approx(rows["uncalibrated"]["nll"], rel=1e-5)
    confidence = np.asarray(by_block[1]["confidence"])[held_out.where]
    assert confidence.mean() == pytest.approx(rows["ats"]["confidence"], rel=1e-5)


@pytest.mark.slow
def test_python_of_the_guides_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "AUTO", options.AUTO[:1])
    run = runner(tmp_path)
    run("README.md", blocks_of(README)[0], {})  # the guides use the head that it saves
    for page in GUIDES:
        of_page = {}
        for block in blocks_of((ROOT / "docs" / page).read_text()):
            run(page, block, of_page)


def test_every_page_with_python_is_tried():
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    with_python = {str(page) for page in pages if blocks_of((ROOT / "docs" / page).read_text())}
    # metrics.md: three lines on batches that the reader has; test_torch.py runs serving.md, test_plot.py
    # plots.md, models/test_own.py guides/own_model.md.
    assert with_python - {"metrics.md", "serving.md", "plots.md", "guides/own_model.md"} == set(GUIDES)


def test_first_screen_holds_two_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)
    for command, last in zip(commands, ("quickstart", "pytest"), strict=False):
        assert re.match(rf"python3 -m venv .venv && .*{last}.*$", command)
