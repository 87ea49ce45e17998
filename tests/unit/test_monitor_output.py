"""The monitor's gauges, and the events and webhooks that its outbox sends."""

from collections.abc import Iterable

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config
from quantdrift.core.config.web import Web
from quantdrift.core.links import alert_page
from quantdrift.core.records import Verdict
from quantdrift.core.telemetry import Instrument, Labels, Read, Telemetry
from quantdrift.facts.words.alert import text_of
from quantdrift.monitor.gauges import SliceGauges
from quantdrift.monitor.outbox import log_record
from quantdrift.storage.alerts.outbox import WaitingEvent
from quantdrift.storage.fold_rows import VerdictRow
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.fold_stream import ALL_ID, BEGIN, BEGIN_US, CATALOG, CLEAR_ID, FAINT_ID

pytestmark = pytest.mark.unit


class _Readings(Telemetry):
    """A meter that hands its callbacks out instead of exporting them."""

    def __init__(self) -> None:
        self.reads: dict[str, Read] = {}

    def observe(self, instrument: Instrument, read: Read) -> None:
        """Keep the callback."""
        self.reads[instrument.name] = read

    def of(self, name: str) -> list[tuple[float, Labels]]:
        """Return the readings of an instrument now."""
        found: Iterable[tuple[float, Labels]] = self.reads[name]()
        return list(found)


def verdict(slice_id: int, said: Verdict, evidence: float = 0.0) -> VerdictRow:
    """Return a verdict on version 1."""
    return VerdictRow(
        model_version_id=1,
        slice_id=slice_id,
        verdict=said,
        reason="",
        since_us=BEGIN_US,
        n_groups=100,
        evidence=evidence,
        threshold=10.0,
        estimate={"flip": {"budget": 0.01, "mean": 0.02}},
        last_us=BEGIN_US,
        updated_us=BEGIN_US,
        fold_seq=1,
    )


def test_the_worst_slices_are_exported_and_the_rest_is_counted() -> None:
    """Firing first, then by evidence; above max_slices nothing is exported but the number left out."""
    board, telemetry = SliceGauges(ManualClock(BEGIN), max_slices=2), _Readings()
    board.register(telemetry)
    board.leads = True
    rows = [
        verdict(ALL_ID, Verdict.OK, 0.1),
        verdict(FAINT_ID, Verdict.FIRING),
        verdict(CLEAR_ID, Verdict.UNKNOWN, 5.0),
    ]
    board.show(rows, CATALOG)
    assert [(value, labels["slice"]) for value, labels in telemetry.of("quantdrift.slice.verdict")] == [
        (3, "scanner=faint"),
        (1, "scanner=clear"),
    ]
    assert [value for value, _ in telemetry.of("quantdrift.slice.evidence")] == [0.0, 0.5]
    assert telemetry.of("quantdrift.slice.left_out") == [(1, {})]
    board.clear()
    assert telemetry.of("quantdrift.slice.verdict") == []


def test_a_monitor_that_hangs_shows_neither_the_lead_nor_what_it_knew() -> None:
    """Another one leads by then: an old verdict would keep an alert open, and a lead would hide that nobody leads."""
    hangs = False
    board, telemetry = SliceGauges(ManualClock(BEGIN), max_slices=2, hangs=lambda: hangs), _Readings()
    board.register(telemetry)
    board.leads = True
    board.show([verdict(ALL_ID, Verdict.FIRING)], CATALOG)
    hangs = True
    for name in ("slice.verdict", "slice.evidence", "progress.age", "monitor.outbox.age"):
        assert telemetry.of(f"quantdrift.{name}") == []
    assert telemetry.of("quantdrift.monitor.leader") == [(0, {})]
    hangs = False
    assert [value for value, _ in telemetry.of("quantdrift.slice.verdict")] == [3]


def test_a_version_measured_against_two_references_is_one_series() -> None:
    """Two rows with the same labels would hide one another: the worse one is shown, and once."""
    twin = msgspec.structs.replace(CATALOG.versions[1], id=7, reference_digest="e" * 64)
    catalog = msgspec.structs.replace(CATALOG, versions={**CATALOG.versions, 7: twin})
    board, telemetry = SliceGauges(ManualClock(BEGIN), max_slices=9), _Readings()
    board.register(telemetry)
    board.leads = True
    other = msgspec.structs.replace(verdict(ALL_ID, Verdict.OK, 0.5), model_version_id=7)
    board.show([verdict(ALL_ID, Verdict.FIRING), other], catalog)
    assert [value for value, _ in telemetry.of("quantdrift.slice.verdict")] == [3]
    assert telemetry.of("quantdrift.slice.left_out") == [(0, {})]


def test_the_heartbeat_is_the_age_of_the_last_folded_capture() -> None:
    """It grows while nothing is folded, whether or not the process lives."""
    clock = ManualClock(BEGIN)
    board, telemetry = SliceGauges(clock, max_slices=2), _Readings()
    board.register(telemetry)
    board.show([verdict(ALL_ID, Verdict.OK)], CATALOG)
    clock.advance(90)
    assert telemetry.of("quantdrift.progress.age") == [(90.0, {"model": "digits"})]


def test_an_event_has_a_fixed_name_flat_attributes_and_a_severity() -> None:
    """ERROR pages, WARN is a ticket, INFO the end; the text is for display only."""
    story = event_with(
        measure="flip",
        mean=0.05,
        low=0.03,
        high=0.08,
        after=0.06,
        n_since_onset=120,
        onset="2026-03-01T12:00:00+00:00",
        examples=["0" * 32],
    )
    for said, number in ((Verdict.FIRING, 17), (Verdict.WARNING, 13), (Verdict.OK, 9)):
        event = WaitingEvent(
            id=1,
            attempts=0,
            at_us=BEGIN_US,
            from_verdict=Verdict.OK,
            to_verdict=said,
            details=story.attributes(),
            text=text_of(story),
        )
        record = log_record(event)
        assert record.severity_number is not None
        assert record.severity_number.value == number
        assert record.event_name == "quantdrift.slice.transition"
        assert record.timestamp == BEGIN_US * 1000
        assert record.attributes is not None
        assert record.attributes["quantdrift.slice"] == "scanner=faint"
        assert all(name.startswith("quantdrift.") for name in record.attributes)
        assert "aggregate_mean" not in str(list(record.attributes))
    assert isinstance(record.body, str)
    assert record.body.startswith("digits 1: 6 % of answers in scanner=faint changed (budget: 1 %).\n")
    assert record.observed_timestamp is not None
    assert record.timestamp is not None
    assert record.observed_timestamp > record.timestamp  # when it is sent, beside when it happened


def test_an_event_has_a_link_to_its_alert_where_the_page_has_an_address() -> None:
    """Attributes to route by, and the last line of the text; without `web.url` there is the number alone."""
    event = WaitingEvent(
        id=1,
        attempts=0,
        at_us=BEGIN_US,
        from_verdict=Verdict.OK,
        to_verdict=Verdict.FIRING,
        details=event_with().attributes(),
        alert_id=12,
    )
    url = alert_page(Config(web=Web(url="https://drift.example.com/")), 12)
    linked, plain = log_record(event, url), log_record(event, alert_page(Config(), 12))
    assert linked.attributes is not None
    assert plain.attributes is not None
    assert linked.attributes["quantdrift.url"] == "https://drift.example.com/alert/12"
    assert linked.attributes["quantdrift.alert_id"] == plain.attributes["quantdrift.alert_id"] == 12
    assert isinstance(plain.body, str)
    assert linked.body == plain.body + "\nLive page: https://drift.example.com/alert/12"
    assert "quantdrift.url" not in plain.attributes
