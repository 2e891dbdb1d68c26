"""Context of a run: directory, devices, seed, log and progress."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from calibjax.runtime.distributed import is_first
from calibjax.runtime.errors import UserError
from calibjax.runtime.options import Seed, check_value
from calibjax.runtime.progress import progress_bar
from calibjax.runtime.sharding import as_mesh, make_mesh
from calibjax.runtime.tracking import TrackerName

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """Context of a run, passed to functions that compute for a while.

    Attributes:
        directory: directory of checkpoints, caches and logs. If None, nothing is stored and the run cannot resume.
        mesh: devices, such as `jax.make_mesh((2, 4), ("data", "fsdp"))`, with axes among data, fsdp and tensor; by
            default all devices along fsdp, as in the commands.
        seed: seed of all random numbers, from 0 to 2³² − 1.
        log: called with one line per event.
        progress: whether to show progress bars, in the first process only.
        title: title of the progress bars; by default each function has its own.
        track: tracker that receives the scalars of training, in addition to TensorBoard.
    """

    directory: Path | None = None
    mesh: Mesh = dataclasses.field(default_factory=make_mesh)
    seed: int = 0
    log: Log = print
    progress: bool = True
    title: str | None = None
    track: TrackerName = "tensorboard"

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh):
            raise UserError(f"mesh: expected jax.make_mesh(...), got {type(self.mesh).__name__}.")
        check_value("seed", Seed, self.seed)
        object.__setattr__(self, "mesh", as_mesh(self.mesh))
        if self.directory is not None:
            object.__setattr__(self, "directory", Path(self.directory))

    @property
    def shows_progress(self) -> bool:
        return self.progress and is_first()

    def within(self, *parts: str) -> "RunContext":
        """This context in a subdirectory of its directory."""
        return self if self.directory is None else dataclasses.replace(self, directory=self.directory.joinpath(*parts))

    def titled(self, title: str) -> "RunContext":
        """This context with another title for the progress bar."""
        return dataclasses.replace(self, title=title)

    def silent(self) -> "RunContext":
        """This context without log lines and progress bars."""
        return dataclasses.replace(self, log=lambda line: None, progress=False)

    @contextlib.contextmanager
    def with_directory(self) -> Iterator["RunContext"]:
        """This context with its directory, or with a temporary one, removed at the end; then in one process only."""
        if self.directory is not None:
            yield self
            return
        if jax.process_count() > 1:
            self.require_directory()
        with tempfile.TemporaryDirectory(prefix="calibjax-") as directory:
            yield dataclasses.replace(self, directory=Path(directory))

    def require_directory(self) -> Path:
        """The directory; raises `UserError` if there is none."""
        if self.directory is None:
            raise UserError("expected a directory to write to; give RunContext(directory=...).")
        return self.directory

    def bar(self, items: Iterable[Any] | None = None, *, title: str, unit: str, **options: Any) -> tqdm:
        """Makes a progress bar over `items`, or one to update manually up to `total`: see `progress_bar`."""
        return progress_bar(items, title=title, unit=unit, disable=not self.shows_progress, **options)
