"""Configurations that are read without transformers: whatever is, transformers reads as the same."""

import json
import subprocess
import sys

import numpy as np
import pytest
from assets import LLAMA_MODELS, model_path
from campaigns.fuzz_families import DRAWN
from transformers import AutoConfig

from calibjax.models import config_from_hf
from calibjax.models.families import _find_settings, _read_plain
from calibjax.models.hf_plain import _DEFAULTS, _TAKEN
from calibjax.runtime.errors import UserError

SETTINGS = {
    "architectures": ["AForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "max_window_layers": 1,
    "sliding_window": None,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "attention_dropout": 0.1,
    "mlp_bias": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "pretraining_tp": 1,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "_name_or_path": "a/b",
}
ANY = (None, "x", "1", [], {}, True, False, -1, 0, 1, 5, 10**12, 10**400, float("nan"), 1.0, 1.5, [1], ["x"], [None])
RARE = ("eos_token_id", "rope_parameters", "layer_types", "quantization_config", "is_causal", "partial_rotary_factor")


def read(folder, settings):
    """Ours without transformers, and ours of what transformers reads; None where one is refused."""
    (folder / "config.json").write_text(json.dumps(settings))
    try:
        plain = _read_plain(_find_settings(folder)[1])
    except UserError:
        return None, None
    if plain is None:
        return None, None
    assert config_from_hf(folder) == plain
    return plain, config_from_hf(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("family", _DEFAULTS)
def test_equals_transformers(tmp_path, family):
    """All settings, without each, with any value of each, and random ones."""
    settings = {"model_type": family} | SETTINGS
    assert set(settings) == set(_TAKEN), "a setting that is taken is not tried"
    tried = [settings, *({k: v for k, v in settings.items() if k != name} for name in SETTINGS)]
    assert all(read(tmp_path, given)[0] for given in tried[:1])
    tried += [settings | {name: value} for name in (*settings, *RARE) for value in ANY]
    rng = np.random.default_rng(0)
    for _ in range(150):
        left = {name: value for name, value in settings.items() if name == "model_type" or rng.random() < 0.8}
        drawn = {name: values[rng.integers(len(values))] for name, values in DRAWN[family].items()}
        chosen = {name: value for name, value in drawn.items() if value != "draw" and rng.random() < 0.3}
        sizes = {"vocab_size": 7, "num_key_value_heads": 4, "head_dim": 6, "sliding_window": 5, "hidden_size": 30}
        tried.append(left | chosen | {name: size for name, size in sizes.items() if rng.random() < 0.3})
    found = [read(tmp_path, given) for given in tried]
    pairs = [pair for pair in found if pair[0] is not None]
    assert all(plain == theirs for plain, theirs in pairs)
    print(f"{family}: {len(pairs)} of {len(tried)} read without transformers")
    assert len(pairs) > 60


def test_a_model_is_loaded_without_transformers_and_torch():
    folder = str(model_path(LLAMA_MODELS[0]))
    code = (
        f"import calibjax, sys; lm = calibjax.load_model({folder!r}); "
        "assert lm.has_tokenizer and not {'transformers', 'torch'} & sys.modules.keys(); "
        "assert lm.tokenizer.decode(lm.tokenizer('once upon a time')['input_ids'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
