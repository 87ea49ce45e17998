"""The findings of the weekly report."""

from datetime import datetime, timedelta

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Config, Model
from quantdrift.core.config.web import Web
from quantdrift.core.records import Metric, Verdict
from quantdrift.facts.estimate import ClusterSums
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.words.alert import text_of
from quantdrift.facts.words.ending import AFTER
from quantdrift.report.figures import EpisodeFigures, Gap
from quantdrift.report.finding import EpisodeFacts, PeriodFacts, episodes, gaps, grouped, models
from quantdrift.storage.alerts.alerts import AlertFact
from quantdrift.storage.figures.estimates import Sums
from quantdrift.storage.figures.figures import frozen
from quantdrift.storage.figures.periods import SliceSums
from quantdrift.storage.slices.verdicts import SliceName, VerdictFact
from quantdrift.storage.versions import Version
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.report_figures import NOW, make_episode

pytestmark = pytest.mark.unit

CONFIG = Config(models=(Model(name="digits", budget=Budget(flip=0.02, divergence=0.05)),))
SLICES = {
    1: SliceName(id=1, model="digits", name="all", predicate="true"),
    2: SliceName(id=2, model="digits", name="scanner=faint", predicate="p2"),
    3: SliceName(id=3, model="digits", name="scanner=gain", predicate="p3"),
}
WIDTH = timedelta(minutes=5)


def _version(digest: str = "5f") -> Version:
    return Version(id=1, model="digits", candidate_version="7", reference_digest=digest, first_seen_at=NOW)


def _sums(n: int, flips: float = 0.0, divergence: float = 0.0) -> Sums:
    weight = 10.0 * n
    of = {
        name: ClusterSums(
            n=n, weight=weight, weight_sq=100.0 * n, total=10 * total, total_sq=100 * total, cross=100 * total
        )
        for name, total in (("flip", flips), ("divergence", divergence))
    }
    return Sums(n_items=n, n_groups=n, weight=weight, weight_sq=100.0 * n, items=weight, of=of)


def _said(slice_id: int, verdict: Verdict, **budgets: float) -> VerdictFact:
    return VerdictFact(
        version_id=1,
        slice_id=slice_id,
        verdict=verdict,
        reason="why",
        since=NOW,
        budgets={Metric(name): budget for name, budget in budgets.items()},
    )


def _facts(*said: VerdictFact, digest: str = "5f", told: tuple[EpisodeFacts, ...] = ()) -> PeriodFacts:
    return PeriodFacts(
        begin=NOW - timedelta(days=7),
        end=NOW,
        versions=(_version(digest),),
        slices=SLICES,
        totals={(1, 1): _sums(5000, 20), (1, 2): _sums(500, 15)},
        bins={},
        verdicts={(1, fact.slice_id): fact for fact in said},
        episodes=told,
    )


def _alert(metric: Metric = Metric.DIVERGENCE, event: AlertEvent | None = None) -> EpisodeFacts:
    alert = AlertFact(
        id=1,
        version_id=1,
        model="digits",
        version="7",
        slice="scanner=faint",
        slice_id=2,
        severity="firing",
        metric=metric.value,
        onset_at=NOW,
        opened_at=NOW,
        written_at=NOW,
        resolved_at=None,
        details=event.attributes() if event else {},
        text=text_of(event) if event else None,
        acknowledged=None,
        escalations=0,
    )
    return EpisodeFacts(alert=alert, figures=frozen(event, NOW), examples=())


def _over(entry: EpisodeFacts, ended: str = "") -> EpisodeFacts:
    alert = msgspec.structs.replace(entry.alert, resolved_at=NOW, ended=ended)
    return msgspec.structs.replace(entry, alert=alert)


def _points(*at: datetime, n: int = 100) -> list[SliceSums]:
    return [SliceSums(version_id=1, slice_id=1, at=moment, sums=_sums(n)) for moment in at]


def test_the_worst_come_first() -> None:
    """Firing before warning before the rest, and among these the surest breach of a budget."""
    (model,) = models(CONFIG, _facts(_said(2, Verdict.OK), _said(3, Verdict.WARNING)))
    assert [entry.name for entry in model.slices] == ["scanner=gain", "scanner=faint"]
    assert model.status is Verdict.WARNING


def test_without_a_reference_nothing_is_healthy() -> None:
    """Whatever the table of verdicts says, a version without a reference is unknown in every slice."""
    (model,) = models(CONFIG, _facts(_said(1, Verdict.OK), _said(2, Verdict.OK), digest=""))
    assert model.status is Verdict.UNKNOWN
    assert {entry.verdict for entry in model.slices} == {Verdict.UNKNOWN}
    assert model.slices[0].reason == "this version has no reference"


def test_a_slice_that_went_silent_is_unknown() -> None:
    """It was ok once and nothing of it was compared in the period: that is not ok."""
    (model,) = models(CONFIG, _facts(_said(1, Verdict.OK), _said(3, Verdict.OK)))
    silent = next(entry for entry in model.slices if entry.name == "scanner=gain")
    assert (silent.verdict, silent.reason) == (Verdict.UNKNOWN, "nothing was compared in this period")
    assert model.n_unknown == 2  # the other one has no verdict yet


def test_the_monitors_budget_goes_before_the_configured_one() -> None:
    """What was judged against is shown, not what the file says today."""
    (model,) = models(CONFIG, _facts(_said(2, Verdict.OK, flip=0.03)))
    assert model.aggregate is not None
    assert (model.aggregate.flip_budget, model.aggregate.divergence_budget) == (0.02, 0.05)
    assert (model.slices[0].flip_budget, model.slices[0].divergence_budget) == (0.03, 0.05)


def test_the_report_says_what_the_alert_said() -> None:
    """Word by word, with the steps; of an alert that is over not what was to be done, and what follows for the owner."""
    event = event_with(onset=NOW.isoformat(), after=0.053, changes=("sidecar pod-7, first seen",))
    words, entry = text_of(event), _alert(event=event)
    lasting, ended = (episodes(CONFIG, _facts(told=(fact,)))[0] for fact in (entry, _over(entry, "replaced")))
    assert lasting.headline == words.headline
    assert lasting.since == "about 2026-11-16 12:00 UTC (estimated)."
    assert lasting.explanation == tuple(str(line) for line in words.lines if line.label != "Since")
    assert "What changed: sidecar pod-7, first seen." in lasting.explanation
    assert 1 <= len(lasting.do_now) <= 3
    assert (lasting.do_now, lasting.tomorrow) == (
        tuple(map(str, words.do_now)),
        tuple(map(str, words.tomorrow)),
    )
    assert (ended.do_now, ended.tomorrow) == ((), (AFTER["replaced"],))


def test_an_alert_has_the_deciding_figures_next_to_those_of_the_whole_period() -> None:
    """From the monitor's own figures of the window that it decided by; the end of an alert is told as one."""
    deciding = event_with(
        onset=NOW.isoformat(), after=0.053, n_since_onset=254, budget=0.01, evidence=16.2, threshold=10.0
    )
    entry = _alert(Metric.FLIP, deciding)
    facts = _facts(_said(2, Verdict.FIRING), told=(entry,))
    decided = "5.3 % of answers changed since 2026-11-16 12:00 UTC (254 observations), budget 1 %; evidence 16, 10 needed"
    assert [told.decided for told in episodes(CONFIG, facts)] == [decided]
    (model,) = models(CONFIG, facts)
    assert model.slices[0].decided == decided
    facts = _facts(_said(2, Verdict.OK), told=(_over(entry),))
    (model,) = models(CONFIG, facts)
    assert model.slices[0].decided.startswith(
        "its alert ended 2026-11-16 12:00 UTC; the figures include the time"
    )


def test_an_alert_whose_comparisons_are_deleted_keeps_what_it_said() -> None:
    """Retention took them: the share when it paged is frozen with the alert, and there is none of now."""
    event = event_with(
        onset=NOW.isoformat(), changed=0.053, changed_low=0.031, changed_high=0.083, n_answers=254
    )
    (told,) = episodes(CONFIG, _facts(told=(_alert(Metric.FLIP, event),)))
    assert told.when_paged is not None
    assert (told.when_paged.value, told.when_paged.low, told.when_paged.n) == (0.053, 0.031, 254)
    assert (told.now, told.share) == (None, told.when_paged)
    assert told.budget == 0.02


@pytest.mark.parametrize(
    ("known", "since"),
    [
        ({"begin": "first_seen"}, "not known. Too little was compared before 2026-11-16 12:00 UTC to say"),
        ({}, "about 2026-11-16 12:00 UTC (estimated)."),
    ],
)
def test_the_report_knows_no_more_of_the_onset_than_the_alert(known: dict[str, str], since: str) -> None:
    """Where the alert said that its begin is not known, the report names no onset either."""
    event = event_with(onset=NOW.isoformat(), after=0.053, **known)
    (told,) = episodes(CONFIG, _facts(told=(_alert(Metric.FLIP, event),)))
    assert told.since.startswith(since)
    assert not any(line.startswith("Since") for line in told.explanation)


def test_gaps_are_whole_buckets_without_a_comparison() -> None:
    """A hole in the middle and silence at the end, while some versions may have pauses of their own."""
    at = [NOW + index * WIDTH for index in (0, 1, 2, 6, 7)]
    found = gaps([*_points(*at), *_points(at[0])], NOW, NOW + 10 * WIDTH, WIDTH)
    assert found == (
        Gap(begin=NOW + 3 * WIDTH, end=NOW + 6 * WIDTH),
        Gap(begin=NOW + 8 * WIDTH, end=NOW + 10 * WIDTH),
    )


def test_sparse_traffic_has_no_gaps() -> None:
    """Where a bucket holds a handful, an empty one is chance."""
    assert gaps(_points(NOW, NOW + 4 * WIDTH, n=3), NOW, NOW + 9 * WIDTH, WIDTH) == ()
    assert gaps([], NOW, NOW + 9 * WIDTH, WIDTH) == ()


def test_what_is_explained_follows_what_explains_it() -> None:
    """In a chain too; without its explanation in the report an alert keeps its own place, and none is lost.

    Two that name each other, which no release writes, are both told.
    """

    def told(number: int, by: int | None = None) -> EpisodeFigures:
        figures = make_episode(slice_id=number)
        return msgspec.structs.replace(figures, alert_id=number, explained_by_id=by)

    found = grouped([told(1, by=3), told(2), told(3), told(4, by=1), told(5, by=9)])
    assert [(one.alert_id, one.folded) for one in found] == [
        (2, False),
        (3, False),
        (1, True),
        (4, True),
        (5, False),
    ]
    assert sorted(one.alert_id for one in grouped([told(1, by=2), told(2, by=1)])) == [1, 2]


def test_slices_and_alerts_have_their_addresses_on_the_live_page() -> None:
    """Of numbers alone, so that no name from the wire is part of a link; without `web.url` there is none."""
    facts = _facts(_said(2, Verdict.FIRING), told=(_alert(),))
    addressed = msgspec.structs.replace(CONFIG, web=Web(url="https://drift.example.com"))
    for config, of_slice, of_alert in (
        (addressed, "https://drift.example.com/slice/1/2", "https://drift.example.com/alert/1"),
        (CONFIG, "", ""),
    ):
        (model,), (episode,) = models(config, facts), episodes(config, facts)
        assert (model.slices[0].page_url, episode.page_url) == (of_slice, of_alert)
