"""Cost of a train step of each head on cached hidden states, against the same head in PyTorch.

    python train/bench_heads.py --model path/to/stories260K
    python train/bench_heads.py --model path/to/stories260K --heads transformer --threads 1

PyTorch trains the exported head (`calibjax.torch`) from the same parameters on the same batches with the same AdamW and
cross-entropy; the losses after the last step are printed, and agree. Both run in one process, in turn; a row has the
medians of `--rounds` rounds of `--steps` steps.
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import tyro

import calibjax
from calibjax.heads import FittedHead, HeadKind
from calibjax.models import LanguageModel
from calibjax.models.frozen import freeze
from calibjax.torch.heads import load_head
from calibjax.train import AtsObjective, create_state, make_train_step
from calibjax.train.portable import export_head

_LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Times train steps of heads in JAX and in PyTorch.

    Attributes:
        model: directory of the frozen model.
        heads: kinds of heads.
        sequences: of a batch.
        seq_len: tokens per sequence.
        steps: of a round.
        rounds: of each.
        threads: of PyTorch; 0: its default. XLA uses all cores that the process may run on.
    """

    model: Path
    heads: tuple[HeadKind, ...] = ("linear", "mlp", "transformer")
    sequences: int = 16
    seq_len: int = 127
    steps: int = 20
    rounds: int = 7
    threads: int = 0


def batches(bench: Bench, lm: LanguageModel) -> list[dict[str, np.ndarray]]:
    """Batches of random tokens with the hidden states of the model."""
    rng, found = np.random.default_rng(0), []
    shape = (bench.sequences, bench.seq_len + 1)
    for _ in range(4):
        tokens = rng.integers(0, lm.config.vocab_size, shape).astype(np.int32)
        found.append(
            {
                "hidden": np.array(lm.hidden_states(tokens[:, :-1]), np.float32),
                "targets": tokens[:, 1:],
                "where": np.ones(tokens[:, 1:].shape, bool),
                "segment_ids": np.ones(tokens[:, 1:].shape, np.int32),
            }
        )
    return found


class InJax:
    """The head in JAX."""

    def __init__(self, lm: LanguageModel, head: FittedHead):
        optimizer = optax.adamw(_LEARNING_RATE, weight_decay=0.0)
        self.step = make_train_step(AtsObjective(lm.config, head.config, "cross-entropy"), optimizer)
        self.state = create_state(jax.tree.map(jnp.array, head.params), optimizer)
        self.frozen = freeze(lm, head.config, hidden_given=True)

    def __call__(self, batch: dict[str, Any]) -> float:
        self.state, metrics = self.step(self.state, self.frozen, batch, {})
        return float(metrics.loss)


class InTorch:
    """The same head in PyTorch."""

    def __init__(self, lm: LanguageModel, head: FittedHead):
        with tempfile.TemporaryDirectory() as folder:
            export_head(Path(folder) / "head", head, lm)
            self.head = load_head(Path(folder) / "head")
        trained = [tensor.requires_grad_() for name, tensor in self.head.named_buffers() if name != "frequencies"]
        self.optimizer = torch.optim.AdamW(trained, _LEARNING_RATE, weight_decay=0.0)
        matrix = lm.params["embedding" if lm.config.tie_embeddings else "unembedding"]
        self.unembedding = torch.from_numpy(np.array(matrix, np.float32))

    def __call__(self, batch: dict[str, Any]) -> float:
        hidden, targets = torch.from_numpy(batch["hidden"]), torch.from_numpy(batch["targets"]).long()
        with torch.no_grad():
            logits = hidden @ self.unembedding.T
        scaled = self.head(hidden).exp()[..., None] * logits
        loss = torch.nn.functional.cross_entropy(scaled.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(bench: Bench) -> None:
    if bench.threads:
        torch.set_num_threads(bench.threads)
    lm = calibjax.load_model(bench.model)
    data = batches(bench, lm)
    print(f"{lm}; {bench.sequences} x {bench.seq_len} tokens; jax {jax.__version__}, torch {torch.__version__}\n")
    print("| head | calibjax | PyTorch | ratio | losses after the last step |\n|---|---|---|---|---|")
    for kind in bench.heads:
        config = calibjax.HeadConfig(kind=kind, hidden_size=lm.config.hidden_size)
        head = FittedHead(config, config.init(jax.random.key(0)), 0.0, lm.fingerprint)
        contenders, losses = (InJax(lm, head), InTorch(lm, head)), [0.0, 0.0]
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(bench.rounds + 1):
            for number, step in enumerate(contenders):
                begin = time.perf_counter()
                for index in range(bench.steps):
                    losses[number] = step(data[index % len(data)])
                if repeat:  # the first round compiles
                    times[number].append(1e3 * (time.perf_counter() - begin) / bench.steps)
        ours, theirs = (statistics.median(each) for each in times)
        both = " and ".join(f"{loss:.5f}" for loss in losses)
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        print(f"| {kind} | {ours:.1f} ms | {theirs:.1f} ms | {ratio:.2f} | {both} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Bench))
