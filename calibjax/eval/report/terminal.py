"""The report in the terminal."""

from rich.console import Console
from rich.table import Table

from calibjax.eval.report.parts import parts_of
from calibjax.eval.report.rows import NARROW, SHORT, binning, cells_of, described, remarks, sets_of, unit_of
from calibjax.eval.report.schema import AnySet, Document, StudyDocument
from calibjax.eval.report.studies import study_tables
from calibjax.eval.report.verdicts import set_verdict, study_verdict, verdict

_WIDEST = 240  # the table of a benchmark; a narrower terminal wraps its lines


def table(results: AnySet, title: str) -> Table:
    """The figures of one set as a `rich` table, one row per method."""
    titles, rows = cells_of(results, SHORT if "confidence" in results else NARROW)
    return _table(f"{title}: {described(results)}", titles, rows)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    out = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        out.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for cells in rows:
        out.add_row(*cells)
    return out


def print_report(document: Document) -> None:
    """Prints the verdict, the tables of every set and part, and the findings, to standard output."""
    console = _console(160 if "layers" in document else 120)
    if "tasks" in document:
        console.width = max(console.width, _WIDEST)
    print_verdict(console, verdict(document))
    parts = parts_of(document)
    for part in parts:
        for rows in part.tables:
            console.print(_table(*rows))
    for index, (title, results) in enumerate(sets_of(document)):
        if index:
            print_verdict(console, set_verdict(results))
        console.print(table(results, title))
        for line in remarks(results):
            console.print(line)
        some = next(iter(results["methods"].values()))["ece"]
        of = ("top token's probability", "top token") if unit_of(results) == "tokens" else ("confidence", "answer")
        clusters = results.get("clusters", "sequences")
        console.print(
            f"ECE, MCE: {some['bins']} equal-width bins {binning(some['closed'])} of the {of[0]}; "
            f"interval: of the population's ECE in these bins, over {clusters}. "
            f"Brier: of the {of[1]}.",
            style="dim",
        )
    for part in parts:
        for line in part.findings:
            console.print(line, style="bold")


def print_study(document: StudyDocument) -> None:
    """Prints the verdict of a study, its question and its tables to standard output."""
    console = _console(160)
    print_verdict(console, study_verdict(document))
    console.print(document["question"], style="bold")
    for of_study in study_tables(document):
        console.print(_table(*of_study))
    console.print(
        f"Means over seeds, ± half their range; [95% intervals]: over sequences, for the heads as fitted. "
        f"ECE: {document['bins']} equal-width bins {binning(document['closed'])} of the top "
        "token's probability. + significantly lower (better) than the row compared with, - significantly higher: the "
        "interval of the difference excludes 0 (paired, not corrected for the number of rows).",
        style="dim",
    )


def print_verdict(console: Console, line: str) -> None:
    """Prints a verdict, a warning in red; nothing if there is none."""
    if line:
        console.print(line, style="bold red" if line.startswith("WARNING") else "bold")


def _console(width: int) -> Console:
    """Standard output; `width` columns where it is a file or a pipe, which has no width. Names may hold brackets."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = width
    return console
