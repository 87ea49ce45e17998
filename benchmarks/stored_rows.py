"""Rows for `python -m benchmarks.storage`: what a shadow worker stores of a digits model, many times over, and their roll-ups.

The values come from the product: its comparator compares logits of a reference with those of a candidate that is a little off, and
its writer stores them. Postgres then draws from these rows, with times, ids, sessions, traces and slices of their own.

Every exchange lies in five slices: `all`, one of 8 scanners, one of 24 hours of the day, one of 6 clients and one of many
tenants. The scanners differ in their traffic and in how far the candidate is off.
"""

import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Final

import asyncpg
import msgspec
import numpy as np

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import OutputKind, Slice
from quantdrift.core.records import BodyStratum, Exchange, HeaderStratum, Policy, Predicate, Sampling
from quantdrift.core.slices import SliceKey, everything
from quantdrift.core.stream.numbering import Numbered
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.shadow.replay.rows import items_of
from quantdrift.storage.comparisons.rows import ComparedExchange, StoreBatch, VersionKey
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.schema.partitions import ensure_partitions

MODEL: Final = "digits"
VERSION: Final = VersionKey(model=MODEL, candidate_version="int8-7", reference_digest="5f1d" * 16)
DAYS: Final = 14
BATCH: Final = 64
POLICY: Final = Policy(
    epoch="e1",
    header_strata=(
        HeaderStratum(name="archive", rate=1.0, headers={"x-scanner": "archive"}),
        HeaderStratum(name="default", rate=0.2),
    ),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)
RULES: Final = (
    Slice(name="scanner", header="x-scanner"),
    Slice(name="client", header="x-client"),
    Slice(name="tenant", header="x-tenant", max_values=1000),
)
"""Slices of the hour are another rule; here they need no place."""
_HOURS: Final = 24
_CLIENTS: Final = 6
_CLASSES: Final = 10
_DAY: Final = timedelta(days=1)
_BOOT: Final = "b007" * 8
_EVERYTHING: Final = everything(MODEL)


class Scanner(msgspec.Struct, frozen=True, kw_only=True):
    """A scanner, its share of the traffic, and how far the candidate's logits are off."""

    name: str
    share: float
    off: float = 0.15


SCANNERS: Final = (
    Scanner(name="office", share=0.5),
    Scanner(name="lab", share=0.15, off=0.01),
    Scanner(name="microfilm", share=0.15),
    Scanner(name="desk", share=0.1),
    Scanner(name="fax", share=0.066),
    Scanner(name="mobile", share=0.03, off=0.01),
    Scanner(name="archive", share=0.002, off=1.2),
    Scanner(name="kiosk", share=0.002, off=0.01),
)
"""`archive` is rare and damaged, `kiosk` rare and sound; `mobile` and `lab` are as sound, and less rare."""


def slice_of(name: str) -> str:
    """Return the name of a scanner's slice."""
    return f"scanner={name}"


@lru_cache(maxsize=4096)
def _key(key: str, value: str) -> SliceKey:
    return SliceKey(
        model=MODEL,
        name=f"{key.partition('-')[2]}={value}",
        predicate=f'{key} = "{value}"',
        where=(Predicate(key=key, equals=value),),
    )


@lru_cache(maxsize=4096)
def _slices(scanner: str, hour: str, client: str, tenant: str) -> tuple[SliceKey, ...]:
    """Return the slices of an item, the same objects for the same slices, as a worker has them."""
    return (
        _EVERYTHING,
        _key("header.x-scanner", scanner),
        _key("time.x-hour", hour),
        _key("header.x-client", client),
        _key("header.x-tenant", tenant),
    )


def exchanges(
    scanner: Scanner, at: datetime, n: int, rng: np.random.Generator, *, n_tenants: int
) -> list[ComparedExchange]:
    """Return exchanges of a scanner as a shadow worker has compared them, one item each."""
    reference = rng.normal(size=(n, _CLASSES))
    reference[np.arange(n), rng.integers(_CLASSES, size=n)] += rng.gamma(4.0, 1.5, n)
    candidate = reference + scanner.off * rng.normal(size=reference.shape)
    comparator = ClassificationComparator(OutputKind.LOGITS, 3)
    slices = [
        _slices(
            scanner.name,
            f"{at.hour:02d}",
            str(rng.integers(_CLIENTS)),
            f"{int(rng.random() ** 3 * n_tenants):04d}",
        )
        for _ in range(n)
    ]
    items = items_of(
        comparator.compare(candidate.astype(np.float32), reference.astype(np.float32)),
        slices=slices,
        features=[{}] * n,
        clusterings=[0] * n,
    )
    rate = 1.0 if scanner.name == "archive" else 0.2
    return [
        ComparedExchange(
            stream_sequence=number,
            payload=b"",
            exchange=Exchange(
                id=uuid.UUID(bytes=rng.bytes(16), version=4).hex,
                captured_at=at + timedelta(milliseconds=number),
                source="digits-5d8f7c9b4-x2x7k",
                model=MODEL,
                version=VERSION.candidate_version,
                protocol="oip-http",
                inputs=(),
                outputs=(),
                sampling=Sampling(
                    policy=POLICY,
                    header_stratum="archive" if rate == 1 else "default",
                    body_stratum="default",
                    pi1=rate,
                    pi2=1.0,
                    u1=float(rng.uniform(0, rate)),
                    u2=float(rng.random()),
                ),
                attributes={
                    "header.x-scanner": scanner.name,
                    "header.x-request-id": str(uuid.UUID(bytes=rng.bytes(16), version=4)),
                },
                group=rng.bytes(16).hex(),
                trace=f"00-{rng.bytes(16).hex()}-{rng.bytes(8).hex()}-01",
            ),
            version=VERSION,
            items=(item,),
        )
        for number, item in enumerate(items)
    ]


def batch_of(compared: Sequence[ComparedExchange], first: int = 1, boot: str = _BOOT) -> StoreBatch:
    """Return a batch as a shadow worker stores it; `first` is the number of its first exchange at this start of the sidecar."""
    return StoreBatch(
        numbered=tuple(Numbered(boot=boot, row=0, number=first + place) for place in range(len(compared))),
        known_by_number=True,
        worker="shadow-0",
        at=datetime.now(UTC),
        compared=tuple(compared),
        references={VERSION.reference_digest: '{"path": "models/digits-fp32.onnx"}'},
        provenance='{"runtime": "onnx", "version": "1.22.0", "provider": "CPUExecutionProvider"}',
    )


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded: rows, slices, and a request id of a row in the middle."""

    n_rows: int
    n_slices: int
    request_id: str
    version_id: int
    slices: dict[str, int]


async def load(dsn: str, *, n_rows: int, n_tenants: int, per_scanner: int = 1024) -> Loaded:
    """Fill `comparison` and `batch` with rows of the last `DAYS` days, in the order in which they were captured."""
    now = datetime.now(UTC)
    days = [now.date() - number * _DAY for number in reversed(range(DAYS))]
    db = await asyncpg.connect(dsn)
    try:
        async with Database(dsn) as database:
            async with database.begin() as connection:
                await ensure_partitions(connection, days[0] - _DAY, days[-1] + _DAY)
            rng = np.random.default_rng(16)
            writer = Writer(database, SystemClock())
            for scanner in SCANNERS:
                compared = exchanges(scanner, now, per_scanner, rng, n_tenants=n_tenants)
                await writer.store(batch_of(compared))
        await db.execute(_SAMPLE)
        await db.execute("analyze sample")
        await db.execute("truncate comparison")
        await db.execute("delete from batch")
        await db.execute(_SLICES, MODEL, _HOURS, _CLIENTS, n_tenants)
        slices = {
            row["name"]: row["id"]
            for row in await db.fetch("select name, id from slice where model = $1", MODEL)
        }
        for number, day in enumerate(days):
            part = range(n_rows * number // DAYS, n_rows * (number + 1) // DAYS)
            await _load_day(db, day, part, n_tenants, now)
        await db.execute("drop table sample")
        await db.execute("vacuum (analyze)")
        await db.execute("checkpoint")
        day = days[len(days) // 2]
        row = await db.fetchrow(
            "select attributes ->> 'header.x-request-id' as request, model_version_id as version from comparison"
            " where captured_at >= $1 limit 1",
            datetime(day.year, day.month, day.day, tzinfo=UTC),
        )
        return Loaded(
            n_rows=await db.fetchval("select count(*) from comparison"),
            n_slices=len(slices),
            request_id=row["request"],
            version_id=row["version"],
            slices=slices,
        )
    finally:
        await db.close()


async def _load_day(db: asyncpg.Connection, day: date, part: range, n_tenants: int, now: datetime) -> None:
    begin = datetime(day.year, day.month, day.day, tzinfo=UTC)
    which = part.start, part.stop, begin, min(_DAY, now - begin).total_seconds(), BATCH
    shares = np.cumsum([scanner.share for scanner in SCANNERS])[:-1].tolist()
    names = [slice_of(scanner.name) for scanner in SCANNERS]
    async with db.transaction():
        await db.execute(_BATCHES, *which)
        await db.execute(_ROWS, *which, n_tenants, shares, names)


_SAMPLE: Final = """
    create unlogged table sample as
    select c.*, row_number() over (partition by attributes ->> 'header.x-scanner') - 1 as number,
        count(*) over (partition by attributes ->> 'header.x-scanner') as n_of_scanner,
        attributes ->> 'header.x-scanner' as scanner
    from comparison c
"""
_SLICES: Final = """
    insert into slice (model, predicate, name, definition)
    select $1, key || ' = "' || value || '"', split_part(key, '-', 2) || '=' || value,
        jsonb_build_object('where', jsonb_build_array(jsonb_build_object('key', key, 'equals', value)))
    from (
        select 'time.x-hour' as key, lpad(n::text, 2, '0') as value from generate_series(0, $2::int - 1) n
        union all select 'header.x-client', n::text from generate_series(0, $3::int - 1) n
        union all select 'header.x-tenant', lpad(n::text, 4, '0') from generate_series(0, $4::int - 1) n
    ) made
    on conflict do nothing
"""
_BATCHES: Final = """
    insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, provenance, fold_seq)
    select 'comparison', 'shadow-0', $3::timestamptz + $4::float8 * n / ($2 - $1) * interval '1 s',
        $3::timestamptz + $4::float8 * n / ($2 - $1) * interval '1 s',
        $3::timestamptz + $4::float8 * n / ($2 - $1) * interval '1 s', $5,
        '{"runtime": "onnx", "version": "1.22.0", "provider": "CPUExecutionProvider"}', n / $5 + 1 + (select coalesce(max(fold_seq), 0) from batch)
    from generate_series(0, $2::int - $1::int - 1, $5::int) n
"""
# A row is a sample of its scanner, of which measures are changed by up to a thousandth: equal ones would make indexes small.
_ROWS: Final = """
    with named as materialized (
        select (select id from slice where predicate = 'true') as everything,
            (select array_agg(id order by n) from unnest($8::text[]) with ordinality o (name, n) join slice using (name)) as scanners,
            (select array_agg(id order by name) from slice where name like 'hour=%') as hours,
            (select array_agg(id order by name) from slice where name like 'client=%') as clients,
            (select array_agg(id order by name) from slice where name like 'tenant=%') as tenants,
            (select max(id) from batch) as last_batch
    ), drawn as materialized (
        select n, random() as a, random() as b, random() as t, random() as c, random() as late, gen_random_uuid() as request,
            replace(gen_random_uuid()::text, '-', '') as trace_id, 0.999 + 0.002 * random() as factor
        from generate_series(0, $2::int - $1::int - 1) n
    ), placed as (
        select d.*, width_bucket(a, $7::float8[]) as scanner, floor(t * t * t * $6::int)::int as tenant,
            $3::timestamptz + greatest($4::float8 * n / ($2 - $1) - 3 * late, 0) * interval '1 s' as at
        from drawn d
    )
    insert into comparison (
        captured_at, exchange_id, item, batch_id, model_version_id, policy_id, slice_ids, n_items, source, header_stratum,
        body_stratum, pi1, pi2, u1, u2, group_key, flip, topk, js, divergence, margin, candidate_margin, reference_margin,
        detail, attributes, features, trace, stored_at, tie
    )
    select p.at, gen_random_uuid(), 0, last_batch - ($2 - $1 - 1 - n) / $5, s.model_version_id, s.policy_id,
        array[everything, scanners[p.scanner + 1], hours[extract(hour from p.at at time zone 'UTC')::int + 1],
            clients[floor(p.c * cardinality(clients))::int + 1], tenants[p.tenant + 1]],
        1, s.source, s.header_stratum, s.body_stratum, s.pi1, s.pi2, s.pi1 * p.b, p.c,
        md5((n / 3)::text || $3::text), s.flip, s.topk, s.js * factor, s.divergence * factor, abs(s.candidate_margin * factor - s.reference_margin * factor),
        s.candidate_margin * factor, s.reference_margin * factor, s.detail,
        jsonb_build_object('header.x-scanner', s.scanner, 'header.x-request-id', request::text), s.features,
        '00-' || trace_id || '-' || left(trace_id, 16) || '-01', b.stored_at, s.tie
    from placed p cross join named
        join batch b on b.id = last_batch - ($2 - $1 - 1 - n) / $5
        join sample s on 'scanner=' || s.scanner = ($8::text[])[p.scanner + 1] and s.number = floor(p.b * s.n_of_scanner)
    order by n
"""


async def load_history(
    dsn: str, *, n_compared: int, n_sidecars: int, loaded: Loaded, tally_s: int = 10
) -> None:
    """Write what the monitor keeps of `n_compared` comparisons in `DAYS` days, and the tallies of some sidecars.

    Hourly and daily sums of every slice, its verdict, and an alert of the damaged slice. The number of rows depends on slices
    and hours; `n_compared` is in the sums alone.
    """
    now = datetime.now(UTC)
    db = await asyncpg.connect(dsn)
    try:
        begin = datetime(now.year, now.month, now.day, tzinfo=UTC) - (DAYS - 1) * _DAY
        await db.execute(_SHARES)
        for table, column, step in (
            ("rollup_hour", "hour", timedelta(hours=1)),
            ("rollup_day", "day", _DAY),
        ):
            await db.execute(
                _ROLLUPS.format(table=table, column=column), loaded.version_id, begin, now, step, n_compared
            )
        await db.execute("drop table share")
        bad = loaded.slices[slice_of("archive")]
        alert = await db.fetchval(
            "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
            " values ($1, $2, 'firing', 'flip', $3, $4, '{}') returning id",
            loaded.version_id,
            bad,
            now - timedelta(hours=30),
            now - timedelta(hours=28),
        )
        await db.execute(_VERDICTS, loaded.version_id, now, bad, alert)
        await db.execute(
            "insert into fold (id, fold_seq, event_time, mass, n_detectors)"
            " select 1, coalesce(max(fold_seq), 0), $1, 0, 4000 from batch on conflict do nothing",
            now,
        )
        await db.execute(_TALLIES, begin, now, timedelta(seconds=tally_s), n_sidecars, n_compared)
        await db.execute("vacuum (analyze)")
        await db.execute("checkpoint")
    finally:
        await db.close()


_SHARES: Final = """
    create unlogged table share as
    with newest as materialized (
        select slice_ids from comparison where captured_at >= (select max(captured_at) - interval '1 day' from comparison)
    )
    select s.id as slice_id, coalesce(n, 0)::float8 / (select count(*) from newest) as share,
        case s.name when 'scanner=archive' then 0.05 else 0.004 end as rate
    from slice s left join (
        select member.id, count(*) as n from newest cross join unnest(slice_ids) member (id) group by 1
    ) counted using (id)
"""
_ROLLUPS: Final = """
    insert into {table} (
        model_version_id, slice_id, {column}, n_items, n_groups, weight, weight_sq, flip, topk, js, divergence, margin,
        flip_weight, topk_weight, js_weight, divergence_weight, margin_weight, n_infinite, divergence_bins, tie_weight
    )
    select $1, slice_id, at, n, n, 5 * n, 25 * n, 5 * n * rate, 5 * n * rate * 2, n * 0.005, n * 0.02, n * 0.1,
        5 * n, 5 * n, 5 * n, 5 * n, 5 * n, 0, array(
            select case when bin between 22 and 50 then n * 5.0 / 29 * (1 + 0.1 * sin(bin + n)) else 0 end
            from generate_series(0, 63) bin
        ), 5 * n
    from (
        select slice_id, at, 1 + floor(share * $5::float8 * extract(epoch from $4::interval) / 1209600 * (0.8 + 0.4 * random()))::bigint
            as n, rate
        from share cross join generate_series($2::timestamptz, $3::timestamptz, $4::interval) at
    ) made
"""
_VERDICTS: Final = """
    insert into verdict (
        model_version_id, slice_id, verdict, reason, since, n_groups, evidence, threshold, estimate, alert_id, last_at, updated_at,
        fold_seq
    )
    select $1, id, case when id = $3 then 'firing' else 'ok' end, 'inside the budget', $2::timestamptz - interval '1 day', 4000, 1, 10,
        '{"flip": {"mean": 0.004, "low": 0.002, "high": 0.007, "budget": 0.01}}', case when id = $3 then $4::bigint end, $2, $2, 1
    from slice
"""
_TALLIES: Final = """
    with stored as (
        insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)
        select 'tally', 'shadow-0', at, at, at + interval '1 hour', 0
        from generate_series($1::timestamptz, $2::timestamptz, interval '1 hour') at
        returning id, captured_from
    ), sidecar as (
        select 'digits-' || n as source, gen_random_uuid() as boot from generate_series(1, $4::int) n
    )
    insert into tally (
        source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published, lost, blind_connections, models, streamed_at
    )
    select source, boot, stratum.name, n, at, stored.id, (n * each)::bigint, (n * each * rate)::bigint, 0, (n * each * rate)::bigint - n / 1000,
        jsonb_build_object('full', n / 1000), 0, jsonb_build_object('digits', jsonb_build_object(
            'row', stratum.row, 'lost', '{}'::jsonb, 'taken', (n * each * rate)::bigint, 'thinned', 0, 'numbered', (n * each * rate)::bigint,
            'published', (n * each * rate)::bigint - n / 1000
        )), at
    from stored
        cross join sidecar
        cross join (values ('default', 0.2, 0, 0.99), ('archive', 1.0, 1, 0.01)) stratum (name, rate, row, part)
        cross join lateral generate_series(stored.captured_from, least(stored.captured_from + interval '1 hour', $2), $3::interval) at
        cross join lateral (
            select extract(epoch from at - $1::timestamptz)::bigint / 10 as n, 5 * $5::float8 / 120960 / $4 * part as each
        ) counted
    where at < stored.captured_from + interval '1 hour'
"""
