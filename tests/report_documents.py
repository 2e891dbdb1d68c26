"""Documents with everything that a page can show, as benign or as hostile as the names given to them."""

from collections.abc import Callable

DIFFERENCE = {"difference": -0.01, "low": -0.02, "high": 0.01}


def figures(*names, value=0.3):
    return {name: {"value": value, "low": value - 0.01, "high": value + 0.01} for name in names}


def row(nll: float, closed: str):
    ends = {"accuracy": 0.0, "low": -0.1, "high": 0.1}
    return {
        "nll": nll,
        "brier": 0.2,
        "log_loss": 0.5,
        "mce": 0.1,
        "accuracy": 0.6,
        "confidence": 0.7,
        "ece": {**figures("ece", value=0.05)["ece"], "bins": 2, "closed": closed},
        "reliability": {
            "count": [40, 60],
            "confidence": [0.3, 0.8],
            "accuracy": [0.25, 0.75],
            "low": [0.2, 0.7],
            "high": [0.3, 0.8],
        },
        "curve": {
            "bandwidth": 0.05,
            "density": [0.5, 1.0, 1.5],
            **{name: [None, 0.5 + shift, 0.9 + shift] for name, shift in ends.items()},
        },
        "against": {"ece": DIFFERENCE, "log_loss": {**DIFFERENCE, "holm_p": 0.2}},
    }


def results(*methods: str, named: Callable[[str], str] = str):
    rows = {name: row(2.0 + 0.1 * number, named("right")) for number, name in enumerate(methods)}
    if "ats" in rows:
        rows["ats"]["temperatures"] = {"edges": [0.5, 1.0, 2.0], "count": [10, 30]}
    return {
        "tokens": 100,
        "shots": 5,
        "cut": 3,
        "too_long": 2,
        "methods": rows,
        "unit": named("tokens"),
        "clusters": named("sequences"),
        "source": named("a file"),
        "confidence": named("the top choice"),
        "title": named("held out"),
        "harness": {named("acc"): 0.6},
        "failed": {named("beta"): named("no reason")},
        "left_out": {named("stacking"): named("too large")},
    }


def document(named: Callable[[str], str] = str):
    """The contents of a metrics.json; every string that is no field of the schema goes through `named`."""

    def subject(name):
        each = {"confidence": 0.7, **figures("ece")}
        methods = {"uncalibrated": each, named("mine"): each}
        shared = {"questions": 20, "confidence": 0.7, "gap": 0.2, **figures("accuracy", value=0.5)}
        return {"subject": named(name), **shared, "methods": methods}

    def text(log_prob):
        own = {"log_prob": log_prob, "log_prob_error": 0.1, "repetition": 0.2, "self_bleu": 20.0}
        return {named("0.5"): own | {f"distinct_{n}": 0.2 * n for n in (1, 2, 3)}}

    def curve(layer):
        return {"layer": layer, "agreement": 0.5, **figures("accuracy", "confidence", "ece", "mce", "entropy", "kl")}

    def edit(layer, strength):
        held_out = figures("accuracy", "confidence", "ece", "mce")
        return {"layer": layer, "strength": strength, "fit": {"ece": 0.1}, "held_out": held_out}

    def loss(name, nll, beats=False):
        own = {"nll": nll, "brier": 0.2, "ece": 0.02, "calibration_error": 0.01, "factor": 1.0, "shrinkage": 0.5}
        return {"candidate": named(name), **own, "beats_temperature": beats}

    subjects = [subject("law"), subject("high_school_government_and_politics")]
    variance = {"logit_variance": 0.01, "logit_variance_percentile": 5.0}
    size = {"norm": 1.5, "norm_percentile": 90.0, "null_space_fraction": 0.1}
    changed = {"entropy": 2.0, "confidence": 0.5, "accuracy": 0.4, "ece": 0.1, "nll": 2.5}
    ours = results("uncalibrated", "temperature", "ats", "pretrained", named("mine"), named=named)
    task = results("uncalibrated", named("mine"), named=named) | {"subjects": subjects}
    losses = {"step": [10, 20], "loss": [3.0, 2.5], "validation_step": [20], "validation_nll": [2.6]}
    return {
        "schema": 1,
        "held_out": ours,
        "tasks": {named(name): task for name in ("task", "other")},
        "transfer": {named("domain"): {**ours}},
        "texts": {"pretrained": text(-3.0), named("mine"): text(-2.0)},
        "analogies": {named("mine"): {named("0.5"): {"accuracy": 0.4, "error": 0.05}}},
        "layers": {
            "tokens": 100,
            "readout": named("letters only"),
            "curves": [curve(0), curve(1)],
            "phase": {"settled": 1, "settled_fraction": 0.9, "correction": DIFFERENCE, "found": False, "peak": 1},
        },
        "direction": {
            "recipe": named("confident"),
            "counts": [10, 20],
            "expected_fraction": 0.1,
            "difference": DIFFERENCE,
            "chosen": {"layer": 1, "strength": 0.5},
            "rows": [{"layer": 1, "gap": 1.0, "length": 2.0, "null_space_fraction": 0.1}],
        },
        "sweep": [edit(0, 0.0), edit(1, -0.5), edit(1, 0.5)],
        "neurons": [{"layer": 1, "index": 3, **size, **variance}],
        "ablation": [{"name": named("none"), **changed}],
        "subjects": subjects,
        "training": {named("joint"): losses},
        "comparison": {
            "candidates": [loss("temperature scaling", 2.6), loss("joint-4", 2.5)],
            "chosen": [loss("temperature scaling", 2.6), loss("joint-4", 2.5, beats=True)],
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

    return {"sequences": [[{"text": named("first"), "scored": False}, token(" word"), token("right", right=True)]]}


def documents():
    whole, methods = document(), ("uncalibrated", "temperature", "ats")
    base = {"schema": 1, "run": {"command": "train ats", "seed": 0}}
    text, parts = whole["texts"]["pretrained"], ("layers", "direction", "sweep", "neurons", "ablation", "subjects")
    answers = {**results(*methods), "unit": "questions"}
    tuned = results("base", "fine_tuned", "base_temperature")
    compared = {**results(*methods), "unit": "predictions", "reference": "temperature", "sort": "ece"}
    texts = {"texts": {"pretrained": text, "lhts-T0.9": text}, "analogies": whole["analogies"]}
    return {
        "tokens": {**base, "held_out": results(*methods), "transfer": {"other": tuned}},
        "compare": {**base, "held_out": compared},
        "lhts": {**base, "held_out": results("pretrained", "lhts-T0.9"), **texts},
        "layers": {**base, "held_out": results("uncalibrated", "edited"), **{name: whole[name] for name in parts}},
        "tasks": {**base, "held_out": answers, "tasks": {"mmlu": whole["tasks"]["task"]}},
    }
