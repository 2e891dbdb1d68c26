"""Kills commands at random moments and checks that every run ends bit-identical: `python tests/campaigns/kills.py`.

A server process imports calibjax once; each start of a command is a fork of it, a process of its own that is killed
with SIGKILL. A run is killed several times, each time at another moment: when the files in its directory have changed
a random number of times, and of these half at the sight of a checkpoint, a head, a model or a report that is being
written. It is then started once more, and what it writes is compared, byte for byte, with what a run wrote that nobody
killed. Prints one JSON line for each run, and the totals.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[2] / ".pytest_cache" / "compiled"))
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"  # also below the settings of pytest

from ports import free_port
from tiny import WORDS, write_model, write_questions, write_text

TRAIN = "--model {folder}/model --data {folder}/data.jsonl --out {out} --seq-len 13 --full-sequences --batch-size 6"
TRAIN += " --epochs 3 --checkpoint-every 2 --learning-rate 0.01 --quiet"
TASKS = (
    "--model {folder}/model --assets {folder} --out {out} --tasks arc_easy triviaqa --further-confidences consistency"
)
LHTS = "--temperatures 0.5 0.9 --sampled-fraction 0.5 --no-partition --texts 4 --text-prompt-tokens 2 --myopic 1"
OPTIONS = {
    "train ats": f"{TRAIN} --loss joint --no-refit-temperature --head-kind mlp",
    "train sft": TRAIN,
    "eval tasks": f"{TASKS} --samples 3 --max-new-tokens 4 --temperature 2 --batch-size 8 --quiet",
    "decide": "--table {folder}/table.csv --risk 0.2 --out {out}/decisions.json",
    "train lhts": f"{TRAIN} {LHTS}",
}
WRITING = re.compile(r"orbax-checkpoint-tmp|\.[0-9a-f]{16}\.(new|old)$|calibjax\.lock$")
RESULTS = ("metrics.json", "tokens.json", "*.safetensors", "train.jsonl", "head.json", "checksums.json")
RESULTS += ("decisions.json", "*.csv")
LIMIT = 300  # seconds of one start


def start(folder, out, command, number, processes, port):
    """Forks one process of a job; returns its id."""
    child = os.fork()
    if child:
        return child
    arguments = [word.format(folder=folder, out=out) for word in f"{command} {OPTIONS[command]}".split()]
    if processes > 1:
        arguments += ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes), "--process-id", str(number)]
        arguments += ["--heartbeat-timeout", "10"]
    code = 70
    try:
        with (folder / f"log{number}").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        from calibjax.cli import main

        code = main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(code)


def import_all():
    """What a start would import, once for all forks. JAX starts its threads only when it is used."""
    for name in ("train_ats", "train_sft", "train_lhts", "eval_tasks", "decide", "parser"):
        importlib.import_module(f"calibjax.commands.{name}")
    others = "lm_eval.tasks transformers.models.auto tokenizers matplotlib.pyplot tensorboardX.event_file_writer"
    for name in others.split():
        importlib.import_module(name)


class Job:
    """The processes of one start of a command."""

    def __init__(self, folder, out, command, processes):
        port = free_port()
        self.began, self.folder = time.monotonic(), folder
        self.running = {start(folder, out, command, n, processes, port): n for n in range(processes)}
        self.codes = {}

    def ended(self):
        for child, number in list(self.running.items()):
            ended_child, status = os.waitpid(child, os.WNOHANG)
            if ended_child:
                self.codes[number] = os.waitstatus_to_exitcode(status)
                del self.running[child]
        return not self.running

    def kill(self, number=None):
        """SIGKILL to one of the processes or to all of them."""
        for child, n in self.running.items():
            if number in (None, n):
                os.kill(child, signal.SIGKILL)

    def wait(self):
        while not self.ended():
            if time.monotonic() - self.began > LIMIT:
                self.kill()
            time.sleep(0.005)
        return [self.codes[n] for n in sorted(self.codes)]

    def output(self):
        return "".join(f.read_text()[-2000:] for f in sorted(self.folder.glob("log*")))


def files(out):
    """Path -> size of all files below a directory."""
    sizes = {}
    for folder, _, names in os.walk(out):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # renamed meanwhile
                sizes[path] = os.stat(path).st_size
    return sizes


def writing(paths, out):
    """The names of what is being written among `files(out)`."""
    parts = {part for path in paths for part in Path(path).relative_to(out).parts}
    return {part for part in parts if WRITING.search(part)}


def contents(out):
    """What a run is compared by, by path; of the log without the rate."""
    data_of_file = {}
    for pattern in RESULTS:
        for file in out.rglob(pattern):
            if "checkpoints" in file.parts:
                continue
            data = file.read_bytes()
            if file.suffix == ".jsonl":
                rows = [json.loads(line) for line in data.splitlines()]
                data = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]
            data_of_file[str(file.relative_to(out))] = data
    return data_of_file


def watched_run(folder, out, command, processes, stop_after=None, inside=False):
    """One start; returns the job, the number of changes seen, and what was being written when it was stopped, if so.

    Args:
        stop_after: number of changes of the files after which the job is given back running; None: at its end.
        inside: only while something new is being written.
    """
    out.mkdir(exist_ok=True)
    job, changes, last = Job(folder, out, command, processes), 0, files(out)
    before = writing(last, out)
    while not job.ended():
        now = files(out)
        changes, last = changes + (now != last), now
        if stop_after is not None and changes >= stop_after and (new := writing(now, out) - before or not inside):
            return job, changes, new if inside else set()
        time.sleep(0.005)
    return job, changes, None


def killed_run(folder, out, command, processes, whole, changes, rng, kills):
    """A run that is killed `kills` times and then finished; returns the moments, and what differs."""
    moments = []
    while True:
        inside = rng.random() < 0.5
        stop_after = rng.randint(1, max(1, changes // 2)) if len(moments) < kills else None
        job, _, new = watched_run(folder, out, command, processes, stop_after, inside)
        if new is None:
            break  # it has finished
        number = rng.choice([None, None, None, *range(processes)]) if processes > 1 else None
        job.kill(number)
        codes = job.wait()
        if codes == [0] * processes:
            break  # it had finished
        assert -signal.SIGKILL in codes, (codes, job.output())
        state = f"writing {re.sub(r'[0-9a-f]{16}|[0-9]+', 'N', min(new))}" if inside else "at random"
        moments.append(f"{state}{'' if number is None else f', process {number} of {processes}'}")
    codes = job.wait()
    different = [] if codes == [0] * processes else [f"exit codes {codes}: {job.output()}"]
    if not different:
        got = contents(out)
        different = sorted(name for name in got.keys() | whole.keys() if got.get(name) != whole.get(name))
    return moments, different, sorted(writing(files(out), out))


def write_inputs(folder):
    """A model, text, local files of two tasks, one of options and one of written answers, and a table of answers."""
    write_model(folder / "model")
    write_text(folder / "data.jsonl", rows=60, words=16)
    draw = random.Random(0)

    def words(low, high):
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    options = [
        {"query": f"Question: {words(1, 8)}", "choices": [words(1, 3) for _ in range(4)], "gold": draw.randrange(4)}
        for _ in range(30)
    ]
    written = [
        {"context": f"Question: {words(1, 6)}\nAnswer:", "answer": words(1, 1), "aliases": [words(1, 1)]}
        for _ in range(30)
    ]
    write_questions(folder, "llm_foundry_eval/arc_easy", options)
    write_questions(folder, "triviaqa/triviaqa_sm_sub", written)
    rows = [(draw.random(), draw.random()) for _ in range(3000)]
    lines = [f"{confidence},{int(other < confidence)}\n" for confidence, other in rows]
    (folder / "table.csv").write_text("confidence,correct\n" + "".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--per-run", type=int, default=4, help="kills of one run")
    parser.add_argument("--commands", nargs="*", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30, help="stop after this long")
    given = parser.parse_args()
    import_all()
    rng, began = random.Random(given.seed), time.monotonic()
    totals, lost = Counter(), []
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        write_inputs(folder)
        whole = {}
        kinds = [(command, n) for n in given.processes for command in given.commands if n == 1 or "train" in command]
        for number in range(10**6):
            command, processes = kinds[number % len(kinds)]
            if sum(totals.values()) >= given.kills or time.monotonic() - began > 60 * given.minutes:
                break
            if (command, processes) not in whole:
                out = folder / f"whole-{command.replace(' ', '-')}-{processes}"
                job, changes, _ = watched_run(folder, out, command, processes)
                assert job.wait() == [0] * processes, job.output()
                whole[command, processes] = contents(out), changes
            expected, changes = whole[command, processes]
            out = folder / f"run{number}"
            outcome = killed_run(folder, out, command, processes, expected, changes, rng, given.per_run)
            moments, different, left = outcome
            for moment in moments:
                totals[f"{command}, {processes} process{'es' * (processes > 1)}: {moment}"] += 1
            row = {"command": command, "processes": processes, "kills": moments, "different": different, "left": left}
            print(json.dumps(row), flush=True)
            if different:
                lost.append(row)
    print(json.dumps({"kills": sum(totals.values()), "lost": len(lost), "seconds": time.monotonic() - began}))
    for moment, count in sorted(totals.items()):
        print(f"{count:4} {moment}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
