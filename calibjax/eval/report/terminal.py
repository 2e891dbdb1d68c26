"""What a command prints at its end: its verdict, the one table that matters, and where the files are.

Tables fit the terminal, and 80 columns where the output is a file or a pipe; the environment variable COLUMNS overrides
both. A table that is too wide loses its least important columns, and a line names them; no number is ever cut.
"""

import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from calibjax.eval.report.notes import comparison_verdict, notes_of, verdict
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import (
    Row,
    TextTable,
    binning,
    comparison_table,
    failures,
    held_out_table,
    layer_findings,
    layer_subjects,
    layer_table,
    layer_tables,
    subject_table,
    text_findings,
    text_table,
    title_of,
)

_GAP = 2  # spaces between columns
_INDENT = "  "  # of the rows of a group
_NARROWEST_NAME = 16  # of the first column, which is text and wraps


def print_result(
    line: str,
    table: TextTable | None = None,
    *,
    notes: Iterable[str] = (),
    more: Iterable[TextTable] = (),
    files: str = "",
) -> None:
    """Prints the end of a command: the verdict, the table that matters, notes, more tables, and where the files are."""
    width = max(shutil.get_terminal_size((80, 24)).columns, 1)
    console = Console(highlight=False, markup=False, width=width)
    if line:
        console.print(line, style="bold red" if line.startswith("WARNING") else "bold")
    for one in (table, *more):
        if one is not None:
            _print_table(console, one)
    for note in notes:
        console.print(note, style="dim")
    if files:
        print(files)


def print_report(document: Document, *, files: str = "", subjects: bool = False) -> None:
    """Prints the verdict of a run, its table, notes on it, and `files`.

    Where there are no files, nothing else would hold the other tables of a run over layers: they are printed first.
    """
    more = [subject_table(name, results) for name, results in document.get("tasks", {}).items() if results["subjects"]]
    if "layers" in document:
        for further in () if files else layer_tables(document)[1:4]:
            print_result("", further)
        table, notes = layer_table(document), layer_findings(document)
        more += [layer_subjects(document)] if document["subjects"] else []
    elif "texts" in document:
        table, notes = text_table(document), text_findings(document)
    else:
        table, notes = held_out_table(document), notes_of(document)
    if more and not subjects:
        count = sum(len(one.rows) for one in more)
        notes.append(f"{count} subjects: --subjects prints them, and the report has them.")
    print_result(verdict(document), table, notes=notes, more=more if subjects else (), files=files)


def print_comparison(held_out: Row, where: str, *, files: str = "") -> None:
    """Prints the verdict of a comparison, its table and its conventions; `where` is a few words on the data."""
    ece = next(iter(held_out["methods"].values()))["ece"]
    convention = (
        "Log loss, Brier: of the prediction being correct. "
        f"Δ: from {title_of(held_out['reference'])}, paired over resamples of {held_out['clusters']}; p: corrected by "
        f"Holm's method for the rows compared. ECE: plug-in estimate in {ece['bins']} equal-width bins "
        f"{binning(ece['closed'])}; its interval, of the population's ECE in these bins, inverts a test at that "
        "estimate and contains it."
    )
    notes = [*failures(held_out), convention]
    print_result(comparison_verdict(held_out), comparison_table(held_out, where), notes=notes, files=files)


# --- one table ---


def _print_table(console: Console, table: TextTable) -> None:
    layout = _fit(table, console.width)
    if table.title:
        console.print(table.title)
    for number, (group, rows) in enumerate(_grouped(table)):
        if layout is None:
            if group:
                console.print(group)
            for cells in (table.rows[row] for row in rows):
                console.print(cells[0], style="bold")
                for column, cell in zip(table.columns[1:], cells[1:], strict=True):
                    console.print(Text(f"  {column}: {cell}"))
            continue
        if group and not number:
            console.print(_drawn(table, (), *layout, header=True))
        if group:
            console.print(group)
        console.print(_drawn(table, rows, *layout, header=not number and not group))
    hidden = [column for index, column in enumerate(table.columns) if layout and index not in layout[0]]
    if hidden:
        console.print(f"Not shown at {console.width} columns: {', '.join(hidden)}.", style="dim")


def _grouped(table: TextTable) -> list[tuple[str, list[int]]]:
    """The title of each group, "" where there are none, and the numbers of its rows."""
    groups = table.groups or ("",) * len(table.rows)
    return [(title, list(rows)) for title, rows in itertools.groupby(range(len(groups)), groups.__getitem__)]


def _drawn(table: TextTable, rows: Sequence[int], shown: Sequence[int], name_width: int, *, header: bool) -> Table:
    """Some rows of a table; columns are as wide as those of all of them."""
    drawn = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True, show_header=header
    )
    indent = _INDENT if table.groups else ""
    for position, index in enumerate(shown):
        title = _header(table, index, name_width)
        title_width = max(map(cell_len, title), default=0)
        drawn.add_column(
            Text("\n".join(title)),
            justify="right" if position else "left",
            no_wrap=True,
            vertical="bottom",
            width=_width(table, index) if position else max(len(indent) + name_width, title_width),
        )
    for row in rows:
        name, *cells = (table.rows[row][index] for index in shown)
        lines = (f"{indent}{line}" for line in _wrapped(name, name_width))
        style = "bold" if row in table.best else None
        drawn.add_row(Text("\n".join(lines)), *map(Text, cells), style=style)
    return drawn


def _fit(table: TextTable, width: int) -> tuple[list[int], int] | None:
    """Columns to show, in their order, and the width of the first; None where not even two columns fit.

    The first column wraps only where that lets another column in, and then has what the others leave.
    """
    names = [cells[0] for cells in table.rows]
    longest = max(map(cell_len, names), default=0)
    word = max((cell_len(word) for name in names for word in name.split()), default=0)
    header_width = max(map(cell_len, table.columns[0].split()), default=0)
    order = list(dict.fromkeys((*table.order, *range(1, len(table.columns)))))
    widths = {index: _width(table, index) for index in order}
    best: tuple[list[int], int] | None = None
    for name_width in sorted({longest, min(longest, max(word, _NARROWEST_NAME))}, reverse=True):
        left, shown = width - max(name_width + (len(_INDENT) if table.groups else 0), header_width), []
        for index in order:
            if widths[index] + _GAP > left:
                break
            left -= widths[index] + _GAP
            shown.append(index)
        if shown and (best is None or len(shown) >= len(best[0])):
            best = [0, *sorted(shown)], min(longest, name_width + left)
    return best


def _width(table: TextTable, index: int) -> int:
    """The least width of a column: of its longest cell, or the longest word of its title."""
    words = [cell_len(word) for word in table.columns[index].split()]
    return max([*words, *(cell_len(cells[index]) for cells in table.rows)], default=0)


def _header(table: TextTable, index: int, name_width: int) -> Sequence[str]:
    return _wrapped(table.columns[index], _width(table, index) if index else max(name_width, 1))


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]
