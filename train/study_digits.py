"""Long-horizon temperatures of models that are not language models: images of digits, pixel by pixel and by diffusion.

    python train/study_digits.py --out runs/digits

Scorers are trained on scikit-learn's 8x8 digits: an autoregressive model of the pixels, whose likelihood is exact, and
a small diffusion model, whose likelihood is a variational bound. Students learn p_T from weighted samples of the scorer
(arXiv 2302.03686): one for each T, and one that is conditioned on T and asked for temperatures that it was not trained
at. Beside them the myopic temperature: of every pixel, or of the noise of every diffusion step. Prints tables in
Markdown and writes them to --out.

Where log q is known, F = E_q[log q(x) − log p(x)/T] = KL(q ‖ p_T) − log Z tells which of two samplers is nearer to p_T.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from calibjax.losses.long_horizon import MODES, Horizon, RunningMean, log_weights, long_horizon_loss, token_weights
from calibjax.runtime.files import write_file

SIDE, LEVELS = 8, 17
PIXELS = SIDE * SIDE
STEPS = 100
"""Of the diffusion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Trains scorers and students, and evaluates their samples.

    Attributes:
        out: for the tables.
        temperatures: of students and of myopic sampling.
        trained: temperatures at which the conditioned student is trained.
        samples: of the scorer, to train students on; and of each sampler, to evaluate it.
        epochs: over the digits; students make a tenth of these steps.
        clip: largest log-weight.
        seed: of all random numbers.
    """

    out: Path
    temperatures: tuple[float, ...] = (0.95, 0.9, 0.8, 0.7, 0.6)
    trained: tuple[float, ...] = (1.0, 0.9, 0.7)
    samples: int = 4096
    epochs: int = 100
    clip: float = 3.0
    seed: int = 0


class PixelModel(nn.Module):
    """A causal transformer over pixels from the top left, conditioned on s = 1/T − 1."""

    width: int = 64
    layers: int = 2

    @nn.compact
    def __call__(self, pixels: Int[Array, "B N"], s: Float[Array, " B"]) -> Float[Array, "B N L"]:
        before = jnp.pad(pixels[:, :-1], ((0, 0), (1, 0)), constant_values=LEVELS)
        x = nn.Embed(LEVELS + 1, self.width)(before) + nn.Embed(PIXELS, self.width)(jnp.arange(PIXELS))[None]
        x = (
            x
            + nn.Dense(self.width, kernel_init=nn.initializers.zeros, use_bias=False)(jnp.stack([s, s * s], axis=-1))[
                :, None
            ]
        )
        mask = nn.make_causal_mask(pixels)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(LEVELS)(nn.LayerNorm()(x))


class Denoiser(nn.Module):
    """The noise in x_t, by an MLP of x_t and t."""

    width: int = 256

    @nn.compact
    def __call__(self, x: Float[Array, "B N"], t: Int[Array, " B"]) -> Float[Array, "B N"]:
        time = nn.Embed(STEPS, self.width)(t)
        h = nn.Dense(self.width)(x) + time
        for _ in range(3):
            h = h + nn.Dense(self.width)(nn.gelu(nn.LayerNorm()(h) + nn.Dense(self.width)(time)))
        return nn.Dense(PIXELS)(nn.LayerNorm()(h))


def optimise(
    loss: Callable[[Any, dict[str, Array], Array], Array],
    params: Any,
    arrays: dict[str, Any],
    *,
    steps: int,
    rate: float,
    key: Array,
    batch: int = 128,
) -> Any:
    """Adam with a cosine schedule; `loss(params, batch, key)` on rows drawn with replacement."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(rate, steps)))
    size = len(next(iter(arrays.values())))
    arrays = jax.tree.map(jnp.asarray, arrays)

    @jax.jit
    def run(params, arrays, key):
        def step(carry, key):
            params, state = carry
            draw, noise = jax.random.split(key)
            rows = {name: x[jax.random.randint(draw, (batch,), 0, size)] for name, x in arrays.items()}
            gradient = jax.grad(loss)(params, rows, noise)
            updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, steps))[0][0]

    return run(params, arrays, key)


class Figures(NamedTuple):
    """Of samples. Likelihoods are of a whole image, nats.

    Attributes:
        log_p: mean log-likelihood under the scorer (of a diffusion model its bound), and its standard error.
        log_p_error: standard error of `log_p`.
        log_q: mean log-likelihood under the sampler itself; NaN where it is not known.
        distance: mean Euclidean distance between two samples, pixels in [0, 1].
        classes: exp of the entropy of the digits, as a classifier reads them; 10 if all are equally frequent.
    """

    log_p: float
    log_p_error: float
    log_q: float
    distance: float
    classes: float

    def free_energy(self, temperature: float) -> float:
        """E_q[log q − log p/T]."""
        return self.log_q - self.log_p / temperature


def figures(log_p: np.ndarray, log_q: np.ndarray | None, images: np.ndarray, classifier: Any) -> Figures:
    """`Figures` of pixels in [0, 1], `[N, 64]`."""
    half = len(images) // 2
    share = np.bincount(classifier.predict(images), minlength=10) / len(images)
    entropy = -np.sum(share[share > 0] * np.log(share[share > 0]))
    return Figures(
        float(log_p.mean()),
        float(log_p.std() / np.sqrt(len(log_p))),
        float("nan") if log_q is None else float(log_q.mean()),
        float(np.linalg.norm(images[:half] - images[half : 2 * half], axis=1).mean()),
        float(np.exp(entropy)),
    )


# The autoregressive model.

_pixels = PixelModel()


def pixel_logits(params: Any, images: Int[Array, "B N"], s: Float[Array, " B"]) -> Array:
    """Logits of each pixel given those before it, `[B, N, L]`."""
    return cast(Array, _pixels.apply(params, images, s))


@jax.jit
def pixel_log_probs(params: Any, images: Int[Array, "B N"], s: Float[Array, " B"]) -> Float[Array, "B N"]:
    """log p of each pixel given those before it."""
    logits = jax.nn.log_softmax(pixel_logits(params, images, s))
    return jnp.take_along_axis(logits, images[..., None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnums=1)
def sample_pixels(params: Any, count: int, s: float, temperature: float, key: Array) -> tuple[Array, Array]:
    """Images at a myopic temperature, and the log-probability of drawing each."""
    condition = jnp.full(count, s)

    def draw(carry, at):
        images, total = carry
        log_q = jax.nn.log_softmax(pixel_logits(params, images, condition)[:, at[0]] / temperature)
        pixel = jax.random.categorical(at[1], log_q)
        total = total + jnp.take_along_axis(log_q, pixel[:, None], axis=1)[:, 0]
        return (images.at[:, at[0]].set(pixel), total), None

    start = (jnp.zeros((count, PIXELS), jnp.int32), jnp.zeros(count))
    (images, total), _ = jax.lax.scan(draw, start, (jnp.arange(PIXELS), jax.random.split(key, PIXELS)))
    return images, total


def pixel_student(
    study: Study, scorer: Any, images: np.ndarray, log_p: np.ndarray, temperatures: tuple[float, ...], key: Array
) -> Any:
    """A student of p_T, from weighted samples of the scorer; of several T conditioned on T."""
    objective: Horizon = dataclasses.replace(MODES["paper"], clip=study.clip)
    mean = RunningMean.empty(PIXELS).update(jnp.asarray(log_p), jnp.ones(log_p.shape, bool)).baseline("position")
    choices = jnp.asarray(temperatures)

    def loss(params, rows, key):
        t = jax.random.choice(key, choices, (len(rows["images"]),))
        s = jnp.where(len(temperatures) > 1, 1 / t - 1, 0.0)
        weights = token_weights(rows["log_p"], t, objective, baseline=mean)
        return long_horizon_loss(pixel_log_probs(params, rows["images"], s), weights).sum(-1).mean() / PIXELS**2

    steps = study.epochs * 14
    return optimise(loss, scorer, {"images": images, "log_p": log_p}, steps=steps // 3, rate=1e-3, key=key)


def study_pixels(study: Study, digits: np.ndarray, held_out: np.ndarray, classifier: Any) -> list[str]:
    keys = iter(jax.random.split(jax.random.key(study.seed), 200))
    none = jnp.zeros(128)

    def loss(params, rows, _):
        return -pixel_log_probs(params, rows["images"], none).mean()

    params = _pixels.init(next(keys), jnp.zeros((1, PIXELS), jnp.int32), jnp.zeros(1))
    scorer = optimise(loss, params, {"images": digits}, steps=study.epochs * 14, rate=3e-3, key=next(keys))

    def score(images: Any) -> np.ndarray:
        parts = np.split(np.asarray(images), range(512, len(images), 512))
        return np.concatenate([np.asarray(pixel_log_probs(scorer, x, jnp.zeros(len(x)))) for x in parts])

    def evaluate(params: Any, s: float, temperature: float) -> Figures:
        parts = [sample_pixels(params, 512, s, temperature, next(keys)) for _ in range(study.samples // 512)]
        images, log_q = (np.concatenate(x) for x in zip(*parts, strict=True))
        return figures(score(images).sum(-1), log_q, images / (LEVELS - 1), classifier)

    parts = [np.asarray(sample_pixels(scorer, 512, 0.0, 1.0, next(keys))[0]) for _ in range(study.samples // 512)]
    images = np.concatenate(parts)
    log_p = score(images)
    both = pixel_student(study, scorer, images, log_p, study.trained, next(keys))
    rows = [("scorer", 1.0, evaluate(scorer, 0.0, 1.0))]
    for t in study.temperatures:
        rows.append(("myopic", t, evaluate(scorer, 0.0, t)))
        student = pixel_student(study, scorer, images, log_p, (t,), next(keys))
        rows.append(("long-horizon", t, evaluate(student, 0.0, 1.0)))
        how = "trained at T" if t in study.trained else "not trained at T"
        rows.append((f"long-horizon, conditioned, {how}", t, evaluate(both, 1 / t - 1, 1.0)))
    before = f"Held-out NLL of the scorer: {-score(held_out).sum(-1).mean():.1f} nats an image "
    before += (
        f"({-score(held_out).mean():.3f} a pixel); of the digits it was trained on {-score(digits).sum(-1).mean():.1f}."
    )
    head = "| sampler | T | log p | entropy | F(T) | distance | classes |"
    lines = [
        f"| {name} | {t:g} | {of.log_p:.1f} ± {of.log_p_error:.1f} | {-of.log_q:.1f} | {of.free_energy(t):.1f} "
        f"| {of.distance:.2f} | {of.classes:.1f} |"
        for name, t, of in rows
    ]
    return ["### Pixel by pixel", "", before, "", head, "|---" * 7 + "|", *lines, ""]


# The diffusion model.

_denoiser = Denoiser()
_beta = np.linspace(1e-3, 0.12, STEPS)
_signal = np.cumprod(1 - _beta)
_before = np.concatenate([[1.0], _signal[:-1]])
_variance = np.concatenate([_beta[:1], (_beta * (1 - _before) / (1 - _signal))[1:]])
"""Of x_t given x_{t+1} (and x, but for the first)."""


def noisy(x: Array, t: Array, noise: Array) -> Array:
    """x_t of images in [−1, 1]."""
    signal = jnp.asarray(_signal)[t][:, None]
    return jnp.sqrt(signal) * x + jnp.sqrt(1 - signal) * noise


def predicted_noise(params: Any, x: Array, t: Array) -> Array:
    """The denoiser's output."""
    return cast(Array, _denoiser.apply(params, x, t))


def previous_mean(params: Any, x: Array, t: Array) -> Array:
    """Mean of p(x_{t−1} | x_t)."""
    beta, signal = (jnp.asarray(of)[t][:, None] for of in (_beta, _signal))
    return (x - beta / jnp.sqrt(1 - signal) * predicted_noise(params, x, t)) / jnp.sqrt(1 - beta)


@functools.partial(jax.jit, static_argnames="draws")
def bound(params: Any, levels: Int[Array, "B N"], key: Array, draws: int = 4) -> Float[Array, " B"]:
    """Variational lower bound of log p of images of 17 levels, nats, averaged over draws of the noise."""
    x = levels / (LEVELS - 1) * 2.0 - 1.0
    step = 1.0 / (LEVELS - 1)

    def term(total, at):
        t, key = at
        times = jnp.full(len(x), t)
        noised = noisy(x, times, jax.random.normal(key, x.shape))
        mean = previous_mean(params, noised, times)
        variance = jnp.asarray(_variance)[t]
        signal, before, beta = (jnp.asarray(of)[t] for of in (_signal, _before, _beta))
        truth = (jnp.sqrt(before) * beta * x + jnp.sqrt(1 - beta) * (1 - before) * noised) / (1 - signal)
        kl = jnp.square(truth - mean).sum(-1) / (2 * variance)
        upper = jnp.where(levels == LEVELS - 1, jnp.inf, (x + step - mean) / jnp.sqrt(variance))
        lower = jnp.where(levels == 0, -jnp.inf, (x - step - mean) / jnp.sqrt(variance))
        # Both ends on the side where the normal distribution function has digits.
        flip = lower > 0
        upper, lower = jnp.where(flip, -lower, upper), jnp.where(flip, -upper, lower)
        high, low = jax.scipy.stats.norm.logcdf(upper), jax.scipy.stats.norm.logcdf(lower)
        ends = high + jnp.log1p(-jnp.exp(jnp.minimum(low - high, -1e-6)))
        return total - jnp.where(t == 0, -ends.sum(-1), kl), None

    times, keys = jnp.tile(jnp.arange(STEPS), draws), jax.random.split(key, STEPS * draws)
    total, _ = jax.lax.scan(term, jnp.zeros(len(x)), (times, keys))
    last = _signal[-1]
    prior = 0.5 * (last * jnp.square(x) + (1 - last) - 1 - np.log(1 - last)).sum(-1)
    return total / draws - prior


@functools.partial(jax.jit, static_argnums=1)
def sample_diffusion(params: Any, count: int, temperature: float, key: Array) -> Int[Array, "B N"]:
    """Images of 17 levels; the variance of every step's noise, and of the first x, is multiplied by `temperature`."""
    first, rest = jax.random.split(key)
    scale = jnp.sqrt(temperature)

    def step(x, at):
        t, key = at
        noise = jnp.where(t > 0, scale * jnp.sqrt(jnp.asarray(_variance)[t]), 0.0) * jax.random.normal(key, x.shape)
        return previous_mean(params, x, jnp.full(count, t)) + noise, None

    start = scale * jax.random.normal(first, (count, PIXELS))
    x, _ = jax.lax.scan(step, start, (jnp.arange(STEPS)[::-1], jax.random.split(rest, STEPS)))
    return jnp.clip(jnp.round((x + 1) / 2 * (LEVELS - 1)), 0, LEVELS - 1).astype(jnp.int32)


def study_diffusion(study: Study, digits: np.ndarray, held_out: np.ndarray, classifier: Any) -> list[str]:
    keys = iter(jax.random.split(jax.random.key(study.seed + 1), 200))

    def loss(params, rows, key):
        x = rows["images"] / (LEVELS - 1) * 2.0 - 1.0
        for_t, for_noise = jax.random.split(key)
        t, noise = jax.random.randint(for_t, (len(x),), 0, STEPS), jax.random.normal(for_noise, x.shape)
        error = jnp.square(predicted_noise(params, noisy(x, t, noise), t) - noise).mean(-1)
        return (rows["weight"] * error).mean()

    params = _denoiser.init(next(keys), jnp.zeros((1, PIXELS)), jnp.zeros(1, jnp.int32))
    steps = study.epochs * 140
    ones = np.ones(len(digits), np.float32)
    scorer = optimise(loss, params, {"images": digits, "weight": ones}, steps=steps, rate=1e-3, key=next(keys))

    def score(images: np.ndarray) -> np.ndarray:
        parts = np.split(images, range(512, len(images), 512))
        return np.concatenate([np.asarray(bound(scorer, part, next(keys))) for part in parts])

    def draw(params: Any, temperature: float) -> np.ndarray:
        parts = [sample_diffusion(params, 512, temperature, next(keys)) for _ in range(study.samples // 512)]
        return np.concatenate(parts)

    def evaluate(params: Any, temperature: float) -> Figures:
        images = draw(params, temperature)
        return figures(score(images), None, images / (LEVELS - 1), classifier)

    images = draw(scorer, 1.0)
    log_p = score(images)
    rows = [("scorer", 1.0, evaluate(scorer, 1.0), "")]
    for t in study.temperatures:
        rows.append(("myopic", t, evaluate(scorer, t), ""))
        logs = log_weights(jnp.asarray(log_p)[:, None], t, baseline=float(log_p.mean()), clip=study.clip)
        weight = np.exp(np.asarray(logs)[:, 0])
        used = weight.sum() ** 2 / np.square(weight).sum() / len(weight)
        arrays = {"images": images, "weight": weight / weight.mean()}
        student = optimise(loss, scorer, arrays, steps=steps // 3, rate=3e-4, key=next(keys))
        rows.append(("long-horizon", t, evaluate(student, 1.0), f"{used:.0%}"))
    before = f"Bound of the NLL of held-out digits: {-score(held_out).mean():.1f} nats an image; "
    before += f"of the digits that the scorer was trained on {-score(digits).mean():.1f}."
    lines = [
        f"| {name} | {t:g} | {of.log_p:.1f} ± {of.log_p_error:.1f} | {of.distance:.2f} | {of.classes:.1f} | {used} |"
        for name, t, of, used in rows
    ]
    head = "| sampler | T | bound of log p | distance | classes | effective samples |"
    return ["### By diffusion", "", before, "", head, "|---" * 6 + "|", *lines, ""]


def main(study: Study) -> None:
    study.out.mkdir(parents=True, exist_ok=True)
    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.data))
    images, labels = data.data[order].astype(np.int32), data.target[order]
    classifier = LogisticRegression(max_iter=5000).fit(images[:1500] / (LEVELS - 1), labels[:1500])
    accuracy = classifier.score(images[1500:] / (LEVELS - 1), labels[1500:])
    real = figures(np.zeros(len(images)), None, images / (LEVELS - 1), classifier)
    lines = [
        f"Of the digits themselves: distance {real.distance:.2f}, classes {real.classes:.1f}; the classifier is right "
        f"on {accuracy:.1%} of held-out digits.",
        "",
    ]
    for part in (study_pixels, study_diffusion):
        found = part(study, images[:1500], images[1500:], classifier)
        print("\n".join(found), flush=True)
        lines += found
    write_file(study.out / "table.md", "\n".join(lines) + "\n")
    print(f"results in {study.out}: table.md")


if __name__ == "__main__":
    main(tyro.cli(Study))
