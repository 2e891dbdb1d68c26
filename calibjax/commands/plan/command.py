"""`calibjax plan`: memory and time of a step on one mesh, or on every mesh of a topology."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax

from calibjax.commands.common import JsonOptions, ModelPathOptions
from calibjax.commands.plan.chips import CHIPS, GIB, Topology, chips_json, parse_topology
from calibjax.commands.plan.duration import run_cost
from calibjax.commands.plan.program import Job, ObjectiveName
from calibjax.commands.plan.result import plan_job
from calibjax.commands.plan.scaling import efficiency, points, scaling_table
from calibjax.eval.report.tables import TextTable
from calibjax.eval.report.terminal import print_result
from calibjax.heads import HeadKind
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import Remat
from calibjax.models.gguf_file import is_gguf
from calibjax.models.load import read_config
from calibjax.models.shapes import SHAPES
from calibjax.runtime import gpu_compiler, tpu_compiler
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Count, Range, Weight, check_options
from calibjax.runtime.sharding import AXES, mesh_shape
from calibjax.runtime.tpu_compiler import DoesNotCompile
from calibjax.train.options import AtsOptions
from calibjax.train.sft import SftOptions
from calibjax.train.state import OptimizerKind

UTILISATION = (0.3, 0.6)
"""Fractions of the roofline; docs/plan.md says where they come from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(JsonOptions, ModelPathOptions):
    """Reports whether a step fits on devices that need not be present, its time at the least, and that of a run.

    The real step is compiled ahead of time. That needs the compiler, which is libtpu (pip install "jax[tpu]") or JAX's
    CUDA plugin (pip install "jax[cuda13]"), but no TPU or GPU; for TPUs it takes minutes for a large model. Without the
    compiler it reports what follows from the shapes alone.

    Attributes:
        model: name of a published model (docs/models.md), a directory with config.json, or a GGUF file; no weights are
            read.
        objective: ats: the frozen pass that heads are fitted on; sft: fine-tuning; eval: evaluation;
            generate: sampling texts with the confidence of a head.
        topology: chip and number along each axis, such as v5e:4x4, v5p:2x2x2, v6e:4x4, h100:8.
        batch_size: sequences per step.
        seq_len: tokens per sequence; of generate, tokens of a prompt.
        new_tokens: of generate: tokens of each text after its prompt; by default 128.
        mesh: devices along each axis, such as data=2,fsdp=8; by default all devices along fsdp.
        tokens: tokens to train or evaluate on, or to generate: reports the duration of the run and what its hidden
            states take.
        epochs: passes over them; by default as the command's.
        utilisation: fractions of the roofline that are reached, the smallest and the largest, for the duration.
        list_chips: print the chips that --topology knows, with their rates, and nothing else.
        suggest: plan every mesh of the topology, and name the best that fits.
        scaling: plan the step on ever smaller topologies too, once with the same batch and once with as many sequences
            on each device.
        dtype: compute dtype, and that of frozen weights; trained ones are float32.
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

    model: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: str | None = None
    objective: ObjectiveName = "ats"
    batch_size: BatchSize = 64
    seq_len: Count = 1024
    new_tokens: Count | None = None
    mesh: str | None = None
    tokens: Annotated[int, Range(1, 10**15)] | None = None
    epochs: Count | None = None
    utilisation: tuple[Annotated[float, Range(0, 1, open="low")], ...] = UTILISATION
    list_chips: bool = False
    suggest: bool = False
    scaling: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Remat = "full"
    accumulate: Count = 1
    optimizer: OptimizerKind = "adamw"
    label_smoothing: Weight = 0.1
    lora_rank: Count | None = None
    lora_targets: Literal["all", "attention", "mlp"] = "all"
    head_kind: HeadKind = "mlp"
    compile: bool = True

    def job(self, config: DecoderConfig, mesh: tuple[int, int, int]) -> Job:
        """The step on a mesh; not checked."""
        return Job(
            config=config,
            objective=self.objective,
            batch=self.batch_size,
            seq=self.seq_len,
            mesh=mesh,
            dtype=self.dtype,
            new_tokens=(self.new_tokens or 128) if self.objective == "generate" else 0,
            ats=AtsOptions(head=self.head_kind, epochs=self.epochs),
            sft=SftOptions(
                epochs=self.epochs or SftOptions.epochs,
                batch_size=self.batch_size,
                accumulate=self.accumulate,
                optimizer=self.optimizer,
                label_smoothing=self.label_smoothing,
                lora_rank=self.lora_rank,
                lora_targets=self.lora_targets,
                remat=self.remat,
            ),
        )


def run(options: PlanOptions, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the command; returns the document that `--json` prints."""
    check_options(options)
    if options.list_chips:
        return _list_chips(options)
    if options.model is None or options.topology is None:
        absent = [f"--{name}" for name in ("model", "topology") if getattr(options, name) is None]
        raise UserError(f"{', '.join(absent)}: missing; calibjax plan --list-chips lists the chips of a topology.")
    jax.config.update("jax_platforms", "cpu")  # programs are traced, and nothing runs on a device
    topology = parse_topology(options.topology)
    config = _config(options.model)
    _check_options(options)
    if options.suggest and options.mesh is not None:
        raise UserError("--suggest: it tries every mesh; leave --mesh out.")
    if options.scaling:
        return _scaling(options, config, topology, log)
    meshes = _meshes(topology.devices) if options.suggest else [mesh_shape(options.mesh, topology.devices)]
    jobs = _checked([options.job(config, mesh) for mesh in meshes])
    compiler = _compiler(topology) if options.compile else None
    plans, reasons = [], []
    for number, job in enumerate(jobs, 1):
        if options.suggest:
            log(f"planning {mesh_text(job.mesh)} ({number} of {len(jobs)}) ...")
        try:
            plan = plan_job(job, topology, compiles=compiler is not None)
            if options.tokens is not None:
                plan["run"] = run_cost(job, topology, plan, options.tokens, _utilisation(options))
            plans.append(plan)
        except DoesNotCompile as reason:
            reasons.append(f"--mesh {mesh_text(job.mesh)} does not compile for {options.topology}: {reason}")
            if options.suggest:
                log(reasons[-1])
    if not plans:
        raise UserError(reasons[0])
    document: dict[str, Any] = {name: getattr(options, name) for name in ("model", "objective", "topology", "dtype")}
    document |= {"batch": options.batch_size, "seq": options.seq_len}
    document |= {"devices": topology.devices, "compiler": compiler}
    if options.suggest:
        fitting = [plan for plan in plans if plan["fits"] is not False]
        best = min(fitting, key=_cost, default={"fits": False, "mesh": None})
        document |= {"fits": best["fits"], "best": best["mesh"], "plans": plans, "did_not_compile": reasons}
    else:
        document |= plans[0]
    if not options.json:
        _print(document, options, topology)
    return document


def _scaling(
    options: PlanOptions, config: DecoderConfig, topology: Topology, log: Callable[[str], None]
) -> dict[str, Any]:
    """The step on smaller topologies and on this one."""
    if options.suggest or options.mesh is not None or options.tokens is not None:
        raise UserError(
            "--scaling: it plans one step, with all devices along fsdp; leave --suggest, --mesh, --tokens out."
        )
    (whole,) = _checked([options.job(config, (1, topology.devices, 1))])
    wanted = points(whole, topology)
    compiler = _compiler(topology) if options.compile else None
    plans, planned = [], {}
    for number, (kind, smaller, job) in enumerate(wanted, 1):
        log(f"planning {job.batch} sequences on {smaller.name} ({number} of {len(wanted)}) ...")
        if (job.batch, smaller.devices) not in planned:
            planned[job.batch, smaller.devices] = plan_job(job, smaller, compiles=compiler is not None)
        plan = planned[job.batch, smaller.devices]
        found = {"kind": kind, "topology": smaller.name, "devices": smaller.devices, "batch": job.batch}
        plans.append({**found, **plan, "efficiency": efficiency(plan)})
    document: dict[str, Any] = {name: getattr(options, name) for name in ("model", "objective", "topology", "dtype")}
    document |= {"seq": options.seq_len, "compiler": compiler, "scaling": plans}
    if not options.json:
        step = f"{options.model}, {options.objective}, sequences of {options.seq_len} tokens, {options.dtype}"
        notes = [
            "hidden, exposed: time of the operations as a part of a step, where transfers run beside them and where "
            "they do not.",
            _source(document, plans, options, topology),
        ]
        print_result(
            f"Up to {topology.devices} devices ({topology.name}): {step}.", scaling_table(plans, _size), notes=notes
        )
    return document


def _list_chips(options: PlanOptions) -> dict[str, Any]:
    if not options.json:
        rows = [
            [name, _size(chip.memory), *(f"{x / 1e9:,.0f}" for x in (chip.bandwidth, chip.interconnect))]
            for name, chip in CHIPS.items()
        ]
        for row, chip in zip(rows, CHIPS.values(), strict=True):
            row.insert(2, f"{chip.flops / 1e12:,.0f}")
        columns = ["chip", "memory", "bfloat16, TFLOP/s", "memory, GB/s", "between devices, GB/s"]
        print_result(
            "Chips that --topology knows, with the rates that their vendors state, of one device.",
            TextTable("", columns, rows),
            notes=[f"{name}: {chip.source}" for name, chip in CHIPS.items()],
        )
    return {"chips": chips_json()}


def _compiler(topology: Topology) -> str | None:
    """The compiler for these devices, with its version; None if it is not installed."""
    if topology.chip.platform == "gpu":
        return gpu_compiler.compiler_version()
    version = tpu_compiler.compiler_version()
    return None if version is None else f"libtpu {version}"


def _utilisation(options: PlanOptions) -> tuple[float, float]:
    found = options.utilisation
    if len(found) != 2 or found[0] > found[1]:
        raise UserError(f"--utilisation: expected two fractions, the smaller one first, such as 0.3 0.6, got {found}.")
    return found[0], found[1]


_OF_SFT = ("remat", "accumulate", "optimizer", "label_smoothing", "lora_rank", "lora_targets")


def _check_options(options: PlanOptions) -> None:
    """Raises `UserError` for options that this objective does not read."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    unread = ("head_kind",) if options.objective == "sft" else _OF_SFT
    unread = (*unread, "epochs") if options.objective in ("eval", "generate") else unread
    unread = unread if options.objective == "generate" else (*unread, "new_tokens")
    given = [f"--{name.replace('_', '-')}" for name in unread if getattr(options, name) != defaults[name]]
    if given:
        raise UserError(f"{', '.join(given)}: --objective {options.objective} does not read it; leave it out.")
    of_run = [f"--{name}" for name in ("epochs", "utilisation") if getattr(options, name) != defaults[name]]
    if of_run and options.tokens is None:
        raise UserError(f"{', '.join(of_run)}: it is for the duration of a run; give --tokens too.")
    _utilisation(options)


def _config(model: str) -> DecoderConfig:
    if model in SHAPES:
        return SHAPES[model]
    if Path(model).is_dir() or is_gguf(model):
        return read_config(model)
    raise UserError(
        f"--model {model}: expected a directory with config.json, a GGUF file, or one of {', '.join(sorted(SHAPES))}."
    )


def _meshes(devices: int) -> list[tuple[int, int, int]]:
    """Every mesh of so many devices."""
    return [
        (data, fsdp, devices // data // fsdp)
        for data in range(1, devices + 1)
        for fsdp in range(1, devices // data + 1)
        if devices % data == 0 and (devices // data) % fsdp == 0
    ]


def _checked(jobs: list[Job]) -> list[Job]:
    """Returns the plans that can run; raises the first one's `UserError` if none can."""
    able, errors = [], []
    for job in jobs:
        try:
            job.check()
            able.append(job)
        except UserError as error:
            errors.append(error)
    if not able:
        raise errors[0]
    return able


def mesh_text(mesh: tuple[int, int, int]) -> str:
    """Returns the mesh in the form of `--mesh`."""
    return ",".join(f"{axis}={n}" for axis, n in zip(AXES, mesh, strict=True) if n > 1) or "data=1"


def _cost(plan: dict[str, Any]) -> tuple[float, ...]:
    """What the best plan has least of: the bound on its time, then what moves between devices, then memory."""
    seconds = plan["roofline_seconds"]
    return seconds["bound"], seconds["interconnect"] or 0.0, plan["bytes_per_device"]["total"]


def _print(document: dict[str, Any], options: PlanOptions, topology: Topology) -> None:
    new = f" + {options.new_tokens or 128}" if options.objective == "generate" else ""
    job = (
        f"{options.model}, {options.objective}, {options.batch_size} x {options.seq_len}{new} tokens per step, "
        f"{options.dtype}, on {topology.devices} device{'s' * (topology.devices > 1)} ({options.topology})"
    )
    plans = document["plans"] if options.suggest else [document]
    notes = [_source(document, plans, options, topology), *([document["note"]] if document.get("note") else [])]
    if options.suggest:
        if document["best"] is None:
            line = f"None of these meshes fits: {job}."
        else:
            line = f"Best{'' if document['fits'] else ', if it fits'}: --mesh {document['best']} for {job}."
        print_result(line, _mesh_table(plans, document["best"]), notes=notes)
        return
    word = {None: "It is not known whether this fits", True: "This fits", False: "This does not fit"}[document["fits"]]
    print_result(f"{word}, at {_bound_words(document)}: {job}.", _plan_table(document), notes=notes)


def _source(document: dict[str, Any], plans: list[dict[str, Any]], options: PlanOptions, topology: Topology) -> str:
    """Where the figures come from."""
    if any(plan["compiled"] for plan in plans):
        return f"The step was compiled by {document['compiler']}; nothing was run."
    if document["compiler"]:
        return "From the shapes alone."
    unknown = "From the shapes alone: {}, so temporaries and collectives are not known."
    if not options.compile:
        return unknown.format("nothing was compiled")
    name, extra = ("GPU", "cuda13") if topology.chip.platform == "gpu" else ("TPU", "tpu")
    return unknown.format(f"the {name} compiler is not installed") + f' Install it with: pip install "jax[{extra}]"'


def _mesh_table(plans: list[dict[str, Any]], best: str | None) -> TextTable:
    rows = []
    for plan in plans:
        seconds = (plan["roofline_seconds"][name] for name in ("compute", "memory", "interconnect"))
        milliseconds = ("" if x is None else f"{1e3 * x:,.0f}" for x in seconds)
        fits = {None: "not known", True: "yes", False: "no"}[plan["fits"]]
        rows.append([plan["mesh"], _size(plan["bytes_per_device"]["total"]), fits, *milliseconds])
    columns = ["mesh", "per device", "fits", "compute", "memory", "moved"]
    chosen = tuple(index for index, plan in enumerate(plans) if plan["mesh"] == best)
    return TextTable("at least so many ms a step", columns, rows, (2, 1, 3, 4, 5), chosen)


def _plan_table(document: dict[str, Any]) -> TextTable:
    rows = [[name.replace("_", " "), _size(size)] for name, size in document["bytes_per_device"].items()]
    rows.append(["fits", _verdict(document)])
    counts = document["parameters"]
    if counts["active"] < counts["total"]:
        rows.append(["parameters of the model", f"{counts['total']:,}"])
        rows.append(["parameters active for a token", f"{counts['active']:,}"])
    if document["experts_per_device"] is not None:
        rows.append(["experts of each block", f"{document['experts_per_device']:,}"])
    if document["kept_bytes_per_token"] is not None:
        rows.append(["kept of the frozen pass, per token", f"{document['kept_bytes_per_token']:,} bytes"])
    rows.append(["operations, FLOP", f"{document['flops_per_device']:.3g}"])
    rows.append(["operations of a step, FLOP", f"{document['flops_per_step']:.3g}"])
    for kind, of_kind in (document["collectives"] or {}).items():
        rows.append([f"{kind}, {of_kind['count']:,} x: received", _size(of_kind["bytes"])])
        rows.append([f"{kind}: the largest", _size(of_kind["largest"])])
    seconds = document["roofline_seconds"]
    for name in ("compute", "memory", "interconnect", "bound"):
        if seconds[name] is not None:
            rows.append([f"roofline, {name}", f"{1e3 * seconds[name]:,.0f} ms"])
    rows += _run_rows(document["run"]) if "run" in document else []
    return TextTable(f"mesh {document['mesh']}", ["per device", ""], rows)


def _run_rows(run: dict[str, Any]) -> list[list[str]]:
    """Rows on the duration of a run."""
    low, high = run["utilisation"]
    rows = [["steps of the run", f"{run['steps']:,}"]]
    if run["kept_bytes"] is not None:
        rows.append(["kept of the frozen pass, each host", _size(run["kept_bytes"])])
    return [*rows, [f"run at {low:.0%} to {high:.0%}", _span(run["seconds"])]]


def _span(seconds: list[float]) -> str:
    unit, name = next((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min"), (0.0, "s")) if seconds[1] >= 2 * u)
    return f"{seconds[0] / (unit or 1):,.1f} to {seconds[1] / (unit or 1):,.1f} {name}"


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def _verdict(plan: dict[str, Any]) -> str:
    margin = plan["margin_bytes"]
    if margin is None:
        return "no"
    if plan["fits"] is None:
        return f"not known: {_size(margin)} left for temporaries"
    return f"yes, with {_size(margin)} to spare" if plan["fits"] else f"no: {_size(-margin)} too much"


def _bound_words(plan: dict[str, Any]) -> str:
    return f"{1e3 * plan['roofline_seconds']['bound']:,.0f} ms a step at the least"
