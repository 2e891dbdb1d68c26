"""The contract of `calibjax.kernels` in float64 numpy: dense, short, nothing shared with the code that is tested."""

import numpy as np

EPS = float(np.finfo(np.float32).eps)
FLOATS = ("log_normalizer", "target_logit", "mean_logit", "max_logit", "expected_logit")
"""The statistics with a gradient."""


def f64(x):
    """The values of an array of any dtype, in float64; None stays None."""
    return None if x is None else np.asarray(x).astype(np.float64)


def logits(hidden, unembedding, bias=None, softcap=None):
    z = f64(hidden) @ f64(unembedding).T
    z = z if bias is None else z + f64(bias)
    return z if softcap is None else softcap * np.tanh(z / softcap)


def probabilities(z, scale):
    scaled = f64(scale)[:, None] * z
    e = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def statistics(hidden, unembedding, targets, scale, bias=None, softcap=None):
    """All statistics of N tokens, targets in [0, V), as a dict of `[N]`."""
    z = logits(hidden, unembedding, bias, softcap)
    scaled = f64(scale)[:, None] * z
    top = scaled.max(axis=1)
    p = probabilities(z, scale)
    finite = np.where(p > 0, z, 0.0)  # a logit of −inf has probability 0: 0·(−inf) counts as 0
    expected = (p * finite).sum(axis=1)
    return {
        "log_normalizer": top + np.log(np.exp(scaled - top[:, None]).sum(axis=1)),
        "target_logit": z[np.arange(len(z)), targets],
        "mean_logit": z.mean(axis=1),
        "max_logit": z.max(axis=1),
        "argmax": z.argmax(axis=1),
        "expected_logit": expected,
        "logit_variance": (p * np.where(p > 0, z - expected[:, None], 0.0) ** 2).sum(axis=1),
        "correct": z.argmax(axis=1) == targets,
    }


def gradients(cotangents, hidden, unembedding, targets, scale, bias=None, softcap=None, argmax=None):
    """(d_hidden, d_unembedding, d_bias, d_scale) and dz of Σ g·statistic; `cotangents` maps names of FLOATS to `[N]`.

    `kernels/test_operator.py` holds it against finite differences. `argmax` breaks ties as the tested code broke them.
    """
    z = logits(hidden, unembedding, bias, softcap)
    rows, vocab_size = np.arange(len(z)), z.shape[1]
    s, p = f64(scale), probabilities(z, scale)
    stats = statistics(hidden, unembedding, targets, scale, bias, softcap)
    g = {name: f64(cotangents[name]) if name in cotangents else np.zeros(len(z)) for name in FLOATS}
    centred = np.where(p > 0, z - stats["expected_logit"][:, None], 0.0)
    dz = p * ((s * g["log_normalizer"])[:, None] + g["expected_logit"][:, None] * (1 + s[:, None] * centred))
    np.add.at(dz, (rows, targets), g["target_logit"])
    np.add.at(dz, (rows, stats["argmax"] if argmax is None else argmax), g["max_logit"])
    dz += g["mean_logit"][:, None] / vocab_size
    if softcap is not None:
        dz *= 1 - (z / softcap) ** 2
    d_scale = g["log_normalizer"] * stats["expected_logit"] + g["expected_logit"] * stats["logit_variance"]
    return (dz @ f64(unembedding), dz.T @ f64(hidden), dz.sum(axis=0), d_scale), dz


def difference(function, x, step=1e-5):
    """Central difference of a scalar float64 function at every entry of x."""
    x = np.array(x, np.float64)
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        values = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            values.append(function(moved))
        out[index] = (values[0] - values[1]) / (2 * step)
    return out


def assert_within(got, expected, tolerance, name=""):
    """|got − expected| <= tolerance everywhere, the tolerance broadcast; returns the largest error over tolerance."""
    got, expected = f64(got), f64(expected)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    tolerance = np.broadcast_to(tolerance, expected.shape)
    error = np.abs(got - expected)
    error = np.where(got == expected, 0.0, error)  # infinities of one sign agree
    bad = ~(error <= tolerance)
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error / tolerance)), error.shape)
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} off; worst at {worst}: got {got[worst]:.9g}, expected "
            f"{expected[worst]:.9g}, error {error[worst]:.3g}, tolerance {tolerance[worst]:.3g}"
        )
    return float((error / np.maximum(tolerance, 1e-300)).max(initial=0.0))
