"""Self-evaluation: questions to a model about its own answer, and strict readers of its replies."""

import re
from typing import NamedTuple

_PERCENT = re.compile(r"(100|\d{1,2})(?:\.0+)?\s*%?", re.ASCII)
_FRACTION = re.compile(r"0?\.\d+|1\.0+|0\.0*", re.ASCII)


def read_number(reply: str) -> float | None:
    """The confidence in a reply whose first line is nothing but a number; None for any other reply.

    A whole number from 0 to 100 is per cent, with or without the sign. A number from 0 to 1 with a decimal point is a
    probability: "1" is 1%, "1.0" is 100%.

    Example:
        >>> [read_number(reply) for reply in (" 85%.", "0.7", "1.0", "1", "150", "maybe 80")]
        [0.85, 0.7, 1.0, 0.01, None, None]
    """
    lines = reply.strip().splitlines()
    line = lines[0].strip().rstrip(".").strip() if lines else ""
    if _FRACTION.fullmatch(line):
        return float(line)
    percent = _PERCENT.fullmatch(line)
    return float(percent[1]) / 100 if percent else None


class TwoWayQuestion(NamedTuple):
    """A question with two replies, for and against the answer, whose probabilities are read."""

    prompt: str
    yes: str
    no: str


_PROPOSED = "{question}\nProposed answer: {answer}\n"
TWO_WAY = {
    "p_true": TwoWayQuestion(_PROPOSED + "Is the proposed answer True or False?\nReply:", " True", " False"),
    "p_not_none": TwoWayQuestion("{question}\n(A) {answer}\n(B) None of the above\nThe right option is (", "A", "B"),
}
"""Name of a method -> its question. `{question}` is the task's own prompt without examples."""
STATED = {"verbalised": _PROPOSED + "Probability that the proposed answer is right, from 0% to 100%:"}
"""Name of a method -> the prompt of a reply that `read_number` reads."""
