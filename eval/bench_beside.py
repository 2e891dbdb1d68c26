"""Times of evaluation beside other libraries' on the same inputs, in turn in one process, on CPU.

    pip install netcal torch accelerate
    python eval/bench_beside.py path/to/model --assets path/to/assets --jobs generate metrics fits tasks start

- generate: greedy continuations of a prompt of 128 tokens by 64; with the head of `--export` too, and by llama.cpp from
  the file of `--gguf` on one thread.
- metrics: ECE of a million confidences and its bootstrap interval (100 resamples, by a loop where a library has none).
- fits: post-hoc methods on 50,000 confidences, or on logits of 10 classes.
- tasks: the harness's own evaluation of `--tasks` in float32, beside its Hugging Face backend.
- start: a new Python that prints the help, imports, or loads the model.

"first" has the compilation of our programs, without a cache on disk; "median" is of the rounds after it. The ratio is
that of medians: times theirs take as long as ours.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import calibjax

Jobs = dict[str, dict[str, Callable[[], Any]]]
"""Work -> library -> what to time; the first library is ours."""


def generation(given: argparse.Namespace) -> Jobs:
    import torch
    import transformers

    from calibjax.torch import attach

    lm = calibjax.load_model(given.model)
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype="float32").eval()
    other.generation_config.eos_token_id = None

    def libraries(batch: int) -> dict[str, Callable[[], Any]]:
        prompts = np.random.default_rng(0).integers(3, lm.config.vocab_size, (batch, 128))
        ids = torch.tensor(prompts)
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}

        def ours(**options: Any) -> Any:
            made = calibjax.generate(lm, prompts.tolist(), max_new_tokens=64, stop_tokens=(), **options)
            return np.asarray(made.tokens)

        def theirs() -> Any:
            with torch.no_grad():
                return other.generate(ids, **settings).numpy()[:, 128:]

        def attached() -> Any:
            with_head = attach(other, given.export, check=False)
            theirs()
            with_head.detach()

        assert (ours() == theirs()).mean() > 0.99, "the continuations differ"
        jax.clear_caches()
        found: dict[str, Callable[[], Any]] = {"calibjax": ours, "transformers": theirs}
        if given.gguf:
            found["llama.cpp"] = llama_cpp(given.gguf, prompts)
        if given.export:
            found["calibjax, head"] = functools.partial(ours, head=calibjax.load_head(given.export, lm))
            found["transformers, head"] = attached
        return found

    return {f"generate 64 tokens, batch {batch}": libraries(batch) for batch in (1, 16, 32)}


def llama_cpp(file: str, prompts: np.ndarray) -> Callable[[], Any]:
    """64 greedy tokens after each prompt by llama.cpp, on one thread, all prompts in one batch."""
    import llama_cpp as api  # pyright: ignore[reportMissingImports]

    rows, length = prompts.shape
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_seq_max = rows * (length + 64), rows * length, rows
    settings.n_threads = settings.n_threads_batch = 1
    context, batch = api.llama_init_from_model(model, settings), api.llama_batch_init(rows * length, 0, 1)
    width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def largest(tokens: np.ndarray, first: int) -> np.ndarray:
        """The most likely token after each row `[rows, columns]`, whose first column has this position."""
        columns = tokens.shape[1]
        batch.n_tokens = tokens.size
        for place, token in enumerate(tokens.ravel().tolist()):
            row, column = divmod(place, columns)
            batch.token[place], batch.pos[place], batch.logits[place] = token, first + column, column == columns - 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        assert api.llama_decode(context, batch) == 0
        logits = [api.llama_get_logits_ith(context, (row + 1) * columns - 1) for row in range(rows)]
        return np.array([[np.ctypeslib.as_array(row, (width,)).argmax()] for row in logits])

    def run() -> np.ndarray:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        tokens = [largest(prompts, 0)]
        for step in range(63):
            tokens.append(largest(tokens[-1], length + step))
        return np.concatenate(tokens, axis=1)

    return run


def error_metrics(_: argparse.Namespace) -> Jobs:
    import netcal.metrics  # pyright: ignore[reportMissingImports]
    from sklearn.calibration import calibration_curve

    from calibjax import metrics

    rng = np.random.default_rng(0)
    confidence = rng.beta(4, 2, 1_000_000).astype(np.float32)
    correct = (rng.random(len(confidence)) < confidence**1.3).astype(np.float32)
    edges = np.linspace(0, 1, 16)

    def sklearn_ece(confidence: np.ndarray, correct: np.ndarray) -> Any:
        accuracy, mean = calibration_curve(correct, confidence, n_bins=15)
        weights = np.histogram(confidence, edges)[0]
        return (weights[weights > 0] * np.abs(accuracy - mean)).sum() / len(confidence)

    def netcal_ece(confidence: np.ndarray, correct: np.ndarray) -> Any:
        return netcal.metrics.ECE(15).measure(confidence, correct)

    def our_ece(confidence: np.ndarray, correct: np.ndarray) -> Any:
        return metrics.expected_calibration_error(confidence, correct).block_until_ready()

    def our_interval() -> Any:
        return metrics.metric_interval(metrics.expected_calibration_error, confidence, correct, resamples=100)

    def interval(metric: Callable[[np.ndarray, np.ndarray], Any]) -> Any:
        draws = (rng.integers(0, len(confidence), len(confidence)) for _ in range(100))
        return np.quantile([metric(confidence[draw], correct[draw]) for draw in draws], (0.025, 0.975))

    libraries = {"calibjax": our_ece, "netcal": netcal_ece, "scikit-learn": sklearn_ece}
    values = [float(metric(confidence, correct)) for metric in libraries.values()]
    assert max(values) - min(values) < 1e-5, values
    once: dict[str, Any] = {name: functools.partial(m, confidence, correct) for name, m in libraries.items()}
    intervals: dict[str, Any] = {name: functools.partial(interval, m) for name, m in libraries.items()}
    return {"ECE of 1,000,000": once, "ECE of 1,000,000 with its interval": {**intervals, "calibjax": our_interval}}


def fits(_: argparse.Namespace) -> Jobs:
    import netcal.binning  # pyright: ignore[reportMissingImports]
    import netcal.scaling  # pyright: ignore[reportMissingImports]
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    from calibjax.recalibrate import METHODS, Predictions

    rng = np.random.default_rng(0)
    confidence = np.clip(rng.beta(4, 2, 50_000), 1e-4, 1 - 1e-4).astype(np.float32)
    correct = (rng.random(len(confidence)) < confidence**1.3).astype(np.float32)
    logits = (3 * rng.normal(size=(50_000, 10))).astype(np.float32)
    labels = np.argmax(logits / 2 + rng.gumbel(size=logits.shape), axis=1)
    scores = np.log(confidence) - np.log1p(-confidence)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    ours = {
        "confidence": Predictions(confidence=confidence, correct=correct),
        "logits": Predictions(logits=logits, labels=labels.astype(np.int32)),
    }

    def fit(name: str, kind: str) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(jax.tree.leaves(METHODS[name].fit(ours[kind])))

    return {
        "Platt": {
            "calibjax": fit("platt", "confidence"),
            "scikit-learn": lambda: LogisticRegression(C=np.inf).fit(scores[:, None], correct),
        },
        "isotonic": {
            "calibjax": fit("isotonic", "confidence"),
            "scikit-learn": lambda: IsotonicRegression(out_of_bounds="clip").fit(confidence, correct),
        },
        "histogram": {
            "calibjax": fit("histogram", "confidence"),
            "netcal": lambda: netcal.binning.HistogramBinning(bins=15).fit(confidence, correct),
        },
        "beta": {
            "calibjax": fit("beta", "confidence"),
            "netcal": lambda: netcal.scaling.BetaCalibration().fit(confidence, correct),
        },
        "temperature, 10 classes": {
            "calibjax": fit("temperature", "logits"),
            "netcal": lambda: netcal.scaling.TemperatureScaling().fit(probabilities, labels),
        },
        "matrix, 10 classes": {
            "calibjax": fit("matrix", "logits"),
            "scikit-learn": lambda: LogisticRegression(C=np.inf, max_iter=1000).fit(logits, labels),
        },
    }


def tasks(given: argparse.Namespace) -> Jobs:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from calibjax.eval.tasks.local_data import task_manager
    from calibjax.lm_eval import CalibjaxLM

    manager = task_manager(given.tasks, given.assets)

    def run(model: Any, name: str) -> dict[str, Any]:
        found: Any = simple_evaluate(
            model,
            tasks=[name],
            limit=given.limit,
            bootstrap_iters=0,
            task_manager=manager,
            log_samples=False,
            verbosity="ERROR",
        )
        return found["results"]

    how: dict[str, Any] = {"pretrained": given.model, "batch_size": 32, "dtype": "float32"}
    ours, theirs = CalibjaxLM(**how), HFLM(**how | {"device": "cpu"})

    def pair(name: str) -> dict[str, Callable[[], Any]]:
        found = [run(model, name)[name]["acc,none"] for model in (ours, theirs)]
        assert found[0] == found[1], f"the accuracies differ: {found}"
        jax.clear_caches()
        return {"calibjax": functools.partial(run, ours, name), "lm-eval": functools.partial(run, theirs, name)}

    return {f"{name}, {given.limit} questions a part": pair(name) for name in given.tasks}


def start(given: argparse.Namespace) -> Jobs:
    def python(*arguments: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    load = f"import calibjax; calibjax.load_model({given.model!r})"
    other = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({given.model!r})"
    return {
        "print the help": {
            "calibjax": python("-m", "calibjax", "--help"),
            "lm-eval": python("-m", "lm_eval", "--help"),
        },
        "import": {"calibjax": python("-c", "import calibjax"), "jax": python("-c", "import jax")},
        "load the model": {"calibjax": python("-c", load), "transformers": python("-c", other)},
    }


JOBS = {"generate": generation, "metrics": error_metrics, "fits": fits, "tasks": tasks, "start": start}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="directory of a model")
    parser.add_argument("--assets", help="directory with data/, for --jobs tasks")
    parser.add_argument("--export", help="of `calibjax export`, for --jobs generate")
    parser.add_argument("--gguf", help="the model as a GGUF file, for --jobs generate")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, required=True, help="what to time")
    parser.add_argument("--tasks", nargs="+", default=["mmlu_local"], help="the harness's tasks")
    parser.add_argument("--limit", type=int, default=5, help="questions of each task, or of each of its parts")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds after the first")
    given = parser.parse_args()
    print("| work | library | first | median | times ours |\n|---|---|---|---|---|", flush=True)
    for name in given.jobs:
        for work, libraries in JOBS[name](given).items():
            seconds: dict[str, list[float]] = {library: [] for library in libraries}
            for _ in range(given.rounds + 1):
                for library, run in libraries.items():
                    began = time.perf_counter()
                    run()
                    seconds[library].append(time.perf_counter() - began)
            middle = {library: statistics.median(times[1:]) for library, times in seconds.items()}
            for library, times in seconds.items():
                ratio = middle[library] / middle["calibjax"]
                print(f"| {work} | {library} | {times[0]:.3f} s | {middle[library]:.3f} s | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
