"""Both Pallas kernels by Pallas' interpreter, and the scan, against float64: statistics, gradients, second derivatives.

    PYTHONPATH=tests:. JAX_PLATFORMS=cpu python tests/campaigns/second_derivatives.py --cases 200 --seed 0

A case is a random draw of hidden states, unembedding, bias, scale, cotangents of all statistics and a direction in
every input. E_p[z] is the derivative of log Z in the scale: the gradients of it alone are second derivatives, in the
scale and each input. Those in any two inputs, along the direction, are those of the scan (`chunked`) only: JAX cannot
differentiate the gradient of a Pallas kernel again. The oracle's are central differences of its float64 gradient.
Shapes and soft-caps are few: each of them compiles programs of its own.
"""

import argparse
import collections
import functools
import os
import random
import sys
import time

# The interpreter's threads wait for each other: with one device of two cores there can be fewer than they need.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import interpreted
import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from calibjax.kernels import vocab_stats

SHAPES = ((5, 16, 37), (16, 32, 130))  # N, D, V
TOLERANCES = {"tpu": 3e-5, "gpu": 3e-2, "scan": 3e-5}
"""Of an error relative to the largest entry. The GPU kernel takes bfloat16, and its gradients are rounded to it."""
NAMES = ("hidden", "unembedding", "bias", "scale")


@functools.cache
def programs(implementation, softcap):
    """The statistics, and their weighted sum's gradient and second derivatives, for a kernel."""

    def total(inputs, targets, cotangents):
        hidden, unembedding, bias, scale = inputs
        stats = vocab_stats(
            hidden, unembedding, targets, scale=scale, bias=bias, softcap=softcap, implementation=implementation
        )
        found = {name: stats.require(name) for name in oracle.FLOATS}
        return sum(jnp.vdot(found[name], cotangents[name]) for name in oracle.FLOATS), found

    gradient = jax.grad(total, has_aux=True)

    def along(inputs, targets, cotangents, direction):
        slopes, _ = gradient(inputs, targets, cotangents)
        return sum(jnp.vdot(a, b) for a, b in zip(slopes, direction, strict=True))

    def run(inputs, targets, cotangents, direction):
        slopes, found = gradient(inputs, targets, cotangents)
        mixed, _ = gradient(inputs, targets, only_expected(cotangents))
        second = jax.grad(along)(inputs, targets, cotangents, direction) if implementation == "chunked" else None
        return found, slopes, mixed, second

    return jax.jit(run)


def only_expected(cotangents):
    return {name: x if name == "expected_logit" else 0 * x for name, x in cotangents.items()}


def draw(rng, shape, dtype):
    n, d, v = shape
    sizes = ((n, d), (v, d), (v,))
    spread = float(rng.choice([0.3, 1.0, 3.0])) / d**0.5
    inputs = [np.float32(rng.normal(size=size) * scale) for size, scale in zip(sizes, (1, spread, 0.5), strict=True)]
    inputs[:2] = [jnp.asarray(x, dtype) for x in inputs[:2]]
    inputs.append(np.float32(np.exp(rng.normal(size=n) * 0.5)))
    cotangents = {name: np.float32(rng.normal(size=n)) for name in oracle.FLOATS}
    direction = [np.float32(rng.normal(size=x.shape)) for x in inputs]
    return inputs, rng.integers(0, v, n), cotangents, direction


def expected(inputs, targets, cotangents, direction, softcap):
    """Statistics, gradients and second derivatives in float64."""
    argmax = oracle.logits(*inputs[:3], softcap).argmax(axis=1)

    def slopes(step, cotangents=cotangents):
        moved = [oracle.f64(x) + step * oracle.f64(u) for x, u in zip(inputs, direction, strict=True)]
        hidden, unembedding, bias, scale = moved
        return oracle.gradients(cotangents, hidden, unembedding, targets, scale, bias, softcap, argmax)[0]

    step = 1e-5
    second = [(a - b) / (2 * step) for a, b in zip(slopes(step), slopes(-step), strict=True)]
    hidden, unembedding, bias, scale = inputs
    mixed = slopes(0.0, only_expected(cotangents))
    return oracle.statistics(hidden, unembedding, targets, scale, bias, softcap), slopes(0.0), mixed, second


def error(got, want):
    """Largest difference over the largest entry."""
    return float(np.abs(oracle.f64(got) - want).max() / max(np.abs(want).max(), 1e-3))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--kernels", nargs="*", default=["tpu", "gpu"], choices=["tpu", "gpu", "scan"])
    given = parser.parse_args()
    names = {"tpu": interpreted.NAME, "gpu": interpreted_gpu.NAME, "scan": "chunked"}
    interpreted_gpu._PATIENCE = 60 * given.minutes + 600  # its limit of a hung run is that of a test
    tried, worst, off = collections.Counter(), collections.defaultdict(float), []
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        fixtures = {"tpu": interpreted.tpu, "gpu": interpreted_gpu.gpu}
        guards = [fixtures[kind].__wrapped__(patch) for kind in given.kernels if kind in fixtures]
        for guard in guards:
            next(guard)
        for number in range(given.cases):
            if time.monotonic() - began > 60 * given.minutes:
                break
            choice = random.Random(f"{given.seed} {number}")
            kind = given.kernels[number % len(given.kernels)]
            shape, softcap = choice.choice(SHAPES), choice.choice([None, 5.0])
            case = draw(np.random.default_rng([given.seed, number]), shape, "bfloat16" if kind == "gpu" else "float32")
            inputs, targets, cotangents, direction = case
            got = programs(names[kind], softcap)(inputs, jnp.asarray(targets), cotangents, direction)
            found, *gradients = got
            stats, *wanted = expected(*case, softcap)
            errors = {name: error(found[name], stats[name]) for name in oracle.FLOATS}
            for what, ours, theirs in zip(("d", "d/ds d", "d2"), gradients, wanted, strict=True):
                if ours is not None:
                    errors |= {f"{what} {name}": error(*pair) for name, *pair in zip(NAMES, ours, theirs, strict=True)}
            tried[kind] += 1
            for name, size in errors.items():
                what = name.rpartition(" ")[0] or "statistics"
                worst[kind, what] = max(worst[kind, what], size)
                if not size <= TOLERANCES[kind]:
                    off.append((kind, number, shape, softcap, name, size))
        for guard in guards:
            next(guard, None)  # raises where a kernel had a race
    print(dict(tried), f"{time.monotonic() - began:.0f} s")
    for (kind, what), size in sorted(worst.items()):
        print(f"{kind} {what:<10} largest error {size:.2e}")
    for row in off[:20]:
        print("off:", *row)
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
