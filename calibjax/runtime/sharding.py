"""The mesh: axes by name, and where batches and weights lie on it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from calibjax.runtime.errors import UserError

AXES = ("data", "fsdp", "tensor")
"""Mesh axes. Batches are split over data and fsdp; weights over fsdp and tensor, by `RULES`."""

_BATCH = ("data", "fsdp")

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(un)?embedding", ("tensor", "fsdp")),  # [V, D]
    (r"position_embedding", (None, "fsdp")),  # [P, D]
    (r"layers\.(attention\.[qkv]|mlp\.(gate|up))\.kernel", (None, "fsdp", "tensor")),  # [L, in, out], out divided
    (r"layers\.(attention\.[qkv]|mlp\.(gate|up))\.bias", (None, "tensor")),  # [L, out]
    (r"layers\.(attention\.o|mlp\.down)\.kernel", (None, "tensor", "fsdp")),  # [L, in, out], summed over tensor
    (r"block\.(attention\.[qkv]|mlp\.(gate|up))\.kernel", ("fsdp", "tensor")),  # of a head, [in, out]
    (r"block\.(attention\.o|mlp\.down)\.kernel", ("tensor", "fsdp")),
    (r"(gate_up|project)\.kernel", ("fsdp", None)),
)
"""(pattern of a parameter's dotted path, mesh axis of each of its dimensions); what matches none is whole."""


def mesh_shape(text: str | None, devices: int) -> tuple[int, int, int]:
    """Devices along each of `AXES` as `--mesh` has them: "data=2,fsdp=4", an axis that is left out has one.

    Args:
        text: of the option; None: all devices along fsdp.
        devices: to be used.

    Raises:
        UserError: an unknown axis or one given twice, a size that is no positive integer, or sizes that do not use the
            devices exactly.
    """
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
        raise UserError(f"--mesh {text}: needs {math.prod(sizes.values())} devices, {devices} were given.")
    return sizes.get("data", 1), sizes.get("fsdp", 1), sizes.get("tensor", 1)


def make_mesh(shape: tuple[int, int, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes `AXES`.

    Args:
        shape: devices along each axis; None: all of them along "data".
        devices: to use; None: `jax.devices()`.

    Raises:
        ValueError: where the shape does not use the devices exactly.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = (len(devices), 1, 1) if shape is None else shape
    if int(np.prod(shape)) != len(devices):
        raise ValueError(f"mesh: the shape {shape} needs {int(np.prod(shape))} devices, {len(devices)} were given.")
    # In the order that suits the wires between TPUs; elsewhere as they come.
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES)


def parse_mesh(text: str | None) -> Mesh:
    """The mesh of all devices that `--mesh` describes; arguments and errors as `mesh_shape`'s."""
    devices = jax.devices()
    return make_mesh(mesh_shape(text, len(devices)), devices)


def describe_mesh(mesh: Mesh) -> str:
    """Such as "8 device(s): data 2, fsdp 4, tensor 1"."""
    return f"{mesh.size} device(s): {', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())}"


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, accumulate: int = 1) -> None:
    """Raises `UserError` where the micro-batches of a step do not divide among the devices of `mesh`."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    micro = batch_size // accumulate
    if micro % rows:
        raise UserError(
            f"--batch-size {batch_size} in {accumulate} micro-batch(es) of {micro} sequences does not divide among the "
            f"{rows} devices of the mesh axes data and fsdp: give a multiple of {rows * accumulate}."
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch split over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(_BATCH))


def context_mesh() -> Mesh | None:
    """The mesh of ours that is set (`jax.set_mesh`), where it has several devices. Not for traced functions."""
    mesh = jax.sharding.get_mesh()
    return mesh if set(AXES) <= set(mesh.axis_names) and mesh.size > 1 else None


def local_rows(mesh: Mesh | None, count: int) -> np.ndarray:
    """Which rows of a batch of `count` this process reads: those that its devices hold, ascending; all without a mesh.

    Processes that hold parts of the same rows, along tensor, read the same ones.
    """
    if mesh is None:
        return np.arange(count)
    held = batch_sharding(mesh).addressable_devices_indices_map((count,)).values()
    return np.unique(np.concatenate([np.arange(count)[index] for index in held]))


def place_rows(mesh: Mesh | None, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The batch of which this process has its `local_rows`, laid out on the mesh; as it is without one.

    On one device too: a step takes host arrays as they are, and placing them by hand only costs time.
    """
    if mesh is None or mesh.size == 1:
        return dict(batch)
    return {name: jax.make_array_from_process_local_data(batch_sharding(mesh), x) for name, x in batch.items()}


def constrain_batch(x: jax.Array) -> jax.Array:
    """`x` with its rows split like a batch's, where a mesh of ours is set (`jax.set_mesh`); else `x` as it is.

    Told once a layer, so that the compiler gathers weights and not activations.
    """
    if not set(_BATCH) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(_BATCH))


def constrain_cache(x: jax.Array) -> jax.Array:
    """Keys or values `[..., B, S, K, H]` with rows split like a batch's, and heads over tensor where it divides them.

    So they lie where the projections leave them; without a mesh of ours, `x` as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return x
    heads = "tensor" if x.shape[-2] % mesh.shape["tensor"] == 0 else None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 4), _BATCH, None, heads, None))


def lookup(table: jax.Array, index: jax.Array, path: str, dtype: DTypeLike) -> jax.Array:
    """`table[index]` in `dtype` for `[V, D]` and `[B, T]`; NaN where an index lies beyond the table.

    Where a mesh of ours is set, the table is the parameter at `path` and lies as `RULES` say: each device looks up what
    its part of the table holds for its tokens and its neighbours' along fsdp, and rows, not the table, move.
    """
    mesh = jax.sharding.get_abstract_mesh()
    spec = param_sharding(mesh, path, table.shape).spec if set(AXES) <= set(mesh.axis_names) else PartitionSpec()
    groups = int(np.prod([mesh.shape[axis] for axis in _BATCH])) if spec else 1
    if not spec or mesh.size == 1 or index.shape[0] % groups:
        return jnp.take(table, index, axis=0, mode="fill").astype(dtype)
    over_rows, over_columns = spec

    def of_device(part: jax.Array, index: jax.Array) -> jax.Array:
        if over_columns is not None:
            index = jax.lax.all_gather(index, over_columns, axis=0, tiled=True)
        beyond = (index < 0) | (index >= table.shape[0])
        if over_rows is not None:
            index = index - jax.lax.axis_index(over_rows) * part.shape[0]
            held = (index >= 0) & (index < part.shape[0])
            rows = jnp.where(held[..., None], part[jnp.where(held, index, 0)].astype(dtype), 0)
            rows = jax.lax.psum(rows, over_rows)
        else:
            rows = part[jnp.where(beyond, 0, index)].astype(dtype)
        rows = jnp.where(beyond[..., None], jnp.nan, rows)
        if over_columns is not None:
            rows = jax.lax.all_to_all(rows, over_columns, split_axis=0, concat_axis=2, tiled=True)
        return rows

    batch = PartitionSpec(_BATCH)
    return jax.shard_map(of_device, in_specs=(spec, batch), out_specs=batch)(table, index)


def take_states(hidden: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
    """`hidden[row, position]`, `[R, D]` of `[B, T, D]` for indices `[R]` into the whole batch.

    Where a mesh of ours is set, each device gives what its rows of the batch hold, and the sum of all is everywhere: so
    R states move, and not the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    groups = int(np.prod([mesh.shape[axis] for axis in _BATCH])) if set(AXES) <= set(mesh.axis_names) else 1
    if groups == 1 or hidden.shape[0] % groups:
        return hidden[row, position]

    def of_device(part: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        row = row - jax.lax.axis_index(_BATCH) * part.shape[0]
        held = (row >= 0) & (row < part.shape[0])
        return jax.lax.psum(jnp.where(held[:, None], part[jnp.where(held, row, 0), position], 0), _BATCH)

    specs = PartitionSpec(_BATCH), PartitionSpec(), PartitionSpec()
    return jax.shard_map(of_device, in_specs=specs, out_specs=PartitionSpec())(hidden, row, position)


def param_sharding(mesh: Mesh | AbstractMesh, path: str, shape: Sequence[int]) -> NamedSharding:
    """Where the parameter at a dotted path lies, by `RULES`; a dimension that an axis does not divide is whole."""
    for pattern, axes in RULES:
        if len(axes) == len(shape) and re.fullmatch(pattern, path):
            pairs = zip(axes, shape, strict=True)
            divided = (axis if axis in mesh.shape and n % mesh.shape[axis] == 0 else None for axis, n in pairs)
            return NamedSharding(mesh, PartitionSpec(*divided))
    return replicated(mesh)


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """`param_sharding` of every leaf of a tree of arrays or shapes, by the path of its dictionaries.

    The moments of an optimiser lie like the parameters they belong to: only the dictionaries within it count.
    """

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        return param_sharding(mesh, ".".join(keys), leaf.shape)

    return jax.tree_util.tree_map_with_path(of, tree)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
