"""Mixtures of experts: a router sends every token to a few of many MLPs (Shazeer et al., 2017, arXiv 1701.06538).

No token is dropped. The copies of the tokens are sorted by expert, so that each matrix product reads the rows of one
expert: by `jax.lax.ragged_dot` on TPUs; elsewhere, where XLA multiplies all rows with all experts, by a loop.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.kernels.platforms import platform
from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Positive, Range, check_options
from calibjax.runtime.sharding import AXES, batch_shards, has_axes

use_ragged_dot = jax.make_user_context(False)
"""`with use_ragged_dot(True):` makes programs traced within use `jax.lax.ragged_dot` on every platform."""

_LARGEST_BLOCK = 128
_ROWS, _EXPERTS = AXES[:2], AXES[2]  # mesh axes that divide tokens and experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Configuration of the experts of a block. Hashable.

    Args:
        experts: number E of experts, at least 2.
        per_token: number K of experts of each token, of the largest router logits; a tie goes to the smaller index.
        normalized: whether the weights of a token's experts are a softmax over its K logits, or over all E.
        router_bias: whether the router's logits have a bias.
        clamp: `c` of gpt-oss's `(clip(up x, -c, c) + 1) * g * sigmoid(swish * g)`, `g = min(gate x, c)`; or `None`.
        swish: factor within the sigmoid; for `clamp` only.
    """

    experts: Annotated[int, Range(2)]
    per_token: int
    normalized: bool = True
    router_bias: bool = False
    clamp: Positive | None = None
    swish: float = 1.702

    def __post_init__(self):
        check_options(self)
        if not 1 <= self.per_token <= self.experts:
            most = f"{self.experts}, the number of experts"
            raise UserError(f"experts per token: expected 1 to {most}, got {self.per_token}.")


def route(logits: Float[Array, "N E"], mixture: Mixture) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """Weights, in float32, and indices of the experts of each token, by the rule of `Mixture`."""
    logits = jnp.where(logits == 0, 0.0, logits)  # `top_k` orders -0.0 before 0.0
    top, chosen = jax.lax.top_k(logits, mixture.per_token)
    base = top if mixture.normalized else logits
    return jnp.exp(top - jax.nn.logsumexp(base, axis=-1, keepdims=True)), chosen


def mix(
    hidden: Float[Array, "N D"],
    weights: Float[Array, "N K"],
    chosen: Int[Array, "N K"],
    params: Mapping[str, Mapping[str, Array]],
    activation: Callable[[Array, Array], Array],
) -> Float[Array, "N D"]:
    """The weighted sum of each token's experts `down(activation(gate x, up x))`, in float32.

    `weights` and `chosen` come from `route`; an index outside `[0, E)` contributes zero. `params` has for `gate`, `up`
    and `down` a `kernel` `[E, in, out]` and optionally a `bias` `[E, out]`; `activation` is a function of gate and up.
    """
    # Each of K copies of a token has a slot: `token` and `expert` are by slot, `slot` and `expert_of` by copy.
    experts = params["up"]["kernel"].shape[0]
    tokens, per_token = chosen.shape
    copies = tokens * per_token
    is_local = (chosen >= 0) & (chosen < experts)
    expert_of = jnp.where(is_local, chosen, experts).reshape(copies)  # E: none of these
    order = jnp.argsort(expert_of, stable=True)  # copies by their expert
    sizes = jnp.zeros(experts + 1, jnp.int32).at[expert_of].add(1)
    starts = jnp.cumsum(sizes) - sizes
    ranks = jnp.zeros(copies, jnp.int32).at[order].set(jnp.arange(copies, dtype=jnp.int32))  # places in `order`
    if platform().name == "tpu" or use_ragged_dot.value:  # the slots of the experts follow each other without gaps
        slot = ranks
        token = order // per_token
        expert = jnp.minimum(expert_of[order], experts - 1)

        def multiply(x: Array, kernels: Array) -> Array:
            return jax.lax.ragged_dot(x, kernels, sizes[:-1])
    else:  # blocks of slots, each of one expert; the token of a slot that is not used is any
        average = max(copies // experts, 1)
        block = min(max(8, 2 ** (average.bit_length() - 1)), _LARGEST_BLOCK)  # a power of two, at most the average
        # Every group that is not empty has at most one block that is not full.
        count = min(copies, copies // block + min(experts, copies))
        blocks = ceil_div(sizes[:-1], block)  # of each expert
        ends = jnp.cumsum(blocks)
        first_slots = jnp.append(ends - blocks, count) * block
        slot = first_slots[expert_of] + ranks - starts[expert_of]
        slot = jnp.where(expert_of < experts, slot, count * block)
        token_of = jnp.arange(copies, dtype=jnp.int32) // per_token
        token = jnp.zeros(count * block, jnp.int32).at[slot].set(token_of, mode="drop")
        number = jnp.arange(count, dtype=ends.dtype)
        expert_of_block = jnp.searchsorted(ends, number, side="right", method="compare_all")
        expert = jnp.repeat(jnp.minimum(expert_of_block, experts - 1), block)

        def multiply(x: Array, kernels: Array) -> Array:
            pairs = (x.reshape(-1, block, x.shape[-1]), expert[::block])
            products = jax.lax.map(lambda pair: pair[0] @ kernels[pair[1]], pairs)
            return products.reshape(-1, kernels.shape[-1])

    def project(name: str, x: Array) -> Array:
        out = multiply(x, params[name]["kernel"])
        return out + params[name]["bias"][expert] if "bias" in params[name] else out

    inputs = hidden[token]
    out = project("down", activation(project("gate", inputs), project("up", inputs)))
    # By selection: a slot without an expert may hold anything.
    out = out.at[slot.reshape(chosen.shape)].get(mode="clip")
    copied = jnp.where(is_local[..., None], out, 0).astype(jnp.float32)
    return jnp.einsum("nkd,nk->nd", copied, weights, precision="highest")


class Experts(nn.Module):
    """The MLP of a block with a mixture of experts. The router's product, softmax and choice are float32.

    If a mesh with `AXES` is set, the experts are divided over its tensor axis: each device applies its experts to the
    tokens of its rows, and the results are summed. `width` is the inner width of each expert.
    """

    mixture: Mixture
    width: int
    activation: Callable[[Array], Array]
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        number, size = self.mixture.experts, hidden.shape[-1]
        kinds: Any = {"param_dtype": self.param_dtype, "kernel_init": self.kernel_init}
        options: Any = {"use_bias": self.mixture.router_bias, "dtype": jnp.float32, "precision": "highest"}
        router = nn.Dense(number, **options, **kinds, name="router")
        logits = router(hidden.astype(jnp.float32).reshape(-1, size))
        weights, chosen = route(logits, self.mixture)
        params = {
            name: self.param(name, self._projection, (number, *shape))
            for name, shape in (("gate", (size, self.width)), ("up", (size, self.width)), ("down", (self.width, size)))
        }
        params = jax.tree.map(lambda x: x.astype(self.dtype), params)
        split = (*hidden.shape[:2], self.mixture.per_token)
        arguments = (hidden, weights.reshape(split), chosen.reshape(split), params)

        def on_device(hidden: Array, weights: Array, chosen: Array, params: Any) -> Array:
            """`mix` for `[B, T, D]` with the experts of this device."""
            experts_here = params["up"]["kernel"].shape[0]
            if experts_here < number:
                chosen = chosen - jax.lax.axis_index(_EXPERTS) * experts_here
            rows, weights, chosen = (x.reshape(-1, x.shape[-1]) for x in (hidden, weights, chosen))
            out = mix(rows, weights, chosen, params, self._gated).reshape(hidden.shape)
            if experts_here < number:
                out = jax.lax.psum(out, _EXPERTS)
            return out.astype(hidden.dtype)

        mesh = jax.sharding.get_abstract_mesh()
        if not has_axes(mesh) or mesh.size == 1:
            return on_device(*arguments)
        divides = hidden.shape[0] % batch_shards(mesh) == 0
        rows = PartitionSpec(_ROWS) if divides else PartitionSpec()
        experts = PartitionSpec() if number % mesh.shape[_EXPERTS] else PartitionSpec(_EXPERTS)
        in_specs = (rows, rows, rows, experts)
        return jax.shard_map(on_device, in_specs=in_specs, out_specs=rows, check_vma=False)(*arguments)

    def _projection(self, key: Array, shape: tuple[int, int, int]) -> dict[str, Array]:
        """Parameters of one projection of all experts: kernel `[E, in, out]` and bias `[E, out]`."""
        bias = {"bias": jnp.zeros((shape[0], shape[2]), self.param_dtype)} if self.use_bias else {}
        return {"kernel": self.kernel_init(key, shape, self.param_dtype), **bias}

    def _gated(self, gate: Array, up: Array) -> Array:
        clamp = self.mixture.clamp
        if clamp is None:
            return self.activation(gate) * up
        gate = jnp.minimum(gate, clamp)
        return (jnp.clip(up, -clamp, clamp) + 1) * gate * jax.nn.sigmoid(self.mixture.swish * gate)
