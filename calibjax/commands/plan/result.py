"""One job on one topology: bytes, operations, collectives, the roofline and the duration of a run, as plain data."""

import math
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from calibjax.commands.plan.chips import GIB, Topology
from calibjax.commands.plan.count import flops
from calibjax.commands.plan.program import Job, Program, build, device_bytes, kept_bytes
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.fingerprint import dotted_leaves
from calibjax.nn.experts import use_ragged_dot
from calibjax.runtime.errors import UserError
from calibjax.runtime.gpu_compiler import gpu_devices
from calibjax.runtime.hlo import Collective, collectives
from calibjax.runtime.sharding import AXES, make_mesh
from calibjax.runtime.tpu_compiler import DoesNotCompile, slice_devices, with_compiler

UTILISATION = (0.3, 0.6)
"""Fractions of the roofline that a run reaches; docs/plan.md states where they come from."""
_PREALLOCATED = 0.75  # of a GPU's whole memory, by JAX unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


class Compiled(NamedTuple):
    """Result of compiling a step for one device.

    Attributes:
        arguments: bytes, with the padding of their layout.
        total: bytes of everything: arguments, what is held beside them while the step runs, and the program itself.
        flops: of the matrix products as traced for this mesh, of all devices.
        collectives: by kind, see `hlo.collectives`; None where jaxlib cannot read the program that libtpu made.
        unknown_loops: loops that `collectives` counts once for want of their length; not that over new tokens.
        seconds: duration of the compilation.
    """

    arguments: int
    total: int
    flops: float
    collectives: dict[str, Collective] | None
    unknown_loops: int
    seconds: float


class TooLarge(NamedTuple):
    """The compiler refused the step for its memory: bytes needed, as it rounds them (or None), and its own words."""

    total: int | None
    reason: str


def compile_step(job: Job, topology: Topology) -> Compiled | TooLarge:
    """Compiles a job for the devices of a topology, in a process of its own.

    Raises:
        UserError: libtpu has no such topology.
        DoesNotCompile: for another reason than memory.
    """
    try:
        return with_compiler(_compile, job, topology)
    except DoesNotCompile as error:
        if "RESOURCE_EXHAUSTED" not in error.details:
            raise
        return too_large(error.details)


def too_large(message: str) -> TooLarge:
    """Reads the compiler's report on a step that does not fit."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    size = re.search(r"(?:Used|required for [^()]*\(|requires?) ?([\d.]+)([KMGT]?)", message)
    total = None if size is None else round(float(size[1]) * units[size[2]])
    return TooLarge(total, " ".join(message.split())[:300])


def _compile(job: Job, topology: Topology) -> Compiled:
    if topology.chip.platform == "gpu":
        devices = gpu_devices(topology.name.partition(":")[0], topology.devices)
    else:
        try:
            devices = slice_devices(topology.name)
        except Exception as error:  # of several kinds
            reason = str(error).splitlines()[0]
            raise UserError(f"--topology {topology.name}: libtpu has no such slice ({reason}).") from error
    mesh = make_mesh(job.mesh, devices)
    program = build(job, mesh)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        traced = program.function.trace(*program.arguments)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    try:
        moved, unknown = collectives(compiled.as_text(), job.turns)
    except jax.errors.JaxRuntimeError:
        # The step has been compiled. But libtpu may be newer than jaxlib, and write what that does not read:
        # jaxlib 0.10.2 cannot read an async-update with several operands, which libtpu 0.0.51 emits for v5p and v6e.
        moved, unknown = None, 0
    beside = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        total=memory.argument_size_in_bytes + beside + memory.generated_code_size_in_bytes,
        flops=flops(traced.jaxpr, job.turns),
        collectives=moved,
        unknown_loops=unknown if job.objective != "generate" else max(0, unknown - 1),
        seconds=time.perf_counter() - start,
    )


def plan_job(job: Job, topology: Topology, *, compiles: bool, tokens: int | None = None) -> dict[str, Any]:
    """Plans a checked job.

    Args:
        job: what runs.
        topology: where.
        compiles: compile the step for these devices; otherwise only what follows from the shapes is known.
        tokens: of a whole run, whose duration is planned too.

    Returns:
        compiled: whether the compiler was asked; parameters: those of the model, `total`, and `active` for a token;
        kept_bytes_per_token: of `ats`, otherwise None; mesh; fits: None where only the compiler could tell;
        likely_fits: True or False in place of None, by an estimate of the temporaries; bytes_per_device:
        parameters, optimizer, and what else is known: `batch_and_padding` and `temporaries` of a compiled step (with
        the program itself), or what the step holds at least: `gradients` and `block_inputs`, or `keys_and_values`, and
        `estimated_temporaries`; `total` of them, and `available`; margin_bytes, None where the compiler did not report
        by how much the step is too large; flops_per_step over all devices; flops_per_device; collectives by kind;
        roofline_seconds: at least so long at the chip's stated rates, were everything else hidden (memory: every
        argument read once, of generate for each token); note: what the compiler reported, or None; run: of `tokens`.

    Raises:
        UserError, DoesNotCompile: as `compile_step`.
    """
    placed = build(job, job.abstract_mesh())
    sizes = {"parameters": device_bytes(placed.parameters), "optimizer": device_bytes(placed.optimizer)}
    known, available = sum(sizes.values()), topology.chip.memory
    note, result, arguments = None, None, known
    if compiles and known > available:
        note = "Parameters and optimiser alone do not fit: not compiled."
    elif compiles:
        result = compile_step(job, topology)
    if isinstance(result, Compiled):
        arguments = result.arguments
        sizes |= {"batch_and_padding": arguments - known, "temporaries": result.total - arguments}
        fits, note = result.total <= available, _note(result, topology)  # a compiler for GPUs refuses nothing
    elif result is not None:
        fits, note = False, result.reason
        sizes |= {} if result.total is None else {"temporaries": max(0, result.total - known)}
    else:
        sizes |= _held(job, placed)
        fits = None if sum(sizes.values()) <= available else False
        sizes["estimated_temporaries"] = _estimated_temporaries(job, topology)
    total = sum(sizes.values())
    operations, moved = _operations(job, result), None
    if isinstance(result, Compiled) and result.collectives is not None:
        moved = {kind: of_kind._asdict() for kind, of_kind in sorted(result.collectives.items())}
    received = None if moved is None else sum(of_kind["bytes"] for of_kind in moved.values())
    passes = max(1, job.new_tokens)  # each new token reads the weights
    seconds = {
        "compute": operations / topology.devices / topology.chip.flops,
        "memory": passes * arguments / topology.chip.bandwidth,
        "interconnect": None if received is None else received / topology.chip.interconnect,
    }
    bound = max(x for x in seconds.values() if x is not None)
    return {
        "compiled": result is not None,
        "parameters": parameter_counts(job.config),
        "kept_bytes_per_token": kept_bytes_per_token(job) if job.objective == "ats" else None,
        "mesh": ",".join(f"{axis}={n}" for axis, n in zip(AXES, job.mesh, strict=True)),
        "fits": fits,
        "likely_fits": total <= available if fits is None else fits,
        "bytes_per_device": {**sizes, "total": total, "available": available},
        "margin_bytes": None if fits is False and total < available else available - total,
        "flops_per_step": operations,
        "flops_per_device": operations / topology.devices,
        "collectives": moved,
        "roofline_seconds": {**seconds, "bound": bound},
        "compile_seconds": result.seconds if isinstance(result, Compiled) else None,
        "note": note,
        **({} if tokens is None else {"run": run_cost(job, bound, tokens)}),
    }


def _operations(job: Job, result: Compiled | TooLarge | None) -> float:
    if isinstance(result, Compiled) and job.config.mixture is None:
        return result.flops
    whole = build(job)
    # Traced for one device, every copy of a token is a row of one expert; on a mesh it has a row on each device that
    # holds experts, of which one is used.
    with use_ragged_dot(True):
        return flops(whole.function.trace(*whole.arguments).jaxpr, job.turns)


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


def _held(job: Job, placed: Program) -> dict[str, int]:
    """Bytes that the step holds besides its arguments, at least: gradients and the inputs of the blocks, or a cache."""
    if job.objective == "generate":
        return {"keys_and_values": kept_bytes(job)}
    if placed.trained is None:
        return {}
    held = {"gradients": device_bytes(placed.trained)}
    if job.objective == "sft":
        held["block_inputs"] = job.config.num_layers * _rows(job) * job.seq * job.config.hidden_size * _width(job)
    return held


def _estimated_temporaries(job: Job, topology: Topology) -> int:
    """Bytes of one block's activations, with their cotangents in training, and of the kernels that it gathers.

    On GPUs, and of float32, attention holds its logits `[B, H, T, T]`. Chunks of the vocabulary are held to 16 MiB.
    """
    config, tokens = job.config, _rows(job) * job.seq
    width = 6 * config.hidden_size + 3 * config.intermediate_size
    held = (3 if job.objective == "sft" else 1) * tokens * width * _width(job)
    if topology.chip.platform == "gpu" or job.dtype == "float32":
        held += (2 if job.objective == "sft" else 1) * tokens * job.seq * config.num_heads * 4 // job.mesh[2]
    block = math.prod(job.mesh) > 1 and parameter_counts(config)["total"] // config.num_layers * _width(job)
    return held + 2 * int(block) // job.mesh[2]


def _rows(job: Job) -> int:
    """Sequences on each device at a time."""
    return max(1, job.batch // (job.sft.accumulate if job.objective == "sft" else 1) // (job.mesh[0] * job.mesh[1]))


def _width(job: Job) -> int:
    return jnp.dtype(job.dtype).itemsize


def kept_bytes_per_token(job: Job) -> int:
    """Bytes of what `train ats` keeps of a token on every host, or on the disk that they share."""
    program = build(job)
    stored, curves = jax.eval_shape(program.function, *program.arguments)
    rows = jax.tree.leaves(curves)[0].shape[:2]
    sizes = [math.prod(x.shape) * x.dtype.itemsize / (job.batch * job.seq) for x in jax.tree.leaves(stored)]
    sizes += [math.prod(x.shape) * x.dtype.itemsize / math.prod(rows) for x in jax.tree.leaves(curves)]
    return round(sum(sizes))


def run_cost(job: Job, bound: float, tokens: int) -> dict[str, Any]:
    """Steps and seconds of a run: its steps times the roofline of a step, divided by the utilisation.

    Of `ats` it is the frozen pass; the fits after it, which do not run the model, take seconds to minutes.

    Args:
        job: the step that is planned.
        bound: roofline of a step, in seconds.
        tokens: to train or evaluate on, with padding, or to generate.

    Returns:
        tokens; sequences; steps; utilisation; seconds: `[least, most]`; kept_bytes, of `ats`, otherwise None.
    """
    sequences = -(-tokens // (job.new_tokens or job.seq))
    steps = -(-sequences // job.batch)
    if job.objective == "sft":
        fitted = sequences - max(1, int(job.sft.validation_fraction * sequences))
        steps = max(1, job.sft.epochs * fitted // job.batch)
    return {
        "tokens": tokens,
        "sequences": sequences,
        "steps": steps,
        "utilisation": list(UTILISATION),
        "seconds": [steps * bound / fraction for fraction in reversed(UTILISATION)],
        "kept_bytes": sequences * job.seq * kept_bytes_per_token(job) if job.objective == "ats" else None,
    }
