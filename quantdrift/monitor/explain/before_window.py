"""The *before* window of an alert: the exchanges that its slice is compared with.

An onset is an estimate and is mostly late, so the time right before it may have drifted already: the last hour is left
out where there is enough data without it, else the newest quarter of the exchanges. A version that came with the onset
has no window of its own before it, or only a bad one: then the window is that of the version before it, in the week
before this one came.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from quantdrift.drift.evidence.clock import DAY_US
from quantdrift.facts.explanation import FEWEST_BEFORE
from quantdrift.storage.alerts.evidence import EvidenceItem
from quantdrift.storage.fold_rows import TransitionRow, VersionRow

ENOUGH = 100  # exchanges; a window with as many is taken, and no less reliable one is looked for
BEFORE_US = 7 * DAY_US
GAP_US = 3_600_000_000
_LAG_US = DAY_US  # a version may be stored this much later than its first exchange was captured
_LATE_SHARE = 0.25


class EvidenceReader(Protocol):
    """The queries behind a before window; `storage.alerts.evidence.Evidence` implements them."""

    async def items(
        self, *, version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> list[EvidenceItem]:
        """Return the newest items of a slice in [begin, end), newest first, a limited number."""
        ...

    async def last_compared(
        self, *, versions: Sequence[int], slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> int | None:
        """Return the version, of those given, that had the slice's newest item in [begin, end), or None."""
        ...


class BeforeWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A window before an onset.

    Parameters
    ----------
    version
        The version that its items are of: the alert's own or an earlier one.
    begin_us, end_us
        [begin, end), event time.
    words
        A description of the window, as text.
    items
        Items of the slice in the window, newest first.
    past
        All items that were read from before the onset, newest first: they show what is new since.
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


async def find_before_window(
    reader: EvidenceReader, row: TransitionRow, versions: Mapping[int, VersionRow]
) -> BeforeWindow:
    """Return the before window of an alert; it has too few items where there is no better one.

    Parameters
    ----------
    reader
        Queried for the slice's windows, four times at most.
    row
        The change of verdict.
    versions
        All versions, by id.
    """
    own = versions[row.model_version_id]
    gap_us = row.onset_us - GAP_US
    # A new version has no items in most of the week: searching there would only cost time.
    older_us = min(max(row.onset_us - BEFORE_US, own.first_seen_us - _LAG_US), gap_us)
    older = await _window(reader, row, older_us, gap_us) if older_us < gap_us else ()
    if _n(older) >= ENOUGH:
        # The last hour is read only to see what is new.
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
    """Return the window of the model's version that was last compared in the slice before this version came."""
    earlier = sorted(
        version.id
        for version in versions.values()
        if version.model == own.model
        and version.is_verified == own.is_verified
        and (version.first_seen_us, version.id) < (own.first_seen_us, own.id)
    )
    end_us = min(row.onset_us, own.first_seen_us)
    span = (end_us - BEFORE_US, end_us)
    if not earlier:
        return None
    predecessor = await reader.last_compared(
        versions=earlier, slice_id=row.slice_id, begin_us=span[0], end_us=span[1], fold_seq=row.fold_seq
    )
    if predecessor is None:
        return None
    items = await _window(reader, row, *span, version=predecessor)
    name = versions[predecessor].candidate_version
    named = f"version {name}"
    if name == own.candidate_version:
        named += f" with the reference {versions[predecessor].reference_digest[:12]}"
    newest_first = sorted((*past, *items), key=lambda item: (item.captured_us, item.exchange), reverse=True)
    return BeforeWindow(
        version=predecessor,
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
