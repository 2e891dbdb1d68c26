"""Checks and times PyTorch losses on this machine's GPU, beside those that `bench.py` times.

    python kernels/torch_losses.py

It prints a line for each problem, task and loss. A loss that is not installed, or lacks an option, has a line with the
reason. It imports neither calibjax nor JAX: two frameworks share no GPU memory.
"""

import argparse
import functools
import importlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

DIFFERENTIATED = {"forward": (), "hidden": (0,), "both": (0, 1)}  # positions among (hidden, unembedding)
# Of the loss, and of loss and gradients. Some of these losses round dW, or the logits, to 16 bits while they add: that
# is allowed, and the table shows the error. A forgotten option changes the loss by some 2%.
SIZES = [(8192, 2304, 256_000), (4096, 4096, 128_256), (32_768, 2560, 128_256)]  # N, D, V
TOLERANCE = {"float32": (1e-4, 1e-4), "float16": (1e-2, 3e-2), "bfloat16": (1e-2, 1e-1)}
CHUNK = 4096  # tokens at a time: with few, reading and writing dW takes longer than the products


def _plain(torch: Any, problem: dict[str, Any]) -> Callable:
    """The mean loss of logits held in float32, or float64 for such inputs."""

    def loss(hidden, unembedding, targets):
        z = torch.nn.functional.linear(hidden, unembedding)
        z = z if z.dtype == torch.float64 else z.float()
        if problem["softcap"] is not None:
            z = problem["softcap"] * torch.tanh(z / problem["softcap"])
        return torch.nn.functional.cross_entropy(z, targets, label_smoothing=problem["label_smoothing"])

    return loss


def _compiled(torch: Any, problem: dict[str, Any]) -> Callable:
    torch.compiler.reset()  # after eight graphs of one function it would run uncompiled
    return torch.compile(_plain(torch, problem), dynamic=False, fullgraph=True)


def _cut_cross_entropy(torch: Any, problem: dict[str, Any]) -> Callable:
    """Apple's; by its default it leaves out blocks of small gradients."""
    if problem["label_smoothing"]:
        raise NotImplementedError("has no label smoothing")
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return functools.partial(loss, softcap=problem["softcap"], reduction="mean", filter_eps="auto", impl="cce")


def _liger(torch: Any, problem: dict[str, Any]) -> Callable:
    """Liger's in Triton."""
    options = {"label_smoothing": problem["label_smoothing"], "softcap": problem["softcap"], "reduction": "mean"}
    chunks = math.ceil(problem["tokens"] / CHUNK)
    options["chunk_mem_const"] = math.ceil(problem["vocab"] / (problem["width"] * chunks))
    functions = importlib.import_module("liger_kernel.transformers.functional")
    return functools.partial(functions.liger_fused_linear_cross_entropy, **options)


LOSSES: dict[str, Callable[[Any, dict[str, Any]], Callable]] = {
    "torch eager": _plain,
    "torch.compile": _compiled,
    "torch cut-cross-entropy": _cut_cross_entropy,
    "torch liger-kernel": _liger,
}


def expected_of(torch: Any, problem: dict[str, Any], inputs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """The mean loss and its gradients in float64, some tokens at a time."""
    (hidden, unembedding), targets = (x.double().requires_grad_() for x in inputs[:2]), inputs[2]
    total, loss = 0.0, _plain(torch, problem)
    for part, y in zip(hidden.split(256), targets.split(256), strict=True):
        value = loss(part, unembedding, y) * (len(y) / len(targets))
        value.backward()
        total = total + value.detach()
    return total, hidden.grad, unembedding.grad


def errors_of(found: tuple[Any, ...], expected: tuple[Any, ...]) -> list[float]:
    """Of the loss and each gradient, relative to the largest value expected; infinite with a NaN anywhere."""
    return [
        float((x.double() - y).abs().max() / y.abs().max()) if x.isfinite().all() else math.inf
        for x, y in zip(found, expected, strict=True)
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
    problems: list[dict[str, Any]], tasks: list[str], device: str, seed: int, repeats: int, only: list[str] | None
) -> list[dict[str, Any]]:
    """A row for each problem (the fields of `contenders.Problem`), task of `DIFFERENTIATED` and loss.

    `only`: losses whose names contain one of these; None: all.
    """
    torch = importlib.import_module("torch")
    rows = []
    torch.backends.cuda.matmul.allow_tf32 = False
    for problem in problems:
        inputs = inputs_of(torch, problem, seed, device)
        expected = expected_of(torch, problem, inputs)
        names = [name for name in LOSSES if not only or any(part in name for part in only)]
        for name, task in itertools.product(names, tasks):
            row = {"problem": problem, "task": task, "contender": name}
            rows.append(row)
            try:
                loss = LOSSES[name](torch, problem)
                row |= _timed(torch, loss, inputs, expected, DIFFERENTIATED[task], repeats, problem["dtype"])
            except Exception as error:  # a failure of one loss does not stop the others
                row["note"] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            note = row.get("note") or f"{1e3 * row['seconds']:.2f} ms, error {row['error']:.1e}"
            if "peak_extra_bytes" in row:
                note += f", {row['peak_extra_bytes'] / 2**20:,.0f} MiB"
            print(f"{problem}, {task}, {name}: {note}", flush=True)
    return rows


def _timed(
    torch: Any,
    loss: Callable,
    inputs: tuple[Any, ...],
    expected: Any,
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
    errors = errors_of((value.detach(), *gradients), (expected[0], *(expected[1 + i] for i in wanted)))
    del value, gradients
    row["error"], (of_loss, of_any) = max(errors), TOLERANCE[dtype]
    if errors[0] > of_loss or row["error"] > of_any:
        return row | {"note": "WRONG"}
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return row | {"seconds": statistics.median(times)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="losses whose names contain one of these")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each")
    given = parser.parse_args()
    problems = [
        {"tokens": n, "width": d, "vocab": v, "dtype": "bfloat16", "label_smoothing": smoothing, "softcap": cap}
        for (n, d, v), smoothing, cap in itertools.product(SIZES, (0.0, 0.1), (None, 30.0))
    ]
    main(problems, list(DIFFERENTIATED), "cuda", time.time_ns() % 2**31, given.repeats, given.only)
