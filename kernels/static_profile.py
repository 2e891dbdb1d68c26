"""Compile a JAX function for a TPU on a machine that has none, and estimate its time from the compiler's own schedule.

libtpu compiles ahead of time for every generation. Its static profile simulates the compiled program, bundle by bundle,
with its loops and DMAs, and reports cycles per operation, Pallas kernels and XLA's own fusions alike. What comes out is
a *static estimate*, not a measurement: `Chip.trust` compares it with published times.
"""

import functools
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.kernels.pallas_tpu import blocks
from calibjax.runtime.compilers import slice_devices, with_compiler
from calibjax.runtime.hlo import executions


class Chip(NamedTuple):
    """What a program is compiled for: one device of JAX."""

    topology: str  # libtpu's name of a slice that has the chip
    kind: str  # JAX's name of the device
    clock: float  # Hz
    flops_per_cycle: int  # bfloat16 flop of one core's matrix units
    cores: int  # of a device; a Pallas grid with a "parallel" dimension is split between them
    trust: str  # how the static estimate compares with time on the chip


_NEARLY = "reads about 0.8x published measured times"
CHIPS = {
    "v5e": Chip("v5e:1x1", "TPU v5 lite", 1.5e9, 131072, 1, "not calibrated"),
    "v5p": Chip("v5p:2x2x1", "TPU v5", 1.75e9, 131072, 2, "within 2% of published measured times"),
    "v6e": Chip("v6e:1x1", "TPU v6 lite", 1.75e9, 524288, 1, _NEARLY),
    "v7x": Chip("tpu7x:2x2x1", "TPU7x", 2.2e9, 524288, 1, f"{_NEARLY}; one of the chip's two cores"),
}


class Program(NamedTuple):
    """A function and the `jax.ShapeDtypeStruct`s of its arguments."""

    function: Callable[..., Any]
    arguments: Sequence[Any]


class Compiled(NamedTuple):
    """Compiler statistics of one program on one device."""

    cycles: Mapping[str, int]  # of each operation, as often as it runs; empty unless profiled
    temporaries: int  # bytes beyond arguments and outputs


def compile_for(chip: str, build: Callable[..., Program], *args: Any, profile: bool = True) -> Compiled:
    """Compiles `build(*args)` for one device of `chip`, a key of `CHIPS`, in a new process.

    `build` is a function at the top of a module, and its arguments are picklable. With `profile` the program is
    simulated: 0.05 to 0.3 s for each grid step of a Pallas kernel, so give it few. Raises `DoesNotCompile` with the
    compiler's reason.
    """
    with tempfile.TemporaryDirectory(prefix="static_profile_") as directory:
        flags = profile_flags(directory) if profile else []
        arguments = (CHIPS[chip], build, args, directory if profile else None)
        return with_compiler(_compile, *arguments, flags=flags, timeout=900.0)


def profile_flags(directory: str) -> list[str]:
    """Flags of a compiler that writes the profile of each program to `directory`."""
    # Small operands would be kept in on-chip memory, where those of the full size do not fit: not here either.
    return [f"--xla_jf_dump_static_llo_profile_to={directory}", "--xla_msa_enable=false"]


def _compile(chip: Chip, build: Callable[..., Program], args: tuple, directory: str | None) -> Compiled:
    """The same in the compiler's process. `directory`: of the profile, if any."""
    import jax
    import numpy as np

    if directory is not None:
        jax.config.update("jax_enable_compilation_cache", False)  # what comes from there is not profiled
    mesh = jax.sharding.Mesh(np.array(slice_devices(chip.topology)[:1]), ("x",))
    jax.set_mesh(mesh)  # from which Pallas knows the chip that it compiles for
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    program = build(*args)
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in program.arguments]
    compiled = jax.jit(program.function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    cycles = {} if directory is None else profiled_cycles(directory, compiled.as_text() or "")
    return Compiled(cycles, 0 if memory is None else memory.temp_size_in_bytes)


def profiled_cycles(directory: str, text: str) -> dict[str, int]:
    """Cycles of each operation of an HLO module; one entry of the profile may stand for several equal operations.

    The profile has one turn of each loop. An operation whose loop's length the text does not tell counts once.
    """
    times = executions(text)
    found: dict[str, int] = {}
    for file in Path(directory).glob("*.textproto"):
        for entry in re.findall(r"hlo_op_estimate \{(.*?)\n\}", file.read_text(), re.DOTALL):
            fields = dict(re.findall(r"(\w+): (\S+)", entry))
            cycles = int(fields["estimated_cycles"]) * int(fields.get("num_equivalent_hlos", 1))
            name = fields["hlo_op_name"].strip('"')
            found[name] = cycles * times.get(name, 1)
    return found


class Estimate(NamedTuple):
    """A static estimate at the full size."""

    cycles: float  # of one device
    seconds: float  # by its clock
    utilization: float  # flop over those that the device's matrix units could do in that time in bfloat16


Points = Sequence[tuple[int, ...]]  # of each axis of a program: its length, or two shorter ones


def at_full_size(cycles: Callable[..., float], sizes: Sequence[int], points: Points) -> float:
    """`cycles(*sizes)` from those at `points`, of which it is an affine function along each axis."""
    if not points:
        return cycles()
    found = [at_full_size(functools.partial(cycles, point), sizes[1:], points[1:]) for point in points[0]]
    if len(found) == 1:
        return found[0]
    small, large = points[0]
    return found[0] + (found[1] - found[0]) / (large - small) * (sizes[0] - small)


def our_points(chip: str, kernels: Sequence[str], inputs: tuple[int, int, int], saved: bool) -> Points:
    """Lengths of N and V at which a program of our kernels is profiled: whole blocks of each of them.

    `kernels` are names in `blocks.PREFERENCES`, `inputs` N, D and the bytes of an entry; `saved`: it holds
    exponentials, of all tokens at a time.
    """
    found = [blocks.choose(blocks.PREFERENCES, kernel, inputs, CHIPS[chip].kind, saved) for kernel in kernels]
    height = CHIPS[chip].cores * math.lcm(*(x.tokens for x in found))
    columns = math.lcm(*(x.columns for x in found))
    while columns < 3072:  # at 2,048 XLA takes another gather of W[y]; at least two of each block
        columns *= 2
    few = 2 if "d_unembedding" in kernels else 1  # past whose sums tokens are streamed
    tokens = inputs[0]
    exact = saved or tokens <= (few + 1) * height
    return (tokens,) if exact else (few * height, (few + 1) * height), (columns, 2 * columns)


def estimate(
    chip: str, build: Callable[..., Program], *args: Any, sizes: Sequence[int], points: Points, flops: float
) -> Estimate:
    """Static estimate of `build(*args, *sizes)`, drawn through the profiles of smaller sizes.

    The simulation walks every grid step, too many at the full size, and keeps them all in memory. A kernel's cycles are
    affine in the number of its blocks along each axis (the cycles outside the steady state stay in the constant), so
    that two lengths of each give the rest. They must be multiples of the kernel's block, at least two along an axis
    that is streamed past another: a single block is not loaded again. `flops` are those of the matrix products.
    """

    def profiled(*lengths: int) -> float:
        return sum(compile_for(chip, build, *args, *lengths).cycles.values())

    cycles = at_full_size(profiled, sizes, points)
    peak = CHIPS[chip].flops_per_cycle * CHIPS[chip].cores
    return Estimate(cycles, cycles / CHIPS[chip].clock, flops / peak / cycles)
