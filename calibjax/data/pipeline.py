"""From arrays to batches: shuffled anew each epoch, the same for the same seed, and resumable at any batch."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np

from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import context_mesh, local_rows, place_rows

Arrays = Mapping[str, np.ndarray]
Batch = dict[str, np.ndarray]

# Everything is in memory: no threads to hand over to, and nothing to prefetch.
_READ = grain.ReadOptions(num_threads=0)


def batches(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool = True,
    part: np.ndarray | None = None,
) -> grain.DatasetIterator[Batch]:
    """Iterates over batches for training.

    Batches run on from one epoch into the next, so every row comes once per epoch whatever the batch size. What is left
    after the last whole batch is dropped; only if `epochs` do not fill a single batch, that one comes padded, as in
    `eval_batches`.

    The iterator's `get_state()` is a dict of plain numbers, to be kept as JSON in a checkpoint. After `set_state` on an
    iterator made with the same arguments, the batches go on as if there had been no break.

    Args:
      arrays: Arrays with one row per example, all with the same number of rows, such as `sequences._asdict()`.
      batch_size: Rows per batch, over all processes.
      seed: Of the shuffling, any integer >= 0.
      epochs: Passes over the rows. Give this or `steps`.
      steps: Number of batches.
      shuffle: Whether each epoch comes in a random order of its own, or in the order of the arrays.
      part: Which rows of every batch this process reads, ascending, as `sharding.local_rows` says; `None`: all.

    Returns:
      An iterator over dicts with the keys of `arrays`.

    Raises:
      UserError: An argument is out of range, or the arrays differ in their number of rows.
    """
    rows = _check(arrays, batch_size)
    if (epochs is None) == (steps is None):
        raise UserError(f"expected either epochs or steps, got epochs={epochs} and steps={steps}.")
    for name, value, least in (("epochs", epochs, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{name}: expected an integer >= {least}, got {value}.")
    if steps is None:
        assert epochs is not None
        steps = max(epochs * rows // batch_size, 1)
    last = steps * batch_size if epochs is None else epochs * rows  # rows drawn in all
    order = _Order(rows, batch_size, last, seed if shuffle else None)
    indices = grain.MapDataset.range(steps).map(order)
    return iter(indices.map(_Gather(arrays, batch_size, part)).to_iter_dataset(_READ))


def eval_batches(arrays: Arrays, batch_size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Iterates once over all rows in their order, in batches of one shape.

    Where a mesh of ours is set (`jax.set_mesh`), batches are laid out on it, and each process reads the rows that its
    own devices hold.

    Args:
      arrays: As for `batches`. The last batch is filled up with copies of row 0 whose `where` is all False, so the
        array `where` has to be there unless `batch_size` divides the number of rows.
      batch_size: Rows per batch, over all processes.

    Returns:
      An iterator over (batch, number of its rows that are real). They come first.

    Raises:
      UserError: As for `batches`, or `where` is missing.
    """
    rows, mesh = _check(arrays, batch_size), context_mesh()
    gather = _Gather(arrays, batch_size, local_rows(mesh, batch_size))
    dataset: Any = grain.MapDataset.range(rows).batch(batch_size, batch_fn=np.asarray).map(gather)
    return (
        (place_rows(mesh, dataset[step]), min(rows - step * batch_size, batch_size)) for step in range(len(dataset))
    )


class _Order(grain.transforms.Map):
    """The rows of a batch, from its number alone: a permutation of its own for each epoch.

    For whole batches at a time: grain's own shuffle answers row by row, at a cost that a small model's step feels.
    """

    def __init__(self, rows: int, batch_size: int, last: int, seed: int | None):
        self._rows, self._batch_size, self._last, self._seed = rows, batch_size, last, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(self._rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._rows)

    def map(self, element: Any) -> np.ndarray:
        drawn = np.arange(element * self._batch_size, min((element + 1) * self._batch_size, self._last))
        epochs = drawn // self._rows
        parts = [self._epoch(int(epoch))[drawn[epochs == epoch] % self._rows] for epoch in np.unique(epochs)]
        return np.concatenate(parts)


class _Gather(grain.transforms.Map):
    """Fetches the rows of a whole batch at once: one fancy index per array, instead of Python for every row."""

    def __init__(self, arrays: Arrays, batch_size: int, part: np.ndarray | None):
        self._arrays = dict(arrays)
        self._batch_size = batch_size
        self._part = np.arange(batch_size) if part is None else part

    def map(self, element: Any) -> Batch:
        missing = self._batch_size - len(element)
        indices = np.pad(element, (0, missing))[self._part]
        batch = {key: array[indices] for key, array in self._arrays.items()}
        if missing:
            if "where" not in batch:
                raise UserError(
                    f"the last batch has {len(element)} rows of {self._batch_size}, and without an array 'where' its "
                    "padding cannot be told from them. Add one, or choose a batch_size that divides the rows."
                )
            batch["where"][self._part >= len(element)] = False
        return batch


def _check(arrays: Arrays, batch_size: int) -> int:
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or min(lengths.values()) == 0:
        raise UserError(f"expected arrays with the same number of rows, at least 1, got {lengths}.")
    if batch_size < 1:
        raise UserError(f"batch_size: expected at least 1, got {batch_size}.")
    return next(iter(lengths.values()))
