"""Chat templates are programs of strangers: rendered as transformers does, and stopped where they do not end."""

import datetime
import time

import pytest
from tiny import CHATML, character_tokenizer

from calibjax.data import chat_template
from calibjax.data.chat_template import render_chat
from calibjax.runtime.errors import UserError

TURNS = [{"role": "user", "content": "hello you"}, {"role": "assistant", "content": "hi\nthere"}]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ eos_token }}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_equals_transformers(template, prompt):
    tokenizer = character_tokenizer(template)
    day = {} if "tojson" in template else {"day": datetime.date(2026, 1, 2)}  # of Parquet, which no template writes
    turns = [*TURNS, {"role": "user", "content": "\ud800 \u2028 \N{SNOWMAN}\n", **day}]
    expected = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    assert render_chat(tokenizer, turns, add_generation_prompt=prompt) == expected


LOOPS = {
    "doubled text": "{% set n = namespace(x='x' * 99999) %}{% for i in range(99999) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "a long text": "{{ 'x' * 10 ** 10 }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep nesting": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nested ranges": "{% for a in range(9999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
}


def refused(template):
    began = time.monotonic()
    with pytest.raises(UserError, match=r"chat template (was stopped: it took more than|rejects)"):
        render_chat(character_tokenizer(template), TURNS[:1])
    assert time.monotonic() - began < 300  # on a busy machine another process takes its time to start


def test_templates_that_do_not_end(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    for template in LOOPS.values():
        refused(template)


@pytest.mark.slow
def test_one_built_in_that_does_not_end(monkeypatch):
    """No signal and no exception of another thread reaches it."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    refused("{{ 7 ** (10 ** 9) }}")
    assert "hello you" in render_chat(character_tokenizer(CHATML), TURNS[:1]), "another process renders the next one"
