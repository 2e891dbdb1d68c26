"""Times of our evaluation and of other libraries' on the same inputs, alternating in one process on a CPU.

    pip install netcal torch accelerate
    python eval/bench_beside.py path/to/model --assets path/to/assets --jobs generate metrics fits tasks start
    taskset -c 0 python eval/bench_beside.py path/to/model --data alpaca.jsonl --jobs ats --cpu-time

- ats: `train ats --recipe paper`, beside the authors' method in PyTorch (arXiv 2409.19817): the same initial head,
  batches and optimiser, and the frozen model in every step; then `train ats` by default, which chooses among heads.
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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import calibjax
from calibjax.commands.parser import in_one_line

Jobs = dict[str, dict[str, Callable[[], Any]]]
"""Work -> library -> what to time; the first library is ours."""


def temperature_heads(args: argparse.Namespace) -> Jobs:
    import torch
    import transformers

    from calibjax.data import batches
    from calibjax.train.options import make_plan

    lm = calibjax.load_model(args.model)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
    data = calibjax.load_text(args.data, lm, seq_len=args.seq_len, layout="full", max_sequences=args.sequences)
    paper = calibjax.AtsOptions(recipe="paper")
    plan = make_plan(paper, lm.config.hidden_size)
    steps = plan.epochs * len(data.tokens) // plan.batch_size
    start = plan.heads[-1].init(jax.random.key(0))  # as `fit_ats` does with its default seed

    def ours(options: calibjax.AtsOptions = paper) -> Any:
        return calibjax.fit_ats(lm, data, options, calibjax.RunContext().silent()).head.params

    def loss(head: Any, tokens: np.ndarray, targets: np.ndarray, where: np.ndarray) -> Any:
        """The authors' selective smoothing of a sequence, with uniform smoothing and weight 0.5."""
        with torch.no_grad():
            hidden = base.model(torch.tensor(tokens)[None]).last_hidden_state
            logits = base.lm_head(hidden)
        calibrated = (logits * head(hidden).exp().clip(max=10))[0]
        labels = torch.tensor(np.where(where, targets, -100)).long()
        right = calibrated.argmax(dim=-1) == labels  # an ignored token counts as wrong, with a loss of 0
        cross_entropy = functools.partial(torch.nn.functional.cross_entropy, reduction="sum")
        hard = cross_entropy(calibrated[right], labels[right]) / right.sum().clip(min=1)
        smooth = cross_entropy(calibrated[~right], labels[~right], label_smoothing=1.0) / (~right).sum().clip(min=1)
        return (~right).float().mean() * hard + right.float().mean() * smooth

    def losses(head: Any, batch: dict[str, np.ndarray]) -> Iterator[Any]:
        for row in zip(batch["tokens"], batch["targets"], batch["where"], strict=True):
            yield loss(head, *row) / len(batch["tokens"])

    def theirs() -> Any:
        head = authors_head(plan.heads[-1], start)
        optimizer = torch.optim.AdamW(head.parameters(), plan.optimizer.learning_rate, weight_decay=0.0)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, steps)
        for batch in batches(data.arrays(), plan.batch_size, seed=0, epochs=plan.epochs):
            for value in losses(head, batch):
                value.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return head

    heads = [authors_head(plan.heads[-1], start), authors_head(plan.heads[-1], ours()), theirs()]
    with torch.no_grad():
        first, *last = [float(sum(losses(head, data.arrays()))) for head in heads]
    assert abs(last[0] - last[1]) < 0.01 * abs(first - last[1]), f"the losses differ: {first}, then {last}"
    jax.clear_caches()
    work = f"ATS, {steps} steps on {data.tokens.size:,} positions, loss {first:.4f} to {last[0]:.4f}"
    return {work: {"calibjax": ours, "PyTorch": theirs, "calibjax, default": lambda: ours(calibjax.AtsOptions())}}


def authors_head(config: calibjax.HeadConfig, params: Any) -> Any:
    """The authors' transformer head in PyTorch with our parameters: from hidden states `[B, T, D]` to log 1/T."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    module: Any = config.build()
    options: Any = {"num_attention_heads": module.block.num_heads, "attn_implementation": "sdpa"}
    shape = LlamaConfig(hidden_size=config.hidden_size, intermediate_size=module.block.intermediate_size, **options)

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.rotary = LlamaDecoderLayer(shape, 0), LlamaRotaryEmbedding(shape)
            self.output = torch.nn.Linear(config.hidden_size, 1)

        def forward(self, hidden: Any) -> Any:
            positions = torch.arange(hidden.shape[1])[None]
            return self.output(self.layer(hidden, position_embeddings=self.rotary(hidden, positions)))

    block, output = params["block"], params["output"]
    arrays = {"output.weight": output["kernel"].T, "output.bias": output["bias"]}
    for theirs, ours in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
        arrays[f"layer.{theirs}.weight"] = block[ours]["scale"]
    for theirs, ours in (("self_attn", "attention"), ("mlp", "mlp")):
        arrays |= {f"layer.{theirs}.{name}_proj.weight": x["kernel"].T for name, x in block[ours].items()}
    head = Head()
    head.load_state_dict({name: torch.tensor(np.asarray(x)) for name, x in arrays.items()})
    return head


def generation(args: argparse.Namespace) -> Jobs:
    import torch
    import transformers

    from calibjax.torch import attach

    lm = calibjax.load_model(args.model)
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
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
            with_head = attach(other, args.export, check=False)
            theirs()
            with_head.detach()

        assert (ours() == theirs()).mean() > 0.99, "the continuations differ"
        jax.clear_caches()
        found: dict[str, Callable[[], Any]] = {"calibjax": ours, "transformers": theirs}
        if args.gguf:
            found["llama.cpp"] = llama_cpp(args.gguf, prompts)
        if args.export:
            found["calibjax, head"] = functools.partial(ours, head=calibjax.load_head(args.export, lm))
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
    isotonic, multinomial = IsotonicRegression(out_of_bounds="clip"), LogisticRegression(C=np.inf, max_iter=1000)
    ours = {
        "confidence": Predictions(confidence=confidence, correct=correct),
        "logits": Predictions(logits=logits, labels=labels.astype(np.int32)),
    }

    def fit(name: str, kind: str) -> Any:
        return jax.block_until_ready(jax.tree.leaves(METHODS[name].fit(ours[kind])))

    theirs: dict[tuple[str, str], tuple[str, Callable[[], Any]]] = {
        ("platt", "confidence"): ("scikit-learn", lambda: LogisticRegression(C=np.inf).fit(scores[:, None], correct)),
        ("isotonic", "confidence"): ("scikit-learn", lambda: isotonic.fit(confidence, correct)),
        ("histogram", "confidence"): ("netcal", lambda: netcal.binning.HistogramBinning(15).fit(confidence, correct)),
        ("beta", "confidence"): ("netcal", lambda: netcal.scaling.BetaCalibration().fit(confidence, correct)),
        ("temperature", "logits"): ("netcal", lambda: netcal.scaling.TemperatureScaling().fit(probabilities, labels)),
        ("matrix", "logits"): ("scikit-learn", lambda: multinomial.fit(logits, labels)),
    }
    return {
        f"{name}, {kind}": {"calibjax": functools.partial(fit, name, kind), library: their_fit}
        for (name, kind), (library, their_fit) in theirs.items()
    }


def tasks(args: argparse.Namespace) -> Jobs:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from calibjax.eval.tasks.local_data import task_manager
    from calibjax.lm_eval import CalibjaxLM

    manager = task_manager(args.tasks, args.assets)

    def run(model: Any, name: str) -> dict[str, Any]:
        found: Any = simple_evaluate(
            model,
            tasks=[name],
            limit=args.limit,
            bootstrap_iters=0,
            task_manager=manager,
            log_samples=False,
            verbosity="ERROR",
        )
        return found["results"]

    how: dict[str, Any] = {"pretrained": args.model, "batch_size": 32, "dtype": "float32"}
    ours, theirs = CalibjaxLM(**how), HFLM(**how | {"device": "cpu"})

    def pair(name: str) -> dict[str, Callable[[], Any]]:
        found = [run(model, name)[name]["acc,none"] for model in (ours, theirs)]
        assert found[0] == found[1], f"the accuracies differ: {found}"
        jax.clear_caches()
        return {"calibjax": functools.partial(run, ours, name), "lm-eval": functools.partial(run, theirs, name)}

    return {f"{name}, {args.limit} questions a part": pair(name) for name in args.tasks}


def start(args: argparse.Namespace) -> Jobs:
    def python(*arguments: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    load = f"import calibjax; calibjax.load_model({args.model!r})"
    other = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({args.model!r})"
    return {
        "print the help": {
            "calibjax": python("-m", "calibjax", "--help"),
            "lm-eval": python("-m", "lm_eval", "--help"),
        },
        "import": {"calibjax": python("-c", "import calibjax"), "jax": python("-c", "import jax")},
        "load the model": {"calibjax": python("-c", load), "transformers": python("-c", other)},
    }


JOBS = {
    "ats": temperature_heads,
    "generate": generation,
    "metrics": error_metrics,
    "fits": fits,
    "tasks": tasks,
    "start": start,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="directory of a model")
    parser.add_argument("--assets", help="directory with data/, for --jobs tasks")
    parser.add_argument("--data", help="text, for --jobs ats")
    parser.add_argument("--sequences", type=int, default=16, help="of the text; shorter rows are left out")
    parser.add_argument("--seq-len", type=int, default=129, help="tokens of a sequence")
    parser.add_argument("--export", help="of `calibjax export`, for --jobs generate")
    parser.add_argument("--gguf", help="the model as a GGUF file, for --jobs generate")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, required=True, help="what to time")
    parser.add_argument("--tasks", nargs="+", default=["mmlu_local"], help="the harness's tasks")
    parser.add_argument("--limit", type=int, default=5, help="questions of each task, or of each of its parts")
    parser.add_argument("--cpu-time", action="store_true", help="of this process, for a core that others use too")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds after the first")
    args = parser.parse_args()
    sys.excepthook = in_one_line
    clock = time.process_time if args.cpu_time else time.perf_counter
    print("| work | library | first | median | times ours |\n|---|---|---|---|---|", flush=True)
    for name in args.jobs:
        for work, libraries in JOBS[name](args).items():
            seconds: dict[str, list[float]] = {library: [] for library in libraries}
            for _ in range(args.rounds + 1):
                for library, run in libraries.items():
                    began = clock()
                    run()
                    seconds[library].append(clock() - began)
            middle = {library: statistics.median(times[1:]) for library, times in seconds.items()}
            for library, times in seconds.items():
                ratio = middle[library] / middle["calibjax"]
                print(f"| {work} | {library} | {times[0]:.3f} s | {middle[library]:.3f} s | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
