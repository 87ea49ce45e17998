"""The judgement of what was compared: the slices of the items, the questions to each, and the decision."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, ValueRules, attribute_key
from quantdrift.core.text import plain
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.gate import ALPHA, Question, Trial, decision, trials
from quantdrift.facts.gate import Decision, Kind, LoadRun, Outcome, SliceAnswer
from quantdrift.models.comparators.protocol import Values
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.gate.found import NONE_FOUND, FoundSlices
from quantdrift.release.gate.observations import (
    attribute_of_bursts,
    blocks,
    burst_of_series,
    digests_of,
    is_calibrated,
    measures_of,
    n_copies,
    numbered,
    visits,
)
from quantdrift.release.gate.offline import Compared

_MOST_NAMED: Final = 5


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked.

    Parameters
    ----------
    slices
        Questions to every slice.
    all
        Further questions, to all items together.
    routed
        Names of the slices that a route serves, where the rest stays as it is served: `slices` are asked of these, `unrouted` of all
        others; empty: there are none, and `slices` are asked of every slice.
    unrouted
        Questions to the slices that no route serves as a whole.
    """

    slices: tuple[Question, ...]
    all: tuple[Question, ...] = ()
    routed: frozenset[str] = frozenset()
    unrouted: tuple[Question, ...] = ()

    def is_untouched(self, name: str) -> bool:
        """Return whether no item of a slice can be served by a route: it is of another value of the rule of the only one."""
        rules = {routed.partition("=")[0] for routed in self.routed}
        return name not in self.routed and rules == {name.partition("=")[0]} and "=" in name

    def of(self, name: str) -> tuple[Question, ...]:
        """Return the questions to a slice."""
        if self.is_untouched(name):
            return ()
        each = self.unrouted if self.routed and name not in self.routed else self.slices
        return (*each, *(self.all if name == ALL else ()))


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All items, in columns.

    Parameters
    ----------
    flip, served_flip, divergence, right, changed_tokens, broken, unlikely
        As of `Compared`.
    group
        (items,) number of the observation that each belongs to.
    members
        The items of each slice, by its name; a slice that no item belongs to has none.
    weight
        (items,) in (0, 1]: how much each counts, proportional within a slice to 1 / its probability to be there; None: all alike.
    copy
        (items,) a number that items with the same inputs share: in a slice they count once; None: not known.
    n_copies, n_calibrated
        Items that are copies of an earlier one, and those that do not count because the candidate was calibrated on them.
    burst
        How many items in a row are one observation, because neighbours are alike; 1: they are not.
    burst_of
        The attribute of which each burst of a value is one observation, of so many items; empty: their order tells them apart.
    """

    flip: Values
    served_flip: Values | None
    divergence: Values
    right: Array | None
    group: IntArray
    members: dict[str, IntArray]
    weight: FloatArray | None = None
    copy: IntArray | None = None
    n_copies: int = 0
    n_calibrated: int = 0
    burst: int = 1
    burst_of: str = ""
    changed_tokens: Values | None = None
    broken: Values | None = None
    unlikely: Values | None = None

    def part(
        self,
        rows: IntArray,
        *,
        flip: Values,
        served_flip: Values | None = None,
        divergence: Values | None = None,
    ) -> "Observed":
        """Return some of the items with what was computed of them.

        Parameters
        ----------
        rows
            Their numbers, ascending.
        flip, served_flip, divergence
            (rows,) each; the divergence is NaN where it was not computed.
        """
        position = np.full(len(self.group), -1, dtype=np.intp)
        position[rows] = np.arange(len(rows))
        members = {name: position[of_slice] for name, of_slice in self.members.items()}
        return Observed(
            flip=flip,
            served_flip=served_flip,
            divergence=np.full(len(rows), np.nan) if divergence is None else divergence,
            right=None,
            group=self.group[rows],
            weight=None if self.weight is None else self.weight[rows],
            copy=None if self.copy is None else self.copy[rows],
            members={name: of_slice[of_slice >= 0] for name, of_slice in members.items()},
        )


def missing_attributes(rules: Iterable[Slice], found: Iterable[Compared]) -> dict[str, str]:
    """Return the slice rules that no file has the attribute of, with the key of the attribute."""
    recorded_keys = {key for file in found for key in file.items.attributes}
    return {
        rule.name: key
        for rule in rules
        if not (rule.feature or rule.cross) and (key := attribute_key(rule)) not in recorded_keys
    }


def check_attributes(inputs: Path, rules: Sequence[Slice], found: Sequence[Compared]) -> None:
    """Check that each rule has its attribute in some file.

    Raises
    ------
    OperatorError
        One has it in none.
    """
    if missing := missing_attributes(rules, found):
        rule, key = next(iter(missing.items()))
        crossed = {other.name for other in rules if missing.keys() & {*other.cross}}
        others = [other.name for other in rules if other.name not in {*missing, *crossed}] or [ALL]
        raise OperatorError(
            f"--inputs {inputs} has no attribute for the slices `{rule}`: give it an array `{rule}` or `{key}` with one text for"
            f" each item, or folders {rule}=VALUE; or judge without these slices: "
            + " ".join(f"--slice {name}" for name in others)
        )


def notes_of(rules: Iterable[Slice], found: Sequence[Compared]) -> list[str]:
    """Return what people should know of the recording: values that no slice has, and items that do not count."""
    notes = undeclared(rules, found)
    unknown = sum(int(np.isnan(file.flip).sum()) for file in found)
    if unknown:
        notes.append(f"{unknown:,} items do not count, because the reference's answer to them is not finite")
    return notes


def undeclared(rules: Iterable[Slice], found: Sequence[Compared]) -> list[str]:
    """Return which recorded values no slice has, in sentences."""
    notes = []
    for rule in rules:
        if rule.feature or rule.cross or not rule.values:
            continue
        key = attribute_key(rule)
        others = Counter(
            value
            for file in found
            for value in file.items.attributes.get(key, ())
            if value not in rule.values
        )
        if others:
            named = ", ".join(f"`{plain(value)}`" for value, _ in others.most_common(_MOST_NAMED))
            notes.append(
                f"{others.total():,} items are in no slice of `{rule.name}`, because `values` of this rule does not have {named}"
            )
    return notes


def said_of(items: Observed) -> list[str]:
    """Return what people should know of the items as evidence, in sentences."""
    notes = []
    if items.n_copies:
        notes.append(
            f"{items.n_copies:,} of {len(items.flip):,} items are copies of others: copies count once"
        )
    if items.n_calibrated:
        notes.append(
            f"{items.n_calibrated:,} items do not count, because the candidate was calibrated on them"
        )
    if items.burst > 1:
        alike = (
            f"items with one {items.burst_of} come in bursts and are alike, as in sessions: each burst, of some {items.burst}, counts as one"
            if items.burst_of
            else f"items next to each other are alike, as in sessions: {items.burst} in a row count as one"
        )
        notes.append(
            f"{alike}. An array `group` says which items belong"
            " together; with a number of its own for each item it says that none do"
        )
    return notes


def observed(
    config: Config,
    model: str,
    found: Sequence[Compared],
    more: FoundSlices = NONE_FOUND,
    *,
    calibration: frozenset[str] = frozenset(),
) -> Observed:
    """Return the items of all files, with their slices.

    Parameters
    ----------
    config
        With the slices that are judged.
    model
        The model's name.
    found
        What was found of each file.
    more
        Learned and discovered slices that are judged, too.
    calibration
        Digests of items that the candidate was calibrated on: they do not count.
    """
    assigner = SliceAssigner(config, model)
    assigner.extra = more.discovered
    keys = [of_item for file in found for of_item in _slices(assigner, file)]
    members: dict[str, list[int]] = {key.name: [] for key in (*assigner.declared(), *more.keys)}
    for item, names in enumerate(_admitted(config, keys)):
        for name in names:
            members.setdefault(name, []).append(item)
    served = [file.served_flip for file in found if file.served_flip is not None]
    right = [file.right for file in found if file.right is not None]
    digests = [digest for file in found for digest in digests_of(file.items.inputs)]
    calibrated = is_calibrated(digests, calibration)
    members_of = {name: np.array(items, dtype=np.intp) for name, items in members.items()}
    copy, group, burst, attribute = numbered(digests), _groups(found), 1, ""
    divergence = np.concatenate([file.divergence for file in found])
    if all(file.items.groups is None for file in found):
        stratum = _strata(members_of, len(digests))
        inputs = (
            {
                name: np.concatenate([file.items.inputs[name] for file in found])
                for name in found[0].items.inputs
            }
            if _are_of_one_shape(found)
            else {}
        )
        first = np.zeros(len(digests), dtype=np.bool_)
        first[np.unique(copy, return_index=True)[1]] = True
        rows = np.flatnonzero(first & ~calibrated)
        series = measures_of({name: array[rows] for name, array in inputs.items()}, divergence[rows])
        attributes = _attributes(found)
        attribute, is_all = attribute_of_bursts(
            series,
            stratum[rows],
            {key: [values[row] for row in rows] for key, values in attributes.items()},
        )
        burst = 1 if is_all else burst_of_series(series, stratum[rows])
        if burst > 1:
            attribute, group = "", blocks(stratum, burst)
        elif attribute:
            group, is_over = visits(attributes[attribute])
            burst = max(round(len(group) / len(is_over)), 2)
    return Observed(
        flip=np.concatenate([file.flip for file in found]),
        divergence=divergence,
        changed_tokens=_joined(file.changed_tokens for file in found),
        broken=_joined(file.broken for file in found),
        unlikely=_joined(file.unlikely for file in found),
        served_flip=np.concatenate(served) if served else None,
        right=np.concatenate(right) if right else None,
        group=group,
        members={name: rows[~calibrated[rows]] for name, rows in members_of.items()},
        copy=copy,
        n_copies=n_copies(copy),
        n_calibrated=int(calibrated.sum()),
        burst=burst,
        burst_of=attribute,
    )


def _joined(columns: Iterable[Values | None]) -> Values | None:
    """Return the column of all files; None: they do not have it."""
    known = [column for column in columns if column is not None]
    return np.concatenate(known) if known else None


def _attributes(found: Sequence[Compared]) -> dict[str, list[str]]:
    """Return the values of the attributes that all files have, by key : (items,) each."""
    keys = sorted(set.intersection(*(set(file.items.attributes) for file in found)))
    return {key: [value for file in found for value in file.items.attributes[key]] for key in keys}


def _strata(members: Mapping[str, IntArray], n_items: int) -> IntArray:
    """Return a number that items of the same slices share : (items,)."""
    names: list[list[int]] = [[] for _ in range(n_items)]
    for number, rows in enumerate(members.values()):
        for row in rows.tolist():
            names[row].append(number)
    return numbered([str(of_item) for of_item in names])


def _are_of_one_shape(found: Sequence[Compared]) -> bool:
    shapes = {
        tuple((name, array.shape[1:]) for name, array in sorted(file.items.inputs.items())) for file in found
    }
    return len(shapes) == 1


def judge(
    asked: Asked,
    items: Observed,
    *,
    model: str,
    candidate: str,
    at: datetime,
    alpha: float = ALPHA,
    run: LoadRun | None = None,
    beside: int = 0,
) -> Decision:
    """Return the decision about a candidate.

    Parameters
    ----------
    asked, items
        The questions, and what was observed.
    model
        The model's name.
    candidate
        Digest of the candidate: `sha256:...`.
    at
        When it was judged.
    alpha
        Probability of a false pass, and of a false failure, at most.
    run
        A load run with its answers; None: not asked for.
    beside
        How many questions about a load run share `alpha` with those to the slices: of a measured one.
    """
    untouched = [name for name in items.members if asked.is_untouched(name)]
    questions = _questions(asked, items)
    begun = trials([question for _, question in questions], alpha, beside=beside)
    ended = [
        (name, _seen(trial, items, items.members[name]))
        for (name, _), trial in zip(questions, begun, strict=True)
    ]
    decided = decision(ended, model=model, candidate=candidate, at=at, run=run)
    return msgspec.structs.replace(
        decided,
        slices=(*decided.slices, *(_unchanged(name, asked, items) for name in untouched)),
        n_copies=items.n_copies,
        n_calibrated=items.n_calibrated,
        burst=items.burst,
        burst_of=items.burst_of,
    )


def _unchanged(name: str, asked: Asked, items: Observed) -> SliceAnswer:
    """Return the answer about a slice that no route serves: what serves it stays, so nothing is newly flipped."""
    (harm,) = asked.unrouted
    return SliceAnswer(
        slice=name,
        question=harm.kind,
        verdict=Outcome.PASS,
        n=len(items.members[name]),
        mean=0.0,
        low=0.0,
        high=0.0,
        limit=harm.limit,
        more=0,
    )


def n_questions(asked: Asked, items: Observed) -> int:
    """Return how many questions are asked of all slices together."""
    return len(_questions(asked, items))


def _questions(asked: Asked, items: Observed) -> list[tuple[str, Question]]:
    return [(name, question) for name in items.members for question in asked.of(name)]


def _seen(trial: Trial, items: Observed, members: IntArray) -> Trial:
    """Return a trial after the items of its slice."""
    chosen, has_value = _values(trial.question, items)
    members = members[has_value[members]]
    if items.copy is not None:
        _, first = np.unique(items.copy[members], return_index=True)
        members = members[np.sort(first)]
    _, group = np.unique(items.group[members], return_inverse=True)
    sizes = np.bincount(group)
    weight = (1.0 if items.weight is None else items.weight[members]) / sizes[group]
    groups: FloatArray = np.zeros((len(sizes), len(trial.question.values)))
    if trial.question.is_graded:
        share = _graded(trial.question, items)[members] / trial.question.values[1]
        groups[:, 0] = np.bincount(group, (1.0 - share) * weight)
        groups[:, 1] = np.bincount(group, share * weight)
        return trial.at_once(groups)
    np.add.at(groups, (group, chosen[members]), weight)
    return trial.at_once(groups)


def _values(question: Question, items: Observed) -> tuple[IntArray, BoolArray]:
    """Return the number of the value that each item has, and whether it is known : (items,) each."""
    if question.kind is Kind.HARM:
        assert items.served_flip is not None
        change = items.flip - items.served_flip
        has_value = ~np.isnan(change)
        return np.where(change == 0, 0, np.where(change > 0, 1, 2)), has_value
    if question.kind is Kind.ACCURACY and items.right is not None:
        reference, candidate = items.right[:, 0].astype(np.intp), items.right[:, 1].astype(np.intp)
        return reference + 2 * candidate, np.ones(len(reference), dtype=np.bool_)
    if question.is_graded:
        graded = _graded(question, items)
        return np.zeros(len(graded), dtype=np.intp), ~np.isnan(graded)
    has_value = ~np.isnan(items.flip)
    return np.where(has_value, items.flip, 0).astype(np.intp), has_value


def _graded(question: Question, items: Observed) -> Values:
    """Return what an item has of a graded question : (items,)."""
    if question.kind is Kind.DIVERGENCE:
        return items.divergence
    by_kind = {
        Kind.CHANGED_TOKENS: items.changed_tokens,
        Kind.BROKEN: items.broken,
        Kind.UNLIKELY: items.unlikely,
    }
    values = by_kind[question.kind]
    assert values is not None
    return values


def _slices(assigner: SliceAssigner, one: Compared) -> list[list[SliceKey]]:
    """Return the slices of each item of a file."""
    attributes = one.items.attributes
    rows = zip(*attributes.values(), strict=True) if attributes else (() for _ in range(len(one.items)))
    return [
        [*assigner.assign(dict(zip(attributes, values, strict=True)), features), *learned]
        for values, features, learned in zip(rows, one.features, one.learned, strict=True)
    ]


def _admitted(config: Config, keys: Sequence[Sequence[SliceKey]]) -> list[list[str]]:
    """Return the names of each item's slices: of a rule without declared values only the most frequent ones, and the rest together."""
    rules = ValueRules(config)
    counts = Counter(key for of_item in keys for key in of_item)
    ranks: Counter[str] = Counter()
    names: dict[SliceKey, str] = {}
    for key, _ in counts.most_common():
        rule = rules.of(key)
        names[key] = key.name
        if rule is not None:
            ranks[rule.source] += 1
            if ranks[rule.source] > rule.most:
                names[key] = rule.other(key).name
    return [list(dict.fromkeys(names[key] for key in of_item)) for of_item in keys]


def _groups(found: Sequence[Compared]) -> IntArray:
    """Return the number of each item's observation: its own, or that of all items with the name of its group."""
    numbers: dict[str, int] = {}
    group: list[int] = []
    for file in found:
        for name in file.items.groups or [""] * len(file.items):
            # Its own number is negative: it cannot be that of a group.
            group.append(numbers.setdefault(name, len(numbers)) if name else -1 - len(group))
    return np.array(group, dtype=np.intp)
