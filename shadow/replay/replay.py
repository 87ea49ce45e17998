"""Replays a batch and compares it: a pure function from captured exchanges to divergences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from typing import TypeVar

import msgspec
import numpy as np

from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Tensor
from quantdrift.shadow.comparators.protocol import Divergences
from quantdrift.shadow.replay.exchange import Answer, PreparedExchange
from quantdrift.shadow.replay.pairing import OutputPair, captured_of, pair_of, replayed_of
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.tensors.arrays import Array, Outputs, TensorSpec
from quantdrift.shadow.tensors.items import item_columns, itemised, joined_steps

Entry = TypeVar("Entry")
Result = TypeVar("Result")


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an exchange.

    Parameters
    ----------
    everything
        Divergences of all items that were compared together: one object for all of these exchanges.
    rows
        Those that are its own.
    embedding
        The reference's embedding : (items, ...), or None where it has none with one entry per item.
    """

    everything: Divergences
    rows: range
    embedding: Array | None

    @property
    def divergences(self) -> Divergences:
        """Of its own items."""
        return self.everything.part(self.rows.start, self.rows.stop)


Outcome = ReplayResult | QuarantineError


class AssembledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is ready to be replayed.

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
    """Return a batch with its inputs side by side; of a single exchange they are not copied.

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
    """Return, per exchange, the reference's outputs, items along the first dimension, or why it is set aside.

    All exchanges are replayed together. Where that fails, halves are tried, down to single exchanges, and of one with many
    items in steps that are half as long, down to single items: only what fails so is set aside, nothing else pays for it.

    Parameters
    ----------
    assembled
        The batch.
    most_items
        Items that are given to the reference at once.

    Raises
    ------
    BrokenRuntimeError
        The reference computes nothing any more.
    RetryError
        What computes is away for now.
    """

    def work(batch: Sequence[PreparedExchange]) -> Sequence[dict[str, Array]]:
        whole = len(batch) == len(assembled.batch)
        replayed = _replay if len(batch) > 1 else _replay_one
        return replayed(assembled if whole else assemble(batch), most_items=most_items)

    return _together(assembled.batch, work)


def compare(batch: Sequence[PreparedExchange], outputs: Sequence[Answer]) -> list[Outcome]:
    """Return, per exchange, the divergences of its items with their embedding, or why it is set aside.

    All exchanges are compared together, and where that fails in halves, as they are replayed.

    Parameters
    ----------
    batch
        Exchanges with one signature.
    outputs
        As `replay` returns them.
    """
    chosen: dict[tuple[object, ...], tuple[str, str]] = {}
    pairs = [pair_of(entry, one, chosen) for entry, one in zip(batch, outputs, strict=True)]
    compared = iter(_together([pair for pair in pairs if isinstance(pair, OutputPair)], _compare))
    return [next(compared) if isinstance(pair, OutputPair) else pair for pair in pairs]


def compare_batch(batch: Sequence[PreparedExchange], *, most_items: int) -> list[Outcome]:
    """Assemble, replay and compare a batch with one signature.

    Parameters
    ----------
    batch
        Exchanges with one signature; at least one.
    most_items
        Items that are given to the reference at once.

    Raises
    ------
    BrokenRuntimeError
        The reference computes nothing any more.
    RetryError
        What computes is away for now.
    """
    return compare(batch, replay(assemble(batch), most_items=most_items))


def replay_again(
    batch: Sequence[PreparedExchange], names: Sequence[Mapping[str, str]], *, most_items: int
) -> list[Outputs | QuarantineError]:
    """Return, per exchange, the reference's outputs by the names under which they are compared, or why there are none.

    Parameters
    ----------
    batch, most_items
        As for `compare_batch`.
    names
        Of each exchange, as in `OutputPair`.

    Raises
    ------
    BrokenRuntimeError
        The reference computes nothing any more.
    RetryError
        What computes is away for now.
    """
    return [
        answer
        if isinstance(answer, QuarantineError)
        else _outputs(partial(replayed_of, entry, answer), wanted)
        for entry, answer, wanted in zip(
            batch, replay(assemble(batch), most_items=most_items), names, strict=True
        )
    ]


def answered_again(
    entry: PreparedExchange, answer: Sequence[Tensor], names: Sequence[str]
) -> Outputs | QuarantineError:
    """Return the outputs `names` of a second answer of the candidate as those of the first are read, or why not."""
    exchange = msgspec.structs.replace(entry.exchange, outputs=tuple(answer))
    again = msgspec.structs.replace(entry, exchange=exchange)
    return _outputs(partial(captured_of, again), {name: name for name in names})


def _outputs(find: Callable[[str], Array], names: Mapping[str, str]) -> Outputs | QuarantineError:
    try:
        return {name: find(own) for name, own in names.items()}
    except QuarantineError as error:
        return error


def _together(
    entries: Sequence[Entry], work: Callable[[Sequence[Entry]], Sequence[Result]]
) -> list[Result | QuarantineError]:
    """Do `work` on all entries at once, or on halves where it refuses them; the error of each that fails alone."""
    if not entries:
        return []
    try:
        return [*work(entries)]
    except QuarantineError as error:
        if len(entries) == 1:
            return [error]
    half = len(entries) // 2
    return [*_together(entries[:half], work), *_together(entries[half:], work)]


def _replay(assembled: AssembledBatch, *, most_items: int) -> list[dict[str, Array]]:
    """Return the reference's outputs of each exchange, items along the first dimension."""
    entries, joined, n_items = assembled.batch, assembled.inputs, assembled.n_items
    judge = entries[0].judge
    if not entries[0].batched:
        return [_alone(entry) for entry in entries]
    # In equal steps, so that hardly an item is computed for nothing.
    size = _fixed_size(judge.runtime.inputs) or ceil(n_items / ceil(n_items / most_items))
    outputs = _in_steps(judge, joined, n_items, size)
    whole = {name: array for name, array in outputs.items() if len(array) == n_items}
    return [{name: array[begin:end] for name, array in whole.items()} for begin, end in _spans(entries)]


def _replay_one(assembled: AssembledBatch, *, most_items: int) -> list[dict[str, Array]]:
    """Return the reference's outputs of one exchange, in shorter steps where it is too large for the memory that there is."""
    entry = assembled.batch[0]
    divisible = entry.batched and _fixed_size(entry.judge.runtime.inputs) is None
    size = min(most_items, assembled.n_items)
    while True:
        try:
            return _replay(assembled, most_items=size)
        except QuarantineError:
            if not divisible or size == 1:
                raise
        size = ceil(size / 2)


def _spans(entries: Sequence[PreparedExchange]) -> Iterator[tuple[int, int]]:
    """Return where the items of each exchange begin and end among those of all."""
    end = 0
    for entry in entries:
        begin, end = end, end + entry.n_items
        yield begin, end


def _alone(entry: PreparedExchange) -> dict[str, Array]:
    """Return the outputs of an exchange that is one item : (1, ...)."""
    outputs = entry.judge.runtime.run({name: array[0] for name, array in entry.inputs.items()})
    return {name: output[np.newaxis] for name, output in outputs.items()}


def _in_steps(judge: VersionReference, inputs: dict[str, Array], n_items: int, size: int) -> dict[str, Array]:
    """Run `size` items at a time; the last step is filled up with its last item. Outputs without items are left out."""
    tables = item_columns(judge.model)
    steps: list[dict[str, Array]] = []
    for begin in range(0, n_items, size):
        step = {name: _rows(array, begin, size) for name, array in inputs.items()}
        outputs = judge.runtime.run(step)
        steps.append(
            {
                name: itemised(output, tables[name], size) if name in tables else output
                for name, output in outputs.items()
            }
        )
    names = [name for name in steps[0] if all(step[name].shape[:1] == (size,) for step in steps)]
    found = {name: joined_steps([step[name] for step in steps], judge.model) for name in names}
    return {name: output[:n_items] for name, output in found.items() if output is not None}


def _rows(array: Array, begin: int, size: int) -> Array:
    """Return `size` items from `begin` on; beyond the end the last one again. Without that they are not copied."""
    if begin + size <= len(array):
        return array[begin : begin + size]
    return array[np.minimum(np.arange(begin, begin + size), len(array) - 1)]


def _fixed_size(specs: Sequence[TensorSpec]) -> int | None:
    """Return how many items the reference insists on, None where any number will do."""
    return next((spec.shape[0] for spec in specs if spec.shape and spec.shape[0] is not None), None)


def _compare(pairs: Sequence[OutputPair]) -> list[ReplayResult]:
    """Compare all items of like outputs at once and hand each exchange its own."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        alike.setdefault(pair.signature, []).append(index)
    found: dict[int, ReplayResult] = {}
    for indices in alike.values():
        together = [pairs[index] for index in indices]
        everything = together[0].judge.comparator.compare(
            _joined([pair.candidate for pair in together]), _joined([pair.reference for pair in together])
        )
        end = 0
        for index, pair in zip(indices, together, strict=True):
            begin, end = end, end + pair.n_items
            found[index] = ReplayResult(
                everything=everything, rows=range(begin, end), embedding=pair.embedding
            )
    return [found[index] for index in range(len(pairs))]


def _joined(sides: Sequence[Outputs]) -> Outputs:
    return {name: np.concatenate([side[name] for side in sides]) for name in sides[0]}
