"""Valid files of every kind that the commands read; the campaigns start from them."""

import functools
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import report_documents
import tiny
from safetensors.numpy import save_file

from calibjax.heads import FittedHead, HeadConfig
from calibjax.models import load_model
from calibjax.models.orbax_checkpoint import save_checkpoint
from calibjax.runtime.checksums import seal
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.saved import save_head
from calibjax.train.step import OptimizerConfig, TrainState

CASES = Path(__file__).parents[1] / "data" / "cases"  # of tests/data/test_table.py; those that are read are copied


def make_corpus(directory: Path) -> None:
    for name in ("adapter", "answers", "configs", "gguf", "sharded", "rows", "tables", "reports"):
        (directory / name).mkdir(parents=True)
    _write_models(directory)
    _write_answers(directory)
    for name, document in report_documents.documents().items():
        (directory / "reports" / f"{name}-metrics.json").write_text(json.dumps(document))
    (directory / "reports" / "tokens.json").write_text(json.dumps(report_documents.sample()))
    _write_rows(directory / "rows")
    for expected in CASES.glob("*.expected.json"):
        if "error" not in json.loads(expected.read_text()):
            shutil.copy(CASES / expected.name.removesuffix(".expected.json"), directory / "tables")


def checkpoint_run() -> dict[str, Any]:
    return {"fingerprint": "0" * 64, "options": {"learning_rate": 0.1, "seed": 0}}


PROBE = "0" * 64
"""Fingerprint of the base model of the probe."""


def probe_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {"weights": rng.normal(size=12).astype(np.float32), "bias": rng.normal(size=()).astype(np.float32)}


def kept_answers() -> Any:
    from calibjax.eval.tasks.answer_files import Answers

    rng, n = np.random.default_rng(4), 20
    rows = [rng.random((2, n)).astype(np.float32) for _ in range(3)]
    texts = np.array([f"text {number}" for number in range(n)])
    choice = rng.integers(0, 4, (2, n)).astype(np.int32)
    cut = np.zeros(n, np.int32)
    return Answers(rows[0], rows[1], choice, rows[2], texts, {"em": rows[0][0]}, cut, 0, *[texts] * 3)


def new_state(step: int = 0) -> TrainState:
    params = HeadConfig(kind="linear", hidden_size=12).init(jax.random.key(step))
    return TrainState(jnp.asarray(step, jnp.int32), params, OptimizerConfig().build(10).init(params))


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
character_tokenizer = functools.cache(functools.partial(tiny.character_tokenizer, CHAT))


def _write_models(directory: Path) -> None:
    for family, name in parity.CASES:
        settings = parity.settings_of(family, name)
        settings = parity.qwen1_settings(settings) if family == "qwen" else settings
        (directory / "configs" / f"{family}-{name}.json").write_text(json.dumps(settings))
    tensors = tiny.model_tensors()
    tiny.write_model(directory / "model")
    shards = {f"model-{part}.safetensors": dict(list(tensors.items())[part::2]) for part in (0, 1)}
    for file, shard in shards.items():
        save_file(shard, directory / "sharded" / file)
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    (directory / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "sharded" / "config.json").write_text(json.dumps(tiny.CONFIG_JSON))
    _write_gguf_and_adapter(directory, tensors)
    lm = load_model(directory / "model")
    save_checkpoint(directory / "converted", lm, dtype="float32")
    config = HeadConfig(kind="mlp", hidden_size=12, intermediate_size=4)
    save_head(directory / "head", FittedHead(config, config.init(jax.random.key(0)), lm.fingerprint, log_factor=0.1))
    checkpoints = Checkpoints(directory / "checkpoints", checkpoint_run())
    checkpoints.save(new_state(1), {"epoch": 0, "position": 3}, step=1)
    checkpoints.close()


def _write_gguf_and_adapter(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    """A model as one GGUF file; and a low-rank adapter, with its base model beside it."""
    from gguf_files import write_gguf
    from transformers import AutoConfig

    write_gguf(directory / "gguf" / "model.gguf", AutoConfig.from_pretrained(directory / "model"), tensors)
    tiny.write_model(directory / "adapter" / "base")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = tensors[f"{name}.weight"].shape
    shapes = {"A": (2, columns), "B": (rows, 2)}
    adapter = {f"base_model.model.{name}.lora_{side}.weight": np.ones(s, np.float32) for side, s in shapes.items()}
    save_file(adapter, directory / "adapter" / "adapter_model.safetensors")


def _write_answers(directory: Path) -> None:
    from calibjax.eval.tasks.answer_files import claim_answers, write_answers
    from calibjax.train.probes import save_probe

    save_probe(directory / "probe", probe_params(), name="probe_correct_answer", fingerprint=PROBE)
    folder = directory / "answers"
    rows = [[["a", -1.25, 0.25, 0.5], ["b", -2.5, 0.1, 0.1]], [["a", -0.5, 0.6, 0.6], ["", -3e-05, 1.0, 1.0]]]
    (folder / "part-4.json").write_text(json.dumps(seal({"samples": rows})))
    write_answers(folder / "task-part.npz", kept_answers())
    claim_answers(folder, tiny.make_lm(), {})


def _write_rows(directory: Path) -> None:
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
    kinds = {
        "text": [{"text": f"words {number} of a row"} for number in range(5)],
        "prompt": [{"prompt": f"ask {number}", "completion": "an answer"} for number in range(5)],
        "instruction": [{"instruction": "do", "input": str(number), "output": "done"} for number in range(5)],
        "chat": [{"messages": turns}] * 3,
    }
    for kind, rows in kinds.items():
        (directory / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "list.json").write_text(json.dumps(kinds["prompt"]))
    (directory / "some.csv").write_text("prompt,completion\n" + "".join(f"ask {n},say {n}\n" for n in range(5)))
    (directory / "words.txt").write_text("all the words of a text\n" * 5)
    (directory / "words.txt.gz").write_bytes(gzip.compress(b"all the words of a text\n" * 5, mtime=0))
