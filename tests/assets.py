"""Where the real models and data are that some tests use; without them those tests are skipped, and say why."""

import importlib.util
import os
from pathlib import Path

import pytest

ASSETS = Path(os.environ.get("CALIBJAX_ASSETS", Path(__file__).parents[2] / "shared" / "assets"))

LLAMA_MODELS = ("stories260K", "tinystories-656k", "baby-llama-105")
GPT2_MODELS = ("craftgpt-5M",)
MODELS = LLAMA_MODELS + GPT2_MODELS


def require_asset(relative: str) -> Path:
    """Returns the path of an asset; skips the calling test where it is not there."""
    path = ASSETS / relative
    if not path.exists():
        pytest.skip(f"{path} is not there; set CALIBJAX_ASSETS to the folder with the test assets")
    return path


def model_path(name: str) -> Path:
    """Returns the directory of one of `MODELS`, or skips the calling test."""
    return require_asset(f"models/{name}")


def tokenizer_of(name: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(name))


def load_script(file: Path):
    """The module of a script, which is not among those that are imported."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data_path(relative: str) -> Path:
    """Returns a file or folder of the data sets, or skips the calling test."""
    return require_asset(f"data/{relative}")


def real_model(name: str) -> Path:
    """Returns a file or folder of real models, such as `gemma-3-270m`; skips the calling test where it is not there.

    `.ci/run` fills the folder that `CALIBJAX_REAL` names by `shared/assets/fetch_real.py`.
    """
    folder = os.environ.get("CALIBJAX_REAL")
    if folder is None or not (Path(folder) / name).exists():
        pytest.skip(f"{name} is not there; set CALIBJAX_REAL to the folder that shared/assets/fetch_real.py has filled")
    return Path(folder) / name
