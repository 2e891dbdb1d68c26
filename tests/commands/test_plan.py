"""`calibjax plan`: what follows from the shapes against hand counts, what is read from programs, and a real compile."""

import dataclasses
import importlib.util
import json
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from published_sizes import PUBLISHED
from tiny import CONFIG_JSON, make_lm, model_tensors, write_model

from calibjax.cli import main
from calibjax.commands import plan as planning
from calibjax.kernels import SCALES
from calibjax.models.shapes import SHAPES
from calibjax.runtime.chips import CHIPS
from calibjax.runtime.compilers import DoesNotCompile, compiler_version, with_compiler
from calibjax.runtime.errors import UserError
from calibjax.runtime.hlo import collectives, executions
from calibjax.runtime.sharding import make_mesh
from calibjax.train.options import AtsOptions, make_plan
from calibjax.train.sft import SftOptions

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def make_job(model="llama-3.1-8b", objective="ats", mesh=(1, 16, 1), batch=64, seq=1024, head="linear", **sft):
    config, method = SHAPES.get(model, model), SftOptions(batch_size=batch, **sft)
    if objective == "ats":
        options = AtsOptions(head_kind=head, features=("hidden_states",), batch_size=batch)
        method = make_plan(options, config.hidden_size)
    return planning.Job(config, method, seq, mesh, "bfloat16")


# --- bytes ---


@pytest.mark.parametrize(("mesh", "divided"), [((1, 16, 1), 16), ((2, 8, 1), 8), ((16, 1, 1), 1), ((1, 4, 4), 16)])
def test_bytes_of_fine_tuning(mesh, divided):
    """Float32 weights by the published count, twice that for AdamW and its two counters; norms are whole everywhere."""
    job = make_job(objective="sft", mesh=mesh)
    program = planning.build(job, job.abstract_mesh())
    norms = 65 * 4096
    expected = 4 * ((PUBLISHED["llama-3.1-8b"] - norms) // divided + norms)
    got = planning.device_bytes(program.parameters)
    assert got == expected
    assert planning.device_bytes(program.optimizer) == 2 * expected + 2 * 4


def test_bytes_of_frozen_models_and_adapters():
    """In bfloat16; adapters of rank 8, beside the seven kernels of 32 blocks, in float32."""
    job = make_job("gemma-2-9b", mesh=(1, 8, 2))
    program, norms = planning.build(job, job.abstract_mesh()), (4 * 42 + 1) * 3584
    assert planning.device_bytes(program.parameters) == 2 * ((PUBLISHED["gemma-2-9b"] - norms) // 16 + norms)
    assert program.optimizer is None
    job = make_job(objective="sft", mesh=(16, 1, 1), lora_rank=8)
    program = planning.build(job, job.abstract_mesh())
    adapters = 4 * 32 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert planning.device_bytes(program.parameters) == 2 * PUBLISHED["llama-3.1-8b"] + adapters
    assert planning.device_bytes(program.optimizer) == 2 * adapters + 2 * 4


@pytest.mark.parametrize("objective", ["sft", pytest.param("ats", marks=pytest.mark.slow)])
def test_bytes_as_xla_counts_them(objective):
    """The program of a small model, compiled for 8 virtual devices: its arguments take the bytes that are planned."""
    job = make_job(make_lm().config, objective=objective, mesh=(2, 2, 2), batch=8, seq=16)
    mesh = make_mesh(job.mesh)
    program = planning.build(job, mesh)
    with jax.set_mesh(mesh):
        compiled = program.function.lower(*program.arguments).compile()
    used, counted = planning.device_bytes(program.arguments), compiled.memory_analysis().argument_size_in_bytes
    assert used == counted
    assert planning.device_bytes(program.parameters) == planning.device_bytes(
        planning.build(job, job.abstract_mesh()).parameters
    )
    assert collectives(compiled.as_text())[0]["all-reduce"].count > 0


# --- operations ---


def traced_flops(job):
    program = planning.build(job)
    return planning.flops(program.function.trace(*program.arguments).jaxpr)


FATAL = type("Fatal", (), {"__reduce__": lambda self: (os._exit, (3,))})()  # ends the process that unpickles it
ATTENDED = 64 * (16 + 1) / 2
"""Columns that each of 1,024 tokens is multiplied with, on average: in 16 blocks, up to the end of its own."""


def products():
    """Operations of one pass of Llama-3.1-8B forward, by hand: blocks with attention, and the unembedding."""
    tokens = 64 * 1024
    kernels = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    attention = 2 * 2 * tokens * ATTENDED * 4096
    return 32 * (2 * tokens * kernels + attention), 2 * tokens * 128256 * 4096


def test_operations_of_temperatures():
    """A forward pass, one product with the unembedding, and a head of D numbers: no backward pass of the model."""
    blocks, unembedding = products()
    head = 2 * 2 * 64 * 1024 * 4096
    got = traced_flops(make_job())
    assert got == pytest.approx(blocks + unembedding + head, rel=1e-4)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_operations_of_fine_tuning(remat):
    """Three passes over blocks and unembedding, 6 N tokens and attention; remat repeats the blocks' first.

    What is repeated lacks products that no gradient needs: the last one of a block.
    """
    blocks, unembedding = products()
    got = traced_flops(make_job(objective="sft", remat=remat))
    down = 32 * 2 * 64 * 1024 * 4096 * 14336
    expected = 3 * (blocks + unembedding) + (blocks - down if remat == "full" else 0)
    six_n = 6 * (PUBLISHED["llama-3.1-8b"] - 128256 * 4096) * 64 * 1024
    assert got == pytest.approx(expected, rel=0.01)
    if remat == "none":
        assert got == pytest.approx(six_n, rel=0.1)


def test_operations_of_a_mixture():
    """Two for each active parameter but the embedding, and attention; active ones as gpt-oss's card counts them."""
    counts = planning.parameter_counts(SHAPES["gpt-oss-120b"])
    embedding = 201088 * 2880
    assert round((counts["active"] - embedding) / 1e9, 2) == 5.13  # arXiv 2508.10925, table 1
    assert round((planning.parameter_counts(SHAPES["gpt-oss-20b"])["active"] - embedding) / 1e9, 2) == 3.61
    job = make_job("gpt-oss-120b", batch=16)
    tokens = 16 * 1024
    expected = 2 * tokens * (counts["active"] - embedding) + 36 * 2 * 2 * tokens * ATTENDED * 64 * 64
    got = planning.plan_job(job, planning.parse_topology("h100:16"), compiles=False)["flops_per_step"]
    assert got == pytest.approx(expected, rel=1e-3)


def test_operations_as_xla_counts_them():
    """Where there is no loop; and a loop, branches and devices beside it."""
    x, w = jnp.ones((8, 32)), jnp.ones((32, 16))

    def straight(x, w):
        return jnp.tanh(x @ w).T @ x

    cost = jax.jit(lambda x, w: (x @ w).T @ x).lower(x, w).compile().cost_analysis()
    assert planning.flops(jax.make_jaxpr(straight)(x, w)) == cost["flops"]

    def repeated(x, w):
        return jax.lax.scan(lambda total, _: (total + straight(x, w).sum(), None), 0.0, length=7)[0]

    assert planning.flops(jax.make_jaxpr(repeated)(x, w)) == 7 * cost["flops"]
    branches = jax.make_jaxpr(lambda x, w: jax.lax.cond(x[0, 0] > 0, straight, lambda x, w: x[:16] * 2, x, w))
    assert planning.flops(branches(jnp.ones((32, 32)), w)) > 0
    divided = jax.shard_map(straight, mesh=make_mesh((8, 1, 1)), in_specs=(P("data"), P()), out_specs=P("data"))
    assert planning.flops(jax.make_jaxpr(divided)(x, w)) == pytest.approx(cost["flops"])


# --- collectives ---


def test_collectives_of_a_program_with_known_ones():
    """Each kind of collective in a loop of 5 on 8 devices, which all see 64 numbers of 4 bytes."""
    mesh = make_mesh((8, 1, 1))

    def local(x):
        def turn(x, _):
            total = jax.lax.psum(x, "data")
            part = jax.lax.psum_scatter(total * x, "data", tiled=True)
            whole = jax.lax.all_gather(jnp.sin(part), "data", tiled=True)
            swapped = jax.lax.all_to_all(jnp.cos(whole).reshape(8, 8), "data", 0, 0, tiled=True).reshape(64)
            return jax.lax.ppermute(jnp.exp(swapped), "data", [(i, (i + 1) % 8) for i in range(8)]), None

        return jax.lax.scan(turn, x, length=5)[0]

    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    text = function.lower(jnp.ones(8 * 64)).compile().as_text()
    got, unknown = collectives(text)
    assert unknown == 0
    [gather] = re.findall(r"(\S+) = \S+ all-gather\(", text)
    assert executions(text)[gather.lstrip("%")] == 5
    size, of_ring = 4 * 64, 7 / 8
    assert {kind: (x.count, x.bytes) for kind, x in got.items()} == {
        "all-reduce": (5, 5 * 2 * size * of_ring),
        "reduce-scatter": (5, 5 * size * of_ring),
        "all-gather": (5, 5 * size * of_ring),
        "all-to-all": (5, 5 * size * of_ring),
        "collective-permute": (5, 5 * size),
    }
    assert got["all-gather"].largest == size


# From what libtpu 0.0.51 made of a step for v5e:4x4, cut down: a loop that counts to 16 by 2, and an all-gather that
# three fusions carry out.
TPU_MODULE = """\
HloModule jit_step, is_scheduled=true

%fused_computation.801 (param_0.1: bf16[1,256,64]) -> (bf16[1,256,64], bf16[1,4096,64]) {
  %param_0.1 = bf16[1,256,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.44 = bf16[1,4096,64]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.1), channel_id=159, \
replica_groups=mesh['axis_0'=16] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (bf16[1,256,64]{2,1,0}, bf16[1,4096,64]{2,1,0}) custom-call(%all-gather.44), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.767 (param_0.2: bf16[1,256,64]) -> bf16[1,4096,64] {
  %param_0.2 = bf16[1,256,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.46 = bf16[1,4096,64]{2,1,0:T(8,128)(2,1)} all-gather(%param_0.2), channel_id=159, \
replica_groups=mesh['axis_0'=16] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%body (param.1: (bf16[32,8], u32[])) -> (bf16[32,8], u32[]) {
  %param.1 = (bf16[32,8]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %constant.2 = u32[]{:T(128)} constant(2)
  %get-tuple-element.1 = bf16[32,8]{1,0:T(8,128)(2,1)} get-tuple-element(%param.1), index=0
  %get-tuple-element.2 = u32[]{:T(128)} get-tuple-element(%param.1), index=1
  %copy.1 = u32[]{:T(128)} copy(%get-tuple-element.2)
  %add.1 = u32[]{:T(128)} add(%copy.1, %constant.2)
  %collective-permute-start.1 = (bf16[32,8]{1,0}, bf16[32,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%get-tuple-element.1), source_target_pairs={{0,1},{1,0}}
  %collective-permute-done.1 = bf16[32,8]{1,0} collective-permute-done(%collective-permute-start.1)
  ROOT %tuple.1 = (bf16[32,8]{1,0}, u32[]{:T(128)}) tuple(%collective-permute-done.1, /*index=1*/%add.1)
}

%condition (param.2: (bf16[32,8], u32[])) -> pred[] {
  %constant.16 = u32[]{:T(128)} constant(16)
  %param.2 = (bf16[32,8]{1,0:T(8,128)(2,1)}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.3 = u32[]{:T(128)} get-tuple-element(%param.2), index=1
  ROOT %compare.1 = pred[]{:T(512)} compare(%get-tuple-element.3, %constant.16), direction=LT
}

ENTRY %main (x: bf16[32,8], y: bf16[1,256,64]) -> (bf16[32,8], u32[]) {
  %x = bf16[32,8]{1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[1,256,64]{2,1,0:T(8,128)(2,1)} parameter(1)
  %constant.0 = u32[]{:T(128)} constant(0)
  %copy.0 = u32[]{:T(128)} copy(%constant.0)
  %start = (bf16[1,256,64]{2,1,0}, bf16[1,4096,64]{2,1,0}) fusion(%y), kind=kCustom, calls=%fused_computation.801
  %goes-on = bf16[1,4096,64]{2,1,0} fusion(%y), kind=kCustom, calls=%async_collective_fusion.767
  %tuple.0 = (bf16[32,8]{1,0}, u32[]{:T(128)}) tuple(%x, %copy.0)
  ROOT %while.1 = (bf16[32,8]{1,0}, u32[]{:T(128)}) while(%tuple.0), condition=%condition, body=%body
}
"""


def test_collectives_of_a_tpu_module():
    got, unknown = collectives(TPU_MODULE)
    assert unknown == 0
    assert got["collective-permute"] == (8, 8 * 2 * 32 * 8, 2 * 32 * 8)
    assert executions(TPU_MODULE)["collective-permute-start.1"] == 8
    assert got["all-gather"] == (1, 2 * 4096 * 64 * 15 // 16, 2 * 4096 * 64)
    # As jax 0.10.2 writes the metadata of a Pallas kernel: over several lines, before the rest of its computation.
    kernel = '  %k = f32[8] custom-call(%x), frontend_attributes={kernel_metadata={\n"xprof_metadata":"{}"\n}}\n'
    assert collectives(TPU_MODULE.replace("  %goes-on", f"{kernel}  %goes-on")) == (got, 0)
    assert collectives(TPU_MODULE.replace("  %copy.1", f"{kernel}  %copy.1")) == (got, 0)
    assert collectives(TPU_MODULE.replace("direction=LT", "direction=NE"))[1] == 1, "an endless loop"


# --- the compiler's process ---


def test_what_libtpu_writes_is_read_or_reported():
    """The words of libtpu 0.0.51; and its programs for v5p and v6e, of which jaxlib reads the memory alone."""
    message = "the total memory required for HLO temporaries (29.50G) exceeds available HBM (15.75G). HLO module: jit"
    refused = f"RESOURCE_EXHAUSTED: CompileTimeHbmOom: Ran out of memory, {message}\nSee"
    assert planning.needed_bytes(refused) == int(29.5 * 2**30)
    assert planning.needed_bytes("RESOURCE_EXHAUSTED") is None
    got = planning.Compiled(arguments=1, total=2, collectives=None, unknown_loops=0)
    assert "jaxlib cannot read libtpu's program" in planning._note(got, planning.parse_topology("v5p:2x2x1"))


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [(os._exit, 3, "code 3"), (int, FATAL, "code 3"), (int, "x\ny", r"ValueError: .*'x\\ny'")],
)
def test_the_compiler_may_fail(function, argument, expected):
    with pytest.raises(DoesNotCompile, match=expected):
        with_compiler(function, argument, timeout=120)


# --- the command ---


def plan(capsys, *arguments):
    code = main(["plan", *arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_json_of_a_gpu_host_and_a_local_model(tmp_path, capsys):
    """Of a directory with a configuration and no weights; nothing is compiled."""
    folder = write_model(tmp_path / "model")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    options = ["--objective", "sft", "--topology", "h100:4", "--batch-size", "8", "--seq-len", "16", "--no-compile"]
    options += ["--dtype", "bfloat16"]
    got = plan(capsys, "--model", str(folder), *options, "--mesh", "data=4")
    sizes = got["bytes_per_device"]
    assert sizes["parameters"] == sizes["gradients"] == 4 * sum(tensor.size for tensor in model_tensors().values())
    assert sizes["block_inputs"] == 2 * 16 * CONFIG_JSON["hidden_size"] * 2  # of one block
    assert sizes["total"] == sum(sizes[name] for name in sizes if name not in ("total", "available"))
    assert (got["fits"], got["compiler"], got["collectives"]) == (None, None, None)
    assert got["margin_bytes"] == sizes["available"] - sizes["total"]
    assert got["flops_per_device"] * 4 == got["flops_per_step"]


def test_json_of_what_cannot_fit(capsys):
    """70B in float32 with AdamW on 16 chips of 16 GB; known without a compiler, and so never compiled."""
    got = plan(capsys, "--model", "llama-3.1-70b", "--objective", "sft", "--topology", "v5e:4x4")
    assert (got["fits"], got["compiled"]) == (False, False)
    assert got["bytes_per_device"]["parameters"] == pytest.approx(4 * PUBLISHED["llama-3.1-70b"] / 16, rel=1e-3)
    assert got["margin_bytes"] < -40 * 2**30


@pytest.mark.parametrize(
    ("options", "steps", "stored"),
    [
        (["--objective", "sft", "--epochs", "3"], 3 * (1000 - 50) // 4, None),
        (["--head-kind", "linear"], 250, 768 * 2 + 4 * (3 * len(SCALES) + 4) + 2),
    ],
)
def test_duration_of_a_run(capsys, options, steps, stored):
    """Steps of all epochs but for the rows of validation, each of the bound, at the given fractions of it.

    A head takes one frozen pass, which keeps the hidden state of a token and its curves.
    """
    sizes = ["--topology", "v5e:2x2", "--batch-size", "4", "--seq-len", "64", "--no-compile", "--tokens", "64000"]
    got = plan(capsys, "--model", "gpt2", *sizes, *options)
    run, seconds = got["run"], steps * got["roofline_seconds"]["bound"]
    assert (run["sequences"], run["steps"]) == (1000, steps)
    assert run["seconds"] == pytest.approx([seconds / each for each in reversed(run["utilisation"])])
    assert run["stored_bytes"] == (None if stored is None else 64000 * stored)


def test_without_the_compiler(monkeypatch, capsys):
    monkeypatch.setattr("calibjax.runtime.compilers.compiler_version", lambda platform: None)
    assert main(["plan", "--model", "gpt2", "--topology", "v5e:2x2", "--batch-size", "4", "--seq-len", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "From the shapes alone" in out
    assert 'The compiler is not installed: pip install "jax[tpu]".' in out
    assert "This probably fits; a step takes at least" in out
    assert "probably yes, with" in out


def test_the_run_of_a_file_is_planned(tmp_path, capsys, monkeypatch):
    """Of `train sft`: its sizes, what is trained, and the defaults that it has; not its mesh."""
    file = tmp_path / "run.yaml"
    file.write_text("command: train sft\nmodel: gpt2\ndata: x\nlora-rank: 4\nmesh: data=2\nseq-len: 64\nloss: focal\n")
    got = plan(capsys, "--config", str(file), "--topology", "v5e-8", "--no-compile")
    assert (got["objective"], got["topology"], got["batch"], got["seq"]) == ("sft", "v5e:2x4", 16, 63)
    assert got["bytes_per_device"]["optimizer"] < got["bytes_per_device"]["parameters"] / 4
    file.write_text("command: train ats\nmodel: gpt2\ndata: [x]\nepochs: 2\naccumulate: 2\nmax-tokens: 512\n")
    monkeypatch.setitem(SHAPES, "gpt2", dataclasses.replace(SHAPES["gpt2"], max_positions=256))
    got = plan(capsys, "--config", str(file), "--topology", "v5e-4", "--no-compile")
    assert (got["objective"], got["seq"], got["run"]["tokens"]) == ("ats", 256, 512)
    file.write_text(f"{file.read_text()}features: [logit_statistics]\n")
    fewer = plan(capsys, "--config", str(file), "--topology", "v5e-4", "--no-compile")
    assert fewer["stored_bytes_per_token"] == got["stored_bytes_per_token"] - 768 * 2, "without hidden states"
    file.write_text("command: train ats\nmodel: gpt2\ndata: [x]\nrecipe: paper\n")
    assert plan(capsys, "--config", str(file), "--topology", "v5e-4", "--no-compile")["batch"] == 8
    file.write_text("command: train ats\nmodel: gpt2\ndata: [x]\nrecipe: papers\n")
    assert main(["plan", "--config", str(file), "--topology", "v5e-4"]) == 2
    assert "recipe: expected one of default, paper, got 'papers'" in capsys.readouterr().err
    file.write_text("command: compare\nbins: 2\n")
    assert main(["plan", "--config", str(file), "--topology", "v5e-4"]) == 2
    assert "is of `calibjax compare`, not of `calibjax plan`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5p-16", "v5p:2x2x2", 8),
        ("v5p:8", "v5p:2x2x2", 8),
        ("v5p:4x4x2", "v5p:4x4x2", 32),
        ("v5p:4x4x12", "v5p:4x4x12", 192),
        ("h100-8", "h100:8", 8),
    ],
)
def test_topologies(text, name, devices):
    assert (planning.parse_topology(text).name, planning.parse_topology(text).devices) == (name, devices)


IMPOSSIBLE = {
    "no power of two.*v5p:4x4x12": ("v5p-384", "v5p-3", "v5p-1"),
    "no such slice; v5e has 2 axes.*v5e:4x4": ("v5e:2x2x2", "v5e:3x2", "v5e:16x32", "v5e-512"),
    "no such slice; v5p has 3 axes.*v5p:4x4x12": ("v5p:4x4", "v5p:3x3x3", "v5p:32x32x16"),
}


@pytest.mark.parametrize(("message", "text"), [(key, text) for key, texts in IMPOSSIBLE.items() for text in texts])
def test_impossible_slices(message, text):
    with pytest.raises(UserError, match=f"--topology {text}: {message}"):
        planning.parse_topology(text)


def test_hub_ids_are_published_models(capsys):
    models = ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b")
    one, other = (plan(capsys, "--model", model, "--topology", "v5e-4", "--no-compile") for model in models)
    assert one | {"model": ""} == other | {"model": ""}


# --- the real thing ---


@pytest.mark.slow
@pytest.mark.skipif(compiler_version("gpu") is None, reason="JAX's CUDA plugin, with its compiler, is not installed")
def test_a_step_compiles_for_gpus(capsys):
    """Adapters of gpt2 on eight H100, and on one: the arguments that are planned, and what moves between them."""
    options = ["--model", "gpt2", "--objective", "sft", "--lora-rank", "8", "--batch-size", "8", "--seq-len", "256"]
    many, one = (plan(capsys, *options, "--topology", f"h100:{count}") for count in (8, 1))
    assert many["compiler"].startswith("jax-cuda")
    assert (many["compiled"], many["fits"], one["fits"]) == (True, True, True)
    assert many["collectives"]["all-gather"]["count"] >= 12
    assert one["collectives"] == {}
    sizes = [got["bytes_per_device"] for got in (many, one)]
    assert 4 * sizes[0]["parameters"] < sizes[1]["parameters"]
    assert 2 * sizes[0]["temporaries"] < sizes[1]["temporaries"]
    assert many["flops_per_step"] == pytest.approx(one["flops_per_step"], rel=0.02)


@needs_compiler
@pytest.mark.slow
def test_a_step_of_8b_compiles_for_v5e():
    """The step that fits a head to Llama-3.1-8B, over 16 chips: it fits, and no collective makes the unembedding whole.

    What is gathered is the model, once, each weight by those that share it along fsdp; where libtpu hands the shards
    round while it multiplies, it does so once or twice more than it must.
    """
    got = with_compiler(planning.compile_step, make_job(head="mlp"), planning.parse_topology("v5e:4x4"))
    assert got.total < CHIPS["v5e"].memory / 2
    assert got.unknown_loops == 0
    unembedding = 2 * 128256 * 4096
    assert max(x.largest for x in got.collectives.values()) < unembedding / 4
    weights = 2 * (PUBLISHED["llama-3.1-8b"] - 128256 * 4096) * 15 / 16
    received = got.collectives["all-gather"].bytes
    received += got.collectives["collective-permute"].bytes if "collective-permute" in got.collectives else 0
    assert 0.95 * weights < received < 1.4 * weights
