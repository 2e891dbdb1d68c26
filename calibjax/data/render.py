"""Text of a row, with the character ranges of its answers."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any, NamedTuple

from calibjax.data.chat_template import Tokenizer, render_chat, render_chats
from calibjax.data.formats import COLUMNS, SEPARATOR, Conversation, Format, Message, read_conversation, string_at
from calibjax.data.source import Row, is_text, with_names
from calibjax.runtime.errors import UserError


class Rendered(NamedTuple):
    """A text with its answers as half-open character ranges; None if the loss includes all of it."""

    text: str
    answers: tuple[tuple[int, int], ...] | None


def render_row(row: Row, format: Format, tokenizer: Tokenizer, place: str) -> Rendered:
    """Renders a row; its `place`, such as "line 7", is named in errors.

    Prompts and conversations take the given template, or the tokenizer's; without one, blank lines join messages.
    """
    row = with_names(row, format.columns if format.is_plain else COLUMNS)
    if format.is_plain:
        return Rendered(string_at(row, format.columns[0], place), None)
    if format.prompt_template is not None:
        fields = {name for _, name, _, _ in Formatter().parse(format.prompt_template) if name is not None}
        if missing := ", ".join(sorted(fields - row.keys())):
            raise UserError(f"prompt_template: {place} has no column {missing}. It has: {', '.join(row)}.")
        values = {field: string_at(row, field, place, optional=True) for field in fields}
        prompt = format.prompt_template.format_map(values)
        text = prompt + string_at(row, format.columns[-1], place)
        return Rendered(text, ((len(prompt), len(text)),))
    conversation = read_conversation(row, format, place)
    try:
        if tokenizer.chat_template:
            rendered = _Chat(tokenizer, conversation).rendered(format.score_template_text)
        else:
            rendered = _without_chat_template(conversation, tokenizer)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    if not is_text(rendered.text):
        raise UserError(f"{place}: expected Unicode text, got half of a surrogate pair.")
    return rendered


def describe_template(format: Format, tokenizer: Tokenizer) -> str:
    """How `render_row` renders rows, in words; "" for plain text."""
    if format.is_plain:
        return ""
    if format.prompt_template is not None:
        return "rendered with the prompt template that was given"
    if not tokenizer.chat_template:
        return "the model has no chat template: messages are joined by blank lines"
    template = json.dumps(tokenizer.chat_template)
    digest = hashlib.sha256(template.encode()).hexdigest()[:8]
    date = ", which writes today's date: tomorrow's tokens differ" if "strftime_now" in template else ""
    return f"rendered with the model's chat template (SHA-256 {digest}){date}"


def _without_chat_template(conversation: Conversation, tokenizer: Tokenizer) -> Rendered:
    text = ""
    answers = []
    extras = sorted(set(conversation.options).union(*map(_extras, conversation.messages)))
    if extras:
        raise UserError(f"{', '.join(extras)}: only a chat template can write this, and the model has none.")
    for position, message in enumerate(conversation.messages):
        start = len(text)
        text += message["content"]
        if position in conversation.answers:
            answers.append((start, len(text)))
        if message["role"] != "assistant":
            text += SEPARATOR
        elif position < len(conversation.messages) - 1:
            # tokenize_rows appends the end-of-sequence token after the last answer, as after a chat template.
            text += str(tokenizer.eos_token or SEPARATOR)
    return Rendered(text, tuple(answers))


class _Chat:
    """A conversation and its tokenizer's chat template.

    An answer is located by rendering the conversation again with a mark in its place: the rest must be equal.
    """

    def __init__(self, tokenizer: Tokenizer, conversation: Conversation):
        self._tokenizer, self._messages, self._options = tokenizer, conversation.messages, conversation.options
        self._answers = conversation.answers
        self._text = self._render(self._messages)
        marks = (f"answer{number}mark" for number in itertools.count())
        self._mark = next(mark for mark in marks if mark not in self._text)

    def _render(self, messages: list[Message], *, prompt: bool = False) -> str:
        return render_chat(self._tokenizer, messages, add_generation_prompt=prompt, **self._options)

    def rendered(self, score_template_text: bool) -> Rendered:
        """The text with its answers; raises `UserError` if the template leaves out something of the row."""
        self._check_context()
        marked = [self._marked(index) for index in self._answers]
        try:
            skeletons = render_chats(self._tokenizer, marked, add_generation_prompt=False, **self._options)
        except UserError:  # one of them is refused
            skeletons = [""] * len(marked)
        ranges = [self._locate(index, skeleton) for index, skeleton in zip(self._answers, skeletons, strict=True)]
        if score_template_text:
            starts = [self._prompt_end(self._text, index) for index in self._answers]
            pairs = zip(ranges, starts, strict=True)
            ranges = [(min(start, prompt_end or start), end) for (start, end), prompt_end in pairs]
        return Rendered(self._text, tuple(ranges))

    def _check_context(self) -> None:
        """Raises `UserError` if tools, or messages that are not scored, are missing in the text."""
        for name in self._options.keys() & {"tools", "documents"}:
            options = {key: value for key, value in self._options.items() if key != name}
            if render_chat(self._tokenizer, self._messages, add_generation_prompt=False, **options) == self._text:
                raise UserError(f"the model's chat template does not write the {name} of this row. Leave them out.")
        for index, message in enumerate(self._messages):
            if index in self._answers:
                continue
            names = [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
            absent = message["content"].strip() not in self._text
            # A mark shows whether it is written in another form, such as JSON.
            absent = absent and self._mark not in self._render(self._marked(index))
            if absent or not all(name in self._text for name in names):
                raise _changed(index, f"it leaves out text of the role {message['role']!r}")

    def _with(self, index: int, message: Message) -> list[Message]:
        return [*self._messages[:index], message, *self._messages[index + 1 :]]

    def _marked(self, index: int) -> list[Message]:
        return self._with(index, {"role": self._messages[index]["role"], "content": self._mark})

    def _locate(self, index: int, skeleton: str) -> tuple[int, int]:
        """Locates one answer, text or a tool call: what stands where the mark stands in the skeleton."""
        marked = self._marked(index)
        # Without the call that it answers, a tool's message may be refused: then the messages up to the answer.
        for stop, rendered in ((len(marked), skeleton), (index + 1, "")):
            try:
                text = self._text if stop == len(marked) else self._render(self._messages[:stop])
                before, *after = (rendered or self._render(marked[:stop])).split(self._mark)
            except UserError:
                continue
            if len(after) != 1 or not self._text.startswith(text) or not text.endswith(after[0]):
                continue
            start, end = len(before), len(text) - len(after[0])
            if not text.startswith(before) or start > end:
                bare = before.rstrip()  # some templates write a space or a line end before text only
                starts = [self._prompt_end(text, index), len(bare) if text.startswith(bare) else None]
                start = next((start for start in starts if start is not None and start <= end), None)
            if start is not None:
                self._check_answer(index, text[start:end])
                return start, end
        raise _changed(index, "it changes the text around it")

    def _check_answer(self, index: int, written: str) -> None:
        """Raises `UserError` if the text of an answer, as it is written, leaves out or rewrites a part of it."""
        message = self._messages[index]
        for key in _extras(message):
            others = {name: value for name, value in message.items() if name != key}
            if self._render(self._with(index, others)) == self._text:
                raise _changed(index, f"it leaves out or rewrites the {key}")
        if missing := _missing(message, written):
            raise _changed(index, f"it leaves out or rewrites the {missing[0]}")

    def _prompt_end(self, text: str, index: int) -> int | None:
        """The length of the text up to the end of the generation prompt of a message; None if there is none."""
        if not index:
            return None
        try:
            prompt = self._render(self._messages[:index], prompt=True)
            writes_prompt = prompt != self._render(self._messages[:index])
        except UserError:
            return None
        return len(prompt) if writes_prompt and text.startswith(prompt) else None


def _extras(message: Message) -> list[str]:
    return [key for key in ("reasoning", "reasoning_content", "thinking", "refusal", "tool_calls") if message.get(key)]


def _missing(message: Message, written: str) -> list[str]:
    """The fields of a message that a text does not hold, white space and the escapes of JSON aside."""
    written = "".join(written.split())

    def variants(text: str) -> set[str]:
        return {"".join(form.split()) for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])}

    def is_written(text: str) -> bool:
        return any(form in written for form in variants(text))

    if extras := _extras(message):
        return [key for key in ("content", *extras) if not all(map(is_written, _strings(message[key])))]
    return [] if written in variants(message["content"]) else ["content"]


def _strings(value: Any) -> Iterator[str]:
    """The strings in a field of a message; of tool calls those of the functions, without ids and types."""
    if isinstance(value, str):
        yield value
    if isinstance(value, Mapping):
        value = [value["function"]] if "function" in value else list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _strings(entry)


def _changed(index: int, reason: str) -> UserError:
    hint = "Change the row, or give the message weight 0, so that it is not scored."
    return UserError(f"the model's chat template does not write message {index} as in the row: {reason}. {hint}")
