"""Evaluation over a mesh: every shape finds the figures of one device, and neither W nor logits are moved."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import make_lm, make_windows, ragged

from calibjax.eval.directions import choose_sets, evaluate_edit, find_directions, null_space
from calibjax.eval.layers import evaluate_layers, make_readout
from calibjax.eval.neurons import entropy_neurons
from calibjax.eval.scoring import Continuation, Scorer
from calibjax.eval.tokens import evaluate_tokens, identity_head
from calibjax.heads import FittedHead, HeadConfig
from calibjax.sharding import make_mesh, param_shardings

SHAPES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]
# 37 and 3 rows of the unembedding divide into no number of shards; 16 columns do.
LM = make_lm(num_layers=2, vocab_size=37, unembedding_bias=True, logit_softcap=8.0)
WINDOWS = ragged(make_windows(20, vocab_size=37))
LETTERS = (7, 2, 11)
HEAD = HeadConfig(kind="mlp", hidden_size=16, features=("hidden_states", "max_logit"), identity_start=False)
HEADS = {
    "as it is": identity_head(LM),
    "mlp": FittedHead(HEAD, HEAD.init(jax.random.key(3)), 0.1, LM.fingerprint),
}


def placed(mesh):
    return dataclasses.replace(LM, params=jax.device_put(LM.params, param_shardings(mesh, LM.params)))


def figures(lm):
    """Everything that evaluation finds out of a model, on the mesh that is set: name -> array."""
    read, letters = make_readout(lm), make_readout(lm, LETTERS)
    asked = WINDOWS._replace(targets=np.asarray(LETTERS, np.int32)[WINDOWS.targets % 3])
    outputs = evaluate_layers(lm, WINDOWS, read, batch_size=8, quiet=True)
    sets = choose_sets("confident", outputs.confidence[-1], outputs.correct[-1])
    along = find_directions(lm, WINDOWS, read, sets, batch_size=8, quiet=True)
    tokens = evaluate_tokens(lm, WINDOWS, HEADS, batch_size=8, quiet=True)
    parts = {
        "layers": outputs,
        "layers, letters": evaluate_layers(lm, asked, letters, batch_size=8, quiet=True),
        "direction": along._replace(counts=np.array(along.counts)),
        "edit": evaluate_edit(lm, WINDOWS, read, 0.3 * along.vectors, batch_size=8),
        **{f"tokens, {name}": result.sums for name, result in tokens.items()},
    }
    found = {f"{part} {name}": x for part, values in parts.items() for name, x in values._asdict().items()}
    space = null_space(lm, energy=0.2)
    found |= {"null space": space.share(np.eye(16)), "neurons": np.array(entropy_neurons(lm, space, layers=2, count=2))}
    rng = np.random.default_rng(0)
    # All are read in one width: one program. The batch is made a multiple of 8 rows where there are as many devices.
    continued = [Continuation(*(rng.integers(0, 37, n).tolist() for n in (18, 1 + count % 4))) for count in range(20)]
    scores = Scorer(lm, HEADS, batch_size=6).score(continued)
    found["log-probabilities"] = np.concatenate([score.log_probs for score in scores], axis=1)
    found["greedy"] = np.concatenate([score.greedy for score in scores])
    return found


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
        found = figures(placed(mesh))
    worst = {}
    for name, expected in alone.items():
        if expected.dtype.kind in "bi":
            np.testing.assert_array_equal(found[name], expected, err_msg=name)
        else:
            scale = max(1.0, np.abs(expected).max())
            worst[name] = np.abs(found[name].astype(np.float64) - expected).max() / scale
    print({name: f"{error:.1e}" for name, error in sorted(worst.items(), key=lambda x: -x[1])[:5]})
    assert max(worst.values()) < 1e-5, max(worst, key=worst.get)
