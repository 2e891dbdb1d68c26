"""What makes a command start fast: plugins and libraries that are not used are left out, compiled programs are kept.

JAX initialises libtpu even where it only serves as a compiler, which fails with lines on standard error after about a
second. transformers imports PyTorch, which takes about three seconds and is not needed for configurations.
"""

import contextlib
import hashlib
import importlib.util
import os
import pkgutil
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # its import warns where PyTorch is missing
_DEVICES = ("accel*", "vfio/[0-9]*", "vfio/devices/*")
_VARIABLES = ("TPU_NAME", "TPU_WORKER_", "TPU_ACCELERATOR_TYPE", "TPU_PROCESS_", "TPU_VISIBLE_", "JAX_FORCE_TPU_INIT")


def platforms_without_tpu(environment: Mapping[str, str], devices: Path = Path("/dev")) -> str | None:
    """A value of `JAX_PLATFORMS` that leaves out the TPU plugin; None where JAX is to choose.

    JAX chooses where the variable is set, libtpu is absent, a plugin other than CUDA's is installed, or a TPU may be
    present: the kernel shows one as /dev/accel* or /dev/vfio/N, and a variable such as `TPU_NAME` announces one.
    """
    if environment.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None:
        return None
    is_announced = any(name.startswith(_VARIABLES) for name in environment)
    if is_announced or any(any(devices.glob(pattern)) for pattern in _DEVICES):
        return None
    plugins = importlib.util.find_spec("jax_plugins")
    names = {module.name for module in pkgutil.iter_modules(plugins.submodule_search_locations)} if plugins else set()
    if not names <= {"xla_cuda12", "xla_cuda13"}:
        return None
    has_cuda = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
    return "cuda,cpu" if has_cuda else "cpu"


def skip_absent_tpu() -> None:
    """Leaves out the TPU plugin where there is no TPU. Effective until JAX initialises its devices."""
    platforms = platforms_without_tpu(os.environ)
    if platforms is None:
        return
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = platforms
        return
    import jax

    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", platforms)


_without_torch = False


def leave_out_torch() -> None:
    """Declares that nothing in this process, which is one of the command line, needs PyTorch; see `torch_left_out`."""
    global _without_torch
    _without_torch = True


@contextlib.contextmanager
def torch_left_out() -> Iterator[None]:
    """For the first import of transformers, which looks for PyTorch once; hides it where nothing needs it."""
    hidden = _without_torch and not {"torch", "transformers"} & sys.modules.keys()
    if hidden:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


def compilation_cache(environment: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Variables by which JAX keeps compiled programs in the user's cache directory; none where they are set.

    There is a directory for each kind of processor (by `cpuinfo`, which need not exist) and number of cores, because
    programs contain its instructions and are divided among the cores, and home directories are shared between machines.
    """
    if {"JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"} & environment.keys():
        return {}
    cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    features = ""
    with contextlib.suppress(OSError), cpuinfo.open() as lines:
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    digest = hashlib.sha256(features.encode()).hexdigest()
    kind = f"{platform.machine()}-{digest[:8]}-{cores}"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "calibjax" / "compiled" / kind),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs for the next command, silently. Effective until JAX compiles the first one."""
    for name, value in compilation_cache(os.environ).items():
        if name not in os.environ:
            os.environ[name] = value
            if "jax" in sys.modules:  # has read its variables
                sys.modules["jax"].config.update(name.lower(), value if name.endswith("_DIR") else int(value))
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
