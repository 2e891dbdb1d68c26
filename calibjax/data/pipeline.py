"""Batches from arrays: reshuffled each epoch, determined by the seed, and resumable at any batch."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from calibjax.runtime.arrays import ceil_div
from calibjax.runtime.errors import UserError
from calibjax.runtime.sharding import batch_shards, context_mesh, local_rows, place_rows

if TYPE_CHECKING:
    import grain  # otherwise imported where batches are read: it takes more than a second

Arrays = Mapping[str, np.ndarray]
Batch = dict[str, np.ndarray]


def batches(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int,
    epochs: int | None = None,
    steps: int | None = None,
    part: np.ndarray | None = None,
) -> "grain.DatasetIterator[Batch]":
    """Iterates over batches for training, dicts with the keys of `arrays`.

    Batches continue across epochs, so every row occurs once per epoch for any batch size. Rows after the last whole
    batch are dropped. If `epochs` do not fill a single batch, one padded batch is returned, as in `eval_batches`. The
    iterator's `get_state()` is JSON; `set_state` on an iterator with the same arguments resumes with the next batch.

    Args:
        arrays: arrays with one row per example, such as `sequences.arrays()`.
        batch_size: rows per batch, over all processes.
        seed: >= 0; determines the order of the rows in each epoch.
        epochs, steps: passes over the rows, or number of batches; one of them is required.
        part: rows of every batch that this process reads, ascending; see `sharding.local_rows`. None: all.
    """
    import grain

    rows = _check(arrays, batch_size)
    if (epochs is None) == (steps is None):
        raise UserError(f"expected either epochs or steps, got epochs={epochs} and steps={steps}.")
    for name, value, least in (("epochs", epochs, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{name}: expected an integer >= {least}, got {value}.")
    total_rows = (steps or 0) * batch_size if epochs is None else epochs * rows
    steps = max(total_rows // batch_size, 1)
    gather = _gather(arrays, batch_size, part)

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(rows)

    def batch(step: Any) -> Batch:
        # Whole batches: grain's shuffle of rows is slow next to the step of a small model.
        drawn = np.arange(step * batch_size, min((step + 1) * batch_size, total_rows))
        epochs = drawn // rows
        parts = [order(int(epoch))[drawn[epochs == epoch] % rows] for epoch in np.unique(epochs)]
        return gather(np.concatenate(parts))

    read = grain.ReadOptions(num_threads=0)  # all arrays are in memory: threads and prefetching would gain nothing
    return iter(grain.MapDataset.range(steps).map(batch).to_iter_dataset(read))


def eval_batches(arrays: Arrays, batch_size: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Iterates once over all rows in their order, in batches of one shape: (batch, number of real rows in it).

    The last batch is padded with copies of row 0 whose `where` is False, so the array `where` is required unless
    `batch_size`, rows over all processes, divides the number of rows. If a mesh is set (`jax.set_mesh`), batches are
    sharded over it, and each process reads the rows of its own devices.
    """
    rows, mesh = _check(arrays, batch_size), context_mesh()
    gather = _gather(arrays, batch_size, local_rows(mesh, batch_size))
    parts = (np.arange(start, min(start + batch_size, rows)) for start in range(0, rows, batch_size))
    return ((place_rows(mesh, gather(part)), len(part)) for part in parts)


def even_batch_size(rows: int, batch_size: int) -> int:
    """The size of batches for which all forward passes cost least: `batch_size`, or three quarters or half of it.

    A pass is taken to cost its rows and a sixteenth of `batch_size`; the last batch may have empty rows. The size is a
    multiple of the number of parts into which the current mesh divides a batch.
    """
    shards = batch_shards(context_mesh())
    sizes = {quarters * batch_size // (4 * shards) * shards for quarters in (2, 3, 4)} - {0}

    def cost(size: int) -> float:
        return ceil_div(rows, size) * (size + batch_size / 16)

    return min(sizes, key=lambda size: (cost(size), -size))


def _gather(arrays: Arrays, batch_size: int, part: np.ndarray | None) -> Callable[[np.ndarray], Batch]:
    held = {name: np.asarray(array) for name, array in arrays.items()}
    places = np.arange(batch_size) if part is None else part

    def gather(rows: np.ndarray) -> Batch:
        missing = batch_size - len(rows)
        indices = np.pad(rows, (0, missing))[places]
        batch = {key: array[indices] for key, array in held.items()}
        if missing:
            if "where" not in batch:
                last = f"the last batch has {len(rows)} rows of {batch_size}, and its padding requires an array 'where'"
                raise UserError(f"{last}. Add one, or choose a batch_size that divides the number of rows.")
            batch["where"][places >= len(rows)] = False
        return batch

    return gather


def _check(arrays: Arrays, batch_size: int) -> int:
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1 or min(lengths.values()) == 0:
        raise UserError(f"expected arrays with the same number of rows, at least 1, got {lengths}.")
    if batch_size < 1:
        raise UserError(f"batch_size: expected at least 1, got {batch_size}.")
    return next(iter(lengths.values()))
