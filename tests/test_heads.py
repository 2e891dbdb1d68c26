"""What a head must never do: start as anything but the identity, look ahead, or change the most likely token."""

import functools
import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import traverse_util
from oracle import EPS, assert_within
from tiny import make_lm

from calibjax import UserError, heads, models
from calibjax.kernels.reference import dense_stats
from calibjax.models.calibrated import calibrated_confidence, calibrated_log_probs
from calibjax.recalibrate import fit_temperature
from calibjax.runtime.options import check_options
from calibjax.train import AtsOptions

B, T, D, V = 2, 6, 8, 13
KINDS = tuple(heads.HEADS)
POOLINGS = ("token", "sequence")
ALL = tuple(heads.FEATURES)
FEATURE_SETS = (("hidden_states",), ALL)
SMALL = {"intermediate_size": 6, "num_heads": 2}
WHERE = np.array([[False, True, True, True, True, False], [True, True, True, True, True, True]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
TOKENS = np.random.default_rng(3).integers(0, V, (4, 8)).astype(np.int32)


def config_of(kind, pooling="token", features=("hidden_states",), **options):
    return heads.HeadConfig(kind=kind, hidden_size=D, pooling=pooling, features=features, **SMALL, **options)


def inputs(dtype=jnp.float32, size=1.0):
    """Hidden states `[B, T, D]` and an unembedding `[V, D]`."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(B, T, D)) * size, dtype), jnp.asarray(rng.normal(size=(V, D)), dtype)


def random_params(config, size=0.7):
    """Parameters far from the start: every one of them random."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(config.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * size, x.dtype), shapes)


def init(config):
    # The generator that compiles fast: threefry would take most of the time of these tests.
    return jax.jit(config.init)(jax.random.key(0, impl="rbg"))


@functools.partial(jax.jit, static_argnums=0)
def log_scale(config, params, hidden, unembedding, where=None, segment_ids=None):
    features = heads.head_features(config.features, hidden, unembedding)
    return config.build().apply({"params": params}, features, where=where, segment_ids=segment_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_head_is_the_identity(kind):
    for pooling, features, dtype in zip(POOLINGS, FEATURE_SETS, (jnp.float32, jnp.bfloat16), strict=True):
        start = init(config_of(kind, features=features))
        hidden, unembedding = inputs(dtype, size=10.0)
        got = log_scale(config_of(kind, pooling, features), start, hidden, unembedding, WHERE, SEGMENTS)
        assert (got.shape, got.dtype) == ((B, T), jnp.float32)
        np.testing.assert_array_equal(got, 0.0)
        assert {x.dtype for x in jax.tree.leaves(start)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_random_start_of_every_matrix(kind):
    """U(−1/√F, 1/√F), F the inputs of the matrix, as torch.nn.Linear."""
    features = ALL if kind == "transformer" else ("hidden_states",)  # with a projection
    config = heads.HeadConfig(kind=kind, hidden_size=32, features=features, num_heads=2, identity_start=False)
    flat = traverse_util.flatten_dict(init(config))
    matrices = {name: np.asarray(x) for name, x in flat.items() if name[-1] == "kernel"}
    assert len(matrices) == {"mlp": 2, "transformer": 9}[kind]
    for name, matrix in matrices.items():
        bound = 1 / math.sqrt(len(matrix))
        assert np.abs(matrix).max() <= bound * (1 + EPS), name
        assert np.abs(matrix).max() > 0.9 * bound, name
        # The variance of the variance of a uniform distribution is 4/45 of the bound's fourth power.
        tolerance = 5 * bound**2 * math.sqrt(4 / 45 / matrix.size)
        assert_within(np.square(matrix).mean(), bound**2 / 3, tolerance, str(name))
    assert np.abs(flat[("output", "bias")]).max() > 0


def test_the_mlp_of_the_authors_reads_what_it_is_given():
    config = config_of("mlp", normalize=False)
    params, (hidden, unembedding) = random_params(config, 0.2), inputs()
    gate, up = np.split(oracle.f64(hidden) @ oracle.f64(params["gate_up"]["kernel"]), 2, axis=-1)
    output = {name: oracle.f64(x) for name, x in params["output"].items()}
    want = (gate / (1 + np.exp(-gate)) * up) @ output["kernel"][:, 0] + output["bias"][0]
    got = log_scale(config, params, hidden, unembedding, WHERE, SEGMENTS)
    assert_within(got, want, 100 * EPS * (1 + np.abs(want)))
    assert np.abs(got - log_scale(config_of("mlp"), params, hidden, unembedding, WHERE, SEGMENTS)).max() > 0.01


@pytest.mark.parametrize("min_scale", [heads.MIN_SCALE, heads.NO_MIN_SCALE])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds(kind, min_scale):
    """Whatever the parameters, s stays in [min_scale, 10].

    At 1e-30 the distribution is uniform, and the most likely token still the base model's.
    """
    config = config_of(kind, min_scale=min_scale)
    lowest, highest = math.log(min_scale), math.log(heads.MAX_SCALE)
    lm = small_model(jnp.float32)
    for bias, want in ((-20.0, max(-20.0, lowest)), (-1e9, lowest), (1e9, highest)):
        params = traverse_util.flatten_dict(jax.tree.map(jnp.zeros_like, random_params(config)))
        last = ("log_scale",) if kind == "constant" else ("output", "bias")
        params[last] = jnp.full_like(params[last], bias)
        params = traverse_util.unflatten_dict(params)
        np.testing.assert_array_equal(log_scale(config, params, *inputs()), np.float32(want))
        if kind not in ("constant", "mlp") or min_scale == heads.MIN_SCALE:
            continue  # `test_no_head_changes_the_most_likely_token`
        log_probs = np.asarray(calibrated_log_probs(lm, TOKENS, heads.FittedHead(config, params, lm.fingerprint)))
        assert np.isfinite(log_probs).all()
        np.testing.assert_array_equal(log_probs.argmax(axis=-1), np.asarray(lm.logits(TOKENS)).argmax(axis=-1))
        if want < 0:
            assert_within(log_probs, np.full_like(log_probs, -math.log(V)), 1e-6, "uniform")
    got = log_scale(config, random_params(config, 10.0), *inputs(size=100.0), WHERE, SEGMENTS)
    assert (np.exp(got) <= heads.MAX_SCALE * (1 + 2 * EPS)).all()
    assert (np.exp(got) >= min_scale * (1 - 2 * EPS)).all()


@pytest.mark.parametrize("features", [("hidden_states",), ALL], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_neither_later_tokens_nor_other_segments(kind, features):
    config = config_of(kind, features=features)
    params = random_params(config, 0.2)
    hidden, unembedding = inputs()
    base = np.asarray(log_scale(config, params, hidden, unembedding, WHERE, SEGMENTS))
    changed = hidden.at[0, 2].set(-3.0 * hidden[0, 2] + 1)  # the last of segment 1 in row 0
    got = np.asarray(log_scale(config, params, changed, unembedding, WHERE, SEGMENTS))
    assert {*zip(*np.nonzero(got != base), strict=True)} == (set() if kind == "constant" else {(0, 2)})
    changed = hidden.at[0, 0].set(5.0).at[0, 5].set(jnp.nan)  # the first token of row 0, and its padding
    got = np.asarray(log_scale(config, params, changed, unembedding, WHERE, SEGMENTS))
    np.testing.assert_array_equal(got[0, 3:5], base[0, 3:5])
    np.testing.assert_array_equal(got[1], base[1])
    if kind == "transformer":
        assert (got[0, 1:3] != base[0, 1:3]).all(), "attention should reach back within the segment"
        # A segment alone in its row gives what it gives when packed.
        moved = jnp.roll(hidden, -3, axis=1)
        alone = np.asarray(log_scale(config, params, moved, unembedding, WHERE, np.ones_like(SEGMENTS)))
        assert_within(base[0, 3:5], alone[0, :2], 100 * EPS * (1 + np.abs(base[0, 3:5])), "packed and alone")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_sequence_pooling_is_the_mean_of_the_tokens(kind):
    """Over the tokens that count, of each segment apart; so masked tokens do not matter."""
    by_token, by_sequence = config_of(kind, "token"), config_of(kind, "sequence")
    params, (hidden, unembedding) = random_params(by_token, 0.2), inputs()
    tokens = np.asarray(log_scale(by_token, params, hidden, unembedding, WHERE, SEGMENTS), np.float64)
    assert np.abs(tokens).max() < math.log(10) - 0.01, "clipped: nothing could be said of the mean"
    got = log_scale(by_sequence, params, hidden, unembedding, WHERE, SEGMENTS)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        inside = SEGMENTS[row] == segment
        want = tokens[row, inside & WHERE[row]].mean()
        assert_within(got[row, inside], np.full(inside.sum(), want), 10 * EPS * (1 + abs(want)))
    np.testing.assert_array_equal(got[0, 5], 0.0)  # padding: no token of its sequence counts
    values = np.array([[np.nan, 1.0, 3.0, np.inf]], np.float32)
    np.testing.assert_array_equal(heads.sequence_mean(values, np.array([[False, True, True, False]])), [[2.0] * 4])


@pytest.mark.parametrize(("dtype", "with_bias"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_features_against_dense_logits(dtype, with_bias):
    hidden, unembedding = inputs(dtype, size=2.0)
    bias = jnp.asarray(np.random.default_rng(2).normal(size=V) * 3, jnp.float32) if with_bias else None
    run = jax.jit(functools.partial(heads.head_features, ALL))
    got = np.asarray(run(hidden, unembedding, bias=bias), np.float64)
    given = run(hidden, unembedding, bias=bias, covariance=jax.jit(heads.logit_covariance)(unembedding, bias))
    assert_within(got, given, 10 * EPS * (1 + np.abs(got)), "with the covariance given")
    z = oracle.logits(np.asarray(hidden).reshape(-1, D), unembedding, bias).reshape(B, T, V)
    np.testing.assert_array_equal(got[..., :D], oracle.f64(hidden))
    size = np.abs(z).max()
    largest = z.max(axis=-1)
    p = oracle.probabilities(z.reshape(-1, V), np.ones(B * T)).reshape(z.shape)
    mean = (p * z).sum(axis=-1)
    variance = (p * (z - mean[..., None]) ** 2).sum(axis=-1)
    statistics = (-np.log(p.max(axis=-1)), np.log1p(largest - mean), np.log1p(variance), z.mean(axis=-1) - largest)
    assert_within(got[..., D : D + 4], np.stack(statistics, axis=-1), 40 * EPS * (1 + size), "logit_statistics")
    assert_within(got[..., D + 4], largest, 10 * EPS * size, "max_logit")
    # hᵀCh cancels less than the sum of its terms: (|h| |W|)² / Var is at most some hundred here.
    assert_within(got[..., D + 5], np.log(z.std(axis=-1, ddof=1)), 200 * EPS, "log_std_logits")
    np.testing.assert_array_equal(got[..., D + 6 :], oracle.f64(unembedding)[z.argmax(axis=-1)])
    dense = run(hidden, unembedding, bias=bias, stats=jax.jit(dense_stats)(z.astype(np.float32)))
    assert_within(dense, got, 40 * EPS * (1 + np.abs(got)), "from logits")
    # max_logit is after the soft-cap, the standard deviation before it.
    capped = np.asarray(jax.jit(lambda: heads.head_features(ALL, hidden, unembedding, bias=bias, softcap=3.0))())
    assert_within(capped[..., D + 4], 3 * np.tanh(largest / 3), 20 * EPS * 3, "max_logit under a soft-cap")
    assert_within(capped[..., D + 5], got[..., D + 5], 10 * EPS, "log_std_logits under a soft-cap")
    removes = jnp.where(jnp.arange(V) < 3, -jnp.inf, 0.0)
    covariance = np.cov(oracle.f64(unembedding[3:]), rowvar=False)
    assert_within(jax.jit(heads.logit_covariance)(unembedding, removes)[:D, :D], covariance, 10 * EPS, "removed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "lstm"}, "kind: expected"),
        ({"min_scale": 0.0}, "min_scale: expected from 1e-30 to 1"),
        ({"pooling": "max"}, "pooling: expected"),
        ({"features": ("logits",)}, "features: expected distinct names"),
        ({"features": ("max_logit", "max_logit")}, "features: expected distinct names"),
        ({"kind": "transformer", "num_heads": 3}, "num_heads: expected a divisor"),
        ({"kind": "transformer", "hidden_size": 7}, "even hidden_size"),
    ],
)
def test_wrong_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        heads.HeadConfig(**{"kind": "linear", "hidden_size": D, **change}).build()


def test_log_factors_that_no_fit_gives():
    for factor in (math.nan, -math.inf, -6.01):
        with pytest.raises(UserError, match=re.escape(f"log_factor: expected a number within ±6, got {factor}")):
            heads.FittedHead(config_of("constant"), {}, "", log_factor=factor)
    bounds = inspect.signature(fit_temperature).parameters["bounds"].default
    assert bounds == (-heads.MAX_LOG_FACTOR, heads.MAX_LOG_FACTOR), "every refit gives a head"


def test_attention_heads_divide_the_width():
    widths = {8: 4, 64: 8, 4096: 32, 100: 5, 2: 1}
    assert {d: heads.HeadConfig(kind="transformer", hidden_size=d).build().block.num_heads for d in widths} == widths


def test_a_head_of_another_package(monkeypatch):
    monkeypatch.setitem(heads.HEADS, "theirs", heads.HeadEntry(lambda config: heads.Dense(1), ()))
    check_options(AtsOptions(head_kind="theirs"))
    with pytest.raises(UserError, match="last layer named output, got kernel"):
        heads.HeadConfig(kind="theirs", hidden_size=D).init(jax.random.key(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_reads_the_options_that_its_entry_names(kind):
    """Another value of those builds another module; of the others it builds the same one."""
    changed = {"pooling": "sequence", "identity_start": False, "normalize": False, "features": ALL}
    changed |= {"intermediate_size": 10, "num_heads": 1, "min_scale": 0.5}
    plain = heads.HeadConfig(kind=kind, hidden_size=D)
    for name, value in changed.items():
        other = heads.HeadConfig(kind=kind, hidden_size=D, **{name: value})
        same = plain.build() == other.build()
        if name == "features":  # they are the input of the module; a constant head reads its shape alone
            shapes = [jax.tree.map(np.shape, jax.eval_shape(c.init, jax.random.key(0))) for c in (plain, other)]
            same = shapes[0] == shapes[1]
        assert same == (name not in heads.HEADS[kind].options), name


def small_model(dtype, norm=1.0):
    """A Llama of one block whose final norm weighs `norm`, so hidden states are of that size; with near ties in W."""
    lm = make_lm(seed=1, vocab_size=V, hidden_size=D, num_kv_heads=2, head_dim=4)
    params = jax.tree.map(np.array, lm.params)
    params["final_norm"]["scale"][:] = norm
    w = params["unembedding"]
    w[5], w[8] = w[2], np.nextafter(w[2], np.float32(np.inf))  # a tie and a tie but for one rounding
    w[10] = w[3] * np.float32(1 + 1e-6)
    return models.LanguageModel.from_params(lm.config, params, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),  # constant and mlp: `test_bounds`
    [("linear", jnp.float32), pytest.param("mlp", jnp.float32, marks=pytest.mark.slow), ("transformer", jnp.bfloat16)],
)
def test_no_head_changes_the_most_likely_token(kind, dtype):
    """With random parameters, hidden states of size 1e-4, 1 and 1e4, ties and near ties in the vocabulary."""
    config = config_of(kind, features=ALL if kind == "linear" else ("hidden_states",))
    tied = 0
    for norm in (1e-4, 1.0, 1e4):
        lm = small_model(dtype, norm)
        z = np.asarray(lm.logits(TOKENS))
        tied += (np.sort(z, axis=-1)[..., -2] >= z.max(axis=-1) * (1 - 4 * EPS)).sum()
        base = z.argmax(axis=-1)
        for size, factor in ((0.7, 0.0), (30.0, -2.5), (30.0, 2.5)):
            head = heads.FittedHead(config, random_params(config, size), lm.fingerprint, log_factor=factor)
            log_probs = np.asarray(calibrated_log_probs(lm, TOKENS, head))
            np.testing.assert_array_equal(log_probs.argmax(axis=-1), base)
            got = calibrated_confidence(lm, TOKENS, head)
            np.testing.assert_array_equal(got.argmax, base)
            assert (np.asarray(got.temperature) > 0).all()
            # The exponent |s z| goes up to 1e6: its rounding in float32 is what the two confidences may differ by.
            tolerance = 8 * EPS * (4 + np.abs(z.max(axis=-1) / np.asarray(got.temperature, np.float64)))
            assert_within(np.exp(log_probs.max(axis=-1)), got.confidence, tolerance, "confidence")
    assert tied > 0, "no tie was met: the test does not test"
