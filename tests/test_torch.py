"""Exported heads: read back by JAX to the same bits, and in PyTorch equal to JAX for every head and family."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import scipy.special
from jax import export
from parity import GPT2_JSON, VARIANTS, random_tokens, settings_of, torch_model
from tiny import LLAMA_JSON, character_tokenizer, make_lm, random_head

from calibjax import from_arrays, recalibrate
from calibjax.cli import main
from calibjax.heads import FEATURES, HEADS
from calibjax.models import load_model
from calibjax.models.calibrated import calibrated_confidence, head_program
from calibjax.models.generate import generate
from calibjax.runtime.errors import UserError
from calibjax.train.saved import export_head, load_head, save_head

FAMILIES = [family for family in VARIANTS if family != "qwen"]  # transformers does not run Qwen v1


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("llama")
    return torch_model(folder, LLAMA_JSON)[0], load_model(folder)


@pytest.mark.parametrize("kind", HEADS)
def test_an_export_is_read_back_to_the_same_bits(tmp_path, kind):
    lm = make_lm()
    head = random_head(lm, kind, log_factor=0.1)
    export_head(tmp_path / "out", head, lm, notes={"loss": "cross-entropy"})
    again = load_head(tmp_path / "out", lm)
    assert (again.config, again.log_factor) == (head.config, head.log_factor)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    with pytest.raises(UserError, match="another base model"):
        export_head(tmp_path / "other", head, make_lm(seed=1))


def padded(tokens, fills=(3, 0)):
    mask = np.stack([np.arange(tokens.shape[1]) >= fill for fill in fills]).astype(np.int64)
    return np.where(mask, tokens, 0), mask


def compare(theirs, lm, head, folder):
    """Largest relative difference of calibrated log-probabilities (absolute below 1 nat) and of temperatures."""
    import torch

    from calibjax.torch import attach

    export_head(folder, head, lm)
    tokens, mask = padded(random_tokens({"vocab_size": lm.config.vocab_size}))
    attached = attach(theirs, folder)
    try:
        with torch.no_grad():
            positions = torch.from_numpy((mask.cumsum(1) - 1).clip(0))
            out = theirs(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask), position_ids=positions)
    finally:
        attached.detach()
    real = mask.astype(bool)
    got = out.logits.log_softmax(-1).numpy()[real]
    temperature = np.asarray(calibrated_confidence(lm, tokens, head, segment_ids=mask).temperature)[real]
    logits = np.asarray(lm.logits(tokens, segment_ids=mask))[real]
    expected = scipy.special.log_softmax(logits.astype(np.float64) / temperature[:, None], axis=-1)
    difference = np.abs(got - expected) / np.maximum(np.abs(expected), 1)
    return difference.max(), np.abs(np.exp(-out.log_scale.numpy()[real]) / temperature - 1).max()


@pytest.mark.parametrize("kind", HEADS)
def test_parity_of_every_head(tmp_path, llama, kind):
    theirs, lm = llama
    features = ("hidden_states",) if kind == "constant" else tuple(FEATURES)
    assert max(compare(theirs, lm, random_head(lm, kind, features, log_factor=0.1), tmp_path)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_parity_of_every_family(tmp_path, family):
    pytest.importorskip("torch")
    theirs, _ = torch_model(tmp_path, settings_of(family, next(iter(VARIANTS[family]))))
    lm = load_model(tmp_path)
    kind = ("linear", "mlp", "transformer")[FAMILIES.index(family) % 3]  # Llama has all of them
    error = max(compare(theirs, lm, random_head(lm, kind, tuple(FEATURES)), tmp_path / kind))
    print(f"{family} {kind}: {error:.1e}")
    assert error <= 1e-5, kind


PROMPTS = [[3, 5, 7], [9, 2, 4, 6, 8]]
GREEDY = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.slow
def test_decoding_with_a_cache_and_padding(tmp_path, llama):
    """Greedy text of JAX and PyTorch is equal, and scores of generated tokens are those of one pass without a cache."""
    import torch

    from calibjax.torch import attach

    theirs, lm = llama
    weight = theirs.get_output_embeddings().weight  # requires a gradient
    np.testing.assert_array_equal(from_arrays(weight, weight.argmax(1), weight)[0].unembedding, lm.unembedding)
    head = random_head(lm, "transformer", log_factor=0.1)
    export_head(tmp_path / "head", head, lm)
    ours = generate(lm, PROMPTS, head=head, max_new_tokens=6, stop_tokens=())
    tokens, width = torch.tensor([[0, 0, *PROMPTS[0]], PROMPTS[1]]), 5
    mask = (tokens > 0).int()
    attached = attach(theirs, tmp_path / "head", logits="unchanged")
    try:
        got = attached.generate(input_ids=tokens, attention_mask=mask, **GREEDY)
        np.testing.assert_array_equal(got.sequences[:, width:].numpy(), np.asarray(ours.tokens))
        np.testing.assert_allclose(got.scores.confidence[:, width - 1 :].numpy(), ours.confidence, rtol=1e-4)
        np.testing.assert_allclose(got.scores.temperature[:, width - 1 :].numpy(), ours.temperature, rtol=1e-4)
    finally:
        attached.detach()
    attached = attach(theirs, tmp_path / "head")
    try:
        cached = theirs.generate(tokens, attention_mask=mask, num_beams=3, **GREEDY)
        anew = theirs.generate(tokens, attention_mask=mask, num_beams=3, use_cache=False, **GREEDY)
    finally:
        attached.detach()
    np.testing.assert_array_equal(cached.numpy(), anew.numpy())


def test_padding_has_no_score_and_changes_none(tmp_path):
    """Of learned positions, masks by place, the last token's logits alone, an end or a stop string of `generate`."""
    torch = pytest.importorskip("torch")
    from tokenizers import decoders

    from calibjax.torch import HeadError, attach

    theirs, _ = torch_model(tmp_path, GPT2_JSON)
    lm = load_model(tmp_path)
    export_head(tmp_path / "head", random_head(lm, "transformer", ("logit_statistics",)), lm)
    tokens, mask = map(torch.from_numpy, padded(random_tokens(GPT2_JSON)))
    cache = theirs(tokens[:, :3])[1]
    attached = attach(theirs, tmp_path / "head")
    for refused in (lambda: theirs(tokens[:, 3:], cache), lambda: attach(theirs, tmp_path / "head")):
        with pytest.raises(HeadError, match=r"has not read|detach"):
            refused()
    with torch.no_grad():
        by_name = theirs(tokens, attention_mask=mask).log_scale
        assert torch.equal(theirs(tokens, None, mask).log_scale, by_name)
        last = theirs(tokens, None, mask, logits_to_keep=1).log_scale
    np.testing.assert_allclose(last, by_name[:, -1:], rtol=1e-5)
    for alone, row in zip(attached.score(tokens[:1, 3:]), attached.score(tokens, mask), strict=True):
        np.testing.assert_allclose(row[:1, 3:], alone, rtol=1e-5)
        assert not row[0, :3].any()
    prompts = tokens[:, 3:6]
    end = attached.generate(prompts, **GREEDY).sequences[0].tolist()[3]
    letters = character_tokenizer()
    letters.backend_tokenizer.decoder = decoders.Fuse()
    stop = {"stop_strings": [letters.decode(end)], "tokenizer": letters}
    for options in ({"eos_token_id": end}, stop, stop | {"num_beams": 2}):
        generated = attached.generate(prompts, **GREEDY | options)
        lengths = [[*row[3:], end].index(end) + 1 for row in generated.sequences.tolist()]
        assert ((generated.scores.confidence > 0).sum(1) - 2).tolist() == np.minimum(lengths, 6).tolist()
    answers = iter([False, False, False, True])
    criteria = [lambda tokens, scores: torch.full((len(tokens),), next(answers))]
    generated = attached.generate(prompts, return_dict_in_generate=True, stopping_criteria=criteria, **GREEDY)
    assert (generated.scores.confidence > 0).sum(1).tolist() == [6, 6]


def test_command(tmp_path, capsys):
    """`calibjax export` finds the base model of a run, and writes its head or its temperature."""
    pytest.importorskip("torch")
    from transformers import GenerationConfig

    (tmp_path / "model").mkdir()
    torch_model(tmp_path / "model", LLAMA_JSON)
    lm = load_model(tmp_path / "model")
    head = random_head(lm, log_factor=0.1)
    save_head(tmp_path / "run" / "head", head, notes={"temperature": 1.0523456781})
    (tmp_path / "run" / "metrics.json").write_text(json.dumps({"run": {"model": str(tmp_path / "model")}}))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "ats"), "--json"]) == 0
    assert load_head(tmp_path / "ats", lm).log_factor == head.log_factor
    base_settings = {"repetition_penalty": 1.1, "min_p": 0.1, "eos_token_id": [2, 3]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(base_settings))
    args = ["export", str(tmp_path / "run" / "head"), "--out", str(tmp_path / "t"), "--method", "temperature"]
    capsys.readouterr()
    assert main(args) == 0
    assert "softmax(logits / 1.0523456781)" in capsys.readouterr().out  # every digit
    assert load_head(tmp_path / "t", lm).params["log_scale"] == np.float32(-np.log(1.0523456781))
    theirs = GenerationConfig.from_pretrained(tmp_path / "t")
    assert (theirs.temperature, theirs.top_k, theirs.do_sample) == (1.0523456781, 0, True)
    assert (theirs.repetition_penalty, theirs.min_p, theirs.eos_token_id) == (None, None, [2, 3])
    save_head(tmp_path / "kept", head, notes={"model": str(tmp_path / "model")})  # as `compare --save`
    assert main(["export", str(tmp_path / "kept"), "--out", str(tmp_path / "ats")]) == 0
    assert main(["export", str(tmp_path / "t"), "--out", str(tmp_path / "x")]) == 2  # names no model
    (tmp_path / "run" / "metrics.json").write_text(json.dumps({"run": {"model": "models/of/another/directory"}}))
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "x")]) == 2
    assert "relative to where the run was started, give --model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_onnx_runs_any_batch_and_length(tmp_path, kind):
    """onnxruntime against StableHLO, on other sizes than those of the export, and with padding on the left."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from calibjax.torch import to_onnx

    lm = make_lm()
    head = random_head(lm, kind, ("hidden_states", "max_logit"))
    export_head(tmp_path / "head", head, lm)
    session = runtime.InferenceSession(to_onnx(tmp_path / "head"), providers=["CPUExecutionProvider"])
    features = np.random.default_rng(0).normal(0, 2, (3, 7, head.config.width)).astype(np.float32)
    mask = np.arange(7) >= np.array([[4], [0], [2]])
    dirty = np.where(mask[..., None], features, np.nan)
    (got,) = session.run(None, {"features": dirty, "mask": mask})
    expected = export.deserialize(bytearray(head_program(head))).call(features, mask)
    np.testing.assert_allclose(got[mask], expected[mask], atol=1e-5)


def test_what_compare_kept(tmp_path, capsys):
    data = recalibrate.Predictions(confidence=np.array([0.9] * 4), correct=np.array([1, 1, 1, 0]))
    recalibrate.save(tmp_path / "kept", recalibrate.Recalibrator("platt", recalibrate.METHODS["platt"].fit(data)))
    assert main(["export", str(tmp_path / "kept"), "--out", str(tmp_path / "p"), "--also", "stablehlo"]) == 0
    program = export.deserialize(bytearray((tmp_path / "p" / "method.stablehlo").read_bytes()))
    assert program.call(np.float32([0.9])) == pytest.approx(0.75, abs=1e-3)
    assert recalibrate.load(tmp_path / "p")(data) == pytest.approx(0.75, abs=1e-3)
    assert main(["export", str(tmp_path / "kept"), "--out", str(tmp_path / "q"), "--also", "onnx"]) == 2
    assert "recalibrator, which is exported as stablehlo" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_errors(tmp_path, llama):
    from calibjax.torch import HeadError, attach

    theirs, lm = llama
    small = make_lm()
    export_head(tmp_path / "head", random_head(lm, "linear"), lm)
    export_head(tmp_path / "small", random_head(small, "linear"), small)
    export_head(tmp_path / "pooled", random_head(lm, "linear", pooling="sequence"), lm)
    for model, name, message in (
        (type(theirs)(theirs.config), "head", "another base model"),
        (theirs, "small", "hidden size 16, the model given has 12"),
        (theirs, "pooled", "pooling"),
        (theirs, ".", "not a head"),
    ):
        with pytest.raises(HeadError, match=message):
            attach(model, tmp_path / name)
    file = tmp_path / "head" / "head.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for read in (lambda path: attach(theirs, path), lambda path: load_head(path, lm)):
        with pytest.raises(ValueError, match="damaged"):
            read(tmp_path / "head")


def rewritten(folder, name, content):
    """A file of an export with its checksum, as who means harm would write it."""
    (folder / name).write_bytes(content)
    sums = json.loads((folder / "checksums.json").read_text())
    sums["files"][name] = hashlib.sha256(content).hexdigest()
    (folder / "checksums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize(
    "damage", ["truncated", "long header", "deep", "unknown kind", "wide", "a parameter less", "NaN", "other schema"]
)
def test_hostile_files(tmp_path, llama, damage):
    """One error for files whose checksums are right."""
    from safetensors.numpy import load, save

    from calibjax.torch import HeadError
    from calibjax.torch import load_head as read

    export_head(tmp_path / "head", random_head(llama[1], "mlp"), llama[1])
    arrays = (tmp_path / "head" / "head.safetensors").read_bytes()
    description = json.loads((tmp_path / "head" / "head.json").read_bytes())
    tensors = load(arrays)
    kernel = tensors["output.kernel"]
    changed = {
        "truncated": arrays[: len(arrays) // 2],
        "long header": (1 << 60).to_bytes(8, "little") + arrays[8:],
        "wide": save({**tensors, "output.kernel": np.ones((len(kernel) + 1, 1), np.float32)}),
        "a parameter less": save({name: x for name, x in tensors.items() if name != "output.kernel"}),
        "NaN": save({**tensors, "output.kernel": kernel * np.float32("nan")}),
        "deep": b"[" * 100_000,
        "unknown kind": json.dumps({**description, "head": {**description["head"], "kind": "pickle"}}).encode(),
        "other schema": json.dumps({**description, "schema": 2}).encode(),
    }
    name = "head.json" if damage in ("deep", "unknown kind", "other schema") else "head.safetensors"
    rewritten(tmp_path / "head", name, changed[damage])
    with pytest.raises(HeadError, match="schema 1, not 2" if damage == "other schema" else "not a head written by"):
        read(tmp_path / "head")


def test_the_layer_of_vllm_compares_the_base_model(tmp_path, llama):
    """By rows of the unembedding and its width, as `calibjax.torch.vllm` does at the first token."""
    import torch

    from calibjax.torch import HeadError
    from calibjax.torch.heads import read_export
    from calibjax.torch.vllm import _Calibration

    theirs, lm = llama
    export_head(tmp_path / "head", random_head(lm, "linear"), lm)
    weight = theirs.get_output_embeddings().weight.detach()
    shard = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=len(weight))
    hidden = torch.ones(3, weight.shape[1])
    for matrix, given, message in (
        (weight, hidden, None),
        (weight.flip(0), hidden, "another base model: the unembedding differs"),
        (weight, torch.ones(3, 7), "hidden size 12, the model given has 7"),
    ):
        calibration = _Calibration(read_export(tmp_path / "head"))
        layer = SimpleNamespace(weight=matrix, shard_indices=shard)
        if message is None:
            assert calibration.log_scale(layer, given, given @ matrix.T, None).shape == (3,)
        else:
            with pytest.raises(HeadError, match=message):
                calibration.log_scale(layer, given, torch.zeros(3, len(matrix)), None)


def test_serving_imports_no_jax(tmp_path, llama):
    _, lm = llama
    export_head(tmp_path / "head", random_head(lm, "mlp"), lm)
    code = f"import sys, calibjax.torch as t; h = t.load_head({str(tmp_path / 'head')!r}); print(h.kind, "
    code += "[m for m in ('jax', 'flax', 'transformers') if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout == "mlp []\n", json.dumps(got.stdout)


GUIDE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()


@pytest.mark.slow
def test_the_guide(tmp_path, monkeypatch):
    """Every Python block of docs/serving.md, one after the other, on what its commands export."""
    for package in ("torch", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    for path in ("path/to/model", "runs/x"):
        (tmp_path / path).mkdir(parents=True)
    torch_model(tmp_path / "path/to/model", LLAMA_JSON)
    head = random_head(load_model(tmp_path / "path/to/model"), "mlp")
    save_head(tmp_path / "runs/x/head", head, notes={"model": "path/to/model"})
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"```sh\n(calibjax export .*?)\n```", GUIDE)
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()[1:]) == 0
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL):
        exec(block, scope)
    assert scope["generated"].scores.confidence.shape == (1, scope["generated"].sequences.shape[1] - 1)
    np.testing.assert_allclose(scope["log_scale"], scope["same"], atol=1e-5)  # StableHLO and ONNX
