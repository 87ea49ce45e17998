"""The view of a slice's signals for people: what each has learned and observed, and its evidence."""

from collections.abc import Sequence

import msgspec

from quantdrift.core.records import Side
from quantdrift.drift.detectors.protocol import DETECTORS, GROWTH, LEARNERS, TAIL
from quantdrift.drift.evidence.header import N_TOTAL, SCALE, M
from quantdrift.drift.evidence.interval import WeightedEstimate
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.evidence.state import load_state
from quantdrift.storage.fold_rows import DetectorRow, FloorRow

QUANTILES = ((0.95, "p95"), (0.99, "p99"), (0.999, "p99.9"))
SHORTFALL = (0.99, "mean above p99")


class TailFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a slice's tail over the recent window, in the metric's unit.

    Parameters
    ----------
    name
        `p95`, `p99`, `p99.9`, or `mean above p99`: the expected shortfall.
    value
        None where there are too few groups.
    low, high
        Its time-uniform 95 % band; None where it is extrapolated from the shape of the tail.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None


class SignalView(msgspec.Struct, frozen=True, kw_only=True):
    """One signal.

    Parameters
    ----------
    n_groups
        Groups ever observed.
    missing
        Groups that it still has to learn from before it can alert; 0 where it can.
    n_learned
        Groups in its baseline; None for a detector that learns nothing.
    budget
        The accepted mean, in the metric's unit; None for a detector that learns a baseline.
    noise
        The allowance added to the budget for noise.
    evidence
        Evidence for a page; that of a slice is the sum over its signals.
    recent
        Mean (of a tail: p99) with its interval over the recent window, in the metric's unit; None where unknown.
    tail
        Further figures of the tail; empty for other kinds.
    limit_s
        The seconds above which an exchange counts as slow, for a learned baseline of the latency; None for other kinds.
    """

    metric: str
    kind: str
    n_groups: int
    missing: int
    n_learned: int | None
    budget: float | None
    noise: float
    evidence: float
    recent: WeightedEstimate | None
    tail: tuple[TailFigure, ...]
    limit_s: float | None = None


class SelfNoise(msgspec.Struct, frozen=True, kw_only=True):
    """How far one side of a version differs from itself, in one slice and metric; all means in the metric's own unit.

    Parameters
    ----------
    mean, low, high
        Recent mean of the slice with its time-uniform bounds; the mean is None where nothing of it was computed again.
    n_groups
        Exchanges behind these figures.
    own
        Whether the two fields below follow from these figures. False: they are those of all of the version's traffic, since
        too little is known of the slice.
    added
        The allowance added to the budget of the slice.
    exceeds
        Whether it is more than `NOISE_BOUND` of the budget, or not yet shown to be less: the slice is then `unknown`.
    budget
        The accepted mean.
    """

    metric: str
    side: Side
    mean: float | None
    low: float
    high: float
    n_groups: int
    own: bool
    added: float
    exceeds: bool
    budget: float


def self_noises(of_version: Sequence[FloorRow], of_slice: Sequence[FloorRow] | None) -> list[SelfNoise]:
    """Return the view of the noise of a slice.

    Parameters
    ----------
    of_slice
        Those of the slice; None for the slice of all traffic.
    """
    own_rows = {(row.side, row.metric): row for row in (of_version if of_slice is None else of_slice)}
    noises = []
    for version in of_version:
        own = own_rows.get((version.side, version.metric))
        used = own if own is not None and own.own else version
        scale = version.scale
        noises.append(
            SelfNoise(
                metric=version.metric,
                side=version.side,
                mean=own.older_total / own.older_weight * own.scale if own else None,
                low=own.low * own.scale if own else 0.0,
                high=(own.high if own else 1.0) * scale,
                n_groups=own.older_n if own else 0,
                own=used is own,
                added=used.added * used.scale,
                exceeds=used.exceeds,
                budget=version.budget * scale,
            )
        )
    return noises


def signal_views(rows: Sequence[DetectorRow]) -> list[SignalView]:
    """Return the view of the signals in `rows`."""
    views = []
    for row in rows:
        detector = DETECTORS[row.kind]
        state = load_state(row.kind, row.state, detector.size)
        learner = LEARNERS.get(row.kind)
        views.append(
            SignalView(
                metric=row.metric,
                kind=row.kind,
                n_groups=int(state[N_TOTAL]),
                missing=detector.missing(state),
                n_learned=None if learner is None else learner.learned(state),
                budget=float((state[M] - row.noise) * state[SCALE]) if learner is None else None,
                noise=float(row.noise * state[SCALE]),
                evidence=detector.evidence(state),
                recent=detector.recent(state),
                tail=_tail(state) if row.kind == TAIL.kind else (),
                limit_s=GROWTH.limit_s(state) if row.kind == GROWTH.kind else None,
            )
        )
    return views


def _tail(state: FloatArray) -> tuple[TailFigure, ...]:
    quantiles = []
    for q, name in QUANTILES:
        shown = TAIL.shown(state, q)
        if shown is None:
            quantiles.append(TailFigure(name=name, value=TAIL.extrapolated(state, q)))
        else:
            quantiles.append(TailFigure(name=name, value=shown.mean, low=shown.low, high=shown.high))
    q, name = SHORTFALL
    above = TAIL.shown(state, q, shortfall=True)
    if above is not None:
        quantiles.append(TailFigure(name=name, value=above.mean, low=above.low, high=above.high))
    return tuple(quantiles)
