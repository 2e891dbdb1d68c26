"""A small language model for the notebooks, trained in seconds on a synthetic language with known probabilities."""

import jax
import jax.numpy as jnp
import optax

from calibjax import LanguageModel, Sequences, linear_cross_entropy
from calibjax.data.synthetic import as_sequences, make_language, sample
from calibjax.models import DecoderConfig, hidden_states, init_params, unembedding

LENGTH = 65  # tokens of a sequence: 64 predictions


def draw(count: int, seed: int) -> Sequences:
    """Sequences of the language of `calibjax quickstart`: 32 tokens, three hidden topics."""
    return as_sequences(sample(make_language(jax.random.key(0)), jax.random.key(seed), count, LENGTH))


def train_model(layers: int = 2, steps: int = 150, label_smoothing: float = 0.0) -> LanguageModel:
    """A decoder trained on 128 sequences, too few for so many steps: it is overconfident, as large models can be."""
    config = DecoderConfig(
        family="llama",
        vocab_size=32,
        hidden_size=48,
        intermediate_size=128,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=12,
        max_positions=LENGTH,
    )
    data = draw(128, seed=1)
    tokens, targets = jnp.asarray(data.tokens), jnp.asarray(data.targets)
    optimizer = optax.adam(optax.linear_schedule(4e-3, 0.0, steps))

    def loss(params, rows):
        hidden = hidden_states(config, params, tokens[rows])
        return linear_cross_entropy(
            hidden, unembedding(config, params), targets[rows], label_smoothing=label_smoothing, reduction="mean"
        )

    def step(carry, key):
        params, state = carry
        gradient = jax.grad(loss)(params, jax.random.choice(key, len(tokens), (16,), replace=False))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train(params):
        keys = jax.random.split(jax.random.key(0), steps)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        return params

    return LanguageModel.from_params(config, train(init_params(config, jax.random.key(0))))
