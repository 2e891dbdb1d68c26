"""Text that users see is written in the words of the field: docstrings and strings of the library, and the pages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = (  # pattern, what to write instead
    (r"tru(er|est)\b|how true\b", "better calibrated"),
    (r"(surer|surest|how sure|for sure)\b", "more confident; significantly"),
    (r"trusts? (it|them)sel(f|ves)\b", "is overconfident"),
    (r"over-confiden(t|ce)\b", "overconfident"),
    (r"(models?|predictions?|fits) as (it is|they are)\b", "the base model; uncalibrated"),
    (r"single temperatures?\b", "temperature scaling"),
    (r"(go|goes|going|gone|went) on (where|from|after)\b|gone on with\b", "resume"),
    (r"mistakes? of (yours|the user)", "invalid input"),
    (r"(a|the) share of|shares of\b", "fraction of"),
    (r"less (the )?`?temperature\b", "Δ against; minus"),
    (r"(is|are) told\b", "is given; logs; reports"),
    (r"mend(s|ed|ing)?\b", "corrects"),
    (r"(packed|training|held-out|each|every) windows?\b|(?<!sliding )windows of (text|\d)", "sequence"),
)
PAGES = [
    file
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/**/*.md",
        "docs/notebooks/*.ipynb",
        "kernels/README.md",
        "[et]*/*.md",
    )
    for file in sorted(ROOT.glob(pattern))
]


def banned_in(text: str) -> list[str]:
    words = " ".join(text.split())
    return [
        f"{words[max(0, found.start() - 30) : found.end() + 20]!r}: write {instead!r}"
        for pattern, instead in BANNED
        for found in re.finditer(rf"(?<![\w-])(?:{pattern})", words, flags=re.IGNORECASE)
    ]


def test_the_list_finds_words_and_nothing_else():
    assert "better calibrated" in banned_in("ATS is truer than before")[0]
    fine = "sliding windows of attention; each process reads its share of the tensors; true positives; recommended"
    assert not banned_in(fine)


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
