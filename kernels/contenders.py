"""The losses that `bench.py` compares, the programs that it runs for each, and their values in float64.

z = softcap(h Wᵀ), per token l = (1−β)(lse(s z) − s z_y) + β (lse(s z) − s mean z), and its mean over N tokens.
"""

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from static_profile import Points, Program, our_points

from calibjax import kernels

Loss = Callable[[Array, Array, Array, Array | None], Array]
"""(hidden [N, D], unembedding [V, D], targets [N], scale [N] or None) -> loss per token [N], or their mean."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and options of one table."""

    tokens: int
    width: int
    vocab: int
    dtype: str
    label_smoothing: float = 0.0
    softcap: float | None = None
    save_logits: bool = False  # for ours

    def __str__(self) -> str:
        return (
            f"N={self.tokens:,} D={self.width:,} V={self.vocab:,} {self.dtype}, "
            f"label smoothing {self.label_smoothing:g}, soft-cap {'none' if self.softcap is None else self.softcap}"
            f"{', logits saved' if self.save_logits else ''}"
        )

    def product_flops(self) -> int:
        """Of one product N·D·V."""
        return 2 * self.tokens * self.width * self.vocab


class Task(NamedTuple):
    """What a program computes.

    Attributes:
        title: for tables.
        differentiated: positions among (hidden, unembedding, targets, scale).
        products: N·D·V products that cannot be avoided.
        recomputing: those of an operator that never holds the logits.
    """

    title: str
    differentiated: tuple[int, ...]
    products: int
    recomputing: int


TASKS = {
    "statistics": Task("all statistics", (), 1, 1),
    "forward": Task("forward", (), 1, 1),
    "scale": Task("forward + scale gradient (temperature training)", (3,), 1, 1),
    "hidden": Task("forward + hidden gradient (W frozen)", (0,), 2, 2),
    "both": Task("forward + backward (hidden and W)", (0, 1), 3, 4),
}


class Contender(NamedTuple):
    """One loss.

    Attributes:
        loss: its formula.
        transposed: it takes the unembedding as [D, V].
        kernel: it is a Pallas kernel for TPUs; else XLA code.
    """

    loss: Loss
    transposed: bool = False
    kernel: bool = False


def _logits(problem: Problem, hidden: Array, unembedding: Array, scale: Array | None) -> Array:
    precision = jax.lax.Precision.HIGHEST if problem.dtype == "float32" else None
    z = jax.lax.dot_general(
        hidden, unembedding, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
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


def _tokamax(problem: Problem, hidden: Array, unembedding: Array, targets: Array, scale: Array | None) -> Array:
    _refuse(problem, scale)
    try:
        import tokamax  # pyright: ignore[reportMissingImports]
        from absl import flags  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise NotImplementedError("not installed") from None
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
    try:
        package = "tokamax._src.ops.linear_softmax_cross_entropy_loss"
        blocks = importlib.import_module(f"{package}.pallas_mosaic_tpu")
        kernel = importlib.import_module(f"{package}.pallas_mosaic_tpu_kernel")
    except ImportError:
        raise NotImplementedError("not installed") from None
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


def _refuse(problem: Problem, scale: Array | None) -> None:
    """Raises for options that tokamax's loss lacks."""
    for name, given in (
        ("label smoothing", problem.label_smoothing),
        ("soft-cap", problem.softcap),
        ("scale", scale is not None),
    ):
        if given:
            raise NotImplementedError(f"has no {name}")


def _vocab_stats(implementation: str, problem: Problem, hidden, unembedding, targets, scale, **options: Any) -> Array:
    wanted = ["log_normalizer", "target_logit"] + (["mean_logit"] if problem.label_smoothing else [])
    execution: dict[str, Any] = {"save_logits": problem.save_logits, **options}
    stats = kernels.vocab_stats(
        hidden,
        unembedding,
        targets,
        scale=scale,
        softcap=problem.softcap,
        statistics=wanted,
        implementation=implementation,
        **execution,
    )
    beta, s = problem.label_smoothing, stats.scale
    loss = stats.require("log_normalizer") - (1 - beta) * s * stats.require("target_logit")
    return loss - beta * s * stats.require("mean_logit") if beta else loss


def _linear_cross_entropy(
    implementation: str, problem: Problem, hidden, unembedding, targets, scale, **options: Any
) -> Array:
    execution: dict[str, Any] = {"save_logits": problem.save_logits, **options}
    return kernels.linear_cross_entropy(
        hidden,
        unembedding,
        targets,
        scale=scale,
        softcap=problem.softcap,
        label_smoothing=problem.label_smoothing,
        reduction="mean",
        implementation=implementation,
        **execution,
    )


# Options that run other kernels where both gradients are computed. With random inputs the filter leaves out hardly any
# block: its time is that of the block-sparse products, not of what it saves.
VARIANTS = {"logits saved": {"save_logits": True}, "filtered": {"filter_threshold": 2.0**-12}}


def contenders(problem: Problem, ahead_of_time: bool = False) -> dict[str, Contender]:
    """Name -> loss, those known from elsewhere first. `ahead_of_time`: compiled for a TPU that is not attached."""
    tokamax = _tokamax_kernel if ahead_of_time else _tokamax
    losses = {
        "optax": Contender(functools.partial(_optax, problem)),
        "dense jnp": Contender(functools.partial(_dense, problem)),
        "lax.scan over tokens": Contender(functools.partial(_scan, problem)),
        "tokamax": Contender(functools.partial(tokamax, problem), transposed=True, kernel=ahead_of_time),
    }
    for name in kernels.IMPLEMENTATIONS:
        if ahead_of_time and name.startswith("pallas_gpu"):
            continue
        kernel, variants = name == "pallas_tpu", VARIANTS if name.startswith("pallas_gpu") else {}
        ways = {"vocab_stats": _vocab_stats, "linear_cross_entropy": _linear_cross_entropy}
        for way, loss in ways.items() if name != "reference" else [("vocab_stats", _vocab_stats)]:
            losses[f"{way} {name}"] = Contender(functools.partial(loss, name, problem), kernel=kernel)
            for label, options in variants.items():
                losses[f"{way} {name}, {label}"] = Contender(functools.partial(loss, name, problem, **options))
    return losses


def program(name: str, task: str, problem: Problem, ahead_of_time: bool = False) -> Program:
    """The function of one contender for one task, (hidden, unembedding, targets, scale) -> outputs, and its arguments.

    Its outputs: the loss per token or its mean; with differentiated arguments the mean and their gradients.

    Raises:
        NotImplementedError: where the contender does not support this task or, when traced, these options.
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

    def mean_loss(*args):
        return jnp.mean(loss(*args))

    def statistics(hidden, unembedding, targets, scale):
        kind, _, implementation = name.partition(" ")
        if kind != "vocab_stats":
            raise NotImplementedError("has no statistics")
        return kernels.vocab_stats(
            hidden, unembedding, targets, scale=scale, softcap=problem.softcap, implementation=implementation
        )

    if "," in name and task != "both":
        raise NotImplementedError("differs only where both gradients are computed")
    if task == "statistics":
        return Program(statistics, arguments)
    return Program(jax.value_and_grad(mean_loss, differentiated) if differentiated else loss, arguments)


def profiled(name: str, chip: str, task: str, problem: Problem) -> Points:
    """Lengths of N and V to profile: few blocks of the kernels, because each step is simulated."""
    if name == "tokamax":
        block = {"v5e": 512, "v5p": 512, "v6e": 1024 if problem.width % 512 else 2048, "v7x": 2048}[chip]
        return (problem.tokens,), (2 * block, 4 * block)
    saved = problem.save_logits or name.startswith("linear_cross_entropy")
    kernels = {"hidden": ("rows",), "both": ("rows", "unembedding")}.get(task, ("statistics",))
    if saved and task == "both":
        kernels = ("statistics", "d_hidden", "unembedding")
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
    unembedding = jax.random.normal(keys[1], (problem.vocab, problem.width), dtype) * jnp.asarray(
        3 / math.sqrt(problem.width), dtype
    )
    targets = jax.random.randint(keys[2], (problem.tokens,), 0, problem.vocab, jnp.int32)
    return hidden, unembedding, targets, jax.random.uniform(keys[3], (problem.tokens,), minval=0.5, maxval=2.0)


class Oracle:
    """Values and gradients in float64 numpy, on a sample of tokens and of rows of the unembedding.

    A row of dW needs the log-normalisers of all tokens, and a mean loss all losses: these come from a separate float32
    pass, which is compared with float64 on the sample.
    """

    _PIECE = 16384  # rows of the unembedding at a time in float64

    def __init__(self, problem: Problem, arguments: tuple[Array, Array, Array, Array], sample: int) -> None:
        self.problem = problem
        self._expected: dict[int, np.ndarray] = {}
        self._hidden, self._unembedding, self._targets, self._scale = (np.asarray(x) for x in arguments)
        choose = np.random.default_rng(0).choice
        self.tokens = choose(problem.tokens, min(sample, problem.tokens), replace=False)
        self.rows = np.union1d(choose(problem.vocab, min(sample, problem.vocab), replace=False), self._targets[:sample])
        hidden = self._hidden[self.tokens].astype(np.float64)
        self._z = self._cap(np.concatenate([hidden @ piece.T for _, piece in self._pieces()], axis=1))
        self._is_target = np.arange(problem.vocab)[None, :] == self._targets[self.tokens][:, None]
        self._all = {scaled: self._all_tokens(arguments, scaled) for scaled in (False, True)}
        for scaled, found in self._all.items():
            for name, expected in (("log_normalizer", self._log_normalizer(scaled)), ("loss", self._loss(scaled))):
                np.testing.assert_allclose(found[name][self.tokens], expected, rtol=1e-4, atol=1e-4, err_msg=name)

    def error(self, task: str, outputs: Any, transposed: bool) -> float:
        """Largest error of all outputs on the sample, each relative to the largest magnitude expected of its array."""
        differentiated = TASKS[task].differentiated
        if task == "statistics":
            pairs = [(getattr(outputs, name), x) for name, x in self._statistics().items()]
            pairs = [(np.asarray(got)[self.tokens], expected) for got, expected in pairs]
        else:
            scaled = 3 in differentiated
            value, gradients = outputs if differentiated else (outputs, ())
            value = np.asarray(value)
            whole = value.ndim == 0
            pairs = [(value, self._all[scaled]["loss"].mean()) if whole else (value[self.tokens], self._loss(scaled))]
            for position, gradient in zip(differentiated, gradients, strict=True):
                pairs.append(self._gradient(position, gradient, transposed))
        return float(np.max([np.abs(got.astype(np.float64) - x).max() / np.abs(x).max() for got, x in pairs]))

    def _pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        for start in range(0, self.problem.vocab, self._PIECE):
            rows = slice(start, start + self._PIECE)
            yield rows, self._unembedding[rows].astype(np.float64)

    def _cap(self, z: np.ndarray) -> np.ndarray:
        cap = self.problem.softcap
        return z if cap is None else cap * np.tanh(z / cap)

    def _all_tokens(self, arguments: tuple[Array, Array, Array, Array], scaled: bool) -> dict[str, np.ndarray]:
        """Log-normaliser and loss of every token, [N], a few tokens at a time."""
        chunk = math.gcd(self.problem.tokens, 32)

        @jax.jit
        def values(hidden, unembedding, targets, scale):
            def some(x):
                z, beta = (
                    _logits(self.problem, x[0], unembedding, x[2] if scaled else None),
                    self.problem.label_smoothing,
                )
                log_normalizer = jax.nn.logsumexp(z, axis=1)
                target = jnp.take_along_axis(z, x[1][:, None], axis=1)[:, 0]
                loss = log_normalizer - (1 - beta) * target - beta * jnp.mean(z, axis=1)
                return {"log_normalizer": log_normalizer, "loss": loss}

            xs = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), (hidden, targets, scale))
            return jax.lax.map(some, xs)

        return {name: np.asarray(x).reshape(-1).astype(np.float64) for name, x in values(*arguments).items()}

    def _s(self, scaled: bool) -> np.ndarray:
        return self._scale[self.tokens].astype(np.float64) if scaled else np.ones(len(self.tokens))

    def _log_normalizer(self, scaled: bool) -> np.ndarray:
        y = self._s(scaled)[:, None] * self._z
        return np.log(np.exp(y - y.max(1, keepdims=True)).sum(1)) + y.max(1)

    def _loss(self, scaled: bool) -> np.ndarray:
        beta = self.problem.label_smoothing
        mean = (1 - beta) * self._z[self._is_target] + beta * self._z.mean(1)
        return self._log_normalizer(scaled) - self._s(scaled) * mean

    def _statistics(self) -> dict[str, np.ndarray]:
        p = np.exp(self._s(True)[:, None] * self._z - self._log_normalizer(True)[:, None])
        return {
            "log_normalizer": self._log_normalizer(True),
            "target_logit": self._z[self._is_target],
            "mean_logit": self._z.mean(1),
            "max_logit": self._z.max(1),
            "expected_logit": (p * self._z).sum(1),
        }

    def _dz(self, z: np.ndarray, log_normalizer: np.ndarray, is_target: np.ndarray) -> np.ndarray:
        """Derivative of the mean loss by the product h Wᵀ, without scale."""
        beta, cap = self.problem.label_smoothing, self.problem.softcap
        dz = np.exp(z - log_normalizer[:, None]) - (1 - beta) * is_target - beta / self.problem.vocab
        return dz / self.problem.tokens * (1.0 if cap is None else 1 - (z / cap) ** 2)

    def _gradient(self, position: int, gradient: Array, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
        """The gradient and the expected one, on the sample."""
        if position not in self._expected:
            self._expected[position] = self._expected_gradient(position)
        if position == 1:
            gradient = gradient[:, self.rows].T if transposed else gradient[self.rows]
        else:
            gradient = gradient[self.tokens]
        return np.asarray(gradient), self._expected[position]

    def _expected_gradient(self, position: int) -> np.ndarray:
        if position == 0:
            dz = self._dz(self._z, self._log_normalizer(False), self._is_target)
            return np.sum([dz[:, rows] @ w for rows, w in self._pieces()], axis=0)
        if position == 1:
            hidden, weights = self._hidden.astype(np.float64), self._unembedding[self.rows].astype(np.float64)
            is_target = self._targets[:, None] == self.rows[None, :]
            dz = self._dz(self._cap(hidden @ weights.T), self._all[False]["log_normalizer"], is_target)
            return dz.T @ hidden
        of, beta = self._statistics(), self.problem.label_smoothing
        derivative = of["expected_logit"] - (1 - beta) * of["target_logit"] - beta * of["mean_logit"]
        return derivative / self.problem.tokens
