"""The report in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from calibjax.eval.report.parts import parts_of
from calibjax.eval.report.rows import NARROW, SHORT, binning, cells_of, described, remarks, sets_of, unit_of, verdict
from calibjax.eval.report.studies import study_tables

_WIDEST = 240  # of the table of a benchmark: a narrower terminal breaks lines, and loses nothing


def table(results: Mapping[str, Any], title: str) -> Table:
    """The figures of one set of sequences as a `rich` table, one row per method."""
    titles, rows = cells_of(results, SHORT if "confidence" in results else NARROW)
    return _table(f"{title}: {described(results)}", titles, rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    out = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        out.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for cells in rows:
        out.add_row(*cells)
    return out


def print_report(document: Mapping[str, Any]) -> None:
    """Prints the verdict and the table of every set, and what else the run found, to standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)  # names of files may hold brackets
    if not console.is_terminal:
        console.width = 160 if "layers" in document else 120  # a file or a pipe has no width of its own
    if "tasks" in document:
        console.width = max(console.width, _WIDEST)
    parts = parts_of(document)
    for part in parts:
        for rows in part.tables:
            console.print(_table(*rows))
    for title, results in sets_of(document):
        line = verdict(results)
        if line:
            console.print(line, style="bold red" if line.startswith("WARNING") else "bold")
        console.print(table(results, title))
        for line in remarks(results):
            console.print(line)
        some = next(iter(results["methods"].values()))["ece"]
        of = ("top token's probability", "top token") if unit_of(results) == "tokens" else ("confidence", "answer")
        console.print(
            f"ECE, MCE: {some['bins']} equal-width bins {binning(some['closed'])} of the {of[0]}; "
            f"interval: of the population's ECE in these bins, over {results.get('clusters', 'windows')}. "
            f"Brier: of the {of[1]}.",
            style="dim",
        )
    for part in parts:
        for line in part.findings:
            console.print(line, style="bold")


def print_study(document: Mapping[str, Any]) -> None:
    """Prints the question of a study and its tables to standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    console.print(document["question"], style="bold")
    for of_study in study_tables(document):
        console.print(_table(*of_study))
    console.print(
        f"Means over seeds ({document['run']['seeds']}), ± half their range; [95% intervals]: over sequences, "
        f"the fits as they are. ECE: {document['bins']} equal-width bins {binning(document['closed'])} of the top "
        "token's probability. + lower (better) than the row compared with, - higher: the interval of the difference "
        "leaves out 0 (paired, not corrected for the number of rows).",
        style="dim",
    )
