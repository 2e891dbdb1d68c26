"""Device mesh: its axes, and the sharding of batches and weights."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from calibjax.runtime.errors import UserError

AXES = ("data", "fsdp", "tensor")
"""Mesh axes. Batches are split over data and fsdp; weights over fsdp and tensor, by `RULES`."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or one that only names its axes and their sizes."""

_BATCH = ("data", "fsdp")

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(un)?embedding", ("tensor", "fsdp")),  # [V, D]
    (r"position_embedding", (None, "fsdp")),  # [P, D]
    (r"layers\.(attention\.[qkv]|mlp\.(gate|up))\.kernel", (None, "fsdp", "tensor")),  # [L, in, out], out divided
    (r"layers\.(attention\.[qkv]|mlp\.(gate|up))\.bias", (None, "tensor")),  # [L, out]
    (r"layers\.(attention\.o|mlp\.down)\.kernel", (None, "tensor", "fsdp")),  # [L, in, out], summed over tensor
    (r"layers\.mlp\.(gate|up|down)\.kernel", (None, "tensor", "fsdp", None)),  # of experts, [L, E, in, out]
    (r"layers\.mlp\.(gate|up|down)\.bias", (None, "tensor", None)),  # of experts, [L, E, out]
    (r"block\.(attention\.[qkv]|mlp\.(gate|up))\.kernel", ("fsdp", "tensor")),  # of a head, [in, out]
    (r"block\.(attention\.o|mlp\.down)\.kernel", ("tensor", "fsdp")),
    (r"(gate_up|project)\.kernel", ("fsdp", None)),
)
"""(pattern of a parameter's dotted path, mesh axis of each dimension). Other parameters are replicated."""


def mesh_shape(text: str | None, devices: int) -> tuple[int, int, int]:
    """Parses `--mesh`, such as "data=2,fsdp=4": devices along each of `AXES`; by default all along fsdp."""
    if text is None:
        return 1, devices, 1
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise UserError(f"--mesh {text}: expected sizes of {', '.join(AXES)}, such as data=2,fsdp=4, got {part!r}.")
        if axis in sizes:
            raise UserError(f"--mesh {text}: expected every axis once, got {axis} twice.")
        sizes[axis] = int(size)
    if math.prod(sizes.values()) != devices:
        hint = "CUDA_VISIBLE_DEVICES selects some GPUs, TPU_VISIBLE_CHIPS some chips of a TPU"
        raise UserError(f"--mesh {text}: expected all {devices} devices, got {math.prod(sizes.values())} ({hint}).")
    return sizes.get("data", 1), sizes.get("fsdp", 1), sizes.get("tensor", 1)


def make_mesh(shape: tuple[int, int, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh of `devices` (by default all); `shape`: the number along each of `AXES` (by default all on fsdp)."""
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(None, len(devices)) if shape is None else shape
    # Ordered by the interconnect between TPUs; on other platforms the order is kept.
    ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(ordered, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def as_mesh(mesh: Mesh) -> Mesh:
    """The devices of a mesh under `AXES`, all of them Auto: the compiler chooses shardings of intermediate arrays."""
    if not set(mesh.axis_names) <= set(AXES):
        axes = f"axes among {', '.join(AXES)}, got {', '.join(map(str, mesh.axis_names))}"
        raise UserError(f'mesh: expected {axes}; make it by jax.make_mesh(({mesh.size},), ("fsdp",)).')
    auto = (AxisType.Auto,) * len(AXES)
    if mesh.axis_names == AXES and mesh.axis_types == auto:
        return mesh
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    devices = mesh.devices.transpose(order).reshape([mesh.shape.get(axis, 1) for axis in AXES])
    return Mesh(devices, AXES, axis_types=auto)


def check_batch(mesh: AnyMesh, batch_size: int, accumulate: int = 1) -> None:
    """Raises `UserError` if a batch is not `accumulate` micro-batches that divide among the devices of `mesh`."""
    shards = batch_shards(mesh)
    multiple = accumulate * shards
    if batch_size % multiple:
        why = f"{accumulate} micro-batch(es), each divided among {shards} device(s) of the mesh axes data and fsdp"
        raise UserError(f"batch_size: expected a multiple of {multiple}, for {why}; got {batch_size}.")


def batch_shards(mesh: AnyMesh | None) -> int:
    """The number of parts into which the rows of a batch are divided: the product of the axes data and fsdp."""
    return 1 if mesh is None else math.prod(mesh.shape.get(axis, 1) for axis in _BATCH)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of the rows of a batch over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(_BATCH))


def has_axes(mesh: AnyMesh) -> bool:
    return set(AXES) <= set(mesh.axis_names)


def context_mesh() -> Mesh | None:
    """The current mesh (`jax.set_mesh`) if it has `AXES` and several devices, else None. Not for traced functions."""
    mesh = jax.sharding.get_mesh()
    return mesh if has_axes(mesh) and mesh.size > 1 else None


def local_rows(mesh: Mesh | None, count: int) -> np.ndarray:
    """Rows of a batch of `count` that this process reads, ascending: those of its devices, or all without a mesh.

    Processes that hold parts of the same rows, along the tensor axis, read the same rows.
    """
    if mesh is None:
        return np.arange(count)
    local_slices = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return np.unique(np.concatenate([np.arange(count)[rows] for rows in local_slices]))


def place_rows(mesh: Mesh | None, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Makes the global batch on the mesh from the `local_rows` of each process.

    Without a mesh or on one device, the host arrays are returned, because placing them explicitly only costs time.
    """
    if mesh is None or mesh.size == 1:
        return dict(batch)
    return {name: jax.make_array_from_process_local_data(batch_sharding(mesh), x) for name, x in batch.items()}


def divide_rows(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Divides the rows of a batch that every process holds whole over the current mesh, if there is one."""
    mesh = context_mesh()
    rows = local_rows(mesh, len(next(iter(batch.values()))))
    return place_rows(mesh, {name: x[rows] for name, x in batch.items()})


def constrain_batch(x: jax.Array) -> jax.Array:
    """Constrains the rows of `x` to the sharding of a batch if a mesh with its axes is set (`jax.set_mesh`).

    The decoder applies it in each layer so that the compiler gathers weights instead of activations.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types and set(AXES) & set(mesh.axis_names):
        hint = "run it under jax.set_mesh(calibjax.RunContext(mesh=mesh).mesh), which leaves shardings to the compiler."
        raise UserError(f"the current mesh has Explicit axes, which this model does not support: {hint}")
    if not set(_BATCH) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_BATCH))


def constrain_cache(x: jax.Array) -> jax.Array:
    """Constrains keys or values `[..., B, K, S, H]`: rows like a batch, heads over tensor if it divides them."""
    mesh = jax.sharding.get_abstract_mesh()
    if not has_axes(mesh):
        return x
    heads = "tensor" if x.shape[-3] % mesh.shape["tensor"] == 0 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 4), _BATCH, heads, None, None))


@jax.custom_vjp
def _take(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]`; NaN where an index is too large. Its gradient is allocated late in the backward pass.

    The gradient begins as zeros [V, D]. If they depended on nothing, XLA would allocate them as early as the loss and
    hold them during the whole backward pass: 1 GB at V = 128,256 and D = 2,048. They depend on the cotangents.
    """
    return jnp.take(table, index, axis=0, mode="fill")


def _take_backward(residuals: tuple[jax.Array, jax.Array], cotangents: jax.Array) -> tuple[jax.Array, None]:
    table, index = residuals
    first = cotangents[(0,) * cotangents.ndim]  # a zero made of it; CPUs drop an optimization barrier
    zero = (jnp.isnan(first) & jnp.isfinite(first)).astype(table.dtype)
    return jnp.broadcast_to(zero, table.shape).at[index].add(cotangents, mode="drop"), None


_take.defvjp(lambda table, index: (_take(table, index), (table, index)), _take_backward)


def lookup(table: jax.Array, index: jax.Array, path: str, dtype: DTypeLike, tied: bool = False) -> jax.Array:
    """`table[index]` in `dtype` for `[V, D]` and `[B, T]`; NaN where an index is out of range.

    `tied` states that the table has another use, to whose gradient XLA adds this one: it changes memory only. If a mesh
    with `AXES` is set, the table is the parameter at `path`, sharded by `RULES`, and each device looks up rows of its
    part for its tokens and those of its neighbours along fsdp: rows are moved instead of the table.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spec = param_sharding(mesh, path, table.shape).spec if has_axes(mesh) else PartitionSpec()
    if not spec or mesh.size == 1 or index.shape[0] % batch_shards(mesh):
        index = jnp.where(index < 0, table.shape[0], index)  # negative ones would count from the end
        rows = jnp.take(table, index, axis=0, mode="fill") if tied else _take(table, index)
        return rows.astype(dtype)
    over_rows, over_columns = spec

    def on_device(part: jax.Array, index: jax.Array) -> jax.Array:
        if over_columns is not None:
            index = jax.lax.all_gather(index, over_columns, axis=0, tiled=True)
        beyond = (index < 0) | (index >= table.shape[0])
        if over_rows is not None:
            is_local, index = _local_index(index, over_rows, part.shape[0])
            rows = jnp.where(is_local[..., None], part[index].astype(dtype), 0)
            rows = jax.lax.psum(rows, over_rows)
        else:
            rows = part[jnp.where(beyond, 0, index)].astype(dtype)
        rows = jnp.where(beyond[..., None], jnp.nan, rows)
        if over_columns is not None:
            rows = jax.lax.all_to_all(rows, over_columns, split_axis=0, concat_axis=2, tiled=True)
        return rows

    batch = PartitionSpec(_BATCH)
    return jax.shard_map(on_device, in_specs=(spec, batch), out_specs=batch)(table, index)


def _local_index(index: jax.Array, axis: Any, size: int) -> tuple[jax.Array, jax.Array]:
    """Whether an index lies in this device's part of `size` rows, and its place there; 0 if it does not."""
    local = index - jax.lax.axis_index(axis) * size
    is_local = (local >= 0) & (local < size)
    return is_local, jnp.where(is_local, local, 0)


def take_states(hidden: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
    """`hidden[row, position]`, `[R, D]` of `[B, T, D]` for indices `[R]` into the whole batch.

    If a mesh with `AXES` is set, each device contributes the states of its rows to a sum: R states move, not the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shards = batch_shards(mesh) if has_axes(mesh) else 1
    if shards == 1 or hidden.shape[0] % shards:
        return hidden[row, position]

    def on_device(part: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        is_local, row = _local_index(row, _BATCH, part.shape[0])
        return jax.lax.psum(jnp.where(is_local[:, None], part[row, position], 0), _BATCH)

    specs = PartitionSpec(_BATCH), PartitionSpec(), PartitionSpec()
    return jax.shard_map(on_device, in_specs=specs, out_specs=PartitionSpec())(hidden, row, position)


def param_sharding(mesh: AnyMesh, path: str, shape: Sequence[int]) -> NamedSharding:
    """Sharding of the parameter at a dotted path by `RULES`; dimensions that an axis does not divide stay whole."""
    for pattern, axes in RULES:
        if len(axes) == len(shape) and re.fullmatch(pattern, path):
            spec = []
            for axis, length in zip(axes, shape, strict=True):
                divides = axis in mesh.shape and length % mesh.shape[axis] == 0
                spec.append(axis if divides else None)
            return NamedSharding(mesh, PartitionSpec(*spec))
    return replicated(mesh)


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """`param_sharding` of every leaf of a tree of arrays or shapes.

    Paths consist only of dictionary keys, so that the moments of an optimiser are sharded like their parameters.
    """

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        return param_sharding(mesh, ".".join(keys), leaf.shape)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def replicated(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
