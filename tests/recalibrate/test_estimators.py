"""The classes give what the functions of `METHODS` give, for every kind of array, and pass scikit-learn's checks."""

import pickle

import numpy as np
import pandas as pd
import pytest
import recalibration_data
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator

from calibjax import UserError, recalibrate
from calibjax.recalibrate import METHODS, Predictions, estimators, optimize

CLASSES = {cls.method: cls for cls in vars(estimators).values() if isinstance(getattr(cls, "method", None), str)}
FIELDS = recalibration_data.bundle()
LOGITS, LABELS, CONFIDENCE = (FIELDS[name] for name in ("logits", "labels", "confidence"))


@pytest.fixture
def few_steps(monkeypatch):
    # Not STEPS: the compiled step of all other tests holds its schedule.
    monkeypatch.setattr(optimize, "_EVAL_EVERY", 10)
    monkeypatch.setattr(optimize, "_PATIENCE", 10)


def test_every_method_has_a_class():
    assert set(CLASSES) == set(METHODS)
    assert all(getattr(recalibrate, cls.__name__) is cls for cls in CLASSES.values())


@pytest.mark.parametrize("name", METHODS)
def test_the_class_gives_what_the_functions_give(name, few_steps):
    method, (first, *others) = METHODS[name], METHODS[name].apply_reads
    given = {field: FIELDS[field] for field in others}
    truth = FIELDS[next(field for field in method.fit_reads if field not in method.apply_reads)]
    state = method.fit(Predictions(**{field: FIELDS[field] for field in method.fit_reads}))
    want = np.asarray(method.apply(state, Predictions(**{field: FIELDS[field] for field in method.apply_reads})))
    fitted = CLASSES[name]().fit(FIELDS[first], truth, **given)
    got = fitted.predict_proba(FIELDS[first], **given)
    expected = np.exp(want) if want.ndim == 2 else np.stack([1 - want, want], axis=1)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-5)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.transform(FIELDS[first], **given), fitted.transform(FIELDS[first], **given))


def test_arrays_frames_and_tensors():
    torch = pytest.importorskip("torch")
    want = recalibrate.VectorScaling().fit(LOGITS, LABELS).predict_proba(LOGITS)
    frame, series = pd.DataFrame(LOGITS, columns=list("abcd")), pd.Series(LABELS)
    np.testing.assert_array_equal(recalibrate.VectorScaling().fit(frame, series).predict_proba(frame), want)
    with pytest.raises(UserError, match="logits: row 0 holds nan"):
        recalibrate.VectorScaling().fit(frame.astype("Float64").shift(), series)  # of NA
    tensor = torch.tensor(LOGITS, requires_grad=True)
    fitted = recalibrate.VectorScaling().fit(tensor, torch.tensor(LABELS))
    np.testing.assert_array_equal(fitted.predict_proba(tensor), want)
    half = recalibrate.TemperatureScaling().fit(tensor.bfloat16(), torch.tensor(LABELS))
    assert np.isfinite(half.recalibrator_(logits=tensor.bfloat16())).all()
    fits = [recalibrate.EnsembleTemperatureScaling().fit(LOGITS, LABELS.astype(order)) for order in ("<i4", ">i4")]
    np.testing.assert_array_equal(*[fit.predict_proba(LOGITS) for fit in fits])
    words = np.array(["ant", "bee", "cat", "dog"])[LABELS]
    named = recalibrate.VectorScaling().fit(LOGITS, words)
    np.testing.assert_array_equal(named.predict_proba(LOGITS), want)
    np.testing.assert_array_equal(named.predict(LOGITS), np.array(["ant", "bee", "cat", "dog"])[want.argmax(axis=1)])
    assert named.score(LOGITS, words) == np.mean(want.argmax(axis=1) == LABELS)
    where = np.arange(400) >= 5
    holes = recalibrate.VectorScaling().fit(LOGITS, np.where(where, LABELS, np.nan), where=where)
    np.testing.assert_array_equal(holes.classes_, range(4))
    column = recalibrate.PlattScaling().fit(CONFIDENCE[:, None], FIELDS["correct"])
    assert column.predict_proba(CONFIDENCE).shape == (400, 2)


def test_options():
    assert repr(recalibrate.HistogramBinning(bins=5)) == "HistogramBinning(bins=5)"
    assert clone(recalibrate.HistogramBinning(bins=5)).get_params() == {"bins": 5}
    fitted = recalibrate.HistogramBinning(bins=5).fit(CONFIDENCE, FIELDS["correct"])
    assert len(np.unique(fitted.transform(CONFIDENCE))) == 5
    with pytest.raises(ValueError, match="expected options among"):
        recalibrate.HistogramBinning(edges=5)
    with pytest.raises(NotFittedError, match="call fit first"):
        recalibrate.HistogramBinning().transform(CONFIDENCE)
    with pytest.raises(UserError, match="expected 4 distinct labels, one a column, got 2"):
        recalibrate.TemperatureScaling().fit(LOGITS, np.array(["a", "b"] * 200))
    with pytest.raises(UserError, match="bins: expected at least 1"):
        recalibrate.HistogramBinning(bins=0).fit(CONFIDENCE, FIELDS["correct"])
    with pytest.raises(UserError, match="features: expected confidence"):
        recalibrate.PlattScaling().fit(CONFIDENCE, FIELDS["correct"], features=LOGITS)


APPLY = {
    *("check_estimator_cloneable", "check_estimator_tags_renamed", "check_valid_tag_types", "check_estimator_repr"),
    *("check_no_attributes_set_in_init", "check_fit_score_takes_y", "check_dont_overwrite_parameters"),
    *("check_do_not_raise_errors_in_init_or_set_params", "check_estimators_unfitted", "check_estimators_dtypes"),
    *("check_n_features_in_after_fitting", "check_pipeline_consistency", "check_estimators_pickle"),
    *("check_f_contiguous_array_estimator", "check_supervised_y_no_nan", "check_decision_proba_consistency"),
}
"""scikit-learn's checks that apply: the others give features that are no logits, and labels that are no columns."""


def test_the_checks_of_scikit_learn():
    seen = set()
    for estimator, check in estimator_checks_generator(recalibrate.TemperatureScaling(), legacy=True):
        name = getattr(check, "func", check).__name__
        if name in APPLY:
            check(estimator)
            seen.add(name)
    assert seen == APPLY
