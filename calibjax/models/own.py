"""Models of other libraries: any function of tokens, and hidden states or logits that are already computed."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from calibjax.data import Sequences, check_ids
from calibjax.models.model import LanguageModel
from calibjax.runtime.arrays import AnyArray, as_array, ceil_div
from calibjax.runtime.checksums import array_hash
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import param_shardings, replicated


@dataclasses.dataclass(frozen=True)
class FunctionConfig:
    """The function of a `FunctionModel`, the names of its keywords, and its sizes. Hashable."""

    apply: Callable[..., Any]
    keywords: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_inputs: int  # number of distinct token ids that `apply` accepts
    logit_softcap: float | None = None
    max_positions: int = 2**30

    def __call__(self, params: Any, batch: Any) -> Array:
        """Hidden states `[B, T, D]`, or logits `[B, T, V]`."""
        return self.apply(params, batch["tokens"], **{name: batch[name] for name in self.keywords})


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionModel:
    """A frozen model that is a function; see `from_function`."""

    config: FunctionConfig
    params: Any  # pytree of arrays
    dtype: jnp.dtype  # of computations
    fingerprint: str  # a head with another fingerprint is refused
    unembedding: Float[Array, "V D"] | None  # None where the model gives logits
    unembedding_bias: Float[Array, " V"] | None

    def __repr__(self) -> str:
        gives = "logits" if self.unembedding is None else f"hidden states of {self.config.hidden_size:,}"
        return f"FunctionModel({gives}, vocabulary {self.config.vocab_size:,}, {self.fingerprint[:21]})"


FrozenModel = LanguageModel | FunctionModel
"""A frozen model: made by `load_model`, `LanguageModel.from_params`, `from_function` or `from_arrays`."""


def from_function(
    apply: Callable[..., Float[Array, "B T D"]],
    params: Any,
    unembedding: Float[AnyArray, "V D"] | None = None,
    *,
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    dtype: DTypeLike | None = None,
    fingerprint: str | None = None,
) -> FunctionModel:
    """A model of any library (linen, NNX, Equinox, MaxText, tunix), for `fit_ats` and `evaluate`.

    Args:
        apply: pure function `(params, tokens [B, T]) -> hidden states [B, T, D]` after the final norm; or, without
            `unembedding`, `-> logits [B, T, V]`, held for one batch. If it has parameters named `segment_ids` or
            `positions`, it receives these of packed sequences, int32 `[B, T]`.
        params: pytree of arrays, the first argument of `apply`. Arrays on the devices of a run's mesh keep their
            sharding; others are copied to every device.
        unembedding, bias, softcap: W `[V, D]`, b `[V]` and c: the logits are z = h Wᵀ + b, or c tanh(z/c).
        dtype: of the product with `unembedding`; default: the dtype of `unembedding`, float32 for logits.
        fingerprint: name of the model, which heads keep; default: a hash of all parameters.

    Raises:
        UserError: the function does not return one array of the width expected.

    Example:
        >>> params = {"embed": jnp.eye(5, 4), "out": jnp.ones((5, 4))}
        >>> from_function(lambda params, tokens: params["embed"][tokens], params, params["out"], fingerprint="tiny")
        FunctionModel(hidden states of 4, vocabulary 5, function:tiny)
    """
    if unembedding is None and not (bias is None and softcap is None):
        raise UserError("bias, softcap: logits have them already; leave them out, or give the unembedding.")
    if any(cls.__module__.startswith("torch.") for cls in type(apply).__mro__):
        hint = "compute its hidden states or logits, and give them to calibjax.from_arrays"
        raise UserError(f"apply: expected a function of JAX arrays, got a PyTorch module; {hint}.")
    takes = inspect.signature(apply).parameters
    keywords = tuple(name for name in ("segment_ids", "positions") if name in takes)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    output = jax.eval_shape(apply, params, tokens, **dict.fromkeys(keywords, tokens))
    shape = getattr(output, "shape", ())
    if shape[:2] != (1, 8) or len(shape) != 3:
        got = shape or f"a {type(output).__name__}"
        raise UserError(f"apply: expected one array [B, T, D] (or logits [B, T, V]) of tokens [1, 8], got {got}.")
    width = vocab_size = shape[2]
    if unembedding is not None:
        vocab_size, columns = np.shape(unembedding)
        if columns != width:
            hint = "; transpose it" if vocab_size == width else ""
            raise UserError(f"unembedding: expected [V, {width}], got {list(np.shape(unembedding))}{hint}.")
    config = FunctionConfig(apply, keywords, width, vocab_size, num_inputs=vocab_size, logit_softcap=softcap)
    weights = [x if x is None or isinstance(x, jax.Array) else jnp.asarray(as_array(x)) for x in (unembedding, bias)]
    compute = jnp.float32 if weights[0] is None else weights[0].dtype
    if fingerprint is None:
        fingerprint = _digest((params, weights, softcap))
    return FunctionModel(config, params, jnp.dtype(dtype or compute), f"function:{fingerprint}", *weights)


def from_arrays(
    values: Float[AnyArray, "*B D"],
    targets: Int[AnyArray, "*B"],
    unembedding: Float[AnyArray, "V D"] | None = None,
    *,
    bias: Float[AnyArray, " V"] | None = None,
    softcap: float | None = None,
    where: Bool[AnyArray, "*B"] | None = None,
) -> tuple[FunctionModel, Sequences]:
    """Hidden states, or logits, that are already computed (JAX, NumPy or PyTorch), as a model and its data.

    Args:
        values: hidden states `[N, D]` or, of sequences, `[S, T, D]`; without `unembedding`, logits `[..., V]`.
        targets: int, of the leading shape of `values`; -100 does not count.
        unembedding, bias, softcap: as in `from_function`.
        where: bool, of the leading shape; False for predictions that do not count.

    Returns:
        (model, data), for `fit_ats` and `evaluate`. A fitted head is accepted by any model with the same unembedding,
        such as one of further arrays. 64 consecutive predictions of `[N, D]`, or half of fewer than 128, make a
        sequence, the unit of splits and intervals; heads with attention read each prediction alone.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> logits = rng.normal(size=(640, 5)).astype(np.float32)
        >>> lm, data = from_arrays(4 * logits, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1))
        >>> data
        Sequences(10 of 64 inputs, 640 targets in the loss)
    """
    values, targets = as_array(values), as_array(targets)
    counted = np.ones(targets.shape, bool) if where is None else as_array(where)
    if values.ndim not in (2, 3) or not targets.shape == counted.shape == values.shape[:-1]:
        shapes = f"values {values.shape}, targets {targets.shape}, where {counted.shape}"
        raise UserError(f"expected values [N, D] or [S, T, D], and targets and where of their shape, got {shapes}.")
    if targets.dtype.kind not in "iub":
        raise UserError(f"targets: expected integers, got {targets.dtype}.")
    flat = values.reshape(-1, values.shape[-1])
    has_sequences = values.ndim == 3
    # Predictions without an axis of time are cut into sequences of 64.
    length = values.shape[1] if has_sequences else min(64, max(len(flat) // 2, 1))
    rows = ceil_div(len(flat), length)

    def cut(x: np.ndarray) -> np.ndarray:
        return np.pad(np.ravel(x), (0, rows * length - len(flat))).reshape(rows, length)

    column = np.arange(length)
    real = cut(np.ones(len(flat), bool))
    segment = 1 if has_sequences else column + 1  # a prediction without an axis of time is a text of its own
    position = column if has_sequences else 0
    data = Sequences(
        tokens=cut(np.arange(len(flat), dtype=np.int32)),
        targets=cut(targets).astype(np.int32),
        where=cut(counted & (targets != -100)),
        segment_ids=(real * segment).astype(np.int32),
        positions=(real * position).astype(np.int32),
        source=np.arange(rows, dtype=np.int32),
    )
    fingerprint = _digest((unembedding, bias, softcap, None if unembedding is not None else values.shape[-1]))
    lm = from_function(_look_up, flat, unembedding, bias=bias, softcap=softcap, fingerprint=fingerprint)
    return dataclasses.replace(lm, config=dataclasses.replace(lm.config, num_inputs=len(flat))), data


def _look_up(table: Array, tokens: Int[Array, "B T"]) -> Array:
    return table[tokens]


def _digest(tree: Any) -> str:
    return array_hash({jax.tree_util.keystr(path): as_array(leaf) for path, leaf in jax.tree.leaves_with_path(tree)})


def check_sequences(lm: FrozenModel, sequences: Sequences) -> None:
    """Raises `UserError` where ids are not the model's, no target counts, or its function cannot read packed texts."""
    config = lm.config
    if not isinstance(config, FunctionConfig):
        check_ids(sequences, config.vocab_size)
        return
    check_ids(sequences, config.vocab_size, config.num_inputs)
    if "segment_ids" not in config.keywords and config.apply is not _look_up and np.max(sequences.segment_ids) > 1:
        problem = "this model's function has no parameter segment_ids that keeps them apart"
        hint = 'Give it one, or load the text with layout="pad".'
        raise UserError(f"sequences: several texts are packed in one sequence, and {problem}. {hint}")


def place_model(lm: FrozenModel, mesh: Mesh) -> FrozenModel:
    """The model on a mesh: the weights of a `LanguageModel` by `sharding.RULES`, others as in `from_function`."""
    if isinstance(lm, LanguageModel):
        return dataclasses.replace(lm, params=jax.device_put(lm.params, param_shardings(mesh, lm.params)))
    devices = set(mesh.devices.flat)

    def place(leaf: Any) -> Any:
        is_placed = isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices
        return leaf if is_placed else jax.device_put(leaf, replicated(mesh))

    names = ("params", "unembedding", "unembedding_bias")
    return dataclasses.replace(lm, **{name: jax.tree.map(place, getattr(lm, name)) for name in names})
