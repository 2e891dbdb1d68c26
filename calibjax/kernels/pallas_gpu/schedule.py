"""Assignment of logits to multiprocessors, in an order that keeps operands in the L2 cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from calibjax.runtime.arrays import ceil_div, round_up

ROWS = 64  # tokens of a warpgroup: one wgmma's
WARPGROUPS = 2  # that multiply
TOKENS = ROWS * WARPGROUPS
TILE = (8, 64)  # of 16-bit elements, 128 bytes a row, swizzled in shared memory; TMA takes arrays of whole tiles

# Token tiles that are walked together over the vocabulary. 132 programs at a time read 16 tiles of 128 tokens and, each
# in a piece of its own, 9 of 256 columns: 9 and 11 MB at D = 2,304, about the least for tiles of this shape. The L2
# cache holds them, and W comes from memory once for each group.
_GROUP = 16
_PARTIAL_BYTES = 16 * 2**20
_DZ_BYTES = 512 * 2**20
SLICE = 64  # columns of a tile of logits that the statistics take at a time: with more, registers spill
_BYTES_A_TOKEN = 28  # of a piece, with all statistics
_TILES_LOST = 0.25  # to start and end a unit of work, in tiles of the vocabulary


class Blocks(NamedTuple):
    columns: int = 256  # of the vocabulary in a tile of logits
    depth: int = 64  # of D in a block of the ring
    stages: int = 4  # blocks in the ring: 4 of 48 KiB leave 35 of the 227 KiB of shared memory
    programs: int | None = None  # that run at once, one for each multiprocessor; by default those of the device
    chunk: int = 8192  # columns of dz that the backward pass has in memory at a time, at most


class Schedule(NamedTuple):
    """The work cut into units: a tile of tokens and a piece of the vocabulary.

    Unit u runs on program u mod `programs`. Within a group of `group` tiles tokens go fastest, then pieces.
    """

    blocks: Blocks
    token_tiles: int
    vocab_tiles: int
    group: int
    pieces: int
    programs: int

    @property
    def units(self) -> int:
        return self.token_tiles * self.pieces

    @property
    def padded_tokens(self) -> int:
        return self.token_tiles * TOKENS

    def unit(self, index: Array) -> tuple[Array, Array, Array, Array]:
        """Token tile, piece, and the first tile of the vocabulary of this piece and of the next."""
        in_group = self.group * self.pieces
        group = jax.lax.div(index, in_group)
        within = index - group * in_group
        size = jnp.minimum(self.group, self.token_tiles - group * self.group)
        piece = jax.lax.div(within, size)
        start, end = (jax.lax.div((piece + i) * self.vocab_tiles, self.pieces) for i in (0, 1))
        return group * self.group + jax.lax.rem(within, size), piece, start, end


def chunk_size(tokens: int, vocab_size: int, blocks: Blocks, saved: bool) -> int:
    """Columns of dz in memory at a time, in whole tiles: at most 8,192, and 512 MiB; with `saved` at most 1 GiB.

    For each chunk W and dW are copied and dh is read and written in float32: 8% of the time from saved exponentials,
    where no kernel runs at the same time.
    """
    limit = (2 if saved else 1) * _DZ_BYTES // (2 * max(tokens, 1))
    columns = min(limit, vocab_size) if saved else min(blocks.chunk, limit, vocab_size)
    return max(round_up(columns, blocks.columns), blocks.columns)


def multiprocessors(device_kind: str) -> int:
    """The number of multiprocessors of a Hopper GPU, by the name that its driver reports."""
    if "PCIe" in device_kind:
        return 114
    return 78 if "H20" in device_kind.split() else 132


def _longest(token_tiles: int, vocab_tiles: int, group: int, pieces: int, programs: int) -> float:
    """The work of the busiest program, in tiles of the vocabulary."""
    sizes = np.diff(np.arange(pieces + 1) * vocab_tiles // pieces) + _TILES_LOST
    groups = np.diff([*range(0, token_tiles, group), token_tiles])
    work = np.concatenate([np.repeat(sizes, count) for count in groups])
    return float(np.bincount(np.arange(work.size) % programs, work).max())


@functools.lru_cache(maxsize=256)
def choose(tokens: int, vocab_size: int, blocks: Blocks, device_kind: str) -> Schedule:
    """The schedule whose busiest program has least to do, with at most 16 MiB of partial statistics or 9 pieces."""
    token_tiles = ceil_div(tokens, TOKENS)
    vocab_tiles = ceil_div(vocab_size, blocks.columns)
    at_once = blocks.programs or multiprocessors(device_kind)
    groups = ceil_div(token_tiles, _GROUP)
    group = ceil_div(token_tiles, groups)
    least = min(ceil_div(at_once, group), vocab_tiles)  # with fewer, one wave would read more than a group
    fitting = _PARTIAL_BYTES // (_BYTES_A_TOKEN * token_tiles * TOKENS)
    candidates = range(least, max(min(vocab_tiles, fitting, 2 * at_once), least) + 1)
    pieces = min(candidates, key=lambda n: _longest(token_tiles, vocab_tiles, group, n, at_once))
    return Schedule(blocks, token_tiles, vocab_tiles, group, pieces, min(at_once, token_tiles * pieces))
