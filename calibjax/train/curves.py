"""What heads are fitted on: the features and scale curves of every token, from one pass of the frozen model.

The model is frozen, so its logits never change; only the scale does. The pass stores, for each token that counts, what
heads read and the curves of `calibjax.kernels.vocab_curves`. No loss, epoch, fold or head needs the model again.
"""

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from calibjax.data import Sequences, eval_batches
from calibjax.data.pipeline import even_batch_size
from calibjax.heads import FEATURES, HEADS, HeadConfig, join_features
from calibjax.kernels import DOUBLED_SCALES, SCALES, VocabCurves, vocab_curves
from calibjax.kernels.curves import dense_curves
from calibjax.kernels.platforms import platform
from calibjax.losses import LOSSES
from calibjax.models.frozen import FrozenArrays, batch_hidden, frozen_arrays, frozen_features, vocab_options
from calibjax.models.own import FrozenModel, check_sequences
from calibjax.runtime.arrays import ceil_div, readable_size, round_up
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import is_first, on_first, to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json, write_file
from calibjax.runtime.sharding import AnyMesh, batch_shards, context_mesh, has_axes, take_states

Keep = Literal["disk", "memory"]
_BLOCK = 512  # tokens of one pass over the vocabulary, on one accelerator
_CPU_BLOCK = 256  # fewer, so that the last block of a batch has little padding
_DEVICE_BLOCK = 1024  # on each of several devices: a pass may gather an unembedding that is stored in parts
# XLA may reorder sums ("fast math"), but NaN, infinities, divisions and exponentials stay exact.
_STILL_EXACT = ("nans", "infs", "division", "functions")
_REORDER_SUMS = {"xla_cpu_enable_fast_math": True, **{f"xla_cpu_fast_math_honor_{n}": True for n in _STILL_EXACT}}
_SAVE_EVERY = 20.0  # seconds between records of the progress of a pass
_EVERYWHERE = "_everywhere"  # after the name of a feature that is stored at every position
_FIELDS = tuple(field.name for field in dataclasses.fields(VocabCurves) if field.name != "scales")


class TokenCurves(NamedTuple):
    """The tokens of S sequences of T positions, without the model.

    Attributes:
        arrays: name -> `[S, T, ...]`: `where` and `segment_ids`, the fields of `VocabCurves`, and the features that
            cannot be computed from these. Each process holds all sequences.
        scales: the scales at which the curves are stored.
        source: int `[S]`, the group of each sequence, as in `Sequences`.
        fingerprint: fingerprint of the frozen model.
        hash: hash of the sequences and the model.
    """

    arrays: Mapping[str, np.ndarray]
    scales: tuple[float, ...]
    source: Int[np.ndarray, " S"]
    fingerprint: str
    hash: str

    @property
    def counted(self) -> Bool[np.ndarray, "S T"]:
        """The tokens that a loss counts."""
        return np.asarray(self.arrays["valid"])

    def take(self, rows: Int[np.ndarray, " n"]) -> "TokenCurves":
        arrays = {name: x[rows] for name, x in self.arrays.items()}
        return self._replace(arrays=arrays, source=self.source[rows])

    def flat(self, names: Sequence[str] = _FIELDS) -> dict[str, np.ndarray]:
        """Arrays at the tokens that count, `[N, ...]`, in the order of the sequences."""
        counted = self.counted
        return {name: self.arrays[name][counted] for name in names if name in self.arrays}

    def spread(self, values: Float[np.ndarray, " N"]) -> Float[np.ndarray, "S T"]:
        """Values of the tokens that count at their positions; 0 elsewhere."""
        out = np.zeros(self.counted.shape, values.dtype)
        out[self.counted] = values
        return out


def curves_of(arrays: Mapping[str, Any], scales: tuple[float, ...]) -> VocabCurves:
    """The curves among the arrays of a batch, or of `TokenCurves.flat`."""
    fields: dict[str, Any] = {name: arrays.get(name) for name in _FIELDS}
    return VocabCurves(**fields, scales=scales)


def features_of(head: HeadConfig, arrays: Mapping[str, Any], scales: tuple[float, ...]) -> Float[Array, "*B F"]:
    """What the head reads, from the arrays of a batch, or of `TokenCurves.flat`; float32."""
    if "features" not in HEADS[head.kind].options:
        return jnp.zeros((*arrays["valid"].shape, 1), jnp.float32)
    stored = {name: _stored_as(head, name) for name in head.features}
    parts = {name: arrays[key] for name, key in stored.items() if key}
    stats = curves_of(arrays, scales).at(1.0) if len(parts) < len(head.features) else None
    return join_features(head.features, parts, stats)


def _stored_as(head: HeadConfig, feature: str) -> str | None:
    """The array that holds a feature; None where it is computed from the curves, which only tokens that count have."""
    if FEATURES[feature].function is None:
        return feature
    return feature + _EVERYWHERE if head.attends else None


def stored_features(heads: Sequence[HeadConfig]) -> tuple[str, ...]:
    """The names of the arrays that hold features of these heads."""
    reading = [head for head in heads if "features" in HEADS[head.kind].options]
    keys = {_stored_as(head, name) for head in reading for name in head.features}
    return tuple(sorted(key for key in keys if key))


def token_curves(
    lm: FrozenModel,
    sequences: Sequences,
    heads: Sequence[HeadConfig] = (),
    *,
    losses: Sequence[str] = (),
    keep: Keep = "memory",
    batch_size: int = 16,
    context: RunContext,
) -> TokenCurves:
    """Runs the frozen model once over all sequences, on the current mesh (`jax.set_mesh`).

    Stores the features that `heads` read and what `losses`, names in `LOSSES`, read: largest logits, wider curves.

    Args:
        keep: "disk", in `context.directory`, from which a killed pass resumes and a later one reads; or "memory".
        batch_size: most sequences per forward pass.

    Raises:
        UserError: no token counts, ids are not of the model's vocabulary, or the files cannot be written.
    """
    check_sequences(lm, sequences)
    arrays = sequences.arrays()
    count, length = sequences.tokens.shape
    batch_size = even_batch_size(count, batch_size)
    features, losses = stored_features(heads), tuple(losses)
    frozen = frozen_arrays(lm, *heads)
    program = functools.partial(frozen_batch, lm.config, lm.dtype, features, losses)
    shapes, scales = _stored_shapes(program, frozen, arrays, batch_size)
    sequences_hash = array_hash(sequences._asdict())
    identity = {
        "model": lm.fingerprint,
        "dtype": str(lm.dtype),
        "sequences": sequences_hash,
        "arrays": {name: [list(x.shape), str(x.dtype)] for name, x in shapes.items()},
        "scales": list(scales),
        "batch_size": batch_size,
    }
    directory = context.require_directory() / "frozen" if keep == "disk" else None
    tokens = int(sequences.where.sum())
    size = readable_size(sum(x.size * x.dtype.itemsize for x in shapes.values()))
    place = "in memory" if directory is None else f"in {directory}"
    context.log(f"frozen pass: {tokens:,} tokens of {count:,} sequences; stored {place} ({size})")
    store = _Store(directory, shapes, identity)
    run = functools.partial(_forward, lm.config, lm.dtype, features, frozen)
    block = functools.partial(_block_program(platform().name), lm.config, lm.dtype, losses, frozen)
    width = _block_width(context_mesh(), batch_size * length)
    counted = sequences.where & (sequences.targets != -100)
    bar = context.bar(title="frozen pass", unit="sequence", total=count, initial=store.done)
    last_saved = time.monotonic()
    end = 0
    for batch, real in eval_batches(arrays, batch_size):
        start, end = end, end + real
        if end <= store.done:
            continue
        _write_batch(store, run, block, width, batch, counted[start:end], start)
        bar.update(real)
        if time.monotonic() - last_saved > _SAVE_EVERY or end == count:
            store.save_progress(end)
            last_saved = time.monotonic()
    bar.close()
    stored_arrays = {"where": sequences.where, "segment_ids": sequences.segment_ids, **store.arrays()}
    digest = f"{lm.fingerprint}-{lm.dtype}-{sequences_hash}"
    return TokenCurves(stored_arrays, scales, sequences.source, lm.fingerprint, digest)


def _stored_shapes(
    program: Callable[..., Any], frozen: FrozenArrays, arrays: Mapping[str, np.ndarray], batch_size: int
) -> tuple[dict[str, jax.ShapeDtypeStruct], tuple[float, ...]]:
    """Shape `[S, T, ...]` and dtype of each array to store, and the scales; `program` is `frozen_batch` of a model."""
    count, length = arrays["tokens"].shape
    batch = {name: jax.ShapeDtypeStruct((batch_size, length), x.dtype) for name, x in arrays.items()}
    stored, curves = jax.eval_shape(program, frozen, batch)
    per_token = {**stored, **_curve_arrays(curves)}
    shapes = {name: jax.ShapeDtypeStruct((count, length, *x.shape[2:]), x.dtype) for name, x in per_token.items()}
    return shapes, curves.scales


def _curve_arrays(curves: VocabCurves) -> dict[str, Any]:
    return {name: values for name in _FIELDS if (values := getattr(curves, name)) is not None}


def _write_batch(
    store: "_Store", run: Any, block: Any, width: int, batch: Any, counted: Bool[np.ndarray, "n T"], start: int
) -> None:
    """Stores the arrays of the first n sequences of a batch, as the sequences `start` to `start` + n − 1."""
    hidden, stored = run(batch)
    for name, array in to_host(stored).items():
        store.write(name, slice(start, start + len(counted)), array[: len(counted)])
    tokens = np.argwhere(counted).astype(np.int32).T  # the row and the position of each
    for first in range(0, tokens.shape[1], width):
        rows, positions = tokens[:, first : first + width]
        padding = (0, width - len(rows))
        curves = to_host(block(hidden, batch["targets"], np.pad(rows, padding), np.pad(positions, padding)))
        for name, values in _curve_arrays(curves).items():
            store.write(name, (start + rows, positions), values[: len(rows)])


@jax.jit(static_argnums=(0, 1, 2))
def _forward(config, dtype, features, frozen, batch):
    """Hidden states `[B, T, D]`, and the features to store, `[B, T, F]` each."""
    hidden = batch_hidden(config, frozen, batch, dtype)
    real = (batch["segment_ids"] > 0)[..., None]
    stored = {key: frozen_features(config, (key.removesuffix(_EVERYWHERE),), frozen, hidden, dtype) for key in features}
    return hidden, {name: jnp.where(real, x, 0) for name, x in stored.items()}


def _block(config, dtype, losses, frozen, hidden, targets, row, position):
    hidden = take_states(hidden, row, position)
    scales = DOUBLED_SCALES if any(LOSSES[name].doubled for name in losses) else SCALES
    top_k = max((LOSSES[name].top_k for name in losses), default=0)
    extent: Any = {"scales": scales, "top_k": min(top_k, config.vocab_size)}
    if frozen.unembedding is None:
        return dense_curves(hidden, targets[row, position], **extent)
    return vocab_curves(
        hidden, frozen.unembedding.astype(dtype), targets[row, position], **extent, **vocab_options(config, frozen)
    )


@functools.cache
def _block_program(platform_name: str) -> Callable[..., VocabCurves]:
    """`_block`, compiled. XLA's CPU compiler vectorises the sums only where it may add their terms in another order."""
    return jax.jit(_block, static_argnums=(0, 1, 2), compiler_options=_REORDER_SUMS if platform_name == "cpu" else None)


def _block_width(mesh: AnyMesh | None, tokens: int) -> int:
    """At most the tokens of a batch, and a multiple of the devices they lie on."""
    if mesh is None or mesh.size == 1 or not has_axes(mesh):
        return _CPU_BLOCK if platform().name == "cpu" else _BLOCK
    shards = batch_shards(mesh)
    return min(_DEVICE_BLOCK, ceil_div(tokens, shards)) * shards


def frozen_batch(
    config: Any, dtype: DTypeLike, features: tuple[str, ...], losses: tuple[str, ...], frozen: FrozenArrays, batch: Any
) -> tuple[dict[str, Array], VocabCurves]:
    """What `token_curves` computes of a batch in which every token counts, as one function: for shapes, and `plan`."""
    hidden, stored = _forward(config, dtype, features, frozen, batch)
    rows, length = batch["targets"].shape
    count = rows * length
    width = _block_width(jax.sharding.get_abstract_mesh(), count)
    number = jnp.arange(round_up(count, width), dtype=jnp.int32).reshape(-1, width) % count

    def block(number: Int[Array, " n"]) -> VocabCurves:
        return _block(config, dtype, losses, frozen, hidden, batch["targets"], number // length, number % length)

    return stored, jax.lax.map(block, number)


class _Store:
    """Arrays in memory; or in files, which the first process writes, with a record of the progress of their pass."""

    def __init__(self, directory: Path | None, shapes: Mapping[str, jax.ShapeDtypeStruct], identity: dict[str, Any]):
        self._directory, self._shapes, self._identity = directory, shapes, identity
        self.done = 0
        """Sequences that are complete."""
        if directory is None:
            self._arrays = {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items()}
            return
        self._progress_file = directory / "note.json"
        self._files = {name: directory / f"{name}.bin" for name in shapes}
        self.done = int(on_first(self._begin))
        self._arrays = self._map("r+") if is_first() else {}

    def _begin(self) -> int:
        """The number of sequences of this pass that the files hold; makes new files if they are of another pass."""
        assert self._directory is not None
        sizes = {name: max(x.size * x.dtype.itemsize, 1) for name, x in self._shapes.items()}
        with contextlib.suppress(ValueError, OSError):
            note = read_json(self._progress_file)
            is_same_pass = isinstance(note, dict) and note.get("identity") == self._identity
            if is_same_pass and all(file.stat().st_size == sizes[name] for name, file in self._files.items()):
                return int(note["done"])
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._progress_file.unlink(missing_ok=True)
            for name, file in self._files.items():
                file.unlink(missing_ok=True)
                with file.open("xb") as fresh:  # a write to a mapped page without a block on the disk ends the process
                    os.posix_fallocate(fresh.fileno(), 0, sizes[name])
        except OSError as error:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.unlink()
            problem = f"cannot write to {self._directory} ({error})"
            raise UserError(f"keep: {problem}. Choose another directory, or keep it in memory.") from error
        return 0

    def _map(self, mode: Literal["r", "r+"]) -> dict[str, np.ndarray]:
        files = [(name, file, self._shapes[name]) for name, file in self._files.items()]
        return {name: np.memmap(file, x.dtype, mode, shape=x.shape) for name, file, x in files}

    def write(self, name: str, at: Any, values: np.ndarray) -> None:
        if name in self._arrays:
            self._arrays[name][at] = values

    def save_progress(self, done: int) -> None:
        """Writes that the first `done` sequences are complete, after they are on the disk."""
        if self._directory is None:
            return
        for array in self._arrays.values():
            assert isinstance(array, np.memmap)
            array.flush()
        on_first(lambda: write_file(self._progress_file, json.dumps({"identity": self._identity, "done": done})))

    def arrays(self) -> dict[str, np.ndarray]:
        return self._arrays if self._directory is None else self._map("r")
