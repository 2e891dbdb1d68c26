"""Every family against transformers and PyTorch: live where torch is installed, and by golden files everywhere."""

import dataclasses
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import scipy.special
import tokenizers
from campaigns import fuzz_families
from safetensors.numpy import load_file, save_file
from tiny import random_head

from calibjax import models
from calibjax.eval.layers.bounds import model_bound
from calibjax.models import config_from_hf, load_model
from calibjax.models.calibrated import calibrated_confidence
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.hf_export import save_model
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import make_mesh

ALIKE = ("olmo3", "ministral", "ministral3", "mixtral", "olmoe")
"""Families whose blocks are those of others: by default, one of their random configurations is enough."""
EACH = [pytest.param(family, marks=[pytest.mark.slow] if family in ALIKE else []) for family in models.FAMILIES]

FIRST = [(family, next(iter(variants))) for family, variants in parity.VARIANTS.items()]
"""Of these the golden file says the same in float32, and bfloat16 is compared too."""
BY_DEFAULT = (
    *("biases-wide-heads-linear", "yarn-original-length-beside", "untied-biases-dynamic", "scaled-rope-own-pattern"),
    *("partial-longrope-tied", "longrope-as-su", "sequential-no-bias-tied", "parallel-biases-tied"),
    *("windows-without-rope", "untied-inner-relu-unscaled"),
)
"""A row for every kind of option, in one of the families that read it."""
ROWS = [pytest.param(*case, marks=() if case[1] in BY_DEFAULT else pytest.mark.slow) for case in parity.CASES]


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_parity_with_torch(tmp_path, family, name):
    pytest.importorskip("torch")
    errors, _ = parity.torch_errors(tmp_path, family, name, half=(family, name) in FIRST)
    print(f"{family} {name}: worst relative errors {errors}")
    assert max(errors["hidden"], errors["logits"]) <= 1e-5
    assert errors.get("bfloat16", 0.0) <= 1.25 * errors.get("torch's bfloat16", 0.0)


@pytest.mark.parametrize("family", EACH)
def test_golden(tmp_path, family):
    golden = parity.read_golden(family, tmp_path)
    got = parity.our_run(load_model(tmp_path), golden["tokens"])
    error = parity.worst_error(got, [*golden["hidden"], golden["logits"]])
    print(f"{family}: worst relative error {error:.1e} (transformers {golden['version']})")
    assert error <= 1e-5


@pytest.mark.parametrize("family", [family for family in models.FAMILIES if family not in ALIKE] + ["mixtral"])
def test_what_is_read_is_written_back(tmp_path, family):
    """The same names, shapes and values, and nothing else."""
    parity.read_golden(family, tmp_path)
    model = load_model(tmp_path)
    save_model(tmp_path / "back", model.config, model.params, like=tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen", "gpt2", "phi3", "mixtral", "gpt_oss"])
def test_each_device_reads_its_part(tmp_path, family):
    """Of joined and transposed tensors, of one for each expert, and of one for all experts whose columns alternate."""
    parity.read_golden(family, tmp_path)
    whole, parts = load_model(tmp_path), load_model(tmp_path, mesh=make_mesh((2, 2, 2)))
    chex.assert_trees_all_equal(whole.params, parts.params)
    assert whole.fingerprint == parts.fingerprint
    assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(parts.params))


def test_another_softcap_is_written(tmp_path):
    """Fine-tuning may change it: config.json then has the one that the weights were trained with."""
    parity.read_golden("gemma2", tmp_path)
    model = load_model(tmp_path)
    config = dataclasses.replace(model.config, logit_softcap=7.5)
    assert config != model.config
    save_model(tmp_path / "back", config, model.params, like=tmp_path)
    assert load_model(tmp_path / "back").config == config


LOCAL = {"layer_types": ["sliding_attention"] * 2}
UNSUPPORTED = [
    ("mamba", {}, "model_type 'mamba' is not supported; supported: gemma, .*, gpt2, .*llama, .*mistral"),
    (None, {}, "model_type None is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0], "sliding_window": 4, **LOCAL}, "expected 'sliding_attention where no_rope"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
    ("qwen2", LOCAL, "sliding_window is null"),
    *((name, {"use_bidirectional_attention": True}, "bidirectional") for name in ("gemma", "gemma2", "gemma3_text")),
    ("gemma2", {"hidden_activation": "relu2"}, "hidden_activation = 'relu2'"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act = 'relu2' is not supported"),
    ("llama", {"hidden_size": 13}, "cannot read it.*not a multiple"),
    ("llama", {"hidden_size": "wide"}, "hidden_size: expected a whole number from 1 to"),
    ("llama", {"is_causal": False}, "is_causal = False is not supported; expected True"),
    *(("llama", {"rms_norm_eps": bad}, "norm_eps: .* from 0 to 1") for bad in (float("nan"), 2.0)),
    ("llama", {"rope_theta": None}, "requires rope_theta, got null"),
    ("llama", {"rope_theta": float("inf")}, "theta: expected above 0, finite; got inf"),
    ("llama", {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}, "factor = 0.5 is not"),
    ("stablelm", {"partial_rotary_factor": None}, "requires partial_rotary_factor, got null"),
    ("stablelm", {"num_key_value_heads": 2, "head_dim": 4}, "head_dim = 4 .* expected None, 6"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
    ("mixtral", {"num_experts_per_tok": 9}, "expected 1 to 8, .*, got 9"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm = True is not supported; expected False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True is not supported; expected False"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
]


@pytest.mark.parametrize(("family", "changes", "message"), UNSUPPORTED)
def test_unsupported_configurations(tmp_path, family, changes, message):
    base = parity.GPT2_JSON if family == "gpt2" else parity.LLAMA_JSON
    (tmp_path / "config.json").write_text(json.dumps(base | changes | {"model_type": family}))
    with pytest.raises(UserError, match=f"(?s){message}"):
        config_from_hf(tmp_path)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("gemma3", r"multi_modal_projector \(2 tensors\), vision_tower"),
        pytest.param("mistral3", "vision_tower", marks=pytest.mark.slow),
    ],
)
def test_language_model_of_a_multimodal_model(tmp_path, caplog, kind, parts):
    """Against the whole model of transformers on text; both kinds of names; what is written is a language model."""
    torch = pytest.importorskip("torch")
    theirs, text = parity.multimodal_model(tmp_path, kind), parity.MULTIMODAL[kind]
    tokens = parity.random_tokens(parity.settings_of(*text))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    lm = load_model(tmp_path)
    assert re.search(rf"the language model is loaded; left out: .*{parts} \(\d+ tensors\)\.", caplog.text)
    assert lm.config.family == text[0]
    error = parity.worst_error([np.asarray(lm.logits(tokens))], [expected])
    print(f"{kind}: worst relative error {error:.1e}")
    assert error <= 1e-5
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head"): x
        for name, x in load_file(file).items()
    }
    save_file(tensors, file)
    assert load_model(tmp_path).fingerprint == lm.fingerprint
    caplog.clear()
    save_model(tmp_path / "back", lm.config, lm.params, like=tmp_path)
    assert load_model(tmp_path / "back").fingerprint == lm.fingerprint
    assert not caplog.text


def quantized_gpt_oss(folder):
    """A random model whose experts are MXFP4, as gpt-oss is published; returns the tensors of the file."""
    random = np.random.default_rng(0)
    settings = parity.settings_of("gpt_oss", "sinks-yarn-window") | {"hidden_size": 64, "intermediate_size": 32}
    settings |= {"num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(settings))
    config = config_from_hf(folder)
    leaves = {path: leaf.shape for path, leaf in dotted_leaves(models.abstract_params(config))}
    tensors = {}
    for rule in models.FAMILIES["gpt_oss"].rules:
        if rule.targets[0] not in leaves:
            continue
        shape = list(leaves[rule.targets[0]][rule.stacked :])
        shape[-1] *= len(rule.targets)
        name = rule.full_name("model.", 0)
        if len(shape) == 3:
            experts, inner, outer = shape
            scales = random.integers(118, 124, (experts, outer, inner // 32), np.uint8)
            blocks = random.integers(0, 256, (*scales.shape, 16), np.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            shape = shape[::-1] if rule.transpose else shape
            tensors[name] = random.normal(0.1, 0.2, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_mxfp4_weights(tmp_path):
    """Against transformers' dequantisation; what is written back is bfloat16 and the same model."""
    pytest.importorskip("torch")
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = quantized_gpt_oss(tmp_path)
    lm = load_model(tmp_path)
    experts = lm.params["layers"]["mlp"]
    for name, got in (
        ("gate_up_proj", np.stack([experts["gate"]["kernel"][0], experts["up"]["kernel"][0]], -1)),
        ("down_proj", np.asarray(experts["down"]["kernel"][0])),
    ):
        packed = (tensors[f"model.layers.0.mlp.experts.{name}_{part}"] for part in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(*map(torch.from_numpy, packed)).float().numpy()
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    save_model(tmp_path / "back", lm.config, lm.params, like=tmp_path, dtype=jnp.bfloat16)
    back = load_model(tmp_path / "back")
    for name in ("up", "gate"):
        np.testing.assert_array_equal(back.params["layers"]["mlp"][name]["kernel"], experts[name]["kernel"])
    bad = {name: x[:-1] if name.endswith("down_proj_scales") else x for name, x in tensors.items()}
    save_file(bad, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="are not a pair of MXFP4 blocks and scales"):
        load_model(tmp_path)


def test_qwen_from_json_alone(tmp_path):
    parity.read_golden("qwen", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert "auto_map" in settings
    del settings["seq_length"]
    for changes, message in (
        ({"no_bias": False}, "no_bias = False is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({}, "qwen configuration: seq_length is missing"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(UserError, match=message):
            config_from_hf(tmp_path)


def test_qwen_tokenizer_without_remote_code(tmp_path):
    """Its own tokenizer is Python beside the weights, and is left alone; a tokenizer.json is read."""
    parity.read_golden("qwen", tmp_path)
    settings = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_qwen.py").write_text("raise SystemExit('remote code was run')")
    with pytest.raises(UserError, match=r"holds no tokenizer; expected tokenizer\.json"):
        _ = load_model(tmp_path).tokenizer
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    assert load_model(tmp_path).tokenizer("b")["input_ids"] == [1]


def test_confidence_and_features_know_the_unembedding_bias(tmp_path):
    golden = parity.read_golden("phi", tmp_path)
    model = load_model(tmp_path)
    assert np.abs(np.asarray(model.unembedding_bias)).max() > 0.1
    logits = np.asarray(golden["logits"], np.float64)
    features = np.stack([logits.max(-1), np.log(logits.std(-1, ddof=1))], axis=-1)
    head = random_head(model, features=("max_logit", "log_std_logits"))
    apply = jax.jit(head.config.build().apply)
    log_scale = np.asarray(apply({"params": head.params}, np.asarray(features, np.float32)), np.float64)
    expected = scipy.special.softmax(np.exp(log_scale)[..., None] * logits, axis=-1).max(-1)
    got = calibrated_confidence(model, golden["tokens"], head)
    np.testing.assert_allclose(got.temperature, np.exp(-log_scale), rtol=1e-5)
    np.testing.assert_allclose(got.confidence, expected, rtol=1e-5)
    with pytest.raises(UserError, match="phi-tiny adds a bias to its logits"):
        model_bound(model, "phi-tiny")


def test_longrope_of_one_kind_of_layer_bounds_the_sequence(tmp_path):
    """Beyond the original length other divisors would hold."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    settings = parity.LLAMA_JSON | {"model_type": "gemma3_text", "head_dim": 10, "max_position_embeddings": 64}
    kinds = {"full_attention": longrope | {"original_max_position_embeddings": 16}, "sliding_attention": None}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_parameters": kinds}))
    assert config_from_hf(tmp_path).max_positions == 16


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "mixtral" else pytest.mark.slow) for f in parity.VARIANTS]
)
def test_random_configurations(family):
    """In float64: a few of `tests/campaigns/fuzz_families.py`, each drawn from its number."""
    pytest.importorskip("torch")
    fuzz_families.quiet()
    assert not fuzz_families.run([family], 3, [0, 1] if family != "mixtral" else [0])
    assert fuzz_families.DRAWN.keys() == parity.VARIANTS.keys()
    assert fuzz_families.draw(family, 0, 1) == fuzz_families.draw(family, 0, 1) != fuzz_families.draw(family, 0, 2)
