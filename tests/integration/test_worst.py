"""The worst items of a slice, whichever way they are found."""

import json
from datetime import UTC, datetime, timedelta
from random import Random

import asyncpg
import pytest

from quantdrift import frames
from quantdrift.storage import worst
from quantdrift.storage.database import Database
from quantdrift.storage.exchanges import worst_exchanges
from quantdrift.storage.worst import worst_keys
from tests.support.storage.comparisons import Comparison, condense, make_partitions, store_comparisons

pytestmark = pytest.mark.integration

NOON = datetime(2031, 6, 15, 12, tzinfo=UTC)
BEGIN, END = NOON - timedelta(hours=20), NOON + timedelta(hours=1)
ALL, BAD, SOUND, ABSENT = 1, 2, 3, 4
N = 600


def _rows() -> list[Comparison]:
    """Return items of two versions on three days: a slice that is worse than the traffic, and one that is far better.

    Equal divergences, infinite ones and unknown ones are among them.
    """
    random = Random(16)
    rows = []
    for number in range(N):
        of = random.choices((None, BAD, SOUND), (8, 1, 1))[0]
        divergence = random.lognormvariate({None: -4.0, BAD: -1.0, SOUND: -12.0}[of], 1.0)
        rows.append(
            Comparison(
                captured_at=NOON - timedelta(minutes=3 * random.randrange(N)),
                exchange_id=f"00000000-0000-0000-0000-{number:012d}",
                batch_id=1,
                model_version_id=1 + (number % 10 == 0),
                slice_ids=(ALL, of) if of else (ALL,),
                flip=random.choices((True, False, None), (3, 90, 7))[0],
                divergence=random.choices((divergence, 0.05, float("inf"), None), (90, 4, 3, 3))[0],
                attributes=json.dumps({"header.x-request-id": f"r{number}"}),
            )
        )
    return rows


ROWS = _rows()


@pytest.fixture(params=["rows", "condensed", "both"])
async def filled(record: asyncpg.Connection, postgres_dsn: str, request: pytest.FixtureRequest) -> str:
    """Return the address of a database with these rows, as they are kept."""
    await record.execute("""
        insert into model_version (model, candidate_version, reference_digest)
        values ('digits', 'int8-1', 'abc'), ('digits', 'int8-2', 'abc');
        insert into slice (model, predicate, name, definition) values ('digits', 'true', 'all', '{}'),
            ('digits', 'b', 'bad', '{}'), ('digits', 's', 'sound', '{}'), ('digits', 'a', 'absent', '{}'), ('other', 'b', 'bad', '{}');
    """)
    await make_partitions(record, {row.captured_at.date() for row in ROWS})
    await record.execute(
        "insert into batch (kind, worker, captured_from, captured_to, n_rows, fold_seq) values ('comparison', 'w', now(), now(), 1, 1)"
    )
    condensed = {"rows": 0, "condensed": N, "both": N // 2}[request.param]
    await store_comparisons(record, ROWS[:condensed])
    assert await condense(record) == condensed
    await store_comparisons(record, ROWS[condensed:])
    return postgres_dsn


def _expected(of: int, versions: tuple[int, ...], *, changed_first: bool) -> list[str]:
    """Return the ids of the slice's items in the time, the worst first."""

    def rank(row: Comparison) -> tuple[bool, bool, float, datetime]:
        by_flip = changed_first and not row.flip
        return by_flip, row.divergence is None, -(row.divergence or 0.0), row.captured_at

    chosen = [
        row
        for row in ROWS
        if of in row.slice_ids and row.model_version_id in versions and BEGIN <= row.captured_at < END
    ]
    return [str(row.exchange_id) for row in sorted(chosen, key=rank)]


@pytest.mark.parametrize("changed_first", [False, True])
@pytest.mark.parametrize("deep", [1, 25, 10_000])
@pytest.mark.parametrize("of", [ALL, BAD, SOUND, ABSENT])
async def test_the_worst_items_are_found_among_the_worst_of_all_or_by_the_slice(
    filled: str, record: asyncpg.Connection, *, of: int, deep: int, changed_first: bool
) -> None:
    """They are the same however deep the worst items of all traffic are read, for every number of items."""
    assert filled
    for versions in ((1,), (1, 2)):
        expected = _expected(of, versions, changed_first=changed_first)
        for n in (1, 7, 20, N):
            keys = worst_keys(
                slices="$1::int[]",
                versions="$2::int[]",
                begin="$3",
                end="$4",
                n="$5",
                changed_first=changed_first,
                deep=deep,
            )
            order = "flip is not true, " if changed_first else ""
            found = await record.fetch(
                f"with {keys} select exchange_id::text from worst order by {order}divergence desc nulls last, captured_at limit $5",
                [of],
                list(versions),
                BEGIN,
                END,
                n,
            )
            assert [row["exchange_id"] for row in found] == expected[:n]


async def test_frames_and_page_name_the_worst_items(filled: str, database: Database) -> None:
    """Frames go by divergence alone; the page shows changed answers first. A name that is no slice has no items."""
    assert worst.DEEP > N
    with frames.arrow(filled) as drift:
        for name, of in (("all", ALL), ("bad", BAD), ("sound", SOUND), ("absent", ABSENT)):
            shown = drift.worst("digits", slice=name, start=BEGIN, end=END, n=15).to_pydict()
            assert shown["exchange_id"] == _expected(of, (1, 2), changed_first=False)[:15]
            assert set(shown["slice"]) <= {name}
            older = drift.worst(
                "digits", slice=name, version="int8-1", start=BEGIN, end=END, n=15
            ).to_pydict()
            assert older["exchange_id"] == _expected(of, (1,), changed_first=False)[:15]
        assert drift.worst("digits", slice="no such slice", start=BEGIN, end=END).num_rows == 0
        assert drift.worst("no such model", start=BEGIN, end=END).num_rows == 0
    async with database.begin() as connection:
        for of in (ALL, BAD, SOUND, ABSENT):
            seen = await worst_exchanges(connection, 1, of, (BEGIN, END), most=20)
            assert [str(row.exchange) for row in seen] == _expected(of, (1,), changed_first=True)[:20]
