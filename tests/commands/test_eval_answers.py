"""`eval tasks --further-confidences`: samples, what the model says of its answers, and the table of answers."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.special
import scipy.stats

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")

from tiny import WORDS, write_model, write_questions

from calibjax.cli import main
from calibjax.commands import eval_tasks
from calibjax.commands.eval_tasks import EvalTasksOptions
from calibjax.eval.answers.clusters import hidden_clustering
from calibjax.eval.answers.judges import plain_text
from calibjax.eval.answers.self_evaluation import TWO_WAY, read_number
from calibjax.eval.tasks import written
from calibjax.models import load_model
from calibjax.models.generate import Sampling, generate
from calibjax.train.probes import load_probe

TOKENS = ("token_entropy", "probability_margin", "deepconf_tail", "semantic_density")
METHODS = ("consistency", "discrete_semantic_entropy", "semantic_entropy", "p_true", "verbalised", *TOKENS)
K, COUNT = 4, 20


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model, and questions whose right answers it may give."""
    folder = tmp_path_factory.mktemp("material")
    lm = load_model(write_model(folder / "model"))
    rng = np.random.default_rng(0)
    contexts = [f"Question: {' '.join(rng.choice(WORDS, rng.integers(1, 6)))}\nAnswer:" for _ in range(COUNT)]
    texts = generate(lm, contexts, max_new_tokens=2).texts(lm.tokenizer)
    aliases = [[text if n % 2 else "w1"] for n, text in enumerate(texts)]
    rows = [{"context": context, "answer": "w0", "aliases": a} for context, a in zip(contexts, aliases, strict=True)]
    write_questions(folder, "triviaqa/triviaqa_sm_sub", rows)
    return folder, lm


@pytest.fixture(scope="module")
def run(material):
    folder = material[0]
    options = {"assets": folder, "max_new_tokens": 2, "quiet": True, "samples": K, "sampling_temperature": 0.3}
    options |= {"batch_size": 4}  # divides the numbers of questions: all batches have one shape
    run = EvalTasksOptions(
        model=str(folder / "model"), tasks=("triviaqa",), further_confidences=METHODS, out=folder / "asked", **options
    )
    lines = []
    return run, eval_tasks.run(run, log=lines.append), lines


def table_of(run):
    lines = (run[0].out / "answers" / "triviaqa.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_table_is_what_the_samples_give(run, material):
    rows = table_of(run)
    assert len(rows) == COUNT
    files = sorted((run[0].out / "answers" / "samples").iterdir(), key=lambda x: int(x.name.split("-")[1]))
    samples = [row for file in files for row in json.loads(file.read_text())["samples"]]
    assert [len(row) for row in samples] == [K] * COUNT
    got = {name: np.array([float(row[name]) for row in rows]) for name in METHODS}
    for n, row in enumerate(rows):
        texts = [plain_text(text) for text, *_ in samples[n]]
        assert got["consistency"][n] == pytest.approx(np.mean([text == plain_text(row["answer"]) for text in texts]))
        votes = {text: [tail for own, *_, tail in samples[n] if plain_text(own) == text] for text in texts}
        own = sum(votes.get(plain_text(row["answer"]), []))
        assert got["deepconf_tail"][n] == pytest.approx(own / sum(map(sum, votes.values())), abs=1e-5)
        p, p_k = float(row["confidence"]), {text: np.exp(mean) for text, mean, *_ in samples[n]}
        p_k.pop(row["answer"], None)
        same = sum(value for text, value in p_k.items() if plain_text(text) == plain_text(row["answer"]))
        assert got["semantic_density"][n] == pytest.approx((p + same) / (p + sum(p_k.values())), abs=1e-5)
    assert len(np.unique(got["consistency"])) > 2
    question, lm = TWO_WAY["p_true"], material[1]
    prompt = question.prompt.format(question=rows[0]["question"], answer=rows[0]["answer"])
    context = lm.tokenizer.encode(prompt)
    logits = np.asarray(lm.logits(np.array([context])), np.float64)[0, -1]
    yes, no = (logits[lm.tokenizer.encode(word)[0]] for word in (question.yes, question.no))
    assert got["p_true"][0] == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-5)
    tokens = generate(lm, [rows[0]["question"]], max_new_tokens=2).tokens[0].tolist()
    context = lm.tokenizer.encode(rows[0]["question"])
    logits = np.asarray(lm.logits(np.array([[*context, *tokens]])), np.float64)[0, len(context) - 1 : -1]
    p = np.sort(scipy.special.softmax(logits, axis=1))
    assert got["probability_margin"][0] == pytest.approx((p[:, -1] - p[:, -2]).mean(), abs=1e-5)
    assert got["token_entropy"][0] == pytest.approx(np.exp(-scipy.stats.entropy(p, axis=1).mean()), abs=1e-5)
    assert any("replies could not be read; their confidence is .5" in line for line in run[2])
    methods = run[1]["held_out"]["methods"]
    assert set(methods) == {"uncalibrated", *METHODS}
    correct = np.array([float(row["correct"]) for row in rows])
    assert methods["consistency"]["brier"] == pytest.approx(((got["consistency"] - correct) ** 2).mean(), abs=1e-6)


def test_a_killed_run_resumes_with_its_samples(run, undrawn, monkeypatch):
    """Of a run that was killed after the samples: none is drawn again, and the table is the same."""
    before = (run[0].out / "answers" / "triviaqa.jsonl").read_bytes()
    for file in (run[0].out / "answers").glob("*.*"):
        file.unlink()
    real = written.continue_contexts

    def greedy(lm, contexts, sampling=Sampling(), **options):
        assert not sampling.temperature
        return real(lm, contexts, **options)

    monkeypatch.setattr(written, "continue_contexts", greedy)
    assert eval_tasks.run(run[0], log=lambda _: None) == run[1]
    assert (run[0].out / "answers" / "triviaqa.jsonl").read_bytes() == before


PROBES = ("probe_correct_question", "probe_agreement_layers", "probe_capability_mean")


@pytest.mark.slow
def test_probes(run, material, undrawn, monkeypatch):
    """Fitted on questions that are not asked, kept, and read again by a run that resumes; a linear function each."""
    folder, lm = material
    probed, lines = dataclasses.replace(run[0], further_confidences=("consistency", *PROBES), out=folder / "probed"), []
    document = eval_tasks.run(probed, log=lines.append)
    assert f"task triviaqa: fitted on 4 calibration questions: {', '.join(PROBES)}" in lines
    rows = table_of((probed,))
    assert len(rows) == COUNT - 4
    assert set(document["held_out"]["methods"]) == {"uncalibrated", "consistency", *PROBES}
    params = load_probe(probed.out / "probes" / "triviaqa" / PROBES[0], lm.fingerprint)
    context = lm.tokenizer.encode(rows[0]["question"].removesuffix("?") + "?" * rows[0]["question"].endswith("?"))
    hidden = np.asarray(lm.hidden_states(np.array([context])), np.float64)[0, -1]
    want = 1 / (1 + np.exp(-(hidden @ params["weights"] + params["bias"])))
    assert float(rows[0][PROBES[0]]) == pytest.approx(want, abs=1e-5)
    before = (probed.out / "answers" / "triviaqa.jsonl").read_bytes()
    for file in (probed.out / "answers").glob("*.*"):
        file.unlink()
    monkeypatch.setattr(eval_tasks, "fit_probe", None)
    assert eval_tasks.run(probed, log=lambda _: None) == document
    assert (probed.out / "answers" / "triviaqa.jsonl").read_bytes() == before


def test_samples_belong_to_their_question(run, undrawn, tmp_path):
    """The same samples where other questions are asked beside it, also in a run that resumes with other batches."""
    few = dataclasses.replace(run[0], limit=12, out=tmp_path / "few", further_confidences=("consistency",))
    eval_tasks.run(few, log=lambda _: None)
    all_rows = {row["question"]: row for row in table_of(run)}
    rows = table_of((few,))
    assert len(rows) == 12
    assert [row["consistency"] for row in rows] == [all_rows[row["question"]]["consistency"] for row in rows]
    for file in (few.out / "answers").glob("*.*"):
        file.unlink()
    eval_tasks.run(dataclasses.replace(few, batch_size=8), log=lambda _: None)
    assert [row["consistency"] for row in table_of((few,))] == [row["consistency"] for row in rows]


def test_the_table_can_be_decided_and_compared(run):
    file = str(run[0].out / "answers" / "triviaqa.jsonl")
    assert main(["decide", "--table", file, "--columns", "confidence=consistency", "--risk", "0.3"]) == 0
    assert main(["compare", "--table", file, "--columns", "confidence=p_true", "--methods", "platt", "--quiet"]) == 0


def test_hidden_states_as_meanings(material):
    lm = load_model(material[0] / "model")
    clusters = hidden_clustering(lm, 0.999)("q", ["w1 w2", "w1 w2", "w7", "w1 w2"])
    assert clusters[:2] + clusters[3:] == [0, 0, 0]
    assert clusters[2] == 1


def test_replies_are_read_strictly():
    read = {"85%": 0.85, "100": 1.0, "0": 0.0, " 42 .": 0.42, "0.25\nmore": 0.25, ".5": 0.5, "1": 0.01, "1.0": 1.0}
    assert {reply: read_number(reply) for reply in read} == read
    unread = ("", "101", "-5", "80-90", "I am 80% sure", "1.5", "nan", "\uff18\uff15")
    assert [read_number(reply) for reply in unread] == [None] * len(unread)
