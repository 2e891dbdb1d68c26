"""Heads in the files of the authors of arXiv 2409.19817 give their formulas, computed by PyTorch and transformers."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import WIDTH, head_log_scale, make_lm

import calibjax

torch = pytest.importorskip("torch")
LM, INNER = make_lm(), 24
OPTIONS = {"intermediate_size": INNER, "num_attention_heads": 2, "num_key_value_heads": 2, "in_features": WIDTH}


def written(directory, kind, tensors, **changes):
    """As `CalibrationModel.save_pretrained` writes it."""
    from safetensors.torch import save_file

    config = {"calibration_type": kind, "feature_key": "hidden_states", **OPTIONS, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, directory / "calibration_head.safetensors")
    return directory


def modules(kind):
    """The modules of their head by name, and its output for hidden states `[B, T, D]`."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(WIDTH, 1)
    if kind == "linear":
        return {"linear": linear}, linear
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=2, num_key_value_heads=2, rms_norm_eps=1e-6
    )
    config._attn_implementation = "eager"
    if kind == "mlp":
        mlp = LlamaMLP(config)
        return {"mlp": mlp, "linear_head": linear}, lambda x: linear(mlp(x))
    layer, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def run(x):
        length = x.shape[1]
        mask = torch.full((length, length), -1e9).triu(1)[None, None]
        positions = torch.arange(length)[None]
        out = layer(x, attention_mask=mask, position_embeddings=rotary(x, positions), position_ids=positions)
        return linear(out[0] if isinstance(out, tuple) else out)

    return {"transformer": layer, "linear_head": linear}, run


@pytest.mark.parametrize("kind", ["linear", "mlp", "transformer"])
def test_their_formula(kind, tmp_path):
    parts, run = modules(kind)
    tensors = {f"{name}.{key}": x for name, part in parts.items() for key, x in part.state_dict().items()}
    head = calibjax.load_head(written(tmp_path, kind, tensors), LM)
    hidden = np.random.default_rng(0).normal(size=(2, 9, WIDTH)).astype(np.float32)
    want = run(torch.tensor(hidden))[..., 0].detach().numpy()
    run = jax.jit(functools.partial(head_log_scale, head))
    got = run(hidden, LM.unembedding, segment_ids=jnp.ones((2, 9), jnp.int32))
    np.testing.assert_allclose(got, np.minimum(want, np.log(10)), atol=2e-5)
    assert calibjax.calibrated_confidence(LM, np.ones((1, 5), np.int32), head).confidence.shape == (1, 5)


def test_their_temperature(tmp_path):
    head = calibjax.load_head(written(tmp_path, "temperature", {"temperature": torch.tensor([2.0])}), LM)
    temperature = calibjax.calibrated_confidence(LM, np.ones((1, 5), np.int32), head).temperature
    np.testing.assert_allclose(temperature, 2.0, rtol=1e-6)


def test_what_is_refused(tmp_path):
    linear = {"linear.weight": torch.zeros(1, WIDTH), "linear.bias": torch.zeros(1)}
    with pytest.raises(calibjax.UserError, match="do not know their base model"):
        calibjax.load_head(written(tmp_path, "linear", linear))
    for changes, message in (
        ({"normalize_logits": True}, "normalize_logits"),
        ({"feature_key": "hidden_states+other"}, "other"),
        ({"calibration_type": "platt_scaling_matrix"}, "platt_scaling_matrix"),
        ({"feature_key": "maxlogit"}, "expected parameters of the shapes"),
    ):
        with pytest.raises(calibjax.UserError, match=message):
            calibjax.load_head(written(tmp_path, "linear", linear, **changes), LM)
