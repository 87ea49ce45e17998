"""What an alert's slice is held against: the window that is its *before*.

An onset is an estimate and mostly comes late, so what lies right before it may be drifted already: the last hour is
left out where there is enough without it, else the newest quarter. A version that came with the onset has no before of
its own, or only a bad one: then it is the version before it, in the week before this one came.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.drift.explain.mix import FEWEST_BEFORE
from quantdrift.storage.monitor.evidence import EvidenceItem
from quantdrift.storage.monitor.rows import TransitionRow, VersionRow

ENOUGH = 100  # exchanges before, from which on a window is not passed over for one with more doubt
BEFORE_US = 7 * DAY_US
GAP_US = 3_600_000_000
_LAG_US = DAY_US  # a version may be stored so much later than its first exchange was captured
_LATE_SHARE = 0.25


class EvidenceReader(Protocol):
    """What the record is asked; `storage.evidence.Evidence` answers it."""

    async def items(
        self, *, version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> list[EvidenceItem]:
        """Return the newest items of a slice in [begin, end), newest first, so many at most."""
        ...

    async def last_compared(
        self, *, versions: Sequence[int], slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> int | None:
        """Return which of some versions had the slice's newest item in [begin, end), or None."""
        ...


class BeforeWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A window before an onset.

    Parameters
    ----------
    version
        Whose items: the alert's own or an earlier one's.
    begin_us, end_us
        [begin, end), event time.
    words
        Which window it is.
    items
        Of the slice in it, newest first.
    past
        All that was read from before the onset, newest first: it tells what is new since.
    """

    version: int
    begin_us: int
    end_us: int
    words: str
    items: tuple[EvidenceItem, ...]
    past: tuple[EvidenceItem, ...]

    @property
    def n(self) -> int:
        """Exchanges in it."""
        return _n(self.items)


async def yardstick(
    reader: EvidenceReader, row: TransitionRow, versions: Mapping[int, VersionRow]
) -> BeforeWindow:
    """Return what the slice of an alert is held against; one with too few items where there is nothing better.

    Parameters
    ----------
    reader
        Asked for the slice's windows: four times at most.
    row
        The change of verdict.
    versions
        Every version, by its number.
    """
    own = versions[row.model_version_id]
    gap_us = row.onset_us - GAP_US
    # Of a version that has just come there is nothing in most of the week, which would be searched in vain.
    older_us = min(max(row.onset_us - BEFORE_US, own.first_seen_us - _LAG_US), gap_us)
    older = await _window(reader, row, older_us, gap_us) if older_us < gap_us else ()
    if _n(older) >= ENOUGH:
        # The hour is read for what is new alone.
        lately = await _window(reader, row, gap_us, row.onset_us)
        words = "the week before the onset without its last hour"
        return _own(row, (older_us, gap_us), words, older, (*lately, *older))
    lately = await _window(reader, row, gap_us, row.onset_us)
    past = (*lately, *older)
    kept = past[int(_LATE_SHARE * len(past)) :]
    cut_us = kept[0].captured_us + 1 if kept else row.onset_us
    kept = tuple(item for item in past if item.captured_us < cut_us)
    cut = _own(row, (older_us, cut_us), "the week before the onset without its newest quarter", kept, past)
    young = own.first_seen_us >= gap_us
    if not young and cut.n >= ENOUGH:
        return cut
    before = await _predecessor(reader, row, own, versions, past)
    if before and before.n >= ENOUGH:
        return before
    if cut.n >= ENOUGH:
        return cut
    whole = _own(row, (older_us, row.onset_us), "the week before the onset", past, past)
    if before and whole.n < FEWEST_BEFORE <= before.n:
        return before
    return whole


async def _predecessor(
    reader: EvidenceReader,
    row: TransitionRow,
    own: VersionRow,
    versions: Mapping[int, VersionRow],
    past: tuple[EvidenceItem, ...],
) -> BeforeWindow | None:
    """Return the window of the version of the model that was last compared in the slice before this one came."""
    earlier = sorted(
        one.id
        for one in versions.values()
        if one.model == own.model and (one.first_seen_us, one.id) < (own.first_seen_us, own.id)
    )
    end_us = min(row.onset_us, own.first_seen_us)
    span = (end_us - BEFORE_US, end_us)
    if not earlier:
        return None
    found = await reader.last_compared(
        versions=earlier, slice_id=row.slice_id, begin_us=span[0], end_us=span[1], fold_seq=row.fold_seq
    )
    if found is None:
        return None
    items = await _window(reader, row, *span, version=found)
    name = versions[found].candidate_version
    named = f"version {name}"
    if name == own.candidate_version:
        named += f" with the reference {versions[found].reference_digest[:12]}"
    newest_first = sorted((*past, *items), key=lambda item: (item.captured_us, item.exchange), reverse=True)
    return BeforeWindow(
        version=found,
        begin_us=span[0],
        end_us=span[1],
        words=f"{named} in the week before this version came",
        items=items,
        past=tuple(newest_first),
    )


async def _window(
    reader: EvidenceReader, row: TransitionRow, begin_us: int, end_us: int, *, version: int | None = None
) -> tuple[EvidenceItem, ...]:
    return tuple(
        await reader.items(
            version=row.model_version_id if version is None else version,
            slice_id=row.slice_id,
            begin_us=begin_us,
            end_us=end_us,
            fold_seq=row.fold_seq,
        )
    )


def _own(
    row: TransitionRow,
    span: tuple[int, int],
    words: str,
    items: tuple[EvidenceItem, ...],
    past: tuple[EvidenceItem, ...],
) -> BeforeWindow:
    return BeforeWindow(
        version=row.model_version_id, begin_us=span[0], end_us=span[1], words=words, items=items, past=past
    )


def _n(items: Sequence[EvidenceItem]) -> int:
    return len({item.exchange for item in items})
