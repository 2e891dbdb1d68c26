"""The inputs that coverage-guided fuzzing found, replayed: see `tests/campaigns/fuzz_coverage.py`."""

import contextlib
import json

import pytest
import report_documents
from campaigns import fuzz_coverage, fuzz_files

from calibjax.eval.report import page
from calibjax.runtime.errors import UserError

FOUND = sorted(file for file in fuzz_coverage.FOUND.rglob("*") if file.is_file())
TARGETS = sorted({file.relative_to(fuzz_coverage.FOUND).parts[0] for file in FOUND})


def test_every_quick_target_has_inputs():
    assert TARGETS == ["report", "rows", "table"]  # of a head and a configuration the first files reach the most


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_found_by_coverage(target, tmp_path, monkeypatch):
    """One `UserError`, or a result that passes the checks of its reader."""
    for name, drawing in (("inline_svg", ""), ("svg", ""), ("png", b"")):  # drawing takes most of the time
        monkeypatch.setattr(page, name, lambda *_, drawing=drawing: drawing)
    metrics = json.dumps(report_documents.document())
    for file in FOUND:
        found, digest, *parts = file.relative_to(fuzz_coverage.FOUND).parts
        if found != target:
            continue
        place = tmp_path / digest
        place.mkdir()
        if target == "report":
            (place / "tokens-metrics.json").write_text(metrics)
        copy = place.joinpath(*parts)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        with contextlib.suppress(UserError):
            fuzz_files.TARGETS[target].read(place, "/".join(parts))
