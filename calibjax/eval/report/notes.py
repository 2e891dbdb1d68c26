"""What a report says beside its results: warnings, conventions, code that uses what was fitted, limitations.

Also the model card of a fitted head, as Markdown, which is made of them.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from calibjax.eval.figures_json import wilson_interval
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import (
    Row,
    TextTable,
    binning,
    counted,
    held_out_table,
    remarks,
    sets_of,
    unit_of,
    winner,
)
from calibjax.eval.report.verdicts import set_verdict, verdict
from calibjax.runtime.version import __version__

FEW = 200
"""Questions of a benchmark below which its figures are hardly more than noise."""


def few(name: str, results: Row) -> str:
    """A warning with Wilson's interval of the accuracy where a set is tiny; "" where it is not."""
    count = results["tokens"]
    if not 0 < count < FEW:
        return ""
    accuracy = next(iter(results["methods"].values()))["accuracy"]
    ends = wilson_interval(round(accuracy * count), count)
    return (
        f"WARNING: {name} has only {counted(results)}: the 95% interval of its accuracy is [{ends['low']:.2f}, "
        f"{ends['high']:.2f}], and its calibration errors are known less well."
    )


def conventions(results: Row) -> str:
    """The binning and the intervals of a set's figures."""
    ece = next(iter(results["methods"].values()))["ece"]
    tokens = unit_of(results) == "tokens"
    confidence, scored = ("top token's probability", "top token") if tokens else ("confidence", "answer")
    definition = f" Confidence: {results['confidence']}." if "confidence" in results else ""
    return (
        f"ECE, MCE: {ece['bins']} equal-width bins {binning(ece['closed'])} of the {confidence}; interval: 95%, of the "
        f"population's ECE in these bins, over {results.get('clusters', 'sequences')}. Brier: of the {scored}."
        f"{definition}"
    )


def notes_of(document: Document) -> list[str]:
    """The verdicts of further sets, remarks on benchmarks, and the conventions of the figures."""
    notes, titles_of_line = [], {}
    for index, (title, results) in enumerate(sets_of(document)):
        if index and (line := set_verdict(results)):
            notes.append(f"{title}: {line}")
        for line in remarks(results):
            titles_of_line.setdefault(line, []).append(title)
    notes += [f"{', '.join(titles)}: {line}." for line, titles in titles_of_line.items()]
    return [*notes, conventions(document["held_out"])]


def model_of(run: Row) -> str:
    """The short name of the model of a run."""
    made = "small decoder" if run.get("command") == "quickstart" else ""
    return _short(run.get("model")) or made


def data_of(run: Row) -> str:
    """The short name of the data of a run."""
    made = "a synthetic language" if run.get("command") == "quickstart" else ""
    keys = ("tasks",) if run.get("tasks") else ("data", "table", "domains", "mmlu")
    names = (_short(run.get(key)) for key in keys)
    return ", ".join(name for name in names if name) or made


def _short(value: Any) -> str:
    """The name of a file or directory without its folders and endings."""
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return re.sub(r"\.(jsonl|json|csv|parquet|txt|npz)(\.gz)?$", "", Path(str(value)).name) if value else ""


def usage(document: Document, directory: Path | None) -> str:
    """Python or commands that use what the run left in its directory; "" where it left nothing to use."""
    run: Mapping[str, Any] = document.get("run", {})
    model, out, command = run.get("model"), directory or Path("runs/x"), run.get("command")
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
        lines = ("import calibjax", "", f"lm = calibjax.load_model({str(out / 'model')!r})")
        return "\n".join((*lines, 'print(calibjax.evaluate(lm, "data.jsonl"))'))
    if command == "quickstart":
        return "calibjax train ats --model path/to/model --data data.jsonl --out runs/x"
    if command != "compare" or (best := winner(document["held_out"])) == "uncalibrated":
        return ""
    saved, config = shlex.quote(str(out / "best")), shlex.quote(str(out / "run.yaml"))
    if model is not None and best in ("ats", "temperature"):
        use = f"calibjax generate --model {shlex.quote(str(model))} --head {saved} --prompt 'Once upon a time'"
    else:
        use = f"calibjax apply --table new.csv --method {saved} --out calibrated.csv"
    return f"calibjax compare --config {config} --save {saved}\n{use}"


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


# --- model card ---


_METHODS = {"ats": "Adaptive Temperature Scaling (arXiv 2409.19817)", "temperature": "temperature scaling"}


class Subject(NamedTuple):
    """What a card is about.

    Attributes:
        repository: of the head, org/name.
        base: id of the base model on the Hub; None where it is not known to be there.
        revision: of the base model; None: not known.
        name: of the base model.
        fingerprint: of its configuration and weights.
        method: "ats" or "temperature".
        head: one line on the head.
    """

    repository: str
    base: str | None
    revision: str | None
    name: str
    fingerprint: str
    method: str
    head: str


def model_card(document: Document, subject: Subject) -> str:
    """Returns the README.md of a repository of the Hub: its metadata as YAML, then base model, data and method, the
    table of results with intervals, the reliability diagram reliability.png, code, and limitations."""
    run = document.get("run", {})
    metadata = {
        "library_name": "calibjax",
        "tags": ["calibration", "temperature-scaling", "uncertainty"],
        "pipeline_tag": "text-generation",
    }
    if subject.base is not None:
        metadata |= {"base_model": subject.base, "base_model_relation": "adapter"}
    base = _plain(subject.base or subject.name) + (f" at revision {subject.revision}" if subject.revision else "")
    facts = {
        "Base model": f"{base}; frozen",
        "Fingerprint": f"`{subject.fingerprint}`",
        "Data": _plain(data_of(run)),
        "Method": f"{_METHODS[subject.method]}: {_plain(subject.head)}",
        "Loss": _plain(str(run.get("fit", {}).get("loss", ""))) if subject.method == "ats" else "cross-entropy",
        "Evaluated on": f"{counted(document['held_out'])}, held out",
        "Written by": f"calibjax {__version__}",
    }
    results = held_out_table(document, intervals=True)
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# Calibrated confidence for {_plain(subject.base or subject.name)}",
        verdict(document),
        _table(("", ""), ((title, value) for title, value in facts.items() if value)),
        "## Results",
        _table(results.columns, _named(results)),
        *(line.replace("<", "&lt;") for line in notes_of(document)),
        "![Reliability diagram](reliability.png)",
        "## Use",
        _code(subject),
        "The most likely token of every position is that of the base model. The head belongs to this base model: both "
        "functions compare it and refuse another one. `org/name@revision` pins a revision of the head.",
        "## Limitations",
        "\n".join(f"- {line}" for line in limitations(document)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _code(subject: Subject) -> str:
    base = subject.base or "path/to/base-model"
    pinned = f"{base}@{subject.revision}" if subject.revision else base
    revision = f", revision={subject.revision!r}" if subject.revision else ""
    return f"""```python
import calibjax

lm = calibjax.load_model({pinned!r})
head = calibjax.load_head({subject.repository!r}, lm)
generated = calibjax.generate(lm, ["Once upon a time"], head=head, max_new_tokens=20)
print(generated.texts(lm.tokenizer), generated.confidence)
```

With PyTorch and transformers, without JAX:

```python
import calibjax.torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({base!r}{revision})
calibjax.torch.attach(model, {subject.repository!r})
```"""


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[_cell(cell) for cell in row] for row in (columns, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _named(table: TextTable) -> list[list[str]]:
    """The rows, each with the title of its group in its name."""
    if not table.groups:
        return table.rows
    return [[f"{group}: {name}", *cells] for group, (name, *cells) in zip(table.groups, table.rows, strict=True)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _plain(text: str) -> str:
    """Names of files and models without characters that Markdown or HTML interpret."""
    return "".join(character if character.isalnum() or character in " ./:-_,()=" else "?" for character in text)
