"""Recognising formats by their columns."""

import pytest

from calibjax.data import Format, Rows, recognise
from calibjax.runtime.errors import UserError


@pytest.mark.parametrize(
    ("columns", "kind", "used"),
    [
        (["id", "text"], "text", ["text"]),
        (["instruction", "input", "output", "text"], "instruction", ["instruction", "input", "output"]),
        (["instruction", "context", "response"], "instruction", ["instruction", "context", "response"]),
        (["prompt", "completion"], "prompt", ["prompt", "completion"]),
        (["question", "output"], "prompt", ["question", "output"]),
        (["type", "query", "original_question", "response"], "prompt", ["query", "response"]),  # MetaMathQA
        (["question", "context", "answer"], "prompt", ["question", "context", "answer"]),
        (["question", "passage", "answer"], "prompt", ["question", "passage", "answer"]),
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
    with pytest.raises(UserError, match=r"no format fits .* alpha, beta\. Expected one of messages, .*--text-column"):
        recognise([{"alpha": 1, "beta": 2}])
    with pytest.raises(UserError, match=r"text_column='txt' is missing. The columns are: alpha, beta"):
        recognise([{"alpha": 1, "beta": 2}], "txt")
    question = {"question": "Who?", "answer": "B"}
    for choices in ({"choices": ["I", "you"]}, {"Options": {"A": "I", "B": "you"}}, {"A": "I", "B": "you"}):
        assert recognise([question | choices], prompt_template="{question}").kind == "prompt"
        with pytest.raises(UserError, match=r"multiple choice.*`eval layers` reads"):
            recognise([question | choices])
