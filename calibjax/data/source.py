"""Rows of a file, a directory or a Hugging Face Hub dataset, in their order."""

import contextlib
import glob
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

from calibjax.runtime.errors import UserError, user_path

# Builder of `datasets` and its options by suffix. In CSV, "NA" and "" are text instead of nulls.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
}
_EXPECTED = f"one of {', '.join(_BUILDERS)} (each but .parquet may end in .gz as well)"


@dataclass(frozen=True)
class Rows(Sequence[Mapping[str, Any]]):
    """Rows of one source: an indexable sequence of dicts.

    Attributes:
        data: rows, a list or a `datasets.Dataset`.
        name: source as the user wrote it, for messages.
        documents: whether each row is a whole text file, which continues from sequence to sequence.
    """

    data: Sequence[Mapping[str, Any]]
    name: str
    documents: bool = False

    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "Mapping[str, Any] | Rows":
        if isinstance(index, slice):
            return Rows([self.data[i] for i in range(*index.indices(len(self)))], self.name, self.documents)
        return self.data[index]


def read_source(source: str | Path, *, split: str | None = None, rows: int | None = None) -> Rows:
    """Reads a source of text.

    Args:
        source: a `.jsonl`, `.json`, `.csv`, `.parquet` or `.txt` file (each but Parquet also with `.gz`); a directory
            of such files, read in the order of their names (other files are ignored); or the id of a dataset on the
            Hugging Face Hub, with its configuration after a colon (`"wikitext:wikitext-2-raw-v1"`). A `.txt` file is
            one row, `{"text": <the whole file>}`.
        split: split of a Hub dataset, "train" by default. In a directory, only files whose names begin with `split` are
            read. A single file has no splits.
        rows: keep only the first `rows` rows, at least 1. From the Hub, only these are downloaded.

    Returns:
        The rows, at least one.

    Raises:
        UserError: if the source is missing, empty, damaged or of an unknown kind, or an option does not apply.
    """
    if rows is not None and rows < 1:
        raise UserError(f"rows: expected at least 1, got {rows}.")
    path = user_path(source)
    if path.is_dir():
        files = _files_in(path, split)
    elif path.exists():
        if split is not None:
            raise UserError(f"split={split!r}: the file {path} has no splits. Leave `split` out.")
        if _suffix(path) not in _BUILDERS or not path.is_file():
            raise UserError(f"{path}: expected a file ending in {_EXPECTED}.")
        files = [path]
    elif _suffix(path) in _BUILDERS or str(source).startswith(("/", ".", "~")):
        raise UserError(f"{path} does not exist. Check the path (the current directory is {Path.cwd()}).")
    else:
        return _read_hub(str(source), split or "train", rows)
    data: list[Mapping[str, Any]] = []
    for file in files:
        data += _read_file(file, None if rows is None else rows - len(data))
    if not data:
        raise UserError(f"{path} holds no rows. Give a file with at least one.")
    return Rows(data, name=str(source), documents=_suffix(files[0]) == ".txt")


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _files_in(directory: Path, split: str | None) -> list[Path]:
    files = sorted(file for file in directory.iterdir() if file.is_file() and _suffix(file) in _BUILDERS)
    if not files:
        raise UserError(f"{directory} holds no data file. Expected files ending in {_EXPECTED}.")
    names = ", ".join(file.name for file in files)
    if split is not None:
        files = [file for file in files if file.name.startswith(split)]
        if not files:
            raise UserError(f"split={split!r}: no file in {directory} begins with it. There are: {names}.")
    if len({_suffix(file) == ".txt" for file in files}) > 1:
        raise UserError(f"{directory} mixes whole documents (.txt) with files of rows: {names}. Give one kind.")
    return files


def _read_file(path: Path, rows: int | None) -> list[Mapping[str, Any]]:
    import datasets

    builder, options = _BUILDERS[_suffix(path)]
    zipped = path.name.endswith(".gz")
    # `datasets` expands *, ? and [ in paths and interprets "::" and "://" as in URLs, so it gets a link with a plain
    # name.
    with tempfile.TemporaryDirectory(prefix="calibjax-data-") as directory:
        link = Path(directory, f"data{_suffix(path)}{'.gz' if zipped else ''}")
        link.symlink_to(path.absolute())
        try:
            with _quiet():
                # Streaming reads the file instead of a copy in the cache, but requires the cache directory.
                data = datasets.load_dataset(
                    builder,
                    data_files=glob.escape(str(link)),
                    split="train",
                    streaming=True,
                    cache_dir=_cache_directory(),
                    **options,
                )
                return list(islice(data, rows))
        except StopIteration:  # raised by `datasets` for an empty JSON file
            return []
        except Exception as error:
            reason = str(error).replace(str(link), str(path))
            kind = f"gzipped {builder}" if zipped else builder
            raise UserError(
                f"{path} cannot be read as {kind}: {reason}. Check that it is complete and has the right suffix."
            ) from error


def _read_hub(name: str, split: str, rows: int | None) -> Rows:
    import datasets
    from datasets import config

    repository, _, configuration = name.partition(":")
    # Streaming fetches only what is read, but does not work offline from the cache.
    streaming = rows is not None and not config.HF_HUB_OFFLINE
    try:
        data: Any = datasets.load_dataset(
            repository, configuration or None, split=split, streaming=streaming, cache_dir=_cache_directory()
        )
        if rows is not None:
            data = list(islice(data, rows))
    except Exception as error:
        raise UserError(
            f"{name!r} is neither a local file or directory nor an available dataset of the Hugging Face Hub "
            f"(split {split!r}): {error}"
        ) from error
    if len(data) == 0:
        raise UserError(f"{name!r}, split {split!r}, holds no rows. Choose another split.")
    return Rows(data, name=name)


_temporary_cache: tempfile.TemporaryDirectory | None = None


def _cache_directory() -> str | None:
    """None, which is the default of `datasets` (it respects HF_DATASETS_CACHE), or a temporary directory instead."""
    from datasets import config

    global _temporary_cache
    cache = Path(config.HF_DATASETS_CACHE)
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK | os.X_OK):
            return None
    if _temporary_cache is None:
        _temporary_cache = tempfile.TemporaryDirectory(prefix="calibjax-datasets-")
    return _temporary_cache.name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps `datasets` from logging errors that it also raises."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)
