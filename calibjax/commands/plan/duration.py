"""How long a run takes, as a range, and what its hidden states take where they are cached."""

import math
from typing import Any

import jax.numpy as jnp

from calibjax.commands.plan.chips import Topology
from calibjax.commands.plan.count import flops
from calibjax.commands.plan.program import Job, build
from calibjax.train.options import AtsPlan, make_plan


def cache_bytes_per_token(job: Job) -> int:
    """Bytes of one token's hidden state, on every host or on the disk that they share."""
    return job.config.hidden_size * jnp.dtype(job.dtype).itemsize


def run_cost(
    job: Job, topology: Topology, plan: dict[str, Any], tokens: int, utilisation: tuple[float, float]
) -> dict[str, Any]:
    """Steps and seconds of a run over so many tokens.

    A run takes its steps times the roofline of a step, divided by the utilisation. With cached hidden states, `ats`
    runs the frozen model once over the tokens, and each step is the head's part alone, of which only the matrix
    products count.

    Args:
        job: the step that is planned.
        topology: where.
        plan: of the step, as `plan_job` returns it.
        tokens: to train or evaluate on, with padding, or to generate.
        utilisation: the smallest and the largest fraction of the roofline that is reached.

    Returns:
        tokens; sequences; steps; utilisation; `seconds`: `[least, most]`, where no hidden states are cached;
        `seconds_cached` and `cache_bytes`, of `ats`, otherwise None.
    """
    sequences = -(-tokens // (job.new_tokens or job.seq))
    steps = _steps(job, sequences)
    low, high = utilisation

    def span(seconds: float) -> list[float]:
        return [seconds / high, seconds / low]

    bound = plan["roofline_seconds"]["bound"]
    cached = None
    if job.objective == "ats":
        program = build(job.with_cache())
        of_head = flops(program.function.trace(*program.arguments).jaxpr) / topology.devices / topology.chip.flops
        forward = max(0.0, bound - of_head)
        cached = span(-(-sequences // job.batch) * forward + steps * of_head)
    return {
        "tokens": tokens,
        "sequences": sequences,
        "steps": steps,
        "utilisation": [low, high],
        "seconds": span(steps * bound),
        "seconds_cached": cached,
        "cache_bytes": None if cached is None else sequences * job.seq * cache_bytes_per_token(job),
    }


def _steps(job: Job, sequences: int) -> int:
    """Steps of the whole run, as `train.ats.train_head` and `train.tuning.tune` count them."""
    if job.objective in ("eval", "generate"):
        return -(-sequences // job.batch)
    if job.objective == "sft":
        kept = sequences - max(1, int(job.sft.validation_fraction * sequences))
        return max(1, job.sft.epochs * kept // job.batch)
    plan = make_plan(job.ats, job.config.hidden_size)
    return head_steps(plan, sequences, job.batch)


def head_steps(plan: AtsPlan, sequences: int, batch: int) -> int:
    """Steps of all heads that `train ats` trains on one set: those of the folds, and the last one.

    Of several losses each predicts the first fold, and the chosen one all; if it does not beat temperature scaling
    there, the next one predicts them too, which is not counted.

    Example:
        >>> from calibjax.train.options import AtsOptions, make_plan
        >>> head_steps(make_plan(AtsOptions(), hidden_size=64), sequences=1600, batch=16)
        3750
    """
    of_folds = len(plan.trials) + plan.folds - 1 if plan.auto else plan.folds if plan.refit_temperature else 0
    without_fold = sequences - math.ceil(sequences / plan.folds)
    return max(1, plan.epochs * sequences // batch) + of_folds * max(1, plan.epochs * without_fold // batch)
