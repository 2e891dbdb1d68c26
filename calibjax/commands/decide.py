"""`calibjax decide`: when to answer, so that at most a given fraction is wrong."""

import dataclasses
from pathlib import Path

import numpy as np

from calibjax.commands.groups import JsonOptions, TableOptions
from calibjax.data.table import PredictionTable
from calibjax.eval.answers.decide import SET_SCORES, TITLES, decide
from calibjax.eval.report.notes import Verdict
from calibjax.eval.report.schema import Document
from calibjax.eval.report.tables import TextTable, short, show
from calibjax.eval.report.terminal import print_result
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.files import check_new_file, json_text, write_file
from calibjax.runtime.options import Fraction, not_identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecideOptions(TableOptions, JsonOptions):
    """Finds the confidence above which to answer, with a guarantee on the fraction of wrong answers.

    The table has the columns of `compare`: confidence and correct (0 or 1), or p_0, p_1, ... (or logits) and label, for
    which prediction sets are computed too. Leave out the rows that a model or a recalibrator was fitted on.
    Example: calibjax decide --table predictions.csv --risk 0.1

    Attributes:
        table: answers with known outcomes: .csv, .tsv, .jsonl, .json, .parquet or .npz.
        risk: largest fraction of wrong answers.
        level: probability, over the draw of the table, of the guarantee on the answers that are given.
        claims: rows are factual claims, and those with the same label in the column group are the claims of one
            answer; limits the expected fraction of false claims among those that an answer keeps.
        by_category: a threshold for each value of the column category, each with the guarantee.
        out: file to write, .json: thresholds and figures.
    """

    risk: Fraction = 0.05
    level: Fraction = 0.9
    claims: bool = False
    by_category: bool = False
    out: Path | None = not_identity(None)

    def check(self) -> None:
        """Raises `UserError` for options that do not fit together, or a file of another kind."""
        if self.claims and self.level != DecideOptions.level:
            raise UserError("--level: the guarantee on --claims is on average over tables, without it; leave it out.")
        if self.out is not None:
            if self.out.suffix != ".json":
                raise UserError(f"--out {self.out}: expected a file ending in .json.")
            with about("--out"):
                check_new_file(self.out)


def run(options: DecideOptions, log: Log = print) -> Document:
    """Runs the command; returns thresholds, with what they guarantee and what they do to the rows of the table."""
    options.check()
    table = options.read_table(options.table, log, skip_broken=options.skip_broken)
    if options.by_category and table.categories is None:
        raise UserError(f"--by-category: {options.table} has no column category: name one, --columns category=NAME.")
    if options.claims and table.groups is None:
        raise UserError(f"--claims: {options.table} has no column group, the answer of a claim: --columns group=NAME.")
    if table.groups is not None and not options.claims:
        count = len(np.unique(table.groups))
        if count < len(table):
            dependent = f"{len(table):,} rows are of {count:,} groups, whose rows depend on each other"
            log(f"WARNING: {dependent}: what follows holds for independent rows, such as one of each group")
    data, p = table.predictions, _probabilities(table)
    scores, outcomes = map(np.asarray, (data.confidence, data.correct) if p is None else (p, data.labels))
    answer = table.groups if options.claims else None
    category = table.categories if options.by_category else None
    with about("--table"):
        decided = decide(scores, outcomes, options.risk, options.level, answer=answer, category=category)
    document = {"table": str(options.table), **decided}
    if options.out is not None:
        write_file(options.out, json_text(document))
    if not options.json:
        _print(document, options)
    return document


def _print(document: Document, options: DecideOptions) -> None:
    rows, sets = [], []
    categories = document.get("categories") or {"": document["thresholds"]}
    for category, decided in categories.items():
        for kind, row in decided.items():
            threshold, name = row["threshold"], TITLES.get(kind, kind)
            start = [f"{category}, {name}" if category else name, f"{row['questions']:,}"]
            if kind in SET_SCORES:
                shown = "every option" if threshold is None else str(threshold)
                cells = [short(row["right_in_set"], ".3f"), f"{row['mean_size']:.2f}", short(row["single"], ".3f")]
                sets.append([*start, shown, *cells])
                continue
            shown = f"answers {row['selects']}" if threshold is None else str(threshold)
            keys = ("answered", "wrong", "wrong_of_answered")
            cells = [show(key, form=".3f", leading_zero=False)(row) for key in keys]
            rows.append([*start, shown, *cells])
    columns = ["wrong answers limited", "questions", "confidence above", "answered", "wrong of all", "wrong of answers"]
    title = f"At most {options.risk} wrong; figures are those of the table itself"
    if options.claims:
        title = title.replace("wrong", "false")
        columns = ["false claims limited", "answers", "confidence above", "kept", "false of all", "false of an answer"]
    titles = ["sets", "questions", "score at least", "right in set", "mean size", "one option"]
    shown = {kind for row in categories.values() for kind in row}
    guarantees = [(kind, text) for kind, text in document["guarantees"].items() if kind in shown]
    notes = [f"{TITLES.get(kind, kind)}: {text}." for kind, text in guarantees]
    table = TextTable(title, columns, rows, (3, 2, 5, 4, 1))
    more = [TextTable("Sets of options", titles, sets)] if sets else []
    files = "" if options.out is None else f"thresholds and figures in {options.out}"
    print_result(_verdict(categories, options), table, notes=notes, more=more, files=files)


def _verdict(categories: Document, options: DecideOptions) -> Verdict:
    decided = [row["claims" if options.claims else "answers"] for row in categories.values()]
    threshold = decided[0]["threshold"]
    none = sum(row["selects"] == "none" for row in decided)
    answered = np.average([row["answered"] for row in decided], weights=[row["questions"] for row in decided])
    if options.claims:
        limit = f"expected fraction of false claims in an answer is at most {options.risk}"
        if none == len(decided):
            return Verdict(f"no claim can be kept: the answers do not show that the {limit}.", is_warning=True)
        if options.by_category:
            return Verdict(f"The {limit} in each category, with the claims above its threshold.")
        if threshold is None:
            return Verdict(f"All claims can be kept: the {limit}.")
        return Verdict(f"Keep claims with a confidence above {threshold}: {answered:.1%} of them; the {limit}.")
    limit = f"at most {options.risk} of the answers are wrong (with probability {options.level})"
    if none == len(decided):
        reason = "the questions are too few, or the confidence does not tell right from wrong well enough"
        line = f"no threshold is guaranteed, with probability {options.level}, to keep at most {options.risk} of the "
        line += f"answers wrong (the row of all questions holds on average): {reason}."
        return Verdict(line, is_warning=True)
    if options.by_category:
        left = f"; in {none} of {len(decided)} categories none is answered" if none else ""
        return Verdict(f"{answered:.1%} of the questions are answered, and in each category {limit}{left}.")
    if threshold is None:
        return Verdict(f"All questions can be answered: {limit}.")
    return Verdict(f"Answer where the confidence is above {threshold}: {answered:.1%} of the questions, and {limit}.")


def _probabilities(table: PredictionTable) -> np.ndarray | None:
    """Probabilities of the options, float64 `[N, K]`: those of the file, or the softmax of its logits."""
    if table.probabilities is not None or table.predictions.logits is None:
        return table.probabilities
    logits = np.asarray(table.predictions.logits, np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / np.sort(p, axis=1).sum(axis=1, keepdims=True)  # sorted: the same sum in any order of the options
