"""Temperature heads: Flax modules from features of the frozen model to the log inverse temperature of each token.

A head returns log_scale `[B, T]`; the logits are multiplied by s = exp(log_scale) > 0, so no head can change which
token is the most likely. log_scale is clipped to [log 1/20, log 10]: the upper end is the authors'; the lower end,
which they do not have, prevents a distribution from becoming uniform. By default a head starts as the identity (s = 1).

"The authors" wrote Adaptive Temperature Scaling (arXiv 2409.19817); their code is at
github.com/Johnathan-Xie/adaptive-temperature-scaling (src/llmtuner/model/calibration/head.py, commit f144309).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels import VocabSharding, VocabStats, vocab_stats
from calibjax.nn.blocks import Block, BlockConfig, Dense, segment_positions, sequence_context
from calibjax.nn.kv_cache import Cache, fill, full_cache, reserve
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Range, check_options
from calibjax.runtime.sharding import lookup

MIN_SCALE, MAX_SCALE = 0.05, 10.0
MAX_LOG_FACTOR = 6.0  # largest |log_factor|; `fit_temperature` searches the same range
NO_MIN_SCALE = 1e-30  # uniform to every digit of float32, but a normal number: the most likely token remains distinct

Features = Float[Array, "B T F"]
PerToken = Float[Array, "B T"]
Mask = Bool[Array, "B T"] | None
Segments = Int[Array, "B T"] | None


class Feature(NamedTuple):
    """What a head can read of each token: an entry of `FEATURES`."""

    width: int | None  # numbers per token; None: D, the width of the hidden states
    statistics: tuple[str, ...] = ()  # fields of `vocab_stats` at s = 1 that it is computed from
    # Computes the feature from these statistics; None: `head_features` computes it from h or W.
    function: Callable[[VocabStats], Float[Array, "... F"]] | None = None


def _logit_statistics(stats: VocabStats) -> Float[Array, "... 4"]:
    """−log max p, log(1 + max z − E_p[z]), log(1 + Var_p[z]), and mean z − max z; 0 for a token that does not count.

    Entropy-based and parameterised temperature scaling read them (arXiv 2206.08957, 2102.12182 and 2207.06211).
    """
    largest = stats.require("max_logit")
    numbers = (
        -stats.log_confidence(),
        jnp.log1p(jnp.maximum(largest - stats.require("expected_logit"), 0.0)),
        jnp.log1p(stats.require("logit_variance")),
        # A bias of −inf, which removes an entry, makes it −inf.
        jnp.maximum(stats.require("mean_logit") - largest, -1e3),
    )
    return jnp.where(stats.valid[..., None], jnp.stack(numbers, axis=-1), 0.0)


FEATURES = {
    "hidden_states": Feature(None),
    "logit_statistics": Feature(
        4, ("log_normalizer", "max_logit", "expected_logit", "logit_variance", "mean_logit"), _logit_statistics
    ),
    "max_logit": Feature(1, ("max_logit",), lambda stats: stats.require("max_logit")[..., None]),
    "log_std_logits": Feature(1),
    "argmax_embedding": Feature(None, ("argmax",)),
}
"""Features that a head can read. All but `logit_statistics` are from the appendix of arXiv 2409.19817."""

# U(−1/√F, 1/√F), F inputs: the start of torch.nn.Linear, which every matrix and bias of the authors' heads has.
_torch_kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class _Head(nn.Module, kw_only=True):
    """A head that reads features `[B, T, F]`; for its fields see `HeadConfig`. Returns float32 `[B, T]`.

    `where` (False for tokens that do not count) and `segment_ids` matter for the pooling over sequences.
    """

    identity_start: bool = True
    pooling: str = "token"
    min_scale: float = MIN_SCALE

    @nn.compact
    def __call__(self, features: Features, *, where: Mask = None, segment_ids: Segments = None) -> Any:
        return self._output_log_scale(self._transformed(features), where, segment_ids)

    def _transformed(self, features: Features) -> Float[Array, "B T H"]:
        return features

    def _output_log_scale(self, features: Float[Array, "B T H"], where: Mask, segment_ids: Segments) -> Array:
        """The last layer: H -> 1, optionally pooled over sequences, clipped; `[B, T]`."""
        kernel_init = bias_init = nn.initializers.zeros
        if not self.identity_start:
            kernel_init = _torch_kernel_init
            bound = 1 / math.sqrt(features.shape[-1])
            bias_init = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        dense = Dense(1, kernel_init=kernel_init, bias_init=bias_init, dtype=jnp.float32, name="output")
        log_scale = dense(features.astype(jnp.float32))[..., 0]
        if self.pooling == "sequence":
            log_scale = sequence_mean(log_scale, where, segment_ids)
        return jnp.clip(log_scale, math.log(self.min_scale), math.log(MAX_SCALE))


def sequence_mean(values: PerToken, where: Mask = None, segment_ids: Segments = None) -> PerToken:
    """For each token the mean over all tokens of its segment that count, earlier and later ones."""
    counts = jnp.ones(values.shape, bool) if where is None else where
    segment_ids = jnp.zeros(values.shape, jnp.int32) if segment_ids is None else segment_ids
    in_segment = (segment_ids[:, :, None] == segment_ids[:, None, :]) & counts[:, None, :]
    total = jnp.sum(values[:, None, :], axis=-1, where=in_segment)
    return total / jnp.maximum(jnp.sum(in_segment, axis=-1, dtype=values.dtype), 1.0)


class ConstantHead(nn.Module):
    """One learned log inverse temperature for every token. Reads nothing but the shape of the features."""

    min_scale: float = MIN_SCALE

    @nn.compact
    def __call__(self, features: Features, **_: Any) -> PerToken:
        log_scale = self.param("log_scale", nn.initializers.zeros, (), jnp.float32)
        log_scale = jnp.clip(log_scale, math.log(self.min_scale), math.log(MAX_SCALE))
        return jnp.broadcast_to(log_scale, features.shape[:2])


class LinearHead(_Head):
    """log_scale = w·f + b."""


class MLPHead(_Head):
    """log_scale = w·(silu(f̂ A) ⊙ (f̂ B)) + b with f̂ = f / rms(f): a gated MLP and a linear output.

    The norm makes one learning rate serve models whose hidden states differ by orders of magnitude. The authors' MLP
    reads f itself (`normalize=False`), and has one more matrix, back to the width of f, before its output.
    `intermediate_size` is the width of A and B; the two products are computed in `dtype`.
    """

    intermediate_size: int
    normalize: bool = True
    dtype: DTypeLike = jnp.float32

    def _transformed(self, features: Features) -> Float[Array, "B T H"]:
        features = features.astype(jnp.float32)
        if self.normalize:
            features = nn.RMSNorm(epsilon=1e-6, use_scale=False)(features)
        kernel_init = nn.linear.default_kernel_init if self.identity_start else _torch_kernel_init
        # One product for both halves of the gate.
        width = 2 * self.intermediate_size
        dense = Dense(width, use_bias=False, dtype=self.dtype, kernel_init=kernel_init, name="gate_up")
        gate, up = jnp.split(dense(features), 2, axis=-1)
        return nn.silu(gate) * up


class TransformerHead(_Head):
    """One Llama block over the sequence, then a linear output: the head of arXiv 2409.19817, section 3.

    Attention is causal and stays inside each segment. Features that are not `hidden_size` wide are first projected; the
    authors' block is as wide as all features together. `cache` is the cache of the tokens before these. If it or `keep`
    is given, the result is a pair: log_scale and the new cache.
    """

    block: BlockConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        features: Features,
        *,
        where: Mask = None,
        segment_ids: Segments = None,
        cache: Cache | None = None,
        keep: bool = False,
    ) -> PerToken | tuple[PerToken, Cache]:
        if segment_ids is None:
            segment_ids = jnp.ones(features.shape[:2], jnp.int32)
        features = jnp.where(segment_ids[..., None] > 0, features, 0.0).astype(self.dtype)  # padding may hold NaN
        init: dict[str, Any] = {} if self.identity_start else {"kernel_init": _torch_kernel_init}
        if features.shape[-1] != self.block.hidden_size:
            width = self.block.hidden_size
            features = Dense(width, use_bias=False, dtype=self.dtype, name="project", **init)(features)
        block = Block(self.block, dtype=self.dtype, name="block", **init)
        if cache is None:
            context = sequence_context(self.block, segment_positions(segment_ids), segment_ids)
            mixed, new = block(features, context)
        else:
            cache, positions = reserve(cache, segment_ids)
            context = sequence_context(self.block, positions, cache.segment_ids, start=cache.length)
            mixed, new = block(features, context, cache.past)
        log_scale = self._output_log_scale(mixed, where, segment_ids)
        if cache is not None:
            return log_scale, fill(cache, new)
        return (log_scale, full_cache(new, segment_ids)) if keep else log_scale


class HeadEntry(NamedTuple):
    """An entry of `HEADS`: `build` makes a module that maps features `[B, T, F]` to log_scale `[B, T]`.

    It is called with `where` and `segment_ids` `[B, T]`. Its last layer, linear, is named `output`, as in `_Head`.
    """

    build: Callable[["HeadConfig"], nn.Module]
    options: tuple[str, ...]  # fields of the configuration that are read, apart from `kind` and `hidden_size`
    attends: bool = False  # whether it reads earlier tokens, whose keys and values it can `keep` in a cache


_COMMON = ("identity_start", "pooling", "min_scale")


def _common(config: "HeadConfig") -> dict[str, Any]:
    return {name: getattr(config, name) for name in _COMMON}


def _transformer(config: "HeadConfig") -> nn.Module:
    size = config.hidden_size
    # Heads 128 wide, as Llama's, but at least 8 of them, as far as an even width per head divides D.
    most = max(size // 128, 8)
    fitting = [heads for heads in range(1, most + 1) if size % (2 * heads) == 0]
    if not fitting:
        raise UserError(f"kind: a transformer head needs an even hidden_size, got {size}; choose mlp or linear.")
    heads = config.num_heads or fitting[-1]
    if size % (2 * heads):
        raise UserError(f"num_heads: expected a divisor of hidden_size {size} with an even quotient, got {heads}.")
    block = BlockConfig(
        hidden_size=size,
        intermediate_size=config.intermediate_size or 4 * size,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
        norm_eps=1e-6,
    )
    return TransformerHead(block, **_common(config))


HEADS: dict[str, HeadEntry] = {
    "constant": HeadEntry(lambda config: ConstantHead(config.min_scale), ("min_scale",)),
    "linear": HeadEntry(lambda config: LinearHead(**_common(config)), ("features", *_COMMON)),
    "mlp": HeadEntry(
        lambda config: MLPHead(config.intermediate_size or config.hidden_size, config.normalize, **_common(config)),
        ("features", "intermediate_size", "normalize", *_COMMON),
    ),
    "transformer": HeadEntry(_transformer, ("features", "intermediate_size", "num_heads", *_COMMON), attends=True),
}
"""Kind of head -> how it is built, and what it reads of its configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The configuration of a head, stored with its parameters. Hashable: a static argument of `jax.jit`.

    Attributes:
        kind: name of an entry of `HEADS`: "constant", "linear", "mlp" or "transformer".
        hidden_size: D of the base model.
        features: names in `FEATURES`, joined on the last axis. A feature with `statistics` costs a product with W.
        pooling: "token": a temperature for each token; "sequence": one for each sequence.
        identity_start: start with s = 1; False: the authors' start, in which every matrix is random.
        intermediate_size: width of the MLP; default: D ("mlp") or 4 D ("transformer").
        num_heads: attention heads of "transformer"; default: heads 128 wide, but at least 8, as far as they divide D.
        normalize: "mlp" divides its features by their root mean square; the authors' MLP does not.
        min_scale: smallest inverse temperature, `NO_MIN_SCALE` to 1; the authors set no lower limit.
    """

    kind: str
    hidden_size: int
    features: tuple[str, ...] = ("hidden_states",)
    pooling: Literal["token", "sequence"] = "token"
    identity_start: bool = True
    intermediate_size: int | None = None
    num_heads: int | None = None
    normalize: bool = True
    min_scale: Annotated[float, Range(NO_MIN_SCALE, 1)] = MIN_SCALE

    def __post_init__(self):
        object.__setattr__(self, "features", tuple(self.features))
        check_options(self)
        if self.kind not in HEADS:
            raise UserError(f"kind: expected one of {', '.join(HEADS)}; got {self.kind!r}.")
        unknown = [name for name in self.features if name not in FEATURES]
        if unknown or not self.features or len(set(self.features)) != len(self.features):
            names = ", ".join(FEATURES)
            raise UserError(f"features: expected distinct names among {names}; got {', '.join(self.features)}.")

    @property
    def width(self) -> int:
        """F, the number of features of a token."""
        return sum(FEATURES[name].width or self.hidden_size for name in self.features)

    @property
    def reads_states(self) -> bool:
        """Whether a feature is as wide as the model; a linear head's weights are penalised then."""
        return any(FEATURES[name].width is None for name in self.features)

    @property
    def is_linear_in_features(self) -> bool:
        """Whether log s of a token starts at 0 and is linear in its features alone, within its bounds."""
        return self.kind == "linear" and self.pooling == "token" and self.identity_start

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics of `vocab_stats` at s = 1 that its features are computed from."""
        if "features" not in HEADS[self.kind].options:
            return ()
        return tuple(sorted({statistic for name in self.features for statistic in FEATURES[name].statistics}))

    def build(self) -> nn.Module:
        """The module; raises `UserError` where the attention heads of a transformer do not divide `hidden_size`."""
        return HEADS[self.kind].build(self)

    @property
    def attends(self) -> bool:
        """Whether the head reads earlier tokens, whose keys and values it can `keep` in a cache."""
        return HEADS[self.kind].attends

    def init(self, key: Array) -> Any:
        """Random parameters, a pytree of float32 arrays."""
        params = self.build().init(key, jnp.zeros((1, 1, self.width), jnp.float32))["params"]
        if not params.keys() & {"output", "log_scale"}:  # which `shrink_head` moves
            raise UserError(f"head {self.kind}: expected a last layer named output, got {', '.join(params)}.")
        return params


def logit_covariance(unembedding: Float[Array, "V D"], bias: Float[Array, " V"] | None = None) -> Float[Array, "E E"]:
    """Covariance of the rows of [W b] over the vocabulary (divisor V − 1), float32, E = D + 1.

    The variance of h's raw logits is h̃ᵀ C h̃ with h̃ = [h, 1]; the feature `log_std_logits` is half its log.
    """
    last = jnp.zeros(len(unembedding)) if bias is None else bias
    rows = jnp.column_stack([unembedding.astype(jnp.float32), last.astype(jnp.float32)])
    remains = last[:, None] > -jnp.inf  # a bias of −inf removes an entry
    rows = jnp.where(remains, rows - jnp.mean(rows, axis=0, keepdims=True, where=remains), 0.0)
    return jnp.matmul(rows.T, rows, precision="highest") / jnp.maximum(jnp.sum(remains, dtype=jnp.float32) - 1.0, 1.0)


def head_features(
    names: tuple[str, ...],
    hidden: Float[Array, "B T D"],
    unembedding: Float[Array, "V D"],
    *,
    covariance: Float[Array, "E E"] | None = None,
    bias: Float[Array, " V"] | None = None,
    softcap: float | None = None,
    sharding: VocabSharding | None = None,
    stats: VocabStats | None = None,
) -> Features:
    """The named features of `FEATURES`, joined along the last axis: float32; hidden states alone keep their dtype.

    Args:
        hidden, unembedding, bias, softcap, sharding: as in `vocab_stats`. log_std_logits is taken before the soft-cap.
        covariance: the result of `logit_covariance`, for log_std_logits; if None, it is computed.
        stats: the statistics at s = 1 that the features read; if None, a pass over the vocabulary computes them.
    """
    if names == ("hidden_states",):
        return hidden
    statistics = sorted({statistic for name in names for statistic in FEATURES[name].statistics})
    if statistics and stats is None:
        stats = vocab_stats(hidden, unembedding, bias=bias, softcap=softcap, statistics=statistics, sharding=sharding)
    parts = {"hidden_states": hidden}
    if "argmax_embedding" in names and stats is not None:
        parts["argmax_embedding"] = lookup(unembedding, stats.require("argmax"), "unembedding", unembedding.dtype)
    if "log_std_logits" in names:
        covariance = logit_covariance(unembedding, bias) if covariance is None else covariance
        ones = jnp.ones((*hidden.shape[:-1], 1))
        augmented = jnp.concatenate([hidden.astype(jnp.float32), ones], axis=-1)
        projected = jnp.matmul(augmented, covariance, precision="highest")
        variance = jnp.sum(projected * augmented, axis=-1, keepdims=True)
        parts["log_std_logits"] = 0.5 * jnp.log(jnp.maximum(variance, 1e-12))
    return join_features(names, parts, stats)


def join_features(
    names: tuple[str, ...], parts: Mapping[str, Float[Array, "*B F"]], stats: VocabStats | None
) -> Float[Array, "*B F"]:
    """The named features, float32, from `parts` or else from the statistics at s = 1."""
    functions: Any = {name: FEATURES[name].function for name in names}
    joined = [parts[name] if name in parts else functions[name](stats) for name in names]
    return jnp.concatenate([part.astype(jnp.float32) for part in joined], axis=-1)


class HeadArrays(NamedTuple):
    """Arrays of a fitted head, passed to jitted functions as arguments; its configuration is static."""

    params: Any
    log_factor: Float[Array, ""] | np.float32 = np.float32(0)


@dataclasses.dataclass(frozen=True)
class FittedHead:
    """A head with its parameters and the base model that it belongs to.

    Attributes:
        config, params: the head, and its float32 parameters in the tree of `config.init`.
        fingerprint: hash of the base model's configuration and weights.
        log_factor: log of a common factor on every token's scale (the refitted temperature), within ±`MAX_LOG_FACTOR`.

    Example:
        >>> config = HeadConfig(kind="linear", hidden_size=8)
        >>> FittedHead(config, config.init(jax.random.key(0)), fingerprint="0123456789abcdef")
        FittedHead(linear, 9 parameters, base 0123456789ab)
    """

    config: HeadConfig
    params: Any
    fingerprint: str
    log_factor: float = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self):
        if not abs(self.log_factor) <= MAX_LOG_FACTOR:
            expected = f"a number within ±{MAX_LOG_FACTOR:g}"
            raise UserError(f"log_factor: expected {expected}, got {self.log_factor}; fit again.")

    @classmethod
    def constant(cls, lm: Any, log_scale: float = 0.0) -> "FittedHead":
        """Temperature scaling of the model `lm` by the factor e^log_scale on its logits; by default the base model."""
        config = HeadConfig(kind="constant", hidden_size=lm.config.hidden_size)
        return cls(config, {"log_scale": np.float32(log_scale)}, lm.fingerprint)

    @property
    def is_identity(self) -> bool:
        """Whether it is the base model: a constant temperature of 1."""
        return self.config.kind == "constant" and not self.log_factor and not self.params["log_scale"]

    @property
    def arrays(self) -> HeadArrays:
        """Its parameters and its factor."""
        return HeadArrays(self.params, np.float32(self.log_factor))

    def __repr__(self) -> str:
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(self.params))
        factor = f", log_factor={self.log_factor:.4g}" if self.log_factor else ""
        return f"FittedHead({self.config.kind}, {count:,} parameters{factor}, base {self.fingerprint[:12]})"
