"""Do more samples of reasoning improve or worsen the calibration of the answer that most of them give?"""

import dataclasses
from collections.abc import Callable

from calibjax.commands.common import finish
from calibjax.commands.study.answers import AnswerStudyOptions, document_of, joined, open_study
from calibjax.eval.report.schema import TasksDocument
from calibjax.eval.tokens import identity_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesStudyOptions(AnswerStudyOptions):
    """The answer that most of k samples give, and the fraction that gives it as confidence, for k = 2, 4, 8, ...

    Accuracy and calibration against the number of samples, and beside the greedy answer. Of the same samples the first
    k are used, so that differences are paired. Answers at the end of a chain of reasoning are compared by --same
    numeric; --max-new-tokens is the length of a chain, so that two runs compare lengths.
    """


def run(options: SamplesStudyOptions, log: Callable[[str], None] = print) -> TasksDocument:
    """Runs the command; returns the contents of metrics.json."""
    study = open_study("study samples", options, log)
    from calibjax.eval.tasks.drawn import majority_answers
    from calibjax.eval.tasks.evaluate import Answers, check
    from calibjax.eval.tasks.evidence import Asking
    from calibjax.eval.tasks.harness import HarnessLM
    from calibjax.eval.tasks.kept import claim_answers

    counts = [2**n for n in range(1, options.samples.bit_length()) if 2**n <= options.samples]
    asking = Asking((), options.samples, options.sampling_temperature, study.same, options.out / "answers")
    how = study.how._replace(asking=asking)
    claim_answers(options.out, study.lm, {})
    model = HarnessLM(study.lm, {"uncalibrated": identity_head(study.lm)}, batch_size=options.batch_size)
    found = {}
    for task in study.tasks:
        parts = study.parts(task)
        for part in parts.values():
            check(model, part.task, how)
        bar = study.context.bar(parts.items(), title=task, unit="part")
        found[task] = Answers.join([majority_answers(model, part, how, label, counts) for label, part in bar])
    names = ["greedy", *(f"{count} samples" for count in counts)]
    found = joined(found)
    document = document_of(
        *(study, found, next(iter(found)), names),
        reference=names[1],
        said="of samples the fraction that gives the answer; of the greedy answer length_normalised; judge: "
        f"{options.judge}",
    )
    finish(document, options.out, holds="answers/ (samples)", show=not options.json)
    return document
