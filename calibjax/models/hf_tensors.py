"""Mapping of a checkpoint's tensors to our parameter tree, planned from names and shapes before any weight is read.

Every tensor must be used or be a known buffer, and every parameter must be filled exactly once.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import abstract_params
from calibjax.models.families import FAMILIES
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.rules import Layout, Rule
from calibjax.runtime.errors import UserError

FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Dtypes of safetensors that are read."""
_MOST_NAMED = 10
_BUFFERS = re.compile(
    r"(.*\.)?rotary_emb\.(original_)?inv_freq|(h\.\d+\.attn|layers\.\d+\.attention)\.(bias|masked_bias)"
)
"""Names, without prefix, of tensors that are no parameters: they follow from the configuration."""
_OTHER_HEADS = re.compile(r"(v_head|value_head|reward_head|score|classifier)\..*")
"""Names of tensors of heads that are not part of a language model."""

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a checkpoint's header: name, shape, safetensors dtype such as `"BF16"`, file, and offset in bytes.

    `read` returns the values at an index of a tensor that is not stored as an array of `dtype` in the order of `shape`.
    `scales` are those of a tensor that is stored as MXFP4; see `merge_mxfp4`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    read: Callable[[Index], np.ndarray] | None = None
    scales: "TensorEntry | None" = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint, or a part of one, that fills a parameter or one layer of it.

    Several `entries` are those of the experts of a layer, which are stacked. `columns` are those of this parameter in
    each group of the layout.
    """

    entries: tuple[TensorEntry, ...]
    layer: int | None
    layout: Layout
    columns: slice

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the values in the file; float32 for experts of different dtypes."""
        kinds = {entry.dtype for entry in self.entries}
        return FLOATS[kinds.pop() if len(kinds) == 1 else "F32"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Assignment of tensors to a model's parameters.

    Args:
        leaves: shape and dtype of each parameter by dotted path.
        pieces: pieces that fill each path; one per layer for stacked parameters.
        must_equal: two tensors that the model ties and the checkpoint stores separately, or `None`.
        left_out: number of tensors of each part that is not the language model.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    pieces: dict[str, list[Piece]]
    must_equal: tuple[TensorEntry, TensorEntry] | None
    left_out: dict[str, int]


def plan_tensors(config: DecoderConfig, entries: Iterable[TensorEntry]) -> Plan:
    """Assigns the tensors of a checkpoint, `entries` of all of its files, to the parameters of a model.

    Raises:
        UserError: tensors are unknown, missing, duplicated, of wrong shape or not floating-point. The message lists up
            to ten names of each kind.
    """
    family = FAMILIES[config.family]
    leaves = dict(dotted_leaves(abstract_params(config)))
    problems: dict[str, list[str]] = collections.defaultdict(list)
    by_name: dict[str, TensorEntry] = {}
    named, left_out = _language_model(list(entries))
    for name, entry in named:
        if _OTHER_HEADS.fullmatch(name):
            left_out[name.split(".")[0]] += 1
            continue
        name = name.removeprefix(family.prefix)
        if _BUFFERS.fullmatch(name):
            continue
        if name in by_name:
            first = by_name[name]
            problems["duplicate"].append(f"{entry.name} ({entry.file.name}) and {first.name} ({first.file.name})")
        by_name.setdefault(name, entry)

    tied = _take_tied(config, by_name)
    pieces: dict[str, list[Piece]] = {path: [] for path in leaves}
    for rule in family.rules:
        if not all(target in leaves for target in rule.targets):
            continue
        for layer in range(config.num_layers) if rule.stacked else (None,):
            entries = []
            for expert in rule.experts(config):
                entry = by_name.pop(rule.source.format(layer, expert), None)
                if entry is None:
                    problems["missing"].append(rule.full_name(family.prefix, layer, expert))
                else:
                    entries.append(entry)
            if len(entries) == len(rule.experts(config)):
                for target, piece in _fill(rule, config, tuple(entries), layer, leaves, problems):
                    pieces[target].append(piece)
    problems["unknown"].extend(entry.name for entry in by_name.values())
    if tied is not None and tied[0].shape != tied[1].shape:
        problems["wrong shape"].append(f"{tied[1].name} {list(tied[1].shape)}, expected {list(tied[0].shape)}")
    if any(problems.values()):
        report = ""
        for kind, names in problems.items():
            if names:
                more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
                report += f" {kind}: {', '.join(names[:_MOST_NAMED])}{more};"
        raise UserError(
            f"The weights do not match this {config.family} configuration.{report[:-1]}. "
            "Check that the files are complete and come from the same model."
        )
    return Plan(leaves, pieces, tied, dict(left_out))


def _language_model(entries: list[TensorEntry]) -> tuple[list[tuple[str, TensorEntry]], collections.Counter]:
    """Returns the tensors of the language model with their names in it, and how many each other part has.

    In a multimodal model they are `language_model.model...` and `language_model.lm_head...`, or as newer versions of
    transformers write them, `model.language_model...` and `lm_head...`.
    """
    text, left_out = [], collections.Counter()
    if not any("language_model." in entry.name for entry in entries):
        return [(entry.name, entry) for entry in entries], left_out
    for entry in entries:
        name = entry.name.removeprefix("model.")
        own = name.removeprefix("language_model.")
        if own != name or name.startswith("lm_head."):
            text.append((own if own.startswith(("lm_head.", "model.")) else f"model.{own}", entry))
        else:
            left_out[name.split(".")[0]] += 1
    return text, left_out


def _take_tied(config: DecoderConfig, by_name: dict[str, TensorEntry]) -> tuple[TensorEntry, TensorEntry] | None:
    """Removes a tied model's second copy of its embedding from `by_name`; returns both copies if there are two."""
    if not config.tie_embeddings:
        return None
    source = {rule.targets: rule.source for rule in FAMILIES[config.family].rules}
    copy = by_name.pop(source["unembedding",], None)
    if copy is None:
        return None
    # `safetensors.torch.save_model` writes a shared tensor under one of its names, which may be this one.
    embedding = by_name.setdefault(source["embedding",], copy)
    return None if embedding is copy else (embedding, copy)


def _fill(
    rule: Rule,
    config: DecoderConfig,
    entries: tuple[TensorEntry, ...],
    layer: int | None,
    leaves: dict[str, jax.ShapeDtypeStruct],
    problems: dict[str, list[str]],
) -> list[tuple[str, Piece]]:
    """Divides tensors among the rule's targets; if they do not fit, adds to `problems` and returns an empty list."""
    layout = rule.layout(config)
    leading = (layer is not None) + (rule.experts(config) != (None,))
    shapes = [leaves[target].shape[leading:] for target in rule.targets]
    ends = list(itertools.accumulate(shape[-1] for shape in shapes))
    expected = (*shapes[0][:-1], ends[-1])
    expected = (*expected[:-2], expected[-1], expected[-2]) if rule.transpose else expected
    wrong = [entry for entry in entries if entry.shape != expected]
    unread = [entry for entry in entries if entry.dtype not in FLOATS]
    problems["wrong shape"] += [f"{entry.name} {list(entry.shape)}, expected {list(expected)}" for entry in wrong]
    problems["not floating-point"] += [f"{entry.name} {entry.dtype}" for entry in unread]
    if wrong or unread:
        return []
    edges = [0, *(end // layout.groups for end in ends)]
    return [
        (target, Piece(entries, layer, layout, slice(start, end)))
        for target, (start, end) in zip(rule.targets, itertools.pairwise(edges), strict=True)
    ]


def merge_mxfp4(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Returns the entries with each pair `NAME_blocks` and `NAME_scales` as one, `NAME`, of their bfloat16 values.

    Blocks are bytes `[E, F, D / 32, 16]`, scales `[E, F, D / 32]`, values `[E, D, F]`; see `read_mxfp4`.
    """
    entries = list(entries)
    by_name = {entry.name: entry for entry in entries}
    merged = []
    for entry in entries:
        name = entry.name.removesuffix("_blocks")
        scales = by_name.get(f"{name}_scales")
        if name != entry.name and scales is not None:
            if entry.shape != (*scales.shape, 16) or len(scales.shape) != 3 or {entry.dtype, scales.dtype} != {"U8"}:
                raise UserError(
                    f"{entry.name} {entry.dtype} {list(entry.shape)} and {scales.name} {scales.dtype} "
                    f"{list(scales.shape)} are not a pair of MXFP4 blocks and scales."
                )
            experts, columns, groups = scales.shape
            shape = experts, 32 * groups, columns
            merged.append(TensorEntry(name, shape, "BF16", entry.file, entry.offset, scales=scales))
        elif not (entry.name.endswith("_scales") and f"{entry.name.removesuffix('_scales')}_blocks" in by_name):
            merged.append(entry)
    return merged


# Of the 16 numbers of 4 bits (OCP Microscaling Formats 1.0, section 5.3.3), the two in each byte; the low bits first.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP4_PAIRS = np.stack([np.tile(_FP4, 16), np.repeat(_FP4, 16)], axis=-1)


def read_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 values `[D, F]` of MXFP4 blocks: numbers of 4 bits, 32 of which share `2 ** (scale - 127)`.

    Args:
        blocks: bytes `[F, D / 32, 16]`.
        scales: bytes `[F, D / 32]`.
    """
    values = _FP4_PAIRS[blocks].reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):
        values = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    return values.reshape(len(scales), -1).astype(jnp.bfloat16).T
