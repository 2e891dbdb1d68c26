"""A real vLLM, in an environment of its own that `.ci/vllm` makes, serves calibrated log-probabilities."""

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from assets import real_model
from parity import torch_model
from ports import free_port
from tiny import LLAMA_JSON, WORDS, random_head, write_tokenizer

from calibjax.heads import FEATURES
from calibjax.models import load_model
from calibjax.models.calibrated import calibrated_log_probs
from calibjax.train.saved import export_head

PYTHON = Path(os.environ.get("CALIBJAX_VLLM", Path(__file__).parents[1] / ".venv-vllm")) / "bin" / "python"
# Heads of 64 channels: vLLM's attention on a CPU has none of 8.
SETTINGS = LLAMA_JSON | {"vocab_size": len(WORDS) + 3, "hidden_size": 128, "intermediate_size": 256}
SETTINGS |= {"max_position_embeddings": 128, "tie_word_embeddings": False}
NEW = 8


def environment(**given):
    inherited = {n: value for n, value in os.environ.items() if not n.startswith(("JAX_", "XLA_", "PYTHONPATH"))}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
    return inherited | offline | given


@contextlib.contextmanager
def serving(model, log, **given):
    """The URL of `vllm serve` with these environment variables."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
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


def complete(url, prompt, temperature, seed):
    """(tokens, their log-probabilities) of one request."""
    body = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": temperature, "seed": seed, "logprobs": 0}
    body |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        log_probs = json.load(answer)["choices"][0]["logprobs"]
    return [int(token.removeprefix("token_id:")) for token in log_probs["tokens"]], log_probs["token_logprobs"]


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
    heads = {"all": random_head(lm, "mlp", tuple(FEATURES)), "transformer": random_head(lm, "transformer")}
    for name, head in heads.items():
        export_head(folder / name, head, lm)
    return folder, lm, heads


def calibrated(lm, head, prompt, tokens):
    """Calibrated log-probabilities of the tokens that follow a prompt, by JAX."""
    text = np.array([prompt + tokens])
    ours = np.asarray(calibrated_log_probs(lm, np.pad(text, ((0, 0), (0, 64 - text.size))), head))[0]
    return ours[np.arange(len(prompt) - 1, text.size - 1), tokens]


NEEDS_VLLM = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist: .ci/vllm makes it (3 minutes)")
GUIDE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text()


def check_server(folder, lm, model, head, requests, log):
    """Greedy tokens are those without the head, log-probabilities those of JAX; returns samples at temperature 1."""
    export_head(folder / "served", head, lm)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, lm.config.vocab_size, rng.integers(4, 24)).tolist() for _ in range(requests)]
    got, sampled, seconds = {}, {}, {}
    for mode in ("", "calibrated", "unchanged"):
        given = {"CALIBJAX_HEAD": str(folder / "served"), "CALIBJAX_LOGITS": mode} if mode else {}
        with serving(model, log / f"{mode or 'plain'}.log", **given) as url:
            got[mode] = complete_all(url, prompts)
            seconds[mode] = min(timed(lambda: complete_all(url, prompts)) for _ in range(3))
            sampled[mode] = complete_all(url, prompts[:20], temperature=1.0)
    for mode in ("calibrated", "unchanged"):
        assert [tokens for tokens, _ in got[mode]] == [tokens for tokens, _ in got[""]]
        errors, changes = [], []
        for prompt, (tokens, log_probs), (_, plain) in zip(prompts, got[mode], got[""], strict=True):
            errors.append(np.abs(calibrated(lm, head, prompt, tokens) - log_probs).max())
            changes.append(np.abs(np.subtract(plain, log_probs)).max())
        print(
            f"{mode}: largest |Δ log p| {max(errors):.1e}; {requests / seconds[mode]:.1f} requests/s, "
            f"{requests / seconds['']:.1f} without a head"
        )
        assert max(errors) < 1e-3
        assert np.median(changes) > 1e-2  # the head does something
    return sampled


@pytest.mark.slow
@NEEDS_VLLM
def test_a_server(tmp_path, exports):
    folder, lm, heads = exports
    assert "CALIBJAX_HEAD=runs/x/export vllm serve path/to/model\n" in GUIDE
    sampled = check_server(folder, lm, folder / "model", heads["all"], 200, tmp_path)
    assert [tokens for tokens, _ in sampled["unchanged"]] == [tokens for tokens, _ in sampled[""]]
    assert [tokens for tokens, _ in sampled["calibrated"]] != [tokens for tokens, _ in sampled[""]]


@pytest.mark.slow
@NEEDS_VLLM
def test_a_server_of_a_real_model(tmp_path):
    directory = real_model("smollm2-135m-instruct")
    lm = load_model(directory)
    check_server(tmp_path, lm, directory, random_head(lm, "linear", tuple(FEATURES)), 40, tmp_path)


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
        ("all", "loud", register, 'expected "calibrated" or "unchanged", got \'loud\''),
        ("all", "", other, "its layer of logits differs from vLLM 0.32"),
    ]
    for name, mode, code, message in cases:
        given = environment(CALIBJAX_HEAD=str(folder / name), **({"CALIBJAX_LOGITS": mode} if mode else {}))
        done = subprocess.run([PYTHON, "-c", code], env=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]
