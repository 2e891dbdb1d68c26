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

1. forward: a block of logits [BLOCK_V, BLOCK_N] exists on the chip only. It updates a running maximum m, Σ exp(z − m)
   and Σ z, and gives z_y if it holds the target. When m rises by δ, the sum so far is multiplied by exp(−δ). This rule
   (an online softmax) merges any two parts of a vocabulary, also those of two devices.
2. backward: the logits of a block are recomputed, dz follows from lse, and is multiplied at once. For dh it is
   multiplied with W, and the sums stay on the chip while the vocabulary passes. For dW it is multiplied with h, and the
   sums stay while the tokens pass.

This takes five matrix products instead of three, and no array of size N·V. Label smoothing adds one constant, β/V.

Layout: the vocabulary lies along sublanes (axis 0), tokens along lanes (axis 1); a row is [1, BLOCK_N].

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

# Block sizes. A block holds all of D: two operands and their float32 sums fit into VMEM up to D of some 4,096.
BLOCK_N, BLOCK_V = 256, 512
LOWEST = jnp.finfo(jnp.float32).min


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Contracts axis contract[0] of `a` with axis contract[1] of `b`; sums are float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def global_index(shape: tuple[int, ...], axis: int, block: Array, size: int) -> Array:
    """Index along `axis` of each entry of a block, counted from the start of the whole array; int32 of this shape."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + block * size


def zero_past_end(x: Array, block: Array, size: int, total: int) -> Array:
    """A block [size, D] with 0 in its rows past the end of the array of `total` rows, where memory is undefined."""
    return jnp.where(global_index(x.shape, 0, block, size) < total, x, 0)


def zero_at_first_step(*sum_refs: Any) -> None:
    """Sums start from zero in the first step of the inner dimension of the grid."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        for ref in sum_refs:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)


def forward_kernel(
    targets_ref, hidden_ref, unembedding_ref, out_ref, max_ref, sum_exp_ref, sum_ref, target_ref, *, vocab_size: int
):
    """Grid (blocks of tokens, blocks of the vocabulary): writes lse, z_y and mean z, rows of `out_ref` [8, BLOCK_N]."""
    block = pl.program_id(1)
    zero_at_first_step(sum_exp_ref, sum_ref, target_ref)

    @pl.when(block == 0)
    def _():
        max_ref[...] = jnp.full(max_ref.shape, LOWEST)

    z = matmul(unembedding_ref[...], hidden_ref[...], (1, 1))
    v = global_index(z.shape, 0, block, BLOCK_V)
    masked = jnp.where(v < vocab_size, z, LOWEST)
    new_max = jnp.maximum(max_ref[...], jnp.max(masked, axis=0, keepdims=True))
    block_sum_exp = jnp.sum(jnp.exp(masked - new_max), axis=0, keepdims=True)
    sum_exp_ref[...] = sum_exp_ref[...] * jnp.exp(max_ref[...] - new_max) + block_sum_exp
    sum_ref[...] += jnp.sum(jnp.where(v < vocab_size, z, 0.0), axis=0, keepdims=True)
    target_ref[...] += jnp.sum(jnp.where(v == targets_ref[0:1, :], z, 0.0), axis=0, keepdims=True)
    max_ref[...] = new_max

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        out_ref[0:1, :] = max_ref[...] + jnp.log(sum_exp_ref[...])
        out_ref[1:2, :] = target_ref[...]
        out_ref[2:3, :] = sum_ref[...] / vocab_size


def logit_cotangents(lse_and_g_ref, targets_ref, hidden, unembedding, block: Array, beta: float, vocab_size: int):
    """dz [BLOCK_V, BLOCK_N] of a block of the vocabulary; rows 0 and 1 of `lse_and_g_ref` are lse and g, [BLOCK_N]."""
    z = matmul(unembedding, hidden, (1, 1))
    lse, g = lse_and_g_ref[0:1, :], lse_and_g_ref[1:2, :]
    v = global_index(z.shape, 0, block, BLOCK_V)
    smoothed_target = (1.0 - beta) * (v == targets_ref[0:1, :]) + beta / vocab_size
    return jnp.where(v < vocab_size, g * (jnp.exp(z - lse) - smoothed_target), 0.0).astype(hidden.dtype)


def d_hidden_kernel(lse_and_g_ref, targets_ref, hidden_ref, unembedding_ref, out_ref, sum_ref, *, beta, vocab_size):
    """Grid (blocks of tokens, blocks of the vocabulary): dh of a block of tokens."""
    block = pl.program_id(1)
    zero_at_first_step(sum_ref)
    w = zero_past_end(unembedding_ref[...], block, BLOCK_V, vocab_size)
    dz = logit_cotangents(lse_and_g_ref, targets_ref, hidden_ref[...], w, block, beta, vocab_size)
    sum_ref[...] += matmul(dz, w, (0, 0))

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def d_unembedding_kernel(
    lse_and_g_ref, targets_ref, hidden_ref, unembedding_ref, out_ref, sum_ref, *, beta, tokens, vocab_size
):
    """Grid (blocks of the vocabulary, blocks of tokens): dW of a block of the vocabulary."""
    vocab_block, token_block = pl.program_id(0), pl.program_id(1)
    zero_at_first_step(sum_ref)
    h, w = zero_past_end(hidden_ref[...], token_block, BLOCK_N, tokens), unembedding_ref[...]
    dz = logit_cotangents(lse_and_g_ref, targets_ref, h, w, vocab_block, beta, vocab_size)
    dz = jnp.where(global_index(dz.shape, 1, token_block, BLOCK_N) < tokens, dz, 0)  # past N, g is not defined
    sum_ref[...] += matmul(dz, h, (1, 0))

    @pl.when(token_block == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def run(kernel: Any, operands: tuple[Array, ...], out: str, scratch: Any, interpret: bool) -> Array:
    """Runs a kernel over a grid of blocks of tokens and of the vocabulary.

    `operands` are arrays [8, N] with a value per token in each row, then hidden [N, D] and unembedding [V, D]. `out` is
    what the result is blocked like: "per_token" or "hidden", with the vocabulary as the inner dimension of the grid, or
    "unembedding", with tokens as the inner one.
    """
    *per_token, hidden, unembedding = operands
    width = hidden.shape[1]
    token_blocks, vocab_blocks = pl.cdiv(len(hidden), BLOCK_N), pl.cdiv(len(unembedding), BLOCK_V)
    grid, token_axis, vocab_axis = (token_blocks, vocab_blocks), 0, 1
    if out == "unembedding":
        grid, token_axis, vocab_axis = (vocab_blocks, token_blocks), 1, 0
    specs = {
        "per_token": pl.BlockSpec((8, BLOCK_N), lambda *step: (0, step[token_axis])),
        "hidden": pl.BlockSpec((BLOCK_N, width), lambda *step: (step[token_axis], 0)),
        "unembedding": pl.BlockSpec((BLOCK_V, width), lambda *step: (step[vocab_axis], 0)),
    }
    per_token_shape = jax.ShapeDtypeStruct((8, len(hidden)), jnp.float32)
    like = {"per_token": per_token_shape, "hidden": hidden, "unembedding": unembedding}[out]
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[specs["per_token"]] * len(per_token) + [specs["hidden"], specs["unembedding"]],
        out_specs=specs[out],
        out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype),
        scratch_shapes=scratch,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=96 * 2**20
        ),
    )(*operands)


def stack_rows(*values: Array) -> Array:
    """Values [N] as the first rows of an array [8, N]: float32 tiles have eight sublanes."""
    padding = [jnp.zeros_like(values[0])] * (8 - len(values))
    return jnp.stack([*values, *padding])


def forward(
    hidden: Array, unembedding: Array, targets: Array, label_smoothing: float, interpret: bool
) -> tuple[Array, Array]:
    """The loss [N], and lse [N] for the backward pass."""
    kernel = functools.partial(forward_kernel, vocab_size=len(unembedding))
    scratch = [pltpu.VMEM((1, BLOCK_N), jnp.float32)] * 4
    operands = (stack_rows(targets), hidden, unembedding)
    lse, target, mean, *_ = run(kernel, operands, "per_token", scratch, interpret)
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
        targets: int32 [N], less than V (not checked); tokens with a negative one have loss and gradients of 0.
        label_smoothing: β in [0, 1].
        interpret: run by Pallas' interpreter, on any device.
    """
    return forward(hidden, unembedding, targets, label_smoothing, interpret)[0]


def cross_entropy_fwd(hidden: Array, unembedding: Array, targets: Array, label_smoothing: float, interpret: bool):
    loss, lse = forward(hidden, unembedding, targets, label_smoothing, interpret)
    return loss, (hidden, unembedding, targets, lse)


def cross_entropy_bwd(label_smoothing: float, interpret: bool, residuals: tuple[Array, ...], g: Array):
    hidden, unembedding, targets, lse = residuals
    width, options = hidden.shape[1], {"beta": label_smoothing, "vocab_size": len(unembedding)}
    operands = (stack_rows(lse, jnp.where(targets >= 0, g, 0.0)), stack_rows(targets), hidden, unembedding)
    kernel = functools.partial(d_hidden_kernel, **options)
    d_hidden = run(kernel, operands, "hidden", [pltpu.VMEM((BLOCK_N, width), jnp.float32)], interpret)
    kernel = functools.partial(d_unembedding_kernel, tokens=len(hidden), **options)
    d_unembedding = run(kernel, operands, "unembedding", [pltpu.VMEM((BLOCK_V, width), jnp.float32)], interpret)
    return d_hidden, d_unembedding, None


cross_entropy.defvjp(cross_entropy_fwd, cross_entropy_bwd)


def dense(hidden: Array, unembedding: Array, targets: Array, label_smoothing: float) -> Array:
    """The same loss [N] by its formula, with all logits [N, V] in memory."""
    log_p = jax.nn.log_softmax(jnp.matmul(hidden, unembedding.T, precision="highest"))
    target_log_p = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    loss = -(1.0 - label_smoothing) * target_log_p - label_smoothing * jnp.mean(log_p, axis=1)
    return jnp.where(targets >= 0, loss, 0.0)


def main(tokens: int = 600, width: int = 128, vocab_size: int = 1500, label_smoothing: float = 0.1) -> None:
    """Prints the largest differences from the dense formula; the sizes are no multiples of the block sizes."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width))
    unembedding = jax.random.normal(keys[1], (vocab_size, width)) / 4
    targets = jax.random.randint(keys[2], (tokens,), -100, vocab_size)
    interpret = jax.default_backend() != "tpu"

    def mean_and_gradients(loss: Any, *options: Any) -> Any:
        grad_fn = jax.value_and_grad(lambda h, w: jnp.mean(loss(h, w, targets, label_smoothing, *options)), (0, 1))
        return jax.jit(grad_fn)(hidden, unembedding)

    value, gradients = mean_and_gradients(cross_entropy, interpret)
    expected_value, expected_gradients = mean_and_gradients(dense)
    print(f"{'interpreted' if interpret else 'compiled'}: loss {value:.6f}, dense {expected_value:.6f}")
    for name, x, y in zip(("dh", "dW"), gradients, expected_gradients, strict=True):
        print(f"{name}: largest difference {jnp.abs(x - y).max():.1e} of {jnp.abs(y).max():.1e}")


if __name__ == "__main__":
    main()
