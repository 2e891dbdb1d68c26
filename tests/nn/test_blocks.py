import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibjax.nn.blocks import Block, BlockConfig, Norm, Rope, sequence_context
from calibjax.runtime.errors import UserError

CONFIG = BlockConfig(hidden_size=12, intermediate_size=20, num_heads=4, num_kv_heads=2, head_dim=6, norm_offset=0.5)
BIASES = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
LAYER = {"norm": "layer", "norm_offset": 0.0, "activation": "gelu_new", "gated_mlp": False, "rope": None}
GPT2_LIKE = dataclasses.replace(CONFIG, num_kv_heads=4, **LAYER, **BIASES)


def make_block(config, dtype=jnp.float32, batch=2, length=7):
    random = np.random.default_rng(1)
    hidden = random.normal(size=(batch, length, config.hidden_size)).astype(dtype)

    def init(hidden):
        return Block(config).init(jax.random.key(0), hidden, sequence_context(config, jnp.arange(length)[None]))

    shapes = jax.eval_shape(init, hidden)
    return hidden, jax.tree.map(lambda leaf: random.normal(0.1, 0.3, leaf.shape).astype(np.float32), shapes)


def apply(config, params, hidden, positions=None, segment_ids=None):
    positions = np.arange(hidden.shape[1])[None] if positions is None else positions

    @jax.jit
    def run(params, hidden):
        return Block(config, hidden.dtype).apply(params, hidden, sequence_context(config, positions, segment_ids))[0]

    return run(params, hidden)


def dense_block(config, params, x):
    """The block written out in float64, one row of the batch and one head at a time."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])

    def norm(p, v):
        v = v - v.mean(-1, keepdims=True) if config.norm == "layer" else v
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + config.norm_eps) * (config.norm_offset + p["scale"])
        return v + p.get("bias", 0.0)

    def linear(p, v):
        return v @ p["kernel"] + p.get("bias", 0.0)

    def rotated(v):
        if config.rope is None:
            return v
        half = v.shape[-1] // 2
        angle = np.arange(len(v))[:, None] * config.rope.theta ** (-np.arange(half) / half)[None]
        pairs = (v[:, :half] + 1j * v[:, half:]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], -1)

    def act(v):
        if config.activation == "silu":
            return v / (1 + np.exp(-v))
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))

    out = []
    for row in np.asarray(x, np.float64):
        inner, p = norm(tree["attention_norm"], row), tree["attention"]
        q, k, v = (linear(p[name], inner) for name in "qkv")
        heads = []
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            size = config.head_dim
            mine, shared = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            scores = rotated(q[:, mine]) @ rotated(k[:, shared]).T / np.sqrt(size)
            scores[np.triu_indices(len(row), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        row = row + linear(p["o"], np.concatenate(heads, -1))
        inner, p = norm(tree["mlp_norm"], row), tree["mlp"]
        up = linear(p["up"], inner)
        out.append(row + linear(p["down"], act(linear(p["gate"], inner)) * up if config.gated_mlp else act(up)))
    return np.stack(out)


def test_the_factor_of_an_update_is_not_rounded():
    """In bfloat16 it would be 1: an update of 3 by the bias of the attention alone."""
    config = dataclasses.replace(CONFIG, output_bias=True, residual_scale=1.0038)
    hidden, params = make_block(config, jnp.bfloat16, batch=1, length=1)
    params = jax.tree.map(np.zeros_like, params)
    params["params"]["attention"]["o"]["bias"] += 3
    out = apply(config, params, np.zeros_like(hidden))
    np.testing.assert_array_equal(out, np.full(out.shape, 3 * 1.0038, jnp.bfloat16))


@pytest.mark.parametrize("config", [CONFIG, GPT2_LIKE], ids=["llama", "gpt2"])
def test_block_equals_dense_float64_keeps_dtype_and_passes_gradients(config):
    hidden, params = make_block(config)
    got = apply(config, params, hidden)
    np.testing.assert_allclose(got, dense_block(config, params, hidden), rtol=0, atol=2e-5)
    hidden, params = make_block(config, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        out = apply(config, params, hidden)
    # Outside the strict rules: under them the gradient of JAX's own attention fails in bfloat16.
    grads = jax.jit(jax.grad(lambda p: jnp.sum(apply(config, p, hidden).astype(jnp.float32) ** 2)))(params)
    assert out.dtype == jnp.bfloat16
    reference = dense_block(config, params, hidden)
    assert np.abs(np.asarray(out, np.float64) - reference).max() < 0.03 * np.abs(reference).max()
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(grad).all(), path
        # One vector added to every key moves all of a row's scores alike, and so nothing.
        assert np.abs(grad).max() > 0 or "['k']['bias']" in jax.tree_util.keystr(path), path


def test_norms_keep_their_digits():
    """A mean of a thousand deviations: E[x²] - E[x]² in float32 would be off by percents."""
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32) + 1000
    norm = Norm("layer")
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    got = jax.jit(lambda x: norm.apply(norm.init(jax.random.key(0), x), x))(x)
    np.testing.assert_allclose(got, exact, atol=2e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 5}, "even number of channels"),
        ({"activation": "xielu"}, "expected one of silu.*got 'xielu'"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1, got 0"),
        ({"rope": {"scaling": "ntk"}}, "linear, llama3, yarn, longrope, none; got 'ntk'"),
        ({"rope": {"scaling": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor < high_freq_factor"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **(change if "rope" not in change else {"rope": Rope(**change["rope"])}))
