"""Writes the head and the training checkpoint of this version that every later one must read.

    python tests/make_version_goldens.py

They are written once for each version of the formats, below `goldens/saved`, and are never replaced.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from tiny import head_log_scale

from calibjax.heads import FittedHead, HeadConfig
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.saved import save_head
from calibjax.train.step import OptimizerConfig, TrainState, create_state

SAVED = Path(__file__).parent / "goldens" / "saved"
FINGERPRINT, LOG_FACTOR = "0123456789abcdef" * 4, -0.125
RUN = {"fingerprint": FINGERPRINT, "options": {"learning_rate": 0.002, "seed": 0}}
DATA = {"epoch": 1, "next": [3, 1, 2]}
STEP = 7


def numbers(tree, seed):
    """Random numbers in place of the leaves; RandomState, whose stream numpy promises for ever."""
    rng = np.random.RandomState(seed)
    return jax.tree.map(lambda leaf: np.asarray(rng.standard_normal(leaf.shape), leaf.dtype), tree)


def head(kind: str) -> FittedHead:
    config = HeadConfig(kind=kind, hidden_size=8, num_heads=2 if kind == "transformer" else None)
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    return FittedHead(config, numbers(shapes, 1), FINGERPRINT, log_factor=LOG_FACTOR)


def log_scale(fitted: FittedHead) -> np.ndarray:
    features = np.random.RandomState(2).standard_normal((2, 5, 8)).astype(np.float32)
    return np.asarray(jax.jit(functools.partial(head_log_scale, fitted))(features, np.zeros((3, 8), np.float32)))


def state() -> TrainState:
    """The state of a linear head after `STEP` steps of AdamW, with random numbers in place of what it learned."""
    empty = create_state(numbers(head("linear").params, 3), OptimizerConfig().build(10))
    return numbers(empty, 4)._replace(step=np.asarray(STEP, np.int32))


def main() -> None:
    for kind in ("linear", "transformer"):
        save_head(SAVED / f"head-{kind}", head(kind), notes={"kind": kind})
    checkpoints = Checkpoints(SAVED / "checkpoints", RUN)
    checkpoints.save(jax.tree.map(jax.numpy.asarray, state()), DATA, step=STEP)
    checkpoints.close()
    scales = {kind: log_scale(head(kind)).round(7).tolist() for kind in ("linear", "transformer")}
    (SAVED / "log_scale.json").write_text(json.dumps(scales) + "\n")


if __name__ == "__main__":
    main()
