"""TPU kernel of the statistics at K scales that all tokens have: three sums per scale, of one logit each.

The layout is that of `statistics`: logits [columns, tokens], running values [8, tokens] for each sum, merged over their
eight sublanes at the end. The vector unit is the limit: six operations for a logit and scale, 97% of its slots on v6e,
where the product takes 13% of the matrix units' time. A loop over groups of tokens forms the logits of one block of the
vocabulary beside the sums of the block before.

With scales in octaves (`stats.octaves`) an exponential is the square of the one an octave below, and the sums of one
chain of octaves stay in registers while the columns of the block pass. With an exponential for each scale, as without
octaves, the kernel takes 14% longer (static estimate, `kernels/RESULTS.md`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels.contract import ForwardRequest, ForwardResult, Inputs, Options
from calibjax.kernels.logit_cotangents import LOG2_E
from calibjax.kernels.pallas_tpu import common, running
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes
from calibjax.kernels.softcap import softcap_unit
from calibjax.kernels.stats import FLOOR, Moments, octaves

SUMS = ("weight", "first", "second")


class Refs(NamedTuple):
    """References of the kernel.

    Attributes:
        at_scales: [3 K, tokens], the result of `sums`.
        z: [2, columns, tokens], logits of this block and of the one before.
        sums: [3, K, 8, tokens], running `SUMS` at each scale.
        state: running values [8, tokens], see `running.states`.
    """

    tokens: Any
    hidden: Any
    unembedding: Any
    moments: Any
    at_scales: Any
    z: Any
    sums: Any
    state: Any
    bias: Any = None


def _kernel(refs: Refs, *, options: Options, powers: tuple[float, ...], vocab_size: int) -> None:
    step, last = pl.program_id(1), pl.num_programs(1) - 1
    _, columns, tokens = refs.z.shape
    axes = common.Axes.of(vocab_size, refs.hidden.shape[1])
    group = 2 * LANES if tokens % (2 * LANES) == 0 else LANES

    @pl.when(step == 0)
    def _():
        refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)
        for name, ref in refs.state.items():
            ref[...] = running.initial(name, ref.shape)

    @pl.loop(0, tokens // group)
    def _(i):
        start = pl.multiple_of(i * group, group)
        rows = axes.rows(refs.unembedding, slice(None))
        z = common.product(options, rows, refs.hidden[pl.ds(start, group), :], (axes.width, 1))
        if refs.bias is not None:
            turned = jnp.broadcast_to(refs.bias[...], (LANES, columns)).T
            z = z + jnp.concatenate([turned] * (group // LANES), axis=1)
        for offset in range(0, group, LANES):
            _absorb(refs, powers, pl.ds(start + offset, LANES), step - 1, vocab_size)
        refs.z[step % 2, :, pl.ds(start, group)] = common.softcapped(options, z)

    pl.when(step == last)(lambda: _write(refs, powers, vocab_size))


def _absorb(refs: Refs, powers: tuple[float, ...], lanes: Any, block: Array, vocab_size: int) -> None:
    """Adds the logits of 128 tokens and a block of the vocabulary; of block −1, before the first, none exist."""
    columns = refs.z.shape[1]
    z = refs.z.at[(block + 2) % 2, :, lanes]
    start = block * columns
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    count = jnp.where(block < 0, 0, vocab_size - start) - sublane
    state = {name: ref[:, lanes] for name, ref in refs.state.items()}
    places = range(0, columns, 8)
    pieces = [jnp.where(count > k, common.finite(z[k : k + 8, :], refs.bias is not None), FLOOR) for k in places]
    new = running.with_best(state, pieces, places, start)
    if "target" in state:
        target = jnp.broadcast_to(refs.tokens[1:2, lanes], (8, LANES)).astype(jnp.int32) - sublane - start
    for k in places:
        raw = jnp.where(count > k, z[k : k + 8, :], 0.0)
        if "total" in state:
            new["total"] = new["total"] + raw
        if "target" in state:
            new["target"] = jnp.where(target == k, raw, new["target"])
    for name, ref in refs.state.items():
        ref[:, lanes] = new[name]
    for k, piece in zip(places, pieces, strict=True):
        z[k : k + 8, :] = piece - new["best"]
    levels = octaves(powers)
    chains = len(powers) // levels
    for first in range(chains):
        nodes = range(first, len(powers), chains)
        moved = [_moved(refs, lanes, node, state["best"] - new["best"], powers[node]) for node in nodes]
        added = [[jnp.zeros((8, LANES), jnp.float32)] * len(SUMS)] * levels
        for k in places:
            u = z[k : k + 8, :]
            e = jnp.exp2(u * powers[first])
            for level in range(levels):
                moment = e * u
                added[level] = [x + y for x, y in zip(added[level], (e, moment, moment * u), strict=True)]
                e = e * e
        for node, old, more in zip(nodes, moved, added, strict=True):
            for i, name in enumerate(SUMS):
                refs.sums[i, node, :, lanes] = old[name] + more[i]


def _moved(refs: Refs, lanes: Any, node: int, delta: Array, power: float) -> dict[str, Array]:
    """The running sums at a scale, relative to another reference; `delta`: old − new."""
    return running.moved({name: refs.sums[i, node, :, lanes] for i, name in enumerate(SUMS)}, delta, power)[0]


def _write(refs: Refs, powers: tuple[float, ...], vocab_size: int) -> None:
    """The moments of a token from those of its eight sublanes."""
    best = refs.state["best"][...]
    top = jnp.max(best, axis=0, keepdims=True)
    for node, power in enumerate(powers):
        moved = _moved(refs, slice(None), node, best - top, power)
        for i, name in enumerate(SUMS):
            row = i * len(powers) + node
            refs.at_scales[row : row + 1, :] = jnp.sum(moved[name], axis=0, keepdims=True)
    moments = {"max_logit": top}
    for name in ("total", "target"):
        if name in refs.state:
            moments[name] = jnp.sum(refs.state[name][...], axis=0, keepdims=True)
    if "argmax" in refs.state:
        moments["argmax"] = running.lowest(refs.state["argmax"][...], best == top, vocab_size)
    running.write(refs.moments, moments)


def moments(request: ForwardRequest, inputs: Inputs, blocks: Blocks, interpret: Any) -> ForwardResult:
    """The moments of the whole vocabulary with `options.scales`: `weight`, `first` and `second` are [N, K]."""
    options, needed, _ = request
    hidden, unembedding, bias, _, targets, _ = inputs
    assert options.scales is not None
    (tokens, width), vocab_size, itemsize = hidden.shape, unembedding.shape[0], hidden.dtype.itemsize
    block, columns, unit = blocks.tokens, blocks.columns, softcap_unit(options.softcap)
    powers = tuple(scale * (LOG2_E * unit) for scale in options.scales)
    count = pl.cdiv(vocab_size, columns)
    grid = (pl.cdiv(tokens, block), count + 1)
    axes = common.Axes.of(vocab_size, width)

    def of_step(_: Any, j: Any) -> Any:
        return jnp.minimum(j, count - 1)

    def per_token(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, block), lambda i, j: (0, i))

    ids = jnp.zeros((tokens,), jnp.float32) if targets is None else common.pack_ids(targets)
    operands: common.Operands = {
        "tokens": (common.pack([jnp.zeros_like(ids), ids]), per_token(8)),
        "hidden": (hidden, pl.BlockSpec((block, width), lambda i, j: (i, 0))),
        "unembedding": (axes.ordered(unembedding), axes.block(columns, width, of_step)),
    }
    if bias is not None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, of_step(i, j))))
    nodes = len(powers)
    rows = -(-len(SUMS) * nodes // 8) * 8
    names = [name for name in running.states(needed) if name not in SUMS]
    results = common.pallas(
        functools.partial(_kernel, options=options, powers=powers, vocab_size=vocab_size),
        functools.partial(running.named, Refs),
        common.Launch(
            name="calibjax_curves",
            grid=grid,
            vmem=vmem_bytes("curves", blocks, width, itemsize, count=nodes),
            flops=2 * tokens * width * vocab_size,
            bytes_accessed=(tokens + grid[0] * vocab_size) * width * itemsize,
            exponentials=common.exponentials(options, tokens, vocab_size) * nodes // octaves(powers),
            interpret=interpret,
        ),
        operands,
        {
            "moments": (jax.ShapeDtypeStruct((8, tokens), jnp.float32), per_token(8)),
            "at_scales": (jax.ShapeDtypeStruct((rows, tokens), jnp.float32), per_token(rows)),
        },
        {
            "z": pltpu.VMEM((2, columns, block), jnp.float32),
            "sums": pltpu.VMEM((len(SUMS), nodes, 8, block), jnp.float32),
            **{f"state_{name}": pltpu.VMEM((8, block), running.dtype(name)) for name in names},
        },
    )
    of_tokens = dict(zip(running.OUTPUTS, results["moments"], strict=False))
    at_scales = results["at_scales"][: len(SUMS) * nodes].reshape(len(SUMS), nodes, tokens)
    weight, first, second = (x.T * unit**power for power, x in enumerate(at_scales))
    return ForwardResult(
        Moments(
            max_logit=of_tokens["max_logit"] * unit,
            argmax=of_tokens["argmax"].astype(jnp.int32) if "argmax" in needed else None,
            weight=weight,
            first=first if "first" in needed else None,
            second=second if "second" in needed else None,
            total=of_tokens["total"] * unit if "total" in needed else None,
            target=of_tokens["target"] * unit if "target" in needed else None,
        )
    )
