"""Long-horizon temperatures of models that are not language models: images of digits, pixel by pixel and by diffusion.

    python train/study_digits.py --out runs/digits

Scorers are trained on scikit-learn's 8x8 digits: an autoregressive model of the pixels, whose likelihood is exact, and
a small diffusion model, whose likelihood is a variational bound. Students learn p_T from weighted samples of the scorer
(arXiv 2302.03686): one for each T, and one that is conditioned on T and asked for temperatures that it was not trained
at. Beside them the myopic temperature: of every pixel, or of the noise of every diffusion step. Prints tables in
Markdown, means over seeds ± half their range, and writes them to --out, where the figures of every seed are kept, so
that an interrupted run resumes.

Where log q is known, F = E_q[log q(x) − log p(x)/T] = KL(q ‖ p_T) − log Z tells which of two samplers is nearer to p_T.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from calibjax.cli import execute
from calibjax.commands.parser import parse_script
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
        samples: of the scorer, to train students on.
        evaluated: samples of each sampler.
        steps: of the scorers, of 64 images pixel by pixel and of 128 by diffusion; a student makes a third of them.
        clip: largest log-weight.
        seeds: of all random numbers, one run each.
    """

    out: Path
    temperatures: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6)
    trained: tuple[float, ...] = (1.0, 0.9, 0.7)
    samples: int = 4096
    evaluated: int = 1024
    steps: tuple[int, int] = (600, 6000)
    clip: float = 3.0
    seeds: tuple[int, ...] = (0, 1)


class PixelModel(nn.Module):
    """A causal transformer over pixels from the top left, conditioned on s = 1/T − 1.

    With `decode` it reads one pixel at a time and keeps keys and values.
    """

    width: int = 64
    layers: int = 2
    decode: bool = False

    @nn.compact
    def __call__(self, before: Int[Array, "B N"], at: Int[Array, " N"], s: Float[Array, " B"]) -> Float[Array, "B N L"]:
        """Logits of the pixels `at`, of the pixel before each (`LEVELS` before the first)."""
        x = nn.Embed(LEVELS + 1, self.width)(before) + nn.Embed(PIXELS, self.width)(at)[None]
        condition = nn.Dense(self.width, kernel_init=nn.initializers.zeros, use_bias=False)
        x = x + condition(jnp.stack([s, s * s], axis=-1))[:, None]
        mask = None if self.decode else nn.make_causal_mask(before)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(4, decode=self.decode)(nn.LayerNorm()(x), mask=mask)
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


@functools.partial(jax.jit, static_argnames=("loss", "steps", "batch"))
def optimise(
    loss: Callable[[Any, dict[str, Array], Array], Array],
    params: Any,
    arrays: dict[str, Any],
    rate: float,
    key: Array,
    *,
    steps: int,
    batch: int,
) -> Any:
    """Adam with a cosine schedule; `loss(params, rows, key)` on rows drawn with replacement."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, steps)),
    )
    size = len(next(iter(arrays.values())))

    def step(carry, key):
        params, state = carry
        draw, noise = jax.random.split(key)
        chosen = jax.random.randint(draw, (batch,), 0, size)
        gradient = jax.grad(loss)(params, {name: x[chosen] for name, x in arrays.items()}, noise)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, jax.tree.map(lambda x: -rate * x, updates)), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, steps))[0][0]


class Figures(NamedTuple):
    """Of samples. Likelihoods are of a whole image, nats.

    Attributes:
        log_p: mean log-likelihood under the scorer (of a diffusion model its bound), and its standard error.
        log_p_error: standard error of `log_p`.
        log_q: mean log-likelihood under the sampler itself; NaN where it is not known.
        distance: mean Euclidean distance between two samples, pixels in [0, 1].
        classes: exp of the entropy of the digits, as a classifier reads them; 10 if all are equally frequent.
        used: effective number of weighted samples that a student learned from, as a fraction; NaN where unknown.
    """

    log_p: float
    log_p_error: float
    log_q: float
    distance: float
    classes: float
    used: float = float("nan")

    def free_energy(self, temperature: float) -> float:
        """E_q[log q − log p/T]."""
        return self.log_q - self.log_p / temperature


class Found(NamedTuple):
    """Of one seed: NLL of an image under the scorer, held out and of its training digits; (sampler, T, figures)."""

    held_out: float
    trained: float
    rows: list[tuple[str, float, Figures]]


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

_pixels, _one_pixel = PixelModel(), PixelModel(decode=True)


@jax.jit
def pixel_log_probs(params: Any, images: Int[Array, "B N"], s: Float[Array, " B"]) -> Float[Array, "B N"]:
    """log p of each pixel given those before it."""
    before = jnp.pad(images[:, :-1], ((0, 0), (1, 0)), constant_values=LEVELS)
    logits = jax.nn.log_softmax(cast(Array, _pixels.apply(params, before, jnp.arange(PIXELS), s)))
    return jnp.take_along_axis(logits, images[..., None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnums=1)
def sample_pixels(params: Any, count: int, s: float, temperature: float, key: Array) -> tuple[Array, Array]:
    """Images at a myopic temperature, and the log-probability of drawing each."""
    condition, places = jnp.full(count, s), jnp.arange(PIXELS)
    whole = jnp.zeros((count, PIXELS), jnp.int32)
    cache = jax.eval_shape(_one_pixel.init, key, whole, places, condition)["cache"]

    def draw(carry, at):
        cache, pixel, total = carry
        place, key = at
        variables = {"params": params["params"], "cache": cache}
        logits, new = _one_pixel.apply(variables, pixel[:, None], place[None], condition, mutable=["cache"])
        log_q = jax.nn.log_softmax(cast(Array, logits)[:, 0] / temperature)
        pixel = jax.random.categorical(key, log_q).astype(jnp.int32)
        total = total + jnp.take_along_axis(log_q, pixel[:, None], axis=1)[:, 0]
        return (new["cache"], pixel, total), pixel

    empty = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), cache)
    start = (empty, jnp.full(count, LEVELS, jnp.int32), jnp.zeros(count))
    (_, _, total), images = jax.lax.scan(draw, start, (places, jax.random.split(key, PIXELS)))
    return images.T, total


def pixel_loss(params: Any, rows: dict[str, Array], _: Array) -> Array:
    """Weighted −log q of images, conditioned on s."""
    return long_horizon_loss(pixel_log_probs(params, rows["images"], rows["s"]), rows["weights"]).mean()


def pixel_student(
    study: Study, scorer: Any, images: np.ndarray, log_p: np.ndarray, temperatures: tuple[float, ...], key: Array
) -> Any:
    """A student of p_T, from weighted samples of the scorer; of several T conditioned on T."""
    objective: Horizon = dataclasses.replace(MODES["paper"], clip=study.clip)
    mean = RunningMean.empty(PIXELS).update(jnp.asarray(log_p), jnp.ones(log_p.shape, bool)).baseline("position")
    weights = [token_weights(jnp.asarray(log_p), t, objective, baseline=mean) for t in temperatures]
    # A weight that is the same for a whole temperature does not change its minimiser, but its part of shared weights.
    weights = np.concatenate([np.asarray(of / of.mean()) for of in weights])
    s = np.repeat([1 / t - 1 if len(temperatures) > 1 else 0.0 for t in temperatures], len(images)).astype(np.float32)
    arrays = {"images": np.tile(images, (len(temperatures), 1)), "weights": weights, "s": s}
    return optimise(pixel_loss, scorer, arrays, 1e-3, key, steps=study.steps[0] // 3, batch=64)


def study_pixels(study: Study, seed: int, digits: np.ndarray, held_out: np.ndarray, classifier: Any) -> Found:
    keys = iter(jax.random.split(jax.random.key(seed), 500))
    params = _pixels.init(next(keys), jnp.zeros((1, PIXELS), jnp.int32), jnp.arange(PIXELS), jnp.zeros(1))
    plain = {"images": digits, "weights": np.ones(digits.shape, np.float32), "s": np.zeros(len(digits), np.float32)}
    scorer = optimise(pixel_loss, params, plain, 3e-3, next(keys), steps=study.steps[0], batch=64)

    def score(images: np.ndarray) -> np.ndarray:
        parts = np.split(images, range(512, len(images), 512))
        return np.concatenate([np.asarray(pixel_log_probs(scorer, x, jnp.zeros(len(x)))) for x in parts])

    def draw(params: Any, s: float, temperature: float, count: int) -> list[np.ndarray]:
        parts = [sample_pixels(params, 512, s, temperature, next(keys)) for _ in range(count // 512)]
        return [np.concatenate(x) for x in zip(*parts, strict=True)]

    def evaluate(params: Any, s: float, temperature: float) -> Figures:
        images, log_q = draw(params, s, temperature, study.evaluated)
        return figures(score(images).sum(-1), log_q, images / (LEVELS - 1), classifier)

    images, _ = draw(scorer, 0.0, 1.0, study.samples)
    log_p = score(images)
    both = pixel_student(study, scorer, images, log_p, study.trained, next(keys))
    found = Found(float(-score(held_out).sum(-1).mean()), float(-score(digits).sum(-1).mean()), [])
    found.rows.append(("scorer", 1.0, evaluate(scorer, 0.0, 1.0)))
    for t in study.temperatures:
        found.rows.append(("myopic", t, evaluate(scorer, 0.0, t)))
        student = pixel_student(study, scorer, images, log_p, (t,), next(keys))
        found.rows.append(("long-horizon", t, evaluate(student, 0.0, 1.0)))
        how = "trained at T" if t in study.trained else "not trained at T"
        found.rows.append((f"conditioned, {how}", t, evaluate(both, 1 / t - 1, 1.0)))
    return found


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
def bound(params: Any, levels: Int[Array, "B N"], key: Array, draws: int = 2) -> Float[Array, " B"]:
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


def denoising_loss(params: Any, rows: dict[str, Array], key: Array) -> Array:
    """Weighted squared error of the predicted noise."""
    x = rows["images"] / (LEVELS - 1) * 2.0 - 1.0
    for_t, for_noise = jax.random.split(key)
    t, noise = jax.random.randint(for_t, (len(x),), 0, STEPS), jax.random.normal(for_noise, x.shape)
    error = jnp.square(predicted_noise(params, noisy(x, t, noise), t) - noise).mean(-1)
    return (rows["weight"] * error).mean()


def study_diffusion(study: Study, seed: int, digits: np.ndarray, held_out: np.ndarray, classifier: Any) -> Found:
    keys = iter(jax.random.split(jax.random.key(seed), 500))
    params = _denoiser.init(next(keys), jnp.zeros((1, PIXELS)), jnp.zeros(1, jnp.int32))
    steps = study.steps[1]
    ones = np.ones(len(digits), np.float32)
    arrays = {"images": digits, "weight": ones}
    scorer = optimise(denoising_loss, params, arrays, 1e-3, next(keys), steps=steps, batch=128)

    def score(images: np.ndarray) -> np.ndarray:
        parts = np.split(images, range(512, len(images), 512))
        return np.concatenate([np.asarray(bound(scorer, part, next(keys))) for part in parts])

    def draw(params: Any, temperature: float, count: int) -> np.ndarray:
        parts = [sample_diffusion(params, 512, temperature, next(keys)) for _ in range(count // 512)]
        return np.concatenate(parts)

    def evaluate(params: Any, temperature: float, used: float = float("nan")) -> Figures:
        images = draw(params, temperature, study.evaluated)
        return figures(score(images), None, images / (LEVELS - 1), classifier)._replace(used=used)

    images = draw(scorer, 1.0, study.samples)
    log_p = score(images)
    found = Found(float(-score(held_out).mean()), float(-score(digits).mean()), [])
    found.rows.append(("scorer", 1.0, evaluate(scorer, 1.0)))
    for t in study.temperatures:
        found.rows.append(("myopic", t, evaluate(scorer, t)))
        logs = log_weights(jnp.asarray(log_p)[:, None], t, baseline=float(log_p.mean()), clip=study.clip)
        weight = np.exp(np.asarray(logs)[:, 0])
        used = float(weight.sum() ** 2 / np.square(weight).sum() / len(weight))
        arrays = {"images": images, "weight": weight / weight.mean()}
        student = optimise(denoising_loss, scorer, arrays, 3e-4, next(keys), steps=steps // 3, batch=128)
        found.rows.append(("long-horizon", t, evaluate(student, 1.0, used)))
    return found


# The tables.


def spread(values: list[float], decimals: int) -> str:
    """Mean ± half the range over seeds."""
    half = (max(values) - min(values)) / 2
    mean = f"{np.mean(values):.{decimals}f}"
    return mean if len(values) == 1 else f"{mean} ±{half:.{decimals}f}"


def table(title: str, seeds: list[Found]) -> list[str]:
    """Of all seeds; columns that hold no number are left out."""
    columns: dict[str, tuple[Callable[[Figures, float], float], int]] = {
        "log p": (lambda of, t: of.log_p, 1),
        "distance": (lambda of, t: of.distance, 3),
        "classes": (lambda of, t: of.classes, 2),
        "entropy": (lambda of, t: -of.log_q, 1),
        "F(T)": (lambda of, t: of.free_energy(t), 1),
        "effective samples": (lambda of, t: of.used, 2),
    }
    rows = list(zip(*(found.rows for found in seeds), strict=True))
    cells = {
        name: ["" if np.isnan(v[0]) else spread(v, digits) for v in ([of(x[2], x[1]) for x in row] for row in rows)]
        for name, (of, digits) in columns.items()
    }
    cells = {name: column for name, column in cells.items() if any(column)}
    lines = [
        "| " + " | ".join([row[0][0], f"{row[0][1]:g}", *(cells[name][index] for name in cells)]) + " |"
        for index, row in enumerate(rows)
    ]
    error = max(row[0][2].log_p_error for row in rows)
    before = (
        f"NLL of an image under the scorer: {spread([of.held_out for of in seeds], 1)} nats of held-out digits, "
        f"{spread([of.trained for of in seeds], 1)} of those it was trained on. Standard error of log p over images: "
        f"at most {error:.1f}."
    )
    head = ["| sampler | T | " + " | ".join(cells) + " |", "|---" * (2 + len(cells)) + "|"]
    return [f"### {title}", "", before, "", *head, *lines, ""]


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
    settings = {k: v for k, v in dataclasses.asdict(study).items() if k not in ("out", "seeds")}
    for title, part in (("Digits, pixel by pixel", study_pixels), ("Digits, by diffusion", study_diffusion)):
        seeds = []
        for seed in study.seeds:
            file = study.out / f"{part.__name__}-{seed}.json"
            if not (file.is_file() and json.loads(file.read_text())["settings"] == json.loads(json.dumps(settings))):
                found = part(study, seed, images[:1500], images[1500:], classifier)
                write_file(file, json.dumps({"settings": settings, **found._asdict()}, indent=2) + "\n")
            kept = json.loads(file.read_text())
            rows = [(name, t, Figures(*of)) for name, t, of in kept["rows"]]
            seeds.append(Found(kept["held_out"], kept["trained"], rows))
        found = table(title, seeds)
        print("\n".join(found), flush=True)
        lines += found
    write_file(study.out / "table.md", "\n".join(lines) + "\n")
    print(f"results in {study.out}: table.md and the figures of every seed")


if __name__ == "__main__":
    sys.exit(execute(parse_script(Study), lambda study, _: main(study)))
