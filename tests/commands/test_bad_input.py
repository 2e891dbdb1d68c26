"""Invalid input: exit code 2, one line that names the option, nothing loaded and nothing left, for every option."""

import contextlib
import importlib
import io
import json
import os
import typing

import pytest
from tiny import write_model, write_text

from calibjax.cli import COMMANDS, main
from calibjax.commands.parser import list_options

LONG = "n" * 5000
NO_NAME = ["", "\0", LONG, "a\udcff", "a\nb", "\x1b[31m"]
NO_PATH = ["loop", "file/x", "n" * 256, "/proc/x"]
NO_NUMBER = ["", "\0", LONG, "many", "9" * 5000, "0x1", "nan", "1e30 "]
ABSURD = {
    int: ([*NO_NUMBER, "1.5", "1e30", "inf", "9" * 4000, "-9" + "9" * 40], ["1000000000", "2147483647", "-0", "-1"]),
    float: ([*NO_NUMBER[:5], "nan", "-inf"], ["1e30", "1e-300", "-0.0", "inf", "1000000000", "-1e30"]),
}
"""Kind of number -> values that every option refuses, values that it may accept."""

OUTPUTS = ("--out",)
INPUTS = ("--model", "--data", "--eval-data", "--table", "--head", "--analogies", "--mmlu", "--assets", "--runs")
ANY_TEXT = ("--prompt", "--prompt-template")  # of several lines, or empty


class Reached(BaseException):
    """The command began its work: everything was accepted."""


def reached(*args, **options):
    raise Reached


WORK = [
    "calibjax.models.load._read_params",
    "calibjax.commands.quickstart.make_language",
    "calibjax.commands.eval_tasks._load_tasks",
    "calibjax.commands.report.save_report",
    "calibjax.commands.plan.command.plan_job",
    "jax.distributed.initialize",
]
"""What each command begins its work with. Reading a model's configuration and headers, or a first row, is none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "model")
    write_text(folder / "data.jsonl", rows=20, words=16)
    (folder / "file").write_text("")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "run").mkdir()
    row = {"tokens": 1, "nll": 0.0, "accuracy": 1.0, "confidence": 1.0}
    (folder / "run" / "metrics.json").write_text(json.dumps({"schema": 1, "held_out": {"methods": {"x": row}}}))
    (folder / "table.csv").write_text("confidence,correct\n" + "".join(f"0.{i},{i % 2}\n" for i in range(10, 40)))
    (folder / "dup.csv").write_text("confidence,correct,correct\n" + "0.5,1,0\n" * 20)
    (folder / "group.csv").write_bytes(b"confidence,correct,group\n" + b"0.5,1,a\n" * 20 + b"0.5,0,\xff\n")
    (folder / "empty.npz").write_bytes(b"")
    (folder / "big.csv").write_text("logit_0,logit_1,label\n" + "1e39,0,1\n" * 20)
    (folder / "null.jsonl").write_text("null\n")
    (folder / "null.json").write_text("null")
    (folder / "latin.jsonl").write_bytes(b'{"text": "w1"}\n{"text": "\xff"}\n')
    (folder / "number.jsonl").write_text('{"text": "w1"}\n' * 7 + '{"text": 3}\n')
    (folder / "other.jsonl").write_text('{"alpha": 1}\n')
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").write_text("")
    return folder


@pytest.fixture
def at(folder, monkeypatch):
    """Commands run in the folder, up to where their work begins."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in WORK:
        monkeypatch.setattr(name, reached)
    return folder


def text(*options):
    return ["--model", "model", "--data", "data.jsonl", "--out", "out", "--seq-len", "13", *options]


VALID = {
    "quickstart": ["--out", "out"],
    "train ats": text(),
    "train sft": text(),
    "train lhts": text(),
    "eval tasks": ["--model", "model", "--tasks", "arc_easy", "--out", "out"],
    "eval layers": text(),
    "eval bounds": ["--model", "model"],
    "compare": text(),
    "report": ["run"],
    "generate": ["--model", "model", "--prompt", "w1"],
    "convert": ["--model", "model", "--out", "out"],
    "plan": ["--model", "gpt2", "--topology", "v5e:2x2", "--no-compile"],
    "study transfer": ["--model", "model", "--domains", "a=data.jsonl", "b=data.jsonl", "--out", "out"],
}
VALID |= {name: text() for name in COMMANDS if name.startswith("study") and name not in VALID}


def invoke(command, arguments):
    """(exit code or "reached", stdout, stderr) of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([*command.split(), *arguments])
        except SystemExit as caught:
            code = caught.code
        except Reached:
            code = "reached"
    return code, out.getvalue(), err.getvalue()


def entries(folder):
    return {os.path.join(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)}


def refused(folder, command, arguments, *named):
    """Asserts that a command refuses its arguments in one line, before any work, and leaves nothing."""
    before = entries(folder)
    code, out, err = invoke(command, arguments)
    what = f"{command} {[str(a)[:40] for a in arguments]}: {code} {err}"
    assert code == 2, what
    assert err.startswith("error: "), what
    assert err.endswith("\n"), what
    assert err[:-1].isprintable(), what
    assert len(err) < 700, what
    assert not out, what
    assert entries(folder) == before, what
    for name in named:
        assert name in err, what
    return err


def test_valid_arguments_reach_the_work(at):
    """What the tests below change was accepted: they are refused for what they change."""
    for command, arguments in VALID.items():
        before = entries(at)
        code, _, err = invoke(command, arguments)
        assert code == "reached", (command, err)
        for made in sorted(entries(at) - before, reverse=True):
            os.rmdir(made) if os.path.isdir(made) else os.unlink(made)


# --- generated from the declarations ---


def kinds(annotation):
    """The types of the values that an option takes."""
    if typing.get_origin(annotation) is typing.Literal:
        return {typing.Literal}
    parts = [kinds(part) for part in typing.get_args(annotation)]
    return set().union(*parts) if parts else {annotation}


def declared():
    """(command, option) of every option, once where commands share it."""
    seen = {}
    for command, entry in COMMANDS.items():
        module = importlib.import_module(f"calibjax.commands.{entry.module}")
        for option in list_options(getattr(module, entry.options)):
            seen.setdefault((option.flag, option.path, str(option.annotation)), (command, option))
    return list(seen.values())


DECLARED = declared()


def with_value(command, flag, value):
    """The valid arguments of a command, with a value of one option."""
    valid = VALID[command]
    if flag == "--runs":
        return [value]
    if flag == "--table":
        return ["--table", value]
    if flag == "--domains":
        return ["--model", "model", "--domains", f"a={value}", "b=data.jsonl", "--out", "out"]
    if flag in valid:
        index = valid.index(flag)
        return [*valid[: index + 1], value, *valid[index + 2 :]]
    return [*valid, flag, value]


@pytest.mark.parametrize(("command", "option"), DECLARED, ids=lambda x: x if isinstance(x, str) else x.flag)
def test_absurd_values(at, command, option):
    """Every option refuses what it cannot take, and no value of any option ends in a traceback."""
    of_option = kinds(option.annotation)
    if bool in of_option:
        refused(at, command, [*VALID[command], f"{option.flag}=3"], option.flag)
        return
    never, maybe = next((ABSURD[kind] for kind in (int, float) if kind in of_option), (NO_NAME, NO_PATH))
    if typing.Literal in of_option:
        never, maybe = [*NO_NAME, "none of them"], []
    if option.flag in ANY_TEXT:
        never, maybe = ["\0", "a\udcff"], ["", LONG, "a\nb\x1b[31m"]
    if option.flag in (*INPUTS, *OUTPUTS):
        never, maybe = [*never, *maybe], []
    if option.flag == "--domains":
        never, maybe = ["\0", "a\udcff", "a\nb", "", *NO_PATH], [LONG]
    for value in never:
        shown = "report" if option.flag == "--runs" else option.flag
        refused(at, command, with_value(command, option.flag, value), *([] if shown == "report" else [shown]))
    for value in maybe:
        before = entries(at)
        code, _, err = invoke(command, with_value(command, option.flag, value))
        assert code in ("reached", 2), (value, code, err)
        if code == 2:
            assert err.startswith("error: "), err
            assert err[:-1].isprintable(), err
            assert entries(at) == before, value
        for made in sorted(entries(at) - before, reverse=True):
            os.rmdir(made) if os.path.isdir(made) else os.unlink(made)


def test_every_option_is_covered():
    numbers = [o for _, o in DECLARED if kinds(o.annotation) & {int, float}]
    names = [o for _, o in DECLARED if not kinds(o.annotation) & {int, float, bool, typing.Literal}]
    print(f"{len(DECLARED)} options: {len(numbers)} numbers, {len(names)} texts and paths")
    assert len(numbers) > 60
    assert {o.flag for o in names} > {*INPUTS, *OUTPUTS}
