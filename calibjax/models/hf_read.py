"""Reading of the parameters of a model from safetensors or GGUF, in chunks, by threads.

A chunk (`fingerprint.chunks`) is read, hashed, cast, checked and copied to the shards of this process, in our layout,
while it is in the cache. Each of several processes reads the chunks that its devices hold, and hashes its part of all.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from calibjax.models.fingerprint import chunk_digest, chunks, join_chunks, layer_name
from calibjax.models.hf_tensors import FLOATS, Index, Piece, Plan, TensorEntry, read_mxfp4
from calibjax.models.rules import Layout, transpose_into
from calibjax.runtime.distributed import together
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import param_sharding

_ALIGNMENT = 64
_TIED_ROWS = 4096


class _Chunk(NamedTuple):
    """A chunk of a piece of the parameter at `path`: its `index` in the piece, and its `number` in the model."""

    path: str
    piece: Piece
    index: Index
    number: int


def read_params(plan: Plan, dtype: np.dtype, mesh: Mesh | None) -> tuple[dict[str, jax.Array], dict[str, str]]:
    """Returns the parameters by dotted path, and the digests of all tensors by name.

    The host holds the part of one parameter that belongs to the devices of this process. On CPUs, arrays of JAX use the
    host's memory without another copy.

    Raises:
        UserError: in all processes that share the mesh, if a file is damaged or a weight is not finite.
    """
    every = []
    for path, pieces in plan.pieces.items():
        for piece in pieces:
            shape = plan.leaves[path].shape[piece.layer is not None :]
            for index in chunks(layer_name(path, piece.layer), shape):
                every.append(_Chunk(path, piece, index, len(every)))
    digests = np.zeros((len(every), 32), np.uint8)
    processes, rank = (1, 0) if mesh is None else (jax.process_count(), jax.process_index())

    def read_own() -> dict[str, jax.Array]:
        params = {}
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
            for path, group in itertools.groupby(every, key=lambda chunk: chunk.path):
                parameter = _Parameter(path, plan.leaves[path].shape, dtype, mesh)
                own = [c for c in group if c.number % processes == rank or any(parameter.overlaps(c))]
                try:
                    list(pool.map(functools.partial(_read_and_place, parameter, digests, dtype), own))
                except OSError as error:
                    raise UserError(str(error)) from error
                params[path] = parameter.finish()
        return params

    params = together(read_own)
    if processes > 1:
        digests = multihost_utils.process_allgather(digests).max(axis=0)
    tensor_digests = {}
    for (path, layer), group in itertools.groupby(every, key=lambda chunk: (chunk.path, chunk.piece.layer)):
        parts, name = list(group), layer_name(path, layer)
        rows = digests[parts[0].number : parts[-1].number + 1]
        shape = plan.leaves[path].shape[layer is not None :]
        tensor_digests[name] = join_chunks(name, parts[0].piece.dtype, shape, rows.tobytes())
    return params, tensor_digests


def _read_and_place(parameter: "_Parameter", digests: np.ndarray, dtype: np.dtype, chunk: _Chunk) -> None:
    stored = read_chunk(chunk.piece, chunk.index)
    digests[chunk.number] = np.frombuffer(chunk_digest(chunk.path, stored), np.uint8)
    with np.errstate(over="ignore"):
        values = stored.astype(dtype, copy=False)
    if not _is_finite(values):
        cause = "holds values too large for" if _is_finite(stored) else "holds NaN or infinity, read as"
        entries = chunk.piece.entries
        entry = entries[chunk.index[0].start if len(entries) > 1 else 0]
        raise UserError(f"{entry.file}: {entry.name} {cause} {dtype.name}.")
    parameter.place(chunk, values)


def _is_finite(array: np.ndarray) -> bool:
    """Whether all values are finite: as integers, NaN and infinity are the largest bits of each sign."""
    if not array.size:
        return True
    infinity = np.array([np.inf, -np.inf], array.dtype)
    signed, unsigned = (np.dtype(f"{kind}{array.itemsize}") for kind in "iu")
    return bool(
        array.view(signed).max() < infinity.view(signed)[0] and array.view(unsigned).max() < infinity.view(unsigned)[1]
    )


class _Parameter:
    """The part of a parameter that the devices of this process hold, while it is filled."""

    def __init__(self, path: str, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh | None):
        self._shape = shape
        self._sharding = None if mesh is None else param_sharding(mesh, path, shape)
        indices = [()] if self._sharding is None else self._places().values()
        self._dtype, self._bits = dtype, np.dtype(f"u{dtype.itemsize}")  # numpy copies numbers of its own dtypes faster
        self._shards = {key: _aligned([b - a for a, b in key], self._bits) for key in map(self._key, indices)}

    def overlaps(self, chunk: _Chunk) -> Iterator[tuple[np.ndarray, Index]]:
        """Yields the part of each shard that a chunk fills, and the index of these values in the chunk."""
        layer = chunk.piece.layer
        for key, shard in self._shards.items():
            target, source = [], []
            for along, (low, high) in zip(chunk.index, key[layer is not None :], strict=True):
                start, stop = max(along.start, low), min(along.stop, high)
                target.append(slice(start - low, stop - low))
                source.append(slice(start - along.start, stop - along.start))
            if all(part.start < part.stop for part in source):
                yield (shard if layer is None else shard[layer])[tuple(target)], tuple(source)

    def place(self, chunk: _Chunk, values: np.ndarray) -> None:
        """Copies the values of a chunk to the shards that hold some of them."""
        values = values.view(self._bits)
        for target, source in self.overlaps(chunk):
            part = values[source]
            if part.ndim > 1 and part.strides[-1] > part.strides[-2] == part.itemsize:
                transpose_into(target, part.swapaxes(-1, -2))
            else:
                target[...] = part

    def finish(self) -> jax.Array:
        """Returns the parameter on its devices."""
        if self._sharding is None:
            return jax.device_put(*(shard.view(self._dtype) for shard in self._shards.values()), may_alias=True)
        arrays = [
            jax.device_put(self._shards[self._key(index)].view(self._dtype), device, may_alias=True)
            for device, index in self._places().items()
        ]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)

    def _places(self) -> dict[Any, Any]:
        assert self._sharding is not None
        return dict(self._sharding.addressable_devices_indices_map(self._shape))

    def _key(self, index: Sequence[slice]) -> tuple[tuple[int, int], ...]:
        whole = (*index, *(slice(None) for _ in range(len(self._shape) - len(index))))
        return tuple(along.indices(n)[:2] for along, n in zip(whole, self._shape, strict=True))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that JAX can use on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def read_chunk(piece: Piece, index: Index) -> np.ndarray:
    """Returns the part of a piece at `index` in our layout; of a kernel, whole columns. A transposed one is a view."""
    first, *others = piece.entries
    if others:
        parts = [_read_columns(piece, entry, index[1:]) for entry in piece.entries[index[0]]]
        parts = [part.astype(piece.dtype, copy=False) for part in parts]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)
    return _read_columns(piece, first, index)


def _read_columns(piece: Piece, entry: TensorEntry, index: Index) -> np.ndarray:
    layout, columns = piece.layout, piece.columns
    *others, last = index
    if layout.groups == 1:
        values = _read_box(entry, (*others, slice(columns.start + last.start, columns.start + last.stop)), layout)
        return values.swapaxes(-1, -2) if layout.transpose else values
    # The columns of this parameter lie in groups between those of others: whole groups are read.
    width = columns.stop - columns.start
    group = entry.shape[-2 if layout.transpose else -1] // layout.groups
    first, end = last.start // width, -(-last.stop // width)
    values = _read_box(entry, (*others, slice(first * group, end * group)), layout)
    values = Layout(layout.transpose, end - first).take(values, columns)
    return values[..., last.start - first * width : last.stop - first * width]


def _read_box(entry: TensorEntry, index: Index, layout: Layout) -> np.ndarray:
    """Reads the part of a stored tensor that `index` selects in our layout."""
    if entry.scales is not None:
        expert, _, columns = index
        box = expert, columns
        blocks = _read_part_of(dataclasses.replace(entry, shape=(*entry.scales.shape, 16), dtype="U8"), box)
        return np.stack([read_mxfp4(*each) for each in zip(blocks, _read_part_of(entry.scales, box), strict=True)])
    index = (*index[:-2], *index[:-3:-1]) if layout.transpose else index
    return _read_part_of(entry, index) if entry.read is None else entry.read(index)


def _read_part_of(entry: TensorEntry, box: Index) -> np.ndarray:
    """Reads `tensor[box]`, at once if these bytes follow each other in the file."""
    dtype = np.dtype(np.uint8) if entry.dtype == "U8" else FLOATS[entry.dtype]
    box = (*box, *(slice(0, n) for n in entry.shape[len(box) :]))
    shape = tuple(along.stop - along.start for along in box)
    divided = [axis for axis, n in enumerate(entry.shape) if shape[axis] != n]
    if divided and math.prod(shape[: divided[-1]]) > 1:
        return np.array(np.memmap(entry.file, dtype, "r", entry.offset, entry.shape)[box])
    start = sum(along.start * math.prod(entry.shape[axis + 1 :]) for axis, along in enumerate(box))
    values = np.empty(shape, dtype)
    into = values.reshape(-1).view(np.uint8).data
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.offset + start * dtype.itemsize)
        while len(into):
            count = file.readinto(into)
            if not count:
                raise UserError(f"{entry.file}: cut short while it was read. Download it again.")
            into = into[count:]
    return values


def tied_differ(plan: Plan) -> bool:
    """Whether two tensors that the configuration ties have different values in the files."""
    if plan.must_equal is None:
        return False
    first, second = plan.must_equal
    for start in range(0, first.shape[0], _TIED_ROWS):
        rows = (slice(start, min(start + _TIED_ROWS, first.shape[0])),)
        if not np.array_equal(_read_part_of(first, rows), _read_part_of(second, rows)):
            return True
    return False
