"""Replays a batch and compares it: a pure function from captured exchanges to divergences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from typing import TypeVar

import msgspec
import numpy as np

from quantdrift.core.config.schema import Reference
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Exchange, Tensor
from shadow.comparators.comparator import Divergences, Outputs, uncomparable
from shadow.mapping import dequantised
from shadow.ragged import item_columns, itemised, joined_steps
from shadow.references import Judge
from shadow.runtime import Array, TensorSpec
from shadow.tensor import decode

Entry = TypeVar("Entry")
Result = TypeVar("Result")


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that is ready to be replayed.

    Parameters
    ----------
    stream_sequence, payload
        Its place in the stream and its wire form.
    exchange
        As captured.
    judge
        What it is measured with.
    inputs
        Name to array : (items, ...), as the reference takes them.
    candidate
        What is compared of the candidate, by name : (items, ...), where that is more than its outputs; else None.
    """

    stream_sequence: int
    payload: bytes
    exchange: Exchange
    judge: Judge
    inputs: dict[str, Array]
    candidate: Outputs | None = None

    @property
    def batched(self) -> bool:
        """Whether the reference takes several items at once: always, where we have put the items together."""
        return self.judge.model.batched or self.candidate is not None

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(next(iter(self.inputs.values())))

    @property
    def signature(self) -> tuple[object, ...]:
        """What exchanges must share to be replayed together: version, and names, types and shapes of inputs.

        In their order too: a feature without the name of an input is that of the first one.
        """
        shapes = tuple((name, array.dtype.str, array.shape[1:]) for name, array in self.inputs.items())
        return (self.exchange.model, self.exchange.version, shapes)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
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


Outcome = Compared | QuarantineError


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of both sides that are compared.

    Parameters
    ----------
    judge, n_items
        Of the exchange.
    names
        Of the outputs, and what the reference calls them.
    candidate, reference
        By name : (items, ...) each. They may be views of those of a whole batch.
    embedding
        As in `Compared`.
    """

    judge: Judge
    n_items: int
    names: Mapping[str, str]
    candidate: Outputs
    reference: Outputs
    embedding: Array | None

    @property
    def signature(self) -> tuple[object, ...]:
        """What pairs must share to be compared together: types and shapes."""
        arrays = (*self.candidate.values(), *self.reference.values())
        return tuple((array.dtype.str, array.shape[1:]) for array in arrays)


class Assembled(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is ready to be replayed.

    Parameters
    ----------
    batch
        Exchanges with one signature; at least one.
    inputs
        Name to array : (items of all of them, ...).
    """

    batch: tuple[Prepared, ...]
    inputs: dict[str, Array]

    @property
    def n_items(self) -> int:
        """Number of items."""
        return len(next(iter(self.inputs.values())))


Answer = dict[str, Array] | QuarantineError


def assemble(batch: Sequence[Prepared]) -> Assembled:
    """Return a batch with its inputs side by side; of a single exchange they are not copied.

    Parameters
    ----------
    batch
        Exchanges with one signature; at least one.
    """
    if len(batch) == 1:
        return Assembled(batch=tuple(batch), inputs=batch[0].inputs)
    joined = {name: np.concatenate([entry.inputs[name] for entry in batch]) for name in batch[0].inputs}
    return Assembled(batch=tuple(batch), inputs=joined)


def replay(assembled: Assembled, *, most_items: int) -> list[Answer]:
    """Return, per exchange, the reference's outputs, items along the first dimension, or why it is set aside.

    All exchanges are replayed together. Where that fails, halves are tried, down to single exchanges: only those
    that fail alone are set aside, nothing else pays for them.

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

    def work(batch: Sequence[Prepared]) -> Sequence[dict[str, Array]]:
        whole = len(batch) == len(assembled.batch)
        return _replay(assembled if whole else assemble(batch), most_items=most_items)

    return _together(assembled.batch, work)


def compare(batch: Sequence[Prepared], outputs: Sequence[Answer]) -> list[Outcome]:
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
    compared = iter(_together([pair for pair in pairs if isinstance(pair, Pair)], _compare))
    return [next(compared) if isinstance(pair, Pair) else pair for pair in pairs]


def compare_batch(batch: Sequence[Prepared], *, most_items: int) -> list[Outcome]:
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
    batch: Sequence[Prepared], names: Sequence[Mapping[str, str]], *, most_items: int
) -> list[Outputs | QuarantineError]:
    """Return, per exchange, the reference's outputs by the names under which they are compared, or why there are none.

    Parameters
    ----------
    batch, most_items
        As for `compare_batch`.
    names
        Of each exchange, as in `Pair`.

    Raises
    ------
    BrokenRuntimeError
        The reference computes nothing any more.
    RetryError
        What computes is away for now.
    """
    return [
        answer if isinstance(answer, QuarantineError) else _outputs(partial(_replayed, entry, answer), wanted)
        for entry, answer, wanted in zip(
            batch, replay(assemble(batch), most_items=most_items), names, strict=True
        )
    ]


def answered_again(
    entry: Prepared, answer: Sequence[Tensor], names: Sequence[str]
) -> Outputs | QuarantineError:
    """Return the outputs `names` of a second answer of the candidate as those of the first are read, or why not."""
    exchange = msgspec.structs.replace(entry.exchange, outputs=tuple(answer))
    again = msgspec.structs.replace(entry, exchange=exchange)
    return _outputs(partial(_captured, again), {name: name for name in names})


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


def _replay(assembled: Assembled, *, most_items: int) -> list[dict[str, Array]]:
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


def _spans(entries: Sequence[Prepared]) -> Iterator[tuple[int, int]]:
    """Return where the items of each exchange begin and end among those of all."""
    end = 0
    for entry in entries:
        begin, end = end, end + entry.n_items
        yield begin, end


def _alone(entry: Prepared) -> dict[str, Array]:
    """Return the outputs of an exchange that is one item : (1, ...)."""
    outputs = entry.judge.runtime.run({name: array[0] for name, array in entry.inputs.items()})
    return {name: output[np.newaxis] for name, output in outputs.items()}


def _in_steps(judge: Judge, inputs: dict[str, Array], n_items: int, size: int) -> dict[str, Array]:
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


def pair_of(
    entry: Prepared, outputs: Answer, chosen: dict[tuple[object, ...], tuple[str, str]]
) -> Pair | QuarantineError:
    """Return the outputs of an exchange side by side; `chosen` remembers which one is compared among which."""
    if isinstance(outputs, QuarantineError):
        return outputs
    given = tuple(tensor.name for tensor in entry.exchange.outputs)
    key = (id(entry.judge), *given)
    try:
        names = {name: name for name in entry.judge.comparator.outputs}
        if not names:
            if key not in chosen:
                chosen[key] = _output_names(entry)
            names = dict([chosen[key]])
        candidate = entry.candidate or {name: _captured(entry, name) for name in names}
        reference = {name: _replayed(entry, outputs, own) for name, own in names.items()}
    except QuarantineError as error:
        return uncomparable(error.detail)
    embedding = outputs.get(entry.judge.runtime.embedding)
    if embedding is not None and not entry.batched:
        embedding = _one_row(embedding)
    return Pair(
        judge=entry.judge,
        n_items=entry.n_items,
        names=names,
        candidate=candidate,
        reference=reference,
        embedding=embedding,
    )


def _captured(entry: Prepared, name: str) -> Array:
    """Return what the candidate gave : (items, ...)."""
    tensor = next((tensor for tensor in entry.exchange.outputs if tensor.name == name), None)
    if tensor is None:
        given = [tensor.name for tensor in entry.exchange.outputs]
        raise uncomparable(f"the candidate's outputs are {given}: `{name}` is not among them")
    candidate = _dequantised(tensor, entry.judge.reference)
    if not entry.judge.model.batched:
        candidate = candidate[np.newaxis]
    column = item_columns(entry.judge.model).get(name)
    if column is not None:
        candidate = itemised(candidate, column, entry.n_items)
    if candidate.shape[:1] != (entry.n_items,):
        raise uncomparable(
            f"the candidate's `{name}` is {list(candidate.shape)}, the exchange has {entry.n_items} items"
        )
    return candidate if entry.judge.model.batched else _one_row(candidate)


def _replayed(entry: Prepared, outputs: Mapping[str, Array], name: str) -> Array:
    """Return what the reference gave : (items, ...)."""
    if name not in outputs:
        raise uncomparable(f"the reference's `{name}` does not hold one entry per item")
    return outputs[name] if entry.batched else _one_row(outputs[name])


def _one_row(output: Array) -> Array:
    """Return the output of a single item : (1, ...), without a first dimension of 1 of its own."""
    return output[0] if output.ndim > 2 and output.shape[1] == 1 else output


def _dequantised(captured: Tensor, reference: Reference) -> Array:
    candidate = decode(captured)
    if not reference.output_scale:
        return candidate
    if candidate.dtype.kind not in "iu":
        raise uncomparable(
            f"the candidate's `{captured.name}` is {captured.datatype}, and `models.references.output_scale` says that "
            "it holds quantised integers"
        )
    return dequantised(candidate, reference.output_scale, reference.output_zero_point)


def _output_names(entry: Prepared) -> tuple[str, str]:
    """Return the names of the compared output: the candidate's and the reference's."""
    given = [tensor.name for tensor in entry.exchange.outputs]
    embedding = entry.judge.runtime.embedding
    wanted = entry.judge.model.output
    # What is an embedding is compared only where nothing else can be.
    known = sorted((spec.name for spec in entry.judge.runtime.outputs), key=lambda name: name == embedding)
    pairs = [(name, name) for name in known if wanted in ("", name)]
    if entry.judge.reference.output:
        pairs = [(wanted, entry.judge.reference.output)]
    common = [pair for pair in pairs if pair[0] in given]
    if not common:
        asked = f"`{wanted}`, as configured, is not" if wanted else "none is"
        raise uncomparable(
            f"the candidate's outputs are {given}, the reference's {known}: {asked} on both sides; "
            "see `models.output` and `models.references.output`"
        )
    return common[0]


def _compare(pairs: Sequence[Pair]) -> list[Compared]:
    """Compare all items of like outputs at once and hand each exchange its own."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        alike.setdefault(pair.signature, []).append(index)
    found: dict[int, Compared] = {}
    for indices in alike.values():
        together = [pairs[index] for index in indices]
        everything = together[0].judge.comparator.compare(
            _joined([pair.candidate for pair in together]), _joined([pair.reference for pair in together])
        )
        end = 0
        for index, pair in zip(indices, together, strict=True):
            begin, end = end, end + pair.n_items
            found[index] = Compared(everything=everything, rows=range(begin, end), embedding=pair.embedding)
    return [found[index] for index in range(len(pairs))]


def _joined(sides: Sequence[Outputs]) -> Outputs:
    return {name: np.concatenate([side[name] for side in sides]) for name in sides[0]}
