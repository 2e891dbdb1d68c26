"""Configuration of a decoder."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from calibjax.nn.blocks import BlockConfig, Rope
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Positive, Range

MAX_LAYERS = 10_000
Params = Mapping[str, Any]
"""The tree of parameters of a decoder, or a part of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(BlockConfig):
    """Configuration of a decoder-only language model: its block, the number of layers, embedding and unembedding.

    Hashable, so it can be a static argument of `jax.jit`. `BlockConfig` documents the fields of the block.

    Args:
        family: Hugging Face `model_type`, a key of `FAMILIES`.
        vocab_size: V, number of rows of the embedding and of the unembedding.
        num_layers: L, number of blocks.
        max_positions: longest supported sequence; with learned positions, the number of rows of their table.
        tie_embeddings: whether the unembedding is the embedding.
        unembedding_bias: whether a bias is added to the logits.
        logit_softcap: `c` in `c * tanh(logits / c)`, or `None`.
        logit_divisor: positive divisor of the logits before bias and soft-cap, or `None`.
        embedding_scale: factor on the embeddings, rounded to the compute dtype; or `None`.
        local_layers: for each layer, whether its attention is local; empty if none is.
        window: number of tokens, including itself, that a token attends to in a local layer. `None`: all before it.
        local_rope: rotary positions of local layers, with the same fraction as `rope`. `None`: `rope`.

    Raises:
        UserError: for inconsistent sizes, a number out of range, or an unknown name.
    """

    family: str
    vocab_size: int
    num_layers: Annotated[int, Range(1, MAX_LAYERS)]
    max_positions: int
    tie_embeddings: bool = False
    unembedding_bias: bool = False
    logit_softcap: Positive | None = None
    logit_divisor: Positive | None = None
    embedding_scale: float | None = None
    local_layers: tuple[bool, ...] = ()
    window: int | None = None
    local_rope: Rope | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.local_layers and len(self.local_layers) != self.num_layers:
            raise UserError(f"local_layers: expected {self.num_layers} values, got {len(self.local_layers)}.")
        if self.local_rope is not None and (self.rope is None or self.local_rope.fraction != self.rope.fraction):
            got = f"got {self.local_rope} beside {self.rope}"
            raise UserError(f"local_rope: expected the same fraction of rotated channels as rope, {got}.")
