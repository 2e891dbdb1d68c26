"""Training over a mesh: every shape finds what one device does, by the collectives that are meant, and no larger."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from tiny import answered, logged, make_lm, make_sequences, ragged, silent

from calibjax import fit_ats
from calibjax.kernels import sharded
from calibjax.models.frozen import frozen_arrays
from calibjax.runtime.sharding import make_mesh, param_shardings, place_rows
from calibjax.train import AtsOptions, OptimizerConfig, create_state, make_train_step
from calibjax.train.curves import frozen_batch
from calibjax.train.lhts import LhtsOptions, fit_lhts
from calibjax.train.sft import SftObjective, SftOptions, fit_sft

SHAPES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]
CONDITIONS = {"batch_size": 8, "learning_rate": 1e-2, "remat": "none", "epochs": 2, "validation_fraction": 0.2}
CONDITIONS |= {"temperatures": (0.5, 0.9), "quantiles": 2}
LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(60)))


def fit(directory, mesh=None, **options):
    quick = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2, "loss": "joint", "folds": 2}
    fitted = fit_ats(*(LM, SEQUENCES, AtsOptions(**quick | options), silent(directory, mesh=mesh)))
    (log,) = directory.glob("*-joint-1/train.jsonl")
    return fitted, logged(log.parent)


OPTIONS = {
    "mlp": {"head_kind": "mlp", "features": ("hidden_states", "argmax_embedding", "max_logit", "logit_statistics")},
    "transformer": {"head_kind": "transformer"},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return {name: fit(tmp_path_factory.mktemp(name), **options) for name, options in OPTIONS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"), [*((shape, "mlp") for shape in SHAPES), ((2, 2, 2), "transformer")], ids=str
)
def test_a_head_is_that_of_one_device(alone, shape, name, tmp_path):
    """The loss of every step that is logged, the head, the refit and the single temperature."""
    (one, expected), (many, got) = alone[name], fit(tmp_path, make_mesh(shape), **OPTIONS[name])
    error = np.abs(got / expected - 1).max()
    print(f"losses: {error:.1e}")
    assert error < 1e-5
    for path, leaf in jax.tree_util.tree_leaves_with_path(one.head.params):
        other = many.head.params
        for key in path:
            other = other[key.key]
        error = np.abs(other - leaf).max() / np.abs(leaf).max()
        print(f"{jax.tree_util.keystr(path)}: {error:.1e}")
        # Adam divides small gradients, and their rounding errors, by their size; the slope of an interpolated curve has
        # the rounding of its nodes divided by their distance.
        assert error < 1e-4
    assert abs(many.head.log_factor - one.head.log_factor) < 1e-5
    assert abs(many.report["temperature"] / one.report["temperature"] - 1) < 1e-5


TUNED = {
    "sft": (fit_sft, SftOptions(epochs=2, batch_size=16, learning_rate=1e-2, remat="none"), SHAPES),
    "adapters": (fit_sft, SftOptions(epochs=2, batch_size=16, learning_rate=1e-2, lora_rank=2), SHAPES[::3]),
    "lhts": (fit_lhts, LhtsOptions(**CONDITIONS), SHAPES[::3]),
    "partition": (functools.partial(fit_lhts, method="partition"), LhtsOptions(**CONDITIONS), SHAPES[::3]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_model_is_that_of_one_device(tmp_path, name):
    tune, options, shapes = TUNED[name]
    lm, sequences = make_lm(num_layers=2), ragged(make_sequences(48))
    one = tune(lm, sequences, options, context=silent(tmp_path / "one"))
    for shape in shapes:
        directory = tmp_path / "x".join(map(str, shape))
        many = tune(lm, sequences, options, context=silent(directory, mesh=make_mesh(shape)))
        error = np.abs(logged(directory) / logged(tmp_path / "one") - 1).max()
        print(f"{shape}: {error:.1e}")
        assert error < 1e-5
        for a, b in zip(jax.tree.leaves(many.params), jax.tree.leaves(one.params), strict=True):
            np.testing.assert_allclose(jax.device_get(a), b, atol=1e-3 * float(jnp.abs(b).max()))
        if name == "sft":
            spec = many.params["layers"]["mlp"]["up"]["kernel"].sharding.shard_shape((2, 16, 20))
            assert spec == (2, 16 // shape[1], 20 if shape[2] == 8 else 20 // shape[2])  # 8 does not divide 20


VOCAB, WIDTH = 1024, 16  # 96 tokens: [tokens, V] is larger than the unembedding, and nothing else comes near it


def collectives_of_step(objective, params, frozen, mesh):
    """Of the compiled train step."""
    optimizer = OptimizerConfig().build(10)
    sequences = make_sequences(8, vocab_size=VOCAB, length=12)
    state = create_state(params, optimizer)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, param_shardings(mesh, state))
        hyper = {"alpha": jnp.float32(1)}
        step = make_train_step(objective, optimizer)
        return collectives(step.lower(state, frozen, place_rows(mesh, sequences.arrays()), hyper).compile().as_text())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("ats", (2, 2, 2)),
        *(pytest.param("ats", shape, marks=pytest.mark.slow) for shape in SHAPES[:3]),
        *(pytest.param("sft", shape, marks=pytest.mark.slow) for shape in SHAPES),
    ],
    ids=str,
)
def test_neither_the_unembedding_nor_logits_are_gathered(kind, shape, monkeypatch):
    """Moved are statistics of the vocabulary's shards, W in pieces where it is stored apart, and gradients."""
    monkeypatch.setattr(sharded, "_GATHERED_BYTES", 4 * 128 * WIDTH)
    lm, mesh = make_lm(vocab_size=VOCAB), make_mesh(shape)
    params = jax.device_put(lm.params, param_shardings(mesh, lm.params))
    if kind == "ats":
        features = ("hidden_states", "argmax_embedding")
        frozen = frozen_arrays(lm)._replace(params=params, unembedding=params["unembedding"])
        batch = place_rows(mesh, make_sequences(8, vocab_size=VOCAB, length=12).arrays())
        with jax.set_mesh(mesh):
            program = jax.jit(frozen_batch, static_argnums=(0, 1, 2, 3))
            got = collectives(program.lower(lm.config, lm.dtype, features, (), frozen, batch).compile().as_text())
    else:
        objective = SftObjective(model=lm.config)
        got = collectives_of_step(objective, params, None, mesh)
    print(sorted(set(got)))
    whole, piece = VOCAB * WIDTH, 128 * WIDTH
    gathered = {size for name, size in got if name == "all-gather"}
    assert kind == "ats" or "all-reduce" in {name for name, _ in got}, "gradients are summed"
    # The curves of a block of tokens are gathered from the shards: larger than this small unembedding.
    assert kind == "ats" or max(gathered, default=0) < whole // 4
    assert whole not in gathered
    assert (piece in gathered) == (shape[1] > 1), "W stored in columns is gathered, in pieces"
    if kind == "sft":
        assert max(size for _, size in got) <= whole, "the gradient of W, and no logits"
