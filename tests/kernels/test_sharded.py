"""The operator over a mesh of 8 devices: the numbers of one device, and no collective but the promised ones."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import FLOATS, assert_within, f64

from calibjax.kernels import VocabSharding, kl_divergences, linear_cross_entropy, sharded, vocab_stats
from calibjax.runtime.sharding import make_mesh

INPUTS = ("hidden", "unembedding", "bias", "scale")
WANTED = (*FLOATS, "argmax", "logit_variance", "correct")


def sharding(shape, **axes):
    return VocabSharding(make_mesh(shape), **axes)


SHARDINGS = {
    "1x1x8": lambda: sharding((1, 1, 8)),
    "2x2x2": lambda: sharding((2, 2, 2)),
    "vocabulary over two axes": lambda: sharding((2, 2, 2), tokens="data", vocab=("tensor", "fsdp")),
    "stored along D": lambda: sharding((2, 2, 2), width="fsdp"),
    "tokens alone, stored along D": lambda: sharding((2, 4, 1), vocab=(), width=("fsdp", "data")),
}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that W stored along D is gathered in several pieces."""
    monkeypatch.setattr(sharded, "_GATHERED_BYTES", 2000)
    monkeypatch.setattr(sharded, "_NARROW", 8)


def problem(vocab=800, tokens=64, width=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden, unembedding = rng.normal(size=(tokens, width)), rng.normal(size=(vocab, width)) / 2
    bias, scale, targets = rng.normal(size=vocab), np.linspace(0.4, 1.6, tokens), rng.integers(0, vocab, tokens)
    targets[::7] = -100
    if vocab > 800:  # beyond what divides
        unembedding[802], targets[1:4] = hidden[5], range(800, 803)
    model = (jnp.asarray(x, dtype) for x in (hidden, unembedding))
    return *model, *(jnp.asarray(x, jnp.float32) for x in (bias, scale)), jnp.asarray(targets, jnp.int32)


@functools.partial(jax.jit, static_argnames=("sharding", "statistics", "options"))
def evaluate(sharding, hidden, unembedding, bias, scale, targets, statistics=WANTED, options=()):
    """All statistics, and the gradients in (hidden, unembedding, bias, scale) for a cotangent of every one."""

    def forward(h, w, b, s):
        got = vocab_stats(
            h, w, targets, bias=b, scale=s, sharding=sharding, statistics=statistics, chunk_size=100, **dict(options)
        )
        return {name: getattr(got, name) for name in FLOATS if name in statistics}, got

    value, pull, got = jax.vjp(forward, hidden, unembedding, bias, scale, has_aux=True)
    return got, pull({name: jnp.linspace(-1.0, 1.5, len(scale)) for name in value})


def assert_same(got, want, tolerance):
    """Statistics and gradients agree within `tolerance` of the size of each.

    The variance is the difference E[(z − max)²] − E[z − max]²: they size its error, also in the scale's gradient.
    """
    stats = want[0]
    size = {name: np.abs(f64(x)).max() for name, x in stats._asdict().items() if x is not None}
    size |= {f"d_{name}": np.abs(f64(x)).max() for name, x in zip(INPUTS, want[1], strict=True)}
    terms = (f64(stats.logit_variance) + f64(stats.max_logit - stats.expected_logit) ** 2).max()
    size |= {name: max(size[name], terms) for name in ("logit_variance", "d_scale")}
    for name, x, y in zip(got[0]._fields, got[0], want[0], strict=True):
        if y is not None and jnp.issubdtype(y.dtype, jnp.floating):
            assert_within(x, y, tolerance * size[name], name)
        elif y is not None:
            np.testing.assert_array_equal(x, y, name)
    for name, x, y in zip(INPUTS, got[1], want[1], strict=True):
        assert x.dtype == y.dtype, name
        assert_within(x, y, tolerance * size["d_" + name], "d_" + name)


@functools.cache
def on_one_device(sizes, options):
    """Inputs of these sizes, with their statistics and gradients on one device."""
    inputs = problem(*sizes)
    return inputs, evaluate(None, *inputs, options=options)


@pytest.mark.parametrize("name", ["2x2x2", "stored along D"])
def test_a_target_before_a_shard_is_not_its_last_row(name):
    """The gradient in hidden states alone adds rows of W at the targets; relative to a shard these may be −1."""
    hidden, unembedding, bias, scale, targets = problem()
    targets = targets.at[1:8].set(jnp.arange(100, 800, 100) - 1)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(sharding, hidden):
        def loss(h):
            options = {"bias": bias, "scale": scale, "sharding": sharding, "chunk_size": 100}
            stats = vocab_stats(h, unembedding, targets, statistics=("log_normalizer", "target_logit"), **options)
            return -stats.log_prob().sum()

        return jax.grad(loss)(hidden)

    want = gradient(None, hidden)
    assert_within(gradient(SHARDINGS[name](), hidden), want, 1e-6 * np.abs(f64(want)).max(), "d_hidden")


CASES = [
    # Name of the sharding, sizes, options; 803 rows and 61 tokens do not divide.
    ("vocabulary over two axes", (), (("softcap", 3.0),)),
    ("tokens alone, stored along D", (), (("softcap", 3.0),)),
    ("2x2x2", (), (("save_logits", True),)),
    ("stored along D", (), (("save_logits", True),)),
    ("2x2x2", (803, 61), ()),
    ("stored along D", (803, 61), ()),
    slow("1x1x8", (803, 61), ()),
]


@pytest.mark.parametrize(("name", "sizes", "options"), CASES)
def test_equals_one_device(name, sizes, options):
    """Targets and a largest logit lie in the rows that are left, too; saved logits change only the cost."""
    inputs, want = on_one_device(sizes, tuple(x for x in options if x[0] != "save_logits"))
    if sizes:
        assert want[0].argmax[5] == 802
    assert_same(evaluate(SHARDINGS[name](), *inputs, options=options), want, 1e-6)


def test_bfloat16():
    inputs = problem(dtype=jnp.bfloat16)
    assert_same(evaluate(SHARDINGS["2x2x2"](), *inputs), evaluate(None, *inputs), 2.0**-7)


@pytest.mark.parametrize("name", ["stored along D", slow("2x2x2")])
def test_masked_tokens_and_removed_entries(name):
    """NaN in masked tokens reaches nothing; a whole shard of the vocabulary may have no mass; ties go to the lowest."""
    hidden, unembedding, bias, scale, targets = (np.array(x) for x in problem())
    unembedding[700] = unembedding[450]
    bias[:400], bias[[450, 700]] = -np.inf, 60.0
    targets = np.where(targets >= 0, 400 + targets // 2, targets)
    names = tuple(name for name in WANTED if name != "mean_logit")  # −inf
    run = functools.partial(evaluate, SHARDINGS[name](), statistics=names)
    clean = run(hidden, unembedding, bias, scale, targets)
    assert_same(clean, evaluate(None, hidden, unembedding, bias, scale, targets, statistics=names), 1e-6)
    masked = targets < 0
    np.testing.assert_array_equal(clean[0].argmax, np.where(masked, -1, 450))
    dirty = run(np.where(masked[:, None], np.float32(np.nan), hidden), unembedding, bias, scale, targets)
    chex.assert_trees_all_equal(dirty, clean)
    np.testing.assert_array_equal(dirty[1][0][masked], 0.0)


def compiled(split, argnums, statistics=("log_normalizer", "target_logit", "max_logit")):
    """(kind, shapes) of every collective, and the number of products, of the program for sharded arguments."""

    def loss(h, w, b, s, y):
        got = vocab_stats(h, w, y, bias=b, scale=s, sharding=split, statistics=statistics, chunk_size=1000)
        return got if argnums is None else jnp.sum(jnp.sin(got.log_prob()) + got.max_logit)

    specs = (P(split.tokens), P(split.vocab, split.width), P(split.vocab), P(split.tokens), P(split.tokens))
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(split.mesh, spec))
        for x, spec in zip(problem(), specs, strict=True)
    ]
    text = jax.jit(loss if argnums is None else jax.grad(loss, argnums)).lower(*arguments).compile().as_text()
    assert "custom-call" not in text, "a product could hide in a library call"
    kinds = r"= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    collectives_of_step = [
        (kind, shape)
        for shapes, kind in re.findall(kinds, text)
        for shape in re.findall(r"[a-z0-9]+\[[0-9,]*\]", shapes)
    ]
    return sorted(collectives_of_step), len(re.findall(r" dot\(", text))


@pytest.mark.parametrize("name", ["2x2x2", slow("stored along D"), slow("vocabulary over two axes")])
def test_second_derivatives(name):
    """Products of the Hessian with a direction are those of the dense formula, differentiated by JAX."""
    *inputs, targets = problem(vocab=83, tokens=16)
    direction = [jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in inputs]

    def dense(h, w, b, s):
        log_probs = jax.nn.log_softmax(s[:, None] * (h @ w.T + b[None]), axis=-1)
        target_log_probs = jnp.take_along_axis(log_probs, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
        return -jnp.sum(jnp.where(targets >= 0, target_log_probs, 0.0))

    def ours(h, w, b, s):
        return linear_cross_entropy(h, w, targets, bias=b, scale=s, sharding=SHARDINGS[name](), reduction="sum")

    def product(loss):
        def along(*inputs):
            slopes = jax.grad(loss, (0, 1, 2, 3))(*inputs)
            return sum(jnp.vdot(x, y) for x, y in zip(direction, slopes, strict=True))

        return jax.jit(jax.grad(along, (0, 1, 2, 3)))(*inputs)

    for part, got, want in zip(INPUTS, product(ours), product(dense), strict=True):
        assert_within(got, want, 1e-5 * np.abs(want).max(), part)


@pytest.mark.parametrize("name", ["2x2x2", slow("1x1x8"), slow("vocabulary over two axes")])
def test_collectives(name):
    """One small all-gather of statistics, and one of argmax; [N, D] only where hidden is differentiated; W never."""
    split = SHARDINGS[name]()
    shards = split.count(split.vocab)
    n, v = 64 // split.count(split.tokens), 800 // shards

    def statistics(k):
        return ("all-gather", f"f32[{shards},{k},{n}]")

    argmax = ("all-gather", f"s32[{shards},{n}]")

    d_hidden, d_weights, d_bias = (("all-reduce", f"f32[{shape}]") for shape in (f"{n},16", f"{v},16", f"{v}"))
    over_tokens = [d_weights, d_bias] if split.count(split.tokens) > 1 else []
    assert compiled(split, None) == ([statistics(3)], 1)
    # The scale alone: one number a token more for E_p[z], and no product more.
    assert compiled(split, (3,)) == ([statistics(4)], 1)
    # W frozen: the rows of the forward pass are summed with the closed forms of the backward pass.
    assert compiled(split, (0,)) == (sorted([statistics(3), argmax, d_hidden]), 2)
    # XLA keeps the logits of the one chunk: 3 products, not 4.
    assert compiled(split, (0, 1, 2, 3)) == (sorted([statistics(4), argmax, d_hidden, *over_tokens]), 3)


def test_collectives_of_an_unembedding_stored_along_width():
    """Gathered piece by piece: the first before the loop, the others in it. dW is scattered back in pieces."""
    split = SHARDINGS["stored along D"]()
    moved, products = compiled(split, None)
    piece = ("all-gather", "f32[25,16]")  # of 400 local rows, 2000 bytes
    assert moved == sorted([piece, piece, ("all-gather", "f32[2,3,16]")])
    assert products == 1
    moved, _ = compiled(split, (0, 1))
    assert moved.count(piece) == 3  # the first one once for both passes
    rest = [collective for collective in moved if collective != piece]
    assert rest == [
        ("all-gather", "f32[2,3,16]"),
        ("all-gather", "s32[2,16]"),
        ("all-reduce", "f32[16,16]"),
        ("all-reduce", "f32[25,8]"),
        ("reduce-scatter", "f32[25,8]"),
    ]


def test_compiles_once():
    """Also for another object that is equal, and outside jit."""
    hidden, unembedding, *_, targets = problem()
    # Its own function: every jit of the same one counts in one cache.
    run = jax.jit(lambda *args, **options: vocab_stats(*args, **options), static_argnames="sharding")
    run(hidden, unembedding, targets, sharding=sharding((2, 2, 2)))
    vocab_stats(hidden, unembedding, targets, sharding=sharding((2, 2, 2)))
    size = sharded.Sharded.forward._cache_size()
    jitted = run(hidden + 1, unembedding, targets, sharding=sharding((2, 2, 2)))
    again = vocab_stats(hidden + 1, unembedding, targets, sharding=sharding((2, 2, 2)))
    assert (run._cache_size(), sharded.Sharded.forward._cache_size()) == (1, size)
    assert_within(again.log_normalizer, jitted.log_normalizer, 1e-5)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tokens": ("data", "batch")}, "no axis 'batch'"),
        ({"vocab": ("tensor", "fsdp")}, "axis 'fsdp' used twice"),
        ({"width": "tensor"}, "width axis 'tensor' not among the tokens'"),
        ({"width": ("fsdp", "fsdp")}, "width axis 'fsdp' used twice"),
    ],
)
def test_errors_teach(axes, message):
    with pytest.raises(ValueError, match=message):
        sharding((2, 2, 2), **axes)


@functools.partial(jax.jit, static_argnums=0)
def several(split, hidden, unembedding, bias, scale, targets):
    """Value and gradients of an operator of each kind, and some statistics."""

    def loss(h, w, s):
        got = vocab_stats(h, w, targets, bias=bias, scale=s, sharding=split, chunk_size=200)
        mean = linear_cross_entropy(h, w, targets, bias=bias, scale=s, sharding=split, reduction="mean")
        lse = got.log_normalizer
        kl = kl_divergences(
            h, h[None], w, log_normalizer=lse, other_log_normalizers=lse[None], bias=bias, sharding=split
        )
        return mean + jnp.mean(got.entropy()), (got.argmax, got.expected_logit, kl)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, unembedding, scale)


@pytest.mark.parametrize("placed", [True, False])
def test_axes_of_type_explicit(placed):
    """The numbers of one device, and results and gradients sharded as the arrays of the user are."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    hidden, unembedding, bias, scale, targets = problem(vocab=803, tokens=64)
    hidden, targets, scale = (x.reshape(4, 16, *x.shape[1:]) for x in (hidden, targets, scale))
    if placed:
        rows = NamedSharding(mesh, P(("data", "fsdp")))
        hidden, targets, scale = (jax.device_put(x, rows) for x in (hidden, targets, scale))

    inputs = hidden, unembedding, bias, scale, targets
    got = several(VocabSharding(mesh), *inputs)
    want = several(None, *(np.asarray(x) for x in inputs))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_within(x, y, 1e-5 * (1 + np.abs(y).max()))
    if placed:
        for x in (got[0][1][0], got[1][0], got[1][2]):
            assert tuple(x.sharding.spec)[:2] == (("data", "fsdp"), None)


def test_shapes_that_cannot_be_split():
    assert vocab_stats(jnp.ones((0, 4)), jnp.ones((9, 4)), sharding=sharding((2, 2, 2))).max_logit.shape == (0,)
    with pytest.raises(ValueError, match="V = 5 rows for 8 shards"):
        vocab_stats(jnp.ones((8, 4)), jnp.ones((5, 4)), sharding=sharding((1, 1, 8)))
    with pytest.raises(ValueError, match="D = 3 does not divide into the 2 shards"):
        vocab_stats(jnp.ones((8, 3)), jnp.ones((8, 3)), sharding=sharding((2, 2, 2), width="fsdp"))
    with pytest.raises(NotImplementedError, match="sharding"):
        vocab_stats(jnp.ones((8, 4)), jnp.ones((8, 4)), implementation="reference", sharding=sharding((2, 2, 2)))
