"""Rows of a file, a directory or a Hugging Face Hub dataset, in their order, read as they are needed."""

import codecs
import contextlib
import csv
import fnmatch
import functools
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from calibjax.runtime.errors import UserError, first_line, shortened, user_path

Row = Mapping[str, Any]
Placed = tuple[str, Row | UserError]  # where a row is, such as "line 7", and the row, or what is wrong with it
SKIP_HINT = "To leave out such rows, give --skip-broken, or skip_broken=True."


@dataclass(frozen=True)
class Rows(Iterable[Row]):
    """Rows of one source. Each iteration reads the source again, lazily."""

    data: Sequence[Row] | Callable[[], Iterator[Placed]]
    name: str  # as the user wrote it
    documents: bool = False  # each row is a whole text file, which continues from sequence to sequence
    skip_broken: bool = False  # rows that cannot be read are left out, instead of raising their error

    def every(self) -> Iterator[Placed]:
        """Each row, or what is wrong with it, with its place."""
        return self.data() if callable(self.data) else _numbered(self.data)

    def placed(self, skipped: "Skipped | None" = None) -> Iterator[tuple[str, Row]]:
        """Yields each row with its place; counts those that are left out. Raises `UserError` for damaged data."""
        for place, row in self.every():
            if not isinstance(row, UserError):
                yield place, row
            elif not self.skip_broken:
                raise UserError(f"{row} {SKIP_HINT}") from row
            elif skipped is not None:
                skipped.add(row)

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.placed())

    @property
    def first(self) -> Row:
        """The first row, whose columns stand for the columns of all. Raises `UserError` if there is none."""
        for row in self:
            return row
        raise UserError(f"{self.name} holds no rows. Give at least one.")


@functools.lru_cache(1024)
def normalised(name: str) -> str:
    """The name of a column without what does not count: case, spaces and underscores."""
    return re.sub(r"[\W_]+", "", name).casefold()


def with_names(row: Row, names: Iterable[str]) -> Row:
    """The row, in which columns can also be read by `names` that differ in case, spaces and underscores only."""
    more = {}
    for name in (name for name in names if name not in row):
        columns = [column for column in row if normalised(column) == normalised(name)]
        if len(columns) > 1:
            raise UserError(f"several columns could be {name}: {', '.join(columns)}. Rename or remove all but one.")
        if columns:
            more[name] = row[columns[0]]
    return {**row, **more}


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number} (the first is row 0)", row) for number, row in enumerate(rows))


@dataclass
class Skipped:
    """Rows that were left out, and what was wrong with the first."""

    count: int = 0
    first: str = ""

    def add(self, error: UserError) -> None:
        self.first = self.first or str(error)
        self.count += 1


def read_source(
    source: str | Path, *, split: str | None = None, rows: int | None = None, skip_broken: bool = False
) -> Rows:
    """Opens a source of text and reads its first row.

    Args:
        source: a `.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet` or `.txt` file (each but Parquet also with
            `.gz`); a directory of such files, also in subdirectories, of one configuration, in the order of their
            names, or one that `datasets.save_to_disk` wrote; or the id of a dataset on the Hugging Face Hub, with its
            configuration after a colon (`"wikitext:wikitext-2-raw-v1"`) and a revision after an at sign
            (`"org/name@revision"`). Cells of CSV are text. A `.txt` file is one row, `{"text": <the whole file>}`.
        split: split of a Hub dataset, "train" by default. In a directory, only files are read whose names, or whose
            subdirectories' names, begin with `split`; it is required where the names are of several splits.
        rows: read only the first `rows` rows, at least 1. From the Hub, only these are downloaded.
        skip_broken: leave out rows that cannot be read, such as broken lines of JSON, instead of raising their error.

    Raises:
        UserError: the source is missing, empty, damaged or of an unknown kind, or an option does not apply. A broken
            row raises when it is reached; the message names its file and line.
    """
    if rows is not None and rows < 1:
        raise UserError(f"rows: expected at least 1, got {rows}.")
    path = user_path(source)
    if is_hub_id(source):
        return replace(_read_hub(str(source), split or "train", rows), skip_broken=skip_broken)
    with _as_user_error(path, "data"):
        if not path.exists():
            raise UserError(f"{path} does not exist. Check the path (the current directory is {Path.cwd()}).")
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return replace(_read_saved(path, split, rows), skip_broken=skip_broken)
        files = _files_in(path, split) if path.is_dir() else [path]
        if files == [path] and split is not None:
            raise UserError(f"split={split!r}: the file {path} has no splits. Leave `split` out.")
        for file in files:
            if _suffix(file) not in _READERS or not file.is_file():
                raise UserError(f"{file}: expected a file ending in {_EXPECTED}.")

    def read() -> Iterator[Placed]:
        return itertools.islice((placed for file in files for placed in _read_file(file)), rows)

    opened = Rows(read, name=str(source), documents=_suffix(files[0]) == ".txt", skip_broken=skip_broken)
    _ = opened.first
    return opened


def is_hub_id(source: str | Path) -> bool:
    """Whether `read_source` looks for a source on the hub: nothing has this path, and it has the form of an id."""
    is_path = os.path.lexists(user_path(source)) or _suffix(Path(source)) in _READERS
    return not is_path and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?(@\w[\w./-]*)?", str(source)) is not None


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


_SPLIT = re.compile(r"(train|test|val|dev|eval)(?:ing|id|idation|uation)?(?![a-z])", re.IGNORECASE)
_COMPRESSED = (".bz2", ".lz4", ".xz", ".zip", ".zst")


def _files_in(directory: Path, split: str | None) -> list[Path]:
    """The data files in a directory, or else those in its subdirectories; also those that cannot be read."""

    def is_data(file: Path) -> bool:
        plain = file.with_suffix("") if file.suffix in _COMPRESSED else file
        return _suffix(plain) in (*_READERS, ".arrow") and (plain == file or not plain.exists())

    every = sorted(file for file in directory.glob("**/*") if file.is_file() and is_data(file))
    # Copies that notebooks and versioning keep, such as .ipynb_checkpoints/train-checkpoint.csv, are no data.
    every = [file for file in every if not any(part[0] == "." for part in file.relative_to(directory).parts)]
    every = [file for file in every if file.name != "dataset_infos.json"]  # of the hub: descriptions of splits
    files = [file for file in every if file.parent == directory] or every
    if not files:
        raise UserError(f"{directory} holds no data file. Expected files ending in {_EXPECTED}.")
    inside = {file: file.relative_to(directory).parts for file in files}
    names = ", ".join("/".join(parts) for parts in inside.values())
    if split is not None:
        files = [file for file in files if any(part.startswith(split) for part in inside[file])]
        if not files:
            raise UserError(f"split={split!r}: no file in {directory} begins with it. There are: {names}.")
    _check_one_configuration(directory, ["/".join(inside[file]) for file in files])
    if split is None:
        splits = []
        for parts in inside.values():
            matches = [match for part in parts if (match := _SPLIT.match(part))]
            splits += [match[1].lower() for match in matches[-1:]]  # of the file, or the folder nearest to it
        _check_one_split(directory, splits, names)
    if len({_suffix(file) == ".txt" for file in files}) > 1:
        raise UserError(f"{directory} mixes whole documents (.txt) with files of rows: {names}. Give one kind.")
    return files


def _check_one_configuration(directory: Path, names: list[str]) -> None:
    """Raises `UserError` for files of several configurations of a data set of the hub, as its README.md lists them.

    Without it they are folders that hold the first of the files of the same split, such as train-00000-of-00001; the
    name part-00000-of-00001, which Spark writes, is of no split.
    """
    several: dict[str, Iterable[str]] = {}
    if (readme := directory / "README.md").is_file():
        from datasets.data_files import sanitize_patterns
        from huggingface_hub import metadata_load

        with contextlib.suppress(Exception):  # the file is of something else, and may hold anything
            for configuration in (metadata_load(readme) or {}).get("configs", ()):
                patterns = itertools.chain(*sanitize_patterns(configuration["data_files"]).values())
                if files := {name for pattern in patterns for name in fnmatch.filter(names, pattern)}:
                    several[configuration["config_name"]] = files
    firsts = {name: match[1] for name in names if (match := re.search(r"(?:^|/)(?!part-)([^/]*)-0+-of-\d+", name))}
    are_splits = all(_SPLIT.match(name.rpartition("/")[0].rpartition("/")[2]) for name in firsts)
    if not several and not are_splits and len(set(firsts.values())) < len(firsts):
        several = {name.rpartition("/")[0]: () for name in firsts}
    if len(several) > 1 and set(names) not in several.values():
        hint = f"give its folder or file, such as {directory / (names[0].rpartition('/')[0] or names[0])}"
        raise UserError(f"{directory} holds several configurations: {', '.join(several)}. Choose one: {hint}.")


def _check_one_split(directory: Path, splits: list[str], names: str) -> None:
    if len(set(splits)) > 1:
        raise UserError(f"{directory} holds several splits: {names}. Choose one: split (or --split, --eval-split).")


def _read_saved(directory: Path, split: str | None, rows: int | None) -> Rows:
    """The rows in a directory that `datasets.save_to_disk` wrote."""
    import datasets

    data: Any = cast(Any, datasets).load_from_disk(str(directory.absolute()))
    if isinstance(data, dict):
        if split is None:
            _check_one_split(directory, list(data), ", ".join(data))
        elif split not in data:
            raise UserError(f"split={split!r}: {directory} does not hold it. There are: {', '.join(data)}.")
        data = data[split or next(iter(data))]
    elif split is not None:
        raise UserError(f"split={split!r}: the data set in {directory} has no splits. Leave `split` out.")
    if not len(data):
        raise UserError(f"{directory} holds no rows. Give at least one.")
    if rows is not None:
        data = data.select(range(min(rows, len(data))))
    return Rows(data, name=str(directory))


# --- files ---


def _read_file(path: Path) -> Iterator[Placed]:
    kind, read = _READERS[_suffix(path)]
    opened: Any = open
    if path.name.endswith(".gz"):
        kind, opened = f"gzipped {kind}", gzip.open
    with _as_user_error(path, kind), opened(path, "rb") as file:
        for at, row in read(file if read is _parquet else _as_utf8(file)):
            place = f"{path}, {at}"
            yield place, UserError(f"{place}: {row}.") if isinstance(row, str) else row


def _as_utf8(file: BinaryIO) -> BinaryIO:
    """The file in UTF-8. UTF-16 with a byte order mark, as spreadsheets and PowerShell write it, is converted."""
    head = file.peek(256)  # type: ignore[attr-defined]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return io.BufferedReader(io.BytesIO(file.read().decode("utf-16").encode()))  # type: ignore[arg-type]
    if b"\0" in head:
        raise ValueError("it holds NUL bytes, as UTF-16 without a byte order mark does; save it as UTF-8")
    return file


@contextlib.contextmanager
def _as_user_error(path: Path, kind: str) -> Iterator[None]:
    """Raises a `UserError` for what the readers raise for a damaged file."""
    import pyarrow

    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, csv.Error, RecursionError, pyarrow.ArrowException) as error:
        hint = "Check that it is complete and has the right suffix."
        raise UserError(f"{path} cannot be read as {kind}: {first_line(error)}. {hint}") from error


_Read = Iterator[tuple[str, Row | str]]  # places and rows; a string describes what is wrong with a row


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    """An object; raises `ValueError` for a key that is there twice, of which JSON readers silently take one."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"several values of {next(name for name in names if names.count(name) > 1)}")
    return value


_loads = functools.partial(json.loads, object_pairs_hook=_unique_keys)


def _json_object(line: bytes) -> Row | str:
    try:
        value = _loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start} of the line"
    except (ValueError, RecursionError) as error:
        return f"cannot be read as json ({shortened(error)}): {_shown_line(line)}"
    return value if isinstance(value, dict) else f"expected a JSON object, got {_shown_line(line)}"


def _shown_line(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").strip())


def _json(file: BinaryIO) -> _Read:
    """An object per line; or an array of objects, or one object of several lines, which are read whole."""
    head = file.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()  # type: ignore[attr-defined]
    if head[:1] == b"[" and head[1:].lstrip()[:1] in (b"{", b"]", b""):
        for place, value in _numbered(_loads(file.read().decode("utf-8-sig"))):
            yield place, value if isinstance(value, dict) else f"expected a JSON object, got {shortened(value)!r}"
        return
    first = file.readline().removeprefix(codecs.BOM_UTF8)
    lines: Iterable[bytes] = itertools.chain([first], file)
    if head[:1] == b"{" and isinstance(_json_object(first), str):
        content = first + file.read()
        with contextlib.suppress(ValueError, RecursionError):
            yield "line 1", _loads(content.decode("utf-8"))
            return
        lines = io.BytesIO(content)
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"line {number}", _json_object(line)


def _csv(file: BinaryIO, delimiter: str | None = None) -> _Read:
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become surrogates, so that the row that holds them can be named.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    first = text.readline()
    start = 1
    if stated := re.fullmatch(r"sep=(.)\s*", first):
        delimiter, first, start = stated[1], text.readline(), 2
    lines = itertools.chain([first], text)
    if delimiter is None:  # a comma if the header has one outside quotes, or else the character of which it has most
        counts = {mark: len(next(csv.reader([first], delimiter=mark), [])) for mark in ",;\t|"}
        delimiter = "," if counts[","] > 1 else max(counts, key=lambda mark: counts[mark])
    # Strict: a quote that is never closed would make one cell of all rows after it.
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    columns = _distinct(next(rows, []))
    if not is_text("".join(columns)):
        raise ValueError("invalid UTF-8 in the first line; save the file as UTF-8")
    before, start = start - 1, start + rows.line_num
    try:
        for cells in rows:
            place, start = f"line {start}", before + rows.line_num + 1
            if not cells:
                continue
            if len(cells) != len(columns):
                expected = f"expected {len(columns)} cells separated by {delimiter!r}"
                yield place, f"{expected}, as in the first line, got {len(cells)}"
            elif not is_text("".join(cells)):
                yield place, "invalid UTF-8; save the file as UTF-8"
            else:
                yield place, dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {start}: {error}: a cell that begins with a quote must end with one") from error


def _distinct(names: list[str]) -> list[str]:
    """Spreadsheets leave columns unnamed. Repeated names get a number, so that only reading one by its name raises."""
    columns = [f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names, 1)]
    if len(set(columns)) < len(columns):
        raise ValueError(f"two columns of the same name: {', '.join(columns)}")
    return columns


def is_text(text: str) -> bool:
    """Whether a string is Unicode text; it is not where it holds half of a surrogate pair."""
    return text.isascii() or text.encode("utf-8", "ignore").decode() == text


def _parquet(file: BinaryIO) -> _Read:
    import pyarrow.parquet

    opened = pyarrow.parquet.ParquetFile(file)
    columns = _distinct(opened.schema_arrow.names)
    batches = opened.iter_batches(batch_size=1000)
    return _numbered(row for batch in batches for row in batch.rename_columns(columns).to_pylist())


_READERS = {
    ".jsonl": ("json", _json),
    ".ndjson": ("json", _json),
    ".json": ("json", _json),
    ".csv": ("csv", _csv),
    ".tsv": ("csv", functools.partial(_csv, delimiter="\t")),
    ".parquet": ("parquet", _parquet),
    ".txt": ("text", lambda file: iter([("the file", {"text": io.TextIOWrapper(file, encoding="utf-8-sig").read()})])),
}
_EXPECTED = f"one of {', '.join(_READERS)} (each but .parquet may end in .gz as well)"


def _read_hub(name: str, split: str, rows: int | None) -> Rows:
    import datasets
    from datasets import config

    named, _, revision = name.partition("@")
    repository, _, configuration = named.partition(":")
    # Streaming fetches only what is read, but does not work offline from the cache.
    options: Any = {"streaming": rows is not None and not config.HF_HUB_OFFLINE, "revision": revision or None}
    try:
        data: Any = datasets.load_dataset(repository, configuration or None, split=split, **options)
        if rows is not None:
            data = list(itertools.islice(data, rows))
    except Exception as error:
        what = f"neither a local file or directory nor a data set of the hub (split {split!r})"
        raise UserError(f"{name!r} is {what}: {error}") from error
    if len(data) == 0:
        raise UserError(f"{name!r}, split {split!r}, holds no rows. Choose another split.")
    return Rows(data, name=name)
