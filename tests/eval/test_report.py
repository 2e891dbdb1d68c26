"""The page of a report: the heat map's data against the dense formula, hostile text, several runs, and a browser."""

import contextlib
import dataclasses
import html
import json
import re
import shlex
import shutil
from io import StringIO

import numpy as np
import pytest
from assets import data_path, model_path
from markupsafe import Markup
from report_documents import document
from tiny import dense_log_probs, make_lm, make_sequences, ragged, write_model, write_text

from calibjax.cli import main
from calibjax.eval.figures_json import subject_rows
from calibjax.eval.report import Run, page
from calibjax.eval.report.notes import usage
from calibjax.eval.report.schema import read_metrics
from calibjax.eval.token_sample import _whole_words, text_after, token_sample
from calibjax.eval.tokens import identity_head
from calibjax.models import LanguageModel, load_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</script><script>alert(1)</script>\"'<b>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model")


def test_sample_equals_the_dense_formula(model):
    with_tokenizer = load_model(model)
    made = make_lm(vocab_size=43)
    lm = LanguageModel.from_params(made.config, made.params, with_tokenizer.tokenizer)
    sequences = ragged(make_sequences(6, vocab_size=43))
    after = dataclasses.replace(identity_head(lm), params={"log_scale": np.float32(0.3)}, log_factor=-0.7)
    sample = token_sample(lm, sequences, identity_head(lm), after, tokens=23, alternatives=4, batch_size=4)
    entries = [entry for sequence in sample["windows"] for entry in sequence if entry["scored"]]
    assert 15 <= len(entries) <= 23
    long = np.flatnonzero(sequences.where.sum(axis=1) >= 5)  # 23 tokens of 5 samples
    assert len(long) == len(sample["windows"]) == 5
    u = 0.3 - 0.7
    places = [
        (s, t)
        for s, window in zip(long, sample["windows"], strict=True)
        for t in np.flatnonzero(sequences.where[s])[: sum(token["scored"] for token in window)]
    ]
    for side, log_scale in enumerate((0.0, u)):
        log_p = dense_log_probs(lm, sequences, log_scale)
        for entry, (s, t) in zip(entries, places, strict=True):
            row, target = log_p[s, t], sequences.targets[s, t]
            expected = (np.exp(row.max()), np.exp(row[target]), -(np.exp(row) * row).sum())
            got = tuple(entry[name][side] for name in ("confidence", "probability", "entropy"))
            np.testing.assert_allclose(got, expected, rtol=1e-3)
            best = np.argsort(-row)[:4]
            assert [text for text, *_ in entry["top"]] == [
                text_after(lm.tokenizer, sequences.tokens[s, t], i) for i in best
            ]
            np.testing.assert_allclose([p[1 + side] for p in entry["top"]], np.exp(row[best]), rtol=1e-3)
            assert entry["right"] == (best[0] == target)
            np.testing.assert_allclose(entry["temperature"], np.exp(-u), rtol=1e-3)


def test_samples_are_cut_between_words():
    def words(*texts):
        return [text["text"] for text in _whole_words([{"text": text, "scored": True} for text in texts])]

    assert words("ver", " the", " laz", "y", " do") == [" the", " laz", "y"]
    assert words("The", " laz", "y", " d", "og") == ["The", " laz", "y"]
    assert words("ab", "cd") == ["ab", "cd"], "no token begins a word"


def test_text_keeps_its_spaces():
    class Pieces:
        """As sentencepiece decodes: the space before the first token of a text is dropped."""

        def decode(self, ids, **options):
            assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            return "".join([" a", "b", "\ufffd"][i] for i in ids).removeprefix(" ")

    assert [text_after(Pieces(), 1, i) for i in range(3)] == [" a", "b", "\ufffd"]


def hostile_sample():
    def token(text, **changes):
        pair = [0.999, 0.1]
        entry = {"text": text, "scored": True, "right": False, "temperature": 2.0, "top": [[text, 0.9, 0.1]] * 5}
        return {**entry, "confidence": pair, "probability": pair, "entropy": pair, **changes}

    plain = [token(f" word{number}", right=number % 2 == 0) for number in range(300)]
    return {"windows": [[{"text": HOSTILE, "scored": False}, token(HOSTILE), token("\n"), token(""), *plain]]}


@pytest.mark.usefixtures("undrawn")
def test_hostile_text_is_text():
    made = page.page([Run("", {"held_out": document()["held_out"]}, hostile_sample())])
    section = made[made.index('<section class="heatmap"') :].partition("</section>")[0]
    assert section.count("<script") == section.count("</script") == 1
    assert html.unescape(section).count(HOSTILE) == 4, "twice in each text"
    data = json.loads(section.split('json">')[1].split("</script>")[0])
    assert data[0] is None
    assert data[1]["text"] == HOSTILE
    steps = [int(k) for k in re.findall(r'class="t k(\d)', section)]
    assert steps == [9] * 303 + [1] * 303
    assert section.count('tabindex="0"') == 2, "one stop for Tab in each text"


# --- the commands ---


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """A run over text, twice, and what it printed; a file of questions."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.jsonl")
    rows = [
        {"question": f"w{i % 7} w{i % 5}", "choices": [f"w{i % 3}", "w1"], "answer": i % 2, "subject": "s"}
        for i in range(40)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ("--model", str(model), "--direction", "confident", "--strengths", "-0.5", "0.5", "--quiet")
    said = StringIO()
    with contextlib.redirect_stdout(said):
        data = ("--data", str(text), "--text-column", "text", "--seq-len", "13")
        assert main(["eval", "layers", *common, *data, "--out", str(folder / "text")]) == 0
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
    assert [(row["layer"], row["strength"]) for row in document["sweep"]] == [(0, 0.0), (1, -0.5), (1, 0.5)]
    unedited, held_out = document["sweep"][0]["held_out"], document["held_out"]["methods"]["uncalibrated"]
    assert unedited["ece"]["value"] == pytest.approx(
        held_out["ece"]["value"], rel=1e-14
    )  # float64, summed in another order
    chosen = tuple(document["direction"]["chosen"].values())
    fit = {(row["layer"], row["strength"]): row["fit"] for row in document["sweep"]}
    assert fit[chosen]["ece"] <= fit[0, 0.0]["ece"]
    assert ("edited" in document["held_out"]["methods"]) == (chosen[0] > 0)
    assert "The decision settles at layer" in printed
    assert printed.strip().splitlines()[-1].startswith(f"results in {out}: report.html")
    page = (out / "report.html").read_text()
    assert page.count('role="img"') == 7  # panels


@pytest.mark.slow
def test_layers_of_questions():
    """MMLU, letters only, on a model whose tokenizer has neither capitals nor a colon."""
    model, data = model_path("craftgpt-5M"), data_path("mmlu/mmlu.jsonl.gz")
    options = ("--rows", "400", "--examples", "24", "--strengths", "0.5", "--sweep-layers", "6", "--quiet", "--json")
    said, announced = StringIO(), StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(announced):
        code = main(
            ["eval", "layers", "--model", str(model), "--data", str(data), "--direction", "confident", *options]
        )
    assert code == 0, announced.getvalue()
    document = json.loads(said.getvalue())
    assert document["layers"]["readout"] == "letters only"
    assert (document["layers"]["tokens"], document["held_out"]["tokens"]) == (24, 12)
    assert all(row["entropy"]["value"] <= np.log(4) + 1e-6 for row in document["layers"]["curves"])
    assert all(row["confidence"]["value"] >= 0.25 for row in document["layers"]["curves"])
    assert "answers a, b, c, d after 'Answer'" in announced.getvalue()
    last, subjects = document["layers"]["curves"][-1], document["subjects"]
    counts = [row["questions"] for row in subjects]
    assert sum(counts) == 24
    assert len({row["subject"] for row in subjects}) == len(subjects) > 1
    for mean, name in (
        (lambda row: row["confidence"], "confidence"),
        (lambda row: row["accuracy"]["value"], "accuracy"),
    ):
        np.testing.assert_allclose(np.average([mean(row) for row in subjects], weights=counts), last[name]["value"])


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


def test_layers_refuses(runs, capsys, model):
    folder, _ = runs
    data = ("--model", str(model), "--data", str(folder / "text.jsonl"), "--text-column", "text", "--seq-len", "13")
    for options, message in (
        (("--sweep-layers", "2"), "--sweep-layers: expected blocks from 1 to 1"),
        (("--neuron-layers", "99"), "--neuron-layers: expected 1 to 1, the model's blocks, got 99"),
    ):
        assert main(["eval", "layers", *data, *options]) == 2
        assert message in capsys.readouterr().err
    questions = ("--model", str(model), "--data", str(folder / "questions.jsonl"))
    assert main(["eval", "layers", *questions]) == 2
    assert "does not write A, B after 'Answer:' as one token each" in capsys.readouterr().err


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made, and not drawn, which takes seconds."""
    monkeypatch.setattr(page, "png", lambda figure: b"\x89PNG")
    monkeypatch.setattr(page, "svg", lambda figure, name: "<svg></svg>")
    monkeypatch.setattr(page, "inline_svg", lambda *_: Markup('<svg role="img"></svg>'))


@pytest.mark.usefixtures("undrawn")
def test_report_of_several_runs(runs, capsys, tmp_path):
    folder, _ = runs
    directories = [str(folder / name) for name in ("text", "again")]
    assert main(["report", *directories, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith(f"report in {tmp_path}: report.html")
    page = (tmp_path / "report.html").read_text()
    names = re.findall(r'\sid="([^"]*)"', page)
    assert len(names) == len(set(names))
    assert "All runs, held out" in page
    assert page.count('role="img"') == 2 * 7 + 2  # and both overlaid
    for name in ("layers", "sweep", "reliability"):
        for number in (1, 2):
            assert (tmp_path / f"{number}-{name}.png").read_bytes().startswith(b"\x89PNG")
            assert "<svg" in (tmp_path / f"{number}-{name}.svg").read_text()

    assert main(["report", *directories]) == 2
    assert "--out: expected a directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "with metrics.json; found none" in capsys.readouterr().err
    (tmp_path / "metrics.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "expected metrics of schema 1" in capsys.readouterr().err


def test_the_page_of_compare_shows_commands_that_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.3, 1, 400)
    rows = zip(confidence, rng.uniform(size=400) < confidence**3, strict=True)
    (tmp_path / "new.csv").write_text("confidence,correct\n" + "".join(f"{c:.4f},{int(r)}\n" for c, r in rows))
    out = tmp_path / "a run"
    assert main(["compare", "--table", "new.csv", "--methods", "platt", "--out", str(out), "--quiet"]) == 0
    commands = usage(read_metrics(out / "metrics.json"), out)
    assert commands.count("\n") == 1
    for line in commands.splitlines():
        assert main(shlex.split(line)[1:]) == 0
    assert (tmp_path / "calibrated.csv").read_text().count("\n") == 401
    assert "calibjax apply" in (out / "report.html").read_text()


# --- in a browser ---


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium")
@pytest.mark.usefixtures("undrawn")
def test_in_a_browser(runs, tmp_path):
    """No request leaves the page, no error is said, hostile text runs nothing, keys and pointer show a token."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    run = tmp_path / "run"
    shutil.copytree(runs[0] / "text", run)
    (run / "tokens.json").write_text(json.dumps(hostile_sample()))
    with contextlib.redirect_stdout(StringIO()):
        assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size < 3e6
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        asked, said = [], []
        for width in (1280, 390):  # a desktop, a phone
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: said.append(dialog.message))
            page.goto((run / "report.html").as_uri())
            token = page.locator(".t").first
            token.hover()
            shown = page.locator(".detail").inner_text()
            assert "99.9%" in shown
            assert "2.000" in shown
            assert "<b>" in shown
            assert page.locator(".t b, .detail b").count() == 0
            token.focus()
            for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("End", 302), ("ArrowRight", 302), ("Home", 0)):
                page.keyboard.press(key)
                assert page.evaluate("document.activeElement.dataset.i") == str(place + 1), key
            assert page.locator(".on").count() == 2, "the same token in both texts"
            widest = page.evaluate(
                "Math.max(...[...document.querySelectorAll('.t')].map("
                "(t) => (t.focus(), document.documentElement.scrollWidth)))"
            )
            assert widest <= width, "nothing but tables scrolls sideways, whichever token is shown"
        browser.close()
    assert said == []
    assert asked == [(run / "report.html").as_uri()] * 2
