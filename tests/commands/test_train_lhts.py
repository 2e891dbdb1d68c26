"""How text and answers are judged, and the command from files to tables."""

import json

import numpy as np
import pytest
import scipy.special
from tiny import WORDS, silent, write_model, write_text

from calibjax.cli import main
from calibjax.data import load_sequences, read_source, split_sequences
from calibjax.eval import text
from calibjax.eval.text import CHOICES, distinct_n, evaluate_analogies, load_analogies, repetition, self_bleu
from calibjax.models import load_model
from calibjax.models.generate import log_probs


def write_analogies(file):
    """Two categories; the fourth word is the third's successor, or its successor's."""
    rows = []
    for i in range(30):
        step = 1 + i % 2
        numbers = (i % 40, (i + step) % 40, (3 * i + 5) % 40, (3 * i + 5 + step) % 40)
        rows.append({"category": f"step {step}"} | dict(zip("abcd", (WORDS[n] for n in numbers), strict=True)))
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_n_grams_are_scikit_learns(n):
    from sklearn.feature_extraction.text import CountVectorizer

    rng = np.random.default_rng(0)
    texts = [[f"w{i}" for i in rng.integers(0, 5, length)] for length in (1, 7, 20, 12)]

    def counts(documents):
        return CountVectorizer(ngram_range=(n, n), token_pattern=r"\S+").fit_transform(documents).toarray()

    table = counts([" ".join(text) for text in texts])
    np.testing.assert_allclose(distinct_n(texts, n), table.shape[1] / table.sum())
    each = [counts([" ".join(text)])[0] for text in texts if len(text) >= n]
    np.testing.assert_allclose(repetition(texts, n), np.mean([1 - len(c) / c.sum() for c in each]))
    assert np.isnan(distinct_n([["a"]], n)) == (n > 1)


def test_self_bleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    assert self_bleu(["a b c d e"] * 3) == pytest.approx(100.0)
    texts = ["the cat sat on the mat", "the cat sat on the rug", "one two three four five six"]
    others = [sacrebleu.sentence_bleu(t, [o for o in texts if o != t]).score for t in texts]
    assert self_bleu(texts) == pytest.approx(np.mean(others))
    assert others[2] < 5 < others[0]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analogies")
    lm = load_model(write_model(folder / "model"))
    return lm, load_analogies(str(write_analogies(folder / "analogies.jsonl")), lm, count=20, seed=1)


def test_questions_are_whole(questions):
    lm, analogies = questions
    assert len(analogies.right) == 20
    assert set(analogies.right) == set(range(CHOICES))
    for question, (right, category) in enumerate(zip(analogies.right, analogies.categories, strict=True)):
        part = analogies.choices[CHOICES * question : CHOICES * (question + 1)]
        choices = [lm.tokenizer.decode(tokens) for _, tokens in part]
        words = [w for w in lm.tokenizer.decode(part[0].context).split() if w in WORDS]
        assert choices[right] == WORDS[(int(words[2][1:]) + int(category[-1])) % 40]
        assert len({*words, *choices}) == len(words) + CHOICES


def test_choices_are_scored_at_every_temperature(questions):
    """By the dense formula; temperature 0 is the limit."""
    lm, analogies = questions
    results = evaluate_analogies(lm, analogies, (1.0, 0.5, 0.01, 0.0), context=silent())
    context, tokens = (np.array(part) for part in zip(*analogies.choices, strict=True))
    logits = np.asarray(lm.logits(context), np.float64)[:, -1]
    chosen = logits[np.arange(len(tokens)), tokens[:, 0]].reshape(-1, CHOICES)
    for temperature in (1.0, 0.5, 0.01):
        p = scipy.special.softmax(chosen / temperature, axis=1)[np.arange(20), analogies.right]
        np.testing.assert_allclose(results[f"{temperature:g}"]["accuracy"], p.mean(), atol=1e-3)
    assert results["0"]["accuracy"] == (chosen.argmax(axis=1) == analogies.right).mean()
    assert results["0"]["questions"] == 20
    tied = np.log([[0.1, 0.2, 0.3, 0.2], [0.4, 0.4, 0.1, 0.1]])
    np.testing.assert_allclose(text.choice_probability(tied, np.array([2, 0]), 0.0), [1.0, 0.5])


@pytest.mark.slow
def test_command(tmp_path, capsys):
    """From files to tables; the student's text is likelier than the model's, under the model."""
    source, data = write_model(tmp_path / "model"), write_text(tmp_path / "data.jsonl", rows=120, words=16)
    out = tmp_path / "out"
    line = "--seq-len 13 --batch-size 16 --learning-rate 0.01 --epochs 8 --temperatures 0.4 --sampled-fraction 1"
    options = f"{line} --quiet --texts 12 --text-prompt-tokens 2 --myopic 1 0".split()
    options += ["--analogies", str(write_analogies(tmp_path / "analogies.jsonl")), "--mesh", "data=8"]
    long = ["--no-full-sequences", "--no-packing", "--text-prompt-tokens", "100"]  # longer than some texts
    given = ["train", "lhts", "--model", str(source), "--data", str(data), "--out", str(out)]
    for bad, message in ((long, "--text-prompt-tokens: expected at most "), (long[1:2], "--no-packing: full")):
        assert main([*given, *bad]) == 2
        assert message in capsys.readouterr().err
    assert main([*given, *options]) == 0
    printed = capsys.readouterr().out
    document = json.loads((out / "metrics.json").read_text())
    names = ["pretrained", "partition", "lhts-T0.4"]
    assert list(document["texts"]) == list(document["analogies"]) == list(document["held_out"]["methods"]) == names
    page = (out / "report.html").read_text()
    for name in names:
        for cell in document["texts"][name].values():
            shown = f"{cell['log_prob']:.3f} ± {cell['log_prob_error']:.3f}"
            assert shown in printed
            assert f">{shown}<" in page
    student = load_model(out / "models" / "lhts-T0.4")
    sequences, _ = load_sequences(read_source(str(data)), student.tokenizer, seq_len=13, layout="full")
    held_out = split_sequences(sequences, 0.9)[1]
    nll = -log_probs(student, held_out).sum(dtype=np.float64) / held_out.where.sum()
    np.testing.assert_allclose(document["held_out"]["methods"]["lhts-T0.4"]["nll"], nll, rtol=1e-5)
    likely = {name: document["texts"][name]["1"]["log_prob"] for name in names}
    assert likely["lhts-T0.4"] > likely["pretrained"] + 0.1
    assert student.tokenizer("w1 w2")["input_ids"]
    assert (out / "diversity.png").stat().st_size > 1000
