"""`linear_cross_entropy`: the loss of hidden states under an unembedding, without the logits.

Reduced to a scalar, its cotangent is known up to a factor when the loss is computed: the gradients are formed there, a
block of tokens at a time, and the backward pass only multiplies them. Of the logits of a block each is computed once:

| differentiated | products N·D·V, forward + backward |
|---|---|
| nothing, or the scale alone | 1 + 0 |
| hidden (and scale) | 2 + 0 |
| bias alone; unembedding alone; both with hidden | 1 + 0; 2 + 0; 3 + 0 |

`reduction="none"` costs what `vocab_stats` costs (four products for everything; see `operator`), as does a scalar over
a mesh or under an implementation that cannot add to gradients ("pallas_tpu").
"""

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import api, chunked, operator
from calibjax.kernels.operator import Call, Gradients, Model, Outputs
from calibjax.kernels.platforms import platform
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import VocabStats
from calibjax.runtime.errors import host_indices

Reduction = Literal["none", "mean", "sum"]

_BLOCK_BYTES = 24 * 2**20  # of the float32 logits of one block of tokens, which stay in a CPU's last cache
_BLOCK_TOKENS = 128  # under which the products are too narrow, and reading and writing dW for each block shows
_BLOCK_SHARE = 32  # a block of more tokens than that takes at most this part of all logits
_ACCELERATOR = 16  # times as many bytes and tokens elsewhere


class _Loss(NamedTuple):
    """What is static in a call; `call` holds options of `vocab_stats`, and the statistics that the loss needs."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float
    ignore_index: int
    implementation: str | None
    sharding: VocabSharding | None
    call: Call

    def per_token(self, stats: VocabStats | Outputs, scale: Array) -> Array:
        """The loss of valid tokens."""
        log_normalizer, target_logit, mean_logit = stats.log_normalizer, stats.target_logit, stats.mean_logit
        assert log_normalizer is not None
        assert target_logit is not None
        loss = log_normalizer - scale * target_logit
        if mean_logit is not None:
            loss = loss + self.label_smoothing * scale * (target_logit - mean_logit)
        if self.z_loss:
            loss = loss + self.z_loss * jnp.square(log_normalizer)
        return loss


def linear_cross_entropy(
    hidden: Float[Array, "*B D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "*B"],
    *,
    scale: Float[Array, "*B"] | float | None = None,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "none",
    where: Bool[Array, "*B"] | None = None,
    ignore_index: int = -100,
    implementation: str | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    filter_threshold: float | None = None,
    save_logits: bool = False,
    sharding: VocabSharding | None = None,
) -> Float[Array, "*B"] | Float[Array, ""]:
    """Cross-entropy of softmax(s·z) with z = softcap(h Wᵀ + b), without ever holding the logits of all tokens.

    With β = `label_smoothing` and lse = log Σ_v exp(s·z_v), a token's loss in nats is

        (1−β)(lse − s z_y) + β (lse − s (1/V) Σ_v z_v) + z_loss·lse².

    Differentiable in `hidden`, `unembedding`, `bias` and `scale` by reverse mode. "mean" and "sum" are made for it:
    "chunked" and "pallas_gpu" then form the gradients in the forward pass, and compute no logit twice. That takes,
    beside inputs and outputs, the logits of one block of tokens (`choose_block_size`; in "pallas_gpu" as
    `save_logits` of `vocab_stats` says) and gradients in float32.

    Args:
        hidden: hidden states, `[..., D]`, floating point.
        unembedding: `[V, D]`, floating point.
        targets: `[...]`, integer in [0, V), or `ignore_index`.
        scale: inverse temperature s > 0, `[...]` or a scalar; None means 1.
        bias: `[V]`, added to the logits before the soft-cap.
        softcap: cap > 0, or None.
        label_smoothing: β in [0, 1], a Python number. 0 saves the mean of the logits.
        z_loss: weight of the squared log-normaliser, at least 0, a Python number.
        reduction: "none"; "sum"; or "mean" over the tokens that count, 0 where there are none.
        where: `[...]`, False for tokens that do not count.
        ignore_index: target value that does not count.
        implementation, chunk_size, precision, filter_threshold: as in `vocab_stats`.
        save_logits, sharding: as in `vocab_stats`. Under `sharding` a scalar costs what `vocab_stats` costs; where its
            gradients are formed in the forward pass, `save_logits` makes one block of all tokens.

    Returns:
        float32, `[...]` or a scalar. Tokens that do not count add exactly zero to loss and gradients, whatever their
        hidden state holds. NaN where a target of a token that counts lies outside [0, V).

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
    hidden, unembedding, targets = map(jnp.asarray, (hidden, unembedding, host_indices(targets)))
    bias = None if bias is None else jnp.asarray(bias)
    call, model, _ = api.plan(
        hidden,
        unembedding,
        targets,
        bias=bias,
        softcap=softcap,
        where=where,
        statistics=("log_normalizer", "target_logit", *(("mean_logit",) if label_smoothing else ())),
        chunk_size=chunk_size,
        precision=precision,
        filter_threshold=filter_threshold,
        save_logits=save_logits,
        sharding=sharding,
    )
    chosen = api.IMPLEMENTATIONS[api.choose(implementation, call, model, sharding)]
    call = call._replace(implementation=chosen)
    loss = _Loss(reduction, label_smoothing, z_loss, ignore_index, implementation, sharding, call)
    adds = chosen is not None and chosen.adding is not None
    formed = reduction != "none" and adds and sharding is None
    scale = jnp.asarray(1.0 if scale is None else scale)
    scale = jnp.broadcast_to(scale.astype(jnp.promote_types(scale.dtype, jnp.float32)), targets.shape)
    where = jnp.broadcast_to(True if where is None else where, targets.shape)
    compute = _with_gradients if formed else _from_statistics
    return compute(loss, hidden, unembedding, bias, scale, targets, where)


def _from_statistics(loss: _Loss, hidden, unembedding, bias, scale, targets, where) -> Array:
    """The loss by `vocab_stats`."""
    stats = api.vocab_stats(
        hidden,
        unembedding,
        targets,
        scale=scale,
        bias=bias,
        where=where,
        softcap=loss.call.softcap,
        ignore_index=loss.ignore_index,
        statistics=tuple(loss.call.wanted),
        implementation=loss.implementation,
        chunk_size=loss.call.chunk_size,
        precision=loss.call.precision,
        filter_threshold=loss.call.filter_threshold,
        save_logits=loss.call.save_logits,
        sharding=loss.sharding,
    )
    values = jnp.where(stats.valid, loss.per_token(stats, stats.scale), 0.0)
    if loss.reduction == "none":
        return values
    return jnp.sum(values) / (jnp.maximum(jnp.sum(stats.valid), 1) if loss.reduction == "mean" else 1)


_with_gradients = jax.custom_vjp(_from_statistics, nondiff_argnums=(0,))


def _with_gradients_fwd(loss: _Loss, hidden, unembedding, bias, scale, targets, where):
    named = {"hidden": hidden, "unembedding": unembedding, "scale": scale, **({} if bias is None else {"bias": bias})}
    differentiated = [name for name, x in named.items() if x.perturbed]
    arrays = {"bias": None, **{name: x.value for name, x in named.items()}}
    targets, where = targets.value, where.value
    assert loss.call.implementation is not None
    in_one_pass = operator.takes_rows(loss.call, loss.call.implementation, alone=True)
    if {"unembedding", "bias"} & set(differentiated) or ("hidden" in differentiated and not in_one_pass):
        value, gradients = _by_blocks(loss, **arrays, targets=targets, where=where, differentiated=differentiated)
    else:  # a single pass as it is

        def scalar(active):
            return _from_statistics(loss, **{**arrays, **active}, targets=targets, where=where)

        value, gradients = jax.value_and_grad(scalar)({name: arrays[name] for name in differentiated})
    # An empty array keeps the dtype that the gradient is rounded to, once it has been multiplied.
    dtypes = {name: jnp.zeros((0,), named[name].value.dtype) for name in differentiated}
    return value, (gradients, dtypes)


def _with_gradients_bwd(loss: _Loss, residuals, cotangent):
    gradients, dtypes = residuals
    d = {name: (cotangent * gradient).astype(dtypes[name].dtype) for name, gradient in gradients.items()}
    return d.get("hidden"), d.get("unembedding"), d.get("bias"), d.get("scale"), None, None


_with_gradients.defvjp(_with_gradients_fwd, _with_gradients_bwd, symbolic_zeros=True)


def choose_block_size(tokens: int, vocab_size: int, bytes_a_logit: float = 4) -> int:
    """Tokens a block, of even sizes: 24 MiB of float32 logits on CPU, or 128 tokens, or 1/32 of them where more.

    Elsewhere 384 MiB or 2,048 tokens; twice as many tokens where a logit takes some 2 bytes. Decided while tracing, by
    `platforms.platform()`.
    """
    factor = (1 if platform().name == "cpu" else _ACCELERATOR) * round(4 / bytes_a_logit)
    block = max(factor * _BLOCK_BYTES // (4 * vocab_size), factor * _BLOCK_TOKENS, tokens // _BLOCK_SHARE)
    blocks = max(-(-tokens // block), 1)
    return max(-(-tokens // blocks), 1)


def _by_blocks(
    loss: _Loss, hidden, unembedding, bias, scale, targets, where, differentiated: list[str]
) -> tuple[Array, dict[str, Array]]:
    """The reduced loss and its gradients in what is differentiated, the unembedding or the bias among it."""
    shape, (vocab_size, width) = hidden.shape, unembedding.shape
    dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
    valid = (where & (targets != loss.ignore_index)).reshape(-1)
    targets, scale = targets.reshape(-1), jnp.where(valid, scale.reshape(-1), 1.0)
    in_range = (targets >= 0) & (targets < vocab_size)
    broken = valid & ~in_range
    targets = jnp.where(in_range, targets, 0).astype(jnp.int32)
    weights = valid / (jnp.maximum(jnp.sum(valid), 1) if loss.reduction == "mean" else 1.0)
    model = Model(
        hidden=hidden.reshape(-1, width).astype(dtype),
        unembedding=unembedding.astype(dtype),
        bias=None if bias is None else bias.astype(jnp.float32),
        valid=valid,
    )
    wanted = loss.call.wanted | ({"expected_logit"} if "scale" in differentiated else set())
    implementation = loss.call.implementation
    assert implementation is not None
    assert implementation.adding is not None
    adding = implementation.adding
    names = ("hidden", "unembedding", "bias")
    flags = tuple(() if name in differentiated else None for name in names)

    def step(carry: Any, start: Array | int, width: int, _: None) -> Any:
        total, gradients, d_scale = carry
        block = loss.call._replace(implementation=adding(gradients._replace(hidden=None)), wanted=wanted)
        of_block = functools.partial(chunked.rows, start=start, width=width)
        piece = model._replace(hidden=of_block(model.hidden), valid=of_block(valid))
        s, y = of_block(scale), of_block(targets)
        outputs, _rows, saved = operator.run_forward(block, piece, s, y, wanted, False, True)

        def reduced(outputs: Outputs, s: Array) -> Array:
            assert outputs.target_logit is not None
            known = outputs._replace(target_logit=jnp.where(of_block(broken), jnp.nan, outputs.target_logit))
            values = loss.per_token(known, s)
            return jnp.sum(jnp.where(of_block(valid), of_block(weights) * values, 0.0))

        value, (g, d_s) = jax.value_and_grad(reduced, argnums=(0, 1))(outputs, s)
        g = g._replace(expected_logit=None)
        kept = operator.Kept(piece, y, outputs, None, saved, flags)
        found = operator.model_gradients(block, kept, s, g)
        if d_scale is not None:
            d_scale = chunked.put(d_scale, d_s + g.log_normalizer * outputs.expected_logit, start)
        found = found._replace(hidden=chunked.put(gradients.hidden, found.hidden, start))
        return total + value, found, d_scale

    def zeros(name: str, *shape: int) -> Array | None:
        return jnp.zeros(shape, jnp.float32) if name in differentiated else None

    tokens = model.hidden.shape[0]
    start = Gradients(
        zeros("hidden", tokens, width), zeros("unembedding", vocab_size, width), zeros("bias", vocab_size)
    )
    carry = (jnp.zeros(()), start, zeros("scale", tokens))
    size = tokens if loss.call.save_logits else choose_block_size(tokens, vocab_size, implementation.saved_bytes)
    value, gradients, d_scale = chunked.fold(step, carry, tokens, max(size, 1))
    found: dict[str, Any] = {**gradients._asdict(), "scale": d_scale}
    shapes = {"hidden": shape, "unembedding": unembedding.shape, "bias": (vocab_size,), "scale": shape[:-1]}
    return value, {name: found[name].reshape(shapes[name]) for name in differentiated}
