"""Portable heads: one directory of safetensors and JSON, which JAX and PyTorch (`calibjax.torch`) both read."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.flax import load_file as load_any
from safetensors.numpy import load_file, save

from calibjax.heads import MAX_SCALE, NO_MIN_SCALE, FittedHead, HeadConfig, TransformerHead
from calibjax.models import LanguageModel
from calibjax.models.calibrated import check_base
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.own import FrozenModel
from calibjax.runtime.checksums import CHECKSUMS, write_directory
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json

HEAD_SCHEMA = 1  # of head.json
PORTABLE = "head.safetensors"
PORTABLE_FILES = ("head.json", PORTABLE, CHECKSUMS)
_PROBE, _PROBE_TOKENS = "probe.", 16


def describe_head(head: FittedHead, notes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The contents of head.json."""
    return {
        "schema": HEAD_SCHEMA,
        "head": dataclasses.asdict(head.config),
        "log_factor": head.log_factor,
        "base_fingerprint": head.fingerprint,
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

    The directory is new, empty, or an earlier export, which is replaced as a whole. `notes` are JSON-able and stored in
    head.json; `more` is the content of further files by name.

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
    files = {
        PORTABLE: save(tensors, {"format": "calibjax-head"}),
        "head.json": json.dumps(description, indent=2) + "\n",
    }
    write_directory(directory, {**files, **(more or {})}, head.params)


def read_portable(file: Path, like: Any) -> Any:
    """The parameters of `export_head`, as a tree like `like`; raises `ValueError` if some are missing."""
    tensors = {name: array for name, array in load_file(file).items() if not name.startswith(_PROBE)}
    names = [name for name, _ in dotted_leaves(like)]
    if sorted(names) != sorted(tensors):
        raise ValueError(f"expected the parameters {sorted(names)}, found {sorted(tensors)}")
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in names])


def constant_head(head: FittedHead, temperature: float) -> FittedHead:
    """Temperature scaling as a head of the same base model."""
    config = dataclasses.replace(head.config, kind="constant")
    return FittedHead(config, {"log_scale": jnp.float32(-np.log(temperature))}, 0.0, head.fingerprint)


AUTHORS = "calibration_head.safetensors"  # of the code of arXiv 2409.19817, beside its config.json
_AUTHORS_FEATURES = {
    "hidden_states": "hidden_states",
    "maxlogit": "max_logit",
    "output_token_feature": "argmax_embedding",
    "logits_std": "log_std_logits",
}


def read_authors_head(directory: Path, lm: FrozenModel | None) -> FittedHead:
    """Reads a head that the code of Adaptive Temperature Scaling wrote; its files do not name the base model.

    Raises:
        UserError: no model is given, or the head is of a kind or with an option that is not supported.
    """
    if lm is None:
        raise UserError(f"{directory}: the authors' heads do not know their base model: give load_head(path, lm).")
    try:
        given, size = read_json(directory / "config.json"), lm.config.hidden_size
        names = str(given.get("feature_key", "hidden_states")).split("+")
        kind, heads = str(given["calibration_type"]), given.get("num_attention_heads", 32)
        if given.get("normalize_logits") or (
            kind == "transformer" and (names != ["hidden_states"] or given.get("num_key_value_heads", 32) != heads)
        ):
            raise ValueError("normalize_logits, grouped attention, and a transformer of other features: not supported")
        config = HeadConfig(
            kind="constant" if kind == "temperature" else kind,
            hidden_size=size,
            features=tuple(_AUTHORS_FEATURES[name] for name in names),
            intermediate_size=given.get("intermediate_size", 11008) if kind in ("mlp", "transformer") else None,
            num_heads=heads if kind == "transformer" else None,
            normalize=False,
            min_scale=NO_MIN_SCALE,
        )
        tensors = {name: np.asarray(x, np.float32) for name, x in load_any(directory / AUTHORS).items()}
        params = _AUTHORS_PARAMS[kind](tensors)
        trees = params, jax.eval_shape(config.init, jax.random.key(0))
        shapes, expected = (jax.tree.map(np.shape, tree) for tree in trees)
        if shapes != expected:
            raise ValueError(f"expected parameters of the shapes {expected}, found {shapes}")
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(f"{directory}: cannot be read as a head of the authors' code ({error!r}).") from error
    return FittedHead(config, params, 0.0, lm.fingerprint)


def _output(tensors: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {"kernel": tensors[f"{name}.weight"].T, "bias": tensors[f"{name}.bias"]}


def _authors_mlp(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Their second matrix and the output are two linear maps in a row: here they are one."""
    output = _output(tensors, "linear_head")
    both = np.concatenate([tensors[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]).T
    kernel = tensors["mlp.down_proj.weight"].T @ output["kernel"]
    return {"gate_up": {"kernel": both}, "output": {**output, "kernel": kernel}}


def _authors_transformer(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    def kernels(group: str, names: str) -> dict[str, Any]:
        return {name: {"kernel": tensors[f"transformer.{group}.{name}_proj.weight"].T} for name in names.split()}

    block = {
        "attention_norm": {"scale": tensors["transformer.input_layernorm.weight"]},
        "attention": kernels("self_attn", "q k v o"),
        "mlp_norm": {"scale": tensors["transformer.post_attention_layernorm.weight"]},
        "mlp": kernels("mlp", "gate up down"),
    }
    return {"block": block, "output": _output(tensors, "linear_head")}


_AUTHORS_PARAMS: dict[str, Callable[[Mapping[str, np.ndarray]], Any]] = {
    "temperature": lambda tensors: {"log_scale": -np.log(tensors["temperature"][0])},
    "linear": lambda tensors: {"output": _output(tensors, "linear")},
    "mlp": _authors_mlp,
    "transformer": _authors_transformer,
}
