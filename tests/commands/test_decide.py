"""`decide` on tables, and a table with several confidences in `compare` and `apply`."""

import csv
import json
import math

import numpy as np
import pytest

from calibjax.cli import main

ROWS = 600


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Answers of two categories: in one the confidence is too high, in the other too low."""
    rng = np.random.default_rng(0)
    confidence = rng.beta(5, 2, ROWS).round(4)
    kind = rng.integers(0, 2, ROWS)
    correct = (rng.random(ROWS) < np.where(kind == 1, confidence**4, confidence**0.1)).astype(int)
    file = tmp_path_factory.mktemp("table") / "answers.csv"
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(["question", "confidence", "consistency", "category", "correct"])
        rows.writerows(
            [f"q{n}", confidence[n], round(confidence[n] * 8) / 8, f"kind {kind[n]}", correct[n]] for n in range(ROWS)
        )
    return file, confidence, kind, correct


def decided(capsys, *args):
    assert main(["decide", "--json", *map(str, args)]) == 0
    return json.loads(capsys.readouterr().out)


def test_thresholds_are_those_of_the_definition(capsys, table):
    file, confidence, kind, correct = table
    found = decided(capsys, "--table", file, "--risk", 0.1, "--by-category")
    for number in (0, 1):
        c, y = confidence[kind == number], correct[kind == number]
        row = found["categories"][f"kind {number}"]["of all questions"]
        fits = [t for t in [-math.inf, *np.sort(c)] if (((c > t) & (y == 0)).sum() + 1) / (len(c) + 1) <= 0.1]
        assert row["threshold"] == (None if fits[0] == -math.inf else fits[0])
        assert row["answered"] == pytest.approx((c > fits[0]).mean())
    assert found["categories"]["kind 0"]["of the answers"]["answered"] > 0.9
    assert found["categories"]["kind 1"]["of the answers"]["answered"] < 0.2


def test_a_column_of_the_table(capsys, table, tmp_path):
    found = decided(capsys, "--table", table[0], "--confidence", "consistency", "--out", tmp_path / "d.json")
    assert found["categories"][""]["of all questions"]["threshold"] * 8 % 1 == 0
    assert json.loads((tmp_path / "d.json").read_text()) == found
    assert main(["decide", "--table", str(table[0]), "--confidence", "p_true"]) == 2
    assert "there is no column p_true; got: question, confidence, consistency" in capsys.readouterr().err


def test_claims_of_answers(capsys, table, tmp_path):
    """Five rows are the claims of an answer."""
    rows = list(csv.reader(table[0].open(newline="")))
    file = tmp_path / "claims.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([[*row, "group" if not n else f"a{n // 5}"] for n, row in enumerate(rows)])
    found = decided(capsys, "--table", file, "--claims", "--risk", 0.2)["categories"][""]["claims of an answer"]
    confidence, correct, answer = table[1], table[3], (np.arange(ROWS) + 1) // 5
    kept = confidence > found["threshold"]
    false, count = (np.bincount(answer, weights=x) for x in (kept & (correct == 0), kept))
    assert found["wrong_of_answered"] == pytest.approx((false / np.maximum(count, 1)).mean())
    assert 0.05 < found["wrong_of_answered"] < 0.2
    assert main(["decide", "--table", str(file), "--claims", "--risk", "0.2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Keep claims with a confidence above {found['threshold']:.6g}".replace(" 0.", " .")[:38] in printed.replace(
        " 0.", " ."
    )
    assert "the expected fraction of false claims in an answer is at most 0.2" in printed
    assert main(["decide", "--table", str(table[0]), "--claims"]) == 2
    assert "has no column group, which tells the answer of a claim" in capsys.readouterr().err


def test_what_is_printed(capsys, table, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["decide", "--table", str(table[0]), "--risk", "0.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Answer where the confidence is above .")
    assert "exchangeable" in out
    assert max(map(len, out.splitlines())) <= 80
    few = table[0].with_name("few.csv")
    few.write_text("".join(table[0].read_text().splitlines(keepends=True)[:13]))
    assert main(["decide", "--table", str(few)]) == 0
    assert "no threshold is known to keep at most 0.05 of the answers wrong" in " ".join(
        capsys.readouterr().out.split()
    )


def test_sets_of_options(capsys, tmp_path):
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(4, 0.5), ROWS)
    label = (p.cumsum(axis=1) < rng.random((ROWS, 1))).sum(axis=1).clip(0, 3)
    lines = [",".join([*(f"{x:.8f}" for x in row), str(k)]) for row, k in zip(p, label, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["p_0,p_1,p_2,p_3,label", *lines]) + "\n")
    row = decided(capsys, "--table", tmp_path / "t.csv", "--risk", 0.1)["categories"][""]["options"]
    of_right = np.sort(p[np.arange(ROWS), label])
    assert row["threshold"] == pytest.approx(of_right[int(0.1 * (ROWS + 1)) - 1], abs=1e-5)
    assert row["right_in_set"] == pytest.approx(0.9, abs=0.01)
    assert row["mean_size"] == pytest.approx((p >= row["threshold"] - 1e-7).sum(axis=1).mean(), abs=0.01)


def test_categories_in_compare_and_apply(capsys, table, tmp_path):
    """Patches are kept by category, and found again in a file that holds only one of them."""
    options = ["--methods", "multicalibration,platt", "--json", "--quiet", "--save", str(tmp_path / "fitted")]
    assert main(["compare", "--table", str(table[0]), *options]) == 0
    rows = json.loads(capsys.readouterr().out)["held_out"]["methods"]
    assert rows["multicalibration"]["log_loss"] < rows["platt"]["log_loss"] - 0.1
    header, *lines = table[0].read_text().splitlines()
    (tmp_path / "one.csv").write_text("\n".join([header, *(line for line in lines if "kind 1" in line)]) + "\n")
    files = [
        "--table",
        str(tmp_path / "one.csv"),
        "--method",
        str(tmp_path / "fitted"),
        "--out",
        str(tmp_path / "o.csv"),
    ]
    assert main(["apply", "--json", *files]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["multicalibration"]["log_loss"] < figures["uncalibrated"]["log_loss"] - 0.2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--risk", "0"], "--risk: expected"),
        (["--out", "x.csv"], "expected a file ending in .json"),
        (["--table", "half.csv"], "correct: expected 0 or 1"),
        (["--table", "half.csv", "--by-category"], "has no column category"),
    ],
)
def test_invalid_input(capsys, table, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.csv").write_text("confidence,correct\n" + "".join(f"0.{n},{n / 9}\n" for n in range(10)))
    assert main(["decide", *([] if "--table" in args else ["--table", str(table[0])]), *args]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
