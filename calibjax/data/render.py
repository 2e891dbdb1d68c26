"""Text of a row, with the character ranges of its answers."""

from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple

from calibjax.data.chat_template import render_chat
from calibjax.data.formats import Format, string_at
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = {"human": "user", "gpt": "assistant"}
_SEPARATOR = "\n\n"


class Rendered(NamedTuple):
    """A text with its answers as half-open character ranges; None if the loss includes all of it."""

    text: str
    answers: tuple[tuple[int, int], ...] | None


Render = Callable[[str, Mapping[str, Any]], Rendered]


def make_render(format: Format, tokenizer: "PreTrainedTokenizerBase", prompt_template: str | None = None) -> Render:
    """Returns a function `(place, row) -> Rendered`; a place, such as "line 7", is for messages.

    Prompts and conversations are rendered with the tokenizer's chat template. Without one, or with a `prompt_template`,
    the text is prompt + response. The default prompt is the instruction and, if there is one, the input, each followed
    by a blank line. In a conversation, every message that is not from the assistant is a prompt.

    Args:
        format: result of `recognise`.
        tokenizer: provides the chat template and the end-of-sequence token.
        prompt_template: format string over the columns of the row, such as "{instruction} {input} ". Only for
            instructions and prompts.

    Raises:
        UserError: if `prompt_template` does not apply to the format or is not a format string.
    """
    if prompt_template is not None:
        _check_template(prompt_template, format)
    if format.is_plain:
        return lambda place, row: Rendered(string_at(row, format.columns[0], place), None)

    if prompt_template is not None:

        def render_template(place: str, row: Mapping[str, Any]) -> Rendered:
            prompt = _fill(prompt_template, row, place)
            response = string_at(row, format.columns[-1], place)
            return Rendered(prompt + response, ((len(prompt), len(prompt) + len(response)),))

        return render_template

    render_messages = _with_chat_template if tokenizer.chat_template else _without_chat_template
    read = _messages if format.kind == "chat" else _pair
    return lambda place, row: render_messages(read(row, format, place), tokenizer, place)


def _check_template(template: str, format: Format) -> None:
    if format.kind not in ("instruction", "prompt"):
        raise UserError(f"prompt_template is for instructions and prompts, but these rows are {format}. Leave it out.")
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"prompt_template={template!r} is not a format string: {error}.") from error
    if not fields or not all(field.isidentifier() for field in fields):
        raise UserError(
            f"prompt_template={template!r}: expected column names in braces, such as "
            f"{''.join('{' + name + '}' for name in format.columns[:-1])!r}."
        )
    if format.columns[-1] in fields:
        raise UserError(f"prompt_template={template!r} contains the response {format.columns[-1]!r}. Leave it out.")


def _fill(template: str, row: Mapping[str, Any], place: str) -> str:
    fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if missing := fields - row.keys():
        raise UserError(
            f"prompt_template: {place} has no column {', '.join(sorted(missing))}. It has: {', '.join(row)}."
        )
    return template.format_map({field: string_at(row, field, place, optional=True) for field in fields})


def _pair(row: Mapping[str, Any], format: Format, place: str) -> list[dict[str, str]]:
    prompt, *inputs, response = format.columns
    text = string_at(row, prompt, place)
    for column in inputs:
        if more := string_at(row, column, place, optional=True):
            text += _SEPARATOR + more
    return [
        {"role": "user", "content": text},
        {"role": "assistant", "content": string_at(row, response, place)},
    ]


def _messages(row: Mapping[str, Any], format: Format, place: str) -> list[dict[str, str]]:
    (column,) = format.columns
    turns = row.get(column)
    where = f"{place}, column {column!r}"
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise UserError(f"{where}: expected a list of messages, got {str(turns)[:60]!r}.")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise UserError(f"{where}: expected a message as a dict, got {str(turn)[:60]!r}.")
        # A file may hold both spellings; columnar readers then fill the absent one with None.
        role, content = (turn.get(new) or turn.get(old) for new, old in (("role", "from"), ("content", "value")))
        if not isinstance(role, str) or not isinstance(content or "", str):
            raise UserError(
                f"{where}: expected role and content (or from and value) to be strings, got {str(turn)[:60]!r}."
            )
        messages.append({"role": _ROLES.get(role, role), "content": content or ""})
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"{where}: no message of role assistant (or gpt), so there is nothing to predict. Roles: {roles}."
        )
    return messages


def _without_chat_template(
    messages: list[dict[str, str]], tokenizer: "PreTrainedTokenizerBase", place: str
) -> Rendered:
    del place
    text, answers = "", []
    for position, message in enumerate(messages):
        start = len(text)
        text += message["content"]
        if message["role"] == "assistant":
            answers.append((start, len(text)))
            # tokenize_rows appends the end-of-sequence token after the last answer, as after a chat template.
            text += str(tokenizer.eos_token or _SEPARATOR) if position < len(messages) - 1 else ""
        else:
            text += _SEPARATOR
    return Rendered(text, tuple(answers))


def _with_chat_template(messages: list[dict[str, str]], tokenizer: "PreTrainedTokenizerBase", place: str) -> Rendered:
    """Locates answers: each begins where the messages before it end, rendered with the generation prompt."""

    def apply(part: list[dict[str, str]], *, prompt: bool) -> str:
        try:
            return render_chat(tokenizer, part, add_generation_prompt=prompt)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error

    text = apply(messages, prompt=False)
    answers = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = apply(messages[:position], prompt=True) if position else ""
        content = message["content"]
        found = text.find(content, len(before))
        if found < 0:
            content = content.strip()
            found = text.find(content, len(before))
        if not text.startswith(before) or found < 0:
            raise UserError(
                f"{place}: the tokenizer's chat template changes the text around message {position}, so the "
                "answer cannot be located. Use single-turn rows, or a chat template that renders the first messages "
                "of a conversation as a prefix of the whole."
            )
        answers.append((len(before) if position else found, found + len(content)))
    return Rendered(text, tuple(answers))
