"""Models, heads and cards over HTTP, from and to a server that speaks the Hub's protocol (tests/hub.py)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub import TOKEN, Repository, serving
from report_documents import document
from tiny import files_in, model_tensors, write_model, write_text

from calibjax.eval.report.notes import Subject, model_card
from calibjax.heads import FittedHead
from calibjax.models import load_model
from calibjax.models.hub import Repository as Name
from calibjax.models.hub import commit_of, repository_of, upload
from calibjax.runtime.errors import UserError, first_line
from calibjax.train.saved import export_head, load_head


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server, with this process's huggingface_hub pointed at it, an empty cache and no token."""
    from huggingface_hub import constants

    with serving() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "DOWNLOAD_CHUNK_SIZE": 256,  # what is resumed are chunks
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base") / "model")


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert repository_of("org/name") == Name("org/name", None)
    assert repository_of("org/name@v1.0") == Name("org/name", "v1.0")
    assert repository_of("gpt2@refs/pr/1") == Name("gpt2", "refs/pr/1")
    for path in ("/a/b", "a/b/c", "../a", "a/b@", "~/a", "a b"):
        assert repository_of(path) is None, path
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert repository_of("org/name") is None  # a path that exists wins
    assert commit_of(tmp_path) is None
    assert commit_of(Path("c/models--org--name/snapshots/12ab")) == Name("org/name", "12ab")


def test_a_model_by_name_and_revision(hub, base, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before huggingface_hub tries again
    hub.models["org/base"] = repository = Repository(files_in(base))
    first = repository.refs["main"]
    changed = write_model(base.parent / "changed", {n: 2 * t for n, t in model_tensors().items()})
    second = repository.commit(files_in(changed))
    hub.cut |= {"model.safetensors", "tokenizer.json"}
    newest = load_model("org/base")
    assert newest.fingerprint == load_model(changed).fingerprint
    assert commit_of(newest.path) == Name("org/base", second)
    assert load_model(f"org/base@{first}").fingerprint == load_model(base).fingerprint
    assert not hub.cut  # both transfers broke off, and were resumed
    resumed = [request for request in hub.requests if "range" in request.headers]
    assert {Path(request.path).name for request in resumed} == {"model.safetensors", "tokenizer.json"}
    seen = len(hub.requests)
    load_model(f"org/base@{first}")  # a commit does not change: from the cache
    assert len(hub.requests) == seen


def test_what_the_hub_refuses(hub, base, monkeypatch):
    files = files_in(base)
    hub.models |= {"org/private": Repository(files, private=True), "org/gated": Repository(files, gated=True)}
    hub.models |= {
        "org/open": Repository(files),
        "org/pickled": Repository({"config.json": files["config.json"], "model.bin": b"x"}),
    }
    for name, reason in {
        "org/none": "no such repository, or a private one",
        "org/private": "no such repository, or a private one",
        "org/gated": "it is gated: accept its conditions on its page, and set HF_TOKEN",
        "org/open@v9": "it has no revision v9",
        "org/pickled": "expected model.safetensors",
    }.items():
        with pytest.raises(UserError, match=reason):
            load_model(name)
    assert first_line(OSError("set 'HF_HUB_OFFLINE=0', " * 9)).endswith(", set ...")  # a long reason ends with a word
    assert not any(request.path.endswith("model.bin") for request in hub.requests)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert load_model("org/private").fingerprint == load_model("org/gated").fingerprint
    transfers = [request for request in hub.requests if request.path.startswith("/cdn/")]
    assert transfers
    assert not any("authorization" in request.headers for request in transfers)  # the token stays with the Hub


def test_heads_by_name(hub, base, tmp_path):
    lm = load_model(base)
    export_head(tmp_path / "a", FittedHead.constant(lm, -0.3), lm)
    export_head(tmp_path / "b", FittedHead.constant(lm, -0.5), lm)
    hub.models["org/head"] = repository = Repository(files_in(tmp_path / "a") | {"README.md": b"x"})
    first = repository.refs["main"]
    repository.commit(files_in(tmp_path / "b"))
    repository.refs["v1"] = first
    assert load_head("org/head", lm).params["log_scale"] == np.float32(-0.5)
    assert load_head("org/head@v1", lm).params["log_scale"] == np.float32(-0.3)
    assert load_head(f"org/head@{first}", lm).params["log_scale"] == np.float32(-0.3)
    assert not any(request.path.endswith("README.md") for request in hub.requests)
    damaged = files_in(tmp_path / "a")
    damaged["head.safetensors"] = damaged["head.safetensors"][:-9]
    hub.models |= {"org/damaged": Repository(damaged), "org/other": Repository({"README.md": b"x"})}
    other = load_model(write_model(tmp_path / "other", {n: 2 * t for n, t in model_tensors().items()}))
    for name, model, reason in (
        ("org/damaged", lm, "damaged"),
        ("org/other", lm, "expected a head"),
        ("org/nothing", lm, "no such repository"),
        ("org/head", other, "fitted on another base model"),
    ):
        with pytest.raises(UserError, match=reason):
            load_head(name, model)
    torch = pytest.importorskip("calibjax.torch", exc_type=ImportError)
    assert torch.load_head(f"org/head@{first}").log_scale == np.float32(-0.3)
    with pytest.raises(torch.HeadError, match="org/nothing: no such directory"):
        torch.load_head("org/nothing")


def test_uploads(hub, monkeypatch):
    with pytest.raises(UserError, match="no token: set HF_TOKEN"):
        upload("org/new", {}, "m")
    monkeypatch.setenv("HF_TOKEN", "hf_ReadsOnly")
    with pytest.raises(UserError, match=r"nothing was uploaded .*status 401") as refused:
        upload("org/new", {"a.json": b"{}"}, "m")
    assert "hf_ReadsOnly" not in str(refused.value)
    assert not hub.models
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(UserError, match="expected a repository as org/name"):
        upload("org/new@v1", {}, "m")
    with pytest.raises(UserError, match="nothing was uploaded"):
        upload("org/bad", {"README.md": b"---\n: [\n---\n"}, "m")
    files = {"a.json": b"{}", "b.safetensors": b"\0" * 1000, "README.md": b"---\ntags: [x]\n---\n"}
    commit = upload("org/new", files, "m", private=True)
    repository = hub.models["org/new"]
    assert repository.refs["main"] == commit
    assert repository.commits[commit] == files
    assert repository.private


@pytest.mark.parametrize("named", [str, lambda text: f"<script>|{text}](x)"], ids=["benign", "hostile"])
def test_card(named):
    metrics = document()
    metrics["run"] = {"command": "train ats", "data": named("text.jsonl"), "fit": {"candidate": "temperature scaling"}}
    metrics["transfer"] = {named("domain"): metrics["held_out"]}
    subject = Subject("org/head", None, None, named("base"), "12ab", "ats", "FittedHead(mlp)")
    card = model_card(metrics, subject)
    assert "base_model" not in yaml.safe_load(card.split("---\n")[1])
    ece = metrics["held_out"]["methods"]["ats"]["ece"]
    assert f"{ece['value']:.4f} [{ece['low']:.4f}, {ece['high']:.4f}]" in card
    assert "| NLL |" in card  # of a run without their intervals
    assert "| Loss | cross-entropy |" in card  # where no head beat temperature scaling
    assert "<script>" not in card
    metrics["held_out"]["methods"]["ats"]["intervals"] = {"nll": {"low": 1.5, "high": 2.5}}
    assert "| NLL [95% interval] |" in model_card(metrics, subject)
    assert f"{metrics['held_out']['methods']['ats']['nll']:.4f} [1.5000, 2.5000]" in model_card(metrics, subject)
    assert "load_model('org/base@12ab')" in model_card(metrics, subject._replace(base="org/base", revision="12ab"))


@pytest.mark.slow
def test_from_a_name_to_a_calibrated_head_and_back(hub, base, tmp_path):
    """The command line over HTTP alone: fit to a model and data by name, push, and use the head by its name."""
    hub.models["org/base"] = Repository(files_in(base))
    hub.data["org/text"] = texts = Repository({"train.jsonl": write_text(tmp_path / "text.jsonl").read_bytes()})
    pinned = texts.refs["main"]
    texts.commit({"train.jsonl": b"not what is asked for"})
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": TOKEN}

    def run(*args):
        done = subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert TOKEN not in done.stdout + done.stderr
        return done.stdout

    fit = "--batch-size 8 --loss cross-entropy --head-kind linear --seq-len 16 --out runs/x"
    run("-m", "calibjax", "train", "ats", "--model", "org/base", "--data", f"org/text@{pinned}", *fit.split(" "))
    pushed = json.loads(run("-m", "calibjax", "push", "runs/x", "org/head", "--json"))
    repository = hub.models["org/head"]
    assert repository.refs["main"] == pushed["commit"]
    files = repository.commits[pushed["commit"]]
    assert not any(str(tmp_path).encode() in content or TOKEN.encode() in content for content in files.values())
    card = files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == "org/base"
    assert hub.models["org/base"].refs["main"] in card
    figures = json.loads(files["metrics.json"])["held_out"]["methods"]["ats"]["ece"]
    assert f"{figures['value']:.4f} [{figures['low']:.4f}, {figures['high']:.4f}]" in card
    assert files["reliability.png"].startswith(b"\x89PNG")
    # The code of the card, as a reader runs it; and what it loads by name is what the run left.
    blocks = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert len(blocks) == 2
    same = "again = calibjax.load_head('runs/x', lm)\n"
    same += "assert (again.params['output']['kernel'] == head.params['output']['kernel']).all()\n"
    run("-c", "\n".join((*blocks, same)))
