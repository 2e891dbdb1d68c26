"""The quick start: a language whose truth is known, a model that trusts itself too much, and its repair."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from calibjax import losses
from calibjax.commands.common import claim_directory, finish
from calibjax.commands.train_ats import calibrate
from calibjax.data import Windows, batches
from calibjax.data.synthetic import TopicLanguage, as_windows, make_language, sample, true_probabilities
from calibjax.kernels import vocab_stats
from calibjax.models import DecoderConfig, LanguageModel, hidden_states, init_params, unembedding
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import make_mesh, replicated
from calibjax.train.loop import train
from calibjax.train.options import AtsOptions
from calibjax.train.state import OptimizerConfig, create_state
from calibjax.train.step import make_train_step

_LENGTH = 65  # tokens a sequence: 64 predictions
_TRAIN, _FIT, _HELD_OUT = 512, 2048, 1024  # sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Shows the whole of calibjax in a minute or two on a CPU: nothing is downloaded.

    Makes a small language whose true next-token probabilities are known, trains a small decoder on too little of it
    until it is over-confident, freezes it, and repairs it with a single temperature and with Adaptive Temperature
    Scaling.

    Attributes:
        out: output directory.
        epochs: passes of the decoder over its few sequences; more make it more over-confident.
        seed: of everything random.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: no progress bars.
    """

    out: Path = Path("runs/quickstart")
    epochs: int = 30
    seed: int = 0
    json: bool = False
    quiet: bool = False


@dataclasses.dataclass(frozen=True)
class LanguageModelObjective:
    """The `Objective` of plain language modelling: cross-entropy of the next token; everything is trained."""

    model: DecoderConfig

    def __call__(
        self, params: Any, frozen: None, batch: Mapping[str, Array], hyper: Mapping[str, Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        hidden = hidden_states(self.model, params, batch["tokens"])
        stats = vocab_stats(
            hidden,
            unembedding(self.model, params),
            batch["targets"],
            where=batch["where"],
            statistics=losses.REQUIRED_STATISTICS["cross_entropy"],
        )
        return jnp.sum(losses.cross_entropy(stats)), jnp.sum(stats.valid).astype(jnp.float32)


def run_quickstart(run: Quickstart, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Carries out `Quickstart`; returns what it wrote to metrics.json."""
    for name, value, least in (("epochs", run.epochs, 1), ("seed", run.seed, 0)):
        if value < least:
            raise UserError(f"--{name}: expected an integer >= {least}, got {value}.")
    identity = {"command": "quickstart", "epochs": run.epochs, "seed": run.seed}
    claim_directory(run.out, identity)
    language_key, *sample_keys = jax.random.split(jax.random.key(run.seed), 4)
    language = make_language(language_key)
    train_set, fit_set, held_out = (
        as_windows(sample(language, key, count, _LENGTH))
        for key, count in zip(sample_keys, (_TRAIN, _FIT, _HELD_OUT), strict=True)
    )
    announce(
        f"language: {language.vocab_size} tokens, {language.topic_transitions.shape[0]} hidden topics; "
        f"{_TRAIN} sequences to train the decoder on, {_FIT} to calibrate on, {_HELD_OUT} held out"
    )
    lm = _train_decoder(run, language, train_set)
    result = calibrate(
        lm,
        fit_set,
        held_out,
        options=AtsOptions(batch_size=32),
        out=run.out,
        seed=run.seed,
        description=identity,
        keep_tokens=True,
        announce=announce,
        quiet=run.quiet,
    )
    truth = true_probabilities(language, jnp.asarray(held_out.tokens))
    for name, method in result.held_out.items():
        assert method.tokens is not None
        of_argmax = np.take_along_axis(np.asarray(truth), method.tokens.argmax[..., None], axis=-1)[..., 0]
        error = np.abs(method.tokens.confidence - of_argmax)
        result.document["held_out"]["methods"][name]["exact_error"] = float(error.mean(dtype=np.float64))
    finish(result.document, run.out, show=not run.json)
    return result.document


def _train_decoder(run: Quickstart, language: TopicLanguage, windows: Windows) -> LanguageModel:
    config = DecoderConfig(
        family="llama",
        vocab_size=language.vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_positions=_LENGTH,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    batch_size = 32
    steps = run.epochs * len(windows.tokens) // batch_size
    adamw = OptimizerConfig(learning_rate=3e-3)
    optimizer = adamw.build(steps)
    state = create_state(init_params(config, jax.random.key(run.seed)), optimizer)
    state = train(
        make_train_step(LanguageModelObjective(config), optimizer, clip_norm=adamw.clip_norm),
        jax.device_put(state, replicated(mesh)),
        None,
        {},
        batches(windows._asdict(), batch_size, seed=run.seed, epochs=run.epochs),
        steps=steps,
        mesh=mesh,
        directory=run.out / "decoder",
        run={"epochs": run.epochs, "seed": run.seed},
        description="decoder",
        quiet=run.quiet,
    )
    return LanguageModel.from_params(config, state.params)
