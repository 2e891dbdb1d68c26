"""What a page says beside the results: warnings about few points, code that uses what was fitted, and limitations."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibjax.eval.report.head import Origin
from calibjax.eval.report.rows import unit_of, winner
from calibjax.eval.report.schema import AnySet, Document

FEW = 200
"""Questions of a benchmark below which its figures are hardly more than noise."""


def few(name: str, results: AnySet | Mapping[str, Any]) -> str:
    """A warning where a set is tiny; "" where it is not."""
    count = results["tokens"]
    if count >= FEW:
        return ""
    accuracy = next(iter(results["methods"].values()))["accuracy"]
    reach = 1.96 * max(accuracy * (1 - accuracy) / max(count, 1), 0.0) ** 0.5
    return (
        f"WARNING: {name} has only {count:,} {unit_of(results)}: its accuracy is known to ± {reach:.2f}, and its "
        "calibration errors less well."
    )


def usage(document: Document, origin: Origin) -> str:
    """Python or commands that use what the run left; "" where it left nothing to use."""
    run: Mapping[str, Any] = document.get("run", {})
    model, out = run.get("model"), origin.directory or "runs/x"
    command = run.get("command")
    if command == "train ats":
        return "\n".join(
            (
                "import calibjax",
                "import numpy as np",
                "",
                f"lm = calibjax.load_model({str(model)!r})",
                f"head = calibjax.load_head({str(out)!r}, lm)",
                'tokens = np.array([lm.tokenizer("Once upon a time")["input_ids"]])',
                "calibrated = calibjax.calibrated_confidence(lm, head, tokens)",
                "print(calibrated.confidence, calibrated.temperature)",
            )
        )
    if command == "train sft":
        lines = ("import calibjax", "", f"lm = calibjax.load_model({str(Path(out) / 'model')!r})")
        return "\n".join((*lines, 'print(calibjax.evaluate(lm, "data.jsonl"))'))
    if command == "compare":
        return _usage_of_comparison(winner(document["held_out"]), model, out)  # pyright: ignore[reportArgumentType]
    if command == "quickstart":
        return "calibjax train ats --model path/to/model --data data.jsonl --out runs/x"
    return ""


def _usage_of_comparison(best: str, model: Any, out: Any) -> str:
    """Commands that fit the winner again, keep it, and apply it; "" where that is the uncalibrated predictions."""
    kept, run = shlex.quote(str(Path(out) / "best")), shlex.quote(str(Path(out) / "run.yaml"))
    if best == "uncalibrated":
        return ""
    if model is not None and best in ("ats", "temperature"):
        use = f"calibjax generate --model {shlex.quote(str(model))} --head {kept} --prompt 'Once upon a time'"
    else:
        use = f"calibjax apply --table new.csv --method {kept} --out calibrated.csv"
    return f"calibjax compare --config {run} --save {kept}\n{use}"


def limitations(document: Document) -> list[str]:
    """What the results do not show, one sentence each."""
    held_out = document["held_out"]
    lines = [
        f"The figures hold for text like the {held_out['tokens']:,} held-out {unit_of(held_out)}; on another domain a "
        "method can be better or worse."
        + ("" if "transfer" in document or "tasks" in document else " Nothing else was evaluated in this run."),
        "Intervals show the noise of the held-out data alone, not that of another fit with another seed.",
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
        lines.append(
            "The language and the model are tiny and synthetic: they show the method, not its effect on yours."
        )
    return lines
