"""A storage that fails: every write, until none does, and what is there afterwards."""

import errno
import resource
import time

import jax.numpy as jnp
import numpy as np
import pytest

from calibjax.runtime.errors import UserError, storage_failure
from calibjax.train import OptimizerConfig, create_state
from calibjax.train.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax, after a failure


def raised(error, *causes):
    """`error`, raised from the first of `causes`, that one from the second, and so on."""
    error.__cause__ = raised(*causes) if causes else None
    return error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a"), errno.ENOSPC),
        (PermissionError(errno.EACCES, "Permission denied"), errno.EACCES),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write [tensorstore_spec='{}'] [os_error_code='28']"), errno.ENOSPC),
        (RuntimeError("Error while serializing: Read-only file system (os error 30) at path /a"), errno.EROFS),
        (raised(UserError("a: cannot write there"), RuntimeError(), OSError(errno.EFBIG, "")), errno.EFBIG),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), None),
        (ValueError("os_error_code"), None),
        (MemoryError("Unable to allocate 12.7 MiB"), errno.ENOMEM),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), errno.ENOMEM),
        (ImportError("a.so: failed to map segment from shared object"), errno.ENOMEM),
        (raised(UserError("a"), ValueError("28")), None),
    ],
    ids=str,
)
def test_failures_of_the_storage_and_others(error, number):
    failure = storage_failure(error)
    assert (failure and failure.errno) == number


def test_the_middle_of_a_long_message_is_left_out():
    message = f"--model {'x' * 10_000} does not exist. Give a directory."
    shown = str(UserError(message))
    assert len(shown) < 4000
    assert shown.startswith("--model xxx")
    assert shown.endswith("xxx does not exist. Give a directory.")


@pytest.fixture
def file_size():
    """Sets the largest size of a file that this process can write, in bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_checkpoint_that_cannot_be_written(tmp_path, file_size):
    """The save, or the next one, raises what `storage_failure` names; the earlier checkpoint is read."""
    state = create_state({"w": jnp.ones((64, 64))}, OptimizerConfig().build(9))
    run = {"rate": 0.1}
    checkpoints = Checkpoints(tmp_path / "c", run)
    checkpoints.save(state, {"next": 1}, step=1)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "c", run)
    file_size(512)

    def save_two():
        for step in (2, 3):
            checkpoints.save(state, {"next": step}, step=step)

    with pytest.raises((OSError, ValueError)) as failed:
        save_two()
    file_size(10**12)
    assert storage_failure(failed.value).errno == errno.EFBIG
    before = None  # TensorStore's threads may still write when Orbax has raised; a new process does not meet them
    while before != (before := sorted((tmp_path / "c").rglob("*"))):
        time.sleep(0.3)
    again = Checkpoints(tmp_path / "c", run)
    restored, data = again.restore(state)
    assert data == {"next": 1}
    np.testing.assert_array_equal(restored.params["w"], state.params["w"])
    again.save(state, {"next": 2}, step=2)
    again.close()
    assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == ["1", "2"]
