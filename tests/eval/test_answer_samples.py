"""Confidences from samples: exact expectations by enumeration, laws, and what lm-polygraph and uqlm compute."""

import itertools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy, gmean
from tiny import WORDS, write_tokenizer

from calibjax.eval.answers import confidence
from calibjax.eval.answers.clusters import CLUSTERINGS, clusters_of, find_clustering, last_number, normalised_clusters
from calibjax.eval.answers.registry import CONFIDENCES, Evidence
from calibjax.runtime.errors import UserError

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "answers.json").read_text())
K = 4
MEANINGS = np.array([0.5, 0.3, 0.15, 0.05])  # P(meaning) of a question whose answers are known
EVERY = np.array(list(itertools.product(range(len(MEANINGS)), repeat=K)), np.int32)  # each way to draw K samples


def test_weights_are_probabilities_of_the_samples():
    """With p of the samples as weights: the entropy of the masses of the clusters, in float64."""
    rng = np.random.default_rng(0)
    log_probs = rng.uniform(-40, 0, EVERY.shape) - 200.0  # far below what float32 can exponentiate
    p = np.exp(log_probs - log_probs.max(axis=1, keepdims=True))
    mass = (p[:, :, None] * (EVERY[:, :, None] == np.arange(len(MEANINGS)))).sum(axis=1) / p.sum(axis=1)[:, None]
    np.testing.assert_allclose(confidence.semantic_entropy(EVERY, log_probs), entropy(mass, axis=1), atol=1e-4)
    want = 1 - entropy(mass, axis=1) / math.log(K)
    np.testing.assert_allclose(confidence.entropy_confidence(EVERY, log_probs), want, atol=1e-4)
    got = confidence.semantic_confidence(EVERY, np.full(len(EVERY), 2), log_probs)
    np.testing.assert_allclose(got, mass[:, 2], atol=1e-4)  # float32 of -240 leaves 1.5e-5 in an exponent


def evidence(n=40, k=6):
    rng = np.random.default_rng(1)
    tokens = rng.uniform(-9, 0, (n, 5)).astype(np.float32)
    tokens[:, 3:] = np.where(rng.random((n, 2)) < 0.5, -np.inf, tokens[:, 3:])
    samples = rng.uniform(-5, 0, (n, k)).astype(np.float32)
    clusters, answer = rng.integers(0, 4, (n, k)), rng.integers(0, 4, n)
    stated, probed = rng.random(n).astype(np.float32), rng.normal(0, 9, n).astype(np.float32)
    top = -np.sort(-np.log(rng.dirichlet(np.full(9, 0.3), (n, 5))))[..., :8].astype(np.float32)
    distributions = np.concatenate([rng.uniform(0, 3, (n, 5, 1)).astype(np.float32), top], axis=-1)
    return Evidence(
        tokens=tokens,
        distributions=distributions,
        clusters=clusters,
        answer=answer,
        sample_log_probs=samples,
        traces=rng.uniform(0.1, 1, (n, k, 2)).astype(np.float32),
        distinct=rng.random((n, k)) < 0.7,
        two_way=samples[:, :2],
        stated=stated,
        log_odds=probed,
    )


@pytest.mark.parametrize("name", CONFIDENCES)
def test_laws(name):
    """In [0, 1]; names of the clusters and the order of the samples do not matter; jit gives the same."""
    method, data = CONFIDENCES[name], evidence()
    fields = {field: data[field] for field in method.fields}  # and nothing else
    want = np.asarray(method(fields))
    assert (want.shape, want.dtype) == ((40,), np.float32)
    assert want.min() >= 0
    assert want.max() <= 1
    np.testing.assert_allclose(jax.jit(method)(fields), want, atol=1e-6)
    order, renamed = np.random.default_rng(2).permutation(6), np.array([7, 2, 9, 4])
    of_samples = {"clusters", "sample_log_probs", "traces", "distinct"}
    shuffled = {field: value[:, order] if field in of_samples else value for field, value in fields.items()}
    shuffled |= {field: renamed[shuffled[field]] for field in ("clusters", "answer") if field in shuffled}
    np.testing.assert_allclose(method(shuffled), want, atol=1e-6)


class Answer:
    """What is known of answer n, in float64."""

    def __init__(self, data, n):
        there = np.isfinite(data["tokens"][n])
        each = data["distributions"][n][there].astype(np.float64)
        self.entropy, self.p = each[:, 0], np.exp(each[:, 1:])
        self.negentropy = 1 + (self.p * np.log(self.p)).sum(axis=1) / math.log(8)
        self.own = np.exp(data["tokens"][n][there].astype(np.float64).mean())
        self.same = data["clusters"][n] == data["answer"][n]
        self.distinct = np.exp(data["sample_log_probs"][n].astype(np.float64)) * data["distinct"][n]
        self.group, self.tail = data["traces"][n].T.astype(np.float64)


FORMULAS = {
    # uqlm's `TopLogprobsScorer`, and its "consistency_and_confidence" with a similarity of 0 or 1
    "token_entropy": lambda x: np.exp(-x.entropy.mean()),
    "mean_token_negentropy": lambda x: x.negentropy.mean(),
    "min_token_negentropy": lambda x: x.negentropy.min(),
    "probability_margin": lambda x: (x.p[:, 0] - x.p[:, 1]).mean(),
    "cocoa": lambda x: x.own * x.same.mean(),
    # DeepConf: the weights of the traces that agree with the answer, and of all
    "deepconf_group": lambda x: x.group[x.same].sum() / x.group.sum(),
    "deepconf_tail": lambda x: x.tail[x.same].sum() / x.tail.sum(),
    # lm-polygraph's `SemanticDensity`, with a distance of 0 within a cluster and of 1 between two
    "semantic_density": lambda x: (x.own + x.distinct[x.same].sum()) / (x.own + x.distinct.sum()),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_further_confidences_by_their_formulas(name):
    data = evidence()
    want = [FORMULAS[name](Answer(data, n)) for n in range(len(data["answer"]))]
    np.testing.assert_allclose(CONFIDENCES[name](data), want, atol=1e-6)


OF_TOKENS = {
    "options": lambda x: softmax(x).max(),
    "options_per_token": lambda x: softmax(x).max(),
    "margin": lambda x: -np.diff(np.sort(np.append(softmax(x), 0))[::-1])[0],
    "negentropy": lambda x: 1 - entropy(softmax(x), base=len(x)) if len(x) > 1 else 1.0,
    "full_vocabulary": lambda x: np.exp(x).max(),
    "arithmetic_mean": lambda x: np.exp(x).mean(),
    "product": lambda x: np.exp(x).prod(),
    "minimum": lambda x: np.exp(x).min(),
    "length_normalised": lambda x: gmean(np.exp(x)),
}
OF_SHARES = {
    "agreement": lambda x: x[0],
    "first_second": lambda x: x[0] - x[1:2].sum(),
    "entropy": lambda x: 1 - entropy(x) / math.log(len(x)) if len(x) > 1 else 1.0,
}


@pytest.mark.parametrize("method", confidence.DESCRIPTIONS)
def test_confidence_in_an_answer(method):
    """Of what is there, in float64; of nothing, 0."""
    rng = np.random.default_rng(0)
    values = rng.uniform(-9, -0.1, (50, 6)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = -np.inf  # nothing there
    values[:2] = [[-np.inf], [1e-3]]  # and rounded beyond a probability of 1
    weights = [row[row > -np.inf].astype(np.float64) for row in values]
    if method in OF_SHARES:
        values = rng.integers(0, 4, (50, 20))
        values[1] = 3
        weights = [np.sort(np.unique(row, return_counts=True)[1])[::-1] / len(row) for row in values]
    got = np.asarray(jax.jit(confidence.answer_confidence, static_argnums=0)(method, values))
    want = [min((OF_TOKENS | OF_SHARES)[method](row), 1.0) if len(row) else 0.0 for row in weights]
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert got.min() >= 0
    with pytest.raises(ValueError, match="expected one of options, options_per_token"):
        confidence.answer_confidence("mean", values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("window", [1, 3, 8, 40])
def test_trace_confidence(window):
    p = np.random.default_rng(6).random(8)
    groups = [p[max(end - window, 0) : end].mean() for end in range(min(window, 8), 9)]
    assert confidence.trace_confidence(p.tolist(), window) == pytest.approx((min(groups), groups[-1]))


# --- clusterings ---


NUMBERS = {
    "so 3 + 4 = 7.": 7,
    "$1,234,567.50 in all": 1234567.5,
    "-12": -12,
    "10-12": 12,
    "\u221212 degrees": -12,
    "about .5": 0.5,
    "1.2e3 or 1e5": 100000,
    "1e1000000000000000000": 10**18,  # no exponent of Decimal
    "none": None,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_last_number(text):
    assert last_number(text) == NUMBERS[text]


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_clusters_are_an_equivalence(name):
    """Equal texts are together, whatever their order; the answer is compared as the samples are."""
    texts = ["The answer is 12.", "12", " 12", "twelve", "Twelve!", "13", "12.0"]
    wanted = {"exact": [0, 1, 1, 2, 3, 4, 5], "normalised": [0, 1, 1, 2, 2, 3, 4], "numeric": [0, 0, 0, 1, 1, 2, 0]}
    assert CLUSTERINGS[name]("", texts) == wanted[name]
    clusters, answer = clusters_of(CLUSTERINGS[name], ["q"], [texts[3]], [texts])
    assert (clusters[0] == answer[0]).tolist() == [number == wanted[name][3] for number in wanted[name]]


def first_letter(question, answers):
    return [ord(answer[0]) for answer in answers]


def test_a_clustering_of_the_user():
    got = find_clustering(f"{__name__}:first_letter")
    clusters, answer = clusters_of(got, ["q"], ["b1"], [["a1", "b2", "b3"]])
    assert (clusters[0] == answer[0]).tolist() == [False, True, True]
    with pytest.raises(UserError, match="expected a whole number for each of 2 answers"):
        clusters_of(lambda question, answers: [0], ["q"], ["a"], [["b"]])


def test_clusters_of_a_model_of_entailment(tmp_path):
    """Algorithm 1 of Kuhn et al. on what the model itself says of each pair."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, WORDS)
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    labels = {0: "CONTRADICTION", 1: "ENTAILMENT"}
    names = {name: number for number, name in labels.items()}
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 3, **sizes, initializer_range=1.0, id2label=labels, label2id=names
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    texts = [" ".join(words) for words in np.random.default_rng(0).choice(WORDS, (12, 3))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    pairs = [[tokenizer(f"w1 {a}", f"w1 {b}", return_tensors="pt") for b in texts] for a in texts]
    with torch.no_grad():
        entails = np.array([[int(model(**pair).logits.argmax()) for pair in row] for row in pairs])
    mutual, want = entails * entails.T, []
    for row in range(len(texts)):
        firsts = [want.index(number) for number in range(max(want, default=-1) + 1)]
        want.append(next((number for number, first in enumerate(firsts) if mutual[first, row]), len(firsts)))
    assert 2 < max(want) < len(texts) - 2
    assert find_clustering(f"nli:{tmp_path}")("w1", texts) == want
    with pytest.raises(UserError, match="nowhere"):
        find_clustering(f"nli:{tmp_path}/nowhere")


# --- other libraries on the same table of samples ---


def golden_evidence():
    table = GOLDENS["table"]
    columns = ([row[name] for row in table] for name in ("question", "answer", "samples"))
    clusters, answer = clusters_of(normalised_clusters, *columns)
    tokens = np.full((len(table), 8), -np.inf, np.float32)
    for place, row in enumerate(table):
        tokens[place, : len(row["token_log_probs"])] = row["token_log_probs"]
    means = np.array([[np.mean(sample) for sample in row["sample_log_probs"]] for row in table])
    return Evidence(tokens=tokens, clusters=clusters, answer=answer, sample_log_probs=means.astype(np.float32))


@pytest.mark.parametrize(("name", "library"), [(m, lib) for m, libs in GOLDENS["methods"].items() for lib in libs])
def test_other_libraries(name, library):
    data = golden_evidence()
    if name.startswith("entropy of "):  # they give nats, we a confidence
        got = confidence.semantic_entropy(
            data["clusters"], data["sample_log_probs"] if name.endswith("probability") else None
        )
    elif name == "perplexity":
        got = 1 / CONFIDENCES["length_normalised"](data)
    else:
        got = CONFIDENCES[name](data)
    want = np.array(GOLDENS["methods"][name][library])
    worst = np.abs(np.asarray(got) - want).max()
    print(f"{name}, {library} {GOLDENS['versions'][library]}: worst difference {worst:.1e}")
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
