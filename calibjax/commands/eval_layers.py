"""`calibjax eval layers`: calibration across the layers of a model, and along a direction of its residual stream."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar

from calibjax.commands import groups, run_directory
from calibjax.data import Sequences, check_ids, choice_sequences, is_multiple_choice
from calibjax.eval.layers.analysis import LayersOptions, evaluate_layers
from calibjax.eval.report.schema import Document
from calibjax.models import LanguageModel
from calibjax.runtime.context import Log
from calibjax.runtime.distributed import together
from calibjax.runtime.errors import UserError, quantity
from calibjax.runtime.options import not_identity, run_identity
from calibjax.runtime.sharding import check_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalLayersOptions(LayersOptions, groups.OutputOptions, groups.SourceOptions, groups.ModelOptions):
    """Evaluates what each layer of a model would predict, and what changes its confidence (arXiv 2511.00280).

    Prints, for each layer, accuracy, confidence, calibration errors, entropy and the divergence from the last layer;
    where the decision settles and whether confidence is corrected after it; the effect of a calibration direction in
    the residual stream, chosen on one half of the data and evaluated on the other; and the effect of ablating entropy
    neurons. --data with the columns question, choices (or A, B, ...) and answer is multiple choice, all else is text.
    Example: calibjax eval layers --model HuggingFaceTB/SmolLM2-135M --data questions.csv --out runs/layers

    Attributes:
        data: file, directory or hub id, as for `train ats`, or of multiple-choice questions.
        out: directory for metrics.json, report.html and figures; without it only the tables are printed.
        letters_only: compare only the letters of a question; --no-letters-only reads the whole vocabulary.
        subjects: print the table of subjects as well.
        text: how text becomes sequences; of questions, --max-sequences are drawn at random.
    """

    reads_choices: ClassVar[bool] = True
    out: Path | None = not_identity(None)
    letters_only: bool = True
    subjects: bool = not_identity(False)


def run(options: EvalLayersOptions, log: Log = print) -> Document:
    """Runs the command; returns the contents of metrics.json. Raises `UserError` before any work is lost."""
    context = run_directory.begin("eval layers", options, log)
    check_batch(context.mesh, options.batch_size)
    lm = options.load(context.mesh, log)
    edits = 1 + len(options.swept(lm.config.num_layers)) * len(options.strengths)
    (fit, held_out), unit, questions = together(functools.partial(_read, options, lm, log))
    counts = [int(half.where.sum()) for half in (fit, held_out)]
    log(f"split: {counts[0]:,} {unit} to find a direction and an edit on, {counts[1]:,} held out")
    tokens = sum(int(half.segment_ids.astype(bool).sum()) for half in (fit, held_out))
    text = f"{tokens:,} tokens in {len(fit.tokens) + len(held_out.tokens):,} sequences"
    log(f"work: {text}, read once for {lm.config.num_layers + 1} layers and once for each of {edits} edits")
    document = evaluate_layers(lm, fit, held_out, options, context, **questions)
    document["held_out"]["unit"] = unit
    document["run"] |= run_identity("eval layers", options)
    figures = "layers.png, sweep.png" + (", subjects.png" if document["subjects"] else "")
    run_directory.finish(document, options, holds=figures)
    return document


def _read(
    options: EvalLayersOptions, lm: LanguageModel, log: Log
) -> tuple[tuple[Sequences, Sequences], str, dict[str, Any]]:
    """The half that is fitted on and the other, what their predictions are, and letters and subjects of questions."""
    rows = options.text.open(options.data, options.split)
    if options.text.text_column is not None or not is_multiple_choice(rows):
        if not options.letters_only:
            raise UserError("--no-letters-only: --data is text, not multiple choice; leave it out.")
        sequences = options.text.read(options.data, lm, log, split=options.split)
        return groups.split_text(sequences, 0.5, log, order="sequential"), "tokens", {}
    if unread := options.text.changed("max_rows", "max_sequences", "skip_broken"):
        raise UserError(f"{', '.join(unread)}: not read with multiple choice; leave them out, or give --text-column.")
    longest, limit = lm.config.max_positions, options.text.max_sequences
    questions = choice_sequences(rows, lm.tokenizer, longest, limit=limit, seed=options.seed)
    check_ids(questions.sequences, lm.config.vocab_size)
    names = lm.tokenizer.convert_ids_to_tokens(list(questions.letters))
    left_out = f"{questions.too_long:,} of them longer than {longest} tokens and left out"
    used = f"{len(questions.subjects):,} used, answers {', '.join(names)} after {questions.cue!r}"
    log(f"data: {rows.name}: multiple choice, {quantity(questions.read, 'question')} read, {left_out}; {used}")
    if skipped := questions.skipped.count:
        log(f"data: {quantity(skipped, 'broken row')} skipped, the first: {questions.skipped.first}")
    # Questions of one subject stand together in most files: the halves should be alike.
    halves = groups.split_text(questions.sequences, 0.5, log, order="shuffled", seed=options.seed)
    letters = questions.letters if options.letters_only else None
    subject_of_row = dict(zip(questions.sequences.source.tolist(), questions.subjects, strict=True))
    subjects = tuple(subject_of_row[row] for half in halves for row in half.source.tolist())
    return halves, "questions", {"letters": letters, "subjects": subjects}
