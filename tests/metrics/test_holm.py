"""Holm's correction against the closed test that it is the short cut of."""

import itertools

import numpy as np

from calibjax.metrics import holm


def test_against_the_closed_test():
    rng = np.random.default_rng(0)
    for size in range(1, 7):
        p = dict(zip("abcdef", np.round(rng.uniform(0, 0.3, size), 2), strict=False))
        sets = [s for n in range(1, size + 1) for s in itertools.combinations(p, n)]
        wanted = {name: max(min(1, len(s) * min(p[j] for j in s)) for s in sets if name in s) for name in p}
        got = holm(p)
        assert list(got) == list(p)
        np.testing.assert_allclose(list(got.values()), list(wanted.values()), rtol=1e-12)


def test_unknown_values_do_not_count():
    got = holm({"a": 0.02, "b": float("nan"), "c": 0.01})
    assert np.isnan(got["b"])
    assert (got["a"], got["c"]) == (0.02, 0.02)
    assert holm({}) == {}
