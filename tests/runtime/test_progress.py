"""Progress where the output is no terminal: a line at the start, every half minute, and at the end."""

import io
import time

from calibjax.runtime import progress
from calibjax.runtime.progress import progress_bar


def test_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    bar = progress_bar(None, title="evaluating", unit="sequence", disable=False, total=1000)
    for seconds in (29.0, 10.0, 10.0, 10.0):  # the first step compiles
        clock[0] += seconds
        bar.update(10)
    bar.set_postfix_str("layer 3")
    bar.close()
    bar.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0].startswith("evaluating: 0/1000 sequence")
    assert lines[1:] == [
        "evaluating: 20/1000 sequence [00:39, about 16:20 left]",  # 980 sequences at one a second
        "evaluating: 40/1000 sequence [00:59, about 16:00 left, layer 3]",
    ]
    assert "\r" not in shown.err


def test_compilation_is_not_in_the_estimate(monkeypatch):
    """Of steps of a second, with two items each at their end, some compile, for a minute each; 90 are left."""
    clock = [1.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    bar = progress.Bar(None, total=200, file=io.StringIO())
    assert "?" in str(bar)
    for seconds in (60.0, 1.0, 1.0, 60.0, 1.0, 1.0, 1.0, 60.0, 1.0, 1.0):
        clock[0] += seconds
        for n in (0, 1, 1):
            bar.update(n)
    assert "<01:30," in str(bar)
    bar.close()


def test_short_work_is_two_lines_and_what_was_complete_one(capsys):
    assert list(progress_bar(range(3), title="comparing", unit="method", disable=False)) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in lines] == ["comparing: 0/3 method", "comparing: 3/3 method"]
    assert list(progress_bar(range(3), title="comparing", unit="method", disable=True)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    progress_bar(None, title="training", unit="step", disable=False, total=3, initial=3).close()
    assert capsys.readouterr().err == "training: 3/3 step [00:00]\n"
