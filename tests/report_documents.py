"""Documents with everything that a page can show, as benign or as hostile as the names given to them."""

from collections.abc import Callable


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

    difference = {"difference": 0.01, "low": 0.0, "high": 0.02}
    share = {"norm_percentile": 90.0, "logit_variance": 0.01, "logit_variance_percentile": 5.0, "null_space_share": 0.1}
    ours = ("uncalibrated", "temperature", "ats", "pretrained", named("mine"))
    return {
        "schema": 1,
        "held_out": results(*ours),
        "tasks": {
            named(name): results("uncalibrated", named("mine")) | {"subjects": [subject("law"), subject("art")]}
            for name in ("task", "other")
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
        "subjects": [subject("law"), subject("art")],
        "training": {
            named("joint"): {"step": [10, 20], "loss": [3.0, 2.5], "validation_step": [20], "validation_nll": [2.6]}
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
