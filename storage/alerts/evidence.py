"""The comparisons around an onset, for the explanation of an alert: bounded reads, inside the fold's transaction.

Every read follows the primary key of `comparison`, newest first, and ends after a fixed number of the version's rows;
only the timeout limits how many rows of other versions it skips. Only rows count that were folded no later than the
change of verdict: the same data gives the same rows, however the batches were cut into folds.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Verdict
from quantdrift.facts.events import AlertEvent, event_of
from quantdrift.storage.alerts.alerts import DETAILS, LAST_EVENT
from quantdrift.storage.database import translated
from quantdrift.storage.described_clusters import described
from quantdrift.storage.fold_rows import from_us, to_us
from quantdrift.storage.newest_rows import newest
from quantdrift.storage.signals import named_values

MOST_ROWS: Final = 5_000  # items of a window: enough to tell 1 % from 1.6 %
MOST_SCANNED: Final = 100_000  # items of the version that are read to find those of a rare slice
_MOST_ALERTS: Final = 256

_OF_TIME: Final = {
    "since": "cast(:begin as timestamptz)",
    "before": "cast(:end as timestamptz)",
    "most": "cast(:scanned as integer)",
    "folded": "cast(:fold_seq as bigint)",
}
_NEWEST_OF_SLICE: Final = f"""
    select newest.captured_at, newest.exchange_id::text, newest.item, newest.group_key, newest.slice_ids, newest.pi, {{columns}}
    from {
    newest(
        "c.captured_at, c.exchange_id, c.item, c.group_key, c.slice_ids, c.pi1 * c.pi2 as pi, {read}",
        **_OF_TIME,
        version="cast(:version as integer)",
        more="join batch b on b.id = c.batch_id where c.model_version_id = :version and b.fold_seq <= :fold_seq",
    )
} newest
    where newest.slice_ids @> array[cast(:slice as int)]
    order by newest.captured_at desc, newest.exchange_id desc, newest.item desc limit :most
"""  # noqa: S608 - constants
_ITEM_COLUMNS: Final = (
    "newest.flip, newest.divergence, newest.reference_margin, newest.source, newest.batch_id, newest.latency_s, newest.n_items,"
    " newest.not_finite, newest.measure, newest.signals"
)
_ITEM: Final = (
    "c.flip, c.divergence, c.reference_margin, c.source, c.batch_id, c.latency_s, c.n_items,"
    " coalesce(c.detail ? 'candidate_not_finite', false) as not_finite, c.detail ->> 'measure' as measure, {signals} as signals"
)
_DETAILS: Final = text(_NEWEST_OF_SLICE.format(columns="newest.detail", read="c.detail::text as detail"))
_NEWEST: Final = text(f"""
    select newest.model_version_id from {
    newest(
        "c.captured_at, c.exchange_id, c.item, c.slice_ids, c.model_version_id",
        **_OF_TIME,
        more="join batch b on b.id = c.batch_id where c.model_version_id = any(cast(:versions as int[])) and b.fold_seq <= :fold_seq",
    )
} newest
    where newest.slice_ids @> array[cast(:slice as int)]
    order by newest.captured_at desc, newest.exchange_id desc, newest.item desc limit 1
""")  # noqa: S608 - constants
_PROVENANCE: Final = text("select id, provenance from batch where id = any(cast(:batches as bigint[]))")
_STORED: Final = text("select stored_at from batch where fold_seq = :fold_seq")
_DOUBT: Final = text("""
    select doubt from doubt join model_version using (model, reference_digest)
    where model_version.id = :version and doubt <> ''
""")
_ALERTING: Final = text(f"""
    select a.model_version_id, a.slice_id, a.severity, {DETAILS} as details from alert a {LAST_EVENT}
    where a.resolved_at is null and a.model_version_id = any(cast(:versions as int[])) order by a.id limit :most
""")  # noqa: S608 - constants


class EvidenceItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item; columns as in `comparison`, `group` the session or else the exchange.

    `not_finite`: the candidate's output was not a number, infinite or empty. `n_items`: of its exchange. `signals`: the values of the
    signals of plug-ins, by name. `measure`: what the divergence of generated text is, `kl`, `regret` or `none`.
    """

    captured_us: int
    exchange: str
    group: str
    slice_ids: tuple[int, ...]
    pi: float
    flip: float | None
    divergence: float | None
    margin: float | None
    source: str
    batch_id: int
    not_finite: bool = False
    latency_s: float | None = None
    n_items: int = 1
    signals: Mapping[str, float] = {}
    measure: str | None = None


class DetailItem(msgspec.Struct, frozen=True, kw_only=True):
    """Other measures of one item: `detail` is the text of a JSON object, the other fields are as in `EvidenceItem`."""

    exchange: str
    group: str
    pi: float
    detail: str | None


class Alerting(msgspec.Struct, frozen=True, kw_only=True):
    """An open alert with its event."""

    model_version_id: int
    slice_id: int
    severity: Verdict
    event: AlertEvent


class Evidence:
    """Reads of the comparisons around an onset.

    Parameters
    ----------
    connection
        Inside the fold's transaction.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def bounded(self, timeout_s: float) -> AsyncIterator[None]:
        """Limit each statement in the block to `timeout_s`; after an error only the block is rolled back.

        Raises
        ------
        RetryError
            A statement took too long, or Postgres is not available.
        """
        async with translated(), self._connection.begin_nested():
            before = await self._connection.scalar(text("select current_setting('statement_timeout')"))
            await self._limit(f"{int(timeout_s * 1000)}ms")
            yield
            await self._limit(str(before))

    async def items(
        self, *, version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> list[EvidenceItem]:
        """Return the newest items of a slice captured in [begin, end) and folded up to `fold_seq`, at most 5,000."""
        read = _ITEM.format(signals=named_values())
        query = text(_NEWEST_OF_SLICE.format(columns=_ITEM_COLUMNS, read=read))
        result = await self._connection.execute(query, _newest(version, slice_id, begin_us, end_us, fold_seq))
        return [
            EvidenceItem(
                captured_us=to_us(captured_at),
                exchange=exchange,
                group=group or exchange,
                slice_ids=tuple(slice_ids),
                pi=pi,
                flip=None if flip is None else float(flip),
                divergence=divergence,
                margin=margin,
                source=source,
                batch_id=batch_id,
                not_finite=not_finite,
                latency_s=latency_s,
                n_items=n_items,
                signals=signals or {},
                measure=measure,
            )
            for (
                captured_at,
                exchange,
                _,
                group,
                slice_ids,
                pi,
                flip,
                divergence,
                margin,
                source,
                batch_id,
                latency_s,
                n_items,
                not_finite,
                measure,
                signals,
            ) in result
        ]

    async def details(
        self, *, version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> list[DetailItem]:
        """Return the other measures of the items that `items` returns."""
        result = await self._connection.execute(
            _DETAILS, _newest(version, slice_id, begin_us, end_us, fold_seq)
        )
        return [
            DetailItem(
                exchange=row["exchange_id"],
                group=row["group_key"] or row["exchange_id"],
                pi=row["pi"],
                detail=row["detail"],
            )
            for row in result.mappings()
        ]

    async def last_compared(
        self, *, versions: Sequence[int], slice_id: int, begin_us: int, end_us: int, fold_seq: int
    ) -> int | None:
        """Return the version, of those given, with the slice's newest item captured in [begin, end), or None."""
        version_id: int | None = await self._connection.scalar(
            _NEWEST,
            {
                "begin": from_us(begin_us),
                "end": from_us(end_us),
                "versions": list(versions),
                "slice": slice_id,
                "fold_seq": fold_seq,
                "scanned": MOST_SCANNED,
            },
        )
        return version_id

    async def provenance(self, batches: Sequence[int]) -> dict[int, dict[str, str]]:
        """Return per batch the engine that replayed it: runtime, version, provider, device; empty where unknown."""
        result = await self._connection.execute(_PROVENANCE, {"batches": list(batches)})
        return {row["id"]: row["provenance"] for row in result.mappings()}

    async def stored_at_us(self, fold_seq: int) -> int | None:
        """Return when a folded batch was stored, or None where there is no such batch."""
        at = await self._connection.scalar(_STORED, {"fold_seq": fold_seq})
        return None if at is None else to_us(at)

    async def doubt(self, version: int) -> str | None:
        """Return where the outputs of a version's reference contradict the configuration, or None."""
        doubt: str | None = await self._connection.scalar(_DOUBT, {"version": version})
        return doubt

    async def cluster(self, version: int, slice_id: int) -> dict[str, Any] | None:
        """Return a learned slice as its fit described it, or None."""
        return (await described(self._connection, version, [slice_id])).get(slice_id)

    async def alerting(self, versions: Sequence[int]) -> list[Alerting]:
        """Return the open alerts of some versions, oldest first, at most 256; without those whose event is not readable."""
        result = await self._connection.execute(_ALERTING, {"versions": list(versions), "most": _MOST_ALERTS})
        return [
            Alerting(
                model_version_id=row["model_version_id"],
                slice_id=row["slice_id"],
                severity=Verdict(row["severity"]),
                event=event,
            )
            for row in result.mappings()
            if (event := event_of(row["details"])) is not None
        ]

    async def _limit(self, setting: str) -> None:
        await self._connection.execute(
            text("select set_config('statement_timeout', :setting, true)"), {"setting": setting}
        )


def _newest(version: int, slice_id: int, begin_us: int, end_us: int, fold_seq: int) -> dict[str, Any]:
    return {
        "begin": from_us(begin_us),
        "end": from_us(end_us),
        "version": version,
        "slice": slice_id,
        "fold_seq": fold_seq,
        "scanned": MOST_SCANNED,
        "most": MOST_ROWS,
    }
