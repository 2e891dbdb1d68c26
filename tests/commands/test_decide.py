"""`decide` on tables, and a table with several confidences in `compare` and `apply`."""

import csv
import json
import math

import numpy as np
import pyarrow.parquet
import pytest

from calibjax.cli import main
from calibjax.eval.answers.decide import TITLES

ROWS = 600


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Answers of two categories: in one the confidence is too high, in the other too low."""
    rng = np.random.default_rng(0)
    confidence = rng.beta(5, 2, ROWS).round(4)
    kind = rng.integers(0, 2, ROWS)
    correct = (rng.random(ROWS) < np.where(kind == 1, confidence**4, confidence**0.1)).astype(int)
    file = tmp_path_factory.mktemp("table") / "answers.csv"
    columns = {"question": [f"q{n}" for n in range(ROWS)], "confidence": confidence}
    columns |= {"consistency": np.round(confidence * 8) / 8, "category": [f"kind {k}" for k in kind]}
    write_csv(file, columns | {"correct": correct})
    return file, confidence, kind, correct


def write_csv(path, columns):
    columns = {name: np.asarray(column).tolist() for name, column in columns.items()}
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])


def decided(capsys, *args):
    assert main(["decide", "--json", *map(str, args)]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_category_has_its_threshold(capsys, table, tmp_path):
    result = decided(capsys, "--table", table[0], "--risk", 0.1, "--by-category", "--out", tmp_path / "d.json")
    assert json.loads((tmp_path / "d.json").read_text()) == result
    zero, one = (result["categories"][f"kind {number}"]["answers"]["answered"] for number in (0, 1))
    assert one < 0.2 < 0.9 < zero
    result = decided(capsys, "--table", table[0], "--columns", "confidence=consistency")["thresholds"]["average"]
    assert result["answered"] == (np.round(table[1] * 8) / 8 > result["threshold"]).mean()


def test_claims_of_answers(capsys, table, tmp_path):
    confidence, correct, answer, file = table[1], table[3], np.arange(ROWS) // 5, tmp_path / "claims.csv"
    write_csv(file, {"confidence": confidence, "correct": correct, "group": [f"a{n}" for n in answer]})
    outcome = decided(capsys, "--table", file, "--claims", "--risk", 0.2)["thresholds"]["claims"]
    selected = confidence > outcome["threshold"]
    false, count = (np.bincount(answer, weights=x) for x in (selected & (correct == 0), selected))
    assert outcome["wrong_of_answered"] == pytest.approx((false / np.maximum(count, 1)).mean())
    assert 0.05 < outcome["wrong_of_answered"] < 0.2
    assert main(["decide", "--table", str(file), "--claims", "--risk", "0.2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Keep claims with a confidence above {outcome['threshold']}:" in printed
    assert "the expected fraction of false claims in an answer is at most 0.2" in printed
    assert main(["decide", "--table", str(file), "--claims", "--level", "0.5"]) == 2
    assert main(["decide", "--table", str(table[0]), "--claims"]) == 2
    assert "has no column group, the answer of a claim: --columns group=NAME" in capsys.readouterr().err


def test_what_is_printed(capsys, table, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["decide", "--table", str(table[0]), "--risk", "0.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Answer where the confidence is above 0.")
    assert "exchangeable" in out
    assert max(map(len, out.splitlines())) <= 80
    few = table[0].with_name("few.csv")
    few.write_text("".join(table[0].read_text().splitlines(keepends=True)[:13]))
    assert main(["decide", "--table", str(few)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "no threshold is guaranteed, with probability 0.9, to keep at most 0.05" in printed


def test_rows_that_depend_on_each_other(capsys, tmp_path):
    write_csv(tmp_path / "t.csv", {"confidence": np.arange(40) / 40, "correct": [1] * 40, "group": np.arange(40) // 4})
    assert main(["decide", "--json", "--table", str(tmp_path / "t.csv")]) == 0
    assert "WARNING: 40 rows are of 10 groups" in capsys.readouterr().err


SCORES = {
    "k/11": lambda rng, x: np.round(x * 11) / 11,
    "two digits": lambda rng, x: x.round(2),
    "float32": lambda rng, x: x.round(1).astype(np.float32),
    "saturated": lambda rng, x: 1 - 10.0 ** -rng.integers(1, 16, len(x)),
    "tiny": lambda rng, x: 10.0 ** -rng.integers(0, 40, len(x)),
    "neighbours": lambda rng, x: np.nextafter(np.round(x * 4) / 5, rng.integers(0, 2, len(x))),
    "float32 neighbours": lambda rng, x: np.float32(0.9) + rng.integers(0, 90, len(x)).astype("f") * np.float32(2**-24),
}
"""Confidences with ties, in the digits and dtypes of files."""


@pytest.mark.parametrize("kind", SCORES)
def test_a_printed_threshold_selects_the_rows_counted(capsys, tmp_path, monkeypatch, kind):
    """The numbers printed in the verdict, the table and the JSON, compared with those of the file."""
    monkeypatch.setenv("COLUMNS", "400")
    rng, n = np.random.default_rng(list(SCORES).index(kind)), 900
    confidence = SCORES[kind](rng, rng.beta(3, 1.5, n))
    rank = np.unique(confidence, return_inverse=True)[1]
    correct = (rng.random(n) < 0.6 + 0.4 * rank / rank.max()).astype(int)
    category, finite = np.arange(n) % 2, 0
    columns = {"confidence": confidence, "correct": correct, "group": np.arange(n) // 3, "category": category}
    np.savez(tmp_path / "t.npz", **columns)
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    write_csv(tmp_path / "t.csv", columns)
    for suffix, risk, flags in (
        *(("npz", risk, []) for risk in (0.05, 0.1, 0.15, 0.2, 0.25)),
        *(("csv", 0.1, []), ("csv", 0.2, ["--claims"]), ("parquet", 0.2, ["--by-category"])),
    ):
        args = ["--table", tmp_path / f"t.{suffix}", "--risk", risk, *flags]
        result = decided(capsys, *args)
        result = result.get("categories") or {"": result["thresholds"]}
        assert main(["decide", *map(str, args)]) == 0
        printed = capsys.readouterr().out
        for part, rows in result.items():
            own, y = (x[category == int(part)] if part else x for x in (confidence, correct))
            for name, row in rows.items():
                if row["threshold"] is None:
                    assert row["answered"] == (row["selects"] == "all")
                    continue
                if name == "average":
                    thresholds = [-math.inf, *np.sort(own)]
                    least = next(t for t in thresholds if (sum(y[own > t] == 0) + 1) / (len(y) + 1) <= risk)
                    assert row["answered"] == (own > least).mean()
                text, finite = str(row["threshold"]), finite + 1
                title = f"{part}, {TITLES[name]}" if part else TITLES[name]
                assert next(line for line in printed.splitlines() if line.startswith(title + " ")).split().count(text)
                if name == "claims" or (not part and name == "answers"):
                    assert f" above {text}: " in next(line for line in printed.splitlines() if "WARNING" not in line)
                assert row["answered"] == (own > float(text)).mean()
                if confidence.dtype == np.float32 or kind in ("k/11", "two digits"):
                    assert row["answered"] == (own.astype(np.float32) > np.float32(text)).mean()
    assert finite > 5


@pytest.mark.parametrize("columns", ["p", "logit"])
def test_sets_of_options(capsys, tmp_path, columns):
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.full(4, 0.5), ROWS)
    label = (p.cumsum(axis=1) < rng.random((ROWS, 1))).sum(axis=1).clip(0, 3)
    values = np.log(p + 1e-300) + rng.normal(size=(ROWS, 1)) if columns == "logit" else p
    write_csv(tmp_path / "t.csv", {f"{columns}_{k}": values[:, k] for k in range(4)} | {"label": label})
    thresholds = decided(capsys, "--table", tmp_path / "t.csv", "--risk", 0.1)["thresholds"]
    row = thresholds["options"]
    of_right = p[np.arange(ROWS), label]
    assert row["right_in_set"] == (of_right >= np.sort(of_right)[int(0.1 * (ROWS + 1)) - 1]).mean()
    assert row["right_in_set"] == (of_right >= row["threshold"]).mean()
    assert row["mean_size"] == (p >= row["threshold"]).sum(axis=1).mean()
    row = thresholds["options_aps"]
    scores = 1 - (p[:, None, :] * (p[:, None, :] > p[:, :, None])).sum(axis=2)
    assert row["right_in_set"] == (scores[np.arange(ROWS), label] >= row["threshold"]).mean()
    assert row["mean_size"] == (scores >= row["threshold"]).sum(axis=1).mean()


def test_sets_with_tied_probabilities(capsys, tmp_path):
    """A tenth of the right options has the same p, in any order of the options and beside different others."""
    rng = np.random.default_rng(2)

    def draw(n):
        p = np.where(rng.random((n, 1)) < 0.3, [[0.21, 0.37, 0.42]], [[0.8, 0.07, 0.13]])
        order = rng.permuted(np.tile(np.arange(3), (n, 1)), axis=1)
        return np.take_along_axis(p, order, axis=1), (order == 0).argmax(axis=1)

    p, label = draw(800)
    write_csv(tmp_path / "t.csv", {f"p_{k}": p[:, k] for k in range(3)} | {"label": label})
    row = decided(capsys, "--table", tmp_path / "t.csv", "--risk", 0.1)["thresholds"]
    assert (row["options"]["threshold"], row["options"]["right_in_set"]) == (0.2, 1)
    assert row["average"]["answered"] == (p.max(axis=1) > row["average"]["threshold"]).mean()
    new, right = draw(20_000)
    assert (new >= row["options"]["threshold"])[np.arange(20_000), right].mean() >= 0.9


def test_every_answer_right(capsys, tmp_path):
    """Nothing is fitted: few rows, and rows of one kind, have thresholds too."""
    for rows in (1, 5, 40):
        write_csv(tmp_path / "t.csv", {"confidence": np.linspace(0.5, 1, rows), "correct": [1] * rows})
        row = decided(capsys, "--table", tmp_path / "t.csv", "--risk", 0.2)["thresholds"]["average"]
        assert row["selects"] == ("all" if (rows + 1) * 0.2 >= 1 else "none")


def test_categories_in_compare_and_apply(capsys, table, tmp_path):
    """Patches are kept by category, and found again in a file that holds only one of them."""
    options = ["--methods", "multicalibration,platt", "--json", "--quiet", "--save", str(tmp_path / "fitted")]
    assert main(["compare", "--table", str(table[0]), *options]) == 0
    rows = json.loads(capsys.readouterr().out)["held_out"]["methods"]
    assert rows["multicalibration"]["log_loss"] < rows["platt"]["log_loss"] - 0.1
    header, *lines = table[0].read_text().splitlines()
    (tmp_path / "one.csv").write_text("\n".join([header, *(line for line in lines if "kind 1" in line)]) + "\n")
    files = ["--table", f"{tmp_path}/one.csv", "--method", f"{tmp_path}/fitted", "--out", f"{tmp_path}/o.csv"]
    assert main(["apply", "--json", *files]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["multicalibration"]["log_loss"] < figures["uncalibrated"]["log_loss"] - 0.2
