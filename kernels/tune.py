"""Which block sizes are fastest in the TPU kernels: every candidate that fits on the chip, by the static profile.

    python kernels/tune.py --chip v6e --width 2304
    python kernels/tune.py --chip v5e --width 4096 --kernel rows --blocks 1024,1024,512 512,512,256 --json rows.json

Prints, best first, the static estimate of each candidate at the full size, its fraction of the matrix units' time, and
which one `PREFERENCES` of `calibjax/kernels/pallas_tpu/blocks.py` takes now. A candidate takes one to three minutes on
a plain CPU machine (two compilations with simulation); nothing runs on a TPU. Needs `pip install ".[plan]"`.
"""

import argparse
import itertools
import json

import jax
import jax.numpy as jnp
from static_profile import CHIPS, Points, Program, estimate

from calibjax.kernels import SCALES
from calibjax.kernels.contract import BackwardRequest, Cotangents, ForwardRequest, Inputs, Options
from calibjax.kernels.pallas_tpu import blocks, make
from calibjax.runtime.tpu_compiler import DoesNotCompile, compiler_version

CANDIDATES = [
    blocks.Blocks(tokens, columns, unit)
    for tokens, columns, unit in itertools.product((512, 1024, 2048), (512, 1024, 2048), (128, 256, 512))
    if columns % (2 * unit) == 0 and tokens % unit == 0
]
PRODUCTS = {"statistics": 1, "curves": 1, "rows": 2, "unembedding": 2, "fused": 3}
WANTED = {"unembedding": frozenset({"unembedding"}), "fused": frozenset({"hidden", "unembedding"})}


def build(kernel: str, chosen: blocks.Blocks, width: int, dtype: str, softcap, tokens: int, vocab_size: int) -> Program:
    """The kernel alone."""
    implementation = make(preferences={kernel: (chosen,)})
    options = Options(softcap, scales=SCALES if kernel == "curves" else None)

    def run(hidden, unembedding, scale, targets):
        inputs = Inputs(hidden, unembedding, None, scale, targets, valid=None)
        if kernel in WANTED:
            cotangents = Cotangents(scale, scale, None, None, uniform=scale, one_hots=((targets, scale),))
            return implementation.backward(BackwardRequest(options, WANTED[kernel]), inputs, cotangents, None, None)
        needed = {"rows": {"target", "rows"}, "curves": {"target", "first", "second", "total", "argmax"}}.get(
            kernel, {"target", "first", "total"}
        )
        return implementation.forward(ForwardRequest(options, frozenset(needed)), inputs).moments

    shapes = (
        ((tokens, width), dtype),
        ((vocab_size, width), dtype),
        ((tokens,), jnp.float32),
        ((tokens,), jnp.int32),
    )
    return Program(run, [jax.ShapeDtypeStruct(*shape) for shape in shapes])


def _points(options: argparse.Namespace, candidate: blocks.Blocks) -> Points:
    height = candidate.tokens * CHIPS[options.chip].cores
    tokens = (2 * height, 3 * height) if options.tokens > 3 * height else (options.tokens,)
    return tokens, (2 * candidate.columns, 4 * candidate.columns)


def main(options: argparse.Namespace) -> None:
    itemsize, kind = jnp.dtype(options.dtype).itemsize, CHIPS[options.chip].kind
    rows = []
    for kernel in options.kernel:
        count = len(SCALES) if kernel == "curves" else 1
        current = blocks.choose(
            blocks.PREFERENCES[kernel], kernel, (options.tokens, options.width, itemsize), kind, count=count
        )
        fits = [
            x
            for x in options.blocks or CANDIDATES
            if blocks.vmem_bytes(kernel, x, options.width, itemsize, count=count) <= blocks.capacity(kind)
        ]
        for i, candidate in enumerate(fits):
            print(f"{kernel} {i + 1}/{len(fits)}: {tuple(candidate)} on {options.chip} ...", flush=True)
            row = {"kernel": kernel, **candidate._asdict(), "current": candidate == current}
            try:
                found = estimate(
                    options.chip,
                    build,
                    kernel,
                    candidate,
                    options.width,
                    options.dtype,
                    options.softcap,
                    sizes=(options.tokens, options.vocab),
                    points=_points(options, candidate),
                    flops=2.0 * PRODUCTS[kernel] * options.tokens * options.width * options.vocab,
                )
                row |= {"milliseconds": 1e3 * found.seconds, "utilization": found.utilization}
            except DoesNotCompile as error:
                row["error"] = str(error)
            rows.append(row)
        print(f"\n{kernel}, D = {options.width}, {options.dtype}, {options.chip} ({CHIPS[options.chip].trust}):")
        ranked = sorted((row for row in rows if row["kernel"] == kernel), key=lambda row: row.get("milliseconds", 1e9))
        for row in ranked:
            size = f"tokens {row['tokens']:5} columns {row['columns']:5} unit {row['unit']:4}"
            figure = row.get("error") or f"{row['milliseconds']:8.2f} ms {row['utilization']:6.1%}"
            print(f"  {size}  {figure}{'   <- in use' if row['current'] else ''}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "libtpu": compiler_version(), "results": rows}, file, indent=1)
        print(f"JSON: {options.json}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, required=True)
    parser.add_argument("--kernel", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="default: all")
    parser.add_argument(
        "--blocks",
        nargs="+",
        type=lambda text: blocks.Blocks(*map(int, text.split(","))),
        metavar="TOKENS,COLUMNS,UNIT",
        help="only these; default: all of 512 to 2048 by 512 to 2048 in units of 128 to 512",
    )
    parser.add_argument("--width", type=int, default=2304, help="D (%(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="N (%(default)s)")
    parser.add_argument("--vocab", type=int, default=256_000, help="V (%(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--softcap", type=float, default=None)
    parser.add_argument("--json", help="write everything there")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args())
