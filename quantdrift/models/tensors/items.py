"""Outputs with a variable number of rows for each item, such as a detector's objects."""

from collections.abc import Mapping, Sequence

import numpy as np

from quantdrift.core.config.schema import Model
from quantdrift.core.tasks import Task
from quantdrift.models.tensors.arrays import Array, output_error

# Marks a row as empty, in columns of scores, of classes and of item numbers.
PADDING = -1


def item_columns(model: Model) -> Mapping[str, int]:
    """Return the outputs of `model` that hold the rows of all items in one table, with the column of the item number."""
    column = model.detection.item_column
    if model.task is not Task.DETECTION or column is None or not model.batched:
        return {}
    return {model.output: column}


def itemised(table: Array, column: int, n_items: int) -> Array:
    """Return the rows of each item, in their order, followed by padding.

    Parameters
    ----------
    table
        (..., columns): one row after the other.
    column
        The column with the item's number; a negative number marks a row as padding.
    n_items
        Number of items of the batch.

    Returns
    -------
    ndarray
        (items, most rows of an item, columns), of the table's type.

    Raises
    ------
    QuarantineError
        Reason `output`: it is not such a table, or it has item numbers of `n_items` or above.
    """
    if table.ndim < 2 or table.shape[-1] <= column or table.dtype.kind not in "fi":
        raise output_error(
            f"a table of {table.dtype.name}{list(table.shape)} has no column {column} with item numbers: check "
            "`models.detection.item_column`"
        )
    rows = table.reshape(-1, table.shape[-1])
    numbers = rows[:, column]
    if not np.all(numbers < n_items):  # false for NaN too
        raise output_error(
            f"column {column} of a table of objects has item numbers beyond the {n_items} items of the batch: check "
            "`models.detection.item_column`"
        )
    rows = rows[numbers >= 0]
    items = rows[:, column].astype(np.int64)
    order = np.argsort(items, kind="stable")
    counts = np.bincount(items, minlength=n_items)
    positions = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    padded = np.full((n_items, counts.max(initial=0), table.shape[-1]), PADDING, dtype=table.dtype)
    padded[items[order], positions] = rows[order]
    return padded


def joined_steps(steps: Sequence[Array], model: Model) -> Array | None:
    """Return outputs (items, ...) of several steps as one array, None if their shapes differ.

    A detector's outputs are padded: each step is as long as the most objects of one of its items.
    """
    if model.task is Task.DETECTION and all(step.ndim > 1 for step in steps):
        most = max(step.shape[1] for step in steps)
        steps = [_padded(step, most) for step in steps]
    if len(steps) == 1:
        return steps[0]
    if len({step.shape[1:] for step in steps}) > 1:
        return None
    return np.concatenate(steps)


def _padded(part: Array, most: int) -> Array:
    if part.shape[1] == most:
        return part
    # Not -1: a score may be a logit.
    padding = {"u": 0, "f": -np.inf}.get(part.dtype.kind, PADDING)
    padded = np.full((len(part), most, *part.shape[2:]), padding, dtype=part.dtype)
    padded[:, : part.shape[1]] = part
    return padded
