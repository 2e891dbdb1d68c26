"""The contents of metrics.json and tokens.json as types, and the one place where such files are checked and read.

The functions that make a document return these types; `read_metrics` and `read_tokens` check a file against them, so
that a damaged file is one `UserError` with the path of its first invalid entry. Entries that no type names are ignored.
"""

import json
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, final

from calibjax.metrics import Closed
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json

SCHEMA = 1
"""Version of metrics.json."""


# --- parts of a row ---


class Interval(TypedDict):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


class Ends(TypedDict):
    """A 95% interval alone."""

    low: float
    high: float


class Ece(Interval):
    """An expected calibration error with its interval and binning."""

    bins: int
    closed: Closed


class Difference(TypedDict):
    """A paired difference of two figures; see `metrics.Comparison`. `holm_p`: corrected for the number of methods."""

    difference: float
    low: float
    high: float
    share_lower: NotRequired[float]
    p_value: NotRequired[float]
    holm_p: NotRequired[float]


class Reliability(TypedDict):
    """Per bin: count, mean confidence, and accuracy with its interval; null where the bin is empty."""

    count: list[int]
    confidence: list[float | None]
    accuracy: list[float | None]
    low: NotRequired[list[float | None]]
    high: NotRequired[list[float | None]]


class Curve(TypedDict):
    """The smooth reliability curve at even steps of confidence from 0 to 1; see `metrics.ReliabilityCurve`."""

    bandwidth: float
    density: list[float]
    accuracy: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Temperatures(TypedDict):
    """A histogram of temperatures: one count fewer than edges."""

    edges: list[float]
    count: list[int]


# --- the sets of a run: rows by method ---


class RowBase(TypedDict):
    """What every method on every set has, but its likelihood. `intervals`: of nll, brier and accuracy."""

    brier: float
    accuracy: float
    confidence: float
    mce: float
    ece: Ece
    reliability: Reliability
    curve: NotRequired[Curve]
    bias: NotRequired[float]
    rmsce: NotRequired[float]
    debiased_ece: NotRequired[float]
    intervals: NotRequired[dict[str, Ends]]
    against_uncalibrated: NotRequired[dict[str, Difference]]


class MethodRow(RowBase):
    """One method on a set of tokens."""

    nll: float
    temperatures: NotRequired[Temperatures]
    exact_error: NotRequired[float]


class ConfidenceRow(RowBase):
    """One method by confidence and correctness, as `comparison_json` makes it.

    `nll` is null for methods that give a confidence alone, `log_loss` is null if it is infinite.
    `against` has no entry for the method that the others are compared with, nor for figures that one of both lacks.
    """

    nll: float | None
    log_loss: float | None
    certain_and_wrong: int
    adaptive_ece: float | None
    smooth_ece: float | None
    auroc: float | None
    changed: int
    against: NotRequired[dict[str, Difference]]


class ComparedRow(ConfidenceRow):
    """One method of `compare`."""

    parameters: int
    fit_seconds: float


class AnswerRow(ConfidenceRow):
    """One method on the answers to a benchmark."""

    aurc: float | None
    excess_aurc: float | None
    ks_error: float | None
    debiased_l2: float | None
    accuracy_interval: Ends


AnyRow = MethodRow | ConfidenceRow


class SetBase(TypedDict):
    """What every set has beside its methods."""

    tokens: int
    unit: NotRequired[str]
    clusters: NotRequired[str]
    title: NotRequired[str]
    confidence: NotRequired[str]
    reference: NotRequired[str]
    failed: NotRequired[dict[str, str]]
    left_out: NotRequired[dict[str, str]]


class ResultSet(SetBase):
    """A set of tokens."""

    methods: dict[str, MethodRow]


class ComparisonSet(SetBase):
    """The held-out predictions of `compare`, rows ordered by the figure `sort`.

    `not_converged` names methods whose fit did not end at a finite optimum.
    """

    unit: str
    clusters: str
    reference: str
    failed: dict[str, str]
    left_out: dict[str, str]
    not_converged: NotRequired[list[str]]
    sort: str
    methods: dict[str, ComparedRow]


class MethodOnSubject(TypedDict):
    """One method on the questions of one subject."""

    confidence: float
    ece: Interval


class SubjectRow(TypedDict):
    """One subject: `gap` is confidence minus accuracy."""

    subject: str
    questions: int
    confidence: float
    accuracy: Interval
    gap: float


class SubjectOfTask(SubjectRow):
    """One subject of a benchmark, under every method."""

    methods: dict[str, MethodOnSubject]


class AnswerSet(SetBase):
    """The answers to a benchmark, or to several together."""

    methods: dict[str, AnswerRow]
    harness: dict[str, float]
    cut: int
    too_long: int


class TaskSet(AnswerSet):
    """The answers to one benchmark, and how it was asked."""

    shots: int
    source: str
    subjects: list[SubjectOfTask]


AnySet = ResultSet | ComparisonSet | AnswerSet | TaskSet


# --- the parts of single commands ---


class TextRow(TypedDict):
    """The texts of one model at one myopic temperature."""

    log_prob: float
    log_prob_error: float
    distinct_1: float
    distinct_2: float
    distinct_3: float
    repetition: float
    self_bleu: float | None
    tokens: NotRequired[int]
    first: NotRequired[str]


class AnalogyRow(TypedDict):
    """The analogies of one model at one myopic temperature; `error` is the accuracy's standard error."""

    accuracy: float
    error: float
    questions: NotRequired[int]
    categories: NotRequired[dict[str, float]]


class LayerRow(TypedDict):
    """The prediction read from one layer."""

    layer: int
    agreement: float
    accuracy: Interval
    confidence: Interval
    ece: Interval
    mce: Interval
    entropy: Interval
    kl: Interval
    nll: NotRequired[Interval]


class PhaseRow(TypedDict):
    """The confidence-correction phase; see `layers.Phase`."""

    settled: int
    peak: int
    correction: Difference
    p_value: NotRequired[float]
    found: bool
    settled_share: float


class LayerCurves(TypedDict):
    """What `layers_json` returns."""

    curves: list[LayerRow]
    phase: PhaseRow


class Layers(LayerCurves):
    """The layers, and what was read from them."""

    tokens: int
    readout: str


class DirectionRow(TypedDict):
    """The direction after one block."""

    layer: int
    gap: float
    length: float
    null_space_share: float


class EditRow(TypedDict):
    """An edit of the residual stream: the block, 0 for none, and its strength."""

    layer: int
    strength: float


class Direction(TypedDict):
    """The direction, the edit chosen on one half, and its effect on the ECE of the other."""

    recipe: str
    counts: list[int]
    expected_share: float
    rows: list[DirectionRow]
    chosen: EditRow
    difference: Difference


class FitFigures(TypedDict):
    """Of an edit, on the half that the choice is made on."""

    ece: float


class HeldOutFigures(TypedDict):
    """Of an edit, on the held-out half."""

    ece: Interval
    mce: Interval
    accuracy: Interval
    confidence: Interval


class SweepRow(EditRow):
    """One edit of the sweep."""

    fit: FitFigures
    held_out: HeldOutFigures


class NeuronRow(TypedDict):
    """An entropy neuron; see `neurons.Neuron`."""

    layer: int
    index: int
    norm: float
    norm_percentile: float
    logit_variance: float
    logit_variance_percentile: float
    null_space_share: float


class AblationRow(TypedDict):
    """The held-out half with neurons of the last block changed; see `ablation.ablate`. Entropy and NLL in nats."""

    name: str
    entropy: float
    confidence: float
    accuracy: float
    ece: float
    nll: float


# --- documents ---


class TrainingCurve(TypedDict):
    """The losses that were logged while something was trained: of batches, and the NLL of validation data."""

    step: list[int]
    loss: list[float]
    validation_step: list[int]
    validation_nll: list[float]


class ComparedLoss(TypedDict):
    """Temperature scaling, or heads of one loss, on sequences that they were not fitted on; nll in nats a token.

    `calibration_error` is debiased (`metrics.debiased_from_sums`); `factor` is the refitted one on every scale;
    `shrinkage` the fraction of the way to temperature scaling by which the log scales are moved.
    """

    loss: str
    nll: float
    brier: float
    ece: float
    calibration_error: float
    factor: float
    shrinkage: float
    beats_temperature: bool


class LossComparison(TypedDict):
    """How a loss was chosen: temperature scaling and every loss on the first fold; on all folds, those that remained.

    `chosen`: temperature scaling and the best loss, which is kept if it beats temperature scaling; empty if no loss has
    a lower NLL and Brier score.
    """

    candidates: list[ComparedLoss]
    chosen: list[ComparedLoss]


class DocumentBase(TypedDict):
    """What the metrics.json of every run holds; `training` by the name of what was trained.

    `comparison`: of `--loss auto`.
    """

    schema: int
    run: NotRequired[dict[str, Any]]
    training: NotRequired[dict[str, TrainingCurve]]
    comparison: NotRequired[LossComparison]


@final
class TokensDocument(DocumentBase):
    """Of `train ats`, `train sft` and `quickstart`."""

    held_out: ResultSet
    transfer: NotRequired[dict[str, ResultSet]]


@final
class CompareDocument(DocumentBase):
    """Of `compare`."""

    held_out: ComparisonSet


@final
class TasksDocument(DocumentBase):
    """Of `eval tasks`: every task, and all of them together."""

    held_out: AnswerSet
    tasks: dict[str, TaskSet]


@final
class LhtsDocument(DocumentBase):
    """Of `train lhts`: model -> myopic temperature -> figures."""

    held_out: ResultSet
    texts: dict[str, dict[str, TextRow]]
    analogies: dict[str, dict[str, AnalogyRow]]


@final
class LayersDocument(DocumentBase):
    """Of `eval layers`."""

    held_out: ResultSet
    layers: Layers
    direction: Direction
    sweep: list[SweepRow]
    neurons: list[NeuronRow]
    ablation: NotRequired[list[AblationRow]]
    subjects: list[SubjectRow]


Document = TokensDocument | CompareDocument | TasksDocument | LhtsDocument | LayersDocument


# --- studies ---


StudyFigure = Literal["nll", "brier", "ece", "accuracy", "confidence", "confidence_right", "confidence_wrong"]
"""The figures of a row of a study."""
ComparedFigure = Literal["nll", "brier", "ece"]
"""Those that are compared with another row's."""


class Repeated(Interval):
    """A mean over seeds with its interval, and the figure of each seed."""

    seeds: list[float]
    debiased: NotRequired[float]


class Against(TypedDict):
    """The row that another is compared with, and the paired differences."""

    name: str
    nll: Difference
    brier: Difference
    ece: Difference


class StudyRow(TypedDict):
    """One row of a study, as `repeats_json` makes it; `loss` and `alpha` where a head was trained."""

    nll: Repeated
    brier: Repeated
    ece: Repeated
    accuracy: Repeated
    confidence: Repeated
    confidence_right: Repeated
    confidence_wrong: Repeated
    against: NotRequired[Against]
    parameters: NotRequired[int]
    loss: NotRequired[str]
    alpha: NotRequired[float | None]


class StudySet(TypedDict):
    """A set of sequences of a study."""

    tokens: int
    windows: int
    methods: dict[str, StudyRow]


@final
class StudyDocument(DocumentBase):
    """Of `study`."""

    study: Literal["pooling", "losses", "alpha", "heads", "transfer"]
    question: str
    sets: dict[str, StudySet]
    bins: int
    closed: Closed


# --- tokens.json ---


class Token(TypedDict):
    """A token of held-out text; all but `text` and `scored` only where it was predicted. Pairs are before and after."""

    text: str
    scored: bool
    right: NotRequired[bool]
    confidence: NotRequired[list[float]]
    probability: NotRequired[list[float]]
    entropy: NotRequired[list[float]]
    temperature: NotRequired[float]
    top: NotRequired[list[list[Any]]]


class TokenSample(TypedDict):
    """The contents of tokens.json: sequences of tokens."""

    windows: list[list[Token]]


# --- reading ---


def read_metrics(file: Path) -> Document | StudyDocument:
    """Reads and checks the metrics.json of a run or a study.

    Raises:
        UserError: the file is unreadable or of another schema, or an entry is missing or invalid.
    """
    found = _load(file)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not {"held_out", "study"} & found.keys():
        raise UserError(f"{file}: expected metrics of schema {SCHEMA} with held-out figures. Run the command again.")
    return check_document(found, file)


def read_tokens(file: Path) -> TokenSample:
    """Reads and checks a tokens.json; raises as `read_metrics`."""
    found = _load(file)
    _check(found, TokenSample, file, _sample_problems)
    return found


def check_document(found: Any, file: Path) -> Any:
    """Returns the contents of a metrics.json, of a study too, after checking them; `file` is named in the error.

    Raises:
        UserError: names the path of the first entry that is missing or invalid.
    """
    kinds = [kind for marker, kind in _KINDS.items() if marker in found]
    held_out = found.get("held_out")
    if isinstance(held_out, dict) and "sort" in held_out:
        kinds.append(CompareDocument)
    for kind in kinds or [TokensDocument]:
        _check(found, kind, file, _document_problems)
    return found


_KINDS: dict[str, type] = {
    "layers": LayersDocument,
    "texts": LhtsDocument,
    "tasks": TasksDocument,
    "study": StudyDocument,
}
"""An entry that only one kind of document has -> its type."""


def _load(file: Path) -> Any:
    try:
        return read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not readable ({error}).") from error


def _check(found: Any, kind: Any, file: Path, further: Any) -> None:
    problem = next(_type_problems(found, kind, ""), None) or next(further(found), None)
    if problem:
        raise UserError(f"{file}: {problem}. Restore the file from a copy, or run the command again.")


def _type_problems(found: Any, kind: Any, path: str) -> Iterator[str]:
    """Where a value of JSON is not of a type: a TypedDict, dict, list, union, `Literal` or scalar."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if typing.is_typeddict(kind):
        if not isinstance(found, dict):
            yield _problem(path, "an object", found)
            return
        for name, of_entry in typing.get_type_hints(kind).items():
            if name in found:
                yield from _type_problems(found[name], of_entry, _join(path, name))
            elif name in kind.__required_keys__:
                yield f"{_join(path, name)}: expected an entry, found none"
    elif origin is dict or origin is list:
        if not isinstance(found, origin):
            yield _problem(path, "an object" if origin is dict else "a list", found)
            return
        for name, value in found.items() if isinstance(found, dict) else enumerate(found):
            yield from _type_problems(value, arguments[-1], _join(path, str(name)))
    elif origin is types.UnionType:
        rest = [argument for argument in arguments if argument is not type(None)]
        if found is not None or len(rest) == len(arguments):
            yield from _type_problems(found, rest[0], path)
    elif origin is Literal:
        if found not in arguments:
            yield _problem(path, f"one of {', '.join(arguments)}", found)
    elif not _is_scalar(found, kind):
        yield _problem(
            path, {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}[kind], found
        )


def _is_scalar(found: Any, kind: type) -> bool:
    if isinstance(found, bool) or kind not in (int, float):
        return type(found) is kind
    if kind is int:
        return isinstance(found, int) and abs(found) < 2**63
    return isinstance(found, int | float) and not abs(found) > 1e100  # NaN is the figure of no points


def _problem(path: str, expected: str, found: Any) -> str:
    shown = json.dumps(found)
    return f"{path or 'the file'}: expected {expected}, found {shown if len(shown) <= 40 else shown[:37] + '...'}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _document_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """What the types cannot express: lists of one length, rows that others name, and parts that must not be empty."""
    sets = {"held_out": document["held_out"]} if "held_out" in document else {}
    for kind in ("transfer", "tasks", "sets"):
        sets |= {f"{kind}.{name}": of_set for name, of_set in document.get(kind, {}).items()}
    if "study" in document:
        yield from _study_problems(document)
    for path, of_set in sets.items():
        if not of_set["methods"]:
            yield f"{path}.methods: expected at least one method, found none"
        for name, row in of_set["methods"].items():
            yield from _row_problems(row, f"{path}.methods.{name}")
        if path.startswith("tasks."):
            yield from _subject_problems(of_set, path)
    if "comparison" in document and not document["comparison"]["candidates"]:
        yield "comparison.candidates: expected at least one loss, found none"
    for name, curve in document.get("training", {}).items():
        for step, value in (("step", "loss"), ("validation_step", "validation_nll")):
            if len(curve[step]) != len(curve[value]):
                yield f"training.{name}: expected {step} and {value} of one length"
    if "layers" in document:
        yield from _layer_problems(document)
    if "texts" in document:
        yield from _text_problems(document)


def _study_problems(document: Mapping[str, Any]) -> Iterator[str]:
    sets, transfer = document["sets"], document["study"] == "transfer"
    if not sets:
        yield "sets: expected at least one set, found none"
    sources = [f"{method} from {domain}" for method in ("temperature", "ats") for domain in sets]
    for name, of_set in sets.items():
        path, rows = f"sets.{name}.methods", of_set["methods"]
        needed = ["uncalibrated", *(sources if transfer else ["temperature"])]
        yield from (f"{path}: expected a row {row!r}, found none" for row in needed if row not in rows)
        for row in rows:
            if transfer and row in sources and "against" not in rows[row]:
                yield f"{path}.{row}: expected an entry against, found none"
            yield from (
                f"{path}.{row}.{figure}.seeds: expected at least one value, found none"
                for figure, value in rows[row].items()
                if isinstance(value, dict) and not value.get("seeds", True)
            )


def _row_problems(row: Mapping[str, Any], path: str) -> Iterator[str]:
    if "reliability" in row:
        bins = row["reliability"]
        if len({len(values) for values in bins.values() if isinstance(values, list)}) != 1 or not bins["count"]:
            yield f"{path}.reliability: expected lists of one length, at least 1"
        for index, (accuracy, confidence) in enumerate(zip(bins["accuracy"], bins["confidence"], strict=False)):
            if (accuracy is None) != (confidence is None):
                yield f"{path}.reliability: expected both accuracy and confidence of bin {index}, or neither"
    if "curve" in row:
        curve = {name: values for name, values in row["curve"].items() if isinstance(values, list)}
        if len({len(values) for values in curve.values()}) != 1 or len(curve["density"]) < 2:
            yield f"{path}.curve: expected lists of one length, at least 2"
    if "temperatures" in row:
        edges, count = row["temperatures"]["edges"], row["temperatures"]["count"]
        if len(edges) != len(count) + 1 or not count:
            yield f"{path}.temperatures: expected one more edge than counts, found {len(edges)} and {len(count)}"


def _subject_problems(of_task: Mapping[str, Any], path: str) -> Iterator[str]:
    for index, row in enumerate(of_task["subjects"]):
        missing = of_task["methods"].keys() - row["methods"].keys()
        if missing:
            yield f"{path}.subjects.{index}.methods: expected {', '.join(sorted(missing))}, found none"


def _layer_problems(document: Mapping[str, Any]) -> Iterator[str]:
    curves, phase, direction = document["layers"]["curves"], document["layers"]["phase"], document["direction"]
    for name in ("settled", "peak"):
        if not 0 <= phase[name] < len(curves):
            yield f"layers.phase.{name}: expected a layer from 0 to {len(curves) - 1}, found {phase[name]}"
    if len(direction["counts"]) != 2:
        yield f"direction.counts: expected 2 counts, found {len(direction['counts'])}"
    if any(not row["length"] for row in direction["rows"]):
        yield "direction.rows: expected lengths above 0"
    edits = [(row["layer"], row["strength"]) for row in document["sweep"]]
    chosen = (direction["chosen"]["layer"], direction["chosen"]["strength"])
    if chosen not in edits:
        yield f"sweep: expected a row for the chosen edit {chosen}, found none"
    if not any(layer == 0 for layer, _ in edits):
        yield "sweep: expected a row for the unedited model (layer 0), found none"
    if not {"uncalibrated"} <= document["held_out"]["methods"].keys():
        yield "held_out.methods: expected uncalibrated, found none"


def _text_problems(document: Mapping[str, Any]) -> Iterator[str]:
    texts = document["texts"]
    if not texts.get("pretrained"):
        yield "texts.pretrained: expected at least one temperature, found none"
        return
    temperatures = set(texts["pretrained"])
    for part in ("texts", "analogies"):
        for name, rows in document[part].items():
            if set(rows) != temperatures:
                yield f"{part}.{name}: expected the temperatures {', '.join(sorted(temperatures))}"
    with_bleu = {cell["self_bleu"] is not None for rows in texts.values() for cell in rows.values()}
    if len(with_bleu) > 1:
        yield "texts: expected self_bleu of every text, or of none"
    missing = {"pretrained", *texts} - document["held_out"]["methods"].keys()
    if missing:
        yield f"held_out.methods: expected {', '.join(sorted(missing))}, found none"


def _sample_problems(sample: Mapping[str, Any]) -> Iterator[str]:
    for index, tokens in enumerate(sample["windows"]):
        for place, token in enumerate(tokens):
            if not token["scored"]:
                continue
            path = f"windows.{index}.{place}"
            for name in ("right", "confidence", "probability", "entropy", "temperature", "top"):
                if name not in token:
                    yield f"{path}.{name}: expected an entry, found none"
            for name in ("confidence", "probability", "entropy"):
                if len(token.get(name, ())) != 2:
                    yield f"{path}.{name}: expected 2 numbers, found {len(token.get(name, ()))}"
            for row in token.get("top", ()):
                if len(row) != 3 or not isinstance(row[0], str):
                    yield f"{path}.top: expected rows of a text and 2 numbers"
