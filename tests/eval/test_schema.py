"""Damaged metrics.json and tokens.json are one `UserError`, and never a traceback; the verdicts of every command."""

import copy
import json
import re

import pytest
import report_documents

from calibjax.eval.report import figures, page
from calibjax.eval.report.notes import comparison_verdict, lhts_verdict, set_verdict, verdict
from calibjax.eval.report.schema import SCHEMA, as_user_error, read_metrics, read_tokens
from calibjax.eval.report.tables import sets_of, winner
from calibjax.eval.report.terminal import print_comparison, print_report
from calibjax.runtime.errors import UserError


@pytest.fixture(scope="module")
def documents():
    return report_documents.documents()


def mutations(value, path=()):
    """Damaged copies with the path of the damage: an entry removed, null, or of another type; of a list its first."""
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:1]
    for key, entry in entries:
        for damage in (None, "text", -3.5, [], {}, True):
            if type(damage) is not type(entry):
                changed = copy.copy(value)
                changed[key] = damage
                yield (*path, key), changed
        changed = copy.copy(value)
        del changed[key]
        yield (*path, key), changed
        if isinstance(entry, dict | list):
            for place, inner in mutations(entry, (*path, key)):
                changed = copy.copy(value)
                changed[key] = inner
                yield place, changed


@pytest.mark.parametrize(
    "kind", ["lhts", *(pytest.param(k, marks=pytest.mark.slow) for k in ("compare", "tokens", "layers"))]
)
def test_damaged_documents(documents, kind, tmp_path, monkeypatch, capsys):
    """Each is refused, or drawn and printed; of what passes the check, each place is drawn once."""
    for name in ("svg", "png"):  # drawing takes seconds
        monkeypatch.setattr(page, name, lambda *_: "")
    monkeypatch.setattr(figures.Drawing, "figure", lambda self: None)
    monkeypatch.setattr(figures.Panel, "figure", lambda self: None)
    file, refused, drawn = tmp_path / "metrics.json", 0, set()
    methods = documents[kind]["held_out"]["methods"]
    for path, damaged in mutations(documents[kind]):
        place = tuple(part for part in path if part not in methods)
        file.write_text(json.dumps(damaged))
        try:
            read_metrics(file)
            if place in drawn or path[0] == "run":
                continue
            drawn.add(place)
            with as_user_error(file):
                if kind == "compare":
                    print_comparison(damaged["held_out"], "x")
                else:
                    print_report(damaged)
                    page.page([page.Run("", damaged)])
        except UserError as error:
            refused += str(error).startswith(f"{file}: ")
        capsys.readouterr()
    assert refused > len(drawn) / 2 > 20, (refused, len(drawn))


def test_damaged_tokens(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "svg", lambda *_: "")
    monkeypatch.setattr(figures.Panel, "figure", lambda self: None)
    file, refused = tmp_path / "tokens.json", 0
    for _, damaged in mutations(report_documents.sample()):
        file.write_text(json.dumps(damaged))
        try:
            page.page([page.Run("", documents["tokens"], read_tokens(tmp_path))])
        except UserError as error:
            refused += str(error).startswith(f"{file}: ")
    assert refused > 20


def test_the_entry_is_named(documents, tmp_path):
    document = copy.deepcopy(documents["tokens"])
    ats, file = document["held_out"]["methods"]["ats"], tmp_path / "metrics.json"
    ats["ece"]["value"] = "much"
    for text, message in (
        (json.dumps(document), 'held_out.methods.ats.ece.value: expected a finite number, found "much"'),
        (json.dumps({**document, "schema": 2}), f"expected metrics of schema {SCHEMA}"),
        ("[]", f"expected metrics of schema {SCHEMA}"),
        ("{", "is not readable"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(message)):
            read_metrics(file)
    del ats["ece"]
    with pytest.raises(UserError, match="the entry 'ece' is missing"), as_user_error(file):
        print_report(document)


def compared(log_losses, unconverged=(), **against):
    rows = {
        name: {"log_loss": value, "against": {"log_loss": against[name]} if name in against else {}}
        for name, value in log_losses.items()
    }
    return {"methods": rows, "reference": "temperature", "sort": "ece", "not_converged": list(unconverged)}


def difference(value, noise, p=0.01):
    return {"difference": value, "low": value - noise, "high": value + noise, "holm_p": p}


LOWER, NOISE = difference(-0.1, 0.05), difference(-0.1, 0.2, 0.9)


@pytest.mark.parametrize(
    ("results", "best", "expected"),
    [
        (
            compared({"temperature": 0.5, "ats": 0.4}, ats=LOWER),
            "ats",
            "ATS wins: its log loss, 0.4000, is significantly below 0.5000 of temperature scaling (-.1000",
        ),
        (compared({"temperature": 0.5, "ats": 0.4}, ats=NOISE), "temperature", "WARNING: no method beats temperature"),
        # An interval below 0 that the correction for the number of methods does not support.
        (
            compared({"temperature": 0.5, "ats": 0.4}, ats=difference(-0.1, 0.05, 0.06)),
            "temperature",
            "WARNING: no method beats temperature scaling beyond noise, log loss 0.5000; the lowest is 0.4000 of ATS",
        ),
        # Every row is judged: the lowest log loss is noise, or did not converge, and the second is significant.
        (compared({"x": 0.38, "ats": 0.4, "temperature": 0.5}, x=NOISE, ats=LOWER), "ats", "ATS wins"),
        (compared({"x": 0.3, "ats": 0.4, "temperature": 0.5}, ["x"], x=LOWER, ats=LOWER), "ats", "ATS wins"),
        (compared({"x": 0.3, "temperature": 0.5}, ["x"], x=LOWER), "temperature", "WARNING: no method beats temp"),
        (compared({"temperature": None, "ats": 0.4}), "ats", "Lowest log loss: ATS, 0.4000; temperature scaling has"),
        (compared({"temperature": None, "ats": None}), "temperature", "WARNING: every method has an infinite log loss"),
    ],
)
def test_comparison_verdict(results, best, expected):
    assert winner(results) == best
    assert str(comparison_verdict(results)).startswith(expected)
    assert set_verdict(results) == comparison_verdict(results)


def test_comparison_with_uncalibrated():
    results = compared({"temperature": 0.5, "ats": 0.4, "uncalibrated": 0.6}, ats=LOWER)
    for value, noise, words in (
        (-0.2, 0.1, "significantly below"),
        (0.2, 0.1, "significantly above"),
        (-0.1, 0.2, "not different beyond noise from"),
    ):
        results["methods"]["ats"]["against_uncalibrated"] = {"log_loss": difference(value, noise)}
        assert f"{words} 0.6000 uncalibrated" in comparison_verdict(results).text


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
    assert str(lhts_verdict({"texts": texts})).startswith(expected)


def test_verdict_of_confidences_in_answers():
    rows = {"uncalibrated": (0.2, 0.7), "minimum": (0.15, 0.75), "p_true": (0.3, None), "product": (0.16, 0.8)}
    methods = {name: {"brier": brier, "auroc": auroc, "accuracy": 0.25} for name, (brier, auroc) in rows.items()}
    results = {"methods": methods, "unit": "questions"}
    assert set_verdict(results).text == (
        "Of 4 confidences in the answers (accuracy 0.2500) minimum has the lowest Brier score, 0.1500 (uncalibrated "
        "0.2000), and product the highest AUROC, 0.8000 (uncalibrated 0.7000); the differences are not tested."
    )
    methods["uncalibrated"]["auroc"] = 0.9
    assert "and uncalibrated the highest AUROC, 0.9000; the" in set_verdict(results).text


def test_held_out_parts_are_no_transfer():
    document = {"held_out": {}, "transfer": {"a, held out": {}, "b": {}}}
    assert [title for title, _ in sets_of(document)] == ["held out", "a, held out", "transfer to b"]


def test_layer_and_task_verdicts(documents):
    layers = copy.deepcopy(documents["layers"])
    rows = layers["held_out"]["methods"]
    for ece, nll, low, high, expected in (
        (0.5, 1.0, -0.2, -0.1, "lowers the ECE of the held-out half, significantly: "),
        (0.5, 1.1, -0.2, -0.1, "lowers the ECE of the held-out half, significantly, and raises its NLL: "),
        (0.5, 1.0, -0.2, 0.1, "lowers the ECE of the held-out half, but not significantly"),
        (2.0, 1.1, -0.1, 0.2, "raises the ECE of the held-out half, but not significantly: "),
        (2.0, 1.0, 0.1, 0.2, "WARNING: the edit chosen on one half raises the ECE of the held-out half, significantly"),
    ):
        layers["direction"]["difference"] |= {"low": low, "high": high}
        rows["edited"] = copy.deepcopy(rows["uncalibrated"])
        rows["edited"]["ece"]["value"] *= ece
        rows["edited"]["nll"] *= nll
        assert expected in str(verdict(layers))
    del rows["edited"]
    assert str(verdict(layers)).startswith("No edit along the direction lowered the ECE")
    answers = documents["tasks"]["held_out"]
    row = {**answers["methods"]["uncalibrated"], "accuracy": 0.5, "accuracy_interval": {"low": 0.4, "high": 0.6}}
    for confidence, word in ((0.35, "under"), (0.45, "neither over- nor under"), (0.65, "over")):
        base = {**answers, "methods": {"uncalibrated": {**row, "confidence": confidence}}}
        assert set_verdict(base).text.startswith(f"The uncalibrated model is {word}confident")


def test_the_verdict_is_the_first_line(documents, capsys):
    print_comparison(documents["compare"]["held_out"], "x")
    assert " ".join(capsys.readouterr().out.split()).startswith(str(verdict(documents["compare"])))
    for kind in ("tokens", "layers", "lhts", "tasks"):
        print_report(documents[kind], files="results in x")
        assert " ".join(capsys.readouterr().out.split()).startswith(str(verdict(documents[kind])))
        assert verdict(documents[kind]).text
