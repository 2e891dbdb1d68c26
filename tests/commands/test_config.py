"""run.yaml: what a run leaves reproduces it, the command line takes precedence, and mistakes are one line."""

import dataclasses

import pytest
import yaml

from calibjax.cli import COMMANDS, load_command, main
from calibjax.commands.compare import CompareOptions
from calibjax.commands.export import ExportOptions
from calibjax.commands.parser import list_options, parse, with_config, write_config
from calibjax.commands.train_lhts import TrainLhtsOptions


def read_again(command, options, tmp_path, *more):
    write_config(tmp_path, command, options)
    args = with_config(command, type(options), ["--config", str(tmp_path / "run.yaml"), *more])
    return parse(type(options), args, prog=command)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("report", "export", "push")])
def test_every_command_reads_what_it_wrote(name, tmp_path):
    options_type, _ = load_command(name)
    given = [w for o in list_options(options_type) if o.default is dataclasses.MISSING for w in (o.flag, "h100:8")]
    options = parse(options_type, given, prog=name)
    assert read_again(name, options, tmp_path) == options


def test_values_that_are_not_defaults(tmp_path):
    given = ["--model", "m", "--data", "d é.txt", "--out", "o", "--no-packing", "--seq-len", "33"]
    options = parse(TrainLhtsOptions, [*given, "--myopic", "0.5", "0.0"], prog="x")
    assert read_again("train lhts", options, tmp_path) == options
    text = (tmp_path / "run.yaml").read_text()
    assert text.startswith("# To run it again: calibjax train lhts --config ")
    content = yaml.safe_load(text)
    assert (content["command"], content["seq-len"]) == ("train lhts", 33)
    assert not {"json", "quiet"} & content.keys()


def test_the_command_line_takes_precedence(tmp_path):
    options = parse(CompareOptions, ["--table", "x.csv", "--bins", "7", "--methods", "platt", "beta"], prog="x")
    again = read_again("compare", options, tmp_path, "--bins", "9", "--methods", "vector")
    assert (again.bins, again.methods, again.table) == (9, ("vector",), options.table)


@pytest.mark.parametrize("args", ["--config F RUN", "RUN --config F", "--also onnx --config=F RUN"])
def test_the_last_option_of_the_file_takes_no_argument(tmp_path, args):
    (tmp_path / "x.yaml").write_text("out: o\nalso: [onnx, stablehlo]\n")
    given = args.replace("F", str(tmp_path / "x.yaml")).split()
    options = parse(ExportOptions, with_config("export", ExportOptions, given), prog="x")
    assert (str(options.run), options.also[0]) == ("RUN", "onnx")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("command: train ats\n", "is of `calibjax train ats`, not of `calibjax compare`"),
        ("- bins\n", "expected a mapping of options to values"),
        ("bins: {a: 1}\n", "bins: expected a value or a list of values, got a mapping"),
        ("bins: [1\n", "cannot be read"),
        ("bin: 3\n", "--bin: calibjax compare has no such option; did you mean --bins?"),
        ("bins: many\n", "--bins: expected a whole number, got 'many'"),
        (None, "cannot be read"),
    ],
)
def test_mistakes(tmp_path, capsys, content, message):
    file = tmp_path / "x.yaml"
    if content is not None:
        file.write_text(content)
    assert main(["compare", "--table", "x.csv", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_run_leaves_the_file_that_repeats_it(undrawn, tmp_path):
    table = tmp_path / "x.csv"
    table.write_text("confidence,correct\n" + "".join(f"0.{k % 9 + 1},{k % 2}\n" for k in range(40)))
    assert main(["compare", "--table", str(table), "--methods", "histogram", "--out", str(tmp_path / "a")]) == 0
    assert main(["compare", "--config", str(tmp_path / "a" / "run.yaml"), "--out", str(tmp_path / "b")]) == 0
    assert len({(tmp_path / name / "run.json").read_text() for name in "ab"}) == 1
