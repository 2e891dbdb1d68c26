"""Attention masks, and the implementations of attention."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from calibjax.kernels.platforms import platform
from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.sharding import AXES, batch_shards, has_axes

_BLOCKS = 16  # at most, because each is compiled; of 64 tokens or more, whose logits stay in a CPU's cache
_SPLASH_BLOCKS = (512, 256)
_ROWS, _HEADS = AXES[:2], AXES[2]  # mesh axes that divide them

KeysValues = tuple[Float[Array, "*L B K S H"], Float[Array, "*L B K S H"]]
"""Keys (rotated) and values of S tokens, with K heads of width H, of all layers or of one."""

Past = tuple[KeysValues, ...]
"""Keys and values of the columns that several rows share, if any, then of each row's own, which take new tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Attention mask: each of T tokens attends to itself and to earlier columns of its segment within a window.

    Attributes:
        segment_ids: segment of each column, `[B, S]`; padding is segment 0. If None, one segment per row.
        start: first column of the T tokens, which follow the tokens in a cache. If None, the columns are the tokens.
        windows: window sizes, one per kind of layer. A token attends to itself and the `window - 1` columns before it.
        kind: index into `windows`, known at run time; None if there is one window.
        until: for each column, the first later one that may not attend to it, `[B, S]`; for trees, depth first.
    """

    segment_ids: Int[Array, "B S"] | None = None
    start: Int[Array, ""] | None = None
    windows: tuple[int | None, ...] = dataclasses.field(default=(None,), metadata={"static": True})
    kind: Int[Array, ""] | None = None
    until: Int[Array, "B S"] | None = None

    def mask(self, time: int, columns: int) -> Bool[Array, "#B 1 T S"] | None:
        """Mask as an array; None for a plain causal mask."""
        if self.segment_ids is None and self.until is None and self.start is None and self.windows == (None,):
            return None
        index = jnp.arange(time) if self.start is None else self.start + jnp.arange(time)
        distance = index[:, None] - jnp.arange(columns)[None, :]
        allowed = distance >= 0
        if self.windows != (None,):
            windows = [columns if window is None else window for window in self.windows]
            allowed &= distance < (windows[0] if self.kind is None else jnp.asarray(windows)[self.kind])
        allowed = allowed[None]
        if self.segment_ids is not None:
            token_segments = self.segment_ids
            if self.start is not None:
                token_segments = jax.lax.dynamic_slice_in_dim(token_segments, self.start, time, axis=1)
            allowed = allowed & (token_segments[:, :, None] == self.segment_ids[:, None, :])
        if self.until is not None:
            allowed = allowed & (index[None, :, None] < self.until[:, None, :])
        return allowed[:, None]


def attend(
    query: Float[Array, "B T Q H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    visible: AttentionMask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " Q"] | None = None,
) -> Float[Array, "B T Q H"]:
    """Grouped-query attention: `softmax(softcap(scale * query key^T))` over visible columns, times `value`.

    Logits and softmax are float32. The implementation is chosen while tracing, by the target platform and the shapes:
    `splash_attend` on TPUs; matrix products, by blocks of tokens, on CPUs and with a soft-cap, sinks or trees;
    otherwise `jax.nn.dot_product_attention`, which stores the logits `[B, Q, T, T]` unless `suits_cudnn`.

    Args:
        query, key, value: Q query heads and K heads of keys and values, of width H; K divides Q.
        visible: mask, without `start`.
        softcap: c of `c * tanh(logits / c)`, or None.
        sinks: for each head, the logit of a further column whose value is zero, or None.
    """
    name = platform().name
    if name == "tpu" and visible.until is None and suits_splash(query, key):
        return splash_attend(query, key, value, visible, scale=scale, softcap=softcap, sinks=sinks)
    time = query.shape[1]
    mask = visible.mask(time, time)
    if name == "cpu" or softcap is not None or sinks is not None or visible.until is not None:
        past = [(jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2))]
        mask = jnp.tri(time, dtype=bool)[None, None] if mask is None else mask
        return attend_by_blocks(query, past, mask, scale=scale, softcap=softcap, sinks=sinks)
    implementation = "cudnn" if name == "gpu" and suits_cudnn(query, key) else "xla"
    # JAX's attention promotes dtypes internally, which fails under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=mask is None, scale=scale, implementation=implementation
        )


def attend_by_blocks(
    query: Float[Array, "B T Q H"],
    past: Sequence[KeysValues],
    mask: Bool[Array, "#B 1 T S"],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " Q"] | None = None,
) -> Float[Array, "B T Q H"]:
    """`attend_by_products` for blocks of tokens, whose logits stay in a CPU's cache.

    If the last part of `past` has T columns, they belong to the tokens, and a block leaves out the columns after it.
    """
    time = query.shape[1]
    options = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if time == 1:
        return attend_by_products(query, past, mask, **options)
    queries_per_key = query.shape[2] // past[0][0].shape[1]
    repeated = [tuple(jnp.repeat(x, queries_per_key, axis=1) for x in part) for part in past]
    *earlier, (keys, values) = repeated
    columns = keys.shape[2]
    first = mask.shape[-1] - columns  # of the last part

    def block(start: Any, end: Any) -> Array:
        last = end if columns == time else columns
        visible = mask[:, :, start:end, : first + last]
        parts = [*earlier, (keys[:, :, :last], values[:, :, :last])]
        return attend_by_products(query[:, start:end], parts, visible, **options)

    if export.is_symbolic_dim(time):
        return block(0, time)
    rows = 64 * ceil_div(time, 64 * _BLOCKS)
    ends = itertools.pairwise([*range(0, time, rows), time])
    return jnp.concatenate([block(*pair) for pair in ends], axis=1)


def attend_by_products(
    query: Float[Array, "B T Q H"],
    past: Sequence[KeysValues],
    mask: Bool[Array, "#B 1 T S"],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " Q"] | None = None,
) -> Float[Array, "B T Q H"]:
    """`attend` by matrix products, to keys and values with their heads before time, as a cache has them.

    With this order of axes, XLA's products need no transposes. The heads and the rows of queries that share keys are
    rows of one product. `past` has keys and values of consecutive columns; each of its A rows serves B / A queries.
    """
    batch, time, heads, _ = query.shape
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    query = jnp.moveaxis(query, 1, 2)

    def group_heads(x: Array, like: Array) -> Array:
        """`[B, Q, T, C]` as `[A, K, B / A * Q / K * T, C]`: the rows of one product share keys."""
        rows, shared = like.shape[:2]
        x = x.reshape(rows, batch // rows, shared, heads // shared * time, -1)
        return jnp.moveaxis(x, 2, 1).reshape(rows, shared, -1, x.shape[-1])

    def ungroup_heads(x: Array) -> Array:
        rows, shared, _, columns = x.shape
        x = x.reshape(rows, shared, batch // rows, heads // shared * time, columns)
        return jnp.moveaxis(x, 1, 2).reshape(batch, heads, time, columns)

    products = [product(group_heads(query, key), jnp.swapaxes(key, -1, -2)) for key, _ in past]
    parts = [ungroup_heads(x) for x in products]
    logits = jnp.concatenate(parts, axis=-1) * scale
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
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
    dtype = past[0][1].dtype
    ends = np.cumsum([part.shape[-1] for part in parts])
    split = jnp.split(weights.astype(dtype), ends[:-1], axis=-1)
    pairs = zip(split, past, strict=True)
    products = [product(group_heads(part, value), value) for part, (_, value) in pairs]
    mixed = sum(map(ungroup_heads, products))
    # Normalised after the product: a pass over [T, H] instead of [T, T], forward and backward.
    return jnp.moveaxis((mixed / total).astype(dtype), 2, 1)


def suits_splash(query: Float[Array, "B T Q H"], key: Float[Array, "B S K H"]) -> bool:
    """Whether the kernel supports these shapes of the whole batch on the current mesh; decided while tracing.

    It takes whole sequences in blocks of at least 256 tokens, in bfloat16, or float32 with default matmul precision
    (which the kernel's gradient ignores), with rows and heads that the devices of the mesh divide.
    """
    _, length, _, width = query.shape
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    divides = length % _SPLASH_BLOCKS[-1] == 0 and width % 16 == 0
    suits_dtype = query.dtype == jnp.bfloat16 or (query.dtype == jnp.float32 and precision is None)
    return divides and suits_dtype and _devices_divide(query, key)


def _devices_divide(query: Float[Array, "B T Q H"], key: Float[Array, "B S K H"]) -> bool:
    """Whether every device of the current mesh has as many rows and heads as the others."""
    mesh = jax.sharding.get_abstract_mesh()
    row_shards, head_shards = 1, 1
    if has_axes(mesh):
        row_shards, head_shards = batch_shards(mesh), mesh.shape[_HEADS]
    divides = query.shape[0] % row_shards == query.shape[2] % head_shards == key.shape[2] % head_shards == 0
    return mesh.size in (0, row_shards * head_shards) and divides


def suits_cudnn(query: Float[Array, "B T Q H"], key: Float[Array, "B S K H"]) -> bool:
    """Whether cuDNN's attention, which stores no logits, takes these shapes on the current mesh.

    That is 16 bits, heads of at most 128 channels in eights, and an even T. The order of sums of its backward pass is
    fixed only by XLA's flag `--xla_gpu_deterministic_ops`.
    """
    _, length, _, width = query.shape
    suits = query.dtype.itemsize == 2 and length % 2 == 0 and width <= 128 and width % 8 == 0
    return suits and _devices_divide(query, key) and _has_cudnn_attention()


def _has_cudnn_attention() -> bool:
    """NVIDIA GPUs from Ampere on, attached: JAX looks at them while it lowers."""
    try:
        return float(jax.local_devices(backend="cuda")[0].compute_capability) >= 8.0
    except RuntimeError:
        return False


def splash_attend(
    query: Float[Array, "B T Q H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    visible: AttentionMask,
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " Q"] | None = None,
) -> Float[Array, "B T Q H"]:
    """`attend` without stored logits, for shapes that `suits_splash` accepts: JAX's splash attention.

    It iterates over blocks of keys with a running softmax (Dao et al., 2022, arXiv 2205.14135) and skips masked blocks.
    """

    def on_device(query: Any, key: Any, value: Any, segment_ids: Any, kind: Any, sinks: Any) -> Any:
        query = (query.astype(jnp.float32) * scale).astype(query.dtype)  # the kernel has no scale
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        arguments = (query, key, value, segment_ids, sinks)
        branches = [functools.partial(_over_rows, window, softcap) for window in visible.windows]
        mixed = branches[0](*arguments) if kind is None else jax.lax.switch(kind, branches, *arguments)
        return jnp.swapaxes(mixed, 1, 2)

    arguments = (query, key, value, visible.segment_ids, visible.kind, sinks)
    if not has_axes(jax.sharding.get_abstract_mesh()):
        return on_device(*arguments)
    divided: Any = PartitionSpec(_ROWS, None, _HEADS)
    specs = (divided, divided, divided, PartitionSpec(_ROWS), PartitionSpec(), PartitionSpec(_HEADS))
    return jax.shard_map(on_device, in_specs=specs, out_specs=divided, check_vma=False)(*arguments)


def _over_rows(window: int | None, softcap: float | None, query, key, value, segment_ids, sinks) -> Array:
    """Maps the kernel over the rows of the batch; the head axis is before time."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library  # takes long to import

    kernel = _kernel(query.shape[1], query.shape[2], window, softcap)

    def over_row(query: Array, key: Array, value: Array, segment_ids: Array | None) -> Array:
        ids = None if segment_ids is None else library.SegmentIds(segment_ids, segment_ids)
        return kernel(query, key, value, ids, sinks)

    # The kernel promotes dtypes and ranks internally, which fails under strict promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.vmap(over_row)(query, key, value, segment_ids)


def _kernel(heads: int, length: int, window: int | None, softcap: float | None, interpret: bool = False) -> Any:
    """Kernel for the heads of one device. The library caches its block tables for equal masks."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    block = next(block for block in _SPLASH_BLOCKS if length % block == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    shape = (length, length)
    mask: Any = library.CausalMask(shape) if window is None else library.LocalMask(shape, (window - 1, 0), 0)
    return library.make_splash_mha(
        library.MultiHeadMask([mask] * heads),
        block_sizes=library.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
