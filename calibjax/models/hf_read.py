"""Reading of the parameters of a model from safetensors or GGUF, in chunks, by threads.

A chunk (`fingerprint.chunks`) is read, hashed, cast, checked and copied to the shards of this process, in our layout,
while it is in the cache. Each of several processes reads the chunks that its devices hold, and hashes its part of all.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from calibjax.models.fingerprint import chunk_digest, chunks, join_chunks, layer_name
from calibjax.models.hf_tensors import Index, Piece, Plan
from calibjax.models.rules import transpose_into
from calibjax.runtime.distributed import together
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import param_sharding

_ALIGNMENT = 64


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
                    list(pool.map(functools.partial(_read_and_place, parameter, digests), own))
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


def _read_and_place(parameter: "_Parameter", digests: np.ndarray, chunk: _Chunk) -> None:
    stored = chunk.piece.read(chunk.index)
    digests[chunk.number] = np.frombuffer(chunk_digest(chunk.path, stored), np.uint8)
    with np.errstate(over="ignore"):
        values = stored.astype(parameter.dtype, copy=False)
    if not _is_finite(values):
        cause = "holds values too large for" if _is_finite(stored) else "holds NaN or infinity, read as"
        entries = chunk.piece.entries
        entry = entries[chunk.index[0].start if len(entries) > 1 else 0]
        raise UserError(f"{entry.file}: {entry.name} {cause} {parameter.dtype.name}.")
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
        self.dtype = dtype
        self._shape, self._sharding = shape, None if mesh is None else param_sharding(mesh, path, shape)
        places = {None: ()} if self._sharding is None else self._sharding.addressable_devices_indices_map(shape)
        self._places = {device: _bounds(index or (), shape) for device, index in places.items()}
        self._bits = np.dtype(f"u{dtype.itemsize}")  # numpy copies numbers of its own dtypes faster
        self._shards = {key: _aligned([b - a for a, b in key], self._bits) for key in set(self._places.values())}

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
        arrays = [
            jax.device_put(self._shards[key].view(self.dtype), device, may_alias=True)
            for device, key in self._places.items()
        ]
        if self._sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Start and end along each axis."""
    whole = (*index, *(slice(None) for _ in range(len(shape) - len(index))))
    return tuple(along.indices(n)[:2] for along, n in zip(whole, shape, strict=True))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that JAX can use on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
