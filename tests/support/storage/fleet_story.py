"""A small fleet with a past: several models and versions, people and none, alerts in every state. Folded by the real fold.

`digits` has people. Its version int8-1 went bad for scanner=faint, paged, and was replaced by int8-2, which is sound.
`letters` has no people. Its one version went bad for lang=de (acknowledged), lang=fr (recovered by itself) and lang=it (closed by a
person); lang=en is sound.
`young` has one request. The traffic ends a few minutes before `now`, so that every window has data.
"""

import random
from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Final

import asyncpg
import msgspec

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.schema import Config, Model, Monitor, Reference, SamplingOptions, Web
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.drift.detectors.protocol import compile_all
from quantdrift.monitor.explain.explain import Explainer
from quantdrift.monitor.explain.ways import ways_with
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.alerts.alerts import Act, act
from quantdrift.storage.alerts.evidence import Evidence
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.incidents.incidents import count_due, store_count
from tests.support.storage.comparisons import Comparison, make_partitions, store_comparisons

MODELS: Final = ("digits", "letters", "young")
CONFIG: Final = Config(
    models=tuple(Model(name=name, references=(Reference(path=f"{name}.onnx"),)) for name in MODELS),
    monitor=Monitor(min_groups=50),
    sampling=SamplingOptions(sticky_header="x-user"),
    web=Web(url="https://drift.example"),
)
CONFIG_TEXT: Final = """
[monitor]
min_groups = 50
[sampling]
sticky_header = "x-user"
[web]
url = "https://drift.example"
[[models]]
name = "digits"
[[models.references]]
path = "digits.onnx"
[[models]]
name = "letters"
[[models.references]]
path = "letters.onnx"
[[models]]
name = "young"
[[models.references]]
path = "young.onnx"
"""
"""The same, as a file: the commands read it."""
_POLICY: Final = Policy(
    epoch="e1",
    header_strata=(
        HeaderStratum(name="faint", rate=1.0, headers={"x-scanner": "faint"}),
        HeaderStratum(name="default", rate=0.5),
    ),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)
_PER_BATCH: Final = 200
_AT_ONCE: Final = 16  # batches in a transaction, which may be idle for a time alone
_MINUTE: Final = timedelta(minutes=1)
_HOUR: Final = timedelta(hours=1)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a stream besides `all`.

    Parameters
    ----------
    share
        Of the requests.
    flips
        Share of changed answers; `(rate, begin, end)` for another one in a time before `now`.
    """

    slice_id: int
    share: float
    pi: float = 0.5
    rate: float = 0.002
    bad: tuple[float, timedelta, timedelta] | None = None


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The captured traffic of one version, from `begin` to `end` before `now`, every `step_s` seconds an exchange."""

    version_id: int
    all_id: int
    begin: timedelta
    end: timedelta
    step_s: float
    n_people: int
    parts: tuple[Part, ...]


class FleetStory(msgspec.Struct, frozen=True, kw_only=True):
    """What was written, by name."""

    now: datetime
    versions: dict[tuple[str, str], int]
    slices: dict[tuple[str, str], int]
    alerts: dict[tuple[str, str, str], int]
    incidents: tuple[int, ...]


_SLICES: Final = {
    ("digits", "all"): (1, None),
    ("digits", "scanner=faint"): (2, ("header.x-scanner", "faint")),
    ("digits", "scanner=clear"): (3, ("header.x-scanner", "clear")),
    ("letters", "all"): (4, None),
    ("letters", "lang=de"): (5, ("header.x-lang", "de")),
    ("letters", "lang=fr"): (6, ("header.x-lang", "fr")),
    ("letters", "lang=en"): (7, ("header.x-lang", "en")),
    ("letters", "lang=it"): (8, ("header.x-lang", "it")),
    ("young", "all"): (9, None),
}
_VERSIONS: Final = {
    ("digits", "int8-1"): (1, 5 * _HOUR),
    ("digits", "int8-2"): (2, 2 * _HOUR),
    ("letters", "q4-a"): (3, 26 * _HOUR),
    ("young", "fp8-1"): (4, 5 * _MINUTE),
}
_STREAMS: Final = (
    Stream(
        version_id=1,
        all_id=1,
        begin=5 * _HOUR,
        end=2 * _HOUR,
        step_s=2.0,
        n_people=250,
        parts=(
            Part(
                slice_id=2,
                share=0.2,
                pi=1.0,
                rate=0.003,
                bad=(0.08, timedelta(hours=3, minutes=25), timedelta(hours=2)),
            ),
            Part(slice_id=3, share=0.8),
        ),
    ),
    Stream(
        version_id=2,
        all_id=1,
        begin=2 * _HOUR,
        end=3 * _MINUTE,
        step_s=2.0,
        n_people=250,
        parts=(Part(slice_id=2, share=0.2, pi=1.0, rate=0.003), Part(slice_id=3, share=0.8)),
    ),
    Stream(
        version_id=3,
        all_id=4,
        begin=26 * _HOUR,
        end=3 * _MINUTE,
        step_s=10.0,
        n_people=0,
        parts=(
            Part(slice_id=5, share=0.25, bad=(0.07, 7 * _HOUR, timedelta())),
            Part(slice_id=6, share=0.25, bad=(0.09, 22 * _HOUR, 17 * _HOUR)),
            Part(slice_id=7, share=0.3),
            Part(slice_id=8, share=0.2, bad=(0.15, 4 * _HOUR, timedelta())),
        ),
    ),
)


def _rows(stream: Stream, now: datetime, rng: random.Random) -> list[Comparison]:
    """Return the compared items of a stream in the order of capture; `batch_id` is still 0."""
    rows = []
    at, end = now - stream.begin, now - stream.end
    people = [f"{number:016x}" for number in range(stream.n_people)]
    while at < end:
        part = rng.choices(stream.parts, [each.share for each in stream.parts])[0]
        if rng.random() < part.pi:
            rate = part.rate
            if part.bad and now - part.bad[1] <= at < now - part.bad[2]:
                rate = part.bad[0]
            exchange_id = f"{rng.getrandbits(128):032x}"
            n_items = rng.choice((1, 1, 1, 2))
            person = rng.choice(people) if people else ""
            for item in range(n_items):
                flip = rng.random() < rate
                rows.append(
                    Comparison(
                        captured_at=at,
                        exchange_id=exchange_id,
                        item=item,
                        n_items=n_items,
                        batch_id=0,
                        model_version_id=stream.version_id,
                        slice_ids=(stream.all_id, part.slice_id),
                        group_key=person,
                        header_stratum="faint" if part.pi == 1.0 else "default",
                        pi1=part.pi,
                        flip=flip,
                        topk=False,
                        js=0.02 if flip else 1e-4,
                        divergence=rng.expovariate(1 / (0.2 if flip else 0.001)),
                        margin=0.01,
                        candidate_margin=0.5,
                        reference_margin=0.5,
                        trace=f"00-{exchange_id}-{'1' * 16}-01",
                    )
                )
        at += timedelta(seconds=stream.step_s * rng.uniform(0.5, 1.5))
    return rows


async def write_fleet(record: asyncpg.Connection, database: Database, *, seed: int = 11) -> FleetStory:
    """Store the traffic as shadow workers do, fold all of it, and act on two alerts as people do."""
    now = datetime.now(UTC).replace(microsecond=0)
    await _write_catalog(record, now)
    rng = random.Random(seed)
    rows = [row for stream in _STREAMS for row in _rows(stream, now, rng)]
    rows.append(
        Comparison(
            captured_at=now - 4 * _MINUTE,
            exchange_id=f"{rng.getrandbits(128):032x}",
            batch_id=0,
            model_version_id=4,
            slice_ids=(9,),
            pi1=0.5,
            flip=False,
            divergence=1e-5,
        )
    )
    rows.sort(key=lambda row: (row.captured_at, row.exchange_id, row.item))
    await make_partitions(record, {row.captured_at.date() for row in rows})
    n_offered = 0
    # An exchange is in one batch, as a message is: the roll-ups would count one that is cut as two.
    begins = [number for number, row in enumerate(rows) if not row.item]
    cuts = [
        *dict.fromkeys(begins[bisect_left(begins, first)] for first in range(0, begins[-1] + 1, _PER_BATCH)),
        len(rows),
    ]
    for first, end in pairwise(cuts):
        batch = rows[first:end]
        n_offered += sum(1 / row.pi1 for row in batch if not row.item).__round__()
        await _write_batch(record, batch)
        await _write_tally(record, batch[-1].captured_at, first // _PER_BATCH + 1, n_offered, end)
    await _fold(database)
    alerts = {
        (row["model"], row["version"], row["slice"]): row["id"]
        for row in await record.fetch(
            "select a.id, v.model, v.candidate_version as version, s.name as slice from alert a"
            " join model_version v on v.id = a.model_version_id join slice s on s.id = a.slice_id order by a.id"
        )
    }
    async with database.begin() as connection:
        await act(
            connection, alerts["letters", "q4-a", "lang=de"], Act.ACK, "the tokenizer is being looked at"
        )
        await act(
            connection, alerts["letters", "q4-a", "lang=it"], Act.CLOSE, "the client that sent these is gone"
        )
    await _fold(database)
    incidents = await record.fetch("select id from incidents order by id")
    return FleetStory(
        now=now,
        versions={key: number for key, (number, _) in _VERSIONS.items()},
        slices={key: number for key, (number, _) in _SLICES.items()},
        alerts=alerts,
        incidents=tuple(row["id"] for row in incidents),
    )


async def _write_catalog(record: asyncpg.Connection, now: datetime) -> None:
    for (model, version), (number, ago) in _VERSIONS.items():
        await record.execute(
            "insert into model_version (id, model, candidate_version, reference_digest, first_seen_at)"
            " overriding system value values ($1, $2, $3, $4, $5)",
            number,
            model,
            version,
            f"{number:x}" * 64,
            now - ago,
        )
    for (model, name), (number, condition) in _SLICES.items():
        where = () if condition is None else (Predicate(key=condition[0], equals=condition[1]),)
        await record.execute(
            "insert into slice (id, model, predicate, name, definition) overriding system value"
            " values ($1, $2, $3, $4, $5)",
            number,
            model,
            "true" if condition is None else f'{condition[0]} = "{condition[1]}"',
            name,
            msgspec.json.encode({"where": where}).decode(),
        )
    await record.execute(
        "insert into policy (id, epoch, definition) overriding system value values (1, 'e1', $1)",
        msgspec.json.encode(_POLICY).decode(),
    )


async def _write_batch(record: asyncpg.Connection, rows: list[Comparison]) -> None:
    """Store rows of several models as the batches of one worker: each model in a batch of its own."""
    for version in sorted({row.model_version_id for row in rows}):
        of_version = [row for row in rows if row.model_version_id == version]
        async with record.transaction():
            batch_id = await record.fetchval(
                "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows, replay_s, compared_model)"
                " select 'comparison', 'shadow-1', $1, $2, $1, $3, $4, model from model_version where id = $5 returning id",
                of_version[-1].captured_at,
                of_version[0].captured_at,
                len(of_version),
                0.001 * len(of_version),
                version,
            )
            await store_comparisons(
                record, [msgspec.structs.replace(row, batch_id=batch_id) for row in of_version]
            )


async def _write_tally(
    record: asyncpg.Connection, at: datetime, sequence: int, offered: int, taken: int
) -> None:
    async with record.transaction():
        batch_id = await record.fetchval(
            "insert into batch (kind, worker, stored_at, captured_from, captured_to, n_rows)"
            " values ('tally', 'shadow-1', $1, $1, $1, 1) returning id",
            at,
        )
        await record.execute(
            "insert into tally (source, boot, stratum, sequence, at, batch_id, offered, taken, thinned, published, lost,"
            " blind_connections) values ('pod-1', $1, 'default', $2, $3, $4, $5, $6, 0, $6, '{}', 0)",
            "b" * 32,
            sequence,
            at,
            batch_id,
            offered,
            taken,
        )


async def _fold(database: Database) -> None:
    """Fold what is stored, and explain it, as the monitor does, until nothing is left; then count what incidents did."""
    compile_all()
    explainer = Explainer(CONFIG, SystemClock(), lambda _: None)
    while True:
        async with database.begin() as connection:
            fold = Fold(CONFIG, await resume(connection))
            claimed = await claim(connection, fold.position.fold_seq, _AT_ONCE)
            if not claimed:
                break
            policies = {row.policy_id for batch in claimed for row in batch.comparisons}
            fold.learn(await load_catalog(connection, wanted=policies, known=fold.catalog))
            for batch in claimed:
                fold.batch(batch)
            outcome = await explainer.explain(Evidence(connection), fold.take(), fold.catalog)
            ways = ways_with(CONFIG, fold.catalog)
            await write(connection, outcome, "https://trace.example/{trace_id}", webhook=True, ways=ways)
    while True:
        async with database.begin() as connection:
            count = await count_due(connection, 60.0)
            if count is None:
                return
            await store_count(connection, count)
