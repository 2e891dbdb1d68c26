"""Formats of rows (text, prompts, chat), recognised by the names of their columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from calibjax.data.source import Rows, is_text
from calibjax.runtime.errors import UserError

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
        columns: columns that are read. The last one holds the text, the response or the messages; others the prompt.
        prompt_template: format string over the columns of the row, such as "{instruction} {input} ", which is the
            prompt in place of the chat template; for instructions and prompts.
        score_template_text: whether the loss includes what the chat template writes between its generation prompt and
            an answer, such as an empty `<think></think>`.
    """

    kind: Literal["text", "document", "instruction", "prompt", "chat"]
    columns: tuple[str, ...]
    prompt_template: str | None = None
    score_template_text: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the loss includes the whole text."""
        return self.kind in ("text", "document")

    def __str__(self) -> str:
        names = {"text": "plain text", "document": "whole documents", "instruction": "instructions"}
        names |= {"prompt": "prompts with responses", "chat": "chat"}
        return f"{names[self.kind]} (column{'s'[: len(self.columns) > 1]} {', '.join(self.columns)})"


def recognise(
    rows: Rows | Sequence[Mapping[str, Any]],
    text_column: str | None = None,
    *,
    prompt_template: str | None = None,
    score_template_text: bool = False,
) -> Format:
    """Returns the first format that matches the columns of the first row: chat, instructions, prompts, plain text.

    `text_column` is read as plain text, whatever other columns exist. The other options are fields of the format.

    Raises:
        UserError: there are no rows, `text_column` is missing, no format matches the columns, or `prompt_template` does
            not apply to the format or is not a format string.
    """
    format = _recognise(rows, text_column)
    if prompt_template is not None:
        _check_template(prompt_template, format)
    return replace(format, prompt_template=prompt_template, score_template_text=score_template_text)


def _recognise(rows: Rows | Sequence[Mapping[str, Any]], text_column: str | None) -> Format:
    columns = list((rows if isinstance(rows, Rows) else Rows(rows, "the data")).first)
    plain = "document" if isinstance(rows, Rows) and rows.documents else "text"
    if text_column is not None:
        if text_column not in columns:
            raise UserError(f"text_column={text_column!r} is missing. The columns are: {', '.join(columns)}.")
        return Format(plain, (text_column,))

    def first(*names: str) -> str | None:
        return next((name for name in names if name in columns), None)

    if chat := first("messages", "conversations"):
        return Format("chat", (chat,))
    if "instruction" in columns and (response := first("output", "response")):
        optional = first("input", "context")
        return Format("instruction", ("instruction", *([optional] if optional else []), response))
    if (prompt := first("prompt", "question")) and (response := first("response", "completion", "answer", "output")):
        return Format("prompt", (prompt, response))
    if text := first("text", "content", "document"):
        return Format(plain, (text,))
    raise UserError(
        f"no format fits the columns {', '.join(columns)}. Expected {_EXPECTED}. "
        "To read one column as plain text, set `text_column`."
    )


def _check_template(template: str, format: Format) -> None:
    if format.kind not in ("instruction", "prompt"):
        raise UserError(f"prompt_template is for instructions and prompts, but these rows are {format}. Leave it out.")
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"prompt_template={template!r} is not a format string: {error}.") from error
    if not fields or not all(field.isidentifier() for field in fields):
        example = "".join("{" + name + "}" for name in format.columns[:-1])
        raise UserError(f"prompt_template={template!r}: expected column names in braces, such as {example!r}.")
    if format.columns[-1] in fields:
        raise UserError(f"prompt_template={template!r} contains the response {format.columns[-1]!r}. Leave it out.")


def string_at(row: Mapping[str, Any], column: str, place: str, *, optional: bool = False) -> str:
    """Returns the Unicode string in `column`; "" for a missing one if `optional`."""
    value = row.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        came = "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
        raise UserError(f"{place}, column {column!r}: expected a string, got {came}.")
    if not is_text(value):
        raise UserError(f"{place}, column {column!r}: expected Unicode text, got half of a surrogate pair.")
    return value
