"""Campaign: coverage-guided fuzzing (atheris) of what reads other people's files. Needs `pip install atheris`.

    PYTHONPATH=$PWD python tests/campaigns/fuzz_coverage.py --seconds 300 [TARGET ...]

The targets, their files and what counts as lost are those of `fuzz_files.py`; inputs that reach new code of calibjax
are kept and mutated again. The first byte of an input chooses the file, the others are its content. Starts from the
files of `corpus.py` and from `found`, where `--keep` adds small inputs that add coverage, each as `TARGET/HASH/FILE`,
and `tests/test_fuzz_corpus.py` replays them. Prints one JSON line for each target, with every input (base64) that was
lost.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaigns import fuzz_files
from campaigns.mutate import mutator

FOUND = Path(__file__).with_name("found")
FAST = ("config", "rows", "table", "report", "head")
LARGEST = 20_000
"""Bytes of an input, so that a run tries many."""


KEPT, SMALL = 16, 1_000
"""Number of new inputs that one run keeps of a target, and their largest size in bytes."""


def files_of(target: str, corpus: Path) -> list[Path]:
    found = (file for pattern in fuzz_files.TARGETS[target].files for file in sorted(corpus.glob(pattern)))
    return [file for file in found if file.is_file() and file.stat().st_size <= LARGEST][:256]


def fuzz(target: str, directory: Path, arguments: list[str]) -> None:
    """Fuzzes one target in this process, which libFuzzer ends."""
    import atheris

    corpus, log = directory / "corpus", directory / f"{target}.jsonl"
    with atheris.instrument_imports(include=["calibjax"]):
        for name in ("commands.report", "data.load", "data.table", "models", "train.checkpoint"):
            importlib.import_module(f"calibjax.{name}")
    from calibjax.runtime.errors import UserError

    files = files_of(target, corpus)
    seen: set[str] = set()
    place = directory / f"case-{os.getpid()}"

    def stop(*_: Any) -> None:
        raise fuzz_files.TooLong

    signal.signal(signal.SIGPROF, stop)

    def change(data: bytes, limit: int, seed: int) -> bytes:
        draw = random.Random(seed)
        index, content = data[:1] or b"\0", data[1:]
        if draw.random() < 0.5:
            file = files[index[0] % len(files)]
            with contextlib.suppress(Exception):
                return (index + mutator(fuzz_files._kind(file))(content or b"{}", draw))[:limit]
        return index + atheris.Mutate(content, max(limit - 1, 1))

    def try_one(data: bytes) -> None:
        if not data:
            return
        file = files[data[0] % len(files)]
        top = corpus / file.relative_to(corpus).parts[0]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(top, place)
        name = str(file.relative_to(top))
        (place / name).write_bytes(data[1:])
        signal.setitimer(signal.ITIMER_PROF, fuzz_files.SECONDS)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                fuzz_files.TARGETS[target].read(place, name)
        except UserError:
            pass
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "calibjax/" in frame.filename] or frames
            reason = f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
            if reason not in seen:
                seen.add(reason)
                row = {"file": name, "reason": reason, "message": str(error)[:300]}
                with log.open("a") as lines:
                    lines.write(json.dumps({**row, "input": base64.b64encode(data).decode()}) + "\n")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    atheris.Setup([sys.argv[0], *arguments], try_one, custom_mutator=change)
    atheris.Fuzz()


def seeds(target: str, directory: Path) -> tuple[Path, list[str]]:
    """A directory with one input for each file of the target, and those found before; and the names of the files."""
    into, corpus = directory / f"seeds-{target}", directory / "corpus"
    into.mkdir()
    files = files_of(target, corpus)
    names = ["/".join(file.relative_to(corpus).parts[1:]) for file in files]
    for index, file in enumerate(files):
        (into / str(index)).write_bytes(bytes([index]) + file.read_bytes())
    for file in filter(Path.is_file, (FOUND / target).rglob("*")):
        digest, *parts = file.relative_to(FOUND / target).parts
        (into / digest).write_bytes(bytes([names.index("/".join(parts))]) + file.read_bytes())
    return into, names


def keep(target: str, inputs: list[bytes], names: list[str]) -> None:
    """Adds some inputs, of all sizes, to `found`."""
    inputs = sorted((data for data in inputs if 1 < len(data) <= SMALL), key=len)
    for data in inputs[:: 1 + len(inputs) // KEPT]:
        file = FOUND / target / hashlib.sha256(data).hexdigest()[:8] / names[data[0] % len(names)]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data[1:])


def campaign(target: str, directory: Path, seconds: int, keeps: bool) -> dict[str, Any]:
    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, __file__, "--directory", directory, target, "--", *arguments]
        command.append(f"-artifact_prefix={directory}/")  # libFuzzer's own files, by default in the working directory
        return subprocess.run(list(map(str, command)), stderr=subprocess.PIPE, text=True, check=False)

    (inputs, names), began = seeds(target, directory), time.monotonic()
    first = {file.read_bytes() for file in inputs.iterdir()}
    done = run(f"-max_total_time={seconds}", f"-max_len={LARGEST}", "-timeout=120", "-rss_limit_mb=0", inputs)
    tried = re.findall(r"Done (\d+) runs|stat::number_of_executed_units: *(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    log = directory / f"{target}.jsonl"
    lost = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not tried or not covered:
        lost.append({"reason": f"the process ended with {done.returncode}", "message": done.stderr[-2000:]})
    if keeps:
        keep(target, [data for file in inputs.iterdir() if (data := file.read_bytes()) not in first], names)
    return {
        "target": target,
        "tried": int("".join(tried[-1])) if tried else 0,
        "inputs": [len(first), len(list(inputs.iterdir()))],
        "edges covered": [int(covered[0]), int(covered[-1])] if covered else [],
        "lost": lost,
        "seconds": round(time.monotonic() - began),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=list(FAST), choices=[[], *fuzz_files.TARGETS])
    parser.add_argument("--seconds", type=int, default=300, help="of each target")
    parser.add_argument("--keep", action="store_true", help="add small inputs that add coverage to found/")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = sys.argv[1:]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options = parser.parse_args(own)
    if options.directory:
        fuzz(options.targets[0], options.directory, arguments[len(own) + 1 :])
    failed = False
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        directory = Path(name).resolve()
        from campaigns.corpus import make_corpus

        make_corpus(directory / "corpus")
        for target in options.targets:
            found = campaign(target, directory, options.seconds, options.keep)
            failed |= bool(found["lost"])
            print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
