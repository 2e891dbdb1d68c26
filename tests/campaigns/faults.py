"""The n-th fault, n = 1, 2, ... until a command succeeds: `python tests/campaigns/faults.py [CASE ...]`.

`faults.c` is loaded before libc and fails the n-th call that opens, writes, syncs, renames, makes or maps a file below
the directory of the command, in Python, TensorStore and safetensors alike: that one call; it and all later ones, as on
a full disk; or from then on all that make something, as in a read-only directory. After each, the command succeeded
and its results are those of a run without faults; or it ended with exit code 1 or 2 and one line, every earlier result
is as it was or replaced as a whole, and the same command, started again, succeeds with the same results. Prints one
JSON line for each case.
"""

import argparse
import contextlib
import ctypes
import io
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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
MODES = ("once", "full", "read-only")
TRAIN = ("--seq-len", "13", "--full-sequences", "--batch-size", "6", "--epochs", "1", "--checkpoint-every", "3")
TRAIN += ("--learning-rate", "0.01", "--quiet")


def preload(arguments):
    """Starts this script again with faults.c loaded, unless it is; returns its functions."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "fault_arm"):
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            shim = Path(folder) / "faults.so"
            subprocess.run(
                ["cc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(HERE / "faults.c"), "-ldl"], check=True
            )
            environment = {**os.environ, "LD_PRELOAD": str(shim)}
            sys.exit(subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False).returncode)
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
        from calibjax.commands.common import claim_directory
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
    """A command of calibjax.

    Attributes:
        arguments: `{inputs}` and `{out}` stand for directories.
        results: what is compared with a run without faults, as patterns.
        earlier: whether the results are there before, from an earlier run.
    """

    def __init__(self, *arguments, results, earlier=False):
        self.arguments, self.results, self.earlier = arguments, results, earlier

    def prepare(self, out):
        pass

    def act(self, out, inputs):
        from calibjax.cli import main

        try:
            return main([argument.format(out=out, inputs=inputs) for argument in self.arguments])
        except SystemExit as ended:
            return ended.code


MODEL = ("--model", "{inputs}/model")
DATA = (*MODEL, "--data", "{inputs}/data.jsonl", "--out", "{out}/run")
HEAD = ("metrics.json", "tokens.json", "head.json", "checksums.json")
CASES = {
    "files": Files(),
    "eval bounds": Command("eval", "bounds", *MODEL, "--out", "{out}/bounds.json", results=("bounds.json",)),
    "convert": Command("convert", *MODEL, "--out", "{out}/model", results=("*.json",)),
    "convert back": Command(
        *("convert", "--model", "{inputs}/orbax", "--out", "{out}/model", "--to", "safetensors"),
        results=("*.json", "*.safetensors"),
    ),
    "report": Command("report", "{inputs}/run", "--out", "{out}/page", results=("report.html",)),
    "train ats": Command(
        *("train", "ats", *DATA, *TRAIN, "--loss", "joint", "--head-kind", "linear", "--cache-hidden", "disk"),
        results=HEAD,
    ),
    "train sft": Command("train", "sft", *DATA, *TRAIN, results=("metrics.json", "*.safetensors")),
    "train lhts": Command(
        *("train", "lhts", *DATA, *TRAIN, "--temperatures", "0.9", "--samples", "0.5", "--no-partition"),
        *("--texts", "4", "--text-prompt-tokens", "2", "--myopic", "1"),
        results=("metrics.json", "*.safetensors"),
    ),
    "eval layers": Command(
        *("eval", "layers", *DATA, "--seq-len", "13", "--full-sequences", "--batch-size", "8", "--quiet"),
        *("--strengths", "0.5", "--direction", "confident"),
        results=("metrics.json",),
    ),
    "study pooling": Command(
        *("study", "pooling", *DATA, "--seq-len", "13", "--full-sequences", "--batch-size", "6", "--epochs", "1"),
        *("--seeds", "1", "--quiet"),
        results=("metrics.json", "head.json"),
    ),
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
    found = {str(file.relative_to(out)): file.read_bytes() for file in files if file.is_file()}
    return {name: data for name, data in found.items() if "checkpoints" not in name and not name.endswith(".lock")}


def try_case(case, library, folder, inputs, *, stride, seconds):
    """Every fault, or each `stride`-th one; returns counts and what went wrong."""
    counts, wrong, began = Counter(), [], time.monotonic()

    def fresh(name):
        out = folder / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        case.prepare(out)
        return out

    whole = fresh("whole")
    before = contents(whole, case.results)
    library.fault_arm(os.fsencode(whole), 0, 0)
    code, printed = run(case, whole, inputs)
    calls = library.fault_disarm()
    assert code == 0, (code, printed)
    expected = contents(whole, case.results)
    assert expected, list(whole.rglob("*"))
    again = fresh("out")
    assert run(case, again, inputs)[0] == 0
    same = {name for name, data in expected.items() if contents(again, case.results)[name] == data}
    for n in range(1, calls + stride, stride):
        if time.monotonic() - began > seconds:
            break
        for mode in range(len(MODES)):
            out = fresh("out")
            library.fault_arm(os.fsencode(out), n, mode)
            code, printed = run(case, out, inputs)
            reached = library.fault_disarm() >= n
            failed = library.fault_failed().decode()
            found, problems = contents(out, case.results), []
            if code == 0:
                counts["succeeded" if reached else "not reached"] += 1
                problems += [f"{name} differs" for name in same if found.get(name) != expected[name]]
            elif code in (1, 2):
                counts[f"exit code {code}"] += 1
                if printed.count("\n") != 1:
                    problems.append(f"{printed.count(chr(10))} lines: {printed[-1500:]}")
                aside = {file.read_bytes() for file in out.glob("*.old/*")}  # the next start puts it back
                for name, data in before.items():
                    if found.get(name) not in (data, expected[name]) and not (name not in found and data in aside):
                        problems.append(f"{name}: neither the earlier result nor the new one")
                code, printed = run(case, out, inputs)
                found = contents(out, case.results)
                if code != 0:
                    problems.append(f"started again: {code} {printed[-1500:]}")
                problems += [f"{name} differs" for name in same if found.get(name) != expected[name]]
            else:
                problems.append(f"a traceback: {code[-3000:]}")
            if problems:
                wrong.append({"n": n, "mode": MODES[mode], "call": failed, "problems": problems})
                print(json.dumps(wrong[-1]), file=sys.stderr, flush=True)
    return {"calls": calls, **counts, "wrong": len(wrong), "seconds": round(time.monotonic() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[[], *CASES])
    parser.add_argument("--stride", type=int, default=1, help="every so many-th fault")
    parser.add_argument("--seconds", type=float, default=1e9, help="of one case, at most")
    given = parser.parse_args()
    library = preload(sys.argv[1:])
    lost = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, inputs = Path(name), Path(name) / "inputs"
        if given.cases != ["files"]:
            make_inputs(inputs, with_run="report" in given.cases)
        for case in given.cases:
            found = try_case(CASES[case], library, folder, inputs, stride=given.stride, seconds=given.seconds)
            print(json.dumps({"case": case, **found}), flush=True)
            lost += found["wrong"]
    return 1 if lost else 0


def make_inputs(inputs, with_run):
    from tiny import write_model, write_text

    from calibjax.cli import main

    write_model(inputs / "model")
    write_text(inputs / "data.jsonl", rows=40, words=16)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["convert", "--model", str(inputs / "model"), "--out", str(inputs / "orbax")]) == 0
        if with_run:
            assert CASES["train ats"].act(inputs, inputs) == 0


if __name__ == "__main__":
    sys.exit(main())
