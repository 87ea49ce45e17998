"""What the fold reads from the record and writes to it: typed rows, free of SQL. Times are microseconds since 1970."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec

from quantdrift.core.records import Metric, Policy, Predicate, Verdict

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def to_us(at: datetime) -> int:
    """Return an aware time as whole microseconds since 1970."""
    return (at - _EPOCH) // _MICROSECOND


def from_us(at_us: int) -> datetime:
    """Return microseconds since 1970 as an aware time in UTC."""
    return _EPOCH + at_us * _MICROSECOND


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row."""


class ComparisonRow(_Row, frozen=True, kw_only=True):
    """One item; columns as in `comparison`."""

    exchange_id: str
    item: int
    captured_us: int
    model_version_id: int
    policy_id: int
    slice_ids: tuple[int, ...]
    pi: float
    flip: float | None
    topk: float | None
    js: float | None
    kl: float | None
    margin: float | None


class TallyRow(_Row, frozen=True, kw_only=True):
    """Cumulative counts of one header stratum of one sidecar; `lost` over all reasons.

    `at_us` is not later than the storing: a clock that runs ahead must not make its counts recent for ever.
    """

    source: str
    boot: str
    stratum: str
    sequence: int
    at_us: int
    offered: int
    taken: int
    lost: int


class BatchRows(_Row, frozen=True, kw_only=True):
    """One batch in its place in the fold; comparisons by (exchange_id, item), tallies by source and stratum."""

    fold_seq: int
    stored_us: int
    comparisons: tuple[ComparisonRow, ...] = ()
    tallies: tuple[TallyRow, ...] = ()


class VersionRow(_Row, frozen=True, kw_only=True):
    """A candidate version; `reference_digest` is empty where it has no reference."""

    id: int
    model: str
    candidate_version: str
    reference_digest: str
    first_seen_us: int


class SliceRow(_Row, frozen=True, kw_only=True):
    """A slice with its conditions."""

    id: int
    model: str
    name: str
    predicate: str
    where: tuple[Predicate, ...]


class Catalog(_Row, frozen=True, kw_only=True):
    """What the numbers in the other rows stand for."""

    versions: dict[int, VersionRow]
    slices: dict[int, SliceRow]
    policies: dict[int, Policy]


class DetectorRow(_Row, frozen=True, kw_only=True):
    """A detector's state with what is shown of it."""

    model_version_id: int
    slice_id: int
    metric: str
    kind: str
    state: bytes
    budget: float
    n_groups: int
    evidence: float
    fold_seq: int
    created_us: int
    last_us: int
    retired_us: int | None


class VerdictRow(_Row, frozen=True, kw_only=True):
    """What is said of a slice now."""

    model_version_id: int
    slice_id: int
    verdict: Verdict
    reason: str
    since_us: int
    n_groups: int
    evidence: float
    threshold: float
    estimate: dict[str, dict[str, float]]
    last_us: int
    updated_us: int
    fold_seq: int


class Episode(StrEnum):
    """What a transition does to the slice's alert."""

    NONE = "none"
    OPEN = "open"
    ESCALATE = "escalate"
    CLOSE = "close"


class TransitionRow(_Row, frozen=True, kw_only=True):
    """A change of verdict.

    Parameters
    ----------
    episode
        What it does to the alert. Everything but `NONE` is also sent as an event.
    metric
        The metric with the most evidence.
    onset_us
        Estimated begin of the drift; the time of the change where none is told.
    details
        Attributes of the event, without their prefix.
    """

    model_version_id: int
    slice_id: int
    from_verdict: Verdict
    to_verdict: Verdict
    at_us: int
    fold_seq: int
    episode: Episode
    metric: Metric
    onset_us: int
    details: dict[str, Any]


class RollupRow(_Row, frozen=True, kw_only=True):
    """What one hour of one slice grows by; columns as in `rollup_hour`, which `rollup_day` shares."""

    model_version_id: int
    slice_id: int
    hour_us: int
    n_items: int
    n_groups: int
    weight: float
    weight_sq: float
    flip: float
    topk: float
    js: float
    kl: float
    margin: float
    flip_weight: float
    topk_weight: float
    js_weight: float
    kl_weight: float
    margin_weight: float
    n_kl_infinite: int
    kl_bins: tuple[float, ...]


class Position(_Row, frozen=True, kw_only=True):
    """How far the fold has come."""

    fold_seq: int = 0
    event_us: int | None = None
    mass: float = 0.0
    n_detectors: int = 0


class Snapshot(_Row, frozen=True, kw_only=True):
    """Everything that the fold needs to go on where it stopped.

    Parameters
    ----------
    position
        Where it stopped.
    detectors, verdicts
        All that are not retired.
    baselines
        Per sidecar start and stratum the newest folded tally before the recent window.
    tallies
        Folded tallies inside it, in the order of the fold.
    """

    position: Position
    detectors: tuple[DetectorRow, ...] = ()
    verdicts: tuple[VerdictRow, ...] = ()
    baselines: tuple[TallyRow, ...] = ()
    tallies: tuple[TallyRow, ...] = ()


class Outcome(_Row, frozen=True, kw_only=True):
    """What a fold writes, in one transaction."""

    position: Position
    detectors: tuple[DetectorRow, ...]
    verdicts: tuple[VerdictRow, ...]
    transitions: tuple[TransitionRow, ...]
    rollups: tuple[RollupRow, ...]
