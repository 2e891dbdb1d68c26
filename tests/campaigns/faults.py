"""The n-th fault, n = 1, 2, ... until a command succeeds: `python tests/campaigns/faults.py [CASE ...]`.

`faults.c` is loaded before libc and fails the n-th call that opens, writes, syncs, renames, makes or maps a file below
the directory of the command, in Python, TensorStore and safetensors alike: that one call; it and all later ones, as on
a full disk; or from then on all that make something, as in a read-only directory. After each, the command succeeded
and its results are those of a run without faults; or it ended with exit code 1 or 2 and one line, every earlier result
is unchanged or replaced whole, and the same command then succeeds with the same results. Prints a JSON line a case.
"""

import argparse
import contextlib
import ctypes
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"  # also below the settings of pytest
MODES = ("once", "full", "read-only")


def preload(script, arguments):
    """Starts a script again with faults.c loaded, unless it is; returns its functions."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "fault_arm"):
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            shim = Path(folder) / "faults.so"
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, HERE / "faults.c", "-ldl"], check=True)
            environment = {**os.environ, "LD_PRELOAD": str(shim)}
            sys.exit(subprocess.run([sys.executable, script, *arguments], env=environment, check=False).returncode)
    library.fault_arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
    library.fault_failed.restype = ctypes.c_char_p
    return library


# --- what is run: each case prepares a directory once, and acts in a copy of it ---


class Files:
    """The helpers that write all files: a file that replaces another, a directory likewise, a new run."""

    results = ("a.json", "head", "run")

    def prepare(self, out):
        (out / "a.json").write_text("old")
        (out / "head").mkdir()
        (out / "head" / "params").write_text("old")

    def act(self, out, inputs):
        from calibjax.commands.run_directory import claim_directory
        from calibjax.runtime import locks
        from calibjax.runtime.errors import UserError, storage_failure
        from calibjax.runtime.files import new_directory, write_file

        try:
            claim_directory(out / "run", {"seed": 1})
            write_file(out / "a.json", "new")
            with new_directory(out / "head", replace=True) as fresh:
                write_file(fresh / "params", "new")
        except (OSError, UserError) as error:
            if storage_failure(error) is None:
                raise
            print(error, file=sys.stderr)
            return 1
        finally:
            locks.release()
        return 0


class Command:
    """A command of calibjax; `results` are patterns of what is compared with a run without faults."""

    def __init__(self, line, results=""):
        self.arguments, self.results = line.split(), results.split()

    def prepare(self, out):
        pass

    def act(self, out, inputs):
        from calibjax.cli import main

        try:
            return main([argument.format(out=out, inputs=inputs) for argument in self.arguments])
        except SystemExit as ended:
            return ended.code


MODEL = "--model {inputs}/model"
TRAIN = MODEL + " --data {inputs}/data.jsonl --out {out}/run --seq-len 13 --full-sequences --quiet --batch-size 6"
TRAIN += " --epochs 1 --checkpoint-every 3 --learning-rate 0.01"
LHTS = " --temperatures 0.9 --sampled-fraction 0.5 --no-partition --texts 4 --text-prompt-tokens 2 --myopic 1"
LAYERS = MODEL + " --data {inputs}/data.jsonl --out {out}/run --seq-len 13 --full-sequences --quiet --batch-size 8"
TASKS = MODEL + " --assets {inputs} --out {out}/run --quiet --tasks "
SAMPLES = " --max-new-tokens 2 --further-confidences consistency probe_correct_answer --samples 2"
HEAD = "metrics.json tokens.json head.json checksums.json"
TABLE = "--table {inputs}/pairs.csv"
CASES = {
    "files": Files(),
    "eval bounds": Command("eval bounds " + MODEL + " --out {out}/bounds.json", "bounds.json"),
    "convert": Command("convert " + MODEL + " --out {out}/model", "*.json"),
    "convert back": Command(
        "convert --model {inputs}/orbax --out {out}/model --to safetensors", "*.json *.safetensors"
    ),
    "report": Command("report {inputs}/run --out {out}/page", "report.html"),
    "train ats": Command("train ats " + TRAIN + " --loss joint --no-refit-temperature --head-kind mlp", HEAD),
    "train sft": Command("train sft " + TRAIN, "metrics.json *.safetensors"),
    "train lhts": Command("train lhts " + TRAIN + LHTS, "metrics.json *.safetensors"),
    "eval layers": Command("eval layers " + LAYERS + " --strengths 0.5 --direction confident", "metrics.json"),
    "eval tasks": Command("eval tasks " + TASKS + "arc_easy --temperature 2", "metrics.json"),
    "eval tasks, samples and probes": Command(
        "eval tasks " + TASKS + "triviaqa" + SAMPLES, "metrics.json *.csv probe.json checksums.json"
    ),
    "compare": Command(
        "compare " + TABLE + " --methods platt isotonic --quiet --out {out}/comparison --save {out}/method",
        "metrics.json method",
    ),
    "apply": Command("apply " + TABLE + " --method {inputs}/method --out {out}/new.csv", "new.csv"),
    "export": Command("export {inputs}/run --model {inputs}/model --out {out}/head", "head.* *.safetensors"),
    "quickstart": Command("quickstart --epochs 1 --out {out}/run --quiet", HEAD),
}


def run(case, out, inputs):
    """The exit code, what was printed to the standard error, and whether an exception left the command."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = case.act(out, inputs)
        except Exception:
            code = traceback.format_exc()
    return code, printed.getvalue()


def contents(out, patterns):
    files = (file for pattern in patterns for file in [*out.glob(pattern), *out.rglob(pattern)])
    files = (inner for file in files for inner in (file.rglob("*") if file.is_dir() else [file]))
    stored = {str(file.relative_to(out)): file.read_bytes() for file in files if file.is_file()}
    return {name: data for name, data in stored.items() if "checkpoints" not in name and not name.endswith(".lock")}


class Whole(NamedTuple):
    """Contents before and after a run without faults, names that two such runs leave alike, calls that can fail."""

    before: dict[str, bytes]
    after: dict[str, bytes]
    same: set[str]
    calls: int


def fresh(case, folder):
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    case.prepare(out)
    return out


def whole_run(case, library, folder, inputs):
    out = fresh(case, folder)
    before = contents(out, case.results)
    library.fault_arm(os.fsencode(out), 0, 0)
    code, printed = run(case, out, inputs)
    calls = library.fault_disarm()
    assert code == 0, (code, printed)
    after = contents(out, case.results)
    assert after, list(out.rglob("*"))
    out = fresh(case, folder)
    assert run(case, out, inputs)[0] == 0
    again = contents(out, case.results)
    return Whole(before, after, {name for name, data in after.items() if again[name] == data}, calls)


def differences(case, out, whole):
    got = contents(out, case.results)
    return [f"{name} differs" for name in whole.same if got.get(name) != whole.after[name]]


def settle(out):
    """Waits for what threads of a command that failed still write; to a user they end with its process."""
    before = None
    while before != (before := sorted(out.rglob("*"))):
        time.sleep(0.1)


def check(case, out, inputs, whole, code, printed):
    """What is wrong after a run with a fault."""
    if code == 0:
        return differences(case, out, whole)
    if code not in (1, 2):
        return [f"exit code or traceback: {str(code)[-3000:]}"]
    problems = [] if printed.count("\n") == 1 else [f"{printed.count(chr(10))} lines: {printed[-1500:]}"]
    got = contents(out, case.results)
    aside = {file.read_bytes() for file in out.glob("*.old/*")}  # the next start puts it back
    for name, data in whole.before.items():
        if got.get(name) not in (data, whole.after[name]) and not (name not in got and data in aside):
            problems.append(f"{name}: neither the earlier result nor the new one")
    settle(out)
    code, printed = run(case, out, inputs)
    if code != 0:
        problems.append(f"started again: {code} {printed[-1500:]}")
    return problems + differences(case, out, whole)


def try_case(case, library, folder, inputs, given):
    """Every fault, or each `stride`-th one, for so long at most; returns counts of the outcomes."""
    began = time.monotonic()
    whole = whole_run(case, library, folder, inputs)
    counts, wrong = Counter(), 0
    faults = itertools.product(enumerate(range(1, whole.calls + given.stride, given.stride)), range(len(MODES)))
    for (turn, n), mode in faults:
        if time.monotonic() - began > given.seconds or (given.in_turn and mode != turn % len(MODES)):
            continue
        out = fresh(case, folder)
        library.fault_arm(os.fsencode(out), n, mode)
        code, printed = run(case, out, inputs)
        reached = library.fault_disarm() >= n
        fault = f"{MODES[mode]} {n} {library.fault_failed().decode()}"
        ended = f"exit code {code}" if code in (1, 2) else "succeeded" if code == 0 else "traceback"
        counts[ended if reached else "not reached"] += 1
        if problems := check(case, out, inputs, whole, code, printed):
            wrong += 1
            print(json.dumps({"fault": fault, "problems": problems}), file=sys.stderr, flush=True)
    return {"calls": whole.calls, **counts, "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[], choices=[[], *CASES])
    parser.add_argument("--stride", type=int, default=1, help="every so many-th fault")
    parser.add_argument("--in-turn", action="store_true", help="each call fails in one of the three ways")
    parser.add_argument("--seconds", type=float, default=1e9, help="of one case, at most")
    given = parser.parse_args()
    library = preload(__file__, sys.argv[1:])
    lost = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, inputs = Path(name), Path(name) / "inputs"
        if given.cases != ["files"]:
            make_inputs(inputs)
        for case in given.cases or CASES:
            outcome = try_case(CASES[case], library, folder, inputs, given)
            print(json.dumps({"case": case, **outcome}), flush=True)
            lost += outcome["wrong"]
    return 1 if lost else 0


def make_inputs(inputs):
    from tiny import WORDS, write_model, write_questions, write_text

    write_model(inputs / "model")
    write_text(inputs / "data.jsonl", rows=40, words=16)

    pairs = [f"{0.2 + 0.01 * row},{int(row % 3 == 0)}" for row in range(60)]
    (inputs / "pairs.csv").write_text("\n".join(["confidence,correct", *pairs]) + "\n")
    options = [{"query": f"Question: {WORDS[n]}", "choices": WORDS[n : n + 3], "gold": n % 3} for n in range(6)]
    write_questions(inputs, "llm_foundry_eval/arc_easy", options)
    written = [{"context": f"Question: {w}\nAnswer:", "answer": w, "aliases": [w]} for w in WORDS[:20]]
    write_questions(inputs, "triviaqa/triviaqa_sm_sub", written)
    for case in ("train ats", "compare"):  # what report, export and apply read
        assert run(CASES[case], inputs, inputs)[0] == 0
    assert run(Command("convert " + MODEL + " --out {out}/orbax"), inputs, inputs)[0] == 0


if __name__ == "__main__":
    sys.exit(main())
