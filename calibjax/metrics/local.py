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

    It is the mean over points i of |Σ_j k_ij (confidence_j − correctness_j)| / Σ_j k_ij, where j runs over the points
    in the bin of i and k_ij = exp(−mean_f |features_if − features_jf| / bandwidth). In the limit of a large bandwidth
    it is the ECE, in that of a small one the mean of |confidence_i − correctness_i|.

    It takes O(N² F) time and O(N F) memory: subsample large sets.

    Args:
        confidence, correct, bins, where: as in `expected_calibration_error`, and so is the result.
        features: `[N, F]`, not NaN at points that count.
        bandwidth: > 0, in units of the features.
    """
    data = points(confidence, correct, where)
    x = _features(features, data)
    index = bin_index(data.confidence, bins)  # [N]
    residual = data.confidence - data.correct

    def gap(point):
        point_features, point_bin = point
        distance = jnp.mean(jnp.abs(x - point_features[None, :]), axis=-1)  # [N], to every point
        kernel = data.weight * jnp.exp(-distance / bandwidth)
        kernel = jnp.where(index == point_bin, kernel, 0.0)
        return jnp.abs(jnp.sum(kernel * residual)) / jnp.sum(kernel)

    gaps = jax.lax.map(gap, (x, index), batch_size=16)
    return data.mean(jnp.where(data.weight > 0, gaps, 0.0))


@metric("bins", counts=True)
def grouping_loss(
    confidence: Float[AnyArray, " N"],
    correct: AnyArray,
    features: Float[AnyArray, "N F"],
    *,
    bins: int = 15,
    where: AnyArray | None = None,
) -> Float[Array, ""]:
    """Lower bound of the grouping loss: the variance of the probability of being right at equal confidence.

    A perfectly calibrated model can have a large grouping loss. The estimate (Perez-Lebel et al. 2023) splits each bin
    into two regions by a hyperplane through the bin's mean feature, orthogonal to the line between the mean features of
    wrong and of right answers. The hyperplanes are fitted on every second point that counts and evaluated on the
    others, then the reverse, and the two estimates are averaged. The points should be in random order.

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
    member = jax.nn.one_hot(bin_index(data.confidence, bins), bins, dtype=jnp.float32)  # [N, bins]
    every_second = jnp.cumsum(data.weight > 0) % 2 == 1

    def class_mean(weight):
        """Mean features [bins, F] of points with these weights [N], and their total weight [bins]."""
        in_bins = member * weight[:, None]  # [N, bins]
        size = jnp.sum(in_bins, axis=0)
        mean = jnp.dot(in_bins.T, x, precision="highest") / jnp.maximum(size, 1e-9)[:, None]
        return mean, size

    def estimate(is_fitted_on):
        """The estimate from the other points; a fraction `correct` of a point belongs to the class of right answers."""
        right, n_right = class_mean(jnp.where(is_fitted_on, data.weight * data.correct, 0.0))
        wrong, n_wrong = class_mean(jnp.where(is_fitted_on, data.weight * (1 - data.correct), 0.0))
        has_both = (n_right > 0) & (n_wrong > 0)
        normal = jnp.where(has_both[:, None], right - wrong, 0.0)  # of each bin's hyperplane, [bins, F]
        fraction_right = (n_right / jnp.maximum(n_right + n_wrong, 1e-9))[:, None]
        mean = fraction_right * right + (1 - fraction_right) * wrong
        threshold = jnp.sum(normal * mean, axis=-1)
        is_above = jnp.dot(x, normal.T, precision="highest") > threshold[None, :]  # [N, bins]
        region = jnp.sum(jnp.where(member > 0, is_above, False), axis=-1)  # [N], 0 or 1: the side in the point's bin
        weight = jnp.where(is_fitted_on, 0.0, data.weight)
        explained, bias, induced = grouping_parts(data._replace(weight=weight), region, 2, bins)
        return jnp.where(jnp.any(weight > 0), explained - bias - induced, jnp.nan)

    return data.nan_unless_usable((estimate(every_second) + estimate(~every_second)) / 2)


def grouping_parts(
    data: Points, regions: Int[Array, " N"], number: int, bins: int
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Explained variance, bias and induced part: the estimate of the grouping loss is the first minus the other two.

    With accuracy μ_br and size n_br of region r (of `number`) in bin b, where regions of one point are ignored:
    explained = Σ_b (n_b/n) Σ_r (n_br/n_b) (μ_br − μ_b)²;
    bias = Σ_b (n_b/n) [Σ_r (n_br/n_b) s²_br/n_br − s²_b/n_b] with s² the sample variance of correctness;
    induced = Σ_b (n_b/n) Var_b(ĉ(confidence)), where the calibration curve ĉ is a least-squares line in each bin, and
    the variance expected by chance is subtracted (the authors' package smooths with nearest neighbours instead).
    """
    index = bin_index(data.confidence, bins)
    cell = jax.nn.one_hot(index * number + regions, bins * number, dtype=jnp.float32)

    def sum_in_regions(value):
        return jnp.sum(cell * (data.weight * value)[:, None], axis=0).reshape(bins, number)

    y = data.correct
    # Confidence is relative to the centre of its bin, so that its variance suffers no cancellation.
    c = data.confidence - (index.astype(jnp.float32) + 0.5) / bins
    sums = jnp.stack([sum_in_regions(value) for value in (jnp.ones_like(y), y, y * y, c, c * c, c * y)])
    sums = jnp.where(sums[:1] > 1, sums, 0.0)  # [6, bins, number]; regions of one point are ignored
    n_r, y_r, yy_r = sums[:3]  # [bins, number] each
    bin_sums = jnp.sum(sums, axis=-1)  # [6, bins]
    n_b = bin_sums[0]
    _, y_mean, yy_mean, c_mean, cc_mean, cy_mean = bin_sums / jnp.maximum(bin_sums[:1], 1.0)
    region_mean = y_r / jnp.maximum(n_r, 1.0)
    all_points = jnp.maximum(jnp.sum(n_b), 1.0)
    explained = jnp.sum(n_r * jnp.square(region_mean - y_mean[:, None])) / all_points
    noise_of_regions = jnp.sum(n_r * variance_of_mean(n_r, y_r, yy_r))
    noise_of_bins = jnp.sum(n_b * variance_of_mean(*bin_sums[:3]))
    bias = (noise_of_regions - noise_of_bins) / all_points

    # Variance of the line that is fitted to (confidence, correctness) in each bin, minus its expectation by chance.
    c_variance = cc_mean - c_mean * c_mean
    y_variance = yy_mean - y_mean * y_mean
    covariance = cy_mean - c_mean * y_mean
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
