"""Outputs whose number of rows is not that of the items: objects, of which each item has as many as it has."""

from collections.abc import Mapping, Sequence

import numpy as np

from quantdrift.core.config.schema import Model
from quantdrift.core.tasks import Task
from quantdrift.shadow.tensors.arrays import Array, uncomparable

# What pads: of a score, of a class and of the number of an item it says that there is nothing.
PADDING = -1


def item_columns(model: Model) -> Mapping[str, int]:
    """Return the outputs of `model` that hold the rows of all items in one table, and the column that tells which."""
    column = model.detection.item_column
    if model.task is not Task.DETECTION or column is None or not model.batched:
        return {}
    return {model.detection.detections: column}


def itemised(table: Array, column: int, n_items: int) -> Array:
    """Return the rows of each item, in their order, behind each other, then padding.

    Parameters
    ----------
    table
        (..., columns): one row after the other.
    column
        Which one holds the number of the item; a negative one says that the row is padding.
    n_items
        Of the batch.

    Returns
    -------
    ndarray
        (items, most rows of an item, columns), of the table's type.

    Raises
    ------
    QuarantineError
        Reason `output`: it is no such table, or tells of items that are not there.
    """
    if table.ndim < 2 or table.shape[-1] <= column or table.dtype.kind not in "fi":
        raise uncomparable(
            f"a table of {table.dtype.name}{list(table.shape)} has no column {column} with the numbers of items"
        )
    rows = table.reshape(-1, table.shape[-1])
    numbers = rows[:, column]
    if not np.all(numbers < n_items):  # nor are those that are no numbers
        raise uncomparable(
            f"column {column} of a table of objects tells of items beyond the {n_items} that there are"
        )
    rows = rows[numbers >= 0]
    items = rows[:, column].astype(np.int64)
    order = np.argsort(items, kind="stable")
    counts = np.bincount(items, minlength=n_items)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.full((n_items, counts.max(initial=0), table.shape[-1]), PADDING, dtype=table.dtype)
    found[items[order], places] = rows[order]
    return found


def joined_steps(steps: Sequence[Array], model: Model) -> Array | None:
    """Return outputs (items, ...) of several steps as one array, None where their shapes differ.

    Those of a detector are as long as the most objects of an item of the step: they get padding.
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
    # A score may be a logit, of which -1 is a likely one.
    padding = {"u": 0, "f": -np.inf}.get(part.dtype.kind, PADDING)
    found = np.full((len(part), most, *part.shape[2:]), padding, dtype=part.dtype)
    found[:, : part.shape[1]] = part
    return found
