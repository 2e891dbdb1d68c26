"""The one decoder for all families: embedding, a scan over blocks, final norm, unembedding.

All functions are pure. The tree of parameters holds

    embedding [V, D], position_embedding [P, D] if learned, layers.<...> [L, ...], final_norm.<...> [D],
    unembedding [V, D] if it is not tied to the embedding, unembedding_bias [V] if the model has one.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Literal, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from calibjax.kernels.stats import softcapped
from calibjax.models.config import DecoderConfig, Params
from calibjax.models.lora import LoraConfig, adapters_of
from calibjax.nn.attention import Past
from calibjax.nn.blocks import Block, SequenceContext, choose_context, make_norm, segment_positions, sequence_context
from calibjax.nn.kv_cache import Cache, fill, full_cache, reserve
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import check_value
from calibjax.runtime.sharding import constrain_batch, lookup

Layers = Literal["last", "all", "residual"]
_Contexts = tuple[SequenceContext, ...]
_Hidden = Float[Array, "*B D"]
Remat = Literal["none", "dots", "full"]
_REMAT_POLICIES = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}


class Decoder(nn.Module):
    """The decoder from token ids to the final norm, as a scan over blocks: their parameters are stacked along axis L.

    For inputs and output see `hidden_states`. With `keep`, or with a `cache` in which `reserve` has assigned columns to
    these tokens, the output is a pair: the hidden states, and the tokens' keys and values in all layers.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: Remat = "none"

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None,
        positions: Int[Array, "#B T"],
        layers: Layers = "last",
        cache: Cache | None = None,
        condition: Float[Array, "B D"] | None = None,
        edit: Float[Array, "L D"] | None = None,
        keep: bool = False,
        until: Int[Array, "B T"] | None = None,
    ) -> Any:
        cfg = self.config
        keep = keep or cache is not None
        hidden = self._lookup("embedding", cfg.vocab_size, tokens)
        if condition is not None:
            hidden = hidden + condition[:, None, :].astype(self.dtype)
        if cfg.rope is None:
            hidden = hidden + self._lookup("position_embedding", cfg.max_positions, positions)
        if cfg.embedding_scale is not None:
            hidden = hidden * jnp.asarray(cfg.embedding_scale, self.dtype)

        def step(
            block: Block, hidden: Array, layer: tuple[Array, Past | None, Array | None], contexts: _Contexts
        ) -> tuple[Array, Any]:
            local, past, added = layer  # whether its attention is local, its part of the cache, its row of `edit`
            context = contexts[0] if len(contexts) == 1 else choose_context(local.astype(jnp.int32), *contexts)
            hidden, new = block(hidden, context, past)
            hidden = constrain_batch(hidden)
            if keep:
                return hidden, new
            if added is not None:
                hidden = hidden + added.astype(hidden.dtype)[None, None, :]
            return hidden, None if layers == "last" else hidden

        if self.remat != "none":
            step = nn.remat(step, policy=_REMAT_POLICIES[self.remat], prevent_cse=False)
        scan = nn.scan(
            step,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),  # pyright: ignore
            length=cfg.num_layers,
        )
        local = jnp.asarray(cfg.local_layers or (False,) * cfg.num_layers)
        contexts = _layer_contexts(cfg, positions, segment_ids, None if cache is None else cache.length, until)
        hidden = constrain_batch(hidden)
        past = None if cache is None else cache.past
        blocks = Block(cfg, self.dtype, self.param_dtype, name="layers")
        last, outputs = scan(blocks, hidden, (local, past, edit), contexts)
        last = make_norm(cfg, self.dtype, self.param_dtype, name="final_norm")(last)
        if not cfg.tie_embeddings:
            # Declared here so that one initialisation makes the whole tree; the module does not use it.
            self.param("unembedding", nn.initializers.normal(0.02), (cfg.vocab_size, cfg.hidden_size), self.param_dtype)
        if cfg.unembedding_bias:
            self.param("unembedding_bias", nn.initializers.zeros, (cfg.vocab_size,), self.param_dtype)
        if keep:
            return last, outputs
        if outputs is None:
            return last
        if layers == "residual":
            return jnp.concatenate([hidden[None], outputs])
        return jnp.concatenate([hidden[None], outputs[:-1], last[None]])

    def _lookup(self, name: str, rows: int, index: Array) -> Array:
        table = self.param(name, nn.initializers.normal(0.02), (rows, self.config.hidden_size), self.param_dtype)
        # An index beyond the table gives NaN, because clamping would give plausible numbers for a wrong token.
        return lookup(table, index, name, self.dtype, tied=name == "embedding" and self.config.tie_embeddings)


def hidden_states(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    layers: Layers = "last",
    dtype: DTypeLike = jnp.float32,
    remat: Remat = "none",
    lora: LoraConfig | None = None,
    condition: Float[Array, "B D"] | None = None,
    edit: Float[Array, "L D"] | None = None,
    until: Int[Array, "B T"] | None = None,
) -> Float[Array, "*L B T D"]:
    """Runs the decoder on tokens up to the final norm, without logits.

    Args:
        config: static under `jax.jit`.
        params: parameters of the decoder.
        tokens: ids in `[0, V)`, `[B, T]`; an id outside makes its row NaN.
        segment_ids: segment of each token, to which it attends; 0 is padding. Default: one segment per row.
        positions: position of each token; by default counted from 0 in each segment.
        layers: `"last"`: the states after the final norm; `"all"`: the embeddings and every block's output, not normed
            except for the last block's, as transformers' `output_hidden_states`; `"residual"`: the same with the last
            block's output not normed either (see `final_norm`).
        dtype: compute dtype. In float32, matrix products have the highest precision on every platform.
        remat: what the backward pass recomputes of a block: `"none"`; `"dots"`: all except its matrix products;
            `"full"`: the whole block, of which only the input is stored.
        lora: configuration of the low-rank adapters that `params` holds, see `init_adapters`.
        condition: for each row, a vector added to the embedding of every token, `[B, D]`.
        edit: vectors added to the residual stream of every token after each block, `[L, D]`.
        until: for each token, the first later column of its row that may not attend to it, `[B, T]`. A row can then
            hold a tree of continuations, depth first, with `positions` counted along each branch. Not with windows.

    Returns:
        `[B, T, D]`, or `[L + 1, B, T, D]` for `"all"` and `"residual"`, in `dtype`.

    Raises:
        UserError: shapes differ, tokens are not integers, T exceeds `config.max_positions`, or `until` with windows.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError(f"tokens: expected integers [B, T], got {tokens.dtype}{list(tokens.shape)}.")
    if not tokens.size:
        raise UserError(f"tokens: expected at least one, got {list(tokens.shape)}.")
    for name, value in {"segment_ids": segment_ids, "positions": positions, "until": until}.items():
        if value is not None and value.shape != tokens.shape:
            raise UserError(f"{name}: expected the tokens' shape {list(tokens.shape)}, got {list(value.shape)}.")
    if tokens.shape[1] > config.max_positions:
        longest = f"at most {config.max_positions} positions for this model"
        raise UserError(f"tokens: expected {longest}, got {tokens.shape[1]}; use shorter sequences.")
    if until is not None and any(config.local_layers):
        raise UserError("until: expected None for a model with attention windows.")
    check_value("layers", Layers, layers)
    blocks = [config.num_layers, config.hidden_size]
    if edit is not None and list(edit.shape) != blocks:
        raise UserError(f"edit: expected one row for each block, {blocks}, got {list(edit.shape)}.")
    module = Decoder(config, dtype, remat=remat)
    module = module if lora is None else lora.adapt(module)
    if positions is None and segment_ids is not None:
        positions = segment_positions(segment_ids)
    elif positions is None:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    with _matmul_precision(dtype):
        hidden = module.apply(
            {"params": params}, tokens, segment_ids, positions, layers, condition=condition, edit=edit, until=until
        )
    return cast(Array, hidden)


def extend(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    cache: Cache | None,
    *,
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    until: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Runs the decoder on the next T tokens of each row, with the keys and values of the tokens before them.

    `cache` holds these in the compute dtype and has free columns for the new tokens (`calibjax.nn.kv_cache.fork` adds
    them); without a cache nothing comes before. By default positions count from 0 in each segment, tokens in the cache
    included. `until`, as in `hidden_states`, covers the T new columns, which are then the last ones of the cache.
    Returns hidden states after the final norm, and the cache with the new tokens.
    """
    if cache is None:
        all_segment_ids, default_positions = segment_ids, segment_positions(segment_ids)
    else:
        cache, default_positions = reserve(cache, segment_ids)
        all_segment_ids = cache.segment_ids
    positions = default_positions if positions is None else positions
    if until is not None:
        columns = all_segment_ids.shape[1]
        before = columns - tokens.shape[1]
        until = jnp.pad(until + before, ((0, 0), (before, 0)), constant_values=columns)
    with _matmul_precision(dtype):
        module = Decoder(config, dtype)
        outputs: Any = module.apply(
            {"params": params}, tokens, all_segment_ids, positions, cache=cache, keep=True, until=until
        )
    hidden, new = outputs
    return hidden, full_cache(new, segment_ids) if cache is None else fill(cache, new)


def final_norm(config: DecoderConfig, params: Params, residual: _Hidden, dtype: DTypeLike = jnp.float32) -> _Hidden:
    """Applies the norm that precedes the unembedding to residual streams of any layer."""
    norm = make_norm(config, dtype, residual.dtype, name="final_norm")
    return cast(Array, norm.apply({"params": params["final_norm"]}, residual))


def unembedding(config: DecoderConfig, params: Params) -> Float[Array, "V D"]:
    """The unembedding (the embedding if they are tied), divided by `logit_divisor` if there is one."""
    matrix = params["embedding"] if config.tie_embeddings else params["unembedding"]
    return matrix if config.logit_divisor is None else matrix / jnp.asarray(config.logit_divisor, matrix.dtype)


def unembedding_bias(params: Params) -> Float[Array, " V"] | None:
    """The bias of the logits before the soft-cap, or `None` if there is none."""
    return params.get("unembedding_bias")


def unembed(config: DecoderConfig, params: Params, hidden: _Hidden) -> Float[Array, "*B V"]:
    """Computes logits `[..., V]` from hidden states `[..., D]`: `softcap(hidden @ unembedding.T + bias)`.

    The dtype of `hidden` is the compute dtype; logits are accumulated and returned in float32.
    """
    matrix = unembedding(config, params).astype(hidden.dtype)
    with _matmul_precision(hidden.dtype):
        logits = jnp.einsum("...d,vd->...v", hidden, matrix, preferred_element_type=jnp.float32)
    bias = unembedding_bias(params)
    if bias is not None:
        logits = logits + jax.lax.expand_dims(bias.astype(jnp.float32), range(logits.ndim - 1))
    return softcapped(logits, config.logit_softcap)


def logits(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "B T V"]:
    """Runs the decoder on tokens and returns logits `[B, T, V]` in float32. For the arguments see `hidden_states`."""
    hidden = hidden_states(config, params, tokens, segment_ids=segment_ids, positions=positions, dtype=dtype)
    return unembed(config, params, hidden)


def init_params(config: DecoderConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Random parameters: matrices and embeddings N(0, 0.02²), scales one, biases zero."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(lambda key: Decoder(config, param_dtype=dtype).init(key, tokens, None, tokens)["params"])(key)


def init_adapters(config: DecoderConfig, lora: LoraConfig, key: PRNGKeyArray) -> dict[str, Any]:
    """Initial float32 adapters for `lora.join`: A from He's uniform distribution, B zero, so that A B is 0."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    module = lora.adapt(Decoder(config))
    return jax.jit(lambda key: adapters_of(module.init(key, tokens, None, tokens)["params"]))(key)


@functools.lru_cache(maxsize=32)  # tracing a decoder takes a tenth of a second
def abstract_params(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> Params:
    """The tree of parameters as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda key: init_params(config, key, dtype), jax.random.key(0))


def _layer_contexts(
    config: DecoderConfig, positions: Array, segment_ids: Array | None, start: Array | None, until: Array | None
) -> _Contexts:
    """Rotary table and mask for all layers; if only some layers are local: one for global, then one for local ones."""
    unlimited = sequence_context(config, positions, segment_ids, start=start, until=until)
    if not any(config.local_layers):
        return (unlimited,)
    length = positions.shape[1] if segment_ids is None else segment_ids.shape[1]
    window = config.window if config.window is not None and config.window < length else None
    local_config = dataclasses.replace(config, rope=config.local_rope or config.rope)
    local = sequence_context(local_config, positions, segment_ids, window=window, start=start, until=until)
    return (local,) if all(config.local_layers) else (unlimited, local)


def _matmul_precision(dtype: DTypeLike) -> contextlib.AbstractContextManager:
    # By default, TPUs and recent GPUs multiply float32 matrices in bfloat16 or TF32.
    return jax.default_matmul_precision("highest") if jnp.dtype(dtype) == jnp.float32 else contextlib.nullcontext()
