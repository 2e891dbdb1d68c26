"""Does a temperature that was fitted on one domain hold on another?"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from calibjax.commands.common import DataOptions, check_source, claim_directory, leave_config, on_devices, split_text
from calibjax.commands.study.fits import SINGLE, StudyOptions, finish_study, fit_heads, load_checked
from calibjax.data import (
    Rows,
    Sequences,
    is_multiple_choice,
    make_sequences,
    read_source,
    recognise,
    right_choice,
    tokenize_rows,
)
from calibjax.eval.compare.repeats import evaluate_repeats
from calibjax.eval.report import row_name
from calibjax.eval.report.schema import StudyDocument
from calibjax.eval.tokens import identity_head
from calibjax.models import LanguageModel
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError, about

SUBJECTS = {
    "medical": (
        *("anatomy", "clinical_knowledge", "college_medicine", "human_aging", "medical_genetics", "nutrition"),
        *("professional_medicine", "virology"),
    ),
    "legal": ("international_law", "jurisprudence", "professional_law"),
    "technical": (
        *("abstract_algebra", "college_computer_science", "college_mathematics", "college_physics"),
        *("computer_security", "conceptual_physics", "electrical_engineering", "high_school_computer_science"),
        *("high_school_physics", "high_school_statistics", "machine_learning"),
    ),
}
"""Subjects of MMLU that are a domain together."""

_NAME = re.compile(r"[^\W_][\w .+-]{0,49}")  # of a directory, in any script, and of a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferOptions(StudyOptions):
    """Does a head that was fitted on one domain hold on another, and how far is it from one fitted there?

    Fits temperature scaling and an ATS head (MLP on hidden states, joint loss, several seeds) on each domain and
    evaluates them on the held-out sequences of all. All domains are cut to as many sequences as the smallest has.
    Prints the matrix of the NLL of ATS, and writes to --out: metrics.json, transfer.png and heads/.

    Attributes:
        domains: NAME=SOURCE each, a source being a file, directory or hub id. A name is of at most 50 letters, digits,
            spaces and _ . + -, and begins with a letter or digit.
        mmlu: questions with the columns question, choices, answer and subject: the medical, legal and technical
            subjects of MMLU become domains of text. A row is the question, a line break and the right answer, and
            every token of it is to be predicted; no multiple choice is made. All rows are read.
    """

    heading: ClassVar[str] = "data"
    domains: tuple[str, ...] = ()
    mmlu: str | None = None


@on_devices
def run(options: TransferOptions, log: Callable[[str], None] = print) -> StudyDocument:
    """Carries out `TransferOptions`; returns what it wrote to metrics.json."""
    named = [domain.partition("=") for domain in options.domains]
    names = [name for name, _, _ in named] + (list(SUBJECTS) if options.mmlu else [])
    if any(not (name and source) for name, _, source in named) or len(set(names)) < max(2, len(names)):
        raise UserError(
            f"--domains, --mmlu: expected at least two domains, NAME=SOURCE with names of their own, got "
            f"{', '.join(options.domains) or 'none'}{' and MMLU' if options.mmlu else ''}."
        )
    for name, _, _ in named:
        if not _NAME.fullmatch(name) or name == "uncalibrated":
            raise UserError(
                "--domains: expected names of 1 to 50 letters, digits, spaces and _ . + -, that begin with a letter or "
                f"digit and are not 'uncalibrated', got {name[:80]!r}. Each names a directory in --out."
            )
    for _, _, source in named:
        check_source("--domains", source, options.text)
    if options.mmlu is not None:
        with about("--mmlu"):
            _questions(options.mmlu)
    lm, mesh = load_checked(options, log)
    with about("--domains"):
        length = options.text.length((options.text.open(source) for *_, source in named), lm, column_optional=True)
    text = dataclasses.replace(options.text, seq_len=length)  # of all domains, which are concatenated
    domains = {name: text.read(source, lm, log, column_optional=True) for name, _, source in named}
    if options.mmlu is not None:
        domains |= _subject_domains(text, options.mmlu, lm, log)
    smallest = min(len(sequences.tokens) for sequences in domains.values())
    parts = {
        name: split_text(sequences.take(slice(smallest)), options.fit_fraction, log)
        for name, sequences in domains.items()
    }
    claim_directory(options.out, options.identity("transfer", {name: fit for name, (fit, _) in parts.items()}))
    leave_config(options.out, "study transfer", options)
    log(f"{len(parts)} domains of {smallest:,} sequences, {options.seeds} seeds")
    context = RunContext(directory=options.out / "heads", mesh=mesh, log=log, progress=not options.quiet)
    heads = {"uncalibrated": [identity_head(lm)]}
    for name, (fit, _) in parts.items():
        with jax.set_mesh(mesh):
            fitted = fit_heads(lm, fit, {"ats": options.variant()}, seeds=options.seeds, context=context.within(name))
        heads |= {row_name(method, name): fitted[method] for method in (SINGLE, "ats")}
    document: dict[str, Any] = {"study": "transfer", "question": "Does it hold on another domain?", "sets": {}}
    for target, (_, held_out) in parts.items():
        against = {
            row_name(method, source): row_name(method, target)
            for method in (SINGLE, "ats")
            for source in parts
            if source != target
        }
        with jax.set_mesh(mesh):
            document["sets"][target] = evaluate_repeats(
                lm,
                held_out,
                heads,
                against={**against, row_name("ats", target): row_name(SINGLE, target)},
                batch_size=options.batch_size,
                bins=options.bins,
                closed=options.closed,
                context=context.titled(f"evaluating on {target}"),
            )
    return finish_study(document, options, log)


def _subject_domains(
    text: DataOptions, source: str, lm: LanguageModel, log: Callable[[str], None]
) -> dict[str, Sequences]:
    rows = _questions(source)
    domains = {}
    for name, subjects in SUBJECTS.items():
        questions = answered_questions(rows, subjects)
        texts = Rows(questions, rows.name)
        if not questions:
            raise UserError(f"--mmlu {source}: no row has one of the {name} subjects {', '.join(subjects)}.")
        examples = tokenize_rows(texts, recognise(texts), lm.tokenizer)
        domains[name] = make_sequences(examples, text.length((), lm), layout=text.layout, max_sequences=text.examples)
        log(f"data: {name}: {len(questions):,} questions, {len(domains[name].tokens):,} sequences")
    return domains


def _questions(source: str) -> Rows:
    rows = read_source(source)
    if not is_multiple_choice(rows) or "subject" not in rows.first:
        raise UserError(f"--mmlu {source}: expected the columns question, choices, answer and subject.")
    return rows


def answered_questions(rows: Rows, subjects: tuple[str, ...]) -> list[dict[str, str]]:
    """Questions of some subjects with their right answers, as text, in an order that mixes the subjects."""
    texts = [
        {"text": f"{row.get('question')}\n{right_choice(row, place)}"}
        for place, row in rows.placed()
        if row.get("subject") in subjects
    ]
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
