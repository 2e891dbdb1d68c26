"""Chat templates of many shapes: what is scored is what the assistant says and what ends its turn, and nothing else."""

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny import SPECIAL_TOKENS, character_tokenizer

from calibjax.data import recognise, tokenize_rows
from calibjax.runtime.errors import UserError

CASES = Path(__file__).parent / "cases" / "chats"


class Shape(NamedTuple):
    """A template, and by hand what it writes after a message of the assistant, and of its content."""

    template: str
    end: str
    content: str = "as is"
    empty_thinking: bool = False


def turns(body, prompt=""):
    end = "{% if add_generation_prompt %}" + prompt + "{% endif %}" if prompt else ""
    return "{% for m in messages %}" + body + "{% endfor %}" + end


def either(user, assistant, prompt=""):
    return turns("{% if m.role == 'user' %}" + user + "{% else %}" + assistant + "{% endif %}", prompt)


C = "{{ m['content'] }}"
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set content, thought = m.content, m.reasoning_content or '' %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first or content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IM = "<|im_end|>\n"
SHAPES = {
    "chatml": Shape(turns("<|im_start|>{{ m.role }}\n" + C + "<|im_end|>\n", "<|im_start|>assistant\n"), IM),
    "vicuna": Shape(either("USER: " + C + " ", "ASSISTANT: " + C + "</s>"), "</s>"),
    "role and colon": Shape(turns("{{ m.role + ': ' + m.content }}\n"), "\n"),
    "llama 2": Shape(either("<s>[INST] {{ m.content }} [/INST]", " {{ m.content | trim }} </s>"), " </s>", "strip"),
    "nothing but text": Shape(either(C + "\n", C + "</s>"), "</s>"),
    "json": Shape(turns('{"{{ m.role }}": {{ m.content | tojson }}}</s>'), '"}</s>', "json"),
    "an end before the next header": Shape(
        turns("{% if not loop.first %}<|endoftext|>{% endif %}{{ m.role }}>" + C) + "<|endoftext|>", "<|endoftext|>"
    ),
    "numbered turns": Shape(turns("[{{ m.role }}] " + C + " [end of {{ m.role }}]</s>"), " [end of assistant]</s>"),
    "qwen 3": Shape(QWEN3, IM, empty_thinking=True),
    "reasoning removed": Shape(
        either("<|user|>" + C, "<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>", "<|assistant|><think>\n"),
        "<|end|>",
    ),
    "last message without end": Shape(
        turns("{{ m.role }}: {{ m.content }}{% if not loop.last %}</s>{% endif %}", "assistant: "), "</s>"
    ),
    "spaces around": Shape(
        either("<|user|>  {{ m.content }}\n\n", "<|assistant|>  {{ m.content.rstrip() }}  </s>\n", "<|assistant|>  "),
        "  </s>\n",
        "rstrip",
    ),
}
WRITTEN = {"as is": str, "strip": str.strip, "rstrip": str.rstrip, "json": lambda text: json.dumps(text)[1:-1]}
PIECES = (
    *("t", "a", "user", "assistant", "ASSISTANT:", "### Assistant:", "model", "content", " ", "\n", "hi there"),
    *('"', "{{ 1 }}", "{% if", "[", "]", "<think>", "[end of assistant]", "answer0mark", "\\", "0", "think", ":", ">"),
)


def random_text(rng):
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(6)))


def scored_runs(example, tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(example.tokens.tolist())
    text = "".join(f"\0{piece}\1" if scored else piece for piece, scored in zip(pieces, example.loss_mask, strict=True))
    return [part.split("\0")[1] for part in text.replace("\1\0", "").split("\1")[:-1]]


def tokenize(rows, tokenizer, **options):
    return list(tokenize_rows(rows, recognise(rows, **options), tokenizer))


@pytest.mark.parametrize("name", SHAPES)
def test_scored_tokens_are_the_answers_and_their_ends(name):
    """The oracle writes each conversation by hand, from the shape's texts and without its template."""
    shape, rng = SHAPES[name], random.Random(name)
    tokenizer = character_tokenizer(shape.template)
    rows, expected = [], []
    for _ in range(40):
        messages, runs, turns = [], [], rng.randrange(1, 4)
        for turn in range(turns):
            user, answer = "q" + random_text(rng), random_text(rng)
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            written, after = WRITTEN[shape.content](answer), shape.end
            if shape.empty_thinking and turn == turns - 1:
                written = written.lstrip("\n")
            end = after.strip() if after.strip() in SPECIAL_TOKENS else ""
            runs += [written, end] if after.startswith(" ") else [written + end]
        rows.append({"messages": messages})
        expected.append([run for run in runs if run])
    for row, example, runs in zip(rows, tokenize(rows, tokenizer), expected, strict=True):
        assert scored_runs(example, tokenizer) == runs, row
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert example.tokens[: len(ids)].tolist() == ids


@pytest.mark.parametrize("file", sorted(CASES.glob("*.json")), ids=lambda file: file.stem)
def test_case(file):
    """Conversations of public bug reports: what is scored, or the refusal."""
    case = json.loads(file.read_text())
    tokenizer = character_tokenizer(case["template"], case.get("eos", "</s>"))
    if "error" in case:
        with pytest.raises(UserError, match=f"row 0 .*{re.escape(case['error'])}.*skip_broken"):
            tokenize([case["row"]], tokenizer)
        return
    (example,) = tokenize([case["row"]], tokenizer)
    assert scored_runs(example, tokenizer) == case["scored"]
    if "text" in case:
        assert "".join(tokenizer.convert_ids_to_tokens(example.tokens)) == case["text"]


HERMES = turns(
    "<|im_start|>{{ m.role }}\n" + C + "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
)
MISTRAL_CALLS = either(
    "[INST] " + C + "[/INST]",
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}]</s>'
    "{% else %} {{ m.content }}</s>{% endif %}",
)
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}
CALL = {"name": "weather", "arguments": {"city": 'Paris "sur Seine"'}}
WRITTEN_CALL = '{"name": "weather", "arguments": {"city": "Paris \\"sur Seine\\""}}'


FORMS = {
    "object": {"tool_calls": [{"type": "function", "function": CALL}]},
    "JSON string": {"tool_calls": [{"id": "1", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}]},
    "old": {"function_call": CALL},
    "of a column": {"tool_calls": [{"id": None, "function": CALL | {"arguments": {"day": None} | CALL["arguments"]}}]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, f"<tool_call>{WRITTEN_CALL}</tool_call><|im_end|>"),
        (MISTRAL_CALLS, f"[TOOL_CALLS] [{WRITTEN_CALL}]</s>"),
        (QWEN3, f"<tool_call>\n{WRITTEN_CALL}\n</tool_call><|im_end|>"),
    ],
)
def test_tool_calls_are_scored_as_the_template_writes_them(template, expected, form):
    absent = {"tool_calls": None, "weight": None} if form == "of a column" else {}  # as columnar files fill it
    user, assistant = {"role": "user", "content": "now?", **absent}, {"role": "assistant", "content": None}
    assistant |= FORMS[form]
    tokenizer = character_tokenizer(template)
    (example,) = tokenize([{"messages": [user, assistant, user, {**assistant, "weight": 0}]}], tokenizer)
    assert scored_runs(example, tokenizer) == [expected]


def test_reasoning_is_scored_where_the_template_writes_it():
    tokenizer = character_tokenizer(QWEN3)
    for change in ({"reasoning_content": "I think"}, {"content": "<think>I think</think>yes"}):
        message = ANSWER | change
        (example,) = tokenize([{"messages": [USER, message]}], tokenizer)
        assert scored_runs(example, tokenizer) == ["<think>\nI think\n</think>\n\nyes<|im_end|>"]
        with pytest.raises(UserError, match=r"does not write message 1 .*(reasoning_content|content).*weight 0"):
            tokenize([{"messages": [USER, message, USER, ANSWER]}], tokenizer)
        (example,) = tokenize([{"messages": [USER, {**message, "weight": 0}, USER, ANSWER]}], tokenizer)
        assert scored_runs(example, tokenizer) == ["yes<|im_end|>"]


def test_text_of_the_template_before_an_answer():
    """An empty block of reasoning is not what the assistant said; an option scores it."""
    row, tokenizer = {"prompt": "q", "response": "yes"}, character_tokenizer(QWEN3)
    for option, expected in ((False, "yes<|im_end|>"), (True, "<think>\n\n</think>\n\nyes<|im_end|>")):
        (example,) = tokenize([row], tokenizer, score_template_text=option)
        assert scored_runs(example, tokenizer) == [expected]


def test_parts_system_and_variables_of_the_template():
    template = "{% if tools %}tools: {{ tools | tojson }} {% endif %}{% if loud %}loud {% endif %}" + HERMES
    tokenizer = character_tokenizer(template)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    row = {"conversations": [{"role": role, "content": parts} for role in ("user", "assistant")]}
    row |= {"tools": json.dumps(tools), "chat_template_kwargs": {"loud": True}}
    system = {"role": "system", "content": "Be kind."}
    chat = {"conversations": [system, *row["conversations"]], "system_prompt": "Be kind."}
    messages = [system, *({"role": role, "content": "one two"} for role in ("user", "assistant"))]
    expected = tokenizer.apply_chat_template(messages, tools=tools, loud=True)["input_ids"]
    for more in ({"system": "Be kind."}, {"system_prompt": "Be kind."}, chat):
        (example,) = tokenize([row | more], tokenizer)
        assert tokenizer.decode(example.tokens) == tokenizer.decode(expected)
        assert scored_runs(example, tokenizer) == ["one two<|im_end|>"]
    row = {"prompt": "one two", "response": "one two", "chat_template_kwargs": {"loud": True}, "documents": "x"}
    (example,) = tokenize([row | {"System Prompt": "Be kind."}], tokenizer)
    expected = tokenizer.apply_chat_template(messages, loud=True)["input_ids"]
    assert tokenizer.decode(example.tokens) == tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (QWEN3.replace("tool_calls", "no_calls"), "rewrites the tool_calls"),
        (None, "tool_calls: only a chat template can write this"),
    ],
)
def test_calls_that_a_template_cannot_write_are_refused(template, message):
    with pytest.raises(UserError, match=rf"row 0 .*{message}.*skip_broken"):
        tokenize([{"messages": [USER, ANSWER | FORMS["object"]]}], character_tokenizer(template))
