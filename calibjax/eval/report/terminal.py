"""What a command prints at its end: its verdict, the one table that matters, and where the files are.

Tables fit the terminal, and 80 columns where the output is a file or a pipe; the environment variable COLUMNS overrides
both. A table that is too wide loses its least important columns, and a line names them; no number is ever cut.
"""

import io
import shutil
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from calibjax.eval.report import command_tables, tables
from calibjax.eval.report.notes import Verdict, bounds_verdict, comparison_verdict, conventions, notes_of, verdict
from calibjax.eval.report.schema import Document

_GAP = 2  # spaces between columns
_INDENT = "  "  # of the rows of a group
_NARROWEST_NAME = 16  # of the first column, which is text and wraps


def print_result(
    line: Verdict | str,
    table: tables.TextTable | None = None,
    *,
    notes: Iterable[str] = (),
    more: Iterable[tables.TextTable] = (),
    files: str = "",
) -> None:
    """Prints the end of a command: the verdict, the table that matters, notes, more tables, and where the files are."""
    width = max(shutil.get_terminal_size((80, 24)).columns, 1)
    console = Console(highlight=False, markup=False, width=width)
    line = line if isinstance(line, Verdict) else Verdict(line)
    if line.text:
        console.print(str(line), style="bold red" if line.is_warning else "bold")
    for printed in (table, *more):
        if printed is not None:
            _print_table(console, printed)
    for note in notes:
        console.print(note, style="dim")
    if files:
        print(files)


def print_report(document: Document, *, files: str = "", subjects: bool = False) -> None:
    """Prints the verdict of a run, its table, notes on it, and `files`.

    Where there are no files, nothing else would hold the other tables of a run over layers: they are printed first.
    """
    tasks = document.get("tasks", {}).items()
    more = [command_tables.subject_table(name, results) for name, results in tasks if results["subjects"]]
    if "layers" in document:
        table, *further = command_tables.layer_tables(document)
        if document["subjects"]:
            more.append(further.pop())
        print_result("", more=() if files else further)
        notes = [*command_tables.layer_findings(document), conventions(document["held_out"])]
    elif "texts" in document:
        table, notes = command_tables.text_table(document), []
    else:
        table, notes = tables.held_out_table(document), notes_of(document)
    if more and not subjects:
        count = sum(len(subjects_of_task.rows) for subjects_of_task in more)
        notes.append(f"{count} subjects: --subjects prints them{', and the report has them' if files else ''}.")
    print_result(verdict(document), table, notes=notes, more=more if subjects else (), files=files)


def print_comparison(held_out: tables.Row, where: str, *, files: str = "") -> None:
    """Prints the verdict of a comparison, its table and its conventions; `where` is a few words on the data."""
    reference = tables.title_of(held_out["reference"])
    difference = f"Δ: from {reference}, paired over resamples of {held_out['clusters']}"
    test = "p: corrected by Holm's method for the rows compared"
    legend = f"Log loss, Brier: of the prediction being correct. {difference}; {test}."
    notes = [*tables.failures(held_out), legend, conventions(held_out)]
    print_result(comparison_verdict(held_out), tables.comparison_table(held_out, where), notes=notes, files=files)


def print_bounds(document: Document, *, files: str = "") -> None:
    """Prints which model is limited the most, a table of the bounds of each model, how to read it, and `files`."""
    note = (
        "|logits|: the largest singular value of the centred unembedding times the final norm's scale, times √D; "
        "the smallest entropy follows from it (eq. 5). 1 - largest confidence: from the longest row, a tighter "
        "bound. Confidence can grow with D and is limited by V: a model with small D and large V cannot become "
        "very confident, so that label smoothing has less overconfidence to prevent (arXiv 2508.00264, section 4)."
    )
    print_result(bounds_verdict(document), command_tables.bounds_table(document), notes=[note], files=files)


def result_text(verdict: Verdict, table: tables.TextTable, *, width: int = 80) -> str:
    """A verdict and its table as `print_result` prints them to a file: text of at most `width` columns."""
    buffer = io.StringIO()
    console = Console(file=buffer, color_system=None, highlight=False, markup=False, width=width)
    console.print(str(verdict))
    _print_table(console, table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _print_table(console: Console, table: tables.TextTable) -> None:
    width = console.width
    columns, name_width = _fit_columns(table, width)
    if table.title:
        console.print(table.title)
    indent = len(_INDENT) if table.groups else 0
    first_width = max(indent + name_width, _longest_word(table.columns[0]))
    widths = [first_width, *(_width(table, index) for index in columns[1:])]
    table_width = sum(widths) + _GAP * (len(widths) - 1)
    console.width = max(width, table_width)  # two columns are shown at any width, and no number is cut
    _print_row(console, [table.columns[index] for index in columns], widths, "bold")
    console.print("─" * table_width)
    groups = table.groups or ("",) * len(table.rows)
    for number, cells in enumerate(table.rows):
        if groups[number] and groups[number] not in groups[:number]:
            console.print(groups[number])
        style = "bold" if number in table.best else ""
        _print_row(console, [cells[index] for index in columns], widths, style, indent)
    console.width = width
    hidden = [column for index, column in enumerate(table.columns) if index not in columns]
    if hidden:
        console.print(f"Not shown at {width} columns: {', '.join(hidden)}.", style="dim")


def _print_row(console: Console, cells: Sequence[str], widths: Sequence[int], style: str, indent: int = 0) -> None:
    """Cells aligned at the bottom; the first to the left, where it wraps, the others to the right."""
    row = Table.grid(padding=(0, _GAP, 0, 0))
    for number, width in enumerate(widths):
        row.add_column(width=width, justify="right" if number else "left", vertical="bottom")
    row.add_row(Padding(cells[0], (0, 0, 0, indent)), *cells[1:], style=style)
    console.print(row)


def _fit_columns(table: tables.TextTable, width: int) -> tuple[list[int], int]:
    """Columns to show, at least two, in their order, and the width of the first.

    The first column wraps only where that lets another column in, and then has what the others leave.
    """
    names = [cells[0] for cells in table.rows]
    longest = max(map(cell_len, names), default=0)
    narrowest = min(longest, max(_NARROWEST_NAME, *map(_longest_word, names)))
    header_width = _longest_word(table.columns[0])
    order = list(dict.fromkeys((*table.order, *range(1, len(table.columns)))))
    widths = {index: _width(table, index) + _GAP for index in order}
    indent = len(_INDENT) if table.groups else 0
    best = [0], narrowest
    for name_width in (longest, narrowest):
        left = width - max(indent + name_width, header_width)
        shown = 0
        while shown < len(order) and widths[order[shown]] <= left:
            left -= widths[order[shown]]
            shown += 1
        if shown >= len(best[0]):
            best = [0, *sorted(order[:shown])], min(longest, name_width + left)
    return best if len(best[0]) > 1 else ([0, *order[:1]], narrowest)


def _width(table: tables.TextTable, index: int) -> int:
    """The least width of a column: of its longest cell, or the longest word of its title."""
    return max([_longest_word(table.columns[index]), *(cell_len(cells[index]) for cells in table.rows)])


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
