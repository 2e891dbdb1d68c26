"""calibjax compare: figures against scikit-learn and numpy, on tables and on a model, saved methods, mistakes."""

import dataclasses
import errno
import json
import re
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv as pa_csv
from scipy.special import softmax
from tiny import on_one_device, write_model, write_text

from calibjax import metrics
from calibjax.cli import main
from calibjax.data.table import PredictionTable, read_table, split_table, table_rows
from calibjax.data.write import write_rows
from calibjax.eval.answers.decide import allocate
from calibjax.eval.compare import COMPARED
from calibjax.eval.compare import compare as comparison_of
from calibjax.eval.report.notes import comparison_verdict
from calibjax.eval.report.tables import winner
from calibjax.recalibrate import METHODS, Predictions, Recalibrator, load, optimize, save
from calibjax.runtime.errors import UserError
from calibjax.train.options import RECIPES

ROWS, CLASSES, TRUE_TEMPERATURE, BINS = 4000, 5, 2.5, 10
QUICK = ["--quiet", "--bins", str(BINS)]


def made():
    """(logits, labels, group): labels drawn at the temperature 2.5."""
    rng = np.random.default_rng(5)
    z = rng.normal(size=(ROWS, CLASSES)) * 2
    labels = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return (TRUE_TEMPERATURE * z).astype(np.float32), labels, rng.integers(0, 300, ROWS)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same predictions as text and as arrays, with logits and with confidences."""
    folder = tmp_path_factory.mktemp("tables")
    z, labels, group = made()
    p = softmax(z.astype(np.float64), axis=1)
    logits = {f"logit_{k}": z[:, k] for k in range(CLASSES)} | {"label": labels, "group": group}
    binary = {"confidence": p.max(axis=1).astype(np.float32), "correct": z.argmax(axis=1) == labels, "group": group}
    for name, columns in (("logits", logits), ("binary", binary)):
        pa_csv.write_csv(pa.table(columns), folder / f"{name}.csv")
    np.savez(folder / "logits.npz", logits=z, labels=labels, group=group)
    np.savez(folder / "binary.npz", **binary)
    return folder


def compare(capsys, *options):
    """Exit code, metrics.json, and what went to standard error."""
    code = main(["compare", "--json", *QUICK, *map(str, options)])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else None, printed.err


def ece_of(confidence, correct):
    """By searching each of the bins (lo, hi]."""
    total = 0.0
    for b in range(BINS):
        inside = (confidence > np.float32(b) / np.float32(BINS)) & (confidence <= np.float32(b + 1) / np.float32(BINS))
        total += abs((confidence[inside].astype(np.float64) - correct[inside]).sum())
    return total / len(confidence)


def close(row, wanted, tolerance):
    for key, value in wanted.items():
        got = row["ece"]["value"] if key == "ece" else row[key]
        np.testing.assert_allclose(got, value, atol=tolerance, rtol=2e-6, err_msg=key)


@pytest.mark.slow
def test_logits_against_numpy_and_scikit_learn(files, capsys):
    from sklearn.metrics import log_loss, roc_auc_score

    methods = ["matrix", "platt", "isotonic"]
    code, document, _ = compare(capsys, "--table", files / "logits.npz", "--methods", *methods)
    assert code == 0
    held_out = document["held_out"]
    fit, test = (part.predictions for part in split_table(read_table(files / "logits.npz"), 0.6, seed=0))
    assert held_out["tokens"] == len(test.labels)
    assert held_out["reference"] == "temperature"
    rows = held_out["methods"]
    assert set(rows) == {"uncalibrated", "temperature", *methods}

    z, labels = np.asarray(test.logits, np.float64), test.labels
    # The temperature, by looking at the likelihood everywhere.
    grid = np.linspace(2.0, 3.0, 401)
    scores = [log_loss(fit.labels, softmax(np.asarray(fit.logits, np.float64) / t, axis=1)) for t in grid]
    best = grid[int(np.argmin(scores))]
    assert abs(best - TRUE_TEMPERATURE) < 0.15
    right = z.argmax(axis=1) == labels
    for name, p in (("uncalibrated", softmax(z, axis=1)), ("temperature", softmax(z / best, axis=1))):
        top = p.max(axis=1)
        wanted = {
            "nll": log_loss(labels, p),
            "log_loss": log_loss(right, top),
            "brier": np.mean((top - right) ** 2),
            "auroc": roc_auc_score(right, top),
            "accuracy": right.mean(),
            "ece": ece_of(top.astype(np.float32), right),
        }
        close(rows[name], wanted, 2e-6 if name == "uncalibrated" else 1e-3)  # of the grid: one part in two thousand
        assert rows[name]["changed"] == 0
    assert rows["temperature"]["ece"]["value"] < 0.05 < 0.1 < rows["uncalibrated"]["ece"]["value"]
    against = rows["uncalibrated"]["against"]
    assert (set(against), rows["temperature"]["against"]) == (set(COMPARED), {})
    for key in ("ece", "brier", "nll"):
        assert against[key]["low"] > 0
        assert against[key]["p_value"] < 0.01
    np.testing.assert_allclose(against["nll"]["difference"], rows["uncalibrated"]["nll"] - rows["temperature"]["nll"])

    # A method that changes the prediction, and methods that give a confidence alone.
    data = Predictions(logits=test.logits)
    new = np.asarray(METHODS["matrix"].apply(METHODS["matrix"].fit(fit), data)).argmax(axis=1)
    assert rows["matrix"]["changed"] == (new != z.argmax(axis=1)).sum() > 0
    np.testing.assert_allclose(rows["matrix"]["accuracy"], (new == labels).mean())
    assert rows["matrix"]["parameters"] == CLASSES * (CLASSES + 1)
    assert rows["platt"]["nll"] is None
    assert set(rows["platt"]["against"]) == {"ece", "brier", "log_loss"}
    assert (rows["isotonic"]["log_loss"] is None) == (rows["isotonic"]["certain_and_wrong"] > 0)


def test_split_keeps_groups_whole_and_no_part_empty(files):
    table = read_table(files / "logits.csv")
    fit, held_out = split_table(table, 0.6, seed=0)
    assert not set(fit.groups) & set(held_out.groups)
    assert len(fit) + len(held_out) == ROWS
    assert abs(len(fit) - 0.6 * ROWS) < 30
    assert not np.array_equal(fit.groups, split_table(table, 0.6, seed=1)[0].groups)
    few = PredictionTable(Predictions(confidence=np.linspace(0, 1, 20), correct=np.arange(20) % 2.0), None)
    assert [len(part) for part in split_table(few, 0.05, seed=0)] == [1, 19]
    for fraction in (1e-9, 0.049, 0.951, 1 - 1e-9):
        with pytest.raises(UserError, match=f"^fit_fraction: {fraction} of 20 rows leaves one part empty"):
            split_table(few, fraction, seed=0)


def test_a_base_model_in_place_of_labels(files, tmp_path, capsys):
    """The base model is calibrated, the one in the table 2.5 times as confident: daca finds that without labels."""
    z, label, group = made()
    np.savez(tmp_path / "base.npz", scores=z / TRUE_TEMPERATURE)
    np.savez(tmp_path / "table.npz", scores=z, gold=label, group=group)
    table = ["--table", tmp_path / "table.npz", "--columns", "logits=scores,label=gold", "--methods", "temperature"]
    base = ["--base-table", tmp_path / "base.npz"]
    code, document, _ = compare(capsys, *table, *base, "--save", tmp_path / "saved")
    assert code == 0
    methods = document["held_out"]["methods"]
    assert set(methods) == {"uncalibrated", "temperature", "daca"}
    assert methods["daca"]["nll"] == pytest.approx(methods["temperature"]["nll"], abs=2e-3)
    assert abs(methods["daca"]["nll"] - methods["uncalibrated"]["nll"]) > 0.1
    assert load(tmp_path / "saved").name == "temperature"
    np.savez(tmp_path / "other.npz", logits=z[:, :4])
    _, _, error = compare(capsys, *table, "--base-table", tmp_path / "other.npz")
    assert "--base-table" in error
    assert "expected logits or probabilities [4000, 5], as --table has them, got [4000, 4]" in error
    assert "expected --table" in compare(capsys, "--model", "x", "--data", "y", *base)[2]
    np.savez(tmp_path / "other.npz", logits=z[::-1], label=label[::-1])
    assert "the labels of --table, row by row" in compare(capsys, *table, "--base-table", tmp_path / "other.npz")[2]


@pytest.mark.parametrize(("sort", "sign"), [("auroc", -1), ("nll", 1)])
def test_order_of_rows(files, capsys, sort, sign):
    methods = ["vector", "platt", "beta"]
    _, document, _ = compare(capsys, "--table", files / "logits.npz", "--methods", *methods, "--sort", sort)
    values = [row[sort] for row in document["held_out"]["methods"].values()]
    known = [sign * value for value in values if value is not None]
    assert known == sorted(known)
    assert values[len(known) :] == [None] * (len(values) - len(known))
    assert len(known) == (3 if sort == "nll" else 5)


@pytest.mark.slow
def test_tables_report_and_what_is_left_out(files, capsys, tmp_path):
    out = tmp_path / "out"
    code = main(["compare", *QUICK, "--table", str(files / "binary.csv"), "--out", str(out)])
    shown = capsys.readouterr().out
    assert code == 0
    document = json.loads((out / "metrics.json").read_text())
    held_out = document["held_out"]
    json.dumps(document, allow_nan=False)
    assert sorted([*held_out["methods"], *held_out["left_out"]]) == sorted(["uncalibrated", *METHODS])
    assert "multicalibration: no categories to read here" in " ".join(shown.split())
    lines = shown.splitlines()
    assert max(map(len, lines[1:-1])) <= 80, "a pipe has 80 columns; the first and the last line are not of the end"
    first, reference = next(iter(held_out["methods"])), held_out["reference"]
    compared = {name: row["against"]["log_loss"] for name, row in held_out["methods"].items() if name != reference}
    corrected = metrics.holm({name: each["p_value"] for name, each in compared.items()})
    assert {name: each["holm_p"] for name, each in compared.items()} == corrected
    losses = [row["log_loss"] for row in held_out["methods"].values()]
    assert losses == sorted(losses)
    best = next(line for line in lines[2:] if line.startswith(f"{first} ")).split()
    accuracy, loss = (f"{held_out['methods'][first][key]:.4f}".lstrip("0") for key in ("accuracy", "log_loss"))
    assert best[1] == loss
    assert accuracy in best
    page = (out / "report.html").read_text()
    for name, row in held_out["methods"].items():
        assert f">{row['brier']:.4f}<" in page, name
        assert len(row["reliability"]["count"]) == BINS
        assert sum(row["reliability"]["count"]) == held_out["tokens"]
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")

    assert main(["report", str(out)]) == 0
    again = capsys.readouterr().out.splitlines()
    assert [line for line in again if "[" in line] == [line for line in lines if "[" in line]


def test_platt_wins_on_its_own_map(tmp_path, capsys):
    """Data of an exact Platt map: it has the lowest log loss, is saved, and maps new data by one call and command."""
    rng = np.random.default_rng(0)
    confidence = rng.beta(4, 2, 8000)
    truth = 1 / (1 + np.exp(0.8 - 0.6 * np.log(confidence / (1 - confidence))))
    correct = rng.random(8000) < truth
    table, saved = tmp_path / "x.csv", tmp_path / "saved"
    pa_csv.write_csv(pa.table({"confidence": confidence, "correct": correct.astype(int)}), table)
    options = ["--table", table, "--methods", "platt", "histogram", "isotonic", "--save", saved]
    code, document, error = compare(capsys, *options)
    assert code == 0, error
    assert next(iter(document["held_out"]["methods"])) == "platt"
    assert str(comparison_verdict(document["held_out"])).startswith("platt wins: its log loss, ")
    new = np.linspace(0.01, 0.99, 25)
    wanted = 1 / (1 + np.exp(0.8 - 0.6 * np.log(new / (1 - new))))
    got = load(saved)(confidence=new)
    np.testing.assert_allclose(got, wanted, atol=0.05)

    pa_csv.write_csv(pa.table({"confidence": new}), tmp_path / "new.csv")
    apply = ["apply", "--method", str(saved), "--table", str(tmp_path / "new.csv")]
    assert main([*apply, "--out", str(tmp_path / "out.csv")]) == 0
    assert "their outcomes are not known" in capsys.readouterr().out
    applied = pa_csv.read_csv(tmp_path / "out.csv")["calibrated_confidence"].to_numpy()
    np.testing.assert_allclose(applied, got, rtol=1e-6)
    assert main(["apply", "--method", str(saved), "--table", str(table), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "The recalibrated predictions are better: log loss " in " ".join(capsys.readouterr().out.split())
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 8000
    for right, verdict in ((1, "no improvement beyond noise"), (99, "the recalibrated predictions are worse")):
        (tmp_path / "new.csv").write_text("confidence,correct\n0.9,0\n" + "0.9,1\n" * right)
        assert main([*apply, "--out", str(tmp_path / "out.csv")]) == 0
        assert f"{verdict}: log loss " in " ".join(capsys.readouterr().out.split())
    (tmp_path / "header.csv").write_text("confidence,correct\n")
    before = table.read_bytes()
    for given, out, message in (
        (table, tmp_path / "none" / "out.csv", f"--out: {tmp_path}/none/out.csv: cannot write there"),
        (table, table, f"--out {table}: expected another file than --table, whose columns would be lost"),
        (tmp_path / "header.csv", tmp_path / "new.jsonl", f"--table: {tmp_path}/header.csv holds no rows"),
    ):
        assert main(["apply", "--method", str(saved), "--table", str(given), "--out", str(out)]) == 2
        assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
    assert table.read_bytes() == before


def test_a_fit_that_did_not_converge_is_shown(tmp_path, undrawn, capsys):
    """Separable: one threshold parts right from wrong, and Platt's slope would grow without end."""
    table, saved, out = tmp_path / "x.csv", tmp_path / "saved", tmp_path / "out"
    table.write_text("confidence,correct\n" + "0.2,0\n0.3,0\n0.7,1\n0.8,1\n" * 100)
    options = ["--table", str(table), "--methods", "platt", "--save", str(saved), "--out", str(out)]
    assert main(["compare", *QUICK, *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    held_out = json.loads((out / "metrics.json").read_text())["held_out"]
    assert set(held_out["not_converged"]) == {"platt", "confidence_temperature"}
    for name in held_out["not_converged"]:
        assert f"{name} (not converged)" in shown
    assert "separable data" in shown
    assert "Not converged: " in (out / "report.html").read_text()
    assert main(["report", str(out)]) == 0
    assert "platt (not converged)" in " ".join(capsys.readouterr().out.split())

    # Neither wins, and neither leads the table; temperature scaling is what remains to be saved.
    assert next(iter(held_out["methods"])) == "uncalibrated"
    assert "no method beats confidence_temperature (not converged) beyond noise" in shown
    assert load(saved).name == "confidence_temperature"
    apply = ["apply", "--method", str(saved), "--table", str(table), "--out", str(tmp_path / "new.csv")]
    assert main(apply) == 0
    assert "confidence_temperature did not converge: " in " ".join(capsys.readouterr().out.split())
    assert main([*apply, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["converged"] is False


def test_apply_to_a_distribution(files, tmp_path, capsys):
    options = ["--table", files / "logits.npz", "--methods", "vector", "--save", tmp_path / "saved"]
    code, document, _ = compare(capsys, *options)
    assert code == 0
    first = winner(document["held_out"])
    assert load(tmp_path / "saved").name == first
    out = tmp_path / "out.npz"
    new = ["--table", str(files / "logits.csv"), "--out", str(out), "--json"]
    assert main(["apply", "--method", str(tmp_path / "saved"), *new]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    z, labels, _ = made()
    log_p = np.asarray(METHODS[first].apply(load(tmp_path / "saved").state, Predictions(logits=z)))
    got = np.load(out)
    np.testing.assert_allclose(got["calibrated_p"], np.exp(log_p), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(got["calibrated_prediction"], log_p.argmax(axis=1))
    np.testing.assert_allclose(got["calibrated_confidence"], np.exp(log_p.max(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(figures[first]["accuracy"], np.mean(log_p.argmax(axis=1) == labels))
    assert figures[first]["log_loss"] < figures["uncalibrated"]["log_loss"]


def test_a_method_that_fails_does_not_stop_the_others(files, capsys, monkeypatch):
    broken = mock.Mock(side_effect=FloatingPointError("no\nluck"))
    monkeypatch.setitem(METHODS, "beta", dataclasses.replace(METHODS["beta"], fit_arrays=broken))
    nonsense = dataclasses.replace(METHODS["platt"], apply_arrays=lambda state, confidence: confidence * np.nan)
    monkeypatch.setitem(METHODS, "platt", nonsense)
    options = ["--table", files / "binary.npz", "--methods", "platt", "beta", "histogram"]
    code, document, _ = compare(capsys, *options)
    assert code == 1
    failed = document["held_out"]["failed"]
    assert failed["beta"] == "FloatingPointError: no"
    assert failed["platt"].startswith("ValueError: it gave nan as a confidence")
    assert set(document["held_out"]["methods"]) == {"uncalibrated", "confidence_temperature", "histogram"}
    assert main(["compare", *QUICK, *map(str, options)]) == 1
    assert "Failed: beta: FloatingPointError: no." in capsys.readouterr().out
    broken.side_effect = OSError(errno.ENOSPC, "No space left on device")  # which is no fault of the method
    assert compare(capsys, *options)[:2] == (1, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("confidence,correct\n" + "0.5,1\n0.4,1\n" * 9, "expected different values of correct, got 1 in each row"),
        ("confidence,correct\n" + "0.5,1\n0.4,0\n" * 4, "expected at least 10 rows, got 8"),
        ("confidence,correct,caf\udce9\n" + "0.5,1,2\n0.4,0,2\n" * 9, "invalid UTF-8 in the first line"),
        ("logit_0,logit_2,label\n" + "1,2,0\n" * 9 + "1,2,1\n", "without a gap"),
        ("p_0,p_1,label\n" + ".5,.5,0\n" * 9 + ".5,.6,1\n", "p: row 9 holds [0.5, 0.6]"),
    ],
)
def test_tables_that_are_wrong(capsys, tmp_path, content, message):
    (tmp_path / "x.csv").write_text(content, errors="surrogateescape")
    code, document, error = compare(capsys, "--table", tmp_path / "x.csv")
    assert (code, document, error.count("\n")) == (2, None, 1), error
    assert message in error


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", np.int64(2**32 + 1), "labels: row 7 holds 4294967297, expected a whole number from 0"),
        ("labels", np.uint32(2**32 - 1), "labels: row 7 holds 4294967295, expected a whole number from 0"),
        ("confidence", 0.5 + 2j, "confidence: row 0 holds 0j, expected a number"),
        ("confidence", 1e39, "confidence: row 7 holds 1e+39, expected 0 to 1"),
    ],
)
def test_numbers_neither_wrap_nor_overflow(tmp_path, name, value, message):
    arrays = {"confidence": np.linspace(0, 1, 20), "correct": np.arange(20) % 2.0}
    if name == "labels":
        arrays = {"logits": np.zeros((20, 3)), "labels": (np.arange(20) % 3).astype(value.dtype)}
    arrays[name] = np.where(np.arange(20) == 7, value, arrays[name])
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UserError, match=re.escape(message)):
        read_table(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x.jsonl", '{"confidence": 0.5, "correct": "x"}', "correct: row 70000 holds 'x', expected a number"),
        ("x.jsonl", '{"confidence":', "x.jsonl, line 70001: cannot be read as json"),
        ("x.csv", "0.5,x", "correct: row 70000 holds 'x', expected a number"),
    ],
)
def test_the_row_of_a_long_file_is_named(tmp_path, name, value, message):
    """Beyond the first mebibyte, which is what Arrow reads at a time."""
    of_row = '{{"confidence": 0.5000, "correct": {}}}' if name == "x.jsonl" else "0.50000000000,{}"
    rows = [of_row.format(i % 2) for i in range(80_000)]
    rows[70_000] = value
    header = [] if name == "x.jsonl" else ["confidence,correct"]
    (tmp_path / name).write_text("\n".join(header + rows))
    assert (tmp_path / name).stat().st_size > 2**20
    with pytest.raises(UserError, match=re.escape(message)):
        read_table(tmp_path / name)


def test_several_confidences_become_one(tmp_path):
    """The columns that `--columns confidences=` names are stacked, saved and applied."""
    rng = np.random.default_rng(8)
    q = rng.random(2000)
    noisy = {name: np.clip(q + rng.normal(size=2000) * 0.4, 0, 1).round(4) for name in ("p_true", "minimum")}
    table = pa.table({**noisy, "correct": (rng.random(2000) < q).astype(int)})
    pa_csv.write_csv(table, tmp_path / "t.csv")
    columns = ["--columns", "confidences=p_true,minimum"]
    args = ["--table", str(tmp_path / "t.csv"), *columns]
    assert main(["compare", *args, *QUICK, "--methods", "platt,stacking", "--save", str(tmp_path / "fitted")]) == 0
    assert load(tmp_path / "fitted").name == "stacking"
    out = ["--method", str(tmp_path / "fitted"), "--out", str(tmp_path / "new.npz"), "--budget", "500"]
    assert main(["apply", *args, *out]) == 0
    want = load(tmp_path / "fitted")(confidences=np.stack(list(noisy.values()), axis=1))
    new = np.load(tmp_path / "new.npz")
    np.testing.assert_array_equal(new["calibrated_confidence"], want)
    np.testing.assert_array_equal(new["calibrated_samples"], allocate(want, 500))


@pytest.mark.slow
def test_a_model_and_text(capsys, tmp_path, monkeypatch):
    """All rows, from statistics and from arrays, are of the same tokens; those that must agree, agree."""
    on_one_device(monkeypatch)
    monkeypatch.setattr(optimize, "STEPS", 100)
    quick = {"epochs": 2, "loss": "joint", "refit_temperature": False, "batch_size": 6}
    monkeypatch.setitem(RECIPES, "default", RECIPES["default"] | quick)
    write_model(tmp_path / "model")
    write_text(tmp_path / "data.jsonl", rows=60, words=16)
    text = ["--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--seq-len", "13", "--full-sequences"]
    methods = ["ats", "ensemble_temperature", "feature_clipping"]
    out = tmp_path / "out"
    text += ["--max-tokens", "240", "--fit-fraction", "0.5"]
    code, document, error = compare(capsys, *text, "--methods", *methods, "--out", out)
    assert code == 0, error
    held_out = document["held_out"]
    rows = held_out["methods"]
    assert not held_out["failed"] | held_out["left_out"]
    assert set(rows) == {"uncalibrated", "temperature", *methods}
    assert held_out["tokens"] == 240  # 20 sequences of 12 predictions
    assert "240 tokens to fit on, 240 held out, of 360 and 360 (--max-tokens)" in error
    assert held_out["clusters"] == "rows of the text"
    for name in ("temperature", "ats", "ensemble_temperature"):
        assert (rows[name]["accuracy"], rows[name]["changed"]) == (rows["uncalibrated"]["accuracy"], 0)
        assert rows[name]["nll"] < rows["uncalibrated"]["nll"] or name == "ats"
    assert {entry.name for entry in out.iterdir()} == {
        *("run.json", "run.yaml", "fit", "metrics.json", "reliability.png", "report.html")
    }


def test_options_of_text_are_refused_with_a_table(files, capsys):
    code, _, error = compare(capsys, "--table", files / "binary.csv", "--split", "test", "--max-rows", "5")
    assert code == 2
    assert "--split, --max-rows: not read with --table" in error


def test_apply_resamples_groups_and_reads_the_confidence_that_was_compared(tmp_path, capsys):
    """Rows that stand 16 times in a group: the interval is that of the rows once, and not a quarter as wide."""
    rng = np.random.default_rng(0)
    confidence, group = rng.uniform(0.5, 1.0, 300).repeat(16), np.arange(300).repeat(16)
    correct = (rng.random(300) < 0.4).repeat(16)
    columns = {"confidence": confidence, "correct": correct, "logit_0": 8 * confidence, "logit_1": 0 * confidence}
    pa_csv.write_csv(pa.table(columns), tmp_path / "rows.csv")
    pa_csv.write_csv(pa.table(columns | {"group": group}), tmp_path / "groups.csv")
    state = METHODS["histogram"].fit(read_table(tmp_path / "rows.csv").predictions)
    save(tmp_path / "fitted", Recalibrator("histogram", state))
    widths = []
    for name in ("rows", "groups"):
        command = ["apply", "--table", tmp_path / f"{name}.csv", "--method", tmp_path / "fitted", "--json"]
        assert main([*map(str, command), "--out", str(tmp_path / f"{name}.npz")]) == 0
        figures = json.loads(capsys.readouterr().out)["figures"]["uncalibrated"]
        np.testing.assert_allclose(figures["confidence"], confidence.mean(), rtol=1e-6)
        widths.append(figures["ece_high"] - figures["ece_low"])
    assert widths[1] > 2 * widths[0]


@pytest.mark.parametrize(
    ("given", "out"),
    [(".csv", ".jsonl"), (".jsonl", ".parquet"), (".parquet", ".npz"), (".npz", ".csv"), (".csv", ".tsv")],
)
def test_apply_keeps_the_columns_of_the_table(tmp_path, given, out):
    """In every format; the new columns are numbers that the methods gave, and a second application is refused."""
    groups = ("é", ",", "a\nb")
    rows = [{"id": f"0{n}", "confidence": n / 16, "correct": n % 2, "group": groups[n % 3]} for n in range(16)]
    write_rows(tmp_path / f"in{given}", lambda: iter(rows))
    data = Predictions(confidence=np.arange(16) / 16, correct=np.arange(16) % 2)
    save(tmp_path / "fitted", Recalibrator("platt", METHODS["platt"].fit(data)))
    files = ["--table", str(tmp_path / f"in{given}"), "--method", str(tmp_path / "fitted")]
    assert main(["apply", *files, "--out", str(tmp_path / f"out{out}"), "--json"]) == 0
    for number, row in enumerate(table_rows(tmp_path / f"out{out}")):
        assert {name: str(row[name]) for name in rows[0]} == {name: str(x) for name, x in rows[number].items()}
        assert list(row) == [*rows[0], "calibrated_confidence"]
    again = read_table(tmp_path / f"out{out}", columns={"confidence": "calibrated_confidence"})
    wanted = load(tmp_path / "fitted")(confidence=np.arange(16) / 16)
    np.testing.assert_array_equal(again.predictions.confidence, wanted)  # in float64, and so in float32
    assert again.groups.max() == 2
    files[1] = str(tmp_path / f"out{out}")
    assert main(["apply", *files, "--out", str(tmp_path / "again.jsonl")]) == 2


def test_predictions_that_do_not_fit_each_other():
    logits = np.random.default_rng(0).normal(size=(20, 3))
    good, confidence = Predictions(logits=logits, labels=np.arange(20) % 3), Predictions(confidence=[0.5], correct=[1])
    for data, groups, message in (
        (good._replace(labels=np.arange(20) % 4), None, "labels: row 3 holds 3"),
        (confidence, None, "this method needs logits"),
        (good, np.zeros(20), "held out: expected at least two groups, got one"),
        (good, np.arange(7), r"groups: expected one label for each of 20 .* got \(7,\)"),
    ):
        with pytest.raises(UserError, match=message):
            comparison_of(good, data, ["temperature"], groups=groups)
    both = good._replace(confidence=np.full(20, 0.5), correct=np.arange(20) % 2)
    assert "confidence_temperature" in comparison_of(both._replace(logits=None, labels=None), both, ["platt"]).states
