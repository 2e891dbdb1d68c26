"""`calibjax plan`: memory and time of a step on one mesh, or on every mesh of a topology, before a run."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax

from calibjax.commands.common import JsonOptions, ModelPathOptions
from calibjax.commands.plan.chips import GIB, Topology, parse_topology
from calibjax.commands.plan.program import Job, ObjectiveName
from calibjax.commands.plan.result import plan_job
from calibjax.eval.report.tables import TextTable
from calibjax.eval.report.terminal import print_result
from calibjax.heads import HeadKind
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import Remat
from calibjax.models.gguf import is_gguf
from calibjax.models.hub import download, repository_of
from calibjax.models.load import read_config
from calibjax.models.shapes import SHAPES
from calibjax.runtime import gpu_compiler, tpu_compiler
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import BatchSize, Count, Range, Weight
from calibjax.runtime.sharding import AXES, mesh_shape
from calibjax.runtime.tpu_compiler import DoesNotCompile
from calibjax.train.options import RECIPES, AtsOptions
from calibjax.train.sft import SftOptions
from calibjax.train.state import OptimizerKind

_OF_SFT = ("remat", "accumulate", "optimizer", "label_smoothing", "lora_rank", "lora_targets")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(JsonOptions, ModelPathOptions):
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
        epochs: passes over them; by default as the command's.
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

    PLANNED: ClassVar[dict[str, ObjectiveName]] = {
        "train ats": "ats",
        "train sft": "sft",
        "eval tasks": "eval",
        "generate": "generate",
    }

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
    head_kind: HeadKind = RECIPES["default"].head
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
        unread = ("head_kind",) if self.objective == "sft" else _OF_SFT
        unread = (*unread, "epochs") if self.objective in ("eval", "generate") else unread
        return unread if self.objective == "generate" else (*unread, "new_tokens")

    @classmethod
    def planned(cls, command: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """What is read of a run's run.yaml, with the objective; the mesh of the run is not."""
        objective = cls.PLANNED[command]
        unread = cls(model="", topology="", objective=objective).unread()
        fields = {field.name for field in dataclasses.fields(cls)} - {*unread, "mesh", "json"}
        read = {name: value for name, value in content.items() if name.replace("-", "_") in fields}
        return {"objective": objective, **read}

    def job(self, config: DecoderConfig, mesh: tuple[int, int, int], dtype: str) -> Job:
        """The step on a mesh; not checked."""
        sft = {name: getattr(self, name) for name in _OF_SFT}
        sft |= {name: getattr(self, name) for name in ("epochs", "batch_size") if getattr(self, name) is not None}
        sft_options = SftOptions(**sft)
        ats_batch = self.batch_size or RECIPES["default"].batch_size
        return Job(
            config=config,
            objective=self.objective,
            batch=sft_options.batch_size if self.objective == "sft" else ats_batch,
            seq=self.seq_len,
            mesh=mesh,
            dtype=dtype,
            new_tokens=(self.new_tokens or 128) if self.objective == "generate" else 0,
            ats=AtsOptions(head=self.head_kind, epochs=self.epochs),
            sft=sft_options,
        )


def run(options: PlanOptions, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the command; returns the document that `--json` prints."""
    options.check()
    jax.config.update("jax_platforms", "cpu")  # programs are traced, and nothing runs on a device
    topology = parse_topology(options.topology)
    config, stored = _model(options.model)
    dtype = options.dtype or stored
    meshes = _meshes(topology.devices) if options.suggest else [mesh_shape(options.mesh, topology.devices)]
    jobs = _checked([options.job(config, mesh, dtype) for mesh in meshes])
    compiler = _compiler(topology) if options.compile else None
    plans, reasons = [], []
    for number, job in enumerate(jobs, 1):
        if compiler is not None or options.suggest:
            how = f", compiled by {compiler}: a minute or more for a large model" if compiler else ""
            log(f"planning {mesh_text(job.mesh)} ({number} of {len(jobs)}){how} ...")
        try:
            plans.append(plan_job(job, topology, compiles=compiler is not None, tokens=options.tokens))
        except DoesNotCompile as reason:
            reasons.append(f"--mesh {mesh_text(job.mesh)} does not compile for {topology.name}: {reason}")
            log(reasons[-1])
    if not plans:
        raise UserError(reasons[0])
    document: dict[str, Any] = {"model": options.model, "objective": options.objective, "topology": topology.name}
    document |= {"dtype": dtype, "batch": jobs[0].batch, "seq": options.seq_len, "devices": topology.devices}
    document |= {"compiler": compiler}
    if options.suggest:
        best = min((plan for plan in plans if plan["likely_fits"]), key=_cost, default={"fits": False, "mesh": None})
        document |= {"fits": best["fits"], "best": best["mesh"], "plans": plans, "did_not_compile": reasons}
    else:
        document |= plans[0]
    if not options.json:
        _print(document, jobs[0], topology, options)
    return document


def _compiler(topology: Topology) -> str | None:
    """The compiler for these devices, with its version; None if it is not installed."""
    if topology.chip.platform == "gpu":
        return gpu_compiler.compiler_version()
    version = tpu_compiler.compiler_version()
    return None if version is None else f"libtpu {version}"


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
    stated = json.loads((folder / "config.json").read_text())
    stored = stated.get("dtype") or stated.get("torch_dtype")
    return config, "bfloat16" if stored == "bfloat16" else "float32"


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
        rows.append([plan["mesh"], _size(total), _verdict(plan).partition(",")[0].partition(":")[0], *milliseconds])
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
    if document["kept_bytes_per_token"] is not None:
        rows.append(["kept of the frozen pass, per token", f"{document['kept_bytes_per_token']:,} bytes"])
    rows.append(["operations, FLOP", f"{document['flops_per_device']:.3g}"])
    rows.append(["operations of a step, FLOP", f"{document['flops_per_step']:.3g}"])
    for kind, of_kind in (document["collectives"] or {}).items():
        rows.append([f"{kind}, {of_kind['count']:,} x: received", _size(of_kind["bytes"])])
        rows.append([f"{kind}: the largest", _size(of_kind["largest"])])
    seconds = document["roofline_seconds"]
    rows += [[f"roofline, {name}", f"{1e3 * x:,.0f} ms"] for name, x in seconds.items() if x is not None]
    if run := document.get("run"):
        low, high = run["utilisation"]
        rows.append(["steps of the run", f"{run['steps']:,}"])
        if run["kept_bytes"] is not None:
            rows.append(["kept of the frozen pass, each host", _size(run["kept_bytes"])])
        rows.append([f"run at {low:.0%} to {high:.0%}", _span(run["seconds"])])
    return TextTable(f"mesh {document['mesh']}", ["per device", ""], rows)


def _span(seconds: list[float]) -> str:
    unit, name = next((u, n) for u, n in ((86400, "d"), (3600, "h"), (60, "min"), (0.0, "s")) if seconds[1] >= 2 * u)
    return f"{seconds[0] / (unit or 1):,.1f} to {seconds[1] / (unit or 1):,.1f} {name}"


def _size(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:,.2f} MiB"


def _verdict(plan: dict[str, Any]) -> str:
    margin = plan["margin_bytes"]
    if margin is None:
        return "no"
    likely = "probably " if plan["fits"] is None else ""
    if margin >= 0:
        return f"{likely}yes, with {_size(margin)} to spare"
    return f"{likely}no: {_size(-margin)} too much"
