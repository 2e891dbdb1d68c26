"""Chips that a run can be planned for, and topologies of them."""

import math
import re
from typing import NamedTuple

from calibjax.runtime.errors import UserError

GIB = 2**30


class Chip(NamedTuple):
    """One chip, which is one device of JAX: its platform, "tpu" or "gpu", and what a program can use of it.

    `memory` is in bytes: of TPUs what libtpu 0.0.51 reports where a step does not fit; of GPUs 95% of what the vendor
    states, as CUDA and NCCL take the rest. Per second: bfloat16 `flops`, dense; `bandwidth`, bytes of its memory;
    `interconnect`, bytes received from the other devices, half of what vendors state for both directions. A slice of
    TPUs has `axes` axes and at most `largest` chips.
    """

    platform: str
    memory: int
    flops: float
    bandwidth: float
    interconnect: float
    axes: int = 1
    largest: int = 10**5


CHIPS = {  # as stated at docs.cloud.google.com/tpu/docs/v5e and nvidia.com/en-us/data-center/h100, and so on
    "v5e": Chip("tpu", int(15.75 * GIB), 197e12, 819e9, 200e9, axes=2, largest=256),
    "v5p": Chip("tpu", int(95.73 * GIB), 459e12, 2765e9, 600e9, axes=3, largest=8960),
    "v6e": Chip("tpu", int(31.24 * GIB), 918e12, 1600e9, 400e9, axes=2, largest=256),
    "a100": Chip("gpu", int(0.95 * 80e9), 312e12, 2039e9, 300e9),
    "h100": Chip("gpu", int(0.95 * 80e9), 989e12, 3350e9, 450e9),
    "h200": Chip("gpu", int(0.95 * 141e9), 989e12, 4800e9, 450e9),
}
"""Chips by libtpu's name of the generation; GPUs are the SXM models."""


class Topology(NamedTuple):
    """The name of a slice or host ("v5e:4x4", "h100:8"), its chip, and the number of its devices."""

    name: str
    chip: Chip
    devices: int


def parse_topology(text: str) -> Topology:
    """Parses "v5e:4x4" (chips along each axis), Google Cloud's "v5e-16", "v5litepod-16" or "v5p-32", or "v5e:8"."""
    kind, sign, shape = re.fullmatch(r"([^:-]*)([:-]?)(.*)", text, flags=re.S).groups()  # pyright: ignore
    kind = {"v5litepod": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        raise UserError(f"--topology {text}: expected one of {', '.join(CHIPS)}, got {kind!r}.")
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", shape):
        raise UserError(f"--topology {text}: expected the chip and its number, such as v5e-16, v5e:4x4 or h100:8.")
    chip = CHIPS[kind]
    if chip.platform == "gpu":
        return Topology(f"{kind}:{shape}", chip, math.prod(map(int, shape.split("x"))))
    cores = 2 if kind == "v5p" and sign == "-" and shape.isdigit() else 1  # Google Cloud's name counts cores
    lengths = [int(length) for length in shape.split("x")]
    chips = math.prod(lengths) // cores
    example = "x".join(["4", "4", "12"][: chip.axes])
    if shape.isdigit():  # as Google Cloud's slices: as square as can be
        lengths = [1] * chip.axes
        while math.prod(lengths) < chips:
            lengths[lengths.index(min(lengths))] *= 2
        lengths.sort(reverse=kind == "v5p")
        if math.prod(lengths) * cores != int(shape):
            raise UserError(f"--topology {text}: no power of two of chips; give those of each axis ({kind}:{example}).")
    has_whole_hosts = all(length == 1 or length % 2 == 0 for length in lengths[:2])  # a host has 2 x 2 chips
    if len(lengths) != chip.axes or not has_whole_hosts or chips > chip.largest:
        expected = f"{chip.axes} axes, the first two of 1 or an even number, and at most {chip.largest:,} chips"
        raise UserError(f"--topology {text}: no such slice; {kind} has {expected}, such as {kind}:{example}.")
    return Topology(f"{kind}:{'x'.join(map(str, lengths))}", chip, chips)
