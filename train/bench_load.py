"""Cost of loading a model: time and memory, compared with transformers loading the same files to the CPU.

    python train/bench_load.py                # 1.2 billion random parameters in bfloat16; 5 GB on disk, some minutes
    python train/bench_load.py --layers 2 --hidden-size 256 --vocab-size 1000

A random Llama-shaped checkpoint is written in Hugging Face's layout, in several files, and converted to an Orbax
checkpoint. Each contender loads it in a process of its own, in bfloat16, after a tiny one of the same kind, so that
imports and compilation are not measured. The files were just written and are in the system's page cache. calibjax reads
all weights, checks that they are finite, and computes the fingerprint of safetensors. transformers maps the files and
reads nothing until a weight is used: its second row sums every weight once, its third copies each to memory of its own,
as calibjax does.

Memory is the peak of the memory that the process allocates while it loads (its anonymous pages, polled every few
milliseconds), and the growth of its resident set, which includes pages of mapped files. On a CPU both include the
parameters. Bytes read are those of system calls, without mapped files, which transformers uses.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import platform
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.commands.parser import parse_script
from calibjax.models import abstract_params, config_from_hf, load_model
from calibjax.models.hf_export import save_model
from calibjax.models.orbax_checkpoint import save_checkpoint
from calibjax.runtime.sharding import make_mesh

CONTENDERS = {
    "calibjax, 1 device": ("safetensors", 1, 1),
    "calibjax, 8 devices": ("safetensors", 8, 1),
    "calibjax, 2 processes of 4 devices, each": ("safetensors", 4, 2),
    "calibjax, converted, 1 device": ("orbax", 1, 1),
    "calibjax, converted, 8 devices": ("orbax", 8, 1),
    "calibjax, converted, 2 processes of 4 devices, each": ("orbax", 4, 2),
    "transformers": ("safetensors", 0, 1),
    "transformers, every weight copied": ("safetensors", 0, 1),
    "transformers, every weight read": ("safetensors", 0, 1),
}
"""Name -> (form of the model, devices of a process, processes)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Loads a random Llama-shaped model with calibjax and with transformers.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: of the MLP.
        layers: L.
        shard_bytes: largest size of one file.
        contenders: beginnings of the names of those to run; all if there are none.
        json: print one JSON document instead of the table.
    """

    vocab_size: int = 128_256
    hidden_size: int = 2_048
    intermediate_size: int = 8_192
    layers: int = 16
    shard_bytes: int = 500_000_000
    contenders: tuple[str, ...] = ()
    json: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden_size // 64,
            "num_key_value_heads": max(self.hidden_size // 256, 1),
            "tie_word_embeddings": True,
        }


def write(bench: Bench, folder: Path) -> int:
    """Writes the model both ways; returns the number of its parameters. In a process of its own, for its memory."""
    (folder / "like").mkdir(parents=True)
    (folder / "like" / "config.json").write_text(json.dumps(bench.settings()))
    config = config_from_hf(folder / "like")
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        rows = [0.04 * (rng.random(leaf.shape[1:], np.float32) - 0.5) for _ in range(leaf.shape[0])]
        return np.stack([np.asarray(row, jnp.bfloat16) for row in rows])

    params = jax.tree.map(draw, abstract_params(config))
    out = folder / "safetensors"
    save_model(out, config, params, like=folder / "like", dtype=jnp.bfloat16, shard_bytes=bench.shard_bytes)
    save_checkpoint(folder / "orbax", load_model(out, jnp.bfloat16), dtype="bfloat16")
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _bytes_read() -> int:
    """Bytes that the process has read by system calls, from the disk or the page cache; not those of mapped files."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024


class _Peak(threading.Thread):
    """Polls the bytes that the process has allocated, until `stopped` is set."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.highest = _resident("RssAnon")
        self.stopped = threading.Event()
        self.used = 0.0

    def run(self):
        while not self.stopped.wait(0.003):
            self.highest = max(self.highest, _resident("RssAnon"))
        self.used = time.thread_time()


def measure(folder: Path, name: str, process: int = 0, coordinator: str = "") -> dict[str, float]:
    """Loads the model as one contender, or one process of it; called in a fresh process."""
    form, devices, processes = CONTENDERS[name]
    if processes > 1:
        jax.distributed.initialize(coordinator, processes, process)

    def load(folder: Path) -> Any:
        if devices:
            mesh = make_mesh((1, devices * processes, 1)) if devices > 1 else None
            return jax.block_until_ready(load_model(folder / form, jnp.bfloat16, mesh).params)
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / form, dtype="bfloat16")
        if "read" in name:
            for parameter in model.parameters():
                parameter.sum()
        if "copied" in name:
            return [parameter.detach().clone() for parameter in model.parameters()]
        return model

    load(folder / "tiny")
    mapped = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = _Peak()
    peak.start()
    before = _bytes_read()
    begin, used, system = time.perf_counter(), time.process_time(), os.times().system
    loaded = load(folder / "model")
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    system = os.times().system - system
    peak.stopped.set()
    peak.join()
    read, used = _bytes_read() - before, used - peak.used
    held = _resident("RssAnon") - peak.before
    del loaded
    mapped = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - mapped
    if processes > 1:
        jax.distributed.shutdown()
    sizes = {"peak": peak.highest - peak.before, "held": held, "resident": mapped, "read": read}
    return {"seconds": seconds, "cpu": used, "system": system, **sizes}


def _in_a_process(function, *arguments, devices: int = 1):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _largest(folder: Path, name: str) -> dict[str, float]:
    """The result of `measure`; of several processes, which wait for each other, the largest of each figure."""
    _, devices, processes = CONTENDERS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    with concurrent.futures.ThreadPoolExecutor(processes) as threads:
        found = [
            threads.submit(_in_a_process, measure, folder, name, process, coordinator, devices=max(devices, 1))
            for process in range(processes)
        ]
        results = [future.result() for future in found]
    return {key: max(result[key] for result in results) for key in results[0]}


def main(bench: Bench) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = Bench(vocab_size=512, hidden_size=128, intermediate_size=128, layers=2)
        _in_a_process(write, tiny, folder / "tiny")
        count = _in_a_process(write, bench, folder / "model")
        files = list((folder / "model" / "safetensors").glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        for name in (name for name in CONTENDERS if name.startswith(bench.contenders or "")):
            try:
                results[name] = _largest(folder, name)
            except ImportError as error:
                results[name] = {"skipped": str(error).splitlines()[0]}
    document = {"jax": jax.__version__, "parameters": count, "bytes": size, "files": len(files), "contenders": results}
    if bench.json:
        print(json.dumps(document, indent=2))
        return
    print(
        f"{count:,} parameters, bfloat16, {len(files)} files, {size / 1e9:.2f} GB; jax {jax.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores\n"
    )
    columns = ["", "time", "CPU time", "of the system", "peak memory", "held afterwards"]
    columns += ["growth of the resident set", "bytes read"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name, result in results.items():
        if "skipped" in result:
            print(f"| {name} | not run: {result['skipped']} | | | | | |")
        else:
            cells = [f"{result[key]:.1f} s" for key in ("seconds", "cpu", "system")]
            cells += [f"{result[key] / 1e9:.2f} GB" for key in ("peak", "held", "resident", "read")]
            print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(parse_script(Bench))
