"""The methods of a set as rows of a table, for the terminal, the page and the model card: titles, columns and cells."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from calibjax.eval.report.schema import Document
from calibjax.runtime.arrays import readable_size

ABSENT = "\N{EN DASH}"
Row = Mapping[str, Any]
_TITLES = {
    "temperature": "temperature scaling",
    "ats": "ATS",
    "base": "base model",
    "base_temperature": "base + temperature scaling",
    "edited": "residual stream edited",
    "fine_tuned": "fine-tuned",
    "fine_tuned_temperature": "fine-tuned + temperature scaling",
    "greedy": "greedy answer",
}
UNCONVERGED = "the fit ended before an optimum; separable data and classes that are never the label have no finite one"
_BEFORE = ("uncalibrated", "base", "pretrained")
_AFTER = ("ats", "fine_tuned", "edited", "lhts", "temperature")


class TextTable(NamedTuple):
    """A table before it is drawn; every column but the first holds numbers.

    Attributes:
        order: indices of the columns from 1, the most important first; the others follow from left to right. A terminal
            that is too narrow drops columns from the end of this order.
        best: indices of the rows that are highlighted.
        groups: title of the group of each row, shown above the group's first row; empty if there are no groups.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    order: tuple[int, ...] = ()
    best: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


def table_of(title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], **options: Any) -> TextTable:
    """A table with a row for each of `rows`, whose cells `columns` computes; `options` are fields of `TextTable`."""
    cells = [[text(row) for text in columns.values()] for row in rows]
    return TextTable(title, list(columns), cells, **options)


# --- numbers ---


def short(value: float, form: str = ".4f") -> str:
    """A number without the zero before its decimal point."""
    return re.sub(r"(?<!\d)0\.", ".", format(value, form))


def interval(row: Row, form: str = ".4f", *, leading_zero: bool = False) -> str:
    """A figure, or a difference with its sign, and its interval: "value [low, high]"."""
    name, form = ("difference", f"+{form}") if "difference" in row else ("value", form)
    value, low, high = row[name], row["low"], row["high"]
    if leading_zero:
        return f"{value:{form}} [{low:{form}}, {high:{form}}]"
    return f"{short(value, form)} [{short(low, form)}, {short(high, form)}]"


def is_lower(against: Row) -> bool:
    """Whether the interval of a difference lies below 0: the figure is significantly lower than the other."""
    return against["high"] < 0


def is_higher(against: Row) -> bool:
    """Whether the interval of a difference lies above 0: the figure is significantly higher than the other."""
    return against["low"] > 0


def differs(against: Row) -> bool:
    """Whether the interval of a difference excludes 0."""
    return is_lower(against) or is_higher(against)


# --- sets ---


def title_of(name: str) -> str:
    return _TITLES.get(name, name)


def figure_of(row: Row, key: str) -> float | None:
    """A figure of a method's row; None if the row does not have it."""
    return row["ece"]["value"] if key == "ece" else row.get(key)


def binning(closed: str) -> str:
    """The edges of a bin as an interval."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}.get(closed, closed)


def unit_of(results: Row) -> str:
    return results.get("unit", "tokens")


def counted(results: Row) -> str:
    return f"{results['tokens']:,} {unit_of(results)}"


def sets_of(document: Document) -> list[tuple[str, Row]]:
    """Titles and results of the sets of a run, the held-out one first, then its parts and texts of other kinds."""
    sets = [(document["held_out"].get("title", "held out"), document["held_out"])]
    if len(document.get("tasks", ())) > 1:
        sets += document["tasks"].items()
    for name, row in document.get("transfer", {}).items():
        sets.append((name if name.endswith(", held out") else f"transfer to {name}", row))
    return sets


def pair_of(results: Row) -> tuple[str, str]:
    """The names of the rows before and after; "after" is the winner of a comparison, else what the run fitted."""
    names = list(results["methods"])
    before = next((name for name in _BEFORE if name in names), names[0])
    if "sort" in results:
        return before, winner(results)
    for key in _AFTER:
        for name in names:
            if name.partition("-")[0] == key:
                return before, name
    return before, before


def winner(results: Row) -> str:
    """The method to use: the one with the lowest log loss among those that beat temperature scaling.

    A method beats it if the interval of the difference lies below 0 and p < 0.05 after Holm's correction; a fit that
    did not converge never does. If no method beats it, temperature scaling is returned. If temperature scaling has no
    finite log loss, the lowest of the others wins without a test.
    """
    rows, reference = results["methods"], results["reference"]
    has_loss = figure_of(rows.get(reference, {}), "log_loss") is not None
    losses = {}
    for name, row in rows.items():
        test = row.get("against", {}).get("log_loss")
        beats = bool(test) and is_lower(test) and test.get("holm_p", math.nan) < 0.05
        is_usable = row["log_loss"] is not None and name not in results.get("not_converged", ())
        if is_usable and (beats or not has_loss):
            losses[name] = row["log_loss"]
    fallback = reference if reference in rows else "uncalibrated"
    return min(losses, key=losses.__getitem__, default=fallback)


def compares_confidences(results: Row) -> bool:
    """Whether the rows of a set are several confidences in the same answers, none of them corrected."""
    others = results["methods"].keys() - {"uncalibrated"}
    answers = unit_of(results) == "questions" and "sort" not in results
    return answers and 0 < len(others) < len(results["methods"]) and "temperature" not in others


def remarks(results: Row) -> list[str]:
    """Notes on a benchmark: its prompts, the harness's own metrics, and prompts too long for the model."""
    lines = []
    if "shots" in results:
        parts = [f"{results['shots']} examples before each question", results["source"]]
        if results["harness"]:
            harness_metrics = ", ".join(f"{name} {value:.4f}" for name, value in results["harness"].items())
            parts.append(f"lm-eval's own metrics: {harness_metrics}")
        lines.append("; ".join(parts))
    if results.get("cut"):
        lines.append(f"{results['cut']:,} prompts exceeded the model's context and were cut at the start")
    if results.get("too_long"):
        lines.append(f"{results['too_long']:,} questions left out: an option alone exceeds the model's context")
    return lines


def failures(results: Row) -> list[str]:
    """A line for each reason why methods failed, did not converge or were left out."""
    lines = []
    reasons_by_kind = {
        "Failed": results.get("failed", {}),
        "Not converged": dict.fromkeys(results.get("not_converged", ()), UNCONVERGED),
        "Left out": results.get("left_out", {}),
    }
    for word, reasons in reasons_by_kind.items():
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(title_of(name) for name in reasons if reasons[name] == reason)
            lines.append(f"{word}: {names}: {reason}.")
    return lines


# --- the table of a run ---


def show(*path: str, form: str = ".4f", leading_zero: bool = True, absent: str = ABSENT) -> Callable[[Row], str]:
    """The function that shows the entry at a path in a row: a number, a figure with its interval, or a text.

    Without `leading_zero` 0.1234 is .1234. A row without such an entry shows `absent`.
    """

    def text(row: Row) -> str:
        value: Any = row
        for name in path:
            value = None if value is None else value.get(name)
        ends = row.get(f"{path[0]}_interval")
        if ends is not None:
            value = {"value": value, **ends}
        if value is None or isinstance(value, str):
            return value or absent
        if isinstance(value, dict):
            return interval(value, form, leading_zero=leading_zero)
        return format(value, form) if leading_zero else short(value, form)

    return text


class Column(NamedTuple):
    """A figure of the methods of a set: a field of their rows, its title, and the text of a row's cell."""

    key: str
    title: str
    text: Callable[[Row], str]
    better: str = ""  # "lower" or "higher", where one direction is better


COLUMNS = (
    Column("nll", "NLL", show("nll"), "lower"),
    Column("brier", "Brier", show("brier"), "lower"),
    Column("ece", "ECE [95% interval]", show("ece"), "lower"),
    Column("debiased_ece", "debiased ECE", show("debiased_ece"), "lower"),
    Column("mce", "MCE", show("mce"), "lower"),
    Column("rmsce", "RMSCE", show("rmsce"), "lower"),
    Column("confidence", "confidence", show("confidence")),
    Column("accuracy", "accuracy", show("accuracy"), "higher"),
    Column("exact_error", "exact error", show("exact_error"), "lower"),
    Column("against", "Δ ECE against temperature scaling", show("against", "ece")),
    Column("against", "Δ Brier against temperature scaling", show("against", "brier")),
    Column("adaptive_ece", "adaptive ECE", show("adaptive_ece"), "lower"),
    Column("smooth_ece", "smooth ECE", show("smooth_ece"), "lower"),
    Column("log_loss", "log loss of correctness", show("log_loss", absent="inf"), "lower"),
    Column("auroc", "AUROC", show("auroc"), "higher"),
    Column("aurc", "AURC", show("aurc"), "lower"),
    Column("excess_aurc", "excess AURC", show("excess_aurc"), "lower"),
    Column("ks_error", "KS error", show("ks_error"), "lower"),
    Column("debiased_l2", "debiased L2", show("debiased_l2"), "lower"),
    Column("changed", "changed", show("changed", form=",")),
    Column("parameters", "parameters", show("parameters", form=",")),
    Column("fit_seconds", "fit (s)", show("fit_seconds", form=".2f")),
)
"""Every figure of a method, in the order of the columns. Figures that no row has are not shown."""
_IMPORTANCE = ("ece", "nll", "brier", "accuracy", "exact_error", "against", "mce", "confidence", "auroc")
"""The columns that a narrow terminal keeps the longest; the others follow in the order of `COLUMNS`."""


def columns_of(sets: Sequence[Row]) -> list[Column]:
    """Every column that some method of the sets has."""
    rows = itertools.chain.from_iterable(results["methods"].values() for results in sets)
    fields = {key for row in rows for key in row if row[key] is not None}
    reference = sets[0].get("reference", "temperature")
    named = "temperature scaling" if reference.endswith("temperature") else title_of(reference)
    present = [column for column in COLUMNS if column.key in fields]
    return [column._replace(title=column.title.replace("temperature scaling", named)) for column in present]


def held_out_table(document: Document, *, intervals: bool = False) -> TextTable:
    """The rows of all sets of a run in one table, the held-out set first.

    ECE always has an interval; `intervals` adds intervals of NLL, Brier score and accuracy of tokens.
    """
    sets = sets_of(document)
    shown = columns_of([results for _, results in sets])
    rows, groups, has_intervals = [], [], False
    for title, results in sets:
        for name, row in results["methods"].items():
            ends_of = row.get("intervals", {}) if intervals else {}
            has_intervals |= bool(ends_of)
            row = {**row, **{f"{key}_interval": ends for key, ends in ends_of.items()}}
            rows.append([title_of(name), *(column.text(row) for column in shown)])
            groups.append(title)
    with_interval = ("nll", "brier", "accuracy") if has_intervals else ()
    titles = [f"{column.title} [95% interval]" if column.key in with_interval else column.title for column in shown]
    first = ()
    if unit_of(sets[0][1]) == "questions":
        first = ("ece", "accuracy")
    if all(compares_confidences(results) for _, results in sets):  # they differ in AUROC, and not in accuracy
        first = ("ece", "brier", "auroc")
    keys = [column.key for column in shown]
    importance = [*first, *_IMPORTANCE, *keys]
    order = sorted(range(len(keys)), key=lambda index: importance.index(keys[index]))
    return TextTable(
        ", ".join(f"{title}: {counted(results)}" for title, results in sets),
        ["method", *titles],
        rows,
        tuple(index + 1 for index in order),
        groups=tuple(groups) if len(sets) > 1 else (),
    )


def comparison_table(results: Row, where: str) -> TextTable:
    """A row for every method of `compare`, best first: log loss, its difference from temperature scaling, and more."""
    figure = functools.partial(show, leading_zero=False)
    title_by_key = {column.key: column.title for column in COLUMNS}
    further = ("nll", "brier", "debiased_ece", "adaptive_ece", "smooth_ece", "mce", "auroc")
    columns: dict[str, Callable[[Row], str]] = {
        "method": show("title"),
        "log loss": figure("log_loss", absent="inf"),
        "Δ log loss [95% interval]": figure("against", "log_loss"),
        "p (Holm)": figure("against", "log_loss", "holm_p", form=".3f"),
        "accuracy": figure("accuracy"),
        "ECE": figure("ece", "value"),
        "interval of ECE": lambda row: interval(row["ece"]).partition(" ")[2],
        **{title_by_key[key]: figure(key) for key in further},
        "Δ ECE [95% interval]": figure("against", "ece"),
        "Δ Brier [95% interval]": figure("against", "brier"),
        "changed": show("changed", form=","),
        "parameters": show("parameters", form=","),
        "fit s": show("fit_seconds", form=".2f"),
    }
    unconverged = results.get("not_converged", ())
    rows = [
        {**row, "title": title_of(name) + (" (not converged)" if name in unconverged else "")}
        for name, row in results["methods"].items()
    ]
    title = f"{where}: {counted(results)}, by {results['sort'].replace('_', ' ')}"
    return table_of(title, rows, columns, best=(list(results["methods"]).index(winner(results)),))


# --- what single commands show beside their sets ---


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
    lines = [
        f"The decision settles at layer {settled} of {last}: from there on the most likely token equals the last "
        f"layer's for at least {100 * phase['settled_fraction']:.4g}% of the predictions."
    ]
    change = interval(phase["correction"], leading_zero=True)
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
            f"{interval(direction['difference'], leading_zero=True)}."
        )
    return lines


def layer_tables(document: Document) -> list[TextTable]:
    """The layers; the direction after each block; the sweep on the held-out half; neurons, without them; subjects."""
    direction, unit = document["direction"], unit_of(document["held_out"])
    first, second = direction["counts"]
    chosen = (direction["chosen"]["layer"], direction["chosen"]["strength"])
    tables = [
        layer_table(document),
        table_of(
            f"direction {direction['recipe']!r}: {first:,} against {second:,} {unit}; expected fraction of a random "
            f"vector in the null space: {direction['expected_fraction']:.3f}",
            direction["rows"],
            {
                "block": show("layer", form=""),
                "gap / norm": lambda row: f"{row['gap'] / row['length']:.4f}",
                "mean norm": show("length", form=".3f"),
                "fraction in the null space": show("null_space_fraction", form=".3f"),
            },
        ),
        table_of(
            "sweep: c in mean norms of the residual, on the held-out half [95% interval]",
            document["sweep"],
            {
                "block": lambda row: str(row["layer"]) if row["layer"] else "none",
                "c": show("strength", form="+g"),
                **{name: _figure("held_out", name.lower()) for name in ("ECE", "MCE", "accuracy", "confidence")},
                "ECE, half that chooses": show("fit", "ece"),
                "edit": lambda row: "chosen" if (row["layer"], row["strength"]) == chosen else "",
            },
        ),
        table_of(
            "entropy neurons: large norm, small direct effect on the logits",
            document["neurons"],
            {
                "block": show("layer", form=""),
                "neuron": show("index", form=""),
                "norm": show("norm", form=".4g"),
                "norm, percentile": lambda row: f"{row['norm_percentile']:.0f}%",
                "logit variance": show("logit_variance", form=".2e"),
                "percentile": lambda row: f"{row['logit_variance_percentile']:.0f}%",
                "fraction in the null space": show("null_space_fraction", form=".3f"),
            },
        ),
        table_of(
            "the entropy neurons of the last block changed, beside others of equal norm; held-out half",
            document["ablation"],
            {
                "change": show("name"),
                **{name: show(name.lower()) for name in ("entropy", "confidence", "accuracy", "ECE", "NLL")},
            },
        ),
    ]
    if document["subjects"]:
        subjects = table_of(
            "subjects, at the last layer, the most overconfident first [95% interval, Wilson]",
            document["subjects"],
            {
                "subject": show("subject"),
                unit: show("questions", form=","),
                "confidence": show("confidence", form=".3f"),
                "accuracy": _figure("accuracy"),
                "confidence - accuracy": show("gap", form="+.3f"),
            },
        )
        tables.append(subjects)
    return tables


def layer_table(document: Document) -> TextTable:
    """A row for each layer, the one at which the decision settles highlighted."""
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


def scientific(log_value: float) -> str:
    """e^log_value as text, even where a float cannot hold it; rounded down, so that a lower bound remains one."""
    exponent = math.floor(log_value / math.log(10))
    if -2 <= exponent < 4:
        return f"{math.floor(1e4 * math.exp(log_value)) / 1e4:.4f}"
    digits = math.floor(100 * math.exp(log_value - exponent * math.log(10))) / 100
    return f"{digits:.2f}e{exponent:+d}"


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


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds, "not known" for None."""
    return "not known" if seconds is None else f"{1e3 * seconds:,.0f} ms"


def _margin(plan: Document) -> str:
    margin = plan["margin_bytes"]
    if margin is None:
        return "no"
    likely = "probably " if plan["fits"] is None else ""
    if margin < 0:
        return f"{likely}no: {readable_size(-margin)} too much"
    return f"{likely}yes, with {readable_size(margin)} to spare"
