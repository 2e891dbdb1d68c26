"""The frozen language model as an object: configuration, weights, tokenizer and fingerprint."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from calibjax.data import Sequences
from calibjax.data.chat_template import Tokenizer
from calibjax.kernels import VocabStats, vocab_stats
from calibjax.models import decoder
from calibjax.models.config import DecoderConfig, Params
from calibjax.models.decoder import Layers
from calibjax.models.fingerprint import dotted_leaves, fingerprint, named_tensors
from calibjax.models.tokenizer import check_tokenizer
from calibjax.runtime.arrays import AnyArray, as_jax
from calibjax.runtime.errors import UserError

Tokens = Int[AnyArray, "B T"] | Sequences
"""Token ids, or sequences, which bring segment ids and positions."""
_Ids = Int[AnyArray, "B T"] | None

# Jitted at module level, so that models of the same configuration share compiled programs.
_hidden_states = jax.jit(decoder.hidden_states, static_argnames=("config", "layers", "dtype"))
_logits = jax.jit(decoder.logits, static_argnames=("config", "dtype"))


def _token_inputs(
    tokens: AnyArray | Sequences, segment_ids: AnyArray | None, positions: AnyArray | None
) -> tuple[Array, dict[str, Array | None]]:
    """Tokens, and the segment ids and positions that keep the texts of packed sequences apart."""
    if isinstance(tokens, Sequences):
        if segment_ids is not None or positions is not None:
            raise UserError("segment_ids, positions: sequences have their own; leave them out.")
        tokens, segment_ids, positions = tokens.tokens, tokens.segment_ids, tokens.positions
    layout = {"segment_ids": segment_ids, "positions": positions}
    layout = {name: None if x is None else as_jax(x) for name, x in layout.items()}
    return as_jax(tokens), layout


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A frozen decoder, as `load_model` returns it or `from_params` makes it.

    Methods are compiled once for each shape. Inside a traced function, call the functions of `calibjax.models` with
    `config` and `params`, or the methods of `dataclasses.replace(lm, params=params)`, so that weights are arguments.
    """

    config: DecoderConfig
    params: Params
    """Parameters in the tree of `init_params`."""
    dtype: jnp.dtype
    """Compute dtype."""
    fingerprint: str
    """Hash of configuration and weights."""
    path: Path | None = None
    """Directory or file that the model was loaded from."""
    _tokenizer: "Callable[[], Tokenizer] | None" = None

    @classmethod
    def from_params(
        cls,
        config: DecoderConfig,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> "LanguageModel":
        """Makes a model from parameters in memory, in the tree of `init_params`.

        Raises:
            UserError: the parameters do not match `config`, or the tokenizer has ids beyond its vocabulary.
        """
        expected = {path: leaf.shape for path, leaf in dotted_leaves(decoder.abstract_params(config))}
        shapes = {path: np.shape(leaf) for path, leaf in dotted_leaves(params)}
        wrong = sorted({path for path, _ in expected.items() ^ shapes.items()})
        if wrong:
            named = ", ".join(f"{path} (expected {expected.get(path)}, got {shapes.get(path)})" for path in wrong[:10])
            raise UserError(f"The parameters do not match the configuration: {named}.")
        if tokenizer is not None:
            check_tokenizer(tokenizer, config, tokenizer.added_tokens_decoder)
        get_tokenizer = None if tokenizer is None else lambda: tokenizer
        digest = fingerprint(config, named_tensors(params))
        return cls(config, params, jnp.dtype(dtype), digest, _tokenizer=get_tokenizer)

    def with_params(self, params: Params, config: DecoderConfig | None = None) -> "LanguageModel":
        """This model with other parameters, such as fine-tuned ones, and their fingerprint; tokenizer and path stay.

        `config`: another configuration, such as one without a soft-cap. Raises `UserError` as `from_params` does.
        """
        model = LanguageModel.from_params(config or self.config, params, dtype=self.dtype)
        return dataclasses.replace(model, path=self.path, _tokenizer=self._tokenizer)

    @classmethod
    def random(cls, vocab_size: int, *, hidden_size: int = 16, num_layers: int = 1, seed: int = 0) -> "LanguageModel":
        """Makes a small Llama with random weights, without a tokenizer, to try functions on.

        Example:
            >>> LanguageModel.random(vocab_size=32).logits([[1, 2, 3]]).shape
            (1, 3, 32)
        """
        config = DecoderConfig(
            family="llama",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_layers=num_layers,
            num_heads=2,
            num_kv_heads=2,
            head_dim=hidden_size // 2,
            max_positions=1024,
        )
        return cls.from_params(config, decoder.init_params(config, jax.random.key(seed)))

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read from its files at the first use; raises `UserError` if there is none."""
        if self._tokenizer is not None:
            return self._tokenizer()
        if self.path is None:
            raise UserError("This model was made in memory without a tokenizer; pass `tokenizer=` to `from_params`.")
        raise UserError(f"{self.path} holds no tokenizer; expected tokenizer.json or another file of transformers.")

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that the parameters were placed on, if any."""
        return getattr(getattr(self.params["embedding"], "sharding", None), "mesh", None)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The context of the mesh that the parameters lie on; without one, it does nothing."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def unembedding(self) -> Float[Array, "V D"]:
        """Unembedding matrix, see `decoder.unembedding`."""
        return decoder.unembedding(self.config, self.params)

    @property
    def unembedding_bias(self) -> Float[Array, " V"] | None:
        """Bias of the logits before the soft-cap, or `None`."""
        return decoder.unembedding_bias(self.params)

    def hidden_states(
        self, tokens: Tokens, *, segment_ids: _Ids = None, positions: _Ids = None, layers: Layers = "last"
    ) -> Float[Array, "*L B T D"]:
        """Hidden states in the compute dtype, as `calibjax.models.hidden_states` has them. Packed texts do not mix."""
        tokens, layout = _token_inputs(tokens, segment_ids, positions)
        return _hidden_states(self.config, self.params, tokens, **layout, layers=layers, dtype=self.dtype)

    def logits(self, tokens: Tokens, *, segment_ids: _Ids = None, positions: _Ids = None) -> Float[Array, "B T V"]:
        """Logits `[B, T, V]` in float32, as `calibjax.models.logits` has them. Packed texts do not mix."""
        tokens, layout = _token_inputs(tokens, segment_ids, positions)
        return _logits(self.config, self.params, tokens, **layout, dtype=self.dtype)

    def vocab_stats(
        self,
        hidden: Float[AnyArray, "B T D"],
        sequences: Sequences,
        *,
        scale: Float[AnyArray, "B T"] | float | None = None,
        statistics: Sequence[str] | None = None,
    ) -> VocabStats:
        """`calibjax.vocab_stats` `[B, T]` of the model's logits: with its bias, soft-cap and the loss mask.

        `stats.mean(values)` is the mean over the tokens that count, as `evaluate` takes it.

        Args:
            hidden: `hidden_states(sequences)`.
            sequences: the sequences of `hidden`, whose targets and loss mask `where` are read.
            scale, statistics: as in `calibjax.vocab_stats`.
        """
        return vocab_stats(
            hidden,
            self.unembedding.astype(self.dtype),
            sequences.targets,
            scale=scale,
            bias=self.unembedding_bias,
            softcap=self.config.logit_softcap,
            where=sequences.where,
            statistics=statistics,
        )

    def __repr__(self) -> str:
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(self.params))
        return f"LanguageModel({self.config.family}, {count:,} parameters, {self.dtype}, {self.fingerprint[:12]})"
