"""The first sentence of the report: it is about the measure that decided, and agrees with the figures below it."""

import itertools

import msgspec
import pytest

from quantdrift.core.records import Metric, Verdict
from quantdrift.report.figures import EpisodeFigures, ModelFigures, ReportedSlice
from quantdrift.show.report.brief import answer
from tests.support.monitor.report_figures import make_episode, make_figures, make_slice

pytestmark = pytest.mark.unit
BUDGET = 0.02
MEASURES = list(
    itertools.product((Metric.FLIP, Metric.DIVERGENCE, Metric.LATENCY), (True, False), (0.016, 0.04))
)


def alerting(share: float, slice_id: int = 2) -> ReportedSlice:
    """Return a slice that alerts, with a share of changed answers, or a divergence."""
    entry = make_slice("scanner=archive", slice_id=slice_id, verdict=Verdict.FIRING, flip=share)
    divergence = entry.figures.divergence
    assert divergence is not None
    figures = msgspec.structs.replace(
        entry.figures,
        divergence=msgspec.structs.replace(divergence, value=share, low=share / 2, high=2 * share),
    )
    return msgspec.structs.replace(entry, figures=figures, flip_budget=BUDGET, divergence_budget=BUDGET)


def alert_of(entry: ReportedSlice, metric: Metric, *, by_budget: bool) -> EpisodeFigures:
    """Return its alert."""
    return msgspec.structs.replace(
        make_episode(),
        slice_id=entry.slice_id,
        slice=entry.name,
        metric=metric,
        by_budget=by_budget,
        resolved_at=None,
    )


def version_of(*slices: ReportedSlice) -> ModelFigures:
    """Return a version with these slices."""
    return msgspec.structs.replace(make_figures().models[0], slices=slices, aggregate=None)


@pytest.mark.parametrize(("metric", "by_budget", "share"), MEASURES)
def test_the_first_sentence_agrees_with_what_decided_and_with_its_budget(
    metric: Metric, share: float, *, by_budget: bool
) -> None:
    """The budget is named where it decided; a share within it was above it only for a part of the time."""
    entry = alerting(share)
    text = answer(version_of(entry), [alert_of(entry, metric, by_budget=by_budget)])
    assert text.startswith("No, not everywhere: in scanner=archive ")
    assert ("budget" in text) == by_budget
    assert ("than before" in text) != by_budget
    assert ("answers of" in text) == (metric is Metric.FLIP)
    assert ("outputs of" in text) == (metric is Metric.DIVERGENCE)
    assert ("take longer" in text) == (metric is Metric.LATENCY)
    is_within = by_budget and metric is not Metric.LATENCY and share <= BUDGET
    assert ("for a part of the time" in text) == is_within


def test_slices_that_alert_for_different_reasons_have_drifted() -> None:
    """No measure is named that is not that of all of them, nor one that is not known."""
    first, second = alerting(0.04), alerting(0.04, 3)
    alerts = [
        alert_of(first, Metric.FLIP, by_budget=True),
        alert_of(second, Metric.DIVERGENCE, by_budget=False),
    ]
    title = f"{make_figures().models[0].model} {make_figures().models[0].version}"
    assert (
        answer(version_of(first, second), alerts) == f"No, not everywhere: in 2 slices {title} has drifted."
    )
    assert answer(version_of(first), []) == f"No, not everywhere: in scanner=archive {title} has drifted."
