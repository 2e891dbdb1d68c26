"""Parts that the TPU kernels share: products, rows of per-token values, the launch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from calibjax.kernels import stats
from calibjax.kernels.contract import Inputs, Options, Refs
from calibjax.kernels.pallas_tpu.blocks import LANES, SLICE, UNPLANNED
from calibjax.runtime.arrays import round_up

NEVER = -(2**30)  # an index that no column of the vocabulary has


def slices(width: int) -> Iterator[Any]:
    """The columns of D in slices of `SLICE`."""
    for start in range(0, width, SLICE):
        yield pl.ds(start, min(SLICE, width - start))


def existing(x: Array, count: int, axis: int = 0) -> Array:
    """`x` with zeros in place of what lies from `count` on along an axis."""
    if count >= x.shape[axis]:
        return x
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < count, x, jnp.zeros_like(x))


class Axes(NamedTuple):
    """Which axis of W, and of dW, the kernels have the vocabulary along: (0, 1) for [V, D], (1, 0) for Wᵀ [D, V]."""

    vocab: int
    width: int

    @classmethod
    def of(cls, vocab_size: int, width: int) -> "Axes":
        """The axes as the array lies in memory: a kernel has the last axis along lanes, and XLA would copy other W.

        XLA stores [V, D] with the vocabulary along lanes where that takes less padding in tiles of 8 by 128.
        """

        def padded(sublanes: int, lanes: int) -> int:
            return round_up(sublanes, 8) * round_up(lanes, LANES)

        return cls(1, 0) if padded(width, vocab_size) < padded(vocab_size, width) else cls(0, 1)

    def ordered(self, x: Array) -> Array:
        """[V, D] with these axes; or the reverse."""
        return x.T if self.vocab else x

    def block(self, columns: int, width: int, index: Callable[..., Any], **options: Any) -> Any:
        """The specification of blocks of `columns` rows of W, of which `index` gives the number."""
        if self.vocab:
            return pl.BlockSpec((width, columns), lambda *step: (0, index(*step)), **options)
        return pl.BlockSpec((columns, width), lambda *step: (index(*step), 0), **options)

    def rows(self, ref: Any, rows: Any, part: Any = slice(None)) -> Array:
        """Rows of a block of W, or a part of D of them, with these axes."""
        return ref[part, rows] if self.vocab else ref[rows, part]


def pack(rows: Sequence[Array]) -> Array:
    """Per-token values as the rows of one float32 [8k, N]: tokens along lanes, the layout that costs no padding."""
    rows = [*rows, *([jnp.zeros_like(rows[0], jnp.float32)] * (-len(rows) % 8))]
    return jnp.stack([row.astype(jnp.float32) for row in rows])


def pack_ids(ids: Array) -> Array:
    """Vocabulary indices as float32, exact below 2²⁴; negative ones as one that never matches."""
    return jnp.where(ids < 0, NEVER, ids).astype(jnp.float32)


def column(ref, row: int) -> Array:
    """A row [1, n] of per-token values as a column repeated over lanes, [n, 128]."""
    return jnp.broadcast_to(ref[row : row + 1, :], (LANES, ref.shape[1])).T


def turned_bias(bias: Array, tokens: int) -> Array:
    """The bias [1, columns] of transposed logits, [columns, tokens]."""
    turned = jnp.broadcast_to(bias, (LANES, bias.shape[1])).T
    return jnp.concatenate([turned] * (tokens // LANES), axis=1)


def softcap_in_units(options: Options, z: Array) -> Array:
    """The logits in units of the soft-cap, tanh(z/cap), so that no step multiplies by it; without one, unchanged."""
    return z if options.softcap is None else jnp.tanh(z * (1.0 / options.softcap))


def without_infinities(z: Array, has_bias: bool) -> Array:
    """Logits with the −inf of a bias replaced by a finite number whose exponential is 0."""
    return jnp.maximum(z, stats.FLOOR) if has_bias else z


def walk_blocks(total: int, size: int, step: Array, walk: Callable[[int], None]) -> int:
    """Traces `walk(rows of this block)` for full blocks and, if smaller, the last; returns the rows of the last."""
    steps = pl.cdiv(total, size)
    last = total - (steps - 1) * size
    if last == size:
        walk(size)
    elif steps == 1:
        walk(last)
    else:
        pl.when(step < steps - 1)(lambda: walk(size))
        pl.when(step == steps - 1)(lambda: walk(last))
    return last


Operands = dict[str, tuple[Any, Any]]  # name -> (array or shape, its BlockSpec)


def pallas(
    kernel: Callable[[Refs], None],
    inputs: Operands,
    outputs: Operands,
    scratch: Mapping[str, Any],
    vmem: int,
    aliases: Mapping[str, str] | None = None,
    **call: Any,
) -> dict[str, Array]:
    """The outputs of `kernel`, the program of a grid step, by name.

    The kernel takes the references of inputs, outputs and scratch (name -> memory on chip) by their names; `state` is a
    dictionary of those called "state_...". The first grid dimension may be divided over the cores of a chip (v5p has
    two). `vmem`: planned bytes on chip. `aliases`: input -> output in its place. `call`: for `pl.pallas_call`.
    """

    def run(*references: Any) -> None:
        refs = Refs(zip(names, references, strict=True))
        refs["state"] = {name[6:]: ref for name, ref in refs.items() if name.startswith("state_")}
        kernel(refs)

    names = (*inputs, *outputs, *scratch)
    places = {name: place for operands in (inputs, outputs) for place, name in enumerate(operands)}
    results = pl.pallas_call(
        run,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        scratch_shapes=list(scratch.values()),
        input_output_aliases={places[a]: places[b] for a, b in (aliases or {}).items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem * 9 // 8 + UNPLANNED
        ),
        **call,
    )(*(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def cost(
    options: Options, inputs: Inputs, products: int, rows: int, saved: bool, exponentials: int = 1
) -> pl.CostEstimate:
    """Cost of a kernel of some products N·D·V that moves `rows` of D entries and, with `saved`, all exponentials."""
    (tokens, width), vocab_size = inputs.hidden.shape, inputs.unembedding.shape[0]
    return pl.CostEstimate(
        flops=2 * products * tokens * width * vocab_size,
        bytes_accessed=(rows * width + saved * tokens * vocab_size) * inputs.hidden.dtype.itemsize,
        transcendentals=exponentials * tokens * vocab_size * (1 if options.softcap is None else 2),
    )
