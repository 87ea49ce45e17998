"""Periods, and what was summed over one: typed, frozen, and without SQL."""

from datetime import datetime
from enum import StrEnum

import msgspec

from quantdrift.storage.figures.estimates import Sums


class _Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A row, or a sum of rows, of the database."""


class Grain(StrEnum):
    """The table that a sum is taken from."""

    ITEM = "comparison"  # exact borders, for short windows
    HOUR = "rollup_hour"
    DAY = "rollup_day"

    @property
    def words(self) -> str:
        """What people read of it."""
        return {"comparison": "single answers", "rollup_hour": "hourly sums", "rollup_day": "daily sums"}[
            self.value
        ]


class SumWindow(_Fact, frozen=True, kw_only=True):
    """A half-open range of capture time, and the table it is read from.

    Parameters
    ----------
    begin, end
        Aware; on whole hours or days where `grain` is one of the roll-ups.
    grain
        The table.
    """

    begin: datetime
    end: datetime
    grain: Grain


class Extent(_Fact, frozen=True, kw_only=True):
    """The amount of data in a period.

    Parameters
    ----------
    first, last
        Earliest and latest capture, as exactly as the database still has it; None where nothing was compared.
    n_items
        Rows of `comparison` in it, counted no further than the caller's limit.
    is_whole
        Whether they reach back as far as the roll-ups do: comparisons are deleted first.
    """

    first: datetime | None
    last: datetime | None
    n_items: int
    is_whole: bool = True


class SliceSums(_Fact, frozen=True, kw_only=True):
    """Sums of one slice of one version, over one bucket or a whole window (`at` is its begin)."""

    version_id: int
    slice_id: int
    at: datetime
    sums: Sums


class VersionSpan(_Fact, frozen=True, kw_only=True):
    """The time in which a version was compared: the begin of its first hour and the end of its last one."""

    version_id: int
    first: datetime
    last: datetime


class SliceBins(_Fact, frozen=True, kw_only=True):
    """Weighted histogram of the divergence: 64 log-spaced bins from 1e-6 to 10, ends open."""

    version_id: int
    slice_id: int
    bins: tuple[float, ...]
