"""The losses that `bench.py` compares, the programs that it runs for each, and their values in float64.

z = softcap(h Wᵀ), per token l = (1−β)(lse(s z) − s z_y) + β (lse(s z) − s mean z), and its mean over N tokens.
"""

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from static_profile import Points, Program, our_points

from calibjax import kernels


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and options of one table."""

    tokens: int
    width: int
    vocab: int
    dtype: str
    label_smoothing: float = 0.0
    softcap: float | None = None

    def __str__(self) -> str:
        return (
            f"N={self.tokens:,} D={self.width:,} V={self.vocab:,} {self.dtype}, "
            f"label smoothing {self.label_smoothing:g}, soft-cap {'none' if self.softcap is None else self.softcap}"
        )

    @property
    def forms_dh_in_backward(self) -> bool:
        """Whether `vocab_stats` on a TPU forms dh in the backward pass, by two products: it has two weights on W."""
        return self.softcap is not None and self.label_smoothing > 0

    def product_flops(self) -> int:
        """Of one product N·D·V."""
        return 2 * self.tokens * self.width * self.vocab


PRESETS = {
    "cpu": Problem(2048, 512, 32_000, "float32"),
    "gemma2-2b": Problem(8192, 2304, 256_000, "bfloat16"),
    "llama31-8b-4k": Problem(4096, 4096, 128_256, "bfloat16"),
    "tokens-32k": Problem(32_768, 2560, 128_256, "bfloat16"),
}


class Task(NamedTuple):
    """What a program computes."""

    title: str
    differentiated: tuple[int, ...]  # positions of (hidden, unembedding, targets, scale)
    products: int  # N·D·V
    recomputing: int  # products of an operator that never holds the logits


TASKS = {
    "statistics": Task("all statistics", (), 1, 1),
    "forward": Task("forward", (), 1, 1),
    "scale": Task("forward + scale gradient (temperature training)", (3,), 1, 1),
    "hidden": Task("forward + hidden gradient (W frozen)", (0,), 2, 2),
    "both": Task("forward + backward (hidden and W)", (0, 1), 3, 4),
}


class Contender(NamedTuple):
    """A loss `(hidden, unembedding, targets, scale or None)` -> loss per token [N], or their mean."""

    loss: Callable[..., Array]
    transposed: bool = False  # it takes the unembedding as [D, V]


def _logits(problem: Problem, hidden: Array, unembedding: Array, scale: Array | None) -> Array:
    precision = jax.lax.Precision.HIGHEST if hidden.dtype != jnp.bfloat16 else None
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    z = jnp.matmul(hidden, unembedding.T, precision=precision, preferred_element_type=wide)
    if problem.softcap is not None:
        z = problem.softcap * jnp.tanh(z / problem.softcap)
    return z if scale is None else scale[:, None] * z


def _optax(problem: Problem, hidden: Array, unembedding: Array, targets: Array, scale: Array | None) -> Array:
    if problem.label_smoothing:
        raise NotImplementedError("has no label smoothing for integer labels")
    z = _logits(problem, hidden, unembedding, scale)
    return optax.softmax_cross_entropy_with_integer_labels(z, targets)


def _dense(problem: Problem, hidden: Array, unembedding: Array, targets: Array, scale: Array | None) -> Array:
    z, beta = _logits(problem, hidden, unembedding, scale), problem.label_smoothing
    target = jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(z, axis=1) - (1 - beta) * target - beta * jnp.mean(z, axis=1)


def _scan(problem: Problem, hidden: Array, unembedding: Array, targets: Array, scale: Array | None) -> Array:
    """The dense loss over chunks of at most 1,024 tokens; their logits are computed again in the backward pass."""
    chunk = math.gcd(problem.tokens, 1024)
    xs = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, targets, scale))

    @jax.checkpoint
    def step(_, x):
        return None, _dense(problem, x[0], unembedding, x[1], x[2])

    return jax.lax.scan(step, None, xs)[1].reshape(-1)


def _refuse(problem: Problem, scale: Array | None) -> None:
    """Raises for options that tokamax's loss lacks."""
    if problem.label_smoothing or problem.softcap or scale is not None:
        raise NotImplementedError("has no label smoothing, soft-cap or scale")


def _tokamax(problem: Problem, hidden: Array, unembedding: Array, targets: Array, scale: Array | None) -> Array:
    _refuse(problem, scale)
    tokamax, flags = importlib.import_module("tokamax"), importlib.import_module("absl.flags")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])  # else tokamax parses our command line, and fails
    # Its own choice: implementation=None looks at no platform and fails.
    implementation = "mosaic_tpu" if jax.default_backend() == "tpu" else "xla"
    return tokamax.linear_softmax_cross_entropy_loss(
        hidden, targets, unembedding, reduction="mean", implementation=implementation
    )


def _tokamax_kernel(problem: Problem, hidden: Array, unembedding: Array, targets: Array, scale: Array | None) -> Array:
    """tokamax's TPU kernels with its heuristic block sizes: its public function refuses to compile ahead of time."""
    _refuse(problem, scale)
    package = "tokamax._src.ops.linear_softmax_cross_entropy_loss"
    blocks = importlib.import_module(f"{package}.pallas_mosaic_tpu")
    kernel = importlib.import_module(f"{package}.pallas_mosaic_tpu_kernel")
    config = dataclasses.asdict(blocks.get_tpu_specific_default_config(*hidden.shape, problem.vocab))
    options = {**config, "reduction": "mean"}

    @jax.custom_vjp
    def loss(hidden, unembedding):
        return forward(hidden, unembedding)[0]

    def forward(hidden, unembedding):
        value, log_normalizer = kernel.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu(
            hidden, targets, unembedding, **options
        )
        return value, (hidden, unembedding, log_normalizer)

    def backward(residuals, g):
        hidden, unembedding, log_normalizer = residuals
        gradients = kernel.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu(
            g, log_normalizer, hidden, targets, unembedding, **options
        )
        return tuple(d.astype(hidden.dtype) for d in gradients)

    loss.defvjp(forward, backward)
    return loss(hidden, unembedding)


def _ours(way: str, implementation: str, problem: Problem, hidden, unembedding, targets, scale, **options) -> Array:
    beta = problem.label_smoothing
    options |= {"softcap": problem.softcap, "scale": scale, "implementation": implementation}
    if way == "linear_cross_entropy":
        options |= {"label_smoothing": beta, "reduction": "mean"}
        return kernels.linear_cross_entropy(hidden, unembedding, targets, **options)
    wanted = ["log_normalizer", "target_logit"] + (["mean_logit"] if beta else [])
    stats = kernels.vocab_stats(hidden, unembedding, targets, statistics=wanted, **options)
    loss = stats.require("log_normalizer") - (1 - beta) * stats.scale * stats.require("target_logit")
    return loss - beta * stats.scale * stats.require("mean_logit") if beta else loss


def contenders(problem: Problem, ahead_of_time: bool = False) -> dict[str, Contender]:
    """Name -> loss, those known from elsewhere first.

    `ahead_of_time`: kernels for a TPU that is not attached; in the profile of XLA code its loops would count once.
    """
    if ahead_of_time:
        ways = ("vocab_stats", "linear_cross_entropy")
        ours = {f"{way} pallas_tpu": Contender(functools.partial(_ours, way, "pallas_tpu", problem)) for way in ways}
        return {"tokamax": Contender(functools.partial(_tokamax_kernel, problem), transposed=True), **ours}
    losses = {
        "optax": Contender(functools.partial(_optax, problem)),
        "dense jnp": Contender(functools.partial(_dense, problem)),
        "lax.scan over tokens": Contender(functools.partial(_scan, problem)),
        "tokamax": Contender(functools.partial(_tokamax, problem), transposed=True),
    }
    for name in kernels.IMPLEMENTATIONS:
        for way in ("vocab_stats", "linear_cross_entropy") if name != "reference" else ("vocab_stats",):
            loss = functools.partial(_ours, way, name, problem)
            losses[f"{way} {name}"] = Contender(loss)
            if name == "pallas_gpu":  # other kernels, where both gradients are computed
                losses[f"{way} {name}, logits saved"] = Contender(functools.partial(loss, save_logits=True))
    return losses


def program(name: str, task: str, problem: Problem, ahead_of_time: bool = False) -> Program:
    """The function of one contender for one task, (hidden, unembedding, targets, scale) -> outputs, and its arguments.

    Its outputs: the loss per token or its mean; with differentiated arguments the mean and their gradients. Raises
    NotImplementedError where the contender does not support this task or, when traced, these options.
    """
    contender, dtype = contenders(problem, ahead_of_time)[name], jnp.dtype(problem.dtype)
    shape = (problem.width, problem.vocab) if contender.transposed else (problem.vocab, problem.width)
    arguments = [
        jax.ShapeDtypeStruct((problem.tokens, problem.width), dtype),
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((problem.tokens,), jnp.int32),
        jax.ShapeDtypeStruct((problem.tokens,), jnp.float32),
    ]
    differentiated = TASKS[task].differentiated

    def loss(hidden, unembedding, targets, scale):
        return contender.loss(hidden, unembedding, targets, scale if 3 in differentiated else None)

    def statistics(hidden, unembedding, targets, scale):
        kind, _, implementation = name.partition(" ")
        if kind != "vocab_stats":
            raise NotImplementedError("has no statistics")
        options = {"scale": scale, "softcap": problem.softcap, "implementation": implementation}
        return kernels.vocab_stats(hidden, unembedding, targets, **options)

    if "," in name and task != "both":
        raise NotImplementedError("differs only where both gradients are computed")
    if task == "statistics":
        return Program(statistics, arguments)
    gradients = jax.value_and_grad(lambda *args: jnp.mean(loss(*args)), differentiated) if differentiated else loss
    return Program(gradients, arguments)


def profiled(name: str, chip: str, task: str, problem: Problem) -> Points:
    """Lengths of N and V to profile: few blocks of the kernels, because each step is simulated."""
    if name == "tokamax":
        block = {"v5e": 512, "v5p": 512, "v6e": 1024 if problem.width % 512 else 2048, "v7x": 2048}[chip]
        return (problem.tokens,), (2 * block, 4 * block)
    saved = name.startswith("linear_cross_entropy")
    kernels = {"hidden": ("expected_row",), "both": ("expected_row", "d_unembedding")}.get(task, ("statistics",))
    if problem.forms_dh_in_backward and task == "hidden":
        kernels = ("statistics", "d_hidden")
    if (problem.forms_dh_in_backward or saved) and task == "both":
        kernels = ("statistics", "d_hidden", "d_unembedding")
    inputs = (problem.tokens, problem.width, jnp.dtype(problem.dtype).itemsize)
    return our_points(chip, kernels, inputs, saved)


def program_of_sizes(name: str, task: str, problem: Problem, tokens: int, vocab: int) -> Program:
    """The same, compiled ahead of time, with another N and V; for `static_profile.estimate`."""
    return program(name, task, dataclasses.replace(problem, tokens=tokens, vocab=vocab), ahead_of_time=True)


def random_arguments(problem: Problem, seed: int) -> tuple[Array, Array, Array, Array]:
    """Hidden states, unembedding [V, D], targets and scale; logits with a standard deviation of 3."""
    keys = jax.random.split(jax.random.key(seed), 4)
    dtype = jnp.dtype(problem.dtype)
    hidden = jax.random.normal(keys[0], (problem.tokens, problem.width), dtype)
    size = jnp.asarray(3 / math.sqrt(problem.width), dtype)
    unembedding = jax.random.normal(keys[1], (problem.vocab, problem.width), dtype) * size
    targets = jax.random.randint(keys[2], (problem.tokens,), 0, problem.vocab, jnp.int32)
    return hidden, unembedding, targets, jax.random.uniform(keys[3], (problem.tokens,), minval=0.5, maxval=2.0)


class Oracle:
    """The dense loss and its gradients in float64, on a sample of tokens and of rows of the unembedding."""

    def __init__(self, problem: Problem, arguments: tuple[Array, Array, Array, Array], sample: int) -> None:
        self.problem, self._arguments = problem, arguments
        choose = np.random.default_rng(0).choice
        self.tokens = choose(problem.tokens, min(sample, problem.tokens), replace=False)
        rows = choose(problem.vocab, min(sample, problem.vocab), replace=False)
        self.rows = np.union1d(rows, np.asarray(arguments[2])[:sample])
        self._expected = functools.cache(self._expect)

    def _sums(self, tokens: np.ndarray, scaled: bool) -> list[np.ndarray]:
        """Losses of some tokens, and the gradients of their sum in hidden, rows of the unembedding, and scale."""
        with jax.enable_x64(True):
            hidden, unembedding, targets, scale = (jnp.asarray(np.asarray(x)) for x in self._arguments)

            def total(hidden, unembedding, scale):
                losses = _dense(self.problem, hidden, unembedding, targets[tokens], scale if scaled else None)
                return jnp.sum(losses), losses

            inputs = [jnp.asarray(x, jnp.float64) for x in (hidden[tokens], unembedding, scale[tokens])]
            (d_hidden, d_unembedding, d_scale), losses = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*inputs)
            return [np.asarray(x) for x in (losses, d_hidden, d_unembedding[self.rows], d_scale)]

    def _expect(self, scaled: bool) -> dict[Any, Any]:
        """The losses of the sample, the mean loss, and its gradients by position."""
        count, mean, d_rows = self.problem.tokens, 0.0, 0.0
        for tokens in np.array_split(np.arange(count), max(count // 256, 1)):
            losses, _, d_part, _ = self._sums(tokens, scaled)
            mean, d_rows = mean + losses.sum() / count, d_rows + d_part / count
        losses, d_hidden, _, d_scale = self._sums(self.tokens, scaled)
        return {"losses": losses, "mean": mean, 0: d_hidden / count, 1: d_rows, 3: d_scale / count}

    def error(self, task: str, outputs: Any, transposed: bool) -> float:
        """Largest error of all outputs on the sample, each relative to the largest magnitude expected of its array."""
        differentiated = TASKS[task].differentiated
        expected = self._expected(task == "statistics" or 3 in differentiated)
        if task == "statistics":
            beta, s = self.problem.label_smoothing, outputs.scale
            mixed = (1 - beta) * outputs.target_logit + beta * outputs.mean_logit
            d_scale = (outputs.expected_logit - mixed) / self.problem.tokens
            value, gradients, differentiated = outputs.log_normalizer - s * mixed, (d_scale,), (3,)
        else:
            value, gradients = outputs if differentiated else (outputs, ())
        value = np.asarray(value)
        pairs = [(value, expected["mean"]) if value.ndim == 0 else (value[self.tokens], expected["losses"])]
        for position, gradient in zip(differentiated, gradients, strict=True):
            if position == 1:
                gradient = gradient[:, self.rows].T if transposed else gradient[self.rows]
            pairs.append((np.asarray(gradient if position == 1 else gradient[self.tokens]), expected[position]))
        return float(np.max([np.abs(got.astype(np.float64) - x).max() / np.abs(x).max() for got, x in pairs]))
