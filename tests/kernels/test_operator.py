"""One table of laws over the implementations of `vocab_stats`, all held against the float64 oracle."""

import functools
import itertools
from typing import NamedTuple

import chex
import interpreted
import interpreted_gpu
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import EPS, FLOATS, assert_within, f64

from calibjax.kernels import STATISTICS, linear_cross_entropy, stats, vocab_stats

tpu, gpu = interpreted.tpu, interpreted_gpu.gpu
TPU, TPU_BLOCKS, APART = interpreted.NAME, interpreted.WITH_ITS_BLOCKS, interpreted.APART
GPU, GPU_BLOCKS = interpreted_gpu.NAME, interpreted_gpu.WITH_ITS_BLOCKS
pytestmark = pytest.mark.usefixtures("tpu", "gpu")

ALL = (*FLOATS, "argmax", "logit_variance", "correct")
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of gradients to the dtype of the inputs


class Case(NamedTuple):
    """A row of the table: V, N, D, chunk, options, dtype, size of the logits.

    chunk: columns at a time in "chunked", or the name of another implementation. rise: of the bias from one block of
    the vocabulary to the next, where references of exponentials may lag behind.
    """

    vocab: int
    tokens: int
    width: int
    chunk: int | str
    bias: bool = False
    softcap: float | None = None
    scale: bool = False
    dtype: str = "float32"
    size: float = 3.0
    save: bool = False
    rise: float | None = None

    @property
    def names(self):
        """The statistics that are differentiated; with a `rise` only those with which dh comes out of the forward."""
        left_out = () if self.rise is None else ("expected_logit", "mean_logit" if self.softcap else None)
        return tuple(name for name in FLOATS if name not in left_out)

    @property
    def options(self):
        named = isinstance(self.chunk, str)
        chosen = {"implementation": self.chunk} if named else {"implementation": "chunked", "chunk_size": self.chunk}
        return {"softcap": self.softcap, "save_logits": self.save, **chosen}

    @property
    def kernel(self):
        return isinstance(self.chunk, str) and self.chunk != "reference"

    @property
    def rounded(self):
        """The relative error at most of an exponential that is saved for the backward pass."""
        return 0.0 if not (self.save and self.kernel) else EPS if self.dtype == "float32" else 2.0**-8


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
needs_gpu = pytest.mark.skipif(not interpreted_gpu.ON_GPU, reason="needs a Hopper GPU and JAX_PLATFORMS=cuda,cpu")
on_gpu = functools.partial(pytest.param, marks=[pytest.mark.slow, needs_gpu])
# Small logits (size 0.01) show a vocabulary padded with zeros; large ones show overflow. 2049 and 129 leave a ragged
# piece of one column, 127 and 1 are below any tile, 500 divides nothing. The TPU kernels have W transposed where its
# width is no multiple of 128 and the vocabulary fills its tiles better; a width of 840 is two slices. By default every
# feature of an implementation (bias, soft-cap, scale, dtype, saved logits, ragged sizes, several blocks of tokens and
# of the vocabulary) has a row.
CASES = [
    Case(1, 1, 8, "reference", bias=True),
    Case(2, 7, 8, 1, scale=True, softcap=2.0),
    Case(127, 7, 100, 50, dtype="bfloat16", bias=True),
    Case(129, 7, 100, 128, bias=True, scale=True, softcap=10.0),
    Case(129, 128, 8, 43, size=0.01),
    Case(129, 7, 8, "reference", bias=True, scale=True, softcap=10.0, dtype="bfloat16"),
    Case(129, 7, 100, 43, bias=True, softcap=10.0, save=True),
    Case(2049, 128, 8, 128, size=30.0, scale=True, bias=True),
    Case(2049, 7, 100, 4096, dtype="bfloat16", bias=True),
    Case(2, 7, 100, TPU, scale=True, softcap=2.0),
    Case(129, 7, 100, TPU, dtype="bfloat16", save=True),
    Case(300, 260, 8, TPU, bias=True, scale=True, size=30.0),  # three blocks of tokens
    Case(150, 130, 128, TPU, bias=True),  # W as it is: the rows of width 8 have it transposed
    Case(130, 130, 100, GPU, dtype="bfloat16", bias=True, scale=True),  # two tiles of tokens, all three sizes ragged
    Case(150, 7, 64, GPU, dtype="bfloat16", softcap=20.0, save=True),
    slow(Case(2049, 7, 8, TPU, softcap=20.0, bias=True, scale=True, dtype="bfloat16")),
    Case(300, 130, 8, APART, bias=True, softcap=5.0, scale=True),
    slow(Case(300, 260, 128, APART, scale=True)),  # three blocks of tokens and several of the vocabulary, both ragged
    slow(Case(300, 130, 128, TPU, bias=True, softcap=20.0, scale=True, size=30.0, save=True)),
    slow(Case(700, 130, 8, APART, bias=True, scale=True, size=30.0, save=True)),
    slow(Case(700, 130, 8, APART, dtype="bfloat16", softcap=20.0, bias=True, save=True)),
    slow(Case(380, 260, 840, APART, scale=True, bias=True)),
    Case(1100, 9, 8, TPU, rise=0.0),
    Case(1100, 9, 8, TPU, rise=60.0),
    slow(Case(1100, 9, 8, TPU, rise=-10.0)),
    slow(Case(1024, 260, 128, TPU, scale=True, size=30.0, rise=10.0)),
    slow(Case(2200, 7, 72, TPU_BLOCKS, dtype="bfloat16")),
    slow(Case(1100, 7, 128, TPU_BLOCKS, dtype="bfloat16", softcap=20.0)),
    slow(Case(2200, 7, 128, TPU_BLOCKS, dtype="bfloat16", save=True)),
    slow(Case(500, 7, 128, interpreted_gpu.TWO_PROGRAMS, dtype="float16", size=30.0)),
    slow(Case(600, 7, 64, GPU_BLOCKS, dtype="bfloat16", softcap=20.0, size=0.01)),
    slow(Case(150, 7, 64, interpreted_gpu.BY_CHUNKS, dtype="bfloat16", bias=True, scale=True)),
    slow(Case(150, 7, 64, interpreted_gpu.BY_CHUNKS, dtype="bfloat16", bias=True, save=True)),
    slow(Case(200, 130, 100, GPU, dtype="float16", softcap=20.0, scale=True, save=True)),
    # Several units each, all sizes ragged.
    on_gpu(Case(5000, 2100, 200, GPU_BLOCKS, dtype="bfloat16", bias=True, scale=True)),
    on_gpu(Case(9001, 1000, 1000, GPU_BLOCKS, dtype="float16", softcap=20.0, save=True)),
    on_gpu(Case(5000, 2100, 576, GPU_BLOCKS, dtype="bfloat16", size=30.0, save=True)),
]


def make(case: Case):
    """hidden, unembedding, bias, scale; targets, the last token ignored where there are more."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    hidden = jnp.asarray(rng.normal(size=(case.tokens, case.width)) * case.size, dtype)
    unembedding = jnp.asarray(rng.normal(size=(case.vocab, case.width)) / np.sqrt(case.width), dtype)
    bias = jnp.asarray(rng.normal(size=case.vocab) * case.size, dtype) if case.bias else None
    if case.rise is not None:
        bias = jnp.asarray(case.rise * (np.arange(case.vocab) // 256), jnp.float32)
    scale = np.geomspace(1e-3, 1e3, case.tokens) if case.scale else np.linspace(0.6, 1.7, case.tokens)
    targets = rng.integers(0, case.vocab, case.tokens)
    targets[-1:] = -100 if case.tokens > 1 else targets[-1:]
    return hidden, unembedding, bias, jnp.asarray(scale, jnp.float32), jnp.asarray(targets, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluate(options, statistics, hidden, unembedding, bias, scale, targets, cotangents):
    """Some statistics, and the gradients of Σ cotangents·statistics in (hidden, unembedding, bias, scale)."""

    def forward(*inputs):
        given = {"bias": inputs[2], "scale": inputs[3], "statistics": statistics, **dict(options)}
        got = vocab_stats(*inputs[:2], targets, **given)
        return {name: getattr(got, name) for name in cotangents}, got

    _, pull, got = jax.vjp(forward, hidden, unembedding, bias, scale, has_aux=True)
    return got, pull(cotangents)


def bounds(case, hidden, unembedding, bias, scale, targets, cotangents, argmax):
    """First-order bounds on the errors that rounding must leave, of statistics and gradients.

    Every logit carries at most zerr = 2 ε Σ_d |h_d W_vd| (plus the bias, the soft-cap and their rounding), p_v the
    relative error rel = 2 s zerr + ε (4 + |s max z| + |log_normalizer|), the products of the backward pass ε Σ|dz||W|,
    and where the inputs are of 16 bits dz and the result are rounded to them (`ROUNDING`). A saved exponential adds
    its rounding to p_v, and over s to z_v. `root`: the random walk of the roundings of a sum over V. The Pallas kernels
    have twice the error of a logit and a longer walk: one large term in the running sum, rounded at every addition.
    """
    h, w, s = np.abs(f64(hidden)), np.abs(f64(unembedding)), f64(scale)
    extra = 0.0 if bias is None else np.abs(f64(bias)).max()
    zabs = (h @ w.T).max(axis=1) + extra
    zerr = (4 if case.kernel else 2) * EPS * (zabs + (case.softcap or 0.0))
    z = oracle.logits(hidden, unembedding, bias, case.softcap)
    p, want = oracle.probabilities(z, scale), oracle.statistics(hidden, unembedding, targets, scale, bias, case.softcap)
    top = np.abs(s * want["max_logit"]) + np.abs(want["log_normalizer"])
    # The Pallas kernels, and XLA's exponential on a GPU, also round s·log₂e and log_normalizer·log₂e.
    rel = 2 * s * zerr + EPS * (4 + top) * (2 if case.kernel or interpreted_gpu.ON_GPU else 1)
    centred = np.abs(z - want["expected_logit"][:, None])
    spread = (p * centred).sum(axis=1)
    below = want["max_logit"] - want["expected_logit"]
    far = (p * (z - want["max_logit"][:, None]) ** 2).sum(axis=1)
    root = 1 + (0.25 if case.kernel else 0.1) * np.sqrt(case.vocab)
    forward = {
        "log_normalizer": s * zerr + EPS * (top + root),
        "target_logit": zerr,
        "mean_logit": zerr,
        "max_logit": zerr,
        "expected_logit": zerr + rel * spread + root * EPS * below + EPS * np.abs(want["expected_logit"]),
        "logit_variance": 2 * zerr * spread + rel * want["logit_variance"] + 2 * root * EPS * far + zerr**2,
    }
    g = {name: np.abs(f64(cotangents[name]))[:, None] for name in FLOATS}
    part = p * (s[:, None] * g["log_normalizer"] + g["expected_logit"] * (1 + s[:, None] * centred))
    dz_error = (rel + case.rounded)[:, None] * part + 2 * p * s[:, None] * g["expected_logit"] * (
        zerr[:, None] + case.rounded / s[:, None] + forward["expected_logit"][:, None]
    )
    all_dz = part + g["mean_logit"] / case.vocab
    np.add.at(all_dz, (np.arange(len(z)), targets), g["target_logit"][:, 0])
    np.add.at(all_dz, (np.arange(len(z)), argmax), g["max_logit"][:, 0])
    if case.softcap is not None:
        dz_error = dz_error + all_dz * (2 * (zerr + case.rounded / s) / case.softcap + EPS)[:, None]
        dz_error = dz_error + case.rounded * g["mean_logit"] / case.vocab  # where the slope itself is kept
    rounding = root * EPS + ROUNDING[case.dtype]
    dz_error = dz_error + rounding * all_dz
    backward = (dz_error @ w, dz_error.T @ h, dz_error.sum(axis=0))
    d_scale = (
        g["log_normalizer"][:, 0] * forward["expected_logit"] + g["expected_logit"][:, 0] * (forward["logit_variance"])
    )
    d_scale = d_scale + 4 * EPS * (
        g["log_normalizer"][:, 0] * np.abs(want["expected_logit"]) + g["expected_logit"][:, 0] * want["logit_variance"]
    )
    if case.chunk == "reference":  # autodiff sums p (g + g (z − E)) z over v, which cancels
        size = (p * np.abs(z) * (g["log_normalizer"] + g["expected_logit"] * centred)).sum(axis=1)
        d_scale = d_scale + (rel + root * EPS) * size
    return forward, (*backward, d_scale)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_statistics_and_gradients_match_float64(case):
    """Ignored tokens of NaN give zeros and change nothing; interpreted kernels give the same bits again."""
    hidden, unembedding, bias, scale, targets = make(case)
    rng = np.random.default_rng(1)
    drawn = {name: jnp.asarray(rng.normal(size=case.tokens), jnp.float32) for name in FLOATS}
    cotangents = {name: drawn[name] for name in case.names}
    statistics = ALL if case.rise is None else (*case.names, "argmax", "correct")
    options = tuple(sorted(case.options.items()))
    valid = np.asarray(targets) != -100
    dirty = [jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan) for x in (hidden, scale)]
    arguments = (dirty[0], unembedding, bias, dirty[1], targets, cotangents)
    got, grads = evaluate(options, statistics, *arguments)
    if case.rise is not None:
        program = jax.make_jaxpr(evaluate, static_argnums=(0, 1))(options, statistics, *arguments)
        assert "calibjax_expected_row" in str(program)
    if case.chunk in (APART, GPU_BLOCKS):  # two cores, or many programs, whose sums are put together
        chex.assert_trees_all_equal(evaluate(options, statistics, *arguments), (got, grads))

    safe = np.where(valid, targets, 0)
    counted = {name: f64(g) * valid * (name in cotangents) for name, g in drawn.items()}
    inputs = (hidden, unembedding, bias, scale)
    argmax = np.where(valid, got.argmax, 0)
    want = oracle.statistics(hidden, unembedding, safe, scale, bias, case.softcap)
    expected, _ = oracle.gradients(counted, hidden, unembedding, safe, scale, bias, case.softcap, argmax)
    forward, backward = bounds(case, *inputs, safe, counted, argmax)

    for name, tolerance in forward.items():
        if name not in statistics:
            continue
        value = getattr(got, name)
        assert value.dtype == jnp.float32, name
        assert_within(np.asarray(value)[valid], want[name][valid], tolerance[valid], name)
        np.testing.assert_array_equal(np.asarray(value)[~valid], 0.0, name)
    # A near tie may go either way in float32; what is picked must be a maximum as far as the logits are known.
    z = oracle.logits(hidden, unembedding, bias, case.softcap)
    picked = z[np.arange(case.tokens), argmax]
    assert_within(picked[valid], want["max_logit"][valid], 2 * forward["max_logit"][valid], "logit of argmax")
    np.testing.assert_array_equal(np.asarray(got.argmax)[~valid], -1)
    np.testing.assert_array_equal(got.correct, (np.asarray(got.argmax) == targets) & valid)

    for name, got_grad, want_grad, tolerance, x in zip(
        ("hidden", "unembedding", "bias", "scale"), grads, expected, backward, inputs, strict=True
    ):
        if x is None:
            assert got_grad is None
            continue
        assert got_grad.dtype == x.dtype, name
        if case.rise is not None and name in ("unembedding", "bias"):
            continue
        rounded = ROUNDING[x.dtype.name] * np.abs(want_grad)
        assert_within(got_grad, want_grad, tolerance + rounded + 1e-30, "d_" + name)
    np.testing.assert_array_equal(f64(grads[0])[~valid], 0.0)
    np.testing.assert_array_equal(f64(grads[3])[~valid], 0.0)


SMALL = Case(11, 5, 4, 4, bias=True, softcap=None, size=1.5)


def small(softcap=None):
    case = SMALL._replace(softcap=softcap)
    return case, [None if x is None else np.array(x) for x in make(case)]


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_oracle_has_the_right_gradients(softcap):
    _, (hidden, unembedding, bias, scale, targets) = small(softcap=softcap)
    targets = np.maximum(targets, 0)
    inputs = [f64(x) for x in (hidden, unembedding, bias, scale)]
    rng = np.random.default_rng(2)
    g = {name: rng.normal(size=5) for name in FLOATS}

    def value(h, w, b, s):
        got = oracle.statistics(h, w, targets, s, b, softcap)
        return sum((g[name] * got[name]).sum() for name in FLOATS)

    grads, _ = oracle.gradients(g, *inputs[:2], targets, inputs[3], inputs[2], softcap)
    for i, grad in enumerate(grads):
        numeric = oracle.difference(lambda x, i=i: value(*inputs[:i], x, *inputs[i + 1 :]), inputs[i])
        assert_within(grad, numeric, 1e-8 * (1 + np.abs(numeric).max()), str(i))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", FLOATS)
def test_each_cotangent_alone(name, softcap):
    """Only one statistic asked for: the branches where the other cotangents do not exist at all."""
    case, (hidden, unembedding, bias, scale, targets) = small(softcap=softcap)
    g = np.linspace(-1, 2, 5).astype(np.float32)
    options = tuple(case.options.items())
    _, grads = evaluate(options, (name,), hidden, unembedding, bias, scale, targets, {name: g})
    valid = targets != -100
    want, _ = oracle.gradients({name: g * valid}, hidden, unembedding, np.maximum(targets, 0), scale, bias, softcap)
    for label, got, expected in zip(("h", "W", "b", "s"), grads, want, strict=True):
        # D = 4 and logits of a few units: 50 ε of the largest entry is some ten roundings in a row.
        assert_within(got, expected, 50 * EPS * (1 + np.abs(expected).max()), label)


@functools.partial(jax.jit, static_argnames="cuts")
def pieces(logits, cuts, scale, targets):
    wanted = frozenset({"first", "second", "total", "target", "argmax"})
    edges = [0, *cuts, logits.shape[1]]
    return [
        stats.moments(logits[:, lo:hi], scale, targets, lo, wanted) for lo, hi in itertools.pairwise(edges) if hi > lo
    ]


def test_merge_is_associative_and_commutative():
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(6, 40)) * np.array([[0.01], [1], [10], [100], [1], [1]])).astype(np.float32)
    logits[4, [3, 17, 30]] = 50.0  # the largest in all three pieces
    logits[5, 10:25] = -np.inf  # a piece without any mass
    scale = np.array([1, 1e-3, 1e3, 1, 1, 1], np.float32)
    targets = np.array([0, 12, 39, 25, 17, 5], np.int32)
    a, b, c = pieces(logits, (10, 25), scale, targets)
    whole = pieces(logits, (), scale, targets)[0]
    merge = functools.partial(jax.jit(stats.merge), scale=scale)
    orders = {
        "(ab)c": merge(merge(a, b), c),
        "a(bc)": merge(a, merge(b, c)),
        "(cb)a": merge(merge(c, b), a),
        "b(ca)": merge(b, merge(c, a)),
    }
    for order, got in orders.items():
        for name in ("max_logit", "argmax", "target"):  # selections: exact
            np.testing.assert_array_equal(getattr(got, name), getattr(whole, name), f"{order} {name}")
        for name in ("weight", "first", "second"):
            want = f64(getattr(whole, name))
            assert_within(getattr(got, name), want, 40 * EPS * (1 + np.abs(want)), f"{order} {name}")
        finite = slice(0, 5)
        size = np.abs(f64(logits[finite])).sum(axis=1)
        assert_within(got.total[finite], whole.total[finite], 4 * EPS * size, f"{order} total")
    assert whole.argmax[4] == 3
    swapped = merge(b, a)
    for name, x, y in zip(stats.Moments._fields, merge(a, b), swapped, strict=True):
        np.testing.assert_array_equal(x, y, name)


@pytest.mark.parametrize("tokens", [250, 100])
def test_dw_of_blocks_of_tokens_with_and_without_masked_ones(tokens):
    """Two blocks of tokens, of which the last has masked ones, and one block, which every block of W uses."""
    rng = np.random.default_rng(1)
    hidden, unembedding = rng.normal(size=(tokens, 8)).astype(np.float32), rng.normal(size=(300, 8)).astype(np.float32)
    targets = rng.integers(0, 300, tokens)
    masked = np.arange(tokens) % 7 == 0 if tokens == 100 else np.arange(tokens) > 240

    @functools.partial(jax.jit, static_argnums=2)
    def of_unembedding(hidden, targets, implementation):
        return jax.grad(
            lambda w: linear_cross_entropy(hidden, w, targets, reduction="none", implementation=implementation).sum()
        )(unembedding)

    want = of_unembedding(hidden[~masked], targets[~masked], "reference")
    hidden[masked], targets[masked] = np.nan, -100
    got = of_unembedding(hidden, targets, interpreted.NAME)
    assert_within(got, f64(want), 1e-5 * np.abs(f64(want)).max(), "d_unembedding")


@needs_gpu
def test_a_batch_under_vmap_on_a_gpu(gpu):
    """The compiled kernels, also within a loop."""
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(3, 200, 72)), jnp.bfloat16)
    unembedding = jnp.asarray(rng.normal(size=(1000, 72)) / 8, jnp.bfloat16)
    targets = jnp.asarray(rng.integers(0, 1000, (3, 200)), jnp.int32)

    def gradients(hidden, targets):
        def loss(h, w):
            return linear_cross_entropy(h, w, targets, reduction="mean", label_smoothing=0.1, implementation=gpu)

        return jax.value_and_grad(loss, (0, 1))(hidden, unembedding)

    at_once = jax.jit(jax.vmap(gradients))(hidden, targets)
    one_by_one = jax.lax.map(lambda x: gradients(*x), (hidden, targets))
    chex.assert_trees_all_close(at_once, one_by_one, rtol=2.0**-6)  # XLA's products are other programs


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_nan_hidden_states_have_no_confidence(implementation):
    hidden = jnp.ones((64, 16)).at[3].set(jnp.nan)  # which XLA's maximum loses in a jitted program on a CPU
    options = {"statistics": ("log_normalizer", "max_logit"), "implementation": implementation}
    confidence = jax.jit(lambda h: vocab_stats(h, jnp.ones((5000, 16)), **options).confidence())(hidden)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(confidence)), [3])


@pytest.mark.parametrize("bad", [-1, 11, 2**32 + 1, 2**63 - 1])
def test_a_target_outside_the_vocabulary_is_nan(bad):
    """Also one that would wrap to a class in 32 bits; not where the token does not count."""
    _, (hidden, unembedding, *_) = small()
    targets, where = np.array([0, bad, 2, -100, bad], np.int64), np.array([True] * 4 + [False])
    got = vocab_stats(hidden, unembedding, targets, where=where)
    np.testing.assert_array_equal(np.isnan(got.target_logit), [False, True, False, False, False])
    assert np.isfinite(got.log_normalizer).all()
    assert not got.correct[1]
    loss = linear_cross_entropy(hidden, unembedding, targets, where=where, reduction="none")
    np.testing.assert_array_equal(np.isnan(loss), np.isnan(got.target_logit))


@pytest.mark.parametrize("chunk", [1, 4, "reference", TPU])
def test_ties_go_to_the_lowest_index(chunk):
    z = np.zeros((4, 9), np.float32)
    z[0, [2, 7]] = z[1, [5, 8]] = z[2, [0, 3, 6]] = 4.0
    options = Case(9, 4, 9, chunk).options
    got = jax.jit(lambda z: vocab_stats(z, np.eye(9, dtype=np.float32), statistics=["argmax"], **options))(z)
    np.testing.assert_array_equal(got.argmax, [2, 5, 0, 0])


@pytest.mark.parametrize("name", ["chunked", "reference", interpreted.NAME, slow(interpreted_gpu.NAME)])
def test_a_bias_of_minus_infinity_removes_entries(name):
    """Masked vocabulary entries, whole chunks of them (0 to 3, 8 to 10): as if these rows of W were not there."""
    _, (hidden, unembedding, bias, scale, targets) = small()
    bias[[0, 1, 2, 3, 5, 8, 9, 10]] = -np.inf
    targets = np.array([4, 6, 7, 4, -100], np.int32)
    if name == interpreted_gpu.NAME:
        hidden, unembedding = hidden.astype(jnp.bfloat16), unembedding.astype(jnp.bfloat16)
    names = ("log_normalizer", "target_logit", "max_logit", "expected_logit")
    g = {name: np.linspace(1, 2, 5).astype(np.float32) * (targets >= 0) for name in names}
    options = {"implementation": name} | ({"chunk_size": 4} if name == "chunked" else {})
    inputs = (hidden, unembedding, bias, scale)
    got, grads = evaluate(tuple(options.items()), (*names, "argmax"), *inputs, targets, g)
    safe = np.maximum(targets, 4)
    want = oracle.statistics(hidden, unembedding, safe, scale, bias)
    valid = targets >= 0
    np.testing.assert_array_equal(np.asarray(got.argmax)[valid], want["argmax"][valid])
    for name in names:
        assert_within(np.asarray(getattr(got, name))[valid], want[name][valid], 1e-5, name)
    expected, _ = oracle.gradients(g, hidden, unembedding, safe, scale, bias)
    for part, x, e in zip("hWbs", grads, expected, strict=True):
        assert_within(x, e, 1e-4 if hidden.dtype == np.float32 else 2.0**-6 * (1 + np.abs(e).max()), part)


@functools.partial(jax.jit, static_argnums=0)
def certain(implementation, hidden, weights, targets, scale):
    """All statistics, and the gradient of the confidences in the scale."""

    def stats(s):
        got = vocab_stats(hidden, weights, targets, scale=s, statistics=STATISTICS, implementation=implementation)
        return jnp.sum(got.confidence()), got

    slope, got = jax.grad(stats, has_aux=True)(scale)
    return got, slope


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize(("size", "scale"), [(1.0, 1e30), (1e30, 1.0), (1e10, 1e30), (-1e10, 1e30)])
def test_logits_and_scales_of_any_size(implementation, size, scale):
    """One token of the vocabulary has all the probability; s·z may lie beyond float32."""
    _, (hidden, *_) = small()
    hidden = np.abs(hidden)
    weights = (size * np.outer(np.arange(1.0, 12.0), np.ones(4))).astype(np.float32)
    top = 10 if size > 0 else 0
    targets = np.array([top, 3, top, -100, 5], np.int32)
    got, slope = certain(implementation, hidden, weights, targets, np.float32(scale))
    counts = targets >= 0
    np.testing.assert_array_equal(got.confidence(), counts)
    np.testing.assert_array_equal(got.entropy(), 0.0)
    np.testing.assert_array_equal(got.logit_variance, 0.0)
    np.testing.assert_array_equal(got.log_prob()[targets == top], 0.0)
    assert (got.log_prob()[counts & (targets != top)] < -1e25).all()
    assert np.isfinite(slope)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_gradients_at_a_scale_of_1e30_are_finite(implementation):
    """Of the confidence penalty, whose cotangents grow with the scale; float32 rounds s·z by 1e23."""
    _, (hidden, unembedding, bias, _, targets) = small()

    def loss(h, w, s):
        options = {"chunk_size": 4} if implementation == "chunked" else {}
        got = vocab_stats(h, w, targets, bias=bias, scale=s, implementation=implementation, **options)
        return jnp.sum(-got.log_prob() - 0.1 * got.entropy())

    for x in jax.jit(jax.grad(loss, (0, 1, 2)))(hidden, unembedding, np.full(5, 1e30, np.float32)):
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("implementation", "vocab", "width"), [("chunked", 40, 2304), slow(TPU, 40, 2304), (TPU, 125, 2312)]
)
def test_wide_hidden_states_of_many_tokens(implementation, vocab, width):
    """Above 512 tokens the closed forms of dh go block by block, the last one ragged; at 2,312 W is transposed."""
    case = Case(vocab, 600, width, implementation)
    hidden, unembedding, _, scale, targets = make(case)
    g = np.random.default_rng(8).normal(size=(3, case.tokens)).astype(np.float32)
    names = ("log_normalizer", "target_logit", "mean_logit")

    @jax.jit
    def grad(hidden):
        def value(h):
            got = vocab_stats(h, unembedding, targets, scale=scale, statistics=names, implementation=implementation)
            return sum(jnp.sum(x * getattr(got, name)) for name, x in zip(names, g, strict=True))

        return jax.grad(value)(hidden)

    counted = dict(zip(names, g * (np.asarray(targets) != -100), strict=True))
    want, dz = oracle.gradients(counted, hidden, unembedding, np.maximum(targets, 0), scale)
    size = np.abs(dz) @ np.abs(f64(unembedding))
    # One thread adds the D products in order, a random walk of ε √D |z|; the sums over V entries carry a few ε more.
    logits = np.abs(f64(scale)[:, None] * oracle.logits(hidden, unembedding)).max(axis=1, keepdims=True)
    assert_within(grad(hidden), want[0], EPS * (20 + case.width**0.5 * logits) * size + 1e-30)


def test_a_subset_of_the_statistics_has_the_same_values():
    _, (hidden, unembedding, bias, scale, targets) = small()
    run = jax.jit(functools.partial(vocab_stats, chunk_size=4), static_argnames="statistics")
    everything = run(hidden, unembedding, targets, bias=bias, scale=scale, statistics=STATISTICS)
    for names in [("log_normalizer",), ("correct",), ("mean_logit", "logit_variance"), ()]:
        got = run(hidden, unembedding, targets, bias=bias, scale=scale, statistics=names)
        for name in STATISTICS:
            if name in names:
                x = f64(getattr(everything, name))
                assert_within(getattr(got, name), x, 8 * EPS * (1 + np.abs(x)), name)
            else:
                assert getattr(got, name) is None, name
    default = run(hidden, unembedding, bias=bias, scale=scale)
    assert default.target_logit is default.correct is default.logit_variance is None
    assert default.valid.all()
    with pytest.raises(ValueError, match="mean_logit"):
        run(hidden, unembedding, targets, statistics=("log_normalizer",)).require("mean_logit")


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    arrays = small()[1]
    hidden, unembedding, scale = (torch.tensor(f64(arrays[place])).bfloat16() for place in (0, 1, 3))
    want = torch.logsumexp(scale.float()[:, None] * (hidden.float() @ unembedding.float().T), dim=1)
    np.testing.assert_allclose(vocab_stats(hidden, unembedding, scale=scale).log_normalizer, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": np.ones((5, 4), np.int32)}, "hidden"),
        ({"unembedding": np.ones((11, 5), np.float32)}, r"\[V, D\]"),
        ({"unembedding": np.ones((0, 4), np.float32)}, "at least one row"),
        ({"targets": np.ones(5, np.float32)}, "integers"),
        ({"targets": np.ones(4, np.int32)}, "targets: expected shape"),
        ({"bias": np.ones(4, np.float32)}, "bias"),
        ({"where": np.ones(5, np.int32)}, "booleans"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": np.inf}, "softcap"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunks": 4}, "chunks"),
        ({"implementation": "fastest"}, "implementation: expected one of"),
        ({"implementation": "reference", "chunk_size": 4}, "takes no chunk_size"),
        ({"statistics": ["logits"]}, "unknown"),
        ({"targets": None, "statistics": ["correct"]}, "need targets"),
    ],
)
def test_errors_teach(change, message):
    _, (hidden, unembedding, _, _, targets) = small()
    arguments = {"hidden": hidden, "unembedding": unembedding, "targets": targets, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        vocab_stats(**arguments)
