"""What a step does: the operations of a traced program, and what a compiled one moves between devices.

The latter are its collectives, with loops as often as they run, from the text of the optimised HLO module
(`compiled.as_text()`), which is the program of one device.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr

from calibjax.runtime.arrays import ceil_div

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8}


class Collective(NamedTuple):
    """All collectives of one kind.

    Attributes:
        count: how often one runs on each device in a step.
        bytes: that a device receives in a step, on a ring: of a result of S bytes gathered from n devices
            S (n - 1) / n, twice that of a sum, and all of a permutation.
        largest: bytes of the largest single result.
    """

    count: int
    bytes: int
    largest: int


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    attributes: str
    root: bool


_Computation = dict[str, _Instruction]
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.+?) ([a-z][\w-]*)\((.*)")


def collectives(text: str) -> tuple[dict[str, Collective], int]:
    """The collectives of an HLO module by kind, and the number of loops whose length the text does not tell.

    The body of such a loop counts once; a collective that the TPU compiler spreads over fusions, where it starts.
    """
    moved: dict[str, Collective] = {}
    unknown = 0
    for x, times, length in _executed(text):
        kind = x.opcode.removesuffix("-start")
        unknown += length is None
        if kind in KINDS:
            size, received = _bytes(x, kind)
            old = moved.get(kind, Collective(0, 0, 0))
            moved[kind] = Collective(old.count + times, old.bytes + times * received, max(old.largest, size))
    return moved, unknown


def executions(text: str) -> dict[str, int]:
    """Name -> how often an instruction of an HLO module runs; a loop of unknown length counts as one pass."""
    counts: dict[str, int] = {}
    for x, times, _ in _executed(text):
        counts[x.name] = counts.get(x.name, 0) + times
    return counts


def _executed(text: str) -> Iterator[tuple[_Instruction, int, int | None]]:
    """Every instruction, how often it runs, and the length of a loop: None where it is unknown, else 1."""
    computations, entry = _parse(text)

    def walk(computation: _Computation, times: int) -> Iterator[tuple[_Instruction, int, int | None]]:
        for x in computation.values():
            length = _length(computations, x, computation) if x.opcode == "while" else 1
            yield x, times, length
            if x.opcode == "while":
                yield from walk(computations[_called(x, "body")[0]], times * (length or 1))
            elif x.opcode in ("fusion", "call", "conditional", "async-start"):
                for name in _called(x, "calls", "to_apply", "branch_computations"):
                    yield from walk(_begun(computations[name]), times)

    return walk(entry, 1)


def _begun(computation: _Computation) -> _Computation:
    """Without collectives that an earlier fusion of a chain began, as the TPU compiler makes them."""
    if any("AsyncCollectiveStart" in x.attributes for x in computation.values()):
        return computation
    return {n: x for n, x in computation.items() if x.opcode not in KINDS or "chain_id=" not in x.attributes}


def _parse(text: str) -> tuple[dict[str, _Computation], _Computation]:
    """The computations by name, of which each holds its instructions by name, and the one that is run."""
    computations: dict[str, _Computation] = {}
    entry, current = {}, None
    for line in text.splitlines():
        if line.startswith(" "):
            if current is not None and (match := _INSTRUCTION.match(line)):
                root, name, shape, opcode, rest = match.groups()
                inner, _, attributes = rest.partition("), ")
                operands = re.findall(r"%([^\s,()]+)", inner) or [inner.removesuffix(")")]
                current[name] = _Instruction(name, shape, opcode, operands, attributes, root is not None)
        elif opening := re.match(r"(ENTRY )?%?([^\s(]+) \(.*\{$", line):
            current = computations.setdefault(opening[2], {})
            entry = current if opening[1] else entry
        elif re.match(r"\}(,|$)", line):  # and not an attribute that goes over several lines, as of Pallas' kernels
            current = None
    return computations, entry


def _called(x: _Instruction, *attributes: str) -> list[str]:
    matches = (re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[^\s,]+)", x.attributes) for attribute in attributes)
    return [name for match in matches if match for name in re.findall(r"%?([^\s,{}%]+)", match[1])]


def _bytes(x: _Instruction, kind: str) -> tuple[int, int]:
    """Bytes of a collective's result, without the padding of its layout, and those that a device receives."""
    arrays = []
    for name, dimensions in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", x.shape):
        bits = _BITS.get(name) or int(re.search(r"\d+", name)[0])  # pyright: ignore[reportOptionalSubscript]
        arrays.append(math.prod(map(int, filter(None, dimensions.split(",")))) * bits // 8)
    # With -start of these two: operand, result, and what the transfer needs.
    size = arrays[1] if x.opcode in ("all-gather-start", "collective-permute-start") else sum(arrays)
    if kind == "collective-permute":
        return size, size
    group = _group(x.attributes)
    fraction = (group - 1) / group
    factors = {"all-gather": fraction, "all-to-all": fraction, "all-reduce": 2 * fraction, "reduce-scatter": group - 1}
    return size, round(size * factors[kind])


def _group(attributes: str) -> int:
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    raise ValueError(f"HLO text without replica groups: {attributes[:100]}")


def _length(computations: dict[str, _Computation], loop: _Instruction, around: _Computation) -> int | None:
    """How often a loop runs that counts up to a constant; None where the text does not tell."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition, body = (computations[_called(loop, name)[0]] for name in ("condition", "body"))
    test, result = (next(x for x in computation.values() if x.root) for computation in (condition, body))
    is_less = test.opcode == "compare" and "direction=LT" in test.attributes
    index = _number(condition, test.operands[0], "get-tuple-element")
    end = _number(condition, test.operands[-1], "constant")
    if not is_less or index is None or end is None:
        return None
    advance = _source(body, result.operands[index])
    if advance is None or advance.opcode != "add":
        return None
    elements = [_number(body, name, "get-tuple-element") for name in advance.operands]
    constants = [_number(body, name, "constant") for name in advance.operands]
    step = next((number for number in constants if number is not None), None)
    if index not in elements or step is None:
        return None
    initial = around.get(loop.operands[0])
    start = None
    if initial is not None and initial.opcode == "tuple":
        start = _number(around, initial.operands[index], "constant")
    return ceil_div(end - (start or 0), step)


def _source(computation: _Computation, name: str) -> _Instruction | None:
    """The instruction whose value this is, before copies."""
    x = computation.get(name)
    while x is not None and x.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        x = computation.get(x.operands[0])
    return x


def _number(computation: _Computation, name: str, opcode: str) -> int | None:
    """The number that a constant is, or the index that an element of a tuple has; None for another instruction."""
    x = _source(computation, name)
    if x is None or x.opcode != opcode:
        return None
    if opcode == "constant":
        number = re.fullmatch(r"-?\d+", x.operands[0])
    else:
        number = re.search(r"(?<=index=)\d+", x.attributes)
    return int(number[0]) if number else None


def flops(jaxpr: Any) -> float:
    """Operations of the matrix products in a jaxpr, over all devices; 2 for each product of two numbers.

    XLA's own `cost_analysis` counts the body of a loop once, and a model is a loop over its layers. A Pallas kernel
    counts as it declares itself (`pl.CostEstimate`), or else its body for each point of its grid. For `cond`, the most
    expensive branch counts. The body of `shard_map` counts once for each device, and that of a `while_loop` once.
    """
    return sum((_equation_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns), start=0.0)


def _equation_flops(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "ragged_dot_general"):
        ragged = params.get("ragged_dot_dimension_numbers")
        (contracted, _), _ = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
        terms = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        # Without a group axis in the second factor, the result has one, and each term belongs to one group.
        groups = 1 if ragged is None or ragged.rhs_group_dimensions else equation.invars[2].aval.shape[-1]
        return 2.0 * terms * math.prod(equation.outvars[0].aval.shape) / groups
    if name == "pallas_call" and params.get("cost_estimate") is not None:
        return float(params["cost_estimate"].flops)
    lists = [value if isinstance(value, tuple | list) else (value,) for value in params.values()]
    inner = [flops(item) for items in lists for item in items if isinstance(item, Jaxpr | ClosedJaxpr)]
    if name == "cond":
        return max(inner)
    if name == "pallas_call":
        return sum(inner) * math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return sum(inner) * params["mesh"].size
    return sum(inner) * (params["length"] if name == "scan" else 1)
