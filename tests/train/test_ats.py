"""Fitting a head: the plan that options make, what is chosen and refitted, and every head, feature and dtype."""

import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import answered, at_targets, dense_log_probs, log_scale_of, make_lm, make_sequences, ragged, silent

from calibjax import fit_ats, load_text, metrics
from calibjax.data import fold_indices, limit_tokens
from calibjax.heads import FittedHead, HeadConfig
from calibjax.metrics import CalibrationSums
from calibjax.recalibrate import TemperatureFit
from calibjax.runtime.errors import UserError
from calibjax.train import AtsOptions, ats, cross_fit
from calibjax.train.options import DECAYS, make_plan

STEPS = {"epochs": 6, "learning_rate": 1e-2}  # of heads that are not solved at once

LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(160)))


def fit(directory, lm=None, sequences=None, *, log=lambda line: None, seed=0, **options):
    options = {"batch_size": 8, **({} if options.get("head_kind") == "linear" else STEPS), **options}
    return fit_ats(
        LM if lm is None else lm,
        SEQUENCES if sequences is None else sequences,
        AtsOptions(**options),
        silent(directory, seed=seed, log=log),
    )


def nll_of(lm, sequences, log_scale):
    return -at_targets(dense_log_probs(lm, sequences, log_scale), sequences).mean()


# --- a whole fit, against float64 over the dense logits ---


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    directory, lines = tmp_path_factory.mktemp("auto"), []
    return fit(directory, log=lines.append, loss="auto"), lines, directory


def test_a_limit_of_tokens_is_that_of_fewer_sequences(tmp_path):
    lines = []
    fitted = fit(tmp_path, log=lines.append, max_tokens=500, loss="cross-entropy", head_kind="linear")
    fewer = limit_tokens(SEQUENCES, 500, seed=0)
    assert any("of " in line and "(max_tokens=500)" in line for line in lines)
    assert fitted.report["sequences"] == {"fit": len(fewer.tokens)}


def test_auto_chooses_by_out_of_fold_predictions(auto):
    """The rules, on the figures of the report: heads with the first loss, then losses of the chosen head."""
    fitted, lines, _ = auto
    scaling, *tried = fitted.comparison["candidates"]
    assert scaling["candidate"] == "temperature scaling"
    heads = [row for row in tried if ", cross-entropy" in row["candidate"]]
    assert heads[0]["candidate"] == "logit statistics, cross-entropy"
    assert heads[1]["candidate"] == "logit statistics + hidden states, cross-entropy, decay 10"
    chosen = fitted.report["candidate"]
    loss = next(row for row in tried if row["candidate"] == chosen)
    least = min(row["nll"] for row in tried)
    assert loss["beats_temperature"]
    # Within a tenth of the gain, or a standard error: at 1,000 tokens a hundredth of a nat.
    assert loss["nll"] - least < max(0.2 * (scaling["nll"] - least), 0.02)
    assert [row["candidate"] for row in fitted.comparison["chosen"]] == ["temperature scaling", chosen]
    assert any(line.startswith(f"chose {chosen}: ") for line in lines)
    assert {row["shrinkage"] for row in tried} == {cross_fit.SHRINKAGE}
    constant = np.full(SEQUENCES.tokens.shape, float(fitted.temperature.params["log_scale"]))
    np.testing.assert_allclose(scaling["nll"], nll_of(LM, SEQUENCES, constant), rtol=2e-6)


def test_a_fold_is_predicted_by_a_head_of_the_others(tmp_path):
    """The first candidate's figure, from fits without each fold, shrunk and evaluated over the dense logits."""
    options = {"head_kind": "linear", "features": ("logit_statistics",), "loss": "cross-entropy"}
    fitted = fit(tmp_path, **options)
    row = fitted.comparison["candidates"][1]
    towards, nll = float(fitted.temperature.params["log_scale"]), 0.0
    for fold in fold_indices(SEQUENCES, 4, seed=0):
        others = SEQUENCES.take(np.setdiff1d(np.arange(len(SEQUENCES.tokens)), fold))
        alone = fit(tmp_path / str(fold[0]), sequences=others, refit_temperature=False, **options).head
        held = SEQUENCES.take(fold)
        log_scale = 0.75 * log_scale_of(LM, alone, held) + 0.25 * towards + math.log(row["factor"])
        nll += nll_of(LM, held, log_scale) * held.where.sum()
    # Features are standardised over all folds: hardly another start of the same optimum.
    np.testing.assert_allclose(row["nll"], nll / SEQUENCES.where.sum(), rtol=1e-4)


def test_a_score_beats_beyond_noise_only():
    """NLL and Brier lower on every sequence; on the mean alone; and with a higher calibration error."""
    rng = np.random.default_rng(0)
    confidence = jnp.full((200, 20), 0.6)
    correct = jnp.asarray(rng.random((200, 20)) < 0.6)

    def scored(nll, confidence=confidence):
        sums = metrics.calibration_sums(confidence, correct, log_prob=-jnp.asarray(nll))
        return cross_fit.CandidateScore(
            "", np.zeros(0), None, CalibrationSums(*(np.asarray(x, np.float64) for x in sums))
        )

    noise = rng.normal(size=(200, 1)) * np.ones((200, 20))
    worse = scored(2 + noise, jnp.full((200, 20), 0.7))
    assert scored(1.9 + noise).beats(worse)
    assert not worse.beats(scored(1.9 + noise))
    spread = np.where(np.arange(200)[:, None] % 2, 1.0, -1.0) * np.ones((200, 20))
    within = scored(1.99 + noise + spread)
    assert within.mean("nll") < worse.mean("nll")
    assert within.mean("brier") < worse.mean("brier")
    assert not within.beats(worse), "NLL within its noise"
    assert not scored(1.9 + noise).beats(scored(2 + noise)), "the same Brier score"
    # Lower NLL and Brier score, higher calibration error: a sharper forecaster with a bias.
    sharp = jnp.where(correct, 0.75, 0.25)
    assert not scored(1.9 + noise, sharp).beats(scored(2 + noise))
    assert scored(1.9 + noise, sharp).mean("brier") < scored(2 + noise).mean("brier")


def test_temperature_scaling_is_kept_where_nothing_beats_it(tmp_path):
    """Tokens drawn from the model at one temperature: no head can beat that."""
    lines = []
    sequences = answered(LM, make_sequences(60), scales=(0.5, 0.5))
    fitted = fit(tmp_path, sequences=sequences, log=lines.append, alpha=1.0)
    assert fitted.report["candidate"] == "temperature scaling"
    assert fitted.head is fitted.temperature
    assert fitted.report["refit"] is None
    assert not any(row["beats_temperature"] for row in fitted.comparison["chosen"])
    assert "WARNING: no head beats temperature scaling beyond noise" in lines[-1]


def test_sets_are_predicted_by_heads_of_the_others(tmp_path):
    """Folds are the sets, temperature scaling is that of the other sets, and the last head is of all."""
    sets = {name: answered(LM, ragged(make_sequences(size, seed=size))) for name, size in (("a", 40), ("b", 24))}
    fitted = fit(tmp_path, sequences=sets, loss="auto", alpha=1.0, head_kind="linear")
    assert fitted.report["sequences"] == {"a": 40, "b": 24}
    options = {"loss": "joint", "head_kind": "constant", "refit_temperature": False}
    single = {name: fit(tmp_path / name, sequences=sets[name], **options) for name in sets}
    nll = [
        nll_of(LM, sets[name], np.full(sets[name].tokens.shape, float(single[other].temperature.params["log_scale"])))
        * sets[name].where.sum()
        for name, other in (("a", "b"), ("b", "a"))
    ]
    expected = sum(nll) / sum(part.where.sum() for part in sets.values())
    np.testing.assert_allclose(fitted.comparison["candidates"][0]["nll"], expected, rtol=1e-5)
    shrinkages = {row["shrinkage"] for row in fitted.comparison["candidates"][1:]}
    assert shrinkages <= set(cross_fit.SET_SHRINKAGES)


@pytest.mark.parametrize("kind", ["linear", "constant"])
def test_a_shrunk_head_is_on_the_way_to_temperature_scaling(kind):
    config = HeadConfig(kind=kind, hidden_size=LM.config.hidden_size)
    params = jax.tree.map(
        lambda x: x + 0.01 * (1 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), config.init(jax.random.key(0))
    )
    before, after = (
        log_scale_of(LM, FittedHead(config, of, LM.fingerprint), SEQUENCES)
        for of in (params, ats.shrink_head(params, -0.5, 0.75))
    )
    np.testing.assert_allclose(after, 0.25 * before - 0.375, atol=1e-6)
    np.testing.assert_allclose(after, cross_fit.shrink(before, -0.5, 0.75), atol=1e-6)


def test_report_is_json_and_complete(auto):
    fitted, lines, directory = auto
    report = json.loads(json.dumps(fitted.report))
    np.testing.assert_allclose(report["temperature"], np.exp(-fitted.temperature.params["log_scale"]), rtol=1e-5)
    assert set(report) == {"plan", "candidate", "refit", "temperature", "sequences"}
    refit = report["refit"]
    assert refit["applied"] == (abs(math.log(refit["factor"])) > 2 * refit["standard_error_of_log"])
    assert report["plan"]["optimizer"]["learning_rate"] == STEPS["learning_rate"]
    assert fitted.head.fingerprint == fitted.temperature.fingerprint == LM.fingerprint
    assert any("refit on top" in line for line in lines)
    assert "frozen" in {entry.name for entry in directory.iterdir()}


@pytest.mark.slow
def test_same_again_to_the_bit(auto, tmp_path):
    """In another directory, and again in the same one, where the frozen pass is read."""
    for directory in (tmp_path, auto[2]):
        again = fit(directory, loss="auto")
        assert again.report == auto[0].report
        chex.assert_trees_all_equal(again.head.params, auto[0].head.params)
        assert again.head.log_factor == auto[0].head.log_factor
    one, other = (fit(tmp_path / str(seed), seed=seed, head_kind="mlp", loss="joint").head for seed in (0, 1))
    assert np.abs(np.asarray(other.params["output"]["kernel"] - one.params["output"]["kernel"])).max() > 0


def test_directory_of_another_fit_is_refused(tmp_path):
    """Checkpoints of a head that is trained in steps."""
    options = {"head_kind": "mlp", "loss": "joint", "refit_temperature": False, "epochs": 1}
    fit(tmp_path, **options)
    cases = (("plan", {"weight_decay": 0.1}), ("tokens", {"sequences": ragged(make_sequences(160, seed=1))}))
    for different, changes in cases:
        with pytest.raises(UserError, match=rf"another run \(different: .*{different}"):
            fit(tmp_path, **options | changes)


# --- the refit ---


@pytest.mark.parametrize(("u", "error", "applied"), [(0.3, 0.1, True), (-0.3, 0.1, True), (0.3, 0.2, False)])
def test_refit_is_applied_beyond_two_standard_errors(tmp_path, monkeypatch, u, error, applied):
    lines = []
    canned = TemperatureFit(u, error, 1.0, 2.0, 3, True)
    monkeypatch.setattr(cross_fit.recalibrate, "fit_temperature", lambda *args, **options: canned)
    fitted = fit(tmp_path, log=lines.append, loss="cross-entropy", head_kind="constant", epochs=1)
    assert fitted.report["refit"] == {"factor": math.exp(u), "standard_error_of_log": error, "applied": applied}
    assert fitted.head.log_factor == (u if applied else 0.0)
    assert ("not applied" in lines[-1]) is not applied


def test_no_refit(tmp_path):
    """Nothing to choose or refit: there are no folds. With a choice, the figures are of the head as it is."""
    options = {"head_kind": "constant", "epochs": 1, "refit_temperature": False}
    fitted = fit(tmp_path / "one", loss="cross-entropy", **options)
    assert fitted.report["refit"] is None
    assert fitted.comparison is None
    assert json.loads(json.dumps(fitted.report, allow_nan=False))["candidate"] == "constant, cross-entropy"

    fitted = fit(tmp_path / "several", loss="auto", alpha=0.1, **options)
    assert fitted.head.log_factor == 0.0
    assert [row["factor"] for row in fitted.comparison["candidates"]] == [1.0, 1.0, 1.0]


# --- heads, features, pooling, dtypes ---


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (
            {"head_kind": "mlp", "features": ("hidden_states", "max_logit", "log_std_logits", "argmax_embedding")},
            jnp.float32,
        ),
        ({"head_kind": "transformer", "accumulate": 2, "learning_rate": 5e-3}, jnp.float32),
        ({"head_kind": "linear", "pooling": "sequence", "keep": "disk"}, jnp.bfloat16),
    ],
    ids=["all features", "transformer", "sequence, bfloat16 on disk"],
)
def test_every_kind_of_head(tmp_path, options, dtype):
    lm, sequences = make_lm(dtype=dtype), SEQUENCES
    fitted = fit(tmp_path, lm, loss="cross-entropy", refit_temperature=False, **options)
    log_scale = log_scale_of(lm, fitted.head, sequences)
    before, after = nll_of(lm, sequences, np.zeros(log_scale.shape)), nll_of(lm, sequences, log_scale)
    print(f"NLL {before:.4f} -> {after:.4f}")
    assert after < before - 0.1
    assert fitted.head.config.kind == options["head_kind"]
    if options.get("pooling") == "sequence":
        for row in range(len(sequences.tokens)):
            for segment in (1, 2):
                values = log_scale[row][sequences.segment_ids[row] == segment]
                assert np.ptp(values) < 1e-6
    else:
        assert np.std(log_scale[sequences.where]) > 1e-3
    assert {leaf.dtype for leaf in jax.tree.leaves(fitted.head.params)} == {jnp.dtype(jnp.float32)}


# --- the plan ---


def test_paper_recipe_is_the_paper():
    plan = make_plan(AtsOptions(recipe="paper"), 4096)
    assert [tuple(trial) for trial in plan.trials] == [("selective-authors", 0.5)]
    head = plan.heads[-1]
    assert (head.kind, head.identity_start, head.min_scale) == ("transformer", False, 1e-30)
    # The blocks of Llama-2-7B and 13B: calibration_configs/*_13b/config.json.
    for hidden, width, heads in ((4096, 11008, 32), (5120, 13824, 40)):
        head = make_plan(AtsOptions(recipe="paper"), hidden).heads[-1]
        assert (head.intermediate_size, head.build().block.num_heads) == (width, heads)
    assert not make_plan(AtsOptions(recipe="paper", head_kind="mlp"), 4096).heads[-1].normalize
    assert make_plan(AtsOptions(recipe="paper", head_kind="mlp", normalize=True), 4096).heads[-1].normalize
    assert (plan.epochs, plan.batch_size, plan.accumulate) == (2, 8, 8)
    assert plan.optimizer.learning_rate == 5e-5
    assert (plan.optimizer.warmup_fraction, plan.optimizer.weight_decay) == (0.0, 0.0)
    assert not plan.refit_temperature


def test_options_override_the_recipe():
    options = {"epochs": 7, "batch_size": 6, "accumulate": 3}
    plan = make_plan(
        AtsOptions(recipe="paper", loss="joint", identity_start=True, refit_temperature=True, **options), 64
    )
    assert {name: getattr(plan, name) for name in options} == options
    head = plan.heads[-1]
    assert (head.kind, head.identity_start, plan.refit_temperature) == ("transformer", True, True)
    assert [tuple(trial) for trial in plan.trials] == [("joint", 1.0)]
    default, reads = make_plan(AtsOptions(), 4096), ("logit_statistics", "hidden_states")
    expected = [("linear", reads[:1]), ("linear", reads), ("mlp", reads[1:])]
    assert [(head.kind, head.features) for head in default.heads] == expected
    assert (default.heads[-1].intermediate_size, default.decays) == (64, DECAYS)
    assert make_plan(AtsOptions(weight_decay=0.5), 64).decays == (0.5,)
    assert [head.features for head in make_plan(AtsOptions(features=("max_logit",)), 64).heads] == [("max_logit",)]


def test_trials():
    def trials(**options):
        return [str(trial) for trial in make_plan(AtsOptions(**options), 64).trials]

    assert trials() == ["cross-entropy", "joint-1", "joint-4", "joint-20"]
    assert trials(alpha=0.25) == ["cross-entropy", "joint-0.25"]
    assert trials(loss="joint", alpha=0) == ["joint-0"]
    assert (trials(loss="selective"), trials(loss="brier")) == (["selective-0.5"], ["brier"])


def test_options_are_checked_before_the_work(tmp_path):
    statistics = {"head_kind": "linear", "features": ("logit_statistics",)}
    for message, options in (
        ("^folds: expected", {"folds": 101}),
        ("^loss: expected one of auto, joint, cross-entropy, .*; got 'hinge'", {"loss": "hinge"}),
        ("alpha: expected at least 0, finite; got inf", {"loss": "focal", "alpha": math.inf}),
        ("^weight_decay: a linear head has a penalty", {**statistics, "weight_decay": 0.1}),
    ):
        with pytest.raises(UserError, match=message):
            fit(tmp_path / "fit", **options)
    assert not (tmp_path / "fit").exists()
    with pytest.raises(UserError, match="even hidden_size"):
        make_plan(AtsOptions(head_kind="transformer"), 7)


def test_what_is_no_model_is_named():
    from flax import nnx

    for call in (fit_ats, lambda module, source: load_text(source, module)):
        with pytest.raises(UserError, match=r"expected a model from load_model, .*, got Linear"):
            call(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), {})
