"""Recognising formats by their columns."""

import pytest

from calibjax.data import Format, Rows, recognise
from calibjax.data.formats import string_at
from calibjax.runtime.errors import UserError


@pytest.mark.parametrize(
    ("columns", "kind", "used"),
    [
        (["id", "text"], "text", ["text"]),
        (["content"], "text", ["content"]),
        (["instruction", "input", "output", "text"], "instruction", ["instruction", "input", "output"]),
        (["instruction", "output"], "instruction", ["instruction", "output"]),
        (["instruction", "context", "response"], "instruction", ["instruction", "context", "response"]),
        (["prompt", "completion"], "prompt", ["prompt", "completion"]),
        (["question", "answer"], "prompt", ["question", "answer"]),
        (["prompt", "output"], "prompt", ["prompt", "output"]),
        (["messages", "prompt", "response"], "chat", ["messages"]),
        (["conversations"], "chat", ["conversations"]),
    ],
)
def test_recognised(columns, kind, used):
    assert recognise([dict.fromkeys(columns, "x")]) == Format(kind, tuple(used))


def test_documents_and_text_column():
    rows = Rows([{"text": "x", "title": "y"}], "name", documents=True)
    assert recognise(rows).kind == "document"
    assert recognise(rows, "title") == Format("document", ("title",))
    assert recognise([{"instruction": "x", "output": "y"}], "output") == Format("text", ("output",))


def test_errors_list_what_is_there():
    with pytest.raises(UserError, match=r"no format fits the columns alpha, beta\. Expected chat .*text_column"):
        recognise([{"alpha": 1, "beta": 2}])
    with pytest.raises(UserError, match=r"text_column='txt' is missing. The columns are: alpha, beta"):
        recognise([{"alpha": 1, "beta": 2}], "txt")
    with pytest.raises(UserError, match="holds no rows"):
        recognise([])


def test_entries():
    assert string_at({"text": "x"}, "text", "line 1") == "x"
    assert string_at({"text": None}, "text", "line 1", optional=True) == ""
    with pytest.raises(UserError, match=r"line 7.*'text': expected a string, got int '3'"):
        string_at({"text": 3}, "text", "line 7")
    with pytest.raises(UserError, match=r"line 7.*got nothing"):
        string_at({}, "text", "line 7")
    with pytest.raises(UserError, match=r"line 7, column 'text': expected Unicode text, got half of a surrogate pair"):
        string_at({"text": "a\ud800"}, "text", "line 7")


def test_description():
    assert str(Format("text", ("text",))) == "plain text (column text)"
    assert str(Format("prompt", ("question", "answer"))) == "prompts with responses (columns question, answer)"
