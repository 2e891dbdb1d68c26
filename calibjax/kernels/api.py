"""`vocab_stats`: one contract, several implementations, chosen by an ordered table."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import chunked, operator, pallas_gpu, pallas_tpu, reference, sharded
from calibjax.kernels.operator import Call, Implementation, Model
from calibjax.kernels.platforms import platform
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import DEFAULT_STATISTICS, STATISTICS, VocabStats
from calibjax.runtime.errors import host_indices

IMPLEMENTATIONS: dict[str, Implementation | None] = {
    "pallas_tpu": pallas_tpu.IMPLEMENTATION,
    "chunked": chunked.IMPLEMENTATION,
    "pallas_gpu": pallas_gpu.IMPLEMENTATION,  # after "chunked", which runs anywhere, until it is measured to be faster
    "reference": None,
}
"""Name -> implementation, best first; None stands for the dense formula, differentiated by JAX itself.

`implementation=None` takes the first whose `check` does not raise NotImplementedError; an explicit name raises it.
`explain` says which that is, and why.
"""


class CannotRun(NotImplementedError, ValueError):
    """No implementation that was asked for can run this call here; a ValueError too, as an argument may be why."""


def vocab_stats(
    hidden: Float[Array, "*B D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "*B"] | None = None,
    *,
    scale: Float[Array, "*B"] | float | None = None,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    where: Bool[Array, "*B"] | None = None,
    ignore_index: int = -100,
    statistics: Sequence[str] | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    filter_threshold: float | None = None,
    save_logits: bool = False,
    sharding: VocabSharding | None = None,
) -> VocabStats:
    """Statistics of the logits z = softcap(h Wᵀ + b) over the vocabulary, without ever holding them all.

    softcap(x) = cap·tanh(x / cap). Everything accumulates in float32, whatever the dtype of the inputs.

    Differentiable in `hidden`, `unembedding`, `bias` and `scale` by reverse mode, through `log_normalizer`,
    `target_logit`, `mean_logit`, `max_logit` (its subgradient: the row of `argmax`) and `expected_logit`;
    `logit_variance` is a constant under differentiation. What is not differentiated costs nothing: a gradient in
    `scale` alone uses ∂ log_normalizer/∂s = E_p[z] and ∂ E_p[z]/∂s = Var_p[z] from the forward pass and adds no
    product.

    Cost of the statistics beyond the one product: `log_normalizer`, `max_logit` one pass over the logits; `argmax`,
    `expected_logit`, `logit_variance` one more elementwise pass each; `target_logit` a gather; `mean_logit` one row
    (with a soft-cap a pass).

    Args:
        hidden: hidden states, `[..., D]`, floating point.
        unembedding: `[V, D]`, floating point.
        targets: `[...]`, integer in [0, V), or `ignore_index`. None leaves out `target_logit` and `correct`.
        scale: inverse temperature s > 0, `[...]` or a scalar; None means 1.
        bias: `[V]`, added to the logits before the soft-cap.
        softcap: cap > 0, or None.
        where: `[...]`, False for tokens that do not count (padding, prompt).
        ignore_index: target value that does not count.
        statistics: names of the wanted fields of `VocabStats`; None means all but `logit_variance`.
        implementation: a name in `IMPLEMENTATIONS`; None takes the first that can run this call on the devices it is
            compiled for: the mesh of `sharding`, or that in context (`jax.set_mesh`), or else the default device. An
            explicit name never falls back. "pallas_gpu" (Hopper) runs by its name only: it has not been timed yet.
        chunk_size: columns at a time in "chunked"; None chooses by memory (`chunked.choose_chunk_size`).
        precision: of the products, as in `jax.lax.dot_general`; None means full float32 for float32 inputs.
        filter_threshold: in the backward pass, leave out blocks of tokens and vocabulary in which every p_v is below
            this, a number of at least 0: their part p_v W_v of dh and p_v h of dW, and with it that product, not the
            logits. What one-hots and `mean_logit` add stays exact, unless a soft-cap ties `mean_logit` to the blocks:
            then its part of such a block, g (1 − (z/cap)²)/V, is left out too, an approximation. The blocks are the
            implementation's ("chunked": 128 tokens by at most 512 columns; "pallas_tpu": those of its kernels, 1,024
            by 512 where memory allows); dh that comes out of the forward pass is exact. None or 0 leaves out nothing.
        save_logits: keep the logits [N, V] from the forward for the backward pass, where that would compute them anew:
            three products in all where hidden and unembedding are both differentiated. They are float32; "pallas_gpu"
            keeps their exponentials in bfloat16, an error of up to 2⁻⁸ of each p but the target's and the largest.
        sharding: the mesh axes over which tokens and vocabulary are split: each device computes with the rows of the
            unembedding that it holds, and what they find is merged (`calibjax.kernels.sharded`). None leaves to XLA
            what to do with sharded arrays: right, but W may be gathered.

    Returns:
        `VocabStats`, each field `[...]`, float32, int32 or bool. Tokens that do not count hold 0 (argmax -1, correct
        False) and give exactly zero gradient, whatever their hidden state holds.

    Raises:
        ValueError: for shapes, dtypes or options that do not fit.
        NotImplementedError: where the implementation named cannot run this call here, or none can.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = vocab_stats(jnp.ones((2, 4)), jnp.eye(3, 4), jnp.array([0, -100]))
        >>> [round(float(x), 4) for x in stats.log_prob()]
        [-1.0986, 0.0]
    """
    hidden, unembedding = jnp.asarray(hidden), jnp.asarray(unembedding)
    targets = None if targets is None else jnp.asarray(host_indices(targets))
    call, model, wanted = plan(
        hidden,
        unembedding,
        targets,
        bias=bias,
        softcap=softcap,
        where=where,
        statistics=statistics,
        chunk_size=chunk_size,
        precision=precision,
        filter_threshold=filter_threshold,
        save_logits=save_logits,
        sharding=sharding,
    )
    call = call._replace(
        implementation=over_mesh(IMPLEMENTATIONS[choose(implementation, call, model, sharding)], sharding)
    )

    shape, vocab_size = hidden.shape[:-1], unembedding.shape[0]
    full_scale = jnp.asarray(1.0 if scale is None else scale)
    full_scale = jnp.broadcast_to(full_scale.astype(jnp.promote_types(full_scale.dtype, jnp.float32)), shape)
    valid = jnp.ones(shape, bool) if where is None else jnp.broadcast_to(where, shape)
    if targets is not None:
        valid = valid & (targets != ignore_index)
    counted_scale = jnp.where(valid, full_scale, 1.0)
    flat_targets = in_range = None
    if targets is not None:
        in_range = (targets >= 0) & (targets < vocab_size)
        flat_targets = jnp.where(in_range, targets, 0).reshape(-1).astype(jnp.int32)

    tokens, padded = valid.size, model.hidden.shape[0]
    compute = reference.statistics if call.implementation is None else operator.statistics
    values = compute(
        call,
        _pad(hidden.reshape(-1, hidden.shape[-1]), padded),
        unembedding,
        bias,
        _pad(counted_scale.reshape(-1), padded, 1),
        _pad(flat_targets, padded),
        None if model.valid is None else _pad(valid.reshape(-1), padded),
    )
    values = {name: value[:tokens].reshape(shape) for name, value in values.items()}
    if "target_logit" in values:
        assert in_range is not None
        values["target_logit"] = jnp.where(in_range, values["target_logit"], jnp.nan)
    if "correct" in wanted:
        values["correct"] = (values["argmax"] == targets) & valid
    filler = {"argmax": -1, "correct": False}
    masked = {name: jnp.where(valid, value, filler.get(name, 0)) for name, value in values.items() if name in wanted}
    return VocabStats(**{name: masked.get(name) for name in STATISTICS}, valid=valid, scale=full_scale)


def plan(
    hidden: Any,
    unembedding: Any,
    targets: Any,
    *,
    bias: Any = None,
    scale: Any = None,
    softcap: float | None = None,
    where: Any = None,
    ignore_index: int = -100,
    statistics: Sequence[str] | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    filter_threshold: float | None = None,
    save_logits: bool = False,
    sharding: VocabSharding | None = None,
) -> tuple[Call, Model, frozenset[str]]:
    """The checked call but for its implementation, the shapes that `operator` will see, and the wanted statistics.

    Looks at shapes and dtypes only. With `sharding` the tokens are padded to divide into their shards.
    """
    bias, where = (x if x is None or hasattr(x, "dtype") else jnp.asarray(x) for x in (bias, where))
    _check_shapes(hidden, unembedding, targets, bias, where)
    _check_options(softcap, chunk_size, filter_threshold)
    wanted = _wanted(statistics, targets)
    dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
    if precision is None and dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    needs_argmax = {"argmax"} if "correct" in wanted else set()
    call = Call(
        implementation=None,
        wanted=frozenset((wanted - {"correct"}) | needs_argmax),
        softcap=softcap,
        precision=precision,
        chunk_size=chunk_size,
        filter_threshold=filter_threshold,
        save_logits=save_logits,
    )
    tokens, padding = math.prod(hidden.shape[:-1]), 0
    if sharding is not None:
        sharding.check_shape(*unembedding.shape)
        padding = -tokens % sharding.count(sharding.tokens)
    masked = targets is not None or where is not None or padding > 0
    model = Model(
        hidden=_shape((tokens + padding, hidden.shape[-1]), dtype),
        unembedding=_shape(unembedding.shape, dtype),
        bias=None if bias is None else _shape(bias.shape, jnp.float32),
        valid=_shape((tokens + padding,), bool) if masked else None,
    )
    return call, model, wanted


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _pad(x: Array | None, length: int, value: int = 0) -> Any:
    """`x` with its first axis padded at the end; for a mask, with False."""
    if x is None or x.shape[0] == length:
        return x
    return jnp.pad(x, ((0, length - x.shape[0]), *((0, 0),) * (x.ndim - 1)), constant_values=value)


def over_mesh(implementation: Implementation | None, sharding: VocabSharding | None) -> Implementation | None:
    """The implementation that runs with `sharding`: itself on every device's part; None is the dense formula."""
    if implementation is None or sharding is None:
        return implementation
    return sharded.implementation(implementation, sharding)


def check(name: str, call: Call, model: Model, sharding: VocabSharding | None) -> str:
    """What the implementation says of this call; raises NotImplementedError where it cannot run it here."""
    implementation = over_mesh(IMPLEMENTATIONS[name], sharding)
    if implementation is None:
        return reference.check(call, sharding is not None)
    return implementation.check(call, model, platform(None if sharding is None else sharding.mesh))


def choose(name: str | None, call: Call, model: Model, sharding: VocabSharding | None) -> str:
    """`name`, or for None the first implementation, that can run this call here; raises `CannotRun` where none can."""
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {sorted(IMPLEMENTATIONS)} or None, got {name!r}.")
    reasons = []
    for candidate in IMPLEMENTATIONS if name is None else (name,):
        try:
            check(candidate, call, model, sharding)
        except NotImplementedError as reason:
            reasons.append(f"implementation={candidate!r} cannot run this call here: {reason}")
        else:
            return candidate
    raise CannotRun("\n".join(reasons))


def _wanted(statistics: Sequence[str] | None, targets: Array | None) -> frozenset[str]:
    names = DEFAULT_STATISTICS if statistics is None else tuple(statistics)
    unknown = sorted(set(names) - set(STATISTICS))
    if unknown:
        raise ValueError(f"statistics: unknown {unknown}; expected names among {list(STATISTICS)}.")
    of_targets = {"target_logit", "correct"}
    if targets is None and statistics is not None and of_targets & set(names):
        raise ValueError(f"statistics: {sorted(of_targets & set(names))} need targets, and none were given.")
    return frozenset(names) - (of_targets if targets is None else set())


def _check_shapes(hidden, unembedding, targets, bias, where) -> None:
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a floating-point array, got {array.dtype}.")
    if unembedding.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != unembedding.shape[1]:
        raise ValueError(
            f"expected hidden [..., D] and unembedding [V, D] with one D, got {hidden.shape} and {unembedding.shape}."
        )
    if unembedding.shape[0] < 1:
        raise ValueError("unembedding: expected at least one row.")
    if targets is not None:
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            raise ValueError(f"targets: expected integers, got {targets.dtype}.")
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(f"targets: expected shape {hidden.shape[:-1]} as hidden has, got {targets.shape}.")
    if bias is not None and bias.shape != (unembedding.shape[0],):
        raise ValueError(f"bias: expected shape ({unembedding.shape[0]},), got {bias.shape}.")
    if where is not None and where.dtype != bool:
        raise ValueError(f"where: expected booleans, got {where.dtype}.")


def _check_options(softcap: float | None, chunk_size: int | None, filter_threshold: float | None) -> None:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected a number above 0 or None, got {softcap}.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1 or None, got {chunk_size}.")
    if filter_threshold is not None and not filter_threshold >= 0:
        raise ValueError(f"filter_threshold: expected a number of at least 0 or None, got {filter_threshold}.")
