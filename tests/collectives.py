"""What a compiled program moves between devices, read from its text."""

import math
import re

_COLLECTIVE = re.compile(r"= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(text: str) -> list[tuple[str, int]]:
    """(kind, elements of the largest array) of every collective."""
    return [
        (kind, max(math.prod(int(n) for n in dims.split(",") if n) for dims in _SHAPE.findall(result)))
        for result, kind in _COLLECTIVE.findall(text)
    ]
