"""Checks and times PyTorch losses on this machine's GPU or CPU, for comparison by `bench.py`.

    python kernels/torch_losses.py '{"problems": [...], "tasks": ["forward", "both"], "device": "cuda", "seed": 0, ...}'

`bench.py` calls it in a separate process, because two frameworks share no GPU memory, with the arguments of `main`. It
prints one JSON document: versions, and a row for each problem, task and loss. A loss that is not installed, or lacks an
option, has a row with the reason. It imports neither calibjax nor JAX.
"""

import functools
import importlib
import importlib.metadata
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

DIFFERENTIATED = {"forward": (), "hidden": (0,), "both": (0, 1)}  # positions among (hidden, unembedding)
PACKAGES = ("torch", "triton", "cut-cross-entropy", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")
# Of the loss, and of loss and gradients. Some of these losses round dW, or the logits, to 16 bits while they add: that
# is allowed, and the table shows the error. A forgotten option changes the loss by some 2%.
TOLERANCE = {"float32": (1e-4, 1e-4), "float16": (1e-2, 3e-2), "bfloat16": (1e-2, 1e-1)}
SAMPLE = 48  # tokens and rows of the unembedding that are compared with float64
CHUNK = 4096  # tokens at a time, as quack's default: with few, reading and writing dW takes longer than the products


def _plain(torch: Any, problem: dict[str, Any]) -> Callable:
    """The mean loss of logits held in float32."""

    def loss(hidden, unembedding, targets):
        z = torch.nn.functional.linear(hidden, unembedding).float()
        if problem["softcap"] is not None:
            z = problem["softcap"] * torch.tanh(z / problem["softcap"])
        return torch.nn.functional.cross_entropy(z, targets, label_smoothing=problem["label_smoothing"])

    return loss


def _refuse(problem: dict[str, Any], *lacking: str) -> None:
    for option in lacking:
        if problem[option]:
            raise NotImplementedError(f"has no {option.replace('_', ' ')}")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise NotImplementedError(f"{error.name} is not installed") from None


def _compiled(torch: Any, problem: dict[str, Any]) -> Callable:
    torch.compiler.reset()  # after eight graphs of one function it would run uncompiled
    return torch.compile(_plain(torch, problem), dynamic=False, fullgraph=True)


def _chunked(chunk: int | None, torch: Any, problem: dict[str, Any]) -> Callable:
    """PyTorch's own, by chunks of tokens; with label smoothing it would fall back to all logits."""
    _refuse(problem, "label_smoothing", "softcap")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return lambda h, w, y: torch.nn.functional.linear_cross_entropy(h, w, y, options=options)


def _cut_cross_entropy(filter_eps: str | None, torch: Any, problem: dict[str, Any]) -> Callable:
    """Apple's; `filter_eps` "auto" leaves out blocks of small gradients, None computes all."""
    _refuse(problem, "label_smoothing")
    options = {"softcap": problem["softcap"], "reduction": "mean", "filter_eps": filter_eps, "impl": "cce"}
    loss = _module("cut_cross_entropy").linear_cross_entropy
    return lambda h, w, y: loss(h, w, y, **options)


def _liger(chunk: int | None, torch: Any, problem: dict[str, Any]) -> Callable:
    """Liger's in Triton. Its own chunks hold as many logits as there are numbers in the hidden states."""
    options = {"label_smoothing": problem["label_smoothing"], "softcap": problem["softcap"], "reduction": "mean"}
    if chunk is not None:
        chunks = math.ceil(problem["tokens"] / chunk)
        options["chunk_mem_const"] = math.ceil(problem["vocab"] / (problem["width"] * chunks))
    loss = _module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda h, w, y: loss(h, w, y, **options)


def _liger_hopper(torch: Any, problem: dict[str, Any]) -> Callable:
    """Liger's in CuTe DSL for Hopper GPUs, which holds all logits in bfloat16."""
    _refuse(problem, "label_smoothing", "softcap")
    liger = _module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return lambda h, w, y: liger.liger_fused_linear_cross_entropy_sm90(h, w, y, reduction="mean")


def _liger_scaled_hopper(torch: Any, problem: dict[str, Any]) -> Callable:
    """Liger's in CuTe DSL for Hopper GPUs that holds no logits, and computes them again for the gradients."""
    _refuse(problem, "label_smoothing", "softcap")
    liger = _module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    return lambda h, w, y: liger.LigerFusedScaledCrossEntropySM90Function.apply(h, w, y).mean()


def _quack(torch: Any, problem: dict[str, Any]) -> Callable:
    """Its kernels for Hopper GPUs, which it takes itself for bfloat16 and V a multiple of 128."""
    _refuse(problem, "label_smoothing", "softcap")
    # Version 0.6.5 refuses gradients by chunks of as many tokens as the hidden states are wide.
    chunk = CHUNK if min(CHUNK, problem["tokens"]) != problem["width"] else problem["width"] // 2
    quack = _module("quack.linear_cross_entropy")
    return lambda h, w, y: quack.chunked_linear_cross_entropy(h, w, y, chunk_size=chunk, reduction="mean")


LOSSES: dict[str, Callable[[Any, dict[str, Any]], Callable]] = {
    "torch eager": _plain,
    "torch.compile": _compiled,
    "torch linear_cross_entropy": functools.partial(_chunked, None),
    f"torch linear_cross_entropy {CHUNK}": functools.partial(_chunked, CHUNK),
    "torch cut-cross-entropy": functools.partial(_cut_cross_entropy, "auto"),
    "torch cut-cross-entropy unfiltered": functools.partial(_cut_cross_entropy, None),
    "torch liger-kernel": functools.partial(_liger, None),
    f"torch liger-kernel {CHUNK}": functools.partial(_liger, CHUNK),
    "torch liger-kernel hopper": _liger_hopper,
    "torch liger-kernel scaled hopper": _liger_scaled_hopper,
    "torch quack": _quack,
}


class Oracle:
    """The mean loss, and its gradients on a sample of tokens and of rows of the unembedding, in float64."""

    def __init__(self, torch: Any, problem: dict[str, Any], inputs: tuple[Any, Any, Any]) -> None:
        hidden, unembedding, targets = inputs
        beta, cap, tokens, vocab = problem["label_smoothing"], problem["softcap"], *map(len, inputs[:2])

        def logits(hidden: Any, weights: Any, dtype: Any) -> Any:
            z = hidden.to(dtype) @ weights.to(dtype).T
            return z if cap is None else cap * torch.tanh(z / cap)

        def d_logits(z: Any, log_normalizer: Any, is_target: Any) -> Any:
            dz = ((z - log_normalizer[:, None]).exp() - (1 - beta) * is_target - beta / vocab) / tokens
            return dz if cap is None else dz * (1 - (z / cap) ** 2)

        total, log_normalizers = 0.0, []
        for part, y in zip(hidden.split(256), targets.split(256), strict=True):
            z = logits(part, unembedding, torch.float32)
            mean = (1 - beta) * z.gather(1, y[:, None])[:, 0].double() + beta * z.double().mean(1)
            log_normalizers.append(z.double().logsumexp(1))
            total += float((log_normalizers[-1] - mean).sum())
        self.tokens, ids = (
            torch.randperm(tokens)[:SAMPLE].to(targets.device),
            torch.arange(vocab, device=targets.device),
        )
        self.rows = torch.cat([targets[:SAMPLE], ids[torch.randperm(vocab)[:SAMPLE].to(ids.device)]]).unique()
        z = torch.cat([logits(hidden[self.tokens], w, torch.float64) for w in unembedding.split(16384)], dim=1)
        dz = d_logits(z, z.logsumexp(1), targets[self.tokens][:, None] == ids[None, :])
        parts = zip(dz.split(16384, dim=1), unembedding.split(16384), strict=True)
        d_hidden: Any = sum(part @ rows.double() for part, rows in parts)
        z = logits(hidden, unembedding[self.rows], torch.float64)
        dz = d_logits(z, torch.cat(log_normalizers), targets[:, None] == self.rows[None, :])
        self._expected = (z.new_tensor(total / tokens), d_hidden, dz.T @ hidden.double())

    def errors(self, loss: Any, gradients: tuple[Any, ...]) -> list[float]:
        """Of the loss and each gradient, relative to the largest value expected; infinite with a NaN anywhere."""
        found = [(loss.detach(), ...), *zip(gradients, (self.tokens, self.rows), strict=False)]
        return [
            float((array[sample].double() - expected).abs().max() / expected.abs().max())
            if array.isfinite().all()
            else math.inf
            for (array, sample), expected in zip(found, self._expected, strict=False)
        ]


def inputs_of(torch: Any, problem: dict[str, Any], seed: int, device: str) -> tuple[Any, Any, Any]:
    """Hidden states, unembedding [V, D] and targets; logits with a standard deviation of 3, the targets' 3 higher.

    Were the targets' as all others, the mean loss would hardly show whether label smoothing is there.
    """
    generator, dtype = torch.Generator(device=device).manual_seed(seed), getattr(torch, problem["dtype"])
    options = {"generator": generator, "device": device}
    unembedding = torch.randn(problem["vocab"], problem["width"], **options) * 3 / problem["width"] ** 0.5
    targets = torch.randint(problem["vocab"], (problem["tokens"],), **options)
    hidden = torch.randn(problem["tokens"], problem["width"], **options) + unembedding[targets] / 3
    return hidden.to(dtype), unembedding.to(dtype), targets


def main(
    problems: list[dict[str, Any]],
    tasks: list[str],
    device: str,
    seed: int,
    repeats: int,
    only: list[str] | None,
    seconds: float,
) -> dict[str, Any]:
    """The rows of all problems.

    Args:
        problems: the fields of `contenders.Problem` for each.
        tasks: keys of `DIFFERENTIATED`.
        device: "cuda" or "cpu".
        seed: of the inputs.
        repeats: timed calls of each loss.
        only: losses whose names contain one of these; None: all.
        seconds: time after which no other loss is started.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        sys.exit("torch is not installed")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU")
    end, rows = time.monotonic() + seconds, []
    torch.backends.cuda.matmul.allow_tf32 = False
    for problem in problems:
        inputs = oracle = None
        for name in LOSSES:
            if only and not any(part in name for part in only):
                continue
            for task in tasks:
                row = {"problem": problem, "task": task, "contender": name}
                rows.append(row)
                if time.monotonic() > end:
                    row["note"] = "not run: time limit reached"
                    continue
                try:
                    loss = LOSSES[name](torch, problem)
                    if inputs is None:
                        inputs = inputs_of(torch, problem, seed, device)
                        with torch.no_grad():
                            oracle = Oracle(torch, problem, inputs)
                    row |= _timed(torch, loss, inputs, oracle, DIFFERENTIATED[task], repeats, problem["dtype"])
                except Exception as error:  # a failure of one loss does not stop the others
                    text = (str(error).strip().splitlines() or [""])[0]
                    row["note"] = (
                        text if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text}"[:80]
                    )
    return {"versions": {package: _version(package) for package in PACKAGES}, "rows": rows}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _timed(
    torch: Any,
    loss: Callable,
    inputs: tuple[Any, Any, Any],
    oracle: Any,
    wanted: tuple[int, ...],
    repeats: int,
    dtype: str,
) -> dict[str, Any]:
    """Error, median time and peak memory beyond inputs and results of a loss with its gradients in `wanted`."""
    on_gpu = inputs[0].is_cuda
    arguments = [x.detach().requires_grad_(i in wanted) if i < 2 else x for i, x in enumerate(inputs)]
    differentiated = [arguments[i] for i in wanted]

    def run() -> tuple[Any, tuple[Any, ...]]:
        with torch.set_grad_enabled(bool(wanted)):
            value = loss(*arguments)
        gradients = torch.autograd.grad(value, differentiated) if wanted else ()
        if on_gpu:
            torch.cuda.synchronize()
        return value, gradients

    run()  # compiles and warms up
    row: dict[str, Any] = {}
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    value, gradients = run()
    if on_gpu:
        results = sum(x.nbytes for x in (value, *gradients))
        row["peak_extra_bytes"] = torch.cuda.max_memory_allocated() - before - results
    errors = oracle.errors(value, gradients)
    del value, gradients
    row["error"], (of_loss, of_any) = max(errors), TOLERANCE[dtype]
    if errors[0] > of_loss or row["error"] > of_any:
        return row | {"note": "WRONG"}
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return row | {"seconds": statistics.median(times), "fastest_seconds": min(times)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
