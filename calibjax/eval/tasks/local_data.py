"""Benchmarks from local files, in the format that lm-eval's task definitions read from the hub.

The files in `definitions/` include lm-eval's own, so that prompts, options and metrics are the harness's, and replace
the download by these functions. They read the files under data/ of `CALIBJAX_ASSETS` or `--assets`.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibjax.data import read_source
from calibjax.eval.tasks.analogies import analogy_questions
from calibjax.runtime.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "definitions"
"""Task files over local data."""


_FOLDERS = ("mmlu/default", "arc", "hellaswag", "truthfulqa", "triviaqa")
"""Folders of the harness's definitions that `definitions/` includes."""


def task_manager(names: Iterable[str], assets: str | Path | None = None) -> "TaskManager":
    """Returns the harness's task definitions and ours.

    If `names` need no others, only the definitions that ours include are read: reading all ten thousand takes seconds.
    """
    import lm_eval.tasks

    metadata: dict[str, Any] = {} if assets is None else {"assets": str(assets)}
    theirs = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [*(theirs / folder for folder in _FOLDERS), TASKS]
    few = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if set(names) <= set(few.all_tasks):
        return few
    return lm_eval.tasks.TaskManager(include_path=str(TASKS), metadata=metadata)


def find(name: str, assets: str | Path | None = None) -> Path:
    """Returns the path of a benchmark's file, such as "mmlu/mmlu.jsonl.gz", in the folder data/ of the assets.

    Raises:
        UserError: neither `assets` nor CALIBJAX_ASSETS is given, or the file is not there.
    """
    folder = assets_folder(assets)
    if folder is None:
        raise UserError(f"data/{name}: set CALIBJAX_ASSETS, or give --assets, to the folder that holds it.")
    path = folder / "data" / name
    if not path.is_file():
        raise UserError(f"{path} does not exist: expected the assets' folder, with data/{name} in it.")
    return path


def assets_folder(assets: str | Path | None = None) -> Path | None:
    """Returns the folder of local data: the argument, or that of CALIBJAX_ASSETS; None without either."""
    folder = assets or os.environ.get("CALIBJAX_ASSETS")
    return Path(folder) if folder else None


@functools.lru_cache(maxsize=4)
def _rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(read_source(path))


def _splits(**splits: Iterable[Mapping[str, Any]]) -> "DatasetDict":
    from datasets import Dataset, DatasetDict

    return DatasetDict({name: Dataset.from_list([dict(row) for row in rows]) for name, rows in splits.items()})


@functools.lru_cache(maxsize=4)
def _subjects(path: Path) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The rows of each subject and split."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in _rows(path):
        found.setdefault((row["subject"], row["split"]), []).append(row)
    return found


def mmlu(subject: str, assets: str | None = None, **_: Any) -> "DatasetDict":
    """Returns one subject of MMLU: 5 questions in dev, the others in test."""
    rows = _subjects(find("mmlu/mmlu.jsonl.gz", assets))
    return _splits(**{split: rows.get((subject, split), []) for split in ("dev", "test")})


def arc(level: str, assets: str | None = None, **_: Any) -> "DatasetDict":
    """Returns ARC; `level` is "easy" or "challenge". Options are labelled A, B, ... in their order."""
    rows = _rows(find(f"llm_foundry_eval/arc_{level}.jsonl.gz", assets))
    return _splits(
        test=[
            {
                "question": row["query"].removeprefix("Question: "),
                "choices": {"text": row["choices"], "label": list("ABCDE"[: len(row["choices"])])},
                "answerKey": "ABCDE"[row["gold"]],
            }
            for row in rows
        ]
    )


def hellaswag(assets: str | None = None, **_: Any) -> "DatasetDict":
    """Returns HellaSwag; the file holds contexts and endings as lm-eval cleans them."""
    rows = _rows(find("hellaswag_val/hellaswag_val.jsonl.gz", assets))
    return _splits(validation=[{**row, "label": str(row["gold"])} for row in rows])


def truthfulqa(assets: str | None = None, **_: Any) -> "DatasetDict":
    """Returns TruthfulQA, multiple choice or generation. Options are the listed answers, the best one first."""
    rows = _rows(find("truthfulqa/truthfulqa.jsonl.gz", assets))
    mc1 = [{"choices": row["mc1_choices"], "labels": _one_hot(row["mc1_label"], row["mc1_choices"])} for row in rows]
    mc2 = [{"choices": row["mc2_choices"], "labels": row["mc2_labels"]} for row in rows]
    both = zip(rows, mc1, mc2, strict=True)
    return _splits(validation=[{**row, "mc1_targets": one, "mc2_targets": two} for row, one, two in both])


def _one_hot(index: int, choices: list[str]) -> list[int]:
    return [int(place == index) for place in range(len(choices))]


def triviaqa(assets: str | None = None, **_: Any) -> "DatasetDict":
    """Returns TriviaQA: questions without context, and all aliases of their answers."""
    rows = _rows(find("triviaqa/triviaqa_sm_sub.jsonl.gz", assets))
    return _splits(
        validation=[
            {
                "question": row["context"].removeprefix("Question: ").removesuffix("\nAnswer:"),
                "answer": {"value": row["answer"], "aliases": row["aliases"]},
            }
            for row in rows
        ]
    )


def analogies(assets: str | None = None, seed: int = 0, **_: Any) -> "DatasetDict":
    """Returns the Google analogies, each with three wrong words of its category, drawn by `seed`."""
    rows = _rows(find("analogies/analogies.jsonl.gz", assets))
    questions = analogy_questions(rows, seed=seed)
    return _splits(
        test=[
            {"query": asked.prompt, "choices": list(asked.choices), "gold": asked.right, "category": asked.category}
            for asked in questions
        ]
    )


_STORY_WORDS = {
    "story_words": r"(?s)(?:\S+\s+){40}()([a-z]+)\b",
    "story_last_words": r"(?s)(?:[^.!?]*[.!?]){2}[^.!?]*()\s(\w+)[.!?]",
    "story_names": r"(?s).*?[a-z,] ([A-Z][a-z]+)\b.*?[a-z,] (\1)\b",
}
"""Task -> the beginning of a story up to the word that is asked for, its last group: the 41st word, the last one of the
third sentence, or a name at its second place within a sentence."""


def stories(kind: str, assets: str | None = None, **_: Any) -> "DatasetDict":
    """Returns words of stories, one of each story that has it; every third story is in train, to calibrate on."""
    train: list[dict[str, str]] = []
    test: list[dict[str, str]] = []
    for number, row in enumerate(_rows(find("tinystories_sample/tinystories_sample.jsonl.gz", assets))):
        found = re.match(_STORY_WORDS[kind], row["text"])
        if found:
            questions = test if number % 3 else train
            questions.append({"question": row["text"][: found.start(2)].rstrip(), "answer": found[2]})
    return _splits(train=train, test=test)
