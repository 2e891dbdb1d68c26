"""Cache of the frozen model's hidden states: they are computed once, and epochs need no forward pass."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from calibjax.data import Sequences, eval_batches
from calibjax.models import LanguageModel
from calibjax.models.frozen import Frozen, batch_hidden
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import is_first, on_first, to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json, write_file

CacheMode = Literal["auto", "memory", "disk", "off"]
_MEMORY_FRACTION = 0.25  # largest fraction of the free host memory that "auto" uses


def sequence_arrays(
    lm: LanguageModel,
    sequences: Sequences,
    *,
    mode: CacheMode,
    batch_size: int,
    context: RunContext,
) -> tuple[dict[str, np.ndarray], bool]:
    """Returns the arrays that training reads: with hidden states if they are cached, otherwise with tokens.

    Each process holds all rows, because the order of an epoch mixes them.

    Args:
        lm: the frozen model.
        sequences: S sequences of T positions.
        mode: "memory": hidden states as one host array; "disk": as a memory-mapped file in `context.directory`, which
            later runs with the same model and sequences reuse; "off": recomputed in every step; "auto": "memory" if
            they take at most a quarter of the free host memory, otherwise "off"; the choice is stored in the directory.
        batch_size: sequences per forward pass.
        context: directory of the cache, log and progress.

    Returns:
        Arrays with S rows each (targets, where, segment_ids, and either hidden, or tokens and positions), and whether
        hidden states are among them.

    Raises:
        UserError: if the file cannot be written.
    """
    directory = context.require_directory()
    shape = (*sequences.tokens.shape, lm.config.hidden_size)
    size = int(np.prod(shape)) * lm.dtype.itemsize
    arrays = {name: getattr(sequences, name) for name in ("targets", "where", "segment_ids")}
    if mode == "auto":
        mode = "memory" if on_first(lambda: _decide(size, directory / "cache.json") == "memory") else "off"
    if mode == "off":
        context.log(f"hidden states are recomputed in every step (a cache would take {_readable(size)})")
        return {**arrays, "tokens": sequences.tokens, "positions": sequences.positions}, False
    context.log(f"caching hidden states: {_readable(size)} ({mode}) for {sequences.where.sum():,} tokens")
    if mode == "memory":
        hidden = np.empty(shape, lm.dtype)
        _compute(lm, sequences, hidden, batch_size, context)
        return {**arrays, "hidden": hidden}, True
    return {**arrays, "hidden": _on_disk(lm, sequences, shape, batch_size, context)}, True


def _decide(size: int, note: Path) -> CacheMode:
    """Chooses the mode for "auto" and stores it: a resumed run must use the same mode to get the same rounding."""
    stored = _stored(note)
    if stored in ("memory", "off"):
        return stored
    mode = "memory" if size <= _MEMORY_FRACTION * host_memory_available() else "off"
    note.parent.mkdir(parents=True, exist_ok=True)
    write_file(note, json.dumps(mode))
    return mode


def _compute(
    lm: LanguageModel, sequences: Sequences, out: np.ndarray | None, batch_size: int, context: RunContext
) -> None:
    """Computes hidden states into `out`, if given; every process takes part in the computation."""
    frozen = Frozen(lm.params, lm.unembedding)
    forward = jax.jit(batch_hidden, static_argnums=(0, 3))
    names = ("tokens", "segment_ids", "positions", "where")
    rows = eval_batches({name: getattr(sequences, name) for name in names}, batch_size)
    bar = context.bar(title="frozen forward pass", unit="sequence", total=len(sequences.tokens))
    start = 0
    for batch, real in rows:
        hidden = to_host(forward(lm.config, frozen, batch, lm.dtype))
        if out is not None:
            out[start : start + real] = hidden[:real]
        start += real
        bar.update(real)
    bar.close()


def _on_disk(
    lm: LanguageModel,
    sequences: Sequences,
    shape: tuple[int, ...],
    batch_size: int,
    context: RunContext,
) -> np.ndarray:
    """Computes or reuses a raw file of `shape` in the model's dtype. A note, written last, identifies its contents."""
    directory = context.require_directory()
    file, note = directory / "hidden.bin", directory / "hidden.json"
    identity = {
        "fingerprint": lm.fingerprint,
        "windows": array_hash(sequences._asdict()),
        "shape": list(shape),
        "dtype": str(lm.dtype),
    }

    def begin() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            note.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            with file.open(
                "xb"
            ) as fresh:  # on a full disk, a write to a mapped page without its block ends the process
                os.posix_fallocate(fresh.fileno(), 0, int(np.prod(shape)) * lm.dtype.itemsize)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.unlink()
            raise UserError(
                f"cannot cache hidden states in {file}: {error}. Use --cache-hidden off or memory."
            ) from error

    def finish() -> None:
        write_file(note, json.dumps(identity))

    if on_first(lambda: file.is_file() and _stored(note) == identity):
        context.log(f"reusing the hidden states in {file}")
    else:
        on_first(begin)
        hidden = np.memmap(file, lm.dtype, "r+", shape=shape) if is_first() else None
        _compute(lm, sequences, hidden, batch_size, context)
        if hidden is not None:
            hidden.flush()
        on_first(finish)
    return np.memmap(file, lm.dtype, "r", shape=shape)


def _stored(note: Path) -> Any:
    """Returns the contents of a note; None if it is missing or incomplete."""
    try:
        return read_json(note)
    except ValueError:
        return None


def array_hash(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256, hex, of the arrays' names, dtypes, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def host_memory_available() -> int:
    """Returns the kernel's estimate of the bytes available without swapping; 0 if there is none (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _readable(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 2**30 else f"{size / 2**30:,.1f} GiB"
