"""Adaptive Temperature Scaling (arXiv 2409.19817) from top to bottom, in one file to read and to adapt.

    python train/ats.py --model path/to/model --data alpaca.jsonl --out runs/ats

A frozen model's logits never change; only the temperature of each token does. So the model runs once, and the script
stores the features that the head reads and the scale curves of each token, which give its loss at every temperature.
The head is trained on these alone, without the model and without the vocabulary. The final evaluation uses both.

`calibjax train ats` does the same for several heads and losses, and chooses among them by cross-fitting. The script
divides the tokens among all devices. A killed run resumes after its last epoch; with other options it starts anew.
"""

import dataclasses
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import calibjax
from calibjax import heads, losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to calibrate, and how.

    Attributes:
        model: directory or GGUF file of the frozen model.
        data: file, directory or hub id of text, instructions or chats.
        out: directory of the checkpoints and the fitted head.
        features: inputs of the head: logit_statistics, hidden_states, max_logit, argmax_embedding or log_std_logits.
        seq_len: tokens per sequence.
        max_sequences: largest number of sequences to read; by default all.
        batch_size: sequences per forward pass of the model.
        tokens_per_step: tokens per training step of the head.
        epochs: passes over the fitting tokens.
        learning_rate: initial learning rate; a cosine schedule decays it to 0.
        seed: random seed of the split and of the token order.
    """

    model: str
    data: str
    out: Path
    features: tuple[str, ...] = ("logit_statistics",)
    seq_len: int = 256
    max_sequences: int | None = None
    batch_size: int = 16
    tokens_per_step: int = 1024
    epochs: int = 20
    learning_rate: float = 0.01
    seed: int = 0


class Tokens(NamedTuple):
    """The N tokens that count in the loss: their features, float32 [N, F], and their scale curves."""

    features: Any
    curves: calibjax.VocabCurves

    def take(self, index: np.ndarray) -> "Tokens":
        """The tokens at `index`: int [n], or a mask."""
        return jax.tree.map(lambda x: x[index], self)


def frozen_pass(lm: calibjax.LanguageModel, data: calibjax.Sequences, options: Options) -> Tokens:
    """Runs the frozen model once over all sequences: features and scale curves of the tokens that count."""

    @jax.jit
    def extract(hidden, unembedding, targets, where):  # hidden [B, T, D], unembedding [V, D], the others [B, T]
        output_layer = {"bias": lm.unembedding_bias, "softcap": lm.config.logit_softcap}
        curves = calibjax.vocab_curves(hidden, unembedding, targets, where=where, **output_layer)
        features = heads.head_features(options.features, hidden, unembedding, stats=curves.at(1.0), **output_layer)
        return Tokens(features, curves)

    parts = []
    for first in range(0, len(data.tokens), options.batch_size):
        batch = data.take(slice(first, first + options.batch_size))
        tokens = jax.device_get(extract(lm.hidden_states(batch), lm.unembedding, batch.targets, batch.where))
        parts.append(tokens.take(tokens.curves.valid))
        print(f"frozen pass: {first + len(batch.tokens):,} of {len(data.tokens):,} sequences")
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def train(config: calibjax.HeadConfig, tokens: Tokens, options: Options, mesh: Mesh, directory: Path) -> Any:
    """Fits a head by cross-entropy with AdamW and returns its parameters; a checkpoint follows every epoch."""
    head, count = config.build(), len(tokens.features)
    step_size = min(options.tokens_per_step, count) // mesh.size * mesh.size  # tokens, as many on every device
    if step_size == 0:
        raise calibjax.UserError(f"expected at least {mesh.size} tokens to fit on and per step, one for each device.")
    steps_per_epoch = count // step_size
    optimizer = optax.adamw(optax.cosine_decay_schedule(options.learning_rate, steps_per_epoch * options.epochs))

    def loss(params: Any, batch: Tokens) -> jax.Array:
        log_scale = jnp.asarray(head.apply({"params": params}, batch.features[:, None]))[:, 0]  # heads read [B, T, F]
        stats = batch.curves.at(jnp.exp(log_scale))
        return stats.mean(losses.cross_entropy(stats))

    @jax.jit(donate_argnums=0)
    def train_step(state: Any, batch: Tokens) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    over_tokens = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    params = config.init(jax.random.key(options.seed))  # T = 1 for every token
    state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, PartitionSpec()))
    with ocp.CheckpointManager(directory.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        first_epoch = manager.latest_step() or 0
        if first_epoch:
            state = manager.restore(first_epoch, args=ocp.args.StandardRestore(state))
        for epoch in range(first_epoch, options.epochs):
            order = np.random.default_rng((options.seed, epoch)).permutation(count)
            epoch_losses = []
            for index in np.split(order[: steps_per_epoch * step_size], steps_per_epoch):
                state, value = train_step(state, jax.device_put(tokens.take(np.sort(index)), over_tokens))
                epoch_losses.append(value)
            print(f"{directory.name}: epoch {epoch + 1} of {options.epochs}, loss {np.mean(epoch_losses):.4f}")
            manager.save(epoch + 1, args=ocp.args.StandardSave(state))
    return jax.device_get(state[0])


def main(options: Options) -> calibjax.Evaluation:
    mesh = calibjax.RunContext().mesh  # all devices; or calibjax.RunContext(mesh=jax.make_mesh(...)).mesh
    with jax.set_mesh(mesh):
        lm = calibjax.load_model(options.model, mesh=mesh)
        data = calibjax.load_text(options.data, lm, seq_len=options.seq_len, max_sequences=options.max_sequences)
        fit, held_out = calibjax.split_sequences(data, 0.7, seed=options.seed)
        tokens = frozen_pass(lm, fit, options)
        checksum = zlib.crc32(repr((options, lm.fingerprint)).encode() + fit.tokens.tobytes())
        directory = options.out / "checkpoints" / f"{checksum:x}"
        fitted = {}
        for name, kind in (("temperature", "constant"), ("ats", "mlp")):
            config = calibjax.HeadConfig(kind=kind, hidden_size=lm.config.hidden_size, features=options.features)
            params = train(config, tokens, options, mesh, directory / name)
            fitted[name] = calibjax.FittedHead(config, params, lm.fingerprint)
        evaluation = calibjax.evaluate(lm, held_out, fitted)
    calibjax.save_head(options.out / "head", fitted["ats"])
    print(f"{evaluation}\nhead: {options.out / 'head'}; use it with calibjax.load_head")
    return evaluation


if __name__ == "__main__":
    main(calibjax.parse_script(Options))
