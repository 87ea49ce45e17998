"""Decisions of people about baselines: each is a row, and the fold applies it with its next batch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.core.signals import (
    BUILT_IN,
    LEARNED,
    WATCHED,
    DetectorKind,
    cap_of,
    is_judged,
    is_watched,
    signal_of,
)
from quantdrift.drift.detectors.protocol import BUDGET, GROWTH, LEARNERS, TAIL
from quantdrift.drift.detectors.tail import pooled_histogram
from quantdrift.drift.detectors.tail.pooled_histogram import TailBaseline
from quantdrift.drift.evidence.header import LAST_AT, N_TOTAL
from quantdrift.drift.evidence.observations import STEPS, FloatArray, ObservationBlock
from quantdrift.drift.evidence.state import load_state
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.groups import (
    LATENCY_GROWTH,
    Columns,
    Observation,
    exchanges,
    scale_of,
    slice_groups,
)
from quantdrift.monitor.fold.inclusion import RememberedRates
from quantdrift.monitor.fold.sessions import Sessions
from quantdrift.storage.audit import Action, who
from quantdrift.storage.baselines import (
    BaselineDecision,
    VersionFact,
    count_waiting,
    decide,
    find_slices,
    find_version,
    learned_signals,
    rows_since,
    watched_signals,
)
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import read_catalog
from quantdrift.storage.fold_rows import Catalog, ComparisonRow, Source

LEAST_BUDGET = 1e-5  # as in the configuration
FUTURE = datetime(9999, 1, 1, tzinfo=UTC)


class DecisionScope(msgspec.Struct, frozen=True, kw_only=True):
    """The signals that a decision is about, and why it is made.

    Parameters
    ----------
    version
        Candidate version; empty: the newest in the database.
    slices, metrics
        Names; empty: all.
    """

    model: str
    version: str = ""
    slices: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    reason: str = ""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of accepting a baseline for one signal.

    Parameters
    ----------
    n_groups
        Groups in the rows.
    missing
        How many more groups a baseline needs; 0 where there are enough.
    watched
        Whether the monitor watches the signal. Where it does not, nothing was recorded: no detector could take over
        the baseline, and a slice that comes back after 30 days of silence starts from the beginning.
    """

    slice: str
    metric: str
    kind: str
    n_groups: int
    missing: int
    watched: bool

    @property
    def recorded(self) -> bool:
        """Whether the signal has a new baseline from the monitor's next batch on."""
        return self.watched and not self.missing


class Imported(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure of an offline evaluation.

    Parameters
    ----------
    upper
        Upper confidence bound of the signal's mean, in the metric's unit; None: back to the configuration's budget.
    n
        Number of evaluated items.
    """

    slice: str
    metric: Metric
    upper: float | None
    n: int = 0


async def accept(
    database: Database,
    config: Config,
    scope: DecisionScope,
    *,
    since: datetime | None,
    until: datetime | None,
    pool: Sequence[str] = (),
    progress: Callable[[str], None],
) -> list[Accepted]:
    """Accept what a version showed between two times as its baseline: the new normal.

    Parameters
    ----------
    since, until
        Capture times; by default from the version's first exchange, and to now.
    pool
        Slices whose pooled tails replace that of a slice with too few exchanges for a tail of its own.
    progress
        Called with one readable line per page of rows.

    Raises
    ------
    OperatorError
        There is no such model, version or slice, or no rows at all, or the monitor has not folded them yet; or a pooled
        slice has no tail yet itself.
    """
    async with database.begin() as connection:
        version = await find_version(connection, scope.model, scope.version)
        slices = await find_slices(connection, scope.model, scope.slices)
        learning = Learning(config, await read_catalog(connection), scope.model)
        begin, end = since or version.first_seen_at, until or FUTURE
        first: datetime | None = None
        last_us, n_rows = 0, 0
        pooled = await find_slices(connection, scope.model, pool) if pool else {}
        async for rows in rows_since(connection, version.id, [*slices, *pooled], begin, end):
            learning.add(rows)
            n_rows += len(rows)
            first = first or datetime.fromtimestamp(rows[0].captured_us / 1e6, UTC)
            last_us = rows[-1].captured_us
            progress(f"learning from {n_rows:,} comparisons of {scope.model} {version.name}")
        if first is None:
            n_waiting = await count_waiting(connection, version.id, begin, end)
            raise _nothing(scope.model, version, begin, n_waiting)
        everything = learning.result()
        if pooled:
            everything = _with_pool(everything, pooled)
        learned = [
            baseline
            for baseline in everything
            if baseline.slice_id in slices and _wanted(baseline.signal.metric, scope.metrics)
        ]
        watched = await watched_signals(connection, version.id)
        made_by = await who(connection)
        await decide(
            connection,
            [
                BaselineDecision(
                    model_version_id=version.id,
                    slice_id=baseline.slice_id,
                    metric=baseline.signal.metric,
                    kind=baseline.signal.kind,
                    source=Source.ACCEPTED,
                    made_by=made_by,
                    reason=scope.reason,
                    from_at=first,
                    to_at=datetime.fromtimestamp(last_us / 1e6, UTC),
                    n_groups=baseline.n_groups,
                    from_version_id=None,
                    content=baseline.content,
                )
                for baseline in learned
                if baseline.content is not None and _key(baseline) in watched
            ],
            Action.BASELINE_ACCEPT,
            model=scope.model,
            note=scope.reason,
        )
    return [
        Accepted(
            slice=slices[baseline.slice_id],
            metric=baseline.signal.metric,
            kind=baseline.signal.kind,
            n_groups=baseline.n_groups,
            missing=baseline.missing,
            watched=_key(baseline) in watched,
        )
        for baseline in learned
    ]


def _nothing(model: str, version: VersionFact, begin: datetime, n_waiting: int) -> OperatorError:
    """Return the error for a version without rows to learn from."""
    if n_waiting:
        return OperatorError(
            f"the monitor has not folded {model} {version.name} yet: {n_waiting:,} comparisons wait. Is a monitor running? "
            "Accept again when it has folded them"
        )
    return OperatorError(
        f"there are no comparisons of {model} {version.name} since {begin:%Y-%m-%d %H:%M} UTC: "
        "give an earlier --since; comparisons older than storage.retention_days are deleted"
    )


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned of one signal.

    Parameters
    ----------
    n_groups
        Groups with a value of the signal.
    missing
        How many more groups a baseline needs; 0 where there are enough.
    content
        The baseline, as JSON values; None where there are too few groups.
    """

    slice_id: int
    signal: SignalKey
    n_groups: int
    missing: int
    content: dict[str, object] | None


class Learning:
    """Learning from the rows of one candidate version, in the order of their capture.

    Parameters
    ----------
    config
        Caps, session length and tolerance.
    catalog
        The slices and policies that the rows refer to.
    model
        The model of the rows.
    """

    def __init__(self, config: Config, catalog: Catalog, model: str) -> None:
        self._budget = config.budget(model)
        self._tolerance = config.monitor.tolerance
        self._catalog = catalog
        self._rates = RememberedRates()
        self._sessions = Sessions(int(config.monitor.session_s * 1_000_000))
        self._waiting: dict[tuple[int, SignalKey], list[tuple[FloatArray, int]]] = {}
        self._states: dict[tuple[int, SignalKey], FloatArray] = {}

    def add(self, rows: Sequence[ComparisonRow]) -> None:
        """Learn from more rows; the items of one exchange must be in one call."""
        observed: list[Observation] = []
        for exchange in exchanges(rows):
            at_us = exchange.rows[0].captured_us
            if exchange.rows[0].group_key:
                self._sessions.add(exchange.rows, at_us)
                over = self._sessions.due(at_us)
                observed += [Observation(exchange.order, items, at_us, closed=True) for _, items, _ in over]
            else:
                observed.append(Observation(exchange.order, exchange.rows, at_us, closed=False))
        if observed:
            self._learn(observed)

    def result(self) -> list[Learned]:
        """Return what has been learned so far, by slice and signal."""
        for key in sorted(self._waiting):
            self._run(key)
        learned = []
        for (slice_id, signal), state in sorted(self._states.items()):
            learner = LEARNERS[signal.kind]
            # Only at the end: bounds that are fixed with all of the data are the tightest.
            learner.tend(state, mass=0.0, at_us=int(state[LAST_AT]))
            if signal == LATENCY_GROWTH and GROWTH.enough(state):
                GROWTH.freeze(state)  # a person chose the time: it need not be a week
            content = msgspec.to_builtins(learner.content(state)) if learner.live(state) else None
            learned.append(
                Learned(
                    slice_id=slice_id,
                    signal=signal,
                    n_groups=int(state[N_TOTAL]),
                    missing=learner.missing(state),
                    content=content,
                )
            )
        return learned

    def _learn(self, observed: Sequence[Observation]) -> None:
        columns = Columns(observed)
        groups = slice_groups(
            observed,
            columns,
            np.ones(len(columns.ends), dtype=np.bool_),
            np.full(len(columns.rows), self._budget.cap),
            partial(self._rates.of, self._catalog),
            grows=np.full(len(columns.rows), True) if self._budget.latency_growth else None,
            named={
                metric: columns.named(metric, np.full(len(columns.rows), True))
                for metric in LEARNED
                if signal_of(metric).detail and is_watched(metric.value, self._budget.signals)
            },
            judged={
                metric: np.full(len(columns.rows), is_judged(metric, self._budget)) for metric in WATCHED
            },
        )
        for number, (_, slice_id) in enumerate(groups.keys):
            for signal in groups.signals:
                if signal.kind not in LEARNERS:
                    continue
                values, observations = groups.values(number, signal)
                for value, observation in zip(values, observations.tolist(), strict=True):
                    waiting = self._waiting.setdefault((slice_id, signal), [])
                    waiting.append((value, observed[observation].rows[0].captured_us))
                    if len(waiting) == STEPS:
                        self._run((slice_id, signal))

    def _run(self, key: tuple[int, SignalKey]) -> None:
        waiting = self._waiting.pop(key, [])
        if not waiting:
            return
        learner = LEARNERS[key[1].kind]
        state = self._states.get(key)
        if state is None:
            scale = scale_of(key[1], self._budget)
            tau = self._budget.latency_growth - 1.0 if key[1] == LATENCY_GROWTH else self._tolerance
            state = learner.fresh(tau=tau, scale=scale, mass=0.0, at_us=waiting[0][1])
        times = np.array([[at_us] for _, at_us in waiting], dtype=np.float64)
        block = ObservationBlock(
            x=np.stack([value for value, _ in waiting])[:, None, :],
            seen=np.ones_like(times, dtype=bool),
            mass=np.zeros_like(times),
            at_us=np.maximum.accumulate(times),
        )
        path = learner.run(state[None], block)
        state = path.stopped(np.array([len(waiting) - 1]))[0]
        self._states[key] = state


def _key(one: Learned) -> tuple[int, str, str]:
    return one.slice_id, one.signal.metric, one.signal.kind


def _with_pool(learned: Sequence[Learned], pooled: Mapping[int, str]) -> list[Learned]:
    """Return the same, with tails of too few groups replaced by the pooled tail of the pooled slices."""
    tails = {
        baseline.slice_id: baseline
        for baseline in learned
        if baseline.slice_id in pooled and baseline.signal.kind == TAIL.kind
    }
    if lacking := [
        name for slice_id, name in pooled.items() if slice_id not in tails or tails[slice_id].content is None
    ]:
        raise OperatorError(
            f"{', '.join(lacking)} cannot be pooled: each of them needs {pooled_histogram.READY:,} exchanges"
        )
    contents = [msgspec.convert(baseline.content, TailBaseline) for baseline in tails.values()]
    content = msgspec.to_builtins(pooled_histogram.pool(contents))
    return [
        msgspec.structs.replace(baseline, content=content, missing=0)
        if baseline.signal.kind == TAIL.kind and baseline.content is None
        else baseline
        for baseline in learned
    ]


async def freeze_or_keep(database: Database, scope: DecisionScope, source: Source) -> int:
    """Record a decision about the current baselines (`FROZEN` or `KEPT`); return how many signals it is about.

    Raises
    ------
    OperatorError
        There is no such model, version or slice, none of the signals has a baseline, or no alert has set aside groups
        that could be kept.
    """
    async with database.begin() as connection:
        version = await find_version(connection, scope.model, scope.version)
        slices = await find_slices(connection, scope.model, scope.slices)
        learned = await learned_signals(connection, version.id)
        keys = [
            (slice_id, signal.metric.value, kind.value)
            for slice_id in slices
            for signal in BUILT_IN
            for kind in signal.kinds
            if kind is not DetectorKind.BUDGET
            and _wanted(signal.metric, scope.metrics)
            and (slice_id, signal.metric.value, kind.value) in learned
        ]
        if not keys:
            raise OperatorError(
                f"no selected signal of {scope.model} {version.name} has a baseline and is still watched: "
                "`quantdrift slices show` says what is missing"
            )
        made_by = await who(connection)
        decisions = [
            msgspec.structs.replace(
                _about(
                    version.id, slice_id, metric, kind, source=source, made_by=made_by, reason=scope.reason
                ),
                n_groups=n_groups,
            )
            for slice_id, metric, kind in keys
            if (n_groups := _n_groups_after(kind, learned[slice_id, metric, kind], source)) is not None
        ]
        if not decisions:
            raise OperatorError(
                f"no selected baseline of {scope.model} {version.name} has enough groups to be frozen yet"
                if source is Source.FROZEN
                else f"no alert has set aside exchanges of the selected signals of {scope.model} {version.name}: there is "
                "nothing to keep"
            )
        action = Action.BASELINE_FREEZE if source is Source.FROZEN else Action.BASELINE_KEEP
        await decide(connection, decisions, action, model=scope.model, note=scope.reason)
    return len(decisions)


def _n_groups_after(kind: str, stored: bytes, source: Source) -> int | None:
    """Return how many groups a baseline has after the decision; None where the decision changes nothing."""
    learner = LEARNERS[kind]
    state = load_state(kind, stored, learner.size)
    if source is Source.FROZEN:
        if learner.missing(state):
            return None
        learner.freeze(state)
    else:
        if not learner.aside(state):
            return None
        learner.keep(state)
    return learner.learned(state)


async def import_(
    database: Database, config: Config, scope: DecisionScope, figures: Sequence[Imported]
) -> list[Imported]:
    """Record budgets from an offline evaluation, which replace the configuration's; return them.

    Raises
    ------
    OperatorError
        There is no such model, version or slice, a figure is not a valid budget, or there are no figures.
    """
    if not any(_wanted(figure.metric.value, scope.metrics) for figure in figures):
        left_out = f"of {', '.join(scope.metrics)} " if scope.metrics and figures else ""
        raise OperatorError(f"there is no figure {left_out}to import: nothing was recorded")
    budget = config.budget(scope.model)
    async with database.begin() as connection:
        version = await find_version(connection, scope.model, scope.version)
        slices = await find_slices(connection, scope.model, sorted({figure.slice for figure in figures}))
        ids = {name: slice_id for slice_id, name in slices.items()}
        wanted = [figure for figure in figures if _wanted(figure.metric.value, scope.metrics)]
        for figure in wanted:
            if figure.metric not in WATCHED:
                raise OperatorError(f"`{figure.metric}` has no budget: give {' or '.join(WATCHED)}")
            top = cap_of(figure.metric, budget)
            if figure.upper is not None and not LEAST_BUDGET <= figure.upper < top:
                raise OperatorError(
                    f"slice `{figure.slice}`: an upper bound of {figure.upper:g} for {figure.metric} is not between "
                    f"{LEAST_BUDGET:g} and {top:g}"
                )
            if figure.n < 0:
                raise OperatorError(
                    f"slice `{figure.slice}`: n is {figure.n}, but a number of items cannot be negative"
                )
        if twice := [
            key for key, n in Counter((figure.slice, figure.metric) for figure in wanted).items() if n > 1
        ]:
            raise OperatorError(f"slice `{twice[0][0]}` has two figures for {twice[0][1]}: give only one")
        made_by = await who(connection)
        await decide(
            connection,
            [
                msgspec.structs.replace(
                    _about(
                        version.id,
                        ids[figure.slice],
                        figure.metric.value,
                        BUDGET.kind,
                        source=Source.IMPORTED,
                        made_by=made_by,
                        reason=scope.reason,
                    ),
                    n_groups=figure.n,
                    content={} if figure.upper is None else {"budget": figure.upper},
                )
                for figure in wanted
            ],
            Action.BASELINE_IMPORT,
            model=scope.model,
            note=scope.reason,
        )
    return wanted


def _about(
    version_id: int, slice_id: int, metric: str, kind: str, *, source: Source, made_by: str, reason: str
) -> BaselineDecision:
    return BaselineDecision(
        model_version_id=version_id,
        slice_id=slice_id,
        metric=metric,
        kind=kind,
        source=source,
        made_by=made_by,
        reason=reason,
        from_at=None,
        to_at=None,
        n_groups=0,
        from_version_id=None,
        content=None,
    )


def _wanted(metric: str, metrics: Sequence[Metric]) -> bool:
    return not metrics or metric in {selected.value for selected in metrics}
