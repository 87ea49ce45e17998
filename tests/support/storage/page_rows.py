"""Rows for the live page: many slices over many days, written with COPY, seeded."""

from datetime import UTC, datetime, timedelta

import asyncpg
import msgspec
import numpy as np

DAY = timedelta(days=1)
_SUMS = [
    "n_items",
    "n_groups",
    "weight",
    "weight_sq",
    "flip",
    "topk",
    "js",
    "divergence",
    "margin",
    "flip_weight",
    "topk_weight",
    "js_weight",
    "divergence_weight",
    "margin_weight",
    "n_infinite",
    "divergence_bins",
]


async def write_history(
    db: asyncpg.Connection,
    *,
    n_slices: int,
    n_days: int,
    end: datetime,
    model: str = "digits",
    version: str = "int8-7",
    name: str = "scanner={:04d}",
    seed: int = 3,
) -> tuple[int, list[int], int | None]:
    """Write a version with slices, of which the second one fires; return its id, its slices and the alert.

    One slice in fifty is in doubt, one in nine is not known. The first slice is that of all traffic.
    """
    random = np.random.default_rng(seed)
    version_id = await db.fetchval(
        "insert into model_version (model, candidate_version, reference_digest, reference, first_seen_at)"
        " values ($1, $2, $3, '{}', $4) returning id",
        model,
        version,
        "5f1d" * 16,
        end - n_days * DAY,
    )
    names = ["all", *(name.format(number) for number in range(1, n_slices))]
    found = await db.fetch(
        "insert into slice (model, predicate, name, definition) select $1, case when n = 'all' then 'true' else"
        " 'header.x-scanner = ' || to_json(n) end, n, '{}' from unnest($2::text[]) n"
        " on conflict (model, predicate) do update set name = excluded.name returning id, name",
        model,
        names,
    )
    by_name = {row["name"]: row["id"] for row in found}
    ids = [by_name[each] for each in names]
    verdicts = [_verdict(number) for number in range(n_slices)]
    alert = None
    if n_slices > 1:
        alert = await db.fetchval(
            "insert into alert (model_version_id, slice_id, severity, metric, onset_at, opened_at, details)"
            " values ($1, $2, 'firing', 'flip', $3, $4, $5) returning id",
            version_id,
            ids[1],
            end - 3 * timedelta(hours=1),
            end - 2 * timedelta(hours=1),
            msgspec.json.encode(details(model, version, names[1], end)).decode(),
        )
    columns = ["model_version_id", "slice_id", "{}", *_SUMS]
    for table, width, n in (
        ("rollup_day", DAY, n_days),
        ("rollup_hour", timedelta(hours=1), 6),
    ):
        seconds = width.total_seconds()
        last = datetime.fromtimestamp(end.timestamp() // seconds * seconds, UTC)
        records = []
        for number, slice_id in enumerate(ids):
            rate = 0.06 if number == 1 else 0.004
            volume = (n_slices if number == 0 else 1) * 40 * seconds / 86_400 + 20
            groups = random.poisson(volume, n) + 1
            flips = random.binomial(groups, rate)
            for back in range(n):
                w = 10.0 * groups[back]
                bins = [0.0] * 64
                bins[30 if number != 1 else 44] = w
                records.append(
                    (
                        version_id,
                        slice_id,
                        last - back * width,
                        int(groups[back]),
                        int(groups[back]),
                        w,
                        10 * w,
                        10.0 * flips[back],
                        0.0,
                        0.001 * w,
                        0.002 * w * (5 if number == 1 else 1),
                        0.01 * w,
                        *(5 * [w]),
                        0,
                        bins,
                    )
                )
        await db.copy_records_to_table(
            table, columns=[each.format(table.removeprefix("rollup_")) for each in columns], records=records
        )
    estimate = '{{"flip": {{"mean": {}, "low": {}, "high": {}, "budget": 0.01}}}}'
    await db.copy_records_to_table(
        "verdict",
        records=[
            (
                version_id,
                slice_id,
                verdict,
                "only 212 exchanges compared, 300 are needed"
                if verdict == "unknown"
                else "inside the budget",
                end - 2 * timedelta(hours=1),
                400 + number,
                12.0 if number == 1 else 1.5,
                10.0,
                estimate.format(*((0.06, 0.04, 0.08) if number == 1 else (0.004, 0.002, 0.007))),
                alert if number == 1 else None,
                end,
                end,
                1,
            )
            for number, (slice_id, verdict) in enumerate(zip(ids, verdicts, strict=True))
        ],
    )
    steps = []
    for number, (slice_id, verdict) in enumerate(zip(ids, verdicts, strict=True)):
        times = sorted(end - n_days * DAY * float(x) for x in random.uniform(0.02, 0.98, 4))
        path = ["unknown", "ok", "warning" if number % 3 == 0 else "unknown", "ok"]
        for at, before, after in zip(times, path[:-1], path[1:], strict=False):
            steps.append((version_id, slice_id, None, before, after, at, 1, "{}"))
        if verdict != "ok":
            mine = alert if number == 1 else None
            steps.append((version_id, slice_id, mine, "ok", verdict, end - 2 * timedelta(hours=1), 1, "{}"))
    await db.copy_records_to_table(
        "transition",
        columns=[
            "model_version_id",
            "slice_id",
            "alert_id",
            "from_verdict",
            "to_verdict",
            "at",
            "fold_seq",
            "details",
        ],
        records=steps,
    )
    await db.execute(
        "insert into fold (id, fold_seq, event_time, mass, n_detectors, folded_at) values (1, 1, $1, 0, 12, now())"
        " on conflict do nothing",
        end,
    )
    return version_id, ids, alert


def _verdict(number: int) -> str:
    if number == 1:
        return "firing"
    return "warning" if number % 50 == 2 else "unknown" if number % 9 == 4 else "ok"


def details(model: str, version: str, name: str, end: datetime) -> dict[str, object]:
    """Return the flat form of an event of a page."""
    return {
        "model": model,
        "version": version,
        "reference": "5f1d",
        "slice": name,
        "predicate": f'header.x-scanner = "{name}"',
        "task": "classification",
        "from_verdict": "ok",
        "verdict": "firing",
        "reason": "the share of changed answers is above the budget",
        "metric": "flip",
        "measure": "flip rate",
        "unit": "",
        "budget": 0.01,
        "detector": "budget",
        "evidence": 16.0,
        "threshold": 10.0,
        "before": 0.004,
        "after": 0.053,
        "onset": (end - timedelta(hours=3)).isoformat(),
        "n_groups": 654,
        "n_since_onset": 254,
        "n_history": 400,
        "mean": 0.053,
        "low": 0.04,
        "high": 0.08,
        "n_recent": 254,
        "aggregate_verdict": "ok",
        "aggregate_mean": 0.0058,
        "examples": ["3f0c1c52-0d9c-4a55-9d8a-000000000001"],
    }
