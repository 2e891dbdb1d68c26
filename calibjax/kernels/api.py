"""`vocab_stats`, which runs the first of several implementations that can run a call; `explain` gives the reasons."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import chunked, operator, sharded
from calibjax.kernels.contract import Implementation, Inputs, Options, padded
from calibjax.kernels.operator import Call
from calibjax.kernels.pallas_gpu.implementation import PallasGpu
from calibjax.kernels.pallas_tpu.implementation import PallasTpu
from calibjax.kernels.platforms import Platform, platform
from calibjax.kernels.reference import Reference
from calibjax.kernels.sharded import VocabSharding
from calibjax.kernels.stats import DEFAULT_STATISTICS, STATISTICS, VocabStats
from calibjax.runtime.arrays import AnyArray, as_jax, round_up

IMPLEMENTATIONS: dict[str, Implementation] = {
    "pallas_tpu": PallasTpu(),
    "pallas_gpu": PallasGpu(),
    "chunked": chunked.Chunked(),
    "reference": Reference(),
}
"""Name -> implementation, best first.

`implementation=None` takes the first whose `check` does not raise NotImplementedError; an explicit name raises it.
"""


class CannotRun(NotImplementedError, ValueError):
    """No requested implementation can run this call here. It is also a ValueError: an argument may be the reason."""


class Arrays(NamedTuple):
    """The arrays of a call but for the scale, as `vocab_stats` receives them, or `jax.ShapeDtypeStruct`."""

    hidden: Any
    unembedding: Any
    targets: Any = None
    bias: Any = None
    where: Any = None


class Execution(TypedDict, total=False):
    """Options of how `vocab_stats` runs, described there."""

    implementation: str | None
    chunk_size: int | None
    precision: jax.lax.PrecisionLike
    save_logits: bool


def vocab_stats(
    hidden: Float[AnyArray, "*B D"],
    unembedding: Float[AnyArray, "V D"],
    targets: Int[AnyArray, "*B"] | None = None,
    *,
    scale: Float[AnyArray, "*B"] | float | None = None,
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    where: Bool[AnyArray, "*B"] | None = None,
    ignore_index: int = -100,
    statistics: Sequence[str] | None = None,
    sharding: VocabSharding | None = None,
    **execution: Unpack[Execution],
) -> VocabStats:
    """Statistics of the logits z = softcap(h Wᵀ + b) over the vocabulary, without holding all logits.

    softcap(x) = cap·tanh(x / cap). Everything accumulates in float32, whatever the dtype of the inputs.

    Differentiable in `hidden`, `unembedding`, `bias` and `scale` by reverse mode, through every float field but
    `logit_variance`. What is not differentiated costs nothing: a gradient in `scale` alone uses
    ∂ log_normalizer/∂s = E_p[z] and ∂ E_p[z]/∂s = Var_p[z] from the forward pass and adds no product (see `explain`).

    Args:
        hidden: hidden states, `[..., D]`, floating point.
        unembedding: `[V, D]`, floating point.
        targets: `[...]`, integer in [0, V), or `ignore_index`. None leaves out `target_logit` and `correct`.
        scale: inverse temperature s > 0, `[...]` or a scalar; None means 1.
        bias: `[V]`, added to the logits before the soft-cap.
        softcap: cap > 0, or None.
        where: `[...]`, False for tokens that do not count (padding, prompt).
        ignore_index: target value that does not count.
        statistics: names of fields of `VocabStats`; None means all but `logit_variance`.
        sharding: the mesh axes over which tokens and vocabulary are split. None leaves sharded arrays to XLA: correct,
            but W may be gathered. Give None in your own `jax.shard_map`; gradients in W or b need `check_vma=False`.
        implementation: a name in `IMPLEMENTATIONS`, which never falls back; None takes the first that can run this call
            on the devices it is compiled for: the mesh of `sharding` or of `jax.set_mesh`, else the default device.
        chunk_size: columns at a time in "chunked"; None chooses by memory (`chunked.choose_chunk_size`).
        precision: of the products, as in `jax.lax.dot_general`; None means full float32 for float32 inputs.
        save_logits: keep the logits [N, V] from the forward for the backward pass, where it would compute them again:
            three products in all where hidden and unembedding are both differentiated. They are float32; the Pallas
            kernels keep exponentials, in 16 bits for inputs of 16 bits: an error of up to 2⁻⁸ of each p.

    Returns:
        `VocabStats`, each field `[...]`, float32, int32 or bool. Tokens that do not count hold 0 (argmax -1, correct
        False) and give exactly zero gradient, even with NaN in their hidden state.

    Raises:
        ValueError: for shapes, dtypes or options that do not fit.
        NotImplementedError: where the implementation named cannot run this call here, or none can.

    Example:
        >>> import jax.numpy as jnp
        >>> stats = vocab_stats(jnp.ones((2, 4)), jnp.eye(3, 4), jnp.array([0, -100]))
        >>> [round(float(x), 4) for x in stats.log_prob()]
        [-1.0986, 0.0]
    """
    arrays = Arrays(hidden, unembedding, targets, bias, where)
    dispatch, arrays = prepare(arrays, softcap, statistics, sharding, execution)
    scale = as_scale(scale, arrays.hidden.shape[:-1])
    values, valid = run_call(dispatch, arrays, scale, ignore_index)
    return VocabStats(**{name: values.get(name) for name in STATISTICS}, valid=valid, scale=scale)


def as_scale(scale: Any, shape: tuple[int, ...]) -> Array:
    """The scale of each token, in this shape and at least float32; None means 1."""
    scale = as_jax(1.0 if scale is None else scale)
    return jnp.broadcast_to(scale.astype(jnp.promote_types(scale.dtype, jnp.float32)), shape)


def hold_logits(
    hidden: Float[Array, "*B D"],
    unembedding: Float[Array, "V D"],
    targets: Int[Array, "*B"],
    *,
    bias: Float[Array, " V"] | None,
    softcap: float | None,
    where: Bool[Array, "*B"],
) -> Callable[..., VocabStats]:
    """`vocab_stats` as a function of log s `[...]` and `statistics`, by one product for all calls.

    The float32 logits [N, V] are held between the calls: for a few tokens at a time, on one device.
    """
    arrays = Arrays(hidden, unembedding, targets, bias, where)
    dispatch, arrays = prepare(arrays, softcap, (), None, {"implementation": "chunked"})
    inputs, _, _ = flat_inputs(arrays, as_scale(None, hidden.shape[:-1]), -100)
    inputs = operator.with_dtypes(inputs).masked()
    _, logits = chunked.block_logits(dispatch.options, inputs, 0, len(unembedding))
    holder = chunked.Chunked(logits)

    def stats(log_scale: Float[Array, "*B"], statistics: Sequence[str]) -> VocabStats:
        scale = jnp.exp(log_scale)
        at_scale = dispatch._replace(statistics=frozenset(statistics))
        values, valid = _run_on_auto_axes(at_scale, arrays, scale, -100, holder)
        return VocabStats(**{name: values.get(name) for name in STATISTICS}, valid=valid, scale=scale)

    return stats


def run_call(
    dispatch: "Dispatch", arrays: Arrays, scale: Array, ignore_index: int
) -> tuple[dict[str, Array], Bool[Array, "*B"]]:
    """Runs a checked call: its statistics by name, of the leading shape of `hidden`, and which tokens count."""
    sharding = dispatch.sharding
    if sharding is None or not sharding.explicit_axes:
        return _run_on_auto_axes(dispatch, arrays, scale, ignore_index)

    def run(sharding: VocabSharding, operands: tuple[Arrays, Array]) -> Any:
        return _run_on_auto_axes(dispatch._replace(sharding=sharding), *operands, ignore_index)

    return sharded.in_auto_axes(sharding, run, (arrays, scale), sharded.leading_spec(arrays.hidden))


def _run_on_auto_axes(
    dispatch: "Dispatch", arrays: Arrays, scale: Array, ignore_index: int, holder: Implementation | None = None
) -> tuple[dict[str, Array], Bool[Array, "*B"]]:
    """`run_call` where no axis of the mesh is explicit; `holder` has the logits, see `hold_logits`."""
    call = dispatch.call()
    inputs, valid, bad_target = flat_inputs(arrays, scale, ignore_index)
    length = dispatch.shapes.hidden.shape[0]  # N, up to a multiple of the shards
    inputs = inputs._replace(
        hidden=padded(inputs.hidden, length),
        scale=padded(inputs.scale, length, 1),
        targets=padded(inputs.targets, length),
        valid=None if dispatch.shapes.valid is None else padded(inputs.valid, length),
    )
    if holder is None:
        values = operator.compute(call, inputs)
    else:  # not through `compute`: an implementation that holds traced arrays cannot be a static argument
        call = call._replace(implementation=holder)
        values, _, _ = operator.forward(call, operator.with_dtypes(inputs), call.statistics)

    values = {name: x[: valid.size].reshape(*valid.shape, *x.shape[1:]) for name, x in values.items()}
    if "target_logit" in values:
        # No NaN in passing where a token does not count: jax_debug_nans would stop there.
        values["target_logit"] = jnp.where(bad_target, jnp.nan, values["target_logit"])
    if "correct" in dispatch.statistics:
        values["correct"] = values["argmax"] == arrays.targets
    values = {name: value for name, value in values.items() if name in dispatch.statistics}
    return operator.masked_statistics(values, valid), valid


def flat_inputs(arrays: Arrays, scale: Array, ignore_index: int) -> tuple[Inputs, Array, Array]:
    """Flattens the arrays to N tokens. Returns the inputs, which tokens count, and which of these have a bad target.

    A bad target lies outside [0, V) and becomes 0. A token that does not count gets scale 1. Masks are `[...]`.
    """
    hidden, unembedding, targets, bias, where = arrays
    shape = hidden.shape[:-1]
    valid = jnp.ones(shape, bool) if where is None else jnp.broadcast_to(where, shape)
    bad_target = jnp.zeros(shape, bool)
    if targets is not None:
        valid = valid & (targets != ignore_index)
        in_range = (targets >= 0) & (targets < unembedding.shape[0])
        bad_target = valid & ~in_range
        targets = jnp.where(in_range, targets, 0).reshape(-1).astype(jnp.int32)
    scale = jnp.where(valid, scale, 1.0).reshape(-1)
    inputs = Inputs(hidden.reshape(-1, hidden.shape[-1]), unembedding, bias, scale, targets, valid.reshape(-1))
    return inputs, valid, bad_target


class Dispatch(NamedTuple):
    """A checked call: `implementation` is the name requested or None, `statistics` are fields of `VocabStats`.

    `shapes` are `jax.ShapeDtypeStruct` of the inputs that the implementation receives.
    """

    implementation: str | None
    statistics: frozenset[str]
    options: Options
    shapes: Inputs
    sharding: VocabSharding | None

    def over_mesh(self, name: str) -> Implementation:
        """The implementation; with `sharding`, run by every device on its shard."""
        if self.sharding is None:
            return IMPLEMENTATIONS[name]
        return sharded.Sharded(IMPLEMENTATIONS[name], self.sharding.without_trivial_axes())

    def platform(self) -> Platform:
        return platform(None if self.sharding is None else self.sharding.mesh)

    def check(self, name: str) -> tuple[bool, str]:
        """Whether the implementation can run the call here, and its line for `explain`."""
        try:
            return True, self.over_mesh(name).check(self.options, self.shapes, self.platform())
        except NotImplementedError as reason:
            return False, f"cannot run this call here: {reason}"

    def choose(self) -> str:
        """The name requested, or else the first that can run the call here; raises `CannotRun` if none can."""
        reasons = []
        for name in IMPLEMENTATIONS if self.implementation is None else (self.implementation,):
            runs, note = self.check(name)
            if runs:
                return name
            reasons.append(f"implementation={name!r} {note}")
        raise CannotRun("\n".join(reasons))

    def call(self, name: str | None = None) -> Call:
        """The call of the implementation `name`; if None, of the one that `choose` returns."""
        statistics = self.statistics
        if "correct" in statistics:
            statistics = (statistics - {"correct"}) | {"argmax"}
        return Call(self.over_mesh(name or self.choose()), statistics, self.options)


def prepare(
    arrays: Arrays,
    softcap: float | None,
    statistics: Sequence[str] | None,
    sharding: VocabSharding | None,
    execution: Execution,
    scales: tuple[float, ...] | None = None,
) -> tuple[Dispatch, Arrays]:
    """Checks a call; returns the dispatch, and the operands as arrays of JAX (shapes stay shapes).

    With `sharding` the tokens are padded to divide into their shards. For `scales` see `vocab_curves`.
    """

    def array(x: Any) -> Any:
        return x if x is None or isinstance(x, jax.ShapeDtypeStruct) else as_jax(x)

    arrays = Arrays(*map(array, arrays))
    hidden, unembedding, targets, bias, where = arrays
    _check_shapes(*arrays)
    options = _options(softcap, scales, execution)
    dtype = jnp.promote_types(hidden.dtype, unembedding.dtype)
    if options.precision is None and dtype == jnp.float32:
        options = options._replace(precision=jax.lax.Precision.HIGHEST)
    tokens = length = math.prod(hidden.shape[:-1])
    if sharding is not None:
        sharding.check_shape(*unembedding.shape)
        length = round_up(tokens, sharding.count(sharding.tokens))
    masked = targets is not None or where is not None or length > tokens
    shape: Any = jax.ShapeDtypeStruct
    shapes = Inputs(
        hidden=shape((length, hidden.shape[-1]), dtype),
        unembedding=shape(unembedding.shape, dtype),
        bias=None if bias is None else shape(bias.shape, jnp.float32),
        scale=shape((length,), jnp.float32),
        targets=None if targets is None else shape((length,), jnp.int32),
        valid=shape((length,), bool) if masked else None,
    )
    names = _check_statistics(statistics, targets)
    return Dispatch(execution.get("implementation"), names, options, shapes, sharding), arrays


def _check_statistics(statistics: Sequence[str] | None, targets: Array | None) -> frozenset[str]:
    if isinstance(statistics, str):
        raise ValueError(f"statistics: expected a sequence of names, got the text {statistics!r}.")
    names = DEFAULT_STATISTICS if statistics is None else tuple(statistics)
    unknown = sorted(set(names) - set(STATISTICS))
    if unknown:
        raise ValueError(f"statistics: unknown {unknown}; expected names among {list(STATISTICS)}.")
    need_targets = {"target_logit", "correct"}
    if targets is None and statistics is not None and need_targets & set(names):
        raise ValueError(f"statistics: {sorted(need_targets & set(names))} need targets, and none were given.")
    return frozenset(names) - (need_targets if targets is None else set())


def _check_shapes(hidden, unembedding, targets, bias, where) -> None:
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a floating-point array, got {array.dtype}.")
    if unembedding.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != unembedding.shape[1]:
        raise ValueError(f"expected hidden [..., D], unembedding [V, D]; got {hidden.shape} and {unembedding.shape}.")
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


def _options(softcap: float | None, scales: tuple[float, ...] | None, execution: Execution) -> Options:
    name = execution.get("implementation")
    if name is not None and name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {sorted(IMPLEMENTATIONS)} or None, got {name!r}.")
    others: dict[str, Any] = {key: value for key, value in execution.items() if key != "implementation"}
    options = Options(softcap=softcap, scales=scales, **others)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number above 0 or None, got {softcap}.")
    if options.chunk_size is not None and options.chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1 or None, got {options.chunk_size}.")
    return options


_ArrayOrShape = ArrayLike | jax.ShapeDtypeStruct


def explain(
    hidden: _ArrayOrShape,
    unembedding: _ArrayOrShape,
    targets: _ArrayOrShape | None = None,
    *,
    bias: _ArrayOrShape | None = None,
    where: _ArrayOrShape | None = None,
    softcap: float | None = None,
    statistics: Sequence[str] | None = None,
    scales: tuple[float, ...] | None = None,
    sharding: VocabSharding | None = None,
    **execution: Unpack[Execution],
) -> str:
    """Explains which implementation `vocab_stats`, or with `scales` `vocab_curves`, chooses, and what the call costs.

    It takes the arguments of these functions; arrays may be given as `jax.ShapeDtypeStruct`. Returns a text with the
    sizes, every implementation in order with what it would do or why it cannot, and the products N·D·V by what is
    differentiated. Raises ValueError for arguments that do not fit.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2304), (256000, 2304))]
        >>> text = explain(*shapes, implementation="reference", chunk_size=128)
        >>> print(text.splitlines()[-2].strip())
        reference   cannot run this call here: it is dense and takes no chunk_size, save_logits or sharding.
    """
    arrays = Arrays(hidden, unembedding, targets, bias, where)
    called = "vocab_stats" if scales is None else "vocab_curves"
    dispatch, _ = prepare(arrays, softcap, statistics, sharding, execution, scales)
    try:
        chosen = dispatch.choose()
    except NotImplementedError:
        chosen = None
    options, shapes, machine = dispatch.options, dispatch.shapes, dispatch.platform()
    tokens, (vocab_size, width) = shapes.hidden.shape[0], shapes.unembedding.shape
    lines = [
        f"{called}: {tokens} tokens, D = {width}, V = {vocab_size}, {shapes.hidden.dtype}, "
        f"for {machine.name} ({machine.device_kind})"
    ]
    if sharding is not None:
        lines.append(sharding.describe(tokens, vocab_size))
    lines += ["implementations, best first:", *(_describe(dispatch, name, chosen) for name in IMPLEMENTATIONS)]
    if chosen is None:
        return "\n".join([*lines, f"none that was requested can run: {called} raises NotImplementedError"])
    if scales is not None:
        return "\n".join([*lines, f"1 product N·D·V and, for each logit, three sums at each of {len(scales)} scales"])
    call = dispatch.call(chosen)
    if options.save_logits:
        size = call.implementation.saved_bytes(shapes.hidden.dtype.itemsize) * tokens * vocab_size / 2**20
        lines.append(f"saved logits, where the backward pass needs them: {size:.0f} MiB over all devices")
    lines.append("products N·D·V, forward + backward, by what is differentiated:")
    for what, d_hidden, d_unembedding in (
        ("nothing, scale", False, False),
        ("hidden", True, False),
        ("unembedding", False, True),
        ("hidden and unembedding", True, True),
    ):
        forward, backward = _matmul_counts(call, d_hidden, d_unembedding)
        lines.append(f"  {what:<23} {forward} + {backward}")
    return "\n".join(lines)


def _describe(dispatch: Dispatch, name: str, chosen: str | None) -> str:
    runs, note = dispatch.check(name)
    if runs and name == chosen:
        note = f"chosen: {note}"
    elif runs:
        reason = "comes later" if dispatch.implementation is None else "not requested"
        note = f"{reason} (could: {note})"
    return f"  {name:<11} {note}"


def _matmul_counts(call: Call, d_hidden: bool, d_unembedding: bool) -> tuple[int, int]:
    """Products N·D·V of the forward and the backward pass."""
    in_forward = d_hidden and operator.forward_gives_d_hidden(call, hidden_alone=not d_unembedding)
    gradients = (d_hidden and not in_forward) + d_unembedding
    if call.implementation.is_dense or call.options.save_logits:
        return 1 + in_forward, gradients
    # One pass computes the logits again for both, or each gradient has a pass of its own.
    again = gradients if call.implementation.gradients_are_separate else min(gradients, 1)
    return 1 + in_forward, gradients + again
