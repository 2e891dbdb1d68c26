"""The metrics in float64 numpy, one point or bin after the other; nothing shared with the code that is tested.

Each takes confidence and correctness `[N]` of the points that count.
"""

import numpy as np


def bins_of(c, bins, closed="right"):
    """The bin of each confidence, −1 for none; edges the float32 numbers k/bins."""
    edges = [np.float32(k) / np.float32(bins) for k in range(bins + 1)]
    index = np.full(len(c), -1)
    for b in range(bins):
        low, high = edges[b], edges[b + 1]
        inside = {
            "right": (c <= high) & ((c > low) | (b == 0)),
            "left": (c >= low) & ((c < high) | (b == bins - 1)),
            "none": (c > low) & (c < high),
        }[closed]
        index[inside] = b
    return index


def equal_mass_bins(c, bins):
    """Runs of the sorted points; the points equal to the last of a run belong to it."""
    runs = np.array_split(np.sort(c), bins)
    tops = [run[-1] for run in runs if len(run)]
    return np.array([min(i for i, top in enumerate(tops) if x <= top) for x in c])


def gaps(c, y, index):
    """(number, mean confidence − accuracy, sample variance of correctness) of each bin that has points."""
    for b in range(index.max() + 1):
        members = index == b
        if members.any():
            variance = y[members].var(ddof=1) if members.sum() > 1 else 0.0
            yield members.sum(), c[members].mean() - y[members].mean(), variance


def binned(c, y, index, norm="l1"):
    rows = [(n / len(c), abs(gap)) for n, gap, _ in gaps(c, y, index)]
    if norm == "max":
        return max((gap for _, gap in rows), default=0.0)
    return sum(share * gap for share, gap in rows) if norm == "l1" else sum(s * g * g for s, g in rows) ** 0.5


def debiased(c, y, index):
    square = sum(n / len(c) * (gap**2 - variance / n) for n, gap, variance in gaps(c, y, index) if n > 1)
    return max(square, 0.0) ** 0.5


def smoothed(c, y, bandwidth):
    """∫ |residual density| by the cosine series of the points themselves."""
    k = np.arange(1, int(8 / (np.pi * bandwidth)) + 2)
    decay = np.exp(-((np.pi * k * bandwidth) ** 2) / 2)
    waves = (np.cos(np.pi * np.outer(k, c)) @ (c - y)) / len(c) * decay
    t = np.linspace(0, 1, 4000 + 1)
    return np.trapezoid(np.abs((c - y).mean() + 2 * np.cos(np.pi * np.outer(t, k)) @ waves), t)


def smooth_ece(c, y):
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        if middle < 0.001 or middle < smoothed(c, y, middle):
            low = middle
        else:
            high = middle
    return smoothed(c, y, high)


def kolmogorov_smirnov(c, y):
    return max(abs(sum(c[c <= t] - y[c <= t])) for t in np.unique(c)) / len(c)


def auroc(c, y):
    """Every pair of points, as right and wrong by their shares."""
    above = (c[:, None] > c[None, :]) + 0.5 * (c[:, None] == c[None, :])
    pairs = y[:, None] * (1 - y)[None, :]
    return (above * pairs).sum() / (y.sum() * (1 - y).sum()) if 0 < y.sum() < len(y) else np.nan


def area(score, loss):
    """Mean over k of the mean loss of the best k, a block of ties contributing its mean loss at each place."""
    order = np.argsort(-score, kind="stable")
    expected = np.array([loss[score == score[i]].mean() for i in order])
    return (np.cumsum(expected) / np.arange(1, len(loss) + 1)).mean()


def log_loss(c, y):
    with np.errstate(divide="ignore", invalid="ignore"):
        right, wrong = np.where(y > 0, y * np.log(c), 0.0), np.where(y < 1, (1 - y) * np.log1p(-c), 0.0)
    return -(right + wrong).mean()


def local(c, y, x, bandwidth):
    index = bins_of(c, 15)
    kernel = np.exp(-np.abs(x[:, None, :] - x[None, :, :]).mean(axis=-1) / bandwidth)
    kernel *= index[:, None] == index[None, :]
    return np.abs(kernel @ (c - y)) / kernel.sum(axis=1)
