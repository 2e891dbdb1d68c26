"""The frozen language model as an object: configuration, weights, tokenizer and identity, held together."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.models import decoder
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import Layers, Params
from calibjax.models.fingerprint import dotted_leaves, fingerprint, named_tensors
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# One cache for all models: two of the same configuration share their compiled programs.
_hidden_states = jax.jit(decoder.hidden_states, static_argnames=("config", "layers", "dtype"))
_logits = jax.jit(decoder.logits, static_argnames=("config", "dtype"))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A frozen decoder, as `load_model` returns it or `from_params` makes it.

    Its methods are compiled once for each shape. Inside a larger traced function, take `config` and `params` and call
    the functions of `calibjax.models` instead, so that the weights are arguments and not constants of the program.

    Args:
      config: What it is.
      params: Its parameters, as `init_params` shapes them.
      dtype: Compute dtype.
      fingerprint: Hash of configuration and weights.
      path: The directory it was loaded from, or `None`.
    """

    config: DecoderConfig
    params: Params
    dtype: jnp.dtype
    fingerprint: str
    path: Path | None = None
    _tokenizer: "PreTrainedTokenizerBase | None" = None

    @classmethod
    def from_params(
        cls,
        config: DecoderConfig,
        params: Params,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> "LanguageModel":
        """Makes a model of parameters in memory.

        Args:
          config: What it is.
          params: Its parameters, as `init_params` shapes them.
          tokenizer: A tokenizer of transformers, or `None`.
          dtype: Compute dtype.

        Returns:
          The model; its fingerprint is that of the parameters as given.

        Raises:
          UserError: The parameters are not those of `config`, or the tokenizer has ids beyond its vocabulary.
        """
        expected = {path: leaf.shape for path, leaf in dotted_leaves(decoder.abstract_params(config))}
        given = {path: np.shape(leaf) for path, leaf in dotted_leaves(params)}
        wrong = [
            f"{path} (expected {expected.get(path)}, got {given.get(path)})"
            for path in sorted(expected.keys() | given.keys())
            if expected.get(path) != given.get(path)
        ]
        if wrong:
            raise UserError(f"The parameters are not those of the configuration: {', '.join(wrong[:10])}.")
        if tokenizer is not None:
            check_tokenizer(tokenizer, config)
        return cls(config, params, jnp.dtype(dtype), fingerprint(config, named_tensors(params)), _tokenizer=tokenizer)

    @property
    def has_tokenizer(self) -> bool:
        """Whether `tokenizer` can be used."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer.

        Raises:
          UserError: It has none; what is missing is said.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        if self.path is None:
            raise UserError("This model was made in memory without a tokenizer; pass `tokenizer=` to `from_params`.")
        raise UserError(
            f"{self.path} holds no tokenizer; expected tokenizer.json, or another of transformers' tokenizer files."
        )

    @property
    def unembedding(self) -> Float[Array, "V D"]:
        """The matrix whose rows are scored against the last hidden states."""
        return decoder.unembedding(self.config, self.params)

    @property
    def unembedding_bias(self) -> Float[Array, " V"] | None:
        """What is added to the logits before the soft-cap, or `None`."""
        return decoder.unembedding_bias(self.params)

    def hidden_states(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        segment_ids: Int[Array | np.ndarray, "B T"] | None = None,
        positions: Int[Array | np.ndarray, "B T"] | None = None,
        layers: Layers = "last",
    ) -> Float[Array, "*L B T D"]:
        """Returns hidden states in the model's compute dtype; see `calibjax.models.hidden_states`."""
        return _hidden_states(
            self.config,
            self.params,
            jnp.asarray(tokens),
            segment_ids=segment_ids,
            positions=positions,
            layers=layers,
            dtype=self.dtype,
        )

    def logits(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        segment_ids: Int[Array | np.ndarray, "B T"] | None = None,
        positions: Int[Array | np.ndarray, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns logits `[B, T, V]` in float32; see `calibjax.models.logits`."""
        return _logits(self.config, self.params, tokens, segment_ids=segment_ids, positions=positions, dtype=self.dtype)

    def __repr__(self) -> str:
        count = sum(int(np.prod(np.shape(leaf))) for _, leaf in dotted_leaves(self.params))
        return f"LanguageModel({self.config.family}, {count:,} parameters, {self.dtype}, {self.fingerprint[:12]})"


def check_tokenizer(tokenizer: Any, config: DecoderConfig) -> None:
    """Raises `UserError` where a tokenizer has an id that the model has no embedding for."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest >= config.vocab_size:
        raise UserError(
            f"The tokenizer's largest id is {largest} ({token!r}), but the model has vocab_size {config.vocab_size}: "
            "they do not belong together, or tokens were added without resizing the model."
        )
