"""The page of a report: the heat map's data against the dense formula, hostile text, several runs, and a browser."""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
from io import StringIO

import numpy as np
import pytest
from assets import model_path
from tiny import dense_log_probs, make_lm, make_sequences, ragged, write_model, write_text

from calibjax.cli import main
from calibjax.commands.eval_layers import EvalLayersOptions, _read
from calibjax.eval import tokens
from calibjax.eval.figures_json import subject_rows
from calibjax.eval.report import page
from calibjax.eval.tokens import _whole_words, text_after, token_sample
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel, load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model")


def test_sample_equals_the_dense_formula(model, monkeypatch):
    monkeypatch.setattr(tokens, "_SAMPLE_TOKENS", 23)
    with_tokenizer = load_model(model)
    made = make_lm(vocab_size=43)
    lm = LanguageModel.from_params(made.config, made.params, with_tokenizer.tokenizer)
    sequences = ragged(make_sequences(6, vocab_size=43))
    after = dataclasses.replace(FittedHead.constant(lm), params={"log_scale": np.float32(0.3)}, log_factor=-0.7)
    sample = token_sample(lm, sequences, FittedHead.constant(lm), after, batch_size=4)
    entries = [entry for sequence in sample["sequences"] for entry in sequence if entry["scored"]]
    assert 15 <= len(entries) <= 23
    long = np.flatnonzero(sequences.where.sum(axis=1) >= 5)  # 23 tokens of 5 samples
    assert len(long) == len(sample["sequences"]) == 5
    u = 0.3 - 0.7
    places = [
        (s, t)
        for s, sequence in zip(long, sample["sequences"], strict=True)
        for t in np.flatnonzero(sequences.where[s])[: sum(token["scored"] for token in sequence)]
    ]
    for side, log_scale in enumerate((0.0, u)):
        log_p = dense_log_probs(lm, sequences, log_scale)
        for entry, (s, t) in zip(entries, places, strict=True):
            row, target = log_p[s, t], sequences.targets[s, t]
            expected = (np.exp(row.max()), np.exp(row[target]), -(np.exp(row) * row).sum())
            got = tuple(entry[name][side] for name in ("confidence", "probability", "entropy"))
            np.testing.assert_allclose(got, expected, rtol=1e-3)
            best = np.argsort(-row)[:5]
            assert [text for text, *_ in entry["top"]] == [
                text_after(lm.tokenizer, sequences.tokens[s, t], i) for i in best
            ]
            np.testing.assert_allclose([p[1 + side] for p in entry["top"]], np.exp(row[best]), rtol=1e-3)
            assert entry["right"] == (best[0] == target)
            np.testing.assert_allclose(entry["temperature"], np.exp(-u), rtol=1e-3)


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["ver", " the", " laz", "y", " do"], [" the", " laz", "y"]),
        (["The", " laz", "y", " d", "og"], ["The", " laz", "y"]),
        (["ab", "cd"], ["ab", "cd"]),  # no token begins a word
    ],
)
def test_samples_are_cut_between_words(texts, whole):
    assert [token["text"] for token in _whole_words([{"text": text, "scored": True} for text in texts])] == whole


def test_text_keeps_its_spaces():
    class Pieces:
        """As sentencepiece decodes: the space before the first token of a text is dropped."""

        def decode(self, ids, **options):
            assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            return "".join([" a", "b", "\ufffd"][i] for i in ids).removeprefix(" ")

    assert [text_after(Pieces(), 1, i) for i in range(3)] == [" a", "b", "\ufffd"]


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """A run over text, twice, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    data = ("--data", str(write_text(folder / "text.jsonl")), "--text-column", "text", "--seq-len", "13")
    options = f"--model {model} --direction confident --strengths -0.5 0.5 --settled 0.875 --quiet".split()
    said = StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["eval", "layers", *options, *data, "--out", str(folder / "text")]) == 0
    shutil.copytree(folder / "text", folder / "again")
    return folder, said.getvalue()


def test_layers_command(runs):
    folder, printed = runs
    out = folder / "text"
    assert {entry.name for entry in out.iterdir()} == {
        *("run.json", "run.yaml", "metrics.json", "report.html", "reliability.png", "layers.png", "sweep.png")
    }
    document = json.loads((out / "metrics.json").read_text())
    json.dumps(document, allow_nan=False)
    assert [row["layer"] for row in document["layers"]["curves"]] == [0, 1]
    fit = {(row["layer"], row["strength"]): row["fit"] for row in document["sweep"]}
    assert list(fit) == [(0, 0.0), (1, -0.5), (1, 0.5)]
    unedited, methods = document["sweep"][0]["held_out"], document["held_out"]["methods"]
    # float64, summed in another order
    assert unedited["ece"]["value"] == pytest.approx(methods["uncalibrated"]["ece"]["value"], rel=1e-14)
    chosen = tuple(document["direction"]["chosen"].values())
    assert fit[chosen]["ece"] <= fit[0, 0.0]["ece"]
    assert ("edited" in methods) == (chosen[0] > 0)
    assert "The decision settles at layer" in printed
    assert "87.5% of the predictions" in " ".join(printed.split())
    assert printed.strip().splitlines()[-1].startswith(f"results in {out}: report.html")
    assert (out / "report.html").read_text().count("<img ") == 7  # panels


def test_halves_of_questions_are_drawn_and_keep_their_subjects(tmp_path):
    """The subject of each question is its number of words."""
    rows = [
        {"question": "one" + i * " one", "choices": ["two", "dog"], "answer": i % 2, "subject": str(i)}
        for i in range(12)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = EvalLayersOptions(model=str(model_path("craftgpt-5M")), data=str(tmp_path / "questions.jsonl"))
    lm = load_model(options.model)
    halves, _, got = _read(options, lm, lambda line: None)
    with pytest.raises(ValueError, match="--seq-len, --packing: not read with multiple choice"):
        _read(dataclasses.replace(options, text=type(options.text)(seq_len=9, packing=False)), lm, print)
    lengths = np.concatenate([half.segment_ids.sum(axis=1) for half in halves])
    words = [int(subject) for subject in got["subjects"]]
    np.testing.assert_array_equal(words, lengths - lengths.min())
    assert len(halves[0].tokens) == 6
    assert set(words[:6]) != set(range(6))


def test_subjects():
    """Wilson's interval is where (p − accuracy)² = z² p (1 − p) / n."""
    subjects = ("law", "art", "law", "law", "art", "law")
    confidence, correct = np.array([0.9, 0.2, 0.8, 0.7, 0.4, 0.6]), np.array([1, 1, 0, 0, 1, 1], bool)
    rows = subject_rows(subjects, confidence, correct)
    assert [(row["subject"], row["questions"]) for row in rows] == [("law", 4), ("art", 2)]
    np.testing.assert_allclose([row["gap"] for row in rows], [0.75 - 0.5, 0.3 - 1.0])
    for row in rows:
        n, accuracy = row["questions"], row["accuracy"]
        for p in (accuracy["low"], accuracy["high"]):
            np.testing.assert_allclose((p - accuracy["value"]) ** 2, 1.959963984540054**2 * p * (1 - p) / n, atol=1e-12)
    assert subject_rows(("", ""), confidence[:2], correct[:2]) == []
    (partly,) = subject_rows(("law", "law"), confidence[:2], np.array([0.2, 0.6], np.float32))
    assert partly["accuracy"]["value"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sweep-layers", "2"), "--sweep-layers: expected blocks from 1 to 1"),
        (("--neuron-layers", "99"), "--neuron-layers: expected 1 to 1"),
        (("--data", "questions.jsonl"), "does not write A, B after 'Answer:' as one token each"),
    ],
)
def test_layers_refuses(runs, capsys, model, options, message, monkeypatch):
    monkeypatch.chdir(runs[0])
    rows = [{"question": f"w{i % 7}", "choices": [f"w{i % 3}", "w1"], "answer": i % 2} for i in range(40)]
    (runs[0] / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = () if "--data" in options else ("--data", "text.jsonl", "--text-column", "text", "--seq-len", "13")
    assert main(["eval", "layers", "--model", str(model), *text, *options]) == 2
    assert message in capsys.readouterr().err


def test_runs_of_other_figures_share_the_columns(runs):
    """A run without NLL beside one with it, in both orders: every cell is under its own title."""
    whole = json.loads((runs[0] / "text" / "metrics.json").read_text())
    without = copy.deepcopy(whole)
    for row in without["held_out"]["methods"].values():
        del row["nll"]
    for documents in ((whole, without), (without, whole)):
        table = page.comparison_of([page.Run(f"run {number}", document) for number, document in enumerate(documents)])
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        for row in table["rows"]:
            document = documents[int(row[0][-1])]
            brier = next(iter(document["held_out"]["methods"].values()))["brier"]
            if row[3] == "uncalibrated":
                assert float(row[table["columns"].index("Brier")]) == pytest.approx(brier, abs=1e-4)
    without["held_out"]["methods"] = {"uncalibrated": without["held_out"]["methods"]["uncalibrated"]}
    assert len(page.comparison_of([page.Run("run", without)])["drawing"].panels) == 1


def test_report_of_several_runs(runs, capsys, tmp_path, undrawn):
    directories = [str(runs[0] / name) for name in ("text", "again")]
    assert main(["report", *directories, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"report in {tmp_path}: report.html")
    text = (tmp_path / "report.html").read_text()
    names = re.findall(r'\sid="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert "All runs, held out" in text
    assert text.count("<img ") == 2 * 7 + 2  # and both overlaid
    for name in ("layers", "sweep", "reliability"):
        for number in (1, 2):
            assert (tmp_path / f"{number}-{name}.png").read_bytes().startswith(b"\x89PNG")
            assert "<svg" in (tmp_path / f"{number}-{name}.svg").read_text()
