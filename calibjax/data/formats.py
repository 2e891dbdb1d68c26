"""Formats of rows (text, prompts, chat), recognised by the names of their columns, and the conversations in them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal, NamedTuple

from calibjax.data.source import Row, Rows, is_text, with_names
from calibjax.runtime.errors import UserError, shortened

_INPUTS = ("input", "context", "passage", "article")
_RESPONSES = ("response", "completion", "answer", "output")
_FORMATS: tuple[tuple[Any, ...], ...] = (
    ("chat", ("messages", "conversations")),
    ("instruction", ("instruction",), _INPUTS, ("output", "response")),
    ("instruction", ("instruction",), ("output", "response")),
    ("prompt", ("prompt", "query"), _RESPONSES),
    ("prompt", ("question",), _INPUTS, _RESPONSES),
    ("prompt", ("question",), _RESPONSES),
    ("text", ("text", "content", "document")),
)
"""Kinds of formats, each with the names of its columns; the first that fits the columns of a row is taken."""
_BESIDE = ("system", "system_prompt", "history", "tools", "documents", "chat_template_kwargs")
COLUMNS = (*_BESIDE, *(name for _, *roles in _FORMATS for names in roles for name in names))


@dataclass(frozen=True)
class Format:
    """Format of a row.

    Attributes:
        kind: "text", "document" (a whole file), "instruction" or "prompt" (with a response), "chat" (messages).
        columns: columns that are read. The last one holds the text, the response or the messages; others the prompt.
        prompt_template: format string over the columns of the row, such as "{instruction} {input} ", which is the
            prompt in place of the chat template; for instructions and prompts.
        score_template_text: whether the loss includes what the template writes before an answer (`<think></think>`).
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
        names = {"text": "plain text", "document": "whole documents", "prompt": "prompts with responses"}
        names |= {"instruction": "instructions", "chat": "chat"}
        columns = "columns" if len(self.columns) > 1 else "column"
        return f"{names[self.kind]} ({columns} {', '.join(self.columns)})"


def recognise(
    rows: Rows | Sequence[Row],
    text_column: str | None = None,
    *,
    prompt_template: str | None = None,
    score_template_text: bool = False,
) -> Format:
    """The first format that fits the columns of the first row, of chat, instructions, prompts and plain text.

    `text_column` is read as plain text, whatever other columns exist. The other options are fields of the format.

    Raises:
        UserError: there are no rows, `text_column` is missing, no format matches the columns, or `prompt_template` does
            not apply to the format or is not a format string.
    """
    rows = rows if isinstance(rows, Rows) else Rows(rows, "the data")
    format = _recognise(rows, text_column)
    row = with_names(rows.first, ("choices", "options", "A", "B"))
    has_choices = row.get("choices") or row.get("options") or {"A", "B"} <= row.keys()
    if prompt_template is None and format.kind == "prompt" and format.columns[0] == "question" and has_choices:
        hint = "`eval layers` reads them; else write the choices into the question, or give a prompt template."
        raise UserError(f"{rows.name}: multiple choice, whose choices no prompt would contain. {hint}")
    if prompt_template is not None:
        if format.kind not in ("instruction", "prompt"):
            raise UserError(f"prompt_template is for instructions and prompts, but rows are {format}. Leave it out.")
        try:
            fields = [name for _, name, _, _ in Formatter().parse(prompt_template) if name is not None]
        except ValueError as error:
            raise UserError(f"{prompt_template=} is not a format string: {error}.") from error
        if not fields or not all(field.isidentifier() for field in fields):
            raise UserError(f"{prompt_template=}: expected columns in braces, as {{{format.columns[0]}}}.")
        if format.columns[-1] in fields:
            raise UserError(f"{prompt_template=} contains the response {format.columns[-1]!r}. Leave it out.")
    return replace(format, prompt_template=prompt_template, score_template_text=score_template_text)


def _recognise(rows: Rows, text_column: str | None) -> Format:
    columns = rows.first
    plain = "document" if rows.documents else "text"
    if text_column is not None:
        if text_column not in columns:
            raise UserError(f"text_column={text_column!r} is missing. The columns are: {', '.join(columns)}.")
        return Format(plain, (text_column,))

    columns = with_names(columns, COLUMNS)
    for kind, *roles in _FORMATS:
        present = [next((name for name in names if name in columns), None) for names in roles]
        if None not in present:
            return Format(plain if kind == "text" else kind, tuple(map(str, present)))
    single = [name for _, *roles in _FORMATS if len(roles) == 1 for name in roles[0]]
    prompts = dict.fromkeys(name for _, *roles in _FORMATS if len(roles) > 1 for name in roles[0])
    expected = f"one of {', '.join(single)}; or one of {', '.join(prompts)} and one of {', '.join(_RESPONSES)}"
    hint = "To read one column as plain text, name it by --text-column (`text_column`)."
    raise UserError(f"no format fits the columns {', '.join(rows.first)}. Expected {expected}. {hint}")


def string_at(row: Row, column: str, place: str, *, optional: bool = False) -> str:
    """The Unicode string in `column`; "" if it is missing and `optional`."""
    value = row.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        got = "nothing" if value is None else f"{type(value).__name__} {shortened(value)!r}"
        raise UserError(f"{place}, column {column!r}: expected a string, got {got}.")
    if not is_text(value):
        raise UserError(f"{place}, column {column!r}: expected Unicode text, got half of a surrogate pair.")
    return value


Message = dict[str, Any]
_ROLES = {"human": "user", "prompter": "user", "observation": "tool"}  # of ShareGPT's and OASST's files
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant")
SEPARATOR = "\n\n"  # between messages where there is no chat template


class Conversation(NamedTuple):
    """A conversation and which of its messages the loss includes."""

    messages: list[Message]  # with "role", "content" (a string) and whatever else the row gives, none of it null
    answers: tuple[int, ...]  # indices of the messages of the assistant whose weight is not 0, ascending
    options: dict[str, Any]  # of the template: "tools", "documents" and the entries of "chat_template_kwargs"


def read_conversation(row: Row, format: Format, place: str) -> Conversation:
    """The conversation of a row: its messages, or its prompt and response as two messages.

    Messages have `role` and `content`, or ShareGPT's `from` and `value`. Messages, tools and the arguments of calls may
    be JSON strings. Null values count as absent, because columnar files add them. In rows of several parts, which are
    TRL's prompt and completion as messages and LLaMA-Factory's `history` before a prompt and a response, only the last
    part holds answers. Also read: `system`, `system_prompt`, `chat_template_kwargs`, in chats `tools` and `documents`.
    """
    if format.kind == "chat" or isinstance(row.get(format.columns[0]), list):
        parts = [_turns(row, column, place) for column in format.columns]
        options = _template_options(row, place)
    else:
        parts = _text_turns(row, format, place)
        options = _template_options({"chat_template_kwargs": row.get("chat_template_kwargs")}, place)
    messages, answers = [], []
    opening = parts[0][1][0]
    has_system = isinstance(opening, Mapping) and "system" in (opening.get("role"), opening.get("from"))
    column = "system" if has_system or row.get("system") else "system_prompt"  # which repeats a chat's own message
    if system := string_at(row, column, place, optional=True):
        messages.append({"role": "system", "content": system})
    for number, (where, turns) in enumerate(parts):
        for turn in turns:
            message, weight = _read_message(turn, f"{where}, message {len(messages)}")
            if message["role"] == "assistant" and weight != 0 and number == len(parts) - 1:
                answers.append(len(messages))
            messages.append(message)
        roles = [message["role"] for message in messages[-len(turns) :]]
    if "assistant" not in roles:
        raise UserError(f"{where}: no message of role assistant (or gpt) to predict. Roles: {', '.join(roles)}.")
    for name in ("image", "images", "video", "videos", "audio", "audios"):
        mark = f"<{name.removesuffix('s')}>"
        if row.get(name) and any(mark in message["content"] for message in messages):
            raise UserError(f"{place}, column {name!r}: {mark} stands for what is no text. Only text is read.")
    return Conversation(messages, tuple(answers), options)


def _mismatch(where: str, expected: str, value: Any) -> UserError:
    return UserError(f"{where}: expected {expected}, got {shortened(value)!r}.")


def _turns(row: Row, column: str, place: str) -> tuple[str, list[Any]]:
    where = f"{place}, column {column!r}"
    turns = row.get(column)
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        turns = _parsed(turns, where)
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise _mismatch(where, "a list of messages", turns)
    return where, list(turns)


def _text_turns(row: Row, format: Format, place: str) -> list[tuple[str, list[Any]]]:
    """A prompt and its response as messages, after those of the column `history`: pairs of prompt and response."""
    prompt, *inputs, response = format.columns
    text = string_at(row, prompt, place)
    if prompt != "prompt":  # a row may hold several, or one that the first row lacks
        inputs = dict.fromkeys((*inputs, *_INPUTS))
    for column in inputs:
        if more := string_at(row, column, place, optional=True):
            text += SEPARATOR + more
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise _mismatch(f"{place}, column 'history'", "pairs of prompt and response", pairs)
    pairs = [*pairs, (text, string_at(row, response, place))]
    return [(place, [{"role": "user", "content": q}, {"role": "assistant", "content": a}]) for q, a in pairs]


def _read_message(turn: Any, where: str) -> tuple[Message, Any]:
    if not isinstance(turn, Mapping):
        raise _mismatch(where, "a message as a dict", turn)
    message = _without_nulls(turn)
    sender = message.pop("from", None)
    value = message.pop("value", None)
    role = message.get("role") or sender
    content = next((given for given in (message.get("content"), value) if given not in (None, "")), "")
    if not isinstance(role, str):
        raise _mismatch(where, "role and content (or from and value) as strings", turn)
    if "train_detail" in message:
        raise UserError(f"{where}: train_detail scores parts of a message, which is not supported. Remove it.")
    trained = message.pop("train", message.pop("training", None))  # axolotl's
    weight = message.pop("weight", trained)
    if weight not in (None, 0, 1) or (weight and _ROLES.get(role, role) not in ("assistant", "function_call")):
        raise UserError(f"{where}: expected a weight of 0, or 1 only for the assistant, got {weight!r} for {role!r}.")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            given = part if isinstance(content, list) else content
            raise _mismatch(where, "text or text parts (only text is read)", given)
    content = "".join(part["text"] for part in parts)
    call = message.pop("function_call", None)
    if role == "function_call":  # ShareGPT's: the value is the call
        role, content, call = "assistant", "", content
    if call is not None:
        message["tool_calls"] = [{"type": "function", "function": _parsed(call, where)}]
    if "tool_calls" in message:
        message["tool_calls"] = [_read_call(call, where) for call in _parsed(message["tool_calls"], where)]
    return {**message, "role": _ROLES.get(role, role), "content": content}, weight


def _read_call(call: Any, where: str) -> Message:
    """A tool call with its arguments as an object, which templates write as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _mismatch(where, "a tool call with a function's name and arguments", call)
    function = {**function, "arguments": _parsed(function.get("arguments", {}), where)}
    return {**call, "function": function} if "function" in call else function


def _template_options(row: Row, place: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for column in ("tools", "documents"):
        where = f"{place}, column {column!r}"
        value = _without_nulls(_parsed(row.get(column) or [], where))
        if value:
            if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
                raise _mismatch(where, "a list of objects", value)
            options[column] = value
    more = _without_nulls(row.get("chat_template_kwargs") or {})
    reserved = {"messages", "conversations", "chat_template", "add_generation_prompt", "continue_final_message"}
    if not isinstance(more, dict) or reserved & more.keys():
        raise _mismatch(f"{place}, column 'chat_template_kwargs'", "an object", more)
    return options | more


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected JSON, got {shortened(value)!r} ({shortened(error)}).") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list | tuple) else value
