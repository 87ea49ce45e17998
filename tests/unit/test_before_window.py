"""The window before an alert that the alert is compared with."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from quantdrift.core.records import Metric, Verdict
from quantdrift.monitor.explain.before_window import ENOUGH, GAP_US, BeforeWindow, find_before_window
from quantdrift.monitor.explain.sample import ComparedValue, WindowSample, damage_between
from quantdrift.storage.alerts.evidence import EvidenceItem
from quantdrift.storage.fold_rows import Episode, TransitionRow, VersionRow
from tests.support.monitor.fold_stream import BEGIN_US, SECOND_US

pytestmark = pytest.mark.unit

HOUR_US = 3600 * SECOND_US
DAY_US = 24 * HOUR_US
ONSET_US = BEGIN_US + 30 * DAY_US
SLICE, OWN, OLD, OLDER, OTHER = 2, 5, 3, 2, 9
FLIPS = ComparedValue(metric=Metric.FLIP, kind="budget", cap=1.0)


def version(number: int, first_seen_us: int, model: str = "digits") -> VersionRow:
    """Return a version."""
    return VersionRow(
        id=number,
        model=model,
        candidate_version=f"int8-{number}",
        reference_digest="d" * 64,
        first_seen_us=first_seen_us,
    )


def run(begin_us: int, n: int, *, every_us: int = 10 * SECOND_US, flip: float = 0.0) -> list[EvidenceItem]:
    """Return exchanges of the slice from a time on."""
    return [
        EvidenceItem(
            captured_us=begin_us + number * every_us,
            exchange=f"{begin_us + number * every_us:032x}",
            group=f"{begin_us + number * every_us:032x}",
            slice_ids=(1, SLICE),
            pi=1.0,
            flip=flip if number % 3 == 0 else 0.0,
            divergence=0.0,
            margin=0.5,
            source="pod-1",
            batch_id=1,
        )
        for number in range(n)
    ]


class Record:
    """Answers as the record does, and counts how often it is asked."""

    def __init__(self, items: dict[int, list[EvidenceItem]]) -> None:
        self._items = items
        self.asked = 0

    async def items(
        self, *, version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> list[EvidenceItem]:
        """Return a window, newest first."""
        assert (slice_id, fold_seq) == (SLICE, 7)
        assert begin_us <= end_us
        self.asked += 1
        found = [one for one in self._items.get(version, ()) if begin_us <= one.captured_us < end_us]
        return found[::-1][:5000]

    async def last_compared(
        self, *, versions: Sequence[int], slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> int | None:
        """Return whose the newest item is."""
        windows = {
            number: await self.items(
                version=number, slice_id=slice_id, begin_us=begin_us, end_us=end_us, fold_seq=fold_seq
            )
            for number in versions
        }
        self.asked -= len(windows) - 1
        newest = {number: items[0].captured_us for number, items in windows.items() if items}
        return max(newest, key=lambda number: newest[number], default=None)


def held_against(
    items: dict[int, list[EvidenceItem]], *, own_us: int = BEGIN_US, earlier: tuple[VersionRow, ...] = ()
) -> BeforeWindow:
    """Return the window for an alert of `OWN`, a version first seen at `own_us`."""
    row = TransitionRow(
        model_version_id=OWN,
        slice_id=SLICE,
        from_verdict=Verdict.OK,
        to_verdict=Verdict.FIRING,
        at_us=ONSET_US + HOUR_US,
        fold_seq=7,
        episode=Episode.OPEN,
        metric=Metric.FLIP,
        onset_us=ONSET_US,
        reason="r",
    )
    versions = {one.id: one for one in (version(OWN, own_us), *earlier)}
    record = Record(items)
    found = asyncio.run(find_before_window(record, row, versions))
    assert record.asked <= 4
    return found


def test_the_last_hour_before_an_onset_is_left_out_where_there_is_enough_without_it() -> None:
    """What an onset that came late leaves in it is no before; all of it still tells what is new."""
    sound, late = run(ONSET_US - DAY_US, 2000), run(ONSET_US - HOUR_US, 300, flip=1.0)
    found = held_against({OWN: sound + late})
    assert found.words == "the week before the onset without its last hour"
    assert found.end_us == ONSET_US - GAP_US
    assert found.n == 2000
    assert list(found.past) == (sound + late)[::-1]
    after = WindowSample(run(ONSET_US, 40, flip=1.0))
    told = damage_between(WindowSample(found.items), after, FLIPS)
    assert told is not None
    assert told.cause == "damage"
    # Whoever holds it against what lies right before the onset finds nothing.
    whole_window = damage_between(WindowSample(late), after, FLIPS)
    assert whole_window is not None
    assert whole_window.cause == "undecided"


def test_of_a_short_past_the_newest_quarter_is_left_out() -> None:
    """An old version in a slice that is new: the older part of what there is."""
    items = run(ONSET_US - HOUR_US // 2, 160)
    found = held_against({OWN: items}, earlier=(version(OLD, BEGIN_US - DAY_US),))
    assert found.words == "the week before the onset without its newest quarter"
    assert found.items == tuple(items[:120][::-1])
    assert found.end_us == items[119].captured_us + 1
    assert found.version == OWN


def test_a_version_that_came_with_the_onset_is_compared_with_the_last_one_before() -> None:
    """Although it has a hundred of its own before an onset that was estimated late: they are as bad.

    Neither a later version counts nor another model's, and of two earlier ones it is the last that was compared.
    """
    came_us = ONSET_US - HOUR_US // 2
    items = {
        OWN: run(came_us, 170, flip=1.0),
        OLD: run(came_us - 2 * DAY_US, 500),
        OLDER: run(came_us - DAY_US, 500),
        OTHER: run(came_us - HOUR_US, 300),
        OTHER + 1: run(came_us - HOUR_US, 300),
    }
    earlier = (
        version(OLD, BEGIN_US),
        version(OLDER, BEGIN_US - DAY_US),
        version(OTHER, came_us + SECOND_US),
        version(OTHER + 1, BEGIN_US, model="text"),
    )
    found = held_against(items, own_us=came_us, earlier=earlier)
    assert found.version == OLDER
    assert found.words == f"version int8-{OLDER} in the week before this version came"
    assert found.n == 500
    times = [item.captured_us for item in found.past]
    assert times == sorted(times, reverse=True)
    assert len(times) == 670
    told = damage_between(WindowSample(found.items), WindowSample(run(ONSET_US, 40, flip=1.0)), FLIPS)
    assert told is not None
    assert told.cause == "damage"


def test_the_same_version_with_another_reference_is_named_with_it() -> None:
    """Else it would be held against itself by name."""
    came_us = ONSET_US - SECOND_US
    former = msgspec.structs.replace(version(OLD, BEGIN_US), candidate_version=f"int8-{OWN}")
    found = held_against({OLD: run(came_us - DAY_US, 500)}, own_us=came_us, earlier=(former,))
    assert found.version == OLD
    assert "with the reference dddddddddddd" in found.words


@pytest.mark.parametrize("n", [0, 8, 40])
def test_without_enough_anywhere_it_is_the_versions_own_past(n: int) -> None:
    """However little that is: the split says whether it is too little."""
    items = run(ONSET_US - HOUR_US // 2, n)
    own = held_against({OWN: items}, own_us=ONSET_US - HOUR_US // 2, earlier=(version(OLD, BEGIN_US),))
    assert (own.version, own.n) == (OWN, n)
    assert own.words == "the week before the onset"
    few = {OWN: items, OLD: run(ONSET_US - DAY_US, ENOUGH // 2)}
    other = held_against(few, own_us=ONSET_US - HOUR_US // 2, earlier=(version(OLD, BEGIN_US),))
    assert other.version == (OWN if n == 40 else OLD)
