"""The replay and comparison of a batch: from captured exchanges to divergences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from typing import TypeVar

import msgspec
import numpy as np

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Tensor
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Array, Outputs, TensorSpec
from quantdrift.models.tensors.items import item_columns, itemised, joined_steps
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.pairing import OutputPair, captured_of, pair_of, replayed_of
from quantdrift.shadow.replay.references import VersionReference

Entry = TypeVar("Entry")
Result = TypeVar("Result")


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replayed and compared exchange.

    Parameters
    ----------
    batch_divergences
        The divergences of all items that were compared together; the exchanges of a batch share this object.
    rows
        The rows of this exchange in it.
    embedding
        The reference's embedding : (items, ...), or None if it has none with one entry per item.
    """

    batch_divergences: Divergences
    rows: range
    embedding: Array | None

    @property
    def divergences(self) -> Divergences:
        """The divergences of this exchange's items."""
        return self.batch_divergences.part(self.rows.start, self.rows.stop)


Outcome = ReplayResult | QuarantineError


class AssembledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is ready to replay.

    Parameters
    ----------
    batch
        Exchanges with one signature; at least one.
    inputs
        Name to array : (items of all of them, ...).
    """

    batch: tuple[PreparedExchange, ...]
    inputs: dict[str, Array]

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(next(iter(self.inputs.values())))


def assemble(batch: Sequence[PreparedExchange]) -> AssembledBatch:
    """Return the batch with its inputs concatenated; those of a single exchange are not copied.

    Parameters
    ----------
    batch
        Exchanges with one signature; at least one.
    """
    if len(batch) == 1:
        return AssembledBatch(batch=tuple(batch), inputs=batch[0].inputs)
    joined = {name: np.concatenate([entry.inputs[name] for entry in batch]) for name in batch[0].inputs}
    return AssembledBatch(batch=tuple(batch), inputs=joined)


def replay(assembled: AssembledBatch, *, most_items: int) -> list[Answer]:
    """Return the reference's outputs for each exchange, items along the first dimension, or why it is quarantined.

    All exchanges are replayed together. If that fails, halves are tried, down to single exchanges, and a single exchange
    with many items in steps of half the length, down to single items. Only an exchange that fails alone is quarantined.

    Parameters
    ----------
    most_items
        Most items in one call of the reference.

    Raises
    ------
    BrokenRuntimeError
        The reference no longer computes anything.
    RetryError
        The reference's server is unreachable.
    """

    def work(batch: Sequence[PreparedExchange]) -> Sequence[dict[str, Array]]:
        is_complete = len(batch) == len(assembled.batch)
        replayed = _replay if len(batch) > 1 else _replay_one
        return replayed(assembled if is_complete else assemble(batch), most_items=most_items)

    return _bisect(assembled.batch, work)


def compare(batch: Sequence[PreparedExchange], outputs: Sequence[Answer]) -> list[Outcome]:
    """Return the divergences and the embedding of each exchange, or why it is quarantined.

    All exchanges are compared together, and if that fails in halves, as in `replay`.

    Parameters
    ----------
    batch
        Exchanges with one signature.
    outputs
        As `replay` returns them.
    """
    chosen: dict[tuple[object, ...], Mapping[str, str]] = {}
    pairs = [pair_of(entry, output, chosen) for entry, output in zip(batch, outputs, strict=True)]
    compared = iter(_bisect([pair for pair in pairs if isinstance(pair, OutputPair)], _compare))
    return [next(compared) if isinstance(pair, OutputPair) else pair for pair in pairs]


def compare_batch(batch: Sequence[PreparedExchange], *, most_items: int) -> list[Outcome]:
    """Assemble, replay and compare a batch with one signature.

    Parameters
    ----------
    batch
        Exchanges with one signature; at least one.
    most_items
        Most items in one call of the reference.

    Raises
    ------
    BrokenRuntimeError
        The reference no longer computes anything.
    RetryError
        The reference's server is unreachable.
    """
    return compare(batch, replay(assemble(batch), most_items=most_items))


def replay_again(
    batch: Sequence[PreparedExchange], names: Sequence[Mapping[str, str]], *, most_items: int
) -> list[Outputs | QuarantineError]:
    """Return the reference's outputs for each exchange, by the names under which they are compared, or the error.

    Parameters
    ----------
    batch, most_items
        As for `compare_batch`.
    names
        Output names of each exchange, as in `OutputPair`.

    Raises
    ------
    BrokenRuntimeError
        The reference no longer computes anything.
    RetryError
        The reference's server is unreachable.
    """
    return [
        answer
        if isinstance(answer, QuarantineError)
        else _outputs(partial(replayed_of, entry, answer), wanted)
        for entry, answer, wanted in zip(
            batch, replay(assemble(batch), most_items=most_items), names, strict=True
        )
    ]


def recheck_outputs(
    entry: PreparedExchange, answer: Sequence[Tensor], names: Sequence[str]
) -> Outputs | QuarantineError:
    """Return the outputs `names` of the candidate's second answer, read like those of the first, or the error."""
    exchange = msgspec.structs.replace(entry.exchange, outputs=tuple(answer))
    again = msgspec.structs.replace(entry, exchange=exchange)
    return _outputs(partial(captured_of, again), {name: name for name in names})


def _outputs(find: Callable[[str], Array], names: Mapping[str, str]) -> Outputs | QuarantineError:
    try:
        return {name: find(name_of_side) for name, name_of_side in names.items()}
    except QuarantineError as error:
        return error


def _bisect(
    entries: Sequence[Entry], work: Callable[[Sequence[Entry]], Sequence[Result]]
) -> list[Result | QuarantineError]:
    """Return the results of `work` on all entries at once, or on halves if that fails; errors of entries that fail alone."""
    if not entries:
        return []
    try:
        return [*work(entries)]
    except QuarantineError as error:
        if len(entries) == 1:
            return [error]
    half = len(entries) // 2
    return [*_bisect(entries[:half], work), *_bisect(entries[half:], work)]


def _replay(assembled: AssembledBatch, *, most_items: int) -> list[dict[str, Array]]:
    """Return the reference's outputs of each exchange, items along the first dimension."""
    entries, joined, n_items = assembled.batch, assembled.inputs, assembled.n_items
    version_reference = entries[0].version_reference
    if not entries[0].batched:
        return [_run_unbatched(entry) for entry in entries]
    # In equal steps, so that little padding is computed.
    size = _fixed_size(version_reference.runtime.inputs) or ceil(n_items / ceil(n_items / most_items))
    outputs = _run_in_steps(version_reference, joined, n_items, size)
    full_outputs = {name: array for name, array in outputs.items() if len(array) == n_items}
    return [
        {name: array[begin:end] for name, array in full_outputs.items()} for begin, end in _spans(entries)
    ]


def _replay_one(assembled: AssembledBatch, *, most_items: int) -> list[dict[str, Array]]:
    """Return the reference's outputs of one exchange, in shorter and shorter steps while it fails (too little memory)."""
    entry = assembled.batch[0]
    divisible = entry.batched and _fixed_size(entry.version_reference.runtime.inputs) is None
    size = min(most_items, assembled.n_items)
    while True:
        try:
            return _replay(assembled, most_items=size)
        except QuarantineError:
            if not divisible or size == 1:
                raise
        size = ceil(size / 2)


def _spans(entries: Sequence[PreparedExchange]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each exchange's items in the batch."""
    end = 0
    for entry in entries:
        begin, end = end, end + entry.n_items
        yield begin, end


def _run_unbatched(entry: PreparedExchange) -> dict[str, Array]:
    """Return the outputs of an exchange of an unbatched model, which is one item : (1, ...)."""
    outputs = entry.version_reference.runtime.run({name: array[0] for name, array in entry.inputs.items()})
    return {name: output[np.newaxis] for name, output in outputs.items()}


def _run_in_steps(
    version_reference: VersionReference, inputs: dict[str, Array], n_items: int, size: int
) -> dict[str, Array]:
    """Run `size` items at a time; the last item pads the last step. Outputs without a dimension of items are dropped."""
    tables = item_columns(version_reference.model)
    steps: list[dict[str, Array]] = []
    for begin in range(0, n_items, size):
        step = {name: _rows(array, begin, size) for name, array in inputs.items()}
        outputs = version_reference.runtime.run(step)
        steps.append(
            {
                name: itemised(output, tables[name], size) if name in tables else output
                for name, output in outputs.items()
            }
        )
    names = [name for name in steps[0] if all(step[name].shape[:1] == (size,) for step in steps)]
    joined = {name: joined_steps([step[name] for step in steps], version_reference.model) for name in names}
    return {name: output[:n_items] for name, output in joined.items() if output is not None}


def _rows(array: Array, begin: int, size: int) -> Array:
    """Return `size` items from `begin` on, padded with the last item. They are copied only if padded."""
    if begin + size <= len(array):
        return array[begin : begin + size]
    return array[np.minimum(np.arange(begin, begin + size), len(array) - 1)]


def _fixed_size(specs: Sequence[TensorSpec]) -> int | None:
    """Return the number of items that the reference requires, None if any number will do."""
    return next((spec.shape[0] for spec in specs if spec.shape and spec.shape[0] is not None), None)


def _compare(pairs: Sequence[OutputPair]) -> list[ReplayResult]:
    """Return the result of each pair; pairs with equal types and shapes are compared together."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        alike.setdefault(pair.signature, []).append(index)
    results: dict[int, ReplayResult] = {}
    for indices in alike.values():
        grouped = [pairs[index] for index in indices]
        batch_divergences = grouped[0].version_reference.comparator.compare(
            _joined([pair.candidate for pair in grouped]), _joined([pair.reference for pair in grouped])
        )
        end = 0
        for index, pair in zip(indices, grouped, strict=True):
            begin, end = end, end + pair.n_items
            results[index] = ReplayResult(
                batch_divergences=batch_divergences, rows=range(begin, end), embedding=pair.embedding
            )
    return [results[index] for index in range(len(pairs))]


def _joined(sides: Sequence[Outputs]) -> Outputs:
    return {name: np.concatenate([side[name] for side in sides]) for name in sides[0]}
