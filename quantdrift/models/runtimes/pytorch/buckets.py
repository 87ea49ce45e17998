"""Buckets: batches are padded to a few sizes, for which the module is compiled or captured as a CUDA graph."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.models.tensors.arrays import Array, TensorSpec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Items of a batch that are computed together.

    Parameters
    ----------
    begin, n_items
        The first item, and their number.
    size
        Number of computed items: copies of the last item pad the step.
    """

    begin: int
    n_items: int
    size: int


def steps_of(n_items: int, buckets: Sequence[int]) -> Iterator[Step]:
    """Yield steps that cover every item once, in order.

    Each step uses the smallest bucket that holds all remaining items, unless more than half of it would be padding and a
    smaller bucket can be filled first.

    Parameters
    ----------
    n_items
        At least 1.
    buckets
        Sizes, in rising order.
    """
    begin = 0
    while begin < n_items:
        left = n_items - begin
        size = next((bucket for bucket in buckets if bucket >= left), buckets[-1])
        full = [bucket for bucket in buckets if bucket <= left]
        if full and 2 * left < size:
            size = full[-1]
        step = Step(begin=begin, n_items=min(left, size), size=size)
        yield step
        begin += step.n_items


def filled(inputs: Mapping[str, Array], step: Step) -> dict[str, Array]:
    """Return the inputs of a step, padded : (size, ...)."""
    rows = np.minimum(np.arange(step.size), step.n_items - 1) + step.begin
    if step.size == step.n_items:
        return {name: array[step.begin : step.begin + step.size] for name, array in inputs.items()}
    return {name: array[rows] for name, array in inputs.items()}


def joined(steps: Sequence[Step], outputs_of_steps: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the outputs of all steps without padding; an output without a dimension of items is that of the first step.

    Parameters
    ----------
    steps, outputs_of_steps
        The steps, and the outputs of each.
    """
    joined_outputs: dict[str, Array] = {}
    for name, first in outputs_of_steps[0].items():
        pairs = list(zip(steps, (outputs[name] for outputs in outputs_of_steps), strict=True))
        if all(array.shape[:1] == (step.size,) for step, array in pairs):
            joined_outputs[name] = np.concatenate([array[: step.n_items] for step, array in pairs])
        else:
            joined_outputs[name] = first
    return joined_outputs


def check_buckets(path: str, inputs: Sequence[TensorSpec], *, graphs: bool) -> None:
    """Check that a reference takes batches of several sizes.

    Parameters
    ----------
    graphs
        Whether CUDA graphs are captured, for which no other dimension may vary.

    Raises
    ------
    OperatorError
        An input has a first dimension that does not vary, or, with graphs, another one that does.
    """
    for spec in inputs:
        if not spec.shape or spec.shape[0] is not None:
            raise OperatorError(
                f"models.references.buckets: the reference {path} takes {spec}, whose first dimension does not vary"
            )
        if graphs and None in spec.shape[1:]:
            raise OperatorError(
                f"models.references.cuda_graphs: the reference {path} takes {spec}: a graph is captured for each bucket, "
                "and no other dimension may vary"
            )
