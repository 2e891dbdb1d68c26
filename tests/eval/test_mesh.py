"""Evaluation over a mesh: every shape finds the figures of one device, and neither W nor logits are moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from tiny import make_lm, make_sequences, ragged, random_head, silent

from calibjax.eval.layers import directions
from calibjax.eval.layers.layers import _layers_of_batch, layer_outputs, make_readout, scored_batch
from calibjax.eval.tasks import scoring
from calibjax.eval.tasks.scoring import Continuation, Scorer, _token_scores
from calibjax.eval.tokens import evaluate_tokens
from calibjax.heads import FittedHead
from calibjax.kernels import VocabSharding, kl_divergences, sharded
from calibjax.models.frozen import frozen_arrays
from calibjax.models.own import place_model
from calibjax.runtime.sharding import batch_sharding, make_mesh, place_rows

SHAPES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]
# 37 and 3 rows of the unembedding divide into no number of shards; 16 columns do.
LM = make_lm(num_layers=2, vocab_size=37, unembedding_bias=True, logit_softcap=8.0)
SEQUENCES = ragged(make_sequences(20, vocab_size=37))
LETTERS = (7, 2, 11)
HEADS = {"base": FittedHead.constant(LM), "mlp": random_head(LM, "mlp", ("hidden_states", "max_logit"), log_factor=0.1)}


def figures(lm):
    """Everything that evaluation finds out of a model, on the mesh that is set: name -> array."""
    read, letters = make_readout(lm), make_readout(lm, LETTERS)
    lettered = SEQUENCES._replace(targets=np.asarray(LETTERS, np.int32)[SEQUENCES.targets % 3])
    outputs = layer_outputs(lm, SEQUENCES, read, batch_size=8, context=silent())
    sets = directions.choose_sets("confident", outputs.confidence[-1], outputs.correct[-1])
    along = directions.find_directions(lm, SEQUENCES, read, sets, batch_size=8, context=silent())
    (tokens,) = evaluate_tokens(lm, SEQUENCES, {"mlp": HEADS["mlp"]}, batch_size=8, context=silent()).values()
    parts = {
        "layers": outputs,
        "layers, letters": layer_outputs(lm, lettered, letters, batch_size=8, context=silent()),
        "direction": along._replace(counts=np.array(along.counts)),
        "edit": directions.evaluate_edit(lm, SEQUENCES, read, 0.3 * along.vectors, batch_size=8)[0],
        "tokens": tokens.sums,
    }
    got = {f"{part} {name}": x for part, values in parts.items() for name, x in values._asdict().items()}
    space = directions.null_space(lm, energy=0.2)
    got |= {
        "null space": space.fraction(np.eye(16)),
        "neurons": np.array(directions.entropy_neurons(lm, space, layers=2, count=2)),
    }
    rng = np.random.default_rng(0)
    # All are read in one width: one program. The batch is made a multiple of 8 rows where there are as many devices.
    continued = [Continuation(*(rng.integers(0, 37, n).tolist() for n in (18, 1 + count % 4))) for count in range(20)]
    beginning = rng.integers(0, 37, 9).tolist()
    continued += [Continuation([*beginning, *rng.integers(0, 37, 4).tolist()], [1 + count]) for count in range(12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_MIN_PREFIX", 8)
        scores = Scorer(lm, HEADS, batch_size=6).score(continued)
    got["log-probabilities"] = np.concatenate([score.log_probs for score in scores], axis=1)
    got["greedy"] = np.concatenate([score.greedy for score in scores])
    return got


@pytest.fixture(scope="module")
def alone():
    """Those of one device; from here on XLA takes fewer pains: nearly all time goes into compiling."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield figures(LM)
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_figures_are_those_of_one_device(alone, shape):
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        got = figures(place_model(LM, mesh))
    worst = {}
    for name, expected in alone.items():
        if expected.dtype.kind in "bi":
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
        else:
            scale = max(1.0, np.abs(expected).max())
            worst[name] = np.abs(got[name].astype(np.float64) - expected).max() / scale
    print({name: f"{error:.1e}" for name, error in sorted(worst.items(), key=lambda x: -x[1])[:5]})
    assert max(worst.values()) < 1e-5, max(worst, key=worst.get)


def test_divergence_of_shards():
    """A vocabulary that does not divide, and as many tokens; against float64."""
    rng = np.random.default_rng(0)
    states, weights, bias = (rng.normal(size=shape) for shape in ((3, 5, 16), (300, 16), (300,)))
    z = 4 * np.tanh((states @ weights.T + bias) / 4)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    expected = (np.exp(log_p[:1]) * (log_p[:1] - log_p[1:])).sum(axis=-1)
    normalizer = jnp.asarray(np.log(np.exp(z).sum(axis=-1)), jnp.float32)
    states, weights, bias = (jnp.asarray(x, jnp.float32) for x in (states, weights, bias))
    got = jax.jit(kl_divergences, static_argnames=("softcap", "sharding"))(
        *(states[0], states[1:], weights),
        log_normalizer=normalizer[0],
        other_log_normalizers=normalizer[1:],
        bias=bias,
        softcap=4.0,
        sharding=VocabSharding(make_mesh((2, 2, 2)), width=("fsdp",)),
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)
    closed = jnp.where(jnp.arange(300) < 290, bias, -jnp.inf)  # options of probability 0
    normal = jax.nn.logsumexp(states @ weights.T + closed[None, None], axis=-1)
    options = {"log_normalizer": normal[0], "other_log_normalizers": normal[1:]}
    got = kl_divergences(states[0], states[1:], weights, bias=closed, **options)
    alone = kl_divergences(states[0], states[1:], weights[:290], bias=bias[:290], **options)
    np.testing.assert_allclose(got, alone, rtol=1e-5)


@pytest.mark.slow
def test_neither_the_unembedding_nor_logits_are_gathered(monkeypatch):
    """Nor are the hidden states of a batch, where scores are read off some of them."""
    vocab, tokens = 1024, 8 * 12
    monkeypatch.setattr(sharded, "_GATHERED_BYTES", 4 * 128 * 16)
    mesh = make_mesh((2, 2, 2))
    lm = place_model(make_lm(vocab_size=vocab, num_layers=2), mesh)
    with jax.set_mesh(mesh):
        read, frozen = make_readout(lm), frozen_arrays(lm)
        batch = place_rows(mesh, scored_batch(make_sequences(8, vocab_size=vocab, length=12), read))
        hidden = jax.ShapeDtypeStruct((8, 12, 16), jnp.float32, sharding=batch_sharding(mesh))
        places, edit = np.zeros((16, 3), np.int32), np.zeros((2, 16), np.float32)
        head = HEADS["mlp"]
        program, fitted = scoring._Program(lm.config, (head.config,), lm.dtype), [head.arrays]
        programs = {
            "layers": _layers_of_batch.lower(lm.config, lm.dtype, lm.params, read, batch),
            "edit": directions._edited_batch.lower(lm.config, lm.dtype, 15, "right", lm.params, read, edit, batch),
            "scores": _token_scores.lower(program, 0, fitted, frozen, hidden, None, places),
        }
        for name, lowered in programs.items():
            got = sorted(set(collectives(lowered.compile().as_text())), key=lambda each: -each[1])
            print(name, got[:5])
            assert ("all-gather", 128 * 16) in got, "W stored in columns is gathered, in pieces"
            assert max(size for _, size in got) < min(vocab * 16, tokens * vocab) // 4
            if name == "scores":
                assert max(size for kind, size in got if size != 128 * 16) < tokens * 16
