"""What a chip can do, and how many devices a topology has."""

import math
import re
from typing import NamedTuple

from calibjax.runtime.errors import UserError

GIB = 2**30


class Chip(NamedTuple):
    """One chip, which is one device of JAX.

    Attributes:
        platform: "tpu" or "gpu".
        memory: bytes that a program can use. Of TPUs what libtpu 0.0.51 reports where a step does not fit; of GPUs 95%
            of what the vendor states: the rest is left to CUDA's context and NCCL's buffers.
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


class Topology(NamedTuple):
    """So many devices of a kind.

    Attributes:
        name: of the slice: "v5e:4x4", "h100:8".
        chip: of it.
        devices: of JAX.
    """

    name: str
    chip: Chip
    devices: int


def parse_topology(text: str) -> Topology:
    """Parses "v5e:4x4" (chips along each axis), Google Cloud's "v5e-16", "v5litepod-16" or "v5p-32", or "h100:8".

    Raises:
        UserError: another form, or an unknown chip.
    """
    kind, sign, shape = re.fullmatch(r"([^:-]*)([:-]?)(.*)", text, flags=re.S).groups()  # pyright: ignore
    kind = {"v5litepod": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        raise UserError(f"--topology {text}: expected one of {', '.join(CHIPS)}, got {kind!r}.")
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", shape):
        raise UserError(f"--topology {text}: expected the chip and its number, such as v5e-16, v5e:4x4 or h100:8.")
    chip = CHIPS[kind]
    if sign == "-" and chip.platform == "tpu":
        shape = _slice(kind, int(shape)) if shape.isdigit() else shape
    return Topology(f"{kind}:{shape}", chip, math.prod(map(int, shape.split("x"))))


def _slice(kind: str, number: int) -> str:
    """The chips along each axis of the slice that Google Cloud calls `kind-number`, as square as can be.

    The number is that of chips, of v5p that of cores, of which a chip has two.
    """
    axes = [1, 1, 1] if kind == "v5p" else [1, 1]
    number = number // 2 if kind == "v5p" else number
    while math.prod(axes) < number:
        axes[axes.index(min(axes), 0)] *= 2
    return "x".join(map(str, sorted(axes, reverse=kind == "v5p")))
