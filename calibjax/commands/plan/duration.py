"""How long a run takes, as a range, and what the frozen pass of `train ats` keeps."""

import math
from typing import Any

import jax

from calibjax.commands.plan.chips import Topology
from calibjax.commands.plan.program import Job, build


def kept_bytes_per_token(job: Job) -> int:
    """Bytes of what `train ats` keeps of a token on every host, or on the disk that they share."""
    program = build(job)
    stored, curves = jax.eval_shape(program.function, *program.arguments)
    tokens = job.batch * job.seq
    rows = jax.tree.leaves(curves)[0].shape[:2]
    sizes = [math.prod(x.shape) * x.dtype.itemsize / tokens for x in jax.tree.leaves(stored)]
    sizes += [math.prod(x.shape) * x.dtype.itemsize / math.prod(rows) for x in jax.tree.leaves(curves)]
    return round(sum(sizes))


def run_cost(
    job: Job, topology: Topology, plan: dict[str, Any], tokens: int, utilisation: tuple[float, float]
) -> dict[str, Any]:
    """Steps and seconds of a run over so many tokens.

    A run takes its steps times the roofline of a step, divided by the utilisation. Of `ats` it is the frozen pass; the
    fits after it, which do not run the model, take seconds to minutes.

    Args:
        job: the step that is planned.
        topology: where.
        plan: of the step, as `plan_job` returns it.
        tokens: to train or evaluate on, with padding, or to generate.
        utilisation: the smallest and the largest fraction of the roofline that is reached.

    Returns:
        tokens; sequences; steps; utilisation; `seconds`: `[least, most]`; `kept_bytes`, of `ats`, otherwise None.
    """
    sequences = -(-tokens // (job.new_tokens or job.seq))
    steps = _steps(job, sequences)
    low, high = utilisation

    def span(seconds: float) -> list[float]:
        return [seconds / high, seconds / low]

    bound = plan["roofline_seconds"]["bound"]
    return {
        "tokens": tokens,
        "sequences": sequences,
        "steps": steps,
        "utilisation": [low, high],
        "seconds": [steps * bound / high, steps * bound / low],
        "kept_bytes": sequences * job.seq * kept_bytes_per_token(job) if job.objective == "ats" else None,
    }


def _steps(job: Job, sequences: int) -> int:
    """Steps of the whole run, as `train.curves.token_curves` and `train.tuning.tune` count them."""
    if job.objective != "sft":
        return -(-sequences // job.batch)
    kept = sequences - max(1, int(job.sft.validation_fraction * sequences))
    return max(1, job.sft.epochs * kept // job.batch)
