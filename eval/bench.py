"""Cost of evaluation: time per token and peak memory, against the forward pass that only computes each token's NLL.

    python eval/bench.py                                   # a random model that a laptop's CPU can run
    python eval/bench.py --model path/to/stories260K --sequences 256 --seq-len 128

Every job runs in a process of its own, in turn with the forward pass, on the same random tokens:
- forward: hidden states and the NLL of every token, batch by batch;
- 1 head: `evaluate_tokens` of the base model;
- 3 heads: of the base model, temperature scaling and an MLP head, which share one forward pass;
- layers: `layer_outputs`, the predictions read from every layer;
- report: figures with their intervals from the results of three heads, and report.html.

The ratios are medians over the pairs, of elapsed time and of the CPU time of the process. Memory is the peak of the
process while the job runs: on CPU its resident set, on accelerators what JAX has allocated. It runs on Linux alone.
"""

import dataclasses
import functools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.commands.parser import parse_script
from calibjax.data import Sequences, eval_batches
from calibjax.data.synthetic import as_sequences
from calibjax.eval.layers.layers import layer_outputs, make_readout
from calibjax.eval.report.page import write_report
from calibjax.eval.report.schema import SCHEMA
from calibjax.eval.tokens import evaluate_tokens, results_json
from calibjax.heads import FittedHead, HeadConfig
from calibjax.models import DecoderConfig, LanguageModel, init_params, load_model
from calibjax.models.frozen import batch_stats, frozen_arrays
from calibjax.runtime.context import RunContext
from calibjax.runtime.distributed import to_host

JOBS = ("forward", "1 head", "3 heads", "layers", "report")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Times evaluation against the forward pass alone and records peak memory.

    Attributes:
        model: directory of a model; by default a random one with D 256, 4 layers and V 32,256.
        dtype: of the computation.
        sequences: number of sequences to evaluate.
        seq_len: tokens per sequence.
        batch: sequences per step.
        repeats: timed pairs.
    """

    model: Path | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    sequences: int = 32
    seq_len: int = 128
    batch: int = 16
    repeats: int = 5


def _model(bench: Bench) -> LanguageModel:
    dtype = jnp.dtype(bench.dtype)
    if bench.model is not None:
        return load_model(bench.model, dtype)
    config = DecoderConfig(
        family="llama",
        vocab_size=32_256,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        max_positions=bench.seq_len,
    )
    return LanguageModel(config, init_params(config, jax.random.key(0), dtype), dtype, fingerprint="random")


def _jobs(bench: Bench, lm: LanguageModel, sequences: Sequences, folder: str) -> dict[str, Callable[[], Any]]:
    """Name -> function that returns when its results are on the host. The values of the heads do not matter."""
    identity, frozen, context = FittedHead.constant(lm), frozen_arrays(lm), RunContext(progress=False)
    mlp = HeadConfig(kind="mlp", hidden_size=lm.config.hidden_size)
    heads = {
        "uncalibrated": identity,
        "temperature": dataclasses.replace(identity, params={"log_scale": jnp.float32(-0.5)}),
        "ats": FittedHead(mlp, mlp.init(jax.random.key(1)), lm.fingerprint),
    }
    options: dict[str, Any] = {"batch_size": bench.batch, "context": context}
    read = make_readout(lm)

    @jax.jit
    def nll(frozen, batch):
        head, statistics = (identity.config, identity.arrays), ("log_normalizer", "target_logit")
        stats, _ = batch_stats(lm.config, *head, frozen, batch, dtype=lm.dtype, statistics=statistics)
        return -stats.log_prob()

    @functools.cache
    def results():
        return evaluate_tokens(lm, sequences, heads, **options)

    return {
        "forward": lambda: [to_host(nll(frozen, batch)) for batch, _ in eval_batches(sequences.arrays(), bench.batch)],
        "1 head": lambda: evaluate_tokens(lm, sequences, {"uncalibrated": identity}, **options),
        "3 heads": lambda: evaluate_tokens(lm, sequences, heads, **options),
        "layers": lambda: layer_outputs(lm, sequences, read, **options),
        "report": lambda: write_report({"schema": SCHEMA, "held_out": results_json(results())}, Path(folder)),
    }


def _timed(job: Callable[[], Any]) -> tuple[float, float]:
    """Elapsed time and CPU time of the process, seconds."""
    begin, used = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - begin, time.process_time() - used


def _peak_mib() -> float:
    """Peak memory, MiB: on CPU the resident set since `clear_refs`, elsewhere what JAX allocated since the start."""
    if jax.default_backend() != "cpu":
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", float("nan")) / 2**20
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """Runs one job and the forward pass in turn; called in a fresh process."""
    lm = _model(bench)
    shape = bench.sequences, bench.seq_len + 1
    sequences = as_sequences(np.random.default_rng(0).integers(0, lm.config.vocab_size, shape, dtype=np.int32))
    with tempfile.TemporaryDirectory() as folder:
        jobs = _jobs(bench, lm, sequences, folder)
        forward, job = jobs["forward"], jobs[name]
        forward()  # both are compiled before they are timed
        job()
        pairs, peak = [], 0.0
        for _ in range(bench.repeats):
            reference = _timed(forward)
            Path("/proc/self/clear_refs").write_text("5")
            pairs.append((reference, _timed(job)))
            peak = max(peak, _peak_mib())
    scored = bench.sequences * bench.seq_len
    return {
        "us_per_token": 1e6 * statistics.median(seconds for _, (seconds, _) in pairs) / scored,
        "ratio": statistics.median(job[0] / forward[0] for forward, job in pairs),
        "cpu_ratio": statistics.median(job[1] / forward[1] for forward, job in pairs),
        "peak_mib": peak,
        "device": jax.devices()[0].device_kind,
        "hidden_size": lm.config.hidden_size,
        "layers": lm.config.num_layers,
        "vocab_size": lm.config.vocab_size,
    }


def main(bench: Bench) -> None:
    results = {}
    for name in JOBS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(measure, (bench, name))
    first = results["forward"]
    model = "random model" if bench.model is None else bench.model.name
    print(
        f"{first['device']}, jax {jax.__version__}; {bench.sequences:,} sequences of {bench.seq_len:,} tokens, "
        f"batch {bench.batch}\n{model}: {first['layers']} layers, "
        f"D {first['hidden_size']:,}, V {first['vocab_size']:,}, {bench.dtype}; median of {bench.repeats} pairs\n"
    )
    print("| job     | time per token | x forward | CPU time | peak memory | x forward |")
    print("|---------|----------------|-----------|----------|-------------|-----------|")
    for name, row in results.items():
        print(
            f"| {name:7} | {row['us_per_token']:11.2f} us | {row['ratio']:9.2f} | {row['cpu_ratio']:8.2f} "
            f"| {row['peak_mib']:7,.0f} MiB | {row['peak_mib'] / first['peak_mib']:9.2f} |"
        )


if __name__ == "__main__":
    main(parse_script(Bench))
