"""Statistics and dh in one forward pass, for a frozen unembedding: two products for each block of tokens.

A block's exponentials come out of the kernel of the statistics. When that is done their maximum is known, and one
product with W makes of them Σ_v p_v c_v W_v. On TPUs a running sum of D columns stays on chip beside the logits; the
registers of a Hopper multiprocessor hold 128 columns of it, and so the exponentials go through memory, in 16 bits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.kernels import chunked, stats
from calibjax.kernels.operator import Call, Model
from calibjax.kernels.pallas_gpu import forward
from calibjax.kernels.pallas_gpu.schedule import Blocks, choose, chunk_size, over_chunks, token_blocks
from calibjax.kernels.slopes import LOG2_E, slope
from calibjax.kernels.stats import Moments


def moments(
    call: Call,
    model: Model,
    scale: Float[Array, " N"],
    targets: Int[Array, " N"] | None,
    needed: frozenset[str],
    blocks: Blocks,
    device_kind: str,
    interpret,
) -> Moments:
    """The moments of the whole vocabulary, with `rows` in float32."""
    model = model.clean()
    (tokens, width), vocab_size = model.hidden.shape, model.unembedding.shape[0]
    count, size = token_blocks(tokens, vocab_size, blocks)
    plan = choose(size, vocab_size, blocks, device_kind)
    needed = needed - {"rows"}

    def of_block(part: tuple[Array, Array, Array | None]) -> Moments:
        hidden, scale, targets = part
        block = Model(hidden, model.unembedding, model.bias, None)
        found, kept = forward.moments(call, block, scale, targets, needed, True, plan, interpret)
        assert kept is not None
        largest = jnp.pad(found.max_logit * scale * LOG2_E, (0, plan.padded_tokens - size))

        def step(total: Array, start: Array | int, count: int) -> Array:
            whole = -(-count // blocks.columns) * blocks.columns
            z, e = kept.read(call, largest, start, whole)
            if call.softcap is not None:
                e = e * slope(call, z)
            if targets is not None:
                column = jax.lax.broadcasted_iota(jnp.int32, e.shape, 1)
                places = jnp.pad(targets - start, (0, len(e) - size))
                e = jnp.where(column == places[:, None], 0.0, e)
            weights = chunked.rows(model.unembedding, start, count)
            return total + jnp.matmul(
                e[:size, :count].astype(hidden.dtype), weights, preferred_element_type=jnp.float32
            )

        nothing = jnp.zeros((size, width), jnp.float32)
        total = over_chunks(step, nothing, vocab_size, chunk_size(size, vocab_size, blocks))
        return found._replace(rows=total * stats.inverse_weight(found.weight)[:, None])

    def split(x: Array | None) -> Array | None:
        if x is None:
            return None
        return jnp.pad(x, ((0, count * size - tokens), *((0, 0),) * (x.ndim - 1))).reshape(count, size, *x.shape[1:])

    found = jax.lax.map(of_block, (split(model.hidden), split(scale), split(targets)))
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:tokens], found)
