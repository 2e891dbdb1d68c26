"""Text that users see is written in the words of the field: docstrings and strings of the library, and the pages."""

import ast
import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import calibjax

ROOT = Path(__file__).parents[1]
BANNED = (
    # pattern, what to write instead, an example
    (r"tru(er|est)\b|how true\b", "better calibrated", "ATS is truer than before"),
    (r"(surer|surest|how sure|for sure)\b", "more confident; significantly", "how sure the model is"),
    (r"trusts? (it|them)sel(f|ves)\b", "is overconfident", "the model trusts itself too much"),
    (r"over-confiden(t|ce)\b", "overconfident", "an over-confident decoder"),
    (
        r"(models?|predictions?|fits) as (it is|they are)\b",
        "the base model; uncalibrated",
        "the model as it is",
    ),
    (r"single temperatures?\b", "temperature scaling", "ATS and a single temperature"),
    (
        r"(go|goes|going|gone|went) on (where|from|after)\b|gone on with\b",
        "resume",
        "it goes on where it was",
    ),
    (r"mistakes? of (yours|the user)", "invalid input", "exit code 2: a mistake of yours"),
    (r"(a|the) share of|shares of\b", "fraction of", "the share of tokens that are right"),
    (r"less (the )?`?temperature\b", "Δ against; minus", "ECE less temperature"),
    (r"(is|are) told\b", "is given; logs; reports", "until it is told to stop"),
    (r"mend(s|ed|ing)?\b", "corrects", "one temperature mends most of it"),
    (
        r"(packed|training|held-out|each|every) windows?\b|(?<!sliding )windows of (text|\d)",
        "sequence",
        "480 windows of 128 tokens",
    ),
)
FINE = (
    "sliding windows of attention",
    "heads share one forward pass; each process reads its share of the tensors",
    "true positives; make sure that it is finite",
    "the target is unchanged as it is computed once",
    "recommended",
)
PAGES = [
    file
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/**/*.md",
        "kernels/README.md",
        "[et]*/*.md",
    )
    for file in sorted(ROOT.glob(pattern))
]


def banned_in(text: str) -> list[str]:
    words = " ".join(text.split())
    return [
        f"{words[max(0, found.start() - 30) : found.end() + 20]!r}: write {instead!r}"
        for pattern, instead, _ in BANNED
        for found in re.finditer(rf"(?<![\w-])(?:{pattern})", words, flags=re.IGNORECASE)
    ]


def test_the_list_finds_its_examples_and_nothing_else():
    for pattern, instead, example in BANNED:
        assert any(instead in line for line in banned_in(example)), pattern
    assert not [line for text in FINE for line in banned_in(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page):
    assert not banned_in(page.read_text())


def test_strings_of_the_library():
    found = []
    for file in sorted((ROOT / "calibjax").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [f"{file.relative_to(ROOT)}:{node.lineno}: {line}" for line in banned_in(node.value)]
    assert not found, "\n".join(found)


def test_options_say_sequences():
    names = set()
    modules = (module.name for module in pkgutil.walk_packages(calibjax.__path__, "calibjax."))
    for module in modules:
        if module.startswith("calibjax.torch"):  # has no options, and needs torch
            continue
        for name, value in vars(importlib.import_module(module)).items():
            if name.endswith("Options") and dataclasses.is_dataclass(value):
                names |= {field.name for field in dataclasses.fields(value)}
    assert {"full_sequences", "seq_len", "epochs"} <= names
    assert not [name for name in names if "window" in name]
