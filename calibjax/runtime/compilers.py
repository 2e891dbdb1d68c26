"""The compilers for TPUs (libtpu) and GPUs (JAX's CUDA plugin) on a machine with neither, in a process of their own.

Each call has a new process because flags and topology are per process, and because libtpu aborts the process on an
internal error. The caller may already have imported jax. The compiler for GPUs needs no driver.
"""

import importlib.metadata
import math
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from calibjax.runtime.errors import UserError


class DoesNotCompile(Exception):
    """The compiler rejected the program, crashed or timed out: the first line of its output; `details` has it all."""

    def __init__(self, details: str):
        super().__init__((details.strip().splitlines() or [""])[0][:300])
        self.details = details


def compiler_version(platform: str = "tpu") -> str | None:
    """Name and version of the compiler for "tpu" or "gpu"; None if it is not installed."""
    for name in ("libtpu",) if platform == "tpu" else ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def with_compiler(
    function: Callable[..., Any], *args: Any, flags: Sequence[str] = (), timeout: float | None = None
) -> Any:
    """The result of `function(*args)`, called in a new process that can compile for devices that are not there.

    The function is of a module; it, its arguments and its result are pickled. `flags` are added to LIBTPU_INIT_ARGS.
    Raises `DoesNotCompile` where compilation fails or takes longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="compiler_") as directory:
        receiver, sender = context.Pipe(duplex=False)
        log = Path(directory, "stderr")
        log.touch()  # a child that dies before it writes
        process = context.Process(target=_child, args=(sender, log, function, args))
        before = dict(os.environ)
        os.environ.update(  # what must be set before jax and libtpu are loaded
            JAX_PLATFORMS="cpu",
            CUDA_VISIBLE_DEVICES="-1",
            TPU_SKIP_MDS_QUERY="1",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            TPU_WORKER_HOSTNAMES="localhost",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            LIBTPU_INIT_ARGS=" ".join(filter(None, [os.environ.get("LIBTPU_INIT_ARGS", ""), *flags])),
        )
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        sender.close()
        try:
            if not receiver.poll(timeout):
                raise DoesNotCompile(f"not done after {timeout:.0f} s")
            result, error = receiver.recv()
        except EOFError:
            process.join()
            fatal = re.search(r"^F\d{4} .*?\] (.*)", log.read_text(), re.MULTILINE)
            ended = f"its process ended with code {process.exitcode}"
            raise DoesNotCompile(f"the compiler died: {fatal[1][:300]}" if fatal else ended) from None
        finally:
            process.kill()
            process.join()
    if error is not None:
        raise error if isinstance(error, UserError) else DoesNotCompile(error)
    return result


def _child(sender: Connection, log: Path, function: Callable[..., Any], args: tuple) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)  # libtpu writes the cause of a crash to stderr
    try:
        sender.send((function(*args), None))
    except UserError as error:
        sender.send((None, error))
    except Exception as error:  # exceptions of the compiler cannot be pickled
        sender.send((None, f"{type(error).__name__}: {error}"))


def slice_devices(topology: str) -> list[Any]:
    """Devices of a TPU slice such as "v5e:4x4" as a compilation target; only in the process of `with_compiler`."""
    from jax.experimental import topologies

    lengths = [min(int(n), 2) for n in re.findall(r"\d+", topology.partition(":")[2])]
    bounds = (*(*lengths, 1, 1)[:2], 1)  # a host has 2 x 2 chips unless the slice has fewer
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, chips_per_host_bounds=bounds).devices


_HOPPER = """cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"""
_AMPERE = """cuda_compute_capability { major: 8 } core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040
  clock_rate_ghz: 1.41 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912"""
_GPUS = {
    "a100": (_AMPERE, 2039000000000, 80000000000, "NVIDIA A100-SXM4-80GB"),
    "h100": (_HOPPER, 3352320000000, 84929347584, "NVIDIA H100 80GB HBM3"),
    "h200": (_HOPPER, 4800000000000, 141000000000, "NVIDIA H200"),
}
# Of the SXM models, in XLA's format of a target: the limits of the architecture (CUDA C++ Programming Guide, compute
# capabilities) and the figures of the vendor's white papers; the memory of an H100 is what its driver reports.
_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {} memory_bandwidth: {} device_memory_size: {}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{}"
"""


def gpu_devices(chip: str, count: int) -> list[Any]:
    """`count` GPUs ("a100", "h100" or "h200") as a compilation target, 8 on a host; where `slice_devices` works."""
    from jax.experimental import topologies

    per_host = math.gcd(count, 8)
    description: Any = topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip,
        target_config=_TARGET.format(*_GPUS[chip]),
        topology=f"1x{count // per_host}x{per_host}",
    )
    return description.devices
