"""Whether the monitor and the database stay flat: weeks of a fleet with releases, seasons and retention, by a virtual clock.

    python -m benchmarks.soak [--quick] [--days 40] [--slices 1000] [--seed 1]

A clock that is moved by hand runs through the days before today. Every day exchanges are stored by the shadow's own
writer into a real Postgres, numbered and folded in backlogs of 64 batches, and the daily
maintenance creates and drops partitions and deletes what is older than the retention of a week. Nothing is replayed, and
nothing is waited for: the fold reads the time from the exchanges.

Each exchange lies in `all` and in seven other slices. A tenth is sampled at four times the rate of the rest. Every few
days a new candidate version takes over, within six hours. Flips and divergences are within the budget; they rise and fall
by a quarter with the day of the week and by a tenth with the hour. Nothing drifts, so that every page is a false one: the
bound of `monitor.pages_per_30_days` says how many are expected.

Printed by day: resident memory of this process, which is all of the monitor, the rows and bytes of each table, and the
time that the day took. The versions of the last 30 days have live detectors, so memory and detector states rise until
then with the number of releases, and must not rise afterwards.

Searches for slices, clusters and explanations of alerts read the database in threads of their own and are not part of it.
"""

import argparse
import asyncio
import gc
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

import asyncpg
import msgspec
import numpy as np
import psutil

from benchmarks.result import Goal, finish
from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config, Model, Reference, Slice, Storage
from quantdrift.core.records import (
    BodyStratum,
    Exchange,
    HeaderStratum,
    Policy,
    Predicate,
    Sampling,
    StratumCount,
    Tally,
    Verdict,
)
from quantdrift.core.slices import SliceKey, everything
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.admin.migrate import upgrade
from quantdrift.storage.admin.retention import maintain
from quantdrift.storage.comparisons.rows import ComparedExchange, ComparedItem, StoreBatch, VersionKey
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.fold.read import claim, load_catalog, resume
from quantdrift.storage.fold.write import write
from quantdrift.storage.server.postgres import PostgresServer

MODEL: Final = "soak"
SOURCE: Final = "pod-0"
BATCH: Final = 64
SLICES_OF_EXCHANGE: Final = 8
RARE: Final = 0.1
FLIPS: Final = 0.004
SEASON: Final = 0.25
HOURS: Final = 0.1
OVERLAP: Final = timedelta(hours=6)
STORAGE: Final = Storage(retention_days=7)
RETIRED_AFTER_DAYS: Final = 30
_MB: Final = 1e6
_BATCHES_AT_ONCE: Final = 64
# A monitor that is wrong about its bound is found out; one that keeps it has two pages or more with a probability of 0.5 %.
_PAGES: Final = 1
Figures = dict[str, float | int | str | None]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How much is stored and folded.

    Parameters
    ----------
    days
        Virtual days.
    slices
        Slices of a version, the aggregate included.
    per_day
        Exchanges that are compared on a day.
    release_days
        Days between two candidate versions.
    flat_from
        The day from which on memory and tables must not grow.
    """

    days: int = 40
    slices: int = 1000
    per_day: int = 4096
    release_days: int = 3
    flat_from: int = 33


QUICK: Final = Scale(days=14, slices=100, per_day=4096, release_days=3, flat_from=10)
POLICY: Final = Policy(
    epoch="e1",
    header_strata=(
        HeaderStratum(name="rare", rate=1.0, headers={"x-rare": "yes"}),
        HeaderStratum(name="default", rate=0.25),
    ),
    body_strata=(BodyStratum(name="default", rate=1.0),),
)


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at the end of a day.

    Parameters
    ----------
    number
        From 1.
    seconds
        Real time that it took.
    rss_mb
        Resident memory.
    rows, mb
        Of each table; partitions together.
    partitions
        Days with a partition.
    """

    number: int
    seconds: float
    rss_mb: float
    rows: dict[str, int]
    mb: dict[str, float]
    partitions: int


class Soak:
    """The monitor and the writer over one database.

    Parameters
    ----------
    dsn
        Of a migrated database.
    begin
        Midnight of the first day.
    """

    def __init__(self, dsn: str, scale: Scale, begin: datetime, seed: int) -> None:
        self._dsn = dsn
        self._scale = scale
        self._begin = begin
        self._rng = np.random.default_rng(seed)
        self._clock = ManualClock(begin)
        values = tuple(f"{number:04d}" for number in range(1, scale.slices))
        self._config = Config(
            models=(Model(name=MODEL, references=(Reference(path="reference.onnx"),)),),
            slices=(Slice(name="tenant", header="x-tenant", values=values),),
            storage=STORAGE,
        )
        self._slices = [everything(MODEL)] + [
            SliceKey(
                model=MODEL,
                name=f"tenant={value}",
                predicate=f'header.x-tenant = "{value}"',
                where=(Predicate(key="header.x-tenant", equals=value),),
            )
            for value in values
        ]
        self._fold: Fold | None = None
        self._number = 0
        self._sequence = 0
        self.fired: list[tuple[datetime, int]] = []
        self.days: list[Day] = []

    async def run(self) -> None:
        """Live through all days."""
        async with Database(self._dsn) as database:
            writer = Writer(database, self._clock)
            for number in range(1, self._scale.days + 1):
                began_s = time.monotonic()
                await maintain(database, STORAGE, self._clock.now())
                await self._day(database, writer, number - 1)
                gc.collect()
                self.days.append(await self._measured(number, time.monotonic() - began_s))
                _say(self.days[-1], len(self.fired))

    async def _day(self, database: Database, writer: Writer, number: int) -> None:
        begin = self._begin + timedelta(days=number)
        n_batches = self._scale.per_day // BATCH
        n_stored = 0
        for index in range(n_batches):
            at = begin + timedelta(days=1) * (index + 0.5) / n_batches
            self._clock.advance((at - self._clock.now()).total_seconds())
            await writer.store(
                StoreBatch(worker="soak", at=at, compared=tuple(self._exchanges(at, number, n_batches)))
            )
            await writer.store_tallies("soak", [self._tally(at)], [at])
            n_stored += 2
            if n_stored >= _BATCHES_AT_ONCE:
                n_stored = 0
                await self._fold_all(database)
        await self._fold_all(database)
        self._clock.advance((begin + timedelta(days=1) - self._clock.now()).total_seconds())

    def _exchanges(self, middle: datetime, number: int, n_batches: int) -> Iterator[ComparedExchange]:
        rng = self._rng
        length = timedelta(days=1) / n_batches
        season = 1 + SEASON * math.sin(2 * math.pi * number / 7)
        season *= 1 + HOURS * math.sin(2 * math.pi * middle.hour / 24)
        flips, rare = rng.random(BATCH) < FLIPS * season, rng.random(BATCH) < RARE
        divergences, margins = rng.lognormal(-6.5, 1.0, BATCH) * season, rng.beta(2.0, 1.0, BATCH)
        draws = rng.random((BATCH, 2))
        n_others = min(SLICES_OF_EXCHANGE, self._scale.slices) - 1
        for place in range(BATCH):
            self._number += 1
            others = 1 + rng.choice(self._scale.slices - 1, n_others, replace=False)
            at = middle + length * (place / BATCH - 0.5)
            pi1 = 1.0 if rare[place] else 0.25
            yield ComparedExchange(
                stream_sequence=self._number,
                payload=b"",
                exchange=Exchange(
                    id=str(UUID(int=self._number)),
                    captured_at=at,
                    source=SOURCE,
                    model=MODEL,
                    version="",
                    protocol="oip-v2-rest",
                    inputs=(),
                    outputs=(),
                    attributes={"header.x-tenant": self._slices[others[0]].name},
                    sampling=Sampling(
                        policy=POLICY,
                        header_stratum="rare" if rare[place] else "default",
                        body_stratum="default",
                        pi1=pi1,
                        pi2=1.0,
                        u1=float(draws[place, 0]) * pi1,
                        u2=float(draws[place, 1]),
                    ),
                ),
                version=self._version(at),
                items=(
                    ComparedItem(
                        slices=(self._slices[0], *(self._slices[other] for other in others)),
                        features={},
                        flip=bool(flips[place]),
                        tie=False,
                        topk=False,
                        js=float(divergences[place]) / 8,
                        divergence=float(divergences[place]),
                        margin=0.01,
                        candidate_margin=float(margins[place]),
                        reference_margin=float(margins[place]),
                        detail=None,
                    ),
                ),
            )

    def _version(self, at: datetime) -> VersionKey:
        """Return the version that answers: after a release the new one takes over within six hours."""
        release, since = divmod(at - self._begin, timedelta(days=self._scale.release_days))
        if release and self._rng.random() >= since / OVERLAP:
            release -= 1
        return VersionKey(model=MODEL, candidate_version=f"int8-{release:03d}", reference_digest="d" * 64)

    def _tally(self, at: datetime) -> Tally:
        self._sequence += 1
        rare = round(self._number * RARE)
        common = self._number - rare
        return Tally(
            source=SOURCE,
            boot="b" * 32,
            sequence=self._sequence,
            at=at,
            strata=(
                StratumCount(stratum="rare", offered=rare, taken=rare, thinned=0, published=rare),
                StratumCount(
                    stratum="default", offered=4 * common, taken=common, thinned=0, published=common
                ),
            ),
            blind_connections=0,
        )

    async def _fold_all(self, database: Database) -> None:
        """Fold everything that is stored, as the leading monitor does."""
        n = _BATCHES_AT_ONCE
        while n == _BATCHES_AT_ONCE:
            async with database.begin() as connection:
                if self._fold is None:
                    self._fold = Fold(self._config, await resume(connection))
                fold = self._fold
                batches = await claim(connection, fold.position.fold_seq, _BATCHES_AT_ONCE)
                wanted = fold.policies() | {row.policy_id for rows in batches for row in rows.comparisons}
                fold.learn(await load_catalog(connection, wanted=wanted, known=fold.catalog))
                for batch in batches:
                    fold.batch(batch)
                outcome = fold.take()
                await write(connection, outcome, "")
            n = len(batches)
            self.fired += [
                (self._clock.now(), transition.slice_id)
                for transition in outcome.transitions
                if transition.to_verdict is Verdict.FIRING
            ]

    async def _measured(self, number: int, seconds: float) -> Day:
        connection = await asyncpg.connect(self._dsn)
        try:
            # Batches are dated by the server's clock, which is not the virtual one.
            await connection.execute(
                "update batch set stored_at = captured_to where stored_at <> captured_to"
            )
            await connection.execute("vacuum analyze")
            tables = await connection.fetch(_TABLES)
            counted = {row["name"]: f'select count(*) from "{row["name"]}"' for row in tables}  # noqa: S608 - our schema
            rows = {name: await connection.fetchval(count) for name, count in counted.items()}
            partitions = await connection.fetchval(
                "select count(*) from pg_inherits where inhparent = 'comparison'::regclass"
            )
        finally:
            await connection.close()
        return Day(
            number=number,
            seconds=seconds,
            rss_mb=psutil.Process().memory_info().rss / _MB,
            rows=rows,
            mb={row["name"]: row["bytes"] / _MB for row in tables},
            partitions=partitions,
        )


_TABLES: Final = """
    select c.relname as name, (pg_total_relation_size(c.oid) + coalesce((
        select sum(pg_total_relation_size(t.relid)) from pg_partition_tree(c.oid) t where t.relid <> c.oid
    ), 0))::float8 as bytes
    from pg_class c
    where c.relkind in ('r', 'p') and not c.relispartition and c.relnamespace = 'public'::regnamespace
        and c.relname <> 'alembic_version'
    order by 1
"""


def main(scale: Scale, seed: int) -> int:
    """Live through the days and print the tables."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qd-soak-") as directory:
        Path(directory).chmod(0o755)  # the database server may run as another user
        with PostgresServer(Path(directory) / "postgres", durable=False) as server:
            asyncio.run(upgrade(server.dsn, progress=lambda _: None))
            today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            soak = Soak(server.dsn, scale, today - timedelta(days=scale.days), seed)
            asyncio.run(soak.run())
    _show(soak, scale)
    first, last = _flat(soak.days, scale)
    grown = {
        name: last.rows[name] - first.rows[name] for name in last.rows if last.rows[name] > first.rows[name]
    }
    figures: Figures = {
        "days": scale.days,
        "slices": scale.slices,
        "exchanges": scale.days * scale.per_day,
        "releases": (scale.days - 1) // scale.release_days,
        "seconds_per_day": float(np.median([day.seconds for day in soak.days])),
        **{f"rss_mb_day_{day.number}": day.rss_mb for day in _shown(soak.days, scale)},
        "database_mb": sum(last.mb.values()),
        "false_pages": len(soak.fired),
        "expected_pages_at_most": Config().monitor.pages_per_30_days * scale.days / 30,
        "tables_that_grew": ", ".join(sorted(grown)) or None,
        "seconds": round(time.monotonic() - began_s),
    }
    retained = ("comparison", "batch", "tally")
    finish(
        "soak",
        figures,
        [
            Goal(name="false_pages", value=len(soak.fired), bound=_PAGES, unit="{page}"),
            Goal(name="rss_growth", value=last.rss_mb / first.rss_mb, bound=1.05, unit="ratio"),
            *(
                Goal(
                    name=f"{name}_growth", value=last.rows[name] / first.rows[name], bound=1.02, unit="ratio"
                )
                for name in retained
            ),
        ],
    )
    return 0


def _flat(days: list[Day], scale: Scale) -> tuple[Day, Day]:
    """Return the days between which nothing may grow: at the same place between two releases, if there are two."""
    n = (scale.days - scale.flat_from) // scale.release_days * scale.release_days
    return days[max(scale.days - 1 - n, 0) if n > 0 else 0], days[-1]


def _shown(days: list[Day], scale: Scale) -> list[Day]:
    wanted = {5, 15, 30, scale.flat_from, scale.days}
    return [day for day in days if day.number in wanted]


def _show(soak: Soak, scale: Scale) -> None:
    shown = _shown(soak.days, scale)
    print(f"{'':<24}" + "".join(f"{f'day {day.number}':>14}" for day in shown))
    print(f"{'resident memory, MB':<24}" + "".join(f"{day.rss_mb:>14.0f}" for day in shown))
    print(f"{'partitions':<24}" + "".join(f"{day.partitions:>14}" for day in shown))
    print(f"{'s of the day':<24}" + "".join(f"{day.seconds:>14.1f}" for day in shown))
    for name in sorted(shown[-1].rows):
        if shown[-1].rows[name]:
            text = "".join(f"{f'{day.rows[name]:,} / {day.mb[name]:.1f}':>14}" for day in shown)
            print(f"{name + ', rows / MB':<24}{text}")
    for at, slice_id in soak.fired:
        print(f"paged: slice {slice_id} at {at}")


def _say(day: Day, n_fired: int) -> None:
    rows = {name: day.rows[name] for name in ("comparison", "batch", "detector", "verdict")}
    print(
        f"... day {day.number}: {day.seconds:.1f} s, {day.rss_mb:.0f} MB, {rows}, {n_fired} pages",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some two minutes")
    parser.add_argument("--days", type=int)
    parser.add_argument("--slices", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chosen = QUICK if given.quick else Scale()
    chosen = msgspec.structs.replace(
        chosen,
        **{name: value for name in ("days", "slices") if (value := getattr(given, name)) is not None},
    )
    sys.exit(main(chosen, given.seed))
