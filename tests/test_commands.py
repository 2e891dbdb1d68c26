"""`calibjax convert` and `calibjax generate`: a model's files in another form and back, and text from a model."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import model_tensors, write_model

from calibjax import FittedHead, HeadConfig, UserError, calibrated_confidence, load_head, load_model, save_head
from calibjax.cli import main
from calibjax.models.checkpoint import save_checkpoint
from calibjax.models.fingerprint import dotted_leaves
from calibjax.sharding import make_mesh, param_sharding


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """Written on one device."""
    out = tmp_path_factory.mktemp("converted") / "model"
    save_checkpoint(out, load_model(source), dtype="float32")
    return out


def same_params(one, other):
    for (path, a), (_, b) in zip(dotted_leaves(one.params), dotted_leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.parametrize("shape", [None, (2, 2, 2), (1, 4, 2)], ids=str)
def test_restored_on_any_mesh(source, converted, shape):
    assert not list(converted.rglob("*.safetensors"))
    mesh = None if shape is None else make_mesh(shape)
    before, after = load_model(source), load_model(converted, mesh=mesh)
    same_params(before, after)
    assert (after.config, after.fingerprint) == (before.config, before.fingerprint)
    assert after.tokenizer("w3 w1")["input_ids"] == before.tokenizer("w3 w1")["input_ids"]
    for path, leaf in dotted_leaves(after.params):
        if mesh is None:
            assert leaf.sharding.device_set == {jax.devices()[0]}
        else:
            assert leaf.sharding.is_equivalent_to(param_sharding(mesh, path, leaf.shape), leaf.ndim), path
    if mesh is not None:
        assert not after.params["layers"]["mlp"]["up"]["kernel"].sharding.is_fully_replicated


def test_restored_in_another_dtype(source, converted):
    got = load_model(converted, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(got.params)} == {jnp.dtype("bfloat16")}
    same_params(load_model(source, jnp.bfloat16), got)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["fp32", "bf16", "fp16"])
def test_there_and_back(tmp_path, capsys, dtype):
    """On all devices; the same tensors, bit for bit, in the same dtype."""
    tensors = {name: tensor.astype(dtype) for name, tensor in model_tensors().items()}
    there, back = tmp_path / "there", tmp_path / "back"
    model = write_model(tmp_path / "model", tensors)
    assert main(["convert", "--model", str(model), "--out", str(there)]) == 0
    assert main(["convert", "--model", str(there), "--out", str(back), "--to", "safetensors", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.split("orbax, ", 1)[1].split("\n", 1)[1])
    assert (document["format"], document["dtype"]) == ("safetensors", np.dtype(dtype).name)
    assert {load_model(path).fingerprint for path in (model, there, back)} == {document["fingerprint"]}
    assert not (back / "calibjax.json").exists()
    got = load_file(back / "model.safetensors")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].tobytes() == tensor.tobytes(), name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, on damaged files
def test_checkpoints_that_cannot_be_read(tmp_path, converted, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    (copy / "checksums.json").unlink()
    with pytest.raises(UserError, match=r"checksums\.json is missing"):
        load_model(copy)
    file, settings = copy / "calibjax.json", copy / "config.json"
    stored = json.loads(file.read_text())
    del stored["checksums"]  # as earlier versions wrote it
    text = json.dumps(stored)
    for content, message in (
        ("{", "not a checkpoint's description"),
        ("[1]", "not a checkpoint's description"),
        (json.dumps(stored | {"schema": 9}), "schema 9, this calibjax reads 1"),
        (json.dumps({"schema": 1}), "schema 1"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            load_model(copy)
    file.write_text(text)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match=r"config\.json is not the one"):
        load_model(copy)
    shutil.copy(converted / "config.json", settings)
    data = max((copy / "params").rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else -1)
    data.write_bytes(data.read_bytes()[:20])
    with pytest.raises(UserError, match=r"params: cannot be read"):
        load_model(copy)
    gc.collect()  # its warnings belong here
    assert main(["convert", "--model", str(converted), "--out", str(copy)]) == 2
    assert "expected a new or an empty directory" in capsys.readouterr().err


def test_a_checkpoint_must_be_finite(tmp_path, source):
    model = load_model(source)
    model.params["final_norm"]["scale"] = model.params["final_norm"]["scale"].at[2].set(jnp.nan)
    save_checkpoint(tmp_path / "model", model, dtype="float32")
    with pytest.raises(UserError, match="NaN or infinity"):
        load_model(tmp_path / "model")


def test_generate(tmp_path, source, converted, capsys):
    """The same text from either form of the model; the table shows what JSON holds; draws follow the seed."""
    lm = load_model(source)
    config = HeadConfig(kind="mlp", hidden_size=lm.config.hidden_size, identity_start=False)
    save_head(tmp_path / "run" / "head", FittedHead(config, config.init(jax.random.key(0)), 0.4, lm.fingerprint))
    arguments = ["generate", "--prompt", "w3 w1", "w7", "--max-new-tokens", "6", "--head", str(tmp_path / "run")]
    assert main([*arguments, "--model", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fingerprint"] == lm.fingerprint
    first = document["texts"][0]
    ids = [token["id"] for token in first["tokens"]]
    assert first["text"] == lm.tokenizer.decode(ids, skip_special_tokens=True)
    prompt = lm.tokenizer("w3 w1")["input_ids"]
    expected = calibrated_confidence(lm, load_head(tmp_path / "run", lm), np.array([[*prompt, *ids]]))
    confidence = [token["confidence"] for token in first["tokens"]]
    np.testing.assert_allclose(confidence, expected.confidence[0, len(prompt) - 1 : -1], rtol=1e-5)

    assert main([*arguments, "--model", str(converted)]) == 0
    shown = capsys.readouterr().out
    assert f"w3 w1 → {first['text']}" in shown
    for token in first["tokens"]:
        assert f"{token['confidence']:.3f}" in shown
    texts = []
    for seed in "445":
        drawn = ["--temperature", "1.5", "--top-k", "9", "--seed", seed, "--json"]
        assert main([*arguments, "--model", str(converted), *drawn]) == 0
        texts.append([text["text"] for text in json.loads(capsys.readouterr().out)["texts"]])
    assert texts[0] == texts[1] != texts[2]
    assert main([*arguments, "--model", str(source), "--top-p", "0.5"]) == 2
    assert "give a temperature above 0" in capsys.readouterr().err
