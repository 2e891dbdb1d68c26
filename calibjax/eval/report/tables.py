"""The methods of a set as rows of a table, for the terminal, the page and the model card: titles, columns and cells."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from calibjax.eval.report.schema import Document

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
UNCONVERGED = (
    "the fit ended before an optimum; separable data, and classes that are never the label, have no finite one"
)
_BEFORE = ("uncalibrated", "base", "pretrained")
_AFTER = ("ats", "fine_tuned", "edited", "lhts", "temperature")


class TextTable(NamedTuple):
    """A table before it is drawn; all but the first column are numbers.

    Attributes:
        order: numbers of columns but the first, the most important first; the others follow from left to right. A
            terminal that is too narrow drops columns from the end of this order.
        best: numbers of the rows that are highlighted.
        groups: the title of each row's group, which stands above the group's first row; empty for none.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    order: tuple[int, ...] = ()
    best: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


def table_of(title: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], **options: Any) -> TextTable:
    """A table with a row for each of `rows`, whose cells `columns` computes; `options` are fields of `TextTable`."""
    return TextTable(title, list(columns), [[cell(row) for cell in columns.values()] for row in rows], **options)


# --- numbers ---


def short(value: float, form: str = ".4f") -> str:
    """A number without the zero before its decimal point."""
    return re.sub(r"(?<!\d)0\.", ".", format(value, form))


def interval(row: Row, form: str = ".4f", *, zero: bool = False) -> str:
    """A figure, or a difference with its sign, and its interval: "value [low, high]", with or without leading zeros."""
    name, form = ("difference", f"+{form}") if "difference" in row else ("value", form)
    value, low, high = (format(row[key], form) if zero else short(row[key], form) for key in (name, "low", "high"))
    return f"{value} [{low}, {high}]"


def is_lower(against: Row) -> bool:
    """Whether a figure is significantly lower than the other: the interval of the difference lies below 0."""
    return against["high"] < 0


def is_higher(against: Row) -> bool:
    """Whether a figure is significantly higher than the other: the interval of the difference lies above 0."""
    return against["low"] > 0


# --- sets ---


def title_of(name: str) -> str:
    """The displayed name of a method."""
    return _TITLES.get(name, name)


def figure_of(row: Row, key: str) -> float | None:
    """A figure of a method's row; None if the row does not have it."""
    return row["ece"]["value"] if key == "ece" else row.get(key)


def binning(closed: str) -> str:
    """The edges of a bin as an interval."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}.get(closed, closed)


def unit_of(results: Row) -> str:
    """The name of the predictions of a set."""
    return results.get("unit", "tokens")


def counted(results: Row) -> str:
    """The number of predictions of a set."""
    return f"{results['tokens']:,} {unit_of(results)}"


def sets_of(document: Document) -> list[tuple[str, Row]]:
    """Titles and results of the sets of a run, the held-out one first."""
    sets = [(document["held_out"].get("title", "held out"), document["held_out"])]
    if len(document.get("tasks", ())) > 1:
        sets += document["tasks"].items()
    return sets + [(f"transfer to {name}", results) for name, results in document.get("transfer", {}).items()]


def pair_of(results: Row) -> tuple[str, str]:
    """The names of the rows before and after: of a comparison its winner, else what the run fitted."""
    names = list(results["methods"])
    before = next((name for name in _BEFORE if name in names), names[0])
    if "sort" in results:
        return before, winner(results)
    return before, next((name for key in _AFTER for name in names if name.partition("-")[0] == key), before)


def difference_of(results: Row, name: str, key: str) -> Row | None:
    """The difference of a figure from the row before, with its interval; None where the document has none."""
    row, before = results["methods"][name], pair_of(results)[0]
    if key in (against := row.get("against_uncalibrated", {})):
        return against[key]
    return row.get("against", {}).get(key) if before == results.get("reference") else None


def winner(results: Row) -> str:
    """The method of a comparison to use: that of the lowest log loss among those that beat temperature scaling.

    Beaten is an interval of the difference below 0 and p < 0.05 after Holm's correction. A fit that did not converge
    never wins. Temperature scaling where none does; where it has no finite log loss, the lowest of the others.
    """
    rows, reference = results["methods"], results["reference"]
    unconverged = results.get("not_converged", ())
    candidates = {n: row for n, row in rows.items() if n not in unconverged and row["log_loss"] is not None}
    if figure_of(rows.get(reference, {}), "log_loss") is not None:
        tests = {n: row.get("against", {}).get("log_loss") for n, row in candidates.items()}
        beating = [n for n, test in tests.items() if test and is_lower(test) and test.get("holm_p", math.nan) < 0.05]
        candidates = {n: candidates[n] for n in beating}
    fallback = reference if reference in rows else "uncalibrated"
    return min(candidates, key=lambda name: candidates[name]["log_loss"], default=fallback)


def compares_confidences(results: Row) -> bool:
    """Whether the rows of a set are several confidences in the same answers, none of them corrected."""
    others = results["methods"].keys() - {"uncalibrated"}
    answers = unit_of(results) == "questions" and "sort" not in results
    return answers and 0 < len(others) < len(results["methods"]) and "temperature" not in others


def remarks(results: Row) -> list[str]:
    """Notes on a benchmark: its prompts, the harness's own metrics, and prompts too long for the model."""
    lines = []
    if "shots" in results:
        own = ", ".join(f"{name} {value:.4f}" for name, value in results["harness"].items())
        parts = [f"{results['shots']} examples before each question", results["source"]]
        lines.append("; ".join([*parts, f"lm-eval's own metrics: {own}"] if own else parts))
    if results.get("cut"):
        lines.append(f"{results['cut']:,} prompts exceeded the model's context and were cut at the start")
    if results.get("too_long"):
        lines.append(f"{results['too_long']:,} questions left out: an option alone exceeds the model's context")
    return lines


def failures(results: Row) -> list[str]:
    """A line for each reason why methods have no row, or none of a fit that converged."""
    lines = []
    unconverged = dict.fromkeys(results.get("not_converged", ()), UNCONVERGED)
    for word, reasons in (
        ("Failed", results.get("failed", {})),
        ("Not converged", unconverged),
        ("Left out", results.get("left_out", {})),
    ):
        for reason in dict.fromkeys(reasons.values()):
            names = ", ".join(title_of(name) for name in reasons if reasons[name] == reason)
            lines.append(f"{word}: {names}: {reason}.")
    return lines


# --- the table of a run ---


def _number(key: str, form: str = ".4f", *, zero: bool = True) -> Callable[[Row], str]:
    """A number, or a figure with its interval, with or without leading zeros."""

    def cell(row: Row) -> str:
        value, ends = row.get(key), row.get(f"{key}_interval")
        if value is None:
            return ABSENT
        if ends is not None:
            value = {"value": value, **ends}
        if isinstance(value, dict):
            return interval(value, form, zero=zero)
        return format(value, form) if zero else short(value, form)

    return cell


def _against(key: str, *, zero: bool = True) -> Callable[[Row], str]:
    return lambda row: interval(row["against"][key], zero=zero) if key in row.get("against", {}) else ABSENT


_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("nll", "NLL", _number("nll")),
    ("brier", "Brier", _number("brier")),
    ("ece", "ECE [95% interval]", _number("ece")),
    ("debiased_ece", "debiased ECE", _number("debiased_ece")),
    ("mce", "MCE", _number("mce")),
    ("rmsce", "RMSCE", _number("rmsce")),
    ("confidence", "confidence", _number("confidence")),
    ("accuracy", "accuracy", _number("accuracy")),
    ("exact_error", "exact error", _number("exact_error")),
    ("against", "Δ ECE against temperature scaling", _against("ece")),
    ("against", "Δ Brier against temperature scaling", _against("brier")),
    ("adaptive_ece", "adaptive ECE", _number("adaptive_ece")),
    ("smooth_ece", "smooth ECE", _number("smooth_ece")),
    ("log_loss", "log loss of correctness", lambda row: "inf" if row["log_loss"] is None else f"{row['log_loss']:.4f}"),
    ("auroc", "AUROC", _number("auroc")),
    ("aurc", "AURC", _number("aurc")),
    ("excess_aurc", "excess AURC", _number("excess_aurc")),
    ("ks_error", "KS error", _number("ks_error")),
    ("debiased_l2", "debiased L2", _number("debiased_l2")),
    ("changed", "changed", _number("changed", ",")),
    ("parameters", "parameters", _number("parameters", ",")),
    ("fit_seconds", "fit (s)", _number("fit_seconds", ".2f")),
)
"""Field of a row, title, text of a cell. Fields that no row has are not shown."""
_IMPORTANCE = ("ece", "nll", "brier", "accuracy", "exact_error", "against", "mce", "confidence", "auroc")
"""The columns that a narrow terminal keeps the longest; the others follow in the order of `_COLUMNS`."""
_MEANS = {"nll": "NLL", "brier": "Brier", "accuracy": "accuracy"}
"""Titles of the figures that `held_out_table` gives with their intervals where it is asked to."""


def columns_of(sets: Iterable[Row]) -> list[tuple[str, str, Callable[[Row], str]]]:
    """Field, title and cell of every column that some method of the sets has."""
    sets = list(sets)
    fields = {key for results in sets for row in results["methods"].values() for key in row if row[key] is not None}
    reference = sets[0].get("reference", "temperature")
    named = "temperature scaling" if reference.endswith("temperature") else title_of(reference)
    return [(key, title.replace("temperature scaling", named), cell) for key, title, cell in _COLUMNS if key in fields]


def cells_of(results: Row, keys: Collection[str]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of a set; `keys` are the figures to show."""
    shown = [column for column in columns_of([results]) if column[0] in keys]
    rows = [[title_of(name), *(cell(row) for _, _, cell in shown)] for name, row in results["methods"].items()]
    return ["method", *(title for _, title, _ in shown)], rows


def held_out_table(document: Document, *, intervals: bool = False) -> TextTable:
    """The rows of all sets of a run in one table, the held-out set first.

    `intervals` shows those of NLL, Brier score and accuracy too, where the document has them. ECE always has its.
    """
    sets = sets_of(document)
    shown = columns_of(results for _, results in sets)
    named = [(title, name, row) for title, results in sets for name, row in results["methods"].items()]
    if intervals and any("intervals" in row for *_, row in named):
        named = [
            (title, name, {**{f"{key}_interval": ends for key, ends in row.get("intervals", {}).items()}, **row})
            for title, name, row in named
        ]
        shown = [(key, f"{title} [95% interval]" if key in _MEANS else title, cell) for key, title, cell in shown]
    ranks = {key: place for place, key in enumerate(_IMPORTANCE)}
    order = sorted(range(len(shown)), key=lambda index: ranks.get(shown[index][0], len(ranks)))
    if sets[0][1].get("unit") == "questions":
        order.sort(key=lambda index: shown[index][0] not in ("ece", "accuracy"))
    if all(compares_confidences(results) for _, results in sets):  # they differ in AUROC, and not in accuracy
        order.sort(key=lambda index: shown[index][0] not in ("ece", "brier", "auroc"))
    return TextTable(
        ", ".join(f"{title}: {counted(results)}" for title, results in sets),
        ["method", *(title for _, title, _ in shown)],
        [[title_of(name), *(cell(row) for _, _, cell in shown)] for _, name, row in named],
        tuple(index + 1 for index in order),
        groups=tuple(title for title, _, _ in named) if len(sets) > 1 else (),
    )


# --- the table of a comparison ---

_FIGURES = {
    "nll": "NLL",
    "brier": "Brier",
    "debiased_ece": "debiased ECE",
    "adaptive_ece": "adaptive ECE",
    "smooth_ece": "smooth ECE",
    "mce": "MCE",
    "auroc": "AUROC",
}


def comparison_table(results: Row, where: str) -> TextTable:
    """A row for every method of `compare`, best first: log loss, its difference from temperature scaling, and more."""

    def p_value(row: Row) -> str:
        p = row.get("against", {}).get("log_loss", {}).get("holm_p", math.nan)
        return ABSENT if math.isnan(p) else short(p, ".3f")

    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: row["title"],
        "log loss": lambda row: "inf" if row["log_loss"] is None else short(row["log_loss"]),
        "Δ log loss [95% interval]": _against("log_loss", zero=False),
        "p (Holm)": p_value,
        "accuracy": _number("accuracy", zero=False),
        "ECE": lambda row: short(row["ece"]["value"]),
        "ECE, 95% interval": lambda row: interval(row["ece"]).partition(" ")[2],
        **{title: _number(key, zero=False) for key, title in _FIGURES.items()},
        "Δ ECE [95% interval]": _against("ece", zero=False),
        "Δ Brier [95% interval]": _against("brier", zero=False),
        "changed": _number("changed", ","),
        "parameters": _number("parameters", ","),
        "fit s": _number("fit_seconds", ".2f"),
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
        parts.append(Part("Texts", text_findings(document), ("diversity",), [text_table(document)]))
    for name, results in document.get("tasks", {}).items():
        if results["subjects"]:
            figures = (subjects_name(document, name),)
            parts.append(Part(f"Subjects of {name}", [], figures, [subject_table(name, results)]))
    return parts


def _figure_cell(key: str, form: str = ".3f") -> Callable[[Row], str]:
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
                "block": _figure_cell("layer", ""),
                "gap / norm": lambda row: f"{row['gap'] / row['length']:.4f}",
                "mean norm": _figure_cell("length"),
                "fraction in the null space": _figure_cell("null_space_share"),
            },
        ),
        table_of(
            "sweep: c in mean norms of the residual, on the held-out half [95% interval]",
            document["sweep"],
            {
                "block": lambda row: str(row["layer"]) if row["layer"] else "none",
                "c": _figure_cell("strength", "+g"),
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
                "block": _figure_cell("layer", ""),
                "neuron": _figure_cell("index", ""),
                "norm": _figure_cell("norm", ".4g"),
                "norm, percentile": lambda row: f"{row['norm_percentile']:.0f}%",
                "logit variance": _figure_cell("logit_variance", ".2e"),
                "percentile": lambda row: f"{row['logit_variance_percentile']:.0f}%",
                "fraction in the null space": _figure_cell("null_space_share"),
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
                | {key.upper() if key in ("ece", "nll") else key: _figure_cell(key, ".4f") for key in figures},
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
            "layer": _figure_cell("layer", ""),
            "accuracy": _figure_cell("accuracy"),
            "confidence": _figure_cell("confidence"),
            "ECE": _figure_cell("ece"),
            "MCE": _figure_cell("mce"),
            "entropy": _figure_cell("entropy"),
            "KL to last": _figure_cell("kl"),
            "same token": _figure_cell("agreement"),
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
            unit_of(document["held_out"]): _figure_cell("questions", ","),
            "confidence": _figure_cell("confidence"),
            "accuracy": _figure_cell("accuracy"),
            "confidence - accuracy": _figure_cell("gap", "+.3f"),
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
        "questions": _figure_cell("questions", ","),
        "accuracy, uncalibrated": _figure_cell("accuracy"),
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

    def percentage(row: Row) -> str:
        score = row["analogies"]
        return ABSENT if score is None else f"{100 * score['accuracy']:.1f} ± {100 * score['error']:.1f}"

    columns: dict[str, Callable[[Row], str]] = {
        "model, myopic temperature": lambda row: row["name"],
        "log p of a token": lambda row: f"{row['log_prob']:.3f} ± {row['log_prob_error']:.3f}",
        "distinct-2": _figure_cell("distinct_2"),
        "repeated 4-grams": _figure_cell("repetition"),
        "analogies, %": percentage,
        "distinct-1": _figure_cell("distinct_1"),
        "distinct-3": _figure_cell("distinct_3"),
        "self-BLEU": lambda row: f"{row['self_bleu']:.1f}",
        "NLL, held-out text": _figure_cell("nll", ".4f"),
    }
    if not analogies:
        del columns["analogies, %"]
    if any(row["self_bleu"] is None for row in rows):
        del columns["self-BLEU"]
    return table_of("text of each model, ± standard error; log p under the pretrained model, nats", rows, columns)
