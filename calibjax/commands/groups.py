"""Groups of options that commands share, and what is read from them: models, tables and text."""

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from calibjax.runtime.context import Log
from calibjax.runtime.distributed import DeviceOptions
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.options import INT_MAX, AnyText, Bins, Closed, Count, Fraction, Range, Seed, flag_of, not_identity
from calibjax.runtime.tracking import TrackerName

if TYPE_CHECKING:
    from calibjax.data import Format, Rows, Sequences
    from calibjax.data.sequences import SplitOrder
    from calibjax.data.table import PredictionTable
    from calibjax.models import LanguageModel

# Models and data are imported where they are used: a command on a table needs neither, and they take two seconds.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The language model of a command, and the devices that it runs on.

    Attributes:
        model: directory with config.json and safetensors, GGUF file, converted model, or hub id.
        adapter: directory of a low-rank adapter of PEFT, which is merged into the weights.
        dtype: compute dtype of the model; by default float32, and bfloat16 on accelerators if the weights are bfloat16.
    """

    model: str
    adapter: Path | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    devices: DeviceOptions = not_identity(DeviceOptions())

    def load(self, mesh: Mesh, log: Log | None = None, *, stored: DTypeLike | None = None) -> "LanguageModel":
        return load_placed(self.model, mesh, self.dtype, stored=stored, adapter=self.adapter, log=log)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Whether prompts are messages of a chat.

    Attributes:
        chat: write each prompt as a user's message with the model's chat template; by default where it has one.
        system: text of a system message before the prompt.
    """

    chat: bool | None = None
    system: Annotated[str, AnyText()] | None = None

    def applies(self, lm: "LanguageModel", log: Log) -> bool:
        """Whether prompts are messages, which is logged; raises `UserError` if there is no template for it."""
        if self.chat is False and self.system is not None:
            raise UserError("--system: only a chat template writes a system message. Leave out --no-chat.")
        has_template = bool(lm.tokenizer.chat_template)
        if not has_template and (self.chat or self.system is not None):
            raise UserError("--chat, --system: the model has no chat template. Leave them out.")
        applies = has_template and self.chat is not False
        if applies:
            log("chat: prompts are messages in the model's chat template; --no-chat gives them as plain text")
        return applies


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """How the result is printed.

    Attributes:
        json: print one JSON document to standard output at the end, and nothing else there.
    """

    json: bool = not_identity(False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions(JsonOptions):
    """Where the result of a seeded run goes, and what is printed.

    Attributes:
        out: output directory.
        json: print metrics.json to standard output at the end, and nothing else there.
        quiet: show no progress bars.
        seed: random seed of the whole run.
    """

    out: Path = not_identity()
    quiet: bool = not_identity(False)
    seed: Seed = 0

    def check(self) -> None:
        """Raises `UserError` where options do not fit together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOutputOptions(OutputOptions):
    """Where the result of training goes, and what follows its steps.

    Attributes:
        track: tracker that receives the scalars of training, in addition to TensorBoard and train.jsonl.
    """

    track: TrackerName = not_identity("tensorboard")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinningOptions:
    """Reliability bins.

    Attributes:
        bins: number of equal-width bins of the expected calibration error.
        closed: the bin of a confidence on an edge: the one below (right), the one above (left), or none.
    """

    bins: Bins = not_identity(15)
    closed: Closed = not_identity("right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Names of the columns of a table of predictions.

    Attributes:
        columns: names of columns that are not called confidence, correct, label, logits, probs, group or category, such
            as confidence=prob,correct=ok; confidence=rating/10 divides by 10. A confidence that is named takes
            precedence over logits. confidences=NAME,NAME,... are several, which stacking makes one of; the first is the
            confidence where there is no other.
        per_token: read a row for each token, where the table holds responses of a server with a text that it scored; by
            default each answer is a row (docs/data.md).
        truth: file with columns that the table lacks, such as correct. Rows with the same custom_id or id belong
            together; without these columns, the order decides.
    """

    columns: tuple[str, ...] = ()
    per_token: bool = False
    truth: Path | None = None

    def named_columns(self) -> dict[str, str]:
        """Role -> column, of --columns."""
        columns = {}
        for argument in self.columns:
            for pair in re.split(r",(?=\w+=)", argument.strip(", ")):
                if not re.fullmatch(r"\w+=.+", pair):
                    raise UserError(f"--columns {pair}: expected pairs such as confidence=prob,correct=ok.")
                role, name = pair.split("=", 1)
                if columns.setdefault(role, name) != name:
                    raise UserError(f"--columns: expected one column as {role}, got {columns[role]} and {name}.")
        return columns

    def read_table(self, file: Path, log: Log, **options: Any) -> "PredictionTable":
        """Reads the table in a file and logs the notes on it; further options as in `data.table.read_table`."""
        from calibjax.data.table import read_table

        columns = self.named_columns()
        with about("--table"):
            table = read_table(file, columns=columns, per_token=self.per_token, truth=self.truth, **options)
        for note in table.notes:
            log(note)
        return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions(ColumnOptions):
    """A table of predictions.

    Attributes:
        skip_broken: leave out rows that cannot be read, instead of stopping at the first; they are counted.
    """

    table: Path
    skip_broken: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How text becomes sequences of tokens.

    Attributes:
        text_column: read this column as plain text; by default the format is recognised: text, instruction, prompt and
            answer, or chat, with the loss on the answers only.
        prompt_template: text before the answer, such as "{instruction}\\n{input}\\n", in place of the chat template.
        score_template_text: include in the loss what the chat template writes between its generation prompt and an
            answer, such as an empty <think></think>.
        max_rows: number of rows to read, from the first; by default all.
        skip_broken: leave out rows that cannot be read, instead of stopping at the first; they are counted.
        seq_len: tokens per sequence; by default a length that holds 95% of the rows with answers (128 to 1,024), and
            128 for plain text, within the model's context.
        full_sequences: cut each row to exactly --seq-len tokens and drop shorter rows; nothing is packed or padded.
        packing: pack several short examples into one sequence, each attending to itself alone; --no-packing pads.
        max_sequences: number of sequences to keep, from the first; by default all.
    """

    text_column: str | None = None
    prompt_template: Annotated[str, AnyText()] | None = None
    score_template_text: bool = False
    max_rows: Count | None = None
    skip_broken: bool = False
    seq_len: Annotated[int, Range(2, INT_MAX)] | None = None
    full_sequences: bool = False
    packing: bool = True
    max_sequences: Count | None = None

    def changed(self, *but: str) -> list[str]:
        """The flags whose values are not the defaults of this class, without the fields `but`."""
        fields = (field for field in dataclasses.fields(DataOptions) if field.name not in but)
        return [flag_of(field.name) for field in fields if getattr(self, field.name) != field.default]

    @property
    def layout(self) -> Literal["full", "pack", "pad"]:
        if self.full_sequences:
            if not self.packing:
                raise UserError("--no-packing: full sequences are not padded; leave it or --full-sequences out.")
            return "full"
        return "pack" if self.packing else "pad"

    def open(self, source: str, split: str | None = None) -> "Rows":
        from calibjax.data import read_source

        return read_source(source, split=split, rows=self.max_rows, skip_broken=self.skip_broken)

    def recognise(self, rows: "Rows", *, column_optional: bool = False) -> "Format":
        """The format of rows; with `column_optional`, a `text_column` that the rows lack is ignored."""
        from calibjax.data import recognise

        column = None if column_optional and self.text_column not in rows.first else self.text_column
        return recognise(
            rows, column, prompt_template=self.prompt_template, score_template_text=self.score_template_text
        )

    def read(self, source: str, lm: "LanguageModel", log: Log, *, split: str | None = None) -> "Sequences":
        (sequences,) = self.read_all((source,), lm, log, split=split, column_optional=False).values()
        return sequences

    def read_all(
        self,
        sources: tuple[str, ...],
        lm: "LanguageModel",
        log: Log,
        *,
        split: str | None = None,
        column_optional: bool = True,
    ) -> dict[str, "Sequences"]:
        """Reads sets of one length, by short names. With `column_optional`, sets may lack `text_column`."""
        from calibjax.data import check_context, check_ids, choose_seq_len, load_sequences

        longest, tokenizer = lm.config.max_positions, lm.tokenizer
        sets = {}
        with about("--data"):
            opened = [self.open(source, split) for source in sources]
            pairs = [(rows, self.recognise(rows, column_optional=column_optional)) for rows in opened]
            seq_len = self.seq_len
            if seq_len is not None:
                check_context(seq_len, longest)
            else:
                lengths = [choose_seq_len(*pair, tokenizer, longest, self.layout) for pair in pairs]
                seq_len = max(lengths, default=min(128, longest))
            shape = {"seq_len": seq_len, "layout": self.layout, "max_sequences": self.max_sequences}
            for source, (rows, format) in zip(sources, pairs, strict=True):
                sequences, description = load_sequences(rows, tokenizer, format=format, **shape)
                check_ids(sequences, lm.config.vocab_size)
                for line in description.splitlines():
                    log(f"data: {line}")
                sets[_set_name(source, sources)] = sequences
        return sets


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The text of a command.

    Attributes:
        data: file (.jsonl, .json, .csv, .parquet, .txt, each also .gz), directory of such files, or hub id.
        split: split of a hub data set or directory.
        text: how text becomes sequences of tokens.
    """

    reads_choices: ClassVar[bool] = False  # multiple choice beside text
    data: str
    split: str | None = None
    text: DataOptions = DataOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions(SourceOptions):
    """The text of a command, and which part of it is held out.

    Attributes:
        fit_fraction: fraction of the sequences to fit on; the rest is held out. A row is never on both sides.
        split_order: shuffled: rows are drawn by the seed; sequential: the fit takes the first ones. A lone row is cut.
    """

    fit_fraction: Fraction = 0.6
    split_order: Literal["shuffled", "sequential"] = "shuffled"

    def split_text(self, sequences: "Sequences", log: Log, seed: int) -> tuple["Sequences", "Sequences"]:
        """The part to fit on and the held-out part; see the function `split_text`."""
        return split_text(sequences, self.fit_fraction, log, order=self.split_order, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalDataOptions:
    """Text to evaluate on, in addition to the part that is held out.

    Attributes:
        eval_data: further sets to evaluate on: files, directories or hub ids.
        eval_split: split of these sets, as --split.
    """

    eval_data: tuple[str, ...] = not_identity(())
    eval_split: str | None = not_identity(None)


def load_placed(
    path: str | Path,
    mesh: Mesh,
    dtype: DTypeLike | None,
    *,
    stored: DTypeLike | None = None,
    adapter: Path | None = None,
    log: Log | None = None,
) -> "LanguageModel":
    """Loads a model onto the devices of a run, each of which holds a part of the weights, and logs it.

    It computes in `dtype`: by default in float32, and in bfloat16 on accelerators if the weights are stored in it.
    `stored` is the dtype of the weights in memory, by default `dtype`.
    """
    from calibjax.models import load_model
    from calibjax.models.load import stored_dtype

    with about("--model"):
        if dtype is None:
            on_host = mesh.devices.flat[0].platform == "cpu"
            dtype = "float32" if on_host or stored_dtype(path) != "bfloat16" else "bfloat16"
        placed = mesh if mesh.size > 1 else None
        lm = load_model(path, dtype=dtype if stored is None else stored, mesh=placed, adapter=adapter)
        if lm.has_tokenizer:
            _ = lm.tokenizer  # refused now, not when a run first uses it
    lm = dataclasses.replace(lm, dtype=jnp.dtype(dtype))
    if log is not None:
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        log(f"model: {lm!r}, on {mesh.size} device(s): {axes}")
    return lm


def split_text(
    sequences: "Sequences", fit_fraction: float, log: Log, *, order: "SplitOrder", seed: int = 0
) -> tuple["Sequences", "Sequences"]:
    """`split_sequences`, with at least two held out; logs how much of that part is in the fitting part as well."""
    from calibjax.data import split_sequences
    from calibjax.data.sequences import check_resamples

    fit, held_out = split_sequences(sequences, fit_fraction, order=order, seed=seed)
    check_resamples(held_out, "held out")
    warn_of_repeats(fit, held_out, "the held-out part", log)
    return fit, held_out


def warn_of_repeats(fit: "Sequences", part: "Sequences", name: str, log: Log) -> None:
    """Logs how many texts of a set to evaluate on are in the fitting part as well."""
    from calibjax.data import count_repeats

    repeated, total = count_repeats(fit, part)
    if repeated:
        texts = f"{repeated:,} of {total:,} texts of {name} ({repeated / total:.1%})"
        hint = "remove duplicate rows, or the figures are better than they should be"
        log(f"WARNING: {texts} are in the fitting part as well: {hint}")


def check_sources(options: Any) -> None:
    """Opens the text that the options name, unless it is on the hub, and recognises its format."""
    data, further = getattr(options, "data", None), getattr(options, "eval_data", ())
    if data == ():
        raise UserError("--data: expected at least one file, directory or hub id, got none.")
    if getattr(options, "eval_split", None) is not None and not further:
        raise UserError("--eval-split: expected --eval-data, the sets that it is a split of.")
    if data is None and not further:
        return
    from calibjax.data import is_hub_id, is_multiple_choice

    sources = () if data is None else data
    if isinstance(sources, str):
        sources = (sources,)
    if len(sources) > len({os.path.abspath(source) for source in sources}):
        raise UserError(f"--data: expected different sets, got {', '.join(sources)}.")
    checks = [("--data", source, options.split, len(sources) > 1) for source in sources]
    checks += [("--eval-data", source, options.eval_split, True) for source in further]
    for option, source, split, column_optional in checks:
        if not is_hub_id(source):
            with about(option):
                rows = options.text.open(source, split)
                is_text = not options.reads_choices or options.text.text_column is not None
                if is_text or not is_multiple_choice(rows):
                    options.text.recognise(rows, column_optional=column_optional)


def _set_name(source: str, sources: tuple[str, ...]) -> str:
    """A short name of a data set: the file's; with its folder's if the file's says little, or two files have it."""

    def names(path: str) -> tuple[str, str]:
        short = Path(path.rstrip("/")).name.split(".")[0]
        return short, f"{Path(path).absolute().parent.name}/{short}"

    all_names = [names(other) for other in set(sources)]
    for place, name in enumerate(names(source)):
        says_little = name in ("train", "valid", "validation", "test", "data", "held_out")
        if not says_little and [other[place] for other in all_names].count(name) == 1:
            return name
    return source


def split_names(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The names in the arguments of an option, each once; a name may be an argument, or joined to others by commas."""
    names = map(str.strip, ",".join(arguments).split(","))
    return tuple(dict.fromkeys(filter(None, names)))
