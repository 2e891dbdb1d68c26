"""The TPU compiler on a machine without a TPU: calls a function in a new process in which libtpu can compile.

Each call has a new process because flags and topology are per process, and because libtpu aborts the process on an
internal error. The caller may already have imported jax.
"""

import importlib.metadata
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.runtime.errors import UserError


class DoesNotCompile(Exception):
    """The compiler rejected the program, crashed, or timed out.

    The message is the first line of its output; `details` is the whole output.
    """

    def __init__(self, details: str):
        super().__init__((details.strip().splitlines() or [""])[0][:300])
        self.details = details


class _Failed(NamedTuple):
    details: str


def compiler_version() -> str | None:
    """Version of libtpu; None if it is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def with_compiler(
    function: Callable[..., Any], *args: Any, flags: Sequence[str] = (), timeout: float | None = None
) -> Any:
    """Returns `function(*args)`, called in a new process that can compile for TPUs (`jax.experimental.topologies`).

    It compiles for GPUs too (`gpu_compiler`), where JAX's CUDA plugin is installed.

    Args:
        function: module-level function; it and its result are pickled.
        *args: picklable arguments.
        flags: flags added to those in the environment (`LIBTPU_INIT_ARGS`).
        timeout: in seconds. None: no limit.

    Raises:
        DoesNotCompile: if compilation fails.
        UserError: if the function raises it.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tpu_compiler_") as directory:
        receiver, sender = context.Pipe(duplex=False)
        log = Path(directory, "stderr")
        process = context.Process(target=_child, args=(sender, log, function, args))
        kept = dict(os.environ)
        os.environ.update(_environment(flags))
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(kept)
        sender.close()
        try:
            if not receiver.poll(timeout):
                raise DoesNotCompile(f"not done after {timeout:.0f} s")
            result = receiver.recv()
        except EOFError:
            process.join()
            fatal = re.search(r"^F\d{4} .*?\] (.*)", log.read_text(), re.MULTILINE)
            raise DoesNotCompile(
                f"the compiler died: {fatal[1][:300]}" if fatal else f"its process ended with code {process.exitcode}"
            ) from None
        finally:
            process.kill()
            process.join()
    if isinstance(result, UserError):
        raise result
    if isinstance(result, _Failed):
        raise DoesNotCompile(result.details)
    return result


def slice_devices(topology: str) -> list[Any]:
    """Devices of a slice such as "v5e:4x4" as a compilation target; only in the process of `with_compiler`.

    A host has 2 x 2 chips unless the slice has fewer, which libtpu needs as an option.
    """
    from jax.experimental import topologies

    lengths = [min(int(n), 2) for n in re.findall(r"\d+", topology.partition(":")[2])]
    bounds = (*(*lengths, 1, 1)[:2], 1)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, chips_per_host_bounds=bounds).devices


def _environment(flags: Sequence[str]) -> dict[str, str]:
    """Environment variables that must be set before jax and libtpu are loaded."""
    return {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(filter(None, [os.environ.get("LIBTPU_INIT_ARGS", ""), *flags])),
    }


def _child(sender: Connection, log: Path, function: Callable[..., Any], args: tuple) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)  # libtpu writes the cause of a crash to stderr
    try:
        sender.send(function(*args))
    except UserError as error:
        sender.send(error)
    except Exception as error:  # exceptions of the compiler cannot be pickled
        sender.send(_Failed(f"{type(error).__name__}: {error}"))
