"""Compile the operator for an H100 on a machine without one: registers, spills, shared memory, temporaries. No time.

    pip install jax-cuda13-plugin jax-cuda13-pjrt     # 132 MB, of the version that jax has; nothing else of CUDA
    python kernels/hopper_static.py --preset gemma2-2b tokens-32k --softcap none 30 --json hopper.json

The programs are those of `bench.py` with `implementation="pallas_gpu"`: `vocab_stats`, or with `--scalar`
`linear_cross_entropy`; `--variant` takes others of its kernels. Registers, spills and shared memory are of the Pallas
kernels in them, temporaries of the whole. A kernel that two of them share is compiled, and listed, once.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import contenders
import jax
import numpy as np
from bench import PRESETS, _softcap
from contenders import Problem
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calibjax.runtime.gpu_compiler import gpu_devices

TASKS = ("statistics", "forward", "hidden", "both")


def installed() -> bool:
    """The compiler is there: jax's CUDA plugin."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def target() -> Mesh:
    """A mesh of one H100 that need not be there."""
    return Mesh(np.array(gpu_devices("h100", 1)), ("device",))


@contextlib.contextmanager
def _dumped() -> Iterator[pathlib.Path]:
    """A directory into which Mosaic writes what it compiles, and the output of ptxas."""
    importlib.import_module("jax.experimental.mosaic.gpu")  # sets the root below to a CUDA that need not be there
    with tempfile.TemporaryDirectory(prefix="hopper_static_") as directory:
        names = {"MOSAIC_GPU_DUMP_TO": directory, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield pathlib.Path(directory)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


def compile_for_h100(problem: Problem, task: str, name: str = "vocab_stats pallas_gpu") -> dict[str, Any]:
    """Compiler statistics of one of `contenders.program`.

    Returns:
        "temporaries", "compile_seconds", and a list "kernels": of each Mosaic kernel its "registers" (of a thread, at
        the launch), "spilled" (bytes stored and loaded), "shared_memory" (bytes), "wgmma" (instructions in its text)
        and "serialized": ptxas could not let products run beside other work.
    """
    mesh = target()
    with jax.set_mesh(mesh), _dumped() as directory:
        function, arguments = contenders.program(name, task, problem)
        placed = NamedSharding(mesh, PartitionSpec())
        arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in arguments]
        start = time.time()
        compiled = jax.jit(function).lower(*arguments).compile()
        seconds, kernels = time.time() - start, []
        for file in sorted(directory.glob("*.ptxas")):
            output = file.read_text()
            kernels.append(
                {
                    "registers": _numbers(r"Used (\d+) registers", output)[0],
                    "spilled": sum(_numbers(r"(\d+) bytes spill", output)),
                    "shared_memory": _shared_memory(file.with_suffix(".mlir-passes.log")),
                    "wgmma": file.with_suffix(".ptx").read_text().count("wgmma.mma_async"),
                    "serialized": "serialized" in output,
                }
            )
    memory: Any = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes
    return {"temporaries": temporaries, "compile_seconds": seconds, "kernels": kernels}


def _shared_memory(log: pathlib.Path) -> int:
    """From the first of the passes that launches the kernel; the log has tens of megabytes."""
    with log.open() as lines:
        return next(size for line in lines for size in _numbers(r"dynamic_shared_memory_size %c(\d+)_i32", line))


def main(options: argparse.Namespace) -> None:
    """Compile, print and record."""
    rows = []
    for preset in options.preset:
        for softcap in options.softcap:
            problem = dataclasses.replace(PRESETS[preset], softcap=softcap, label_smoothing=0.1)
            for task in options.task:
                way = "linear_cross_entropy" if options.scalar else "vocab_stats"
                name = ", ".join([f"{way} pallas_gpu", *([options.variant] if options.variant else [])])
                row = compile_for_h100(problem, task, name)
                rows.append({**dataclasses.asdict(problem), "task": task, "contender": name, **row})
                print(
                    f"{name}, {problem}, {task}: {row['temporaries'] / 2**20:.1f} MiB of temporaries, "
                    f"compiled in {row['compile_seconds']:.0f} s"
                )
                for kernel in row["kernels"]:
                    print("   ", ", ".join(f"{key} {value}" for key, value in kernel.items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    if not installed():
        sys.exit("hopper_static.py needs the packages jax-cuda13-plugin and jax-cuda13-pjrt; it needs no GPU.")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["gemma2-2b", "llama31-8b-4k", "tokens-32k"])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=["statistics"])
    parser.add_argument("--scalar", action="store_true", help="the mean loss, whose gradients the forward pass forms")
    parser.add_argument("--variant", choices=contenders.VARIANTS, help="with --task both")
    parser.add_argument("--softcap", type=_softcap, nargs="+", default=[None, 30.0], help="or none")
    parser.add_argument("--json", type=pathlib.Path, help="write everything there")
    main(parser.parse_args())
