"""The completion script, in the shell that runs it."""

import shutil
import subprocess

import pytest

from calibjax.cli import COMMANDS, load_command, main
from calibjax.commands.parser import completion_script


@pytest.fixture(scope="module")
def script():
    return completion_script(["bash"], {name: load_command(name)[0] for name in COMMANDS})


def complete(script, *words):
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("calibjax", *words))
    run = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _calibjax; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash(script):
    assert {"quickstart", "train", "eval", "compare", "apply"} <= complete(script, "")
    assert complete(script, "train", "") == {"ats", "sft", "lhts"}
    assert complete(script, "eval", "l") == {"layers"}
    flags = complete(script, "train", "ats", "--m")
    assert {"--model", "--mesh"} <= flags
    assert all(flag.startswith("--m") for flag in flags)
    assert complete(script, "train", "ats", "--dtype", "bf") == {"bfloat16"}
    assert complete(script, "compare", "--table", "x", "--col") == {"--columns"}


def test_other_shells(capsys):
    assert main(["--completion", "fish"]) == 2
    assert capsys.readouterr().err == "error: --completion: expected one of bash, zsh.\n"
