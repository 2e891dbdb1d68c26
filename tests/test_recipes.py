"""The recipes: what they say of memory, and that they run."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from assets import load_script
from tiny import write_model, write_text

from calibjax.losses.long_horizon import MODES
from calibjax.models import abstract_params
from calibjax.models.shapes import SHAPES
from calibjax.runtime.sharding import make_mesh

RECIPES = Path(__file__).parents[1] / "train" / "recipes"

# Numbers of parameters as the hub's model cards and transformers' configurations give them.
GPT2 = [("small", 124_439_808, 12, 768), ("medium", 354_823_168, 24, 1024), ("large", 774_030_080, 36, 1280)]


@pytest.mark.parametrize(
    ("name", "shape"), [("llama31_8b", "llama-3.1-8b"), ("mistral_7b", "mistral-7b"), ("gemma2_2b", "gemma-2-2b")]
)
def test_memory_is_what_the_docstring_says(name, shape):
    text, config = load_script(RECIPES / "label_smoothing.py").__doc__, SHAPES[shape]
    parameters = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract_params(config)))
    length, gib = 4096, 2**30
    assert (
        f"{name}: {16 * parameters / gib:.1f} GiB, {16 * parameters / 8 / gib:.1f} GiB on each device; "
        f"inputs {float(f'{2 * config.num_layers * length * config.hidden_size / gib:.2g}')} GiB; "
        f"the logits of a sequence would take {4 * length * config.vocab_size / gib:.2f} GiB"
    ) in text


@pytest.mark.parametrize("data", ["alpaca", "tulu3", "openhermes"])
def test_a_recipe_fits_its_mesh(data):
    run = load_script(RECIPES / "label_smoothing.py").recipe("some/model", data)
    run.sft.check(make_mesh((1, 8, 1)))
    assert (run.sft.label_smoothing, run.sft.reduction, run.sft.learning_rate) == (0.1, "sum", 5e-6)


@pytest.mark.slow
def test_a_recipe_runs(monkeypatch, tmp_path, capsys):
    module = load_script(RECIPES / "label_smoothing.py")
    model, text = write_model(tmp_path / "model"), write_text(tmp_path / "data.jsonl", rows=300, words=12)
    files = ["--model", str(model), "--data", str(text), "--out", str(tmp_path / "out"), "--split", "None"]
    monkeypatch.setattr(sys, "argv", ["recipe", "llama31_8b", "alpaca", *files, "--seq-len", "12", "--quiet"])
    assert module.main() == 0
    assert "results in" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "parameters", "layers", "width"), GPT2)
def test_the_long_horizon_of_gpt2(name, parameters, layers, width):
    """The authors' settings (config_gpt2.yaml and runner_gpt2.py at 5c4c39d): 1,000 steps of 512 texts, and so on."""
    module, gib = load_script(RECIPES / "gpt2.py"), 2**30
    model, accumulate = module.SIZES[name]
    run = module.recipe(model, accumulate=accumulate)
    assert run.lhts.objective == MODES["authors"]
    assert (run.lhts.temperatures, run.lhts.rate, run.lhts.batch_size, run.text.seq_len) == ((0.9,), 1e-4, 512, 1024)
    sequences = int(int(run.text.max_sequences * run.fit_fraction) * (1 - run.lhts.validation_fraction))
    assert 1000 <= sequences // 512 <= 1002
    run.lhts.check(make_mesh((1, 8, 1)))
    for expected in (
        f"{16 * parameters / gib:.1f} GiB for weights",
        f"{4 * parameters / gib:.1f} GiB for the scorer",
        f"{2 * layers * (512 // accumulate) * 1023 * width / gib:.1f} GiB for the inputs",
    ):
        assert expected in module.__doc__.split(f"\n{name}:")[1].splitlines()[0], expected
