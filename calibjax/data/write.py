"""Rows to a file, in the format of its name."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from calibjax.data.source import Row
from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.files import new_file

_json = json.JSONEncoder(default=str).encode  # times, decimals and bytes of Parquet as text
WRITABLE = (".csv", ".tsv", ".jsonl", ".parquet", ".npz")


def write_rows(out: Path, rows: Callable[[], Iterator[Row]]) -> None:
    """Writes rows in the format of the suffix of `out`, with the union of their columns.

    `rows` is called once or twice. In .csv and .tsv, a list or an object is written as JSON; .jsonl has the columns of
    each row. Raises `UserError` for a column with values of different types, which .parquet and .npz cannot hold.
    """
    with new_file(out) as file:
        if out.suffix in (".parquet", ".npz"):
            _write_columns(out, file, rows)
            return
        text = io.TextIOWrapper(cast(BinaryIO, file), encoding="utf-8", newline="", write_through=True)
        if out.suffix == ".jsonl":
            text.writelines(_json(row) + "\n" for row in rows())
        else:
            names = list(dict.fromkeys(name for row in rows() for name in row))
            delimiter = "\t" if out.suffix == ".tsv" else ","
            lines = csv.DictWriter(text, names, delimiter=delimiter, lineterminator="\n")
            lines.writeheader()
            for row in rows():
                nested = {name: _json(cell) for name, cell in row.items() if isinstance(cell, bool | list | dict)}
                lines.writerow({**row, **nested})
        text.detach()


def _write_columns(out: Path, file: Any, rows: Callable[[], Iterator[Row]]) -> None:
    import pyarrow
    import pyarrow.parquet

    listed = list(rows())
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in listed for name in row):
        cells = [row.get(name) for row in listed]
        try:
            columns[name] = pyarrow.array(cells) if out.suffix == ".parquet" else np.array(cells)
            if out.suffix == ".npz" and (columns[name].dtype == object or len({isinstance(x, str) for x in cells}) > 1):
                raise ValueError("text, numbers and nothing")
        except (ValueError, TypeError, OverflowError, pyarrow.ArrowException) as error:
            several = f"values of several types or lengths ({first_line(error)})"
            raise UserError(f"{out}: column {name} holds {several}: choose a file ending in .jsonl.") from error
    if out.suffix == ".npz":
        np.savez_compressed(file, **columns)
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
