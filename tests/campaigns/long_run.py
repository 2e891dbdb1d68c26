"""A long run: memory, compilations and checkpoints kept. `python tests/campaigns/long_run.py`, 10,000 steps by default.

Trains a temperature head with a checkpoint every tenth step. Prints, as one JSON line, the memory of the process after
every tenth of the run, the programs that were compiled after the first checkpoint, and the checkpoints at the end.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}

import jax
import jax.numpy as jnp
from tiny import make_lm, make_sequences, silent

from calibjax.data import batches
from calibjax.heads import HeadConfig
from calibjax.train import AtsObjective, OptimizerConfig, create_state, make_train_step
from calibjax.train.curves import token_curves
from calibjax.train.loop import train


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    given = parser.parse_args()
    compiled, memory, began = [], [], time.monotonic()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    lm, sequences = make_lm(), make_sequences(64)
    with jax.set_mesh(silent().mesh):
        tokens = token_curves(lm, sequences, context=silent())
    head = HeadConfig(kind="mlp", hidden_size=lm.config.hidden_size, features=("logit_statistics",))
    optimizer = OptimizerConfig(learning_rate=1e-3).build(given.steps)
    step_fn = make_train_step(AtsObjective(head, "joint", tokens.scales), optimizer)
    count, every, taken = given.steps, given.checkpoint_every, 0

    def step(*arguments):
        nonlocal taken
        taken += 1
        if taken == every + 2:
            compiled.clear()
        if taken % (count // 10) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(round(pages * resource.getpagesize() / 2**20, 1))  # MiB that the process holds now
        return step_fn(*arguments)

    with tempfile.TemporaryDirectory(prefix="long-run-") as name:
        context, data = silent(Path(name)), batches(tokens.arrays, 16, seed=0, epochs=count // 4)
        options = {"steps": count, "context": context, "identity": {}, "checkpoint_every": every}
        with jax.set_mesh(context.mesh):
            state = create_state(head.init(jax.random.key(0)), optimizer)
            train(step, state, (), {"alpha": jnp.float32(1)}, data, **options)
        saved_steps = sorted(int(entry.name) for entry in (Path(name) / "checkpoints").iterdir())
    programs, seconds = step_fn._cache_size(), round(time.monotonic() - began)
    result = {"steps": taken, "checkpoints": count // every, "kept": saved_steps, "programs of the step": programs}
    result |= {"compiled after the first checkpoint": len(compiled), "MiB": memory, "seconds": seconds}
    print(json.dumps(result))
    flat = memory[-1] - memory[4] < 0.02 * memory[4]
    return 0 if flat and programs == 1 and not compiled and saved_steps == [count - every, count] else 1


if __name__ == "__main__":
    sys.exit(main())
