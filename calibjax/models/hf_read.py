"""Reading of the parameters of a model from safetensors: every byte once, in chunks, by threads and processes.

A chunk (`fingerprint.chunks`) is read, hashed, cast, checked and copied to the shards of this process, in our layout,
while it is in the cache. Several processes divide the chunks of the whole model among themselves, and send each other
what they have read, because networks between accelerators are faster than file systems.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calibjax.models.fingerprint import chunk_digest, chunks, in_file_order, join_chunks, layer_name
from calibjax.models.hf_tensors import FLOATS, Index, Piece, Plan, TensorEntry, read_mxfp4
from calibjax.models.rules import Layout, transpose_into
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import param_sharding

_ROUND = 2**25
"""Bytes that all processes together read before they exchange them, if each has more than one chunk."""

_ALIGNMENT = 64
_TIED_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of a parameter.

    Args:
        path: dotted path of the parameter.
        piece: piece that it is a part of; its number among the pieces of the parameter is its layer.
        index: place of the chunk in the piece.
        number: number of the chunk in the model.
    """

    path: str
    piece: Piece
    index: Index
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the chunk, without the axis of layers."""
        return tuple(along.stop - along.start for along in self.index)

    @property
    def size(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


def read_params(plan: Plan, dtype: np.dtype, mesh: Mesh | None) -> tuple[dict[str, jax.Array], dict[str, str]]:
    """Returns the parameters by dotted path, and the digests of all tensors by name.

    The host holds the part of one parameter that belongs to the devices of this process, and `_ROUND` bytes. On CPUs,
    arrays of JAX use the host's memory without another copy.

    Args:
        plan: result of `plan_tensors`.
        dtype: dtype of the parameters.
        mesh: devices to divide the parameters among; `None` for the default device.

    Raises:
        UserError: in all processes that share the mesh, if a file is damaged or a weight is not finite.
    """
    processes = 1 if mesh is None else jax.process_count()
    every = _all_chunks(plan)
    rounds = list(divide(every, dtype.itemsize, processes))
    length = max(sum(chunk.size for chunk in part) for parts in rounds for part in parts)
    table = np.zeros((len(every), 32), np.uint8)
    params: dict[str, jax.Array] = {}
    pending: dict[str, _Parameter] = {}
    remaining = dict.fromkeys(plan.leaves, 0)
    for chunk in every:
        remaining[chunk.path] += 1
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
        for parts in rounds:
            for path in dict.fromkeys(chunk.path for part in parts for chunk in part):
                if path not in pending:
                    pending[path] = _Parameter(path, plan.leaves[path].shape, dtype, mesh)
            if processes == 1:
                run = functools.partial(_read_and_place, pending, table, dtype)
                list(pool.map(run, parts[0]))
            else:
                read = _exchange(*_read_part(pool, parts[jax.process_index()], table, dtype, length))
                for part, values in zip(parts, read, strict=True):
                    list(pool.map(functools.partial(_place_from, pending, values), part, _offsets(part)))
            for chunk in (chunk for part in parts for chunk in part):
                remaining[chunk.path] -= 1
                if not remaining[chunk.path]:
                    params[chunk.path] = pending.pop(chunk.path).finish()
    if processes > 1:
        table = multihost_utils.process_allgather(table).max(axis=0)
    return params, _join(plan, every, table)


def _all_chunks(plan: Plan) -> list[Chunk]:
    found = []
    for path, pieces in plan.pieces.items():
        for piece in pieces:
            shape = plan.leaves[path].shape[piece.layer is not None :]
            for index in chunks(layer_name(path, piece.layer), shape):
                found.append(Chunk(path, piece, index, len(found)))
    return found


def divide(chunks: Sequence[Chunk], itemsize: int, processes: int) -> Iterator[list[list[Chunk]]]:
    """Yields rounds: the chunks that each process reads before they exchange them. Each chunk occurs once."""
    parts: list[list[Chunk]] = [[]]
    size, limit = 0, _ROUND // processes
    for chunk in chunks:
        if size and size + chunk.size * itemsize > limit:
            if len(parts) == processes:
                yield parts
                parts = []
            parts.append([])
            size = 0
        parts[-1].append(chunk)
        size += chunk.size * itemsize
    yield parts + [[] for _ in range(processes - len(parts))]


def _join(plan: Plan, every: Sequence[Chunk], table: np.ndarray) -> dict[str, str]:
    rows: dict[str, list[Chunk]] = {}
    for chunk in every:
        rows.setdefault(layer_name(chunk.path, chunk.piece.layer), []).append(chunk)
    return {
        name: join_chunks(
            name,
            of[0].piece.dtype,
            plan.leaves[of[0].path].shape[of[0].piece.layer is not None :],
            table[of[0].number : of[-1].number + 1].tobytes(),
        )
        for name, of in rows.items()
    }


# --- one process ---


def _read_and_place(pending: "dict[str, _Parameter]", table: np.ndarray, dtype: np.dtype, chunk: Chunk) -> None:
    pending[chunk.path].place(chunk, _read_checked(chunk, table, dtype))


def _read_checked(chunk: Chunk, table: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the values of a chunk in `dtype`, and puts its digest into `table`."""
    stored = read_chunk(chunk.piece, chunk.index)
    table[chunk.number] = np.frombuffer(chunk_digest(chunk.path, stored), np.uint8)
    with np.errstate(over="ignore"):
        values = stored.astype(dtype, copy=False)
    if not _is_finite(values):
        cause = "holds values too large for" if _is_finite(stored) else "holds NaN or infinity, read as"
        entries = chunk.piece.entries
        entry = entries[chunk.index[0].start if len(entries) > 1 else 0]
        raise UserError(f"{entry.file}: {entry.name} {cause} {dtype.name}.")
    return values


def _is_finite(array: np.ndarray) -> bool:
    """Whether all values are finite: as integers, NaN and infinity are the largest bits of each sign."""
    if not array.size:
        return True
    infinity = np.array([np.inf, -np.inf], array.dtype)
    signed, unsigned = (np.dtype(f"{kind}{array.itemsize}") for kind in "iu")
    return bool(
        array.view(signed).max() < infinity.view(signed)[0] and array.view(unsigned).max() < infinity.view(unsigned)[1]
    )


# --- several processes ---


def _read_part(
    pool: ThreadPoolExecutor, part: Sequence[Chunk], table: np.ndarray, dtype: np.dtype, length: int
) -> tuple[np.ndarray, UserError | None]:
    """Returns the values of the chunks of one process, `[length]`, and the first error."""
    values = np.zeros(length, dtype)

    def read(chunk: Chunk, offset: int) -> None:
        ordered = in_file_order(chunk.path, _read_checked(chunk, table, dtype))
        values[offset : offset + chunk.size] = ordered.reshape(-1)

    try:
        list(pool.map(read, part, _offsets(part)))
    except UserError as error:
        return values, error
    except OSError as error:
        return values, UserError(str(error))
    return values, None


def _offsets(part: Sequence[Chunk]) -> list[int]:
    return np.cumsum([0, *(chunk.size for chunk in part)])[:-1].tolist()


def _exchange(values: np.ndarray, error: UserError | None) -> np.ndarray:
    """Returns the values `[n]` of all processes, `[P, n]`; raises in all of them if one has an error.

    Each device gathers its part of the values from its counterparts in the other processes.
    """
    processes, local = jax.process_count(), jax.local_device_count()
    sent = np.zeros((local, values.nbytes // local + 1), np.uint8)  # at least one byte more than the values
    sent.reshape(-1)[: values.nbytes] = values.view(np.uint8)
    sent[-1, -1] = error is not None
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(processes, local), ("process", "local"))
    mine = mesh.devices[jax.process_index()]
    rows = [jax.device_put(row[None, None], device) for row, device in zip(sent, mine, strict=True)]
    divided = NamedSharding(mesh, PartitionSpec("process", "local"))
    whole = jax.make_array_from_single_device_arrays((processes, *sent.shape), divided, rows)
    shards = {shard.device: shard.data for shard in _gather(mesh)(whole).addressable_shards}
    gathered = np.concatenate([np.asarray(shards[device])[:, 0] for device in mine], axis=1)
    failed = np.flatnonzero(gathered[:, -1])
    if len(failed):
        raise error or UserError(f"process {failed[0]} failed; see its own error message.")
    return gathered[:, : values.nbytes].view(values.dtype)


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec(None, "local")))


def _place_from(pending: "dict[str, _Parameter]", values: np.ndarray, chunk: Chunk, offset: int) -> None:
    shape = in_file_order(chunk.path, np.empty(chunk.shape, np.void)).shape
    ordered = values[offset : offset + chunk.size].reshape(shape)
    pending[chunk.path].place(chunk, in_file_order(chunk.path, ordered))


# --- shards ---


class _Parameter:
    """The part of a parameter that the devices of this process hold, while it is filled."""

    def __init__(self, path: str, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh | None):
        self._shape = shape
        self._sharding = None if mesh is None else param_sharding(mesh, path, shape)
        indices = [()] if self._sharding is None else self._places().values()
        self._dtype, self._bits = dtype, np.dtype(f"u{dtype.itemsize}")  # numpy copies numbers of its own dtypes faster
        self._shards = {key: _aligned([b - a for a, b in key], self._bits) for key in map(self._key, indices)}

    def place(self, chunk: Chunk, values: np.ndarray) -> None:
        """Copies the values of a chunk to the shards that hold some of them."""
        layer, values = chunk.piece.layer, values.view(self._bits)
        at = [(along.start, along.stop) for along in chunk.index]
        for key, shard in self._shards.items():
            held = key[layer is not None :]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(at, held, strict=True)]
            if all(start < stop for start, stop in both):
                source = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(both, at, strict=True))
                target = tuple(slice(s - a, e - a) for (s, e), (a, _) in zip(both, held, strict=True))
                _copy((shard if layer is None else shard[layer])[target], values[source])

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


def _copy(target: np.ndarray, values: np.ndarray) -> None:
    if values.ndim > 1 and values.strides[-1] > values.strides[-2] == values.itemsize:
        transpose_into(target, values.swapaxes(-1, -2))
    else:
        target[...] = values


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that JAX can use on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


# --- files ---


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
