"""The items that a diagnosis or a repair works on: from recorded inputs, exemplars or what waits in the stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.diagnosable import is_told, task_problem
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.records import Exchange, Exemplar, ExemplarItem, ExemplarKind, Tensor
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, feature_key, holds, time_attributes
from quantdrift.core.text import plain
from quantdrift.drift.evidence.observations import IntArray
from quantdrift.models.comparators.protocol import Divergences, Flags
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.models.tensors.codec import decode
from quantdrift.models.tensors.features import features_of
from quantdrift.release.diagnose.copies import AGREEMENT, Copy, joined
from quantdrift.release.gate.judge import Observed, observed
from quantdrift.release.gate.offline import Compared, is_routable
from quantdrift.release.recording import RecordedFile, RecordedItems, RecordingLayout, read

MOST_INSIDE: Final = 8_192
"""Most items of the slice; of more, every k-th is used."""
MOST_ELSEWHERE: Final = 2_048
"""Most items of other slices."""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of items.

    Parameters
    ----------
    inside, elsewhere
        Of the slice, and of all others, by name : (items, ...).
    damaged
        Of the slice, chosen because their answer changed; None: nothing was chosen.
    served
        What was served for `inside` and then `damaged`, by the name of the output; None: it is not known.
    """

    inside: dict[str, Array]
    elsewhere: dict[str, Array]
    damaged: dict[str, Array] | None = None
    served: dict[str, Array] | None = None


def recorded(
    parts: Sequence[RecordedFile],
    layout: RecordingLayout,
    rules: Sequence[Slice],
    chosen: SliceKey,
    *,
    progress: Callable[[int], None],
) -> Samples:
    """Return the recorded items of a slice, and others.

    Parameters
    ----------
    parts, layout
        The files, and what their arrays are.
    rules
        The slice rules of the model.
    progress
        Called with the number of bytes of each file that was read.

    Raises
    ------
    OperatorError
        A file cannot be read, or does not tell which items belong to the slice.
    """
    inside, elsewhere = list[dict[str, Array]](), list[dict[str, Array]]()
    for part in parts:
        items = read(part, layout)
        is_inside = within(items, rules, chosen)
        for rows, side in ((is_inside, inside), (~is_inside, elsewhere)):
            side.append({name: array[rows] for name, array in items.inputs.items()})
        progress(part.n_bytes)
    return Samples(inside=_some(inside, MOST_INSIDE), elsewhere=_some(elsewhere, MOST_ELSEWHERE))


def of_exemplars(found: Sequence[Exemplar], others: Sequence[Exemplar], copy: Copy) -> Samples:
    """Return the items of exemplars.

    Parameters
    ----------
    found, others
        Exemplars of the slice, damaged ones and at least one random one, and random ones of other slices; all of one version.
    copy
        The switchable copy, which names the inputs.

    Raises
    ------
    OperatorError
        They do not have the inputs of the candidate.
    """
    random = [exemplar for exemplar in found if exemplar.kind is ExemplarKind.RANDOM]
    random_ids = {exemplar.exchange.id for exemplar in random}
    chosen = [
        exemplar
        for exemplar in found
        if exemplar.kind is ExemplarKind.DAMAGED and exemplar.exchange.id not in random_ids
    ]
    return Samples(
        inside=_items_of(random, copy.inputs),
        elsewhere=_items_of(others, copy.inputs) if others else {name: np.empty(0) for name in copy.inputs},
        damaged=_items_of(chosen, copy.inputs) if chosen else None,
        served=_served([*random, *chosen], copy.outputs),
    )


def of_waiting(found: Sequence[Exchange], chosen: SliceKey, copy: Copy) -> Samples:
    """Return the items of exchanges that wait in the stream of samples; nobody has chosen them.

    Raises
    ------
    OperatorError
        None is of the slice, headers and parameters do not tell the slice, or the inputs do not fit.
    """
    if not all(
        is_routable(SliceKey(model="", name="", predicate="", where=(condition,)))
        for condition in chosen.where
    ):
        raise OperatorError(
            f"no exemplar of the slice {chosen.name} that was drawn at random can be read for this version, and exchanges in the stream do not"
            " tell who is in it. Let the shadow keep exemplars: models.exemplars = true; or, if it is not learned, record inputs and give --inputs"
        )
    inside = [
        exchange for exchange in found if all(holds(part, exchange.attributes, {}) for part in chosen.where)
    ]
    elsewhere = [exchange for exchange in found if exchange not in inside]
    if not inside:
        raise OperatorError(
            f"no exemplar of the slice {chosen.name} that was drawn at random can be read for this version, and no exchange of it waits in the"
            " stream. Record inputs and give --inputs, or let the shadow keep exemplars: models.exemplars = true"
        )
    sides = [[_as_exemplar(exchange) for exchange in side] for side in (inside, elsewhere)]
    return Samples(
        inside=_items_of(sides[0], copy.inputs),
        elsewhere=_items_of(sides[1], copy.inputs)
        if sides[1]
        else {name: np.empty(0) for name in copy.inputs},
        served=_served(sides[0], copy.outputs),
    )


def _as_exemplar(exchange: Exchange) -> Exemplar:
    """Return an exchange with all of its items."""
    n_items = exchange.inputs[0].shape[0] if exchange.inputs and exchange.inputs[0].shape else 0
    return Exemplar(
        kind=ExemplarKind.RANDOM,
        slice="",
        exchange=exchange,
        items=tuple(ExemplarItem(index=index) for index in range(n_items)),
        reference=(),
        reference_digest="",
        probability=1.0,
        compared_at=exchange.captured_at,
    )


def check_served(samples: Samples, copy: Copy, compare: Callable[[Outputs, Outputs], Divergences]) -> None:
    """Check that the candidate's file gives the answers that were served.

    Raises
    ------
    OperatorError
        It gives others.
    """
    if samples.served is None:
        return
    inputs = samples.inside
    if samples.damaged is not None:
        inputs = joined([inputs, samples.damaged])
    flips = compare(copy.served(inputs), samples.served).flip
    n_others = int(np.nan_to_num(flips).sum())
    if n_others > max(1.0, (1.0 - AGREEMENT) * len(flips)):
        raise OperatorError(
            f"the file answers {n_others} of {len(flips)} exemplars otherwise than what was served: it is not the file that serves, or its"
            " server computes with other kernels. No site can be named"
        )


def _items_of(found: Sequence[Exemplar], names: Sequence[str]) -> dict[str, Array]:
    parts = []
    for exemplar in found:
        tensors = {tensor.name: tensor for tensor in exemplar.exchange.inputs}
        if missing := [name for name in names if name not in tensors]:
            raise OperatorError(f"the exemplars have no input `{missing[0]}`, which the candidate takes")
        rows = [item.index for item in exemplar.items]
        parts.append({name: _rows(tensors[name], rows) for name in names})
    return joined(parts) if parts else {name: np.empty(0) for name in names}


def _served(found: Sequence[Exemplar], names: Sequence[str]) -> dict[str, Array] | None:
    """Return what was served, by the name of the output; None where an exemplar lacks one."""
    parts: dict[str, list[Array]] = {name: [] for name in names}
    for exemplar in found:
        tensors = {tensor.name: tensor for tensor in exemplar.exchange.outputs}
        if any(name not in tensors for name in names):
            return None
        for name in names:
            parts[name].append(_rows(tensors[name], [item.index for item in exemplar.items]))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _rows(tensor: Tensor, rows: Sequence[int]) -> Array:
    try:
        return decode(tensor)[list(rows)]
    except (QuarantineError, IndexError) as error:
        raise OperatorError(f"an exemplar has no readable items in `{plain(tensor.name)}`") from error


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The items that a repair is built and measured on: recorded inputs, or exemplars of all slices.

    Parameters
    ----------
    inputs
        By name : (items, ...).
    names
        The file and the row of each item, as `recorded/a.npz:17`, or the exchange and the item.
    items
        Their slices and observations; nothing was computed of them yet. An exemplar is in the slice alone that it was drawn for.
    inside
        The items of the damaged slice, whatever they were drawn for.
    chosen
        Those of `inside` that are kept because they are damaged: they measure nothing.
    share
        Share of the slice in the traffic; 1 where it is unknown.
    source
        What the items are, in words.
    """

    inputs: dict[str, Array]
    names: list[str]
    items: Observed
    inside: IntArray
    chosen: IntArray
    share: float
    source: str


def all_recorded(
    config: Config,
    chosen: SliceKey,
    parts: Sequence[RecordedFile],
    layout: RecordingLayout,
    rules: Sequence[Slice],
    *,
    progress: Callable[[int], None],
) -> Recording:
    """Return all recorded items with their slices.

    Parameters
    ----------
    chosen
        The damaged slice.
    parts, layout, rules, progress
        As of `recorded`.

    Raises
    ------
    OperatorError
        A file cannot be read.
    """
    files = []
    for part in parts:
        files.append(not_computed(read(part, layout), rules))
        progress(part.n_bytes)
    sliced = msgspec.structs.replace(config, slices=tuple(rules))
    items = observed(sliced, chosen.model, files)
    inside = items.members.get(chosen.name, np.arange(0))
    return Recording(
        inputs=joined([file.items.inputs for file in files]),
        names=[f"{file.items.path}:{row}" for file in files for row in range(len(file.items))],
        items=items,
        inside=inside,
        chosen=np.arange(0),
        share=len(inside) / len(items.group),
        source="recorded inputs",
    )


def exemplar_recording(
    config: Config,
    chosen: SliceKey,
    found: Sequence[Exemplar],
    rules: Sequence[Slice],
    copy: Copy,
) -> Recording:
    """Return the items of exemplars of all slices.

    Parameters
    ----------
    chosen
        The damaged slice.
    found
        Random exemplars of all slices, and damaged ones of this slice; all of one version.
    rules
        The slice rules of the model.
    copy
        The switchable copy, which names the inputs.

    Raises
    ------
    OperatorError
        They do not have the inputs of the candidate.
    """
    random_ids = {
        exemplar.exchange.id for exemplar in found if _is_random(exemplar) and exemplar.slice == chosen.name
    }
    found = [exemplar for exemplar in found if _is_random(exemplar) or exemplar.exchange.id not in random_ids]
    zone = ZoneInfo(config.capture.time_zone)
    inputs = _items_of(found, copy.inputs)
    rows = [(exemplar, item.index) for exemplar in found for item in exemplar.items]
    random = np.array([_is_random(exemplar) for exemplar, _ in rows])
    pi = np.array([exemplar.pi or 1.0 for exemplar, _ in rows])
    names = np.array([exemplar.slice for exemplar, _ in rows])
    declared = SliceAssigner(msgspec.structs.replace(config, slices=tuple(rules)), chosen.model).declared()
    members = {
        name: np.flatnonzero(random & (names == name))
        for name in dict.fromkeys([*(key.name for key in declared), *names[random].tolist()])
    }
    weight = np.ones(len(rows))
    for of_slice in members.values():
        weight[of_slice] = pi[of_slice].min(initial=1.0) / pi[of_slice]
    groups = [exemplar.exchange.group or exemplar.exchange.id for exemplar, _ in rows]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    nothing = np.full(len(rows), np.nan)
    exchanges = [exemplar.exchange for exemplar, _ in rows]
    attributes = [
        {**exchange.attributes, **time_attributes(exchange.captured_at, zone)} for exchange in exchanges
    ]
    within = _told(chosen, rules, inputs, attributes)
    within |= names == chosen.name
    of_all = members[ALL] if is_told(config, chosen.where) else np.arange(0)
    return Recording(
        inputs=inputs,
        names=[f"{exemplar.exchange.id}:{item}" for exemplar, item in rows],
        items=Observed(
            flip=nothing,
            served_flip=None,
            divergence=nothing,
            right=None,
            group=np.array([numbers[name] for name in groups], dtype=np.intp),
            members=members,
            weight=weight,
        ),
        inside=np.flatnonzero(within),
        chosen=np.flatnonzero(~random),
        share=float(np.average(within[of_all], weights=weight[of_all])) if len(of_all) else 1.0,
        source="exemplars",
    )


def _is_random(one: Exemplar) -> bool:
    return one.kind is ExemplarKind.RANDOM


def _told(
    chosen: SliceKey,
    rules: Sequence[Slice],
    inputs: Mapping[str, Array],
    attributes: Sequence[Mapping[str, str]],
) -> Flags:
    """Return which items attributes and features put into a slice : (items,)."""
    keys = {condition.key for condition in chosen.where}
    wanted = [rule for rule in rules if rule.feature and feature_key(rule) in keys]
    features = features_of(wanted, inputs) if wanted else [{} for _ in attributes]
    return np.array(
        [
            all(holds(condition, item_attributes, feature) for condition in chosen.where)
            for item_attributes, feature in zip(attributes, features, strict=True)
        ],
        dtype=bool,
    )


def not_computed(items: RecordedItems, rules: Sequence[Slice]) -> Compared:
    """Return the items of a file as they are before any model has run."""
    wanted = [rule for rule in rules if rule.feature]
    unknown = np.full(len(items), np.nan)
    return Compared(
        items=items,
        features=features_of(wanted, items.inputs) if wanted else [{} for _ in range(len(items))],
        flip=unknown,
        served_flip=None,
        divergence=unknown,
        right=None,
        learned=[()] * len(items),
    )


def comparison(model: Model, copy: Copy) -> Callable[[Outputs, Outputs], Divergences]:
    """Return the comparison of outputs of a copy, by the task of the model.

    Raises
    ------
    OperatorError
        An exchange of the model is not a batch of items, or the candidate lacks an output that is compared.
    """
    if problem := task_problem(model):
        raise OperatorError(problem)
    comparator = comparator_of(model)
    names = comparator.outputs or ((model.output,) if model.output else copy.outputs)
    if missing := [name for name in comparator.outputs if name not in copy.outputs]:
        raise OperatorError(
            f"the candidate has no output `{missing[0]}`, which model `{model.name}` compares: it has"
            f" {', '.join(f'`{output}`' for output in copy.outputs)}"
        )
    if not comparator.outputs and (names[0] not in copy.outputs or len(names) > 1):
        raise OperatorError(
            f"the candidate has the outputs {', '.join(f'`{output}`' for output in copy.outputs)}: set `models.output` of model"
            f" `{model.name}` to the one that is compared"
        )

    def compare(candidate: Outputs, reference: Outputs) -> Divergences:
        try:
            return comparator.compare(
                {name: candidate[name] for name in names}, {name: reference[name] for name in names}
            )
        except QuarantineError as error:
            raise OperatorError(f"the outputs cannot be compared: {error.detail}") from error

    return compare


def within(items: RecordedItems, rules: Sequence[Slice], chosen: SliceKey) -> Flags:
    """Return which items belong to the slice : (items,)."""
    keys = {condition.key for condition in chosen.where}
    wanted = [rule for rule in rules if rule.feature and feature_key(rule) in keys]
    recorded_keys = {*items.attributes, *(feature_key(rule) for rule in wanted)}
    if unknown := sorted(keys - recorded_keys):
        name = unknown[0].partition(".")[2] or unknown[0]
        raise OperatorError(
            f"{items.path} does not tell which items belong to the slice {chosen.name}: give it an array `{name}` with one text for"
            f" each item, or put it below a folder {name}=VALUE"
        )
    rows = zip(*items.attributes.values(), strict=True) if items.attributes else [()] * len(items)
    return _told(
        chosen, rules, items.inputs, [dict(zip(items.attributes, values, strict=True)) for values in rows]
    )


def _some(parts: Sequence[dict[str, Array]], most: int) -> dict[str, Array]:
    """Return the rows of all parts, evenly thinned to `most`."""
    every = joined(parts)
    n_items = len(next(iter(every.values())))
    if n_items <= most:
        return every
    rows = thinned(np.arange(n_items), most)
    return {name: array[rows] for name, array in every.items()}


def thinned(rows: IntArray, most: int) -> IntArray:
    """Return at most `most` of the rows, evenly spread."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.intp)]
