"""Training that is killed at a step of its choice, within the process."""

import contextlib

import pytest

from calibjax.train import tuning


class Killed(Exception):
    """Stands for the end of the process."""


@contextlib.contextmanager
def killed_at_step(number: int):
    """The block is expected to train, and ends when its step is called for the `number`-th time."""
    make = tuning.make_train_step

    def killing(*args, **kwargs):
        step, calls = make(*args, **kwargs), []

        def run(*inputs):
            calls.append(1)
            if len(calls) == number:
                raise Killed
            return step(*inputs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "make_train_step", killing)
        with pytest.raises(Killed):
            yield
