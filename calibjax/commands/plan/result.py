"""One job on one topology: bytes, operations, collectives and the roofline, as plain data."""

import math
from typing import Any

import jax.numpy as jnp

from calibjax.commands.plan.chips import Topology
from calibjax.commands.plan.compiled import Compiled, compile_step
from calibjax.commands.plan.count import flops
from calibjax.commands.plan.duration import kept_bytes_per_token
from calibjax.commands.plan.program import Job, Program, build, device_bytes, kept_bytes
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.fingerprint import dotted_leaves
from calibjax.nn.experts import use_ragged_dot
from calibjax.runtime.sharding import AXES

_PREALLOCATED = 0.75  # of a GPU's whole memory, by JAX unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


def plan_job(job: Job, topology: Topology, *, compiles: bool) -> dict[str, Any]:
    """Plans a checked job.

    Args:
        job: what runs.
        topology: where.
        compiles: compile the step for these devices; otherwise only what follows from the shapes is known.

    Returns:
        compiled: whether the compiler was asked; parameters: those of the model, `total`, and `active` for a token;
        experts_per_device: of a mixture, otherwise None; kept_bytes_per_token: of `ats`, otherwise None; mesh; fits:
        None where only the compiler could tell; bytes_per_device:
        parameters, optimizer, and what else is known: `batch_and_padding` and `temporaries` of a compiled step (with
        the program itself), or what the step holds at least: `gradients` and `block_inputs`, or `keys_and_values`;
        `total` of them, and `available`; margin_bytes, None where the compiler did not say by how much the step is too
        large; flops_per_step over all devices; flops_per_device; collectives by kind; roofline_seconds: at least so
        long at the chip's stated rates, were everything else hidden (memory: every argument read once, of generate for
        each token); note: what the compiler said, or None.

    Raises:
        UserError, DoesNotCompile: as `compile_step`.
    """
    placed = build(job, job.abstract_mesh())
    sizes: dict[str, int] = {
        "parameters": device_bytes(placed.parameters),
        "optimizer": device_bytes(placed.optimizer),
    }
    known = sum(sizes.values())
    moved, operations, note, result = None, None, None, None
    if compiles and known > topology.chip.memory:
        note = "Parameters and optimiser alone do not fit: not compiled."
    elif compiles:
        result = compile_step(job, topology)
    if isinstance(result, Compiled):
        sizes["batch_and_padding"] = result.arguments - known
        sizes["temporaries"] = result.total - result.arguments
        # A compiler for TPUs refuses what does not fit; that for GPUs compiles it.
        total, fits, operations = result.total, result.total <= topology.chip.memory, result.flops
        if result.collectives is not None:
            moved = {kind: of_kind._asdict() for kind, of_kind in sorted(result.collectives.items())}
        note = _note(result, topology)
    else:
        sizes |= _held(job, placed)
        total = sum(sizes.values())
        fits = None if total <= topology.chip.memory else False
        if result is not None:
            fits, note = False, result.reason
            if result.total is not None:
                total = max(result.total, known)
                sizes = {name: sizes[name] for name in ("parameters", "optimizer")} | {"temporaries": total - known}
    if operations is None or job.config.mixture is not None:
        whole = build(job)
        # Traced for one device, every copy of a token is a row of one expert; on a mesh it has a row on each device
        # that holds experts, of which one is used.
        with use_ragged_dot(True):
            operations = flops(whole.function.trace(*whole.arguments).jaxpr, job.turns)
    received = None if moved is None else sum(of_kind["bytes"] for of_kind in moved.values())
    passes = max(1, job.new_tokens)  # each new token reads the weights
    seconds = {
        "compute": operations / topology.devices / topology.chip.flops,
        "memory": passes * (result.arguments if isinstance(result, Compiled) else known) / topology.chip.bandwidth,
        "interconnect": None if received is None else received / topology.chip.interconnect,
    }
    return {
        "compiled": result is not None,
        "parameters": parameter_counts(job.config),
        "experts_per_device": _experts(job),
        "kept_bytes_per_token": kept_bytes_per_token(job) if job.objective == "ats" else None,
        "mesh": ",".join(f"{axis}={n}" for axis, n in zip(AXES, job.mesh, strict=True)),
        "fits": fits,
        "bytes_per_device": {**sizes, "total": total, "available": topology.chip.memory},
        "margin_bytes": None if fits is False and total < topology.chip.memory else topology.chip.memory - total,
        "flops_per_step": operations,
        "flops_per_device": operations / topology.devices,
        "collectives": moved,
        "roofline_seconds": {**seconds, "bound": max(x for x in seconds.values() if x is not None)},
        "compile_seconds": result.seconds if isinstance(result, Compiled) else None,
        "note": note,
    }


def _note(result: Compiled, topology: Topology) -> str | None:
    """What there is to know about a step that was compiled."""
    if result.collectives is None:
        return (
            "Compiled; but jaxlib cannot read libtpu's program, so what moves between devices is not known. "
            'pip install "jax[tpu]" gets the libtpu that this jax goes with.'
        )
    memory = topology.chip.memory
    if topology.chip.platform == "gpu" and _PREALLOCATED / 0.95 * memory < result.total <= memory:
        return (
            f"JAX takes {_PREALLOCATED:.0%} of a GPU's memory, and this needs more: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."
        )
    if result.unknown_loops:
        return f"{result.unknown_loops} loops of unknown length: their collectives count once."
    return None


def parameter_counts(config: DecoderConfig) -> dict[str, int]:
    """Returns the number of parameters of a model, and of those that a token is multiplied with (or looked up in)."""
    counts = {path: math.prod(leaf.shape) for path, leaf in dotted_leaves(abstract_params(config))}
    total, mixture = sum(counts.values()), config.mixture
    if mixture is None:
        return {"total": total, "active": total}
    expert = sum(
        count // mixture.experts
        for path, count in counts.items()
        if path.startswith("layers.mlp.") and not path.startswith("layers.mlp.router.")
    )
    return {"total": total, "active": total - (mixture.experts - mixture.per_token) * expert}


def _experts(job: Job) -> int | None:
    """How many experts of a block each device holds, in part or whole, as `sharding.RULES` divide them."""
    if job.config.mixture is None:
        return None
    experts, tensor = job.config.mixture.experts, job.mesh[AXES.index("tensor")]
    return experts if experts % tensor else experts // tensor


def _held(job: Job, placed: Program) -> dict[str, int]:
    """Bytes that the step holds besides its arguments, at least.

    Gradients and the inputs of the blocks; of `generate` the keys and values of earlier tokens.
    """
    if job.objective == "generate":
        return {"keys_and_values": kept_bytes(job)}
    if placed.trained is None:
        return {}
    held = {"gradients": device_bytes(placed.trained)}
    if job.objective == "sft":
        rows = job.batch // job.sft.accumulate // (job.mesh[0] * job.mesh[1])
        width = job.config.hidden_size * jnp.dtype(job.dtype).itemsize
        held["block_inputs"] = job.config.num_layers * rows * job.seq * width
    return held
