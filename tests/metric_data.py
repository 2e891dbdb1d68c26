"""The points on which our metrics and those of others are compared; numpy only, so both sides make them alike."""

import numpy as np

SEED, N = 7, 600


def accuracy(confidence):
    """Truth that is above and below the confidence by turns."""
    return np.clip(confidence + 0.15 * np.sin(12 * confidence), 0, 1)


def continuous():
    """(confidence, correct) `[N]`; float32 numbers in float64, none on an edge of 10 or 15 bins."""
    rng = np.random.default_rng(SEED)
    confidence = rng.uniform(size=N).astype(np.float32).astype(np.float64)
    return confidence, (rng.uniform(size=N) < accuracy(confidence)).astype(np.int64)


def gridded():
    """The same with confidence in multiples of 1/1000, with ties."""
    rng = np.random.default_rng(SEED + 1)
    confidence = (rng.integers(0, 1001, N) / 1000).astype(np.float32).astype(np.float64)
    return confidence, (rng.uniform(size=N) < accuracy(confidence)).astype(np.int64)


def classes():
    """(probabilities `[N, 4]`, labels `[N]`); float32 numbers in float64."""
    rng = np.random.default_rng(SEED + 2)
    logits = rng.normal(size=(N, 4)) * 1.5
    odds = np.exp(logits)
    probabilities = (odds / odds.sum(axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    true = np.exp(0.6 * logits)
    true /= true.sum(axis=1, keepdims=True)
    labels = (rng.uniform(size=(N, 1)) > np.cumsum(true, axis=1)).sum(axis=1)
    return probabilities, np.minimum(labels, 3)


def grouped():
    """(confidence, correct, regions `[N]` 0 to 2): regions differ in accuracy at equal confidence."""
    rng = np.random.default_rng(SEED + 3)
    confidence = rng.uniform(size=N).astype(np.float32).astype(np.float64)
    regions = rng.integers(0, 3, N)
    chance = np.clip(confidence + 0.2 * (regions - 1), 0, 1)
    return confidence, (rng.uniform(size=N) < chance).astype(np.int64), regions


def edges():
    """Confidence 0, 0.1, ... 1: every edge of ten bins."""
    return np.arange(11) / 10, np.array([1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1])
