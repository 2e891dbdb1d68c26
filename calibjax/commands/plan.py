"""`calibjax plan`: memory and time of a step on one mesh, or on every mesh of a topology, before a run."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from calibjax.commands.groups import JsonOptions
from calibjax.data import check_context
from calibjax.eval.report.command_tables import plan_table
from calibjax.eval.report.notes import plan_verdict
from calibjax.eval.report.schema import Document
from calibjax.eval.report.terminal import print_result
from calibjax.models import LanguageModel, abstract_params
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import init_adapters
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.frozen import frozen_arrays
from calibjax.models.gguf import is_gguf
from calibjax.models.hub import download, repository_of
from calibjax.models.load import read_config
from calibjax.models.shapes import SHAPES
from calibjax.nn.experts import use_ragged_dot
from calibjax.runtime import compilers
from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.chips import Topology, parse_topology
from calibjax.runtime.compilers import DoesNotCompile
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError
from calibjax.runtime.files import read_json
from calibjax.runtime.hlo import Collective, collectives, flops
from calibjax.runtime.options import Count, Range, flag_of
from calibjax.runtime.sharding import AXES, batch_sharding, check_batch, make_mesh, mesh_shape, param_shardings
from calibjax.train.curves import frozen_batch, stored_features
from calibjax.train.options import RECIPES, AtsOptions, AtsPlan, HeadKind, make_plan
from calibjax.train.sft import SftObjective, SftOptions
from calibjax.train.step import make_train_step
from calibjax.train.tuning import first_state

UTILISATION = (0.3, 0.6)
"""Fractions of the roofline that a run reaches; docs/plan.md states where they come from."""
_PREALLOCATED = 0.75  # of a GPU's whole memory, by JAX unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(JsonOptions):
    """Reports whether a step fits on devices, which need not be present, and the least time of a step and of a run.

    `--config run.yaml` of a run of `train ats` or `train sft` plans that run. The step is compiled ahead of time. That
    needs the compiler, libtpu (pip install "jax[tpu]") or JAX's CUDA plugin (pip install "jax[cuda13]"), but no TPU or
    GPU, and can take minutes. Without it the memory of temporaries is estimated from the shapes.
    Example: calibjax plan --model llama-3.1-8b --topology h100:8

    Attributes:
        model: published name (docs/models.md), hub id, directory with config.json, or GGUF file; no weights are read.
        topology: chips: v5e-16 (or v5e:4x4, chips along each axis), v5p-16, v6e-8, a100:8, h100:8 or h200:8.
        objective: ats: the frozen pass that heads are fitted on; sft: fine-tuning.
        seq_len: inputs per sequence, one fewer than `train --seq-len`; by default 1,024 within the model's context.
        mesh: devices along each axis, such as data=2,fsdp=8; by default all devices along fsdp.
        tokens: number of tokens to train on: adds the run's time at 30 to 60% of the roofline, and for ats its storage.
        dtype: compute dtype, and that of frozen weights; by default the stored one. Trained weights are float32.
        head_kind: the head that gives a token its temperature, for ats; by default that of `train ats`.
        features: what the head reads, for ats; by default as by `train ats`.
        compile: --no-compile reports what follows from the shapes alone.
        sft: how the model is trained; with ats only batch_size is read.
    """

    PLANNED: ClassVar[tuple[str, ...]] = ("train ats", "train sft")

    model: str
    topology: str
    objective: Literal["ats", "sft"] = "ats"
    seq_len: Count | None = None
    mesh: str | None = None
    tokens: Annotated[int, Range(1, 10**15)] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    head_kind: HeadKind | None = None
    features: tuple[str, ...] | None = None
    compile: bool = True
    sft: SftOptions = SftOptions()

    def check(self) -> None:
        """Raises `UserError` for options that this objective does not read."""
        unread = [field for field in dataclasses.fields(SftOptions) if field.name != "batch_size"]
        not_read = [flag_of(field.name) for field in unread if getattr(self.sft, field.name) != field.default]
        if self.objective == "sft":
            not_read = [flag_of(name) for name in ("head_kind", "features") if getattr(self, name) is not None]
        if not_read:
            raise UserError(f"{', '.join(not_read)}: --objective {self.objective} does not read it; leave it out.")

    @classmethod
    def planned(cls, command: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """What is read of a run's run.yaml, with the objective; the mesh of the run is not."""
        method = SftOptions.__dataclass_fields__ if command == "train sft" else ("head_kind", "features")
        fields = {"model", "batch_size", "seq_len", "dtype", *method}
        content = {name.replace("-", "_"): value for name, value in content.items()}
        planned = {name: value for name, value in content.items() if name in fields}
        if command == "train ats":
            name = content.get("recipe", "default")
            if name not in [*RECIPES]:
                raise UserError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}.")
            recipe = RECIPES[name]
            defaults = {"batch_size": recipe["batch_size"], "head_kind": recipe["head_kind"]}
            planned = {**defaults, "tokens": content.get("max_tokens"), **planned}
        if isinstance(planned.get("seq_len"), int):
            planned["seq_len"] -= 1  # the last token is a target only
        return {"objective": command.removeprefix("train "), **planned}


def run(options: PlanOptions, log: Log = print) -> Document:
    options.check()
    jax.config.update("jax_platforms", "cpu")  # programs are traced, and nothing runs on a device
    topology = parse_topology(options.topology)
    config, stored = _model(options.model)
    method = options.sft
    if options.objective == "ats":
        head = options.head_kind or RECIPES["default"]["head_kind"]
        ats = AtsOptions(head_kind=head, features=options.features, batch_size=method.batch_size)
        method = make_plan(ats, config.hidden_size)
    mesh = mesh_shape(options.mesh, topology.devices)
    job = Job(config, method, options.seq_len or min(1024, config.max_positions), mesh, options.dtype or stored)
    job.check()
    compiler = compilers.compiler_version(topology.chip.platform) if options.compile else None
    if compiler is not None:
        log(f"planning {job.mesh_text}, compiled by {compiler}: a minute or more for a large model ...")
    try:
        plan = plan_job(job, topology, compiles=compiler is not None, tokens=options.tokens)
    except DoesNotCompile as reason:
        raise UserError(f"--mesh {job.mesh_text} does not compile for {topology.name}: {reason}") from reason
    document = {
        "model": options.model,
        "objective": options.objective,
        "topology": topology.name,
        "dtype": job.dtype,
        "batch": job.method.batch_size,
        "seq": job.seq_len,
        "devices": topology.devices,
        "compiler": compiler,
        **plan,
    }
    if not options.json:
        _print(document, topology, options)
    return document


def _model(model: str) -> tuple[DecoderConfig, str]:
    """The configuration of a model, and the dtype that a run on accelerators computes in."""
    name = model.rsplit("/", 1)[-1].split("@")[0].lower()
    name = re.sub(r"(-hf|-instruct|-it|-chat|-base|-v[\d.]+)+$", "", name)
    if name in SHAPES and not Path(model).exists():
        return SHAPES[name], "bfloat16"
    if is_gguf(model):
        return read_config(model), "float32"
    folder = Path(model)
    if not folder.is_dir():
        repository = repository_of(model)
        if repository is None or "/" not in model:
            names = ", ".join(sorted(SHAPES))
            raise UserError(f"--model {model}: expected a hub id, directory, GGUF file, or one of {names}.")
        folder = download(repository, "--model", ["config.json"])
    config = read_config(folder)
    content = read_json(folder / "config.json")
    stored = content.get("dtype") or content.get("torch_dtype")
    return config, "bfloat16" if stored == "bfloat16" else "float32"


# --- the step: the one that training runs, on shapes in place of arrays ---


class Job(NamedTuple):
    """What is planned: a step on sequences of `seq_len` tokens, on a mesh, in a compute dtype. Picklable."""

    config: DecoderConfig
    method: AtsPlan | SftOptions
    seq_len: int
    mesh: tuple[int, int, int]
    dtype: str

    @property
    def mesh_text(self) -> str:
        return ",".join(f"{axis}={n}" for axis, n in zip(AXES, self.mesh, strict=True))

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices, which determines where arrays lie."""
        return AbstractMesh(self.mesh, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def check(self) -> None:
        """Raises `UserError` where the step could not run: options out of range, or a batch that does not divide."""
        check_context(self.seq_len, self.config.max_positions)
        if isinstance(self.method, SftOptions):
            self.method.check(self.abstract_mesh())
            self.method.check_model(self.config)
        else:
            check_batch(self.abstract_mesh(), self.method.batch_size)


class Program(NamedTuple):
    """A jitted step and its arguments: trees of `jax.ShapeDtypeStruct`s, with shardings if there is a mesh.

    `parameters` are the weights of the model and of adapters, `trained` those with gradients.
    """

    function: Any
    arguments: tuple[Any, ...]
    parameters: Any
    trained: Any = None
    optimizer: Any = None


def build(job: Job, mesh: Any = None) -> Program:
    """The step of a checked job, divided over a mesh (or an `AbstractMesh`), which must be set when it is traced."""
    config, method, dtype = job.config, job.method, jnp.dtype(job.dtype)

    def placed(tree: Any) -> Any:
        """With the shardings of `param_shardings`, which replicates what is no parameter."""
        if mesh is None:
            return tree
        return jax.tree.map(lambda x, s: x.update(sharding=s), tree, param_shardings(mesh, tree))

    rows = None if mesh is None else batch_sharding(mesh)
    dtypes = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), jnp.int32) | {"where": jnp.bool_}
    shape = (method.batch_size, job.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, x, sharding=rows) for name, x in dtypes.items()}
    weights = placed(abstract_params(config, dtype))
    if isinstance(method, AtsPlan):
        del batch["where"]  # every token is planned as one that counts

        def frozen_step(weights: Any, batch: Any) -> Any:
            frozen = frozen_arrays(LanguageModel(config, weights, dtype, ""), *method.heads)
            losses = tuple(trial.loss for trial in method.trials)
            return frozen_batch(config, dtype, stored_features(method.heads), losses, frozen, batch)

        return Program(jax.jit(frozen_step), (weights, batch), weights)
    optimizer = method.optimizer_config.build(1000)  # steps of the schedule: a number in the program
    objective = SftObjective(model=method.configure(config), options=method, dtype=dtype)
    step = make_train_step(
        objective, optimizer, accumulate=method.accumulate, reduction=method.reduction, clip_norm=method.clip_norm
    )
    lora = method.lora
    if lora is None:
        frozen, start = None, abstract_params(config)
    else:
        frozen, start = weights, jax.eval_shape(lambda: init_adapters(config, lora, jax.random.key(0)))
    state = placed(jax.eval_shape(lambda params: first_state(params, optimizer), start))
    return Program(step, (state, frozen, batch, {}), (state.params, frozen), state.params, state.opt_state)


def device_bytes(tree: Any) -> int:
    """Bytes that a tree of `jax.ShapeDtypeStruct`s takes on each device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


# --- the compiled step ---


class Compiled(NamedTuple):
    """Result of compiling a step: bytes of its arguments with their padding, and in total with the program itself.

    `collectives` is None where jaxlib cannot read libtpu's program; `unknown_loops` are those of unknown length.
    """

    arguments: int
    total: int
    collectives: dict[str, Collective] | None
    unknown_loops: int


def compile_step(job: Job, topology: Topology) -> Compiled:
    """Compiles a job for the devices of a topology; called in a process of its own, by `compilers.with_compiler`."""
    if topology.chip.platform == "gpu":
        devices = compilers.gpu_devices(topology.name.partition(":")[0], topology.devices)
    else:
        devices = compilers.slice_devices(topology.name)
    mesh = make_mesh(job.mesh, devices)
    program = build(job, mesh)
    with jax.set_mesh(mesh):
        compiled = program.function.lower(*program.arguments).compile()
    memory = compiled.memory_analysis()
    try:
        moved, unknown = collectives(compiled.as_text())
    except jax.errors.JaxRuntimeError:
        # The step has been compiled. But libtpu may be newer than jaxlib, and write what that does not read:
        # jaxlib 0.10.2 cannot read an async-update with several operands, which libtpu 0.0.51 emits for v5p and v6e.
        moved, unknown = None, 0
    arguments = memory.argument_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = arguments + outputs + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return Compiled(arguments=arguments, total=total, collectives=moved, unknown_loops=unknown)


def needed_bytes(message: str) -> int | None:
    """The memory that a step needs, as the compiler that refused it states and rounds it; None where it does not."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    size = re.search(r"(?:Used|required for [^()]*\(|requires?) ?([\d.]+)([KMGT]?)", message)
    return None if size is None else round(float(size[1]) * units[size[2]])


# --- the plan ---


def plan_job(job: Job, topology: Topology, *, compiles: bool, tokens: int | None = None) -> dict[str, Any]:
    """Plans a checked job, and the run over `tokens`; without `compiles` only what follows from the shapes is known.

    Returns what `--json` prints of one mesh (docs/plan.md). `fits` is None where only the compiler could tell;
    `likely_fits` then estimates the temporaries. `margin_bytes` is None where the compiler did not report the excess.
    """
    memory = _memory(job, topology, compiles=compiles)
    roofline = _roofline(job, topology, memory)
    total, available = sum(memory.sizes.values()), topology.chip.memory
    likely_fits = total <= available if memory.fits is None else memory.fits
    stored = None if isinstance(job.method, SftOptions) else stored_bytes_per_token(job)
    is_excess_unknown = memory.fits is False and total < available
    plan = {
        "compiled": memory.is_compiled,
        "parameters": parameter_counts(job.config),
        "stored_bytes_per_token": stored,
        "mesh": job.mesh_text,
        "fits": memory.fits,
        "likely_fits": likely_fits,
        "bytes_per_device": {**memory.sizes, "total": total, "available": available},
        "margin_bytes": None if is_excess_unknown else available - total,
        **roofline,
        "note": memory.note,
    }
    if tokens is not None:
        plan["run"] = _run_cost(job, roofline["roofline_seconds"]["bound"], tokens, stored)
    return plan


class _Memory(NamedTuple):
    """What a step holds on each device.

    `sizes` are bytes by what holds them, `arguments` those that a step reads. `fits` is None where only the compiler
    could tell. A step that the compiler refused is compiled (`is_compiled`). `collectives` is None if not known.
    """

    sizes: dict[str, int]
    fits: bool | None
    arguments: int
    is_compiled: bool = False
    collectives: dict[str, Collective] | None = None
    note: str | None = None


def _memory(job: Job, topology: Topology, *, compiles: bool) -> _Memory:
    """The memory of a step, by the compiler if it `compiles`, else from the shapes."""
    placed = build(job, job.abstract_mesh())
    sizes = {"parameters": device_bytes(placed.parameters), "optimizer": device_bytes(placed.optimizer)}
    known, available = sum(sizes.values()), topology.chip.memory
    if not compiles or known > available:
        sizes |= _resident_bytes(job, placed, topology)
        at_least = sum(sizes.values()) - sizes["estimated_temporaries"]
        note = "Parameters and optimiser alone do not fit: not compiled." if compiles else None
        return _Memory(sizes, None if at_least <= available else False, known, note=note)
    try:
        compiled = compilers.with_compiler(compile_step, job, topology)
    except DoesNotCompile as error:
        if "RESOURCE_EXHAUSTED" not in error.details:
            raise
        if needed := needed_bytes(error.details):
            sizes["temporaries"] = max(0, needed - known)
        return _Memory(sizes, False, known, is_compiled=True, note=" ".join(error.details.split())[:300])
    sizes |= {"batch_and_padding": compiled.arguments - known, "temporaries": compiled.total - compiled.arguments}
    fits = compiled.total <= available  # a compiler for GPUs refuses nothing
    note = _note(compiled, topology)
    return _Memory(sizes, fits, compiled.arguments, is_compiled=True, collectives=compiled.collectives, note=note)


def _roofline(job: Job, topology: Topology, memory: _Memory) -> dict[str, Any]:
    """Operations, transfers between devices and the least time of each, as entries of the plan."""
    whole = build(job)
    with use_ragged_dot(True):  # on one device, where each copy of a token is a row of one expert
        operations = flops(whole.function.trace(*whole.arguments).jaxpr)
    moved = seconds_moving = None
    if memory.collectives is not None:
        moved = {kind: collective._asdict() for kind, collective in sorted(memory.collectives.items())}
        seconds_moving = sum(entry["bytes"] for entry in moved.values()) / topology.chip.interconnect
    seconds = {
        "compute": operations / topology.devices / topology.chip.flops,
        "memory": memory.arguments / topology.chip.bandwidth,
        "interconnect": seconds_moving,
    }
    bound = max(x for x in seconds.values() if x is not None)
    return {
        "flops_per_step": operations,
        "flops_per_device": operations / topology.devices,
        "collectives": moved,
        "roofline_seconds": {**seconds, "bound": bound},
    }


def _note(result: Compiled, topology: Topology) -> str | None:
    if result.collectives is None:
        hint = 'pip install "jax[tpu]" gets the libtpu that this jax goes with.'
        return f"Compiled; but jaxlib cannot read libtpu's program, so what moves between devices is not known. {hint}"
    memory = topology.chip.memory
    if topology.chip.platform == "gpu" and _PREALLOCATED / 0.95 * memory < result.total <= memory:
        hint = "set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        return f"JAX takes {_PREALLOCATED:.0%} of a GPU's memory, and this needs more: {hint}."
    if result.unknown_loops:
        return f"{result.unknown_loops} loops of unknown length: their collectives count once."
    return None


def parameter_counts(config: DecoderConfig) -> dict[str, int]:
    """The number of parameters of a model, and of those that one token is multiplied with or looks up."""
    counts = {path: math.prod(leaf.shape) for path, leaf in dotted_leaves(abstract_params(config))}
    total, mixture = sum(counts.values()), config.mixture
    if mixture is None:
        return {"total": total, "active": total}
    experts = re.compile(r"layers\.mlp\.(?!router\.)")
    expert = sum(count // mixture.experts for path, count in counts.items() if experts.match(path))
    return {"total": total, "active": total - (mixture.experts - mixture.per_token) * expert}


def _resident_bytes(job: Job, placed: Program, topology: Topology) -> dict[str, int]:
    """Bytes that a step holds in addition to its arguments: what it needs at least, and an estimate of temporaries.

    Temporaries are one block's activations, with their cotangents in training, and the kernels that it gathers. On GPUs
    and in float32, attention holds its logits `[B, H, T, T]`. Chunks of the vocabulary take at most 16 MiB.
    """
    config, itemsize = job.config, jnp.dtype(job.dtype).itemsize
    data, fsdp, tensor = job.mesh
    tokens = job.method.batch_size // (job.method.accumulate * data * fsdp) * job.seq_len
    resident_bytes = {}
    trains = isinstance(job.method, SftOptions)
    if trains:
        block_inputs = config.num_layers * tokens * config.hidden_size * itemsize
        resident_bytes = {"gradients": device_bytes(placed.trained), "block_inputs": block_inputs}
    passes, copies = (3, 2) if trains else (1, 1)
    activations_per_token = (6 * config.hidden_size + 3 * config.intermediate_size) * itemsize
    estimate = passes * tokens * activations_per_token
    if topology.chip.platform == "gpu" or job.dtype == "float32":
        attention_logits = copies * tokens * job.seq_len * config.num_heads * 4
        estimate += attention_logits // tensor
    if math.prod(job.mesh) > 1:
        gathered_kernels = 2 * (parameter_counts(config)["total"] // config.num_layers * itemsize)
        estimate += gathered_kernels // tensor
    return {**resident_bytes, "estimated_temporaries": estimate}


def stored_bytes_per_token(job: Job) -> int:
    """Bytes of what `train ats` keeps of a token on every host, or on the disk that they share."""
    program = build(job)
    stored, curves = jax.eval_shape(program.function, *program.arguments)
    rows = math.prod(jax.tree.leaves(curves)[0].shape[:2])
    return round(device_bytes(stored) / (job.method.batch_size * job.seq_len) + device_bytes(curves) / rows)


def _run_cost(job: Job, bound: float, tokens: int, stored: int | None) -> dict[str, Any]:
    """Steps and seconds `[least, most]` of a run; with `ats`, of the frozen pass alone, as the fits take little."""
    sequences = ceil_div(tokens, job.seq_len)
    steps = ceil_div(sequences, job.method.batch_size)
    if isinstance(job.method, SftOptions):
        fitted = sequences - max(1, int(job.method.validation_fraction * sequences))
        steps = max(1, job.method.epochs * fitted // job.method.batch_size)
    return {
        "tokens": tokens,
        "sequences": sequences,
        "steps": steps,
        "utilisation": list(UTILISATION),
        "seconds": [steps * bound / fraction for fraction in reversed(UTILISATION)],
        "stored_bytes": None if stored is None else sequences * job.seq_len * stored,
    }


def _print(document: Document, topology: Topology, options: PlanOptions) -> None:
    if document["compiled"]:
        notes = [f"The step was compiled by {document['compiler']}; nothing was run."]
    else:
        notes = ["From the shapes alone: temporaries are an estimate, and collectives are not known."]
    if options.compile and document["compiler"] is None:
        extra = "cuda13" if topology.chip.platform == "gpu" else "tpu"
        notes.append(f'The compiler is not installed: pip install "jax[{extra}]".')
    if document["note"]:
        notes.append(document["note"])
    print_result(plan_verdict(document), plan_table(document), notes=notes)
