"""Cost of a batch of the frozen pass of ATS, or of an SFT train step, against the forward pass to each token's NLL.

    python train/bench.py                                     # a model that a laptop's CPU can run
    python train/bench.py --shape gemma-2-2b --fit-layers --dtype bfloat16 --batch 4 --seq-len 1024
    python train/bench.py --shape llama-3.1-8b --fit-layers --dtype bfloat16 --objective sft --batch 4 --seq-len 1024

Both programs run the same frozen model on the same batch, in turn in one process. The output is the median times and
their ratio, the products with the unembedding in each compiled program, and the temporaries of the compiled step beside
the size of the logits that it never holds.
"""

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import calibjax
from calibjax import kernels, losses
from calibjax.commands.parser import parse_script
from calibjax.kernels import chunked
from calibjax.models import DecoderConfig, LanguageModel, init_params
from calibjax.models.frozen import batch_stats, freeze
from calibjax.models.shapes import SHAPES
from calibjax.nn.attention import cudnn_attention, cudnn_takes
from calibjax.train import OptimizerConfig, create_state, make_train_step
from calibjax.train.curves import frozen_pass
from calibjax.train.sft import SftObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Times a step against the forward pass alone, on a random model.

    Attributes:
        objective: ats: the frozen pass, after which heads are fitted without the model (`bench_ats.py`); sft: all
            weights, in float32, with label smoothing 0.1, and AdamW.
        shape: a name of `calibjax.models.shapes`, whose sizes replace those below, with at most `layers` layers; None:
            a Llama of the sizes below.
        fit_layers: as many of the shape's layers as fit into the device's memory, instead of `layers`.
        hidden_size: D.
        layers: L.
        heads: attention heads.
        vocab_size: V.
        batch: sequences.
        seq_len: tokens a sequence.
        dtype: of the frozen model.
        cudnn_attention: in both programs, for bfloat16 models on NVIDIA GPUs.
        operator: implementation of `vocab_stats` in both programs, by name ("pallas_gpu"); None: the default.
        repeats: timed runs of each, in turn.
        json: print one JSON document instead of the table.
    """

    objective: Literal["ats", "sft"] = "ats"
    shape: str | None = None
    fit_layers: bool = False
    hidden_size: int = 512
    layers: int = 8
    heads: int = 8
    vocab_size: int = 32_256
    batch: int = 8
    seq_len: int = 160
    dtype: Literal["float32", "bfloat16"] = "float32"
    cudnn_attention: bool = False
    operator: str | None = None
    repeats: int = 15
    json: bool = False


def unembedding_products(program: jax.stages.Compiled, vocab_size: int, chunk: int) -> int:
    """Matrix products in a compiled program with an operand or result as wide as the vocabulary or a chunk of it.

    One product appears twice where the chunks do not divide V: in the loop, and for the last, shorter chunk.
    """
    widths = {vocab_size, chunk, vocab_size % chunk} - {0}
    # An instruction's line gives its result's shape and its operands' names: their shapes stand on their own lines.
    instruction = re.compile(r"\s*(?:ROOT )?(%[\w.-]+) = (.*?)\s([\w-]+)\((.*)$")
    shapes, products = {}, []
    for line in (program.as_text() or "").splitlines():
        if match := instruction.match(line):
            name, result, operation, rest = match.groups()
            shapes[name] = {int(n) for dims in re.findall(r"\w+\[([\d,]+)\]", result) for n in dims.split(",")}
            if operation in ("dot", "convolution", "custom-call"):
                products.append([name, *re.findall(r"%[\w.-]+", rest.split("), ")[0])])
    return sum(any(widths & shapes[name] for name in names) for names in products)


def _temporaries(program: jax.stages.Compiled) -> float:
    """MiB of temporary buffers, from the compiler's own analysis; NaN where it gives none."""
    analysis = program.memory_analysis()
    return float("nan") if analysis is None else analysis.temp_size_in_bytes / 2**20


def _config(bench: Bench) -> DecoderConfig:
    if bench.shape is not None:
        if bench.shape not in SHAPES:
            raise SystemExit(f"--shape: expected one of {', '.join(SHAPES)}, got {bench.shape!r}.")
        config = SHAPES[bench.shape]
        layers = _fitting_layers(config, bench) if bench.fit_layers else min(bench.layers, config.num_layers)
        return _cut(config, layers)
    return DecoderConfig(
        family="llama",
        vocab_size=bench.vocab_size,
        hidden_size=bench.hidden_size,
        intermediate_size=11 * bench.hidden_size // 4,
        num_layers=bench.layers,
        num_heads=bench.heads,
        num_kv_heads=bench.heads,
        head_dim=bench.hidden_size // bench.heads,
        max_positions=bench.seq_len,
    )


def _prefer(bench: Bench, config: DecoderConfig) -> None:
    """Puts `bench.operator` before the other implementations, where it can run."""
    if bench.operator is None:
        return
    rows = [jax.ShapeDtypeStruct((n, config.hidden_size), bench.dtype) for n in (bench.batch, config.vocab_size)]
    try:
        jax.eval_shape(lambda h, w: kernels.vocab_stats(h, w, implementation=bench.operator), *rows)
    except ValueError as error:
        raise SystemExit(f"--operator: {error}") from None
    others = dict(kernels.IMPLEMENTATIONS)
    kernels.IMPLEMENTATIONS.clear()
    kernels.IMPLEMENTATIONS.update({bench.operator: others.pop(bench.operator), **others})


def _cut(config: DecoderConfig, layers: int) -> DecoderConfig:
    """The first layers."""
    return dataclasses.replace(config, num_layers=layers, local_layers=config.local_layers[:layers])


def _fitting_layers(config: DecoderConfig, bench: Bench) -> int:
    """Layers whose weights, with all that training keeps of them, take at most half of the device's memory."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is None:
        raise SystemExit("--fit-layers: this device does not report its memory; give --layers.")
    # Trained: float32 weights, gradients and two moments, and the weights as they are computed with.
    size = (16 if bench.objective == "sft" else 0) + jnp.dtype(bench.dtype).itemsize

    def count(layers: int) -> int:
        shapes = jax.eval_shape(lambda: init_params(_cut(config, layers), jax.random.key(0), jnp.bfloat16))
        return sum(x.size for x in jax.tree.leaves(shapes))

    one, two = count(1), count(2)
    layers = 1 + int((memory / 2 / size - one) // (two - one))
    if layers < 1:
        raise SystemExit(f"--fit-layers: not even one layer fits into {memory / 2**30:.0f} GiB.")
    return min(layers, config.num_layers)


class _Training(NamedTuple):
    """A train step and its arguments; the state is donated."""

    step: jax.stages.Compiled
    state: Any
    frozen: Any
    hyper: Mapping[str, jax.Array]


def _ats(bench: Bench, lm: LanguageModel, batch: Mapping[str, jax.Array]) -> _Training:
    def step(state: Any, frozen: Any, batch: Any, hyper: Any) -> Any:
        return state, frozen_pass(lm.config, lm.dtype, ("hidden_states",), frozen, batch)

    frozen = freeze(lm)
    return _Training(jax.jit(step).lower((), frozen, batch, {}).compile(), (), frozen, {})


def _sft(bench: Bench, lm: LanguageModel, batch: Mapping[str, jax.Array]) -> _Training:
    optimizer = OptimizerConfig().build(1000)
    state = create_state(jax.tree.map(lambda x: jnp.array(x, jnp.float32), lm.params), optimizer)
    step = make_train_step(SftObjective(model=lm.config, label_smoothing=0.1, dtype=lm.dtype), optimizer)
    return _Training(step.lower(state, None, batch, {}).compile(), state, None, {})  # pyright: ignore[reportFunctionMemberAccess]


def main(bench: Bench) -> None:
    config = _config(bench)
    dtype = jnp.dtype(bench.dtype)
    if bench.cudnn_attention and not (
        jax.default_backend() == "gpu" and cudnn_takes(config.head_dim, dtype, config.attention_softcap)
    ):
        raise SystemExit("--cudnn-attention: expected a GPU and a bfloat16 model without soft-cap on attention.")
    _prefer(bench, config)
    lm = LanguageModel(config, init_params(config, jax.random.key(0), dtype), dtype, fingerprint="random")
    identity = calibjax.HeadConfig(kind="constant", hidden_size=config.hidden_size)
    shape = (bench.batch, bench.seq_len)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size),
        "targets": jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size),
        "where": jnp.ones(shape, bool),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(bench.seq_len), shape),
    }
    frozen = freeze(lm)
    training = (_ats if bench.objective == "ats" else _sft)(bench, lm, batch)
    step, state = training.step, training.state

    def nll(frozen, batch):
        needed = losses.LOSSES["cross-entropy"].statistics
        params = {"log_scale": jnp.zeros(())}
        stats, _ = batch_stats(config, identity, params, frozen, batch, dtype=dtype, statistics=needed)
        return losses.cross_entropy(stats)

    forward = jax.jit(nll).lower(frozen, batch).compile()
    times: dict[str, list[float]] = {"forward": [], "step": []}
    for repeat in range(bench.repeats + 2):
        begin = time.perf_counter()
        jax.block_until_ready(forward(frozen, batch))
        middle = time.perf_counter()
        state, metrics = step(state, training.frozen, batch, training.hyper)
        jax.block_until_ready(metrics)
        end = time.perf_counter()
        if repeat >= 2:  # the first two warm up
            times["forward"].append(middle - begin)
            times["step"].append(end - middle)
    tokens = bench.batch * bench.seq_len
    chunk = chunked.choose_chunk_size(tokens, config.vocab_size)
    others = {config.hidden_size, config.intermediate_size, 2 * config.hidden_size, bench.seq_len, tokens}
    collisions = {chunk, config.vocab_size % chunk} & others
    # Where another axis is as wide as a chunk they cannot be told apart, and other operators have no such chunks.
    products = ("not counted",) * 2
    if not collisions and bench.operator in (None, "chunked"):
        products = tuple(unembedding_products(program, config.vocab_size, chunk) for program in (forward, step))
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "config": dataclasses.asdict(bench),
        "layers": config.num_layers,
        "forward_ms": 1e3 * medians["forward"],
        "step_ms": 1e3 * medians["step"],
        "ratio": statistics.median(s / f for s, f in zip(times["step"], times["forward"], strict=True)),
        "products_forward": products[0],
        "products_step": products[1],
        "temporaries_mib": _temporaries(step),
        "temporaries_forward_mib": _temporaries(forward),
        "logits_mib": 4 * tokens * config.vocab_size / 2**20,
        "chunk": chunk if bench.operator in (None, "chunked") else None,
    }
    if bench.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{result['device']}, jax {result['jax']}; {tokens:,} tokens, {config.num_layers} layers, "
        f"D {config.hidden_size}, V {config.vocab_size:,}"
    )
    print(f"forward pass to NLL   {result['forward_ms']:9.1f} ms   products with W: {result['products_forward']}")
    print(
        f"{bench.objective.upper()} step              {result['step_ms']:9.1f} ms   "
        f"products with W: {result['products_step']}"
    )
    print(f"ratio                 {result['ratio']:9.3f}      (median of {bench.repeats} pairs)")
    print(
        f"temporaries: step {result['temporaries_mib']:.1f} MiB, forward {result['temporaries_forward_mib']:.1f} MiB; "
        f"the logits would be {result['logits_mib']:.1f} MiB"
        + ("" if result["chunk"] is None else f" (chunks of {chunk:,} columns)")
    )


if __name__ == "__main__":
    options = parse_script(Bench)
    with cudnn_attention(options.cudnn_attention):
        main(options)
