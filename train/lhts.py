"""Long Horizon Temperature Scaling (arXiv 2302.03686) from top to bottom, in one file to read and to adapt.

    python train/lhts.py --model path/to/model --data stories.txt --out runs/lhts --temperature 0.8

A temperature T of whole sequences is p(x)^(1/T) / Z: it weighs a sequence by its likelihood, where dividing logits by T
weighs each next token by its own. A student is trained towards it without Z, by maximum likelihood of the text, each
sequence weighed by p(x)^(1/T − 1), normalised over the batch (self-normalised importance weights): sequences that the
scorer finds likely count more.

`calibjax train lhts` adds several temperatures in one student, text that the model samples itself, a moving average of
the weights' normaliser, and baselines. Devices share the sequences and the weights. A killed run resumes at its last
checkpoint.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import calibjax
from calibjax.commands.parser import parse_script
from calibjax.data import batches
from calibjax.models.hf_export import save_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and how.

    Attributes:
        model: directory of the model: scorer and initial student.
        data: text.
        out: directory of the checkpoints and the trained model.
        temperature: T of whole sequences; below 1 likely sequences gain.
        seq_len: tokens of a sequence: the horizon.
        rows: sequences to read, at most.
        batch_size: sequences of a step, among which the importance weights are normalised.
        steps: of the optimiser.
        learning_rate: at the start; it falls to 0.
        save_every: steps between checkpoints.
        seed: of the order of the sequences.
    """

    model: str
    data: str
    out: Path
    temperature: float = 0.8
    seq_len: int = 64
    rows: int | None = None
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
    """The student after `steps` steps of AdamW."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(options.learning_rate, options.steps), weight_decay=0.0)
    exponent = 1.0 / options.temperature - 1.0

    def loss(params: Any, frozen: Any, batch: dict[str, jax.Array]) -> jax.Array:
        weight = jax.nn.softmax(exponent * log_likelihood(scorer, frozen, batch))
        return -jnp.sum(jax.lax.stop_gradient(weight) * log_likelihood(scorer, params, batch))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, frozen: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, frozen, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = jax.tree.map(lambda x: x.copy(), scorer.params)  # a step donates its state; the scorer keeps its weights
    state = params, jax.jit(optimizer.init)(params)
    rows = batches(data.arrays(), options.batch_size, seed=options.seed, steps=options.steps)
    keep = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=options.save_every)
    with ocp.CheckpointManager((options.out / "checkpoints").absolute(), options=keep) as manager:
        done = manager.latest_step() or 0
        if done:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(state), rows=ocp.args.JsonRestore())
            restored = manager.restore(done, args=items)
            state = restored.state
            rows.set_state(restored.rows)
        for number, batch in enumerate(rows, start=done + 1):
            state, value = step(state, scorer.params, batch)
            if number % 10 == 0 or number == options.steps:
                print(f"step {number:,} of {options.steps:,}, weighted NLL of a sequence {float(value):.2f}")
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), rows=ocp.args.JsonSave(rows.get_state()))
            manager.save(number, args=items, force=number == options.steps)
    return dataclasses.replace(scorer, params=state[0])


def main(options: Options) -> dict[str, float]:
    with jax.set_mesh(calibjax.RunContext().mesh) as mesh:
        scorer = calibjax.load_model(options.model, mesh=mesh)
        data = calibjax.load_text(options.data, scorer, seq_len=options.seq_len, max_sequences=options.rows)
        fit, held_out = calibjax.split_sequences(data, 0.7, seed=options.seed)
        student = train(scorer, fit, options)
        # What a temperature of sequences is for: the student's text is likelier under the scorer than the scorer's own.
        prompts = held_out.tokens[:16, :8].tolist()
        likelihood = {}
        for name, model in (("scorer", scorer), ("student", student)):
            sampling = calibjax.Sampling(temperature=1.0, key=jax.random.key(options.seed))
            text = calibjax.generate(model, prompts, max_new_tokens=32, sampling=sampling, stop_tokens=())
            figures = calibjax.evaluate(scorer, np.asarray(text.tokens).tolist()).figures
            likelihood[name] = -figures["uncalibrated"]["nll"].value
            print(f"{name}: {likelihood[name]:.3f} nats a token under the scorer")
        save_model(options.out / "model", student.config, student.params, like=Path(options.model), replace=True)
    print(f"model: {options.out / 'model'}; it loads in calibjax and in transformers")
    return likelihood


if __name__ == "__main__":
    main(parse_script(Options))
