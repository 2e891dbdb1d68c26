"""Programs of heads, and of models with heads, read back."""

import subprocess
import sys

import numpy as np
import pytest
from jax import export
from test_torch import random_head
from tiny import VOCAB, make_lm

from calibjax.heads import FEATURES
from calibjax.models import stablehlo
from calibjax.models.calibrated import calibrated_logprobs
from calibjax.runtime.errors import UserError

MASK = np.arange(7) >= np.array([[4], [0], [2]])


@pytest.mark.parametrize("kind", ["constant", "linear", "mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_a_head(kind):
    head = random_head(make_lm(), kind, tuple(FEATURES))
    features = np.random.default_rng(0).normal(0, 2, (3, 7, head.config.width)).astype(np.float32)
    found = export.deserialize(bytearray(stablehlo.head_program(head))).call(features, MASK)
    segments = MASK.astype(np.int32)
    expected = head.config.build().apply({"params": head.params}, features, where=MASK, segment_ids=segments) + 0.1
    np.testing.assert_allclose(found[MASK], expected[MASK], atol=1e-6)


@pytest.mark.slow
def test_a_model_with_its_head_where_calibjax_cannot_be_imported(tmp_path):
    lm = make_lm()
    head = random_head(lm, "transformer", tuple(FEATURES))
    tokens = np.random.default_rng(0).integers(0, VOCAB, MASK.shape).astype(np.int32)
    (tmp_path / "program").write_bytes(stablehlo.model_program(lm, head))
    np.savez(tmp_path / "inputs.npz", tokens, MASK)
    code = """
import sys, numpy, pathlib
sys.modules["calibjax"] = None
from jax import export
given = numpy.load("inputs.npz")
program = export.deserialize(bytearray(pathlib.Path("program").read_bytes()))
numpy.savez("found.npz", *program.call(*(given[name] for name in given.files)))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    with np.load(tmp_path / "found.npz") as found:
        log_probs, log_scale = (found[name] for name in found.files)
    expected = calibrated_logprobs(lm, head, tokens, segment_ids=MASK.astype(np.int32))
    np.testing.assert_allclose(log_probs[MASK], expected[MASK], atol=1e-5)
    np.testing.assert_array_equal(log_probs[MASK].argmax(-1), expected[MASK].argmax(-1))
    assert np.isfinite(log_scale[MASK]).all()


def test_errors(monkeypatch):
    lm = make_lm()
    with pytest.raises(UserError, match="another base model"):
        stablehlo.model_program(make_lm(seed=1), random_head(lm, "linear"))
    monkeypatch.setattr(stablehlo, "_LARGEST", 1 << 10)
    with pytest.raises(UserError, match="at most 0 MiB of weights"):
        stablehlo.model_program(lm, random_head(lm, "linear"))
