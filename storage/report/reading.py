"""The reads of a report: one snapshot, a fixed number of statements, and typed facts as results."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric, Verdict
from quantdrift.facts.estimate import Estimate
from quantdrift.storage.account.coverage import Coverage
from quantdrift.storage.database import Database
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.spans import VersionReader
from quantdrift.storage.schema.tables import ReportRun
from quantdrift.storage.snapshot import SnapshotReader

_VERSIONS = text("""
    select id, model, candidate_version, reference_digest, coalesce(reference ->> 'precision', '') as precision, first_seen_at,
        coalesce(doubt, '') as doubt
    from model_version left join doubt using (model, reference_digest)
    where :model = '' or model = :model order by model, id
""")

_SLICES = text(
    "select id, model, name, predicate from slice where :model = '' or model = :model order by model, id"
)

_VERDICTS = text("""
    with later as (
        select distinct on (model_version_id, slice_id) model_version_id, slice_id, from_verdict
        from transition where at >= :end order by model_version_id, slice_id, fold_seq, id
    )
    select v.model_version_id, v.slice_id, coalesce(l.from_verdict, v.verdict) as verdict,
        case when l.from_verdict is null then v.reason else '' end as reason, v.since, v.estimate
    from verdict v left join later l using (model_version_id, slice_id)
    where v.model_version_id = any(cast(:versions as int[])) order by 1, 2
""")

_CHANGES = text("""
    select count(*) filter (where paged_now) as pages, count(*) filter (where warned_now and not paged) as tickets
    from (
        select bool_or(to_verdict = 'firing') as paged, bool_or(to_verdict = 'firing' and at >= :begin) as paged_now,
            bool_or(to_verdict = 'warning' and at >= :begin) as warned_now
        from transition
        where at < :end and alert_id in (
            select alert_id from transition
            where at >= :begin and at < :end and model_version_id = any(cast(:versions as int[]))
        )
        group by alert_id
    ) told
""")

# What decides about a verdict: the set-up of the database and of NATS does not.
_DECISIONS = text("""
    select at, actor, action, model, subject, note from audit
    where at >= :begin and at < :end and (:model = '' or model in ('', :model))
        and action not in ('db upgrade', 'setup postgres', 'setup nats', 'pause seen')
    order by seq desc limit :most
""")
_MOST_DECISIONS = 200

_EXAMPLES = text("""
    select exchange_id::text, item, captured_at, flip, divergence, trace, detail from comparison
    where captured_at >= :begin and captured_at < :end and model_version_id = :version
        and slice_ids @> array[cast(:slice as int)] and (flip or not :flips)
    order by flip desc nulls last, divergence desc nulls last, captured_at desc limit :most
""")


class _Fact(msgspec.Struct, frozen=True, kw_only=True):
    """A row, or a sum of rows, of the database."""


class Version(_Fact, frozen=True, kw_only=True):
    """A candidate version with its reference; digest and precision of it are empty where it has none.

    `doubt` is what that reference's outputs say against the configuration; empty: nothing.
    """

    id: int
    model: str
    candidate_version: str
    reference_digest: str
    precision: str = ""
    doubt: str = ""
    first_seen_at: datetime


class SliceName(_Fact, frozen=True, kw_only=True):
    """A slice with its name and predicate."""

    id: int
    model: str
    name: str
    predicate: str


class VerdictFact(_Fact, frozen=True, kw_only=True):
    """The verdict of a slice at the end of the period.

    Parameters
    ----------
    reason
        In words.
    budgets
        Accepted mean by metric, as the monitor wrote it; may lack some.
    noise
        The allowance for noise that was added to the budget, if there was one.
    recent
        By metric the recent mean, over the detector's window.
    """

    version_id: int
    slice_id: int
    verdict: Verdict
    reason: str
    since: datetime
    budgets: dict[Metric, float]
    noise: dict[Metric, float] = {}
    recent: dict[Metric, Estimate] = {}


class Example(_Fact, frozen=True, kw_only=True):
    """An example exchange of an alert; `trace` is its traceparent or empty, `detail` has its other measures."""

    exchange_id: str
    item: int
    captured_at: datetime
    flip: bool | None
    divergence: float | None
    trace: str
    detail: dict[str, Any] | None = None


class Decision(_Fact, frozen=True, kw_only=True):
    """An entry of the audit: what a person decided, about what, and why; `model` is empty where it is no single one."""

    at: datetime
    actor: str
    action: str
    model: str
    subject: str
    note: str


class Changes(_Fact, frozen=True, kw_only=True):
    """The number of alerts in the period: those that paged, and those that remained tickets."""

    pages: int
    tickets: int


class Reader(SnapshotReader):
    """Reads in one snapshot of the database.

    Parameters
    ----------
    connection
        Inside a transaction; `reading` opens one.

    Attributes
    ----------
    divergence
        Sums over comparisons and roll-ups.
    coverage
        Counts of what was offered and lost.
    versions_read
        When each version was compared, and its sums over sessions.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        super().__init__(connection)
        self.divergence = Divergence(connection)
        self.coverage = Coverage(connection)
        self.versions_read = VersionReader(connection)

    async def versions(self, model: str = "") -> list[Version]:
        """Return the candidate versions of `model`, or of all, oldest first."""
        return [Version(**row) for row in await self._rows(_VERSIONS, model=model)]

    async def slices(self, model: str = "") -> list[SliceName]:
        """Return the slices of `model`, or of all."""
        return [SliceName(**row) for row in await self._rows(_SLICES, model=model)]

    async def verdicts(self, end: datetime, versions: Sequence[int]) -> list[VerdictFact]:
        """Return the verdict of each slice at `end`; the reason is empty where the verdict has changed since."""
        return [
            VerdictFact(
                version_id=row["model_version_id"],
                slice_id=row["slice_id"],
                verdict=Verdict(row["verdict"]),
                reason=row["reason"],
                since=row["since"],
                budgets=_of_estimate(row["estimate"], "budget"),
                noise=_of_estimate(row["estimate"], "noise"),
                recent=_recent(row["estimate"]),
            )
            for row in await self._rows(_VERDICTS, end=end, versions=list(versions))
        ]

    async def changes(self, begin: datetime, end: datetime, versions: Sequence[int]) -> Changes:
        """Return how many alerts paged in a period, and how many warned in it and did not page by its end."""
        return Changes(**(await self._rows(_CHANGES, begin=begin, end=end, versions=list(versions)))[0])

    async def examples(
        self, begin: datetime, end: datetime, *, version: int, slice_id: int, flips: bool, most: int
    ) -> list[Example]:
        """Return exchanges of a slice in a short window, flipped ones first, then by divergence.

        Parameters
        ----------
        flips
            Only flipped ones: the examples of an alert that flips decided.
        """
        wanted = {"begin": begin, "end": end, "version": version, "slice": slice_id, "flips": flips}
        rows = await self._rows(_EXAMPLES, **wanted, most=most)
        return [Example(**row) for row in rows]

    async def decisions(self, begin: datetime, end: datetime, model: str = "") -> list[Decision]:
        """Return what people decided in a period about `model`, or all: the newest 200, newest first."""
        wanted = {"begin": begin, "end": end, "model": model, "most": _MOST_DECISIONS}
        return [Decision(**row) for row in await self._rows(_DECISIONS, **wanted)]

    async def judged_until(self) -> datetime | None:
        """Return the capture time up to which the monitor has folded; None where it never has."""
        rows = await self._rows(text("select event_time from fold"))
        return rows[0]["event_time"] if rows else None


@asynccontextmanager
async def reading(database: Database) -> AsyncIterator[Reader]:
    """Open a snapshot: all reads see the same state of the database, and nothing can be written.

    Raises
    ------
    OperatorError
        The database has no tables yet.
    RetryError
        Postgres is not available.
    """
    async with database.begin() as connection:
        await connection.execute(text("set transaction isolation level repeatable read, read only"))
        if await connection.scalar(text("select to_regclass('report_run') is null")):
            raise OperatorError("the database has no tables yet: run `quantdrift db upgrade`")
        yield Reader(connection)


async def record_run(
    database: Database, *, kind: str, begin: datetime, end: datetime, path: str, figures: Mapping[str, Any]
) -> int:
    """Store the run of a report with its figures (JSON types only), and return its id."""
    async with database.begin() as connection:
        statement = insert(ReportRun).values(kind=kind, from_at=begin, to_at=end, path=path, figures=figures)
        return int(await connection.scalar(statement.returning(ReportRun.id)) or 0)


def _recent(estimate: Mapping[str, Any]) -> dict[Metric, Estimate]:
    """Return, by metric, the recent mean with its interval."""
    means, lows, highs = (_of_estimate(estimate, member) for member in ("mean", "low", "high"))
    return {
        metric: Estimate(mean=mean, low=lows.get(metric), high=highs.get(metric))
        for metric, mean in means.items()
    }


def _of_estimate(estimate: Mapping[str, Any], member: str) -> dict[Metric, float]:
    """Return, by metric, one member of the objects in `verdict.estimate`, where it is present."""
    return {
        Metric(name): float(entry[member])
        for name, entry in estimate.items()
        if name in Metric.names() and isinstance(entry, Mapping) and entry.get(member) is not None
    }
