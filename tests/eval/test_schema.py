"""Damaged metrics.json and tokens.json are one `UserError` that names the entry, and never a traceback; verdicts."""

import copy
import json
import re

import numpy as np
import pytest
import report_documents
from tiny import make_lm, make_sequences, ragged

from calibjax.eval.compare.contenders import Outcome, Result
from calibjax.eval.compare.repeats import repeats_json
from calibjax.eval.compare.results import comparison_json, print_comparison
from calibjax.eval.layers.layers import LayerOutputs, layers_json
from calibjax.eval.report import figures, page, print_report, print_study
from calibjax.eval.report.page import Run
from calibjax.eval.report.schema import SCHEMA, check_document, read_metrics, read_tokens
from calibjax.eval.report.studies import study_figures
from calibjax.eval.report.verdicts import comparison_verdict, lhts_verdict, set_verdict, study_verdict, verdict
from calibjax.eval.tokens import evaluate_tokens, identity_head, results_json
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError

RNG = np.random.default_rng(0)
N = 60
METHODS = ("uncalibrated", "temperature", "histogram", "ats", "partition")
DRAWN = {"reliability", "temperatures", "layers", "sweep", "chosen", "subjects", "texts"}
"""Parts that a figure is made of."""


def outcome(sharpness=1.0):
    correct = RNG.random(N) < 0.6
    confidence = np.clip(0.3 + 0.4 * correct + 0.2 * RNG.standard_normal(N) * sharpness, 0.01, 0.99)
    choice = RNG.integers(0, 3, N)
    return Outcome(confidence.astype(np.float32), correct.astype(np.float32), choice, np.log(confidence))


@pytest.fixture(scope="module")
def documents():
    """One document of each kind, made by the functions that the commands call."""
    lm, sequences = make_lm(), ragged(make_sequences(6))
    heads = {name: identity_head(lm) for name in ("uncalibrated", "temperature", "ats")}
    quiet = RunContext(progress=False)
    evaluated = evaluate_tokens(lm, sequences, heads, bins=2, keep_tokens=True, context=quiet)
    tokens = results_json(evaluated, resamples=20)
    results = {name: Result(outcome(), 0.5, 1) for name in ("uncalibrated", "temperature", "histogram")}
    rows = comparison_json(results, reference="temperature", bins=2, resamples=20)
    held_out = {"tokens": N, "unit": "predictions", "clusters": "rows", "reference": "temperature", "sort": "ece"}
    held_out |= {"methods": rows, "failed": {"beta": "no reason"}, "left_out": {"lore": "no features"}}
    repeats, against = {name: [result] for name, result in evaluated.items()}, {"ats": "temperature"}
    study = repeats_json(repeats, sequences, against=against, bins=2, resamples=20)
    for row in study["methods"].values():
        row |= {"parameters": 3, "loss": "joint", "alpha": None}
    drawn = report_documents.document()
    outputs = LayerOutputs(
        *(RNG.random((2, N)), RNG.integers(0, 5, (2, N)), RNG.random((2, N)) < 0.5),
        *(-RNG.random((3, 2, N))),
        np.arange(N, dtype=np.int32) // 4,
    )
    layers = {"tokens": N, "readout": "letters only", **layers_json(outputs, bins=2, resamples=20)}
    base = {"schema": SCHEMA, "run": {"command": "train ats", "seed": 0}}
    of_models = {**tokens, "methods": dict.fromkeys(("pretrained", "lhts-T0.9"), tokens["methods"]["ats"])}
    text = next(iter(drawn["texts"].values()))
    tuned = dict.fromkeys(("base", "fine_tuned", "base_temperature"), tokens["methods"]["ats"])
    edited = {**tokens, "methods": dict.fromkeys(("uncalibrated", "edited"), tokens["methods"]["ats"])}
    parts = {name: drawn[name] for name in ("direction", "sweep", "neurons", "subjects")}
    return {
        "tokens": {**base, "held_out": tokens, "transfer": {"other": {**tokens, "methods": tuned}}},
        "compare": {**base, "held_out": held_out},
        "lhts": {
            **base,
            "held_out": of_models,
            "texts": {"pretrained": text, "lhts-T0.9": text},
            "analogies": drawn["analogies"],
        },
        "layers": {**base, "held_out": edited, "layers": layers, **parts},
        "study": {**base, "study": "heads", "question": "?", "sets": {"held out": study}, "bins": 2, "closed": "right"},
        "tasks": {**base, **tasks(results)},
    }


def tasks(results):
    evaluate = pytest.importorskip("calibjax.eval.tasks.evaluate", reason="lm-eval is not installed")
    from calibjax.eval.tasks.results import answers_json, subjects_json

    outcomes = [result.outcome for result in results.values()]
    fields = [np.stack(part) for part in zip(*outcomes, strict=True)]
    subjects = np.array(["law", "art"] * (N // 2))
    answers = evaluate.Answers(*fields, subjects, {"acc": np.ones(N)}, np.zeros(N, int), 0)
    names, options = ["uncalibrated", "temperature", "ats"], {"bins": 2, "closed": "right", "resamples": 20}
    of_task = answers_json(answers, names, **options)
    own = {"shots": 5, "source": "hub", "subjects": subjects_json(answers, names, **options)}
    return {"held_out": of_task, "tasks": {"mmlu": {**of_task, **own}}}


def mutations(value):
    """(path, damaged copy): every entry removed, null, of another type; one entry of each list, table of rows alike."""
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:1]
    for key, entry in entries:
        for damage in (None, "text", -3.5, [], {}, True):
            if type(damage) is not type(entry):
                changed = copy.copy(value)
                changed[key] = damage
                yield [key], changed
        changed = copy.copy(value)
        del changed[key]
        yield [key], changed
        if isinstance(entry, dict | list):
            for path, inner in mutations(entry):
                changed = copy.copy(value)
                changed[key] = inner
                yield [key, *path], changed


@pytest.mark.parametrize("kind", ["tokens", "compare", "lhts", "layers", "tasks"])
def test_damaged_documents(documents, kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "inline_svg", lambda *_: "")  # drawing takes seconds; the figures are still made
    file = tmp_path / "metrics.json"
    file.write_text(json.dumps(documents[kind]))
    good, count, refused, drawn = read_metrics(file), 0, 0, set()
    for path, damaged in mutations(good):
        count += 1
        try:
            if "schema" not in damaged or "held_out" not in damaged:
                continue
            check_document(damaged, file)
        except UserError as error:
            refused += str(error).startswith(f"{file}: ")
            continue
        # What passes is drawn, a kind of place once.
        place = tuple(str(part) for part in path if part not in METHODS)
        if path[0] == "run" or (place, kind) in drawn:
            continue
        drawn.add((place, kind))
        if "sort" in damaged["held_out"]:
            print_comparison(damaged["held_out"], "x")
        else:
            print_report(damaged)
        if DRAWN & set(path):
            with monkeypatch.context() as patched:
                if "reliability" not in path:  # its diagrams take most of the time
                    patched.setattr(figures, "_reliability_panel", lambda *_: None)
                page.page([Run("", damaged)])
        capsys.readouterr()
    assert refused > count / 2, (refused, count)


def test_damaged_studies_and_tokens(documents, tmp_path, capsys):
    for path, damaged in mutations(documents["study"]):
        if "study" in damaged and path != ["study"]:
            try:
                check_document(damaged, tmp_path / "metrics.json")
            except UserError:
                continue
            assert path[0] in ("run", "sets", "question"), path
    file = tmp_path / "tokens.json"
    sample = report_documents.sample()
    for _, damaged in mutations(sample):
        file.write_text(json.dumps(damaged))
        try:
            tokens = read_tokens(file)
        except UserError:
            continue
        page.heatmap_html(tokens, "x")


def test_the_path_of_the_entry_is_named(documents, tmp_path):
    document = copy.deepcopy(documents["tokens"])
    document["held_out"]["methods"]["ats"]["ece"]["value"] = None
    file = tmp_path / "metrics.json"
    for damage, message in (
        (document, "held_out.methods.ats.ece.value: expected a finite number, found null"),
        ({**document, "held_out": []}, "held_out: expected an object, found []"),
        ({**documents["study"]}, "is of a study"),
        ({**document, "schema": 2}, f"expected metrics of schema {SCHEMA}"),
        ([], f"expected metrics of schema {SCHEMA}"),
    ):
        file.write_text(json.dumps(damage))
        with pytest.raises(UserError, match=re.escape(message)):
            read_metrics(file)
    file.write_text("{")
    with pytest.raises(UserError, match="is not readable"):
        read_metrics(file)


# --- verdicts ---


def compared(log_losses, reference="temperature", **against):
    rows = {
        name: {"log_loss": value, "against": {"log_loss": against[name]} if name in against else {}}
        for name, value in log_losses.items()
    }
    return {"methods": rows, "reference": reference, "sort": "ece"}


def difference(value, noise):
    return {"difference": value, "low": value - noise, "high": value + noise}


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            compared({"temperature": 0.5, "ats": 0.4}, ats=difference(-0.1, 0.05)),
            "Lowest log loss: ATS, 0.4000 against 0.5000 of temperature scaling, significantly lower",
        ),
        (compared({"temperature": 0.5, "ats": 0.4}, ats=difference(-0.1, 0.2)), "WARNING: no method beats temperature"),
        (compared({"temperature": 0.3, "ats": 0.4}, ats=difference(0.1, 0.05)), "WARNING: no method beats temperature"),
        (compared({"temperature": None, "ats": 0.4}), "Lowest log loss: ATS, 0.4000; temperature scaling has no"),
        (compared({"temperature": None, "ats": None}), "WARNING: every method has an infinite log loss"),
    ],
)
def test_comparison_verdict(results, expected):
    assert comparison_verdict(results).startswith(expected)
    assert set_verdict(results) == comparison_verdict(results)


@pytest.mark.parametrize(
    ("log_prob", "error", "expected"),
    [
        (-2.0, 0.1, "lhts-T0.9 writes text at myopic temperature 1 that is more likely and less varied"),
        (-2.0, 0.9, "WARNING: the likelihood of lhts-T0.9's text at myopic temperature 1 lies within two standard"),
        (-4.0, 0.1, "WARNING: the likelihood of lhts-T0.9's text at myopic temperature 1 is lower than"),
    ],
)
def test_lhts_verdict(log_prob, error, expected):
    def row(log_prob, distinct):
        return {"1": {"log_prob": log_prob, "log_prob_error": error, "distinct_2": distinct}}

    texts = {"pretrained": row(-3.0, 0.5), "partition": row(-1.0, 0.1), "lhts-T0.9": row(log_prob, 0.4)}
    assert lhts_verdict({"texts": texts}).startswith(expected)


def test_study_verdicts():
    def row(nll, against=None):
        return {"nll": {"value": nll}} | ({} if against is None else {"against": {"nll": against}})

    better, worse = difference(-0.1, 0.01), difference(0.1, 0.01)
    rows = {"uncalibrated": row(3.0), "temperature": row(2.0), "mlp": row(1.9, better), "linear": row(2.1, worse)}
    assert study_verdict({"study": "heads", "sets": {"held out": {"methods": rows}}}) == (
        "On held out mlp has the lowest NLL, 1.9000 (temperature scaling 2.0000); 1 of 2 variants are significantly "
        "better than the row they are compared with, and 1 significantly worse."
    )
    assert study_verdict({"study": "heads", "sets": {"x": {"methods": {**rows, "mlp": row(2.05, worse)}}}}).startswith(
        "WARNING: no variant beats temperature scaling on x"
    )
    sets = {
        target: {
            "methods": {
                f"{method} from {source}": row(2.0, worse if method == "ats" else difference(0.0, 0.1))
                for method in ("ats", "temperature")
                for source in "ab"
            }
        }
        for target in "ab"
    }
    assert "in 2 of 2 pairs of domains for ATS and in 0 of 2" in study_verdict({"study": "transfer", "sets": sets})


def test_layer_and_task_verdicts(documents):
    layers = copy.deepcopy(documents["layers"])
    rows = layers["held_out"]["methods"]
    for ece, high, expected in (
        (0.5, -0.1, "lowers the ECE of the held-out half, significantly"),
        (0.5, 0.1, "lowers the ECE of the held-out half, but not significantly"),
        (2.0, 0.1, "WARNING: the edit chosen on one half makes the held-out half worse"),
    ):
        layers["direction"]["difference"]["high"] = high
        rows["edited"] = copy.deepcopy(rows["uncalibrated"])
        rows["edited"]["ece"]["value"] *= ece
        assert expected in verdict(layers)
    del rows["edited"]
    assert verdict(layers).startswith("No edit along the direction lowered the ECE")
    answers = documents["tasks"]["held_out"]
    base = {**answers, "methods": {"uncalibrated": answers["methods"]["uncalibrated"]}}
    assert re.match("The uncalibrated model is (over|under)confident: mean confidence 0", set_verdict(base))


def test_the_verdict_is_the_first_line(documents, capsys):
    study = documents["study"]
    print_study(study)
    assert " ".join(capsys.readouterr().out.split()).startswith(study_verdict(study))
    print_comparison(documents["compare"]["held_out"], "x")
    assert capsys.readouterr().out.startswith(verdict(documents["compare"]))
    for kind in ("tokens", "layers", "lhts", "tasks"):
        print_report(documents[kind])
        assert capsys.readouterr().out.startswith(verdict(documents[kind]))
        assert verdict(documents[kind])
    assert len(list(study_figures(study))) == 1
