"""Adapters of PEFT: merged at loading, the logits are those of PEFT itself."""

import json
import shutil

import numpy as np
import pytest
from parity import GPT2_JSON, LLAMA_JSON, torch_model

from calibjax.cli import main
from calibjax.heads import FittedHead
from calibjax.models import load_model
from calibjax.runtime.errors import UserError
from calibjax.train import load_head, save_head

torch = pytest.importorskip("torch", reason="the oracle is PEFT, which needs torch")

PHI3 = {**LLAMA_JSON, "model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": False}
PATTERNS = {"alpha_pattern": {"layers.0.self_attn.q_proj": 9, "v_proj": 1}, "rank_pattern": {"v_proj": 4}}
CASES = {
    "all kernels": (LLAMA_JSON, {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "rslora of one layer": (
        LLAMA_JSON,
        {"r": 2, "use_rslora": True, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    "patterns": (LLAMA_JSON, {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], **PATTERNS}),
    "joined kernels": (PHI3, {"r": 3, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "transposed": (GPT2_JSON, {"r": 3, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
}


def make(folder, settings, **lora):
    """Writes a random model and an adapter whose matrices are both random; returns PEFT's own model."""
    peft = pytest.importorskip("peft", reason="the oracle is PEFT")  # seconds: here, where a worker needs it
    torch.manual_seed(0)
    base, _ = torch_model(folder / "base", settings)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder / "adapter")
    return adapted.double().eval()


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(tmp_path, name):
    settings, lora = CASES[name]
    theirs = make(tmp_path, settings, **lora)
    ids = np.arange(1, 13)[None]
    expected = theirs(torch.tensor(ids)).logits.detach().numpy()
    base, lm = load_model(tmp_path / "base"), load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(lm.logits(ids), expected, atol=1e-5 * scale)
    assert np.abs(np.asarray(base.logits(ids)) - expected).max() > 1e-2 * scale
    assert lm.fingerprint != base.fingerprint
    assert lm.fingerprint == load_model(tmp_path / "base", "bfloat16", adapter=tmp_path / "adapter").fingerprint


def test_a_head_of_an_adapted_model_is_exported(tmp_path, capsys):
    make(tmp_path, LLAMA_JSON, r=2, target_modules=["q_proj"])
    lm = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    save_head(tmp_path / "run" / "head", FittedHead.constant(lm, 0.1))
    base = {"model": str(tmp_path / "base"), "adapter": str(tmp_path / "adapter")}
    (tmp_path / "run" / "metrics.json").write_text(json.dumps({"run": base}))
    given = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert main([*given, "--model", base["model"]]) == 2
    assert "another base model" in capsys.readouterr().err
    assert main(given) == 0
    assert load_head(tmp_path / "out", lm).fingerprint == lm.fingerprint


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    make(tmp_path, LLAMA_JSON, r=2, target_modules=["q_proj"])
    adapter, wrong = tmp_path / "adapter", tmp_path / "wrong"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(iter(tensors))

    def refused(message, settings=settings, tensors=tensors):
        shutil.rmtree(wrong, ignore_errors=True)
        wrong.mkdir()
        (wrong / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, wrong / "adapter_model.safetensors")
        with pytest.raises(UserError, match=message):
            load_model(tmp_path / "base", adapter=wrong)

    refused("use_dora=True is not supported. Merge the adapter", settings | {"use_dora": True})
    refused("init_lora_weights='pissa_niter_4' is not", settings | {"init_lora_weights": "pissa_niter_4"})
    refused("peft_type='IA3' is not supported", settings | {"peft_type": "IA3"})
    for alpha in ("8", 10**400):
        refused("lora_alpha: expected", settings | {"lora_alpha": alpha})
    refused("of 2 layers has no projection", tensors={k.replace("layers.1", "layers.7"): v for k, v in tensors.items()})
    refused("expected lora_A and lora_B of one rank", tensors={k: v for k, v in tensors.items() if k != name})
    refused("expected matrices lora_A and lora_B", tensors=tensors | {"base_model.model.v_head.weight": tensors[name]})
    wide = {k: np.ones((v.shape[0], 5), np.float32) if "lora_A" in k else v for k, v in tensors.items()}
    refused(r"has the shape \[12, 5\], expected \[12, 12\]", tensors=wide)
    refused("holds NaN or infinity", tensors={k: v * np.nan for k, v in tensors.items()})
    with pytest.raises(UserError, match="expected an adapter of PEFT"):
        load_model(tmp_path / "base", adapter=tmp_path / "base")
