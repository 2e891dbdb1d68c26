"""Campaign: mutated files, each given to what reads it. Expected is a `UserError` or a result that can be right.

    PYTHONPATH=$PWD python tests/campaigns/fuzz_files.py --seed 0 --seconds 600

Reported as lost: another exception, a process that died, more than 10 s of CPU time, memory beyond 2 GiB, or a file
that was written outside the directory of the case. A case is drawn from (seed, number): `--case NUMBER` repeats one.
"""

import argparse
import collections
import contextlib
import faulthandler
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from campaigns.mutate import mutator

SECONDS, MEMORY = 10, 2 * 2**30
BATCH = 2000
"""Cases that one worker tries before it is replaced."""


class Target(NamedTuple):
    """A kind of file: how often it is drawn, its names below the corpus, and what reads it.

    `read` gets the directory and the name of the mutated file, and asserts what holds of every result.
    """

    weight: int
    files: tuple[str, ...]
    read: Callable[[Path, str], Any]


# --- what reads them ---


def read_config(directory: Path, name: str) -> None:
    from calibjax.models import config_from_hf
    from calibjax.models.decoder import abstract_params

    folder = directory / "one"
    folder.mkdir()
    (directory / name).rename(folder / "config.json")
    config = config_from_hf(folder)
    assert hash(config) is not None
    abstract_params(config)


def read_model(directory: Path, name: str) -> None:
    from calibjax.models import load_model

    lm = load_model(directory)
    assert_finite(lm.params)
    if lm.has_tokenizer:
        ids = lm.tokenizer("w1 w2 w3")["input_ids"]
        assert max(ids, default=0) < lm.config.vocab_size


def read_gguf(directory: Path, name: str) -> None:
    from calibjax.models import load_model
    from calibjax.models.orbax_checkpoint import save_checkpoint

    lm = load_model(directory / name)
    assert_finite(lm.params)
    save_checkpoint(directory / "converted", lm, dtype="float32")


def read_adapter(directory: Path, name: str) -> None:
    from calibjax.models import load_model

    assert_finite(load_model(directory / "base", adapter=directory).params)


def read_head(directory: Path, name: str) -> None:
    from calibjax.train.saved import load_head

    assert_finite(load_head(directory).params)


def read_probe(directory: Path, name: str) -> None:
    from campaigns.corpus import PROBE, probe_params

    from calibjax.train.probes import load_probe

    for got, expected in zip(_leaves(load_probe(directory, PROBE)), _leaves(probe_params()), strict=True):
        np.testing.assert_array_equal(got, expected)


def read_answers(directory: Path, name: str) -> None:
    """What `eval tasks` keeps: the samples of two questions, of which model they are, or the answers to a part."""
    import tiny

    from calibjax.eval.tasks.answer_files import claim_answers, read_samples
    from calibjax.eval.tasks.answer_files import read_answers as read

    if not (directory / name).is_file():
        return  # it is asked again
    if name == "part-4.json":
        means = [mean for row in read_samples(directory / name, 2, 2) for _, mean, *_ in row]
        assert len(means) == 4
        assert np.isfinite(means).all()
        assert max(means) <= 0
    elif name == "model.json":
        claim_answers(directory, tiny.make_lm(), {})
    else:
        answers = read(directory / name)
        assert answers.confidence.shape == answers.correct.shape == (len(answers.confidence), len(answers.question))
        assert answers.confidence.min(initial=1) >= 0


def read_checkpoint(directory: Path, name: str) -> None:
    from campaigns.corpus import checkpoint_run, new_state

    from calibjax.train.checkpoint import Checkpoints

    checkpoints = Checkpoints(directory, checkpoint_run())
    try:
        restored = checkpoints.restore(new_state())
    finally:
        checkpoints.close()
    if restored is not None:
        for got, expected in zip(_leaves(restored[0]), _leaves(new_state(1)), strict=True):
            np.testing.assert_array_equal(got, expected)


def read_rows(directory: Path, name: str) -> None:
    from campaigns.corpus import character_tokenizer

    from calibjax.data import read_source
    from calibjax.data.load import load_sequences

    options = {"seq_len": 16, "layout": "pack", "max_sequences": 50}
    sequences, _ = load_sequences(read_source(directory / name), character_tokenizer(), **options)
    assert sequences.tokens.min() >= 0
    assert sequences.where.any()


def read_table(directory: Path, name: str) -> None:
    from calibjax.data.table import read_table

    table = read_table(directory / name)
    predictions = table.predictions
    for field in predictions:
        assert field is None or not np.isnan(field).any()
    if predictions.logits is None:
        assert predictions.confidence.min() >= 0
        assert predictions.confidence.max() <= 1
    else:
        assert predictions.labels.max() < predictions.logits.shape[1]


def read_report(directory: Path, name: str) -> None:
    from calibjax.commands.report import ReportOptions, run
    from calibjax.eval.report import page

    (directory / name).rename(directory / ("tokens.json" if "tokens.json" in name else "metrics.json"))
    if "tokens.json" in name:
        shutil.copy(directory / "tokens-metrics.json", directory / "metrics.json")
    out = directory / "out"
    if hash((directory, name)) % 30:  # most of the time goes into drawing
        page.png, page.svg = (lambda *_: b""), (lambda *_: "")
    run(ReportOptions(runs=(directory,), out=out), log=lambda line: None)
    assert (out / "report.html").read_text()[:9].lower() == "<!doctype"


def _leaves(tree: Any) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_finite(tree: Any) -> None:
    assert all(bool(np.isfinite(leaf).all()) for leaf in _leaves(tree))


TARGETS = {
    "config": Target(25, ("configs/*.json",), read_config),
    "weights": Target(8, ("model/model.safetensors", "sharded/*.json", "sharded/*.safetensors"), read_model),
    "tokenizer": Target(5, ("model/tokenizer.json", "model/tokenizer_config.json"), read_model),
    "converted": Target(5, ("converted/*", "converted/params/*", "converted/params/*/*"), read_model),
    "gguf": Target(8, ("gguf/*",), read_gguf),
    "adapter": Target(6, ("adapter/*.json", "adapter/*.safetensors"), read_adapter),
    "head": Target(8, ("head/*", "head/params/*", "head/params/*/*"), read_head),
    "probe": Target(6, ("probe/*",), read_probe),
    "answers": Target(6, ("answers/*",), read_answers),
    "checkpoint": Target(4, ("checkpoints/1/*", "checkpoints/1/*/*", "checkpoints/1/*/*/*"), read_checkpoint),
    "rows": Target(15, ("rows/*",), read_rows),
    "table": Target(20, ("tables/*",), read_table),
    "report": Target(20, ("reports/*.json",), read_report),
}


# --- one case ---


class Case(NamedTuple):
    target: str
    file: Path
    directory: Path


def draw_case(seed: int, number: int, corpus: Path, chosen: list[str]) -> tuple[Case, random.Random]:
    draw = random.Random(f"{seed} {number}")
    target = draw.choices(chosen, [TARGETS[name].weight for name in chosen])[0]
    pattern = draw.choice(TARGETS[target].files)
    top = corpus / pattern.split("/")[0]
    files = sorted(file for file in corpus.glob(pattern) if file.is_file())
    return Case(target, draw.choice(files), top), draw


def try_case(case: Case, draw: random.Random, into: Path) -> str:
    """Returns "read" or "refused"; raises anything else."""
    from calibjax.runtime.errors import UserError

    shutil.copytree(case.directory, into)
    file = into / case.file.relative_to(case.directory)
    content = file.read_bytes()
    other = random.Random(draw.random())
    if draw.random() < 0.03:
        file.unlink()
        file.symlink_to(draw.choice(("/etc/passwd", "/proc/self/mem", "/dev/zero", str(file), "..")))
    else:
        file.write_bytes(mutator(str(_kind(file)))(content, other) if content else other.randbytes(10))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            TARGETS[case.target].read(into, str(file.relative_to(into)))
    except UserError as error:
        if len(str(error)) > 5000:
            raise RuntimeError(f"a message of {len(str(error))} characters") from error
        return "refused"
    return "read"


def _kind(file: Path) -> str:
    """The file's name; of Orbax's metadata, which is JSON without a suffix, one with it."""
    with contextlib.suppress(ValueError):
        if not file.suffix and file.read_bytes()[:1] == b"{":
            return f"{file.name}.json"
    return file.name


# --- workers ---


class TooLong(BaseException):
    """More CPU time than a case may take."""


def work(numbers: range, options: argparse.Namespace) -> None:
    """Tries cases in this process; which one it did not survive, the parent reads from the file `at`."""
    corpus, log, at = (options.directory / name for name in ("corpus", "log.tsv", "at"))
    if options.case is None:  # Orbax's threads write about what they lose
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    place = Path(tempfile.mkdtemp(prefix="cases-", dir=options.directory))
    os.environ["TMPDIR"] = str(options.directory / "cache")
    tempfile.tempdir = None
    outside: list[str] = []
    sys.addaudithook(lambda event, arguments: _watch(event, arguments, str(options.directory), outside))
    for target in ("config", "rows", "head"):  # what they import and start is no part of a case's memory
        with contextlib.suppress(Exception):
            number = next(n for n in range(10**6) if draw_case(0, n, corpus, list(TARGETS))[0].target == target)
            try_case(*draw_case(0, number, corpus, list(TARGETS)), place / "first")
        shutil.rmtree(place / "first", ignore_errors=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))

    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    for number in numbers:
        at.write_text(str(number))
        case, draw = draw_case(options.seed, number, corpus, options.targets)
        outside.clear()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        faulthandler.dump_traceback_later(12 * SECONDS, exit=True)
        began = time.process_time()
        reason = ""
        try:
            result = try_case(case, draw, place / str(number))
        except BaseException as error:
            result, frames = "lost", traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "calibjax/" in frame.filename] or frames
            reason = f"{type(error).__name__}: {str(error)[:200]!r} at {ours[-1].filename}:{ours[-1].lineno}"
            if options.case is not None:
                traceback.print_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if outside:
            result, reason = "lost", f"wrote {outside[:3]}"
        shutil.rmtree(place / str(number), ignore_errors=True)
        taken = time.process_time() - began
        with log.open("a") as file:
            file.write(f"{number}\t{case.target}\t{case.file.name}\t{result}\t{taken:.3f}\t{reason}\n")
    at.write_text("-1")


def _watch(event: str, arguments: tuple[Any, ...], allowed: str, outside: list[str]) -> None:
    """Audit hook: collects the paths outside of `allowed` that are written, moved, linked or removed."""
    paths, at = [], -1
    if event == "open":
        path, mode, flags = arguments
        if set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR):
            paths = [path]
    elif event in ("os.rename", "os.link"):
        paths, at = list(arguments[:2]), arguments[2]
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
        paths, at = [arguments[0]], arguments[-1] if event != "os.truncate" else -1
    elif event == "os.symlink":
        paths, at = [arguments[1]], arguments[2]
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            directory, name = os.path.split(os.fsdecode(path))
            base = os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) and at >= 0 else os.getcwd()
            real = os.path.join(os.path.realpath(os.path.join(base, directory)), name)
            if event == "open":
                real = os.path.realpath(real)
            if not real.startswith((allowed, "/dev/null", "/proc/self")):
                outside.append(f"{event} {real}")


def started(options: argparse.Namespace, *arguments: Any) -> int:
    """Runs this script in a new process, for a task of `main`; returns its exit code."""
    own = ["--directory", options.directory, "--seed", options.seed, "--targets", *options.targets]
    own += [] if options.case is None else ["--case", options.case]
    return subprocess.run([sys.executable, __file__, *map(str, (*own, *arguments))], check=False).returncode


def campaign(options: argparse.Namespace) -> Iterator[str]:
    """Yields lines of progress, then the summary."""
    corpus, log, at = (options.directory / name for name in ("corpus", "log.tsv", "at"))
    (options.directory / "cache").mkdir()
    cache = ("HF_HOME", "HF_DATASETS_CACHE", "MPLCONFIGDIR", "XDG_CACHE_HOME")
    os.environ |= dict.fromkeys(cache, str(options.directory / "cache"))
    if started(options, "--corpus"):
        raise SystemExit("the corpus could not be made")
    log.touch()
    began, number = time.monotonic(), options.case or 0
    last = number + 1 if options.case is not None else 10**9
    while number < last and (options.case is not None or time.monotonic() - began < options.seconds):
        numbers = range(number, min(number + BATCH, last))
        status = started(options, "--work", numbers.start, numbers.stop)
        dead = int(at.read_text())
        if status and dead >= 0:
            case, _ = draw_case(options.seed, dead, corpus, options.targets)
            with log.open("a") as file:
                file.write(f"{dead}\t{case.target}\t{case.file.name}\tlost\t0\tthe process ended with {status}\n")
            number = dead + 1
        else:
            number = numbers.stop
        yield f"{number} cases, {time.monotonic() - began:.0f} s"
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for _, target, _, result, *_ in rows:
        counts[target][result] += 1
    for target, of_target in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
        slowest = max(float(row[4]) for row in rows if target in (row[1], "all"))
        yield f"{target}: {of_target.total()} tried, {dict(of_target)}, the slowest {slowest:.1f} s"
    reasons = collections.defaultdict(list)
    for row in rows:
        if row[3] == "lost":
            reasons[f"{row[1]} {row[2]} {row[5]}"].append(row[0])
    for reason, numbers in sorted(reasons.items(), key=lambda item: -len(item[1])):
        yield f"lost {len(numbers)}: {reason} (case {numbers[0]})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", type=int, help="try this case alone, and print its traceback")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.corpus:
        from campaigns.corpus import make_corpus

        make_corpus(options.directory / "corpus")
        return 0
    if options.work:
        work(range(*options.work), options)
        return 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        options.directory = Path(directory).resolve()
        lost = False
        for line in campaign(options):
            print(line, flush=True)
            lost |= line.startswith("lost")
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
