"""Typed rows that the fold reads and writes, without SQL. Times are microseconds since 1970."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from quantdrift.core.records import UNVERIFIED, Metric, Policy, Predicate, Side, Verdict
from quantdrift.core.slices import SliceKey
from quantdrift.facts.events import AlertEvent, Ending, NoiseEvent

RETIRED_AFTER: Final = timedelta(days=30)  # without data: a signal, or a version without a reference
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def to_us(at: datetime) -> int:
    """Return an aware time as whole microseconds since 1970."""
    return (at - _EPOCH) // _MICROSECOND


def from_us(at_us: int) -> datetime:
    """Return microseconds since 1970 as an aware time in UTC."""
    return _EPOCH + at_us * _MICROSECOND


class _Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the rows. They are in no reference cycle, and too many for the garbage collector to search."""


class ComparisonRow(_Row, frozen=True, kw_only=True, omit_defaults=True):
    """One item; columns as in `comparison`. `signals` has the values of the signals of plug-ins by name.

    `is_shown` says of an item of an open session that it was in the begin of it that the budgets were shown.
    """

    exchange_id: str
    item: int
    captured_us: int
    model_version_id: int
    policy_id: int
    slice_ids: tuple[int, ...]
    group_key: str
    pi1: float
    pi2: float
    u1: float
    u2: float
    candidate_margin: float | None
    flip: float | None
    topk: float | None
    js: float | None
    divergence: float | None = msgspec.field(name="kl")  # as sessions that are open have it
    margin: float | None
    tie: float | None = None
    latency_s: float | None = None
    signals: dict[str, float | None] = {}
    is_shown: bool = False

    @property
    def pi(self) -> float:
        """The total inclusion probability."""
        return self.pi1 * self.pi2


class TallyRow(_Row, frozen=True, kw_only=True):
    """Cumulative counts of one header stratum of one sidecar: `lost` over all reasons, `models` taken and lost by model.

    In `taken` and `lost`, in all and by model, are neither requests that got no answer to compare nor those that named a
    model which was not configured: these are in `unknown`, by that name. `models` has all models that the sidecar is known
    to capture, also without a count.

    `at_us` is not later than the time of storing: the counts of a clock that is ahead must not stay recent for ever.
    `final` says that it is the last one of its start. `open` has what was taken and had no other count yet, by model; under
    the empty name are requests whose model was not known.
    """

    source: str
    boot: str
    stratum: str
    sequence: int
    at_us: int
    offered: int
    taken: int
    lost: int
    models: dict[str, tuple[int, int]] = {}
    unknown: dict[str, int] = {}
    final: bool = False
    open: dict[str, int] = {}


class ExpiryRow(_Row, frozen=True, kw_only=True):
    """Exchanges that expired in the stream; columns as in `expiry`. `at_us` is the time of storing."""

    stratum: str
    model: str
    n: int
    at_us: int


class Source(StrEnum):
    """The origin of a baseline."""

    LEARNED = "learned"  # by the monitor, from enough of the version's own groups
    INHERITED = "inherited"  # by the monitor, from the version before
    ACCEPTED = "accepted"  # by a person, from stored rows: the new normal
    IMPORTED = "imported"  # by a person, from an offline evaluation: a budget
    FROZEN = "frozen"  # by a person: learning stops
    KEPT = "kept"  # by a person: the alert was false, and the groups seen during it are learned


class BaselineRow(_Row, frozen=True, kw_only=True):
    """A baseline that applies to a signal from `fold_seq` on; columns as in `baseline`.

    `content` is None where the decision is about the current baseline; its keys are the detector's own, or `budget` of
    an imported budget, in the metric's unit.
    """

    model_version_id: int
    slice_id: int
    metric: str
    kind: str
    source: Source
    made_by: str
    reason: str
    from_us: int | None
    to_us: int | None
    n_groups: int
    from_version_id: int | None
    content: dict[str, Any] | None
    fold_seq: int


class SliceChange(_Row, frozen=True, kw_only=True):
    """The start or end of the watch of a discovered slice, or of one that is made of a value.

    `made_by` is a person, `monitor` or `shadow`, `reason` a text. `lapsed`: the value lost its place.
    """

    slice_id: int
    watched: bool
    lapsed: bool = False
    made_by: str
    reason: str


class AlertClose(_Row, frozen=True, kw_only=True):
    """A person's decision that an open alert is over; `made_by` is the person, `reason` the text."""

    model_version_id: int
    slice_id: int
    made_by: str
    reason: str


class ServingRow(_Row, frozen=True, kw_only=True):
    """Whether a candidate version serves, as the fold sees it; columns as in `serving`."""

    model_version_id: int
    last_us: int
    gap_s: float = 0.0
    gaps_s: float = 0.0
    replaced_us: int | None = None
    back_us: int | None = None


class SessionRow(_Row, frozen=True, kw_only=True):
    """An open session; columns as in `session`."""

    model_version_id: int
    policy_id: int
    group_key: str
    opened_us: int
    items: bytes
    fold_seq: int

    @property
    def key(self) -> tuple[int, int, str]:
        """Version, policy and group."""
        return self.model_version_id, self.policy_id, self.group_key


class NoiseRow(_Row, frozen=True, kw_only=True):
    """An item that was computed twice; columns as in `noise`, `pi` is the total inclusion probability.

    `slice_ids` is None where the worker did not store them: the item then counts for the version alone. `candidate_flip` and
    `candidate_divergence` are those of its comparison, of the candidate with the first replay; None where that is not known.
    """

    exchange_id: str
    side: Side
    captured_us: int
    model_version_id: int
    policy_id: int
    pi: float
    flip: float | None
    divergence: float | None
    slice_ids: tuple[int, ...] | None = None
    candidate_flip: float | None = None
    candidate_divergence: float | None = None


class PairRow(_Row, frozen=True, kw_only=True):
    """The test of whether noise explains a metric of a slice; columns as in `noise_test`."""

    model_version_id: int
    slice_id: int
    metric: str
    suspect: bool
    budget: float
    since_us: int
    n: int
    wealth: tuple[float, ...]
    shown: bool
    explained: bool = False
    unpaired: bool = False
    enough_us: int = 0
    enough_groups: int = 0
    enough_n: int = 0
    paired_us: int = 0
    fold_seq: int = 0

    @property
    def key(self) -> tuple[int, int, str]:
        """Version, slice and metric."""
        return self.model_version_id, self.slice_id, self.metric


class FloorRow(_Row, frozen=True, kw_only=True):
    """The noise of one side in one metric; columns as in `noise_floor`, or `noise_slice`.

    `slice_id` is 0 for all of the version's traffic. Of a slice, `added` and `exceeds` are in use where `own` is true; else those
    of the version are. `announced` says whether the start of too much noise in the slice was sent as an event.
    """

    model_version_id: int
    side: Side
    metric: str
    scale: float
    older_n: int
    older_weight: float
    older_total: float
    newer_n: int
    newer_weight: float
    newer_total: float
    low: float
    high: float
    added: float
    budget: float
    exceeds: bool
    updated_us: int
    fold_seq: int
    slice_id: int = 0
    own: bool = True
    announced: bool = False


class NoiseChangeRow(_Row, frozen=True, kw_only=True):
    """A change of noise to too high, or back; columns as in `noise_change`, `slice_id` is 0 for all of the version's traffic."""

    model_version_id: int
    slice_id: int
    side: Side
    metric: str
    exceeds: bool
    at_us: int
    fold_seq: int
    event: NoiseEvent


class BatchRows(_Row, frozen=True, kw_only=True):
    """One numbered batch of the fold, with the comparisons that are folded with it, in order; tallies and expiries by their keys.

    `decisions` are people's decisions about baselines since the previous batch, `slices` the discovered slices that were
    confirmed, retired or restored, `closes` the alerts that people closed; all apply from this batch on. `unreferenced` are
    versions without a reference whose exchanges the workers received, `noise` items that were computed twice. `captured_us` is
    the latest capture time in it; 0: not known. `compares` says that a worker compared something, which may be folded later;
    `n_rows` is how many rows were stored with it. `model` is that of its comparisons, whichever rows are folded with it; empty: it is not
    of one model.
    """

    fold_seq: int
    stored_us: int
    model: str = ""
    n_rows: int = 0
    captured_us: int = 0
    compares: bool = True
    comparisons: tuple[ComparisonRow, ...] = ()
    tallies: tuple[TallyRow, ...] = ()
    decisions: tuple[BaselineRow, ...] = ()
    slices: tuple[SliceChange, ...] = ()
    closes: tuple[AlertClose, ...] = ()
    unreferenced: tuple[int, ...] = ()
    noise: tuple[NoiseRow, ...] = ()
    expiries: tuple[ExpiryRow, ...] = ()


class VersionRow(_Row, frozen=True, kw_only=True):
    """A candidate version; `reference_digest` is empty where it has no reference."""

    id: int
    model: str
    candidate_version: str
    reference_digest: str
    first_seen_us: int

    @property
    def is_verified(self) -> bool:
        """Whether it is known who sent its exchanges."""
        return not self.candidate_version.endswith(UNVERIFIED)


class SliceRow(_Row, frozen=True, kw_only=True):
    """A slice with its conditions."""

    id: int
    model: str
    name: str
    predicate: str
    where: tuple[Predicate, ...]

    @property
    def key(self) -> SliceKey:
        """The slice without its number."""
        return SliceKey(model=self.model, name=self.name, predicate=self.predicate, where=self.where)


class Catalog(_Row, frozen=True, kw_only=True):
    """The versions, slices and policies that other rows refer to, by id.

    Parameters
    ----------
    undeclared_sessions
        Per version and slice, the attribute whose requests were found to be alike.
    """

    versions: dict[int, VersionRow]
    slices: dict[int, SliceRow]
    policies: dict[int, Policy]
    undeclared_sessions: dict[tuple[int, int], str] = {}


class QuarantineCount(_Row, frozen=True, kw_only=True):
    """Exchanges of a model that were quarantined in the last hour, and the most frequent reason."""

    n: int
    reason: str


class ShareQuestion(_Row, frozen=True, kw_only=True):
    """What is asked about shares of slices by hour.

    Parameters
    ----------
    models
        Those of which samples are missing now.
    newest_hour_us
        Start of the newest hour.
    history_h
        Hours that are asked for.
    windows_h, kept
        Only slices are that have less than `kept` of their mean share in one of these windows of newest hours.
    """

    models: tuple[str, ...]
    newest_hour_us: int
    history_h: int
    windows_h: tuple[int, ...]
    kept: float


class ShareHour(_Row, frozen=True, kw_only=True, gc=False):
    """The samples of a slice of a model in an hour of capture, of all versions; slice 0 is all traffic.

    Parameters
    ----------
    weight, weight_sq
        Sums of w and w^2, w = 1 / pi.
    n_slices
        Slices of the model that were sampled lately, with all traffic.
    """

    model: str
    slice_id: int
    hour_us: int
    weight: float
    weight_sq: float
    n_slices: int


class Circumstances(_Row, frozen=True, kw_only=True):
    """What the fold is told of the present, beside the batches: it changes verdicts, and no evidence.

    Parameters
    ----------
    paused
        By model, by whom and since when its sampling is paused; under an empty name, that of all models.
    quarantined
        By model.
    """

    paused: dict[str, str] = {}
    quarantined: dict[str, QuarantineCount] = {}


class DetectorRow(_Row, frozen=True, gc=False):
    """A detector's state and its displayed figures; `noise` is the part of `budget` that was added for noise.

    The fold makes some thousands at a time, from columns in the order of the fields.
    """

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
    noise: float = 0.0


class VerdictRow(_Row, frozen=True, gc=False):
    """The current verdict of a slice; made as a `DetectorRow` is."""

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
    """The effect of a transition on the slice's alert."""

    NONE = "none"
    OPEN = "open"
    ESCALATE = "escalate"
    CLOSE = "close"
    REOPEN = "reopen"  # the newest one, which ended because its version was replaced


class TransitionRow(_Row, frozen=True, kw_only=True):
    """A change of verdict.

    Parameters
    ----------
    episode
        The effect on the alert. All but `NONE` are also sent as an event.
    metric
        The metric with the most evidence.
    onset_us
        Estimated begin of the drift; the time of the change where there is no estimate.
    reason
        Why the verdict changed.
    event
        What is sent of it; None for `NONE`, and for `REOPEN`, which sends what the alert has.
    ended
        Of `CLOSE`: why the alert is over.
    quiet
        It is stored and not sent: the version was replaced before.
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
    reason: str
    event: AlertEvent | None = None
    ended: Ending | None = None
    quiet: bool = False

    @property
    def alert(self) -> AlertEvent:
        """The event of a change that opens, escalates or closes an alert: each of these has one."""
        assert self.event is not None
        return self.event


class RollupRow(_Row, frozen=True, gc=False):
    """The increments of one hour of one slice; columns as in `rollup_hour` and `rollup_day`; made as a `DetectorRow` is."""

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
    divergence: float
    margin: float
    flip_weight: float
    topk_weight: float
    js_weight: float
    divergence_weight: float
    margin_weight: float
    n_infinite: int
    divergence_bins: tuple[float, ...]
    tie: float = 0.0
    tie_weight: float = 0.0
    n_unmeasured: int = 0
    cap: float = 0.0
    flip_weight_sq: float = 0.0
    flip_sq: float = 0.0
    flip_cross: float = 0.0
    divergence_weight_sq: float = 0.0
    divergence_sq: float = 0.0
    divergence_cross: float = 0.0
    heaviest: float = 0.0
    people: tuple[float, ...] = ()


class ItemCount(NamedTuple):
    """Items of a slice in one hour of capture, those of them that nothing was measured of, and whether one names a person."""

    model_version_id: int
    slice_id: int
    hour_us: int
    n_items: int
    n_unmeasured: int
    names_people: bool


class Position(_Row, frozen=True, kw_only=True):
    """The position of the fold.

    Parameters
    ----------
    event_us
        The latest time of an exchange or a tally.
    exchange_us
        The latest capture of an exchange; the mass is that until then.
    is_counted
        Whether `n_detectors` is known; else the live detectors are counted.
    """

    fold_seq: int = 0
    event_us: int | None = None
    exchange_us: int | None = None
    mass: float = 0.0
    n_detectors: int = 0
    is_counted: bool = True


class Snapshot(_Row, frozen=True, kw_only=True):
    """The stored state from which the fold continues.

    Parameters
    ----------
    detectors, verdicts
        All that are not retired.
    baselines
        Per sidecar start and stratum the newest folded tally before the recent window.
    tallies
        Folded tallies inside the recent window, in the order of the fold.
    expiries
        Expiries inside the recent window, in the same order.
    sessions
        The open sessions.
    imported
        The newest imported budgets.
    recent_items
        What was compared in the hour of the position and in the one before, by hour.
    retired
        Retired slices: comparisons that still arrive for them are not watched.
    floors
        The noise floors.
    pairs
        The tests of whether noise explains what is measured.
    serving
        The versions that were compared within 30 days.
    compared_us
        When the last folded batch of comparisons was stored; None: never, or long ago.
    """

    position: Position
    detectors: tuple[DetectorRow, ...] = ()
    verdicts: tuple[VerdictRow, ...] = ()
    baselines: tuple[TallyRow, ...] = ()
    tallies: tuple[TallyRow, ...] = ()
    expiries: tuple[ExpiryRow, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
    imported: tuple[BaselineRow, ...] = ()
    recent_items: tuple[ItemCount, ...] = ()
    retired: tuple[int, ...] = ()
    lapsed: tuple[int, ...] = ()
    floors: tuple[FloorRow, ...] = ()
    pairs: tuple[PairRow, ...] = ()
    serving: tuple[ServingRow, ...] = ()
    compared_us: int | None = None


class ExplainedBy(_Row, frozen=True, kw_only=True):
    """The smaller alerting slice that explains an open alert from now on; None: nothing does any more.

    Fields as in `Explanation`.
    """

    explained_by: str | None
    explained_by_id: int | None


class Explains(_Row, frozen=True, kw_only=True):
    """All larger alerting slices that an open alert explains from now on; fields as in `Explanation`."""

    explains: tuple[str, ...]
    explains_ids: tuple[int, ...]


class AlertNote(_Row, frozen=True, kw_only=True):
    """A change to the explanation of an open alert, made when the fold is written."""

    model_version_id: int
    slice_id: int
    change: ExplainedBy | Explains


class FoldResult(_Row, frozen=True, kw_only=True):
    """The rows that a fold writes, in one transaction.

    `forgotten_noise` are versions and slices whose noise is deleted before `floors` are written; `ended_pairs` are the tests, by
    version, slice and metric, that are deleted before `pairs` are written.
    """

    position: Position
    detectors: tuple[DetectorRow, ...]
    verdicts: tuple[VerdictRow, ...]
    transitions: tuple[TransitionRow, ...]
    rollups: tuple[RollupRow, ...]
    learned: tuple[BaselineRow, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
    closed: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[AlertNote, ...] = ()
    floors: tuple[FloorRow, ...] = ()
    noise_changes: tuple[NoiseChangeRow, ...] = ()
    forgotten_noise: tuple[tuple[int, int], ...] = ()
    pairs: tuple[PairRow, ...] = ()
    ended_pairs: tuple[tuple[int, int, str], ...] = ()
    serving: tuple[ServingRow, ...] = ()


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """A shard: which monitor folds it, empty where none does, how many of its batches wait, and since when the oldest does."""

    number: int
    holder: str = ""
    n_unfolded: int = 0
    oldest: datetime | None = None
