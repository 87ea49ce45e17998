"""The reads and writes of `quantdrift baseline`: versions, slices, rows to learn from, decisions."""

from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import OperatorError
from quantdrift.storage import queries
from quantdrift.storage.audit import Action, add
from quantdrift.storage.fold.read import comparison_row
from quantdrift.storage.fold_rows import ComparisonRow, Source
from quantdrift.storage.schema.tables import BaselineTable
from quantdrift.storage.signals import named_values
from quantdrift.storage.snapshot import rows

_VERSIONS: Final = text("""
    select id, candidate_version, first_seen_at, reference_digest from model_version
    where model = :model order by reference_digest = '', first_seen_at desc, id desc
""")
_MODELS: Final = text("select distinct model from model_version order by model")
_SLICES: Final = text("select id, name from slice where model = :model order by id")
_IN_FORCE: Final = text("""
    select distinct on (v.model, v.id, s.id, b.metric, b.kind) b.id, v.model, v.candidate_version as version,
        s.name as slice, b.metric, b.kind, b.source, b.made_by, b.made_at, b.reason, b.from_at, b.to_at, b.n_groups,
        f.candidate_version as from_version, b.content, b.fold_seq
    from baseline b join model_version v on v.id = b.model_version_id join slice s on s.id = b.slice_id
        left join model_version f on f.id = b.from_version_id
    where (:model = '' or v.model = :model) and (:version = '' or v.candidate_version = :version)
        and (:slice = '' or s.name = :slice)
    order by v.model, v.id, s.id, b.metric, b.kind, b.id desc
""")
_HISTORY: Final = text(_IN_FORCE.text.replace("distinct on (v.model, v.id, s.id, b.metric, b.kind)", ""))
# In pages by the primary key: whole exchanges, in the order of capture, however many there are.
_ROWS: Final = """
    select batch_id, c.exchange_id::text, item, captured_at, model_version_id, policy_id, slice_ids, group_key,
        pi1, pi2, u1, u2, candidate_margin, flip, tie, topk, js, divergence, margin, latency_s, {signals} as signals
    from comparisons(cast(:at as timestamptz), :end, cast(:slices as int[])) c join batch on batch.id = c.batch_id
    where model_version_id = :version
        -- Rows that wait for the monitor are learned when they are folded, and must not be learned twice.
        and batch.fold_seq is not null and slice_ids && cast(:slices as int[])
        and (captured_at, c.exchange_id, item) > (:at, cast(:exchange as uuid), :item)
    order by captured_at, c.exchange_id, item limit :most
"""
_LEARNED: Final = text("""
    select distinct b.slice_id, b.metric, b.kind, d.state
    from baseline b join detector d using (model_version_id, slice_id, metric, kind)
    where b.model_version_id = :version and b.content is not null and b.kind <> 'budget' and b.fold_seq is not null
        and d.retired_at is null
""")
_WATCHED: Final = text("""
    select slice_id, metric, kind from detector where model_version_id = :version and retired_at is null
""")
_REPLACED: Final = text("""
    select source, count(*) as n from (
        select distinct on (b.slice_id, b.metric, b.kind) b.source
        from unnest(cast(:slices as int[]), cast(:metrics as text[]), cast(:kinds as text[])) one (slice_id, metric, kind)
        join baseline b using (slice_id, metric, kind) where b.model_version_id = :version
        order by b.slice_id, b.metric, b.kind, b.id desc
    ) newest group by source order by source
""")
_WAITING: Final = text("""
    select count(*) from comparisons(:begin, :end) c join batch b on b.id = c.batch_id
    where b.fold_seq is null and c.model_version_id = :version
""")
_PAGE: Final = 10_000
_PAGE_KEY: Final = {"at": "captured_at", "exchange": "exchange_id", "item": "item"}
_BASELINES_NOW: Final = text(queries.BASELINES)


class VersionFact(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate version that has a reference."""

    id: int
    name: str
    first_seen_at: datetime


class BaselineFact(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline or a decision about one, as people read it."""

    id: int
    model: str
    version: str
    slice: str
    metric: str
    kind: str
    source: Source
    made_by: str
    made_at: datetime
    reason: str
    from_at: datetime | None
    to_at: datetime | None
    n_groups: int
    from_version: str | None
    content: dict[str, Any] | None
    fold_seq: int | None


class BaselineDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A person's decision about one signal; columns as in `baseline`."""

    model_version_id: int
    slice_id: int
    metric: str
    kind: str
    source: Source
    made_by: str
    reason: str
    from_at: datetime | None
    to_at: datetime | None
    n_groups: int
    from_version_id: int | None
    content: dict[str, Any] | None


async def find_version(connection: AsyncConnection, model: str, name: str) -> VersionFact:
    """Return a version of `model` that has a reference; the newest where `name` is empty.

    Raises
    ------
    OperatorError
        There is none of that name, or it has no reference; the message says which there are.
    """
    every = (await connection.execute(_VERSIONS, {"model": model})).mappings().all()
    rows = [row for row in every if row["reference_digest"]]
    if not rows:
        models = ", ".join((await connection.scalars(_MODELS)).all()) or "none"
        raise OperatorError(
            f"the database has no version of model `{model}` with a reference; models: {models}"
        )
    for row in rows:
        if name in {"", row["candidate_version"]}:
            return VersionFact(
                id=row["id"], name=row["candidate_version"], first_seen_at=row["first_seen_at"]
            )
    versions_known = ", ".join(row["candidate_version"] for row in rows)
    if name in {row["candidate_version"] for row in every}:
        raise OperatorError(
            f"version `{name}` of model `{model}` has no reference, so it is not compared: name a reference in "
            f"models.references. Versions with one: {versions_known}"
        )
    raise OperatorError(
        f"model `{model}` has no version `{name}` in the database; versions: {versions_known}"
    )


async def find_slices(connection: AsyncConnection, model: str, names: Sequence[str]) -> dict[int, str]:
    """Return ids and names of slices of `model`; all of them where `names` is empty.

    Raises
    ------
    OperatorError
        There is no slice of that name.
    """
    slice_names = {row.id: row.name for row in await connection.execute(_SLICES, {"model": model})}
    if missing := set(names) - set(slice_names.values()):
        raise OperatorError(
            f"model `{model}` has no slice {', '.join(f'`{name}`' for name in sorted(missing))}; "
            f"slices: {', '.join(slice_names.values())}"
        )
    return {slice_id: name for slice_id, name in slice_names.items() if not names or name in names}


async def baselines(
    connection: AsyncConnection,
    *,
    model: str = "",
    version: str = "",
    slice_name: str = "",
    history: bool = False,
) -> list[BaselineFact]:
    """Return the newest baseline of each signal, or with `history` all of them, newest first within a signal."""
    wanted = {"model": model, "version": version, "slice": slice_name}
    rows = await connection.execute(_HISTORY if history else _IN_FORCE, wanted)
    return [msgspec.convert(dict(row), BaselineFact) for row in rows.mappings()]


async def learned_signals(connection: AsyncConnection, version_id: int) -> dict[tuple[int, str, str], bytes]:
    """Return the watched signals of a version (slice, metric, kind) that have a baseline, with their detector's state.

    The state is that of the table `detector`, not decoded.
    """
    rows = await connection.execute(_LEARNED, {"version": version_id})
    return {(row.slice_id, row.metric, row.kind): bytes(row.state) for row in rows}


async def watched_signals(connection: AsyncConnection, version_id: int) -> set[tuple[int, str, str]]:
    """Return the signals of a version (slice, metric, kind) that the monitor watches now."""
    rows = await connection.execute(_WATCHED, {"version": version_id})
    return {(row.slice_id, row.metric, row.kind) for row in rows}


async def count_waiting(connection: AsyncConnection, version_id: int, begin: datetime, end: datetime) -> int:
    """Return how many comparisons of a version, captured in [begin, end), no monitor has folded yet."""
    wanted = {"version": version_id, "begin": begin, "end": end}
    return int(await connection.scalar(_WAITING, wanted) or 0)


async def rows_since(
    connection: AsyncConnection, version_id: int, slice_ids: Sequence[int], begin: datetime, end: datetime
) -> AsyncIterator[list[ComparisonRow]]:
    """Yield a version's rows that lie in any of the slices, in the order of capture, whole exchanges at a time."""
    last = {"at": begin, "exchange": "00000000-0000-0000-0000-000000000000", "item": -1}
    within = {"version": version_id, "slices": list(slice_ids), "begin": begin, "end": end, "most": _PAGE}
    rows: list[ComparisonRow] = []
    query = text(_ROWS.format(signals=named_values()))
    while True:
        page = (await connection.execute(query, {**within, **last})).mappings().all()
        rows += [comparison_row(row) for row in page]
        if len(page) < _PAGE:
            break
        last = {key: page[-1][name] for key, name in _PAGE_KEY.items()}
        cut = len(rows) - 1
        while cut > 0 and rows[cut - 1].exchange_id == rows[cut].exchange_id:
            cut -= 1
        if cut:  # an exchange may be longer than a page
            yield rows[:cut]
        rows = rows[cut:]
    if rows:
        yield rows


async def decide(
    connection: AsyncConnection,
    decisions: Sequence[BaselineDecision],
    action: Action,
    *,
    model: str,
    note: str,
) -> None:
    """Record decisions about one version and their entry in the audit; the monitor applies them with its next batch."""
    if not decisions:
        return
    wanted = {
        "version": decisions[0].model_version_id,
        "slices": [decision.slice_id for decision in decisions],
        "metrics": [decision.metric for decision in decisions],
        "kinds": [decision.kind for decision in decisions],
    }
    before = {row.source: row.n for row in await connection.execute(_REPLACED, wanted)}
    values = [msgspec.structs.asdict(decision) | {"source": decision.source.value} for decision in decisions]
    ids = (await connection.scalars(insert(BaselineTable).returning(BaselineTable.id), values)).all()
    slices = {decision.slice_id for decision in decisions}
    await add(
        connection,
        action,
        model=model,
        subject=f"slice {min(slices)}" if len(slices) == 1 else f"{len(slices)} slices",
        before={"signals": before},
        after={
            "signals": {decisions[0].source.value: len(decisions)},
            "version": decisions[0].model_version_id,
            "baselines": [min(ids), max(ids)],
        },
        note=note,
    )


class BaselineNow(msgspec.Struct, frozen=True, kw_only=True):
    """The baseline of one metric that applies now.

    Parameters
    ----------
    total, share
        Sums over its groups: their quotient is its mean, divided by the metric's cap.
    learned_s
        Of the latency: the seconds that at most 1 % of the exchanges exceeded; None for other metrics.
    """

    metric: str
    source: str
    made_by: str
    made_at: datetime
    from_at: datetime | None
    to_at: datetime | None
    n_groups: int
    total: float | None
    share: float | None
    learned_s: float | None = None

    @property
    def level(self) -> float | None:
        """Its mean, divided by the metric's cap; None: it has no groups."""
        return self.total / self.share if self.total is not None and self.share else None


async def baselines_now(
    connection: AsyncConnection, version_id: int, slice_id: int
) -> dict[str, BaselineNow]:
    """Return the learned or accepted baseline that applies now, by metric."""
    records = await rows(connection, BaselineNow, _BASELINES_NOW, version=version_id, slice=slice_id)
    return {baseline.metric: baseline for baseline in records}
