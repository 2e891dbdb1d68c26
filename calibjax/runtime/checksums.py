"""Checksums (SHA-256) of what is written to disk: of files, of JSON values, and of arrays however they are divided."""

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

from calibjax.runtime.distributed import to_host
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import write_file

CHECKSUMS = "checksums.json"
"""The file that `write_checksums` puts beside the files that it covers."""

_PARTS = 16


def json_digest(value: Any) -> str:
    """Returns the checksum of a JSON value; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode()).hexdigest()


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `content` with its own checksum under the key `sha256`."""
    return {**content, "sha256": json_digest(content)}


def unseal(sealed: Any) -> dict[str, Any]:
    """Returns what `seal` was given; raises `ValueError` where it is not that."""
    if not isinstance(sealed, dict) or "sha256" not in sealed:
        raise ValueError("no checksums")
    content = {key: value for key, value in sealed.items() if key != "sha256"}
    if json_digest(content) != sealed["sha256"]:
        raise ValueError("the checksum of the checksums differs")
    return content


def array_digests(tree: Any) -> dict[str, str]:
    """Returns the checksum of every array of a tree: of its dtype, its shape and its bytes.

    Each of an array's last two axes is cut into gcd(n, 16) equal parts, and the checksum is that of the parts'
    checksums in their order. It is the same however the array is divided among devices: where a device holds whole
    parts, each process hashes its own and only checksums are exchanged; else the array is gathered.

    Args:
        tree: arrays of jax or numpy. If devices of several processes hold them, all processes call this function.

    Returns:
        64 hexadecimal digits for each leaf, by its dotted path.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    leaves = {path: leaf if _in_whole_parts(leaf) else to_host(leaf) for path, leaf in leaves.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tables = list(pool.map(_part_digests, leaves.values()))
    if any(not _is_local(leaf) for leaf in leaves.values()):
        joined = multihost_utils.process_allgather(np.concatenate(tables)).max(axis=0)
        tables = np.split(joined, np.cumsum([len(table) for table in tables])[:-1])
    return {
        path: hashlib.sha256(json.dumps([str(leaf.dtype), leaf.shape]).encode() + table.tobytes()).hexdigest()
        for (path, leaf), table in zip(leaves.items(), tables, strict=True)
    }


def _is_local(array: Any) -> bool:
    """Whether this process holds the whole array."""
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def _part_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each part of an array; where an axis has length 0, there are no parts."""
    first_cut = len(shape) - 2
    return tuple(max(n // math.gcd(n, _PARTS) if axis >= first_cut else n, 1) for axis, n in enumerate(shape))


def _in_whole_parts(array: Any) -> bool:
    """Whether `_part_digests` can hash the array as it lies; the same in all processes."""
    if _is_local(array):
        return True
    held = array.sharding.shard_shape(array.shape)
    return all(n % size == 0 for n, size in zip(held, _part_shape(array.shape), strict=True))


def _part_digests(array: Any) -> np.ndarray:
    """SHA-256 of each part, uint8 `[parts, 32]`; zeros for the parts that other processes hash."""
    sizes = np.array(_part_shape(array.shape), np.int64)
    table = np.zeros((*(array.shape // sizes), 32), np.uint8)
    if _is_local(array):
        held = [(np.zeros_like(sizes), np.asarray(array))]
    else:
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        held = [(np.array([along.start or 0 for along in shard.index], np.int64), shard.data) for shard in shards]
    for start, data in held:
        data = np.asarray(data)
        for number in np.ndindex(*(data.shape // sizes)):
            begin = number * sizes
            inner = tuple(slice(*bounds) for bounds in zip(begin, begin + sizes, strict=True))
            part = np.ascontiguousarray(data[inner]).reshape(-1).view(np.uint8)
            table[tuple((start + begin) // sizes)] = np.frombuffer(hashlib.sha256(part.data).digest(), np.uint8)
    return table.reshape(-1, 32)


def write_checksums(directory: Path, arrays: Mapping[str, str]) -> None:
    """Writes `checksums.json`: the checksums of the files in `directory`, not of those in its folders, and of arrays.

    Args:
        directory: all of its files are written.
        arrays: checksum of each array by its name.
    """
    files = {file.name: _file_digest(file) for file in sorted(directory.iterdir()) if file.is_file()}
    content = seal({"schema": 1, "files": files, "arrays": dict(arrays)})
    write_file(directory / CHECKSUMS, json.dumps(content, indent=2) + "\n")


def read_checksums(directory: Path, remedy: str) -> dict[str, str] | None:
    """Checks the files that `write_checksums` found in `directory`.

    Args:
        directory: of `write_checksums`.
        remedy: what the user is to do about damaged files; the last sentence of each error.

    Returns:
        The checksums of the arrays; `None` where there is no `checksums.json`, as in what earlier versions wrote.

    Raises:
        UserError: a file is missing or differs from what was written.
    """
    file = directory / CHECKSUMS
    if not file.exists():
        return None
    try:
        content = unseal(json.loads(file.read_text(encoding="utf-8")))
        files, arrays = dict(content["files"]), dict(content["arrays"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: damaged or edited ({error}). {remedy}") from error
    for name, expected in files.items():
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing. {remedy}")
        if _file_digest(directory / name) != expected:
            raise UserError(f"{directory / name}: damaged or edited (its checksum differs). {remedy}")
    return arrays


def different_arrays(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Returns the names of the arrays whose checksums differ, or that only one of the two has."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def _file_digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
