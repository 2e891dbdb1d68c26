"""What calibrating costs: an ATS train step against the forward pass that only computes each token's NLL.

    python train/bench.py                                     # a model that a laptop's CPU can run
    python train/bench.py --hidden-size 2304 --vocab-size 256000 --layers 26 --batch 8 --seq-len 1024 --dtype bfloat16

Both programs run the same frozen model on the same batch, turn by turn in one process. Printed: median times and their
ratio; the products with the unembedding in each compiled program; the temporaries of the compiled step beside the size
of the logits that it never holds.
"""

import dataclasses
import json
import re
import statistics
import time
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

import calibjax
from calibjax import losses
from calibjax.heads import HeadKind
from calibjax.kernels import chunked
from calibjax.models import DecoderConfig, LanguageModel, init_params
from calibjax.models.frozen import batch_stats, freeze
from calibjax.train import AtsObjective, OptimizerConfig, create_state, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Times an ATS train step against the forward pass alone, on a random Llama-shaped model.

    Attributes:
        hidden_size: D.
        layers: L.
        heads: attention heads.
        vocab_size: V.
        batch: sequences.
        seq_len: tokens a sequence.
        dtype: of the frozen model.
        head: of the calibration.
        loss: that the head is trained with.
        repeats: timed runs of each, in turn.
        json: print one JSON document instead of the table.
    """

    hidden_size: int = 512
    layers: int = 8
    heads: int = 8
    vocab_size: int = 32_256
    batch: int = 8
    seq_len: int = 160
    dtype: Literal["float32", "bfloat16"] = "float32"
    head: HeadKind = "mlp"
    loss: Literal["joint", "cross-entropy", "selective", "selective-balanced"] = "joint"
    repeats: int = 15
    json: bool = False


def unembedding_products(program: jax.stages.Compiled, vocab_size: int, chunk: int) -> int:
    """Matrix products in a compiled program with an operand or result as wide as the vocabulary or a chunk of it.

    One product stands there twice where the chunks do not divide V: in the loop, and for the ragged piece.
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


def main(bench: Bench) -> None:
    config = DecoderConfig(
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
    dtype = jnp.dtype(bench.dtype)
    lm = LanguageModel(config, init_params(config, jax.random.key(0), dtype), dtype, fingerprint="random")
    head = calibjax.HeadConfig(kind=bench.head, hidden_size=bench.hidden_size)
    identity = calibjax.HeadConfig(kind="constant", hidden_size=bench.hidden_size)
    shape = (bench.batch, bench.seq_len)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), shape, 0, bench.vocab_size),
        "targets": jax.random.randint(jax.random.key(2), shape, 0, bench.vocab_size),
        "where": jnp.ones(shape, bool),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(bench.seq_len), shape),
    }
    frozen = freeze(lm)
    optimizer = OptimizerConfig().build(1000)
    state = create_state(head.init(jax.random.key(3)), optimizer)
    hyper = {"alpha": jnp.float32(0.5), "top_label_weight": jnp.float32(1.0)}
    step = make_train_step(AtsObjective(config, head, bench.loss, dtype), optimizer).lower(  # pyright: ignore[reportFunctionMemberAccess]
        state, frozen, batch, hyper
    )

    def nll(frozen, batch):
        needed = losses.REQUIRED_STATISTICS["cross_entropy"]
        params = {"log_scale": jnp.zeros(())}
        stats, _ = batch_stats(config, identity, params, frozen, batch, dtype=dtype, statistics=needed)
        return losses.cross_entropy(stats)

    forward, step = jax.jit(nll).lower(frozen, batch).compile(), step.compile()
    times: dict[str, list[float]] = {"forward": [], "step": []}
    for repeat in range(bench.repeats + 2):
        begin = time.perf_counter()
        jax.block_until_ready(forward(frozen, batch))
        middle = time.perf_counter()
        state, metrics = step(state, frozen, batch, hyper)
        jax.block_until_ready(metrics)
        end = time.perf_counter()
        if repeat >= 2:  # the first two warm up
            times["forward"].append(middle - begin)
            times["step"].append(end - middle)
    tokens = bench.batch * bench.seq_len
    chunk = chunked.choose_chunk_size(tokens, bench.vocab_size)
    others = {config.hidden_size, config.intermediate_size, 2 * config.hidden_size, bench.seq_len, tokens}
    collisions = {chunk, bench.vocab_size % chunk} & others
    if collisions:
        raise SystemExit(f"cannot count products: other axes are {collisions} wide too; change --vocab-size.")
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "config": dataclasses.asdict(bench),
        "forward_ms": 1e3 * medians["forward"],
        "step_ms": 1e3 * medians["step"],
        "ratio": statistics.median(s / f for s, f in zip(times["step"], times["forward"], strict=True)),
        "products_forward": unembedding_products(forward, bench.vocab_size, chunk),
        "products_step": unembedding_products(step, bench.vocab_size, chunk),
        "temporaries_mib": _temporaries(step),
        "temporaries_forward_mib": _temporaries(forward),
        "logits_mib": 4 * tokens * bench.vocab_size / 2**20,
        "chunk": chunk,
    }
    if bench.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['device']}, jax {result['jax']}; {tokens:,} tokens, D {bench.hidden_size}, V {bench.vocab_size:,}")
    print(f"forward pass to NLL   {result['forward_ms']:9.1f} ms   products with W: {result['products_forward']}")
    print(f"ATS train step        {result['step_ms']:9.1f} ms   products with W: {result['products_step']}")
    print(f"ratio                 {result['ratio']:9.3f}      (median of {bench.repeats} pairs)")
    print(
        f"temporaries: step {result['temporaries_mib']:.1f} MiB, forward {result['temporaries_forward_mib']:.1f} MiB; "
        f"the logits would be {result['logits_mib']:.1f} MiB (chunks of {chunk:,} columns)"
    )


if __name__ == "__main__":
    main(tyro.cli(Bench))
