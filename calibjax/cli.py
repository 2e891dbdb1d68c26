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

from calibjax.commands import (
    compare,
    convert,
    eval_bounds,
    eval_layers,
    eval_tasks,
    generate,
    quickstart,
    report,
    train_ats,
    train_lhts,
    train_sft,
)
from calibjax.commands.plan import command as plan
from calibjax.commands.study import ablations, transfer
from calibjax.runtime.distributed import is_first
from calibjax.runtime.errors import UserError
from calibjax.train import NonFiniteLossError

Run = Callable[..., dict[str, Any]]

COMMANDS: dict[str, tuple[type, Run]] = {
    "quickstart": (quickstart.QuickstartOptions, quickstart.run),
    "train ats": (train_ats.TrainAtsOptions, train_ats.run),
    "train sft": (train_sft.TrainSftOptions, train_sft.run),
    "train lhts": (train_lhts.TrainLhtsOptions, train_lhts.run),
    "eval tasks": (eval_tasks.EvalTasksOptions, eval_tasks.run),
    "eval layers": (eval_layers.EvalLayersOptions, eval_layers.run),
    "eval bounds": (eval_bounds.EvalBoundsOptions, eval_bounds.run),
    "compare": (compare.CompareOptions, compare.run),
    "report": (report.ReportOptions, report.run),
    "generate": (generate.GenerateOptions, generate.run),
    "convert": (convert.ConvertOptions, convert.run),
    "plan": (plan.PlanOptions, plan.run),
    **{
        f"study {name}": (ablations.AblationOptions, functools.partial(ablations.run, name))
        for name in ablations.ABLATIONS
    },
    "study transfer": (transfer.TransferOptions, transfer.run),
}
"""Every command: its options and what it calls."""

GROUPS = {
    "train": "Train a calibration head or fine-tune a model.",
    "eval": "Evaluate a model: benchmarks, layers, bounds.",
    "study": "Train many heads to answer one question about them.",
}


def execute(options: Any, run: Run) -> int:
    """Runs a command; returns the exit code. With --json only the document goes to standard output.

    Of several processes the first prints and shows progress. Where one fails, it leaves at once: the others, which wait
    for it, are ended by JAX's heartbeat, and clean-up would wait for them in turn.
    """
    try:
        if hasattr(options, "devices"):
            options.devices.join()
        speaks = not hasattr(options, "devices") or is_first()
        if not speaks and hasattr(options, "quiet"):
            options = dataclasses.replace(options, quiet=True)
        log = functools.partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
        document = run(options, log if speaks else _discard)
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
            "and the output of the others). Start all of them again with the same options: the run resumes from what "
            "is in --out.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    if options.json and speaks:
        print(json.dumps(document, indent=2))
    return 1 if document.get("held_out", {}).get("failed") else 0


def _discard(line: str) -> None:
    """For `log`."""


def _summary(command: str) -> str:
    """The help of a command: the docstring of its options up to their list, or the question of a study."""
    group, _, name = command.partition(" ")
    if group == "study" and name in ablations.ABLATIONS:
        return ablations.ABLATIONS[name].question
    return inspect.cleandoc(COMMANDS[command][0].__doc__ or "").split("\n\nAttributes:")[0]


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `calibjax`.

    Returns:
        0; 2 on invalid input; 1 where training diverged or a method failed.
    """
    app = tyro.extras.SubcommandApp()
    groups = {name: tyro.extras.SubcommandApp() for name in GROUPS}
    for command, (options_type, run) in COMMANDS.items():
        _add(groups, app, command, options_type, run)
    for name, group in groups.items():
        app.command(group, name=name, help=GROUPS[name])
    return app.cli(prog="calibjax", args=args, config=(tyro.conf.OmitArgPrefixes,))


def _add(groups: dict[str, Any], app: Any, command: str, options_type: Any, run: Run) -> None:
    group, _, name = command.rpartition(" ")

    def call(options: Any) -> int:
        return execute(options, run)

    call.__annotations__["options"] = Annotated[options_type, tyro.conf.arg(name="")]
    if not any(f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(options_type)):
        call.__defaults__ = (options_type(),)
    groups.get(group, app).command(name=name, help=_summary(command))(call)


if __name__ == "__main__":
    sys.exit(main())
