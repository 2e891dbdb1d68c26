"""Not run on a GPU yet: statistics and dh in one forward pass, for a frozen unembedding.

Two products for each block of tokens.

The kernel of the statistics saves the exponentials of a block. Then their maximum is known, and one product with W
gives Σ_v p_v c_v W_v. On TPUs a running sum of D columns stays on chip beside the logits; the registers of a Hopper
multiprocessor hold 128 columns of it, so the exponentials go through memory, in 16 bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from calibjax.kernels import chunked, stats
from calibjax.kernels.contract import ForwardRequest, Inputs
from calibjax.kernels.logit_cotangents import LOG2_E
from calibjax.kernels.pallas_gpu import forward
from calibjax.kernels.pallas_gpu.schedule import Blocks, choose, chunk_size, over_chunks, token_blocks
from calibjax.kernels.softcap import slope_in_units
from calibjax.kernels.stats import Moments


def moments(request: ForwardRequest, inputs: Inputs, blocks: Blocks, device_kind: str, interpret: Any) -> Moments:
    """The moments of the whole vocabulary, with `rows` in float32."""
    options = request.options
    inputs = inputs.masked()
    (tokens, width), (vocab_size, _), dtype = inputs.hidden.shape, inputs.unembedding.shape, inputs.hidden.dtype
    count, size = token_blocks(tokens, vocab_size, blocks)
    schedule = choose(size, vocab_size, blocks, device_kind)
    of_statistics = ForwardRequest(options, request.needed - {"rows"}, save=True)

    def of_block(part: tuple[Array, Array, Array | None]) -> Moments:
        hidden, scale, targets = part
        block = Inputs(hidden, inputs.unembedding, inputs.bias, scale, targets, valid=None)
        moments, saved = forward.moments(of_statistics, block, schedule, interpret)
        largest = jnp.pad(moments.max_logit * scale * LOG2_E, (0, schedule.padded_tokens - size))

        def step(total: Array, start: Array | int, count: int) -> Array:
            whole = -(-count // blocks.columns) * blocks.columns
            z, e = saved.read(options, largest, start, whole)
            if options.softcap is not None:
                e = e * slope_in_units(z, options.softcap)
            if targets is not None:
                column = jax.lax.broadcasted_iota(jnp.int32, e.shape, 1)
                places = jnp.pad(targets - start, (0, len(e) - size))
                e = jnp.where(column == places[:, None], 0.0, e)
            weights = chunked.rows(inputs.unembedding, start, count)
            return total + jnp.matmul(e[:size, :count].astype(dtype), weights, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((size, width), jnp.float32)
        total = over_chunks(step, zeros, vocab_size, chunk_size(size, vocab_size, blocks))
        return moments._replace(rows=total * stats.inverse_weight(moments.weight)[:, None])

    def split(x: Array | None) -> Array | None:
        if x is None:
            return None
        return jnp.pad(x, ((0, count * size - tokens), *((0, 0),) * (x.ndim - 1))).reshape(count, size, *x.shape[1:])

    blocks_of_moments = jax.lax.map(of_block, (split(inputs.hidden), split(inputs.scale), split(inputs.targets)))
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:tokens], blocks_of_moments)
