"""The part of a report on `calibjax eval layers`: findings and tables."""

from calibjax.eval.report.rows import TextTable, short, unit_of
from calibjax.eval.report.schema import AblationRow, Difference, Interval, LayersDocument


def findings(document: LayersDocument) -> list[str]:
    """The findings, one sentence each."""
    layers, direction = document["layers"], document["direction"]
    phase, curves = layers["phase"], layers["curves"]
    last, fraction = len(curves) - 1, phase["settled_share"]
    settled = phase["settled"]
    lines = [
        f"The decision settles at layer {settled} of {last}: from there on the most likely token equals the last "
        f"layer's for at least {fraction:.0%} of the predictions."
    ]
    figures = _difference(phase["correction"])
    if "p_value" in phase:
        figures += f" (p = {phase['p_value']:.3f}, corrected for the choice of the layer)"
    if phase["found"]:
        lines.append(
            f"Confidence-correction phase found: from there ECE peaks at layer {phase['peak']} and falls to the last "
            f"layer by {figures}."
        )
    elif settled == last:
        lines.append("No confidence-correction phase: the decision settles at the last layer.")
    else:
        lines.append(
            f"No confidence-correction phase: from the largest ECE after layer {settled} (layer {phase['peak']}) to "
            f"the last layer, ECE falls by {figures}."
        )
    chosen = direction["chosen"]
    if chosen["layer"]:
        lines.append(
            f"Edit chosen on one half: {chosen['strength']:+g} times the mean residual norm along the direction after "
            f"block {chosen['layer']}. On the held-out half it changes ECE by {_difference(direction['difference'])}."
        )
    return lines


def _difference(change: Difference) -> str:
    return f"{change['difference']:+.4f} [{change['low']:+.4f}, {change['high']:+.4f}]"


def tables(document: LayersDocument) -> list[TextTable]:
    """The layers; the direction after each block; the sweep on the held-out half; neurons, without them; subjects."""
    out = [layer_table(document), _direction_table(document), _sweep_table(document), _neuron_table(document)]
    if "ablation" in document:
        out.append(_ablation_table(document["ablation"]))
    return [*out, subject_table(document)] if document["subjects"] else out


def layer_table(document: LayersDocument) -> TextTable:
    layers, unit = document["layers"], unit_of(document["held_out"])
    names = ("accuracy", "confidence", "ece", "mce", "entropy", "kl")
    return TextTable(
        f"layers: {layers['tokens']:,} {unit}, {layers['readout']} [95% interval]; same token: as the last layer's",
        ["layer", "accuracy", "confidence", "ECE", "MCE", "entropy", "KL to last", "same token"],
        [
            [str(row["layer"]), *(interval(row[name]) for name in names), f"{row['agreement']:.3f}"]
            for row in layers["curves"]
        ],
        order=(3, 2, 7, 1, 5, 6, 4),
        best=(layers["phase"]["settled"],),
    )


def _direction_table(document: LayersDocument) -> TextTable:
    direction, unit = document["direction"], unit_of(document["held_out"])
    first, second = direction["counts"]
    return TextTable(
        f"direction {direction['recipe']!r}: {first:,} against {second:,} {unit}; expected fraction of a random vector "
        f"in the null space: {direction['expected_share']:.3f}",
        ["block", "gap / norm", "mean norm", "fraction in the null space"],
        [
            [
                str(row["layer"]),
                f"{row['gap'] / row['length']:.4f}",
                f"{row['length']:.3f}",
                f"{row['null_space_share']:.3f}",
            ]
            for row in direction["rows"]
        ],
    )


def _sweep_table(document: LayersDocument) -> TextTable:
    chosen = document["direction"]["chosen"]
    return TextTable(
        "sweep: c in mean norms of the residual, on the held-out half [95% interval]",
        ["block", "c", "ECE", "MCE", "accuracy", "confidence", "ECE, half that chooses", ""],
        [
            [
                str(row["layer"]) if row["layer"] else "none",
                f"{row['strength']:+g}",
                *(interval(row["held_out"][name]) for name in ("ece", "mce", "accuracy", "confidence")),
                f"{row['fit']['ece']:.4f}",
                "chosen" if (row["layer"], row["strength"]) == (chosen["layer"], chosen["strength"]) else "",
            ]
            for row in document["sweep"]
        ],
    )


def _neuron_table(document: LayersDocument) -> TextTable:
    return TextTable(
        "entropy neurons: large norm, small direct effect on the logits",
        ["block", "neuron", "norm", "norm, percentile", "logit variance", "percentile", "fraction in the null space"],
        [
            [
                *(str(row["layer"]), str(row["index"]), f"{row['norm']:.4g}", f"{row['norm_percentile']:.0f}%"),
                *(f"{row['logit_variance']:.2e}", f"{row['logit_variance_percentile']:.0f}%"),
                f"{row['null_space_share']:.3f}",
            ]
            for row in document["neurons"]
        ],
    )


def _ablation_table(rows: list[AblationRow]) -> TextTable:
    return TextTable(
        "the entropy neurons of the last block changed, beside others of equal norm; held-out half",
        ["change", "entropy", "confidence", "accuracy", "ECE", "NLL"],
        [
            [row["name"], *(f"{row[key]:.4f}" for key in ("entropy", "confidence", "accuracy", "ece", "nll"))]
            for row in rows
        ],
    )


def subject_table(document: LayersDocument) -> TextTable:
    return TextTable(
        "subjects, at the last layer, the most overconfident first [95% interval, Wilson]",
        ["subject", unit_of(document["held_out"]), "confidence", "accuracy", "confidence - accuracy"],
        [
            [
                row["subject"],
                f"{row['questions']:,}",
                f"{row['confidence']:.3f}",
                interval(row["accuracy"]),
                f"{row['gap']:+.3f}",
            ]
            for row in document["subjects"]
        ],
    )


def interval(row: Interval) -> str:
    """A figure and its interval, without the zeros before decimal points."""
    value, low, high = (short(row[key], ".3f") for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
