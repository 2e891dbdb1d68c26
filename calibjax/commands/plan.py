"""`calibjax plan`: memory and time of a step on one mesh, or on every mesh of a topology, before a run."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh

from calibjax.commands.common import JsonOptions
from calibjax.data import check_context
from calibjax.eval.report.tables import TextTable
from calibjax.eval.report.terminal import print_result
from calibjax.eval.tokens import evaluate_batch
from calibjax.heads import HeadConfig, HeadKind
from calibjax.models import LanguageModel, abstract_params
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import Remat, init_adapters
from calibjax.models.fingerprint import dotted_leaves
from calibjax.models.frozen import freeze
from calibjax.models.generate import DecodingInputs, DecodingProgram, decode_batch
from calibjax.models.gguf import is_gguf
from calibjax.models.hub import download, repository_of
from calibjax.models.load import read_config
from calibjax.models.shapes import SHAPES
from calibjax.nn.experts import use_ragged_dot
from calibjax.runtime import compilers
from calibjax.runtime.compilers import DoesNotCompile
from calibjax.runtime.errors import UserError
from calibjax.runtime.hlo import Collective, collectives
from calibjax.runtime.options import BatchSize, Count, Range, Weight
from calibjax.runtime.sharding import AXES, batch_sharding, make_mesh, mesh_shape, param_shardings
from calibjax.train.curves import frozen_pass, stored_features
from calibjax.train.options import RECIPES, AtsOptions, make_plan
from calibjax.train.sft import SftOptions, sft_objective
from calibjax.train.step import OptimizerKind, make_train_step
from calibjax.train.tuning import first_state

ObjectiveName = Literal["ats", "sft", "eval", "generate"]
UTILISATION = (0.3, 0.6)
"""Fractions of the roofline that a run reaches; docs/plan.md states where they come from."""
GIB = 2**30
_SFT_FIELDS = ("remat", "accumulate", "optimizer", "label_smoothing", "lora_rank", "lora_targets")
_STEPS = 1000  # of the schedule: a number in the program, of no consequence for its size
_PREALLOCATED = 0.75  # of a GPU's whole memory, by JAX unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(JsonOptions):
    """Reports whether a step fits on devices that need not be present, its time at the least, and that of a run.

    `--config run.yaml` of a run of `train ats`, `train sft`, `eval tasks` or `generate` plans that run. The step is
    compiled ahead of time. That needs the compiler, which is libtpu (pip install "jax[tpu]") or JAX's CUDA plugin (pip
    install "jax[cuda13]"), but no TPU or GPU; for TPUs it takes minutes for a large model. Without the compiler the
    memory of temporaries is estimated from the shapes.

    Attributes:
        model: published model by its name (docs/models.md) or hub id, directory with config.json, or GGUF file; no
            weights are read.
        topology: chips: v5e-16 (or v5e:4x4, chips along each axis), v5p-16, v6e-8, a100:8, h100:8 or h200:8.
        objective: ats: the frozen pass that heads are fitted on; sft: fine-tuning; eval: evaluation;
            generate: sampling texts with the confidence of a head.
        batch_size: sequences per step; by default as the command's.
        seq_len: tokens per sequence, by default 1,024, the most that `train` chooses; of generate, tokens of a prompt.
        new_tokens: of generate: tokens of each text after its prompt; by default 128.
        mesh: devices along each axis, such as data=2,fsdp=8; by default all devices along fsdp.
        tokens: tokens to train or evaluate on, or to generate: reports the duration of the run at 30 to 60% of the
            roofline, and what its hidden states take.
        epochs: of sft: passes over them; by default as the command's.
        suggest: plan every mesh of the topology, and name the best that fits.
        dtype: compute dtype, and that of frozen weights; by default that of the weights, as of a run on accelerators.
            Trained weights are float32.
        remat: of sft: what the backward pass recomputes of a block.
        accumulate: of sft: micro-batches per step.
        optimizer: of sft.
        label_smoothing: of sft.
        lora_rank: of sft: train adapters of this rank instead of the weights.
        lora_targets: of sft: kernels with an adapter.
        head_kind: of all but sft: the head that gives a token its temperature.
        compile: --no-compile reports what follows from the shapes alone.
        json: print one JSON document instead of tables.
    """

    PLANNED: ClassVar[Any] = {"train ats": "ats", "train sft": "sft", "eval tasks": "eval", "generate": "generate"}

    model: str
    topology: str
    objective: ObjectiveName = "ats"
    batch_size: BatchSize | None = None
    seq_len: Count = 1024
    new_tokens: Count | None = None
    mesh: str | None = None
    tokens: Annotated[int, Range(1, 10**15)] | None = None
    epochs: Count | None = None
    suggest: bool = False
    dtype: Literal["float32", "bfloat16"] | None = None
    remat: Remat = SftOptions.remat
    accumulate: Count = SftOptions.accumulate
    optimizer: OptimizerKind = SftOptions.optimizer
    label_smoothing: Weight = SftOptions.label_smoothing
    lora_rank: Count | None = None
    lora_targets: Literal["all", "attention", "mlp"] = "all"
    head_kind: HeadKind = RECIPES["default"]["head"]
    compile: bool = True

    def check(self) -> None:
        """Raises `UserError` for options that this objective does not read."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        given = [f"--{name.replace('_', '-')}" for name in self.unread() if getattr(self, name) != default[name]]
        if given:
            raise UserError(f"{', '.join(given)}: --objective {self.objective} does not read it; leave it out.")
        if self.suggest and self.mesh is not None:
            raise UserError("--suggest: it tries every mesh; leave --mesh out.")

    def unread(self) -> tuple[str, ...]:
        unread = ("head_kind",) if self.objective == "sft" else _SFT_FIELDS
        unread = unread if self.objective == "sft" else (*unread, "epochs")
        return unread if self.objective == "generate" else (*unread, "new_tokens")

    @classmethod
    def planned(cls, command: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """What is read of a run's run.yaml, with the objective; the mesh of the run is not."""
        objective = cls.PLANNED[command]
        unread = cls(model="", topology="", objective=objective).unread()
        fields = {field.name for field in dataclasses.fields(cls)} - {*unread, "mesh", "json"}
        read = {name: value for name, value in content.items() if name.replace("-", "_") in fields}
        return {"objective": objective, **read}

    def job(self, config: DecoderConfig, mesh: tuple[int, int, int], dtype: str) -> "Job":
        """The step on a mesh; not checked."""
        sft = {name: getattr(self, name) for name in _SFT_FIELDS}
        sft |= {name: getattr(self, name) for name in ("epochs", "batch_size") if getattr(self, name) is not None}
        sft_options = SftOptions(**sft)
        ats_batch = self.batch_size or RECIPES["default"]["batch_size"]
        return Job(
            config=config,
            objective=self.objective,
            batch=sft_options.batch_size if self.objective == "sft" else ats_batch,
            seq=self.seq_len,
            mesh=mesh,
            dtype=dtype,
            new_tokens=(self.new_tokens or 128) if self.objective == "generate" else 0,
            ats=AtsOptions(head=self.head_kind),
            sft=sft_options,
        )


def run(options: PlanOptions, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the command; returns the document that `--json` prints."""
    options.check()
    jax.config.update("jax_platforms", "cpu")  # programs are traced, and nothing runs on a device
    topology = parse_topology(options.topology)
    config, stored = _model(options.model)
    dtype, count = options.dtype or stored, topology.devices
    if options.suggest:
        pairs = [(data, fsdp) for data in range(1, count + 1) for fsdp in range(1, count // data + 1)]
        meshes = [(data, fsdp, count // data // fsdp) for data, fsdp in pairs if count % (data * fsdp) == 0]
    else:
        meshes = [mesh_shape(options.mesh, count)]
    jobs = [options.job(config, mesh, dtype) for mesh in meshes]
    jobs = [job for job in jobs if job.batch % job.divisor == 0] or jobs[:1]
    jobs[0].check()
    compiler = compilers.compiler_version(topology.chip.platform) if options.compile else None
    plans, reasons = [], []
    for number, job in enumerate(jobs, 1):
        mesh = ",".join(f"{axis}={n}" for axis, n in zip(AXES, job.mesh, strict=True) if n > 1) or "data=1"
        if compiler is not None or options.suggest:
            how = f", compiled by {compiler}: a minute or more for a large model" if compiler else ""
            log(f"planning {mesh} ({number} of {len(jobs)}){how} ...")
        try:
            plans.append(plan_job(job, topology, compiles=compiler is not None, tokens=options.tokens))
        except DoesNotCompile as reason:
            reasons.append(f"--mesh {mesh} does not compile for {topology.name}: {reason}")
            log(reasons[-1])
    if not plans:
        raise UserError(reasons[0])
    document: dict[str, Any] = {"model": options.model, "objective": options.objective, "topology": topology.name}
    document |= {"dtype": dtype, "batch": jobs[0].batch, "seq": options.seq_len, "devices": count}
    document |= {"compiler": compiler}
    if options.suggest:
        best = min((plan for plan in plans if plan["likely_fits"]), key=_cost, default={"fits": False, "mesh": None})
        document |= {"fits": best["fits"], "best": best["mesh"], "plans": plans, "did_not_compile": reasons}
    else:
        document |= plans[0]
    if not options.json:
        _print(document, jobs[0], topology, options)
    return document


def _model(model: str) -> tuple[DecoderConfig, str]:
    """The configuration of a model, and the dtype that a run on accelerators computes in."""
    name = re.sub(r"(-hf|-instruct|-it|-chat|-base|-v[\d.]+)+$", "", model.rsplit("/", 1)[-1].split("@")[0].lower())
    if name in SHAPES and not Path(model).exists():
        return SHAPES[name], "bfloat16"
    if is_gguf(model):
        return read_config(model), "float32"
    folder = Path(model)
    if not folder.is_dir():
        repository = repository_of(model)
        if repository is None or "/" not in model:
            raise UserError(
                f"--model {model}: expected a hub id, a directory with config.json, a GGUF file, or one of "
                f"{', '.join(sorted(SHAPES))}."
            )
        folder = download(repository, "--model", ["config.json"])
    config = read_config(folder)
    content = json.loads((folder / "config.json").read_text())
    stored = content.get("dtype") or content.get("torch_dtype")
    return config, "bfloat16" if stored == "bfloat16" else "float32"


def _cost(plan: dict[str, Any]) -> tuple[float, ...]:
    """What the best plan has least of: the bound on its time, then what moves between devices, then memory."""
    seconds = plan["roofline_seconds"]
    return seconds["bound"], seconds["interconnect"] or 0.0, plan["bytes_per_device"]["total"]


# --- chips ---


class Chip(NamedTuple):
    """One chip, which is one device of JAX: its platform, "tpu" or "gpu", and what a program can use of it.

    `memory` is in bytes: of TPUs what libtpu 0.0.51 reports where a step does not fit; of GPUs 95% of what the vendor
    states, as the rest is left to CUDA's context and NCCL's buffers. Per second: bfloat16 `flops`, dense; `bandwidth`,
    bytes of its memory; `interconnect`, bytes that it receives from the other devices of the slice or host, half of
    what the vendors state for both directions.
    """

    platform: str
    memory: int
    flops: float
    bandwidth: float
    interconnect: float


CHIPS = {  # as stated at docs.cloud.google.com/tpu/docs/v5e and nvidia.com/en-us/data-center/h100, and so on
    "v5e": Chip("tpu", int(15.75 * GIB), 197e12, 819e9, 200e9),
    "v5p": Chip("tpu", int(95.73 * GIB), 459e12, 2765e9, 600e9),
    "v6e": Chip("tpu", int(31.24 * GIB), 918e12, 1600e9, 400e9),
    "a100": Chip("gpu", int(0.95 * 80e9), 312e12, 2039e9, 300e9),
    "h100": Chip("gpu", int(0.95 * 80e9), 989e12, 3350e9, 450e9),
    "h200": Chip("gpu", int(0.95 * 141e9), 989e12, 4800e9, 450e9),
}
"""Chips by libtpu's name of the generation; GPUs are the SXM models."""


class Topology(NamedTuple):
    """The name of a slice or host ("v5e:4x4", "h100:8"), its chip, and the number of its devices."""

    name: str
    chip: Chip
    devices: int


def parse_topology(text: str) -> Topology:
    """Parses "v5e:4x4" (chips along each axis), Google Cloud's "v5e-16", "v5litepod-16" or "v5p-32", or "h100:8"."""
    kind, sign, shape = re.fullmatch(r"([^:-]*)([:-]?)(.*)", text, flags=re.S).groups()  # pyright: ignore
    kind = {"v5litepod": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        raise UserError(f"--topology {text}: expected one of {', '.join(CHIPS)}, got {kind!r}.")
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", shape):
        raise UserError(f"--topology {text}: expected the chip and its number, such as v5e-16, v5e:4x4 or h100:8.")
    chip = CHIPS[kind]
    if sign == "-" and chip.platform == "tpu" and shape.isdigit():  # Google Cloud's name: as square as can be
        axes = [1, 1, 1] if kind == "v5p" else [1, 1]
        while math.prod(axes) < int(shape) // (2 if kind == "v5p" else 1):  # of v5p it counts cores, two of a chip
            axes[axes.index(min(axes))] *= 2
        shape = "x".join(map(str, sorted(axes, reverse=kind == "v5p")))
    return Topology(f"{kind}:{shape}", chip, math.prod(map(int, shape.split("x"))))


# --- the step: the one that training and evaluation run, on shapes in place of arrays ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned: `batch` sequences of `seq` tokens in a step on a mesh, in a compute dtype. Picklable.

    The batch sizes of `ats` and `sft` are not read; `new_tokens` is 0 but for generate.
    """

    config: DecoderConfig
    objective: ObjectiveName
    batch: int
    seq: int
    mesh: tuple[int, int, int]
    dtype: str
    ats: AtsOptions
    sft: SftOptions
    new_tokens: int = 0

    @property
    def turns(self) -> int:
        """How often the program's loop of unknown length runs: that over new tokens, after the first."""
        return max(1, self.new_tokens - 1)

    @property
    def accumulate(self) -> int:
        return self.sft.accumulate if self.objective == "sft" else 1

    @property
    def divisor(self) -> int:
        """What divides the batch: micro-batches, and devices that hold sequences of their own."""
        return self.accumulate * self.mesh[0] * self.mesh[1]

    @property
    def rows(self) -> int:
        """Sequences on each device at a time."""
        return self.batch // self.divisor

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices: enough to say where arrays lie."""
        return AbstractMesh(self.mesh, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def check(self) -> None:
        """Raises `UserError` where the step could not run: options out of range, or a batch that does not divide."""
        if self.batch % self.divisor:
            raise UserError(
                f"--batch-size {self.batch}: expected a multiple of {self.divisor}, the devices along data and fsdp"
                f"{' times --accumulate' if self.accumulate > 1 else ''}."
            )
        check_context(self.seq + self.new_tokens, self.config.max_positions)
        self.sft.check(self.abstract_mesh())
        if self.objective == "sft":
            self.sft.check_model(self.config)
        make_plan(self.ats, self.config.hidden_size)


class Program(NamedTuple):
    """A jitted step and its arguments, trees of `jax.ShapeDtypeStruct`s that say where they lie on a mesh, if any.

    `parameters` are those that are weights, of the model and of a head, `trained` those with gradients.
    """

    function: Any
    arguments: tuple[Any, ...]
    parameters: Any
    trained: Any = None
    optimizer: Any = None


def build(job: Job, mesh: Mesh | AbstractMesh | None = None) -> Program:
    """The step of a checked job, divided over `mesh`, which is to be set when it is traced; None: for one device."""
    kinds = dict.fromkeys(("tokens", "targets", "where", "segment_ids", "positions"), jnp.int32) | {"where": jnp.bool_}
    rows = None if mesh is None else batch_sharding(mesh)  # pyright: ignore[reportArgumentType]
    batch = {name: jax.ShapeDtypeStruct((job.batch, job.seq), kind, sharding=rows) for name, kind in kinds.items()}
    builder = {"ats": _ats_program, "sft": _sft_program, "eval": _eval_program, "generate": _generate_program}
    return builder[job.objective](job, mesh, batch)


def device_bytes(tree: Any) -> int:
    """Bytes that a tree of `jax.ShapeDtypeStruct`s takes on each device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def _placed(tree: Any, mesh: Any) -> Any:
    """Shapes with the shardings of `param_shardings`, which replicates what is no parameter."""
    if mesh is None:
        return tree
    shardings = param_shardings(mesh, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _weights(job: Job, mesh: Any) -> Any:
    return _placed(abstract_params(job.config, jnp.dtype(job.dtype)), mesh)


def _head(head: HeadConfig, mesh: Any) -> Any:
    return _placed(jax.eval_shape(lambda: head.init(jax.random.key(0))), mesh)


def _frozen(job: Job, weights: Any, *heads: HeadConfig) -> Any:
    """What `freeze` makes of the weights. Within a step, so that what it holds twice is one argument, as in memory."""
    return freeze(LanguageModel(job.config, weights, jnp.dtype(job.dtype), ""), *heads)


def _sft_program(job: Job, mesh: Any, batch: Any) -> Program:
    options = job.sft
    optimizer = options.optimizer_config.build(_STEPS)
    step = make_train_step(
        sft_objective(job.config, options, jnp.dtype(job.dtype), mesh),
        optimizer,
        accumulate=options.accumulate,
        reduction=options.reduction,
        clip_norm=options.clip_norm,
    )
    frozen, lora = None, options.lora
    if lora is None:
        start = abstract_params(job.config)
    else:
        frozen, start = _weights(job, mesh), jax.eval_shape(lambda: init_adapters(job.config, lora, jax.random.key(0)))
    state = _placed(jax.eval_shape(lambda params: first_state(params, optimizer), start), mesh)
    return Program(step, (state, frozen, batch, {}), (state.params, frozen), state.params, state.opt_state)


def _ats_program(job: Job, mesh: Any, batch: Any) -> Program:
    heads = make_plan(job.ats, job.config.hidden_size).heads

    def whole(weights: Any, batch: Any) -> Any:
        frozen = _frozen(job, weights, *heads)
        return frozen_pass(job.config, jnp.dtype(job.dtype), stored_features(heads), frozen, batch)

    weights = _weights(job, mesh)
    del batch["where"]  # every token is planned as one that counts
    return Program(jax.jit(whole), (weights, batch), weights)


def _eval_program(job: Job, mesh: Any, batch: Any) -> Program:
    constant = HeadConfig(kind="constant", hidden_size=job.config.hidden_size)
    configs = (constant, constant, make_plan(job.ats, job.config.hidden_size).head)

    def whole(weights: Any, heads: Any, factors: Any, batch: Any) -> Any:
        frozen = _frozen(job, weights, *configs)
        return evaluate_batch(job.config, configs, jnp.dtype(job.dtype), 15, "right", heads, factors, frozen, batch)

    heads = [_head(config, mesh) for config in configs]
    factors = _placed([jax.ShapeDtypeStruct((), jnp.float32)] * len(configs), mesh)
    weights = _weights(job, mesh)
    return Program(jax.jit(whole), (weights, heads, factors, batch), (weights, heads))


def _generate_program(job: Job, mesh: Any, batch: Any) -> Program:
    head = make_plan(job.ats, job.config.hidden_size).head
    loop = DecodingProgram(job.config, head, jnp.dtype(job.dtype), job.new_tokens, None, True, 1)

    def whole(weights: Any, head_params: Any, tokens: Any, segment_ids: Any, rest: dict[str, Any]) -> Any:
        frozen = _frozen(job, weights, head)
        return decode_batch(loop, DecodingInputs(frozen, head_params, tokens=tokens, segment_ids=segment_ids, **rest))

    rest = jax.eval_shape(
        lambda: {
            "log_factor": jnp.float32(0),
            "stop_tokens": jnp.zeros(8, jnp.int32),
            "numbers": jnp.zeros(job.batch, jnp.int32),
            "key": jax.random.key(0),
            "temperature": jnp.float32(1),
            "top_p": None,
        }
    )
    weights, head_params = _weights(job, mesh), _head(head, mesh)
    arguments = (weights, head_params, batch["tokens"], batch["segment_ids"], _placed(rest, mesh))
    return Program(jax.jit(whole), arguments, (weights, head_params))


# --- operations ---


def flops(jaxpr: Any, turns: int = 1) -> float:
    """Operations of the matrix products in a jaxpr, over all devices; 2 for each product of two numbers.

    XLA's own `cost_analysis` counts the body of a loop once, and a model is a loop over its layers. A Pallas kernel
    counts as it declares itself (`pl.CostEstimate`), or else its body for each point of its grid. Of several branches
    the largest one counts, what runs within `shard_map` once for each device, and a `while_loop` `turns` times.
    """
    return sum((_equation_flops(equation, turns) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns), start=0.0)


def _equation_flops(equation: Any, turns: int) -> float:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "ragged_dot_general"):
        ragged = params.get("ragged_dot_dimension_numbers")
        (contracted, _), _ = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
        terms = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        # Without a group axis in the second factor, the result has one, and each term belongs to one group.
        groups = 1 if ragged is None or ragged.rhs_group_dimensions else equation.invars[2].aval.shape[-1]
        return 2.0 * terms * math.prod(equation.outvars[0].aval.shape) / groups
    if name == "pallas_call" and params.get("cost_estimate") is not None:
        return float(params["cost_estimate"].flops)
    lists = [value if isinstance(value, tuple | list) else (value,) for value in params.values()]
    inner = [flops(item, turns) for items in lists for item in items if isinstance(item, Jaxpr | ClosedJaxpr)]
    if name == "cond":
        return max(inner)
    if name == "pallas_call":
        return sum(inner) * math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return sum(inner) * params["mesh"].size
    return sum(inner) * {"scan": params.get("length"), "while": turns}.get(name, 1)


# --- the compiled step ---


class Compiled(NamedTuple):
    """Result of compiling a step: bytes of its arguments with their padding, and in total with the program itself.

    `flops` are those of all devices. `collectives` is None where jaxlib cannot read the program that libtpu made.
    `unknown_loops` counts loops of unknown length but that over new tokens.
    """

    arguments: int
    total: int
    flops: float
    collectives: dict[str, Collective] | None
    unknown_loops: int


def compile_step(job: Job, topology: Topology) -> Compiled:
    """Compiles a job for the devices of a topology; called in a process of its own, by `compilers.with_compiler`."""
    if topology.chip.platform == "gpu":
        devices = compilers.gpu_devices(topology.name.partition(":")[0], topology.devices)
    else:
        try:
            devices = compilers.slice_devices(topology.name)
        except Exception as error:  # of several kinds
            reason = str(error).splitlines()[0]
            raise UserError(f"--topology {topology.name}: libtpu has no such slice ({reason}).") from error
    mesh = make_mesh(job.mesh, devices)
    program = build(job, mesh)
    with jax.set_mesh(mesh):
        traced = program.function.trace(*program.arguments)
        compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    try:
        moved, unknown = collectives(compiled.as_text(), job.turns)
    except jax.errors.JaxRuntimeError:
        # The step has been compiled. But libtpu may be newer than jaxlib, and write what that does not read:
        # jaxlib 0.10.2 cannot read an async-update with several operands, which libtpu 0.0.51 emits for v5p and v6e.
        moved, unknown = None, 0
    beside = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        total=memory.argument_size_in_bytes + beside + memory.generated_code_size_in_bytes,
        flops=flops(traced.jaxpr, job.turns),
        collectives=moved,
        unknown_loops=unknown if job.objective != "generate" else max(0, unknown - 1),
    )


def needed_bytes(message: str) -> int | None:
    """The memory that a step needs, as the compiler that refused it states and rounds it; None where it does not."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    size = re.search(r"(?:Used|required for [^()]*\(|requires?) ?([\d.]+)([KMGT]?)", message)
    return None if size is None else round(float(size[1]) * units[size[2]])


# --- the plan ---


def plan_job(job: Job, topology: Topology, *, compiles: bool, tokens: int | None = None) -> dict[str, Any]:
    """Plans a checked job, and the run over `tokens`; without `compiles` only what follows from the shapes is known.

    Returns:
        What `--json` prints of one mesh; docs/plan.md describes it. `fits` is None where only the compiler could tell,
        and `likely_fits` then goes by an estimate of the temporaries; `margin_bytes` is None where the compiler did
        not report by how much the step is too large.
    """
    placed = build(job, job.abstract_mesh())
    sizes = {"parameters": device_bytes(placed.parameters), "optimizer": device_bytes(placed.optimizer)}
    known, available = sum(sizes.values()), topology.chip.memory
    compiled, refused, note = None, None, None
    if compiles and known > available:
        note = "Parameters and optimiser alone do not fit: not compiled."
    elif compiles:
        try:
            compiled = compilers.with_compiler(compile_step, job, topology)
        except DoesNotCompile as error:
            if "RESOURCE_EXHAUSTED" not in error.details:
                raise
            refused = error.details
    arguments = known if compiled is None else compiled.arguments
    if compiled is not None:
        sizes |= {"batch_and_padding": arguments - known, "temporaries": compiled.total - arguments}
        fits, note = compiled.total <= available, _note(compiled, topology)  # a compiler for GPUs refuses nothing
    elif refused is not None:
        needed = needed_bytes(refused)
        fits, note = False, " ".join(refused.split())[:300]
        sizes |= {} if needed is None else {"temporaries": max(0, needed - known)}
    else:
        sizes |= _held(job, placed, topology)
        fits = None if sum(sizes.values()) - sizes["estimated_temporaries"] <= available else False
    total = sum(sizes.values())
    if compiled is not None and job.config.mixture is None:
        operations = compiled.flops
    else:
        # Of a mixture, traced for one device, every copy of a token is a row of one expert; on a mesh it has a row on
        # each device that holds experts, of which one is used.
        whole = build(job)
        with use_ragged_dot(True):
            operations = flops(whole.function.trace(*whole.arguments).jaxpr, job.turns)
    moved, received = None, None
    if compiled is not None and compiled.collectives is not None:
        moved = {kind: each._asdict() for kind, each in sorted(compiled.collectives.items())}
        received = sum(each["bytes"] for each in moved.values()) / topology.chip.interconnect
    passes = max(1, job.new_tokens)  # each new token reads the weights
    seconds = {
        "compute": operations / topology.devices / topology.chip.flops,
        "memory": passes * arguments / topology.chip.bandwidth,
        "interconnect": received,
    }
    bound = max(x for x in seconds.values() if x is not None)
    return {
        "compiled": compiled is not None or refused is not None,
        "parameters": parameter_counts(job.config),
        "stored_bytes_per_token": stored_bytes_per_token(job) if job.objective == "ats" else None,
        "mesh": ",".join(f"{axis}={n}" for axis, n in zip(AXES, job.mesh, strict=True)),
        "fits": fits,
        "likely_fits": total <= available if fits is None else fits,
        "bytes_per_device": {**sizes, "total": total, "available": available},
        "margin_bytes": None if fits is False and total < available else available - total,
        "flops_per_step": operations,
        "flops_per_device": operations / topology.devices,
        "collectives": moved,
        "roofline_seconds": {**seconds, "bound": bound},
        "note": note,
        **({} if tokens is None else {"run": _run_cost(job, bound, tokens)}),
    }


def _note(result: Compiled, topology: Topology) -> str | None:
    """What there is to know about a step that was compiled."""
    if result.collectives is None:
        return (
            "Compiled; but jaxlib cannot read libtpu's program, so what moves between devices is not known. "
            'pip install "jax[tpu]" gets the libtpu that this jax goes with.'
        )
    memory = topology.chip.memory
    if topology.chip.platform == "gpu" and _PREALLOCATED / 0.95 * memory < result.total <= memory:
        return (
            f"JAX takes {_PREALLOCATED:.0%} of a GPU's memory, and this needs more: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."
        )
    if result.unknown_loops:
        return f"{result.unknown_loops} loops of unknown length: their collectives count once."
    return None


def parameter_counts(config: DecoderConfig) -> dict[str, int]:
    """The number of parameters of a model, and of those that a token is multiplied with (or looked up in)."""
    counts = {path: math.prod(leaf.shape) for path, leaf in dotted_leaves(abstract_params(config))}
    total, mixture = sum(counts.values()), config.mixture
    if mixture is None:
        return {"total": total, "active": total}
    experts = re.compile(r"layers\.mlp\.(?!router\.)")
    expert = sum(count // mixture.experts for path, count in counts.items() if experts.match(path))
    return {"total": total, "active": total - (mixture.experts - mixture.per_token) * expert}


def cache_bytes(job: Job) -> int:
    """Bytes on each device of the keys and values of `generate`, as `sharding.constrain_cache` divides them."""
    tensor, heads = job.mesh[2], job.config.num_kv_heads
    values = job.config.num_layers * job.rows * (job.seq + job.new_tokens - 1) * job.config.head_dim
    return 2 * values * (heads // tensor if heads % tensor == 0 else heads) * jnp.dtype(job.dtype).itemsize


def _held(job: Job, placed: Program, topology: Topology) -> dict[str, int]:
    """Bytes that the step holds besides its arguments: what it holds at least, and an estimate of its temporaries.

    These are one block's activations, with their cotangents in training, and the kernels that it gathers. On GPUs, and
    of float32, attention holds its logits `[B, H, T, T]`. Chunks of the vocabulary are held to 16 MiB.
    """
    config, tokens, itemsize = job.config, job.rows * job.seq, jnp.dtype(job.dtype).itemsize
    held, trains = {}, job.objective == "sft"
    if trains:
        block_inputs = config.num_layers * tokens * config.hidden_size * itemsize
        held = {"gradients": device_bytes(placed.trained), "block_inputs": block_inputs}
    elif job.objective == "generate":
        held = {"keys_and_values": cache_bytes(job)}
    estimate = (3 if trains else 1) * tokens * (6 * config.hidden_size + 3 * config.intermediate_size) * itemsize
    if topology.chip.platform == "gpu" or job.dtype == "float32":
        estimate += (2 if trains else 1) * tokens * job.seq * config.num_heads * 4 // job.mesh[2]
    if math.prod(job.mesh) > 1:
        block = parameter_counts(config)["total"] // config.num_layers * itemsize
        estimate += 2 * block // job.mesh[2]
    return {**held, "estimated_temporaries": estimate}


def stored_bytes_per_token(job: Job) -> int:
    """Bytes of what `train ats` keeps of a token on every host, or on the disk that they share."""
    program = build(job)
    stored, curves = jax.eval_shape(program.function, *program.arguments)
    rows = math.prod(jax.tree.leaves(curves)[0].shape[:2])
    return round(device_bytes(stored) / (job.batch * job.seq) + device_bytes(curves) / rows)


def _run_cost(job: Job, bound: float, tokens: int) -> dict[str, Any]:
    """Steps and seconds `[least, most]` of a run; of `ats` those of the frozen pass, as the fits take little."""
    sequences = -(-tokens // (job.new_tokens or job.seq))
    steps = -(-sequences // job.batch)
    if job.objective == "sft":
        fitted = sequences - max(1, int(job.sft.validation_fraction * sequences))
        steps = max(1, job.sft.epochs * fitted // job.batch)
    return {
        "tokens": tokens,
        "sequences": sequences,
        "steps": steps,
        "utilisation": list(UTILISATION),
        "seconds": [steps * bound / fraction for fraction in reversed(UTILISATION)],
        "stored_bytes": sequences * job.seq * stored_bytes_per_token(job) if job.objective == "ats" else None,
    }


# --- what is printed ---


def _print(document: dict[str, Any], job: Job, topology: Topology, options: PlanOptions) -> None:
    new = f" + {job.new_tokens}" if job.new_tokens else ""
    step = (
        f"{options.model}, {job.objective}, {job.batch} x {job.seq}{new} tokens per step, {job.dtype}, on "
        f"{topology.devices} device{'s' * (topology.devices > 1)} ({topology.name})"
    )
    plans = document["plans"] if options.suggest else [document]
    notes = [_source(document, plans, options, topology), *([document["note"]] if document.get("note") else [])]
    if options.suggest:
        likely = "" if document["fits"] else ", by an estimate of its memory"
        best = document["best"]
        line = f"None of these meshes fits: {step}." if best is None else f"Best{likely}: --mesh {best} for {step}."
        print_result(line, _mesh_table(plans, best), notes=notes)
        return
    certainty = "does" if document["fits"] is not None else "probably does"
    verdict = f"This {certainty} {'' if document['likely_fits'] else 'not '}fit".replace("does fit", "fits")
    bound = f"{1e3 * document['roofline_seconds']['bound']:,.0f} ms a step at the least"
    print_result(f"{verdict}, at {bound}: {step}.", _plan_table(document), notes=notes)


def _source(document: dict[str, Any], plans: list[dict[str, Any]], options: PlanOptions, topology: Topology) -> str:
    """Where the figures come from."""
    if any(plan["compiled"] for plan in plans):
        return f"The step was compiled by {document['compiler']}; nothing was run."
    if document["compiler"]:
        return "From the shapes alone."
    unknown = "From the shapes alone: {}, so temporaries are an estimate, and collectives are not known."
    if not options.compile:
        return unknown.format("nothing was compiled")
    name, extra = ("GPU", "cuda13") if topology.chip.platform == "gpu" else ("TPU", "tpu")
    return unknown.format(f"the {name} compiler is not installed") + f' Install it with: pip install "jax[{extra}]"'


def _mesh_table(plans: list[dict[str, Any]], best: str | None) -> TextTable:
    rows = []
    for plan in plans:
        seconds = (plan["roofline_seconds"][name] for name in ("compute", "memory", "interconnect"))
        milliseconds = ("" if x is None else f"{1e3 * x:,.0f}" for x in seconds)
        total = plan["bytes_per_device"]["total"]
        rows.append([plan["mesh"], _size(total), re.split("[,:]", _margin(plan))[0], *milliseconds])
    columns = ["mesh", "per device", "fits", "compute", "memory", "moved"]
    chosen = tuple(index for index, plan in enumerate(plans) if plan["mesh"] == best)
    return TextTable("at least so many ms a step", columns, rows, (2, 1, 3, 4, 5), chosen)


def _plan_table(document: dict[str, Any]) -> TextTable:
    rows = [[name.replace("_", " "), _size(size)] for name, size in document["bytes_per_device"].items()]
    rows.append(["fits", _margin(document)])
    counts = document["parameters"]
    if counts["active"] < counts["total"]:
        rows.append(["parameters of the model", f"{counts['total']:,}"])
        rows.append(["parameters active for a token", f"{counts['active']:,}"])
    if document["stored_bytes_per_token"] is not None:
        rows.append(["stored from the frozen pass, per token", f"{document['stored_bytes_per_token']:,} bytes"])
    rows.append(["operations, FLOP", f"{document['flops_per_device']:.3g}"])
    rows.append(["operations of a step, FLOP", f"{document['flops_per_step']:.3g}"])
    for kind, moved in (document["collectives"] or {}).items():
        rows.append([f"{kind}, {moved['count']:,} x: received", _size(moved["bytes"])])
        rows.append([f"{kind}: the largest", _size(moved["largest"])])
    seconds = document["roofline_seconds"]
    rows += [[f"roofline, {name}", f"{1e3 * x:,.0f} ms"] for name, x in seconds.items() if x is not None]
    if run := document.get("run"):
        low, high = run["utilisation"]
        rows.append(["steps of the run", f"{run['steps']:,}"])
        if run["stored_bytes"] is not None:
            rows.append(["stored from the frozen pass, each host", _size(run["stored_bytes"])])
        least, most = run["seconds"]
        units = ((86400, "d"), (3600, "h"), (60, "min"))
        unit, name = next(((unit, name) for unit, name in units if most >= 2 * unit), (1, "s"))
        rows.append([f"run at {low:.0%} to {high:.0%}", f"{least / unit:,.1f} to {most / unit:,.1f} {name}"])
    return TextTable(f"mesh {document['mesh']}", ["per device", ""], rows)


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def _margin(plan: dict[str, Any]) -> str:
    margin = plan["margin_bytes"]
    if margin is None:
        return "no"
    likely = "probably " if plan["fits"] is None else ""
    return f"{likely}yes, with {_size(margin)} to spare" if margin >= 0 else f"{likely}no: {_size(-margin)} too much"
