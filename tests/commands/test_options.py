"""Options of all commands: their ranges, what the command line calls them, and what the help shows of them."""

import dataclasses
import math
import re
import shlex
import typing
from inspect import signature

import numpy as np
import pytest

from calibjax.cli import COMMANDS, load_command, main
from calibjax.commands.groups import split_names
from calibjax.commands.parser import list_options, parse
from calibjax.commands.run_directory import begin
from calibjax.eval.layers.analysis import LayersOptions
from calibjax.eval.tasks.options import TasksOptions
from calibjax.models.generate import generate
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Count, Range, check_options, check_value, run_identity
from calibjax.train.lhts import LhtsOptions
from calibjax.train.options import AtsOptions
from calibjax.train.sft import SftOptions


def options_of(name):
    return load_command(name)[0]


def numeric(annotation):
    """int or float where an annotation has it, below unions, tuples and `Annotated`; None for other types."""
    if annotation in (int, float):
        return annotation
    return next((kind for part in typing.get_args(annotation) if (kind := numeric(part))), None)


def test_one_name_and_one_kind_for_an_option():
    kinds = {}
    for name in COMMANDS:
        for option in list_options(options_of(name)):
            assert option.help, (name, option.flag)
            kinds.setdefault(option.flag, set()).add(numeric(option.annotation) or (option.kind is bool))
    assert not {flag: of_flag for flag, of_flag in kinds.items() if len(of_flag) > 1}
    assert not {"--batch", "--seq", "--text", "--options"} & kinds.keys()
    assert options_of("generate").max_new_tokens == signature(generate).parameters["max_new_tokens"].default
    assert not [cls for cls in (AtsOptions, SftOptions, LhtsOptions, TasksOptions) if " at 0x" in str(signature(cls))]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("help_flag", ["--help", "--help-all"])
def test_help_at_80_columns(help_flag, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command.split(), help_flag])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"MISSING|<class|\(default:[^)]*\)\.?\s+\(default:", shown)
    _, example = shown.split(f"\nexample:\n  calibjax {command} ")
    assert parse(options_of(command), shlex.split(example.replace("\\\n", "")), prog=command)
    flags = [option.flag for option in list_options(options_of(command)) if not option.is_positional]
    assert not [flag for flag in flags if flag not in shown]
    if command == "train ats":
        assert re.search(r"--epochs INT [^(]*\(default:\s+6\)", shown)
        assert ("--heartbeat-timeout INT" in shown) == (help_flag == "--help-all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "ats"], "calibjax has no command 'trian'; did you mean train?"),
        (["train", "ast"], "calibjax has no command 'train ast'; did you mean train ats?"),
        (["layer"], "calibjax has no command 'layer'; did you mean eval layers?"),
        (["--verison"], "calibjax has no command '--verison'; did you mean --version?"),
        (["walk"], "calibjax has no command 'walk'; calibjax --help lists them."),
        (["train", "ats", "--lr", "1"], "--lr: calibjax train ats has no such option; did you mean --learning-rate?"),
        (["train", "ats", "--head=mlp"], "--head: calibjax train ats has no such option; did you mean --head-kind?"),
        (["decide", "--device"], "--device: calibjax decide has no such option; calibjax decide --help lists them."),
        (["decide", "--table", "x", "--risk", "a"], "--risk: expected a number, got 'a'."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistyped(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


# --- the parser ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    depth: Count = 3
    prompt_tokens: Count = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    norm: float | None = 1.0
    fast: bool | None = None
    sizes: tuple[float, ...] = ()
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--name", "x"], Outer(name="x")),
        (["--name=x", "--depth=7", "--prompt-tokens=2"], Outer(name="x", inner=Inner(depth=7, prompt_tokens=2))),
        (["--name=x", "--norm", "None", "--fast"], Outer(name="x", norm=None, fast=True)),
        (["--name", "x", "--no-fast", "--norm", "-1e-3"], Outer(name="x", fast=False, norm=-1e-3)),
        (["--name", "x", "--sizes", "1", "-2.5"], Outer(name="x", sizes=(1.0, -2.5))),
    ],
)
def test_parse(args, expected):
    assert parse(Outer, args, prog="test") == expected


def test_parse_with_other_defaults():
    default = Outer(name="y", norm=None, fast=True, inner=Inner(depth=9))
    assert parse(Outer, [], prog="test", default=default) == default
    changed = dataclasses.replace(default, fast=False, inner=Inner(depth=1))
    assert parse(Outer, ["--no-fast", "--depth", "1"], prog="test", default=default) == changed
    assert run_identity("test", default)["inner"] == {"depth": 9, "prompt_tokens": 1}


def test_own_checks_run_before_the_directory_is_claimed(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Refuses:
        out: typing.Any = tmp_path / "out"

        def check(self):
            raise UserError("no")

    with pytest.raises(UserError, match="no"):
        begin("test", Refuses(), print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        (Range(0, 2**31 - 1), -1, "at least 0"),
        (Range(0, 2**31 - 1), 2**31, "at most 2147483647"),
        (Range(0, open="low"), math.inf, "above 0, finite"),
        (Range(), math.nan, "a finite number"),
        (Range(infinite=True), -math.inf, "a number above -inf"),
        (Range(0, 1), 2, "from 0 to 1"),
        (Range(0, 1, open="both"), 1, "above 0 and below 1"),
    ],
)
def test_ranges(limits, value, expected):
    assert not limits.holds(value)
    assert limits.expected(value) == expected
    assert limits.holds(0.5)
    assert limits.holds(math.inf) == limits.infinite


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"epochs": 3}, r"options: expected a dataclass, such as AtsOptions\(...\), got dict"),
        (lambda: AtsOptions(epochs="3"), "epochs: expected a whole number, got '3'"),
        (lambda: AtsOptions(epochs=True), "epochs: expected a whole number, got True"),
        (lambda: AtsOptions(epochs=0), "epochs: expected at least 1, got 0"),
        (lambda: AtsOptions(learning_rate=np.float32(np.nan)), "learning_rate: expected above 0"),
        (lambda: AtsOptions(identity_start=1), "identity_start: expected True or False, got 1"),
        (lambda: AtsOptions(features="hidden_states"), "features: expected a tuple, got 'hidden_states'"),
        (lambda: LhtsOptions(temperatures=(0.9, "x")), r"temperatures: expected a number, got \(0.9, 'x'\)"),
        (lambda: SftOptions(clip_norm="x"), "clip_norm: expected a number, got 'x'"),
    ],
)
def test_values_from_python(options, message):
    with pytest.raises(UserError, match=message):
        check_options(options())


@pytest.mark.parametrize("kind", [AtsOptions, SftOptions, LhtsOptions, LayersOptions, TasksOptions])
def test_choices_from_python(kind):
    """Every option with choices refuses others; numbers of NumPy are numbers."""
    names = [option.path[-1] for option in list_options(kind) if option.choices]
    assert names
    check_options(kind(batch_size=np.int64(4)))
    for name in names:
        with pytest.raises(UserError, match=f"{name}: expected one of .*; got 'foo'"):
            check_options(dataclasses.replace(kind(), **{name: "foo"}))


def test_names_joined_by_commas():
    assert split_names(("mmlu, arc_easy", "arc_easy,", " triviaqa ", "")) == ("mmlu", "arc_easy", "triviaqa")
    many = ",".join(["arc_easy"] * 57)
    check_value("--tasks", tuple[str, ...], (many,))
    with pytest.raises(UserError, match="at most 255 bytes"):
        check_value("--model", str, many)
