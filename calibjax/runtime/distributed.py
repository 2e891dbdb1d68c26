"""Jobs of several processes with JAX's distributed runtime: joining, and work of the first process."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calibjax.runtime import signals
from calibjax.runtime.errors import UserError, first_line
from calibjax.runtime.options import INT_MAX, Count, Range, check_options
from calibjax.runtime.sharding import make_mesh, mesh_shape

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Which devices a command runs on. Every process of a job is started with the same options but for --process-id.

    Attributes:
        mesh: devices along each axis, such as data=2,fsdp=4; by default all devices along fsdp.
        distributed: join the other processes of the job, as Cloud TPU, SLURM, Open MPI or Kubernetes name them in the
            environment; elsewhere give the next three.
        coordinator: host and port of process 0, such as 10.0.0.1:1234; the port is any that is free there.
        processes: number of processes of the job.
        process_id: number of this process, from 0.
        heartbeat_timeout: seconds after which all processes end when one of them does not answer.
    """

    mesh: str | None = None
    distributed: bool = False
    coordinator: str | None = None
    processes: Count | None = None
    process_id: Annotated[int, Range(0, INT_MAX)] | None = None
    heartbeat_timeout: Count = 100

    def join(self) -> None:
        """Joins the other processes, if any are named. Must be called before any other use of JAX."""
        check_options(self)
        address = {"--coordinator": self.coordinator, "--processes": self.processes, "--process-id": self.process_id}
        missing = [name for name, value in address.items() if value is None]
        if len(missing) == len(address) and not self.distributed:
            try:
                jax.devices()
            except (RuntimeError, AssertionError) as error:  # it asserts where the platform's plugin is not installed
                hint = "unset it, or install what the devices need, such as calibjax[cuda13]"
                raise UserError(f"JAX_PLATFORMS: JAX finds no such device ({first_line(error)}): {hint}.") from error
            return
        if missing and not self.distributed:
            raise UserError(f"{', '.join(missing)}: missing; give all of {', '.join(address)}, or --distributed.")
        if self.processes is not None and self.process_id is not None and self.process_id >= self.processes:
            raise UserError(f"--process-id: expected 0 to {self.processes - 1}, got {self.process_id}.")
        try:
            jax.distributed.initialize(*address.values(), heartbeat_timeout_seconds=self.heartbeat_timeout)
        except (ValueError, RuntimeError) as error:
            hint = f"Where --distributed does not find them, give {', '.join(address)} in every process."
            raise UserError(f"cannot join the processes of the job ({first_line(error)}). {hint}") from error
        signals.share_sigterm()

    def make_mesh(self) -> Mesh:
        """Makes the mesh of all devices of all processes; for errors see `mesh_shape`."""
        return make_mesh(mesh_shape(self.mesh, jax.device_count()))


def is_first() -> bool:
    """Whether this is the process that writes and prints."""
    return jax.process_index() == 0


def on_first(work: Callable[[], int | None]) -> int:
    """Runs `work` in process 0 while the others wait; returns its result, or raises `UserError`, in all processes."""
    return int(from_first(lambda: np.int32(work() or 0), np.int32(0)))


def from_first(work: Callable[[], Any], like: Any) -> np.ndarray:
    """`on_first` for work that returns an array, of the shape and dtype of `like`."""
    result = together(lambda: np.asarray(work(), like.dtype) if is_first() else like)
    return result if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(result))


def together(work: Callable[[], Result]) -> Result:
    """Runs `work` in every process. A `UserError` in one process raises a `UserError` in all of them."""
    if jax.process_count() == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except UserError as caught:
        error = caught
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array(error is not None)))
    if len(failed):
        raise error or UserError(f"process {failed[0]} failed; see its own error message.")
    return cast(Result, result)


def check_same(values: Sequence[Any], what: str) -> None:
    """Raises `UserError` in all processes if `values` (by repr) differ between processes; `what` names them."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(repr(list(values)).encode()).digest()
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    different = np.flatnonzero((digests != digests[0]).any(axis=1))
    if len(different):
        raise UserError(f"{what} differ between process 0 and process {different[0]}: give all of them the same files.")


def to_host(tree: Any) -> Any:
    """The whole arrays of a tree as NumPy arrays, in every process. All processes must call this function."""

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return _gathered(x)
        return x

    return jax.device_get(jax.tree.map(whole, tree))


def _gathered(x: jax.Array) -> np.ndarray:
    """The whole array; where the mesh divides it among the devices of a process, each receives a part."""
    if not isinstance(x.sharding, NamedSharding):
        return multihost_utils.process_allgather(x, tiled=True)
    mesh = x.sharding.mesh
    process = np.vectorize(lambda device: device.process_index)(mesh.devices)
    is_same = [(process == process.take([0], axis)).all() for axis in range(process.ndim)]
    within = {name for name, same in zip(mesh.axis_names, is_same, strict=True) if same}
    named = [entry if isinstance(entry, tuple) else (entry,) for entry in x.sharding.spec]
    undivided = [tuple(name for name in names if name in within) for names in named]
    spec = PartitionSpec(*undivided)
    parts = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, spec))(x)
    whole = np.empty(x.shape, x.dtype)
    for part in parts.addressable_shards:
        whole[part.index] = part.data
    return whole
