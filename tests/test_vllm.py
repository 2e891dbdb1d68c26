"""A real vLLM, in an environment of its own that `.ci/vllm` makes, serves calibrated log-probabilities."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from parity import torch_model
from ports import free_port
from test_torch import random_head
from tiny import WORDS, write_tokenizer

from calibjax.models import load_model
from calibjax.models.calibrated import calibrated_logprobs
from calibjax.train.portable import export_head

PYTHON = Path(os.environ.get("CALIBJAX_VLLM", Path(__file__).parents[1] / ".venv-vllm")) / "bin" / "python"
# Heads of 64 channels: vLLM's attention on a CPU has none of 8.
SETTINGS = {
    "model_type": "llama",
    "vocab_size": len(WORDS) + 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REQUESTS, NEW = 200, 8


def environment(**given):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHONPATH"))}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
    return kept | offline | given


@contextlib.contextmanager
def serving(model, log, *options, **given):
    """The URL of `vllm serve` with these options and environment variables."""
    port = free_port()
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--served-model-name",
        "m",
        *options,
    ]
    command += ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment(**given), stdout=file, stderr=file, cwd=log.parent)
        try:
            for _ in range(600):
                assert server.poll() is None, log.read_text()[-4000:]
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            server.terminate()
            server.wait(60)


def complete(url, prompt, temperature, seed, **more):
    """(tokens, their log-probabilities) of one request."""
    asked = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": temperature, "seed": seed, "logprobs": 0}
    asked |= {"return_tokens_as_token_ids": True, "ignore_eos": True, **more}
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]
    return [int(token.removeprefix("token_id:")) for token in found["tokens"]], found["token_logprobs"]


def complete_all(url, prompts, temperature=0.0):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda each: complete(url, each[1], temperature, each[0]), enumerate(prompts)))


def timed(run):
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """(directory of a small Llama, the same in JAX, heads by the name of the directory of their export)."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("exports")
    (folder / "model").mkdir()
    torch_model(folder / "model", SETTINGS)
    write_tokenizer(folder / "model", WORDS)
    lm = load_model(folder / "model")
    heads = {
        "all": random_head(
            lm, "mlp", ("hidden_states", "logit_statistics", "max_logit", "log_std_logits", "argmax_embedding")
        ),
        "logits": random_head(lm, "mlp", ("log_std_logits", "logit_statistics", "max_logit")),
        "constant": random_head(lm, "constant"),
        "transformer": random_head(lm, "transformer"),
    }
    for name, head in heads.items():
        export_head(folder / name, head, lm)
    return folder, lm, heads


def calibrated(lm, head, prompt, tokens):
    """Calibrated log-probabilities of the tokens that follow a prompt, by JAX."""
    text = np.array([prompt + tokens])
    ours = np.asarray(calibrated_logprobs(lm, head, np.pad(text, ((0, 0), (0, 64 - text.size)))))[0]
    return ours[np.arange(len(prompt) - 1, text.size - 1), tokens]


NEEDS_VLLM = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist: .ci/vllm makes it (3 minutes)")
GUIDE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()
_COMMANDS = re.findall(r"^(CALIBJAX_HEAD=(?:.*\\\n)*.*)$", GUIDE, flags=re.MULTILINE)
SERVE = [shlex.split(command.replace("\\\n", " ")) for command in _COMMANDS]
"""The words of each `vllm serve` of the guide."""


@pytest.mark.slow
@NEEDS_VLLM
def test_a_server(tmp_path, exports):
    folder, lm, heads = exports
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, SETTINGS["vocab_size"], rng.integers(4, 24)).tolist() for _ in range(REQUESTS)]
    of_mode = {"": None, "calibrated": "all", "unchanged": "all", "processor": "logits"}
    (options_of,) = (
        {words[1].partition("=")[2]: words[4:]} for words in SERVE if words[1].startswith("CALIBJAX_LOGITS=")
    )
    assert ["CALIBJAX_HEAD=runs/x/export", "vllm", "serve", "path/to/model"] in SERVE
    found, sampled, seconds = {}, {}, {}
    for mode, name in of_mode.items():
        given = {"CALIBJAX_HEAD": str(folder / name), "CALIBJAX_LOGITS": mode} if name else {}
        options = options_of.get(mode, ())
        with serving(folder / "model", tmp_path / f"{mode or 'plain'}.log", *options, **given) as url:
            found[mode] = complete_all(url, prompts)
            seconds[mode] = min(timed(lambda: complete_all(url, prompts)) for _ in range(5))
            sampled[mode] = complete_all(url, prompts[:20], temperature=1.0)
            if mode == "processor":
                with pytest.raises(urllib.error.HTTPError) as refused:
                    complete(url, prompts[0], 0.0, 0, logit_bias={"5": 1.0})
                assert refused.value.code == 400
                assert "logit_bias: a calibrated server" in refused.value.read().decode()
    for mode, name in list(of_mode.items())[1:]:
        assert [tokens for tokens, _ in found[mode]] == [tokens for tokens, _ in found[""]]  # greedy
        errors, changes = [], []
        for prompt, (tokens, log_probs), (_, plain) in zip(prompts, found[mode], found[""], strict=True):
            errors.append(np.abs(calibrated(lm, heads[name], prompt, tokens) - log_probs).max())
            changes.append(np.abs(np.subtract(plain, log_probs)).max())
        print(
            f"{mode}: largest |Δ log p| {max(errors):.1e}; {REQUESTS / seconds[mode]:.1f} requests/s, "
            f"{REQUESTS / seconds['']:.1f} without a head"
        )
        assert max(errors) < 1e-3
        assert np.median(changes) > 1e-2  # the head does something
    assert [tokens for tokens, _ in sampled["unchanged"]] == [tokens for tokens, _ in sampled[""]]
    for mode in ("calibrated", "processor"):
        assert [tokens for tokens, _ in sampled[mode]] != [tokens for tokens, _ in sampled[""]]


# vLLM's own loader of processors of the second model runner, which itself needs a GPU or Triton for CPUs.
SECOND = """
import json, os, sys
from types import SimpleNamespace
import numpy, torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu.sample.logits_processor import (
    build_custom_logits_processors, build_custom_logits_processors_params_validator)
names = ["calibjax.torch.vllm_processor:CalibratedLogits"]
given = {"dtype": "float32", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
config = EngineArgs("model", **given).create_engine_config()
slots = ("device", "max_num_reqs", "vocab_size", "all_token_ids", "prompt_len", "prefill_len", "total_len")
slots = SimpleNamespace(**dict.fromkeys(slots, 0))
found = {}
for head in ("logits", "constant"):
    os.environ.update(CALIBJAX_HEAD=head, CALIBJAX_LOGITS="processor")
    (processor,) = build_custom_logits_processors(config, slots, False, names)
    assert processor.add_request(0, SamplingParams())
    found[head] = processor.apply(torch.from_numpy(numpy.load("logits.npy")), None).numpy()
numpy.savez("found.npz", **found)
validate = build_custom_logits_processors_params_validator(names)
validate(SamplingParams(temperature=0.7, top_k=5, seed=1))
def error_of(run, mode="processor", head="logits"):
    os.environ.update(CALIBJAX_HEAD=head, CALIBJAX_LOGITS=mode)
    try:
        run()
    except Exception as error:  # vLLM wraps those of requests
        return f"{type(error).__name__}: {error}"
build = lambda: build_custom_logits_processors(config, slots, False, names)
errors = {
    "request": error_of(lambda: validate(SamplingParams(min_tokens=3, repetition_penalty=1.2))),
    "mode": error_of(build, mode="calibrated"),
    "reads hidden states": error_of(build, head="all"),
    "reads other tokens": error_of(build, head="transformer"),
}
config.model_config.logprobs_mode = "raw_logprobs"
errors["raw"] = error_of(build)
config.model_config.logprobs_mode = "processed_logprobs"
config.model_config.get_vocab_size = lambda: 99
errors["vocabulary"] = error_of(build)
print(json.dumps(errors))
"""


@pytest.mark.slow
@NEEDS_VLLM
def test_a_processor_of_the_second_model_runner(exports):
    folder, lm, heads = exports
    logits = np.asarray(lm.logits(np.random.default_rng(1).integers(3, 30, (1, 8)))[0], np.float32)
    np.save(folder / "logits.npy", logits)
    done = subprocess.run(
        [PYTHON, "-c", SECOND], env=environment(), capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    spread = np.log(logits.std(axis=1, ddof=1))
    features = np.stack([spread, logits.max(axis=1)], axis=1)[None]
    log_scale = {"constant": np.full(8, -0.3 + 0.1)}
    log_scale["logits"] = np.asarray(heads["logits"].config.build().apply({"params": heads["logits"].params}, features))
    log_scale["logits"] = log_scale["logits"][0] + 0.1
    with np.load(folder / "found.npz") as found:
        for name in found.files:
            np.testing.assert_allclose(found[name], logits * np.exp(log_scale[name])[:, None], rtol=1e-5, err_msg=name)
            np.testing.assert_array_equal(found[name].argmax(1), logits.argmax(1))
    errors = json.loads(done.stdout.splitlines()[-1])
    assert "min_tokens, repetition_penalty: a calibrated server" in errors["request"]
    assert "needs CALIBJAX_HEAD=DIR and CALIBJAX_LOGITS=processor" in errors["mode"]
    assert (
        "a logits processor sees logits only, and this mlp head reads hidden_states, " in errors["reads hidden states"]
    )
    assert "this transformer head reads" in errors["reads other tokens"]
    assert "--logprobs-mode raw_logprobs: taken before" in errors["raw"]
    assert "the model served has 128 and 99" in errors["vocabulary"]


@pytest.mark.slow
@NEEDS_VLLM
def test_errors(exports):
    """One clear error where the engine starts, also from a version of vLLM with another layer."""
    folder, _, _ = exports
    register = "from calibjax.torch.vllm import register; register()"
    other = (
        "import vllm.model_executor.layers.logits_processor as m; m.LogitsProcessor = type('Other', (), {});" + register
    )
    cases = [
        ("transformer", "", register, "reads other tokens"),
        ("nothing", "", register, "not a head written by"),
        ("all", "loud", register, 'expected "calibrated", "unchanged" or "processor", got \'loud\''),
        ("all", "", other, "its layer of logits is not that of 0.32"),
    ]
    for name, mode, code, message in cases:
        given = environment(CALIBJAX_HEAD=str(folder / name), **({"CALIBJAX_LOGITS": mode} if mode else {}))
        done = subprocess.run([PYTHON, "-c", code], env=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]
