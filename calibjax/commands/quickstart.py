"""`calibjax quickstart`: a language with known probabilities, an overconfident model of it, and its calibration."""

import dataclasses
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from calibjax.commands import groups, run_directory
from calibjax.commands.train_ats import evaluate_fit
from calibjax.data import Sequences, batches
from calibjax.data.synthetic import TopicLanguage, as_sequences, make_language, sample
from calibjax.eval.report.schema import Document
from calibjax.models import LanguageModel, config_from_hf, init_params
from calibjax.models.hf_export import save_model
from calibjax.runtime.context import Log, RunContext
from calibjax.runtime.files import write_file
from calibjax.runtime.options import Count, not_identity, run_identity
from calibjax.runtime.sharding import replicated
from calibjax.train.ats import fit_ats
from calibjax.train.loop import train
from calibjax.train.options import AtsOptions
from calibjax.train.saved import save_head
from calibjax.train.sft import SftObjective, SftOptions
from calibjax.train.step import OptimizerConfig, create_state, make_train_step

_LENGTH = 65  # tokens per sequence: 64 predictions
_TRAIN, _FIT, _HELD_OUT = 512, 2048, 1024  # sequences
_BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartOptions(groups.OutputOptions):
    """Shows the whole of calibjax in a minute or two on a CPU; nothing is downloaded.

    Trains a small decoder on too little text of a synthetic language, whose next-token probabilities are known, until
    it is overconfident, and calibrates it by temperature scaling and by Adaptive Temperature Scaling.
    Example: calibjax quickstart --out runs/quickstart

    Attributes:
        epochs: passes of the decoder over its few sequences; more make it more overconfident.
    """

    out: Path = not_identity(Path("runs/quickstart"))
    epochs: Count = 30


def run(options: QuickstartOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json."""
    context = run_directory.begin("quickstart", options, log)
    language_key, train_key, fit_key, held_out_key = jax.random.split(jax.random.key(options.seed), 4)
    language = make_language(language_key)
    train_set = as_sequences(sample(language, train_key, _TRAIN, _LENGTH))
    fit_set = as_sequences(sample(language, fit_key, _FIT, _LENGTH))
    held_out = as_sequences(sample(language, held_out_key, _HELD_OUT, _LENGTH))
    sizes = f"{language.vocab_size} tokens, {language.topic_transitions.shape[0]} hidden topics"
    split = f"{_TRAIN} sequences to train the decoder on, {_FIT} to calibrate on, {_HELD_OUT} held out"
    log(f"language: {sizes}; {split}")
    lm = _train_decoder(options, language, train_set, context.within("decoder"))
    fitted = fit_ats(lm, fit_set, AtsOptions(batch_size=_BATCH_SIZE), context.within("fit"))
    save_head(options.out / "head", fitted.head, notes=fitted.report)
    identity = run_identity("quickstart", options)
    settings = {"batch_size": _BATCH_SIZE, "binning": groups.BinningOptions(), "keep_tokens": True}
    document, results = evaluate_fit(identity, lm, {"held_out": held_out}, fitted, context, **settings)
    truth = true_probabilities(language, jnp.asarray(held_out.tokens))
    for name, method in results["held_out"].items():
        assert method.tokens is not None
        exact = np.take_along_axis(np.asarray(truth), method.tokens.argmax[..., None], axis=-1)[..., 0]
        error = np.abs(method.tokens.confidence - exact)
        document["held_out"]["methods"][name]["exact_error"] = float(error.mean(dtype=np.float64))
    run_directory.finish(document, options)
    return document


def _train_decoder(
    options: QuickstartOptions, language: TopicLanguage, sequences: Sequences, context: RunContext
) -> LanguageModel:
    """Trains the decoder, and writes it in Hugging Face's layout, without a tokenizer: the base model for `export`."""
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": language.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": _LENGTH,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with tempfile.TemporaryDirectory() as like:
        write_file(Path(like) / "config.json", json.dumps(settings))
        config = config_from_hf(like)
        steps = options.epochs * len(sequences.tokens) // _BATCH_SIZE
        adamw = OptimizerConfig(learning_rate=3e-3)
        optimizer = adamw.build(steps)
        state = create_state(init_params(config, jax.random.key(options.seed)), optimizer)
        objective = SftObjective(model=config, options=SftOptions(loss="cross-entropy", remat="none"))
        state = train(
            make_train_step(objective, optimizer, clip_norm=adamw.clip_norm),
            jax.device_put(state, replicated(context.mesh)),
            None,
            {},
            batches(sequences._asdict(), _BATCH_SIZE, seed=options.seed, epochs=options.epochs),
            steps=steps,
            context=context.titled("decoder"),
            identity={"epochs": options.epochs, "seed": options.seed},
        )
        save_model(options.out / "model", config, state.params, like=Path(like), replace=True)
    return LanguageModel.from_params(config, state.params, cast(Any, Syllables()))


class Syllables:
    """A tokenizer that reads each token of the small language as a word of one syllable."""

    def __init__(self):
        self._words = [consonant + vowel for vowel in "aeio" for consonant in "bdfgklmn"]
        self.added_tokens_decoder: dict[int, Any] = {}
        """As of transformers: none of the words was added."""

    def get_vocab(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self._words)}

    def decode(self, ids: Iterable[int], **options: Any) -> str:
        """The words of tokens, each after a space; the options of transformers are accepted and unused."""
        return "".join(f" {self._words[token]}" for token in ids)


def true_probabilities(language: TopicLanguage, tokens: Int[Array, "S T"]) -> Float[Array, "S T V"]:
    """Exact P(next token | all tokens so far) after every position, by Bayesian filtering of the topic.

    With belief b over topics, P(next = v) = Σ_k b_k P_k(v | token); after v, b_k becomes proportional to
    b_k P_k(v | token), and then the topic drifts. Entry t is the distribution of the token at t + 1.
    """
    topics = language.topic_transitions.shape[0]
    start = jnp.full((tokens.shape[0], topics), 1.0 / topics)

    def step(belief, now):
        token, following = now
        rows = jnp.moveaxis(language.transitions[:, token], 0, 1)  # [S, K, V]
        predicted = jnp.einsum("sk,skv->sv", belief, rows, precision="highest")
        likelihood = jnp.take_along_axis(rows, following[:, None, None], axis=2)[..., 0]
        belief = belief * likelihood
        belief = belief / jnp.maximum(jnp.sum(belief, axis=1, keepdims=True), 1e-30)
        belief = jnp.matmul(belief, language.topic_transitions, precision="highest")
        return belief, predicted

    following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)  # the last update is not used
    _, predicted = jax.lax.scan(step, start, (tokens.T, following.T))
    return jnp.moveaxis(predicted, 0, 1)
