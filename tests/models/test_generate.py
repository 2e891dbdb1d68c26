"""Generation: against transformers' tokens, and against the decoder and the heads without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from assets import model_path
from parity import GOLDENS, read_golden, worst_error
from scipy.special import log_softmax, softmax
from tiny import VOCAB, compilations, make_lm, random_head

import calibjax
from calibjax import LanguageModel, UserError, calibrated_confidence, generate, models
from calibjax.heads import FEATURES, FittedHead
from calibjax.models.decoder import extend
from calibjax.models.generate import Sampling, sampling_logits
from calibjax.nn.kv_cache import fork
from calibjax.runtime.sharding import make_mesh, param_shardings

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Windows shorter than the texts, in one layer of two.
OPTIONS = {
    "num_layers": 2,
    "max_positions": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "local_layers": (True, False),
    "window": 4,
}
PROMPTS = [[3, 7, 1], [5], [2, 2, 9, 23, 4, 8, 11]]
N = 12


the_lm = functools.cache(lambda: make_lm(**OPTIONS))


@functools.cache
def head_of(kind, **options):
    features = tuple(FEATURES) if kind == "linear" else ("hidden_states",)
    return random_head(the_lm(), kind, features, log_factor=0.3, **options)


@pytest.mark.parametrize("name", ["stories260K", *map(slow, ["tinystories-656k", "craftgpt-5M"])])
def test_greedy_equals_transformers(name):
    lm = calibjax.load_model(model_path(name))
    golden = np.load(GOLDENS / "generation.npz")
    assert lm.tokenizer("Once upon a time")["input_ids"] == golden[f"{name}-prompt"].tolist()
    got = generate(lm, ["Once upon a time"], max_new_tokens=len(golden[name]), stop_tokens=())
    np.testing.assert_array_equal(got.tokens[0], golden[name])
    assert got.texts(lm.tokenizer) == [lm.tokenizer.decode(golden[name], skip_special_tokens=True)]


@pytest.mark.parametrize(
    "family", ["gemma2", "gpt_oss", *map(slow, ["gpt2", "mistral", "gemma3_text", "phi", "mixtral"])]
)
def test_cached_forward_equals_transformers(tmp_path, family):
    """Four columns at a time; the first row padded on the left, the second on the right."""
    golden = read_golden(family, tmp_path)
    lm = calibjax.load_model(tmp_path)
    length, pad = golden["tokens"].shape[1], 4
    rows = [slice(pad, pad + length), slice(0, length)]
    tokens, segments = np.zeros((2, 2, length + pad), np.int32)
    for row, columns in enumerate(rows):
        tokens[row, columns], segments[row, columns] = golden["tokens"][row], 1
    step = jax.jit(extend, static_argnums=0)
    cache, parts = None, []
    for start in range(0, length + pad, 4):
        part = slice(start, start + 4)
        hidden, cache = step(lm.config, lm.params, tokens[:, part], cache, segment_ids=segments[:, part])
        cache = fork(cache, 1, length + pad - 4) if start == 0 else cache
        parts.append(hidden)
    hidden = np.concatenate(parts, axis=1)
    assert np.isfinite(hidden).all()
    hidden = np.stack([hidden[row, columns] for row, columns in enumerate(rows)])
    logits = jax.jit(models.unembed, static_argnums=0)(lm.config, lm.params, hidden)
    error = worst_error([hidden, logits], [golden["hidden"][-1], golden["logits"]])
    print(f"{family}: worst relative error {error:.1e}")
    assert error <= 1e-5


def whole_texts(got):
    """Prompts with their continuations, padded on the right, and where each continuation was predicted."""
    tokens = np.zeros((len(PROMPTS), 32), np.int32)
    segments = np.zeros_like(tokens)
    for row, prompt in enumerate(PROMPTS):
        text = [*prompt, *np.asarray(got.tokens[row])]
        tokens[row, : len(text)], segments[row, : len(text)] = text, 1
    columns = np.array([len(prompt) - 1 for prompt in PROMPTS])[:, None] + np.arange(N)[None]
    return tokens, segments, (np.arange(len(PROMPTS))[:, None], columns)


@pytest.mark.parametrize("name", ["linear", "transformer"])
def test_equals_the_forward_pass_without_cache(name):
    head = head_of(name)
    got = generate(the_lm(), PROMPTS, head=head, max_new_tokens=N)
    tokens, segments, at = whole_texts(got)
    logits = np.asarray(the_lm().logits(tokens, segment_ids=segments), np.float64)[at]
    np.testing.assert_array_equal(got.tokens, logits.argmax(-1))
    log_probs = log_softmax(logits, axis=-1).max(-1)
    np.testing.assert_allclose(got.base_log_probs, log_probs, atol=1e-5)
    expected = calibrated_confidence(the_lm(), tokens, head, segment_ids=segments)
    np.testing.assert_allclose(got.temperature, np.asarray(expected.temperature)[at], rtol=1e-5)
    np.testing.assert_allclose(got.confidence, np.asarray(expected.confidence)[at], rtol=1e-5)
    assert np.ptp(np.asarray(got.temperature)) > 0.1


def test_stop_tokens():
    options = {"head": head_of("transformer"), "max_new_tokens": N}
    free = np.asarray(generate(the_lm(), PROMPTS, **options).tokens)
    stops = (int(free[0, 4]), int(free[2, 2]))
    got = jax.tree.map(np.asarray, generate(the_lm(), PROMPTS, stop_tokens=stops, **options))
    for row in range(len(PROMPTS)):
        ends = np.flatnonzero(np.isin(free[row], stops))
        length = ends[0] + 1 if ends.size else N
        np.testing.assert_array_equal(got.where[row], np.arange(N) < length)
        np.testing.assert_array_equal(got.tokens[row], np.where(np.arange(N) < length, free[row], -1))
        assert not got.confidence[row, length:].any()
        assert not got.base_log_probs[row, length:].any()
    assert got.where.sum() < got.where.size
    with pytest.raises(UserError, match="fit a head with pooling 'token'"):
        generate(the_lm(), PROMPTS, head=head_of("mlp", pooling="sequence"))


# --- draws ---


SAMPLING = ("top_k", "top_p", "calibrated", "num_samples", "prompt_seeds")


def draw(*, key=5, prompts=(PROMPTS[0],) * 1000, lm=None, scale=0.3, temperature=2.0, **options):
    """Two tokens a row, beside a head that has the same scale everywhere."""
    lm = lm or the_lm()
    sampling = {name: options.pop(name) for name in SAMPLING if name in options}
    sampling = Sampling(temperature=temperature, key=jax.random.key(key), **sampling)
    options = {"sampling": sampling, "max_new_tokens": 2} | options
    return jax.tree.map(np.asarray, generate(lm, prompts, head=FittedHead.constant(lm, np.log(scale)), **options))


def test_in_double_precision_of_jax():
    """Where 64-bit types are enabled, and of prompts of any dtype, the model keeps its own, and a key its draws."""
    sampling = Sampling(temperature=1.5, key=jax.random.key(3))
    options = {"max_new_tokens": 3, "head": head_of("transformer"), "sampling": sampling}
    expected = generate(the_lm(), PROMPTS, **options)
    with jax.enable_x64(True):
        got = generate(the_lm(), [np.asarray(prompt, np.uint64) for prompt in PROMPTS], **options)
    for name, x, y in zip(got._fields, got, expected, strict=True):
        assert x.dtype == y.dtype, name
        np.testing.assert_allclose(x, y, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("head", [pytest.param(False, marks=pytest.mark.slow), True])
def test_samples_of_one_prompt(head):
    """K a prompt, one after the other; what is drawn for a number does not depend on the prompts beside it."""
    lm = the_lm()
    fitted = head_of("transformer") if head else None
    options = {"max_new_tokens": 3, "stop_tokens": (), "head": fitted}

    def drawn(prompts, seeds):
        sampling = Sampling(temperature=1.5, key=jax.random.key(3), num_samples=4, prompt_seeds=seeds)
        return jax.tree.map(np.asarray, generate(lm, prompts, sampling=sampling, **options))

    together, alone = drawn(PROMPTS[:3], (7, 2, 9)), drawn(PROMPTS[2:0:-1], (9, 2))
    assert together.tokens.shape == (12, 3)
    np.testing.assert_array_equal(together.tokens[8:12], alone.tokens[:4])
    np.testing.assert_array_equal(together.tokens[4:8], alone.tokens[4:])
    assert len({tuple(row) for row in together.tokens.tolist()}) > 6
    for row, tokens in enumerate(together.tokens.tolist()):
        prompt = list(PROMPTS[row // 4])
        logits = np.asarray(lm.logits(np.array([(prompt + tokens + [0] * 20)[:20]])), np.float64)[0]
        want = [np.log(softmax(logits[len(prompt) - 1 + k])[token]) for k, token in enumerate(tokens)]
        np.testing.assert_allclose(together.base_log_probs[row], want, atol=2e-5)
    with pytest.raises(UserError, match="prompt_seeds: expected one for each of 2 prompts, got 3"):
        drawn(PROMPTS[:2], (1, 2, 3))


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"top_k": 8, "top_p": 0.9}, 1.0),
        ({"calibrated": True}, 0.3),
        ({"calibrated": True, "num_samples": 1000, "prompts": (PROMPTS[0],)}, 0.3),
    ],
    ids=["top-k-top-p", "calibrated", "one-prompt"],
)
def test_draws_follow_the_distribution(options, scale):
    got = draw(**options)
    count = len(got.tokens)
    logits = np.asarray(the_lm().logits(np.array([PROMPTS[0]])), np.float64)[0, -1]
    expected = softmax(scale * logits / 2)
    if "top_k" in options:
        # In words: the 8 largest; of those, from the largest on, until they sum to 0.9.
        order = np.argsort(-logits)
        expected[order[8:]] = 0
        expected /= expected.sum()
        nucleus = np.searchsorted(np.cumsum(expected[order]), 0.9) + 1
        assert nucleus < 8
        expected[order[nucleus:]] = 0
        expected /= expected.sum()
    drawn = np.bincount(got.tokens[:, 0], minlength=VOCAB)
    assert not drawn[expected == 0].any()
    seen = count * expected > 5
    observed = np.append(drawn[seen], drawn[~seen].sum())
    wanted = np.append(count * expected[seen], count * expected[~seen].sum())
    result = scipy.stats.chisquare(observed[wanted > 0], wanted[wanted > 0])
    print(f"chi-square {result.statistic:.1f} over {(wanted > 0).sum()} cells, p = {result.pvalue:.3f}")
    assert result.pvalue > 1e-3
    # Whatever they were drawn from, what is said of the tokens is of the whole distribution.
    token = got.tokens[:, 0]
    np.testing.assert_allclose(got.base_log_probs[:, 0], np.log(softmax(logits))[token], atol=1e-5)
    np.testing.assert_allclose(got.confidence[:, 0], softmax(0.3 * logits)[token], rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, None, None), (1.0, 5, None), (1.0, None, 0.6), (1.3, 9, 0.8), (2.0, 99, 1)],
)
def test_cuts_equal_those_of_transformers(temperature, top_k, top_p):
    torch = pytest.importorskip("torch")
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(0, 2, (6, 31)).astype(np.float32)
    theirs = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits))
    theirs = theirs if top_k is None else TopKLogitsWarper(top_k)(None, theirs)
    theirs = theirs if top_p is None else TopPLogitsWarper(top_p)(None, theirs)
    got = jax.jit(lambda: sampling_logits(jnp.asarray(logits), temperature, top_k, top_p))()
    np.testing.assert_allclose(got, theirs.numpy(), rtol=1e-6)


# --- programs and devices ---


def test_no_recompilation_on_the_second_call():
    draw(top_k=8, top_p=0.9)
    other = make_lm(seed=1, **OPTIONS)
    with compilations() as compiled:
        prompts = [[number % VOCAB] * (1 + number % 5) for number in range(1000)]
        got = draw(lm=other, prompts=prompts, key=1, top_k=8, top_p=0.5, temperature=0.7, scale=3.0, stop_tokens=(3, 4))
        assert not compiled
        jax.block_until_ready(jax.jit(lambda x: 3 * x)(1.0))
    assert compiled
    assert not got.where.all()


@pytest.mark.slow
def test_on_a_mesh():
    mesh = make_mesh((2, 2, 2))
    placed = jax.device_put(the_lm().params, param_shardings(mesh, the_lm().params))
    lm = LanguageModel.from_params(the_lm().config, placed)
    for sampling in (Sampling(), Sampling(temperature=1.0, key=jax.random.key(1), num_samples=3)):
        options = {"head": head_of("transformer"), "max_new_tokens": N, "sampling": sampling}
        expected, got = (generate(model, PROMPTS, **options) for model in (the_lm(), lm))
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        np.testing.assert_allclose(got.confidence, expected.confidence, rtol=1e-5)
    with jax.set_mesh(mesh):
        ones = np.ones((4, 8), np.int32)
        _, cache = jax.jit(extend, static_argnums=0)(lm.config, lm.params, ones, None, segment_ids=ones)
    assert cache.keys.sharding.shard_shape(cache.keys.shape) == (2, 1, 1, 8, 4)


MISTAKES = [
    *((prompts, {}, "expected a list of texts") for prompts in ([], "a text", None)),
    (["a text"], {}, "made in memory without a tokenizer"),
    ([[1], []], {}, "number 1 has no tokens"),
    ([[1], [1.5]], {}, r"number 1: expected a list of whole numbers.*got \[1.5\]"),
    ([[1, 2**64]], {}, "number 0: expected a list of whole numbers"),
    ([[1]], {"stop_tokens": 5}, "stop_tokens: expected a list of whole numbers"),
    ([[1]], {"sampling": Sampling(prompt_seeds=(2**32,))}, "prompt_seeds: expected a list of whole numbers"),
    ([[1, VOCAB]], {}, f"number 0: expected ids from 0 to {VOCAB - 1}, got {VOCAB}"),
    *(([[1]], {"stop_tokens": (2, bad)}, f"stop_tokens: expected ids .*, got {bad}") for bad in (VOCAB, -1)),
    ([[1], [1] * 64], {}, "prompts: expected fewer than 64 tokens"),
    *(([[1]] * 2, {"max_new_tokens": n}, f"expected 1 to 63 after 1 prompt tokens, got {n}") for n in (0, 64)),
]


@pytest.mark.parametrize(("prompts", "options", "message"), MISTAKES)
def test_mistakes(prompts, options, message):
    with pytest.raises(UserError, match=message):
        generate(the_lm(), prompts, **{"max_new_tokens": 5} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"temperature": bad}, "temperature: expected 0 .* to 10000") for bad in (-1.0, 1e-30, 1e5, float("nan"))),
        ({"temperature": 1.0}, "key: sampling needs one"),
        ({"top_k": 3}, "need a temperature above 0"),
        ({"top_k": 0, "temperature": 1.0}, "top_k: expected at least 1"),
        *(({"top_p": bad, "temperature": 1.0}, "top_p: expected above 0") for bad in (0.0, 1.01)),
    ],
)
def test_sampling_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
