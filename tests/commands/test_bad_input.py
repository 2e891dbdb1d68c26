"""Invalid input: exit code 2, one line that names the option, nothing loaded and nothing left, for every option."""

import contextlib
import io
import os
import shutil
import typing

import pytest
from tiny import write_model, write_text

from calibjax.cli import COMMANDS, load_command, main
from calibjax.commands.parser import list_options

LONG = "n" * 5000
NO_NAME = ["", "\0", LONG, "a\udcff", "a\nb", "\x1b[31m"]
NO_PATH = ["./loop", "./file/x", "n" * 256, "/proc/x"]
NO_NUMBER = ["", "\0", LONG, "many", "9" * 5000, "0x1", "nan", "1e30 "]
ABSURD = {
    int: ([*NO_NUMBER, "1.5", "1e30", "inf", "9" * 4000, "-9" + "9" * 40], ["1000000000", "2147483647", "-0", "-1"]),
    float: ([*NO_NUMBER[:4], "nan", "-inf"], ["1e30", "1e-300", "-0.0", "inf", "1000000000", "-1e30"]),
}
"""Kind of number -> values that every option refuses, values that it may accept."""

OUTPUTS = ("--out",)
INPUTS = ("--model", "--data", "--eval-data", "--table", "--head", "--analogies", "--assets", "--runs")
POSITIONAL = ("--runs", "--run", "--repository")
ANY_TEXT = ("--prompt", "--prompt-template", "--system")  # of several lines, or empty


class Reached(BaseException):
    """The command began its work: everything was accepted."""


def reached(*args, **options):
    raise Reached


WORK = [
    "calibjax.models.load.read_params",
    "calibjax.commands.quickstart.make_language",
    "calibjax.commands.eval_tasks.load_tasks",
    "calibjax.eval.report.schema.read_json",
    "calibjax.commands.apply.load",
    "calibjax.commands.decide.decide",
    "calibjax.commands.export.load_head",
    "calibjax.commands.push.check_upload",
    "calibjax.commands.plan.plan_job",
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
    (folder / "run" / "metrics.json").write_text("{}")
    (folder / "table.csv").write_text("confidence,correct\n" + "".join(f"0.{i},{i % 2}\n" for i in range(10, 40)))

    (folder / "group.csv").write_bytes(b"confidence,correct,group\n" + b"0.5,1,a\n" * 20 + b"0.5,0,\xff\n")
    (folder / "empty.npz").write_bytes(b"")
    (folder / "big.csv").write_text("logit_0,logit_1,label\n" + "1e39,0,1\n" * 20)
    (folder / "cut.csv").write_text("confidence,correct\n" + "0.5,1\n" * 20 + "0.5")

    (folder / "wrong.csv").write_text("certainty,correct\n" + "0.5,0\n" * 20)
    (folder / "null.jsonl").write_text("null\n")
    (folder / "questions.csv").write_text("question,A,B,answer\nWho?,I,you,B\n")
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
    yield folder
    shutil.rmtree(folder / "out", ignore_errors=True)


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
    "apply": ["--table", "table.csv", "--method", "kept", "--out", "out.csv"],
    "decide": ["--table", "table.csv"],
    "export": ["run", "--out", "out"],
    "push": ["run", "org/name"],
    "generate": ["--model", "model", "--prompt", "w1"],
    "convert": ["--model", "model", "--out", "out"],
    "plan": ["--model", "gpt2", "--topology", "v5e:2x2", "--no-compile"],
}


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


def remove_new(folder, before):
    for made in sorted(entries(folder) - before, reverse=True):
        os.rmdir(made) if os.path.isdir(made) else os.unlink(made)


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
        remove_new(at, before)


# --- generated from the declarations ---


def kinds(annotation):
    parts = [kinds(part) for part in typing.get_args(annotation)]
    return set().union(*parts) if parts else {annotation}


def declared():
    """(command, option) of every option, once where commands share it."""
    seen = {}
    for command in COMMANDS:
        for option in list_options(load_command(command)[0]):
            seen.setdefault((option.flag, option.path, str(option.annotation)), (command, option))
    return list(seen.values())


DECLARED = declared()


def with_value(command, flag, value):
    valid = VALID[command]
    if flag == "--table" and command == "compare":
        return ["--table", value]
    if flag in valid or flag in POSITIONAL:
        index = valid.index(flag) + 1 if flag in valid else int(flag == "--repository")
        return [*valid[:index], value, *valid[index + 1 :]]
    return [*valid, flag, value]


def of_each(values, number, step):
    """Every `step`-th value, from another one on for each option: every value meets options of each kind."""
    return values if len(values) < step else values[number % step :: step]


SLOW = ("--tasks",)  # lm-eval looks each name up among its thousands
CASES = [
    *(pytest.param(n, *each, 4, marks=[pytest.mark.slow] * (each[1].flag in SLOW)) for n, each in enumerate(DECLARED)),
    *(pytest.param(n, *each, 1, marks=pytest.mark.slow) for n, each in enumerate(DECLARED) if each[1].flag not in SLOW),
]


@pytest.mark.parametrize(("number", "command", "option", "step"), CASES, ids=lambda x: getattr(x, "flag", str(x)))
def test_absurd_values(at, number, command, option, step):
    """Every option refuses what it cannot take, and no value of any option ends in a traceback."""
    of_option = kinds(option.annotation)
    if bool in of_option:
        refused(at, command, [*VALID[command], f"{option.flag}=3"], option.flag)
        return
    never, maybe = next((ABSURD[kind] for kind in (int, float) if kind in of_option), (NO_NAME, NO_PATH))
    if option.choices:
        never, maybe = [*NO_NAME, "none of them"], []
    if option.flag in ANY_TEXT:
        never, maybe = ["\0", "a\udcff"], ["", LONG, "a\nb\x1b[31m"]
    if option.flag in (*INPUTS, *OUTPUTS):
        never, maybe = [*never, *maybe], []
    for value in of_each(never, number, step):
        named = [] if option.flag in POSITIONAL else [option.flag]
        refused(at, command, with_value(command, option.flag, value), *named)
    for value in of_each(maybe, number, step):
        before = entries(at)
        code, _, err = invoke(command, with_value(command, option.flag, value))
        assert code in ("reached", 2), (value, code, err)
        if code == 2:
            assert err.startswith("error: "), err
            assert err[:-1].isprintable(), err
            assert entries(at) == before, value
        remove_new(at, before)


# --- one by one ---

ATS, SFT, LHTS = "train ats", "train sft", "train lhts"
BAD = [
    # data
    (ATS, ["--data", "nowhere.jsonl"], "--data: nowhere.jsonl does not exist"),
    (ATS, ["--data", "null.jsonl"], "null.jsonl, line 1: expected a JSON object, got 'null'"),
    (ATS, ["--data", "full"], "--data: full holds no data file"),
    (ATS, ["--data", "questions.csv"], "--data: questions.csv: multiple choice"),
    ("eval layers", ["--data", "questions.csv"], None),
    (ATS, ["--eval-split", "b"], "--eval-split: expected --eval-data, the sets that it is a split of"),
    (ATS, ["--split", "test"], "--split 'test': the file data.jsonl has no splits"),
    (ATS, ["--eval-data", "data.jsonl", "--eval-split", "b"], "--eval-split 'b': the file data.jsonl has no splits"),
    (LHTS, ["--analogies", "data.jsonl"], "--analogies: data.jsonl: expected analogies with columns category"),
    # models
    (ATS, ["--model", "nowhere/model/x"], "--model: nowhere/model/x does not exist"),
    ("plan", ["--model", "gtp2"], "--model gtp2: expected a hub id"),
    ("push", ["--base", "a/b/c"], "--base a/b/c: expected org/name or org/name@revision"),
    # directories
    (ATS, ["--out", "file"], "--out file: expected a directory, but this is a file"),
    (ATS, ["--out", "full"], "--out full is not empty and holds no run of calibjax"),
    ("convert", ["--out", "full"], "--out: full: expected a new or an empty directory, but it holds thesis.tex"),
    ("convert", ["--out", "n" * 254], None),
    ("eval bounds", ["--out", "full"], "--out: full: expected a file or a new path, but this is a directory"),
    ("report", ["full"], "expected the directory of a finished run, with metrics.json"),
    ("push", ["full", "org/name", "--dry-run=card"], "full: expected the directory of a finished run, with metrics"),
    ("report", ["run", "run"], "--out: expected a directory to write the report of several runs to"),
    # methods of training
    (ATS, ["--loss", "cross-entropy", "--alpha", "0.5"], "--alpha: the loss cross-entropy has no such weight"),
    (ATS, ["--batch-size", "8", "--accumulate", "3"], "--batch-size: expected a multiple of 24"),
    (ATS, ["--batch-size", "6"], "--batch-size: expected a multiple of 8"),
    (ATS, ["--data"], "--data: expected at least one file, directory or hub id, got none"),
    (ATS, ["--data", "data.jsonl", "./data.jsonl"], "--data: expected different sets, got data.jsonl, ./data.jsonl"),
    (ATS, ["--head-kind=constant", "--features=max_logit", "--pooling=sequence"], "--features, --pooling: a constant"),
    (ATS, ["--features", "smell"], "--features: expected distinct names among hidden_states, "),
    (ATS, ["--head-kind", "constant", "--normalize"], "--normalize: a constant head does not read it"),
    (ATS, ["--head-kind=linear", "--epochs=2", "--accumulate=2"], "--epochs, --accumulate: a linear head is solved"),
    (ATS, ["--mesh", "data=2,data=4"], "--mesh data=2,data=4: expected every axis once, got data twice"),
    (ATS, ["--mesh", "data=3"], "--mesh data=3: expected all 8 devices"),
    (ATS, ["--mesh", "rows=8"], "--mesh rows=8: expected sizes of data, fsdp, tensor"),
    (ATS, ["--processes", "2"], "--coordinator, --process-id: missing; give all of"),
    (SFT, ["--loss", "selective-authors"], "--loss selective-authors: it is for temperature heads (train ats) only"),
    (SFT, ["--loss", "focal", "--z-loss", "1"], "--z-loss: expected 0 with loss focal, got 1.0"),
    (SFT, ["--lora-targets", "mlp"], "--lora-alpha, --lora-targets: they are options of adapters"),
    (SFT, ["--loss", "top-k-smoothing"], "--loss top-k-smoothing: it has no sharded form"),
    *((LHTS, ["--temperatures", *bad], "expected at least one, and each once") for bad in ((), ("0.9", "0.7", "0.90"))),
    (LHTS, ["--text-prompt-tokens", "13"], "--text-prompt-tokens: expected less than --seq-len 13, got 13"),
    (LHTS, ["--analogy-rows", "5"], "--analogy-rows: expected --analogies"),
    (LHTS, ["--no-partition", "--quantiles", "3"], "--quantiles, --partition-rounds: of the baseline"),
    # evaluation
    ("eval tasks", ["--judge", "os:path"], "--judge: expected a function, got os:path, of type module"),
    ("eval tasks", ["--judge", "no/where/judge"], "--judge: no/where/judge does not exist"),
    ("eval tasks", ["--head", "full"], "--head: full: expected a head (head.json and params/)"),
    ("eval tasks", ["--assets", "nowhere"], "--assets: nowhere does not exist"),
    ("eval tasks", ["--further-confidences", "probe_correct_answer", "--fit"], "--fit: it is for multiple choice"),
    ("eval tasks", ["--sample-calibrated"], "--sample-calibrated: expected a head"),
    ("eval tasks", ["--samples", "4"], "--samples: further_confidences names none"),
    ("eval tasks", ["--samples", "4", "--further-confidences", "p_true"], "--samples: further_confidences names none"),
    ("eval tasks", ["--clustering", "nowhere:f"], "--clustering: expected exact, normalised, numeric"),
    ("compare", ["--table", "table.csv"], "give either --model and --data, or --table"),
    ("compare", ["--per-token"], "--per-token: not read with --model"),
    ("decide", ["--columns", "confidence=a,confidence=b"], "--columns: expected one column as confidence, got a and b"),
    ("compare", ["--methods", "mlp_temperature"], "--methods: mlp_temperature: expected all, or some"),
    ("compare", ["--save", "x/../out"], "--save x/../out: expected another directory than --out"),
    ("compare", ["--save", "file"], "--save: file"),
    ("compare", ["--save", "file/x"], "--save: "),
    ("export", ["--out", "file/x"], "--out: "),
    ("apply", ["--out", "x.xls"], "expected a file ending in .csv, .tsv, .jsonl, .parquet, .npz"),
    ("generate", ["--temperature", "1e-300"], "--temperature: expected 0 or a number from"),
    ("generate", ["--temperature", "1", "--sample-calibrated"], "--sample-calibrated: expected --head"),
    ("generate", ["--prompt"], "--prompt: expected at least one text to continue, got none"),
    ("eval bounds", ["--model"], "--model: expected at least one directory or hub id, got none"),
    ("eval tasks", ["--tasks", "triviaqa", "--fit", "--temperature", "2"], "--fit fits the temperature"),
    ("decide", ["--out", "x.csv"], "expected a file ending in .json"),
    ("decide", ["--by-category"], "has no column category"),
    # plan
    ("plan", ["--objective", "sft", "--head-kind", "mlp"], "--head-kind: --objective sft does not read it"),
    ("plan", ["--objective", "sft", "--lora-rank", "1000000000"], "--lora-rank: expected 1 to 768"),
    ("plan", ["--epochs", "3"], "--epochs: --objective ats does not read it"),
    *(("plan", ["--topology", bad], "--topology") for bad in ("v9:4", "h100:0")),
    ("plan", ["--mesh", "data=8"], "--mesh data=8: expected all 4 devices"),
    ("plan", ["--seq-len", "1000000"], "--seq-len"),
    # the line itself
    (ATS, ["--quiet", "stray"], "'stray': calibjax train ats takes no such argument"),
]
TABLES = [
    ("group.csv", "--table: group.csv, line 22: invalid UTF-8; save the file as UTF-8"),
    ("empty.npz", "--table: empty.npz cannot be read as an .npz file"),
    ("big.csv", "--table: big.csv: logit: row 0 holds [1e+39, 0.0], expected finite numbers of float32"),
    (
        "null.jsonl",
        "--table: null.jsonl, line 1: expected a JSON object, got 'null'. To leave out such rows, give --skip",
    ),
    ("file", "--table: file: expected a file ending in .csv"),
    ("full", "--table: full: expected a file, found a directory"),
    ("cut.csv", "--table: cut.csv"),
    ("wrong.csv", "--table: wrong.csv: expected the columns"),
]


@pytest.mark.parametrize(("command", "changes", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad(at, command, changes, message):
    arguments = [*([] if changes[0] == "full" else VALID[command]), *changes]
    if message is None:
        assert invoke(command, arguments)[0] == "reached"
    else:
        refused(at, command, arguments, message)


@pytest.mark.parametrize(("file", "message"), TABLES, ids=lambda x: x[:20])
def test_bad_tables(at, file, message):
    refused(at, "compare", ["--table", file, "--out", "out"], message)
    refused(at, "decide", ["--table", file], message)
    refused(at, "compare", ["--table", "table.csv", "--base-table", file], message.replace("--table", "--base-table"))


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_options(at, command):
    """Those that are required are named, and nothing else is looked at."""
    required = [option.flag for c, option in DECLARED if c == command and option.default.__class__ is type]
    if command not in ("quickstart", "compare", "report"):
        refused(at, command, [], "missing; calibjax", *(flag for flag in required if flag not in POSITIONAL))
