"""What `import calibjax` offers: its names, and a head fitted and evaluated without a directory."""

import ast
import functools
import json
import tempfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assets import model_path
from tiny import VOCAB, answered, at_targets, make_lm, make_sequences, ragged, silent

import calibjax

STUB = Path(calibjax.__file__).with_suffix(".pyi")
LM = make_lm()
SEQUENCES = answered(LM, ragged(make_sequences(40)))
QUICK = calibjax.AtsOptions(loss="cross-entropy", head_kind="linear", refit_temperature=False, batch_size=8)

NAMES = """
    AtsFit AtsOptions Comparison Evaluation FittedHead FrozenModel FunctionModel Generation HeadConfig LanguageModel
    LayersOptions LhtsFit LhtsOptions Predictions RunContext Sampling Sequences SftFit SftOptions TasksOptions
    TokenConfidence UserError VocabCurves VocabStats __version__ calibrated_confidence calibrated_log_probs compare
    decide evaluate evaluate_layers evaluate_tasks fit_ats fit_lhts fit_sft from_arrays from_function generate heads
    kernels linear_cross_entropy load_head load_model load_text losses metrics parse_script plot recalibrate save_head
    save_model split_sequences vocab_curves vocab_stats
"""


def test_names():
    expected = NAMES.split()
    assert sorted(dir(calibjax)) == sorted(expected)
    declared = [alias.asname for node in ast.parse(STUB.read_text()).body for alias in node.names]
    assert sorted(declared) == sorted(expected)  # what type checkers see: names that are exported under themselves
    assert all(getattr(calibjax, name) is not None for name in expected)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Without a directory: with a temporary one, of which nothing is left."""
    parent = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(parent))
        result = calibjax.fit_ats(LM, SEQUENCES, QUICK, silent())
    assert not list(parent.iterdir())
    return result


def test_a_directory_changes_nothing(fitted, tmp_path):
    actual = calibjax.fit_ats(LM, SEQUENCES, QUICK, silent(tmp_path / "fit"))
    chex.assert_trees_all_equal(actual.head.params, fitted.head.params)
    assert actual.head.log_factor == fitted.head.log_factor
    assert (tmp_path / "fit").is_dir()


def test_an_evaluation_shows_its_figures(fitted):
    """`eval/test_tokens.py` has the figures and their intervals against dense formulas."""
    evaluation = calibjax.evaluate(LM, SEQUENCES, fitted.heads, context=silent())
    assert list(evaluation.results) == ["uncalibrated", "temperature", "ats"]
    assert evaluation.tokens == SEQUENCES.where.sum()
    for name, intervals in evaluation.results.items():
        for key, figure in intervals.items():
            value = evaluation.document["methods"][name][key]
            assert figure.value == (value["value"] if isinstance(value, dict) else value)
            assert figure.low <= figure.value <= figure.high
    figure = evaluation.results["ats"]["nll"]
    assert f"{figure.value:.4f} [{figure.low:.4f}, {figure.high:.4f}]" in repr(evaluation)
    assert repr(evaluation).count("\n") == 3


def test_statistics_of_packed_sequences_are_those_that_evaluate_counts(fitted):
    """Hidden states, loss and confidence of `Sequences`, which know their segments and their mask."""
    for lm in (LM, make_lm(seed=2, logit_softcap=5.0, unembedding_bias=True)):
        rows = calibjax.evaluate(lm, SEQUENCES, context=silent()).document["methods"]
        stats = lm.vocab_stats(lm.hidden_states(SEQUENCES), SEQUENCES)
        nll = stats.mean(calibjax.losses.cross_entropy(stats))
        np.testing.assert_allclose(nll, rows["uncalibrated"]["nll"], rtol=1e-6)
        np.testing.assert_allclose(stats.mean(stats.confidence()), rows["uncalibrated"]["confidence"], rtol=1e-6)
        assert (np.asarray(stats.argmax) == np.asarray(lm.logits(SEQUENCES)).argmax(-1))[SEQUENCES.where].all()
    row = calibjax.evaluate(LM, SEQUENCES, fitted.head, context=silent()).document["methods"]["head"]
    got = calibjax.calibrated_confidence(LM, SEQUENCES, fitted.head)
    np.testing.assert_allclose(np.asarray(got.confidence).sum() / SEQUENCES.where.sum(), row["confidence"], rtol=1e-6)
    assert not np.asarray(got.confidence)[~SEQUENCES.where].any()
    log_probs = np.asarray(calibjax.calibrated_log_probs(LM, SEQUENCES, fitted.head))
    np.testing.assert_allclose(-at_targets(log_probs, SEQUENCES).mean(), row["nll"], rtol=1e-5)
    with pytest.raises(calibjax.UserError, match="sequences have their own"):
        LM.hidden_states(SEQUENCES, segment_ids=SEQUENCES.segment_ids)
    none = LM.vocab_stats(LM.hidden_states(SEQUENCES), SEQUENCES._replace(where=np.zeros_like(SEQUENCES.where)))
    assert float(none.mean(jnp.full(SEQUENCES.where.shape, jnp.nan))) == 0.0


def test_token_ids_as_data():
    texts = [[1, 2, 3, 4, 5], [6, 7]]
    sequences = calibjax.load_text(texts, LM, seq_len=6, layout="pad")
    assert sequences.tokens[0, :4].tolist() == [1, 2, 3, 4]
    assert sequences.targets[1, :1].tolist() == [7]
    assert sequences.where.sum() == 5
    for wrong, message in (
        ([[1]], "text 0: expected two or more token ids"),
        ([1, 2], r"One text is \[\[1, 2, 3\]\]"),
        ([[1, 99]], "token ids from 0 to 23"),
        (3, "expected a path, or a list of texts or token ids, got int"),
    ):
        with pytest.raises(calibjax.UserError, match=message):
            calibjax.load_text(wrong, LM, seq_len=6)


def test_texts_are_read_in_sequences_that_the_model_takes():
    texts = [list(np.random.default_rng(row).integers(0, VOCAB, 50)) for row in range(9)]
    data = calibjax.load_text(texts, LM, seq_len=LM.config.max_positions)
    assert (
        calibjax.evaluate(LM, texts, context=silent()).results == calibjax.evaluate(LM, data, context=silent()).results
    )
    fitted, want = (calibjax.fit_ats(LM, source, QUICK, silent()).head for source in (texts, data))
    chex.assert_trees_all_equal(fitted.params, want.params)
    for tune in (calibjax.fit_sft, calibjax.fit_lhts):
        with pytest.raises(calibjax.UserError, match=r"validation_fraction=0.05 of 18 sequence\(s\) is none"):
            tune(LM, texts, context=silent())


def test_texts_and_rows_as_data_are_those_of_a_file(tmp_path):
    lm = calibjax.load_model(model_path("stories260K"))
    texts = ["Once upon a time there was a cat.", "Lily liked to play."]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    want = calibjax.load_text(tmp_path / "data.jsonl", lm, seq_len=32)
    for source in (texts, [{"text": text} for text in texts]):
        chex.assert_trees_all_equal(calibjax.load_text(source, lm, seq_len=32), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {"tokens": s.tokens + 20},
            r"tokens \(0 in padding\): expected ids from 0 to 23, got .*tokenizer of another model",
        ),
        (lambda s: {"targets": s.targets - 20}, "targets: expected ids from 0 to 23, got -"),
        (lambda s: {"targets": np.full_like(s.targets, -100)}, "at least one target that counts"),
        (lambda s: {"where": np.zeros_like(s.where)}, "at least one target that counts"),
    ],
)
def test_sequences_of_another_vocabulary(fitted, change, message):
    wrong = SEQUENCES._replace(**change(SEQUENCES))
    calls = [lambda: calibjax.evaluate(LM, wrong, fitted.head), lambda: calibjax.fit_ats(LM, wrong, QUICK)]
    tuners = (calibjax.fit_sft, calibjax.fit_lhts)
    for call in (*calls, *(functools.partial(tune, LM, wrong, context=silent()) for tune in tuners)):
        with pytest.raises(calibjax.UserError, match=message):
            call()
    with pytest.raises(calibjax.UserError, match="fitted on another base model"):
        calibjax.evaluate(make_lm(seed=1), SEQUENCES, fitted.head, context=silent())
    with pytest.raises(calibjax.UserError, match=r"uncalibrated .*another"):
        calibjax.evaluate(LM, SEQUENCES, {"uncalibrated": fitted.head}, context=silent())


def test_targets_of_minus_100_count_for_nothing():
    ignored = np.arange(SEQUENCES.tokens.shape[1]) % 3 == 1
    marked = SEQUENCES._replace(targets=np.where(ignored, -100, SEQUENCES.targets))
    same = [marked, marked._replace(where=SEQUENCES.where & ~ignored)]
    got, want = (calibjax.fit_sft(LM, data, context=silent()).report["validation_nll"] for data in same)
    assert got == want


def test_sequences_as_jax_arrays(fitted):
    forms = (SEQUENCES, jax.tree.map(jnp.asarray, SEQUENCES))
    want, got = (calibjax.evaluate(LM, data, fitted.head, context=silent()).document for data in forms)
    assert got == want


def test_short_reprs(fitted):
    assert repr(fitted.temperature) == f"FittedHead(constant, 1 parameters, base {LM.fingerprint[:12]})"
    temperature = f"{fitted.report['temperature']:.4g}"
    assert repr(fitted) == f"AtsFit({fitted.head!r}, candidate {fitted.report['candidate']}, temperature {temperature})"
    generated = calibjax.generate(LM, [[1, 2]], max_new_tokens=3)
    assert repr(generated) == "Generation(tokens [1, 3])"
    for value in (fitted, fitted.head, fitted.temperature, generated):
        assert len(repr(value)) < 200
        assert "Array" not in repr(value)
