"""What became of every request: the counts of the product beside what the clients saw, and the alerts."""

from collections import Counter

import msgspec

from benchmarks.storm.stack import Stack
from benchmarks.storm.traffic import Traffic

# Totals since each start of the sidecar's supervisor: the last tally of each has them.
_TALLIES = """
    select coalesce(sum(offered), 0)::bigint as offered, coalesce(sum(taken), 0)::bigint as taken,
        coalesce(sum(thinned), 0)::bigint as thinned, coalesce(sum(published), 0)::bigint as published
    from (select distinct on (source, boot, stratum) * from tally order by source, boot, stratum, sequence desc) t
"""
_LOST = """
    select key as reason, sum(value::bigint)::bigint as n
    from (select distinct on (source, boot, stratum) * from tally order by source, boot, stratum, sequence desc) t
        cross join lateral jsonb_each_text(lost) group by 1
"""
_COMPARED = """
    select count(*) as n_rows, count(distinct exchange_id) as n_exchanges,
        count(distinct attributes ->> 'header.x-request-id') as n_requests from comparison
"""
_REQUESTS = (
    "select distinct split_part(attributes ->> 'header.x-request-id', '-', 1)::int as number from comparison"
)
_QUARANTINED = "select reason, count(*) as n from quarantine group by 1"
_EXPIRED = "select coalesce(sum(n), 0)::bigint as n from expiry"
_FOLDED = """
    select coalesce(sum(n_items), 0)::bigint as n from rollup_day join slice on slice.id = slice_id
    where predicate = 'true'
"""
_FIRED = """
    select slice.name, count(*) as n, min(extract(epoch from at))::float8 as at
    from transition join slice on slice.id = slice_id where to_verdict = 'firing' group by 1 order by 1
"""
_ALERTS = """
    select slice.name, count(*) as n from alert join slice on slice.id = slice_id
    where severity = 'firing' group by 1 order by 1
"""
_VERDICTS = "select slice, verdict, reason from slice_now order by 1"
_PAGE = 17  # OpenTelemetry's severity number of an error


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The counts at the end of a run.

    Parameters
    ----------
    answered, failed
        What the clients saw.
    offered, taken, thinned, published
        Sums over the sidecar's starts, from its tallies.
    lost, quarantined
        By reason.
    expired, waiting
        Exchanges that expired in the stream, and those that are still there.
    compared, compared_rows, compared_requests
        Exchanges with a comparison, their rows, and the client's requests among them.
    folded
        Items that the monitor has counted for the aggregate.
    unknown_requests
        Comparisons of requests that no client has sent.
    """

    answered: int
    failed: int
    offered: int
    taken: int
    thinned: int
    published: int
    lost: dict[str, int]
    quarantined: dict[str, int]
    expired: int
    waiting: int
    compared: int
    compared_rows: int
    compared_requests: int
    folded: int
    unknown_requests: int

    @property
    def counted(self) -> int:
        """Requests that the product accounts for: not taken + thinned + lost + expired + waiting + compared + quarantined."""
        return (
            self.offered
            - self.taken
            + self.thinned
            + sum(self.lost.values())
            + self.expired
            + self.waiting
            + self.compared
            + sum(self.quarantined.values())
        )

    @property
    def uncounted(self) -> int:
        """Requests that were answered and that the product accounts for nowhere."""
        return max(0, self.answered - self.counted)

    @property
    def overcounted(self) -> int:
        """Requests that the product accounts for beyond all that were sent: something is counted twice."""
        return max(0, self.counted - self.answered - self.failed)

    @property
    def missing(self) -> int:
        """Exchanges that the stream has acknowledged and that are neither compared, quarantined, expired nor waiting."""
        ended = self.compared + sum(self.quarantined.values()) + self.expired + self.waiting
        return max(0, self.published - ended)

    @property
    def doubled(self) -> int:
        """Comparisons that are there twice: as rows, as exchanges of one request, or in the monitor's counts."""
        return (
            self.compared_rows
            - self.compared
            + self.compared
            - self.compared_requests
            + max(0, self.folded - self.compared_rows)
        )

    @property
    def unfolded(self) -> int:
        """Comparisons that the monitor has not counted."""
        return max(0, self.compared_rows - self.folded)


class Alerts(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor has said.

    Parameters
    ----------
    fired
        Changes to `firing` by slice.
    opened
        Alerts that paged, by slice.
    pages
        Pages that reached the collector by slice, each event once.
    first_s
        Time of the first change to `firing`, seconds since 1970; None: there was none.
    verdicts
        The verdicts at the end, by slice, with the reason.
    """

    fired: dict[str, int]
    opened: dict[str, int]
    pages: dict[str, int]
    first_s: float | None
    verdicts: dict[str, str]


async def read_account(stack: Stack, traffic: Traffic, waiting: int) -> Account:
    """Return the counts; the traffic has ended.

    Parameters
    ----------
    waiting
        Messages in the stream.
    """
    tallies = (await stack.rows(_TALLIES))[0]
    compared = (await stack.rows(_COMPARED))[0]
    sent = traffic.answered | {failure.asked.number for failure in traffic.failures}
    requests = {row["number"] for row in await stack.rows(_REQUESTS)}
    return Account(
        answered=len(traffic.answered),
        failed=len(traffic.failures),
        offered=tallies["offered"],
        taken=tallies["taken"],
        thinned=tallies["thinned"],
        published=tallies["published"],
        lost={row["reason"]: row["n"] for row in await stack.rows(_LOST) if row["n"]},
        quarantined={row["reason"]: row["n"] for row in await stack.rows(_QUARANTINED)},
        expired=(await stack.rows(_EXPIRED))[0]["n"],
        waiting=waiting,
        compared=compared["n_exchanges"],
        compared_rows=compared["n_rows"],
        compared_requests=compared["n_requests"],
        folded=(await stack.rows(_FOLDED))[0]["n"],
        unknown_requests=len(requests - sent),
    )


async def read_alerts(stack: Stack) -> Alerts:
    """Return what the monitor has said."""
    fired = await stack.rows(_FIRED)
    seen = {
        (event.attributes.get("quantdrift.slice"), event.time_unix_nano)
        for event in stack.collector.events
        if event.severity == _PAGE
    }
    return Alerts(
        fired={row["name"]: row["n"] for row in fired},
        opened={row["name"]: row["n"] for row in await stack.rows(_ALERTS)},
        pages=dict(Counter(str(name) for name, _ in seen)),
        first_s=min((row["at"] for row in fired), default=None),
        verdicts={row["slice"]: f"{row['verdict']} ({row['reason']})" for row in await stack.rows(_VERDICTS)},
    )
