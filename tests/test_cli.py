"""The command line: what it prints, where, with which exit code; and every mistake as one line before any work."""

import json
import os
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from tiny import write_model, write_text

from calibjax import __version__, load_head, load_model
from calibjax.cli import main
from calibjax.commands import quickstart
from calibjax.commands.groups import _set_name
from calibjax.train import options as ats_options

ROOT = Path(__file__).parents[1]
SECRETS = {"HF_TOKEN": "hf_SecretOfTheHub", "WANDB_API_KEY": "SecretOfWeightsAndBiases"}
SHORT = ["--seq-len", "13", "--full-sequences", "--epochs", "2", "--batch-size", "8"]
ONE = ("--head-kind", "mlp", "--loss", "joint", "--no-refit-temperature")  # one head is trained


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model with its tokenizer, and a file of text for it."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "model")
    write_text(folder / "data.jsonl", rows=60, words=16)
    write_text(folder / "other.jsonl", rows=12, words=16)  # the first of the same rows
    return folder


def train_ats(made, out, *options, model=None):
    arguments = ["--model", str(model or made / "model"), "--data", str(made / "data.jsonl"), "--out", str(out)]
    return main(["train", "ats", *arguments, *SHORT, *options])


def test_help_of_groups(capsys):
    for words, named in ((["--help"], "quickstart"), (["train", "--help"], "ats"), (["train", "--model"], "ats")):
        with pytest.raises(SystemExit) as caught:
            main(words)
        shown = "".join(capsys.readouterr())
        assert caught.value.code == (0 if "--help" in words else 2)
        assert "usage: calibjax" in shown
        assert named in shown


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("token*", [], "holds no tokenizer; expected tokenizer.json"),
        ("", ["--seq-len", "33"], "longer than the model's context of 32 tokens"),
        ("", ["--seq-len", "20"], "no sequence of 20 tokens has anything to predict"),
        ("", ["--max-sequences", "1"], "--fit-fraction 0.6 of 1 sequence(s) is none"),
        ("", ["--max-sequences", "2"], "held out: expected at least two sequences, got one"),
    ],
)
def test_what_does_not_fit_is_one_line(capsys, tmp_path, made, missing, options, message):
    """Models that are wrong, and options that fit neither model nor text: nothing is trained, and nothing left."""
    model = write_model(tmp_path / "model")
    for file in model.glob(missing) if missing else ():
        file.unlink()
    capsys.readouterr()
    assert train_ats(made, tmp_path / "out", *options, model=model) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert (printed.err.count("\n"), printed.out.count("Traceback")) == (1, 0), printed
    assert message in printed.err
    assert not (tmp_path / "out").exists(), "something was left"


# --- whole runs ---


@pytest.fixture(scope="module")
def done(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("done") / "run"
    stdout, stderr = StringIO(), StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.MonkeyPatch.context() as patch:
        for name, secret in SECRETS.items():
            patch.setenv(name, secret)
        code = train_ats(made, out, *ONE, "--json", "--eval-data", str(made / "other.jsonl"))
    assert code == 0, stderr.getvalue()
    return out, stdout.getvalue(), stderr.getvalue()


def test_json_is_all_that_is_printed(done):
    out, stdout, stderr = done
    document = json.loads(stdout)
    assert document == json.loads((out / "metrics.json").read_text())
    assert document["schema"] == 1
    assert list(document["held_out"]["methods"]) == ["uncalibrated", "temperature", "ats"]
    assert document["held_out"]["tokens"] == 24 * 12  # 60 sequences, 40% held out
    assert list(document["transfer"]) == ["other"]
    assert document["transfer"]["other"]["tokens"] == 12 * 12
    assert document["run"]["fit"]["candidate"] == "mlp, joint-1"
    assert "model: LanguageModel(llama" in stderr
    assert re.search(r"WARNING: \d+ of 12 texts of other \(.* are in the fitting part as well", stderr)
    assert "tokens/s" in stderr  # the progress bars


def test_no_secret_of_the_environment_is_written(done):
    """Neither in what is printed nor in any file: logs, JSON, pages, checkpoints."""
    out, *printed = done
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in SECRETS.values():
        assert not [text for text in printed if secret in text]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_what_a_run_leaves(done, made):
    out = done[0]
    assert {entry.name for entry in out.iterdir()} == {
        *("run.json", "run.yaml", "fit", "head", "metrics.json", "tokens.json", "reliability.png", "report.html")
    }
    assert load_head(out, load_model(made / "model")).config.kind == "mlp"
    assert json.loads((out / "head" / "head.json").read_text())["notes"]["candidate"] == "mlp, joint-1"


def test_finished_run_again(done, made, capsys):
    """Nothing is trained anew, everything is written again, and all figures are the same; the tables are printed."""
    out, stdout, _ = done
    head = (out / "head" / "head.json").read_text()
    code = train_ats(made, out, *ONE, "--eval-data", str(made / "other.jsonl"), "--quiet")
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    assert json.loads((out / "metrics.json").read_text()) == json.loads(stdout)
    assert (out / "head" / "head.json").read_text() == head
    lines = printed.out.strip().splitlines()
    assert lines[-1].startswith(f"results in {out}: ")
    assert any(line.startswith(("ATS is better calibrated", "ATS has a lower NLL", "WARNING: ATS ")) for line in lines)
    assert any("transfer to other" in line for line in lines)
    document = json.loads(stdout)
    for of_set in (document["held_out"], *document["transfer"].values()):
        for row in of_set["methods"].values():
            cell = f"{row['ece']['value']:.4f} [{row['ece']['low']:.4f}, {row['ece']['high']:.4f}]"
            assert any(cell in line and f"{row['nll']:.4f}" in line for line in lines), cell


def test_a_report_keeps_the_command_of_its_run(done, undrawn, tmp_path, capsys):
    assert main(["report", str(done[0]), "--out", str(tmp_path / "again")]) == 0
    assert "calibjax train ats --model" in (tmp_path / "again" / "report.html").read_text()


def test_a_push_can_be_looked_at_first(done, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("calibjax.commands.push.upload", None)
    arguments = ["push", str(done[0]), "org/name", "--dry-run", str(tmp_path / "card")]
    assert main(arguments) == 0
    names = {file.name for file in (tmp_path / "card").iterdir()}
    assert names >= {"README.md", "metrics.json", "reliability.png"}
    assert "org/name" in (tmp_path / "card" / "README.md").read_text()
    assert main(arguments) == 2, "it is there"


def test_other_run_in_the_same_place(done, made, capsys):
    out = done[0]
    before = (out / "metrics.json").read_bytes()
    for options, different in (
        (["--loss", "cross-entropy"], "ats.loss 'joint' there, 'cross-entropy' now"),
        ([*ONE, "--seed", "1"], "seed 0 there, 1 now"),
    ):
        assert train_ats(made, out, *options) == 2
        error = capsys.readouterr().err
        assert re.search(f"holds another run .*{re.escape(different)}", error)
        assert error.count("\n") == 1
    assert main(["quickstart", "--out", str(out)]) == 2
    assert "holds another run (different: command 'train ats' there, 'quickstart' now)." in capsys.readouterr().err
    assert (out / "metrics.json").read_bytes() == before


def test_training_that_diverges(made, tmp_path, capsys):
    options = ["--data", str(made / "data.jsonl"), str(made / "other.jsonl"), "--learning-rate", "1e38"]
    assert train_ats(made, tmp_path / "out", *ONE, *options, "--weight-decay", "1e38", "--quiet") == 1
    printed = capsys.readouterr()
    assert re.fullmatch("stopped: ATS .* at step .*\n", printed.err)
    assert re.search(r"WARNING: \d+ of 29 texts of the held-out parts of all sets", printed.out)
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_names_of_sets():
    def names(*sources):
        return [_set_name(source, sources) for source in sources]

    assert names("a/lima.jsonl.gz", "wiki/test.txt.gz", "org/set/") == ["lima", "wiki/test", "set"]
    assert names("a/x.jsonl", "b/x.jsonl") == ["a/x", "b/x"]
    assert names("a/held_out.jsonl") == ["a/held_out"]  # "held_out" is the run's own part
    for sources in (("a/x.jsonl", "a/x.csv"), ("a/x.v1.jsonl", "a/x.v2.jsonl"), ("a/b/x.txt", "c/b/x.txt")):
        assert len(set(names(*sources))) == 2, sources


# --- the quick start ---


@pytest.mark.slow
def test_quickstart(tmp_path, monkeypatch, capsys):
    """Smaller than what the user gets: the model is overconfident, and each method improves on the one before."""
    for name, size in (("_TRAIN", 96), ("_FIT", 768), ("_HELD_OUT", 256)):
        monkeypatch.setattr(quickstart, name, size)
    monkeypatch.setattr(ats_options, "ALPHA_GRID", (1.0,))
    out = tmp_path / "quick"
    assert main(["quickstart", "--out", str(out), "--seed", "1", "--epochs", "24"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith(f"results in {out}: ")
    assert "tokens/s" in printed.err
    assert re.search(r"exact\n.*error", printed.out), "its title takes two lines of 80 columns"
    document = json.loads((out / "metrics.json").read_text())
    base, single, ats = (document["held_out"]["methods"][name] for name in ("uncalibrated", "temperature", "ats"))
    assert base["accuracy"] == single["accuracy"] == ats["accuracy"]
    assert base["confidence"] > base["accuracy"] + 0.05
    for key in ("exact_error", "nll", "brier"):
        assert ats[key] < single[key] < base[key], key
    assert single["ece"]["value"] < base["ece"]["low"]
    assert {entry.name for entry in out.iterdir()} == {
        *("run.json", "run.yaml", "decoder", "fit", "head", "model"),
        *("metrics.json", "tokens.json", "reliability.png", "report.html"),
    }
    assert load_head(out, load_model(out / "model")).config.kind == "mlp"
    assert main(["export", str(out), "--out", str(tmp_path / "export")]) == 0


def test_writes_that_never_began_are_not_reported(capsys):
    """Orbax leaves its coroutines behind where a write fails; Python would print two lines for each."""

    async def write():
        pass

    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        write()
        assert len(reported) == 1
        with pytest.raises(SystemExit) as ended:
            main(["--version"])
        write()
    assert len(reported) == 1
    assert (ended.value.code, capsys.readouterr().out) == (0, f"calibjax {__version__}\n")


PLAN, FULL = "plan --model gpt2 --topology v5e-4 --no-compile", "No space left on device"


@pytest.mark.parametrize(("command", "why"), [("--version", FULL), ("--version", "Broken pipe"), (PLAN, FULL)])
def test_output_that_cannot_be_written(command, why):
    """A full disk, and a pipe whose reader has ended, as that of `| head -1`; in a line of its own, of all commands."""
    reader, pipe = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "calibjax", *command.split()]
    with open("/dev/full", "wb") as full:
        output = pipe if why == "Broken pipe" else full
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, f"stopped: the output cannot be written ({why}).\n")


def test_a_current_directory_that_was_removed(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["export", str(tmp_path), "--out", "o"]) == 2
    assert capsys.readouterr().err == "error: the current directory does not exist any more: change to another one.\n"


def test_streams_that_are_closed(tmp_path):
    """`<&- >&- 2>&-`: no file gets the number of a stream, and what asks a stream for its terminal is answered."""
    run = "import sys\nfrom calibjax.cli import main\ntry:\n main(['--version'])\nfinally:\n file = open('out', 'w')"
    script = f"{run}\n print(file.fileno() > 2, sys.stderr.isatty(), file=file)"
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, script], cwd=tmp_path, check=False)
    assert (tmp_path / "out").read_text() == "True False\n"
