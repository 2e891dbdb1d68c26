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
from tiny import files_in, model_tensors, write_model

from calibjax import FittedHead, HeadConfig, UserError, calibrated_confidence, load_head, load_model, save_head
from calibjax.cli import main
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.hf_export import copy_settings, settings_files
from calibjax.models.orbax_checkpoint import save_checkpoint
from calibjax.runtime.checksums import write_checksums
from calibjax.runtime.sharding import make_mesh, param_sharding
from calibjax.train.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
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
    assert after.params["layers"]["mlp"]["up"]["kernel"].sharding.is_fully_replicated == (mesh is None)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["fp32", "bf16", "fp16"])
def test_there_and_back(tmp_path, capsys, dtype):
    """On all devices; the same tensors, bit for bit, in the same dtype."""
    tensors = {name: tensor.astype(dtype) for name, tensor in model_tensors().items()}
    there, back = tmp_path / "there", tmp_path / "back"
    model = write_model(tmp_path / "model", tensors)
    assert main(["convert", "--model", str(model), "--out", str(there)]) == 0
    assert main(["convert", "--model", str(there), "--out", str(back), "--to", "safetensors", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.partition("for --model")[2].partition("\n")[2])
    assert (document["format"], document["dtype"]) == ("safetensors", np.dtype(dtype).name)
    assert {load_model(path).fingerprint for path in (model, there, back)} == {document["fingerprint"]}
    assert not {"calibjax.json", "checksums.json"} & {file.name for file in back.iterdir()}
    got = load_file(back / "model.safetensors")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].tobytes() == tensor.tobytes(), name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, on damaged files
def test_checkpoints_that_cannot_be_read(tmp_path, converted):
    copy = tmp_path / "copy"
    shutil.copytree(converted, copy)
    arrays = json.loads((copy / "checksums.json").read_text())["arrays"]
    (copy / "checksums.json").unlink()
    with pytest.raises(UserError, match=r"checksums\.json is missing"):
        load_model(copy)

    def edit(name, content, message):
        (copy / name).write_text(content)
        (copy / "checksums.json").unlink(missing_ok=True)
        write_checksums(copy, arrays)
        with pytest.raises(UserError, match=message):
            load_model(copy)
        shutil.copy(converted / name, copy)

    stored = json.loads((copy / "calibjax.json").read_text())
    for content in ("{", "[1]", json.dumps(stored | {"schema": 9}), json.dumps({"schema": 4})):
        edit("calibjax.json", content, "not a checkpoint's description")
    settings = json.loads((copy / "config.json").read_text())
    edit("config.json", json.dumps(settings | {"rms_norm_eps": 1e-3}), r"config\.json is not the one")
    data = max((f for f in (copy / "params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data.write_bytes(data.read_bytes()[:20])
    (copy / "checksums.json").unlink()
    write_checksums(copy, arrays)
    with pytest.raises(UserError, match=r"params: cannot be read"):
        load_model(copy)
    gc.collect()  # its warnings belong here


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
@pytest.mark.parametrize("name", ["m", "w *?", "a%41#b::c"])
def test_convert_keeps_what_it_did_not_make(tmp_path, source, to, name):
    """The source stands where a fixed temporary name would be; the result appears in one piece, with usual rights."""
    model = tmp_path / f"{name}.new"
    shutil.copytree(source, model)
    before = files_in(model)
    assert main(["convert", "--model", str(model), "--out", str(tmp_path / name), "--to", to]) == 0
    assert files_in(model) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([name, model.name])
    same_params(load_model(model), load_model(tmp_path / name))
    assert (tmp_path / name).stat().st_mode == model.stat().st_mode


@pytest.mark.parametrize("name", ["[w]", "a\\b"])
def test_paths_below_which_orbax_loses_what_it_writes(tmp_path, source, capsys, name):
    """A checkpoint below [w] cannot be read, and one below a\\b is written to a/b: refused before anything is done."""
    model, out, data = str(source), tmp_path / name / "out", tmp_path / "data.txt"
    data.write_text("a text")
    for command in (["convert"], ["train", "ats", "--data", str(data)]):
        assert main([*command, "--model", model, "--out", str(out)]) == 2
        assert "Orbax cannot write below a path with" in capsys.readouterr().err
    config = HeadConfig(kind="constant", hidden_size=8)
    head = FittedHead(config, config.init(jax.random.key(0)), "")
    for write in (lambda: save_head(out, head), lambda: Checkpoints(out, {})):
        with pytest.raises(UserError, match="Orbax cannot write below"):
            write()
    assert list(tmp_path.iterdir()) == [data]
    assert main(["convert", "--model", model, "--out", str(out), "--to", "safetensors"]) == 0
    same_params(load_model(source), load_model(out))


def test_convert_refuses_to_write_into_its_model(tmp_path, source, capsys):
    shutil.copytree(source, tmp_path / "m" / "model")
    model = tmp_path / "m" / "model"
    (tmp_path / "link").symlink_to("m")
    before = files_in(tmp_path)
    for out in (model, tmp_path / "m", model / "sub" / "out", tmp_path / "link" / "model", tmp_path / "link", tmp_path):
        for name in (model, tmp_path / "link" / "model"):
            assert main(["convert", "--model", str(name), "--out", str(out)]) == 2, out
            assert "--out" in (error := capsys.readouterr().err)
            assert "neither holds --model nor lies in it" in error, out
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "empty").symlink_to("elsewhere")
    assert main(["convert", "--model", str(model), "--out", str(tmp_path / "empty")]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert files_in(tmp_path) == before


def test_a_model_in_the_cache_of_the_hub(tmp_path, source):
    """Every file of a snapshot is a link to a blob of its repository: the contents are copied."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "mine").symlink_to(snapshot)
    for number, model in enumerate((snapshot, tmp_path / "mine")):
        out = tmp_path / f"out{number}"
        assert main(["convert", "--model", str(model), "--out", str(out), "--to", "safetensors"]) == 0
        assert not [file for file in out.iterdir() if file.is_symlink()]
        assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "place", "target"),
    [
        *[(name, "model", "secret") for name in ("config.json", "merges.txt", "x.model", "x.jinja")],
        *[("loop.json", "model", "loop.json"), ("x.json", "model", "nowhere")],
        *[("x.json", "models--x/snapshots/model", f"models--x/{file}") for file in ("secret", "blobs2/secret")],
        ("x.json", "x/snapshots/model", "x/blobs/secret"),
    ],
)
def test_links_out_of_the_model_are_not_copied(tmp_path, source, capsys, name, place, target):
    """Nor is anything read before they are refused."""
    for folder in ("models--x/blobs2", "x/blobs", "out"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("secret", "models--x/secret", "models--x/blobs2/secret", "x/blobs/secret"):
        (tmp_path / file).write_text('{"secret": 1}')
    model = tmp_path / place
    shutil.copytree(source, model)
    inside = model / "settings.json"
    inside.symlink_to("config.json")
    assert inside in settings_files(model)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target if target == "loop.json" else tmp_path / target)
    with pytest.raises(UserError, match=f"{name} is a symbolic link to"):
        copy_settings(model, tmp_path / "out", "float32")
    (model / "model.safetensors").write_bytes(b"not read")
    if name != "config.json":
        assert main(["convert", "--model", str(model), "--out", str(tmp_path / "out")]) == 2
        assert f"{name} is a symbolic link to" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_must_be_finite(tmp_path, source):
    model = load_model(source)
    model.params["final_norm"]["scale"] = model.params["final_norm"]["scale"].at[2].set(jnp.nan)
    save_checkpoint(tmp_path / "model", model, dtype="float32")
    with pytest.raises(UserError, match="NaN or infinity"):
        load_model(tmp_path / "model")


@pytest.mark.slow
def test_generate(tmp_path, source, converted, capsys):
    """The same text from either form of the model; the table shows what JSON holds; draws follow the seed."""
    lm = load_model(source)
    config = HeadConfig(kind="mlp", hidden_size=lm.config.hidden_size, identity_start=False)
    head = FittedHead(config, config.init(jax.random.key(0)), lm.fingerprint, log_factor=0.4)
    save_head(tmp_path / "run" / "head", head)
    arguments = ["generate", "--prompt", "w3 w1", "w7", "--max-new-tokens", "6", "--head", str(tmp_path / "run")]
    assert main([*arguments, "--model", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fingerprint"] == lm.fingerprint
    first = document["texts"][0]
    ids, confidence = ([token[name] for token in first["tokens"]] for name in ("id", "confidence"))
    prompt = lm.tokenizer("w3 w1")["input_ids"]
    assert "w3 w1" + first["text"] == lm.tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert "".join(token["token"] for token in first["tokens"]).startswith(first["text"])
    expected = calibrated_confidence(lm, np.array([[*prompt, *ids]]), load_head(tmp_path / "run", lm))
    np.testing.assert_allclose(confidence, expected.confidence[0, len(prompt) - 1 : -1], rtol=1e-5)

    assert main([*arguments, "--model", str(converted)]) == 0
    shown = capsys.readouterr().out
    assert f"w3 w1 → {first['text'].strip()}" in shown
    assert all(f"{value:.3f}" in shown for value in confidence)
    texts = []
    for seed in "445":
        drawn = ["--temperature", "1.5", "--top-k", "9", "--seed", seed, "--json"]
        assert main([*arguments, "--model", str(converted), *drawn]) == 0
        texts.append([text["text"] for text in json.loads(capsys.readouterr().out)["texts"]])
    assert texts[0] == texts[1] != texts[2]
    assert main([*arguments, "--model", str(source), "--top-p", "0.5"]) == 2
    assert "need a temperature above 0" in capsys.readouterr().err
