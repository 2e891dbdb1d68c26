"""What a report says of a run of `calibjax eval layers`: lines and tables, whatever they are drawn on."""

import re
from collections.abc import Mapping
from typing import Any

from calibjax.eval.report.rows import TextTable


def findings(document: Mapping[str, Any]) -> list[str]:
    """What was found, a sentence each."""
    layers, direction = document["layers"], document["direction"]
    phase, curves = layers["phase"], layers["curves"]
    last, share = len(curves) - 1, phase["settled_share"]
    settled = phase["settled"]
    lines = [
        f"The decision settles at layer {settled} of {last}: from there on at least {share:.0%} of the most likely "
        "tokens are those of the last layer."
    ]
    change = phase["correction"]
    figures = f"{change['difference']:+.4f} [{change['low']:+.4f}, {change['high']:+.4f}]"
    if phase["found"]:
        lines.append(
            f"A confidence-correction phase: after that ECE peaks at layer {phase['peak']} and falls by {figures} to "
            "the last layer."
        )
    elif settled == last:
        lines.append("No confidence-correction phase: the decision settles only at the last layer.")
    else:
        lines.append(
            f"No confidence-correction phase: from the layer of the largest ECE after that ({phase['peak']}) to the "
            f"last, ECE falls by {figures}."
        )
    chosen, difference = direction["chosen"], direction["difference"]
    if not chosen["layer"]:
        lines.append("No edit along the direction made the half that chooses truer: the model is left as it is.")
        return lines
    figures = f"{difference['difference']:+.4f} [{difference['low']:+.4f}, {difference['high']:+.4f}]"
    lines.append(
        f"Chosen on one half: {chosen['strength']:+g} times the mean length along the direction after block "
        f"{chosen['layer']}. On the other half it changes ECE by {figures}."
    )
    return lines


def tables(document: Mapping[str, Any]) -> list[TextTable]:
    """The layers; the direction after each block; the sweep on the half that did not choose; neurons; subjects."""
    layers, direction = document["layers"], document["direction"]
    unit = document["held_out"]["unit"]
    names = ("accuracy", "confidence", "ece", "mce", "entropy", "kl")
    curves = [
        [str(row["layer"]), *(interval(row[name]) for name in names), f"{row['agreement']:.3f}"]
        for row in layers["curves"]
    ]
    directions = [
        [
            str(row["layer"]),
            f"{row['gap'] / row['length']:.4f}",
            f"{row['length']:.3f}",
            f"{row['null_space_share']:.3f}",
        ]
        for row in direction["rows"]
    ]
    swept = [
        [
            str(row["layer"]) if row["layer"] else "none",
            f"{row['strength']:+g}",
            *(interval(row["held_out"][name]) for name in ("ece", "mce", "accuracy", "confidence")),
            f"{row['fit']['ece']:.4f}",
            "chosen" if (row["layer"], row["strength"]) == tuple(direction["chosen"].values()) else "",
        ]
        for row in document["sweep"]
    ]
    neurons = [
        [
            *(str(row["layer"]), str(row["index"]), f"{row['norm']:.4g}", f"{row['norm_percentile']:.0f}%"),
            *(f"{row['logit_variance']:.2e}", f"{row['logit_variance_percentile']:.0f}%"),
            f"{row['null_space_share']:.3f}",
        ]
        for row in document["neurons"]
    ]
    subjects = [
        [
            row["subject"],
            f"{row['questions']:,}",
            f"{row['confidence']:.3f}",
            interval(row["accuracy"]),
            f"{row['gap']:+.3f}",
        ]
        for row in document["subjects"]
    ]
    first, second = direction["counts"]
    of_subjects = TextTable(
        "subjects, at the last layer, the most over-confident first [95% interval, Wilson]",
        ["subject", unit, "confidence", "accuracy", "confidence less accuracy"],
        subjects,
    )
    return [
        TextTable(
            f"layers: {layers['tokens']:,} {unit}, {layers['readout']} [95% interval]; same token: as the last layer's",
            ["layer", "accuracy", "confidence", "ECE", "MCE", "entropy", "KL to last", "same token"],
            curves,
        ),
        TextTable(
            f"direction {direction['recipe']!r}: {first:,} against {second:,} {unit}; share of a random vector in the "
            f"null space: {direction['expected_share']:.3f}",
            ["block", "gap / length", "mean length", "share in the null space"],
            directions,
        ),
        TextTable(
            "sweep: c in mean lengths of the residual, on the half that did not choose [95% interval]",
            ["block", "c", "ECE", "MCE", "accuracy", "confidence", "ECE of the other half", ""],
            swept,
        ),
        TextTable(
            "entropy neurons: large norm, small direct effect on the logits",
            ["block", "neuron", "norm", "norm, percentile", "logit variance", "percentile", "share in the null space"],
            neurons,
        ),
        *([of_subjects] if subjects else []),
    ]


def interval(row: Mapping[str, float]) -> str:
    """Without zeros before points."""
    return re.sub(r"(?<!\d)0\.", ".", f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
