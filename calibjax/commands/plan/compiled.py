"""What the compiler makes of a job: memory and collectives of the real step, on devices that are not there."""

import re
import time
from typing import Any, NamedTuple

import jax

from calibjax.commands.plan.chips import GIB, Topology
from calibjax.commands.plan.count import flops
from calibjax.commands.plan.program import Job, build
from calibjax.runtime.errors import UserError
from calibjax.runtime.gpu_compiler import gpu_devices
from calibjax.runtime.hlo import Collective, collectives
from calibjax.runtime.sharding import make_mesh
from calibjax.runtime.tpu_compiler import DoesNotCompile, slice_devices, with_compiler


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
    """The compiler refused the step for its memory.

    Attributes:
        total: bytes needed, rounded as the compiler reports them; None if it reports none.
        reason: its own words.
    """

    total: int | None
    reason: str


def compile_step(job: Job, topology: Topology) -> Compiled | TooLarge:
    """Compiles a job for the devices of a topology such as "v5e:4x4" or "h100:8", in a process of its own.

    Raises:
        UserError: libtpu has no such topology, or it has another number of devices.
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
    found = re.search(r"(?:Used|required for [^()]*\(|requires?) ?([\d.]+)([KMGT]?)", message)
    total = None if found is None else round(float(found[1]) * units[found[2]])
    return TooLarge(total, " ".join(message.split())[:300])


def _devices(topology: Topology) -> list[Any]:
    if topology.chip.platform == "gpu":
        return gpu_devices(topology.name.partition(":")[0], topology.devices)
    try:
        return slice_devices(topology.name)
    except Exception as error:  # of several kinds
        reason = str(error).splitlines()[0]
        raise UserError(f"--topology {topology.name}: libtpu has no such slice ({reason}).") from error


def _compile(job: Job, topology: Topology) -> Compiled:
    devices = _devices(topology)
    mesh = make_mesh(job.mesh, devices)
    program = build(job, mesh)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        traced = program.function.trace(*program.arguments)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    try:
        found, unknown = collectives(compiled.as_text(), job.turns)
    except jax.errors.JaxRuntimeError:
        # The step has been compiled. But libtpu may be newer than jaxlib, and write what that does not read:
        # jaxlib 0.10.2 cannot read an async-update with several operands, which libtpu 0.0.51 emits for v5p and v6e.
        found, unknown = None, 0
    beside = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        total=memory.argument_size_in_bytes + beside + memory.generated_code_size_in_bytes,
        flops=flops(traced.jaxpr, job.turns),
        collectives=found,
        unknown_loops=unknown if job.objective != "generate" else max(0, unknown - 1),
        seconds=time.perf_counter() - start,
    )
