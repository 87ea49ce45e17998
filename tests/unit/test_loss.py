"""Losses, per header stratum and per slice."""

import pytest

from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import reachable_strata
from quantdrift.monitor.fold.loss import RECENT_US, SILENT_US, LossCounts, RecentCounts
from quantdrift.storage.fold_rows import ExpiryRow, TallyRow
from tests.support.monitor.fold_stream import BEGIN_US, POLICY, SECOND_US

pytestmark = pytest.mark.unit


def test_counts_of_the_recent_hour_come_from_cumulative_tallies() -> None:
    """Lost and repeated tallies cost nothing, a new start counts from zero, and an hour later all is forgotten."""

    def tally(sequence: int, taken: int, lost: int, boot: str = "a", at_s: int = 0) -> TallyRow:
        return TallyRow(
            source="pod",
            boot=boot,
            stratum="faint",
            sequence=sequence,
            at_us=BEGIN_US + at_s * SECOND_US,
            offered=2 * taken,
            taken=taken,
            lost=lost,
        )

    ledger = LossCounts([tally(1, 100, 1)])
    ledger.add(tally(5, 160, 4))
    ledger.add(tally(4, 150, 4))
    ledger.add(tally(1, 7, 2, boot="b", at_s=60))
    assert ledger.recent(["faint", "other"], "digits") == RecentCounts(offered=134, taken=67, lost=5)
    ledger.forget(BEGIN_US + RECENT_US)
    assert ledger.recent(["faint"], "digits") == RecentCounts(offered=14, taken=7, lost=2)


def test_losses_of_one_model_do_not_count_for_another() -> None:
    """What names no model may be of any that its sidecar captures, and of no other; a tally without names is anybody's."""

    def tally(sequence: int, **models: tuple[int, int]) -> TallyRow:
        return TallyRow(
            source="pod",
            boot="a",
            stratum="default",
            sequence=sequence,
            at_us=BEGIN_US,
            offered=100 * sequence,
            taken=10 * sequence,
            lost=5 * sequence,
            models=models,
        )

    ledger = LossCounts([tally(1)])
    ledger.add(tally(3, bad=(8, 8), good=(10, 0)))
    assert ledger.recent(["default"], "bad") == RecentCounts(offered=200, taken=10, lost=10)
    assert ledger.recent(["default"], "good") == RecentCounts(offered=200, taken=12, lost=2)
    assert ledger.recent(["default"], "new") == RecentCounts(offered=0, taken=0, lost=0)
    ledger.add(tally(4, bad=(8, 8), good=(10, 0), new=(0, 0)))
    assert ledger.recent(["default"], "new") == RecentCounts(offered=100, taken=10, lost=5)
    assert ledger.recent(["default"], "good") == RecentCounts(offered=300, taken=22, lost=7)
    ledger.forget(BEGIN_US + RECENT_US)
    assert ledger.recent(["default"], "bad") == RecentCounts(offered=0, taken=0, lost=0)


def test_what_was_named_where_it_is_not_configured_counts_once_the_model_is_known() -> None:
    """Only what came wholly after the first comparison; a capture process that starts again counts from zero."""

    def tally(sequence: int, at_s: int, unknown: int, **models: tuple[int, int]) -> TallyRow:
        return TallyRow(
            source="pod",
            boot="a",
            stratum="default",
            sequence=sequence,
            at_us=BEGIN_US + at_s * SECOND_US,
            offered=0,
            taken=sum(taken for taken, _ in models.values()),
            lost=0,
            models=models,
            unknown={"credit": unknown},
        )

    ledger = LossCounts()
    ledger.add(tally(1, 0, 100))
    ledger.add(tally(2, 10, 300))
    ledger.add(tally(3, 20, 400, credit=(50, 0)))  # corrected in this time
    ledger.add(tally(4, 30, 400, credit=(90, 0)))
    known_us = BEGIN_US + 15 * SECOND_US
    assert ledger.recent(["default"], "credit", known_us) == RecentCounts(offered=0, taken=90, lost=0)
    assert ledger.recent(["default"], "credit") == RecentCounts(offered=0, taken=90, lost=0)
    ledger.add(tally(5, 40, 430, credit=(90, 0)))  # another sidecar's configuration would do the same
    ledger.add(tally(6, 50, 7, credit=(90, 0)))
    assert ledger.recent(["default"], "credit", known_us) == RecentCounts(offered=0, taken=127, lost=37)
    assert ledger.recent(["faint"], "credit", known_us) == RecentCounts(offered=0, taken=0, lost=0)
    ledger.forget(BEGIN_US + 40 * SECOND_US + RECENT_US)
    assert ledger.recent(["default"], "credit", known_us) == RecentCounts(offered=0, taken=7, lost=7)


def test_the_strata_of_a_slice_are_those_its_items_may_fall_into() -> None:
    """Strata that contradict the slice are passed over; the walk ends where one takes it whole."""
    faint, clear = (Predicate(key="header.x-scanner", equals=value) for value in ("faint", "clear"))
    assert [one.name for one in reachable_strata((faint,), POLICY)] == ["faint"]
    assert [one.name for one in reachable_strata((clear,), POLICY)] == ["default"]
    assert [one.name for one in reachable_strata((), POLICY)] == ["faint", "default"]
    by_path = Policy(
        epoch="e",
        header_strata=(
            HeaderStratum(name="v2", rate=0.5, path_prefix="/v2"),
            *POLICY.header_strata,
        ),
        body_strata=(),
    )
    assert [one.name for one in reachable_strata((faint,), by_path)] == ["v2", "faint"]


def test_what_expired_counts_for_its_model_and_stratum_for_an_hour() -> None:
    """What a worker was done with after all is taken off again, and leaves nothing below zero."""

    def expiry(n: int, at_s: int = 0, stratum: str = "default", model: str = "slow") -> ExpiryRow:
        return ExpiryRow(stratum=stratum, model=model, n=n, at_us=BEGIN_US + at_s * SECOND_US)

    ledger = LossCounts(expiries=[expiry(10)])
    ledger.expire(expiry(-3, at_s=60))
    ledger.expire(expiry(2, stratum="faint"))
    assert ledger.recent(["default"], "slow") == RecentCounts(offered=0, taken=0, lost=0, expired=7)
    assert ledger.recent(["default", "faint"], "slow").expired == 9
    assert ledger.recent(["default", "faint"], "calm").expired == 0
    ledger.forget(BEGIN_US + RECENT_US)
    assert ledger.recent(["default"], "slow").expired == 0


def test_what_a_sidecar_had_that_ended_without_its_last_counts_is_unaccounted_for_an_hour() -> None:
    """Until it is silent for long nothing is said of it; a later tally, or the last one, clears it; the order is no matter."""

    def tally(sequence: int, boot: str, at_us: int, *, final: bool = False) -> TallyRow:
        return TallyRow(
            source="pod",
            boot=boot,
            stratum="default",
            sequence=sequence,
            at_us=at_us,
            offered=100,
            taken=50,
            lost=0,
            models={"digits": (40, 0)},
            final=final,
            open={"digits": 7, "other": 3, "": 2},
        )

    def unaccounted(counts: LossCounts, at_us: int, model: str = "digits") -> int:
        counts.forget(at_us)
        assert counts.recent(["faint"], model).unaccounted == 0
        return counts.recent(["default"], model).unaccounted

    rows = [tally(1, "gone", BEGIN_US), tally(1, "ends", BEGIN_US), tally(2, "ends", BEGIN_US, final=True)]
    silent_us, over_us = BEGIN_US + SILENT_US, BEGIN_US + SILENT_US + RECENT_US
    for counts in (LossCounts(tallies=rows), LossCounts(rows), LossCounts(tallies=reversed(rows))):
        assert unaccounted(counts, silent_us - 1) == 0
        assert unaccounted(counts, silent_us) == 9
        assert unaccounted(counts, silent_us, "other") == 3
        assert unaccounted(counts, over_us - 1) == 9
        assert counts.recent(["default"], "digits").missing == 9
        assert unaccounted(counts, over_us) == 0
    counts = LossCounts(tallies=rows)
    assert unaccounted(counts, silent_us) == 9
    counts.add(tally(2, "gone", silent_us + 1))
    assert unaccounted(counts, silent_us + 1) == 0
    assert unaccounted(counts, silent_us + 1 + SILENT_US) == 9
