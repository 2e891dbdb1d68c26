"""The platform that a program is compiled for."""

from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh


class Platform(NamedTuple):
    name: str  # "cpu", "gpu" or "tpu"
    device_kind: str  # the vendor's name of the chip, such as "TPU v5 lite"


def platform(mesh: Mesh | AbstractMesh | None = None) -> Platform:
    """The devices of `mesh`, or of the mesh in context (`jax.set_mesh`), or else the default device.

    A mesh comes first because its devices need not be attached: a program for TPUs can be compiled on a CPU machine.
    """
    device = (jax.sharding.get_abstract_mesh() if mesh is None else mesh.abstract_mesh).abstract_device
    if device is None:
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    name = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return Platform(name, device.device_kind)
