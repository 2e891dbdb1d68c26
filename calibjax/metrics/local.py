"""Miscalibration within groups of equal confidence: local calibration error and grouping loss.

Both use features that distinguish answers, such as hidden states, embeddings or one-hot subjects. Features are not
rescaled: standardise them if their scales differ.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from calibjax.metrics._points import Points, metric, points
from calibjax.metrics.errors import variance_of_mean
from calibjax.metrics.sums import bin_index
from calibjax.runtime.arrays import AnyArray


@metric("bins")
def local_calibration_error(
    confidence: Float[AnyArray, " N"],
    correct: AnyArray,
    features: Float[AnyArray, "N F"],
    *,
    bins: int = 15,
    bandwidth: float | Array = 1.0,
    where: AnyArray | None = None,
) -> Float[Array, ""]:
    """Local calibration error (LCE, Luo et al. 2022): the calibration gap among similar answers.

    The mean over points i of LCE_i = |Σ_j k_ij (confidence_j − correctness_j)| / Σ_j k_ij over the j in the bin of i,
    with the kernel k_ij = exp(−mean_f |features_if − features_jf| / bandwidth). With a large bandwidth, LCE_i is the
    gap of the bin, and the mean is the ECE; with a small one, LCE_i is |confidence_i − correctness_i|.

    It takes O(N² F) time and O(N F) memory: subsample large sets.

    Args:
        confidence, correct, bins, where: as in `expected_calibration_error`, and so is the result.
        features: `[N, F]`, not NaN at points that count.
        bandwidth: > 0, in units of the features.
    """
    data = points(confidence, correct, where)
    x = _features(features, data)
    index = bin_index(data.confidence, bins)
    residual = data.confidence - data.correct

    def gap(point):
        features, bin_ = point
        distance = jnp.mean(jnp.abs(x - features[None, :]), axis=-1)
        similar = jnp.where(index == bin_, data.weight * jnp.exp(-distance / bandwidth), 0.0)
        return jnp.abs(jnp.sum(similar * residual)) / jnp.sum(similar)

    gaps = jnp.where(data.weight > 0, jax.lax.map(gap, (x, index), batch_size=16), 0.0)
    return data.mean(gaps)


@metric("bins", counts=True)
def grouping_loss(
    confidence: Float[AnyArray, " N"],
    correct: AnyArray,
    features: Float[AnyArray, "N F"],
    *,
    bins: int = 15,
    where: AnyArray | None = None,
) -> Float[Array, ""]:
    """Grouping loss, a lower bound: the variance of the probability of being right at equal confidence.

    A hyperplane splits each bin into two regions. It goes through the mean feature of the bin and is orthogonal to the
    line between the mean features of wrong and of right answers. The split is fitted on every second point that counts
    and evaluated on the others, and vice versa; the estimates (Perez-Lebel et al. 2023) are averaged. A perfectly
    calibrated model can have a large grouping loss. The order of the points should be random.

    Args:
        confidence, correct, bins: as in `expected_calibration_error`.
        where: `[N]`, bool, or whole numbers, how often a point counts.
        features: `[N, F]`, finite at points that count.

    Returns:
        float32 scalar on the scale of `brier_score`. The bias is removed, so noise may make it negative. NaN where no
        point counts, or a feature of one that does is not finite.
    """
    data = points(confidence, correct, where, counts=True)
    x = _features(features, data)
    data = data._replace(usable=data.usable & jnp.all(jnp.isfinite(x)))  # else NaN would fall on one side of the split
    member = jax.nn.one_hot(bin_index(data.confidence, bins), bins, dtype=jnp.float32)
    second = jnp.cumsum(data.weight > 0) % 2 == 1

    def fitted_on(half):
        def class_mean(fraction):
            """Mean features [bins, F] of the class that takes a fraction of each point, and its size [bins]."""
            weight = member * jnp.where(half, data.weight * fraction, 0.0)[:, None]
            size = jnp.sum(weight, axis=0)
            return jnp.dot(weight.T, x, precision="highest") / jnp.maximum(size, 1e-9)[:, None], size

        right, n_right = class_mean(data.correct)
        wrong, n_wrong = class_mean(1 - data.correct)
        both = (n_right > 0) & (n_wrong > 0)
        normal = jnp.where(both[:, None], right - wrong, 0.0)  # of the hyperplane in each bin
        fraction = (n_right / jnp.maximum(n_right + n_wrong, 1e-9))[:, None]
        mean = fraction * right + (1 - fraction) * wrong
        threshold = jnp.sum(normal * mean, axis=-1)
        is_above = jnp.dot(x, normal.T, precision="highest") > threshold[None, :]  # [N, bins]
        region = jnp.sum(jnp.where(member > 0, is_above, False), axis=-1)  # 0 or 1 in the point's own bin
        weight = jnp.where(half, 0.0, data.weight)
        explained, bias, induced = grouping_parts(data._replace(weight=weight), region, 2, bins)
        return jnp.where(jnp.any(weight > 0), explained - bias - induced, jnp.nan)

    return data.nan_unless_usable((fitted_on(second) + fitted_on(~second)) / 2)


def grouping_parts(
    data: Points, regions: Int[Array, " N"], number: int, bins: int
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Explained variance, bias and induced part of the grouping loss, which is the first minus the others.

    With accuracy μ_br and size n_br of region r (of `number`) in bin b, where regions of one point are ignored:
    explained = Σ_b (n_b/n) Σ_r (n_br/n_b) (μ_br − μ_b)²;
    bias = Σ_b (n_b/n) [Σ_r (n_br/n_b) s²_br/n_br − s²_b/n_b] with s² the sample variance of correctness;
    induced = Σ_b (n_b/n) Var_b(ĉ(confidence)), where the calibration curve ĉ is linear within each bin (least squares,
    minus the variance due to its noise; the authors' package smooths with nearest neighbours instead).
    """
    index = bin_index(data.confidence, bins)
    cell = jax.nn.one_hot(index * number + regions, bins * number, dtype=jnp.float32)

    def per_cell(value):
        return jnp.sum(cell * (data.weight * value)[:, None], axis=0).reshape(bins, number)

    # Centred on the bin, so that the variance of confidence suffers no cancellation.
    offset = data.confidence - (index.astype(jnp.float32) + 0.5) / bins
    y = data.correct
    values = (jnp.ones_like(y), y, y * y, offset, offset * offset, offset * y)
    sums = jnp.stack([per_cell(value) for value in values])
    sums = jnp.where(sums[:1] > 1, sums, 0.0)  # regions of one point are ignored
    n_r, y_r, yy_r = sums[:3]  # [bins, number] each
    whole = jnp.sum(sums, axis=-1)
    n_b = whole[0]
    _, y_b, yy_b, c_b, cc_b, cy_b = whole / jnp.maximum(whole[:1], 1.0)  # means over the bin, [bins] each
    mean_r = y_r / jnp.maximum(n_r, 1.0)
    all_points = jnp.maximum(jnp.sum(n_b), 1.0)
    explained = jnp.sum(n_r * jnp.square(mean_r - y_b[:, None])) / all_points
    noise_of_regions = jnp.sum(n_r * variance_of_mean(n_r, y_r, yy_r))
    noise_of_bins = jnp.sum(n_b * variance_of_mean(*whole[:3]))
    bias = (noise_of_regions - noise_of_bins) / all_points

    # Variance of the line that is fitted to (confidence, correctness) in each bin, minus its expectation by chance.
    c_variance = cc_b - c_b * c_b
    covariance = cy_b - c_b * y_b
    y_variance = yy_b - y_b * y_b
    has_slope = (c_variance > 1e-12) & (n_b > 2)
    fitted = jnp.where(has_slope, jnp.square(covariance) / jnp.where(has_slope, c_variance, 1.0), 0.0)
    chance = jnp.where(has_slope, (y_variance - fitted) / jnp.maximum(n_b - 2, 1.0), 0.0)
    induced = jnp.sum(n_b * (fitted - chance)) / all_points
    return explained, bias, induced


def _features(features: Float[AnyArray, "N F"], data: Points) -> Float[Array, "N F"]:
    features, count = jnp.asarray(features), len(data.confidence)
    if features.ndim != 2 or len(features) != count:
        raise ValueError(f"features: expected [N, F] for N = {count} points, got shape {features.shape}.")
    return jnp.where(data.weight[:, None] > 0, features.astype(jnp.float32), 0.0)
