"""What a decoder is: its sizes and kinds, and nothing of its weights."""

import dataclasses
from typing import Literal

from calibjax.nn.blocks import BlockConfig, Rope
from calibjax.runtime.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(BlockConfig):
    """A decoder-only language model: a block, how often it is repeated, and what stands at both ends.

    Hashable, so it can be a static argument of `jax.jit`. The block's own fields are those of `BlockConfig`.

    Args:
      family: The Hugging Face `model_type` it was read from, a key of `FAMILIES`.
      vocab_size: Rows V of the embedding and of the unembedding.
      num_layers: Blocks L.
      max_positions: The longest sequence it was made for; with learned positions, the rows of their table.
      tie_embeddings: Whether the unembedding is the embedding.
      unembedding_bias: Whether a bias is added to the logits.
      logit_softcap: `c` in `c * tanh(logits / c)`, or `None`.
      logit_divisor: What logits are divided by before bias and soft-cap, or `None`.
      embedding_scale: Factor on the embeddings, rounded to the compute dtype; or `None`.
      local_layers: For each layer, whether it is local; empty where none is.
      window: How many tokens, itself included, a token of a local layer sees; `None`: all before it.
      local_rope: Rotary positions of local layers, of the same fraction; `None`: as in the others.

    Raises:
      UserError: The sizes do not fit each other, a number is not finite, or a name is not known.
    """

    family: str
    vocab_size: int
    num_layers: int
    max_positions: int
    tie_embeddings: bool = False
    unembedding_bias: bool = False
    logit_softcap: float | None = None
    logit_divisor: float | None = None
    embedding_scale: float | None = None
    local_layers: tuple[bool, ...] = ()
    window: int | None = None
    local_rope: Rope | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("vocab_size", "num_layers", "max_positions"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: expected at least 1, got {getattr(self, name)}.")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise UserError(f"logit_softcap: expected None or a positive number, got {self.logit_softcap}.")
        if self.logit_divisor is not None and not self.logit_divisor > 0:
            raise UserError(f"logit_divisor: expected None or a positive number, got {self.logit_divisor}.")
        if self.local_layers and len(self.local_layers) != self.num_layers:
            raise UserError(f"local_layers: expected {self.num_layers} values, got {len(self.local_layers)}.")
        if self.window is not None and self.window < 1:
            raise UserError(f"window: expected None or at least 1, got {self.window}.")
        if self.local_rope is not None and (self.rope is None or self.local_rope.fraction != self.rope.fraction):
            raise UserError(
                "local_rope: expected one that rotates as many channels as rope, "
                f"got {self.local_rope} beside {self.rope}."
            )

    @property
    def positions(self) -> Literal["rope", "learned"]:
        """How the model knows positions: a table is learned where they are not rotary."""
        return "learned" if self.rope is None else "rope"
