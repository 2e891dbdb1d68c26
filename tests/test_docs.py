"""The pages name files, modules, commands and options that exist."""

import functools
import importlib
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from calibjax.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [file for pattern in ("*.md", "*/*.md") for file in sorted(ROOT.glob(pattern)) if file.name != "CHANGELOG.md"]
PLACES = (ROOT, ROOT / "calibjax")
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_files_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert not [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"`(?:python )?((?:\.?[\w*-]+/)+[\w*.-]+\.(?:py|md|json|yaml|sh))\b", text)
    ours = [path for path in named if path.split("/")[0] in ("calibjax", "tests", "kernels", "train", "eval", "docs")]
    assert not [path for path in ours if not [found for place in PLACES for found in place.glob(path)]]


@by_page
def test_modules_exist(page):
    for name in sorted(set(re.findall(r"`(calibjax(?:\.\w+)+)", page.read_text()))):
        module, *attributes = name.split(".")
        found = importlib.import_module(module)
        for attribute in attributes:
            module = f"{module}.{attribute}"
            try:
                found = getattr(found, attribute)
            except AttributeError:
                found = importlib.import_module(module)


def test_diffs_are_the_files():
    """What the diffs of CONTRIBUTING add, line for line and in their order, stands in the files that they name."""
    diffs = "".join(re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL))
    parts = re.split(r"^--- (.+)\n", diffs, flags=re.MULTILINE)[1:]
    assert len(parts) >= 2 * 10
    for name, diff in zip(parts[::2], parts[1::2], strict=True):
        lines = iter((ROOT / name).read_text().splitlines())
        for added in re.findall(r"^\+(.*)$", diff, flags=re.MULTILINE):
            wanted = added.removesuffix(" ...")
            assert any(line == wanted or (wanted != added and line.startswith(wanted)) for line in lines), (name, added)


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
            assert command.split()[0] in groups, command  # `calibjax study` speaks of all studies
            continue
        unknown = [option for option in options if not re.search(rf"{option}(?![\w-])", help_of(command))]
        assert not unknown, f"calibjax {command}: {unknown}"
