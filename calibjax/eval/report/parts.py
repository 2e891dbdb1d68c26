"""What single commands show beside their sets, as sentences and tables: layers, texts, subjects."""

import re
from collections.abc import Callable
from typing import NamedTuple

from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import (
    ABSENT,
    Row,
    TextTable,
    interval,
    table_of,
    title_of,
    unit_of,
)


class Part(NamedTuple):
    """A section of a report: its title, findings as sentences, names of figures, and tables."""

    title: str
    findings: list[str]
    figures: tuple[str, ...]
    tables: list[TextTable]


def parts_of(document: Document) -> list[Part]:
    """The parts of a run in the order of display; `figures` may name some that the run does not have."""
    parts = []
    if "layers" in document:
        parts.append(Part("Layers", layer_findings(document), ("layers", "sweep", "subjects"), layer_tables(document)))
    if "texts" in document:
        parts.append(Part("Texts", text_findings(document), ("diversity",), [text_table(document)]))
    for name, results in document.get("tasks", {}).items():
        if results["subjects"]:
            figures = (subjects_name(document, name),)
            parts.append(Part(f"Subjects of {name}", [], figures, [subject_table(name, results)]))
    return parts


def _cell(key: str, form: str = ".3f") -> Callable[[Row], str]:
    """A number, or a figure with its interval."""
    return lambda row: interval(row[key], form) if isinstance(row[key], dict) else format(row[key], form)


# --- eval layers ---


def layer_findings(document: Document) -> list[str]:
    """Where the decision settles, whether there is a confidence-correction phase, and what the edit changes."""
    layers, direction = document["layers"], document["direction"]
    phase, settled, last = layers["phase"], layers["phase"]["settled"], len(layers["curves"]) - 1
    lines = [
        f"The decision settles at layer {settled} of {last}: from there on the most likely token equals the last "
        f"layer's for at least {phase['settled_share']:.0%} of the predictions."
    ]
    change = interval(phase["correction"], zero=True)
    if "p_value" in phase:
        change += f" (p = {phase['p_value']:.3f}, corrected for the choice of the layer)"
    if phase["found"]:
        lines.append(
            f"Confidence-correction phase found: from there ECE peaks at layer {phase['peak']} and falls to the last "
            f"layer by {change}."
        )
    elif settled == last:
        lines.append("No confidence-correction phase: the decision settles at the last layer.")
    else:
        lines.append(
            f"No confidence-correction phase: from the largest ECE after layer {settled} (layer {phase['peak']}) to "
            f"the last layer, ECE falls by {change}."
        )
    chosen = direction["chosen"]
    if chosen["layer"]:
        lines.append(
            f"Edit chosen on one half: {chosen['strength']:+g} times the mean residual norm along the direction after "
            f"block {chosen['layer']}. On the held-out half it changes ECE by "
            f"{interval(direction['difference'], zero=True)}."
        )
    return lines


def layer_tables(document: Document) -> list[TextTable]:
    """The layers; the direction after each block; the sweep on the held-out half; neurons, without them; subjects."""
    direction, unit = document["direction"], unit_of(document["held_out"])
    first, second = direction["counts"]
    chosen = (direction["chosen"]["layer"], direction["chosen"]["strength"])

    def held_out(key: str) -> Callable[[Row], str]:
        return lambda row: interval(row["held_out"][key], ".3f")

    tables = [
        layer_table(document),
        table_of(
            f"direction {direction['recipe']!r}: {first:,} against {second:,} {unit}; expected fraction of a random "
            f"vector in the null space: {direction['expected_share']:.3f}",
            direction["rows"],
            {
                "block": _cell("layer", ""),
                "gap / norm": lambda row: f"{row['gap'] / row['length']:.4f}",
                "mean norm": _cell("length"),
                "fraction in the null space": _cell("null_space_share"),
            },
        ),
        table_of(
            "sweep: c in mean norms of the residual, on the held-out half [95% interval]",
            document["sweep"],
            {
                "block": lambda row: str(row["layer"]) if row["layer"] else "none",
                "c": _cell("strength", "+g"),
                "ECE": held_out("ece"),
                "MCE": held_out("mce"),
                "accuracy": held_out("accuracy"),
                "confidence": held_out("confidence"),
                "ECE, half that chooses": lambda row: f"{row['fit']['ece']:.4f}",
                "": lambda row: "chosen" if (row["layer"], row["strength"]) == chosen else "",
            },
        ),
        table_of(
            "entropy neurons: large norm, small direct effect on the logits",
            document["neurons"],
            {
                "block": _cell("layer", ""),
                "neuron": _cell("index", ""),
                "norm": _cell("norm", ".4g"),
                "norm, percentile": lambda row: f"{row['norm_percentile']:.0f}%",
                "logit variance": _cell("logit_variance", ".2e"),
                "percentile": lambda row: f"{row['logit_variance_percentile']:.0f}%",
                "fraction in the null space": _cell("null_space_share"),
            },
        ),
    ]
    if "ablation" in document:
        figures = ("entropy", "confidence", "accuracy", "ece", "nll")
        tables.append(
            table_of(
                "the entropy neurons of the last block changed, beside others of equal norm; held-out half",
                document["ablation"],
                {"change": lambda row: row["name"]}
                | {key.upper() if key in ("ece", "nll") else key: _cell(key, ".4f") for key in figures},
            )
        )
    return [*tables, layer_subjects(document)] if document["subjects"] else tables


def layer_table(document: Document) -> TextTable:
    """A row for each layer, the one at which the decision settles highlighted."""
    layers, unit = document["layers"], unit_of(document["held_out"])
    return table_of(
        f"layers: {layers['tokens']:,} {unit}, {layers['readout']} [95% interval]; same token: as the last layer's",
        layers["curves"],
        {
            "layer": _cell("layer", ""),
            "accuracy": _cell("accuracy"),
            "confidence": _cell("confidence"),
            "ECE": _cell("ece"),
            "MCE": _cell("mce"),
            "entropy": _cell("entropy"),
            "KL to last": _cell("kl"),
            "same token": _cell("agreement"),
        },
        order=(3, 2, 7, 1, 5, 6, 4),
        best=(layers["phase"]["settled"],),
    )


def layer_subjects(document: Document) -> TextTable:
    """A row for each subject, at the last layer."""
    return table_of(
        "subjects, at the last layer, the most overconfident first [95% interval, Wilson]",
        document["subjects"],
        {
            "subject": lambda row: row["subject"],
            unit_of(document["held_out"]): _cell("questions", ","),
            "confidence": _cell("confidence"),
            "accuracy": _cell("accuracy"),
            "confidence - accuracy": _cell("gap", "+.3f"),
        },
    )


# --- subjects of eval tasks ---


def subjects_name(document: Document, task: str) -> str:
    """The file name of the figure of a task's subjects: with the task's name, or its number if that is no file name."""
    is_file_name = re.fullmatch(r"\w[\w.-]{,79}", task, re.ASCII)
    return f"subjects-{task if is_file_name else list(document['tasks']).index(task)}"


def subject_table(task: str, results: Row) -> TextTable:
    """A row for each subject of a task, first the one on which the uncalibrated model is the most overconfident."""
    methods = list(results["methods"])
    columns: dict[str, Callable[[Row], str]] = {
        "subject": lambda row: row["subject"],
        "questions": _cell("questions", ","),
        "accuracy, uncalibrated": _cell("accuracy"),
    }
    for method in methods:
        columns[f"confidence, {title_of(method)}"] = lambda row, m=method: f"{row['methods'][m]['confidence']:.3f}"
        columns[f"ECE, {title_of(method)}"] = lambda row, m=method: interval(row["methods"][m]["ece"], ".3f")
    return table_of(
        f"subjects of {task} [95% interval: Wilson's for accuracy, over questions for ECE]",
        results["subjects"],
        columns,
        order=(2, *range(4, 4 + 2 * len(methods), 2), 1),
    )


# --- train lhts ---


def text_findings(document: Document) -> list[str]:
    """A sentence for each model but the pretrained one, at the first myopic temperature."""
    texts, methods = document["texts"], document["held_out"]["methods"]
    temperature = next(iter(texts["pretrained"]))
    base = texts["pretrained"][temperature]
    return [
        f"{name} at myopic temperature {temperature}: log p of a token {row[temperature]['log_prob']:.3f} against "
        f"{base['log_prob']:.3f} of the pretrained model, distinct-2 {row[temperature]['distinct_2']:.3f} against "
        f"{base['distinct_2']:.3f}; NLL of held-out text {methods[name]['nll']:.4f} against "
        f"{methods['pretrained']['nll']:.4f}."
        for name, row in texts.items()
        if name != "pretrained"
    ]


def text_table(document: Document) -> TextTable:
    """A row for every model at every myopic temperature: likelihood and diversity of its text, accuracy, NLL."""
    texts, analogies, methods = document["texts"], document["analogies"], document["held_out"]["methods"]
    rows = [
        {**cell, "name": f"{name}, {temperature}", "nll": methods[name]["nll"]}
        | {"analogies": analogies.get(name, {}).get(temperature)}
        for name, cells in texts.items()
        for temperature, cell in cells.items()
    ]
    columns: dict[str, Callable[[Row], str]] = {
        "model, myopic temperature": lambda row: row["name"],
        "log p of a token": lambda row: f"{row['log_prob']:.3f} ± {row['log_prob_error']:.3f}",
        "distinct-2": _cell("distinct_2"),
        "repeated 4-grams": _cell("repetition"),
        "analogies, %": _analogies,
        "distinct-1": _cell("distinct_1"),
        "distinct-3": _cell("distinct_3"),
        "self-BLEU": lambda row: f"{row['self_bleu']:.1f}",
        "NLL, held-out text": _cell("nll", ".4f"),
    }
    if not analogies:
        del columns["analogies, %"]
    if any(row["self_bleu"] is None for row in rows):
        del columns["self-BLEU"]
    return table_of("text of each model, ± standard error; log p under the pretrained model, nats", rows, columns)


def _analogies(row: Row) -> str:
    score = row["analogies"]
    return ABSENT if score is None else f"{100 * score['accuracy']:.1f} ± {100 * score['error']:.1f}"
