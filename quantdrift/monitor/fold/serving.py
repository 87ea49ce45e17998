"""Which candidate versions serve: what the fold sees of their exchanges, in event time. Pure.

A version is replaced once another version of its model serves and this one does not: nothing of it was seen for ten times its
usual gap, at least two minutes, counted until the newest exchange of the other one. Silence alone shows nothing: there may be
no traffic, or the shadow may be down. It serves again once its exchanges are seen over two minutes: one straggler is no return.

A release and a roll-back are said sooner: half a minute is enough where the other version began, or came back, when this one ended,
and its exchanges come at least half as often as this one's did. The longer wait is for a version that pauses beside another one.

The usual gap is the mean gap between its exchanges, weighted by the length of the gaps: the gap that a moment of the last hour
lies in. So a burst with a long pause after it does not count as a short gap. A silence of the whole model counts at most as
much as would replace a version. A version that came back has shown how long it pauses: its next pause may be twice as long.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import numpy as np

from quantdrift.drift.evidence.clock import MICROSECONDS
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.storage.fold_rows import ServingRow

GAPS: Final = 10.0
LEAST_SILENCE_S: Final = 120.0
SWITCH_S: Final = 30.0
"""Of silence after which a version that began meanwhile has taken over: exchanges may be so late and are folded in order all the same."""
_LEAST_PAUSE_S: Final = 5.0
_OFTEN: Final = 2.0  # times the usual gap of a version: what comes as often as that took all of its traffic, not a canary's part
MEMORY_S: Final = 3600.0
"""Of the usual gap; also the longest pause that counts of a version that came back."""


class ServingVersions:
    """The versions that were seen, and which of them others have replaced.

    Parameters
    ----------
    rows
        As they were stored.
    """

    def __init__(self, rows: Iterable[ServingRow]) -> None:
        self._rows = {row.model_version_id: row for row in rows}
        self._changed: set[int] = set()

    def __contains__(self, version_id: object) -> bool:
        """Return whether a version was seen."""
        return version_id in self._rows

    def versions(self) -> list[int]:
        """Return the versions that were seen."""
        return sorted(self._rows)

    def row(self, version_id: int) -> ServingRow:
        """Return what is known of a version that was seen."""
        return self._rows[version_id]

    def is_replaced(self, version_id: int) -> bool:
        """Return whether another version serves instead of this one."""
        row = self._rows.get(version_id)
        return row is not None and row.replaced_us is not None

    def seen(self, version_id: int, times_us: IntArray) -> None:
        """Note exchanges of a version.

        Parameters
        ----------
        times_us
            When they were captured, at most when they were stored. What is older than its newest exchange changes nothing.
        """
        row = self._rows.get(version_id)
        times = np.unique(times_us)
        if row is not None:
            times = times[times > row.last_us]
        if not len(times):
            return
        if row is None:
            row = ServingRow(model_version_id=version_id, last_us=int(times[0]))
        gaps_s = np.diff(times, prepend=row.last_us) / MICROSECONDS
        if row.replaced_us is None:
            row = _with_gaps(row, gaps_s)
        else:
            pauses = np.flatnonzero(gaps_s > _longest_gap_s(row))
            back_us = int(times[pauses[-1]]) if len(pauses) else row.back_us or int(times[0])
            row = msgspec.structs.replace(row, back_us=back_us)
        self._rows[version_id] = msgspec.structs.replace(row, last_us=int(times[-1]))
        self._changed.add(version_id)

    def judge(self, now_us: int, counts: Callable[[int, int], bool]) -> tuple[list[int], list[int]]:
        """Find what has changed since the last call: return the versions that were replaced, and those that serve again.

        Parameters
        ----------
        now_us
            The fold's time.
        counts
            Whether the first version can replace the second: both are of one model, for instance.
        """
        rows = [self._rows[version_id] for version_id in sorted(self._rows)]
        newest_us = max((row.last_us for row in rows), default=0)

        def took_over(other: ServingRow, row: ServingRow) -> bool:
            return _took_over(other, row) and counts(other.model_version_id, row.model_version_id)

        def is_over(row: ServingRow) -> bool:
            return newest_us > row.last_us + SWITCH_S * MICROSECONDS and any(
                took_over(other, row)
                or (_outlasts(other, row) and counts(other.model_version_id, row.model_version_id))
                for other in rows
            )

        changed = []
        for row in rows:
            if row.replaced_us is None:
                changed += [_replaced(row, now_us)] if is_over(row) else []
            elif any(took_over(row, other) for other in rows):  # a roll-back, not a pause
                changed.append(msgspec.structs.replace(row, replaced_us=None, back_us=None))
            elif _is_seen_again(row) and not is_over(row):
                changed.append(_back(row))
        for row in changed:
            self._rows[row.model_version_id] = row
            self._changed.add(row.model_version_id)
        return (
            [row.model_version_id for row in changed if row.replaced_us is not None],
            [row.model_version_id for row in changed if row.replaced_us is None],
        )

    def instead_of(self, version_id: int, counts: Callable[[int, int], bool]) -> list[int]:
        """Return the versions that serve instead of one that was replaced, the one that was seen last first."""
        last_us = self._rows[version_id].last_us
        rows = [
            row
            for row in self._rows.values()
            if row.replaced_us is None and row.last_us > last_us and counts(row.model_version_id, version_id)
        ]
        rows.sort(key=lambda row: (-row.last_us, row.model_version_id))
        return [row.model_version_id for row in rows]

    def heirs(self, version_id: int, counts: Callable[[int, int], bool]) -> list[int]:
        """Return the versions that have exchanges although this one has been silent for `GAPS` of its gaps, the newest first.

        That it was replaced is said after a longer silence, because people read it; where evidence is counted says nothing to
        anybody, and may change again.
        """
        row = self._rows[version_id]
        until_us = row.last_us + max(GAPS * row.gap_s, _LEAST_PAUSE_S) * MICROSECONDS
        heirs = [
            heir
            for heir in self._rows.values()
            if heir.replaced_us is None
            and heir.last_us > until_us
            and counts(heir.model_version_id, version_id)
        ]
        heirs.sort(key=lambda heir: (-heir.last_us, heir.model_version_id))
        return [heir.model_version_id for heir in heirs]

    def forget(self, version_id: int) -> None:
        """Forget a version; what is stored of it stays."""
        self._rows.pop(version_id, None)
        self._changed.discard(version_id)

    def take(self) -> tuple[ServingRow, ...]:
        """Return the rows that changed since the last call."""
        rows = tuple(self._rows[version_id] for version_id in sorted(self._changed))
        self._changed.clear()
        return rows


def _longest_gap_s(row: ServingRow) -> float:
    """Return the longest silence in which a version may still serve."""
    return max(GAPS * row.gap_s, LEAST_SILENCE_S)


def _replaced(row: ServingRow, now_us: int) -> ServingRow:
    return msgspec.structs.replace(row, replaced_us=now_us, back_us=None)


def _outlasts(other: ServingRow, row: ServingRow) -> bool:
    """Return whether a version that serves was seen after the longest silence of another one."""
    return other.replaced_us is None and other.last_us > row.last_us + _longest_gap_s(row) * MICROSECONDS


def _took_over(other: ServingRow, row: ServingRow) -> bool:
    """Return whether a version that began, or came back, when another one ended has had its traffic for half a minute."""
    began_us = other.last_us - other.gaps_s * MICROSECONDS if other.replaced_us is None else other.back_us
    return (
        began_us is not None
        and row.replaced_us is None
        and began_us > row.last_us - LEAST_SILENCE_S * MICROSECONDS
        and other.last_us - max(began_us, row.last_us) >= max(GAPS * row.gap_s, SWITCH_S) * MICROSECONDS
        and other.gap_s <= _OFTEN * row.gap_s
    )


def _is_seen_again(row: ServingRow) -> bool:
    """Return whether exchanges of a version that was replaced were seen for long enough."""
    return row.back_us is not None and row.last_us - row.back_us >= LEAST_SILENCE_S * MICROSECONDS


def _back(row: ServingRow) -> ServingRow:
    """Return a row that serves again: a pause of twice the length replaces it no more."""
    assert row.back_us is not None
    assert row.replaced_us is not None
    pause_s = (row.back_us - row.replaced_us) / MICROSECONDS + _longest_gap_s(row)
    return msgspec.structs.replace(
        row, gap_s=max(row.gap_s, 2 * min(pause_s, MEMORY_S) / GAPS), replaced_us=None, back_us=None
    )


def _with_gaps(row: ServingRow, gaps_s: FloatArray) -> ServingRow:
    """Return a row after exchanges with these gaps, (exchanges,), before them."""
    counted = np.minimum(gaps_s, _longest_gap_s(row))
    total_s = float(counted.sum())
    if total_s <= 0:
        return row
    known_s = min(row.gaps_s + total_s, MEMORY_S)
    share, mean_s = min(total_s / known_s, 1.0), float((counted**2).sum()) / total_s
    return msgspec.structs.replace(row, gap_s=row.gap_s + share * (mean_s - row.gap_s), gaps_s=known_s)
