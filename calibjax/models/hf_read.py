"""Parameters from the tensors of safetensors or GGUF files: a plan, made before any weight is read, and the reading.

Every tensor must be used or be a known buffer, and every parameter must be filled exactly once.

Weights are read in chunks, by threads. A chunk (`fingerprint.chunks`) is read, hashed, cast, checked and copied to the
shards of this process, in our layout, while in the cache. A process reads what its devices hold, and hashes its part.
"""

import collections
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.families import FAMILIES
from calibjax.models.fingerprint import chunk_digest, chunks, dotted_leaves, join_chunks, layer_name
from calibjax.models.rules import Layout, transpose_into
from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.distributed import together
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import param_sharding

FLOATS = {
    "F64": jnp.dtype("float64"),
    "F32": jnp.dtype("float32"),
    "F16": jnp.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}
"""Dtypes of safetensors that are read."""
_MAX_NAMED = 10
_BUFFERS = re.compile(
    r"(.*\.)?rotary_emb\.(original_)?inv_freq|(h\.\d+\.attn|layers\.\d+\.attention)\.(bias|masked_bias)"
)
"""Names, without prefix, of tensors that are no parameters: they follow from the configuration."""
_OTHER_HEADS = re.compile(r"(v_head|value_head|reward_head|score|classifier)\..*")

Index = tuple[slice, ...]
Problems = dict[str, list[str]]
"""Tensors by what is wrong with them."""


class TensorEntry(NamedTuple):
    """A tensor in a checkpoint's header: name, shape, safetensors dtype such as `"BF16"`, file, and offset in bytes.

    `reader` replaces `read` for a tensor that is not stored as an array of `dtype` in the order of `shape`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    reader: Callable[[Index], np.ndarray] | None = None

    def read(self, index: Index) -> np.ndarray:
        """Reads `tensor[index]`, at once if these bytes follow each other in the file."""
        if self.reader is not None:
            return self.reader(index)
        dtype = np.dtype(np.uint8) if self.dtype == "U8" else FLOATS[self.dtype]
        try:
            tensor = np.memmap(self.file, dtype, "r", self.offset, self.shape)
            part = tensor[index]
            if not part.flags.c_contiguous:
                return np.array(part)
            start = part.ctypes.data - tensor.ctypes.data
            return np.fromfile(self.file, dtype, part.size, offset=self.offset + start).reshape(part.shape)
        except ValueError as error:  # of memmap, or of reshape
            raise UserError(f"{self.file}: cut short while it was read. Download it again.") from error


class Piece(NamedTuple):
    """A tensor, or its `columns` in each group, that fills a parameter or one layer of it.

    Several `entries` hold the experts of a layer, which are stacked.
    """

    entries: tuple[TensorEntry, ...]
    layer: int | None
    layout: Layout
    columns: slice

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values in the file; float32 for experts of different dtypes."""
        kinds = {entry.dtype for entry in self.entries}
        return FLOATS[kinds.pop() if len(kinds) == 1 else "F32"]

    def read(self, index: Index) -> np.ndarray:
        """The part at `index` in our layout; for a kernel, whole columns. A transposed part is a view."""
        if len(self.entries) == 1:
            return self._read_columns(self.entries[0], index)
        stored = [self._read_columns(entry, index[1:]) for entry in self.entries[index[0]]]
        parts = [part.astype(self.dtype, copy=False) for part in stored]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)

    def _read_columns(self, entry: TensorEntry, index: Index) -> np.ndarray:
        transpose, groups, columns = self.layout.transpose, self.layout.groups, self.columns
        *others, last = index

        def read(start: int, stop: int) -> np.ndarray:
            part = slice(start, stop)
            stored_index = (*others[:-1], part, others[-1]) if transpose else (*others, part)
            return entry.read(stored_index)

        if groups == 1:
            values = read(columns.start + last.start, columns.start + last.stop)
            return values.swapaxes(-1, -2) if transpose else values
        # The columns of this parameter lie in groups between those of others: whole groups are read.
        width = columns.stop - columns.start
        group = entry.shape[-2 if transpose else -1] // groups
        first, end = last.start // width, ceil_div(last.stop, width)
        values = Layout(transpose, end - first).take(read(first * group, end * group), columns)
        return values[..., last.start - first * width : last.stop - first * width]


Pieces = dict[str, list[Piece]]
"""The pieces that fill each parameter, by its dotted path."""


def plan_tensors(config: DecoderConfig, entries: Iterable[TensorEntry]) -> tuple[Pieces, dict[str, int]]:
    """Assigns the tensors of a checkpoint, `entries` of all of its files, to the parameters of a model.

    Returns the pieces that fill each parameter, by dotted path (one a layer of stacked parameters), and how many
    tensors each part that is not the language model has.

    Raises:
        UserError: tensors are unknown, missing, duplicated, of wrong shape or not floating-point; up to ten of each.
    """
    family = FAMILIES[config.family]
    problems: Problems = collections.defaultdict(list)
    by_name: dict[str, TensorEntry] = {}
    named, left_out = _language_model_tensors(list(entries))
    for name, entry in named:
        if _OTHER_HEADS.fullmatch(name):
            left_out[name.split(".")[0]] += 1
            continue
        name = name.removeprefix(family.prefix)
        if _BUFFERS.fullmatch(name):
            continue
        first = by_name.setdefault(name, entry)
        if first is not entry:
            problems["duplicate"].append(f"{entry.name} ({entry.file.name}) and {first.name} ({first.file.name})")
    if config.tie_embeddings:
        _drop_tied_copy(config, by_name, problems)

    leaves = dict(dotted_leaves(abstract_params(config)))
    pieces: Pieces = {path: [] for path in leaves}
    for rule, layer in family.stored(config, leaves):
        experts = rule.experts(config)
        present = []
        for expert in experts:
            entry = by_name.pop(rule.source.format(layer, expert), None)
            if entry is None:
                problems["missing"].append(rule.full_name(family.prefix, layer, expert))
            else:
                present.append(entry)
        if len(present) < len(experts):
            continue
        layout = rule.layout(config)
        leading_axes = int(layer is not None) + int(experts != (None,))  # of our stacked layers and experts
        expected, columns = layout.divide([leaves[target].shape[leading_axes:] for target in rule.targets])
        wrong = [entry for entry in present if entry.shape != expected]
        unread = [entry for entry in present if entry.dtype not in FLOATS]
        problems["wrong shape"] += [f"{entry.name} {list(entry.shape)}, expected {list(expected)}" for entry in wrong]
        problems["not floating-point"] += [f"{entry.name} {entry.dtype}" for entry in unread]
        for target, part in zip(rule.targets, columns, strict=True):
            pieces[target].append(Piece(tuple(present), layer, layout, part))
    problems["unknown"] += [entry.name for entry in by_name.values()]
    _refuse_problems(config, problems)
    return pieces, dict(left_out)


def _refuse_problems(config: DecoderConfig, problems: Problems) -> None:
    listed = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            listed.append(f" {kind}: {', '.join(names[:_MAX_NAMED])}{more}")
    if listed:
        mismatch = f"The weights do not match this {config.family} configuration.{';'.join(listed)}."
        raise UserError(f"{mismatch} Check that the files are complete and come from the same model.")


def _language_model_tensors(entries: list[TensorEntry]) -> tuple[list[tuple[str, TensorEntry]], collections.Counter]:
    """The tensors of the language model with their names in it, and the number of tensors of each other part.

    In a multimodal model they are `language_model.model...` and `language_model.lm_head...`, or as newer versions of
    transformers write them, `model.language_model...` and `lm_head...`.
    """
    text, left_out = [], collections.Counter()
    if not any("language_model." in entry.name for entry in entries):
        return [(entry.name, entry) for entry in entries], left_out
    for entry in entries:
        name = entry.name.removeprefix("model.")
        text_name = name.removeprefix("language_model.")
        if text_name != name or name.startswith("lm_head."):
            text.append((text_name, entry))
        else:
            left_out[name.split(".")[0]] += 1
    return text, left_out


def _drop_tied_copy(config: DecoderConfig, by_name: dict[str, TensorEntry], problems: Problems) -> None:
    """Takes the unembedding of a tied model, which some files hold a second time, out of `by_name`."""
    source = {rule.targets: rule.source for rule in FAMILIES[config.family].rules}
    copy = by_name.pop(source["unembedding",], None)
    if copy is None:
        return
    # `safetensors.torch.save_model` writes a shared tensor under one of its names, which may be this one.
    embedding = by_name.setdefault(source["embedding",], copy)
    if embedding is copy:
        return
    if embedding.shape != copy.shape:
        problems["wrong shape"].append(f"{copy.name} {list(copy.shape)}, expected {list(embedding.shape)}")
        return
    parts = [(slice(start, start + 4096),) for start in range(0, copy.shape[0], 4096)]
    are_floats = {embedding.dtype, copy.dtype} <= FLOATS.keys()
    if not are_floats or not all(np.array_equal(embedding.read(part), copy.read(part)) for part in parts):
        problems["not the embedding (set tie_word_embeddings to false in config.json)"].append(copy.name)


def merge_mxfp4(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """The entries, with one entry `NAME` of bfloat16 values for each pair `NAME_blocks` and `NAME_scales`.

    Blocks are bytes `[E, F, D / 32, 16]`, scales `[E, F, D / 32]`, values `[E, D, F]`; see `_read_mxfp4`.
    """
    by_name = {entry.name: entry for entry in entries}
    merged = []
    for entry in entries:
        name = entry.name.removesuffix("_blocks")
        scales = by_name.get(f"{name}_scales")
        if name != entry.name and scales is not None:
            if entry.shape != (*scales.shape, 16) or len(scales.shape) != 3 or {entry.dtype, scales.dtype} != {"U8"}:
                pair = " and ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in (entry, scales))
                raise UserError(f"{pair} are not a pair of MXFP4 blocks and scales. Download them again.")
            experts, columns, groups = scales.shape
            reader = functools.partial(_read_mxfp4, entry, scales)
            merged.append(TensorEntry(name, (experts, 32 * groups, columns), "BF16", entry.file, entry.offset, reader))
        elif not (entry.name.endswith("_scales") and f"{entry.name.removesuffix('_scales')}_blocks" in by_name):
            merged.append(entry)
    return merged


# The 16 numbers of 4 bits (OCP Microscaling Formats 1.0, section 5.3.3), and the two in each byte, the low bits first.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_PAIRS = np.stack([np.tile(_FP4, 16), np.repeat(_FP4, 16)], axis=-1)


def _read_mxfp4(blocks: TensorEntry, scales: TensorEntry, index: Index) -> np.ndarray:
    """Whole columns of some experts: numbers of 4 bits, 32 of which share `2 ** (scale - 127)`."""
    experts, _, columns = index
    exponents = scales.read((experts, columns))[..., None].astype(np.int32) - 127
    values = _FP4_PAIRS[blocks.read((experts, columns))].reshape(*exponents.shape[:-1], 32)
    with np.errstate(over="ignore"):
        values = np.ldexp(values, exponents)
    return values.reshape(*values.shape[:2], -1).astype(jnp.bfloat16).swapaxes(-1, -2)


class _Chunk(NamedTuple):
    """A chunk of a piece of the parameter at `path`: its `index` in the piece, and its `number` in the model."""

    path: str
    piece: Piece
    index: Index
    number: int


def read_params(
    config: DecoderConfig, pieces: Pieces, dtype: np.dtype, mesh: Mesh | None
) -> tuple[dict[str, jax.Array], dict[str, str]]:
    """Reads the parameters, by dotted path, and computes the digests of all tensors, by name.

    The host holds this process's part of one parameter; on CPUs, arrays of JAX use that memory without another copy.

    Raises:
        UserError: in all processes that share the mesh, if a file is damaged or a weight is not finite.
    """
    shapes = {path: leaf.shape for path, leaf in dotted_leaves(abstract_params(config))}
    all_chunks = []
    for path, stored in pieces.items():
        for piece in stored:
            shape = shapes[path][piece.layer is not None :]
            for index in chunks(layer_name(path, piece.layer), shape):
                all_chunks.append(_Chunk(path, piece, index, len(all_chunks)))
    digests = np.zeros((len(all_chunks), 32), np.uint8)
    processes, rank = (1, 0) if mesh is None else (jax.process_count(), jax.process_index())

    def read_part() -> dict[str, jax.Array]:
        params = {}
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 32)) as pool:
            for path, group in itertools.groupby(all_chunks, key=lambda chunk: chunk.path):
                parameter = _Parameter(path, shapes[path], dtype, mesh)
                read_here = [c for c in group if c.number % processes == rank or any(parameter.overlaps(c))]
                try:
                    list(pool.map(functools.partial(_read_and_place, parameter, digests), read_here))
                except OSError as error:
                    raise UserError(str(error)) from error
                params[path] = parameter.finish()
        return params

    params = together(read_part)
    if processes > 1:
        digests = multihost_utils.process_allgather(digests).max(axis=0)
    tensor_digests = {}
    for (path, layer), group in itertools.groupby(all_chunks, key=lambda chunk: (chunk.path, chunk.piece.layer)):
        parts, name = list(group), layer_name(path, layer)
        rows = digests[parts[0].number : parts[-1].number + 1]
        shape = shapes[path][layer is not None :]
        tensor_digests[name] = join_chunks(name, parts[0].piece.dtype, shape, rows.tobytes())
    return params, tensor_digests


def _read_and_place(parameter: "_Parameter", digests: np.ndarray, chunk: _Chunk) -> None:
    stored = chunk.piece.read(chunk.index)
    digests[chunk.number] = np.frombuffer(chunk_digest(chunk.path, stored), np.uint8)
    with np.errstate(over="ignore"):
        values = stored.astype(parameter.dtype, copy=False)
    if not _is_finite(values):
        cause = "holds values too large for" if _is_finite(stored) else "holds NaN or infinity; it was read as"
        expert = chunk.index[0].start if len(chunk.piece.entries) > 1 else 0
        entry = chunk.piece.entries[expert]
        raise UserError(f"{entry.file}: {entry.name} {cause} {parameter.dtype.name}.")
    parameter.place(chunk, values)


def _is_finite(array: np.ndarray) -> bool:
    """Whether all values are finite: as integers, NaN and infinity are the largest bits of each sign."""
    ends = {f"i{array.itemsize}": np.inf, f"u{array.itemsize}": -np.inf}
    return all(array.view(bits).max(initial=0) < np.array(end, array.dtype).view(bits) for bits, end in ends.items())


class _Parameter:
    """The part of a parameter that the devices of this process hold, while it is filled."""

    def __init__(self, path: str, shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh | None):
        self.dtype = dtype
        self._shape, self._sharding = shape, None if mesh is None else param_sharding(mesh, path, shape)
        places: Any = {None: (slice(None),) * len(shape)}
        if self._sharding is not None:
            places = self._sharding.addressable_devices_indices_map(shape)
        self._places = {}
        for device, index in places.items():
            self._places[device] = tuple(along.indices(n)[:2] for along, n in zip(index, shape, strict=True))
        self._bits = np.dtype(f"u{dtype.itemsize}")  # numpy copies numbers of its own dtypes faster
        shapes = {key: [end - start for start, end in key] for key in self._places.values()}
        self._shards = {key: _aligned(shard, self._bits) for key, shard in shapes.items()}

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
                shard_layer = shard if layer is None else shard[layer]
                yield shard_layer[tuple(target)], tuple(source)

    def place(self, chunk: _Chunk, values: np.ndarray) -> None:
        values = values.view(self._bits)
        for target, source in self.overlaps(chunk):
            part = values[source]
            if part.ndim > 1 and part.strides[-1] > part.strides[-2] == part.itemsize:
                transpose_into(target, part.swapaxes(-1, -2))
            else:
                target[...] = part

    def finish(self) -> jax.Array:
        arrays = [
            jax.device_put(self._shards[key].view(self.dtype), device, may_alias=True)
            for device, key in self._places.items()
        ]
        if self._sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array that JAX can use on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    alignment = 64
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)
