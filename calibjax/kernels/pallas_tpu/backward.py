"""The TPU kernels of the backward pass: of dh, and of dW and db.

The sums of dh [tokens, D] stay on chip while the vocabulary streams past, those of dW [columns, D] while the tokens do.
Each kernel computes the logits again, or reads their saved exponentials, forms dz block by block in float32, rounds it
to the inputs' dtype, and multiplies at once. Logits and dz are [columns, tokens]: per-token values lie along lanes, and
dz is the left operand of dzᵀ·h and, transposed in registers, of dz·W. The order of all sums is the same in every run.

Saved exponentials (`Exponentials`) have the inputs' dtype. bfloat16 has the range of float32, and rounds by up to 2⁻⁸,
as dz is for its products. At a one-hot, where all digits of p − 1 can cancel, dz is computed from the exact logit.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from calibjax.kernels.contract import LOG2_E, Cotangents, Gradients, Inputs, Options, Refs, dz_of_logits, token_values
from calibjax.kernels.pallas_tpu import common
from calibjax.kernels.pallas_tpu.blocks import LANES, Blocks, vmem_bytes
from calibjax.kernels.stats import slope_in_units
from calibjax.runtime.arrays import round_up

Places = dict[str, int]  # name of a per-token value -> its row in the packed array
_GRID = {"d_hidden": (0, 1), "d_unembedding": (1, 0)}  # a kernel's grid dimensions along tokens and vocabulary


class Exponentials(NamedTuple):
    """exp(s (z − reference)) of all logits; z and reference in units of the soft-cap.

    Attributes:
        values: in the inputs' dtype, transposed. Under a soft-cap, where a logit's slope is needed but its exponential
            is below `contract.SMALLEST_SAVED`, the negative slope is stored instead: (z/cap)² − 1.
        references: float32, at least eight rows for each unit of columns: row v mod 8 is that of column v.
        known: pairs of ids int32 [N] and z float32 [N], of columns that may have a one-hot; ids may be outside [0, V).
    """

    values: Float[Array, "V N"]
    references: Float[Array, "R N"]
    known: tuple[tuple[Int[Array, " N"], Float[Array, " N"]], ...]


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
        factor = factor * values["softmax"]
        values = {**values, "softmax": jnp.ones_like(factor)}
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
        dz = dz_of_logits(options, z, values.get, hit, p, slope)
        k = 0
        while (exact := values.get(f"dz{k}")) is not None:
            dz = jnp.where(hit(k), exact, dz)
            k += 1
        return dz

    return dz_of


def packed(options: Options, inputs: Inputs, cotangents: Cotangents) -> tuple[Array, Places]:
    """`token_values` as rows of one array, and the row of each name.

    With saved exponentials "dz{k}", dz at the k-th of their known columns, takes the place of "g{k}".
    """
    values = token_values(options, inputs, cotangents)
    one_hots, saved = cotangents.one_hots, cotangents.saved
    if saved is not None:
        values = {name: x for name, x in values.items() if not name.startswith("g")}
        for k, (ids, z) in enumerate(saved.known):
            dz = dz_of_logits(options, z, values.get, lambda _: jnp.array(False))
            for other_ids, g in one_hots:
                dz = dz + jnp.where(other_ids == ids, g, 0.0)
            values[f"dz{k}"] = dz
        one_hots = saved.known
    values |= {f"ids{k}": common.pack_ids(ids) for k, (ids, _) in enumerate(one_hots)}
    if inputs.valid is not None:
        values["valid"] = inputs.valid
    return common.pack(list(values.values())), {name: row for row, name in enumerate(values)}


def pipeline(unit: int, multiply: Callable, differentiate: Callable, accumulate: Callable, count: int) -> None:
    """Three stages at a time: the logits of unit c + 1, the derivatives of unit c, the sums of unit c − 1."""
    units = pl.cdiv(count, unit)
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
    """Writes dz from transposed logits, both [columns, tokens]; adds it to `bias_sums_ref` [columns, 128], if given.

    The first column has the index `start` in the vocabulary; `counts` of columns and tokens exist, and dz is 0 beyond.
    With `references`, of `unit` columns each, `z_ref` holds `Exponentials.values` instead of logits.

    The arithmetic is on tiles of 8 columns and 128 tokens, which are written in pairs: 16-bit tiles have 16 columns.
    """
    columns, tokens = counts
    sublane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    size, width = z_ref.shape
    height = 16 if size % 16 == 0 else 8
    for group in range(0, min(tokens, width), LANES):
        lanes = pl.ds(group, LANES)
        per_token = _tiles_of_values(places, tokens_ref, lanes, sublane)
        dz_of_saved = None
        for top in range(0, size, height):
            if references is not None and top % unit == 0:
                row = top // unit * 8
                dz_of_saved = dz_of_unit(options, references[row : row + 8, lanes], per_token)
            rows = z_ref[top : top + height, lanes].astype(jnp.float32)
            tiles = []
            for column in range(top, top + height, 8):

                def hit(k: int, column=column, per_token=per_token) -> Array:
                    return per_token[f"ids{k}"] - start == column

                z = rows[column - top : column - top + 8]
                if dz_of_saved is None:
                    dz = dz_of_logits(options, common.softcap_in_units(options, z), per_token.get, hit)
                else:
                    dz = dz_of_saved(z, hit)
                if tokens - group < LANES:
                    dz = jnp.where(lane < tokens - group, dz, 0.0)
                if columns - column < 8:
                    dz = jnp.where(sublane < columns - column, dz, 0.0)
                if bias_sums_ref is not None:
                    bias_sums_ref[column : column + 8, :] += dz
                tiles.append(dz)
            dz_ref[top : top + height, lanes] = jnp.concatenate(tiles, axis=0).astype(dz_ref.dtype)


def _tiles_of_values(places: Places, tokens_ref: Any, lanes: Any, sublane: Array) -> dict[str, Array]:
    """The per-token values of 128 tokens, [8, 128] each; ids are relative to the `sublane`."""
    values = {}
    for name, row in places.items():
        if name == "valid":
            continue
        x = jnp.broadcast_to(tokens_ref[row : row + 1, lanes], (8, LANES))
        values[name] = x.astype(jnp.int32) - sublane if name.startswith("ids") else x
    return values


def _begin(refs: Refs, sums: Any) -> None:
    for ref in (refs.sums, refs.bias_sums):
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
    if refs.before is not None:
        sums[...] = refs.before[...]


def _clear(refs: Refs, places: Places) -> None:
    """Hidden states of 0 where a token does not count: it may hold NaN, and 0·NaN would reach every row of dW."""
    counts = common.column(refs.tokens, places["valid"])[:, :1] > 0.0
    refs.hidden[...] = jnp.where(counts, refs.hidden[...], jnp.zeros_like(refs.hidden))


def _kernel(
    refs: Refs,
    *,
    kind: str,
    options: Options,
    sizes: tuple[int, int, int],
    blocks: Blocks,
    unit_saved: int,
    places: Places,
) -> None:
    """A grid step of "d_hidden", past whose sums units of columns pass, or "d_unembedding", past whose units of tokens.

    `sizes`: N, D and V. With `saved` [columns, tokens] there is no `z`, and of the operands only the one that passes.
    Without `sums` the `gradient` is float32 and starts as `before`.
    """
    tokens, width, vocab_size = sizes
    unit, for_hidden = blocks.unit, kind == "d_hidden"
    step, steps = pl.program_id(1), pl.num_programs(1)
    axes = common.Axes.of(vocab_size, width)
    sums = refs.gradient if refs.sums is None else refs.sums
    pl.when(step == 0)(lambda: _begin(refs, sums))
    if refs.clears is not None:
        pl.when(refs.clears[step] > 0)(lambda: _clear(refs, places))

    def unit_at(c: int) -> tuple[Any, Any]:
        part = pl.ds(c * unit, unit)
        return (part, slice(None)) if for_hidden else (slice(None), part)

    def multiply(c: int):
        if refs.saved is not None:
            return
        columns, lanes = unit_at(c)
        z = options.matmul(axes.rows(refs.unembedding, columns), refs.hidden[lanes, :], (axes.width, 1))
        refs.z[c % 2] = z if refs.bias is None else z + common.turned_bias(refs.bias[:, columns], z.shape[1])

    def differentiate(c: int, count: int):
        columns, lanes = unit_at(c)
        references = refs.references
        if for_hidden and references is not None:
            first_row = c * unit // unit_saved * 8
            references = references.at[pl.ds(first_row, pl.cdiv(unit, unit_saved) * 8), :]
        write_dz(
            options,
            places,
            refs.tokens.at[:, lanes],
            refs.z.at[c % 2] if refs.saved is None else refs.saved.at[columns, lanes],
            refs.dz.at[c % 2],
            refs.bias_sums,
            start=step * blocks.columns + c * unit if for_hidden else pl.program_id(0) * blocks.columns,
            counts=(count, blocks.tokens) if for_hidden else (blocks.columns, count),
            references=references,
            unit=unit_saved,
        )

    def accumulate(c: int, count: int):
        if sums is None:
            return
        size = min(unit, round_up(count, LANES))
        passing = pl.ds(c * unit, size)
        dz = refs.dz[c % 2, :size, :].T if for_hidden else refs.dz[c % 2, :, :size]
        for part in common.slices(width):
            if for_hidden:
                w = common.existing(axes.rows(refs.unembedding, passing, part), count, axes.vocab)
                sums[:, part] += options.matmul(dz, w, (1, axes.vocab))
                continue
            x = common.existing(refs.hidden[passing, part], count)
            if axes.vocab:
                sums[part, :] += options.matmul(x, dz, (0, 1))
            else:
                sums[:, part] += options.matmul(dz, x, (1, 0))

    stages = functools.partial(pipeline, unit, multiply, differentiate, accumulate)
    total, size = (vocab_size, blocks.columns) if for_hidden else (tokens, blocks.tokens)
    common.walk_blocks(total, size, step, stages)

    @pl.when(step == steps - 1)
    def _():
        if refs.sums is not None:
            gradient = refs.sums[...]
            if for_hidden and "valid" in places:
                gradient = jnp.where(common.column(refs.tokens, places["valid"])[:, :1] > 0.0, gradient, 0.0)
            refs.gradient[...] = gradient.astype(refs.gradient.dtype)
        if refs.d_bias is not None:
            refs.d_bias[...] = jnp.sum(refs.bias_sums[...].T, axis=0, keepdims=True)


def _operands(
    kind: str, inputs: Inputs, saved: Exponentials | None, values: Array, blocks: Blocks, unit_saved: int
) -> common.Operands:
    """What a kernel reads, by blocks; with saved exponentials no bias, and of hidden and unembedding what passes."""
    hidden, unembedding, bias, _, _, valid = inputs
    block, columns, _ = blocks
    i, j = _GRID[kind]
    axes = common.Axes.of(*unembedding.shape)
    operands = {"tokens": (values, pl.BlockSpec((len(values), block), lambda *step: (0, step[i])))}
    if saved is not None:
        # Where a block has fewer columns than a unit, several have the same references.
        sharing = max(unit_saved // columns, 1)
        rows = 8 * pl.cdiv(columns, unit_saved)
        references_spec = pl.BlockSpec((rows, block), lambda *step: (step[j] // sharing, step[i]))
        operands["saved"] = (saved.values, pl.BlockSpec((columns, block), lambda *step: (step[j], step[i])))
        operands["references"] = (saved.references, references_spec)
    if saved is None or kind == "d_hidden":
        w_spec = axes.block(columns, unembedding.shape[1], lambda *step: step[j])
        operands["unembedding"] = (axes.ordered(unembedding), w_spec)
    if saved is None or kind == "d_unembedding":
        operands["hidden"] = (hidden, pl.BlockSpec((block, hidden.shape[1]), lambda *step: (step[i], 0)))
    if saved is None and bias is not None:
        operands["bias"] = (bias[None, :], pl.BlockSpec((1, columns), lambda *step: (0, step[j])))
    if valid is not None and kind == "d_unembedding":  # for each block of tokens, whether some do not count
        padded = jnp.pad(valid, (0, -len(valid) % block)).reshape(-1, block)
        operands["clears"] = (jnp.any(~padded, axis=1).astype(jnp.int32), pl.BlockSpec(memory_space=pltpu.SMEM))
    return operands


def gradients(
    kind: str,
    options: Options,
    wanted: frozenset[str],
    inputs: Inputs,
    cotangents: Cotangents,
    into: Gradients | None,
    sizes: tuple[Blocks, int, int],
    interpret: Any,
) -> Gradients:
    """The gradients of the kernel `kind`: "d_hidden": dh, in the dtype of the hidden states; "d_unembedding": dW, db.

    dW and db are added to `into`, dW then in float32. `sizes`: the blocks, how many columns share one reference of
    the saved exponentials, and how often a block of `into` is on the chip.
    """
    blocks, unit_saved, buffers = sizes
    tokens, width = inputs.hidden.shape
    vocab_size, dtype = inputs.unembedding.shape[0], inputs.hidden.dtype
    saved = cotangents.saved
    for_hidden = kind == "d_hidden"
    unit = blocks.unit
    columns = min(blocks.columns, round_up(vocab_size, unit if for_hidden else LANES))
    block = blocks.tokens if for_hidden else round_up(blocks.tokens, unit)
    blocks = blocks._replace(columns=columns, tokens=block)
    values, places = packed(options, inputs, cotangents)
    operands = _operands(kind, inputs, saved, values, blocks, unit_saved)
    unit_shape = (2, unit, block) if for_hidden else (2, columns, unit)
    scratch: dict[str, Any] = {"dz": pltpu.VMEM(unit_shape, dtype)}
    if saved is None:
        scratch["z"] = pltpu.VMEM(unit_shape, jnp.float32)
    axes = common.Axes.of(vocab_size, width)
    outputs = {}
    spec: Any = axes.block(columns, width, lambda j, i: j)
    result = axes.ordered(inputs.unembedding)
    if for_hidden:
        result, spec = inputs.hidden, pl.BlockSpec((block, width), lambda i, j: (i, 0))
    if into is not None and into.unembedding is not None:
        result = axes.ordered(into.unembedding)
        before_spec = axes.block(columns, width, lambda j, i: j, pipeline_mode=pl.Buffered(buffers))
        operands["before"] = (result, before_spec)
    elif wanted != {"bias"}:
        scratch["sums"] = pltpu.VMEM(spec.block_shape, jnp.float32)
    if wanted != {"bias"}:
        outputs["gradient"] = (jax.ShapeDtypeStruct(result.shape, result.dtype), spec)
    if "bias" in wanted:
        bias_spec = pl.BlockSpec((1, columns), lambda j, i: (0, j))
        outputs["d_bias"] = (jax.ShapeDtypeStruct((1, vocab_size), jnp.float32), bias_spec)
        scratch["bias_sums"] = pltpu.VMEM((columns, LANES), jnp.float32)
    # The interpreter returns an aliased result with the padding of its last block.
    in_place = "before" in operands and not (interpret and vocab_size % columns)
    static = {"kind": kind, "options": options, "blocks": blocks, "unit_saved": unit_saved, "places": places}
    grid = (pl.cdiv(tokens, block), pl.cdiv(vocab_size, columns))
    resident, passing, passes = (tokens, vocab_size, grid[0]) if for_hidden else (vocab_size, tokens, grid[1])
    results = common.pallas(
        functools.partial(_kernel, sizes=(tokens, width, vocab_size), **static),
        operands,
        outputs,
        scratch,
        vmem_bytes(kind, blocks, width, dtype.itemsize, saved=saved is not None, before=buffers),
        aliases={"before": "gradient"} if in_place else {},
        name=f"calibjax_{kind}",
        grid=grid if for_hidden else grid[::-1],
        interpret=interpret,
        cost_estimate=common.cost(
            options, inputs, 2 if saved is None else 1, 2 * resident + passes * passing, saved is not None
        ),
    )
    if for_hidden:
        return Gradients(results["gradient"])
    d_unembedding = axes.ordered(results["gradient"]) if "unembedding" in wanted else None
    d_bias = results["d_bias"][0] if "bias" in wanted else None
    if d_bias is not None and into is not None and into.bias is not None:
        d_bias = d_bias + into.bias
    return Gradients(None, d_unembedding, d_bias)
