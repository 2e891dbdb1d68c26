"""Block sizes of the TPU kernels: a table of preferences, and the bytes on chip that decide among them."""

from collections.abc import Mapping
from typing import NamedTuple

LANES = 128
SLICE = 768  # columns of D that one accumulation into [rows, D] takes at a time; bounds the product's temporary

RESIDENT = 3  # blocks of tokens whose float32 dh stays on the chip all along

UNPLANNED = 4 * 2**20
"""Bytes on chip that a kernel may take beyond what `vmem_bytes` plans, an eighth of which it may take too:
temporaries of the arithmetic on logits, the transposed bias, spilled registers. The compiler took up to 3.3 MiB more.
"""

VMEM_MIB = {"2": 16, "3": 16, "4": 16, "5p": 64, "7": 64}
"""MiB of on-chip vector memory of a core, by the generation that a device kind names; 128 for others (v5e, v6e)."""


class Blocks(NamedTuple):
    """Sizes of one grid step.

    Attributes:
        tokens: rows of hidden states, a multiple of 128.
        columns: rows of the unembedding, an even multiple of `unit` in the statistics kernel.
        unit: rows of the streamed operand whose product runs beside the arithmetic on the one before.
    """

    tokens: int
    columns: int
    unit: int


Preferences = Mapping[str, tuple[Blocks, ...]]

PREFERENCES: Preferences = {
    "statistics": (
        Blocks(1024, 1024, 256),
        Blocks(1024, 512, 256),
        Blocks(512, 512, 256),
        Blocks(512, 256, 128),
        Blocks(256, 256, 128),
        Blocks(128, 256, 128),
    ),
    "curves": (
        Blocks(1024, 256, 256),
        Blocks(512, 256, 256),
        Blocks(256, 256, 256),
        Blocks(128, 128, 128),
    ),
    "rows": (
        Blocks(1024, 2048, 512),
        Blocks(1024, 1024, 512),
        Blocks(512, 1024, 512),
        Blocks(512, 768, 256),
        Blocks(512, 512, 512),
        Blocks(256, 512, 512),
        Blocks(256, 256, 128),
        Blocks(128, 128, 128),
    ),
    "d_hidden": (
        Blocks(1024, 1024, 512),
        Blocks(1024, 512, 256),
        Blocks(512, 512, 256),
        Blocks(256, 512, 256),
        Blocks(256, 256, 128),
        Blocks(128, 128, 128),
    ),
    "unembedding": (
        Blocks(1024, 1024, 512),
        Blocks(1024, 768, 512),
        Blocks(1024, 512, 512),
        Blocks(1024, 384, 512),
        Blocks(512, 512, 256),
        Blocks(512, 384, 512),
        Blocks(512, 256, 256),
        Blocks(256, 256, 128),
        Blocks(128, 128, 128),
    ),
    "statistics, saved": (Blocks(1024, 2048, 256), Blocks(1024, 1024, 256)),
    "d_hidden, saved": (Blocks(1024, 2048, 256), Blocks(1024, 1024, 256)),
    "unembedding, saved": (Blocks(2048, 1024, 256), Blocks(1024, 1024, 256)),
    "fused": (
        Blocks(512, 1024, 256),
        Blocks(512, 512, 256),
        Blocks(256, 512, 128),
        Blocks(128, 256, 128),
        Blocks(128, 128, 128),
    ),
}
"""Kernel -> blocks, largest first; the first that fits on the chip is taken.

The first of "statistics", "rows" and "unembedding" was the fastest of those profiled at D = 2304 on v6e; the next ones,
with units of 256 and more, on v7x at D of 2,560 to 7,168. A unit of 128 columns leaves half of a matrix unit of 256
idle. "rows" is the kernel of the statistics with dh, "fused" that of dh and dW together, whose `columns` are a piece of
the vocabulary (see `pieces`). "saved": tried first where the exponentials are saved, the fastest of eight on v6e.
"""


def preferred(preferences: Preferences, kernel: str, saved: bool) -> tuple[Blocks, ...]:
    """The blocks of a kernel to choose among."""
    return (*(preferences.get(f"{kernel}, saved", ()) if saved else ()), *preferences[kernel])


def vmem_bytes(
    kernel: str, blocks: Blocks, width: int, itemsize: int, *, saved: bool = False, count: int = 1, before: int = 2
) -> int:
    """On-chip bytes of a kernel. Operands and results are there twice: fetched or written while the last are in use.

    `saved`: it writes or reads saved exponentials. `count`: pieces of W that "fused" has on the chip, scales of
    "curves".
    `before`: how often "unembedding" holds the sums of earlier tokens that it starts from, with `saved`.
    """
    tokens, columns, unit = blocks
    x = tokens * width * itemsize  # hidden states [tokens, D]
    w = columns * width * itemsize  # rows of W [columns, D]
    common = [3 * (x + w) // 2 if itemsize == 4 else 0]  # float32 operands, each split into three of bfloat16
    if saved:
        common += [
            2 * tokens * columns * itemsize,  # exponentials
            2 * tokens * 8 * 4 * -(-columns // LANES),  # their references
        ]
        if kernel == "unembedding":
            common += [(before + 1) * 4 * columns * width, -4 * w]  # float32 sums in place of W and of its gradient
        if kernel == "d_hidden":
            common += [-2 * x]
    if kernel == "statistics":
        return sum(common) + sum([2 * x, 2 * w, 3 * 4 * unit * tokens])  # the last: logits of three units
    if kernel == "curves":
        logits = 3 * 4 * columns * tokens  # of this block, of the one before, and the product
        sums = (8 + 2) * 4 * 3 * count * tokens  # running sums of 8 sublanes, and their result
        return sum(common) + sum([2 * x, 2 * w, logits, sums])
    if kernel == "rows":
        return sum(common) + sum(
            [
                x,
                3 * w,  # the block before, too
                tokens * width * itemsize,  # the result
                tokens * width * 4,  # its sums
                4 * tokens * min(SLICE, width),  # a product before it is added
                4 * tokens * columns,  # logits
                (4 + 2 * itemsize) * tokens * unit,  # exponentials, rounded twice
                10 * 4 * LANES * tokens,  # columns of per-token values
            ]
        )
    if kernel == "fused":
        sums_of_hidden = 2 * RESIDENT * 4 * tokens * width  # or two blocks read and two written
        others = (count - 1) * columns * width * (4 + 4 * itemsize)  # sums, W and dW of the other pieces
        bias_sums = 2 * 4 * LANES * (count - 1) * columns
        return vmem_bytes("unembedding", blocks, width, itemsize) + sums_of_hidden + others + bias_sums
    side = tokens if kernel == "d_hidden" else columns  # of the gradient
    return sum(common) + sum(
        [
            2 * x,
            2 * w,
            2 * side * width * itemsize,  # the result
            side * width * 4,  # its sums
            4 * side * min(SLICE, width),  # a product before it is added
            2 * (4 + itemsize) * side * unit,  # logits, and dz
            4 * side * unit,  # slopes of the soft-cap
            10 * 4 * LANES * side,  # columns of per-token values
        ]
    )


def saved_bytes(itemsize: int) -> float:
    """Bytes of a saved exponential and its part of the references, which take 32 bytes for 256 columns."""
    return itemsize + 0.125


def _generation(device_kind: str) -> str:
    name = device_kind.lower().replace("tpu", "").replace(" ", "").removeprefix("v")
    return "5p" if name == "5" else name


def two_cores(device_kind: str) -> bool:
    """Whether one device is two cores with a memory of their own: v4 and v5p."""
    return _generation(device_kind) in ("4", "5p")


def buffers(device_kind: str) -> int:
    """How often the kernel of dW holds a block of earlier sums: twice, fetched while the last is used.

    On a chip with little memory once: waiting for it is some 15% of the kernel's time, half as many columns cost more.
    """
    return 2 if capacity(device_kind) > 2**26 else 1


def capacity(device_kind: str) -> int:
    """Bytes of on-chip memory that a kernel may plan with on a chip of this kind: 13/16, the rest is the compiler's."""
    name = _generation(device_kind)
    known = [mib for part, mib in VMEM_MIB.items() if name.startswith(part)]
    return (known[0] if known else 128) * 2**20 // 16 * 13


def choose(
    preferred: tuple[Blocks, ...],
    kernel: str,
    inputs: tuple[int, int, int],
    device_kind: str,
    saved: bool = False,
    count: int = 1,
) -> Blocks:
    """The first preference that fits, no taller than the tokens need; for float32 at most 512 tokens and columns.

    `inputs`: N, D and the bytes of an entry; `saved`, `count`: as of `vmem_bytes`. A float32 product takes six passes
    of the matrix units: small blocks keep them as busy, and large ones take minutes to compile. Raises
    NotImplementedError where none fits.
    """
    tokens, width, itemsize = inputs
    for blocks in preferred:
        small = itemsize == 2 or max(blocks.tokens, blocks.columns) <= 512
        needs = vmem_bytes(kernel, blocks, width, itemsize, saved=saved, before=buffers(device_kind), count=count)
        if small and needs <= capacity(device_kind):
            needed = -(-tokens // LANES) * LANES
            return blocks._replace(tokens=min(blocks.tokens, needed))
    least = vmem_bytes(kernel, preferred[-1], width, itemsize, saved=saved, count=count)
    raise NotImplementedError(
        f"the TPU kernel {kernel!r} needs {least / 2**20:.0f} MiB on chip at D = {width}, of "
        f"{capacity(device_kind) / 2**20:.0f} MiB"
    )


def pieces(blocks: Blocks, width: int, itemsize: int, device_kind: str) -> int:
    """Returns how many blocks of `blocks.columns` rows of W the fused kernel stores: 4 or 2 if they fit, else 1."""
    for count in (4, 2):
        if vmem_bytes("fused", blocks, width, itemsize, count=count) <= capacity(device_kind):
            return count
    return 1


def least_columns(itemsize: int) -> int:
    """Columns on the chip below which the fused kernel waits for dh, of which it moves 8 bytes for 6 flop a column.

    v6e has 560 flop in bfloat16 for each byte that its memory moves: 930 columns take as long as their traffic.
    Products in float32 take six times longer.
    """
    return 1024 if itemsize == 2 else 256
