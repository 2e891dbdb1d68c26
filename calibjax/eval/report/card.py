"""The model card of a fitted head, as Markdown, from the metrics.json of its run."""

from collections.abc import Iterable
from typing import NamedTuple

import yaml

from calibjax.eval.report.head import data_of
from calibjax.eval.report.notes import limitations
from calibjax.eval.report.rows import TextTable, counted, held_out_table
from calibjax.eval.report.schema import TokensDocument
from calibjax.eval.report.terminal import notes_of
from calibjax.eval.report.verdicts import verdict
from calibjax.runtime.version import __version__

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


def model_card(document: TokensDocument, subject: Subject) -> str:
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
