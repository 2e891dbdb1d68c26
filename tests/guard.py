"""Digests of what every command gives on the small assets, for a change that should change no figure.

    python tests/guard.py --write before.json
    python tests/guard.py --compare before.json

Runs each command once on a CPU, on one machine with the same packages and cores, and digests its exit code, prints and
the files that it writes, without times, versions, paths and pictures. `--only WORD` selects runs by name; some read the
files of others. Exits with 1 where something differs.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}

import numpy as np
from assets import ASSETS

MODEL = "--model {assets}/models/stories260K"
TEXT = f"{MODEL} --data {{assets}}/data/tinystories_sample --seq-len 64 --quiet"
RUNS = {
    "quickstart": "quickstart --out quick --epochs 1 --quiet",
    "train ats": f"train ats {TEXT} --out ats --max-rows 40 --max-tokens 3000 --folds 2",
    "train ats mlp": f"train ats {TEXT} --out mlp --max-rows 24 --head-kind mlp --loss joint --epochs 2",
    "train sft": f"train sft {TEXT} --out sft --max-rows 40 --epochs 1 --lora-rank 2",
    "train lhts": f"train lhts {TEXT} --out lhts --max-rows 24 --epochs 1 --temperatures 0.9 --texts 4 --myopic 1",
    "eval tasks": f"eval tasks {MODEL} --assets {{assets}} --tasks arc_easy --limit 12 --head ats --out tasks --quiet",
    "eval layers": f"eval layers {TEXT} --out layers --max-rows 12 --strengths 0.5 --direction confident",
    "eval bounds": f"eval bounds {MODEL} --out bounds.json",
    "compare": "compare --table table.csv --out compare --save method --quiet",
    "compare model": f"compare {TEXT} --out compared --max-rows 24 --max-tokens 600 --methods ats,platt,vector,beta",
    "apply": "apply --table table.csv --method method --out applied.csv",
    "decide": "decide --table table.csv --risk 0.3 --by-category --out decide.json",
    "generate": f"generate {MODEL} --head mlp --prompt Once upon --temperature 1.2 --top-k 20 --seed 3 --json",
    "convert": f"convert {MODEL} --out orbax",
    "convert back": "convert --model orbax --out safetensors --to safetensors",
    "export": "export mlp --out export",
    "push": "push mlp org/name --dry-run card",
    "report": "report ats mlp --out report",
    "plan": "plan --model llama-3.1-8b --topology v5e-16 --tokens 1000000 --no-compile --json",
}
VOLATILE = re.compile(r"seconds|time|version|path|(?<!candi)date|python|platform|packages|started|host")
PRINTED = re.compile(r"\d+:\d\d(:\d\d)?|[\d.,]+ (s|ms|min|seconds|minutes)\b|[\d.,]+k? tokens/s|\d+ MiB")
PICTURES = re.compile(rb'<img src="data:[^"]*"|\d{4}-\d\d-\d\d|<td[^>]*"fit \(s\)".*?</td>', re.DOTALL)
TEXTS = (".json", ".csv", ".html", ".md", ".safetensors")
LEFT_OUT = ("run.json", "ocdbt.process_0.json", "tokenizer.json")


def make_table(file: Path) -> None:
    rng = np.random.default_rng(0)
    confidence, kind = rng.beta(4, 2, 900).round(4), rng.integers(0, 2, 900)
    correct = rng.random(900) < np.where(kind == 1, confidence**3, confidence**0.3)
    rows = (f"{c},{int(y)},kind {k}" for c, y, k in zip(confidence, correct, kind, strict=True))
    file.write_text("\n".join(["confidence,correct,category", *rows]))


def stable(value):
    """A JSON value without what is volatile."""
    if isinstance(value, dict):
        return {name: stable(inner) for name, inner in value.items() if not VOLATILE.search(name)}
    return [stable(inner) for inner in value] if isinstance(value, list) else value


def parts_of(file: Path, own: str) -> dict[str, bytes]:
    """Name -> content to digest: of a JSON document its entries, of checksums those of arrays, else the file."""
    content = file.read_bytes().replace(own.encode(), b"").replace(str(ASSETS).encode(), b"")
    if file.suffix != ".json":
        return {str(file): PICTURES.sub(b"", content)}
    document = json.loads(content)
    if file.name == "checksums.json":
        document = {"arrays": document.get("arrays")}
    return {f"{file} {name}": json.dumps(x).encode() for name, x in stable(document).items()}


def run(line: str, own: str, known: set[Path]) -> dict[str, bytes]:
    """What one command leaves: name -> content to digest."""
    from calibjax.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(line.format(assets=ASSETS).split())
    contents = {"exit code": b"%d" % code, "printed": PRINTED.sub("", out.getvalue().replace(own, "")).encode()}
    files = {file for file in Path(".").rglob("*") if file.suffix in TEXTS and file.name not in LEFT_OUT} - known
    known |= files
    for file in sorted(files):
        contents |= parts_of(file, own)
    return contents


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    write, compare = (path and path.resolve() for path in (given.write, given.compare))
    digests, known = {}, {Path("table.csv")}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_table(Path("table.csv"))
        for name, line in RUNS.items():
            if given.only in name:
                contents = run(line, folder, known)
                digests |= {f"{name}: {part}": hashlib.sha256(x).hexdigest()[:16] for part, x in contents.items()}
                print(f"{name}: {len(contents)} digests", flush=True)
    if write:
        write.write_text(json.dumps(digests, indent=1) + "\n")
    before = json.loads(compare.read_text()) if compare else digests
    chosen = [name for name in sorted(before.keys() | digests.keys()) if given.only in name.partition(":")[0]]
    differing = [name for name in chosen if before.get(name) != digests.get(name)]
    print(*(f"differs: {name}" for name in differing), f"{len(digests) - len(differing)} of {len(digests)}", sep="\n")
    sys.exit(1 if differing else 0)
