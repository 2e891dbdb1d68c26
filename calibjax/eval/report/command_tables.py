"""What single commands show beside their sets: layers, subjects, texts, bounds and plans."""

import functools
import re
from typing import NamedTuple

from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import Row, TextTable, interval, scientific, show, table_of, title_of, unit_of
from calibjax.runtime.arrays import milliseconds, readable_size


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
        parts.append(Part("Texts", [], ("diversity",), [text_table(document)]))
    for name, results in document.get("tasks", {}).items():
        if results["subjects"]:
            figures = (subjects_name(document, name),)
            parts.append(Part(f"Subjects of {name}", [], figures, [subject_table(name, results)]))
    return parts


_figure = functools.partial(show, form=".3f", leading_zero=False)
"""A figure with its interval, in the tables of single commands."""


def layer_findings(document: Document) -> list[str]:
    """Where the decision settles, whether there is a confidence-correction phase, and what the edit changes."""
    layers, direction = document["layers"], document["direction"]
    phase, last = layers["phase"], len(layers["curves"]) - 1
    settled = phase["settled"]
    fraction = f"{100 * phase['settled_fraction']:.4g}% of the predictions"
    agreement = f"from there on the most likely token equals the last layer's for at least {fraction}"
    lines = [f"The decision settles at layer {settled} of {last}: {agreement}."]
    change = interval(phase["correction"], leading_zero=True)
    if "p_value" in phase:
        change += f" (p = {phase['p_value']:.3f}, corrected for the choice of the layer)"
    if phase["found"]:
        course = f"from there ECE peaks at layer {phase['peak']} and falls to the last layer by {change}"
        lines.append(f"Confidence-correction phase found: {course}.")
    elif settled == last:
        lines.append("No confidence-correction phase: the decision settles at the last layer.")
    else:
        course = f"from the largest ECE after layer {settled} (layer {phase['peak']}) to the last layer"
        lines.append(f"No confidence-correction phase: {course}, ECE falls by {change}.")
    chosen = direction["chosen"]
    if chosen["layer"]:
        edit = f"{chosen['strength']:+g} times the mean residual norm along the direction after block {chosen['layer']}"
        change = interval(direction["difference"], leading_zero=True)
        lines.append(f"Edit chosen on one half: {edit}. On the held-out half it changes ECE by {change}.")
    return lines


def layer_tables(document: Document) -> list[TextTable]:
    """The layers; the direction after each block; the sweep on the held-out half; neurons, without them; subjects."""
    drawn = [_curve_table, _direction_table, _sweep_table, _neuron_table, _ablation_table]
    if document["subjects"]:
        drawn.append(_layer_subject_table)
    return [table(document) for table in drawn]


def _curve_table(document: Document) -> TextTable:
    layers, unit = document["layers"], unit_of(document["held_out"])
    return table_of(
        f"layers: {layers['tokens']:,} {unit}, {layers['readout']} [95% interval]; same token: as the last layer's",
        layers["curves"],
        {
            "layer": show("layer", form=""),
            **{name: _figure(name.lower()) for name in ("accuracy", "confidence", "ECE", "MCE", "entropy")},
            "KL to last": _figure("kl"),
            "same token": show("agreement", form=".3f"),
        },
        order=(3, 2, 7, 1, 5, 6, 4),
        best=(layers["phase"]["settled"],),
    )


def _direction_table(document: Document) -> TextTable:
    direction = document["direction"]
    first, second = direction["counts"]
    columns = {
        "block": show("layer", form=""),
        "gap / norm": lambda row: f"{row['gap'] / row['length']:.4f}",
        "mean norm": show("length", form=".3f"),
        "fraction in the null space": show("null_space_fraction", form=".3f"),
    }
    sets = f"{first:,} against {second:,} {unit_of(document['held_out'])}"
    expected = f"expected fraction of a random vector in the null space: {direction['expected_fraction']:.3f}"
    title = f"direction {direction['recipe']!r}: {sets}; {expected}"
    return table_of(title, direction["rows"], columns)


def _sweep_table(document: Document) -> TextTable:
    chosen = document["direction"]["chosen"]
    edit = chosen["layer"], chosen["strength"]
    columns = {
        "block": lambda row: str(row["layer"]) if row["layer"] else "none",
        "c": show("strength", form="+g"),
        **{name: _figure("held_out", name.lower()) for name in ("ECE", "MCE", "accuracy", "confidence")},
        "ECE, half that chooses": show("fit", "ece"),
        "edit": lambda row: "chosen" if (row["layer"], row["strength"]) == edit else "",
    }
    title = "sweep: c in mean norms of the residual, on the held-out half [95% interval]"
    return table_of(title, document["sweep"], columns)


def _neuron_table(document: Document) -> TextTable:
    columns = {
        "block": show("layer", form=""),
        "neuron": show("index", form=""),
        "norm": show("norm", form=".4g"),
        "norm, percentile": lambda row: f"{row['norm_percentile']:.0f}%",
        "logit variance": show("logit_variance", form=".2e"),
        "percentile": lambda row: f"{row['logit_variance_percentile']:.0f}%",
        "fraction in the null space": show("null_space_fraction", form=".3f"),
    }
    return table_of("entropy neurons: large norm, small direct effect on the logits", document["neurons"], columns)


def _ablation_table(document: Document) -> TextTable:
    figures = ("entropy", "confidence", "accuracy", "ECE", "NLL")
    columns = {"change": show("name"), **{name: show(name.lower()) for name in figures}}
    title = "the entropy neurons of the last block changed, beside others of equal norm; held-out half"
    return table_of(title, document["ablation"], columns)


def _layer_subject_table(document: Document) -> TextTable:
    columns = {
        "subject": show("subject"),
        unit_of(document["held_out"]): show("questions", form=","),
        "confidence": show("confidence", form=".3f"),
        "accuracy": _figure("accuracy"),
        "confidence - accuracy": show("gap", form="+.3f"),
    }
    title = "subjects, at the last layer, the most overconfident first [95% interval, Wilson]"
    return table_of(title, document["subjects"], columns)


def subjects_name(document: Document, task: str) -> str:
    """The file name of the figure of a task's subjects: with the task's name, or its number if that is no file name."""
    is_file_name = re.fullmatch(r"\w[\w.-]{,79}", task, re.ASCII)
    return f"subjects-{task if is_file_name else list(document['tasks']).index(task)}"


def subject_table(task: str, results: Row) -> TextTable:
    """A row for each subject of a task, first the one on which the uncalibrated model is the most overconfident."""
    methods = list(results["methods"])
    columns = {
        "subject": show("subject"),
        "questions": show("questions", form=","),
        "accuracy, uncalibrated": _figure("accuracy"),
    }
    for method in methods:
        columns[f"confidence, {title_of(method)}"] = show("methods", method, "confidence", form=".3f")
        columns[f"ECE, {title_of(method)}"] = _figure("methods", method, "ece")
    return table_of(
        f"subjects of {task} [95% interval: Wilson's for accuracy, over questions for ECE]",
        results["subjects"],
        columns,
        order=(2, *range(4, 4 + 2 * len(methods), 2), 1),
    )


def text_table(document: Document) -> TextTable:
    """A row for every model at every myopic temperature: likelihood and diversity of its text, accuracy, NLL."""
    texts, analogies, methods = document["texts"], document["analogies"], document["held_out"]["methods"]
    rows = []
    for name, cells in texts.items():
        for temperature, figures in cells.items():
            row = {**figures, "name": f"{name}, {temperature}", "nll": methods[name]["nll"]}
            row["likelihood"] = f"{figures['log_prob']:.3f} ± {figures['log_prob_error']:.3f}"
            score = analogies.get(name, {}).get(temperature)
            if score is not None:
                row["analogies"] = f"{100 * score['accuracy']:.1f} ± {100 * score['error']:.1f}"
            rows.append(row)
    columns = {
        "model, myopic temperature": show("name"),
        "log p of a token": show("likelihood"),
        "distinct-2": show("distinct_2", form=".3f"),
        "repeated 4-grams": show("repetition", form=".3f"),
        "analogies, %": show("analogies"),
        "distinct-1": show("distinct_1", form=".3f"),
        "distinct-3": show("distinct_3", form=".3f"),
        "self-BLEU": show("self_bleu", form=".1f"),
        "NLL, held-out text": show("nll"),
    }
    if not analogies:
        del columns["analogies, %"]
    if any(row["self_bleu"] is None for row in rows):
        del columns["self-BLEU"]
    return table_of("text of each model, ± standard error; log p under the pretrained model, nats", rows, columns)


def bounds_table(document: Document) -> TextTable:
    """A row for each model: its smallest entropy and largest confidence, and what they follow from."""
    columns = {
        "model": show("model"),
        "V": show("vocab_size", form=","),
        "D": show("hidden_size", form=","),
        "least entropy, nats": lambda row: scientific(row["bound"]["log_entropy"]),
        "1 - largest confidence": lambda row: scientific(row["log_one_minus_confidence"]),
        "|logits| at most": show("logit_norm", form=".4g"),
        "log V": show("bound", "uniform_entropy", form=".3f"),
        "soft-cap": show("softcap", form="g", absent="-"),
    }
    title = "bounds from the final norm and the unembedding"
    return table_of(title, document["models"], columns, order=(3, 4, 1, 2, 5, 6))


def plan_table(document: Document) -> TextTable:
    """Memory, operations and times of a step on each device; and of the run, if its length is known."""
    rows = [[name.replace("_", " "), readable_size(size)] for name, size in document["bytes_per_device"].items()]
    rows.append(["fits", _margin(document)])
    counts = document["parameters"]
    if counts["active"] < counts["total"]:
        rows.append(["parameters of the model", f"{counts['total']:,}"])
        rows.append(["parameters active for a token", f"{counts['active']:,}"])
    if document["stored_bytes_per_token"] is not None:
        rows.append(["stored from the frozen pass, per token", f"{document['stored_bytes_per_token']:,} bytes"])
    operations = f"{document['flops_per_device']:.3g} FLOP of {document['flops_per_step']:.3g} a step"
    rows.append(["operations", operations])
    for kind, moved in (document["collectives"] or {}).items():
        received = f"{readable_size(moved['bytes'])} received, the largest {readable_size(moved['largest'])}"
        rows.append([kind, f"{moved['count']:,} x, {received}"])
    rows += [[f"roofline, {name}", milliseconds(x)] for name, x in document["roofline_seconds"].items()]
    if run := document.get("run"):
        rows.append(["steps of the run", f"{run['steps']:,}"])
        if run["stored_bytes"] is not None:
            rows.append(["stored from the frozen pass, each host", readable_size(run["stored_bytes"])])
        low, high = run["utilisation"]
        least, most = run["seconds"]
        units = ((86400, "d"), (3600, "h"), (60, "min"))
        unit, name = next(((seconds, name) for seconds, name in units if most >= 2 * seconds), (1, "s"))
        duration = f"{least / unit:,.1f} to {most / unit:,.1f} {name}"
        rows.append([f"run at {low:.0%} to {high:.0%}", duration])
    return TextTable(f"mesh {document['mesh']}", ["per device", ""], rows)


def _margin(plan: Document) -> str:
    margin = plan["margin_bytes"]
    if margin is None:
        return "no"
    likely = "probably " if plan["fits"] is None else ""
    if margin < 0:
        return f"{likely}no: {readable_size(-margin)} too much"
    return f"{likely}yes, with {readable_size(margin)} to spare"
