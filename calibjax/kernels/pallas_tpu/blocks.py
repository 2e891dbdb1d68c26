"""Block sizes of the TPU kernels: a table of preferences, and the bytes on chip that decide among them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calibjax.runtime.arrays import ceil_div, round_up

LANES = 128
SLICE = 768  # columns of D that one accumulation into [rows, D] takes at a time; bounds the product's temporary

UNPLANNED = 4 * 2**20
"""Bytes on chip that a kernel may take beyond what `vmem_bytes` plans and an eighth of that:
temporaries of the arithmetic on logits, the transposed bias, spilled registers. The compiler took up to 3.3 MiB more.
"""

VMEM_MIB = {"2": 16, "3": 16, "4": 16, "5p": 64, "7": 64}
"""MiB of on-chip vector memory of a core, by the generation that a device kind names; 128 for others (v5e, v6e)."""


class Blocks(NamedTuple):
    tokens: int  # rows of hidden states, a multiple of 128
    columns: int  # rows of the unembedding, an even multiple of `unit` in the statistics kernel
    unit: int  # rows of the streamed operand: the product of one unit runs with the arithmetic on the one before


Preferences = Mapping[str, Sequence[tuple[int, int, int]]]

PREFERENCES: Preferences = {
    "statistics": (
        (1024, 1024, 256),
        (1024, 512, 256),
        (512, 512, 256),
        (512, 256, 128),
        (256, 256, 128),
        (128, 256, 128),
    ),
    "curves": ((1024, 256, 256), (512, 256, 256), (256, 256, 256), (128, 128, 128)),
    "expected_row": (
        (1024, 2048, 512),
        (1024, 1024, 512),
        (512, 1024, 512),
        (512, 768, 256),
        (512, 512, 512),
        (256, 512, 512),
        (256, 256, 128),
        (128, 128, 128),
    ),
    "d_hidden": (
        (1024, 1024, 512),
        (1024, 512, 256),
        (512, 512, 256),
        (256, 512, 256),
        (256, 256, 128),
        (128, 128, 128),
    ),
    "d_unembedding": (
        (1024, 1024, 512),
        (1024, 768, 512),
        (1024, 512, 512),
        (1024, 384, 512),
        (512, 512, 256),
        (512, 384, 512),
        (512, 256, 256),
        (256, 256, 128),
        (128, 128, 128),
    ),
    "statistics, saved": ((1024, 2048, 256), (1024, 1024, 256)),
    "d_hidden, saved": ((1024, 2048, 256), (1024, 1024, 256)),
    "d_unembedding, saved": ((2048, 1024, 256), (1024, 1024, 256)),
}
"""Kernel -> blocks, largest first; the first that fits on the chip is taken.

The first of "statistics", "expected_row" (statistics with dh) and "d_unembedding" was the fastest profiled on v6e at
D = 2304; the next ones, with units of 256 and more, on v7x at D of 2,560 to 7,168. A unit of 128 columns leaves half of
a matrix unit of 256 idle. "saved": tried first where the exponentials are saved, the fastest of eight on v6e.
"""


def vmem_bytes(
    kernel: str, blocks: Blocks, width: int, itemsize: int, *, saved: bool = False, count: int = 1, before: int = 2
) -> int:
    """On-chip bytes of a kernel. Operands and results are there twice: fetched or written while the last are in use.

    `saved`: it writes or reads saved exponentials. `count`: scales of "curves". `before`: copies of the sums of earlier
    tokens that "d_unembedding" starts from, with `saved`.
    """
    tokens, columns, unit = blocks
    x = tokens * width * itemsize  # hidden states [tokens, D]
    w = columns * width * itemsize  # rows of W [columns, D]
    parts = [3 * (x + w) // 2] if itemsize == 4 else []  # float32 operands, each split into three of bfloat16
    if saved:
        parts += [
            2 * tokens * columns * itemsize,  # exponentials
            2 * tokens * 8 * 4 * ceil_div(columns, LANES),  # their references
        ]
    if saved and kernel == "d_unembedding":
        parts += [(before + 1) * 4 * columns * width, -4 * w]  # float32 sums in place of W and of its gradient
    if saved and kernel == "d_hidden":
        parts += [-2 * x]
    if kernel == "statistics":
        parts += [2 * x, 2 * w, 3 * 4 * unit * tokens]  # the last: logits of three units
    elif kernel == "curves":
        logits = 3 * 4 * columns * tokens  # of this block, of the one before, and the product
        sums = (8 + 2) * 4 * 3 * count * tokens  # running sums of 8 sublanes, and their result
        parts += [2 * x, 2 * w, logits, sums]
    elif kernel == "expected_row":
        parts += [
            x,
            3 * w,  # with the block before
            tokens * width * itemsize,  # the result
            tokens * width * 4,  # its sums
            4 * tokens * min(SLICE, width),  # a product before it is added
            4 * tokens * columns,  # logits
            (4 + 2 * itemsize) * tokens * unit,  # exponentials, rounded twice
            10 * 4 * LANES * tokens,  # columns of per-token values
        ]
    else:
        side = tokens if kernel == "d_hidden" else columns  # of the gradient
        parts += [
            2 * x,
            2 * w,
            2 * side * width * itemsize,  # the result
            side * width * 4,  # its sums
            4 * side * min(SLICE, width),  # a product before it is added
            2 * (4 + itemsize) * side * unit,  # logits, and dz
            4 * side * unit,  # slopes of the soft-cap
            10 * 4 * LANES * side,  # columns of per-token values
        ]
    return sum(parts)


def capacity(device_kind: str) -> int:
    """Bytes of on-chip memory that a kernel may plan with on a chip of this kind: 13/16, the rest is the compiler's."""
    name = device_kind.lower().replace("tpu", "").replace(" ", "").removeprefix("v")
    name = "5p" if name == "5" else name
    known = [mib for part, mib in VMEM_MIB.items() if name.startswith(part)]
    return (known[0] if known else 128) * 2**20 // 16 * 13


def buffers(device_kind: str) -> int:
    """Copies of a block of earlier sums that the kernel of dW has on chip: two, one fetched while the other is used.

    One on a chip with little memory: waiting for it is some 15% of the kernel's time, half as many columns cost more.
    """
    return 2 if capacity(device_kind) > 2**26 else 1


def choose(
    preferences: Preferences,
    kernel: str,
    sizes: tuple[int, int, int],
    device_kind: str,
    saved: bool = False,
    count: int = 1,
) -> Blocks:
    """The first preference that fits, no taller than the tokens need; for float32 at most 512 tokens and columns.

    `sizes`: N, D and the bytes of an entry; `saved`, `count`: as in `vmem_bytes`. A float32 product takes six passes:
    small blocks keep the matrix units as busy and compile sooner. Raises NotImplementedError where none fits.
    """
    tokens, width, itemsize = sizes
    tried_first = preferences.get(f"{kernel}, saved", ()) if saved else ()
    limit = capacity(device_kind)
    needs = 0
    for blocks in (Blocks(*sizes) for sizes in (*tried_first, *preferences[kernel])):
        needs = vmem_bytes(kernel, blocks, width, itemsize, saved=saved, before=buffers(device_kind), count=count)
        small = itemsize == 2 or max(blocks.tokens, blocks.columns) <= 512
        if small and needs <= limit:
            return blocks._replace(tokens=min(blocks.tokens, round_up(tokens, LANES)))
    memory = f"{needs / 2**20:.0f} MiB on chip at D = {width}, of {limit / 2**20:.0f} MiB"
    raise NotImplementedError(f"the TPU kernel {kernel!r} needs {memory}")
