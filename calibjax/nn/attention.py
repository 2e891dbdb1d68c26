"""Attention masks, and the implementations of attention."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.platforms import platform
from calibjax.nn import splash_attention as splash

cudnn_attention = jax.make_user_context(False)
"""`with cudnn_attention(True):` makes GPU programs traced within use cuDNN's attention; see `attend`."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("segment_ids", "start", "kind"), meta_fields=("windows",)
)
@dataclasses.dataclass(frozen=True)
class Visible:
    """Attention mask: each of T tokens attends to itself and to earlier columns of its segment within a window.

    Attributes:
        segment_ids: segment of each column, `[B, S]`. Padding is a segment too, so that every token attends to at least
            one column. None: one segment per row.
        start: the tokens are at columns `start` to `start + T`. None: the columns are the tokens.
        windows: window sizes, one per kind of layer. A token attends to itself and the `window - 1` columns before it.
            None: all before it.
        kind: index into `windows`, known at run time; None if there is one window.
    """

    segment_ids: Int[Array, "B S"] | None = None
    start: Int[Array, ""] | None = None
    windows: tuple[int | None, ...] = (None,)
    kind: Int[Array, ""] | None = None

    def mask(self, time: int, columns: int) -> Bool[Array, "#B 1 T S"] | None:
        """Mask as an array; None for a plain causal mask."""
        if self.segment_ids is None and self.start is None and self.windows == (None,):
            return None
        index = jnp.arange(time) if self.start is None else self.start + jnp.arange(time)
        distance = index[:, None] - jnp.arange(columns)[None, :]
        seen = distance >= 0
        if self.windows != (None,):
            windows = [columns if window is None else window for window in self.windows]
            seen &= distance < (windows[0] if self.kind is None else jnp.asarray(windows)[self.kind])
        seen = seen[None]
        if self.segment_ids is not None:
            own = self.segment_ids
            if self.start is not None:
                own = jax.lax.dynamic_slice_in_dim(own, self.start, time, axis=1)
            seen = seen & (own[:, :, None] == self.segment_ids[:, None, :])
        return seen[:, None]


def attend(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B S N K"],
    value: Float[Array, "B S N K"],
    visible: Visible,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H K"]:
    """Grouped-query attention: `softmax(softcap(scale * query key^T))` over visible columns, times `value`.

    Logits and softmax are float32. The implementation is chosen while tracing, by the target platform
    (`platforms.platform`) and by shapes: `splash` on TPUs if it supports the shapes; otherwise matrix products on CPUs
    and with a soft-cap or sinks; otherwise `jax.nn.dot_product_attention`. The last two store the logits
    `[B, H, T, S]`. If `cudnn_attention` is set, cuDNN is used where it supports the inputs (bfloat16 or
    float16, at most 128 channels per head, a multiple of 8, whole sequences with an even number of tokens). It stores
    no logits, but its backward pass has no fixed order of sums unless XLA's flag `--xla_gpu_deterministic_ops` is
    set.

    Args:
        query: `[B, T, H, K]`.
        key, value: `[B, S, N, K]`; N divides H.
        visible: mask of columns.
        scale: factor on the logits.
        softcap: c of `c * tanh(logits / c)`, or None.
        sinks: for each head, the logit of a further column whose value is zero, or None.

    Returns:
        `[B, T, H, K]`, in the dtype of `value`.
    """
    name = platform().name
    if name == "tpu" and visible.start is None and splash.suits(query, key):
        arguments = (visible.segment_ids, visible.windows, visible.kind)
        return splash.attend(query, key, value, *arguments, scale=scale, softcap=softcap, sinks=sinks)
    mask = visible.mask(query.shape[1], key.shape[1])
    if name == "cpu" or softcap is not None or sinks is not None:
        return _by_products(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
    # JAX's attention promotes dtypes internally, which fails under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=mask is None,
            scale=scale,
            implementation=_of_library(name, query, key),
        )


def cudnn_takes(head_dim: int, dtype: DTypeLike, softcap: float | None) -> bool:
    """Whether cuDNN supports such heads: at most 128 channels, a multiple of 8, in 16 bits, without soft-cap."""
    return head_dim <= 128 and head_dim % 8 == 0 and jnp.dtype(dtype).name in ("bfloat16", "float16") and not softcap


def _of_library(name: str, query: Array, key: Array) -> Literal["xla", "cudnn"]:
    """Implementation of `jax.nn.dot_product_attention`."""
    length, width = query.shape[1], query.shape[3]
    suits = length == key.shape[1] and length % 2 == 0 and cudnn_takes(width, query.dtype, None)
    return "cudnn" if name == "gpu" and cudnn_attention.value and suits else "xla"


def _by_products(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Array | None = None,
) -> Array:
    """Dense attention with the head axis before time, for CPUs, and for soft-caps and sinks, which JAX's lacks.

    With this order of axes, XLA's products on CPUs need no transposes, and gradients are much faster; an axis of groups
    beside that of heads would make them slower by a third.
    """
    time, groups = query.shape[1], query.shape[2] // key.shape[2]
    query, key, value = (jnp.moveaxis(x, 1, 2) for x in (query, key, value))
    if groups > 1:
        key, value = (jnp.repeat(x, groups, axis=1) for x in (key, value))
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    logits = product(query, jnp.swapaxes(key, -1, -2)) * scale
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    mask = jnp.tri(time, dtype=bool)[None, None] if mask is None else mask
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, -1, 1, 1)
        highest = jnp.maximum(highest, sinks)
    highest = jax.lax.stop_gradient(highest)
    weights = jnp.exp(logits - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest)
    # Normalised after the product: a pass over [T, K] instead of [T, T], forward and backward.
    mixed = product(weights.astype(value.dtype), value) / total
    return jnp.moveaxis(mixed.astype(value.dtype), 2, 1)
