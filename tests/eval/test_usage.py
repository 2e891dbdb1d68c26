"""The commands that the page of `compare` shows run as they are copied."""

import shlex

import numpy as np

from calibjax.cli import main
from calibjax.eval.report.notes import usage
from calibjax.eval.report.schema import read_metrics


def test_the_page_of_compare_shows_commands_that_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1, 400)
    rows = zip(confidence, rng.uniform(size=400) < confidence**3, strict=True)
    (tmp_path / "new.csv").write_text("confidence,correct\n" + "".join(f"{c:.4f},{int(r)}\n" for c, r in rows))
    out = tmp_path / "a run"
    assert main(["compare", "--table", "new.csv", "--methods", "platt", "--out", str(out), "--quiet"]) == 0
    commands = usage(read_metrics(out / "metrics.json"), out)
    assert commands.count("\n") == 1
    for line in commands.splitlines():
        assert main(shlex.split(line)[1:]) == 0
    assert (tmp_path / "calibrated.csv").read_text().count("\n") == 401
    assert "calibjax apply" in (out / "report.html").read_text()
