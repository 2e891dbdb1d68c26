"""Tokenising: the ids are the tokenizer's own, and the mask covers the answers and what ends them."""

import logging

import numpy as np
import pytest
from assets import tokenizer_of
from tiny import CHATML, character_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from calibjax.data import examples as examples_module
from calibjax.data import recognise, tokenize_rows
from calibjax.data.examples import _find_answers
from calibjax.data.render import Rendered
from calibjax.runtime.errors import UserError

TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello you"},
    {"role": "assistant", "content": "hi\nthere"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def tokenize(rows, tokenizer, text_column=None, **options):
    return list(tokenize_rows(rows, recognise(rows, text_column, **options), tokenizer))


def show(example, tokenizer):
    """The text, with what is to be predicted in brackets."""
    pieces = tokenizer.convert_ids_to_tokens(example.tokens.tolist())
    text = "".join(f"[{piece}]" if masked else piece for piece, masked in zip(pieces, example.loss_mask, strict=True))
    return text.replace("][", "")


def test_plain_text_is_the_tokenizers_own(caplog):
    tokenizer = tokenizer_of("stories260K")
    texts = ["Once upon a time", "", "word " * 400, *map(str, range(2500))]
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").addHandler(caplog.handler)
        examples = tokenize([{"text": text} for text in texts], tokenizer)
    assert caplog.text == ""  # no "sequence length is longer than the maximum"
    assert [example.row for example in examples] == list(range(len(texts)))
    for text, example in zip(texts, examples, strict=True):
        assert example.tokens.dtype == np.int32
        assert example.tokens.tolist() == tokenizer(text, verbose=False)["input_ids"]
        assert example.loss_mask.tolist() == [False] + [True] * (len(example.tokens) - 1)


ADD = {"instruction": "Add", "input": "1+1", "output": "two"}


@pytest.mark.parametrize(
    ("row", "template", "eos", "expected"),
    [
        (ADD, None, "</s>", "Add\n\n1+1\n\n[two</s>]"),
        ({"System": "be", "Instruction": "Add", "INPUT ": "1", "output": "x"}, None, None, "be\n\nAdd\n\n1\n\n[x]"),
        ({"instruction": "Sing", "input": None, "output": "la"}, None, "</s>", "Sing\n\n[la</s>]"),
        (ADD | {"tone": "dry"}, "({tone}) {instruction}: {input}\n", "</s>", "(dry) Add: 1+1\n[two</s>]"),
        ({"messages": [{"role": "assistant", "content": "la"}]}, None, "</s>", "l[a</s>]"),
        ({"messages": TURNS}, None, "</s>", "be kind\n\nhello you\n\n[hi\nthere</s>]bye\n\n[so long</s>]"),
        ({"messages": TURNS[1:]}, None, None, "hello you\n\n[hi\nthere]\n\nbye\n\n[so long]"),
    ],
)
def test_without_chat_template(row, template, eos, expected):
    tokenizer = character_tokenizer(eos=eos)
    (example,) = tokenize([row], tokenizer, prompt_template=template)
    assert show(example, tokenizer) == expected


def test_with_chat_template():
    """An answer without a question, an input that the first row lacks, and a prompt template in place of the chat's."""
    tokenizer = character_tokenizer(CHATML)
    answer = [{"instruction": "Sing", "output": "la"}, {"instruction": "Add", "input": "1", "output": " x "}]
    chat = "<|im_start|>assistant\n[hi\nthere<|im_end|>]\n<|im_start|>user\nbye<|im_end|>\n"
    for rows, options, expected in (
        ([{"messages": TURNS[2:4]}], {}, chat),
        (answer, {}, "<|im_start|>user\nAdd\n\n1<|im_end|>\n<|im_start|>assistant\n[ x <|im_end|>]\n"),
        (answer, {"prompt_template": "{instruction}="}, "Add=[ x </s>]"),
    ):
        *_, example = tokenize(rows, tokenizer, **options)
        assert show(example, tokenizer) == expected


def test_spaces_where_a_tokenizer_trims_offsets():
    """As Pythia's does: a space is scored where the answer holds it, and only there."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate([*characters, "</s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    (example,) = tokenize([{"prompt": "Add ", "response": " x "}], tokenizer, prompt_template="{prompt}")
    assert show(example, tokenizer) == "AddĠ[ĠxĠ</s>]"


def test_chat_template_of_a_real_model():
    tokenizer = tokenizer_of("craftgpt-5M")
    rows = [{"messages": TURNS[1:3]}, {"messages": TURNS[1:]}]
    one, two = tokenize(rows, tokenizer)
    # Its format: 0, prompt, 1, answer, 0, ...: the token that begins a turn also ends the one before.
    answer = tokenizer("hi\nthere", add_special_tokens=False)["input_ids"]
    assert one.tokens.tolist() == [0, *tokenizer("hello you")["input_ids"], 1, *answer, 0]
    assert one.loss_mask.tolist() == [False] * 4 + [True] * (len(answer) + 1)
    bye, last = tokenizer(["bye", "so long"])["input_ids"]
    assert two.tokens.tolist() == [*one.tokens.tolist(), *bye, 1, *last, 0]
    assert two.loss_mask.tolist() == one.loss_mask.tolist() + [False] * (len(bye) + 1) + [True] * (len(last) + 1)


@pytest.mark.parametrize("name", ["stories260K", "tinystories-656k", "baby-llama-105"])
def test_mask_with_real_tokenizers(name):
    """The masked tokens decode to the answer, also where bytes and made-up spaces have no width of their own."""
    tokenizer = tokenizer_of(name)
    (example,) = tokenize([{"prompt": "Who is there", "response": "It is I, the cat."}], tokenizer)
    masked = example.tokens[example.loss_mask]
    assert masked[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(masked[:-1]).replace("<unk>", "I").strip() == "It is I, the cat."
    assert example.tokens[:-1].tolist() == tokenizer("Who is there\n\nIt is I, the cat.")["input_ids"]


def test_tokens_without_width():
    """A begin token at the very start is not of the answer; a space made up before the answer is."""
    offsets = np.array([(0, 0), (0, 2), (2, 2), (2, 4), (4, 5)])
    _, mask = _find_answers(Rendered("Q:yes", ((2, 5),)), np.array([1, 5, 6, 7, 8]), offsets, {1, 2}, None)
    assert mask.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt", "not a format string"),
        ("{}", "expected columns in braces, as {prompt}"),
        ("{prompt}{response}", "contains the response"),
        ("{question}", "row 0 .* has no column question. It has: prompt, response"),
    ],
)
def test_bad_prompt_template(template, message, monkeypatch):
    with pytest.raises(UserError, match=message):
        tokenize([{"prompt": "a", "response": "b"}], character_tokenizer(), prompt_template=template)
    with pytest.raises(UserError, match="score_template_text: no chat template"):
        tokenize([{"prompt": "a", "response": "b"}], character_tokenizer(), score_template_text=True)
    with pytest.raises(UserError, match="rows are plain text"):
        tokenize([{"text": "a"}], character_tokenizer(), prompt_template="{text}")
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(UserError, match="not a fast tokenizer"):
        tokenize([{"prompt": "a", "response": "b"}], character_tokenizer())


@pytest.mark.parametrize("name", ["stories260K", "tinystories-656k", "craftgpt-5M"])
def test_long_texts_are_tokenised_in_parts(name, monkeypatch):
    """The tokens are those of the whole text, with special tokens; a limit gives its first tokens."""
    tokenizer = tokenizer_of(name)
    text = " ".join(f"Once upon a time, there were {n} cats\nand \u00e9\U0001f600 dogs." for n in range(1500))
    answer = text[len(text) // 2 :]
    monkeypatch.setattr("calibjax.data.examples._PART", 4096)
    monkeypatch.setattr("calibjax.data.examples._OVERLAP", 256)
    whole = tokenizer(text, verbose=False)["input_ids"]
    calls, real = [], examples_module._encode

    def encode(rendered, *args, **options):
        calls.extend(len(item.text) for item in rendered)
        return real(rendered, *args, **options)

    monkeypatch.setattr(examples_module, "_encode", encode)
    (example,) = tokenize([{"text": text}], tokenizer)
    assert example.tokens.tolist() == whole
    assert max(calls) <= 4096
    (short,) = tokenize_rows([{"text": text}], recognise([{"text": text}]), tokenizer, max_tokens=999)
    assert short.tokens.tolist() == whole[:999]
    (pair,) = tokenize([{"prompt": "Who?", "response": answer}], tokenizer)
    monkeypatch.undo()
    (expected,) = tokenize([{"prompt": "Who?", "response": answer}], tokenizer)
    assert pair.tokens.tolist() == expected.tokens.tolist()
    assert pair.loss_mask.tolist() == expected.loss_mask.tolist()


def test_a_long_text_without_a_boundary(monkeypatch):
    """A word as long as the text: there is no place to join parts at."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    monkeypatch.setattr("calibjax.data.examples._PART", 4096)
    (example,) = tokenize([{"text": "a" * 20_000 + " b"}], fast)
    assert example.tokens.tolist() == [0, 0]


def test_a_text_that_begins_with_the_token_that_is_added_is_named(caplog):
    """The model would read it twice, which no metric shows."""
    rows = [{"text": "Once"}, {"text": "<s>Once"}, {"text": "<s>upon"}]
    first, second, _ = tokenize_rows(rows, recognise(rows), tokenizer_of("stories260K"))
    assert caplog.text.count("row 1 begins with <s>, and the tokenizer adds it: the model reads it twice") == 1
    assert second.tokens[:2].tolist() == [first.tokens[0]] * 2
