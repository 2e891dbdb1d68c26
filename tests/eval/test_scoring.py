"""Scores of continuations against float64 over the dense logits; text up to a stop sequence; lm-eval's own backend."""

import functools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats
from assets import ASSETS, data_path, model_path
from tiny import VOCAB, WORDS, head_log_scale, make_lm, random_head, write_model, write_tokenizer

from calibjax.eval.tasks import scoring
from calibjax.eval.tasks.continuation import continue_contexts
from calibjax.eval.tasks.scoring import Continuation, Scorer, _prefix_caches, _states, _token_scores
from calibjax.heads import FittedHead
from calibjax.models import load_model
from calibjax.models.generate import generate
from calibjax.runtime.errors import UserError

the_lm = functools.cache(lambda: make_lm(num_layers=2))


@functools.cache
def the_heads():
    return {
        "base": FittedHead.constant(the_lm()),
        "transformer": random_head(the_lm(), "transformer", log_factor=0.3),
        "sequence": random_head(the_lm(), pooling="sequence", log_factor=0.3),
    }


def requests(seed=0, count=40):
    """Most are read 32 tokens wide; half of them lose their start."""
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(25, 45, count), rng.integers(1, 6, count), strict=True)
    drawn = [Continuation(*(rng.integers(0, VOCAB, n).tolist() for n in pair)) for pair in lengths]
    shared = drawn[0].context
    questions = [[*drawn[1].context[:14], *rng.integers(0, VOCAB, 4).tolist()] for _ in range(5)]  # after one beginning
    # Options of one question: one token each, and two read alike up to their last token.
    return (
        drawn
        + [Continuation(shared, [token]) for token in range(4)]
        + [Continuation(shared, [1, 2, t]) for t in (3, 4)]
        + [Continuation([*shared, 1, 2], [3])]  # read as those two, of which more is scored
        # More than a row holds, of one context.
        + [Continuation(drawn[0].context[:6], rng.integers(0, VOCAB, n).tolist()) for n in (9, 4, 9, 7, 9, 1)]
        + [Continuation(context, rng.integers(0, VOCAB, n).tolist()) for context in questions for n in (3, 2)]
    )


def dense(continuations):
    """Log-probabilities `[M, n]` of each request and which are largest, float64 from the model's own logits."""
    read = [[*context, *tokens[:-1]][-the_lm().config.max_positions :] for context, tokens in continuations]
    inputs, real, where = np.zeros((3, len(continuations), the_lm().config.max_positions), np.int32)
    for row, (ids, request) in enumerate(zip(read, continuations, strict=True)):
        inputs[row, : len(ids)], real[row, : len(ids)] = ids, 1
        where[row, len(ids) - len(request.tokens) : len(ids)] = 1
    hidden = the_lm().hidden_states(inputs, segment_ids=real)
    logits = np.asarray(the_lm().logits(inputs, segment_ids=real), np.float64)
    tokens, log_ps = {"where": where.astype(bool), "segment_ids": real}, []
    for head in the_heads().values():
        run = jax.jit(functools.partial(head_log_scale, head, unembedding=the_lm().unembedding, **tokens))
        log_scale = run(hidden)
        log_ps.append(scipy.special.log_softmax(logits * np.exp(np.asarray(log_scale, np.float64))[..., None], axis=-1))
    log_probs, best = np.stack(log_ps), logits.argmax(-1)
    for row, (_, tokens) in enumerate(continuations):
        at = np.flatnonzero(where[row])
        yield log_probs[:, row, at, tokens], best[row, at] == tokens, log_probs[:, row, at]


@pytest.mark.parametrize(
    ("names", "prefix", "groups"),
    [
        (["base"], 128, 0),
        (["base"], 8, 1),
        (["base", "transformer"], 8, 1),
        (["base", "transformer", "sequence"], 8, 0),
    ],
)
def test_scores_are_those_of_the_dense_formula(monkeypatch, names, prefix, groups):
    """With the context of several options in one row, after the keys and values of a prefix, and in a row for each."""
    monkeypatch.setattr(scoring, "_MIN_PREFIX", prefix)
    continuations = requests()
    scorer = Scorer(the_lm(), {name: the_heads()[name] for name in names}, batch_size=8)
    after_prefix, rows = scorer._plan(continuations)
    assert len(after_prefix) == groups
    assert (len(rows) < len(continuations) - 5) == ("sequence" not in names)
    scores, close = scorer.score(continuations, top_k=5), {"atol": 1e-4}  # float32 logits to 60, times scales to 2
    for request, score, (log_probs, greedy, each) in zip(continuations, scores, dense(continuations), strict=True):
        each = each[: len(names)]
        np.testing.assert_allclose(score.log_probs, log_probs[: len(names)], **close)
        np.testing.assert_allclose(score.distributions[:, 0], scipy.stats.entropy(np.exp(each), axis=-1), **close)
        np.testing.assert_allclose(score.distributions[:, 1:], np.sort(each)[..., :-6:-1].swapaxes(1, 2), **close)
        assert (score.greedy == greedy).all()
        assert score.cut == max(len(request.context) + len(request.tokens) - 1 - the_lm().config.max_positions, 0)
    assert any(score.cut for score in scores)


@pytest.mark.parametrize("shortest", [128, 8])
def test_rows_are_trees(monkeypatch, shortest):
    """What a token attends to, before itself, is what its request reads; beginnings are held once where that pays."""
    monkeypatch.setattr(scoring, "_MIN_PREFIX", shortest)
    continuations = requests()
    scorer = Scorer(the_lm(), {"base": the_heads()["base"]})
    groups, others = scorer._plan(continuations)
    assert len(groups) == (shortest == 8)
    paths = {}
    for prefix, row in [((), row) for row in others] + [(group.prefix, row) for group in groups for row in group.rows]:
        until, tokens = np.array(row.until), np.array(row.tokens)
        assert len(tokens) <= scorer.max_length
        for number, columns in row.columns.items():
            seen = [np.flatnonzero((np.arange(len(until)) <= column) & (column < until)) for column in columns]
            assert [row.positions[column] + 1 for column in columns] == [len(prefix) + len(places) for places in seen]
            paths[number] = [[*prefix, *tokens[places].tolist()] for places in seen]
    for number, (context, continuation) in enumerate(continuations):
        read = [*context, *continuation[:-1]][-scorer.max_length :]
        assert paths[number] == [read[: end + 1] for end in range(len(read) - len(continuation), len(read))]
    groups, others = scorer._plan(continuations[-10:])
    assert groups or [row for row in others if len(row.columns) > 2], "questions that begin alike share no row"
    _, apart = scorer._plan([Continuation([5, *request.context], request.tokens) for request in continuations[:10]])
    assert len(apart) == 10, "one token in common does not pay"


def test_steps_of_long_rows_have_fewer_of_them_and_the_same_scores(monkeypatch):
    continuations = requests(count=24)
    whole = Scorer(the_lm(), {"base": the_heads()["base"]}, batch_size=32).score(continuations)
    shapes = []

    def spy(*args):
        shapes.append(args[-2]["tokens"].shape)
        return _states(*args)

    monkeypatch.setattr(scoring, "_states", spy)
    monkeypatch.setattr(scoring, "_WIDE", 8)
    parts = Scorer(the_lm(), {"base": the_heads()["base"]}, batch_size=32).score(continuations)
    assert shapes[0] == (8, 32)
    assert all(rows * width <= 32 * 8 for rows, width in shapes)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-5)


def test_a_second_call_compiles_nothing(monkeypatch):
    monkeypatch.setattr(scoring, "_MIN_PREFIX", 8)
    programs = _states, _token_scores, _prefix_caches
    scorer = Scorer(the_lm(), {"base": the_heads()["base"]}, batch_size=8)
    scorer.score(requests())
    compiled = [program._cache_size() for program in programs]
    scorer.score(requests(seed=5))
    assert [program._cache_size() for program in programs] == compiled


@pytest.mark.parametrize("bad", [Continuation([], [1]), Continuation([1], []), Continuation([1], [1] * 33)])
def test_what_cannot_be_scored_is_refused_before_any_work(bad):
    with pytest.raises(UserError, match="request 1: expected a context"):
        Scorer(the_lm(), the_heads()).stream([Continuation([1], [1]), bad])


def test_text_continues_to_the_stop_sequence(tmp_path):
    lm = load_model(write_model(tmp_path / "model"))
    contexts = [lm.tokenizer(text)["input_ids"] for text in ("w1 w2 w3", "w7", "w9 w4")]
    whole = generate(lm, contexts, max_new_tokens=8).texts(lm.tokenizer)
    words = [text.split() for text in whole]
    stop = words[0][2]  # comes third in the first text
    got = dict(continue_contexts(lm, contexts, until=[stop], max_new_tokens=8, batch_size=3))
    for number, text in enumerate(whole):
        assert got[number].text == text.split(stop)[0]
        written = lm.tokenizer.decode(list(got[number].tokens)).split()
        assert written == (words[number][: words[number].index(stop)] if stop in words[number] else words[number])
    with pytest.raises(UserError, match="max_gen_toks: expected 1 to 31"):
        continue_contexts(lm, contexts, max_new_tokens=32)


def test_the_space_before_the_first_word_is_no_stop(tmp_path):
    folder = write_model(tmp_path / "model")
    write_tokenizer(folder, [f"Ġ{word}" for word in WORDS])  # as byte pairs have it
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    lm, contexts = load_model(folder), [[5, 6], [9]]
    whole = generate(lm, contexts, max_new_tokens=4).texts(lm.tokenizer)
    for number, got in continue_contexts(lm, contexts, until=[" "], max_new_tokens=4, batch_size=2):
        assert got.text == " " + whole[number].split()[0]
        assert len(got.tokens) == 1


def test_the_model_of_lm_eval_needs_no_torch():
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import calibjax.lm_eval\n"
        "from lm_eval.api.registry import get_model; print(get_model('calibjax').__name__)"
    )
    env = {**os.environ, "USE_TORCH": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.stdout.strip().endswith("CalibjaxLM"), done.stderr[-2000:]


@pytest.mark.slow
def test_the_command_line_of_the_harness_takes_our_model_batches_and_tasks(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")
    from calibjax.lm_eval import BATCH_SIZE

    write_model(tmp_path / "model")
    (tmp_path / "words.jsonl").write_text(json.dumps({"text": "w1 w2 w3"}) + "\n")
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "words.jsonl")},
        "test_split": "train",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(json.dumps(task))

    def run(*arguments):
        command = [sys.executable, "-m", "calibjax.lm_eval", *map(str, arguments)]
        env = {**os.environ, "CALIBJAX_ASSETS": str(tmp_path), "HF_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)

    wanted = ("run", "-a", f"pretrained={tmp_path / 'model'}", "-o", tmp_path / "out")
    done = run(*wanted, "-t", "words", f"--include_path={tmp_path / 'tasks'}")
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(written.read_text())["config"]
    assert (config["model"], config["batch_size"]) == ("calibjax", BATCH_SIZE)
    done = run(*wanted, "-t", "arc_easy_local", "-b", "4")
    assert done.returncode == 2, "our task is known, its data are not there"
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'data'}")


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def test_a_killed_run_resumes_from_the_cache_of_the_harness(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")
    from lm_eval.api.model import CachingLM

    from calibjax.lm_eval import CalibjaxLM

    write_model(tmp_path / "model")
    model = CalibjaxLM(str(tmp_path / "model"), batch_size=2)
    queries = instances("loglikelihood", [(f"w{n} w{n + 1}", f" w{n + 2} w5") for n in range(9)])
    want = model.loglikelihood(queries, disable_tqdm=True)
    whole = Scorer._batch
    batches = []

    def dying(self, *args):
        batches.append(1)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(Scorer, "_batch", dying)
    cached = CachingLM(model, str(tmp_path / "cache.db"))
    with pytest.raises(KeyboardInterrupt):
        cached.loglikelihood(queries)
    assert len(batches) == 3
    same = CalibjaxLM.create_from_arg_obj(
        {"pretrained": str(tmp_path / "model")}, {"batch_size": 2, "device": "cuda:0"}
    )
    again = CachingLM(same, str(tmp_path / "cache.db"))
    assert again.loglikelihood(queries) == want
    assert len(batches) == 3 + 3, "9 requests, 4 of them known: 3 batches of 2 are left"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories260K", "craftgpt-5M"])
def test_log_likelihoods_are_those_of_the_hugging_face_backend(name):
    """The harness's own model on PyTorch, on the same requests; accuracy of its own task definitions."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install calibjax[lm-eval]")
    for package in ("torch", "accelerate", "peft"):
        pytest.importorskip(package, reason=f"the oracle is the harness's own backend, which needs {package}")
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    from calibjax.eval.tasks.local_data import task_manager
    from calibjax.lm_eval import CalibjaxLM

    path = model_path(name)
    data_path("llm_foundry_eval/arc_easy.jsonl.gz")
    theirs = HFLM(pretrained=str(path), device="cpu", batch_size=8, dtype="float32")
    ours = CalibjaxLM(str(path), batch_size=8)
    assert (ours.max_length, ours.prefix_token_id, ours.eot_token_id) == (
        *(theirs.max_length, theirs.prefix_token_id, theirs.eot_token_id),
    )
    texts = ["Once upon a time there was a girl named Lily.", "One day, a cat saw a big tree. " * 12, "Hello"]
    pairs = [(text, end) for text in texts for end in (" She liked to play.", " A", "x")] + [("", "Once upon a time")]
    queries = instances("loglikelihood", [*pairs, ("The end. ", "Bye")])
    want, got = (model.loglikelihood(queries) for model in (theirs, ours))
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    np.testing.assert_allclose([x for x, _ in got], [x for x, _ in want], atol=1e-3)

    # No sentence twice: the harness's backend confuses windows that are read alike and scored in part.
    long = " ".join(f"On day {n} the girl had {7 * n} cats and {n * n} dogs." for n in range(1, 30))
    rolling = instances("loglikelihood_rolling", [(long,), (texts[0],), (texts[2],)])
    np.testing.assert_allclose(ours.loglikelihood_rolling(rolling), theirs.loglikelihood_rolling(rolling), atol=1e-3)

    until = {"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False}
    written = instances("generate_until", [(text, until) for text in texts])
    assert ours.generate_until(written) == theirs.generate_until(written)

    tasks = ["arc_easy_local", "truthfulqa_mc1_local"]
    manager, options = task_manager(tasks, ASSETS), {"limit": 10, "bootstrap_iters": 0}
    results = [lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, **options) for model in (theirs, ours)]
    for task in ("arc_easy", "truthfulqa_mc1"):
        for metric in ("acc,none", "acc_norm,none"):
            assert len({result["results"][task].get(metric) for result in results}) == 1, task
        lls = [
            [float(response[0][0]) for sample in result["samples"][task] for response in sample["resps"]]
            for result in results
        ]
        error = np.abs(np.subtract(*lls)).max()
        print(f"{name}, {task}: {len(lls[0])} options, largest difference {error:.1e} of {np.abs(lls[0]).max():.0f}")
        assert error < 1e-3, error
