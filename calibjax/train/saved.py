"""Heads on disk: as a fit saves them (Orbax), portable (safetensors, which JAX and PyTorch read), and the authors'."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors import SafetensorError
from safetensors.flax import load_file as load_any
from safetensors.numpy import load_file, save

from calibjax.heads import MAX_SCALE, NO_MIN_SCALE, FittedHead, HeadConfig, TransformerHead
from calibjax.models import LanguageModel
from calibjax.models.calibrated import check_base, check_fingerprint
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.hub import download, repository_of
from calibjax.models.own import FrozenModel
from calibjax.runtime.checksums import array_digests, different_names, read_checksums, write_checksums, write_directory
from calibjax.runtime.distributed import on_first
from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.files import check_orbax_path, check_plain_files, json_text, new_directory, read_json, write_file

_SCHEMA = 1  # of head.json
_PORTABLE = "head.safetensors"
_MAX_PARAMETERS = 2**31
_REMEDY = "Restore the head from a copy, or fit it again."
_PROBE, _PROBE_TOKENS = "probe.", 16


def _description(head: FittedHead, notes: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "head": dataclasses.asdict(head.config),
        "log_factor": head.log_factor,
        "base_fingerprint": head.fingerprint,
        "notes": notes or {},
    }


def save_head(directory: str | Path, head: FittedHead, *, notes: dict[str, Any] | None = None) -> None:
    """Writes a head: `params/` (Orbax), `head.json` (what it is, its base model's fingerprint, notes), and checksums.

    A head already there is replaced as a whole. Raises `UserError` for what is not a head, or a directory that holds
    anything else or cannot be written.
    """
    if not isinstance(head, FittedHead):
        raise UserError(f"head: expected a FittedHead, such as fit_ats(...).head, got {type(head).__name__}.")
    directory = Path(directory)
    check_orbax_path(directory)
    digests = array_digests(head.params)
    description = _description(head, notes)
    with new_directory(directory, replace=True) as fresh:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / "params", head.params)

        def describe() -> None:
            write_file(fresh / "head.json", json_text(description))
            write_checksums(fresh, digests)

        on_first(describe)


def load_head(path: str | Path, lm: FrozenModel | None = None) -> FittedHead:
    """Reads a head that `calibjax train ats`, `calibjax export` or `save_head` wrote.

    Args:
        path: the head's directory, or the run's directory that holds it as `head`; where nothing has this path, a
            repository of the Hugging Face Hub that `calibjax push` wrote, as `org/name` or `org/name@revision`. Or a
            directory of the code of arXiv 2409.19817: calibration_head.safetensors and config.json.
        lm: the base model to use it with; its fingerprint must be the one the head was fitted on.

    Returns:
        The head, its parameters on the host.

    Raises:
        UserError: no head there, an unreadable one, one that is not as it was written, or one of another base model.
    """
    if (Path(path) / _AUTHORS).is_file():
        return _read_authors_head(Path(path), lm)
    file = _head_file(path)
    directory = file.parent
    check_plain_files(directory)
    digests = read_checksums(directory, _REMEDY)
    try:
        description = read_json(file)
        if (schema := description["schema"]) != _SCHEMA:
            raise ValueError(f"schema {schema}, this calibjax reads {_SCHEMA}")
        config = HeadConfig(**description["head"])
        fingerprint = str(description["base_fingerprint"])
        abstract = jax.eval_shape(config.init, jax.random.key(0))
        head = FittedHead(config, abstract, fingerprint, log_factor=float(description["log_factor"]))
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
        if count > _MAX_PARAMETERS:
            raise ValueError(f"a head of {count:,} parameters; expected at most {_MAX_PARAMETERS:,}")
        if lm is not None:
            check_fingerprint(lm, fingerprint)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{file} is not a head's description ({error}). {_REMEDY}") from error
    on_host = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), abstract)
    try:
        if (directory / _PORTABLE).exists():
            params = _read_portable(directory / _PORTABLE, on_host)
        else:
            with ocp.StandardCheckpointer() as checkpointer:
                params = checkpointer.restore(directory.absolute() / "params", on_host)
        _check_shapes(params, on_host)  # onto the host, Orbax does not look
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
            raise ValueError("they are not finite")
        if different := different_names(array_digests(params), digests):
            raise ValueError(f"damaged: the checksum of {', '.join(different[:5])} differs")
    except Exception as error:  # Orbax raises bare Exception for damaged files
        message = f"{directory / 'params'}: cannot read the head's parameters ({first_line(error)}). {_REMEDY}"
        raise UserError(message) from error
    return dataclasses.replace(head, params=params, fingerprint=fingerprint if lm is None else lm.fingerprint)


def _check_shapes(params: Any, like: Any) -> None:
    shapes, expected = jax.tree.map(np.shape, params), jax.tree.map(np.shape, like)
    if shapes != expected:
        raise ValueError(f"expected parameters of the shapes {expected}, found {shapes}")


def head_notes(path: str | Path) -> dict[str, Any]:
    """The notes of `save_head`; those of `calibjax train ats` are the report of the fit. Raises as `load_head`."""
    file = _head_file(path)
    try:
        return dict(read_json(file)["notes"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not a head's description ({error}); fit the head again.") from error


def _head_file(path: str | Path) -> Path:
    repository = repository_of(path) if "/" in str(path) else None
    files = ("head.json", _PORTABLE, "checksums.json")
    directory = Path(path) if repository is None else download(repository, "head", files)
    if (directory / "head" / "head.json").is_file():
        directory = directory / "head"
    file = directory / "head.json"
    if not file.is_file():
        raise UserError(f"{path}: expected a head (head.json and params/) or a run that holds one; found none.")
    return file


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
    names = ("family", "hidden_size", "vocab_size", "logit_softcap", "logit_divisor")
    base = {name: getattr(lm.config, name) for name in names}
    description = {**_description(head, notes), "constants": constants, "base": base}
    files = {_PORTABLE: save(tensors, {"format": "calibjax-head"}), "head.json": json_text(description)}
    write_directory(directory, {**files, **(more or {})}, head.params)


def _read_portable(file: Path, like: Any) -> Any:
    """The parameters of `export_head`, as a tree like `like`; raises `ValueError` if some are missing."""
    tensors = {name: array for name, array in load_file(file).items() if not name.startswith(_PROBE)}
    names = [name for name, _ in dotted_leaves(like)]
    if sorted(names) != sorted(tensors):
        raise ValueError(f"expected the parameters {sorted(names)}, found {sorted(tensors)}")
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in names])


_AUTHORS = "calibration_head.safetensors"  # of the code of arXiv 2409.19817, beside its config.json
_AUTHORS_FEATURES = {
    "hidden_states": "hidden_states",
    "maxlogit": "max_logit",
    "output_token_feature": "argmax_embedding",
    "logits_std": "log_std_logits",
}


def _read_authors_head(directory: Path, lm: FrozenModel | None) -> FittedHead:
    """Reads a head that the code of Adaptive Temperature Scaling wrote; its files do not name the base model."""
    if lm is None:
        raise UserError(f"{directory}: the authors' heads do not know their base model: give load_head(path, lm).")
    try:
        authors = read_json(directory / "config.json")
        names = str(authors.get("feature_key", "hidden_states")).split("+")
        kind = str(authors["calibration_type"])
        heads = authors.get("num_attention_heads", 32)
        is_grouped = authors.get("num_key_value_heads", 32) != heads
        if authors.get("normalize_logits") or (kind == "transformer" and (names != ["hidden_states"] or is_grouped)):
            raise ValueError("normalize_logits, grouped attention, and a transformer of other features: not supported")
        config = HeadConfig(
            kind="constant" if kind == "temperature" else kind,
            hidden_size=lm.config.hidden_size,
            features=tuple(_AUTHORS_FEATURES[name] for name in names),
            intermediate_size=authors.get("intermediate_size", 11008) if kind in ("mlp", "transformer") else None,
            num_heads=heads if kind == "transformer" else None,
            normalize=False,
            min_scale=NO_MIN_SCALE,
        )
        tensors = {name: np.asarray(x, np.float32) for name, x in load_any(directory / _AUTHORS).items()}
        params = _AUTHORS_PARAMS[kind](tensors)
        _check_shapes(params, jax.eval_shape(config.init, jax.random.key(0)))
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(f"{directory}: cannot be read as a head of the authors' code ({error!r}).") from error
    return FittedHead(config, params, lm.fingerprint)


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
