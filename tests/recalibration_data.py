"""Data for the recalibrators: numpy alone, so that other environments can make the same."""

import numpy as np
import oracle

BINS = 10


def binary(n=600):
    """(confidence, correct): over-confident, and skewed, so that Platt and beta differ."""
    rng = np.random.default_rng(11)
    confidence = np.clip(rng.beta(4, 1.5, n), 0.01, 0.99).astype(np.float32).astype(np.float64)
    return confidence, (rng.random(n) < 0.9 * confidence**2).astype(int)


def classes(n=400, k=4, gain=2.0):
    """(logits, labels): over-confident, with a bias of each class of its own."""
    rng = np.random.default_rng(12)
    labels = rng.integers(0, k, n)
    logits = rng.normal(size=(n, k))
    logits[np.arange(n), labels] += 1.3
    return (gain * logits + np.linspace(-0.8, 0.8, k)[None, :]).astype(np.float32).astype(np.float64), labels


def bundle(n=400, k=4, d=5, seed=20, gain=2.0):
    """Every field of `Predictions`: logits = features @ unembedding.T, labels drawn at the temperature `gain`."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, d)).astype(np.float32)
    unembedding = (rng.normal(size=(k, d)) * gain).astype(np.float32)
    logits = features @ unembedding.T
    labels = (logits / gain + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return described(logits, labels, features, unembedding, rng.integers(0, 7, n, np.int32) % 3)


def described(logits, labels, features, unembedding, categories):
    confidence = oracle.probabilities(logits, np.ones(len(logits))).max(axis=1).astype(np.float32)
    return {
        "logits": logits,
        "labels": labels,
        "confidence": confidence,
        "correct": (logits.argmax(axis=1) == labels).astype(np.float32),
        "confidences": np.stack([confidence, confidence**0.5], axis=1),
        "features": features,
        "unembedding": unembedding,
        "categories": categories,
    }
