"""Guarantees of decisions: coverage over random splits, on average exactly what the theorems say, also per category."""

import itertools

import numpy as np
import pytest

from calibjax.eval.answers import decide as decisions
from calibjax.runtime.errors import UserError

SPLITS = 1000
N, POOL = 150, 900


def pool(seed=0):
    """Confidences with ties, which are overconfident for one category and underconfident for the other."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(4, 2, POOL).round(2)
    category = rng.integers(0, 2, POOL)
    truth = np.where(category == 1, confidence**3, np.sqrt(confidence))
    return confidence, (rng.random(POOL) < truth).astype(float), category


def splits(count, size):
    rng = np.random.default_rng(1)
    for _ in range(SPLITS):
        order = rng.permutation(count)
        yield order[:size], order[size:]


@pytest.mark.parametrize("category", [None, 0, 1])
def test_risk_over_random_splits(category):
    """Splits of a pool are exchangeable: the expectation is at most the risk, and near it."""
    confidence, correct, kind = pool()
    if category is not None:
        confidence, correct = confidence[kind == category], correct[kind == category]
    wrong = []
    for fit, new in splits(len(confidence), N):
        threshold = decisions.risk_threshold(confidence[fit], correct[fit], 0.1)
        wrong.append(decisions.threshold_outcome(confidence[new], correct[new], threshold)["wrong"])
    mean, error = np.mean(wrong), np.std(wrong) / np.sqrt(SPLITS)
    print(f"category {category}: wrong {mean:.4f} +- {error:.4f}")
    assert mean <= 0.1 + 3 * error
    assert mean >= 0.1 - 2 / (N + 1) - 0.02 - 3 * error  # the theorem's lower bound, less what ties at one value hold


@pytest.mark.parametrize("kind", decisions.SET_SCORES)
def test_sets_over_random_splits(kind):
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(5, 0.6), POOL)
    label = (p.cumsum(axis=1) < rng.random((POOL, 1))).sum(axis=1).clip(0, 4)
    flat = p**0.3 / (p**0.3).sum(axis=1, keepdims=True)  # miscalibrated: the guarantee holds all the same
    covered = []
    for fit, new in splits(POOL, N):
        scores = decisions.SET_SCORES[kind](flat)
        sets = scores[new] >= decisions.set_threshold(scores[fit], label[fit], 0.1)
        covered.append(sets[np.arange(len(new)), label[new]].mean())
    mean, error = np.mean(covered), np.std(covered) / np.sqrt(SPLITS)
    print(f"covered {mean:.4f} +- {error:.4f}")
    assert mean >= 0.9 - 3 * error
    assert mean <= 0.9 + 1 / (N + 1) + (kind != "options") * 0.02 + 3 * error  # the first option's score is always 1


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_adaptive_sets_by_their_definition(penalty):
    """Option by option, the most probable first, until they hold 1 - t, the penalty of each further one included."""
    rng = np.random.default_rng(4)
    p = (rng.dirichlet(np.ones(5), 200).round(1) + 0.02) / 1.1  # with ties
    for t in (0.05, 0.33, 0.71):
        sets = decisions.adaptive_scores(p, penalty) >= t
        for row, got in zip(p, sets, strict=True):
            more = [row > own for own in row]
            want = [row[above].sum() + penalty * above.sum() <= 1 - t + 1e-12 for above in more]
            np.testing.assert_array_equal(got, want)


def test_samples_are_allocated_where_they_help_most():
    """Of every way to divide a budget, none has more questions with a right sample."""
    rng = np.random.default_rng(5)
    every = np.array([counts for counts in itertools.product(range(9), repeat=4) if sum(counts) == 8])
    for q in [*rng.random((30, 4)) ** 2, np.array([1.0, 0.5, 0.0, 0.1])]:
        got = decisions.allocate(q, 8)
        assert got.sum() == 8
        assert (1 - (1 - q) ** got).sum() >= (1 - (1 - q[None, :]) ** every).sum(axis=1).max() - 1e-12
    assert decisions.allocate(np.array([0.0, 1.0, 1.0]), 8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("digits", [1, 9])
def test_selection_with_known_risk(digits):
    """P(right | c) = c for c uniform: above t a fraction (1 - t)/2 is wrong."""
    rng, level, risk = np.random.default_rng(3), 0.8, 0.2
    broken, answered = [], []
    for _ in range(SPLITS):
        confidence = np.ceil(rng.random(1000) * 10**digits) / 10**digits
        correct = (rng.random(1000) < confidence - 0.5 / 10**digits).astype(float)
        threshold = decisions.selective_threshold(confidence, correct, risk, level)
        broken.append(np.isfinite(threshold) and (1 - threshold) / 2 > risk + 1e-9)
        answered.append(decisions.threshold_outcome(confidence, correct, threshold)["answered"])
    error = np.sqrt(level * (1 - level) / SPLITS)
    assert np.mean(broken) <= 1 - level + 3 * error
    assert np.mean(answered) > 0.5 * 2 * risk  # 2 risk could be answered, were the truth known


def test_by_hand():
    confidence, correct = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]), np.array([1, 0, 1, 1, 0, 1, 1, 0, 1])
    # (wrong above t + 1)/10 <= 0.2: one wrong answer, 0.8, may be given
    for risk, threshold in ((0.2, 0.61), (0.1, 0.81), (0.09, np.inf), (0.4, -np.inf)):
        assert decisions.risk_threshold(confidence, correct, risk) == threshold
    assert decisions.risk_threshold(np.ones(9), np.zeros(9), 0.2) == np.inf  # `>=` must not select them
    assert [*decisions.threshold_outcome(confidence, correct, 0.6).values()] == [0.6, 9, 4 / 9, 1 / 9, 1 / 4, "some"]
    assert decisions.set_threshold(confidence[:, None], np.zeros(9, int), 0.1) == 0.1
    assert decisions.set_threshold(confidence[:, None], np.zeros(9, int), 0.09) == -np.inf
    for count, threshold in ((50, np.inf), (51, -np.inf)):  # 0.9^50 = 0.0052 is above 0.1/20, and 0.9^51 below
        assert decisions.selective_threshold(np.full(count, 0.5), np.ones(count), 0.1) == threshold
    pairs = confidence[:, None] * [1, -1] + [0, 1]
    assert decisions.decide(pairs, correct.astype(float)) == decisions.decide(pairs, correct)  # labels as floats
    mixed = decisions.decide(confidence, correct, category=np.array(["a", 1, 2.5] * 3, object))
    assert mixed == decisions.decide(confidence, correct, category=["a", "1", "2.5"] * 3)


@pytest.mark.parametrize(
    ("value", "limit", "between"),
    [
        (7 / 11, 8 / 11, 0.7),
        (8 / 11, 7 / 11, 0.7),
        (1 - 1e-9, 1.0, 0.9999999991),  # equal in float32
        (0.0, 1e-300, 1e-301),
        (float(np.float32(0.1)), float(np.nextafter(np.float32(0.1), np.float32(1))), 0.100000002),
        (float(np.nextafter(np.float32(0.1), np.float32(1))), float(np.float32(0.1)), 0.100000008),
        (0.3, float(np.nextafter(0.3, 1)), 0.3),  # no number lies between
    ],
)
def test_the_shortest_decimal_between(value, limit, between):
    got = decisions._between(value, limit)
    assert got == between
    assert value == got or min(value, limit) < got < max(value, limit)
    assert np.float32(got) == np.float32(value) or np.float32(got) != np.float32(limit)


def claims(answers, seed):
    """(confidence, correct, answer) of 1 to 6 claims each, which depend on each other by their answer."""
    rng = np.random.default_rng(seed)
    answer = np.repeat(np.arange(answers), rng.integers(1, 7, answers))
    confidence = rng.random(len(answer)).round(2)
    return confidence, (rng.random(len(answer)) < confidence ** rng.choice([0.2, 2], answers)[answer]) * 1.0, answer


def false_fraction(confidence, correct, answer, threshold):
    """Of each answer, the fraction of false claims among those above a threshold."""
    selected = confidence > threshold
    false, count = (np.bincount(answer, weights=x) for x in (selected & (correct < 1), selected))
    return false / np.maximum(count, 1)


@pytest.mark.parametrize("risk", [0.02, 0.1, 0.3, 0.9])
def test_claims_by_the_definition(risk):
    confidence, correct, answer = claims(40, 1)
    order = np.random.default_rng(2).permutation(len(answer))
    got = decisions.claim_threshold(confidence[order], correct[order], answer[order] * 7, risk)
    bound, fits = np.zeros(40), [np.inf]
    for t in [*np.unique(confidence)[::-1], -np.inf]:
        bound = np.maximum(bound, false_fraction(confidence, correct, answer, t))
        if (bound.sum() + 1) / 41 <= risk:
            fits.append(t)
    # One keeps the same claims as the other: a threshold of ours is the confidence of a false claim.
    taken, want = confidence > got, confidence > min(fits)
    np.testing.assert_array_equal(taken, want)
    assert decisions.claim_threshold(confidence[:1], correct[:1], answer[:1], 0.49) == np.inf


@pytest.mark.parametrize(
    ("confidence", "correct", "risk", "message"),
    [
        ([0.5, np.nan], [1, 0], 0.05, "expected numbers in .0, 1., got nan"),
        ([0.5, 0.7], [1, 0], 2.0, "risk: expected above 0 and below 1, got 2.0"),
        ([[0.5, 0.5], [0.2, 0.8]], [1, 2], 0.05, "an option's index below 2, got 2"),
        ([0.5, 0.7], [0.5, 1], 0.05, "0 .wrong. or 1 .right., got 0.5"),
    ],
)
def test_what_no_guarantee_holds_for_is_refused(confidence, correct, risk, message):
    with pytest.raises(UserError, match=message):
        decisions.decide(np.array(confidence), np.array(correct), risk)
    with pytest.raises(UserError, match="level: "):
        decisions.decide([0.5, 0.7], [1, 0], level=0.5, answer=[0, 1])
    for labels in ([0], [np.nan, 1], ["a", np.nan], ["a", None]):
        for name in ("answer", "category"):
            with pytest.raises(UserError, match=f"{name}: expected"):
                decisions.decide([0.5, 0.7], [1, 0], **{name: labels})
