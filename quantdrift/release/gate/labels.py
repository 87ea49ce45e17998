"""Labels that come after the traffic: the exchanges that wait for their true classes, and what these say of the accuracy.

A gate on live traffic keeps the top classes of reference and candidate for each exchange. When `quantdrift labels load` gives it a true
class, the exchange counts for the question `accuracy` (`quantdrift.drift.gate`), with the weight that it has for every other question; a session
counts once, when it is over, by those of its exchanges that have a label then.

Assumption: whether an item gets a label, and when, does not depend on who is right about it. Then the mean over what has labels is that
of the traffic, and its bounds are valid at all times, in the order in which the labels come. Not proved is a pass where the labels come from
a part of the traffic alone, such as complaints, or more often from one slice than from another.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec
import numpy as np

from quantdrift.drift.evidence.group import ROUNDING
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.storage.gate import TrueLabel

NO_CLASS: Final = -1
MOST_EXPECTED: Final = 100_000
"""Exchanges that wait for labels at once; beyond it the oldest are forgotten."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The top classes of an exchange's items.

    Parameters
    ----------
    reference, candidate, served
        (items,) each; `NO_CLASS` where there is none.
    """

    reference: IntArray
    candidate: IntArray
    served: IntArray

    def value(self, label: TrueLabel, numbers: Mapping[str, int]) -> int | None:
        """Return the number of the value of `Question.accuracy` that an item has; None: there is no such item.

        A label without a class says who was right of those who have served. A candidate that decides like neither counts as wrong: it
        may be right only where both are wrong, so the loss of accuracy is overestimated.
        """
        if not 0 <= label.item < len(self.reference):
            return None
        reference, candidate, served = (
            int(side[label.item]) for side in (self.reference, self.candidate, self.served)
        )
        true = None if label.label is None else _number(label.label, numbers)
        if true is not None:
            return (reference == true) + 2 * (candidate == true)
        right = candidate != NO_CLASS and (
            (candidate == reference and label.reference_right)
            or (candidate == served and label.candidate_right)
        )
        return label.reference_right + 2 * right


class _Exchange(msgspec.Struct, kw_only=True):
    """An exchange that waits: its answers, the rate of its part, and the value of each item with a label."""

    answers: Answers
    part: float
    values: dict[int, int]


class _LabelledGroup(msgspec.Struct, kw_only=True):
    """A group of exchanges that is one observation: when it began, its session if it is one, its weight and its exchanges."""

    began_at: datetime
    session: str
    weight: float
    exchanges: dict[UUID, _Exchange]


class ExpectedLabels:
    """The exchanges that wait for labels, in the order in which they were captured. One thread calls it.

    Parameters
    ----------
    classes
        Names of the classes, as of `models.labels`.
    session
        A session is over so long after its first exchange.
    most
        Most exchanges that wait.

    Attributes
    ----------
    forgotten
        Exchanges that were forgotten before they had a label, because more than `most` waited.
    """

    def __init__(self, classes: Sequence[str], session: timedelta, *, most: int = MOST_EXPECTED) -> None:
        self.forgotten = 0
        self._numbers = {name: number for number, name in enumerate(classes)}
        self._session, self._most = session, most
        self._groups: dict[str, _LabelledGroup] = {}
        self._of: dict[UUID, str] = {}
        self._newest: dict[str, str] = {}  # the group of a session, by the name of the session

    def __len__(self) -> int:
        return len(self._of)

    def expect(
        self,
        exchange: UUID,
        answers: Answers,
        *,
        at: datetime,
        weight: float,
        part: float = 1.0,
        session: str = "",
    ) -> None:
        """Wait for the labels of an exchange.

        Parameters
        ----------
        exchange
            Its id.
        at
            When it was captured.
        weight
            Its weight c / pi, at most 1; of a session c alone.
        part
            With a session: the rate of the part that it is in.
        session
            Name of its session; empty: it is an observation of its own.
        """
        name = self._newest.get(session, "") if session else ""
        group = self._groups.get(name)
        if group is None or self._is_over(group, at):
            name = exchange.hex  # a session is called like its first exchange
            group = self._groups[name] = _LabelledGroup(
                began_at=at, session=session, weight=weight, exchanges={}
            )
            if session:
                self._newest[session] = name
        group.weight = weight
        group.exchanges[exchange] = _Exchange(answers=answers, part=part, values={})
        self._of[exchange] = name
        while len(self._of) > self._most:
            oldest = next(iter(self._groups))
            self.forgotten += len(self._pop(oldest).exchanges)

    def give(self, labels: Sequence[TrueLabel]) -> None:
        """Take labels; those of exchanges that do not wait, or have counted already, change nothing."""
        for label in labels:
            name = self._of.get(label.exchange)
            if name is None:
                continue
            exchange = self._groups[name].exchanges[label.exchange]
            if (value := exchange.answers.value(label, self._numbers)) is not None:
                exchange.values[label.item] = value

    def taken(self, at: datetime | None) -> Iterator[FloatArray]:
        """Yield the weights by value, (4,), of each group that has labels and is over at `at`, and forget it; None: all are over."""
        ready = [
            name
            for name, group in self._groups.items()
            if (at is None or self._is_over(group, at))
            and any(exchange.values for exchange in group.exchanges.values())
        ]
        for name in ready:
            total = _weights(self._pop(name))
            if total.sum() <= 1 + ROUNDING:
                yield total

    def _is_over(self, group: _LabelledGroup, at: datetime) -> bool:
        return not group.session or at - group.began_at > self._session

    def _pop(self, name: str) -> _LabelledGroup:
        group = self._groups.pop(name)
        for exchange in group.exchanges:
            del self._of[exchange]
        if self._newest.get(group.session) == name:
            del self._newest[group.session]
        return group


def _weights(group: _LabelledGroup) -> FloatArray:
    """Return the weights of a group by value: for each part the mean over its exchanges with labels, over its rate."""
    parts: dict[float, list[FloatArray]] = {}
    for exchange in group.exchanges.values():
        if exchange.values:
            counts = Counter(exchange.values.values())
            shares = np.array([counts[value] for value in range(4)]) / len(exchange.values)
            parts.setdefault(exchange.part, []).append(shares)
    total: FloatArray = np.zeros(4)
    for part, of_part in sorted(parts.items()):
        total += group.weight / part * np.mean(of_part, axis=0)
    return total


def _number(label: str, numbers: Mapping[str, int]) -> int | None:
    """Return the number of a class that is given by its name or its number; None: it is neither."""
    number = numbers.get(label)
    return int(label) if number is None and label.isascii() and label.isdigit() else number
