"""Documents with everything that a page can show, as benign or as hostile as the names given to them."""

import importlib.util
from collections.abc import Callable

import numpy as np
from tiny import make_lm, make_sequences, ragged

from calibjax.eval.compare import Outcome, Result, comparison_json
from calibjax.eval.layers.layers import LayerOutputs, layers_json
from calibjax.eval.report.schema import SCHEMA
from calibjax.eval.tokens import evaluate_tokens, identity_head, results_json
from calibjax.runtime.context import RunContext

N = 60


def interval(value):
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def document(named: Callable[[str], str] = str):
    """The contents of a metrics.json; every string that is no field of the schema goes through `named`."""
    counts = {"count": [40, 60], "confidence": [0.3, 0.8], "accuracy": [0.25, 0.75]}

    def row(nll):
        return {
            "nll": nll,
            "brier": 0.2,
            "mce": 0.1,
            "accuracy": 0.6,
            "confidence": 0.7,
            "ece": {**interval(0.05), "bins": 2, "closed": named("right")},
            "reliability": {**counts, "low": [0.2, 0.7], "high": [0.3, 0.8]},
            "curve": {
                "bandwidth": 0.05,
                "density": [0.5, 1.0, 1.5],
                **{
                    end: [None, 0.5 + shift, 0.9 + shift]
                    for end, shift in (("accuracy", 0), ("low", -0.1), ("high", 0.1))
                },
            },
            "against": {"ece": {"difference": -0.01, "low": -0.02, "high": 0.01}},
        }

    def results(*methods):
        rows = {name: row(2.0 + 0.1 * number) for number, name in enumerate(methods)}
        if "ats" in rows:
            rows["ats"]["temperatures"] = {"edges": [0.5, 1.0, 2.0], "count": [10, 30]}
        return {
            "tokens": 100,
            "unit": named("tokens"),
            "clusters": named("windows"),
            "methods": rows,
            "failed": {named("beta"): named("no reason")},
            "left_out": {named("lore"): named("too large")},
            "shots": 5,
            "source": named("a file"),
            "harness": {named("acc"): 0.6},
            "cut": 3,
            "too_long": 2,
            "confidence": named("the top choice"),
            "title": named("held out"),
        }

    def subject(name):
        each = {"confidence": 0.7, "ece": interval(0.1)}
        return {
            "subject": named(name),
            "questions": 20,
            "confidence": 0.7,
            "accuracy": interval(0.5),
            "gap": 0.2,
            "methods": {"uncalibrated": each, named("mine"): each},
        }

    def text(log_prob):
        figures = {"log_prob": log_prob, "log_prob_error": 0.1, "repetition": 0.2, "self_bleu": 20.0}
        return {named("0.5"): figures | {f"distinct_{n}": 0.2 * n for n in (1, 2, 3)}}

    def curve(layer):
        names = ("accuracy", "confidence", "ece", "mce", "entropy", "kl")
        return {"layer": layer, "agreement": 0.5, **{name: interval(0.3) for name in names}}

    def edit(layer, strength):
        names = ("accuracy", "confidence", "ece", "mce")
        held_out = {name: interval(0.1) for name in names}
        return {"layer": layer, "strength": strength, "fit": {"ece": 0.1}, "held_out": held_out}

    def loss(name, nll, error, beats=False):
        figures = {"nll": nll, "brier": 0.2, "ece": error, "calibration_error": error, "factor": 1.0, "shrinkage": 0.5}
        return {"loss": name, **figures, "beats_temperature": beats}

    subjects = [subject("law"), subject("high_school_government_and_politics")]
    difference = {"difference": 0.01, "low": 0.0, "high": 0.02}
    share = {"norm_percentile": 90.0, "logit_variance": 0.01, "logit_variance_percentile": 5.0, "null_space_share": 0.1}
    ours = ("uncalibrated", "temperature", "ats", "pretrained", named("mine"))
    return {
        "schema": 1,
        "held_out": results(*ours),
        "tasks": {
            named(name): results("uncalibrated", named("mine")) | {"subjects": subjects} for name in ("task", "other")
        },
        "transfer": {named("domain"): results(*ours)},
        "texts": {"pretrained": text(-3.0), named("mine"): text(-2.0)},
        "analogies": {named("mine"): {named("0.5"): {"accuracy": 0.4, "error": 0.05}}},
        "layers": {
            "tokens": 100,
            "readout": named("letters only"),
            "curves": [curve(0), curve(1)],
            "phase": {"settled": 1, "settled_share": 0.9, "correction": difference, "found": False, "peak": 1},
        },
        "direction": {
            "recipe": named("confident"),
            "counts": [10, 20],
            "expected_share": 0.1,
            "difference": difference,
            "chosen": {"layer": 1, "strength": 0.5},
            "rows": [{"layer": 1, "gap": 1.0, "length": 2.0, "null_space_share": 0.1}],
        },
        "sweep": [edit(0, 0.0), edit(1, -0.5), edit(1, 0.5)],
        "neurons": [{"layer": 1, "index": 3, "norm": 1.5, **share}],
        "ablation": [
            {"name": named("none"), "entropy": 2.0, "confidence": 0.5, "accuracy": 0.4, "ece": 0.1, "nll": 2.5}
        ],
        "subjects": subjects,
        "training": {
            named("joint"): {"step": [10, 20], "loss": [3.0, 2.5], "validation_step": [20], "validation_nll": [2.6]}
        },
        "comparison": {
            "candidates": [loss(named("temperature scaling"), 2.6, 0.02), loss(named("joint-4"), 2.5, 0.01)],
            "chosen": [loss(named("temperature scaling"), 2.6, 0.02), loss(named("joint-4"), 2.5, 0.01, beats=True)],
        },
        "run": {named("command"): named("train ats"), "seed": 0, "text": {named("column"): [named("a"), None, True]}},
    }


def sample(named: Callable[[str], str] = str):
    """The contents of a tokens.json."""

    def token(text, **changes):
        top = [[named(text), 0.9, 0.1]] * 2
        scored = {"text": named(text), "scored": True, "right": False, "temperature": 2.0, "top": top}
        pair = {name: [0.999, 0.1] for name in ("confidence", "probability", "entropy")}
        return {**scored, **pair, **changes}

    return {"windows": [[{"text": named("first"), "scored": False}, token(" word"), token("right", right=True)]]}


def outcome(rng):
    correct = rng.random(N) < 0.6
    confidence = np.clip(0.3 + 0.4 * correct + 0.2 * rng.standard_normal(N), 0.01, 0.99)
    choice = rng.integers(0, 3, N)
    return Outcome(confidence.astype(np.float32), correct.astype(np.float32), choice, np.log(confidence))


def documents():
    """One document of each kind, made by the functions that the commands call."""
    rng, lm, sequences = np.random.default_rng(0), make_lm(), ragged(make_sequences(6))
    heads = {name: identity_head(lm) for name in ("uncalibrated", "temperature", "ats")}
    quiet = RunContext(progress=False)
    evaluated = evaluate_tokens(lm, sequences, heads, bins=2, keep_tokens=True, context=quiet)
    tokens = results_json(evaluated)
    results = {name: Result(outcome(rng), 0.5, 1, None) for name in ("uncalibrated", "temperature", "histogram")}
    rows = comparison_json(results, reference="temperature", bins=2)
    held_out = {"tokens": N, "unit": "predictions", "clusters": "rows", "reference": "temperature", "sort": "ece"}
    held_out |= {"methods": rows, "failed": {"beta": "no reason"}, "left_out": {"lore": "no features"}}
    drawn = document()
    outputs = LayerOutputs(
        *(rng.random((2, N)), rng.integers(0, 5, (2, N)), rng.random((2, N)) < 0.5),
        *(-rng.random((3, 2, N))),
        np.arange(N, dtype=np.int32) // 4,
    )
    layers = {"tokens": N, "readout": "letters only", **layers_json(outputs, bins=2)}
    base = {"schema": SCHEMA, "run": {"command": "train ats", "seed": 0}}
    of_models = {**tokens, "methods": dict.fromkeys(("pretrained", "lhts-T0.9"), tokens["methods"]["ats"])}
    text = next(iter(drawn["texts"].values()))
    tuned = dict.fromkeys(("base", "fine_tuned", "base_temperature"), tokens["methods"]["ats"])
    edited = {**tokens, "methods": dict.fromkeys(("uncalibrated", "edited"), tokens["methods"]["ats"])}
    parts = {name: drawn[name] for name in ("direction", "sweep", "neurons", "ablation", "subjects")}
    return {
        "tokens": {**base, "held_out": tokens, "transfer": {"other": {**tokens, "methods": tuned}}},
        "compare": {**base, "held_out": held_out},
        "lhts": {
            **base,
            "held_out": of_models,
            "texts": {"pretrained": text, "lhts-T0.9": text},
            "analogies": drawn["analogies"],
        },
        "layers": {**base, "held_out": edited, "layers": layers, **parts},
        **({"tasks": {**base, **tasks(results)}} if importlib.util.find_spec("lm_eval") else {}),
    }


def tasks(results):
    from calibjax.eval.tasks.answer_files import Answers
    from calibjax.eval.tasks.benchmark import answers_json, subjects_json

    outcomes = [result.outcome for result in results.values()]
    fields = [np.stack(part) for part in zip(*outcomes, strict=True)]
    subjects = np.array(["law", "art"] * (N // 2))
    answers = Answers(*fields, subjects, {"acc": np.ones(N)}, np.zeros(N, int), 0, *np.full((3, N), ""))
    names, options = ["uncalibrated", "temperature", "ats"], {"bins": 2, "closed": "right"}
    of_task = answers_json(answers, names, **options)
    own = {"shots": 5, "source": "hub", "subjects": subjects_json(answers, names, **options)}
    return {"held_out": of_task, "tasks": {"mmlu": {**of_task, **own}}}
