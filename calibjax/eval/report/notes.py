"""The words of a report: verdicts, warnings, conventions, limitations, and model cards.

A verdict is the first line of a result: one sentence, by one function for each kind of document. Where a method does
not beat temperature scaling, it states that.
"""

import math
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml

from calibjax.eval.report import tables
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import Row, counted, differs, interval, is_higher, is_lower, title_of, unit_of
from calibjax.metrics.intervals import wilson_interval
from calibjax.runtime.arrays import milliseconds
from calibjax.runtime.version import __version__


class Verdict(NamedTuple):
    """The first sentence on a result, "" where there is nothing to compare; a warning is printed with "WARNING: "."""

    text: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"WARNING: {self.text}" if self.is_warning else self.text


def verdict(document: Document) -> Verdict:
    if "layers" in document:
        return layers_verdict(document)
    if "texts" in document:
        return lhts_verdict(document)
    line = set_verdict(document["held_out"])
    return line._replace(text=line.text + _given_loss(document)) if line.is_warning else line


def fit_of(document: Document) -> Row:
    """What the run reports of its fit; empty for a command whose `fit` is an option."""
    fit = document.get("run", {}).get("fit")
    return fit if isinstance(fit, dict) else {}


def _given_loss(document: Document) -> str:
    """The sentence that the head of `train ats` was kept because its loss was fixed, not because it won; else ""."""
    plan = fit_of(document).get("plan", {})
    if plan.get("may_keep_temperature", True):
        return ""
    losses = ", ".join(str(loss) for loss, *_ in plan["trials"])
    return f" The head is kept because the loss is fixed ({losses}): auto keeps temperature scaling where no head wins."


def set_verdict(results: Row) -> Verdict:
    """The sentence of one set: a method is better where its ECE and NLL (else Brier score) are both lower."""
    methods = results["methods"]
    if "sort" in results:
        return comparison_verdict(results)
    if {"base", "fine_tuned"} <= methods.keys():
        return _fine_tuning_verdict(methods)
    if {"ats", "temperature", "uncalibrated"} <= methods.keys():
        return _ats_verdict(methods)
    if {"temperature", "uncalibrated"} <= methods.keys():
        scaled, base = methods["temperature"], methods["uncalibrated"]
        text, is_warning = _comparison("temperature scaling", scaled, "the uncalibrated model", base)
        return Verdict(text if is_warning else text[0].upper() + text[1:], is_warning)
    if methods.keys() == {"uncalibrated"} and results.get("unit") == "questions":
        return _base_verdict(methods["uncalibrated"])
    return _confidences_verdict(methods) if tables.compares_confidences(results) else Verdict("")


def _comparison(
    name: str,
    row: Row,
    other_name: str,
    other: Row,
    *,
    field: str = "against_uncalibrated",
    addition: str = "",
    must_differ: bool = False,
) -> Verdict:
    """The sentence on a row against another, by the tests in its `field`; `must_differ` warns of equality."""
    key, title = _proper_score(row, other)
    ece, score = _figures(row, other)
    differences = {figure: row.get(field, {}).get(figure) for figure in ("ece", key)}
    if reason := _why_equal(row, other, differences.values()):
        return Verdict(f"{name} does not differ from {other_name} {reason}: {ece}; {score}{addition}.", must_differ)
    differing = [figure for figure, x in differences.items() if x and differs(x)]
    subject = f"{name[0].upper()}{name[1:]}"
    if all(differences.values()) and len(differing) == 1:
        changed, same = ("ece", key) if differing == ["ece"] else (key, "ece")
        names, values = {"ece": "ECE", key: title}, {"ece": ece, key: score}
        improves = is_lower(differences[changed])
        comparative = "lower" if improves else "higher"
        line = f"{subject} has a {comparative} {names[changed]} than {other_name}: {values[changed]}"
        line = f"{line}; its {names[same]} does not differ beyond noise: {values[same]}{addition}."
        return Verdict(line, is_warning=not improves)
    better = f"{subject} is better calibrated than {other_name}: {ece}; {score}{addition}."
    return _worse(name, row, other_name, other, addition) or Verdict(better)


def _fine_tuning_verdict(methods: Row) -> Verdict:
    base, tuned, scaled = methods["base"], methods["fine_tuned"], methods.get("base_temperature")
    addition = ""
    if scaled is not None:
        addition = f"; the base model's ECE with temperature scaling is {scaled['ece']['value']:.4f}"
    name, base_name = "the fine-tuned model", "the base model"
    return _comparison(name, tuned, base_name, base, addition=addition, must_differ=True)


def _ats_verdict(methods: Row) -> Verdict:
    ats, scaled, base = (methods[name] for name in ("ats", "temperature", "uncalibrated"))
    key, title = _proper_score(ats, scaled)
    if all(ats[name] == scaled[name] for name in (key, "brier", "confidence")):
        line = f"ATS is temperature scaling here, which no head beat beyond noise: {'; '.join(_figures(scaled, base))}"
        return Verdict(f"{line} uncalibrated.", is_warning=True)
    uncalibrated = f" (uncalibrated ECE {base['ece']['value']:.4f}, {title} {base[key]:.4f})"
    verdict = _comparison(
        "ATS", ats, "temperature scaling", scaled, field="against", addition=uncalibrated, must_differ=True
    )
    differences = [ats.get("against_uncalibrated", {}).get(figure) for figure in ("ece", key)]
    if verdict.is_warning or (all(differences) and not any(map(is_higher, differences))):
        return verdict
    return _worse("ATS", ats, "the uncalibrated model", base) or verdict


def _base_verdict(base: Row) -> Verdict:
    word, ends = "neither over- nor underconfident beyond noise", base["accuracy_interval"]
    if not ends["low"] <= base["confidence"] <= ends["high"]:
        word = "overconfident" if base["confidence"] > base["accuracy"] else "underconfident"
    figures = f"mean confidence {base['confidence']:.4f} at accuracy {base['accuracy']:.4f}"
    line = f"The uncalibrated model is {word}: {figures}, ECE {base['ece']['value']:.4f}."
    return Verdict(f"{line} No temperature or head was given to compare with.")


def _confidences_verdict(methods: Row) -> Verdict:
    base = methods["uncalibrated"]

    def figure(name: str, field: str) -> str:
        return f"{methods[name][field]:.4f}" + ("" if name == "uncalibrated" else f" (uncalibrated {base[field]:.4f})")

    lowest = min(methods, key=lambda name: methods[name]["brier"])
    compared = f"Of {len(methods)} confidences in the answers (accuracy {base['accuracy']:.4f})"
    line = f"{compared} {title_of(lowest)} has the lowest Brier score, {figure(lowest, 'brier')}"
    ranked = {name: row["auroc"] for name, row in methods.items() if row["auroc"] is not None}
    if ranked and base["auroc"] is not None:
        highest = max(ranked, key=lambda name: ranked[name])
        subject = "" if highest == lowest else f"{title_of(highest)} "
        line += f", and {subject}the highest AUROC, {figure(highest, 'auroc')}"
    return Verdict(f"{line}; the differences are not tested.")


def _proper_score(row: Row, other: Row) -> tuple[str, str]:
    """Field and title of the proper score: Brier where a row has no likelihood, as generated answers have none."""
    return ("brier", "Brier") if row["nll"] is None or other["nll"] is None else ("nll", "NLL")


def _figures(row: Row, other: Row) -> tuple[str, str]:
    key, title = _proper_score(row, other)
    ece = f"ECE {row['ece']['value']:.4f} against {other['ece']['value']:.4f}"
    return ece, f"{title} {row[key]:.4f} against {other[key]:.4f}"


def _why_equal(row: Row, other: Row, tests: Iterable[Row | None]) -> str:
    """Why a row counts as equal to another: "here" if the figures of a sentence are equal, "beyond noise" if none of
    the differences `tests` is significant; "" if it differs."""
    key, _ = _proper_score(row, other)
    pairs = (row["ece"]["value"], other["ece"]["value"]), (row[key], other[key])
    if all(f"{a:.4f}" == f"{b:.4f}" for a, b in pairs):
        return "here"
    return "beyond noise" if all(test and not differs(test) for test in tests) else ""


def _worse(name: str, row: Row, other_name: str, other: Row, addition: str = "") -> Verdict | None:
    """The warning that a row's ECE or score is higher than another's; None if neither is."""
    key, title = _proper_score(row, other)
    ece, score = _figures(row, other)
    lower_ece = row["ece"]["value"] <= other["ece"]["value"]
    lower_score = row[key] <= other[key]
    if lower_ece and lower_score:
        return None
    text = f"{name} is worse than {other_name} here: {ece}; {score}{addition}."
    if lower_ece:
        text = f"{name} is better than {other_name} in ECE only: {ece}; {score}{addition}."
    if lower_score:
        text = f"{name} is better than {other_name} in {title} only: {score}; {ece}{addition}."
    return Verdict(text, is_warning=True)


def comparison_verdict(results: Row) -> Verdict:
    """The `winner` of `compare`, or that none beats temperature scaling; and its test against no calibration."""
    rows, reference, best = results["methods"], results["reference"], tables.winner(results)
    finite = {name: row["log_loss"] for name, row in rows.items() if row["log_loss"] is not None}
    if not finite:
        line = "every method has an infinite log loss here: each gave 1 to a wrong answer, or 0 to a right one."
        return Verdict(line, is_warning=True)
    scaling, unconverged = title_of(reference), results.get("not_converged", ())
    if reference not in finite:
        shown = f"{title_of(best)}, {finite[best]:.4f}" if best in finite else "none of a fit that converged"
        return Verdict(f"Lowest log loss: {shown}; {scaling} has no finite log loss to compare with.")
    if best != reference:
        losses = f"its log loss, {finite[best]:.4f}, is significantly below {finite[reference]:.4f} of {scaling}"
        line = f"{title_of(best)} wins: {losses} ({_tested(rows, best)})"
        return Verdict(f"{line}{_against_uncalibrated(rows, best, ', and ')}.")
    ended = " (not converged)" if reference in unconverged else ""
    line = f"no method beats {scaling}{ended} beyond noise, log loss {finite[reference]:.4f}"
    others = [name for name in finite if name not in (reference, *unconverged)]
    nearest = min(others, key=lambda name: finite[name], default=reference)
    if finite[nearest] < finite[reference] and "log_loss" in rows[nearest].get("against", {}):
        line += f"; the lowest is {finite[nearest]:.4f} of {title_of(nearest)} ({_tested(rows, nearest)})"
    return Verdict(f"{line}{_against_uncalibrated(rows, reference, f', and {scaling} is ')}.", is_warning=True)


def _tested(rows: Row, name: str) -> str:
    count = sum("log_loss" in row.get("against", {}) for row in rows.values())
    against = rows[name]["against"]["log_loss"]
    p = tables.short(against.get("holm_p", math.nan), ".3f")
    return f"{interval(against)}, p = {p} after Holm's correction for {count} comparisons"


def _against_uncalibrated(rows: Row, name: str, joint: str) -> str:
    """Whether a method beats the uncalibrated predictions; "" where that was not compared."""
    base = rows.get("uncalibrated")
    against = rows[name].get("against_uncalibrated", {}).get("log_loss")
    if base is None or against is None or base["log_loss"] is None:
        return ""
    word = "not different beyond noise from"
    if differs(against):
        word = "significantly " + ("below" if is_lower(against) else "above")
    return f"{joint}{word} {base['log_loss']:.4f} uncalibrated ({interval(against)})"


def final_candidate(comparison: Row) -> str:
    """The name of what was fitted in the end: a head with its loss, or temperature scaling."""
    chosen = comparison["chosen"] or comparison["candidates"][:1]
    return chosen[-1]["candidate"]


def choice_verdict(comparison: Row) -> str:
    measured = "NLL, Brier score and debiased calibration error are of sequences that training never saw"
    if not comparison["chosen"]:
        return f"No candidate beats temperature scaling beyond noise, so temperature scaling is kept. {measured}."
    scaled, best = comparison["chosen"]
    if not best["beats_temperature"]:
        return f"Kept, as the loss is fixed: {best['candidate']}, which does not beat temperature scaling. {measured}."
    figures = f"{best['calibration_error']:.4f} against {scaled['calibration_error']:.4f} on all folds"
    by_error = f"by the calibration error ({figures}) of the losses whose NLL is within noise of the lowest"
    by_nll = "by NLL where the least one does not beat temperature scaling"
    return f"Chosen: {best['candidate']}, {by_error}, or {by_nll}. {measured}."


def plan_verdict(document: Document) -> str:
    likely = "probably " if document["fits"] is None else ""
    fits = "fits" if document["likely_fits"] else "does not fit"
    bound = milliseconds(document["roofline_seconds"]["bound"])
    step = "{model}, {objective}, {batch} x {seq} tokens per step, {dtype}".format(**document)
    devices = f"{document['devices']} device{'s' * (document['devices'] > 1)} ({document['topology']})"
    return f"This {likely}{fits}; a step takes at least {bound}: {step}, on {devices}."


def lhts_verdict(document: Document) -> Verdict:
    """The text of the model of `train lhts` against the pretrained model's, at the first myopic temperature."""
    texts = document["texts"]
    temperature = next(iter(texts["pretrained"]))
    trained = {name: rows[temperature] for name, rows in texts.items() if name.startswith("lhts")}
    if not trained:
        return Verdict("")
    base = texts["pretrained"][temperature]
    name = max(trained, key=lambda name: trained[name]["log_prob"])
    row = trained[name]
    gain = row["log_prob"] - base["log_prob"]
    noise = 2 * (row["log_prob_error"] ** 2 + base["log_prob_error"] ** 2) ** 0.5
    varied = "less" if row["distinct_2"] < base["distinct_2"] else "not less"
    log_probs = f"log p of a token {row['log_prob']:.3f} against {base['log_prob']:.3f}"
    figures = f"{log_probs}, distinct-2 {row['distinct_2']:.3f} against {base['distinct_2']:.3f}"
    at = f"at myopic temperature {temperature}"
    if gain <= noise:
        word = "lies within two standard errors of" if gain >= -noise else "is lower than"
        line = f"the likelihood of {name}'s text {at} {word} that of the pretrained model's: {figures}."
        return Verdict(line, is_warning=True)
    line = f"{name} writes text {at} that is more likely and {varied} varied than the pretrained model's: {figures}."
    return Verdict(line)


def layers_verdict(document: Document) -> Verdict:
    """The effect of the edit that `eval layers` chose, on the half of the data that did not choose it."""
    methods, difference = document["held_out"]["methods"], document["direction"]["difference"]
    before, after = methods["uncalibrated"], methods.get("edited")
    if after is None:
        line = "No edit along the direction lowered the ECE of the half that chooses: the model is left unedited"
        return Verdict(f"{line}, ECE {before['ece']['value']:.4f} on the held-out half.")
    accuracy = f"accuracy {after['accuracy']:.4f} against {before['accuracy']:.4f}"
    figures = "; ".join([*_figures(after, before), accuracy])
    is_raised = after["ece"]["value"] > before["ece"]["value"]
    is_significant = is_higher(difference) if is_raised else is_lower(difference)
    change = f"{'raises' if is_raised else 'lowers'} the ECE of the held-out half"
    line = f"edit chosen on one half {change}, " + ("significantly" if is_significant else "but not significantly")
    if is_raised or after["nll"] > before["nll"]:
        also = "" if is_raised else ", and raises its NLL"
        return Verdict(f"the {line}{also}: {figures}.", is_warning=True)
    return Verdict(f"The {line}: {figures}.")


def bounds_verdict(document: Document) -> str:
    models = document["models"]
    tightest = max(models, key=lambda model: model["bound"]["log_entropy"])
    subject = "The model with the tightest bound" if len(models) > 1 else "The model"
    entropy = tables.scientific(tightest["bound"]["log_entropy"])
    confidence = f"1 - {tables.scientific(tightest['log_one_minus_confidence'])}"
    limits = f"cannot have an entropy below {entropy} nats, nor a confidence above {confidence}, on any text"
    return f"{subject}, {tightest['model']}, {limits}."


# --- warnings, conventions, limitations ---


def small_set_warning(name: str, results: Row) -> Verdict:
    """A warning with Wilson's interval of the accuracy where a set has fewer than 200 questions; "" otherwise."""
    count = results["tokens"]
    if not 0 < count < 200:
        return Verdict("")
    accuracy = next(iter(results["methods"].values()))["accuracy"]
    low, high = wilson_interval(round(accuracy * count), count)
    limits = f"the 95% interval of its accuracy is [{low:.2f}, {high:.2f}]"
    line = f"{name} has only {counted(results)}: {limits}, and its calibration errors are imprecise."
    return Verdict(line, is_warning=True)


def conventions(results: Row) -> str:
    """The binning and the intervals of a set's figures."""
    ece = next(iter(results["methods"].values()))["ece"]
    tokens = unit_of(results) == "tokens"
    confidence, scored = ("top token's probability", "top token") if tokens else ("confidence", "answer")
    definition = f" Confidence: {results['confidence']}." if "confidence" in results else ""
    bins = f"{ece['bins']} equal-width bins {tables.binning(ece['closed'])} of the {confidence}"
    resampled = f"95%, of the population's ECE in these bins, over {results.get('clusters', 'sequences')}"
    return f"ECE, MCE: {bins}; interval: {resampled}. Brier: of the {scored}.{definition}"


def notes_of(document: Document) -> list[str]:
    """The verdicts of further sets, remarks on benchmarks, and the conventions of the figures."""
    notes = []
    titles_of_remark: dict[str, list[str]] = {}
    for index, (title, results) in enumerate(tables.sets_of(document)):
        line = set_verdict(results)
        if index and line.text:
            notes.append(f"{title}: {line}")
        for remark in tables.remarks(results):
            titles_of_remark.setdefault(remark, []).append(title)
    notes += [f"{', '.join(titles)}: {remark}." for remark, titles in titles_of_remark.items()]
    return [*notes, conventions(document["held_out"])]


def model_of(run: Row) -> str:
    return _short(run.get("model")) or ("small decoder" if run.get("command") == "quickstart" else "")


def data_of(run: Row) -> str:
    keys = ("tasks",) if run.get("tasks") else ("data", "table")
    names = ", ".join(filter(None, [_short(run.get(key)) for key in keys]))
    return names or ("a synthetic language" if run.get("command") == "quickstart" else "")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return re.sub(r"\.(jsonl|json|csv|parquet|txt|npz)(\.gz)?$", "", Path(str(value)).name) if value else ""


def limitations(document: Document) -> list[str]:
    """What the results do not show, one sentence each."""
    held_out = document["held_out"]
    lines = [
        f"The figures hold for text like the {held_out['tokens']:,} held-out {unit_of(held_out)}; on another domain a "
        "method can be better or worse."
        + ("" if "transfer" in document or "tasks" in document else " Nothing else was evaluated in this run."),
        "Intervals show the noise of the held-out data alone, not the noise of another fit with another seed.",
        "ECE depends on its bins; two methods whose intervals overlap widely are not ranked by it. Log-likelihood and "
        "Brier score do not depend on bins.",
    ]
    if "ats" in held_out["methods"]:
        lines.append(
            "A temperature changes how confident the model is, never which token is the most likely; it does not make "
            "the model more accurate, and the head belongs to this base model alone."
        )
    if unit_of(held_out) == "tokens":
        lines.append("Confidence of a token is not confidence of an answer: calibrated tokens can form wrong answers.")
    if document.get("run", {}).get("command") == "quickstart":
        lines.append("Language and model are tiny and synthetic: they show the method, not its effect on yours.")
    return lines


class Subject(NamedTuple):
    """What a card is about: a head, its repository and method ("ats" or "temperature"), and its base model."""

    repository: str
    base: str | None
    revision: str | None
    name: str
    fingerprint: str
    method: str
    head: str


def model_card(document: Document, subject: Subject) -> str:
    """The README.md of a repository of the Hub: metadata as YAML, facts, results, diagram, code and limitations."""
    metadata = {
        "library_name": "calibjax",
        "tags": ["calibration", "temperature-scaling", "uncertainty"],
        "pipeline_tag": "text-generation",
    }
    if subject.base is not None:
        metadata |= {"base_model": subject.base, "base_model_relation": "adapter"}
    name = _markdown_text(subject.base or subject.name)
    base = name + (f" at revision {subject.revision}" if subject.revision else "")
    method, loss = "Adaptive Temperature Scaling (arXiv 2409.19817)", fit_of(document).get("candidate", "")
    if subject.method == "temperature" or loss == "temperature scaling":  # which no head beat
        method, loss = "temperature scaling", "cross-entropy"
    facts = {
        "Base model": f"{base}; frozen",
        "Fingerprint": f"`{subject.fingerprint}`",
        "Data": _markdown_text(data_of(document.get("run", {}))),
        "Method": f"{method}: {_markdown_text(subject.head)}",
        "Loss": _markdown_text(loss),
        "Evaluated on": f"{counted(document['held_out'])}, held out",
        "Written by": f"calibjax {__version__}",
    }
    results = tables.held_out_table(document, intervals=True)
    prefixes = [f"{group}: " for group in results.groups] or [""] * len(results.rows)
    rows = [[prefix + method, *cells] for prefix, (method, *cells) in zip(prefixes, results.rows, strict=True)]
    path = subject.base or "path/to/base-model"
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    # A cell is on one line, without characters that end it or begin a tag.
    environment.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    environment.filters["repr"] = repr
    template = resources.files("calibjax.eval.report").joinpath("card.md.jinja").read_text("utf-8")
    return environment.from_string(template).render(
        subject=subject,
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        name=name,
        verdict=str(verdict(document)),
        facts=[(title, value) for title, value in facts.items() if value],
        columns=results.columns,
        rows=rows,
        remarks=notes_of(document),
        base=path,
        pinned=f"{path}@{subject.revision}" if subject.revision else path,
        limitations=limitations(document),
    )


def _markdown_text(text: str) -> str:
    """Names of files and models without characters that Markdown or HTML interpret."""
    return "".join(character if character.isalnum() or character in " ./:-_,()=+" else "?" for character in text)
