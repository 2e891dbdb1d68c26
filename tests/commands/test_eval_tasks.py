"""Benchmarks over small local files against float64 by hand; the prompts against those of the harness."""

import dataclasses
import functools
import itertools
import json

import numpy as np
import pytest
from assets import data_path, model_path
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from tiny import WORDS, model_tensors, write_model, write_questions, write_tokenizer

from calibjax.cli import main
from calibjax.commands import eval_tasks as benchmarks
from calibjax.commands.eval_tasks import EvalTasksOptions
from calibjax.data.table import read_table
from calibjax.eval.answers.clusters import normalised_clusters
from calibjax.eval.answers.judges import find_judge, references, string_match
from calibjax.eval.tasks.benchmark import evaluate_tasks
from calibjax.eval.tasks.choices import right_options
from calibjax.eval.tasks.local_data import BenchmarkTask, task_manager
from calibjax.eval.tasks.options import TasksOptions
from calibjax.eval.tasks.questions import TaskQuestions, _set_aside
from calibjax.heads import FittedHead
from calibjax.models import load_model
from calibjax.models.generate import generate
from calibjax.runtime.context import RunContext
from calibjax.runtime.errors import UserError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")

import lm_eval
from lm_eval.api.samplers import ContextSampler
from lm_eval.filters import build_filter_ensemble

from calibjax.eval.tasks.harness import Chat, HarnessLM
from calibjax.eval.tasks.scoring import Continuation

TEMPERATURE = 2.5
BINS = 10
COUNT = 20  # of every task: one compilation of each metric


def trivia_prompt(lm, context):
    """As the harness writes it, and what the model can read of it before 4 tokens more."""
    return lm.tokenizer.encode(context.replace("\nAnswer:", "?\nAnswer:"))[-(32 - 4) :]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model, local files of three tasks, and what they hold."""
    folder = tmp_path_factory.mktemp("material")
    lm = load_model(write_model(folder / "model"))
    rng = np.random.default_rng(0)

    def words(low, high):
        return " ".join(rng.choice(WORDS, rng.integers(low, high)))

    arc = [
        {"query": f"Question: {words(1, 9)}", "choices": [words(1, 4) for _ in range(4)], "gold": int(rng.integers(4))}
        for _ in range(COUNT)
    ]
    truthful = [
        {"type": "t", "category": f"c{n % 2}", "question": words(2, 5)}
        | {"best_answer": "w1", "correct_answers": ["w1"], "incorrect_answers": ["w2"]}
        | {"mc1_choices": ["w1", "w2"], "mc1_label": 0}
        | {"mc2_choices": [words(1, 3) for _ in range(2 + n % 4)], "mc2_labels": [1, *[n % 2] * (1 + n % 4)]}
        for n in range(COUNT)
    ]
    contexts = [f"Question: {words(40, 41) if n == 4 else words(1, 6)}\nAnswer:" for n in range(COUNT)]
    texts = generate(lm, [trivia_prompt(lm, context) for context in contexts], max_new_tokens=4).texts(lm.tokenizer)
    trivia = [
        {"context": context, "answer": "w0 w0", "aliases": [text.upper() if n % 3 else "w1 w1 w1"]}
        for n, (context, text) in enumerate(zip(contexts, texts, strict=True))
    ]
    write_questions(folder, "llm_foundry_eval/arc_easy", arc)
    write_questions(folder, "truthfulqa/truthfulqa", truthful)
    write_questions(folder, "triviaqa/triviaqa_sm_sub", trivia)
    return folder, lm, arc, truthful, trivia


@pytest.fixture(scope="module")
def run(material):
    folder = material[0]
    options = {"assets": folder, "temperature": TEMPERATURE, "bins": BINS, "max_new_tokens": 4, "quiet": True}
    tasks = ("arc_easy,truthfulqa_mc2", "triviaqa")
    run = EvalTasksOptions(model=str(folder / "model"), tasks=tasks, out=folder / "out", batch_size=8, **options)
    return run, benchmarks.run(run, log=lambda _: None)


def test_from_python(material, run, tmp_path):
    """`evaluate_tasks` has the figures of the command, and makes its directory."""
    folder, lm, *_ = material
    options = TasksOptions(assets=folder, bins=BINS, batch_size=8)
    context = RunContext(directory=tmp_path / "some" / "new").silent()
    document = evaluate_tasks(lm, ["arc_easy"], options=options, context=context)
    mine, of_command = (x["tasks"]["arc_easy"]["methods"]["uncalibrated"] for x in (document, run[1]))
    assert mine["ece"]["value"] == pytest.approx(of_command["ece"]["value"], rel=1e-6)  # other rows share a step
    assert (tmp_path / "some/new/answers").is_dir()
    parts = task_manager(["arc_easy_local"], folder).load(["arc_easy_local"])["tasks"]
    splits = parts["arc_easy"].dataset
    splits["test"] = splits["test"].select(range(2))
    for tasks, limit in ((["arc_easy"], 2), ({"arc_easy": BenchmarkTask(parts, "")}, None)):
        fewer = dataclasses.replace(options, batch_size=4, limit=limit)
        with pytest.raises(UserError, match=r"some/new: its answers are of .*, other options or questions"):
            evaluate_tasks(lm, tasks, options=fewer, context=context)
    for name, more in (("uncalibrated", {}), ("temperature", {"fit": True}), ("correct", {})):
        with pytest.raises(UserError, match=rf"{name}: the name of"):
            evaluate_tasks(lm, ["arc_easy"], {name: FittedHead.constant(lm)}, dataclasses.replace(options, **more))


@functools.cache
def logits(lm, ids):
    tokens = np.zeros((1, 32), np.int32)  # one shape: causal, so that what comes later does not matter
    tokens[0, : len(ids)] = ids
    return np.asarray(lm.logits(tokens), np.float64)[0]


def log_probs(lm, before, after, temperature):
    """Of each token of the continuation, float64; texts or ids."""
    first, last = (lm.tokenizer.encode(x) if isinstance(x, str) else list(x) for x in (before, after))
    ids = first + last  # a tokenizer of words: the whole is its parts
    z = log_softmax(logits(lm, tuple(ids)) / temperature, axis=-1)
    return z[np.arange(len(first) - 1, len(ids) - 1), last]


def scores_of(lm, arc, temperature=1.0):
    """Log-probabilities of the tokens of every option, by question."""
    questions = [(f"{row['query']}\nAnswer:", [f" {choice}" for choice in row["choices"]]) for row in arc]
    return [[log_probs(lm, query, choice, temperature) for choice in choices] for query, choices in questions]


def ece(confidence, correct):
    index = np.clip(np.ceil(confidence * BINS) - 1, 0, BINS - 1)
    return sum([abs((confidence - correct)[index == b].sum()) for b in range(BINS)]) / len(confidence)


@pytest.mark.parametrize(("method", "temperature"), [("uncalibrated", 1.0), ("temperature", TEMPERATURE)])
@pytest.mark.parametrize("task", ["arc_easy", "triviaqa"])
def test_figures_are_those_by_hand(material, run, task, method, temperature):
    from sklearn.metrics import roc_auc_score

    _, lm, arc, _, trivia = material
    if task == "triviaqa":
        prompts = [trivia_prompt(lm, row["context"]) for row in trivia]
        texts = []
        for ids in prompts:  # the most likely token, one after the other
            got = []
            while len(got) < 4 and lm.tokenizer.eos_token_id not in got:
                got.append(int(logits(lm, (*ids, *got))[len(ids) + len(got) - 1].argmax()))
            texts.append(lm.tokenizer.decode(got, skip_special_tokens=True))
        each = [log_probs(lm, *pair, temperature) for pair in zip(prompts, texts, strict=True)]
        confidence = np.array([np.exp(values.mean()) for values in each])
        correct = np.array([row["aliases"][0].lower() == text for row, text in zip(trivia, texts, strict=True)])
    else:
        totals = np.array([[each.sum() for each in row] for row in scores_of(lm, arc, temperature)])
        confidence = softmax(totals, axis=1).max(axis=1)
        correct = totals.argmax(axis=1) == [row["gold"] for row in arc]
    got = run[1]["tasks"][task]
    row = got["methods"][method]
    assert got["tokens"] == len(confidence)
    assert 0 < row["accuracy"] < 1
    for value, wanted in (
        (row["accuracy"], correct.mean()),
        (row["confidence"], confidence.mean()),
        (row["ece"]["value"], ece(confidence, correct)),
        (row["brier"], ((confidence - correct) ** 2).mean()),
        (row["auroc"], roc_auc_score(correct, confidence)),
    ):
        assert value == pytest.approx(wanted, abs=1e-5)
    ends = row["accuracy_interval"]
    assert ends["low"] < row["accuracy"] < ends["high"]
    if method == "uncalibrated":
        own = got["harness"]["acc" if task == "arc_easy" else "exact_match"]
        assert own == pytest.approx(row["accuracy"], abs=1e-9)


def test_the_document_says_what_its_numbers_are(run):
    document = run[1]
    assert document["held_out"]["tokens"] == sum(results["tokens"] for results in document["tasks"].values())
    assert list(document["held_out"]["methods"]) == ["uncalibrated", "temperature"]
    arc, trivia = (document["tasks"][name] for name in ("arc_easy", "triviaqa"))
    assert arc["confidence"].startswith("options (probability of the chosen option among the options, by their summed")
    assert trivia["confidence"].startswith("length_normalised")
    assert arc["source"] == "local data"
    assert (arc["cut"], trivia["cut"]) == (0, 1)
    subjects = document["tasks"]["truthfulqa_mc2"]["subjects"]
    assert {row["subject"]: row["questions"] for row in subjects} == {"c0": 10, "c1": 10}
    assert "subjects of truthfulqa_mc2" in (run[0].out / "report.html").read_text()


def test_the_answers_are_a_table(run, capsys):
    """A line a question, which gives the figures of metrics.json, and which `compare` and `decide` read."""
    names = list(run[1]["held_out"]["methods"])
    for task, results in run[1]["tasks"].items():
        file = run[0].out / "answers" / f"{task}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == results["tokens"]
        for row in rows:
            assert row["question"]
            assert row["confidence"] == row[names[0]]
            assert task == "triviaqa" or (row["answer"] in row["right"]) == bool(row["correct"])
        for name in names:
            correct = np.array([row.get(f"correct_{name}", row["correct"]) for row in rows])
            confidence = np.array([row[name] for row in rows])
            wanted = results["methods"][name]["brier"]
            assert ((confidence - correct) ** 2).mean() == pytest.approx(wanted, abs=1e-6)
        table = read_table(file)
        assert (table.predictions.logits is None) == (task in ("triviaqa", "truthfulqa_mc2"))
        if table.predictions.logits is not None:
            p = softmax(table.predictions.logits, axis=1).max(axis=1)
            np.testing.assert_allclose(p, [row["confidence"] for row in rows], rtol=1e-5)
        assert main(["decide", "--table", str(file), "--risk", "0.5"]) == 0
    capsys.readouterr()


def test_several_options_may_be_right_and_prompts_may_be_cut(material, run):
    """TruthfulQA's mc2: the options in which the harness counts probability are the right ones; or none is right."""
    task = task_manager(["truthfulqa_mc2_local"], material[0]).load(["truthfulqa_mc2_local"])["tasks"]["truthfulqa_mc2"]
    for n, row in enumerate(material[3]):
        right = right_options(task, task.eval_docs[n])
        certain = [(0.0 if place in right else -1e3, False) for place in range(len(row["mc2_choices"]))]
        assert task.process_results(task.eval_docs[n], certain)["acc"] == 1
        assert len(right) == sum(row["mc2_labels"])
    (task,) = task_manager(["arc_easy_local"], material[0]).load(["arc_easy_local"])["tasks"].values()
    for label, right in (("w99", []), (7, []), (-1, []), (1, [1])):  # without its right option: answered wrongly
        task.config.doc_to_target = lambda _, label=label: label
        assert right_options(task, task.eval_docs[0]) == right
        assert task.process_results(task.eval_docs[0], [(-place % 4, False) for place in range(1, 5)])["acc"] == 0
    results = run[1]["tasks"]["truthfulqa_mc2"]
    assert results["cut"] == len(material[3])  # its primer is longer than the model reads
    assert results["methods"]["uncalibrated"]["nll"] is None


def test_a_second_run_asks_nothing_again(run, undrawn, monkeypatch, capsys):
    """Nor does it resume a run of other questions."""
    monkeypatch.setattr(TaskQuestions, "batches", None)
    again = benchmarks.run(run[0], log=lambda _: None)
    assert again == run[1]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"results in {run[0].out}: report.html")
    with pytest.raises(UserError, match=r"holds another run \(different: assets"):
        benchmarks.run(dataclasses.replace(run[0], assets=run[0].out), log=lambda _: None)


def test_parts_that_are_scored_together_resume_together(material, tmp_path):
    """Subjects of a benchmark: alone, the questions of one would be a batch of another shape, and round otherwise."""
    (folder, lm, *_), names = material, ["arc_easy_local", "truthfulqa_mc2_local"]
    tasks = {"both": BenchmarkTask(task_manager(names, folder).load(names)["tasks"], "")}
    context = RunContext(directory=tmp_path).silent()
    whole = evaluate_tasks(lm, tasks, context=context)
    (tmp_path / "answers" / "both-arc_easy.npz").unlink()
    assert evaluate_tasks(lm, tasks, context=context) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("arc_easi",)}, "^tasks: expected names .*got arc_easi"),
        ({"tasks": ("arc_easy",), "shots": 3}, "^shots: expected at most the 0 examples of the task .*, got 3"),
        ({"tasks": ("triviaqa",)}, "max_gen_toks: expected 1 to 31"),
        ({"tasks": ("triviaqa",), "max_new_tokens": 4, "fit": True}, "^fit: it fits a temperature over options"),
        ({"tasks": ("arc_easy",), "option_confidence": "full_vocabulary", "fit": True}, "among the options"),
    ],
)
def test_mistakes_are_said_in_one_line(material, monkeypatch, changes, message):
    if changes["tasks"] == ("arc_easi",):  # without reading the harness's ten thousand definitions
        from calibjax.eval.tasks import local_data

        few = local_data.task_manager(())
        monkeypatch.setattr(local_data, "task_manager", lambda *_: few)
    options = {"model": str(material[0] / "model"), "assets": material[0], "quiet": True}
    with pytest.raises(UserError, match=message):
        benchmarks.run(EvalTasksOptions(**{**options, **changes}), log=lambda _: None)


def test_preset_of_label_smoothing_reads_the_whole_vocabulary(material, capsys):
    folder, lm, arc, *_ = material
    args = f"eval tasks --model {folder / 'model'} --tasks arc_easy --assets {folder} --preset label-smoothing --json"
    assert main([*args.split(), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "says nothing" in err, "the probability of an option of several tokens is near 0"
    row = json.loads(out)["held_out"]["methods"]["uncalibrated"]
    totals = np.array([[each.sum() for each in row] for row in scores_of(lm, arc)])
    assert row["confidence"] == pytest.approx(np.exp(np.max(totals, axis=1)).mean(), abs=1e-6)
    right = totals[np.arange(len(arc)), [question["gold"] for question in arc]]
    assert row["nll"] == pytest.approx(-right.mean(), abs=1e-4)


def test_fit_is_temperature_scaling_over_the_options(material, undrawn, tmp_path):
    """The factor by scipy on the questions set aside; all figures on the others, by hand."""
    folder, lm, arc, *_ = material
    options = {"assets": folder, "bins": BINS, "quiet": True, "batch_size": 8, "seed": 3, "out": tmp_path / "out"}
    options |= {"model": str(folder / "model"), "tasks": ("arc_easy",), "fit": True}
    run = EvalTasksOptions(**options, option_confidence="options_per_token")
    document = benchmarks.run(run, log=lambda _: None)
    scores = np.array([[each.mean() for each in row] for row in scores_of(lm, arc)])
    gold = np.array([row["gold"] for row in arc])
    aside = np.zeros(len(arc), bool)
    aside[_set_aside(len(arc), 3)] = True
    assert aside.sum() == len(arc) // 5

    def nll(u, chosen):
        return -log_softmax(np.exp(u) * scores[chosen], axis=1)[np.arange(chosen.sum()), gold[chosen]].mean()

    u = minimize_scalar(nll, args=(aside,), bounds=(-6, 6), method="bounded", options={"xatol": 1e-6}).x
    methods = document["held_out"]["methods"]
    assert document["held_out"]["tokens"] == (~aside).sum()
    for name, log_scale in (("uncalibrated", 0.0), ("temperature", u)):
        p = np.exp(log_softmax(np.exp(log_scale) * scores[~aside], axis=1))
        correct = p.argmax(axis=1) == gold[~aside]
        assert methods[name]["accuracy"] == pytest.approx(correct.mean(), abs=1e-9)
        assert methods[name]["confidence"] == pytest.approx(p.max(axis=1).mean(), abs=2e-4)
        assert methods[name]["ece"]["value"] == pytest.approx(ece(p.max(axis=1), correct), abs=2e-4)
        assert methods[name]["nll"] == pytest.approx(nll(log_scale, ~aside), abs=2e-4)
    assert f"temperature over the options {np.exp(-u):.3g}"[:-1] in document["held_out"]["confidence"]
    assert "fitted on 4 questions (a fifth of the questions, which are not asked)" in document["held_out"]["confidence"]
    assert benchmarks.run(run, log=lambda _: None) == document  # the fit is saved


def test_a_model_judges_by_the_likelier_of_two_replies(tmp_path):
    """A model, and the same with the embeddings of the two replies exchanged."""
    tensors, judgements = model_tensors(), []
    embeddings = tensors["model.embed_tokens.weight"]
    text = "Question: a?\nCorrect answers: b; c\nGiven answer: a b\n"
    text += "Is the given answer correct? Reply with Yes or No.\nReply:"
    for name, order in (("one", [3, 4]), ("other", [4, 3])):
        exchanged = embeddings.copy()
        exchanged[[3, 4]] = embeddings[order]
        folder = write_model(tmp_path / name, {**tensors, "model.embed_tokens.weight": exchanged})
        write_tokenizer(folder, ["Yes", "No", *WORDS[2:]])
        lm = load_model(folder, "bfloat16")
        logits = lm.logits(np.array([lm.tokenizer(text).input_ids[-31:]]))[0, -1]
        judgements.append(find_judge(str(folder))("a?", " a b\n", ["b", "c"]))
        assert judgements[-1] == (logits[3] > logits[4])
    assert sorted(judgements) == [0.0, 1.0]


def test_judges():
    assert string_match("", "A: The  Onion!", ["onion"]) == 1
    assert string_match("", "The.", ["the"]) == 1  # an article as the whole answer
    assert string_match("", "\u201cSchindler\u2019s List\u201d", ["Schindler's List"]) == 1
    assert string_match("", "Cafe\u0301", ["caf\u00e9"]) == 1
    assert normalised_clusters("", ["Schindler\u2019s cafe\u0301", "Schindler's caf\u00e9", "cafe"]) == [0, 0, 1]
    assert string_match("", "a", ["the", ""]) == string_match("", "", ["", "the"]) == 0
    assert find_judge("calibjax.eval.answers.judges:string_match") is string_match
    assert references({"answer": {"value": "x", "aliases": ["y"]}}) == ["x", "y"]
    assert references({"answer": ["x", "y"]}) == ["x", "y"]
    assert references({"answer": "8 + 4 = 12\n#### 12"}) == ["12"]
    for unread in ({"question": "?"}, {"answer": []}, {"answer": [["x"]]}):
        with pytest.raises(UserError, match="expected answers in correct_answers"):
            references(unread)


def test_the_harness_has_its_own_figures(material):
    """Those of its evaluation, through two filters of a task: the first word of an answer, and the whole."""
    folder, lm, *_ = material
    (task,) = task_manager(["triviaqa_local"], folder).load(["triviaqa_local"])["tasks"].values()
    filters = {"word": ["regex", {"regex_pattern": r"(\w+)"}], "whole": ["remove_whitespace", None]}
    task._filters = [build_filter_ensemble(name, [one, ["take_first", None]]) for name, one in filters.items()]
    document = evaluate_tasks(lm, {"": BenchmarkTask({"": task}, "")}, options=TasksOptions(max_new_tokens=4))
    model = HarnessLM(lm, {"uncalibrated": FittedHead.constant(lm)}, max_gen_toks=4)
    theirs = lm_eval.evaluate(lm=model, task_dict={"triviaqa": task}, bootstrap_iters=0)["results"]["triviaqa"]
    assert document["held_out"]["harness"] == {f"exact_match,{name}": theirs[f"exact_match,{name}"] for name in filters}
    assert theirs["exact_match,word"] != theirs["exact_match,whole"]


def test_answers_that_are_not_read_are_refused_before_any_question(material, monkeypatch):
    parts = task_manager(["triviaqa_local"], material[0]).load(["triviaqa_local"])["tasks"]
    splits = parts["triviaqa"].dataset
    splits["validation"] = splits["validation"].rename_column("answer", "target")
    monkeypatch.setattr(TaskQuestions, "batches", None)
    with pytest.raises(
        UserError, match=r"^task triviaqa: expected answers in correct_answers, .* got question, target"
    ):
        evaluate_tasks(material[1], {"triviaqa": BenchmarkTask(parts, "")}, options=TasksOptions(max_new_tokens=4))


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@functools.cache
def loaded_task(task, shots, assets):
    several = task_manager([f"{task}_local"], assets).load([f"{task}_local"])["tasks"]
    loaded = several["mmlu_high_school_us_history"] if task == "mmlu" else next(iter(several.values()))
    loaded.set_config("num_fewshot", shots)
    if shots == 3:  # drawn for each question, as by most tasks of the harness
        loaded.sampler = ContextSampler(loaded.sampler.df)
    return loaded


@pytest.mark.parametrize("system", [None, "w1 w2"])
@pytest.mark.parametrize(
    ("task", "shots"),
    [("mmlu", 0), ("mmlu", 2), ("arc_easy", 0), *(("triviaqa", n) for n in (0, 3, 5)), ("truthfulqa_mc1", 0)],
)
def test_chats_have_the_requests_of_the_harness(material, task, shots, system):
    """The oracle: the harness's own requests with --apply_chat_template, rendered by transformers."""
    folder, lm, *_ = material
    assets = data_path("mmlu").parents[1] if task == "mmlu" else folder
    loaded = loaded_task(task, shots, assets)
    tokenizer = lm.tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE

    def rendered(messages, add_generation_prompt=True):
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    loaded.set_fewshot_seed(0)
    options = {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": system}
    loaded.build_all_requests(limit=5, chat_template=rendered, tokenizer_name="", **options)
    by_question = itertools.groupby(loaded.instances, lambda request: request.doc_id)
    theirs = [[tuple(map(str, request.args)) for request in group] for _, group in by_question]

    asking = HarnessLM(lm, {"uncalibrated": FittedHead.constant(lm)}, batch_size=2, chat=Chat(system))
    encoded = []

    def encode(*pair):
        encoded.append(pair)
        return Continuation([1], [1])

    asking.encode = encode
    options = TasksOptions(shots=shots, max_new_tokens=4)
    questions = TaskQuestions(asking, task, BenchmarkTask({task: loaded}, ""), options, RunContext())
    questions.check()
    prompts = [prompt for batch in questions.batches(task, loaded.eval_docs, range(5)) for prompt in batch.prompts]
    tokenizer.chat_template = None
    assert prompts == [group[0][0] for group in theirs]
    assert encoded == ([] if task.startswith("trivia") else [pair for group in theirs for pair in group])
    assert prompts[0].endswith("<assistant> ")
    assert prompts[0].count("<assistant> ") == shots + 1


def test_chat_is_the_default_of_a_model_with_a_template(tmp_path, capsys):
    """Said in a line; the tokens are those of the template typed by hand with --no-chat."""
    model = write_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<", "w1 ").replace(">", ""))
    given = ["generate", "--model", str(model), "--max-new-tokens", "3", "--json"]
    results = []
    by_hand = ["--no-chat", "--prompt", "w1 system w5 w1 /s w1 user w3 w4 w1 /s w1 assistant"]
    for options in (["--prompt", "w3 w4", "--system", "w5"], by_hand):
        assert main([*given, *options]) == 0
        printed = capsys.readouterr()
        assert ("chat: prompts are messages" in printed.err + printed.out) == ("--no-chat" not in options)
        results.append(json.loads(printed.out))
    assert [result["chat"] for result in results] == [True, False]
    assert results[0]["texts"][0]["tokens"] == results[1]["texts"][0]["tokens"]
    assert {"base_log_prob", "confidence"} < results[0]["texts"][0]["tokens"][0].keys()
    (model / "chat_template.jinja").unlink()
    for options, text in ((["--chat"], "no chat template"), (["--system", "w5", "--no-chat"], "Leave out --no-chat")):
        assert main([*given, "--prompt", "w3", *options]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_all_subjects_of_mmlu(tmp_path):
    """57 subjects of real questions: what is set aside for a fit, and the figures over all of them."""
    assets = data_path("mmlu").parents[1]
    loaded = task_manager(["mmlu_local"], assets).load(["mmlu_local"])["tasks"]
    assert len(loaded) == 57
    assert sum(len(task.eval_docs) for task in loaded.values()) == 14042
    task = loaded["mmlu_high_school_us_history"]

    lm = load_model(model_path("stories260K"))
    model = HarnessLM(lm, {"uncalibrated": FittedHead.constant(lm)})
    few, none = (
        TaskQuestions(model, "mmlu", BenchmarkTask(loaded, ""), TasksOptions(fit=True, shots=shots), RunContext())
        for shots in (5, 0)
    )
    assert none.calibration_split(task) == "dev"
    assert len(none.calibration_questions(task)[1]) == 5
    assert len(none.numbers(task)) == len(task.eval_docs)
    assert few.calibration_split(task) is None  # the examples before a question hold the answers of dev
    aside = few.calibration_questions(task)[1]
    assert len(aside) == len(task.eval_docs) // 5
    assert sorted([*aside, *few.numbers(task)]) == list(range(len(task.eval_docs)))

    run = EvalTasksOptions(
        model=str(model_path("stories260K")), tasks=("mmlu",), assets=assets, limit=2, preset="ats", out=tmp_path / "o"
    )
    document = benchmarks.run(run)
    assert document["held_out"]["tokens"] == 57 * 2
    assert len(document["held_out"]["subjects"]) == 57
    assert document["held_out"]["harness"]["acc"] == document["held_out"]["methods"]["uncalibrated"]["accuracy"]
