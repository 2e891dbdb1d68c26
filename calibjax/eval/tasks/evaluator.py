"""One task of lm-eval: the answers of a model and its heads to all questions, part by part."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from calibjax.eval.tasks.answer_files import Answers
from calibjax.eval.tasks.choices import MultipleChoice
from calibjax.eval.tasks.questions import BATCH, Batch, TaskQuestions
from calibjax.eval.tasks.written import WrittenAnswers


class TaskEvaluator:
    """Evaluates a model on one task. The harness's own metrics are of the first head of the model."""

    def __init__(self, questions: TaskQuestions):
        self.questions = questions
        self.multiple_choice, self.written = MultipleChoice(questions), WrittenAnswers(questions)

    def answers(self, parts: Collection[str], tick: Callable[[int], Any]) -> Iterator[tuple[str, Answers]]:
        """Asks the questions of some parts and yields the answers to each part, in any order.

        Small parts are scored together: a batch has one shape however few questions are in it. `tick` is called with
        the number of questions done.
        """

        def choose(batches: Sequence[Batch]) -> list[Answers]:
            tick(sum(len(batch.numbers) - len(batch.documents) for batch in batches))  # too long to be asked
            return [self.multiple_choice.answers(*scored) for scored in self.multiple_choice.score(batches, tick)]

        def write(batch: Batch) -> Answers:
            result = self.written.answers(batch)
            tick(len(batch.numbers))
            return result

        together: list[Batch] = []
        for part in parts:
            task = self.questions.task.parts[part]
            numbers = self.questions.numbers(task)
            batches = self.questions.batches(part, task.eval_docs, numbers)
            if task.OUTPUT_TYPE != "multiple_choice":
                yield part, Answers.join([write(batch) for batch in batches])
            elif len(numbers) > BATCH:
                yield part, Answers.join([choose([batch])[0] for batch in batches])
            else:
                if sum(len(batch.numbers) for batch in together) + len(numbers) > BATCH:
                    yield from zip([batch.part for batch in together], choose(together), strict=True)
                    together = []
                together += batches
        yield from zip([batch.part for batch in together], choose(together), strict=True)
