"""A model's identity: one hash over its configuration and every weight."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import blake3
import numpy as np
from flax import traverse_util
from jax.typing import ArrayLike

from calibjax.models.config import DecoderConfig, Params
from calibjax.models.rules import transposed

VERSION = 3
"""Version of fingerprints, which begin with it."""

_CHUNK = 2**18
"""Numbers in a chunk, about: chunks are read, hashed and copied by threads while they are in the cache."""


def fingerprint(config: DecoderConfig, tensors: Iterable[tuple[str, ArrayLike]]) -> str:
    """Hashes a model: "3:", the version, and the SHA-256 of its configuration and of the digests of all tensors.

    `tensors` are pairs of name and array in any order, as `named_tensors` yields. Fields of the configuration that are
    not defaults are hashed, as JSON with sorted keys.
    """
    return combine_digests(config, {name: tensor_digest(name, tensor) for name, tensor in tensors})


def chunks(name: str, shape: Sequence[int]) -> list[tuple[slice, ...]]:
    """Divides a tensor into the chunks that are hashed, by its name and shape alone.

    Kernels `[..., in, out]` are cut into columns, because files hold them transposed; other tensors into rows.
    """
    axes = [[slice(0, n)] for n in shape]
    if name.endswith(".kernel") and len(shape) > 1:
        *leading, rows, columns = shape
        axes[:-2] = [_slices(experts, 1) for experts in leading]
        axes[-1] = _slices(columns, max(_CHUNK // max(rows, 1), 64))
    else:
        axes[0] = _slices(shape[0], max(_CHUNK // max(math.prod(shape[1:]), 1), 1))
    return list(itertools.product(*axes))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def chunk_digest(name: str, values: np.ndarray) -> bytes:
    """The BLAKE3 digest of the raw bytes of a chunk as most files hold it: kernels as `[..., out, in]`."""
    if name.endswith(".kernel") and values.ndim > 1:
        values = transposed(values) if values.flags.c_contiguous else values.swapaxes(-1, -2)
    return blake3.blake3(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).digest()


def tensor_digest(name: str, tensor: ArrayLike) -> str:
    """The digest of one tensor's name, shape, dtype and chunks; see `join_chunks`."""
    array = np.asarray(tensor)
    digests = b"".join(chunk_digest(name, array[index]) for index in chunks(name, array.shape))
    return join_chunks(name, array.dtype, array.shape, digests)


def join_chunks(name: str, dtype: np.dtype, shape: Sequence[int], digests: bytes) -> str:
    """The `sha256` of a tensor's name, dtype, shape and the digests of its chunks, in their order."""
    return hashlib.sha256(json.dumps([name, str(dtype), list(shape)]).encode() + digests).hexdigest()


def combine_digests(config: DecoderConfig, digests: Mapping[str, str]) -> str:
    """The fingerprint of a model from the digests of its tensors by name."""
    canonical = [distinctive(config), sorted(digests.items())]
    return f"{VERSION}:{hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()}"


def distinctive(config: Any) -> dict[str, Any]:
    """The fields of a configuration that are not defaults, as JSON: new fields do not change earlier fingerprints."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            values[field.name] = distinctive(value) if dataclasses.is_dataclass(value) else value
    return json.loads(json.dumps(values))


def named_tensors(params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a parameter tree on the host with dotted names; stacked tensors layer by layer."""
    for path, leaf in dotted_leaves(params):
        array = np.asarray(leaf)
        if path.startswith("layers."):
            yield from ((layer_name(path, layer), piece) for layer, piece in enumerate(array))
        else:
            yield path, array


def dotted_leaves(tree: Params) -> list[tuple[str, Any]]:
    """The leaves of nested dictionaries as pairs of dotted path and leaf, sorted by path."""
    return sorted(traverse_util.flatten_dict(dict(tree), sep=".").items())


def layer_name(path: str, layer: int | None) -> str:
    """The name of one layer of the stacked tensor at `path`, or `path` if `layer` is `None`."""
    return path if layer is None else path.replace("layers.", f"layers.{layer}.", 1)
