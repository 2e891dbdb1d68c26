"""What earlier versions wrote is read, verified, and gives the same numbers; see `make_version_goldens.py`."""

import json
import shutil

import jax
import make_version_goldens as goldens
import numpy as np
import pytest

from calibjax.train import load_head
from calibjax.train.checkpoint import Checkpoints
from calibjax.train.saved import head_notes


@pytest.mark.parametrize("kind", ["linear", "transformer"])
def test_head_of_an_earlier_version(kind, caplog):
    got, expected = load_head(goldens.SAVED / f"head-{kind}"), goldens.head(kind)
    assert (got.config, got.log_factor, got.fingerprint) == (expected.config, goldens.LOG_FACTOR, goldens.FINGERPRINT)
    jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)
    assert head_notes(goldens.SAVED / f"head-{kind}") == {"kind": kind}
    assert "not verified" not in caplog.text
    scales = json.loads((goldens.SAVED / "log_scale.json").read_text())[kind]
    # A block of 8 channels: sums of some 30 products of numbers of size 1 to 10.
    np.testing.assert_allclose(goldens.log_scale(got), scales, atol=2e-5)


def test_training_checkpoint_of_an_earlier_version(tmp_path, caplog):
    shutil.copytree(goldens.SAVED / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints", goldens.RUN)
    expected = goldens.state()
    got, data = checkpoints.restore(jax.tree.map(jax.numpy.zeros_like, expected))
    checkpoints.close()
    assert (data, int(got.step)) == (goldens.DATA, goldens.STEP)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert "not verified" not in caplog.text
