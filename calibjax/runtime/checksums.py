"""SHA-256 checksums of files, JSON values and (sharded) arrays."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from calibjax.runtime.distributed import on_first, to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import json_text, new_directory, read_json, write_file

CHECKSUMS = "checksums.json"


def json_digest(value: Any) -> str:
    """Checksum of a JSON value; it does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode()).hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its own checksum under the key `sha256`."""
    return {**content, "sha256": json_digest(content)}


def unseal(sealed: Any) -> dict[str, Any]:
    """The content that `seal` was given; raises `ValueError` if its checksum is missing or differs."""
    if not isinstance(sealed, dict) or "sha256" not in sealed:
        raise ValueError("no checksum")
    content = {key: value for key, value in sealed.items() if key != "sha256"}
    if json_digest(content) != sealed["sha256"]:
        raise ValueError("its checksum differs")
    return content


def array_hash(arrays: Mapping[str, ArrayLike]) -> str:
    """SHA-256, hex, of the arrays' names, dtypes, shapes and contents, which this process holds whole."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def array_digests(tree: Any) -> dict[str, str]:
    """Dotted path -> checksum of the dtype, shape and bytes, for every array of a tree.

    Each of the last two axes of an array is cut into gcd(n, 16) equal parts, and the checksum is that of the parts'
    checksums in their order. It does not depend on sharding. If devices hold whole parts, each process hashes its own
    parts and only checksums are exchanged; otherwise the array is gathered. All processes must call this function.
    """
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves[name] = leaf if _in_whole_parts(leaf) else to_host(leaf)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tables = list(pool.map(_part_digests, leaves.values()))
    if any(not _is_local(leaf) for leaf in leaves.values()):
        joined = multihost_utils.process_allgather(np.concatenate(tables)).max(axis=0)
        tables = np.split(joined, np.cumsum([len(table) for table in tables])[:-1])
    digests = {}
    for (path, leaf), table in zip(leaves.items(), tables, strict=True):
        header = json.dumps([str(leaf.dtype), leaf.shape]).encode()
        digests[path] = hashlib.sha256(header + table.tobytes()).hexdigest()
    return digests


def _is_local(array: Any) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def _part_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the parts of an array; there are no parts if an axis has length 0."""
    cuts = [1] * len(shape[:-2]) + [math.gcd(n, 16) for n in shape[-2:]]
    return tuple(max(n // cut, 1) for n, cut in zip(shape, cuts, strict=True))


def _in_whole_parts(array: Any) -> bool:
    """Whether `_part_digests` can hash the array without gathering it; equal in all processes."""
    if _is_local(array):
        return True
    shard_shape = array.sharding.shard_shape(array.shape)
    return all(n % size == 0 for n, size in zip(shard_shape, _part_shape(array.shape), strict=True))


def _part_digests(array: Any) -> np.ndarray:
    """SHA-256 of each part, uint8 `[parts, 32]`; zeros for parts that other processes hash."""
    sizes = np.array(_part_shape(array.shape), np.int64)
    table = np.zeros((*(array.shape // sizes), 32), np.uint8)
    if _is_local(array):
        pieces = [(np.zeros_like(sizes), array)]
    else:
        pieces = []
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                start = [along.start or 0 for along in shard.index]
                pieces.append((np.array(start, np.int64), shard.data))
    for start, piece in pieces:
        data = np.asarray(piece)
        for number in np.ndindex(*(data.shape // sizes)):
            begin = number * sizes
            inner = tuple(slice(*bounds) for bounds in zip(begin, begin + sizes, strict=True))
            part = np.ascontiguousarray(data[inner]).reshape(-1).view(np.uint8)
            table[tuple((start + begin) // sizes)] = np.frombuffer(hashlib.sha256(part.data).digest(), np.uint8)
    return table.reshape(-1, 32)


def write_checksums(directory: Path, arrays: Mapping[str, str]) -> None:
    """Writes `checksums.json` with the checksums of the files directly in `directory`, and those of arrays by name."""
    files = {file.name: _file_digest(file) for file in sorted(directory.iterdir()) if file.is_file()}
    content = seal({"schema": 1, "files": files, "arrays": dict(arrays)})
    write_file(directory / CHECKSUMS, json_text(content))


def write_directory(directory: str | Path, files: Mapping[str, str | bytes], arrays: Any) -> None:
    """Writes files by name and the checksums of them and of `arrays`; replaces an earlier directory as a whole."""
    digests = array_digests(arrays)
    with new_directory(Path(directory), replace=True) as fresh:

        def write() -> None:
            for name, content in files.items():
                write_file(fresh / name, content)
            write_checksums(fresh, digests)

        on_first(write)


def read_checksums(directory: Path, remedy: str) -> dict[str, str]:
    """Verifies the files of `checksums.json`; returns the checksums of the arrays.

    Where a file is missing or has changed, the message of the `UserError` ends with `remedy`.
    """
    file = directory / CHECKSUMS
    if not file.exists():
        raise UserError(f"{file} is missing. {remedy}")
    try:
        content = unseal(read_json(file))
        files, arrays = dict(content["files"]), dict(content["arrays"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged or edited ({error}). {remedy}") from error
    for name, expected in files.items():
        if Path(name).name != name:  # such as ../x, or /proc/kcore
            raise UserError(f"{file}: expected names of files of this directory, found {name[:200]!r}. {remedy}")
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing. {remedy}")
        try:
            digest = _file_digest(directory / name)
        except OSError as error:  # of a link to something that is no file on a disk
            raise UserError(f"{directory / name}: cannot be read ({error.strerror}). {remedy}") from error
        if digest != expected:
            raise UserError(f"{directory / name}: damaged or edited (its checksum differs). {remedy}")
    return arrays


def different_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names whose values, such as checksums of arrays, differ or that occur in only one of the two."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _file_digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
