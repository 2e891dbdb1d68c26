"""What is drawn from `metrics.json`: the table, the reliability diagram, and one self-contained page."""

import base64
import html
import io
import json
from collections.abc import Mapping
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
_COLUMNS = ("NLL", "Brier", "ECE [95% interval]", "MCE", "confidence", "accuracy")


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


def table(results: Mapping[str, Any], title: str) -> Table:
    """The figures of one set of windows as a `rich` table, one row per method."""
    exact = any("exact_error" in row for row in results["methods"].values())
    out = Table(title=f"{title}: {results['tokens']:,} tokens", title_justify="left")
    out.add_column("method", no_wrap=True)
    for column in (*_COLUMNS, *(("exact error",) if exact else ())):
        out.add_column(column, justify="right", no_wrap=True)
    for cells in _rows(results, exact):
        out.add_row(*cells)
    return out


def _rows(results: Mapping[str, Any], exact: bool) -> list[list[str]]:
    rows = []
    for name, row in results["methods"].items():
        ece = row["ece"]
        cells = [
            _TITLES.get(name, name),
            f"{row['nll']:.4f}",
            f"{row['brier']:.4f}",
            f"{ece['value']:.4f} [{ece['low']:.4f}, {ece['high']:.4f}]",
            f"{row['mce']:.4f}",
            f"{row['confidence']:.4f}",
            f"{row['accuracy']:.4f}",
        ]
        rows.append(cells + ([f"{row['exact_error']:.4f}"] if exact else []))
    return rows


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
        edge = {"right": "(lo, hi]", "left": "[lo, hi)", "none": "(lo, hi)"}[some["closed"]]
        console.print(
            f"ECE, MCE: {some['bins']} equal-width bins {edge} of the top token's probability; interval: bootstrap "
            "over windows. Brier: of the top token.",
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
    figure = Figure(figsize=(4.2 * len(methods), 4.9), layout="constrained")
    axes = figure.subplots(2, len(methods), height_ratios=[4, 1], sharex=True, sharey="row", squeeze=False)
    for column, (name, row) in enumerate(methods.items()):
        colour = _COLOURS.get(name, "#444444")
        bins = row["reliability"]
        width = 1 / len(bins["count"])
        left = [i * width for i in range(len(bins["count"]))]
        upper, lower = axes[0, column], axes[1, column]
        upper.plot([0, 1], [0, 1], color="0.5", linewidth=1, linestyle="--")
        for x, confidence, accuracy in zip(left, bins["confidence"], bins["accuracy"], strict=True):
            if accuracy is None:
                continue
            upper.bar(x, accuracy, width, align="edge", color=colour, alpha=0.8, edgecolor="white", linewidth=0.5)
            upper.plot([confidence, confidence], [accuracy, confidence], color="0.2", linewidth=1)
            upper.plot(confidence, confidence, marker=".", color="0.2", markersize=4)
        upper.set(title=f"{_TITLES.get(name, name)}\nECE {row['ece']['value']:.4f}", xlim=(0, 1), ylim=(0, 1))
        lower.bar(left, bins["count"], width, align="edge", color=colour, alpha=0.5, edgecolor="white", linewidth=0.5)
        lower.set(xlabel="confidence", yscale="symlog")
        if column == 0:
            upper.set_ylabel("accuracy")
            lower.set_ylabel("tokens")
    figure.suptitle(
        f"{title}: reliability of {results['tokens']:,} next-token predictions", fontsize=11, parse_math=False
    )
    return figure


def temperature_figure(results: Mapping[str, Any]):
    """Histogram of the temperatures that ATS gave to the held-out tokens; None where there is no such row."""
    from matplotlib.figure import Figure

    row = results["methods"].get("ats")
    if row is None:
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
    exact = any("exact_error" in row for row in results["methods"].values())
    header = "".join(
        f"<th scope=col>{html.escape(c)}</th>" for c in ("method", *_COLUMNS, *(("exact error",) if exact else ()))
    )
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in _rows(results, exact)
    )
    parts = [f"<h2>{html.escape(title)}</h2>"]
    if with_verdict:
        parts.append(_paragraph(verdict(results)))
    parts.append(
        f"<p>{results['tokens']:,} tokens</p><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
    )
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
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>calibjax report</title><style>{_STYLE}</style></head><body>\n"
        f"{_paragraph(verdict(document['held_out']))}\n"  # the first line of the page
        f"<h1>Calibration report</h1>\n{sections}\n"
        "<p>ECE and MCE compare mean confidence and accuracy in equal-width bins of the top token's probability; the "
        "interval is a 95% bootstrap over windows. Vertical bars in the diagrams are the gaps. NLL in nats per token; "
        "Brier score of the top token.</p>\n"
        f"<details><summary>The run</summary><pre>{details}</pre></details>\n</body></html>\n"
    )
    (directory / "report.html").write_text(page, encoding="utf-8")
