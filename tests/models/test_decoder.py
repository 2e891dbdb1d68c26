import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assets import MODELS, model_path
from tiny import make_lm

from calibjax import models
from calibjax.models import LanguageModel, load_model
from calibjax.models.shapes import SHAPES
from calibjax.nn.blocks import Rope
from calibjax.runtime.errors import UserError

SIZES = {"vocab_size": 37, "hidden_size": 24, "num_heads": 4, "max_positions": 16}
LLAMA = make_lm(**SIZES, intermediate_size=40, num_layers=3, num_kv_heads=2, head_dim=6).config
GPT2 = dataclasses.replace(SHAPES["gpt2"], **SIZES, intermediate_size=96, num_layers=2, num_kv_heads=4, head_dim=6)
# Layers of two kinds: windows and rotary positions alternate, as in Gemma 3.
MIXED = dataclasses.replace(
    SHAPES["gemma-3-1b"],
    **SIZES,
    intermediate_size=40,
    num_layers=4,
    num_kv_heads=2,
    head_dim=6,
    local_layers=(True, True, False, True),
    window=3,
    attention_softcap=2.0,
)
run_hidden = jax.jit(models.hidden_states, static_argnames=("config", "layers", "dtype"))

CONFIGS = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
ALL_CONFIGS = pytest.mark.parametrize("config", [LLAMA, GPT2, MIXED], ids=["llama", "gpt2", "mixed"])


def random_params(config, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: random.normal(0.02, 0.15, leaf.shape).astype(np.float32), models.abstract_params(config)
    )


def random_tokens(config, shape=(2, 12)):
    return np.random.default_rng(2).integers(0, config.vocab_size, shape, np.int32)


@functools.cache
def model_in_memory():
    return LanguageModel.from_params(LLAMA, random_params(LLAMA))


def with_value(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


def run_segments(config, tokens, segments=None):
    """Hidden states of all layers, on the host: the one program of each configuration that most tests share."""
    segments = np.ones((2, 12), np.int32) if segments is None else segments
    return np.asarray(run_hidden(config, random_params(config), tokens, segment_ids=segments, layers="all"))


def relative_error(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("stories260K", "craftgpt-5M") else pytest.mark.slow) for n in MODELS]
)
def test_golden(name):
    model = load_model(model_path(name))
    golden = np.load(model_path(name) / "golden.npz")
    hidden = model.hidden_states(golden["input_ids"], layers="all")
    assert hidden.shape == golden["hidden"].shape
    errors = [relative_error(got, expected) for got, expected in zip(hidden, golden["hidden"], strict=True)]
    errors.append(relative_error(model.logits(golden["input_ids"]), golden["logits"]))
    print(name, [f"{error:.1e}" for error in errors])
    assert max(errors) <= 1e-5
    if name == "stories260K":
        np.testing.assert_allclose(model.hidden_states(golden["input_ids"]), hidden[-1], rtol=0, atol=1e-5)


@ALL_CONFIGS
def test_packed_sequences_equal_separate_ones(config):
    params, tokens = random_params(config), random_tokens(config)
    segments = np.array([[1] * 5 + [2] * 5 + [0] * 2, [3] * 7 + [1] * 5], np.int32)
    packed = run_segments(config, tokens, segments)
    assert np.isfinite(packed).all()
    for row, part in [(0, slice(0, 5)), (0, slice(5, 10)), (1, slice(7, 12))]:
        alone = run_hidden(config, params, tokens[row : row + 1, part], layers="all")
        assert relative_error(packed[:, row : row + 1, part], alone) < 2e-6

    changed = run_segments(config, with_value(tokens, np.s_[0, 10:], 0), segments)
    np.testing.assert_array_equal(changed[:, 0, :10], packed[:, 0, :10])


@CONFIGS
def test_explicit_positions_and_causality(config):
    params, tokens = random_params(config), random_tokens(config)
    hidden = run_segments(config, tokens)[-1]
    run = functools.partial(run_hidden, config, params, tokens, segment_ids=np.ones((2, 12), np.int32), layers="all")
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), (2, 12))
    np.testing.assert_array_equal(run(positions=positions)[-1], hidden)
    # Rotary positions are relative, so a shift changes nothing; learned ones are not.
    shifted = relative_error(run(positions=positions + 3)[-1], hidden)
    assert (shifted < 1e-5) == (config.rope is not None)
    changed = run_segments(config, with_value(tokens, np.s_[:, 5], (tokens[:, 5] + 1) % config.vocab_size))[-1]
    np.testing.assert_array_equal(changed[:, :5], hidden[:, :5])
    assert (np.abs(changed[:, 5:] - hidden[:, 5:]).max(-1) > 1e-6).all()


@ALL_CONFIGS
def test_dtypes_are_kept_under_strict_rules(config):
    tokens = jax.ShapeDtypeStruct((2, 6), jnp.int32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        params = models.abstract_params(config, jnp.bfloat16)
        run = functools.partial(models.hidden_states, config, dtype=jnp.bfloat16)
        hidden = jax.eval_shape(lambda p, t: run(p, t, segment_ids=t), params, tokens)
        logits = jax.eval_shape(lambda p, t: models.logits(config, p, t, dtype=jnp.bfloat16), params, tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_window_ends_at_its_length():
    """One layer, one window of 3: a change at t is seen at t, t + 1, t + 2, and at no other token."""
    config = dataclasses.replace(LLAMA, num_layers=1, local_layers=(True,), window=3)
    params, tokens = random_params(config), random_tokens(config, (1, 9))
    before, after = (
        run_hidden(config, params, t)[0] for t in (tokens, with_value(tokens, (0, 4), (tokens[0, 4] + 1) % 37))
    )
    changed = np.abs(np.asarray(before) - np.asarray(after)).max(-1) > 0
    np.testing.assert_array_equal(changed, [False] * 4 + [True] * 3 + [False] * 2)


@ALL_CONFIGS
def test_float32_products_are_of_highest_precision(config):
    params, tokens = models.abstract_params(config), jnp.zeros((1, 4), jnp.int32)
    jaxpr = str(jax.make_jaxpr(lambda p: models.logits(config, p, tokens))(params))
    products = jaxpr.count("dot_general")
    assert products == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 0


def test_a_token_beyond_the_vocabulary_is_not_clamped():
    tokens = with_value(random_tokens(LLAMA), (0, 11), LLAMA.vocab_size)
    hidden = run_segments(LLAMA, with_value(tokens, (1, 11), LLAMA.vocab_size - 1))[-1]
    assert np.isnan(hidden[0, 11]).all()
    assert np.isfinite(hidden[1]).all()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 17), {}, "at most 16 positions.*got 17"),
        (4, {}, r"expected integers \[B, T\]"),
        ((1, 0), {}, r"expected at least one, got \[1, 0\]"),
        ((1, 4), {"segment_ids": np.ones((1, 3), np.int32)}, "segment_ids: expected the tokens'"),
        ((1, 4), {"positions": np.ones((2, 4), np.int32)}, "positions: expected the tokens'"),
        ((1, 4), {"layers": "first"}, "expected one of last, all, residual; got 'first'"),
    ],
)
def test_bad_inputs(shape, options, message):
    with pytest.raises(UserError, match=message):
        model_in_memory().hidden_states(np.zeros(shape, np.int32), **options)


def test_inputs_from_the_host():
    """Lists are arrays, and what int32 does not hold is outside the vocabulary: 2³² + 1 is not 1."""
    lm = model_in_memory()
    for run in (lm.logits, lm.hidden_states):
        places = {"segment_ids": [[1, 1, 2]], "positions": [[0, 1, 0]]}
        expected = run(np.array([[3, 1, 2]]), **{name: np.array(rows) for name, rows in places.items()})
        np.testing.assert_array_equal(run([[3, 1, 2]], **places), expected)
        assert np.isnan(run(np.array([[3, 2**32 + 1, 2]], np.int64))[0, 1]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: expected at least 1, got 0"),
        ({"logit_softcap": -1.0}, "logit_softcap: expected above 0, got -1.0"),
        ({"local_layers": (True,)}, "local_layers: expected 3 values, got 1"),
        ({"local_rope": Rope(fraction=0.5)}, "same fraction of rotated channels as rope"),
        ({"parallel": "one_norm", "norm_placement": "both"}, "'pre' where parallel is set"),
        ({"qk_norm": "heads"}, "qk_norm: expected one of head, projection; got 'heads'"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(LLAMA, **changes)


def test_model_in_memory():
    params = models.init_params(LLAMA, jax.random.key(0, impl="rbg"))
    model = LanguageModel.from_params(LLAMA, params)
    assert not model.has_tokenizer
    assert model.unembedding is params["unembedding"]
    with pytest.raises(UserError, match=r"final_norm.bias \(expected \(24,\), got None\)"):
        LanguageModel.from_params(GPT2, params)
