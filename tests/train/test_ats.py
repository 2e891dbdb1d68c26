"""Fitting a head: the plan that options make, what is chosen and refitted, and every head, feature and dtype."""

import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import answered, at_targets, dense_log_probs, make_lm, make_sequences, ragged, silent

from calibjax.commands.train_ats import fit_ats
from calibjax.data import hold_back
from calibjax.heads import HeadConfig
from calibjax.models.frozen import batch_stats, freeze
from calibjax.recalibrate import TemperatureFit
from calibjax.runtime.errors import UserError
from calibjax.train import AtsOptions, ats
from calibjax.train.options import Trial, make_plan

QUICK = {"epochs": 6, "batch_size": 8, "learning_rate": 1e-2, "validation_fraction": 0.2}

LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(160)))


def fit(directory, lm=None, sequences=None, *, log=lambda line: None, seed=0, **options):
    return fit_ats(
        LM if lm is None else lm,
        SEQUENCES if sequences is None else sequences,
        AtsOptions(**QUICK | options),
        silent(directory, seed=seed, log=log),
    )


_stats = jax.jit(batch_stats, static_argnums=(0, 1), static_argnames=("dtype", "statistics"))


def log_scale_of(lm, head, sequences):
    """The head's log scale for every token `[S, T]`."""
    batch = {name: jnp.asarray(value) for name, value in sequences._asdict().items() if name != "source"}
    frozen = freeze(lm, head=head.config)
    options = {"dtype": lm.dtype, "statistics": ("max_logit",), "log_factor": jnp.float32(head.log_factor)}
    return np.asarray(_stats(lm.config, head.config, head.params, frozen, batch, **options)[1])


def nll_of(lm, sequences, log_scale):
    return -at_targets(dense_log_probs(lm, sequences, log_scale), sequences).mean()


def top_label_of(lm, sequences, log_scale):
    """The mean log loss of the most likely token being right."""
    log_q = dense_log_probs(lm, sequences, log_scale)
    right = (log_q.argmax(-1) == sequences.targets)[sequences.where]
    top = log_q.max(-1)[sequences.where]
    return -np.where(right, top, np.log(np.maximum(-np.expm1(top), 1e-300))).mean()


# --- a whole fit, against float64 over the dense logits ---


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    directory, lines = tmp_path_factory.mktemp("auto"), []
    return fit(directory, log=lines.append, loss="auto"), lines, directory


def test_single_temperature_is_the_best_one(auto):
    grid = np.linspace(math.log(0.05), math.log(10), 100)
    for width in (0.1, 0.002):
        best = grid[np.argmin([nll_of(LM, SEQUENCES, np.full(SEQUENCES.tokens.shape, u)) for u in grid])]
        grid = np.linspace(best - width, best + width, 100)
    got = float(auto[0].temperature.params["log_scale"])
    print(f"log scale {got:.5f}, on the grid {best:.5f}")
    assert abs(got - best) < 2e-3
    assert -1.5 < best < -0.3, "a temperature to be found inside"
    np.testing.assert_allclose(auto[0].report["temperature"], math.exp(-got), rtol=1e-5)
    assert auto[0].temperature.log_factor == 0.0


def test_auto_keeps_the_best_score(auto):
    fitted, lines, _ = auto
    report = fitted.report
    scores = {c["loss"]: c["validation_score"] for c in report["candidates"]}
    print(scores)
    assert list(scores) == ["joint", "cross-entropy", "selective-0.02", "selective-0.1", "selective-0.5"]
    assert scores[report["loss"]] == min(scores.values())
    assert len(set(scores.values())) == 5
    said = next(line for line in lines if line.startswith("chose "))
    assert said.startswith(f"chose {report['loss']}: ")
    assert all(name in said and f"{score:.4f}" in said for name, score in scores.items())
    # What is reported of the head that was kept, over the dense logits of the sequences that were kept back.
    train_rows, rows = hold_back(SEQUENCES, 0.2, 0)
    assert report["windows"] == {"train": len(train_rows), "validation": len(rows)}
    kept = SEQUENCES.take(rows)
    log_scale = log_scale_of(LM, fitted.head, kept) - fitted.head.log_factor
    chosen = next(c for c in report["candidates"] if c["loss"] == report["loss"])
    np.testing.assert_allclose(chosen["validation_nll"], nll_of(LM, kept, log_scale), rtol=2e-6)
    delivered = log_scale + fitted.head.log_factor
    expected = nll_of(LM, kept, delivered) + top_label_of(LM, kept, delivered)
    np.testing.assert_allclose(chosen["validation_score"], expected, rtol=1e-5)


def test_the_score_chooses_and_not_the_likelihood():
    of = {nll: ats.Candidate(Trial("joint", None), None, nll, 1 / nll, None) for nll in (1.0, 2.0)}
    assert ats.choose(list(of.values()), silent()) is of[2.0]


def test_the_head_finds_what_is_to_be_found(auto):
    log_scales = {
        "uncalibrated": np.zeros(SEQUENCES.tokens.shape),
        "temperature": log_scale_of(LM, auto[0].temperature, SEQUENCES),
        "ats": log_scale_of(LM, auto[0].head, SEQUENCES),
    }
    found = {name: nll_of(LM, SEQUENCES, log_scale) for name, log_scale in log_scales.items()}
    print(found)
    assert found["ats"] < found["temperature"] - 0.03
    assert found["temperature"] < found["uncalibrated"] - 0.1


def test_report_is_json_and_says_everything(auto):
    fitted, lines, directory = auto
    report = json.loads(json.dumps(fitted.report))
    assert set(report) == {"plan", "loss", "score", "candidates", "refit", "temperature", "windows"}
    refit = report["refit"]
    assert refit["applied"] == (abs(math.log(refit["factor"])) > 2 * refit["standard_error_of_log"])
    assert report["plan"]["optimizer"]["learning_rate"] == QUICK["learning_rate"]
    assert fitted.head.fingerprint == fitted.temperature.fingerprint == LM.fingerprint
    assert any("refit on top" in line for line in lines)
    assert {entry.name for entry in directory.iterdir()} >= {"joint", "cross-entropy", "selective-0.1"}


def test_same_again_to_the_bit(auto, tmp_path):
    """The chosen trial alone, in another directory, is the same head; another seed is another one."""
    loss, _, alpha = auto[0].report["loss"].rpartition("-")
    options = {"loss": loss, "alpha": float(alpha)} if loss == "selective" else {"loss": auto[0].report["loss"]}
    again, other = (fit(tmp_path / str(seed), seed=seed, **options).head for seed in (0, 1))
    chex.assert_trees_all_equal(again.params, auto[0].head.params)
    assert again.log_factor == auto[0].head.log_factor
    assert np.abs(np.asarray(other.params["output"]["kernel"] - again.params["output"]["kernel"])).max() > 0


def test_directory_of_another_fit_is_refused(auto):
    cases = (
        ("plan", {"weight_decay": 0.1}),
        ("seed", {"seed": 1}),
        ("fingerprint", {"lm": make_lm(seed=9)}),
        ("windows", {"sequences": ragged(make_sequences(160, seed=1))}),
    )
    for different, options in cases:
        with pytest.raises(UserError, match=rf"another run \(different: {different}\)"):
            fit(auto[2], **{"loss": "auto"} | options)


# --- the refit ---


@pytest.mark.parametrize(("u", "error", "applied"), [(0.3, 0.1, True), (-0.3, 0.1, True), (0.3, 0.2, False)])
def test_refit_is_applied_beyond_two_standard_errors(tmp_path, monkeypatch, u, error, applied):
    lines = []
    canned = TemperatureFit(u, error, 1.0, 2.0, 3, True)
    monkeypatch.setattr(ats.recalibrate, "fit_temperature", lambda *args, **options: canned)
    fitted = fit(tmp_path, log=lines.append, loss="cross-entropy", head="constant", epochs=1)
    assert fitted.report["refit"] == {"factor": math.exp(u), "standard_error_of_log": error, "applied": applied}
    assert fitted.head.log_factor == (u if applied else 0.0)
    assert ("not applied" in lines[-1]) is not applied


def test_no_refit(tmp_path):
    """Nothing to choose or refit: nothing is kept from training. With a choice, the score is of the head as it is."""
    options = {"head": "constant", "epochs": 1, "refit_temperature": False}
    fitted = fit(tmp_path / "one", loss="cross-entropy", **options)
    assert fitted.report["refit"] is None
    assert fitted.report["candidates"] == []
    assert fitted.report["windows"] == {"train": len(SEQUENCES.tokens), "validation": 0}
    assert json.loads(json.dumps(fitted.report, allow_nan=False))["loss"] == "cross-entropy"

    fitted = fit(tmp_path / "several", loss="auto", alpha=0.1, **options)
    assert fitted.head.log_factor == 0.0
    kept = SEQUENCES.take(hold_back(SEQUENCES, 0.2, 0)[1])
    assert fitted.report["windows"]["validation"] == len(kept.tokens)
    log_scale = log_scale_of(LM, fitted.head, kept)
    chosen = next(c for c in fitted.report["candidates"] if c["loss"] == fitted.report["loss"])
    np.testing.assert_allclose(chosen["validation_nll"], nll_of(LM, kept, log_scale), rtol=2e-6)
    score = nll_of(LM, kept, log_scale) + top_label_of(LM, kept, log_scale)
    np.testing.assert_allclose(chosen["validation_score"], score, rtol=1e-5)


# --- heads, features, pooling, dtypes ---


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"head": "mlp", "features": "hidden_states+max_logit+log_std_logits+argmax_embedding"}, jnp.float32),
        ({"head": "transformer", "accumulate": 2, "learning_rate": 5e-3}, jnp.float32),
        ({"head": "linear", "pooling": "sequence", "cache_hidden": "disk"}, jnp.bfloat16),
    ],
    ids=["all features", "transformer", "sequence, bfloat16 on disk"],
)
def test_every_kind_of_head(tmp_path, options, dtype):
    lm, sequences = make_lm(dtype=dtype), SEQUENCES
    fitted = fit(tmp_path, lm, loss="cross-entropy", **options)
    log_scale = log_scale_of(lm, fitted.head, sequences)
    before, after = nll_of(lm, sequences, np.zeros(log_scale.shape)), nll_of(lm, sequences, log_scale)
    print(f"NLL {before:.4f} -> {after:.4f}")
    assert after < before - 0.1
    assert fitted.head.config.kind == options["head"]
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
    assert plan.head.kind == "transformer"
    assert not plan.head.identity_start
    assert plan.head.intermediate_size == 11008  # the block of Llama-2-7B
    assert plan.head.build().block.num_heads == 32
    assert plan.head.min_scale == 1e-30
    larger = make_plan(AtsOptions(recipe="paper"), 5120).head  # of Llama-2-13B: calibration_configs/*_13b/config.json
    assert larger.intermediate_size == 13824
    assert larger.build().block.num_heads == 40
    assert not make_plan(AtsOptions(recipe="paper", head="mlp"), 4096).head.normalize
    assert make_plan(AtsOptions(recipe="paper", head="mlp", normalize=True), 4096).head.normalize
    assert (plan.epochs, plan.batch_size, plan.accumulate) == (2, 8, 8)
    assert plan.optimizer.learning_rate == 5e-5
    assert (plan.optimizer.warmup_fraction, plan.optimizer.weight_decay) == (0.0, 0.0)
    assert not plan.refit_temperature


def test_options_override_the_recipe():
    plan = make_plan(
        AtsOptions(recipe="paper", head="mlp", loss="joint", epochs=7, batch_size=6, accumulate=3, learning_rate=1e-3),
        64,
    )
    assert (plan.head.kind, plan.epochs, plan.batch_size, plan.accumulate) == ("mlp", 7, 6, 3)
    assert [tuple(trial) for trial in plan.trials] == [("joint", None)]
    plan = make_plan(AtsOptions(recipe="paper", random_start=False, refit_temperature=True, warmup_fraction=0.3), 64)
    assert plan.head.identity_start
    assert plan.refit_temperature
    assert plan.optimizer.warmup_fraction == 0.3
    assert not make_plan(AtsOptions(refit_temperature=False), 64).refit_temperature
    assert not make_plan(AtsOptions(normalize=False), 64).head.normalize
    assert make_plan(AtsOptions(), 64).head == HeadConfig(kind="mlp", hidden_size=64)
    with pytest.raises(UserError, match="--normalize: a linear head does not read it"):
        make_plan(AtsOptions(head="linear", normalize=True), 64)


def test_trials():
    def trials(**options):
        return [str(trial) for trial in make_plan(AtsOptions(**options), 64).trials]

    assert trials() == ["joint", "cross-entropy", "selective-0.02", "selective-0.1", "selective-0.5"]
    assert trials(alpha=0.25) == ["joint", "cross-entropy", "selective-0.25"]
    assert trials(loss="selective") == ["selective-0.5"]
    assert trials(loss="label-smoothing") == ["label-smoothing-0.1"]
    assert trials(loss="selective-authors", alpha=0.3) == ["selective-authors-0.3"]
    assert trials(loss="selective-balanced", alpha=0.0) == ["selective-balanced-0"]
    assert trials(loss="brier") == ["brier"]
    assert trials(loss="focal", alpha=2.0) == ["focal-2"]
    with pytest.raises(UserError, match=r"--loss: expected one of joint, cross-entropy, .*, got 'hinge'"):
        trials(loss="hinge")
    with pytest.raises(UserError, match=r"--alpha: expected at least 0, finite, got inf"):
        trials(loss="focal", alpha=math.inf)
    with pytest.raises(UserError, match="--alpha: --loss cross-entropy has no such weight"):
        trials(loss="cross-entropy", alpha=0.3)
    with pytest.raises(UserError, match="--features, --pooling: a constant head does not read them; leave them out"):
        trials(head="constant", features="max_logit", pooling="sequence")


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"alpha": 1.5}, "--alpha"),
        ({"alpha": -0.1}, "--alpha"),
        ({"alpha": math.nan}, "--alpha"),
        ({"top_label_weight": -1.0}, "--top-label-weight"),
        ({"validation_fraction": 0.0}, "--validation-fraction"),
        ({"validation_fraction": 1.0}, "--validation-fraction"),
        ({"epochs": 0}, "--epochs"),
        ({"batch_size": 0}, "--batch-size"),
        ({"accumulate": 3}, "--accumulate"),
        ({"accumulate": 0}, "--accumulate"),
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": math.nan}, "--learning-rate"),
        ({"learning_rate": math.inf}, "--learning-rate"),
        ({"warmup_fraction": 1.0}, "--warmup-fraction"),
        ({"warmup_fraction": -0.1}, "--warmup-fraction"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"checkpoint_every": 0}, "--checkpoint-every"),
        ({"features": "hidden_states+logits"}, "features"),
        ({"features": "hidden_states+hidden_states"}, "features"),
        ({"features": ""}, "--features"),
    ],
    ids=str,
)
def test_options_out_of_range(tmp_path, options, flag):
    with pytest.raises(UserError, match=rf"^{flag}: ") as caught:
        make_plan(AtsOptions(**options), 64)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=rf"^{flag}: "):
        fit(tmp_path / "fit", **options)
    assert not (tmp_path / "fit").exists(), "something was done before the options were looked at"


def test_head_that_cannot_be_built():
    with pytest.raises(UserError, match="even hidden_size"):
        make_plan(AtsOptions(head="transformer"), 7)


def test_fewer_sequences_than_a_batch(tmp_path):
    fitted = fit(
        tmp_path, sequences=SEQUENCES.take(slice(5)), loss="cross-entropy", head="linear", validation_fraction=0.3
    )
    assert fitted.report["windows"] == {"train": 4, "validation": 1}
    assert np.isfinite(np.asarray(fitted.head.params["output"]["kernel"])).all()
