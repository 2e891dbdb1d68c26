"""Programs of fitted recalibrators: by StableHLO where calibjax cannot be imported, and by onnxruntime."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import recalibration_data
from jax import export

from calibjax.recalibrate import METHODS, Predictions
from calibjax.recalibrate.programs import stablehlo_program
from calibjax.recalibrate.saved import Recalibrator

FAST = ("temperature", "platt", "isotonic")


@functools.cache
def fitted(name):
    data, method = recalibration_data.bundle(), METHODS[name]
    return Recalibrator(name, method.fit(Predictions(**{field: data[field] for field in method.fit_reads})), {})


def inputs(name):
    # ONNX has no expm1: near p = 1 the odds of one-vs-rest lose digits in onnxruntime.
    data = recalibration_data.bundle(n=11, seed=1, gain=1.0 if name == "one_vs_rest_platt" else 2.0)
    return {field: data[field] for field in METHODS[name].apply_reads}


def close(got, expected):
    """Probabilities to 1e-6; their logarithms to rounding where they are not tiny."""
    if expected.ndim == 2:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        got, expected = np.exp(got), np.exp(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in METHODS])
def test_stablehlo(name, tmp_path):
    """Of one method also in a process that cannot import calibjax."""
    given = inputs(name)
    (tmp_path / "program").write_bytes(stablehlo_program(fitted(name)))
    np.savez(tmp_path / "inputs.npz", **given)
    code = """
import sys, numpy, pathlib
sys.modules["calibjax"] = None
from jax import export
given = numpy.load("inputs.npz")
program = export.deserialize(bytearray(pathlib.Path("program").read_bytes()))
numpy.save("found.npy", program.call(*(given[name] for name in given.files)))
"""
    got = export.deserialize(bytearray((tmp_path / "program").read_bytes())).call(*given.values())
    if name == "matrix":
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
        got = np.load(tmp_path / "found.npy")
    close(np.asarray(got), fitted(name)(**given))
