"""The scripts of studies: they end as the commands do, and never take up results of other settings."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "train/study_smoothing": ("models", {"sequences": 9, "foreign-sequences": 9, "epochs": 9, "learning-rate": 9}),
    "train/study_vocabulary": ("vocabularies", {"layers": 9, "characters": 9, "epochs": 9, "held-out": 9}),
    "train/study_pairs": ("models", {"tokens": 9, "seeds": 9}),
    "eval/study_directions": ("models", {"sequences": 9, "questions": 9}),
}
"""Script -> (what it loops over, here nothing; options that change the results of one round)."""
SCRIPTS = [*SETTINGS, "train/study_recipes", "train/pretrain", "eval/study_phase"]


def run(script, monkeypatch, capsys, *arguments):
    """(exit code, standard error) of a script in this process."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
    monkeypatch.syspath_prepend(str(ROOT / "train"))
    monkeypatch.syspath_prepend(str(ROOT / "train" / "recipes"))
    for shared in ("common", "pretrain"):
        monkeypatch.delitem(sys.modules, shared, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_path_ends_with_one_line(script, monkeypatch, capsys, tmp_path):
    code, error = run(script, monkeypatch, capsys, "--assets", tmp_path / "none", "--out", tmp_path / "out")
    assert (code, error) == (2, f"error: --assets: {tmp_path}/none/data does not exist.\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
@pytest.mark.parametrize("script", SETTINGS)
def test_results_of_other_settings_are_not_taken_up(script, monkeypatch, capsys, tmp_path):
    nothing, changed = SETTINGS[script]
    (tmp_path / "data").mkdir()
    out = tmp_path / "out"
    given = ["--assets", tmp_path, "--out", out, f"--{nothing}"]
    assert run(script, monkeypatch, capsys, *given)[0] == 0
    (out / "kept").mkdir()
    assert run(script, monkeypatch, capsys, *given)[0] == 0
    for option, value in changed.items():
        code, error = run(script, monkeypatch, capsys, *given, f"--{option}", value)
        assert code == 2, option
        assert f"--out {out} holds another run (different: {option.replace('-', '_')} " in error
