"""Does the test for a correction phase find one that is there, and none that is not?

    python eval/study_phase.py --assets path/to/assets --out runs/phase

A model is fine-tuned until it is overconfident, and its unembedding given an exact null space. One more block, which
writes into that null space alone, is trained to temper the predictions, and another to sharpen them. The test must find
a phase of arXiv 2511.00280 where a block tempers, and nowhere else. Prints a table in Markdown and writes it to --out.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import minimize_scalar

from calibjax import metrics
from calibjax.cli import execute
from calibjax.commands.common import DataOptions
from calibjax.commands.parser import parse_script
from calibjax.data import Sequences
from calibjax.eval.layers.directions import null_space
from calibjax.eval.layers.layers import correction_phase, layer_outputs, make_readout
from calibjax.models import LanguageModel, init_params, load_model
from calibjax.models import decoder as decoders
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import require_directory
from calibjax.runtime.files import write_file
from calibjax.train.sft import SftOptions, fit_sft

QUIET = RunContext(progress=False, log=lambda _: None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Trains the models and tests their layers.

    Attributes:
        assets: directory with models/ and data/.
        out: for the table, its figures and the fine-tuned model.
        model: name of a directory in assets/models.
        epochs: of the fine-tuning that makes the model overconfident.
        steps: of the training of one more block.
    """

    assets: Path
    out: Path
    model: str = "stories260K"
    epochs: int = 30
    steps: int = 200


def temperature_of(lm: LanguageModel, sequences: Sequences) -> float:
    """The temperature of the smallest NLL, of a small vocabulary."""
    logits = np.asarray(lm.logits(sequences.tokens, segment_ids=sequences.segment_ids, positions=sequences.positions))
    logits, targets = jnp.asarray(logits[sequences.where]), jnp.asarray(sequences.targets[sequences.where])
    nll = jax.jit(
        lambda log_t: optax.softmax_cross_entropy_with_integer_labels(logits / jnp.exp(log_t), targets).mean()
    )
    return float(np.exp(cast(Any, minimize_scalar(lambda x: float(nll(x)), bounds=(-2, 2), method="bounded")).x))


def with_null_space(lm: LanguageModel) -> tuple[LanguageModel, np.ndarray]:
    """The model with an exact null space, and a basis of it: that of its unembedding, whose effect is removed.

    Rows become those of (W − mean row) (I − N Nᵀ) before the final norm's scale; embeddings are kept.
    """
    basis, scale = null_space(lm).basis, np.asarray(lm.params["final_norm"]["scale"], np.float64)
    rows = np.asarray(lm.unembedding, np.float64)
    rows = (rows - rows.mean(axis=0)) * scale
    unembedding = jnp.asarray((rows - rows @ basis @ basis.T) / scale, jnp.float32)
    config = dataclasses.replace(lm.config, tie_embeddings=False)
    return LanguageModel.from_params(config, {**lm.params, "unembedding": unembedding}, lm.tokenizer), basis


def with_block(
    lm: LanguageModel, basis: np.ndarray, sequences: Sequences, temperature: float, steps: int
) -> LanguageModel:
    """The model with one more block, trained towards its own predictions at a temperature; nothing else changes.

    The block starts by writing nothing, as the model at temperature 1, and writes along `basis` alone: by the final
    norm it changes the size of the logits of a token, not their order.
    """
    config = dataclasses.replace(lm.config, num_layers=lm.config.num_layers + 1)
    projection = jnp.asarray(basis @ basis.T, jnp.float32)
    fresh = init_params(dataclasses.replace(lm.config, num_layers=1), jax.random.key(0))["layers"]

    def writing(block, change):
        def of_leaf(path, x):
            return change(x) if any(getattr(p, "key", "") in ("o", "down") for p in path) else x

        return jax.tree_util.tree_map_with_path(of_leaf, block)

    block = writing(fresh, jnp.zeros_like)
    batches = {name: jnp.asarray(x) for name, x in sequences.arrays().items()}

    def extended(block):
        block = writing(block, lambda x: x @ projection)
        layers = jax.tree.map(lambda old, new: jnp.concatenate([old, new]), lm.params["layers"], block)
        return {**lm.params, "layers": layers}

    def logits(config, params, batch):
        given = {name: batch[name] for name in ("segment_ids", "positions")}
        return decoders.logits(config, params, batch["tokens"], **given)

    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(block, state, rows):
        batch = {name: x[rows] for name, x in batches.items()}
        wanted = jax.nn.softmax(logits(lm.config, lm.params, batch) / temperature)

        def loss(block):
            each = optax.softmax_cross_entropy(logits(config, extended(block), batch), wanted)
            return jnp.where(batch["where"], each, 0.0).sum() / batch["where"].sum()

        updates, state = optimizer.update(jax.grad(loss)(block), state)
        return optax.apply_updates(block, updates), state

    rng, state = np.random.default_rng(0), optimizer.init(block)
    for _ in range(steps):
        block, state = step(block, state, rng.integers(0, len(sequences.tokens), 8))
    return LanguageModel.from_params(config, extended(block), lm.tokenizer)


def run_phase(study: Study) -> dict[str, Any]:
    """Layers and the test of each model."""
    lm = load_model(study.assets / "models" / study.model)
    options = DataOptions(seq_len=128, examples=400)
    wiki = options.read(str(study.assets / "data/wikitext2/valid.txt.gz"), lm, lambda _: None)
    small, calibration, held_out = (wiki.take(rows) for rows in np.split(np.arange(len(wiki.tokens)), [60, 280]))
    options = SftOptions(
        label_smoothing=0.0, epochs=study.epochs, learning_rate=2e-3, remat="none", checkpoint_every=10**6
    )
    tuned = fit_sft(lm, small, options, context=dataclasses.replace(QUIET, directory=study.out / "sft"))
    overconfident = LanguageModel.from_params(tuned.config, tuned.params, lm.tokenizer)
    overconfident, basis = with_null_space(overconfident)
    temperature = temperature_of(overconfident, calibration)
    print(f"temperature of the overconfident model: {temperature:.3f}", flush=True)
    models = {"overconfident": overconfident}
    for what, aim in (("tempers", temperature), ("sharpens", 1 / temperature)):
        block = with_block(overconfident, basis, calibration, aim, study.steps)
        models[f"with a block that {what}, T = {aim:.2f}"] = block
    found = {}
    for name, model in models.items():
        outputs = layer_outputs(model, held_out, make_readout(model), context=QUIET)
        sums = [
            metrics.pooled_sums(c, y.astype(np.float32), log_prob=p, groups=outputs.group)
            for c, y, p in zip(outputs.confidence, outputs.correct, outputs.log_prob, strict=True)
        ]
        agreement = (outputs.argmax == outputs.argmax[-1:]).mean(axis=1)
        phase = correction_phase(sums, agreement)
        found[name] = {
            "ece": [float(metrics.ece_from_sums(metrics.total(of))) for of in sums],
            "accuracy": outputs.correct.mean(axis=1).tolist(),
            "agreement": agreement.tolist(),
            "phase": {**phase._asdict(), "correction": list(phase.correction)},
        }
        print(f"{name}: {found[name]['phase']}", flush=True)
    return found


def phase_table(found: dict[str, Any]) -> list[str]:
    head = ["model", "ECE of the layers", "agreement with the last", "settled at", "largest ECE - last", "p", "phase"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, of in found.items():
        phase, last = of["phase"], len(of["ece"]) - 1
        correction = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*phase["correction"][:3])
        cells = [name, *(" ".join(f"{x:.2f}" for x in of[key]) for key in ("ece", "agreement"))]
        cells += [f"{phase['settled']} of {last}", correction if phase["peak"] < last else "0"]
        lines.append("| " + " | ".join([*cells, f"{phase['p_value']:.3f}", "yes" if phase["found"] else "no"]) + " |")
    return lines


def main(study: Study) -> None:
    require_directory(study.assets / "data", "--assets")
    study.out.mkdir(parents=True, exist_ok=True)
    found = run_phase(study)
    lines = phase_table(found)
    write_file(study.out / "phase.json", json.dumps(found, indent=2) + "\n")
    write_file(study.out / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"results in {study.out}: table.md and phase.json")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
