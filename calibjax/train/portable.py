"""Portable heads: one directory of safetensors and JSON, which JAX and PyTorch (`calibjax.torch`) both read."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save

from calibjax.heads import MAX_SCALE, FittedHead, TransformerHead
from calibjax.models import LanguageModel
from calibjax.models.calibrated import check_base
from calibjax.models.fingerprint import dotted_leaves
from calibjax.runtime.checksums import CHECKSUMS, array_digests, write_checksums
from calibjax.runtime.distributed import on_first
from calibjax.runtime.files import new_directory, write_file

HEAD_SCHEMA = 1
"""Of head.json."""
PORTABLE = "head.safetensors"
PORTABLE_FILES = ("head.json", PORTABLE, CHECKSUMS)
_PROBE, _PROBE_TOKENS = "probe.", 16


def describe_head(head: FittedHead, notes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the contents of head.json: configuration, common factor, fingerprint of the base model, and notes."""
    return {
        "schema": HEAD_SCHEMA,
        "head": dataclasses.asdict(head.config),
        "log_factor": head.log_factor,
        "base_fingerprint": head.fingerprint,
        "checksums": CHECKSUMS,
        "notes": notes or {},
    }


def export_head(
    directory: str | Path,
    head: FittedHead,
    lm: LanguageModel,
    *,
    notes: Any = None,
    more: Mapping[str, str | bytes] | None = None,
) -> None:
    """Writes a head as safetensors and JSON.

    `head.safetensors` holds the parameters by their dotted names, matrices as `[inputs, outputs]`, and a probe: the
    hidden states of `lm` on a few tokens and their rows of the unembedding, by which other frameworks recognise the
    base model. `head.json` describes both. `load_head` reads the directory back to the same bits.

    Args:
        directory: new, empty, or an earlier export, which is replaced as a whole.
        head: a fitted head.
        lm: its base model.
        notes: JSON-able; kept in head.json.
        more: content of further files by name.

    Raises:
        UserError: `lm` is not the base model of `head`, or the directory holds anything else.
    """
    check_base(lm, head)
    tokens = np.arange(_PROBE_TOKENS, dtype=np.int32) * 7 % lm.config.vocab_size
    hidden = lm.hidden_states(tokens[None])[0]
    tensors = {name: np.asarray(leaf) for name, leaf in dotted_leaves(head.params)}
    tensors |= {f"{_PROBE}tokens": tokens, f"{_PROBE}hidden": np.asarray(hidden, np.float32)}
    matrix = lm.params["embedding" if lm.config.tie_embeddings else "unembedding"]
    tensors[f"{_PROBE}unembedding"] = np.asarray(matrix[tokens], np.float32)
    module = head.config.build()
    constants: dict[str, Any] = {"max_scale": MAX_SCALE}
    if isinstance(module, TransformerHead):
        assert module.block.rope is not None
        constants |= {"num_heads": module.block.num_heads, "norm_eps": module.block.norm_eps}
        constants |= {"rope_theta": module.block.rope.theta}
    base = {name: getattr(lm.config, name) for name in ("family", "hidden_size", "vocab_size")}
    base |= {name: getattr(lm.config, name) for name in ("logit_softcap", "logit_divisor")}
    description = {**describe_head(head, notes), "constants": constants, "base": base}
    digests = array_digests(head.params)

    def write(fresh: Path) -> None:
        write_file(fresh / PORTABLE, save(tensors, {"format": "calibjax-head"}))
        write_file(fresh / "head.json", json.dumps(description, indent=2) + "\n")
        for name, content in (more or {}).items():
            write_file(fresh / name, content)
        write_checksums(fresh, digests)

    with new_directory(Path(directory), replace=True) as fresh:
        on_first(lambda: write(fresh))


def read_portable(file: Path, like: Any) -> Any:
    """Reads the parameters of `export_head`, as a tree like `like`; raises `ValueError` if some are missing."""
    tensors = {name: array for name, array in load_file(file).items() if not name.startswith(_PROBE)}
    names = [name for name, _ in dotted_leaves(like)]
    if sorted(names) != sorted(tensors):
        raise ValueError(f"expected the parameters {sorted(names)}, found {sorted(tensors)}")
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in names])


def constant_head(head: FittedHead, temperature: float) -> FittedHead:
    """Returns temperature scaling at `temperature` as a head of the same base model."""
    config = dataclasses.replace(head.config, kind="constant")
    return FittedHead(config, {"log_scale": jnp.float32(-np.log(temperature))}, 0.0, head.fingerprint)
