"""The `calibjax` command: finds the command, parses its options, runs it, and turns its end into an exit code."""

import contextlib
import functools
import importlib
import json
import logging
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before transformers and tokenizers are imported by anything: they read these once.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from calibjax.runtime import signals
from calibjax.runtime.options import command_line
from calibjax.runtime.version import __version__

Run = Callable[..., Mapping[str, Any] | None]

COMMANDS: dict[str, str] = {
    "quickstart": "Shows everything on a small language model, in minutes.",
    "train ats": "Fits Adaptive Temperature Scaling to a frozen model.",
    "train sft": "Fine-tunes a model with label smoothing.",
    "train lhts": "Fine-tunes a model to a long-horizon temperature.",
    "eval tasks": "Evaluates accuracy and calibration on benchmarks (lm-eval).",
    "eval layers": "Evaluates calibration after each layer of a model.",
    "eval bounds": "Computes the smallest entropy that predictions can have.",
    "compare": "Compares all recalibration methods.",
    "apply": "Recalibrates new predictions by a method that compare saved.",
    "decide": "Finds the confidence above which few answers are wrong.",
    "report": "Redraws the report of one run, or of several together.",
    "generate": "Continues a text, with the confidence of each token.",
    "convert": "Converts a model to Orbax or to safetensors.",
    "export": "Exports a fitted head for PyTorch and for serving.",
    "push": "Uploads a fitted head and its model card to the Hub.",
    "plan": "Predicts memory and time of a step on given devices.",
}
"""Every command with its summary, in the order of the help; `train ats` is `commands/train_ats.py`."""

GROUPS = {
    "train": "Trains a temperature head, or fine-tunes a model.",
    "eval": "Evaluates a model: benchmarks, layers, bounds.",
}


def main(args: Sequence[str] | None = None) -> int:
    """Entry point of `calibjax`.

    Returns:
        0; 1 if training diverged, a method failed or a disk is full; 2 on invalid input; 130 on Ctrl-C; 143 on SIGTERM.
    """
    words = list(sys.argv[1:] if args is None else args)
    return _until_stopped(lambda: _run_command(words), shlex.join(["calibjax", *words]))


def execute(options: Any, run: Run) -> int:
    """Runs `run(options)`, of a dataclass, as `main` runs a command; returns the exit code.

    Without a field `json` nothing is printed of what `run` returns, which may be None.
    """
    return _until_stopped(lambda: _execute(options, run), shlex.join(["python", *sys.argv]))


def _until_stopped(work: Callable[[], int], resume: str) -> int:
    """The exit code of `work`, or of the signal that ended it, with a line that gives the command to resume."""

    def report(name: str) -> None:
        # Other commands write --out at their end. A configuration is of a run with --out, as quickstart always is.
        resumable = resume.startswith(("calibjax train", "calibjax eval tasks", "calibjax quickstart", "python"))
        is_resumed = resumable and any(word in resume for word in ("--out", "--config", "calibjax quickstart"))
        action = "resume" if is_resumed else "start again"
        print(f"\nstopped by {name}; to {action}: {resume}", file=sys.stderr, flush=True)

    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file would get its number, and what libraries print
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    typed = command_line.set(resume)
    _silence_late_errors()
    try:
        with signals.handled(report):
            code = work()
            sys.stdout.flush()
            return code
    except OSError as error:
        from calibjax.runtime.errors import storage_failure

        if not isinstance(error, BrokenPipeError) and (error.filename is not None or storage_failure(error) is None):
            raise
        with contextlib.suppress(OSError):
            print(f"stopped: the output cannot be written ({error.strerror}).", file=sys.stderr, flush=True)
        for stream in (sys.stdout, sys.stderr):  # Python would try again at its end
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1
    except KeyboardInterrupt:
        name, code = "Ctrl-C", signals.INTERRUPTED
    except signals.Terminated:
        name, code = "SIGTERM", signals.TERMINATED
    finally:
        command_line.reset(typed)
    report(name)  # after progress bars, which end with the exception
    if "calibjax.runtime.distributed" in sys.modules:  # otherwise the signal came while the command was imported
        import jax

        if jax.process_count() > 1:
            if signals.agreed():
                jax.distributed.shutdown()  # all leave together
            os._exit(code)  # the others may wait for this one, and its clean-up for them
    return code


def _silence_late_errors() -> None:
    """Silences TensorStore's threads about writes that Orbax has given up, also after the command has ended.

    The exception of a signal that is raised in a callback is not printed either: `signals` ends the command.
    """
    logging.getLogger("huggingface_hub").propagate = False  # Orbax adds a handler of the root, and lines came twice
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    before = sys.unraisablehook
    if getattr(before, "func", None) is not _report_unraisable:
        sys.unraisablehook = functools.partial(_report_unraisable, before)


def _report_unraisable(report: Callable[[Any], Any], failure: Any) -> None:
    is_signal = isinstance(failure.exc_value, KeyboardInterrupt | signals.Terminated)
    if not is_signal and str(failure.exc_value) != "Event loop is closed":
        report(failure)


def _run_command(args: list[str]) -> int:
    from calibjax.runtime.errors import UserError, printable, storage_failure

    try:
        with signals.ending_at_once():
            name = _command_name(args)
            options_type, run = load_command(name)
            from calibjax.commands.parser import parse, with_config

            given = with_config(name, options_type, args[len(name.split()) :])
            options = parse(options_type, given, prog=f"calibjax {name}")
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except (ImportError, MemoryError) as error:
        if storage_failure(error) is None:
            raise
        print(f"stopped: {storage_failure(error)}", file=sys.stderr)
        return 1
    return _execute(options, run)


def load_command(name: str) -> tuple[type, Run]:
    """The options of a command, and the function that takes them; imports its module."""
    module = importlib.import_module(f"calibjax.commands.{name.replace(' ', '_')}")
    return getattr(module, f"{name.title().replace(' ', '')}Options"), module.run


def _command_name(args: list[str]) -> str:
    """The command that the arguments begin with; exits after help or the version."""
    group = args[0] if args and args[0] in GROUPS else ""
    prefix = f"{group} " if group else ""
    words = args[1:] if group else args
    word = words[0] if words else ""
    name = prefix + word
    if name in COMMANDS:
        return name
    if name == "--version":
        print(f"calibjax {__version__}")
        raise SystemExit(0)
    commands = {command: text for command, text in COMMANDS.items() if command.startswith(prefix)}
    if word in ("", "-h", "--help", *GROUPS) or (group and word.startswith("-")):
        is_help = word in ("-h", "--help")
        purpose = GROUPS[group] if group else "Measures and improves the calibration of large language models."
        lines = [f"usage: calibjax {prefix}COMMAND [OPTIONS]", "", purpose, ""]
        lines += [f"  {command:<15} {text}" for command, text in commands.items()]
        lines += ["", f"calibjax {prefix}COMMAND --help lists the options of a command."]
        if not group:
            lines.append("calibjax --version prints the version.")
        print("\n".join(lines), file=sys.stdout if is_help else sys.stderr)
        raise SystemExit(0 if is_help else 2)
    from calibjax.commands.parser import fail

    known = {command.split()[-1]: command for command in commands}
    if not group:
        known |= {other: other for other in (*GROUPS, "--help", "--version")}
    fail(f"calibjax has no command {name!r}", word, known, "calibjax --help lists them")


def _execute(options: Any, run: Run) -> int:
    """Runs a command; returns the exit code. With --json only the document goes to standard output.

    The first of several processes prints and shows progress. A process that fails leaves at once: the others, which
    wait for it, are ended by JAX's heartbeat, and clean-up would wait for them in turn.
    """
    import jax

    from calibjax.commands.run_directory import removing_empty_out
    from calibjax.runtime import locks
    from calibjax.runtime.distributed import is_first
    from calibjax.runtime.errors import DENIED, NonFiniteLossError, UserError, printable, storage_failure

    # Scripts have options of their own, which may lack these fields.
    devices, out, as_json = (getattr(options, name, None) for name in ("devices", "out", "json"))
    try:
        if devices is not None:
            devices.join()
        is_printing = devices is None or is_first()

        def log(line: str) -> None:
            if is_printing:
                print(printable(line), file=sys.stderr if as_json else sys.stdout, flush=True)

        with removing_empty_out(out):
            try:
                document = run(options, log)
            finally:
                locks.release()
    except NonFiniteLossError as error:
        print(f"stopped: {_one_line(error, options)}", file=sys.stderr)
        return 1
    except Exception as raised:
        error = raised
        if isinstance(error, FileNotFoundError) and error.errno is not None and error.filename is None:  # of os.getcwd
            error = UserError("the current directory does not exist any more: change to another one.")
        failure = storage_failure(error)
        code = 2 if failure is None or failure.errno in DENIED else 1  # 2 also where a path must not be written
        if isinstance(error, UserError):
            print(f"error: {_one_line(error, options)}", file=sys.stderr)
            return code
        if failure is not None:
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the other writes fail as well
            where = failure.filename or out
            reason = f"{failure.strerror} ({where})" if where else failure.strerror
            if jax.process_count() == 1:
                print(end="", flush=True)  # raises where it is the output that cannot be written
            hint = "What was complete before is unchanged; with the same options, a run resumes."
            print(f"stopped: {reason}. {hint}", file=sys.stderr)
        if jax.process_count() == 1:
            if failure is None:
                raise
            return code
        if failure is None:
            traceback.print_exc()
        print(
            f"stopped: process {jax.process_index()} of {jax.process_count()} failed, or lost another one (see above, "
            "and the output of the others). Start all of them again with the same options: the run resumes from what "
            "is in --out.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    if as_json and is_printing:
        print(json.dumps(document, indent=2))
    return 1 if document and document.get("held_out", {}).get("failed") else 0


def _one_line(error: Exception, options: Any) -> str:
    """The message; where it begins with arguments of the library, with the options in their place."""
    from calibjax.commands.parser import list_options
    from calibjax.runtime.errors import printable
    from calibjax.runtime.options import flag_of

    names = {option.path[-1] for option in list_options(type(options))} | {"model"}
    message = " ".join(str(error).split())
    start = re.match(r"(--[\w-]+: )?([a-z_]+(?:, [a-z_]+)*)(=|: )", message)
    arguments = start[2].split(", ") if start else []
    if start and start[1] == "--eval-data: ":
        arguments = [{"split": "eval_split"}.get(name, name) for name in arguments]
    if start and names.issuperset(arguments):
        options_given = ", ".join(map(flag_of, arguments))
        message = f"{options_given}{': ' if start[3] == ': ' else ' '}{message[start.end() :]}"
    return printable(message)
