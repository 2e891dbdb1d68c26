import contextlib
import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from assets import GPT2_MODELS, LLAMA_MODELS, MODELS, model_path
from safetensors.numpy import save_file
from tiny import LLAMA_JSON, model_tensors
from tiny import write_model as write_tiny
from tokenizers import AddedToken

from calibjax.data import Rows, check_ids, load_sequences
from calibjax.data.chat_template import render_chat
from calibjax.eval.tasks.scoring import Continuation, Scorer
from calibjax.heads import FittedHead
from calibjax.models import DecoderConfig, LanguageModel, fingerprint, load_model
from calibjax.models.fingerprint import chunks, tensor_digest
from calibjax.models.generate import generate
from calibjax.models.shapes import SHAPES
from calibjax.models.tokenizer import find_tokenizer
from calibjax.nn.blocks import Rope
from calibjax.runtime.errors import UserError

CASES = Path(__file__).parents[1] / "data" / "cases" / "models"


def write_config(folder, base=LLAMA_JSON, **changes):
    (folder / "config.json").write_text(json.dumps(base | changes))
    return folder


def write_model(folder, tensors=None, **changes):
    save_file(model_tensors(LLAMA_JSON) if tensors is None else tensors, folder / "model.safetensors")
    return write_config(folder, **changes)


def write_shards(folder, *shards, **changes):
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return write_config(folder, **changes)


def test_shards_prefixes_and_what_is_left_out_change_nothing(tmp_path, caplog):
    """Nor a tied embedding that is stored a second time, or under the name of the head only."""
    folders = [tmp_path / name for name in ("single", "shards", "bare", "head")]
    for folder in folders:
        folder.mkdir()
    tensors = model_tensors(LLAMA_JSON)
    names = sorted(tensors)
    single = load_model(write_model(folders[0]))
    parts = [{name: tensors[name] for name in names[start::3]} for start in range(3)]
    shards = load_model(write_shards(folders[1], *parts))
    left_out = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2 + i, np.float32) for i in range(2)}
    left_out |= dict.fromkeys(("v_head.summary.weight", "score.weight"), np.ones((1, 12), np.float32))
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["lm_head.weight"] = bare["embed_tokens.weight"]
    other = load_model(write_model(folders[2], bare | left_out))
    assert "left out: score (1 tensors), v_head (1 tensors)" in caplog.text
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    for model in (shards, other, load_model(write_model(folders[3], tensors))):
        chex.assert_trees_all_equal(single.params, model.params)
        assert single.fingerprint == model.fingerprint


@pytest.mark.parametrize("name", MODELS)
def test_fingerprint_of_real_models(name):
    model = load_model(model_path(name))
    assert model.fingerprint == load_model(model_path(name), jnp.bfloat16).fingerprint
    assert model.fingerprint == LanguageModel.from_params(model.config, model.params).fingerprint
    assert model.tokenizer.decode(model.tokenizer("once upon a time")["input_ids"])


def test_fingerprint_changes_with_one_weight_and_with_the_configuration(tmp_path):
    tensors = model_tensors(LLAMA_JSON)
    tensors["model.norm.weight"][3] += 1e-6
    other = functools.partial(write_config, rope_theta=7.0)
    writes = (write_model, other, functools.partial(write_model, tensors=tensors))
    assert len({load_model(write(tmp_path)).fingerprint for write in writes}) == 3


def test_fingerprint_outlives_new_options():
    """A field added later, at its default, leaves it; every field that is not at its default counts."""
    config = dataclasses.replace(SHAPES["gemma-3-1b"], num_layers=2, local_layers=(True, False))
    later = dataclasses.make_dataclass("New", [("new", float, 1.0)], bases=(DecoderConfig,), frozen=True, kw_only=True)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert fingerprint(later(**fields), []) == fingerprint(config, [])
    changes = ({"new": 2.0}, {"rope": Rope()}, {"local_rope": None}, {"local_rope": Rope(theta=5.0)}, {"window": 5})
    changed = {fingerprint(later(**fields | change), []) for change in (*changes, {"qkv_bias": True})}
    assert len(changed | {fingerprint(config, [])}) == 7


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64], ids=["fp16", "bf16", "fp64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_and_loaded_dtypes(tmp_path, stored, dtype):
    tensors = {name: tensor.astype(stored) for name, tensor in model_tensors(LLAMA_JSON).items()}
    model = load_model(write_model(tmp_path, tensors), dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(model.unembedding, tensors["model.embed_tokens.weight"].astype(jnp.dtype(dtype)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing: model.layers.1.mlp.up_proj.weight\."),
        ("model.layers.2.mlp.up_proj.weight", np.ones(2, np.float32), r"unknown: model.layers.2.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.q_proj.bias", np.ones(12, np.float32), r"unknown: .*q_proj.bias"),
        ("model.norm.weight", np.ones(11, np.float32), r"wrong shape: model.norm.weight \[11\], expected \[12\]"),
        ("model.layers.0.mlp.up_proj.weight", np.ones((12, 20), np.float32), r"\[12, 20\], expected \[20, 12\]"),
        ("model.norm.weight", np.ones(12, np.int8), "not floating-point: model.norm.weight I8"),
        ("norm.weight", np.ones(12, np.float32), "duplicate: .*norm.weight"),
        ("lm_head.weight", np.ones((30, 12), np.float32), r"wrong shape: lm_head.weight \[30, 12\]"),
        ("lm_head.weight", np.ones((31, 12), np.float32), r"set tie_word_embeddings to false.*: lm_head.weight"),
        ("model.norm.weight", np.full(12, np.nan, np.float32), "model.norm.weight holds NaN or infinity"),
        ("model.norm.weight", np.full(12, 1e60), "norm.weight holds values too large for float32"),
    ],
)
def test_bad_tensors(tmp_path, name, value, message):
    tensors = {key: tensor for key, tensor in (model_tensors(LLAMA_JSON) | {name: value}).items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        load_model(write_model(tmp_path, tensors))


def test_all_problems_are_named_up_to_ten_of_each(tmp_path):
    tensors = {f"extra.{number}": np.ones(1, np.float32) for number in range(12)}
    with pytest.raises(UserError, match=r"missing: model.layers.2.input_layernorm.weight.* and 2 more") as caught:
        load_model(write_model(tmp_path, model_tensors(LLAMA_JSON) | tensors, num_hidden_layers=3))
    assert str(caught.value).count("extra.") == 10


def test_shards(tmp_path):
    """A name in two of them, and one that is missing; other indexes are in test_hostile."""
    tensors = model_tensors(LLAMA_JSON)
    with pytest.raises(UserError, match=r"duplicate: model.norm.weight \(model-1.*\) and model.norm.weight \(model-0"):
        load_model(write_shards(tmp_path, tensors, {"model.norm.weight": tensors["model.norm.weight"]}))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"lists files that are missing: model-1\.safetensors"):
        load_model(tmp_path)


def test_no_model(tmp_path, monkeypatch):
    import huggingface_hub.constants

    def refused(message, path=tmp_path, dtype="float32"):
        with pytest.raises(UserError, match=message) as caught:
            load_model(path, dtype)
        assert "\n" not in str(caught.value)

    refused("does not exist", tmp_path / "gone")
    refused(r"no config\.json; give the directory that holds it")
    write_config(tmp_path)
    refused("expected model.safetensors or model.safetensors.index.json, found neither")
    refused("expected a directory", tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    refused(r"pickled \(pytorch_model.bin\).*save_pretrained")
    for dtype, name in ((jnp.int8, "int8"), ("bf16", "bf16"), (None, "None")):
        refused(f"expected float32 or bfloat16, got {name}", dtype=dtype)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("could not be downloaded .*it is not in the cache, and the hub is switched off", "nobody/nothing")


def test_added_token_beyond_the_vocabulary(tmp_path):
    """As in Gemma 3: a prompt or continuation that holds the token is refused; data are among the cases."""
    model = write_tiny(tmp_path / "model")
    tokenizer = load_model(model).tokenizer
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    tokenizer.save_pretrained(model)
    lm = load_model(model)
    assert lm.tokenizer("<image>")["input_ids"] == [lm.config.vocab_size]
    with pytest.raises(UserError, match="prompts: number 0: expected ids from"):
        generate(lm, ["a <image>"], max_new_tokens=1)
    with pytest.raises(UserError, match=f"token ids below {lm.config.vocab_size}"):
        Scorer(lm, {"base": FittedHead.constant(lm)}).score([Continuation([3], [lm.config.vocab_size])])


@pytest.mark.parametrize("file", sorted(CASES.glob("*.json")), ids=lambda file: file.stem)
def test_case(tmp_path, caplog, file):
    """Tokenizers and templates of public bug reports: what is rendered or read, or the warning and the refusal."""
    case = json.loads(file.read_text())
    lm = load_model(write_tiny(tmp_path / "model"))
    lm.tokenizer.add_tokens([AddedToken(token, special=True) for token in case.get("added", ())])
    lm.tokenizer.save_pretrained(tmp_path / "model")
    for name, content in case.get("files", {}).items():
        path = tmp_path / "model" / name
        path.parent.mkdir(exist_ok=True)
        settings = isinstance(content, dict) and json.dumps(json.loads(path.read_text()) | content)
        path.write_text(settings or content)
    config = dataclasses.replace(lm.config, vocab_size=lm.config.vocab_size + case.get("rows", 0))
    tokenizer = find_tokenizer(tmp_path / "model", config)()
    assert case.get("warning", "") in caplog.text
    assert "warning" in case or not caplog.text
    with pytest.raises(UserError, match=re.escape(case["error"])) if "error" in case else contextlib.nullcontext():
        if "messages" in case:
            assert render_chat(tokenizer, case["messages"], **case.get("options", {})) == case["rendered"]
        else:
            rows = Rows([{"text": case["text"]}], "text")
            check_ids(load_sequences(rows, tokenizer, seq_len=4, layout="pack")[0], config.vocab_size)


@pytest.mark.parametrize("name", [LLAMA_MODELS[0], GPT2_MODELS[0]])
def test_tokenizer_of_another_model(tmp_path, name):
    for file in model_path(name).glob("*.json"):
        shutil.copy(file, tmp_path)
    with pytest.raises(UserError, match=r"largest id is \d+ .* but the model has vocab_size 31"):
        load_model(write_model(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read the tokenizer files"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embedding", (70_001, 33)),
        ("layers.0.mlp.gate.kernel", (300, 9_000)),
        ("layers.1.mlp.up.kernel", (3, 2_000, 1_100)),
        ("layers.1.mlp.up.bias", (3, 1_100)),
        ("unembedding", (1, 2**21)),
        ("head.kernel", (0, 5)),
    ],
)
def test_every_byte_is_in_one_chunk_and_changes_the_fingerprint(name, shape):
    count = np.zeros(shape, np.int8)
    for index in chunks(name, shape):
        count[index] += 1
    assert (count == 1).all()
    before, random = tensor_digest(name, count), np.random.default_rng(0)
    for place in random.integers(0, max(count.size, 1), 20 if count.size else 0):
        changed = count.copy()
        changed.flat[place] += 1
        assert tensor_digest(name, changed) != before
    if len(shape) > 1:
        assert tensor_digest(name, count.reshape(shape[::-1])) != before
