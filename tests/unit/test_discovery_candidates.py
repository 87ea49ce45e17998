"""Candidates for discovered slices: tested, confirmed, expired and retired, from rows and times alone."""

from datetime import datetime, timedelta

import msgspec
import pytest

from quantdrift.core.config.schema import Budget
from quantdrift.core.records import Metric, Predicate
from quantdrift.core.slices import SliceKey, slice_of
from quantdrift.drift.discovery.items import Gathering, SearchItems
from quantdrift.drift.discovery.search import FoundSlice
from quantdrift.monitor.discovery.candidates import EXPIRE_DAYS, decide, new_candidate, origins, with_traffic
from quantdrift.monitor.discovery.limits import DiscoveryLimits
from quantdrift.storage.fold_rows import ComparisonRow, to_us
from quantdrift.storage.schema.slice_tables import DiscoveryStatus
from quantdrift.storage.slices.discovery import DiscoveryRow, SearchedVersion
from tests.support.storage.discovered_traffic import DAY, FAINT, NOW, POLICY, discovery

pytestmark = pytest.mark.unit

LIMITS = DiscoveryLimits()
HOUR = timedelta(hours=1)
SESSION_US = 1_800_000_000


def item(at: datetime, key: str = "", *, flip: float | None = 1.0, group: str = "") -> ComparisonRow:
    """Return an item of the first candidate, captured at `at`."""
    return ComparisonRow(
        exchange_id=key or at.isoformat(),
        item=0,
        captured_us=to_us(at),
        model_version_id=1,
        policy_id=1,
        slice_ids=(0,),
        group_key=group,
        pi1=1.0,
        pi2=1.0,
        u1=0.5,
        u2=0.5,
        candidate_margin=None,
        flip=flip,
        topk=None,
        js=None,
        divergence=None,
        margin=None,
    )


def after(rows: list[ComparisonRow], row: DiscoveryRow | None = None, *, hours: int = 4) -> DiscoveryRow:
    """Test one candidate on rows."""
    (done,), n_unknown = with_traffic(
        [row or discovery()], rows, {1: POLICY}, Budget(), session_us=SESSION_US, until=NOW + hours * HOUR
    )
    assert n_unknown == 0
    return done


def test_only_what_was_captured_after_the_freezing_counts() -> None:
    """Flips before it say nothing, whatever they are; the place moves on to the end of what was read."""
    before = [item(NOW - HOUR + timedelta(seconds=index)) for index in range(50)]
    assert after(before).n_groups == 0
    assert after(before).log_evidence == 0.0
    assert after(before).tested_at == NOW + 4 * HOUR
    later = [item(NOW + timedelta(seconds=index)) for index in range(5)]
    assert after(before + later).n_groups == 5
    assert after(before + later) == after(later)


def test_tests_go_on_where_they_stopped() -> None:
    """Two rounds over halves give what one round over all gives."""
    rows = [item(NOW + timedelta(minutes=10 * index), flip=float(index % 3 == 0)) for index in range(24)]
    halfway = after(rows[:12], hours=2)
    assert after(rows[12:], halfway) == after(rows)
    assert after(rows, halfway) == after(rows), "what was tested must not count again"


def test_an_item_whose_policy_nobody_knows_is_left_out_and_counted() -> None:
    """What retention took of the policies ends no round; the other items count as if it were not there."""
    rows = [item(NOW + timedelta(seconds=index)) for index in range(6)]
    strange = [msgspec.structs.replace(row, policy_id=2) for row in rows[:2]]
    (done,), n_unknown = with_traffic(
        [discovery()],
        [*strange, *rows[2:]],
        {1: POLICY},
        Budget(),
        session_us=SESSION_US,
        until=NOW + 4 * HOUR,
    )
    assert n_unknown == 2
    assert done == after(rows[2:])


def test_a_session_is_one_observation_and_no_value_is_none() -> None:
    """Ten exchanges of one user within a session count once; what has no flip does not count."""
    one_user = [item(NOW + timedelta(seconds=index), str(index), group="user") for index in range(10)]
    assert after(one_user).n_groups == 1
    assert after([item(NOW + HOUR, flip=None)]).n_groups == 0
    far_apart = [item(NOW, "a", group="user"), item(NOW + HOUR, "b", group="user")]
    assert after(far_apart).n_groups == 2


def test_another_cap_of_the_model_does_not_change_what_is_tested() -> None:
    """Frozen as "the mean KL is above 0.1", under a cap of 5: 0.05 nats is no evidence, whatever the cap is now."""
    row = discovery(metric=Metric.DIVERGENCE, null_mean=0.1, scale=5.0)
    rows = [
        msgspec.structs.replace(item(NOW + timedelta(seconds=index), flip=None), divergence=0.05)
        for index in range(2000)
    ]
    now = [Budget(cap=cap) for cap in (0.5, 5.0)]
    ends = [
        with_traffic([row], rows, {1: POLICY}, one, session_us=SESSION_US, until=NOW + HOUR)[0][0]
        for one in now
    ]
    assert ends[0] == ends[1]
    assert ends[0].n_groups == 2000
    assert ends[0].log_evidence == 0.0


def test_enough_evidence_confirms_and_stays_confirmed() -> None:
    """Flips all the time against a null of 2 % are soon shown; a later clean stretch takes nothing back."""
    row = after([item(NOW + timedelta(seconds=index)) for index in range(30)])
    assert row.log_evidence > row.log_threshold
    clean = after([item(NOW + 5 * HOUR + timedelta(seconds=i), flip=0.0) for i in range(500)], row, hours=8)
    assert clean.log_evidence == row.log_evidence
    assert max(clean.log_wealth) < max(row.log_wealth)
    (done,), waiting = decide([clean], {}, NOW + DAY, LIMITS)
    assert done.row.status is DiscoveryStatus.CONFIRMED
    assert done.row.confirmed_at == NOW + DAY
    assert "530 exchanges" in done.reason
    assert waiting == {}


def stands(
    row: DiscoveryRow, at: datetime, retiring: dict[int, str] | None = None
) -> tuple[DiscoveryStatus, str]:
    """Return what becomes of one discovery, and why."""
    (done,), _ = decide([row], retiring or {}, at, LIMITS)
    return done.row.status, done.reason


def test_candidates_expire_and_what_is_retired_says_why() -> None:
    """At `EXPIRE_DAYS` without confirmation, not an hour before; a slice is retired for the reason given."""
    days = timedelta(days=EXPIRE_DAYS)
    assert stands(discovery(), NOW + days - HOUR) == (DiscoveryStatus.CANDIDATE, "")
    assert stands(discovery(), NOW + days) == (DiscoveryStatus.EXPIRED, "not confirmed within 14 days")
    assert stands(discovery(log_evidence=9.0), NOW + days)[0] is DiscoveryStatus.CONFIRMED
    watched = discovery(status=DiscoveryStatus.CONFIRMED, confirmed_at=NOW, seen_at=NOW + DAY)
    assert stands(watched, NOW + DAY, {1: ""}) == (DiscoveryStatus.CONFIRMED, "")
    assert stands(watched, NOW + DAY, {1: "quiet"}) == (DiscoveryStatus.RETIRED, "quiet")
    assert stands(discovery(), NOW + DAY, {1: "quiet"}) == (DiscoveryStatus.CANDIDATE, "")


def test_the_strongest_get_the_places_and_the_rest_wait_for_so_long() -> None:
    """Per model; what waits stays a candidate, past its own time for it has been shown, and then expires."""
    rows = [discovery(id=n, predicate=str(n), log_evidence=7.0 + n) for n in range(1, 5)]
    rows += [discovery(id=9, model="other", log_evidence=8.0)]
    limits, begin = DiscoveryLimits(most_slices=2), NOW + timedelta(days=99)
    done, waiting = decide(rows, {}, begin, limits)
    assert [one.row.status for one in done] == [DiscoveryStatus.CANDIDATE] * 2 + [
        DiscoveryStatus.CONFIRMED
    ] * 3
    assert [one.row.waits_since for one in done] == [begin, begin, None, None, None]
    assert waiting == {"digits": 2}
    days = timedelta(days=EXPIRE_DAYS)
    later, waiting = decide([one.row for one in done], {}, begin + days - HOUR, limits)
    assert [one.row.waits_since for one in later[:2]] == [begin, begin], "it does not begin to wait anew"
    assert waiting == {"digits": 2}
    over, waiting = decide([one.row for one in later], {}, begin + days, limits)
    assert [one.row.status for one in over[:2]] == [DiscoveryStatus.EXPIRED] * 2
    assert {one.reason for one in over[:2]} == {
        "no place among the 2 monitored slices became free within 14 days"
    }
    assert waiting == {}


def test_who_waits_takes_the_place_of_what_is_retired() -> None:
    """In the same round, the strongest of those that wait."""
    there = discovery(id=1, status=DiscoveryStatus.CONFIRMED, confirmed_at=NOW, seen_at=NOW)
    wait = [discovery(id=n, predicate=str(n), log_evidence=7.0 + n, waits_since=NOW) for n in (2, 3)]
    done, waiting = decide([there, *wait], {1: "quiet"}, NOW + DAY, DiscoveryLimits(most_slices=1))
    assert [one.row.status for one in done] == [
        DiscoveryStatus.RETIRED,
        DiscoveryStatus.CANDIDATE,
        DiscoveryStatus.CONFIRMED,
    ]
    assert done[2].row.waits_since is None
    assert waiting == {"digits": 1}


def traffic() -> SearchItems:
    """Return 1,000 items: a tenth is faint, contrast rises from 0 to 1."""
    gathering = Gathering()
    for index in range(1000):
        scanner = "faint" if index % 10 == 0 else "clean"
        features = {"feature.contrast": index / 1000}
        gathering.add(str(index), 1.0, {"header.x-scanner": scanner}, features, {Metric.FLIP: 0.0})
    return gathering.items()


def found(*where: Predicate) -> FoundSlice:
    """Return a finding."""
    return FoundSlice(
        where=where,
        metric=Metric.DIVERGENCE,
        mean=0.1,
        low=0.05,
        overall=0.01,
        bound=0.02,
        share=0.1,
        n_items=100,
        score=3.0,
    )


def test_what_is_a_slice_already_is_not_tested_again() -> None:
    """Whether declared, under test or confirmed, also where its bin has moved a little; `(other)` is no such slice."""
    bin_of_today = Predicate(key="feature.contrast", high=0.305)
    declared = slice_of("digits", [Predicate(key="feature.contrast", high=0.3)])
    other = SliceKey(
        model="digits",
        name="scanner=(other)",
        predicate="header.x-scanner is any other",
        where=(Predicate(key="header.x-scanner"),),
    )
    items = traffic()
    (bins, faint) = origins("digits", [found(bin_of_today), found(FAINT)], items, [declared, other], [])
    assert bins.watched
    assert bins.key == declared
    assert not faint.watched
    for status in (DiscoveryStatus.CANDIDATE, DiscoveryStatus.CONFIRMED):
        (same,) = origins("digits", [found(FAINT)], items, [], [discovery(status=status)])
        assert same.watched


def test_what_a_person_retired_is_not_tested_again_and_what_went_quiet_is() -> None:
    """A decision holds until it is taken back."""
    for held in (False, True):
        (origin,) = origins(
            "digits", [found(FAINT)], traffic(), [], [discovery(status=DiscoveryStatus.RETIRED, held=held)]
        )
        assert origin.watched is held


@pytest.mark.parametrize("status", [DiscoveryStatus.EXPIRED, DiscoveryStatus.RETIRED])
def test_what_has_ended_is_tested_again_under_its_own_name(status: DiscoveryStatus) -> None:
    """Its id, its slice and its first finding stay; everything that was tested is forgotten."""
    old = Predicate(key="feature.contrast", high=0.3)
    key = slice_of("digits", [old])
    expired = discovery(
        id=7,
        predicate=key.predicate,
        name=key.name,
        where=key.where,
        status=status,
        slice_id=4,
        n_groups=99,
        log_evidence=3.0,
    )
    moved = found(Predicate(key="feature.contrast", high=0.305))
    (origin,) = origins("digits", [moved], traffic(), [], [expired])
    assert not origin.watched
    version = SearchedVersion(id=2, model="digits", candidate_version="int8-8")
    again = new_candidate(
        origin, version, Budget(), threshold=100.0, now=NOW + DAY, frozen_at=NOW + DAY + HOUR
    )
    assert (again.id, again.slice_id, again.predicate) == (7, 4, key.predicate)
    assert again.first_found_at == NOW
    assert again.n_found == 2
    assert (again.n_groups, again.log_evidence, set(again.log_wealth)) == (0, 0.0, {0.0})
    assert again.tested_at == again.frozen_at == NOW + DAY + HOUR
    assert again.null_mean == 0.02 * Budget().cap, "stored in the metric's own unit"
