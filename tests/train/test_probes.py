"""Probes: the fit against scikit-learn, the features against the model, and the directory that keeps one."""

import numpy as np
import pytest
from tiny import make_lm

from calibjax.eval.answers.probe_features import PROBE_FEATURES, answer_features
from calibjax.runtime.errors import UserError
from calibjax.train.probes import fit_probe, load_probe, save_probe

N, WIDTH = 200, 6


@pytest.fixture(scope="module")
def fitted():
    """(features, fractions of 4 attempts, probe)."""
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(N, WIDTH)) * np.geomspace(0.01, 100, WIDTH) + 5).astype(np.float32)
    log_odds = (features - 5) / np.geomspace(0.01, 100, WIDTH) @ rng.normal(size=WIDTH)
    target = rng.binomial(4, 1 / (1 + np.exp(-log_odds))) / 4
    return features, target, fit_probe(features, target)


def test_the_fit_is_the_best_penalised_one(fitted):
    """Fractions are rows of right and of wrong attempts; a penalty of F/2 is C = 1/F."""
    from sklearn.linear_model import LogisticRegression

    features, target, params = fitted
    features = features.astype(np.float64)
    x = (features - features.mean(axis=0)) / features.std(axis=0)
    twice, labels = np.concatenate([x, x]), np.repeat([1, 0], N)
    model = LogisticRegression(C=1 / WIDTH, tol=1e-8, max_iter=1000)
    model.fit(twice, labels, sample_weight=np.concatenate([target, 1 - target]))
    want = model.predict_proba(x)[:, 1]
    got = 1 / (1 + np.exp(-(features @ params["weights"] + params["bias"])))
    print(f"largest difference {np.abs(got - want).max():.1e}")
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_probe_is_kept_with_its_model(fitted, tmp_path):
    params, place = fitted[2], tmp_path / "probe"
    save_probe(place, params, name="probe_correct_mean", fingerprint="f")
    save_probe(place, params, name="probe_correct_mean", fingerprint="f")  # replaced as a whole
    loaded = load_probe(place, "f")
    for name, value in params.items():
        np.testing.assert_array_equal(loaded[name], value)
    with pytest.raises(UserError, match="fitted on another base model"):
        load_probe(place, "g")
    description, weights = place / "probe.json", place / "probe.safetensors"
    for file, damaged in (
        (description, description.read_bytes().replace(b"mean", b"last")),
        (weights, bytes([*weights.read_bytes()[:-9], weights.read_bytes()[-9] ^ 1, *weights.read_bytes()[-8:]])),
        (weights, b""),
    ):
        whole = file.read_bytes()
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"Remove this directory to fit the probe again"):
            load_probe(place, "f")
        file.write_bytes(whole)
    load_probe(place, "f")


def test_features_are_states_of_the_answers():
    """Of rows of several lengths, more than a batch, against the model on each row alone."""
    lm, rng = make_lm(num_layers=3), np.random.default_rng(1)
    contexts = [rng.integers(0, 24, rng.integers(1, 20)).tolist() for _ in range(19)]
    answers = [rng.integers(0, 24, rng.integers(1, 9)).tolist() for _ in range(19)]
    got = answer_features(lm, contexts, answers, set(PROBE_FEATURES))
    for row, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
        if row % 6:
            continue
        states = np.asarray(lm.hidden_states(np.array([context + answer]), layers="all"), np.float64)[:, 0]
        want = {
            "question": states[-1, len(context) - 1],
            "answer": states[-1, -1],
            "mean": states[-1, len(context) :].mean(axis=0),
            "layers": states[1:, -1].ravel(),
        }
        for name, value in want.items():
            np.testing.assert_allclose(got[name][row], value, rtol=2e-5, atol=5e-5, err_msg=name)
