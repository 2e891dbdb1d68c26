"""Formats of rows (text, prompts, chat), recognised by the names of their columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from calibjax.data.source import Rows, is_text
from calibjax.runtime.errors import UserError

_CHAT = ("messages", "conversations")
_INPUT = ("input", "context")
_INSTRUCTION_RESPONSE = ("output", "response")
_PROMPT = ("prompt", "question")
_RESPONSE = ("response", "completion", "answer", "output")
_TEXT = ("text", "content", "document")

_EXPECTED = (
    "chat (messages or conversations), instructions (instruction, optionally input or context, and output or "
    "response), prompts (prompt or question, and response, completion, answer or output), or plain text (text, content "
    "or document)"
)


@dataclass(frozen=True)
class Format:
    """Format of a row.

    Attributes:
        kind: "text" for plain text, "document" for plain text that is a whole file, "instruction" or "prompt" for a
            prompt and its response, "chat" for a list of messages.
        columns: columns that are read. The last one holds the text, the response or the messages; those before it hold
            the prompt.
    """

    kind: Literal["text", "document", "instruction", "prompt", "chat"]
    columns: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Whether the loss includes the whole text."""
        return self.kind in ("text", "document")

    def __str__(self) -> str:
        names = {"text": "plain text", "document": "whole documents", "instruction": "instructions"}
        names |= {"prompt": "prompts with responses", "chat": "chat"}
        return f"{names[self.kind]} (column{'s'[: len(self.columns) > 1]} {', '.join(self.columns)})"


def recognise(rows: Rows | Sequence[Mapping[str, Any]], text_column: str | None = None) -> Format:
    """Recognises the format of rows.

    The first format that matches the columns of the first row is used: chat, instructions, prompts, plain text.

    Args:
        rows: result of `read_source`, or any sequence of dicts.
        text_column: column to read as plain text, whatever other columns exist.

    Returns:
        The format.

    Raises:
        UserError: if there are no rows, `text_column` is missing, or no format matches the columns.
    """
    columns = list((rows if isinstance(rows, Rows) else Rows(rows, "the data")).first)
    plain = "document" if isinstance(rows, Rows) and rows.documents else "text"
    if text_column is not None:
        if text_column not in columns:
            raise UserError(f"text_column={text_column!r} is missing. The columns are: {', '.join(columns)}.")
        return Format(plain, (text_column,))

    def first(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in columns), None)

    if chat := first(_CHAT):
        return Format("chat", (chat,))
    if "instruction" in columns and (response := first(_INSTRUCTION_RESPONSE)):
        optional = first(_INPUT)
        return Format("instruction", ("instruction", *([optional] if optional else []), response))
    if (prompt := first(_PROMPT)) and (response := first(_RESPONSE)):
        return Format("prompt", (prompt, response))
    if text := first(_TEXT):
        return Format(plain, (text,))
    raise UserError(
        f"no format fits the columns {', '.join(columns)}. Expected {_EXPECTED}. "
        "To read one column as plain text, set `text_column`."
    )


def string_at(row: Mapping[str, Any], column: str, place: str, *, optional: bool = False) -> str:
    """Returns the string in `column`. A missing one gives "" if `optional`, else raises `UserError` with the place."""
    value = row.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        came = "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
        raise UserError(f"{place}, column {column!r}: expected a string, got {came}.")
    if not is_text(value):
        raise UserError(f"{place}, column {column!r}: expected Unicode text, got half of a surrogate pair.")
    return value
