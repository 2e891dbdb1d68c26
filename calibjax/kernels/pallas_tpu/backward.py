"""The TPU kernels of the backward pass: of dh, and of dW and db.

The sums of dh [tokens, D] stay on chip while the vocabulary streams past, those of dW [columns, D] while the tokens do.
Each kernel computes the logits again, or reads their saved exponentials, forms dz (`logit_cotangents`) block by block
in float32, rounds it to the inputs' dtype, and multiplies at once. Logits and dz are [columns, tokens]: per-token
values lie along lanes, and dz is the left operand of dzᵀ·h; that of dz·W after a transposition in registers. No sum is
split between grid steps that could run in another order: results are the same from run to run.

Saved exponentials (`Exponentials`) have the inputs' dtype. bfloat16 has the range of float32, and rounds by up to 2⁻⁸,
as dz is rounded for its products once more. At a one-hot that is not enough: in p − 1 all digits of p can cancel. There
dz is computed from the exact logit.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from calibjax.kernels.contract import Cotangents, Gradients, Inputs, Options, Refs
from calibjax.kernels.logit_cotangents import LOG2_E, dz_of_logits, token_values
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes
from calibjax.kernels.stats import slope_in_units

Places = dict[str, int]  # name of a per-token value -> its row in the packed array


class Exponentials(NamedTuple):
    """exp(s (z − reference)) of all logits; z and reference in units of the soft-cap.

    Attributes:
        values: in the inputs' dtype, transposed. Under a soft-cap, where a logit's slope is needed but its exponential
            is below `common.LEAST`, the negative slope is stored instead: (z/cap)² − 1.
        references: float32, eight rows for each unit of columns: row v mod 8 is that of column v. There may be more
            rows than V needs.
        known: pairs of ids int32 [N] and z float32 [N], of columns that may have a one-hot; ids outside [0, V) match
            nothing.
    """

    values: Float[Array, "V N"]
    references: Float[Array, "R N"]
    known: tuple[tuple[Int[Array, " N"], Float[Array, " N"]], ...]

    def operands(
        self, columns: int, tokens: int, unit: int, index: Callable[..., tuple[Any, Any]]
    ) -> dict[str, tuple[Array, Any]]:
        """ "saved" and "references" of a kernel, by blocks of `columns` by `tokens` with that `index`, and references
        of `unit` columns each.

        Where a block has fewer columns than a unit, several have the same references.
        """

        def of_unit(*step: Any) -> tuple[Any, Any]:
            column, token = index(*step)
            return column // max(unit // columns, 1), token

        rows = 8 * -(-columns // unit)
        return {
            "saved": (self.values, pl.BlockSpec((columns, tokens), index)),
            "references": (self.references, pl.BlockSpec((rows, tokens), of_unit)),
        }


def dz_of_unit(
    options: Options, reference: Array, values: Mapping[str, Array]
) -> Callable[[Array, Callable[[int], Array]], Array]:
    """`(saved, hit) -> dz` for a unit of columns, all of the shape of its pieces.

    `saved` are `Exponentials.values` in float32, `hit` says whether a column is the k-th known one. `values` are the
    per-token values, see `token_values`; "dz{k}" is dz at the k-th of the known columns.
    """
    # exp(s reference − lse), and where p has no other use, times the cotangent `softmax`.
    factor = jnp.exp2(reference * values["scale"] - values["log_normalizer"])
    if "softmax" in values and "centred" not in values:
        factor, values = factor * values["softmax"], {**values, "softmax": jnp.ones_like(factor)}
    needs_logits = options.softcap is not None or "centred" in values
    inverse = LOG2_E / values["scale"] if needs_logits else None

    def dz_of(saved: Array, hit: Callable[[int], Array]) -> Array:
        p, slope = saved * factor, None
        z = p
        if inverse is not None:
            # Off by up to 2⁻⁸/s, and any number where p is 0.
            size = jnp.abs(saved)
            z = jnp.log(size) * inverse + reference
            if options.softcap is not None:
                z = jnp.maximum(z, -1.0)
                slope = jnp.where(saved < 0.0, size, slope_in_units(z, options.softcap))
                p = jnp.maximum(saved, 0.0) * factor
        dz, k = dz_of_logits(options, z, values.get, hit, p, slope), 0
        while (exact := values.get(f"dz{k}")) is not None:
            dz = jnp.where(hit(k), exact, dz)
            k += 1
        return dz

    return dz_of


def packed(
    options: Options, inputs: Inputs, cotangents: Cotangents, saved: Exponentials | None = None
) -> tuple[Array, Places]:
    """`token_values` as rows of one array, and the row of each name.

    With `saved` "dz{k}", dz at the k-th of its known columns, takes the place of "g{k}".
    """
    values, one_hots = token_values(options, inputs, cotangents), cotangents.one_hots
    if saved is not None:
        values = {name: x for name, x in values.items() if not name.startswith("g")}
        for k, (ids, z) in enumerate(saved.known):
            dz = dz_of_logits(options, z, values.get, lambda _: jnp.array(False))
            values[f"dz{k}"] = sum((jnp.where(other == ids, g, 0.0) for other, g in one_hots), dz)
        one_hots = saved.known
    values |= {f"ids{k}": common.pack_ids(ids) for k, (ids, _) in enumerate(one_hots)}
    if inputs.valid is not None:
        values["valid"] = inputs.valid
    return common.pack(list(values.values())), {name: row for row, name in enumerate(values)}


def pipeline(unit: int, multiply: Callable, differentiate: Callable, accumulate: Callable, count: int) -> None:
    """Three stages at a time: the logits of unit c + 1, the derivatives of unit c, the sums of unit c − 1."""
    units = -(-count // unit)
    counts = [min(unit, count - c * unit) for c in range(units)]
    multiply(0)
    for c in range(units):
        if c + 1 < units:
            multiply(c + 1)
        differentiate(c, counts[c])
        if c:
            accumulate(c - 1, counts[c - 1])
    accumulate(units - 1, counts[-1])


def write_dz(
    options: Options,
    places: Places,
    tokens_ref: Any,
    z_ref: Any,
    dz_ref: Any,
    bias_sums_ref: Any,
    *,
    start: Array | int,
    counts: tuple[int, int],
    references: Any = None,
    unit: int = 0,
) -> None:
    """Writes dz [columns, tokens] of transposed logits, and adds it to `bias_sums_ref` [columns, 128] where given.

    The first column has the index `start`; `counts` of columns and of tokens exist, and dz is 0 beyond them. With
    `references`, of `unit` columns each, `z_ref` has `Exponentials.values`.
    """
    columns, tokens = counts
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    size, width = z_ref.shape
    height = 16 if size % 16 == 0 else 8
    for group in range(0, min(tokens, width), LANES):
        lanes = pl.ds(group, LANES)

        def value(name: str, lanes=lanes) -> Array:
            row = places[name]
            x = jnp.broadcast_to(tokens_ref[row : row + 1, lanes], (8, LANES))
            return x.astype(jnp.int32) - sublane if name.startswith("ids") else x

        per_token = {name: value(name) for name in places if name != "valid"}
        dz_of = None
        for k in range(0, size, height):
            pieces = []
            if references is not None and k % unit == 0:
                dz_of = dz_of_unit(options, references[k // unit * 8 : k // unit * 8 + 8, lanes], per_token)
            rows = z_ref[k : k + height, lanes].astype(jnp.float32)
            for half in range(k, k + height, 8):

                def hit(index: int, place=half, per_token=per_token) -> Array:
                    return per_token[f"ids{index}"] - start == place

                z = rows[half - k : half - k + 8]
                if dz_of is None:
                    dz = dz_of_logits(options, common.softcapped(options, z), per_token.get, hit)
                else:
                    dz = dz_of(z, hit)
                dz = dz if tokens - group >= LANES else jnp.where(lane < tokens - group, dz, 0.0)
                dz = dz if columns - half >= 8 else jnp.where(sublane < columns - half, dz, 0.0)
                if bias_sums_ref is not None:
                    bias_sums_ref[half : half + 8, :] += dz
                pieces.append(dz)
            total = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=0)
            dz_ref[k : k + height, lanes] = total.astype(dz_ref.dtype)


def _d_hidden_kernel(
    refs: Refs, *, options: Options, vocab_size: int, blocks: Blocks, unit_saved: int, places: Places
) -> None:
    # With `saved` [columns, tokens] there are no `hidden` and `z`.
    columns, unit = blocks.columns, blocks.unit
    step, steps = pl.program_id(1), pl.num_programs(1)
    tokens, width = refs.sums.shape
    axes = common.Axes.of(vocab_size, width)

    @pl.when(step == 0)
    def _():
        refs.sums[...] = jnp.zeros(refs.sums.shape, jnp.float32)

    def multiply(c: int):
        if refs.saved is not None:
            return
        part = pl.ds(c * unit, unit)
        z = common.product(options, axes.rows(refs.unembedding, part), refs.hidden[...], (axes.width, 1))
        refs.z[c % 2] = z if refs.bias is None else z + common.turned_bias(refs.bias[:, part], tokens)

    def differentiate(c: int, count: int):
        references = None
        if refs.saved is not None:
            references = refs.references.at[pl.ds(c * unit // unit_saved * 8, -(-unit // unit_saved) * 8), :]
        write_dz(
            options,
            places,
            refs.tokens,
            refs.z.at[c % 2] if refs.saved is None else refs.saved.at[pl.ds(c * unit, unit), :],
            refs.dz.at[c % 2],
            None,
            start=step * columns + c * unit,
            counts=(count, tokens),
            references=references,
            unit=unit_saved,
        )

    def accumulate(c: int, count: int):
        size = min(unit, -(-count // LANES) * LANES)
        dz = refs.dz[c % 2, :size, :].T
        for part in common.slices(width):
            w = common.existing(axes.rows(refs.unembedding, pl.ds(c * unit, size), part), count, axes.vocab)
            refs.sums[:, part] += common.product(options, dz, w, (1, axes.vocab))

    stages = functools.partial(pipeline, unit, multiply, differentiate, accumulate)
    common.walk_blocks(vocab_size, columns, step, stages)

    @pl.when(step == steps - 1)
    def _():
        sums = refs.sums[...]
        if "valid" in places:
            sums = jnp.where(common.column(refs.tokens, places["valid"])[:, :1] > 0.0, sums, 0.0)
        refs.d_hidden[...] = sums.astype(refs.d_hidden.dtype)


def d_hidden(
    options: Options,
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Exponentials | None,
    sizes: tuple[Blocks, int],
    interpret: Any,
) -> Array:
    """dh [N, D] in the dtype of the hidden states; 0 where a token is not valid.

    `saved`: see `forward.moments`. `sizes`: the blocks, and how many columns share one reference of `saved`.
    """
    blocks, unit_saved = sizes
    hidden, unembedding, bias = inputs[:3]
    (tokens, width), vocab_size = hidden.shape, unembedding.shape[0]
    blocks = blocks._replace(columns=min(blocks.columns, -(-vocab_size // blocks.unit) * blocks.unit))
    values, places = packed(options, inputs, cotangents, saved)
    block, columns, dtype = blocks.tokens, blocks.columns, hidden.dtype
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    x_spec = pl.BlockSpec((block, width), lambda i, j: (i, 0))
    operands: common.Operands = {"tokens": (values, pl.BlockSpec((len(values), block), lambda i, j: (0, i)))}
    if saved is None:
        operands["hidden"] = (hidden, x_spec)
    else:
        operands |= saved.operands(columns, block, unit_saved, lambda i, j: (j, i))
    axes = common.Axes.of(vocab_size, width)
    operands["unembedding"] = (axes.ordered(unembedding), axes.block(columns, width, lambda i, j: j))
    if bias is not None and saved is None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda i, j: (0, j)))
    static = {"options": options, "vocab_size": vocab_size, "blocks": blocks, "places": places}
    scratch = {
        "dz": pltpu.VMEM((2, blocks.unit, block), dtype),
        "sums": pltpu.VMEM((block, width), jnp.float32),
    }
    if saved is None:
        scratch["z"] = pltpu.VMEM((2, blocks.unit, block), jnp.float32)
    return common.pallas(
        functools.partial(_d_hidden_kernel, **static, unit_saved=unit_saved),
        operands,
        {"d_hidden": (jax.ShapeDtypeStruct(hidden.shape, dtype), x_spec)},
        scratch,
        vmem_bytes("d_hidden", blocks, width, dtype.itemsize, saved=saved is not None),
        name="calibjax_d_hidden",
        grid=grid,
        interpret=interpret,
        cost_estimate=common.cost(
            options,
            inputs,
            products=2 if saved is None else 1,
            rows=2 * tokens + grid[0] * vocab_size,
            other_bytes=0 if saved is None else saved.values.size * dtype.itemsize,
        ),
    )["d_hidden"]


def _d_unembedding_kernel(
    refs: Refs, *, options: Options, lengths: tuple[int, int], blocks: Blocks, unit_saved: int, places: Places
) -> None:
    # With `saved` [columns, tokens] there are no `unembedding` and `z`. Without `sums`, `d_unembedding` is float32 and
    # starts as `before`. `lengths`: N and V.
    block, columns, unit = blocks
    width = refs.hidden.shape[1]
    step, steps = pl.program_id(1), pl.num_programs(1)
    start = pl.program_id(0) * columns
    sums = refs.d_unembedding if refs.sums is None else refs.sums
    axes = common.Axes.of(lengths[1], width)

    @pl.when(step == 0)
    def _():
        for ref in (refs.sums, refs.bias_sums):
            if ref is not None:
                ref[...] = jnp.zeros(ref.shape, jnp.float32)
        if refs.before is not None:
            sums[...] = refs.before[...]

    if refs.clears is not None:
        # A token that does not count may hold NaN, and 0·NaN would reach every row of dW.
        @pl.when(refs.clears[step] > 0)
        def _():
            counts = common.column(refs.tokens, places["valid"])[:, :1] > 0.0
            refs.hidden[...] = jnp.where(counts, refs.hidden[...], jnp.zeros_like(refs.hidden))

    def multiply(c: int):
        if refs.saved is not None:
            return
        z = common.product(options, refs.unembedding[...], refs.hidden[pl.ds(c * unit, unit), :], (axes.width, 1))
        refs.z[c % 2] = z if refs.bias is None else z + common.turned_bias(refs.bias[...], unit)

    def differentiate(c: int, count: int):
        lanes = pl.ds(c * unit, unit)
        write_dz(
            options,
            places,
            refs.tokens.at[:, lanes],
            refs.z.at[c % 2] if refs.saved is None else refs.saved.at[:, lanes],
            refs.dz.at[c % 2],
            refs.bias_sums,
            start=start,
            counts=(columns, count),
            references=refs.references,
            unit=unit_saved,
        )

    def accumulate(c: int, count: int):
        if sums is None:
            return
        size = min(unit, -(-count // LANES) * LANES)
        for part in common.slices(width):
            x = common.existing(refs.hidden[pl.ds(c * unit, size), part], count)
            axes.add(options, sums, part, refs.dz[c % 2, :, :size], x)

    stages = functools.partial(pipeline, unit, multiply, differentiate, accumulate)
    common.walk_blocks(lengths[0], block, step, stages)

    @pl.when(step == steps - 1)
    def _():
        if refs.sums is not None:
            refs.d_unembedding[...] = refs.sums[...].astype(refs.d_unembedding.dtype)
        if refs.d_bias is not None:
            refs.d_bias[...] = jnp.sum(refs.bias_sums[...].T, axis=0, keepdims=True)


def d_unembedding(
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    saved: Exponentials | None,
    into: Gradients | None,
    sizes: tuple[Blocks, int, int],
    interpret: Any,
) -> Gradients:
    """dW [V, D] in the dtype of the unembedding and db float32 [V], where wanted; added to `into`, dW in float32.

    `saved`: see `forward.moments`. `sizes`: the blocks, how many columns share one reference of `saved`, and how often
    a block of `into` is on the chip.
    """
    blocks, unit_saved, buffers = sizes
    hidden, unembedding, bias, _, _, valid = inputs
    (tokens, width), vocab_size, dtype = hidden.shape, unembedding.shape[0], unembedding.dtype
    columns = min(blocks.columns, -(-vocab_size // LANES) * LANES)
    block = -(-blocks.tokens // blocks.unit) * blocks.unit
    blocks = blocks._replace(columns=columns, tokens=block)
    values, places = packed(options, inputs, cotangents, saved)
    before = None if into is None else into.unembedding
    grid = (pl.cdiv(vocab_size, columns), pl.cdiv(tokens, block))
    axes = common.Axes.of(vocab_size, width)
    w_spec = axes.block(columns, width, lambda j, i: j)
    bias_spec = pl.BlockSpec((1, columns), lambda j, i: (0, j))
    operands: common.Operands = {
        "tokens": (values, pl.BlockSpec((len(values), block), lambda j, i: (0, i))),
        "hidden": (hidden, pl.BlockSpec((block, width), lambda j, i: (i, 0))),
    }
    if valid is not None:  # for each block of tokens, whether some do not count
        counts = jnp.pad(valid, (0, -tokens % block)).reshape(-1, block)
        operands["clears"] = (jnp.any(~counts, axis=1).astype(jnp.int32), pl.BlockSpec(memory_space=pltpu.SMEM))
    outputs: common.Operands = {}
    scratch: dict[str, Any] = {}
    if saved is None:
        operands["unembedding"] = (axes.ordered(unembedding), w_spec)
        scratch["z"] = pltpu.VMEM((2, columns, blocks.unit), jnp.float32)
    else:
        operands |= saved.operands(columns, block, unit_saved, lambda j, i: (j, i))
    if bias is not None and saved is None:
        operands["bias"] = (bias[None, :], bias_spec)
    scratch["dz"] = pltpu.VMEM((2, columns, blocks.unit), dtype)
    if "unembedding" in wanted:
        outputs["d_unembedding"] = (jax.eval_shape(axes.ordered, unembedding if before is None else before), w_spec)
        if before is None:
            scratch["sums"] = pltpu.VMEM(w_spec.block_shape, jnp.float32)
        else:
            before_spec = axes.block(columns, width, lambda j, i: j, pipeline_mode=pl.Buffered(buffers))
            operands["before"] = (axes.ordered(before), before_spec)
    if "bias" in wanted:
        outputs["d_bias"] = (jax.ShapeDtypeStruct((1, vocab_size), jnp.float32), bias_spec)
        scratch["bias_sums"] = pltpu.VMEM((columns, LANES), jnp.float32)
    static = {"options": options, "lengths": (tokens, vocab_size), "blocks": blocks, "places": places}
    # The interpreter returns an aliased result with the padding of its last block.
    in_place = "before" in operands and not (interpret and vocab_size % columns)
    results = common.pallas(
        functools.partial(_d_unembedding_kernel, **static, unit_saved=unit_saved),
        operands,
        outputs,
        scratch,
        vmem_bytes("unembedding", blocks, width, dtype.itemsize, saved=saved is not None, before=buffers),
        aliases={"before": "d_unembedding"} if in_place else {},
        name="calibjax_d_unembedding",
        grid=grid,
        interpret=interpret,
        cost_estimate=common.cost(
            options,
            inputs,
            products=2 if saved is None else 1,
            rows=2 * vocab_size + grid[0] * tokens,
            other_bytes=0 if saved is None else saved.values.size * dtype.itemsize,
        ),
    )
    d_bias = None
    if "bias" in wanted:
        d_bias = results["d_bias"][0]
        d_bias = d_bias if into is None or into.bias is None else d_bias + into.bias
    return Gradients(None, axes.ordered(results["d_unembedding"]) if "unembedding" in wanted else None, d_bias)
