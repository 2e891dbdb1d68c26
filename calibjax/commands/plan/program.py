"""The step that is planned: the one that training and evaluation run, on shapes in place of arrays."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from calibjax.data import check_context
from calibjax.eval.tokens import evaluate_batch
from calibjax.heads import HeadConfig
from calibjax.models import LanguageModel, abstract_params
from calibjax.models.config import DecoderConfig
from calibjax.models.decoder import init_adapters
from calibjax.models.frozen import freeze
from calibjax.models.generate import DecodingInputs, DecodingProgram, decode_batch
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import AXES, batch_sharding, param_shardings, replicated
from calibjax.train.curves import frozen_pass, stored_features
from calibjax.train.options import AtsOptions, make_plan
from calibjax.train.sft import SftOptions, sft_objective
from calibjax.train.step import make_train_step
from calibjax.train.tuning import first_state

ObjectiveName = Literal["ats", "sft", "eval", "generate"]
_STEPS = 1000  # of the schedule: a number in the program, of no consequence for its size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned. Picklable.

    Attributes:
        config: of the model.
        objective: ats: a batch of the frozen pass, after which heads are fitted without the model; sft: a step of
            fine-tuning; eval: a batch of evaluation: of the base model, with temperature scaling, and with a head;
            generate: all tokens of a batch of texts, sampled, with the confidence of a head.
        batch: sequences per step.
        seq: tokens per sequence; of generate those of a prompt.
        mesh: devices along each of `sharding.AXES`.
        dtype: compute dtype, and that of frozen weights.
        ats: how the head is fitted; its `batch_size` is not read.
        sft: how the model is fine-tuned; its `batch_size` is `batch`.
        new_tokens: of generate: tokens of each text after its prompt; otherwise 0.
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

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without devices: enough to say where arrays lie."""
        return AbstractMesh(self.mesh, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def check(self) -> None:
        """Raises `UserError` where the step could not run: options out of range, or a batch that does not divide."""
        if self.seq < 1:
            raise UserError(f"--seq-len: expected at least 1, got {self.seq}.")
        accumulate = self.sft.accumulate if self.objective == "sft" else 1
        rows = self.mesh[0] * self.mesh[1] * max(accumulate, 1)
        if self.batch < 1 or self.batch % rows:
            raise UserError(
                f"--batch-size {self.batch}: expected a multiple of {rows}, the devices along data and fsdp"
                f"{' times --accumulate' if accumulate > 1 else ''}."
            )
        check_context(self.seq + self.new_tokens, self.config.max_positions)
        self.sft.check(self.abstract_mesh())
        if self.objective == "sft":
            self.sft.check_model(self.config)
        make_plan(self.ats, self.config.hidden_size)


class Program(NamedTuple):
    """A step and what it is called with.

    Attributes:
        function: jitted.
        arguments: trees of `jax.ShapeDtypeStruct`s; with a mesh, they say where they lie.
        parameters: those of the arguments that are weights, of the model and of a head.
        trained: those of `parameters` that have gradients; None: nothing is trained.
        optimizer: its state; None where nothing is trained.
    """

    function: Any
    arguments: tuple[Any, ...]
    parameters: Any
    trained: Any
    optimizer: Any


def build(job: Job, mesh: Mesh | AbstractMesh | None = None) -> Program:
    """The step of a checked job, divided over `mesh`, which is to be set (`jax.set_mesh`) when it is traced.

    None: whole, as for one device.
    """
    build_one = {"ats": _ats, "sft": _sft, "eval": _eval, "generate": _generate}[job.objective]
    return build_one(job, mesh, _batch(job, mesh))


def device_bytes(tree: Any) -> int:
    """Bytes that a tree of `jax.ShapeDtypeStruct`s takes on each device."""

    def of(leaf: jax.ShapeDtypeStruct) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def _place(tree: Any, shardings: Any) -> Any:
    """The shapes with the shardings; one sharding, or a tree of them."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _batch(job: Job, mesh: Any) -> dict[str, Any]:
    kinds = {
        "tokens": jnp.int32,
        "targets": jnp.int32,
        "where": jnp.bool_,
        "segment_ids": jnp.int32,
        "positions": jnp.int32,
    }
    batch = {name: jax.ShapeDtypeStruct((job.batch, job.seq), kind) for name, kind in kinds.items()}
    return batch if mesh is None else _place(batch, batch_sharding(mesh))


def _weights(job: Job, mesh: Any) -> Any:
    weights = abstract_params(job.config, jnp.dtype(job.dtype))
    return weights if mesh is None else _place(weights, param_shardings(mesh, weights))


def _sft(job: Job, mesh: Any, batch: Any) -> Program:
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
    state = jax.eval_shape(lambda params: first_state(params, optimizer), start)
    if mesh is not None:
        state = _place(state, param_shardings(mesh, state))
    return Program(step, (state, frozen, batch, {}), (state.params, frozen), state.params, state.opt_state)


def _head(job: Job, head: HeadConfig, mesh: Any) -> Any:
    params = jax.eval_shape(lambda: head.init(jax.random.key(0)))
    return params if mesh is None else _place(params, param_shardings(mesh, params))


def _frozen(job: Job, weights: Any, *heads: HeadConfig) -> Any:
    """What `freeze` makes of the weights. Within a step, so that what it holds twice is one argument, as in memory."""
    lm = LanguageModel(job.config, weights, jnp.dtype(job.dtype), "")
    return freeze(lm, *heads)


def _ats(job: Job, mesh: Any, batch: Any) -> Program:
    heads = make_plan(job.ats, job.config.hidden_size).heads

    def whole(weights: Any, batch: Any) -> Any:
        return frozen_pass(
            job.config, jnp.dtype(job.dtype), stored_features(heads), _frozen(job, weights, *heads), batch
        )

    weights = _weights(job, mesh)
    del batch["where"]  # every token is planned as one that counts
    return Program(jax.jit(whole), (weights, batch), weights, None, None)


def _eval(job: Job, mesh: Any, batch: Any) -> Program:
    head = make_plan(job.ats, job.config.hidden_size).head
    constant = HeadConfig(kind="constant", hidden_size=job.config.hidden_size)
    configs = (constant, constant, head)

    def whole(weights: Any, heads: Any, factors: Any, batch: Any) -> Any:
        frozen = _frozen(job, weights, *configs)
        return evaluate_batch(job.config, configs, jnp.dtype(job.dtype), 15, "right", heads, factors, frozen, batch)

    heads = [_head(job, config, mesh) for config in configs]
    factors = [jax.ShapeDtypeStruct((), jnp.float32)] * len(configs)
    factors = factors if mesh is None else _place(factors, replicated(mesh))
    weights = _weights(job, mesh)
    return Program(jax.jit(whole), (weights, heads, factors, batch), (weights, heads), None, None)


def _generate(job: Job, mesh: Any, batch: Any) -> Program:
    head = make_plan(job.ats, job.config.hidden_size).head
    of_loop = DecodingProgram(job.config, head, jnp.dtype(job.dtype), job.new_tokens, None, True, 1)

    def whole(weights: Any, head_params: Any, tokens: Any, segment_ids: Any, rest: dict[str, Any]) -> Any:
        frozen = _frozen(job, weights, head)
        return decode_batch(
            of_loop, DecodingInputs(frozen, head_params, tokens=tokens, segment_ids=segment_ids, **rest)
        )

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
    rest = rest if mesh is None else _place(rest, replicated(mesh))
    weights, head_params = _weights(job, mesh), _head(job, head, mesh)
    arguments = (weights, head_params, batch["tokens"], batch["segment_ids"], rest)
    return Program(jax.jit(whole), arguments, (weights, head_params), None, None)


def kept_bytes(job: Job) -> int:
    """Bytes on each device of the keys and values that `generate` keeps, as `sharding.constrain_cache` divides them."""
    data, fsdp, tensor = job.mesh
    rows, columns, heads = job.batch // (data * fsdp), job.seq + job.new_tokens - 1, job.config.num_kv_heads
    values = job.config.num_layers * rows * columns * (heads // tensor if heads % tensor == 0 else heads)
    return 2 * values * job.config.head_dim * jnp.dtype(job.dtype).itemsize
