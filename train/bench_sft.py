"""Cost of label smoothing: a whole fine-tuning step against the same step with full logits, in time and memory.

    python train/bench_sft.py                          # D 2,048, two layers, 2,048 tokens, V 128,256; some minutes
    python train/bench_sft.py --vocab-size 256000 --tie --dtype bfloat16
    python train/bench_sft.py --model path/to/gemma-3-270m --compile-only

The same decoder, data and AdamW in every contender; only the loss differs: ours is `linear_cross_entropy` with label
smoothing, optax `softmax_cross_entropy` of full logits and smoothed labels, "optax, plain" without smoothing. Each runs
in a process of its own. Memory is what the compiler counts beyond weights, gradients and optimiser state.
"""

import dataclasses
import multiprocessing
import statistics
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from calibjax.commands.parser import parse_script
from calibjax.models import DecoderConfig, config_from_hf, decoder, init_params
from calibjax.train import OptimizerConfig, create_state, make_train_step
from calibjax.train.sft import SftObjective, SftOptions

CONTENDERS = ("ours", "optax", "optax, plain")
BATCH, SEQ_LEN = 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Times fine-tuning steps of a random Llama-shaped model and counts their memory.

    Attributes:
        model: directory of a model to take the shape of, in place of V, D and two layers.
        vocab_size: V.
        hidden_size: D, a multiple of 128, the width of a head.
        tie: unembedding and embedding are the same array.
        dtype: compute dtype; weights are float32.
        repeats: timed steps of each contender.
        compile_only: run no steps; print only the memory.
    """

    model: str | None = None
    vocab_size: int = 128_256
    hidden_size: int = 2_048
    tie: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 3
    compile_only: bool = False


def _objective(bench: Bench, config: DecoderConfig, name: str):
    dtype = jnp.dtype(bench.dtype)
    if name == "ours":
        return SftObjective(model=config, options=SftOptions(), dtype=dtype)

    def full_logits(params, frozen, batch, hyper):
        places = {"segment_ids": batch["segment_ids"], "positions": batch["positions"]}
        hidden = decoder.hidden_states(config, params, batch["tokens"], **places, dtype=dtype, remat="full")
        z, targets = decoder.unembed(config, params, hidden), batch["targets"]
        if name == "optax":
            labels = optax.smooth_labels(jax.nn.one_hot(targets, config.vocab_size), SftOptions.label_smoothing)
            loss = optax.softmax_cross_entropy(z, labels)
        else:
            loss = optax.softmax_cross_entropy_with_integer_labels(z, targets)
        return jnp.sum(jnp.where(batch["where"], loss, 0.0)), jnp.sum(batch["where"]).astype(jnp.float32)

    return full_logits


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """Compiles one contender's step, and runs it; for a process of its own."""
    adamw, heads = OptimizerConfig(), bench.hidden_size // 128
    optimizer, shape = adamw.build(100), (BATCH, SEQ_LEN)
    config = DecoderConfig(
        family="llama",
        vocab_size=bench.vocab_size,
        hidden_size=bench.hidden_size,
        intermediate_size=11 * bench.hidden_size // 4,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        max_positions=SEQ_LEN,
        tie_embeddings=bench.tie,
    )
    config = config if bench.model is None else config_from_hf(bench.model)
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size),
        "targets": jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size),
        "where": jnp.ones(shape, bool),
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(SEQ_LEN), shape),
    }

    def start():
        return create_state(init_params(config, jax.random.key(0)), optimizer)

    abstract = jax.eval_shape(start)
    step = make_train_step(_objective(bench, config, name), optimizer, clip_norm=adamw.clip_norm)
    compiled = step.lower(abstract, None, batch, {}).compile()  # pyright: ignore[reportFunctionMemberAccess]
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(abstract.params))
    analysis = compiled.memory_analysis()
    beyond = (analysis.temp_size_in_bytes - weights) / 2**20
    result = {"weights_mib": weights / 2**20, "beyond_mib": beyond, "device": jax.devices()[0].device_kind}
    result |= {"width": config.hidden_size, "vocab_size": config.vocab_size}
    if bench.compile_only:
        return result
    state, times = jax.block_until_ready(jax.jit(start)()), []
    for _ in range(bench.repeats + 1):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(compiled(state, None, batch, {}))
        times.append(time.perf_counter() - begin)
    return result | {"step_s": statistics.median(times[1:])}


def main(bench: Bench) -> None:
    results = {}
    for name in CONTENDERS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(measure, (bench, name))
    ours, tokens = results["ours"], BATCH * SEQ_LEN
    print(
        f"{ours['device']}, jax {jax.__version__}; {tokens:,} tokens, D {ours['width']:,}, V {ours['vocab_size']:,}, "
        f"{bench.dtype}; weights {ours['weights_mib']:,.0f} MiB, logits {tokens * ours['vocab_size'] / 2**18:,.0f} MiB"
    )
    for key, title, unit in (("beyond_mib", "memory", "MiB"), ("step_s", "step", "s")):
        for name, result in results.items():
            if key in result:
                print(f"{title:8} {name:13} {result[key]:12,.2f} {unit:4} {result[key] / ours[key]:6.2f} x ours")


if __name__ == "__main__":
    main(parse_script(Bench))
