"""What a chip can do, and how many devices a topology has."""

import math
import re
from typing import Any, NamedTuple

from calibjax.runtime.errors import UserError

GIB = 2**30


class Chip(NamedTuple):
    """One chip, which is one device of JAX.

    Attributes:
        platform: "tpu" or "gpu".
        memory: bytes that a program can use. Of TPUs what libtpu 0.0.51 says where one does not fit; of GPUs 95% of
            what the vendor states: the rest is left to CUDA's context and NCCL's buffers.
        flops: bfloat16 operations a second, dense.
        bandwidth: of the device's memory, bytes a second.
        interconnect: to other devices of the slice or host, bytes a second that one device receives: half of what the
            vendors state for both directions.
        source: where the vendor states it.
    """

    platform: str
    memory: int
    flops: float
    bandwidth: float
    interconnect: float
    source: str


_CLOUD = "https://docs.cloud.google.com/tpu/docs"
CHIPS = {
    "v5e": Chip("tpu", int(15.75 * GIB), 197e12, 819e9, 200e9, f"{_CLOUD}/v5e"),
    "v5p": Chip("tpu", int(95.73 * GIB), 459e12, 2765e9, 600e9, f"{_CLOUD}/v5p"),
    "v6e": Chip("tpu", int(31.24 * GIB), 918e12, 1600e9, 400e9, f"{_CLOUD}/v6e"),
    "a100": Chip("gpu", int(0.95 * 80e9), 312e12, 2039e9, 300e9, "https://www.nvidia.com/en-us/data-center/a100/"),
    "h100": Chip("gpu", int(0.95 * 80e9), 989e12, 3350e9, 450e9, "https://www.nvidia.com/en-us/data-center/h100/"),
    "h200": Chip("gpu", int(0.95 * 141e9), 989e12, 4800e9, 450e9, "https://www.nvidia.com/en-us/data-center/h200/"),
}
"""Chips by libtpu's name of the generation; GPUs are the SXM models."""


def chips_json() -> dict[str, dict[str, Any]]:
    """The chips that `--topology` knows, by name, as plain data."""
    return {name: chip._asdict() for name, chip in CHIPS.items()}


class Topology(NamedTuple):
    """So many devices of a kind.

    Attributes:
        name: as it was given: "v5e:4x4", "h100:8".
        chip: of it.
        devices: of JAX.
    """

    name: str
    chip: Chip
    devices: int


def parse_topology(text: str) -> Topology:
    """Parses "v5e:4x4" (chips along each axis of a TPU slice) or "h100:8" (GPUs).

    Raises:
        UserError: another form, or an unknown chip.
    """
    kind, _, shape = text.partition(":")
    if kind not in CHIPS:
        raise UserError(f"--topology {text}: expected one of {', '.join(CHIPS)} before the colon, got {kind!r}.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        raise UserError(f"--topology {text}: expected the chip and its number along each axis, such as v5e:4x4.")
    chip = CHIPS[kind]
    return Topology(text, chip, math.prod(map(int, shape.split("x"))))
