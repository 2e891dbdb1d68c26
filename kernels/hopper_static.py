"""Compile the operator for an H100 on a machine without one: registers, spills, shared memory, temporaries. No time.

    pip install jax-cuda13-plugin jax-cuda13-pjrt     # 132 MB, of the version that jax has; nothing else of CUDA
    python kernels/hopper_static.py --preset gemma2-2b tokens-32k --softcap none 30

The programs are those of `bench.py` with `implementation="pallas_gpu"`. Registers, spills and shared memory are of the
Pallas kernels in them, temporaries of the whole. A kernel that two of them share is compiled, and listed, once.
"""

import argparse
import dataclasses
import importlib
import os
import pathlib
import re
import tempfile
import time
from typing import Any

import contenders
import jax
import numpy as np
from bench import softcap
from contenders import PRESETS, Problem
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calibjax.runtime.compilers import gpu_devices


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


def compile_for_h100(problem: Problem, task: str, name: str = "vocab_stats pallas_gpu") -> dict[str, Any]:
    """Compiler statistics of one of `contenders.program`, and of each Mosaic kernel in it."""
    mesh = Mesh(np.array(gpu_devices("h100", 1)), ("device",))
    importlib.import_module("jax.experimental.mosaic.gpu")  # sets the root below to a CUDA that need not be there
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory(prefix="hopper_static_") as directory:
        # Mosaic writes what it compiles there, and the output of ptxas.
        os.environ |= {"MOSAIC_GPU_DUMP_TO": directory, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        function, arguments = contenders.program(name, task, problem)
        placed = NamedSharding(mesh, PartitionSpec())
        arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in arguments]
        start = time.time()
        compiled = jax.jit(function).lower(*arguments).compile()
        seconds, kernels = time.time() - start, []
        for variable in ("MOSAIC_GPU_DUMP_TO", "MOSAIC_GPU_DUMP_PTXAS"):
            del os.environ[variable]
        for file in sorted(pathlib.Path(directory).glob("*.ptxas")):
            output = file.read_text()
            # The first of the passes that launches the kernel; the log has tens of megabytes.
            with file.with_suffix(".mlir-passes.log").open() as lines:
                pattern = r"dynamic_shared_memory_size %c(\d+)_i32"
                shared_memory = next(size for line in lines for size in _numbers(pattern, line))
            kernels.append(
                {
                    "registers": _numbers(r"Used (\d+) registers", output)[0],  # of a thread, at the launch
                    "spilled": sum(_numbers(r"(\d+) bytes spill", output)),
                    "shared_memory": shared_memory,  # bytes
                    "wgmma": file.with_suffix(".ptx").read_text().count("wgmma.mma_async"),
                    "serialized": "serialized" in output,  # ptxas could not let products run beside other work
                }
            )
    memory: Any = compiled.memory_analysis()
    return {"temporaries": memory.temp_size_in_bytes, "compile_seconds": seconds, "kernels": kernels}


def main(options: argparse.Namespace) -> None:
    """Compile and print."""
    name = f"{'linear_cross_entropy' if options.scalar else 'vocab_stats'} pallas_gpu"
    name += ", logits saved" if options.save_logits else ""
    for preset in options.preset:
        for cap in options.softcap:
            problem = dataclasses.replace(PRESETS[preset], softcap=cap, label_smoothing=0.1)
            for task in options.task:
                row = compile_for_h100(problem, task, name)
                mebibytes, seconds = row["temporaries"] / 2**20, row["compile_seconds"]
                print(f"{name}, {problem}, {task}: {mebibytes:.1f} MiB of temporaries, compiled in {seconds:.0f} s")
                for kernel in row["kernels"]:
                    print("   ", ", ".join(f"{key} {value}" for key, value in kernel.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["gemma2-2b", "llama31-8b-4k", "tokens-32k"])
    tasks = ("statistics", "forward", "hidden", "both")
    parser.add_argument("--task", nargs="+", choices=tasks, default=["statistics"])
    parser.add_argument("--scalar", action="store_true", help="the mean loss, whose gradients the forward pass forms")
    parser.add_argument("--save-logits", action="store_true", help="with --task both")
    parser.add_argument("--softcap", type=softcap, nargs="+", default=[None, 30.0], help="or none")
    main(parser.parse_args())
