"""Cross-entropy with label smoothing over a large vocabulary, without its logits in memory: the idea in one file.

    python kernels/cross_entropy.py

checks it against the dense formula by Pallas' interpreter on a CPU; no TPU, and no compiler for one, has run it yet.
`calibjax.kernels` is the same idea for use: temperatures, soft-cap, bias, meshes, one product less, float64 tests.

With z = h Wᵀ, lse = log Σ_v exp(z_v), target y and smoothing β, the loss of a token and its derivative are

    l = lse − (1 − β) z_y − β mean_v z_v,
    dz_v = g (exp(z_v − lse) − (1 − β) [v = y] − β/V)      for the cotangent g of l,
    dh = Σ_v dz_v W_v,   dW_v = Σ_tokens dz_v h.

At N = 8,192 tokens and V = 256,000 words the logits take 8 GB. But a token needs only three numbers of them: lse, z_y
and mean z. So the vocabulary passes block by block:

1. forward: a block of logits [COLUMNS, TOKENS] exists on the chip only. It adds to a running maximum m, to Σ exp(z − m)
   and to Σ z, and gives z_y where it holds the target. When m rises by δ, the sum so far shrinks by exp(−δ): this rule
   (an online softmax) merges any two parts of a vocabulary, also those of two devices.
2. backward: the logits of a block are computed again, dz follows from lse, and is multiplied at once: with W for dh,
   whose sums stay on the chip while the vocabulary passes; with h for dW, whose sums stay while the tokens pass.

Five products instead of three, and no array of size N·V. Label smoothing costs nothing: β/V is one number.

Layout: the vocabulary lies along sublanes (axis 0), tokens along lanes: what a token has one of is a row [1, TOKENS].

Sources: Milakov and Gimelshein 2018 (online softmax, arXiv 1805.02867); Wijmans et al. 2025 (no logits in memory,
arXiv 2411.09009); Szegedy et al. 2016 (label smoothing, arXiv 1512.00567, section 7).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TOKENS, COLUMNS = 256, 512  # of a block: with all of D, two operands and their sums fit on a TPU to D of some 4,096
LOWEST = jnp.finfo(jnp.float32).min


def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product over one axis of each, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def indices(shape: tuple[int, ...], axis: int, block: Array, size: int) -> Array:
    """The index, in the whole array, of every entry of a block along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + block * size


def existing(x: Array, block: Array, size: int, total: int) -> Array:
    """The rows of a block that exist in an array of `total` rows, and zeros: beyond its end memory holds anything."""
    return jnp.where(indices(x.shape, 0, block, size) < total, x, 0)


def zero_at_first(*sums: Any) -> None:
    """Sums start from zero in the first step of the inner dimension of the grid."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref in sums:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)


def forward_kernel(targets, hidden, unembedding, outputs, top, weight, total, target, *, vocab_size: int):
    """Grid (blocks of tokens, blocks of the vocabulary): lse, z_y and mean z, the rows of `outputs` [8, TOKENS]."""
    block = pl.program_id(1)

    zero_at_first(weight, total, target)

    @pl.when(block == 0)
    def _():
        top[...] = jnp.full(top.shape, LOWEST)

    z = product(unembedding[...], hidden[...], (1, 1))
    v = indices(z.shape, 0, block, COLUMNS)
    bounded = jnp.where(v < vocab_size, z, LOWEST)
    new_top = jnp.maximum(top[...], jnp.max(bounded, axis=0, keepdims=True))
    of_block = jnp.sum(jnp.exp(bounded - new_top), axis=0, keepdims=True)
    weight[...] = weight[...] * jnp.exp(top[...] - new_top) + of_block
    total[...] += jnp.sum(jnp.where(v < vocab_size, z, 0.0), axis=0, keepdims=True)
    target[...] += jnp.sum(jnp.where(v == targets[0:1, :], z, 0.0), axis=0, keepdims=True)
    top[...] = new_top

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        outputs[0:1, :] = top[...] + jnp.log(weight[...])
        outputs[1:2, :] = target[...]
        outputs[2:3, :] = total[...] / vocab_size


def logit_cotangents(values, targets, hidden, unembedding, block: Array, label_smoothing: float, vocab_size: int):
    """dz [COLUMNS, TOKENS] of a block of the vocabulary; `values`: lse and g, in rows [1, TOKENS]."""
    z = product(unembedding, hidden, (1, 1))
    lse, g = values[0:1, :], values[1:2, :]
    v = indices(z.shape, 0, block, COLUMNS)
    wanted = (1.0 - label_smoothing) * (v == targets[0:1, :]) + label_smoothing / vocab_size
    return jnp.where(v < vocab_size, g * (jnp.exp(z - lse) - wanted), 0.0).astype(hidden.dtype)


def d_hidden_kernel(values, targets, hidden, unembedding, d_hidden, sums, *, label_smoothing: float, vocab_size: int):
    """Grid (blocks of tokens, blocks of the vocabulary): dh of a block of tokens."""
    block = pl.program_id(1)
    zero_at_first(sums)
    w = existing(unembedding[...], block, COLUMNS, vocab_size)
    dz = logit_cotangents(values, targets, hidden[...], w, block, label_smoothing, vocab_size)
    sums[...] += product(dz, w, (0, 0))

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        d_hidden[...] = sums[...].astype(d_hidden.dtype)


def d_unembedding_kernel(
    values, targets, hidden, unembedding, d_unembedding, sums, *, label_smoothing: float, sizes: tuple[int, int]
):
    """Grid (blocks of the vocabulary, blocks of tokens): dW of a block of the vocabulary."""
    tokens, vocab_size = sizes
    block = pl.program_id(1)
    zero_at_first(sums)
    h = existing(hidden[...], block, TOKENS, tokens)
    dz = logit_cotangents(values, targets, h, unembedding[...], pl.program_id(0), label_smoothing, vocab_size)
    dz = jnp.where(indices(dz.shape, 1, block, TOKENS) < tokens, dz, 0)
    sums[...] += product(dz, h, (1, 0))

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        d_unembedding[...] = sums[...].astype(d_unembedding.dtype)


def call(kernel: Any, operands: tuple[Array, ...], result: Any, scratch: list[Any], vocab_first: bool, interpret: bool):
    """Runs a kernel over blocks of operands (rows of per-token values ..., hidden, unembedding) and of one result."""
    *rows, hidden, unembedding = operands
    width, counts = hidden.shape[1], (pl.cdiv(len(hidden), TOKENS), pl.cdiv(len(unembedding), COLUMNS))

    def spec(shape: tuple[int, int], of_tokens: bool, axis: int) -> pl.BlockSpec:
        """Blocks of an array, of which `axis` is cut, along the tokens or along the vocabulary."""
        step = int(of_tokens == vocab_first)  # of the grid's two steps the one that counts these blocks
        return pl.BlockSpec(shape, lambda *steps: (steps[step], 0) if axis == 0 else (0, steps[step]))

    of_hidden, of_unembedding = spec((TOKENS, width), True, 0), spec((COLUMNS, width), False, 0)
    of_rows = spec((8, TOKENS), True, 1)
    of_result = {hidden.shape: of_hidden, unembedding.shape: of_unembedding}.get(result.shape, of_rows)
    return pl.pallas_call(
        kernel,
        grid=counts[::-1] if vocab_first else counts,
        in_specs=[*[of_rows] * len(rows), of_hidden, of_unembedding],
        out_specs=of_result,
        out_shape=result,
        scratch_shapes=scratch,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=96 * 2**20
        ),
    )(*rows, hidden, unembedding)


def rows(*values: Array) -> Array:
    """Values [N] as the first rows of one array [8, N], the least number of sublanes."""
    return jnp.stack([*values, *[jnp.zeros_like(values[0])] * (8 - len(values))])


def forward(
    hidden: Array, unembedding: Array, targets: Array, label_smoothing: float, interpret: bool
) -> tuple[Array, Array]:
    """The loss [N], and lse [N] for the backward pass."""
    row = pltpu.VMEM((1, TOKENS), jnp.float32)
    kernel = functools.partial(forward_kernel, vocab_size=len(unembedding))
    result = jax.ShapeDtypeStruct((8, len(hidden)), jnp.float32)
    lse, target, mean, *_ = call(
        kernel, (rows(targets), hidden, unembedding), result, [row] * 4, vocab_first=False, interpret=interpret
    )
    loss = lse - (1.0 - label_smoothing) * target - label_smoothing * mean
    return jnp.where(targets >= 0, loss, 0.0), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    hidden: Array, unembedding: Array, targets: Array, label_smoothing: float = 0.0, interpret: bool = False
) -> Array:
    """The loss of each token, float32 [N].

    Args:
        hidden: [N, D], bfloat16 or float32.
        unembedding: [V, D], of the same dtype.
        targets: int32 [N]; tokens with a negative one have loss and gradients of 0.
        label_smoothing: β in [0, 1].
        interpret: run by Pallas' interpreter, on any device.
    """
    return forward(hidden, unembedding, targets, label_smoothing, interpret)[0]


def cross_entropy_fwd(hidden: Array, unembedding: Array, targets: Array, label_smoothing: float, interpret: bool):
    loss, lse = forward(hidden, unembedding, targets, label_smoothing, interpret)
    return loss, (hidden, unembedding, targets, lse)


def cross_entropy_bwd(label_smoothing: float, interpret: bool, residuals: tuple[Array, ...], g: Array):
    hidden, unembedding, targets, lse = residuals
    (tokens, width), vocab_size = hidden.shape, len(unembedding)
    operands = (rows(lse, jnp.where(targets >= 0, g, 0.0)), rows(targets), hidden, unembedding)
    of_hidden = functools.partial(d_hidden_kernel, label_smoothing=label_smoothing, vocab_size=vocab_size)
    of_unembedding = functools.partial(
        d_unembedding_kernel, label_smoothing=label_smoothing, sizes=(tokens, vocab_size)
    )
    d_hidden, d_unembedding = (
        call(kernel, operands, jax.ShapeDtypeStruct(x.shape, x.dtype), [sums], vocab_first, interpret)
        for kernel, x, sums, vocab_first in (
            (of_hidden, hidden, pltpu.VMEM((TOKENS, width), jnp.float32), False),
            (of_unembedding, unembedding, pltpu.VMEM((COLUMNS, width), jnp.float32), True),
        )
    )
    return d_hidden, d_unembedding, None


cross_entropy.defvjp(cross_entropy_fwd, cross_entropy_bwd)


def dense(hidden: Array, unembedding: Array, targets: Array, label_smoothing: float) -> Array:
    """The same by the formula, with all logits in memory."""
    log_p = jax.nn.log_softmax(jnp.matmul(hidden, unembedding.T, precision="highest"))
    of_target = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    loss = -(1.0 - label_smoothing) * of_target - label_smoothing * jnp.mean(log_p, axis=1)
    return jnp.where(targets >= 0, loss, 0.0)


def main(tokens: int = 600, width: int = 128, vocab_size: int = 1500, label_smoothing: float = 0.1) -> None:
    """Prints the largest differences from the dense formula; blocks of tokens and vocabulary are ragged."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width))
    unembedding = jax.random.normal(keys[1], (vocab_size, width)) / 4
    targets = jax.random.randint(keys[2], (tokens,), -100, vocab_size)
    interpret = jax.default_backend() != "tpu"

    def mean(loss: Any, *options: Any) -> Any:
        return jax.value_and_grad(lambda h, w: jnp.mean(loss(h, w, targets, label_smoothing, *options)), (0, 1))

    ours, theirs = (f(hidden, unembedding) for f in (mean(cross_entropy, interpret), mean(dense)))
    print(f"{'interpreted' if interpret else 'compiled'}: loss {ours[0]:.6f}, dense {theirs[0]:.6f}")
    for name, x, y in zip(("dh", "dW"), ours[1], theirs[1], strict=True):
        print(f"{name}: largest difference {jnp.abs(x - y).max():.1e} of {jnp.abs(y).max():.1e}")


if __name__ == "__main__":
    main()
