"""Writes goldens/answers.json: a table of sampled answers, and what lm-polygraph and uqlm compute from it.

Run in an environment of its own, for neither is a dependency of calibjax:

    pip install lm-polygraph==0.7.0 uqlm==0.6.7
    python tests/make_answer_goldens.py

Two answers mean the same where their texts are equal: the models of entailment that both libraries ask are replaced by
that comparison. lm-polygraph's SemanticEntropy with class probabilities by "sum" does not divide by the total
probability of the samples (Kuhn et al. 2023 do not either), so that it is another quantity and left out.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
from lm_polygraph.estimators import MaximumSequenceProbability, Perplexity, SemanticEntropy
from uqlm.black_box.match import MatchScorer
from uqlm.nli.cluster import SemanticClusterer
from uqlm.nli.entropy_utils import compute_response_probabilities, compute_semantic_entropy
from uqlm.white_box.single_logprobs import SingleLogprobsScorer

QUESTIONS, SAMPLES = 25, 6
CITIES = ("Bonn", "Berlin", "Paris", "Lyon", "Rome")


class EqualTexts:
    """Answers for uqlm's model of entailment."""

    def get_nli_results_batch(self, pairs):
        return [
            {"noncontradiction_score": float(a == b), "entailment_score": float(a == b), "entailment": a == b}
            for a, b in pairs
        ]


def made_table():
    rng = np.random.default_rng(0)

    def log_probs():
        return np.round(-rng.exponential(0.7, rng.integers(1, 8)), 4).tolist()

    return [
        {
            "question": f"Question {number}",
            "answer": str(rng.choice(CITIES, p=p)),
            "token_log_probs": log_probs(),
            "samples": [str(text) for text in rng.choice(CITIES, SAMPLES, p=p)],
            "sample_log_probs": [log_probs() for _ in range(SAMPLES)],
        }
        for number, p in enumerate(rng.dirichlet(np.full(len(CITIES), 0.5), QUESTIONS))
    ]


def by_class(table):
    """The classes of samples as lm-polygraph has them."""
    numbers = [np.unique(row["samples"], return_inverse=True)[1].tolist() for row in table]
    members = [[np.flatnonzero(np.equal(own, c)).tolist() for c in range(max(own) + 1)] for own in numbers]
    return {"sample_to_class": [dict(enumerate(own)) for own in numbers], "class_to_sample": members}


def main():
    table = made_table()
    answers, samples = [row["answer"] for row in table], [row["samples"] for row in table]
    greedy = {"greedy_log_likelihoods": [row["token_log_probs"] for row in table]}
    tokens = [[{"logprob": value} for value in row["token_log_probs"]] for row in table]
    classes = {"sample_texts": samples, "semantic_classes_entail": by_class(table)}
    single = SingleLogprobsScorer().evaluate(tokens)
    weighted, discrete = [], []
    for row in table:
        results = [[{"logprob": value} for value in sample] for sample in row["sample_log_probs"]]
        for entropies, probabilities in zip(
            (weighted, discrete), compute_response_probabilities(results, SAMPLES), strict=True
        ):
            masses = SemanticClusterer(EqualTexts()).evaluate(row["samples"], None, probabilities)[2]
            entropies.append(compute_semantic_entropy(masses))
    methods = {
        "consistency": {"uqlm": MatchScorer().evaluate(answers, samples)},
        "entropy of meanings": {
            "uqlm": discrete,
            "lm-polygraph": SemanticEntropy(class_probability_estimation="frequency")(classes),
        },
        "entropy of meanings, weighted by probability": {"uqlm": weighted},
        "minimum": {"uqlm": single["min_probability"]},
        "length_normalised": {"uqlm": single["sequence_probability"]},
        "product": {"lm-polygraph": np.exp(-MaximumSequenceProbability()(greedy))},
        "perplexity": {"lm-polygraph": np.exp(Perplexity()(greedy))},
    }
    document = {
        "versions": {name: importlib.metadata.version(name) for name in ("lm-polygraph", "uqlm")},
        "methods": {
            method: {name: np.asarray(values, np.float64).round(9).tolist() for name, values in libraries.items()}
            for method, libraries in methods.items()
        },
        "table": table,
    }
    file = Path(__file__).parent / "goldens" / "answers.json"
    file.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
