"""Benchmarks from local files, in the format that lm-eval's task definitions read from the hub.

The files in `definitions/` include lm-eval's own, so that prompts, options and metrics are the harness's, and replace
the download by these functions. They read the files under data/ of the assets.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibjax.data import read_source
from calibjax.eval.text import analogy_questions
from calibjax.runtime.errors import UserError, first_line, quantity

if TYPE_CHECKING:
    from datasets import DatasetDict
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "definitions"  # task files over local data
_FOLDERS = ("mmlu/default", "arc", "hellaswag", "truthfulqa", "triviaqa")
"""Folders of the harness's definitions that `definitions/` includes."""


def task_manager(names: Iterable[str], assets: str | Path | None = None) -> "TaskManager":
    """The harness's task definitions and ours, only those that `names` need; raises `UserError` without lm-eval."""
    try:
        import lm_eval.tasks
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'calibjax[lm-eval]'.") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every task that its metadata can be given
    metadata: dict[str, Any] = {} if assets is None else {"assets": str(assets)}
    theirs = Path(lm_eval.tasks.__file__).parent
    folders: list[str | Path] = [*(theirs / folder for folder in _FOLDERS), TASKS]
    # All ten thousand definitions take seconds.
    few = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if set(names) <= set(few.all_tasks):
        return few
    return lm_eval.tasks.TaskManager(include_path=str(TASKS), metadata=metadata)


class BenchmarkTask(NamedTuple):
    """A task by its name in `--tasks`: its parts (the subjects of MMLU), and where its questions come from."""

    parts: dict[str, "ConfigurableTask"]
    source: str


def check_tasks(names: tuple[str, ...], assets: Path | None) -> "TaskManager":
    """The tasks of lm-eval; raises `UserError` for names that are not among them."""
    manager = task_manager(names, assets)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        expected = "expected names such as mmlu, arc_easy or triviaqa, which `lm_eval ls tasks` lists"
        raise UserError(f"tasks: {expected}; got {', '.join(unknown) or 'none'}.")
    return manager


def load_tasks(
    names: tuple[str, ...], manager: "TaskManager", assets: Path | None, log: Callable[[str], None]
) -> dict[str, BenchmarkTask]:
    """Name -> task, from local data where the assets have it, else from the hub; logs where each comes from."""
    tasks = {}
    for name in names:
        has_local = f"{name}_local" in manager.all_tasks and assets_folder(assets) is not None
        task_name = f"{name}_local" if has_local else name
        is_local = task_name.endswith("_local") or (TASKS / f"{task_name}.yaml").is_file()
        try:
            parts: dict[str, Any] = dict(manager.load([task_name])["tasks"])
        except UserError:
            raise
        except Exception as error:  # of the hub, of datasets, of a task file: whatever goes wrong is the task's
            local = ", ".join(sorted(file.stem.removesuffix("_local") for file in TASKS.glob("*.yaml")))
            hint = "" if is_local else f" Its questions come from the hub; a folder of --assets may hold {local}."
            raise UserError(f"tasks: {name} cannot be loaded: {first_line(error)}.{hint}") from error
        tasks[name] = BenchmarkTask(parts, "local data" if is_local else "hub")
        count = sum(len(task.eval_docs) for task in parts.values())
        in_parts = f" in {len(parts)} parts" if len(parts) > 1 else ""
        log(f"task {name}: {quantity(count, 'question')}{in_parts}, {tasks[name].source}")
    return tasks


def find(name: str, assets: str | Path | None = None) -> Path:
    """The path of a file in the folder data/ of the assets; raises `UserError` if it is not there."""
    folder = assets_folder(assets)
    if folder is None:
        raise UserError(f"assets: expected the folder that holds data/{name}; CALIBJAX_ASSETS may name it too.")
    path = folder / "data" / name
    if not path.is_file():
        raise UserError(f"{path} does not exist: expected the assets' folder, with data/{name} in it.")
    return path


def assets_folder(assets: str | Path | None = None) -> Path | None:
    """The argument, or the folder that CALIBJAX_ASSETS names."""
    folder = assets or os.environ.get("CALIBJAX_ASSETS")
    return Path(folder) if folder else None


@functools.lru_cache(maxsize=4)
def _rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(read_source(path))


def _splits(**splits: Iterable[Mapping[str, Any]]) -> "DatasetDict":
    from datasets import Dataset, DatasetDict

    return DatasetDict({name: Dataset.from_list(list(map(dict, rows))) for name, rows in splits.items()})


def mmlu(subject: str, assets: str | None = None, **_: Any) -> "DatasetDict":
    """One subject of MMLU: 5 questions in dev, the others in test."""
    rows = [row for row in _rows(find("mmlu/mmlu.jsonl.gz", assets)) if row["subject"] == subject]
    dev = [row for row in rows if row["split"] == "dev"]
    return _splits(dev=dev, test=[row for row in rows if row["split"] == "test"])


def arc(level: str, assets: str | None = None, **_: Any) -> "DatasetDict":
    """ARC; `level` is "easy" or "challenge". Options are labelled A, B, ... in their order."""
    rows = _rows(find(f"llm_foundry_eval/arc_{level}.jsonl.gz", assets))
    documents = []
    for row in rows:
        choices = {"text": row["choices"], "label": list("ABCDE"[: len(row["choices"])])}
        question = row["query"].removeprefix("Question: ")
        documents.append({"question": question, "choices": choices, "answerKey": "ABCDE"[row["gold"]]})
    return _splits(test=documents)


def hellaswag(assets: str | None = None, **_: Any) -> "DatasetDict":
    """HellaSwag; the file holds contexts and endings as lm-eval cleans them."""
    rows = _rows(find("hellaswag_val/hellaswag_val.jsonl.gz", assets))
    return _splits(validation=[{**row, "label": str(row["gold"])} for row in rows])


def truthfulqa(assets: str | None = None, **_: Any) -> "DatasetDict":
    """TruthfulQA, multiple choice or generation. Options are the listed answers, the best one first."""
    rows = _rows(find("truthfulqa/truthfulqa.jsonl.gz", assets))
    documents = []
    for row in rows:
        one_hot = [int(place == row["mc1_label"]) for place in range(len(row["mc1_choices"]))]
        targets = {
            "mc1_targets": {"choices": row["mc1_choices"], "labels": one_hot},
            "mc2_targets": {"choices": row["mc2_choices"], "labels": row["mc2_labels"]},
        }
        documents.append({**row, **targets})
    return _splits(validation=documents)


def triviaqa(assets: str | None = None, **_: Any) -> "DatasetDict":
    """TriviaQA: questions without context, and all aliases of their answers."""
    rows = _rows(find("triviaqa/triviaqa_sm_sub.jsonl.gz", assets))
    documents = []
    for row in rows:
        question = row["context"].removeprefix("Question: ").removesuffix("\nAnswer:")
        documents.append({"question": question, "answer": {"value": row["answer"], "aliases": row["aliases"]}})
    return _splits(validation=documents)


def analogies(assets: str | None = None, seed: int = 0, **_: Any) -> "DatasetDict":
    """The Google analogies, each with three wrong words of its category, drawn by `seed`."""
    questions = analogy_questions(_rows(find("analogies/analogies.jsonl.gz", assets)), seed=seed)
    rows = [{"query": q.prompt, "choices": q.choices, "gold": q.right, "category": q.category} for q in questions]
    return _splits(test=rows)


_STORY_WORDS = {
    "story_words": r"(?s)(?:\S+\s+){40}()([a-z]+)\b",
    "story_last_words": r"(?s)(?:[^.!?]*[.!?]){2}[^.!?]*()\s(\w+)[.!?]",
    "story_names": r"(?s).*?[a-z,] ([A-Z][a-z]+)\b.*?[a-z,] (\1)\b",
}
"""Task -> the beginning of a story up to the word that is asked for, its last group: the 41st word, the last one of the
third sentence, or a name at its second place within a sentence."""


def stories(kind: str, assets: str | None = None, **_: Any) -> "DatasetDict":
    """Words of stories, one of each story that has it; every third story is in train, to calibrate on."""
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for number, row in enumerate(_rows(find("tinystories_sample/tinystories_sample.jsonl.gz", assets))):
        word = re.match(_STORY_WORDS[kind], row["text"])
        if word:
            question = {"question": row["text"][: word.start(2)].rstrip(), "answer": word[2]}
            splits["test" if number % 3 else "train"].append(question)
    return _splits(**splits)
