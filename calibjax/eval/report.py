"""What is drawn from `metrics.json`: the table, the reliability diagram, and one self-contained page."""

import base64
import html
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Okabe and Ito's colour-blind safe set.
_COLOURS = {
    "uncalibrated": "#D55E00",
    "temperature": "#0072B2",
    "ats": "#009E73",
    "base": "#D55E00",
    "base_temperature": "#E69F00",
    "fine_tuned": "#0072B2",
    "fine_tuned_temperature": "#56B4E9",
}
_TITLES = {
    "temperature": "single temperature",
    "ats": "ATS",
    "base": "base model",
    "base_temperature": "base model + temperature",
    "fine_tuned": "fine-tuned",
    "fine_tuned_temperature": "fine-tuned + temperature",
}


ABSENT = "\N{EN DASH}"


def figure_of(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a method's row; None where it has none."""
    return row["ece"]["value"] if key == "ece" else row.get(key)


def title_of(name: str) -> str:
    """A method as it is shown."""
    return _TITLES.get(name, name)


def binning(closed: str) -> str:
    """The edges of a bin, as mathematics writes them."""
    return {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}[closed]


def _number(key: str, form: str = ".4f") -> Callable[[Mapping[str, Any]], str]:
    return lambda row: ABSENT if row.get(key) is None else format(row[key], form)


def _ece(row: Mapping[str, Any]) -> str:
    return f"{row['ece']['value']:.4f} [{row['ece']['low']:.4f}, {row['ece']['high']:.4f}]"


def _ece_against(row: Mapping[str, Any]) -> str:
    against = row.get("against", {}).get("ece")
    return (
        ABSENT if against is None else f"{against['difference']:+.4f} [{against['low']:+.4f}, {against['high']:+.4f}]"
    )


_COLUMNS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("nll", "NLL", _number("nll")),
    ("brier", "Brier", _number("brier")),
    ("ece", "ECE [95% interval]", _ece),
    ("mce", "MCE", _number("mce")),
    ("confidence", "confidence", _number("confidence")),
    ("accuracy", "accuracy", _number("accuracy")),
    ("exact_error", "exact error", _number("exact_error")),
    ("against", "ECE less single temperature", _ece_against),
    ("adaptive_ece", "adaptive ECE", _number("adaptive_ece")),
    ("smooth_ece", "smooth ECE", _number("smooth_ece")),
    ("log_loss", "log loss of being right", lambda row: "inf" if row["log_loss"] is None else f"{row['log_loss']:.4f}"),
    ("auroc", "AUROC", _number("auroc")),
    ("changed", "changed", _number("changed", ",")),
    ("parameters", "parameters", _number("parameters", ",")),
    ("fit_seconds", "fit (s)", _number("fit_seconds", ".2f")),
)
"""Field of a row, title, text of a cell. Those that no row has are not shown."""
_ACROSS = 6
"""Reliability diagrams side by side, at most."""


def _unit(results: Mapping[str, Any]) -> str:
    return results.get("unit", "tokens")


def verdict(results: Mapping[str, Any]) -> str:
    """One line: whether ATS came out truer than the single temperature and the model as it is, or a fine-tuned model
    than the one it was made from.

    Worse on expected calibration error or on negative log-likelihood counts as worse.
    """
    methods = results["methods"]
    if {"base", "fine_tuned"} <= methods.keys():
        before, after = methods["base"], methods["fine_tuned"]
        figures = (
            f"ECE {after['ece']['value']:.4f} against {before['ece']['value']:.4f}; "
            f"NLL {after['nll']:.4f} against {before['nll']:.4f}"
        )
        if after["ece"]["value"] > before["ece"]["value"] or after["nll"] > before["nll"]:
            return f"WARNING: the fine-tuned model is worse than the base model here: {figures}."
        return f"The fine-tuned model is truer than the base model: {figures}."
    if not {"ats", "temperature", "uncalibrated"} <= methods.keys():
        return ""
    ats, single, base = (methods[name] for name in ("ats", "temperature", "uncalibrated"))
    ece = f"ECE {ats['ece']['value']:.4f} against {single['ece']['value']:.4f}"
    nll = f"NLL {ats['nll']:.4f} against {single['nll']:.4f}"
    worse = [
        text
        for text, lost in (
            (ece, ats["ece"]["value"] > single["ece"]["value"]),
            (nll, ats["nll"] > single["nll"]),
        )
        if lost
    ]
    if worse:
        return f"WARNING: ATS is worse than a single temperature here: {'; '.join(worse)}."
    if ats["ece"]["value"] > base["ece"]["value"] or ats["nll"] > base["nll"]:
        return (
            f"WARNING: ATS is worse than the uncalibrated model here: ECE {ats['ece']['value']:.4f} against "
            f"{base['ece']['value']:.4f}; NLL {ats['nll']:.4f} against {base['nll']:.4f}."
        )
    before = f"uncalibrated {base['ece']['value']:.4f}, {base['nll']:.4f}"
    return f"ATS is truer than a single temperature: {ece}; {nll} ({before})."


def _cells(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table of a set."""
    methods = results["methods"]
    shown = [(title, cell) for key, title, cell in _COLUMNS if any(key in row for row in methods.values())]
    rows = [[title_of(name), *(cell(row) for _, cell in shown)] for name, row in methods.items()]
    return ["method", *(title for title, _ in shown)], rows


def table(results: Mapping[str, Any], title: str) -> Table:
    """The figures of one set of windows as a `rich` table, one row per method."""
    titles, rows = _cells(results)
    out = Table(title=f"{title}: {results['tokens']:,} tokens", title_justify="left")
    for index, column in enumerate(titles):
        out.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for cells in rows:
        out.add_row(*cells)
    return out


def print_report(document: Mapping[str, Any]) -> None:
    """Prints the verdict and the table of every set, to standard output."""
    console = Console(highlight=False, markup=False, soft_wrap=True)  # names of files may hold brackets
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    for title, results in _sets(document):
        line = verdict(results)
        if line:
            console.print(line, style="bold red" if line.startswith("WARNING") else "bold")
        console.print(table(results, title))
        some = next(iter(results["methods"].values()))["ece"]
        console.print(
            f"ECE, MCE: {some['bins']} equal-width bins {binning(some['closed'])} of the top token's probability; "
            "interval: bootstrap over windows. Brier: of the top token.",
            style="dim",
        )


def _sets(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    sets = [("held out", document["held_out"])]
    return sets + [(f"transfer to {name}", results) for name, results in document.get("transfer", {}).items()]


def reliability_figure(results: Mapping[str, Any], title: str):
    """Reliability diagrams side by side, one per method: accuracy against confidence, and the histogram below.

    Returns a `matplotlib.figure.Figure`; nothing global is touched.
    """
    from matplotlib.figure import Figure

    methods = results["methods"]
    lines = -(-len(methods) // _ACROSS)
    columns = -(-len(methods) // lines)
    size = 4.2 if lines == 1 else 3.2
    figure = Figure(figsize=(size * columns, (size + 0.7) * lines), layout="constrained")
    axes = figure.subplots(2 * lines, columns, height_ratios=[4, 1] * lines, sharey="row", squeeze=False)
    for unused in range(len(methods), lines * columns):
        for axis in axes[-2:, unused % columns]:
            axis.set_axis_off()
    for index, (name, row) in enumerate(methods.items()):
        line, column = divmod(index, columns)
        colour = _COLOURS.get(name, "#444444")
        bins = row["reliability"]
        width = 1 / len(bins["count"])
        left = [i * width for i in range(len(bins["count"]))]
        upper, lower = axes[2 * line : 2 * line + 2, column]
        upper.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--")
        for x, confidence, accuracy in zip(left, bins["confidence"], bins["accuracy"], strict=True):
            if accuracy is None:
                continue
            upper.bar(x, accuracy, width, align="edge", color=colour, alpha=0.8, edgecolor="white", linewidth=0.5)
            upper.plot([confidence, confidence], [accuracy, confidence], color="0.2", linewidth=1)
            upper.plot(confidence, confidence, marker=".", color="0.2", markersize=4)
        upper.set(title=f"{title_of(name)}\nECE {row['ece']['value']:.4f}", xlim=(0, 1), ylim=(0, 1))
        upper.tick_params(labelbottom=False)
        lower.bar(left, bins["count"], width, align="edge", color=colour, alpha=0.5, edgecolor="white", linewidth=0.5)
        lower.set(xlabel="confidence", xlim=(0, 1), yscale="symlog")
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel(_unit(results), fontsize="small")
    predictions = "next-token predictions" if _unit(results) == "tokens" else _unit(results)
    figure.suptitle(f"{title}: reliability of {results['tokens']:,} {predictions}", fontsize=11, parse_math=False)
    return figure


def temperature_figure(results: Mapping[str, Any]):
    """Histogram of the temperatures that ATS gave to the held-out tokens; None where there is no such row."""
    from matplotlib.figure import Figure

    row = results["methods"].get("ats")
    if row is None or "temperatures" not in row:
        return None
    edges, count = row["temperatures"]["edges"], row["temperatures"]["count"]
    figure = Figure(figsize=(6.3, 2.6), layout="constrained")
    axis = figure.subplots()
    axis.stairs(count, edges, fill=True, color=_COLOURS["ats"], alpha=0.8)
    axis.axvline(1.0, color="0.5", linewidth=1, linestyle="--")
    axis.set(xscale="log", xlabel="temperature given to a token (1 = unchanged)", ylabel="tokens")
    ticks = (0.1, 0.25, 0.5, 1, 2, 4, 10, 20)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    return figure


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #8886; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
.verdict { font-weight: 600; }
.warning { border-left: 5px solid #D55E00; padding-left: .8rem; }
pre { overflow-x: auto; font-size: 13px; }
"""


def _paragraph(line: str) -> str:
    return f'<p class="verdict{" warning" if line.startswith("WARNING") else ""}">{html.escape(line)}</p>'


def _section(title: str, results: Mapping[str, Any], *, with_verdict: bool) -> str:
    titles, rows = _cells(results)
    header = "".join(f"<th scope=col>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    parts = [f"<h2>{html.escape(title)}</h2>"]
    if with_verdict:
        parts.append(_paragraph(verdict(results)))
    parts.append(
        f"<p>{results['tokens']:,} {_unit(results)}</p>"
        f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
    )
    for kind, title_ in (("failed", "Failed"), ("left_out", "Left out")):
        for name, reason in results.get(kind, {}).items():
            parts.append(f"<p>{title_}: {html.escape(f'{name}: {reason}')}.</p>")
    figures = [(f"Reliability diagrams, {title}", reliability_figure(results, title))]
    temperatures = temperature_figure(results)
    if temperatures is not None:
        figures.append((f"Temperatures that ATS gave, {title}", temperatures))
    for description, figure in figures:
        data = base64.b64encode(_png(figure)).decode()
        parts.append(f'<p><img alt="{html.escape(description)}" src="data:image/png;base64,{data}"></p>')
    return "\n".join(parts)


def write_report(document: Mapping[str, Any], directory: Path) -> None:
    """Writes `reliability.png` (the held-out set) and `report.html` (all sets; self-contained, no request to anywhere).

    Args:
        document: the contents of `metrics.json`.
        directory: exists.
    """
    (directory / "reliability.png").write_bytes(_png(reliability_figure(document["held_out"], "held out")))
    sections = "\n".join(
        _section(title, results, with_verdict=index > 0) for index, (title, results) in enumerate(_sets(document))
    )
    details = html.escape(json.dumps(document.get("run", {}), indent=2))
    tokens = _unit(document["held_out"]) == "tokens"
    of, per = ("the top token's probability", "token") if tokens else ("the confidence", "row")
    over = document["held_out"].get("clusters", "windows")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>calibjax report</title><style>{_STYLE}</style></head><body>\n"
        f"{_paragraph(verdict(document['held_out']))}\n"  # the first line of the page
        f"<h1>Calibration report</h1>\n{sections}\n"
        f"<p>ECE and MCE compare mean confidence and accuracy in equal-width bins of {of}; the interval is a 95% "
        f"bootstrap over {over}. Vertical bars in the diagrams are the gaps. NLL in nats per {per}; Brier score of the "
        "prediction being right.</p>\n"
        f"<details><summary>The run</summary><pre>{details}</pre></details>\n</body></html>\n"
    )
    (directory / "report.html").write_text(page, encoding="utf-8")
