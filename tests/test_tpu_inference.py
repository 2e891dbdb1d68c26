"""Heads on the Llama of a real tpu-inference, in an environment of its own, on a CPU.

`CALIBJAX_TPU_INFERENCE` names an environment with tpu-inference 0.32, vLLM, JAX, and calibjax without its requirements.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from parity import torch_model
from test_torch import random_head
from test_vllm import SETTINGS
from tiny import WORDS, write_tokenizer

from calibjax.models import load_model
from calibjax.models.calibrated import calibrated_logprobs
from calibjax.train.portable import export_head

PYTHON = Path(os.environ.get("CALIBJAX_TPU_INFERENCE", "none")) / "bin" / "python"
RUN = """
import sys
import jax, jax.numpy as jnp, numpy as np
from safetensors.numpy import load_file
from vllm.engine.arg_utils import EngineArgs
from tpu_inference.distributed.jax_parallel_state import init_pp_distributed_environment
from tpu_inference.models.common import model_loader
from calibjax.torch.heads import HeadError, read_export
from calibjax.torch.tpu_inference import _check_base, register

jax.config.update("jax_default_matmul_precision", "highest")
init_pp_distributed_environment("", 0, 1, jax.devices()[0], False)
axes = ("data", "attn_dp", "attn_dp_expert", "expert", "model", "dcp", "pcp")
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * 7), axes)
name = "CalibratedLlamaForCausalLM"
for head in sys.argv[1:]:
    register(head)
    given = {"dtype": "float32", "max_model_len": 64, "hf_overrides": {"architectures": [name]}}
    config = EngineArgs("model", **given).create_engine_config()
    assert config.model_config.architectures == [name]
    config.model_config.dtype = jnp.float32
    cls = model_loader._MODEL_REGISTRY[name]
    with jax.set_mesh(mesh):
        model = cls(config, jax.random.key(0), mesh)
        try:
            _check_base(super(cls, model).compute_logits, read_export(head))
        except HeadError as error:  # of the random weights that it begins with
            print(error)
        matrix = load_file("model/model.safetensors")["lm_head.weight"]
        model.model.lm_head.value = jnp.asarray(matrix.T)
        _check_base(super(cls, model).compute_logits, read_export(head))
        logits = jax.jit(model.compute_logits)(jnp.asarray(np.load("hidden.npy")))
        np.save(f"{head}.npy", jax.nn.log_softmax(logits))
try:
    register("all")
except HeadError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="CALIBJAX_TPU_INFERENCE names no environment with tpu-inference")
def test_llama(tmp_path):
    """Registered, accepted by vLLM's configuration, built, and its compiled logits against JAX; another base refused.

    The weights of its unembedding are set by hand: its loader needs a torchax that fits the torch of the environment.
    """
    (tmp_path / "model").mkdir()
    torch_model(tmp_path / "model", SETTINGS)
    write_tokenizer(tmp_path / "model", WORDS)
    lm = load_model(tmp_path / "model")
    heads = {
        "constant": random_head(lm, "constant"),
        "linear": random_head(lm, "linear"),
        "mlp": random_head(lm, "mlp", ("hidden_states", "logit_statistics", "max_logit", "log_std_logits")),
    }
    for name, head in heads.items():
        export_head(tmp_path / name, head, lm)
    export_head(tmp_path / "all", random_head(lm, "mlp", ("hidden_states", "argmax_embedding")), lm)
    tokens = np.random.default_rng(0).integers(3, 40, (1, 20))
    np.save(tmp_path / "hidden.npy", np.asarray(lm.hidden_states(tokens)[0]))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTHONPATH"))}
    command = [PYTHON, "-c", RUN, *heads]
    environment = {**kept, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("this head was fitted on another base model: its logits differ") == len(heads)
    assert "this mlp head reads hidden_states, argmax_embedding" in done.stdout
    for name, head in heads.items():
        expected = np.asarray(calibrated_logprobs(lm, head, tokens))[0]
        error = np.abs(np.load(tmp_path / f"{name}.npy") - expected).max()
        print(f"tpu-inference, {name}: {error:.1e}")
        assert error <= 1e-5
