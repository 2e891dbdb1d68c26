"""The pages name files, modules, commands and options that exist, and the reference has every public name."""

import functools
import importlib
import importlib.util
import inspect
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from assets import load_script

from calibjax import heads
from calibjax.cli import COMMANDS, main
from calibjax.models.families import FAMILIES
from calibjax.runtime.chips import CHIPS

ROOT = Path(__file__).parents[1]
PAGES = [
    file
    for pattern in ("*.md", "*/*.md", "docs/*/*.md", "docs/notebooks/*.ipynb", ".github/*.md")
    for file in sorted(ROOT.glob(pattern))
    if file.name != "CHANGELOG.md"
]
PLACES = (ROOT, ROOT / "calibjax")
NO_TORCH = importlib.util.find_spec("torch") is None
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_files_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"`(?:python )?((?:\.?[\w*-]+/)+[\w*.-]+\.(?:py|md|json|yaml|sh))\b", text)
    ours = [path for path in named if path.split("/")[0] in ("calibjax", "tests", "kernels", "train", "eval", "docs")]
    assert not [path for path in ours if not [file for place in PLACES for file in place.glob(path)]]


@by_page
def test_modules_exist(page):
    names = set(re.findall(r"`(calibjax(?:\.\w+)+)", page.read_text()))
    needs_torch = {name for name in names if name.startswith("calibjax.torch") and NO_TORCH}
    for name in sorted(names - needs_torch):
        module, *attributes = name.split(".")
        value = importlib.import_module(module)
        for attribute in attributes:
            module = f"{module}.{attribute}"
            value = getattr(value, attribute, None) or importlib.import_module(module)
    if needs_torch:
        pytest.skip(f"torch is not installed: {', '.join(sorted(needs_torch))} left out")


def test_diffs_are_the_files():
    """What the diffs of CONTRIBUTING add, line for line and in their order, stands in the files that they name."""
    diffs = "".join(re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL))
    parts = re.split(r"^--- (.+)\n", diffs, flags=re.MULTILINE)[1:]
    assert len(parts) >= 2 * 10
    for name, diff in zip(parts[::2], parts[1::2], strict=True):
        lines = iter((ROOT / name).read_text().splitlines())
        for added in re.findall(r"^\+(.*)$", diff, flags=re.MULTILINE):
            start = added.removesuffix(" ...")
            assert any(line == start or (start != added and line.startswith(start)) for line in lines), (name, added)


@functools.cache
def help_of(command):
    with redirect_stdout(StringIO()) as out, pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return out.getvalue()


def commands_of(text):
    """(command, its options) of every `calibjax ...` in blocks of shell and in code spans; lines may be continued."""
    blocks = re.findall(r"```sh\n(.*?)```", text.replace("\\\n", " "), flags=re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        for words in re.findall(r"(?<!from )(?<![\w.-])calibjax ((?:[a-z]+ ?)+)([^;|]*)", line):
            command = next((c for c in sorted(COMMANDS, key=len)[::-1] if f"{words[0]} ".startswith(f"{c} ")), None)
            yield command or words[0], re.findall(r"--[a-z][a-z-]*", words[1])


@by_page
def test_commands_exist(page):
    groups = {command.split()[0] for command in COMMANDS}
    for command, options in commands_of(page.read_text()):
        if command not in COMMANDS:
            assert command.split()[0] in groups, command  # `calibjax train` is of all its commands
            continue
        unknown = [option for option in options if not re.search(rf"{option}(?![\w-])", help_of(command))]
        assert not unknown, f"calibjax {command}: {unknown}"


PACKAGES = "heads", "kernels", "losses", "metrics", "plot", "recalibrate", "data", "models"
PACKAGES = ("calibjax", *(f"calibjax.{package}" for package in PACKAGES))
"""The top level, and the packages whose names are public."""


def public_names(package):
    """`__all__`, what a package imports, or what a module defines itself; not the packages of the top level."""
    module = importlib.import_module(package)
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if not hasattr(module, "__path__"):
        own = {name: value for name, value in own.items() if getattr(value, "__module__", None) == package}
    exported = {name: getattr(module, name) for name in getattr(module, "__all__", own)}
    return {name: value for name, value in exported.items() if not inspect.ismodule(value)}


def documented_names():
    """Package -> names of the autosummary tables of docs/reference."""
    documented = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for package, table in re.findall(r"currentmodule:: (\S+)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            documented.setdefault(package, []).extend(re.findall(r"^   (\w+)$", table, flags=re.MULTILINE))
    return documented


def test_every_public_name_has_a_page():
    """One page each: what the top level exports is documented there and not again with its package."""
    documented = documented_names()
    front = public_names("calibjax")
    assert set(front) == {name for name in dir(importlib.import_module("calibjax")) if name in front}
    for package in PACKAGES:
        names = public_names(package)
        if package != "calibjax":
            names = {name: value for name, value in names.items() if front.get(name) is not value}
        if package == "calibjax.heads":  # a module without __all__ may document its constants too
            names |= {name: value for name, value in vars(heads).items() if name in documented[package]}
        assert sorted(documented[package]) == sorted(names), package
    assert set(documented) == set(PACKAGES)


def test_every_command_is_in_the_reference():
    table = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert set(re.findall(r"^\| `calibjax ([a-z ]+)` \|", table, flags=re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_model_types_are_counted(page):
    assert re.findall(r"\b(\d+) model types", (ROOT / page).read_text()) == [str(len(FAMILIES))]


def test_times_of_the_llama_guide_follow_from_its_operations():
    """Planned, not measured: operations / (devices x peak x utilisation), with the rates that `plan` has."""
    text = (ROOT / "docs" / "guides" / "llama.md").read_text()
    chips = {"H100": ("h100", 1), "v5e-8": ("v5e", 8), "v5e-16": ("v5e", 16)}
    (operations,) = [float(number) for number in re.findall(r"([\d.]+e\d+) FLOP \|", text)]
    for name, (chip, devices) in chips.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        peak, utilisation, seconds = (cell.strip() for cell in row.strip("|").split("|")[1:])
        rate = CHIPS[chip].flops * devices
        assert float(peak) == pytest.approx(rate, rel=0.005)
        expected = operations / (rate * float(utilisation.strip("%")) / 100)
        assert float(seconds.split()[0]) == pytest.approx(expected, abs=1)


FIGURES = load_script(ROOT / "docs" / "figures.py")


@pytest.mark.parametrize("name", FIGURES.FIGURES)
def test_figures_show_the_tables_of_their_page(name):
    """A changed table needs `python docs/figures.py`: the file holds the checksum of what it shows."""
    page = FIGURES.FIGURES[name][0]
    shown = FIGURES.selected(name)
    numbers = [FIGURES.number(cell) for table in shown for row in table.rows for cell in row[1:]]
    assert sum(number == number for number in numbers) > len(shown)
    image = ROOT / "docs" / "figures" / f"{name}.svg"
    assert FIGURES.checksum(shown) in image.read_text(), f"python docs/figures.py: {page} has changed"
    assert re.search(rf"!\[[^]]+\]\([./a-z]*figures/{name}\.svg\)", (ROOT / page).read_text()), page


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=lambda file: file.stem)
def test_notebooks_are_valid_and_clean(notebook):
    nbformat = pytest.importorskip("nbformat")
    clean = load_script(ROOT / "docs" / "notebooks" / "clean.py")
    nbformat.validate(nbformat.read(notebook, as_version=4))
    assert notebook.read_text() == clean.cleaned(notebook, clean.repository()), "python docs/notebooks/clean.py"
    linked = clean.cleaned(notebook, "https://github.com/org/name")
    assert f"colab.research.google.com/github/org/name/blob/main/docs/notebooks/{notebook.name}" in linked
    nbformat.validate(nbformat.reads(linked, as_version=4))


def test_build_files():
    """The files that GitHub reads parse, and the site is built by the command that the README names."""
    for file in [*ROOT.glob(".github/**/*.yml"), ROOT / "CITATION.cff"]:
        assert yaml.safe_load(file.read_text()), file
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    papers = {entry["identifiers"][0]["value"].removeprefix("arXiv:") for entry in citation["references"]}
    assert papers == {"2409.19817", "2508.00264", "2302.03686", "2511.00280"}
    conf = (ROOT / "docs" / "conf.py").read_text()
    command = re.search(r"`(python -m sphinx -W [^`]*)`", (ROOT / "README.md").read_text())
    assert command
    assert command[1] in conf
    assert "python -m sphinx -W" in (ROOT / ".ci" / "run").read_text()
