"""What moves between devices in a compiled program: its collectives, with loops as often as they run.

Reads the text of the optimised HLO module (`compiled.as_text()`), which is the program of one device.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

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


_Computation = list[_Instruction]


def collectives(text: str, turns: int = 1) -> tuple[dict[str, Collective], int]:
    """The collectives of an HLO module by kind, and the number of loops whose length the text does not tell.

    Such loops count `turns` times. A collective that the TPU compiler spreads over several fusions counts where it
    starts.
    """
    moved: dict[str, Collective] = {}
    unknown = 0
    for x, times, length in _executed(text, turns):
        kind = x.opcode.removesuffix("-start")
        unknown += length is None
        if kind in KINDS:
            size, received = _bytes(x, kind)
            old = moved.get(kind, Collective(0, 0, 0))
            moved[kind] = Collective(old.count + times, old.bytes + times * received, max(old.largest, size))
    return moved, unknown


def executions(text: str) -> dict[str, int]:
    """How often each instruction of an HLO module runs, by name; those in loops of unknown length as if it were 1."""
    counts: dict[str, int] = {}
    for x, times, _ in _executed(text, 1):
        counts[x.name] = counts.get(x.name, 0) + times
    return counts


def _executed(text: str, turns: int) -> Iterator[tuple[_Instruction, int, int | None]]:
    """Every instruction, how often it runs, and the length of a loop: None where it is unknown, else 1."""
    computations, entry = _parse(text)

    def walk(computation: _Computation, times: int) -> Iterator[tuple[_Instruction, int, int | None]]:
        for x in computation:
            length = _length(computations, x, computation) if x.opcode == "while" else 1
            yield x, times, length
            if x.opcode == "while":
                yield from walk(computations[_called(x, "body")[0]], times * (turns if length is None else length))
            elif x.opcode in ("fusion", "call", "conditional", "async-start"):
                for name in _called(x, "calls", "to_apply", "branch_computations"):
                    yield from walk([y for y in computations[name] if not _continues(y, computations[name])], times)

    return walk(computations[entry], 1)


def _continues(x: _Instruction, computation: _Computation) -> bool:
    """Whether a collective of a chain of fusions, as the TPU compiler makes them, was begun in an earlier one."""
    starts = any("AsyncCollectiveStart" in y.attributes for y in computation)
    return x.opcode in KINDS and "chain_id=" in x.attributes and not starts


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith(" "):
            if current is not None and " = " in line:
                current.append(_instruction(line))
        elif opening := re.match(r"(ENTRY )?%?([^\s(]+) \(.*\{$", line):
            current = computations.setdefault(opening[2], [])
            entry = opening[2] if opening[1] else entry
        elif re.match(r"\}(,|$)", line):  # and not an attribute that goes over several lines, as of Pallas' kernels
            current = None
    return computations, entry


def _instruction(line: str) -> _Instruction:
    left, right = line.strip().split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    start = right.index("(", end)
    close = _closing(right, start)
    return _Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        shape=right[:end],
        opcode=right[end:start].strip(),
        operands=re.findall(r"%([^\s,()]+)", right[start:close]) or [right[start + 1 : close]],
        attributes=right[close + 1 :],
        root=left.startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    """Returns the index of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"HLO text with an open bracket: {text[start : start + 100]}")


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
    """How many devices take part together."""
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
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = computations[_called(loop, "condition")[0]], computations[_called(loop, "body")[0]]
    test = next(x for x in condition if x.root)
    index = _element(condition, test.operands[0])
    end = _constant(condition, test.operands[-1])
    if test.opcode != "compare" or "direction=LT" not in test.attributes or index is None or end is None:
        return None
    advance = _source(body, next(x for x in body if x.root).operands[index])
    if advance is None or advance.opcode != "add" or index not in [_element(body, name) for name in advance.operands]:
        return None
    step = next((n for name in advance.operands if (n := _constant(body, name)) is not None), None)
    first = _named(around, loop.operands[0])
    start = _constant(around, first.operands[index]) if first is not None and first.opcode == "tuple" else None
    return None if step is None else -(-(end - (start or 0)) // step)


def _named(computation: _Computation, name: str) -> _Instruction | None:
    return next((x for x in computation if x.name == name), None)


def _source(computation: _Computation, name: str) -> _Instruction | None:
    """The instruction whose value this is, before copies."""
    x = _named(computation, name)
    while x is not None and x.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        x = _named(computation, x.operands[0])
    return x


def _constant(computation: _Computation, name: str) -> int | None:
    x = _source(computation, name)
    number = x is not None and x.opcode == "constant" and re.fullmatch(r"-?\d+", x.operands[0])
    return int(number[0]) if number else None


def _element(computation: _Computation, name: str) -> int | None:
    x = _source(computation, name)
    index = x is not None and x.opcode == "get-tuple-element" and re.search(r"index=(\d+)", x.attributes)
    return int(index[1]) if index else None
