"""What commands print at their end: every width is kept, no number is cut, and nothing is dropped in silence."""

import re

import pytest
import report_documents
from rich.cells import cell_len

from calibjax.eval.report.command_tables import layer_tables
from calibjax.eval.report.notes import Verdict
from calibjax.eval.report.tables import ABSENT, TextTable, held_out_table
from calibjax.eval.report.terminal import print_report, print_result, result_text

TABLE = TextTable(
    "a title that is longer than the narrowest of terminals",
    ["method", "log loss", "Δ ECE [95% interval]", "parameters of the fit", "NLL"],
    [
        ["temperature scaling of the base model", ".1234", "-.0320 [-.0449, -.0203]", "1,234,567", "2.3281"],
        ["ATS", "inf", "+.0001 [-.0002, +.0003]", "12", ABSENT],
    ],
    order=(4, 1, 2),
)


def printed(capsys, monkeypatch, width, call):
    monkeypatch.setenv("COLUMNS", str(width))
    call()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [*range(45, 100, 5), 240])
def test_no_width_cuts_a_number(capsys, monkeypatch, width):
    lines = printed(capsys, monkeypatch, width, lambda: print_result("A verdict of several words.", TABLE))
    text = "\n".join(lines)
    assert result_text(Verdict("A verdict of several words."), TABLE, width=width) == re.sub("(?m) +$", "", text)
    assert max(map(cell_len, lines)) <= width
    assert "…" not in text
    hidden = re.search(r"Not shown at \d+ columns: ([^.]*)\.", " ".join(text.split()))
    named = hidden[1].split(", ") if hidden else []
    for index, column in enumerate(TABLE.columns[1:], 1):
        assert (column in named) != all(cells[index] in text for cells in TABLE.rows), (column, named)
    shown = [column for column in TABLE.columns if column not in named]
    assert set(shown) >= {"method", "NLL"}, "the most important column is never dropped"
    assert width < 240 or not named


@pytest.mark.parametrize("width", [45, 60, 80, 240])
def test_groups_stand_above_their_rows(capsys, monkeypatch, width):
    """One header, one width for each column, and a long title of a group narrows no column."""
    titles = ["a group with a title of many words", "another"]
    rows = [["ATS", f"{number}.5", "12"] for number in range(4)]
    table = TextTable("", ["method", "NLL", "parameters"], rows, groups=(titles[0], titles[0], titles[1], titles[1]))
    lines = printed(capsys, monkeypatch, width, lambda: print_result("", table))
    assert max(map(cell_len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    places = [text.index(part) for part in ("parameters", titles[0], "0.5", "1.5", titles[1], "2.5", "3.5")]
    assert places == sorted(places)
    assert text.count("parameters") == 1
    rows = [line for line in lines if line.endswith(" 12")]
    assert len(rows) == 4
    assert {line.index("ATS") for line in rows} == {2}
    assert len({(line.index(".5"), len(line)) for line in rows}) == 1


KINDS = {
    "tokens": ("held_out", "transfer"),
    "tasks": ("held_out", "tasks"),
    "layers": ("held_out", "layers", "direction", "sweep", "neurons", "ablation", "subjects"),
    "texts": ("held_out", "texts", "analogies"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_report_fits_a_pipe_of_80_columns(capsys, monkeypatch, kind):
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = report_documents.document(lambda name: f"[/red] {name}")
    document = {name: value for name, value in whole.items() if name in (*KINDS[kind], "schema", "run")}
    print_report(document, files="results in x: report.html")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert lines[-1] == "results in x: report.html"
    assert any("[/red] " in line for line in lines), "names are no markup"
    assert any(line.startswith("ECE, MCE: ") for line in lines) == (kind != "texts")
    if kind in ("tokens", "tasks"):
        table = held_out_table(document)
        assert sorted(table.order) == list(range(1, len(table.columns))), "every column has a rank"
    if kind in ("tasks", "layers"):
        assert "subjects: --subjects prints them" in " ".join(" ".join(lines).split())
        print_report(document, subjects=True)
        text = " ".join(capsys.readouterr().out.split())
        for table in layer_tables(document) if kind == "layers" else ():  # in no file: none is left out
            assert " ".join(table.title.split()) in text
        assert "subjects of" in text or kind == "layers"
