"""What becomes of discovered slices: decided from rows and times alone."""

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Discovery
from quantdrift.core.predicates import slice_of
from quantdrift.core.records import Metric, Predicate
from quantdrift.core.slices import SliceKey
from quantdrift.drift.confirmation import N_BETS
from quantdrift.drift.discovery import Found
from quantdrift.drift.items import Gathering, Items
from quantdrift.monitor.candidates import UNSEEN, frozen, origins, settled, with_traffic
from storage.discoveries import Status
from storage.discovery import DiscoveryRow, SearchedVersion
from storage.fold_rows import ComparisonRow, to_us
from tests.discovered_traffic import DAY, NOW, POLICY

pytestmark = pytest.mark.unit

FAINT = Predicate(key="header.x-scanner", equals="faint")
LIMITS = Discovery()
HOUR = timedelta(hours=1)
SESSION_US = 1_800_000_000


def discovery(**changes: Any) -> DiscoveryRow:
    """Return a candidate that was frozen at `NOW`."""
    row = DiscoveryRow(
        id=1,
        model="digits",
        predicate='header.x-scanner = "faint"',
        name="x-scanner=faint",
        where=(FAINT,),
        status=Status.CANDIDATE,
        model_version_id=1,
        metric=Metric.FLIP,
        found_mean=0.1,
        overall_mean=0.01,
        found_share=0.1,
        null_mean=0.02,
        scale=1.0,
        log_threshold=7.0,
        log_wealth=(0.0,) * N_BETS,
        first_found_at=NOW,
        frozen_at=NOW,
        tested_at=NOW,
    )
    return msgspec.structs.replace(row, **changes)


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
        kl=None,
        margin=None,
    )


def after(rows: list[ComparisonRow], row: DiscoveryRow | None = None, *, hours: int = 4) -> DiscoveryRow:
    """Test one candidate on rows."""
    (done,) = with_traffic(
        [row or discovery()], rows, {1: POLICY}, Budget(), session_us=SESSION_US, until=NOW + hours * HOUR
    )
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


def test_a_session_is_one_observation_and_no_value_is_none() -> None:
    """Ten exchanges of one user within a session count once; what has no flip does not count."""
    one_user = [item(NOW + timedelta(seconds=index), str(index), group="user") for index in range(10)]
    assert after(one_user).n_groups == 1
    assert after([item(NOW + HOUR, flip=None)]).n_groups == 0
    far_apart = [item(NOW, "a", group="user"), item(NOW + HOUR, "b", group="user")]
    assert after(far_apart).n_groups == 2


def test_another_cap_of_the_model_does_not_change_what_is_tested() -> None:
    """Frozen as "the mean KL is above 0.1", under a cap of 5: 0.05 nats is no evidence, whatever the cap is now."""
    row = discovery(metric=Metric.KL, null_mean=0.1, scale=5.0)
    rows = [
        msgspec.structs.replace(item(NOW + timedelta(seconds=index), flip=None), kl=0.05)
        for index in range(2000)
    ]
    now = [Budget(kl_cap=cap) for cap in (0.5, 5.0)]
    ends = [
        with_traffic([row], rows, {1: POLICY}, one, session_us=SESSION_US, until=NOW + HOUR)[0] for one in now
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
    (done,), waiting = settled([clean], NOW + DAY, LIMITS)
    assert done.status is Status.CONFIRMED
    assert done.confirmed_at == NOW + DAY
    assert waiting == {}


def test_candidates_expire_and_what_is_unseen_too() -> None:
    """At `expire_days` without confirmation, and 30 days after the last traffic; not a day before."""
    days = timedelta(days=LIMITS.expire_days)
    assert settled([discovery()], NOW + days - HOUR, LIMITS)[0][0].status is Status.CANDIDATE
    assert settled([discovery()], NOW + days, LIMITS)[0][0].status is Status.EXPIRED
    proven = discovery(log_evidence=9.0)
    assert settled([proven], NOW + days, LIMITS)[0][0].status is Status.CONFIRMED
    watched = discovery(status=Status.CONFIRMED, confirmed_at=NOW, seen_at=NOW + DAY)
    assert settled([watched], NOW + UNSEEN, LIMITS)[0][0].status is Status.CONFIRMED
    assert settled([watched], NOW + UNSEEN + DAY, LIMITS)[0][0].status is Status.EXPIRED


def test_the_strongest_get_the_places_and_the_rest_wait() -> None:
    """Per model; what waits stays a candidate and does not expire, for it has been confirmed."""
    rows = [discovery(id=n, predicate=str(n), log_evidence=7.0 + n) for n in range(1, 5)]
    rows += [discovery(id=9, model="other", log_evidence=8.0)]
    limits = Discovery(most_slices=2)
    done, waiting = settled(rows, NOW + timedelta(days=99), limits)
    assert [row.status for row in done] == [
        Status.CANDIDATE,
        Status.CANDIDATE,
        Status.CONFIRMED,
        Status.CONFIRMED,
        Status.CONFIRMED,
    ]
    assert waiting == {"digits": 2}


def traffic() -> Items:
    """Return 1,000 items: a tenth is faint, contrast rises from 0 to 1."""
    gathering = Gathering()
    for index in range(1000):
        scanner = "faint" if index % 10 == 0 else "clean"
        features = {"feature.contrast": index / 1000}
        gathering.add(str(index), 1.0, {"header.x-scanner": scanner}, features, {Metric.FLIP: 0.0})
    return gathering.items()


def found(*where: Predicate) -> Found:
    """Return a finding."""
    return Found(
        where=where,
        metric=Metric.KL,
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
    for status in (Status.CANDIDATE, Status.CONFIRMED):
        (same,) = origins("digits", [found(FAINT)], items, [], [discovery(status=status)])
        assert same.watched


def test_what_has_expired_is_tested_again_under_its_own_name() -> None:
    """Its id, its slice and its first finding stay; everything that was tested is forgotten."""
    old = Predicate(key="feature.contrast", high=0.3)
    key = slice_of("digits", [old])
    expired = discovery(
        id=7,
        predicate=key.predicate,
        name=key.name,
        where=key.where,
        status=Status.EXPIRED,
        slice_id=4,
        n_groups=99,
        log_evidence=3.0,
    )
    moved = found(Predicate(key="feature.contrast", high=0.305))
    (origin,) = origins("digits", [moved], traffic(), [], [expired])
    assert not origin.watched
    version = SearchedVersion(id=2, model="digits", candidate_version="int8-8")
    again = frozen(origin, version, Budget(), threshold=100.0, now=NOW + DAY, frozen_at=NOW + DAY + HOUR)
    assert (again.id, again.slice_id, again.predicate) == (7, 4, key.predicate)
    assert again.first_found_at == NOW
    assert again.n_found == 2
    assert (again.n_groups, again.log_evidence, set(again.log_wealth)) == (0, 0.0, {0.0})
    assert again.tested_at == again.frozen_at == NOW + DAY + HOUR
    assert again.null_mean == 0.02 * Budget().kl_cap, "stored in the metric's own unit"
