"""Example exchanges of alerts: one query for all alerts that a fold opens or escalates.

An hour of a busy version is hundreds of thousands of rows and takes half a second to read: once per fold, not once per
alert. The few thousand most divergent items of the hour are selected first; usually every alerting slice has its
examples among them, and they are exactly those that a query per slice would have found. Slices with too few are queried
again, without the others.
"""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.errors import RetryError
from quantdrift.core.signals import SignalForm, signal_of
from quantdrift.facts.events import AlertExamples
from quantdrift.storage.alerts.evidence import Evidence
from quantdrift.storage.fold_rows import TransitionRow, from_us

MOST: Final = 5  # per alert
DEPTH: Final = 5_000  # items selected by one query: more do not fit into Postgres's default sort memory
ROUNDS: Final = 3
STATEMENT_S: Final = 5.0
_SPAN: Final = timedelta(hours=1)
_LOG = logging.getLogger(__name__)

_WORST: Final = text("""
    with alarm as (
        select * from unnest(
            cast(:places as int[]), cast(:versions as int[]), cast(:slices as int[]),
            cast(:begins as timestamptz[]), cast(:ends as timestamptz[]), cast(:fold_seqs as bigint[]),
            cast(:by_flips as boolean[])
        ) as a (place, version, slice, begin_at, end_at, fold_seq, by_flips)
    ), worst as (
        select c.model_version_id, c.captured_at, c.exchange_id, c.slice_ids, c.trace, b.fold_seq,
            coalesce(c.flip, false) as flip, coalesce(nullif(c.divergence, 'NaN'), 0) as divergence
        from comparisons(:begin, cast(:end as timestamptz) + interval '1 microsecond', cast(:slices as int[])) c
        join batch b on b.id = c.batch_id
        where c.model_version_id = any(cast(:versions as int[]))
            and c.slice_ids && cast(:slices as int[]) and b.fold_seq <= :fold_seq
        order by flip desc, divergence desc, c.exchange_id limit :depth
    ), one as (
        select distinct on (a.place, w.exchange_id) a.place, w.exchange_id, w.trace, w.flip, w.divergence
        from worst w cross join lateral unnest(w.slice_ids) as s (id)
            join alarm a on a.version = w.model_version_id and a.slice = s.id
                and w.captured_at between a.begin_at and a.end_at and w.fold_seq <= a.fold_seq
                and (w.flip or not a.by_flips)
        order by a.place, w.exchange_id, w.flip desc, w.divergence desc
    ), ranked as (
        select *, row_number() over (partition by place order by flip desc, divergence desc, exchange_id) as rank from one
    )
    select place, exchange_id::text, trace, (select count(*) from worst) as n_sorted
    from ranked where rank <= :most order by place, rank
""")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The example exchanges of an alert.

    Parameters
    ----------
    examples
        Exchanges: flipped ones first, then by divergence; 32 hexadecimal digits each.
    traces
        Their `traceparent`s, or empty.
    """

    examples: tuple[str, ...] = ()
    traces: tuple[str, ...] = ()

    def linked(self, trace_url: str) -> AlertExamples:
        """Return them as a part of the event.

        Parameters
        ----------
        trace_url
            Link to a production trace, with `{trace_id}`; empty: no links.
        """
        links = tuple(
            trace_url.replace("{trace_id}", parts[1])
            for trace in self.traces
            if trace_url and len(parts := trace.split("-")) == 4
        )
        return AlertExamples(exchanges=self.examples, traces=links)


async def examples(connection: AsyncConnection, rows: Sequence[TransitionRow]) -> list[Shown]:
    """Return the most divergent exchanges of each alert since its onset, within the hour before the change.

    An alert that flips decided shows flips alone: an exchange that did not flip would be no example of it.

    An alert is sent with or without them: a query that takes too long is rolled back alone, and logged.

    Parameters
    ----------
    connection
        Inside the fold's transaction.
    rows
        Alerts that open or escalate.
    """
    examples_of: dict[int, list[tuple[str, str]]] = {row_index: [] for row_index in range(len(rows))}
    # Of a slow candidate the most divergent exchanges show nothing.
    incomplete = [index for index in examples_of if not signal_of(rows[index].metric).is_about_speed]
    try:
        for _ in range(ROUNDS):
            if not incomplete:
                break
            async with Evidence(connection).bounded(STATEMENT_S):
                worst, n_sorted = await _worst(
                    connection, {row_index: rows[row_index] for row_index in incomplete}
                )
            examples_of |= worst
            still_incomplete = [row_index for row_index in incomplete if len(examples_of[row_index]) < MOST]
            # If all items were read, or no other slice took places, there are no more examples.
            incomplete = (
                [] if n_sorted < DEPTH or len(still_incomplete) == len(incomplete) else still_incomplete
            )
    except RetryError as error:
        _LOG.warning("%d alerts are sent without examples: %s", len(incomplete), error)
    return [
        Shown(
            examples=tuple(exchange_id for exchange_id, _ in shown), traces=tuple(trace for _, trace in shown)
        )
        for shown in examples_of.values()
    ]


async def _worst(
    connection: AsyncConnection, alarms: Mapping[int, TransitionRow]
) -> tuple[dict[int, list[tuple[str, str]]], int]:
    """Return exchanges and traces per index of an alert, the most divergent first, and how many items were selected."""
    windows = [_window(row) for row in alarms.values()]
    rows = await connection.execute(
        _WORST,
        {
            "places": list(alarms),
            "versions": [row.model_version_id for row in alarms.values()],
            "slices": [row.slice_id for row in alarms.values()],
            "begins": [begin for begin, _ in windows],
            "ends": [end for _, end in windows],
            "fold_seqs": [row.fold_seq for row in alarms.values()],
            "by_flips": [signal_of(row.metric).form is SignalForm.CHANGED for row in alarms.values()],
            "begin": min(begin for begin, _ in windows),
            "end": max(end for _, end in windows),
            "fold_seq": max(row.fold_seq for row in alarms.values()),
            "depth": DEPTH,
            "most": MOST,
        },
    )
    examples_of: dict[int, list[tuple[str, str]]] = {row_index: [] for row_index in alarms}
    n_sorted = 0
    for row in rows.mappings():
        examples_of[row["place"]].append((row["exchange_id"].replace("-", ""), row["trace"]))
        n_sorted = row["n_sorted"]
    return examples_of, n_sorted


def _window(row: TransitionRow) -> tuple[datetime, datetime]:
    at = from_us(row.at_us)
    return max(from_us(row.onset_us), at - _SPAN), at
