"""Attention without stored logits: JAX's splash attention on TPUs, over a mesh and for layers of several windows.

The kernel (`jax.experimental.pallas.ops.tpu.splash_attention`) iterates over blocks of keys with a running softmax (Dao
et al., 2022, https://arxiv.org/abs/2205.14135), skips blocks that order or window mask completely, and recomputes the
weights in the backward pass from one number per row. It stores `[B, T, H, K]` and 4 bytes for each of `[B, H, T]`,
where the dense form stores `[B, H, T, T]` in float32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from calibjax.runtime.sharding import AXES

_BLOCKS = (512, 256)
_ROWS, _HEADS = AXES[:2], AXES[2]  # mesh axes that divide them


def suits(query: Float[Array, "B T H K"], key: Float[Array, "B S N K"]) -> bool:
    """Whether the kernel supports these shapes of the whole batch on the current mesh; decided while tracing.

    It requires whole sequences in blocks of at least 256 tokens; bfloat16, or float32 with default matmul precision
    (which the kernel's gradient ignores); and rows and heads that the devices of the mesh divide.
    """
    batch, length, heads, width = query.shape
    mesh = jax.sharding.get_abstract_mesh()
    rows, columns = 1, 1
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if set(AXES) <= set(mesh.axis_names):
        rows, columns = math.prod(mesh.shape[axis] for axis in _ROWS), mesh.shape[_HEADS]
    return (
        length == key.shape[1]
        and length % _BLOCKS[-1] == 0
        and width % 16 == 0
        and (query.dtype == jnp.bfloat16 or (query.dtype == jnp.float32 and precision is None))
        and mesh.size in (0, rows * columns)
        and batch % rows == heads % columns == key.shape[2] % columns == 0
    )


def attend(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T N K"],
    value: Float[Array, "B T N K"],
    segment_ids: Int[Array, "B T"] | None,
    windows: tuple[int | None, ...],
    kind: Int[Array, ""] | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "B T H K"]:
    """Causal attention within segments for shapes that `suits` accepts. For the arguments see `attention.attend`."""

    def on_device(query: Any, key: Any, value: Any, segment_ids: Any, kind: Any, sinks: Any) -> Any:
        # The kernel has no scale argument. The product is rounded to the dtype of the queries.
        query = (query.astype(jnp.float32) * scale).astype(query.dtype)
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        arguments = (query, key, value, segment_ids, sinks)
        branches = [functools.partial(_over_rows, window, softcap) for window in windows]
        mixed = branches[0](*arguments) if kind is None else jax.lax.switch(kind, branches, *arguments)
        return jnp.swapaxes(mixed, 1, 2)

    arguments = (query, key, value, segment_ids, kind, sinks)
    if not set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return on_device(*arguments)
    divided: Any = PartitionSpec(_ROWS, None, _HEADS)
    specs = (divided, divided, divided, PartitionSpec(_ROWS), PartitionSpec(), PartitionSpec(_HEADS))
    return jax.shard_map(on_device, in_specs=specs, out_specs=divided, check_vma=False)(*arguments)


def _over_rows(window: int | None, softcap: float | None, query, key, value, segment_ids, sinks) -> Array:
    """Maps the kernel over the rows of the batch; the head axis is before time."""
    # Not above: Mosaic takes long to import, and most platforms never need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as library

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

    block = next(block for block in _BLOCKS if length % block == 0)
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
