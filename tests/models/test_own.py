"""A model of one's own, as a function or as arrays, gives what the same model gives as a `LanguageModel`."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import answered, make_lm, make_sequences, ragged, silent

import calibjax
from calibjax.models import decoder
from calibjax.train import options

LM = make_lm(logit_softcap=6.0, unembedding_bias=True)
SEQUENCES = answered(LM, ragged(make_sequences(40)))
FIT, HELD_OUT = calibjax.split_sequences(SEQUENCES, 0.6)
QUICK = calibjax.AtsOptions(
    loss="cross-entropy", head_kind="linear", features=("logit_statistics",), refit_temperature=False
)
READS = calibjax.AtsOptions(features=("argmax_embedding",))


def apply_hidden(params, tokens, segment_ids, positions):
    return decoder.hidden_states(LM.config, params, tokens, segment_ids=segment_ids, positions=positions)


def apply_logits(params, tokens, *, segment_ids, positions):
    return decoder.logits(LM.config, params, tokens, segment_ids=segment_ids, positions=positions)


def as_function():
    softcap, bias = LM.config.logit_softcap, LM.unembedding_bias
    return calibjax.from_function(apply_hidden, LM.params, LM.unembedding, bias=bias, softcap=softcap)


def as_logits():
    return calibjax.from_function(apply_logits, LM.params)


def figures(lm, fit, held_out):
    fitted = calibjax.fit_ats(lm, fit, QUICK, silent())
    return fitted, calibjax.evaluate(lm, held_out, fitted.heads, context=silent()).document["methods"]


@pytest.fixture(scope="module")
def want():
    return figures(LM, FIT, HELD_OUT)


def from_arrays(of, sequences):
    unembedding = {} if of == LM.logits else {"unembedding": LM.unembedding}
    options = {"bias": LM.unembedding_bias, "softcap": LM.config.logit_softcap} if unembedding else {}
    arrays = of(sequences), sequences.targets, *unembedding.values()
    return calibjax.from_arrays(*arrays, where=sequences.where, **options)


@pytest.mark.parametrize("form", ["function", "logits", "arrays", "arrays of logits"])
def test_every_form_of_a_model(want, form):
    if form in ("function", "logits"):
        lm, fit, held_out = as_function() if form == "function" else as_logits(), FIT, HELD_OUT
    else:
        compute = LM.hidden_states if form == "arrays" else LM.logits
        (lm, fit), (other, held_out) = (from_arrays(compute, part) for part in (FIT, HELD_OUT))
        assert other.fingerprint == lm.fingerprint
        head = calibjax.fit_ats(lm, fit, QUICK, silent()).head
        evaluated = calibjax.evaluate(other, held_out, head, context=silent()).document["methods"]["head"]
        np.testing.assert_allclose(evaluated["nll"], want[1]["ats"]["nll"], rtol=1e-4)
        lm, fit, held_out = other, held_out, held_out
    fitted, rows = figures(lm, fit, held_out)
    np.testing.assert_allclose(rows["uncalibrated"]["nll"], want[1]["uncalibrated"]["nll"], rtol=1e-5)
    np.testing.assert_allclose(rows["uncalibrated"]["ece"]["value"], want[1]["uncalibrated"]["ece"]["value"], atol=1e-5)
    if fit is FIT:
        np.testing.assert_allclose(fitted.report["temperature"], want[0].report["temperature"], rtol=1e-4)
        for name in ("temperature", "ats"):
            np.testing.assert_allclose(rows[name]["nll"], want[1][name]["nll"], rtol=1e-4)
        got = calibjax.calibrated_confidence(lm, HELD_OUT, fitted.head)
        expected = calibjax.calibrated_confidence(LM, HELD_OUT, want[0].head)
        np.testing.assert_array_equal(got.argmax, expected.argmax)
        np.testing.assert_allclose(got.confidence, expected.confidence, atol=1e-3)  # slopes are solved to 1e-4 of NLL


def test_rows_of_predictions():
    """`[N, D]`: each prediction stands alone, the last sequence is padded, and none is lost."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(150, 7)).astype(np.float32)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    row = np.arange(150)
    lm, data = calibjax.from_arrays(3 * logits, np.where(row == 4, -100, labels), where=row != 3)
    assert data.tokens.shape == (3, 64)
    assert data.where.sum() == 148
    assert (data.positions == 0).all()
    fitted = calibjax.fit_ats(lm, data, calibjax.AtsOptions(head_kind="constant", loss="cross-entropy"), silent())
    want = calibjax.recalibrate.METHODS["temperature"].fit(
        calibjax.recalibrate.Predictions(logits=3 * logits, labels=labels), (row != 3) & (row != 4)
    )
    np.testing.assert_allclose(np.log(fitted.report["temperature"]), -float(want.log_scale), atol=1e-4)


def test_logits_that_are_not_finite():
    logits = np.random.default_rng(0).normal(size=(130, 5)) + np.array([0, 0, 0, 0, -np.inf])
    with pytest.raises(ValueError, match="features: expected finite"):
        calibjax.fit_ats(*calibjax.from_arrays(logits, np.arange(130) % 4), context=silent())
    with pytest.raises(ValueError, match="uncalibrated: the likelihood of some tokens is NaN"):
        calibjax.evaluate(*calibjax.from_arrays(np.full_like(logits, np.nan), np.arange(130) % 4), context=silent())


def test_a_head_knows_its_model(want, tmp_path):
    lm = as_function()
    with pytest.raises(calibjax.UserError, match="another base model"):
        calibjax.evaluate(lm, HELD_OUT, want[0].head, context=silent())
    head = calibjax.fit_ats(lm, FIT, QUICK, silent()).head
    calibjax.save_head(tmp_path / "head", head)
    assert calibjax.load_head(tmp_path / "head", as_function()).fingerprint == head.fingerprint
    with pytest.raises(calibjax.UserError, match="base model"):
        calibjax.load_head(tmp_path / "head", as_logits())


def without_segments(params, tokens):
    return decoder.hidden_states(LM.config, params, tokens)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibjax.from_function(without_segments, LM.params, LM.unembedding.T), "transpose"),
        (lambda: calibjax.from_function(lambda p, x: (x, x), LM.params), "one array .* got a tuple"),
        (lambda: calibjax.from_function(apply_logits, LM.params, softcap=2.0), "logits have them already"),
        (lambda: calibjax.from_function(pytest.importorskip("torch").nn.Linear(3, 3), {}), "PyTorch.*from_arrays"),
        (lambda: calibjax.from_arrays(np.ones((4, 3)), np.ones(5, int)), r"got values \(4, 3\), targets \(5,\)"),
        (lambda: calibjax.from_arrays(np.ones((4, 3)), np.full(4, 1.5)), "targets: expected integers, got float64"),
        (
            lambda: calibjax.evaluate(calibjax.from_function(without_segments, LM.params, LM.unembedding), SEQUENCES),
            "no parameter segment_ids",
        ),
        (lambda: calibjax.fit_ats(as_logits(), FIT, READS, silent()), "argmax_embedding: this feature reads"),
        (lambda: calibjax.save_head("head", QUICK), "head: expected a FittedHead, .* got AtsOptions"),
        (lambda: LM.hidden_states(["Once upon a time"]), "expected an array of numbers, got text"),
    ],
)
def test_errors(call, message):
    with pytest.raises(calibjax.UserError, match=message):
        call()


@pytest.mark.slow
def test_a_mesh_of_jax():
    """Any mesh of `jax.make_mesh` with our axes, of Explicit ones too; sharded weights stay as they are."""
    explicit = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    lm = as_function()
    rows = {}
    for mesh in (explicit, jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])):
        for model in (LM, lm):
            context = silent(mesh=mesh)
            fitted = calibjax.fit_ats(model, FIT, QUICK, context)
            got = calibjax.evaluate(model, HELD_OUT, fitted.heads, context=context)
            rows[mesh.size, model is LM] = [got.results[name]["nll"].value for name in got.results]
    np.testing.assert_allclose(list(rows.values()), [rows[1, True]] * 4, rtol=1e-4)
    with pytest.raises(calibjax.UserError, match="mesh: expected axes among data, fsdp, tensor, got x"):
        calibjax.RunContext(mesh=jax.make_mesh((8,), ("x",)))
    assert calibjax.RunContext().mesh.size == len(jax.devices())
    with jax.set_mesh(explicit), pytest.raises(calibjax.UserError, match="the current mesh has Explicit axes"):
        LM.logits(HELD_OUT)
    with jax.set_mesh(explicit):
        got = calibjax.evaluate(LM, HELD_OUT, context=silent())
    np.testing.assert_allclose(got.results["uncalibrated"]["nll"].value, rows[1, True][0], rtol=1e-6)


@pytest.mark.slow
def test_the_guide_runs(tmp_path, monkeypatch):
    """linen, NNX, a function shaped as those of MaxText and tunix, and arrays."""
    monkeypatch.setattr(options, "AUTO", options.AUTO[:1])
    monkeypatch.setattr(options, "AUTO_FEATURES", options.AUTO_FEATURES[:1])
    monkeypatch.setattr(calibjax.RunContext.__dataclass_fields__["mesh"], "default_factory", lambda: silent().mesh)
    page = Path(__file__).parents[2] / "docs" / "guides" / "own_model.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace = {}
    for block in blocks:
        exec(compile(block.replace("runs/x", str(tmp_path)), page.name, "exec"), namespace)
    assert len(blocks) == 5
    assert namespace["confidence"].shape == namespace["held_out"].targets.shape
