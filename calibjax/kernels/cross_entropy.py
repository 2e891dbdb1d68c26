"""`linear_cross_entropy`: the loss of hidden states under an unembedding, without the logits.

The cotangent of a scalar loss is known up to a factor when the loss is computed: the gradients are formed there, one
block of tokens at a time, and the backward pass only multiplies them.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import api, chunked, operator
from calibjax.kernels.contract import Gradients
from calibjax.kernels.platforms import platform
from calibjax.kernels.sharded import VocabSharding
from calibjax.runtime.arrays import AnyArray, ceil_div

Reduction = Literal["none", "mean", "sum"]

_BLOCK_BYTES = 24 * 2**20  # of the float32 logits of one block of tokens, which stay in a CPU's last-level cache
_BLOCK_TOKENS = 128  # under which the products are too narrow, and reading and writing dW for each block shows
_MAX_BLOCKS = 32  # a block holds at least 1/32 of all tokens
_ACCELERATOR_FACTOR = 16  # times as many bytes and tokens elsewhere


class _Loss(NamedTuple):
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    ignore_index: int
    dispatch: api.Dispatch

    def per_token(self, stats: Mapping[str, Any], scale: Array) -> Array:
        log_normalizer, target_logit = stats["log_normalizer"], stats["target_logit"]
        loss = log_normalizer - scale * target_logit
        if self.label_smoothing:
            loss = loss + self.label_smoothing * scale * (target_logit - stats["mean_logit"])
        if self.z_loss:
            loss = loss + self.z_loss * jnp.square(log_normalizer)
        return loss

    def count(self, valid: Array) -> Array | int:
        """What the sum of the losses is divided by: the number of tokens that count, at least 1, for a mean."""
        return jnp.maximum(jnp.sum(valid), 1).astype(jnp.float32) if self.reduction == "mean" else 1


def linear_cross_entropy(
    hidden: Float[AnyArray, "*B D"],
    unembedding: Float[AnyArray, "V D"],
    targets: Int[AnyArray, "*B"],
    *,
    scale: Float[AnyArray, "*B"] | float | None = None,
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
    where: Bool[AnyArray, "*B"] | None = None,
    ignore_index: int = -100,
    sharding: VocabSharding | None = None,
    **execution: Unpack[api.Execution],
) -> Float[Array, "*B"] | Float[Array, ""]:
    """Cross-entropy of softmax(s·z) with z = softcap(h Wᵀ + b), without holding the logits of all tokens.

    With β = `label_smoothing` and lse = log Σ_v exp(s·z_v), a token's loss in nats is

        (1−β)(lse − s z_y) + β (lse − s (1/V) Σ_v z_v) + z_loss·lse².

    Differentiable in `hidden`, `unembedding`, `bias` and `scale` by reverse mode. With the reductions "mean" and "sum",
    on one device, every implementation but "reference" forms the gradients in the forward pass and computes no logit
    twice. Memory beyond inputs and outputs: the logits of one block of tokens (`choose_block_size`) and, where there
    are several blocks or in float16, gradients in float32. With "none" neither is held, and both gradients take one
    product more; on TPUs two under a soft-cap with label smoothing.

    Args:
        hidden, unembedding, scale, bias, softcap, where, ignore_index, sharding: as in `vocab_stats`.
        targets: `[...]`, integer in [0, V), or `ignore_index`.
        label_smoothing: β in [0, 1], a Python number. 0 saves the mean of the logits.
        z_loss: weight of the squared log-normaliser, at least 0, a Python number.
        reduction: "none"; "sum"; or "mean" over the tokens that count, 0 where there are none.
        execution: as in `vocab_stats`. `save_logits` makes one block of all tokens.

    Returns:
        float32, `[...]` or a scalar. Tokens that do not count add exactly zero to loss and gradients, even with NaN in
        their hidden state. NaN where a target of a token that counts lies outside [0, V).

    Raises:
        ValueError: for shapes, dtypes or options that do not fit.
        NotImplementedError: where the implementation named cannot run this call here, or none can.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = linear_cross_entropy(jnp.ones((2, 4)), jnp.eye(3, 4), jnp.array([0, -100]), reduction="mean")
        >>> round(float(loss), 4)
        1.0986
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction: expected one of {list(get_args(Reduction))}, got {reduction!r}.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, got {label_smoothing}.")
    if not z_loss >= 0:
        raise ValueError(f"z_loss: expected a number of at least 0, got {z_loss}.")
    statistics = ("log_normalizer", "target_logit", *(("mean_logit",) if label_smoothing else ()))
    arrays = api.Arrays(hidden, unembedding, targets, bias, where)
    dispatch, arrays = api.prepare(arrays, softcap, statistics, sharding, execution)
    loss = _Loss(reduction, label_smoothing, z_loss, ignore_index, dispatch)
    forms_gradients = reduction != "none" and dispatch.call().implementation.accumulates
    compute = _with_gradients if forms_gradients else _from_statistics
    return compute(loss, arrays, api.as_scale(scale, arrays.hidden.shape[:-1]))


def _from_statistics(loss: _Loss, arrays: api.Arrays, scale: Array) -> Array:
    stats, valid = api.run_call(loss.dispatch, arrays, scale, loss.ignore_index)
    values = jnp.where(valid, loss.per_token(stats, scale), 0.0)
    return values if loss.reduction == "none" else jnp.sum(values) / loss.count(valid)


_with_gradients = jax.custom_vjp(_from_statistics, nondiff_argnums=(0,))


def _with_gradients_fwd(loss: _Loss, arrays: api.Arrays, scale):
    named = {"hidden": arrays.hidden, "unembedding": arrays.unembedding, "bias": arrays.bias, "scale": scale}
    differentiated = [name for name, x in named.items() if x is not None and x.perturbed]
    arrays = api.Arrays(*(None if x is None else x.value for x in arrays))
    scale = scale.value
    in_one_pass = operator.forward_gives_d_hidden(loss.dispatch.call(), hidden_alone=True)
    given_by_one_pass = {"scale", "hidden"} if in_one_pass else {"scale"}
    if set(differentiated) <= given_by_one_pass:

        def scalar(active):
            hidden = active.get("hidden", arrays.hidden)
            return _from_statistics(loss, arrays._replace(hidden=hidden), active.get("scale", scale))

        value, gradients = jax.value_and_grad(scalar)({name: named[name].value for name in differentiated})
    else:
        value, flat = _by_blocks(loss, arrays, scale, differentiated)
        gradients = {name: flat[name].reshape(named[name].value.shape) for name in differentiated}
    # An empty array keeps the dtype that the gradient is rounded to, once it has been multiplied.
    dtypes = {name: jnp.zeros((0,), named[name].value.dtype) for name in differentiated}
    return value, (gradients, dtypes)


def _with_gradients_bwd(loss: _Loss, residuals, cotangent):
    gradients, dtypes = residuals
    d = {name: (cotangent * gradient).astype(dtypes[name].dtype) for name, gradient in gradients.items()}
    return api.Arrays(d.get("hidden"), d.get("unembedding"), bias=d.get("bias")), d.get("scale")


_with_gradients.defvjp(_with_gradients_fwd, _with_gradients_bwd, symbolic_zeros=True)


def choose_block_size(tokens: int, vocab_size: int, bytes_per_logit: float = 4, gradient_bytes: int = 0) -> int:
    """Tokens per block, of even sizes, decided while tracing by `platforms.platform()`. The largest of three:

    - on a CPU the tokens of 24 MiB of float32 logits, elsewhere of 384 MiB; twice as many where a logit takes 2 bytes;
    - on a CPU 128 tokens, elsewhere 2,048; twice as many where a logit takes 2 bytes;
    - 1/32 of all tokens.

    A GPU takes all tokens as one block where the further logits take no more memory than the float32 gradient in W that
    several blocks need, `gradient_bytes` a row: measured in `kernels/HOPPER.md`.
    """
    factor = (1 if platform().name == "cpu" else _ACCELERATOR_FACTOR) * round(4 / bytes_per_logit)
    block = max(factor * _BLOCK_BYTES // (4 * vocab_size), factor * _BLOCK_TOKENS, tokens // _MAX_BLOCKS)
    blocks = max(ceil_div(tokens, block), 1)
    size = max(ceil_div(tokens, blocks), 1)
    more_bytes = (tokens - size) * bytes_per_logit
    return tokens if platform().name == "gpu" and 0 < more_bytes <= gradient_bytes else size


def _by_blocks(loss: _Loss, arrays: api.Arrays, scale: Array, wanted: list[str]) -> tuple[Array, dict[str, Any]]:
    """The reduced loss and its gradients in `wanted` for flattened tokens, by name, formed block by block."""
    inputs, valid, bad_target = api.flat_inputs(arrays, scale, loss.ignore_index)
    inputs = operator.with_dtypes(inputs)
    bad_target = bad_target.reshape(-1)
    tokens = inputs.hidden.shape[0]
    vocab_size, width = inputs.unembedding.shape
    weights = valid.reshape(-1).astype(jnp.float32) / loss.count(valid)  # [N]
    call = loss.dispatch.call()
    if "scale" in wanted:
        call = call._replace(statistics=call.statistics | {"expected_logit"})
    differentiated = tuple(() if name in wanted else None for name in Gradients._fields)
    dtype = inputs.unembedding.dtype
    gradient_bytes = 4 * width if "unembedding" in wanted and dtype == jnp.bfloat16 else 0
    bytes_per_logit = call.implementation.saved_bytes(dtype.itemsize)
    size = choose_block_size(tokens, vocab_size, bytes_per_logit, gradient_bytes)
    if call.options.save_logits:
        size = tokens
    # Not in float16: dW would be rounded before the backward pass multiplies it by the scale of the loss.
    is_one_block = 0 < tokens <= size and dtype != jnp.float16

    def step(carry: Any, start: Array | int, size: int, _: None) -> tuple[Any, None]:
        total, gradients, d_scale = carry

        def block_rows(x: Any) -> Any:
            return chunked.take_rows(x, start, size)

        block = jax.tree.map(block_rows, inputs._replace(unembedding=None, bias=None))
        block = block._replace(unembedding=inputs.unembedding, bias=inputs.bias)
        outputs, _rows, saved = operator.forward(call, block, call.statistics, save=True)

        def block_loss(outputs: dict[str, Array], s: Array) -> Array:
            target_logit = jnp.where(block_rows(bad_target), jnp.nan, outputs["target_logit"])
            values = loss.per_token({**outputs, "target_logit": target_logit}, s)
            return jnp.sum(jnp.where(block.valid, block_rows(weights) * values, 0.0))

        value, (g, d_s) = jax.value_and_grad(block_loss, argnums=(0, 1))(outputs, block.scale)
        if d_scale is not None:
            d_s = d_s + g["log_normalizer"] * outputs["expected_logit"]
            d_scale = chunked.update_rows(d_scale, d_s, start)
        residuals = operator.Residuals(block, outputs, None, saved, differentiated)
        g.pop("expected_logit", None)  # the loss does not read it
        into = None if is_one_block else gradients._replace(hidden=None)
        new = operator.input_gradients(call, residuals, g, into)
        if not is_one_block:
            new = new._replace(hidden=chunked.update_rows(gradients.hidden, new.hidden, start))
        return (total + value, new, d_scale), None

    zeros = {name: jnp.zeros(getattr(inputs, name).shape, jnp.float32) for name in wanted}
    carry = (jnp.zeros(()), Gradients(*map(zeros.get, Gradients._fields)), zeros.get("scale"))
    if is_one_block:  # nothing is added to dW, which has the dtype of W from the start
        carry, _ = step(carry, 0, tokens, None)
    else:
        carry, _ = chunked.fold(step, carry, tokens, max(size, 1))
    value, gradients, d_scale = carry
    return value, gradients._asdict() | {"scale": d_scale}
