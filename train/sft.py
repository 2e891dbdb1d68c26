"""Fine-tuning with label smoothing (arXiv 2508.00264) from top to bottom, in one file to read and to adapt.

    python train/sft.py --model path/to/model --data alpaca.jsonl --out runs/sft

Label smoothing mixes the target of the loss with the uniform distribution over the vocabulary: (1 − β)(−log p_y) +
β (−(1/V) Σ_v log p_v). `linear_cross_entropy` computes it from hidden states and unembedding without the logits
`[B, T, V]`, by Pallas kernels on TPUs and Hopper GPUs, elsewhere in chunks of the vocabulary, so that it is affordable
where V is large.

`calibjax train sft` adds low-rank adapters, other losses, validation and several processes. The script runs unchanged
on a TPU VM or several GPUs: weights are sharded over the mesh axis `fsdp`, sequences over all devices. A killed run
resumes at its last checkpoint, with the batch after it; with other options it starts anew.
"""

import dataclasses
import itertools
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import calibjax
from calibjax.data import batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, and how.

    Attributes:
        model: directory of the model.
        data: file, directory or hub id of text, instructions or chats; only the tokens of answers count in the loss.
        out: directory of the checkpoints and the trained model.
        label_smoothing: β in [0, 1].
        seq_len: tokens per sequence.
        max_sequences: largest number of sequences to read; by default all.
        batch_size: sequences per step.
        steps: steps of the optimiser.
        learning_rate: peak learning rate, after a warmup of a tenth of the steps; a cosine schedule decays it to 0.
        save_every: steps between checkpoints.
        seed: random seed of the split and of the order of the sequences.
    """

    model: str
    data: str
    out: Path
    label_smoothing: float = 0.1
    seq_len: int = 256
    max_sequences: int | None = None
    batch_size: int = 16
    steps: int = 200
    learning_rate: float = 2e-5
    save_every: int = 50
    seed: int = 0


def train(lm: calibjax.LanguageModel, data: calibjax.Sequences, options: Options) -> calibjax.LanguageModel:
    """The model after `steps` steps of AdamW on label-smoothed cross-entropy."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, options.steps // 10, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model = dataclasses.replace(lm, params=params)
        hidden = model.hidden_states(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
        return calibjax.linear_cross_entropy(
            hidden,
            model.unembedding,
            batch["targets"],
            bias=model.unembedding_bias,
            softcap=lm.config.logit_softcap,
            where=batch["where"],
            label_smoothing=options.label_smoothing,
            reduction="mean",
        )

    @jax.jit(donate_argnums=0)
    def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    # jit shards the optimiser's state as the weights are. The first step donates both, so the base model keeps a copy.
    params = jax.tree.map(lambda x: x.copy(), lm.params)
    state = params, jax.jit(optimizer.init)(params)
    loader = batches(data.arrays(), options.batch_size, seed=options.seed, steps=options.steps)
    policy = ocp.CheckpointManagerOptions(max_to_keep=1, save_interval_steps=options.save_every)
    checksum = zlib.crc32(repr((options, lm.fingerprint)).encode() + data.tokens.tobytes())
    directory = options.out / "checkpoints" / f"{checksum:x}"
    with ocp.CheckpointManager(directory.absolute(), options=policy) as manager:
        last_step = manager.latest_step() or 0
        if last_step:
            state = manager.restore(last_step, args=ocp.args.StandardRestore(state))
        remaining = itertools.islice(loader, last_step, None)  # batches depend on the seed and their number alone
        for step, batch in enumerate(remaining, start=last_step + 1):
            state, value = train_step(state, batch)
            is_last = step == options.steps
            if step % 10 == 0 or is_last:
                print(f"step {step:,} of {options.steps:,}, loss {float(value):.4f}")
            manager.save(step, args=ocp.args.StandardSave(state), force=is_last)  # and every `save_every` steps
    return lm.with_params(state[0])


def main(options: Options) -> dict[str, calibjax.Evaluation]:
    mesh = calibjax.RunContext().mesh  # all devices; or calibjax.RunContext(mesh=jax.make_mesh(...)).mesh
    with jax.set_mesh(mesh):
        lm = calibjax.load_model(options.model, mesh=mesh)
        data = calibjax.load_text(options.data, lm, seq_len=options.seq_len, max_sequences=options.max_sequences)
        fit, held_out = calibjax.split_sequences(data, 0.7, seed=options.seed)
        print(f"{int(np.sum(fit.where)):,} tokens to train on, {int(np.sum(held_out.where)):,} held out")
        tuned = train(lm, fit, options)
        evaluations = {"base": calibjax.evaluate(lm, held_out), "fine-tuned": calibjax.evaluate(tuned, held_out)}
        calibjax.save_model(options.out / "model", tuned.config, tuned.params, like=options.model, replace=True)
    for name, evaluation in evaluations.items():
        print(f"{name}: {evaluation}")
    print(f"model: {options.out / 'model'}; it loads in calibjax and in transformers")
    return evaluations


if __name__ == "__main__":
    main(calibjax.parse_script(Options))
