"""Long Horizon Temperature Scaling (arXiv 2302.03686) from top to bottom, in one file to read and to adapt.

    python train/lhts.py --model path/to/model --data stories.txt --out runs/lhts --temperature 0.8

The target distribution of whole sequences at temperature T is p(x)^(1/T) / Z. Below T = 1 it favours sequences that are
likely as a whole; dividing the logits by T favours each likely next token instead. The student maximises the likelihood
of samples from p, weighted by p(x)^(1/T − 1) and normalised over the batch (self-normalised importance sampling), which
does not need Z. Here `--data` stands for samples: where p did not write it, its own distribution replaces p.

`calibjax train lhts` adds text that the model samples itself, several temperatures in one student and baselines. Arrays
are sharded over the devices. A killed run resumes at its last checkpoint; with other options it starts anew.
"""

import dataclasses
import itertools
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import calibjax
from calibjax.data import batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and how.

    Attributes:
        model: directory of the model, which is the scorer p and the initial student.
        data: file, directory or hub id of text.
        out: directory of the checkpoints and the trained model.
        temperature: T > 0 of whole sequences; below 1 it favours likely ones.
        seq_len: tokens per sequence, the horizon.
        max_sequences: largest number of sequences to read; by default all.
        batch_size: sequences per step; the importance weights are normalised over them.
        steps: steps of the optimiser.
        learning_rate: initial learning rate; a cosine schedule decays it to 0.
        save_every: steps between checkpoints.
        seed: random seed of the split, of the order of the sequences and of the sampled text.
    """

    model: str
    data: str
    out: Path
    temperature: float = 0.8
    seq_len: int = 64
    max_sequences: int | None = None
    batch_size: int = 16
    steps: int = 200
    learning_rate: float = 2e-5
    save_every: int = 50
    seed: int = 0


def log_likelihood(lm: calibjax.LanguageModel, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """log p(x) of each sequence `[B]`, in nats, without the logits."""
    model = dataclasses.replace(lm, params=params)
    hidden = model.hidden_states(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
    nll = calibjax.linear_cross_entropy(
        hidden,
        model.unembedding,
        batch["targets"],
        bias=model.unembedding_bias,
        softcap=lm.config.logit_softcap,
        where=batch["where"],
        reduction="none",
    )
    return -jnp.sum(nll, axis=1)


def train(scorer: calibjax.LanguageModel, data: calibjax.Sequences, options: Options) -> calibjax.LanguageModel:
    """The student after `steps` steps of AdamW on the weighted negative log-likelihood of sequences."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(options.learning_rate, options.steps), weight_decay=0.0)
    exponent = 1 / options.temperature - 1

    def loss(params: Any, scorer_params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        weight = jax.nn.softmax(exponent * log_likelihood(scorer, scorer_params, batch))  # [B]
        return -jnp.sum(jax.lax.stop_gradient(weight) * log_likelihood(scorer, params, batch))

    @jax.jit(donate_argnums=0)
    def train_step(state: Any, scorer_params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, gradient = jax.value_and_grad(loss)(params, scorer_params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.tree.map(lambda x: x.copy(), scorer.params)  # a step donates its state; the scorer keeps its weights
    state = params, jax.jit(optimizer.init)(params)
    loader = batches(data.arrays(), options.batch_size, seed=options.seed, steps=options.steps)
    policy = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=options.save_every)
    checksum = zlib.crc32(repr((options, scorer.fingerprint)).encode() + data.tokens.tobytes())
    directory = options.out / "checkpoints" / f"{checksum:x}"
    with ocp.CheckpointManager(directory.absolute(), options=policy) as manager:
        last_step = manager.latest_step() or 0
        if last_step:
            state = manager.restore(last_step, args=ocp.args.StandardRestore(state))
        remaining = itertools.islice(loader, last_step, None)  # batches depend on the seed and their number alone
        for step, batch in enumerate(remaining, start=last_step + 1):
            state, value = train_step(state, scorer.params, batch)
            is_last = step == options.steps
            if step % 10 == 0 or is_last:
                print(f"step {step:,} of {options.steps:,}, weighted NLL of a sequence {float(value):.2f}")
            manager.save(step, args=ocp.args.StandardSave(state), force=is_last)  # and every `save_every` steps
    return scorer.with_params(state[0])


def mean_log_prob(lm: calibjax.LanguageModel, prompts: np.ndarray, continuations: np.ndarray) -> float:
    """Mean log-probability of a token of the continuations `[B, T]`, in nats, given the prompts `[B, P]`."""
    tokens = np.concatenate([prompts, continuations], axis=1)
    positions = np.broadcast_to(np.arange(tokens.shape[1] - 1), tokens[:, 1:].shape)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "where": positions >= prompts.shape[1] - 1,
        "segment_ids": np.ones_like(positions),
        "positions": positions,
    }
    return float(jnp.sum(log_likelihood(lm, lm.params, batch))) / continuations.size


def main(options: Options) -> dict[str, float]:
    mesh = calibjax.RunContext().mesh  # all devices; or calibjax.RunContext(mesh=jax.make_mesh(...)).mesh
    with jax.set_mesh(mesh):
        scorer = calibjax.load_model(options.model, mesh=mesh)
        data = calibjax.load_text(options.data, scorer, seq_len=options.seq_len, max_sequences=options.max_sequences)
        fit, held_out = calibjax.split_sequences(data, 0.7, seed=options.seed)
        student = train(scorer, fit, options)
        # The purpose of T < 1: under the scorer, the student's samples are likelier than the scorer's own.
        prompts = held_out.tokens[:16, :8]  # 16 prompts of 8 tokens, which are continued by 32
        likelihood = {}
        for name, model in (("scorer", scorer), ("student", student)):
            sampling = calibjax.Sampling(temperature=1.0, key=jax.random.key(options.seed))
            text = calibjax.generate(model, prompts.tolist(), max_new_tokens=32, sampling=sampling, stop_tokens=())
            likelihood[name] = mean_log_prob(scorer, prompts, np.asarray(text.tokens))
            print(f"{name}: {likelihood[name]:.3f} nats a token under the scorer")
        calibjax.save_model(options.out / "model", student.config, student.params, like=options.model, replace=True)
    print(f"model: {options.out / 'model'}; it loads in calibjax and in transformers")
    return likelihood


if __name__ == "__main__":
    main(calibjax.parse_script(Options))
