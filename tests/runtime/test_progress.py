"""Progress where the output is no terminal: a line at the start, every half minute, and at the end."""

from calibjax.runtime.progress import progress_bar


def test_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    bar = progress_bar(None, title="evaluating", unit="sequence", disable=False, total=1000)
    for seconds in (29.0, 10.0, 10.0, 10.0):
        clock[0] += seconds
        bar.update(10)
    bar.set_postfix_str("layer 3")
    bar.close()
    bar.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines == [
        "evaluating: 0/1000 sequence [00:00<?]",
        "evaluating: 20/1000 sequence [00:39<31:51]",
        "evaluating: 40/1000 sequence [00:59<23:36, layer 3]",
    ]
    assert "\r" not in shown.err


def test_short_work_is_two_lines(capsys):
    assert list(progress_bar(range(3), title="comparing", unit="method", disable=False)) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in lines] == ["comparing: 0/3 method", "comparing: 3/3 method"]
    assert list(progress_bar(range(3), title="comparing", unit="method", disable=True)) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_a_phase_that_was_complete_is_one_line(capsys):
    progress_bar(None, title="training", unit="step", disable=False, total=3, initial=3).close()
    assert capsys.readouterr().err == "training: 3/3 step [00:00<?]\n"
