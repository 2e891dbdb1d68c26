"""Transformer blocks, used by the frozen decoder and by the calibration heads."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.nn.attention import AttentionMask, KeysValues, Past, attend, attend_by_blocks
from calibjax.nn.experts import Experts, Mixture
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Positive, Range, check_options

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": nn.silu,
    "swish": nn.silu,
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "gelu_fast": functools.partial(nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(nn.gelu, approximate=True),
}
"""Activations by their names in Hugging Face configurations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) and its scaling to longer contexts.

    Args:
        theta: base of the wavelengths; positive.
        fraction: fraction of the channels of each head that are rotated, in (0, 1].
        scaling: `None`; `"linear"`: every frequency is divided by `factor`; `"llama3"`: only low frequencies are
            (arXiv 2407.21783), with a smooth transition between `low_freq_factor` and `high_freq_factor` turns over the
            original context; `"yarn"`: the same with a transition between `beta_slow` and `beta_fast` turns, linear in
            the index of the frequency (arXiv 2309.00071, section 3.2); `"longrope"`: each frequency is divided by one
            of `divisors`, which has a number for each pair of channels; `"none"`: nothing is rotated.
        factor: scaling of the context; positive.
        truncate: for `"yarn"`: whether the transition begins and ends at whole indices.
        original_max_positions: context before scaling; for `"llama3"` and `"yarn"`.
        amplitude: factor on cosines and sines.
        interleaved: whether pairs are neighbouring channels, instead of channels of the two halves.
    """

    theta: Positive = 10000.0
    fraction: Annotated[float, Range(0, 1, open="low")] = 1.0
    scaling: Literal["linear", "llama3", "yarn", "longrope", "none"] | None = None
    factor: Positive = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    original_max_positions: int = 8192
    amplitude: float = 1.0
    interleaved: bool = False

    def __post_init__(self):
        check_options(self)
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.scaling == "llama3" and not 0 < low < high:
            raise UserError(f"Rope: expected 0 < low_freq_factor < high_freq_factor, got {low} and {high}.")

    def width(self, head_dim: int) -> int:
        """Number of rotated channels of a head."""
        return int(head_dim * self.fraction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Configuration of a transformer block. Hashable, so it can be a static argument of `jax.jit`.

    Args:
        hidden_size: width D of the residual stream.
        intermediate_size: width of the MLP.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides `num_heads` (grouped-query attention).
        head_dim: width of a head; its rotated part must be even.
        norm: `"rms"` or `"layer"`.
        norm_offset: added to the stored scale of an RMS norm; 1 for Gemma, which stores scales around zero.
        norm_placement: norms before attention and MLP (`"pre"`), after them (`"post"`), or `"both"`. A norm after them
            is applied to the update of the residual stream.
        parallel: `None` if the MLP follows attention; `"one_norm"` or `"two_norms"` if both read one hidden state.
        qk_norm: `None`; `"head"`: queries and keys are normed within each head; `"projection"`: over all heads at once.
        norm_eps: added to the variance or mean square; from 0 to 1.
        activation: a name in `ACTIVATIONS`.
        gated_mlp: `down(act(gate x) * up x)` if true, else `down(act(up x))`.
        rope: rotary positions, or `None`.
        qkv_bias, output_bias, mlp_bias: whether these projections have a bias.
        attention_scale: factor on attention logits; `None` for `1 / sqrt(head_dim)`.
        attention_softcap: `c` in `c * tanh(attention logits / c)`, or `None`.
        attention_sinks: whether every head has a sink: a logit that takes part in the softmax and attends to nothing.
        qkv_clip: largest absolute value of queries and keys, before they are rotated, and of values; or `None`.
        mixture: experts that replace the MLP, each gated and `intermediate_size` wide; `None` for one MLP.
        residual_scale: factor on the updates of the residual stream by attention and MLP, or `None`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norm_placement: Literal["pre", "post", "both"] = "pre"
    parallel: Literal["one_norm", "two_norms"] | None = None
    qk_norm: Literal["head", "projection"] | None = None
    activation: str = "silu"
    gated_mlp: bool = True
    rope: Rope | None = Rope()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: Positive | None = None
    attention_sinks: bool = False
    qkv_clip: Positive | None = None
    mixture: Mixture | None = None
    residual_scale: float | None = None

    def __post_init__(self):
        if not (isinstance(self.norm_eps, int | float) and 0 <= self.norm_eps <= 1):
            hint = "correct it in config.json (rms_norm_eps, layer_norm_eps or layer_norm_epsilon)"
            raise UserError(f"norm_eps: expected a number from 0 to 1, got {self.norm_eps}; {hint}.")
        check_options(self)
        if self.num_heads % self.num_kv_heads:
            heads = f"{self.num_heads} and {self.num_kv_heads}"
            raise UserError(f"num_heads must be a multiple of num_kv_heads, got {heads}.")
        if self.rope is not None:
            width = self.rope.width(self.head_dim)
            if width % 2 or not width:
                raise UserError(f"Rotary positions need an even number of channels, got {width} of {self.head_dim}.")
            if self.rope.scaling == "longrope" and len(self.rope.divisors) != width // 2:
                raise UserError(f"Rope.divisors: expected {width // 2} values, got {len(self.rope.divisors)}.")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation: expected one of {', '.join(ACTIVATIONS)}; got {self.activation!r}.")
        if self.norm_offset and self.norm != "rms":
            raise UserError(f"norm_offset: only RMS norms have one, got {self.norm_offset} with norm {self.norm!r}.")
        if self.parallel is not None and self.norm_placement != "pre":
            raise UserError(f"norm_placement: expected 'pre' where parallel is set, got {self.norm_placement!r}.")
        if self.mixture is not None and not self.gated_mlp:
            raise UserError("gated_mlp: expected True, because experts are gated.")


class SequenceContext(NamedTuple):
    """What every block reads in addition to hidden states: rotary table and mask."""

    rotary: tuple[Float[Array, "B T 1 R"], Float[Array, "B T 1 R"]] | None
    visible: AttentionMask


def segment_positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Positions that restart at 0 wherever the segment id changes along T."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def sequence_context(
    config: BlockConfig,
    positions: Int[Array, "#B T"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    window: int | None = None,
    start: Int[Array, ""] | None = None,
    until: Int[Array, "B S"] | None = None,
) -> SequenceContext:
    """The rotary table and the attention mask of a batch, whose tokens have these positions in their segments.

    `segment_ids`, `window`, `start` and `until` as in `AttentionMask`.
    """
    rotary = None if config.rope is None else rotary_table(positions, config.rope, config.head_dim)
    return SequenceContext(rotary, AttentionMask(segment_ids, start, (window,), until=until))


def choose_context(index: Int[Array, ""], first: SequenceContext, second: SequenceContext) -> SequenceContext:
    """Selects the first of two contexts of the same sequence if `index` is 0, the second if it is 1."""
    rotary = jax.tree.map(lambda a, b: jnp.where(index == 0, a, b), first.rotary, second.rotary)
    windows = first.visible.windows + second.visible.windows
    if windows[0] == windows[1]:
        return SequenceContext(rotary, first.visible)
    return SequenceContext(rotary, dataclasses.replace(first.visible, windows=windows, kind=index))


def _scale_llama3(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Stretches the frequencies with few turns over the original context: long waves."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _scale_yarn(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Stretches the frequencies, more and more between the indices of `beta_fast` and `beta_slow` turns."""
    width = 2 * len(frequencies)

    def index(turns: float) -> float:
        """Index of the frequency with this number of turns over the original context."""
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp_width = (high - low) or 1e-3  # a step if low equals high
    ramp = np.clip((np.arange(len(frequencies)) - low) / ramp_width, 0.0, 1.0)
    return (1 - ramp) * frequencies + ramp * frequencies / rope.factor


_SCALINGS: dict[str, Callable[[Rope, np.ndarray], np.ndarray]] = {
    "linear": lambda rope, frequencies: frequencies / rope.factor,
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
    "longrope": lambda rope, frequencies: frequencies / np.asarray(rope.divisors),
    "none": lambda rope, frequencies: np.zeros_like(frequencies),
}


def rotary_table(
    positions: Int[Array, "B T"], rope: Rope, head_dim: int
) -> tuple[Float[Array, "B T 1 R"], Float[Array, "B T 1 R"]]:
    """Cosines and sines, times the amplitude, of every position's angles: float32 `[B, T, 1, R]`, R pairs.

    Angles per position are `theta ** (-i / R)`, scaled according to `rope`.
    """
    width = rope.width(head_dim)
    frequencies = rope.theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.scaling is not None:
        frequencies = _SCALINGS[rope.scaling](rope, frequencies)
    frequencies = jnp.asarray(frequencies, jnp.float32)[None, None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return rope.amplitude * jnp.cos(angles), rope.amplitude * jnp.sin(angles)


def rotate(
    x: Float[Array, "B T Q H"],
    table: tuple[Float[Array, "#B T 1 R"], Float[Array, "#B T 1 R"]],
    interleaved: bool = False,
) -> Float[Array, "B T Q H"]:
    """Rotates each pair `(x_i, x_{i + R})`, `i < R`, by its angle: the half-split order of Hugging Face's Llama.

    If `interleaved`, the pairs are `(x_{2i}, x_{2i + 1})`. Channels from 2R on pass unchanged. The arithmetic is
    float32, because bfloat16 cannot represent the angles of large positions.
    """
    cos, sin = table
    pairs = cos.shape[-1]
    channels, rest = jnp.split(x.astype(jnp.float32), (2 * pairs,), axis=-1)
    if interleaved:
        first, second = channels[..., ::2], channels[..., 1::2]
    else:
        first, second = jnp.split(channels, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        turned = (jnp.stack(turned, axis=-1).reshape(channels.shape),)
    return jnp.concatenate([*turned, rest], axis=-1).astype(x.dtype)


def _last_axis(vector: Float[Array, " D"], like: Array) -> Array:
    return jax.lax.expand_dims(vector.astype(like.dtype), range(like.ndim - 1))


class Dense(nn.Dense):
    """`nn.Dense` with all axes but the last flattened: on CPUs the gradient of its kernel is then much faster."""

    def __call__(self, inputs: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        flat = super().__call__(inputs.reshape(-1, inputs.shape[-1]))
        return flat.reshape(*inputs.shape[:-1], self.features)


class Norm(nn.Module):
    """The norm `kind` of a `BlockConfig`, over the last axis, computed in float32 and cast to `dtype` at the end.

    "rms": `x / sqrt(mean(x²) + eps) * (offset + scale)` (arXiv 1910.07467). "layer": the same of `x - mean(x)`, plus a
    bias; `E[x²] - E[x]²` would lose digits where the mean is large, as in GPT-2.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        shape = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.constant(1.0 - self.offset), shape, self.param_dtype)
        x = x.astype(jnp.float32)
        if self.kind == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        x = x * (self.offset + _last_axis(scale, x))
        if self.kind == "layer":
            x = x + _last_axis(self.param("bias", nn.initializers.zeros, shape, self.param_dtype), x)
        return x.astype(self.dtype)


def make_norm(config: BlockConfig, dtype: DTypeLike, param_dtype: DTypeLike, name: str) -> Norm:
    return Norm(config.norm, config.norm_eps, config.norm_offset, dtype, param_dtype, name=name)


class _Layer(nn.Module):
    """What a block and its parts have in common; see `Block`."""

    config: BlockConfig
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.normal(0.02)

    def _dense(self, width: int, name: str, use_bias: bool) -> Dense:
        kinds: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "kernel_init": self.kernel_init}
        return Dense(width, use_bias=use_bias, **kinds, name=name)

    def _norm(self, name: str) -> Norm:
        return make_norm(self.config, self.dtype, self.param_dtype, name)


class Attention(_Layer):
    """Causal grouped-query attention. Returns its output and the tokens' keys and values; `past` holds earlier ones."""

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B T D"], context: SequenceContext, past: Past | None = None
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        cfg = self.config

        def heads(count: int, name: str, norm: str | None = None) -> Array:
            x = self._dense(count * cfg.head_dim, name, cfg.qkv_bias)(hidden)
            split = (*hidden.shape[:2], count, cfg.head_dim)
            if norm is not None:
                x = x.reshape(split) if norm == "head" else x
                x = self._norm(f"{name}_norm")(x)
            if cfg.qkv_clip is not None:
                x = jnp.clip(x, -cfg.qkv_clip, cfg.qkv_clip)
            return x.reshape(split)

        query = heads(cfg.num_heads, "q", cfg.qk_norm)
        key = heads(cfg.num_kv_heads, "k", cfg.qk_norm)
        value = heads(cfg.num_kv_heads, "v")
        if context.rotary is not None:
            interleaved = cfg.rope is not None and cfg.rope.interleaved
            query, key = (rotate(x, context.rotary, interleaved) for x in (query, key))
        scale = cfg.head_dim**-0.5 if cfg.attention_scale is None else cfg.attention_scale
        sinks = None
        if cfg.attention_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (cfg.num_heads,), self.param_dtype)
        options: Any = {"scale": scale, "softcap": cfg.attention_softcap, "sinks": sinks}
        new = jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2)
        if past is None:
            mixed = attend(query, key, value, context.visible, **options)
        else:
            *shared, (keys, values) = past
            shared_columns = sum(shared_keys.shape[2] for shared_keys, _ in shared)
            assert context.visible.start is not None, "`past` requires a context with `start`"
            start = context.visible.start - shared_columns
            keys = jax.lax.dynamic_update_slice_in_dim(keys, new[0], start, 2)
            values = jax.lax.dynamic_update_slice_in_dim(values, new[1], start, 2)
            mask = context.visible.mask(hidden.shape[1], shared_columns + keys.shape[2])
            assert mask is not None
            mixed = attend_by_blocks(query, [*shared, (keys, values)], mask, **options)
        output = self._dense(cfg.hidden_size, "o", cfg.output_bias)
        return output(mixed.reshape(*hidden.shape[:2], -1)), new


class MLP(_Layer):
    """`down(act(gate x) * up x)`, or `down(act(up x))` if not gated."""

    @nn.compact
    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        cfg = self.config
        dense = functools.partial(self._dense, use_bias=cfg.mlp_bias)
        activation = ACTIVATIONS[cfg.activation]
        up = dense(cfg.intermediate_size, "up")(hidden)
        if cfg.gated_mlp:
            inner = activation(dense(cfg.intermediate_size, "gate")(hidden)) * up
        else:
            inner = activation(up)
        return dense(cfg.hidden_size, "down")(inner)


class Block(_Layer):
    """One transformer block: by default pre-norm, `h += attention(norm(h))`, then `h += mlp(norm(h))`.

    It returns hidden states, and the keys and values of the tokens, which `calibjax.nn.kv_cache` stores. It computes
    and returns in `dtype`; `init` creates parameters in `param_dtype`, every matrix by `kernel_init`.
    """

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "B T D"], context: SequenceContext, past: Past | None = None
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        cfg = self.config
        kinds = (self.dtype, self.param_dtype, self.kernel_init)

        def norm(x: Array, name: str, exists: bool = True) -> Array:
            return self._norm(name)(x) if exists else x

        def add(hidden: Array, update: Array) -> Array:
            if cfg.residual_scale is not None:  # in float32, because bfloat16 would round the factor
                update = (update.astype(jnp.float32) * cfg.residual_scale).astype(update.dtype)
            return hidden + update

        before = cfg.norm_placement != "post"
        after = cfg.norm_placement != "pre"
        attention = Attention(cfg, *kinds, name="attention")
        if cfg.mixture is None:
            mlp = MLP(cfg, *kinds, name="mlp")
        else:
            activation = ACTIVATIONS[cfg.activation]
            mlp = Experts(cfg.mixture, cfg.intermediate_size, activation, cfg.mlp_bias, *kinds, name="mlp")
        normed = norm(hidden, "attention_norm", before)
        mixed, new = attention(normed, context, past)
        if cfg.parallel is not None:
            other = normed if cfg.parallel == "one_norm" else norm(hidden, "mlp_norm")
            hidden = add(add(hidden, mixed), mlp(other))
        else:
            hidden = add(hidden, norm(mixed, "attention_post_norm", after))
            update = mlp(norm(hidden, "mlp_norm", before))
            hidden = add(hidden, norm(update, "mlp_post_norm", after))
        return hidden, new
