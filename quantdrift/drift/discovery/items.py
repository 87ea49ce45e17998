"""The items of a search as columns: attributes as codes, features as numbers, divergence in [0, 1].

The memory is bounded for any traffic, by the number of attributes and of distinct values of each. Values above these
limits are counted and left out, as if the item did not have them.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from quantdrift.core.records import Metric, Predicate
from quantdrift.core.text import number_of
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray

MOST_KEYS = 64
MOST_VALUES = 4096
ABSENT = -1


class SearchItems(msgspec.Struct, frozen=True, kw_only=True):
    """N items. Those of one exchange need not be adjacent.

    Parameters
    ----------
    codes
        Attribute to (N,) indices in its `levels`; `ABSENT` if an item does not have it.
    levels
        Attribute to its values, in the order they were met.
    numbers
        Feature to (N,) values; NaN where an item does not have it.
    signals
        Metric to (N,) divergence over its cap, in [0, 1]; NaN where an item has none.
    weight
        (N,) 1 / pi, divided by the number of the exchange's items: an exchange counts once, however large.
    pi
        (N,) inclusion probabilities.
    group
        (N,) number of the exchange, 0 to `n_groups` - 1, in the order they were met.
    n_groups
        Exchanges.
    n_left_out
        Number of attributes, features and values above the limits.
    """

    codes: dict[str, IntArray]
    levels: dict[str, tuple[str, ...]]
    numbers: dict[str, FloatArray]
    signals: dict[Metric, FloatArray]
    weight: FloatArray
    pi: FloatArray
    group: IntArray
    n_groups: int
    n_left_out: int = 0

    def __len__(self) -> int:
        return len(self.pi)

    def members(self, where: Iterable[Predicate]) -> BoolArray:
        """Return which items, (N,), meet every condition of `where`."""
        members = np.ones(len(self), dtype=bool)
        for condition in where:
            members &= self._meets(condition)
        return members

    def without(self, prefix: str) -> "SearchItems":
        """Return the same items without the attributes whose keys begin with `prefix`."""
        codes = {key: column for key, column in self.codes.items() if not key.startswith(prefix)}
        return msgspec.structs.replace(self, codes=codes, levels={key: self.levels[key] for key in codes})

    def _meets(self, condition: Predicate) -> BoolArray:
        if condition.equals is not None:
            levels = self.levels.get(condition.key, ())
            if condition.equals not in levels:
                return np.zeros(len(self), dtype=bool)
            same: BoolArray = self.codes[condition.key] == levels.index(condition.equals)
            return same
        values = self.numbers.get(condition.key)
        if values is None:
            of_levels = np.array([number_of(level) for level in self.levels.get(condition.key, ())])
            if not len(of_levels):
                return np.zeros(len(self), dtype=bool)
            codes = self.codes[condition.key]
            values = np.where(codes >= 0, of_levels[codes], np.nan)
        inside = ~np.isnan(values)
        if condition.low is not None:
            inside &= values >= condition.low
        if condition.high is not None:
            inside &= values < condition.high
        return inside


class Gathering:
    """Collects items one by one and keeps only numbers of each.

    Parameters
    ----------
    keys
        Attributes and features that are always kept.
    most_keys
        Largest number of attributes and features. While there is room besides `keys`, others are kept in the order in
        which they appear.
    """

    def __init__(self, keys: Iterable[str] = (), most_keys: int = MOST_KEYS) -> None:
        self._reserved = frozenset(keys)
        self._free = most_keys - len(self._reserved)
        self._codes: dict[str, list[float]] = {}
        self._places: dict[str, dict[str, int]] = {}
        self._numbers: dict[str, list[float]] = {}
        self._signals: dict[Metric, list[float]] = {}
        self._pi: list[float] = []
        self._group: list[int] = []
        self._groups: dict[str, int] = {}
        self._left_out: set[tuple[str, str]] = set()
        self._n_left_out = 0

    def __len__(self) -> int:
        return len(self._pi)

    def add(
        self,
        exchange: str,
        pi: float,
        attributes: Mapping[str, str],
        features: Mapping[str, float],
        signals: Mapping[Metric, float | None],
    ) -> None:
        """Add one item.

        Parameters
        ----------
        exchange
            Its exchange's id.
        pi
            Its inclusion probability, in (0, 1].
        attributes, features
            As recorded.
        signals
            Metric to divergence over its cap, in [0, 1]; None or NaN where it has none.
        """
        n = len(self._pi)
        for key, value in attributes.items():
            if (column := self._column(self._codes, key, n, ABSENT)) is not None:
                column.append(self._code(key, value))
        for key, number in features.items():
            if (numbers := self._column(self._numbers, key, n, np.nan)) is not None:
                numbers.append(number)
        for metric, signal in signals.items():
            series = self._signals.setdefault(metric, [])
            series += [np.nan] * (n - len(series))
            series.append(np.nan if signal is None else signal)
        self._pi.append(pi)
        self._group.append(self._groups.setdefault(exchange, len(self._groups)))

    def items(self) -> SearchItems:
        """Return the added items."""
        n = len(self._pi)
        pi = np.array(self._pi, dtype=np.float64)
        group = np.array(self._group, dtype=np.intp)
        size = np.bincount(group, minlength=len(self._groups))
        return SearchItems(
            codes={key: _filled(column, n, ABSENT).astype(np.intp) for key, column in self._codes.items()},
            levels={key: tuple(codes) for key, codes in self._places.items()},
            numbers={key: _filled(column, n, np.nan) for key, column in self._numbers.items()},
            signals={metric: _filled(column, n, np.nan) for metric, column in self._signals.items()},
            weight=1.0 / (pi * size[group]),
            pi=pi,
            group=group,
            n_groups=len(self._groups),
            n_left_out=self._n_left_out,
        )

    def _column(
        self, columns: dict[str, list[float]], key: str, n: int, missing: float
    ) -> list[float] | None:
        column = columns.get(key)
        if column is None:
            if key not in self._reserved:
                if self._free <= 0:
                    self._leave_out(key, "")
                    return None
                self._free -= 1
            column = columns[key] = []
        column += [missing] * (n - len(column))
        return column

    def _code(self, key: str, value: str) -> int:
        codes = self._places.setdefault(key, {})
        code = codes.get(value)
        if code is None:
            if len(codes) >= MOST_VALUES:
                self._leave_out(key, value)
                return ABSENT
            code = codes[value] = len(codes)
        return code

    def _leave_out(self, key: str, value: str) -> None:
        # Distinct ones are counted as far as a set of bounded size allows.
        if len(self._left_out) < MOST_VALUES:
            if (key, value) in self._left_out:
                return
            self._left_out.add((key, value))
        self._n_left_out += 1


def _filled(column: Sequence[float], n: int, missing: float) -> FloatArray:
    array = np.full(n, missing, dtype=np.float64)
    array[: len(column)] = column
    return array
