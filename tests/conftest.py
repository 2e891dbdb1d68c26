"""Strict arithmetic for every test, a virtual mesh of 8 CPU devices, and little time spent on compiling.

Compiled programs are kept in `.pytest_cache/compiled`, which workers, subprocesses and later runs share. Their key
holds the program, the flags and the versions; what is older than a week is removed.
"""

import functools
import gc
import os
import time
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads wait for each other on small matrices: 20 times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: the same
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Programs of tests run once on small inputs: optimisations, the emitters of fusions by MLIR, and threads that
    # compile parts of a program cost more than they save. Without these a cold run takes half the time.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# Imports and tracing make many small objects, and collections walk all that live: a fifth of a short run otherwise.
gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def survivors_are_not_walked_again():
    """Collections of later modules leave out what earlier ones left: traces and programs, millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def undrawn(monkeypatch):
    """Makes the figures of reports, but does not draw them: that takes a second or two a page."""
    monkeypatch.setattr("calibjax.eval.report.page.png", lambda figure: b"\x89PNG")
    monkeypatch.setattr("calibjax.eval.report.page.svg", lambda figure, name: "<svg/>")


TESTS = Path(__file__).parent
FAST = (
    *("data", "losses/test_bounds.py", "losses/test_long_horizon.py"),
    *("metrics/test_goldens.py", "models/test_shapes.py", "nn/test_blocks.py", "recalibrate/test_temperature.py"),
    *("runtime/test_files.py", "train/test_loop.py", "train/test_versions.py", "test_layout.py"),
)
"""What `-m fast` runs: files and folders that touch every package and cost a second or few."""


@functools.cache
def is_fast(path: Path) -> bool:
    return any(path == TESTS / name or TESTS / name in path.parents for name in FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The others are not even imported: that alone takes ten seconds."""
    unwanted = collection_path.name.startswith("test_") and not is_fast(collection_path)
    return True if config.option.markexpr == "fast" and unwanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_fast(item.path) and not item.get_closest_marker("slow"):
            item.add_marker("fast")
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        for file in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("*"):
            if file.stat().st_mtime < time.time() - 7 * 24 * 3600:
                file.unlink(missing_ok=True)
