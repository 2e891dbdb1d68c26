"""Rehearsal at real size: the large commands on a random model of a published shape, on 8 virtual devices of a CPU.

    python train/rehearse.py --assets path/to/assets --out /tmp/rehearsal         # Llama-3.2-1B
    python train/rehearse.py --assets path/to/assets --out /tmp/moe --model olmoe

A model with random weights is written as bfloat16 safetensors. Each step is a command that a user starts, in one
process of 8 devices and in two of 4. `OUT/rehearsal.json` has of each step the duration, the CPU time, the peak of the
memory that each process allocated (anonymous pages, polled), and what is expected: the largest program that
`calibjax plan` compiles for the step, and what the command takes with a model of a megabyte. Finished steps are kept: a
rehearsal that is started again goes on.

- the commands, on little text, with the tokenizer of a small model: no cost depends on the ids.
- resume: `train sft` is killed after its first checkpoint by SIGKILL and goes on in two processes on another mesh.
- cache: hidden states of `--cache-tokens` tokens on disk, of the model with its first layer alone.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from calibjax.commands.parser import parse_script
from calibjax.commands.plan.program import Job, build
from calibjax.data.load import load_text
from calibjax.heads import HeadConfig
from calibjax.models import LanguageModel, abstract_params, config_from_hf, load_model
from calibjax.models.hf_export import save_model
from calibjax.runtime.context import RunContext
from calibjax.runtime.files import write_file
from calibjax.runtime.sharding import AXES, make_mesh
from calibjax.train.curves import token_curves
from calibjax.train.options import AtsOptions
from calibjax.train.sft import SftOptions

DEVICES = 8
MESH, OTHER_MESH = (1, 2, 4), (1, 4, 2)
"""Devices along data, fsdp and tensor: of all steps, and of the run that is resumed."""
NEW_TOKENS = 8
STEPS = ("train ats", "eval tasks", "compare", "train sft", "generate")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {  # Llama-3.2-1B
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 2_048,
        "intermediate_size": 8_192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
    },
    "llama2": {  # Llama-2-7B; 4 layers are 1.07 billion parameters
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 4_096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4_096,
        "rope_theta": 10_000.0,
    },
    "olmoe": {  # OLMoE-1B-7B has 16 layers, 0.42 billion parameters each; 3 layers are 1.5 billion
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "vocab_size": 50_304,
        "hidden_size": 2_048,
        "intermediate_size": 1_024,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4_096,
        "rope_theta": 10_000.0,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Runs the commands at real size and compares the memory that they take with what is planned.

    Attributes:
        assets: directory with models/ and data/.
        out: for the model, the runs and the log.
        model: shape of the model.
        layers: layers, in place of the shape's.
        steps: steps to run; by default all.
        seq_len: tokens per sequence.
        examples: sequences of text.
        cache_tokens: tokens whose hidden states are cached.
        part: what the script runs in a process of its own: planned and the name of a step, or cache.
    """

    assets: Path
    out: Path
    model: Literal["llama", "llama2", "olmoe"] = "llama"
    layers: int | None = None
    steps: tuple[str, ...] = (*STEPS, "resume", "cache")
    seq_len: int = 32
    examples: int = 32
    cache_tokens: int = 100_000
    part: tuple[str, ...] = ()

    @property
    def lora_targets(self) -> Literal["attention", "all"]:
        """Kernels that are adapted; experts have no adapters."""
        return "attention" if self.model == "olmoe" else "all"


def command(run: Rehearsal, step: str, model: Path, out: Path) -> list[str]:
    """The arguments of a command; its result goes to `out`, and it reads that of `train ats` beside it."""
    data = ["--data", str(run.assets / "data/lima/lima.jsonl.gz"), "--examples", str(run.examples)]
    data += ["--seq-len", str(run.seq_len)]
    of = [*step.split(), "--model", str(model), "--dtype", "bfloat16", "--mesh", _mesh(MESH)]
    batch = ["--batch-size", str(DEVICES)]
    head = ["--head", str(out.parent / "train ats/head")]
    end = ["--quiet", "--out", str(out)]
    match step:
        case "train ats":
            # No refit: on random weights the likelihood is flat, and a search for its minimum ends at a bound.
            fit = ["--head-kind", "linear", "--loss", "joint", "--no-refit-temperature", "--epochs", "1"]
            return [*of, *data, *batch, *fit, *end]
        case "train sft":
            adapters = ["--lora-rank", "16", "--lora-targets", run.lora_targets]
            adapters += ["--validation-fraction", "0.2"]
            return [*of, *data, *batch, *adapters, "--epochs", "2", "--checkpoint-every", "1", *end]
        case "eval tasks":
            tasks = ["--assets", str(run.assets), "--tasks", "arc_easy", "--limit", "8", "--max-length", "96"]
            return [*of, *tasks, *batch, *head, *end]
        case "compare":
            return [*of, *data, "--methods", "temperature", "isotonic", *end]
    return [*of, "--prompt", "once upon a time", "--max-new-tokens", str(NEW_TOKENS), *head]


def _mesh(sizes: tuple[int, int, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def write_model(run: Rehearsal) -> None:
    """Writes the model with random weights, one tensor at a time in memory."""
    if (run.out / "model").exists():
        return
    like = run.out / "like"
    like.mkdir(parents=True, exist_ok=True)
    for file in (run.assets / "models/stories260K").glob("*token*"):
        shutil.copy(file, like)
    settings = SHAPES[run.model] | ({"num_hidden_layers": run.layers} if run.layers else {})
    write_file(like / "config.json", json.dumps(settings))
    config, rng = config_from_hf(like), np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        out = np.empty(leaf.shape, jnp.bfloat16)
        for index in np.ndindex(*leaf.shape[: max(leaf.ndim - 2, 0)]):
            out[index] = 0.04 * (rng.random(leaf.shape[len(index) :], np.float32) - 0.5)
        return out

    save_model(run.out / "model", config, jax.tree.map(draw, abstract_params(config)), like=like, dtype=jnp.bfloat16)


# --- what is expected ---


def planned(run: Rehearsal, step: str) -> dict[str, int]:
    """Bytes of the largest program of a step on all devices: what it is called with, and what it takes beside."""
    objectives: dict[str, tuple[Any, ...]] = {"train ats": ("eval", "ats"), "train sft": ("eval", "sft")}
    found = []
    mesh = make_mesh(MESH, jax.devices())
    for objective in objectives.get(step, ("generate",) if step == "generate" else ("eval",)):
        job = Job(
            config=config_from_hf(run.out / "model"),
            objective=objective,
            # The prompt of `generate` is padded to 32 tokens, and repeated for the devices along fsdp.
            batch={"compare": 16, "generate": MESH[1]}.get(step, DEVICES),
            seq={"eval tasks": 96, "generate": 32}.get(step, run.seq_len),
            new_tokens=NEW_TOKENS if objective == "generate" else 0,
            mesh=MESH,
            dtype="bfloat16",
            ats=AtsOptions(head="linear"),
            sft=SftOptions(batch_size=DEVICES, lora_rank=16, lora_targets=run.lora_targets),
        )
        program = build(job, mesh)
        with jax.set_mesh(mesh):
            memory = program.function.lower(*program.arguments).compile().memory_analysis()
        beside = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        found.append({"arguments": DEVICES * memory.argument_size_in_bytes, "beside": DEVICES * beside})
    return max(found, key=lambda bytes_of: sum(bytes_of.values()))


# --- what is seen ---


def watch(arguments: Sequence[Sequence[str]], log: Path, kill_when: Path | None = None) -> dict[str, Any]:
    """Runs processes until they end, or kills them all as soon as there is a checkpoint in `kill_when`.

    Args:
        arguments: command line of each process.
        log: of the output of process i, with the suffix `.i.txt`.
        kill_when: a directory of checkpoints, named after their steps once they are complete.

    Returns:
        exit codes, seconds, CPU seconds of all processes, and the peak of each in bytes.
    """
    flags = f"--xla_force_host_platform_device_count={DEVICES // len(arguments)}"
    # One program at a time, as on accelerators: on a CPU the next is started before the last has freed its memory.
    one_by_one = {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}
    environment = {**os.environ, **one_by_one, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    begin, before, running = time.perf_counter(), os.times(), []
    for number, line in enumerate(arguments):
        with log.with_suffix(f".{number}.txt").open("w") as output:
            running.append(subprocess.Popen(line, env=environment, stdout=output, stderr=output))
    peaks = [0] * len(running)
    while any(process.poll() is None for process in running):
        peaks = [max(peak, _allocated(process.pid)) for peak, process in zip(peaks, running, strict=True)]
        if kill_when is not None and kill_when.exists() and any(file.name.isdigit() for file in kill_when.iterdir()):
            for process in running:
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    after = os.times()
    return {
        "codes": [process.returncode for process in running],
        "seconds": time.perf_counter() - begin,
        "cpu": after.children_user + after.children_system - before.children_user - before.children_system,
        "peaks": peaks,
    }


def _allocated(pid: int) -> int:
    try:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def in_processes(arguments: Sequence[str], processes: int) -> list[list[str]]:
    """The command lines of one job of several processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    line = [sys.executable, "-m", "calibjax", *arguments]
    if processes == 1:
        return [line]
    job = ["--coordinator", coordinator, "--processes", str(processes), "--process-id"]
    return [[*line, *job, str(number)] for number in range(processes)]


# --- the steps ---


def run_step(run: Rehearsal, step: str, processes: int) -> dict[str, Any]:
    """Runs a command, and the same on a model of a megabyte: what that takes is not the model's.

    Returns:
        what `watch` does, `baseline`, what `planned` does, and `expected`: bytes of each process.
    """
    baseline, of_model = run.out / "small" / step, run.out / f"{processes}-processes" / step
    small = json.loads((run.out / "small.json").read_text()) if (run.out / "small.json").exists() else {}
    if step not in small:
        line = command(run, step, run.assets / "models/stories260K", _fresh(baseline))
        small[step] = max(_checked(watch(in_processes(line, 1), baseline), baseline)["peaks"])
        write_file(run.out / "small.json", json.dumps(small))
    memory = _in_own_process(run, "planned", step)
    found = watch(in_processes(command(run, step, run.out / "model", _fresh(of_model)), processes), of_model)
    expected = small[step] + sum(memory.values()) // processes
    return {**_checked(found, of_model), "baseline": small[step], "planned": memory, "expected": expected}


def run_resume(run: Rehearsal) -> dict[str, Any]:
    """Kills `train sft` after its first checkpoint, resumes it on another mesh and compares the result.

    Returns:
        what `watch` does of the resumed run, `killed`, and `difference`: the largest one of a weight from the run of 8
        devices that was not killed.
    """
    whole, out = run.out / "1-processes/train sft", _fresh(run.out / "resume/train sft")
    line = command(run, "train sft", run.out / "model", out)
    killed = watch(in_processes(line, 1), out.with_name("killed"), kill_when=out / "fit/checkpoints")
    line[line.index("--mesh") + 1] = _mesh(OTHER_MESH)
    if not all(killed["codes"]):
        raise RuntimeError(f"`train sft` ended before it could be killed; see {out.with_name('killed')}.0.txt")
    found = _checked(watch(in_processes(line, 2), out.with_name("resumed")), out.with_name("resumed"))
    before, after = (load_model(each / "model").params for each in (whole, out))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return {**found, "killed": killed, "difference": max(float(jnp.abs(a - b).max()) for a, b in pairs)}


def fill_cache(run: Rehearsal) -> dict[str, int]:
    """Keeps a frozen pass on disk, with the first layer of the model; returns the bytes of the files."""
    lm = load_model(run.out / "model", jnp.bfloat16)
    params = {**lm.params, "layers": jax.tree.map(lambda x: x[:1], lm.params["layers"])}
    first = LanguageModel.from_params(dataclasses.replace(lm.config, num_layers=1), params, dtype=jnp.bfloat16)
    data = load_text(run.assets / "data/wikitext2/test.txt.gz", lm, seq_len=512, max_sequences=run.cache_tokens // 512)
    context = RunContext(directory=run.out / "cache", log=lambda line: print(line, file=sys.stderr))
    with jax.set_mesh(context.mesh):
        heads = [HeadConfig(kind="linear", hidden_size=lm.config.hidden_size)]
        kept = token_curves(first, data, heads, keep="disk", batch_size=DEVICES, context=context)
    return {"bytes": sum(array.nbytes for array in kept.arrays.values()), "tokens": int(data.tokens.size)}


def _fresh(out: Path) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _checked(found: dict[str, Any], log: Path) -> dict[str, Any]:
    if any(found["codes"]):
        raise RuntimeError(f"exit codes {found['codes']}; see {log}.0.txt")
    return found


def _in_own_process(run: Rehearsal, *part: str) -> dict[str, Any]:
    """What a part of this script prints, and what `watch` does."""
    layers = [] if run.layers is None else ["--layers", str(run.layers)]
    line = [sys.executable, __file__, "--assets", str(run.assets), "--out", str(run.out), "--model", run.model, *layers]
    line += ["--seq-len", str(run.seq_len), "--cache-tokens", str(run.cache_tokens), "--part", *part]
    log = run.out / part[0]
    found = _checked(watch([line], log), log)
    printed = json.loads(log.with_suffix(".0.txt").read_text().splitlines()[-1])
    return printed if part[0] == "planned" else {**found, **printed}


def main(run: Rehearsal) -> None:
    """Runs the steps that are not in the log, and prints a line of each."""
    if run.part:
        print(json.dumps(planned(run, run.part[1]) if run.part[0] == "planned" else fill_cache(run)))
        return
    write_model(run)
    file = run.out / "rehearsal.json"
    log: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for step in run.steps:
        for processes in (1, 2) if step in STEPS else (1,):
            name = f"{step}, {processes} x {DEVICES // processes} devices" if step in STEPS else step
            if name not in log:
                log[name] = {
                    "resume": run_resume,
                    "cache": lambda run: _in_own_process(run, "cache"),
                }.get(step, lambda run, step=step, processes=processes: run_step(run, step, processes))(run)
                write_file(file, json.dumps(log, indent=2))
            print(line_of(name, log[name]), flush=True)
    print(f"Log: {file}")


def line_of(name: str, found: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    seen = max(found["peaks"])
    cells = [name, f"{found['seconds']:.0f} s", f"{found['cpu']:.0f} s", f"{seen / 1e9:.2f} GB"]
    if "expected" in found:
        cells += [f"{found['expected'] / 1e9:.2f} GB", f"{seen / found['expected'] - 1:+.0%}"]
    if "difference" in found:
        cells.append(f"largest difference of a weight {found['difference']:.1e}")
    if "bytes" in found:
        cells.append(f"{found['tokens']:,} tokens, {found['bytes'] / 1e6:.0f} MB on disk")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(parse_script(Rehearsal))
