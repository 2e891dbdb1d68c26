"""The mesh: axes by name, and where a batch and the frozen weights lie on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
"""Mesh axes. Batches are split over data and fsdp; weights are whole on every device."""


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
    return Mesh(np.asarray(devices).reshape(shape), AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch split over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
