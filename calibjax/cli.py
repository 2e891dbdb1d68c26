"""The `calibjax` command: parse, call, print."""

import dataclasses
import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

# Before transformers and tokenizers are imported by anything: they read these once.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import jax
import tyro

from calibjax.commands.compare import CompareRun, run_compare
from calibjax.commands.convert import ConvertRun, run_convert
from calibjax.commands.eval_bounds import HeadBoundRun, run_head_bound
from calibjax.commands.eval_layers import LayersRun, run_layers
from calibjax.commands.eval_tasks import TasksRun, run_tasks
from calibjax.commands.generate import GenerateRun, run_generate
from calibjax.commands.plan import PlanRun, run_plan
from calibjax.commands.quickstart import Quickstart, run_quickstart
from calibjax.commands.report import ReportRun, run_report
from calibjax.commands.study import ABLATIONS, AblationRun, TransferRun, run_ablation, run_transfer
from calibjax.commands.train_ats import AtsRun, run_ats
from calibjax.commands.train_lhts import LhtsRun, run_lhts
from calibjax.commands.train_sft import SftRun, run_sft
from calibjax.runtime.distributed import is_first
from calibjax.runtime.errors import UserError
from calibjax.train import NonFiniteLossError


def carry_out(run: Any, work: Callable[..., dict[str, Any]]) -> int:
    """Runs a command; the exit code. With --json only the document goes to standard output.

    Of several processes the first prints and shows progress. Where one fails, it leaves at once: the others, which wait
    for it, are ended by JAX's heartbeat, and clean-up would wait for them in turn.
    """
    try:
        if hasattr(run, "devices"):
            run.devices.join()
        speaks = not hasattr(run, "devices") or is_first()
        if not speaks and hasattr(run, "quiet"):
            run = dataclasses.replace(run, quiet=True)
        announce = functools.partial(print, file=sys.stderr if run.json else sys.stdout, flush=True)
        document = work(run, announce=announce if speaks else _silent)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NonFiniteLossError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    except Exception:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        print(
            f"stopped: process {jax.process_index()} of {jax.process_count()} failed, or lost another one (see above, "
            "and what the others say). Start all of them again with the same options: the run goes on from what it has "
            "kept in --out.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    if run.json and speaks:
        print(json.dumps(document, indent=2))
    return 1 if document.get("held_out", {}).get("failed") else 0


def _silent(line: str) -> None:
    """For `announce`."""


def _summary(command: type) -> str:
    """The docstring of a command's options up to their list, which tyro shows beside each option."""
    return inspect.cleandoc(command.__doc__ or "").split("\n\nAttributes:")[0]


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `calibjax`. Returns 0, or 2 on a user's error, or 1 where training diverged or a method failed."""
    app, train, evaluate, study = (tyro.extras.SubcommandApp() for _ in range(4))

    @app.command(name="quickstart", help=_summary(Quickstart))
    def quickstart(run: Annotated[Quickstart, tyro.conf.arg(name="")] = Quickstart()) -> int:  # noqa: B008 (frozen)
        return carry_out(run, run_quickstart)

    @train.command(name="ats", help=_summary(AtsRun))
    def ats(run: Annotated[AtsRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_ats)

    @train.command(name="sft", help=_summary(SftRun))
    def sft(run: Annotated[SftRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_sft)

    @train.command(name="lhts", help=_summary(LhtsRun))
    def lhts(run: Annotated[LhtsRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_lhts)

    @evaluate.command(name="head-bound", help=_summary(HeadBoundRun))
    def head_bound(run: Annotated[HeadBoundRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_head_bound)

    @evaluate.command(name="layers", help=_summary(LayersRun))
    def layers(run: Annotated[LayersRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_layers)

    @evaluate.command(name="tasks", help=_summary(TasksRun))
    def tasks(run: Annotated[TasksRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_tasks)

    @app.command(name="report", help=_summary(ReportRun))
    def report(run: Annotated[ReportRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_report)

    @app.command(name="compare", help=_summary(CompareRun))
    def compare(run: Annotated[CompareRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_compare)

    @app.command(name="generate", help=_summary(GenerateRun))
    def generate(run: Annotated[GenerateRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_generate)

    @app.command(name="plan", help=_summary(PlanRun))
    def plan(run: Annotated[PlanRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_plan)

    @app.command(name="convert", help=_summary(ConvertRun))
    def convert(run: Annotated[ConvertRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_convert)

    def ablation(name: str) -> None:
        @study.command(name=name, help=ABLATIONS[name].question)
        def carry_out_ablation(run: Annotated[AblationRun, tyro.conf.arg(name="")]) -> int:
            return carry_out(run, functools.partial(run_ablation, name))

    for name in ABLATIONS:
        ablation(name)

    @study.command(name="transfer", help=_summary(TransferRun))
    def transfer(run: Annotated[TransferRun, tyro.conf.arg(name="")]) -> int:
        return carry_out(run, run_transfer)

    app.command(train, name="train", help="Fit something to a language model.")
    app.command(evaluate, name="eval", help="Look at a language model.")
    app.command(study, name="study", help="Fit many heads to answer one question about them.")
    return app.cli(prog="calibjax", args=args, config=(tyro.conf.OmitArgPrefixes,))


if __name__ == "__main__":
    sys.exit(main())
