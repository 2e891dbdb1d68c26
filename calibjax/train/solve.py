"""Linear heads and temperature scaling, fitted to all tokens at once on their scale curves.

A linear head is u = log s = b + w·f̂ with standardised features f̂. The fit minimises mean ℓ(u) + ½ decay |w_D|², where
w_D are the weights of the hidden states. The weights of the statistics of the logits are few and hardly penalised.

For ℓ the negative log-likelihood, ∂ℓ/∂u = s (E_p[z] − z_y), and the expectation of its derivative is s² Var_p[z]
(Fisher). So H = Σ s² Var_p[z] f̂ f̂ᵀ / N at temperature scaling's s is close to the Hessian of every fit on these tokens,
whatever the fold, loss or decay. It preconditions L-BFGS: in v = Lᵀ[b, w], L Lᵀ = H + decay, that takes ten passes.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from calibjax import recalibrate
from calibjax.heads import FEATURES, MAX_SCALE, MIN_SCALE, HeadConfig
from calibjax.kernels import VocabCurves
from calibjax.losses import LOSSES, curve_loss
from calibjax.recalibrate.optimize import preconditioned_lbfgs
from calibjax.runtime.distributed import to_host
from calibjax.runtime.sharding import batch_shards, context_mesh, divide_rows
from calibjax.train.curves import TokenCurves, curves_of, features_of, stored_features
from calibjax.train.options import Trial

_BLOCK = 512  # tokens that are added in float32; the sums of blocks are added in float64
_RIDGE = 1e-6  # times the mean curvature: for features that are constant, or depend on others
_FREE_DECAY = 1e-3  # decay of the weights of the statistics of the logits
_BOUNDS = (math.log(MIN_SCALE), math.log(MAX_SCALE))
_LBFGS = {"maxiter": 60, "ftol": 1e-7, "gtol": 1e-4}  # smaller tolerances are below the noise of float32 sums


class Design(NamedTuple):
    """The tokens of a fit, N with padding to a multiple of `_BLOCK`, and what all fits on them share."""

    features: Float[Array, "N F"]  # standardised, on the devices
    mean: Float[np.ndarray, " F"]
    deviation: Float[np.ndarray, " F"]
    decayed: Bool[np.ndarray, " F"]  # features whose weights `decay` penalises; the others have `_FREE_DECAY`
    curves: VocabCurves
    curvature: Float[np.ndarray, "G G"]  # H of bias and weights, G = 1 + F
    temperature_log_scale: float  # log s of temperature scaling
    tokens: int  # number of tokens without padding


def make_design(tokens: TokenCurves, head: HeadConfig, temperature_log_scale: float) -> Design:
    """The design of the tokens that count, for `head`, given log s of temperature scaling on these tokens."""
    curve_arrays = tokens.flat()
    count = len(curve_arrays["valid"])
    arrays = curve_arrays | tokens.flat(stored_features([head]))
    features = np.asarray(to_host(_features(head, arrays, tokens.scales)), np.float32)  # [count, F]
    if not np.isfinite(features).all():
        raise ValueError("a head's features: expected finite numbers; rule out a class by a logit of -1e4, not -inf.")
    mean = features.mean(axis=0, dtype=np.float64)
    features = features - mean.astype(np.float32)
    deviation = np.sqrt(np.square(features).mean(axis=0, dtype=np.float64))
    varies = (deviation > 1e-6 * np.abs(mean)) & (deviation > 0)
    deviation = np.where(varies, deviation, 1.0)
    features /= deviation.astype(np.float32)
    decayed: list[bool] = []
    for name in head.features:
        width = FEATURES[name].width
        if width is None:  # a hidden state
            decayed += [True] * head.hidden_size
        else:
            decayed += [False] * width
    placed = _place({"features": features, **curve_arrays})
    placed_features = placed.pop("features")
    curves = curves_of(placed, tokens.scales)
    gram = to_host(_gram(placed_features, curves, jnp.float32(temperature_log_scale)))
    curvature = gram.astype(np.float64) / count
    return Design(placed_features, mean, deviation, np.array(decayed), curves, curvature, temperature_log_scale, count)


_features = jax.jit(features_of, static_argnums=(0, 2))  # one program instead of one for each operation


def _place(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arrays, padded to a multiple of `_BLOCK` and of the devices, with rows divided over the current mesh."""
    mesh = context_mesh()
    multiple = math.lcm(_BLOCK, batch_shards(mesh))
    placed = {}
    for name, x in arrays.items():
        padding = np.zeros((-len(x) % multiple, *x.shape[1:]), x.dtype)
        placed |= divide_rows({name: np.concatenate([x, padding])})
    return placed if mesh is not None else jax.device_put(placed)


@jax.jit
def _gram(features: Float[Array, "N F"], curves: VocabCurves, log_scale: Float[Array, ""]) -> Float[Array, "G G"]:
    """N·H: Σ s² Var_p[z] [1, f̂] [1, f̂]ᵀ over the tokens, at the same scale s for all."""
    scale = jnp.exp(log_scale)
    variance = curves.at(scale).require("logit_variance")
    weight = jnp.where(curves.valid, scale**2 * variance, 0.0)  # [N]
    with_bias = jnp.concatenate([jnp.ones((len(features), 1)), features], axis=1)  # [N, G]
    return jnp.matmul((weight[:, None] * with_bias).T, with_bias, precision="highest")


@jax.jit(static_argnums=0)
def _loss_and_gradient(
    loss: str, hyper: dict[str, Float[Array, ""]], x: Float[Array, " G"], features, curves: VocabCurves, weights
):
    """Loss at bias and weights x: sums over blocks of tokens, [N / `_BLOCK`], and the gradient [G] of their total."""

    def total(x: Array) -> tuple[Array, Array]:
        scale = jnp.exp(_log_scale(x, features))
        values, _ = curve_loss(LOSSES[loss], curves, scale, hyper=hyper)
        weighted = jnp.where(weights > 0, weights * values, 0.0)
        block_sums = jnp.sum(weighted.reshape(-1, _BLOCK), axis=1)
        return jnp.sum(block_sums), block_sums

    (_, block_sums), gradient = jax.value_and_grad(total, has_aux=True)(x)
    return block_sums, gradient


@jax.jit
def _log_scale(x: Float[Array, " G"], features: Float[Array, "N F"]) -> Float[Array, " N"]:
    return jnp.clip(x[0] + jnp.matmul(features, x[1:], precision="highest"), *_BOUNDS)


def solve(
    design: Design,
    trial: Trial,
    decay: float,
    weights: Float[np.ndarray, " N"] | None = None,
    start: Float[np.ndarray, " G"] | None = None,
) -> Float[np.ndarray, " G"]:
    """Minimises the objective; returns bias and weights `[1 + F]` of the standardised features, float64.

    `weights`: of the tokens, by default 1; `start`: by default temperature scaling.
    """
    weights = np.ones(design.tokens, np.float32) if weights is None else weights
    total_weight = float(weights.sum(dtype=np.float64))
    placed_weights = _place({"weights": weights})["weights"]
    penalty = np.concatenate([[0.0], np.where(design.decayed, decay, _FREE_DECAY)])  # [G]; none on the bias
    ridge = _RIDGE * np.trace(design.curvature) / len(penalty)
    hessian = design.curvature + np.diag(penalty + ridge)
    x0 = np.append(design.temperature_log_scale, np.zeros(len(penalty) - 1)) if start is None else start
    hyper = {} if trial.alpha is None else {"alpha": jnp.float32(trial.alpha)}

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        x32 = jnp.asarray(x, jnp.float32)
        arrays = (hyper, x32, design.features, design.curves, placed_weights)
        block_sums, loss_gradient = to_host(_loss_and_gradient(trial.loss, *arrays))
        value = np.asarray(block_sums, np.float64).sum() / total_weight + 0.5 * (penalty * x) @ x
        gradient = np.asarray(loss_gradient, np.float64) / total_weight + penalty * x
        return value, gradient

    return preconditioned_lbfgs(objective, x0, hessian, **_LBFGS).x


def predict(design: Design, x: Float[np.ndarray, " G"]) -> Float[np.ndarray, " N"]:
    """log s of every token, float32, within the bounds of a head."""
    return to_host(_log_scale(jnp.asarray(x, jnp.float32), design.features))[: design.tokens]


def head_params(design: Design, x: Float[np.ndarray, " G"]) -> dict[str, Any]:
    """The parameters of a linear head: the standardisation is folded into them, so it reads the features themselves."""
    kernel = x[1:] / design.deviation
    bias = x[:1] - kernel @ design.mean
    return {"output": {"kernel": kernel[:, None].astype(np.float32), "bias": bias.astype(np.float32)}}


def fit_token_temperature(tokens: TokenCurves) -> recalibrate.TemperatureFit:
    """Temperature scaling of the tokens: maximises the likelihood of the targets, within the bounds of every head."""
    return recalibrate.fit_temperature(likelihood_sums_at(tokens), bounds=_BOUNDS)


def likelihood_sums_at(
    tokens: TokenCurves, log_scale: Float[np.ndarray, " N"] | None = None, *, top_label: bool = False
) -> Callable[[Float[Array, ""]], Iterator[recalibrate.LikelihoodSums]]:
    """A function of u that gives the likelihood of each sequence where the scale of every token is multiplied by e^u.

    `log_scale`: log s of the tokens that count, by default 0. `top_label`: whether to take the likelihood that the most
    likely token is right, instead of the target's.
    """
    arrays = tokens.flat()
    count = len(arrays["valid"])
    sequences = len(tokens.source)
    sequence_of_token = np.repeat(np.arange(sequences), tokens.counted.sum(axis=1))  # [count]
    arrays["log_scale"] = np.zeros(count, np.float32) if log_scale is None else log_scale
    placed = _place(arrays)
    base_log_scale = placed.pop("log_scale")
    curves = curves_of(placed, tokens.scales)

    def sums_at(u: Float[Array, ""]) -> Iterator[recalibrate.LikelihoodSums]:
        token_sums = to_host(_likelihood(top_label, curves, base_log_scale + u))
        yield recalibrate.LikelihoodSums(*(np.bincount(sequence_of_token, x[:count], sequences) for x in token_sums))

    return sums_at


@jax.jit(static_argnums=0)
def _likelihood(top_label: bool, curves: VocabCurves, log_scale: Float[Array, " N"]) -> recalibrate.LikelihoodSums:
    """The likelihood of every token, [N] each: a sum over a sequence of one token."""
    one_token_sequences = jax.tree.map(lambda x: x[:, None], curves)
    stats = one_token_sequences.at(jnp.exp(log_scale)[:, None])  # [N, 1]
    return recalibrate.likelihood_sums(stats, top_label=top_label)
