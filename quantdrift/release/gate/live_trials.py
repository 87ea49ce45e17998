"""The trials of live traffic, with what counts as one observation: an exchange, or a burst of exchanges that are alike.

The bounds of a trial are for observations that say something new each. Twenty frames of one camera, of which all flip or none, are one.
Declared sessions count once (`quantdrift.release.gate.live`); here is looked for what nobody declared, before a verdict is given.

Assumption (H0)
    Exchanges of the same slices are exchangeable in the order in which they come, and among them those with one value of an attribute that comes
    in bursts, which is judged by its values alone.
Evidence
    As of `quantdrift.release.gate.observations`, of the divergence and of four projections of the inputs: all exchanges, and each slice for
    itself. For each such attribute the products of the scores of exchanges at most 8 apart in one burst of a value.
Bound
    Each look finds bursts in independent traffic with a probability of at most `FALSE_SHARE` in the order and as much by attributes. Looks are
    at a verdict, and then where half as many exchanges came again.
What is found
    By an attribute each burst of a value counts once, when it is over. Else, and where bursts of values are alike in turn, so many exchanges in a row
    of the same slices do. The trials begin again from all that is remembered: bounds are valid for any grouping that does not depend on
    answers. That it depends on a test of them makes them approximate, as is what is left of the dependence at the ends of blocks
    (`tests/statistical/test_gate_bursts.py`).
Not seen
    Bursts whose divergence and inputs differ as much as any others, and those in which many users send at the same time and no recorded attribute tells
    them apart: of ten at a time some thousand exchanges are needed.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.gate import Trial
from quantdrift.facts.gate import Outcome
from quantdrift.release.gate.observations import (
    LEAST_ROWS,
    attribute_of_bursts,
    blocks,
    burst_of_series,
    numbered,
    visits,
)

FALSE_SHARE: Final = 0.003
"""Share of looks at independent traffic, at most, that find bursts in its order; the same by attributes."""
MOST_REMEMBERED: Final = 20_000
"""Exchanges that can be counted differently later."""
_AGAIN: Final = 1.5  # times as many exchanges, from which on bursts are looked for again
_COUNTED_AGAIN: Final = 1.02  # times as many, from which on bursts are counted again
_MOST_SLICES: Final = 100  # those with the most exchanges are tested for themselves
_ALONE: Final = -1  # of no remembered exchange: a declared session
_LABELLED: Final = -2  # its label came later, and says not of which exchange


class SeenExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange that is an observation of its own unless it is of a burst.

    Parameters
    ----------
    slices
        The slices that any of its items is in.
    measures
        Numbers that exchanges of one burst may share; as many of each exchange.
    attributes
        What is recorded of it.
    shares
        The weights of its items by value, by the number of the trial.
    """

    slices: tuple[str, ...]
    measures: tuple[float, ...]
    attributes: Mapping[str, str]
    shares: Mapping[int, FloatArray]


class Bursts(msgspec.Struct, frozen=True, kw_only=True):
    """What exchanges come in.

    Parameters
    ----------
    length
        Exchanges of one, about.
    n_exchanges, n_observations
        How many exchanges are counted as how many observations.
    attribute
        Whose values tell bursts apart; empty: their order does.
    """

    length: int
    n_exchanges: int
    n_observations: int
    attribute: str = ""


class LiveTrials:
    """The trials of one gate on live traffic. One thread calls it.

    Parameters
    ----------
    trials
        Nothing was seen yet.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._base = list(trials)  # before what is remembered
        self._plain = list(trials)
        self._in_bursts: list[Trial] = []
        self._attribute, self._length = "", 1
        self._bursts: Bursts | None = None
        self._n_before = self._n_observations_before = 0
        self._forget()

    @property
    def current(self) -> Sequence[Trial]:
        """The trials, in the order in which they were given. Before one of them decides, bursts are looked for."""
        self._decide()
        if self._bursts:
            return self._in_bursts
        if 0 < self._n < LEAST_ROWS and not self._n_before:  # too few to see bursts
            return [msgspec.structs.replace(trial, passed=None) for trial in self._plain]
        return self._plain

    @property
    def bursts(self) -> Bursts | None:
        """What exchanges come in; None: each says something new, as far as is known."""
        return self._bursts

    @property
    def outcome(self) -> Outcome:
        """The verdict so far."""
        return _outcome(self.current)

    def see(self, exchange: SeenExchange) -> None:
        """Count an exchange."""
        if self._n >= MOST_REMEMBERED:
            self._count(search=True)
            self._base = list(self._in_bursts if self._bursts else self._plain)
            self._plain = list(self._base)
            self._n_before += self._n
            self._n_observations_before = self._bursts.n_observations if self._bursts else self._n_before
            self._forget()
        self._slices.append(exchange.slices)
        self._measures.append(exchange.measures)
        for key, value in exchange.attributes.items():
            self._values.setdefault(key, {})[self._n - 1] = value
        for number, shares in exchange.shares.items():
            self._append(number, self._n - 1, shares)

    def add(self, number: int, shares: FloatArray, *, is_session: bool) -> None:
        """Count an observation of one trial: a declared session, or an exchange that got its label."""
        self._append(number, _ALONE if is_session else _LABELLED, shares)

    def finish(self) -> None:
        """Look for bursts a last time, where there is a verdict."""
        if self._bursts or _outcome(self._plain) is not Outcome.INSUFFICIENT:
            self._count(search=True)

    @property
    def _n(self) -> int:
        return len(self._slices)

    def _forget(self) -> None:
        self._slices: list[tuple[str, ...]] = []
        self._measures: list[tuple[float, ...]] = []
        self._values: dict[str, dict[int, str]] = {}
        self._places: list[list[int]] = [[] for _ in self._base]
        self._shares: list[list[FloatArray]] = [[] for _ in self._base]
        self._looked_at = self._counted_at = 0

    def _append(self, number: int, place: int, shares: FloatArray) -> None:
        self._places[number].append(place)
        self._shares[number].append(shares)
        self._plain[number] = self._plain[number].after(shares[None])

    def _decide(self) -> None:
        """Count bursts again where many exchanges came, and look for them where there would be a verdict without."""
        if self._bursts:
            if self._n >= _COUNTED_AGAIN * self._counted_at:
                self._count(search=self._n >= _AGAIN * self._looked_at)
        elif self._n >= max(LEAST_ROWS, _AGAIN * self._looked_at) and (
            _outcome(self._plain) is not Outcome.INSUFFICIENT
        ):
            self._count(search=True)

    def _count(self, *, search: bool) -> None:
        """Count what is remembered by the bursts that were found, after a search for others."""
        if not self._n:
            return
        self._counted_at = self._n
        stratum = numbered([str(slices) for slices in self._slices])
        if search and self._n >= LEAST_ROWS:
            self._looked_at = self._n
            self._search(stratum)
        if not self._attribute and self._length == 1:
            return
        if self._attribute:
            group, is_over = visits(self._values_of(self._attribute))
        else:
            group = blocks(stratum, self._length)
            is_over = np.bincount(group, minlength=1) == self._length
        n_groups = max(len(is_over), 1)
        length = max(round(self._n / n_groups), 2) if self._attribute else self._length
        if self._bursts and self._n < LEAST_ROWS:
            length = self._bursts.length
        self._bursts = Bursts(
            length=length,
            n_exchanges=self._n_before + self._n,
            n_observations=self._n_observations_before + int(is_over.sum()),
            attribute=self._attribute,
        )
        self._in_bursts = [
            self._regrouped(number, group, is_over, length) for number in range(len(self._base))
        ]

    def _search(self, stratum: IntArray) -> None:
        """Look for bursts in what is remembered: those of an attribute, where their own order shows no others, else those of the order."""
        series = list(np.array(self._measures, dtype=np.float64).T)
        values = {key: self._values_of(key) for key in sorted(self._values)}
        attribute, is_all = attribute_of_bursts(series, stratum, values, false_share=FALSE_SHARE)
        if is_all:
            self._attribute = attribute
            return
        length = self._length_of_order(series, stratum)
        if length > 1:
            self._attribute, self._length = "", max(self._length, length)
        elif attribute:
            self._attribute = attribute

    def _length_of_order(self, series: Sequence[FloatArray], stratum: IntArray) -> int:
        """Return how many exchanges in a row are alike, over all or in a slice that is large enough to tell; 1: none."""
        rows_of: dict[str, list[int]] = {}
        for place, slices in enumerate(self._slices):
            for name in slices:
                rows_of.setdefault(name, []).append(place)
        large = sorted((rows for rows in rows_of.values() if LEAST_ROWS <= len(rows) < self._n), key=len)
        subsets = [np.arange(self._n), *map(np.array, large[-_MOST_SLICES:])]
        return max(
            burst_of_series(
                [values[rows] for values in series], stratum[rows], false_share=FALSE_SHARE / len(subsets)
            )
            for rows in subsets
        )

    def _values_of(self, key: str) -> list[str]:
        values = self._values.get(key, {})
        return [values.get(place, "") for place in range(self._n)]

    def _regrouped(self, number: int, group: IntArray, is_over: BoolArray, length: int) -> Trial:
        """Return a trial after the observations that are over, in the order in which they were."""
        base, places = self._base[number], np.array(self._places[number], dtype=np.intp)
        if not len(places):
            return base
        shares = np.array(self._shares[number])
        labelled, is_seen = places == _LABELLED, places >= 0
        # Numbers of groups: those of exchanges, then each session, then blocks of exchanges with labels.
        name = len(is_over) + np.arange(len(places))
        name[is_seen] = group[places[is_seen]]
        late = np.arange(int(labelled.sum())) // length
        name[labelled] = len(is_over) + len(places) + late
        counts = np.ones(len(places), dtype=np.bool_)
        counts[is_seen] = is_over[name[is_seen]]
        counts[labelled] = late < len(late) // length
        name, shares = name[counts], shares[counts]
        _, member, sizes = np.unique(name, return_inverse=True, return_counts=True)
        last = np.zeros(len(sizes), dtype=np.intp)
        np.maximum.at(last, member, np.arange(len(member)))
        means = np.stack([np.bincount(member, column) for column in shares.T], axis=1) / sizes[:, None]
        return base.after(means[np.argsort(last)])


def _outcome(trials: Sequence[Trial]) -> Outcome:
    if any(trial.failed for trial in trials):
        return Outcome.FAIL
    return Outcome.PASS if all(trial.passed for trial in trials) else Outcome.INSUFFICIENT
