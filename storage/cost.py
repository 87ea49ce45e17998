"""What changed answers and replays cost: the figures of `quantdrift.facts.cost`, with what they need from the tables."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.config.cost import read_values
from quantdrift.core.config.schema import Config
from quantdrift.facts.cost import Prices, cost_figure, cost_of_changed, cost_of_replays
from quantdrift.facts.estimate import Estimate, ratio
from quantdrift.facts.figures import Figure, Window
from quantdrift.storage.figures.estimates import hashed, statement, sums_of
from quantdrift.storage.figures.figures import SeenVersion, in_window

_WORTH: Final = "worth"
_MEASURES: Final = {
    _WORTH: "c.flip::int * coalesce(price.worth, cast(:per_request as double precision))",
}
_SUMS: Final = text(
    statement(
        _MEASURES,
        """
        from comparisons(:begin, :end, cast(:slices as int[])) c
        left join unnest(cast(:names as text[]), cast(:worths as double precision[])) as price (name, worth)
            on price.name = c.attributes ->> cast(:attribute as text)
        where c.model_version_id = :version
            and c.slice_ids && cast(:slices as int[])
        """,
        at="cast(:begin as timestamptz)",
    ).replace("::", "\\:\\:")
)
_REPLAYS: Final = text("""
    select b.compared_model as model, coalesce(sum(b.replay_s), 0) as seconds, cast(sum(b.n_rows) as bigint) as n,
        cast(coalesce(sum(b.n_rows) filter (where b.replay_s is not null), 0) as bigint) as n_timed
    from batch b
    where b.kind = 'comparison' and b.stored_at >= :begin and b.stored_at < :end and b.n_rows > 0
        and b.compared_model is not null group by 1
""")


_MEAN_WORTH: Final = text("""
    select sum(1 / (c.pi1 * c.pi2) * coalesce(price.worth, :per_request)) / nullif(sum(1 / (c.pi1 * c.pi2)), 0)
    from comparisons(:begin, :end, cast(:slices as int[]), true) c
    join unnest(cast(:begins as timestamptz[]), cast(:ends as timestamptz[])) as part (begin_at, end_at)
        on c.captured_at >= part.begin_at and c.captured_at < part.end_at
    left join unnest(cast(:names as text[]), cast(:worths as double precision[])) as price (name, worth)
        on price.name = c.attributes ->> cast(:attribute as text)
    where c.flip and c.model_version_id = :version and c.slice_ids && cast(:slices as int[])
""")


class ReplayTime(msgspec.Struct, frozen=True, kw_only=True):
    """The replays of a model.

    Parameters
    ----------
    n, n_timed
        Items that were replayed, and those of which it is known how long their batch took.
    seconds
        Time of the device of the latter.
    """

    model: str
    n: int
    n_timed: int
    seconds: float

    @property
    def seconds_of_all(self) -> float | None:
        """Time of the device of all replays, if those whose time is not known took as long as the others; None: no time is known."""
        return self.seconds * self.n / self.n_timed if self.n_timed else None


def prices_of(config: Config, model: str) -> Prices:
    """Return the prices of a model, with the file of what each request is worth read again.

    Raises
    ------
    OperatorError
        The file cannot be used: the message says why.
    """
    cost, of_model = config.cost, config.model(model)
    own = None if of_model is None else of_model.value_per_request
    return Prices(
        currency=cost.currency,
        per_request=cost.value_per_request if own is None else own,
        attribute=cost.attribute,
        by_value=read_values(cost.values_file) if cost.values_file else {},
        device_hour=cost.device_hour,
    )


async def changed_cost(
    connection: AsyncConnection, prices: Prices, share: Figure, *, version_id: int, slice_id: int
) -> Figure | None:
    """Return what the changed answers of a `changed_share` cost in its window; None without a price.

    Where all requests are worth the same, nothing is read. Else the worth of each compared request is read, and its mean over the
    traffic, 0 where the answer did not change, has the interval of `quantdrift.facts.estimate.ratio` with the largest worth as cap.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    if not prices.by_value:
        return cost_of_changed(share, prices)
    if not prices.most:
        return None
    values = {
        "names": list(prices.by_value),
        "worths": list(prices.by_value.values()),
        "attribute": prices.attribute,
        "per_request": prices.per_request,
        "begin": share.window.begin,
        "end": share.window.end,
        "version": version_id,
        "slices": [slice_id],
    }
    for row in await hashed(connection, _SUMS, values):
        mean = ratio(sums_of(row, _MEASURES).of[_WORTH], prices.most)
        return None if mean is None else cost_figure(share, mean, prices)
    return None


async def mean_worth(
    connection: AsyncConnection,
    prices: Prices,
    times: Sequence[tuple[datetime, datetime]],
    *,
    version_id: int,
    slice_ids: Sequence[int],
) -> float:
    """Return what a request with a changed answer in any of the slices is worth on average; `per_request` where none was seen.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    if not prices.by_value:
        return prices.per_request
    values = {
        "names": list(prices.by_value),
        "worths": list(prices.by_value.values()),
        "attribute": prices.attribute,
        "per_request": prices.per_request,
        "begins": [begin for begin, _ in times],
        "ends": [end for _, end in times],
        "begin": min(begin for begin, _ in times),
        "end": max(end for _, end in times),
        "version": version_id,
        "slices": list(slice_ids),
    }
    worth = (await connection.execute(_MEAN_WORTH, values)).scalar_one()
    return prices.per_request if worth is None else float(worth)


async def lost_costs(
    connection: AsyncConnection,
    prices: Prices,
    version: SeenVersion,
    window: Window,
    losses: Mapping[int, Estimate],
) -> dict[int, Figure]:
    """Return what the accuracy that a version lost costs in a window, by slice; empty without a price.

    Parameters
    ----------
    window
        It begins with an hour of the clock.
    losses
        By slice, the share of requests that the reference answers rightly and the candidate wrongly, less the reverse: below 0 the cost
        is a gain. Assumption: on average such a request is worth what one with a changed answer is.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    if not prices.most:
        return {}
    slices = await in_window(connection, version, window, window.end, slice_ids=())
    costs: dict[int, Figure] = {}
    for slice_id, loss in losses.items():
        share = slices[slice_id].changed_share if slice_id in slices else None
        if share is None:
            continue
        times = [(window.begin, window.end)]
        worth = await mean_worth(connection, prices, times, version_id=version.id, slice_ids=[slice_id])
        cost = cost_figure(share, loss, prices, worth)
        costs |= {} if cost is None else {slice_id: cost}
    return costs


async def replay_times(connection: AsyncConnection, begin: datetime, end: datetime) -> dict[str, ReplayTime]:
    """Return how long references computed, by model, in the batches that were stored in a time.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    rows = (await connection.execute(_REPLAYS, {"begin": begin, "end": end})).mappings()
    return {row["model"]: ReplayTime(**row) for row in rows}


def replay_costs(
    times: Mapping[str, ReplayTime], config: Config, window: Window, as_of: datetime
) -> dict[str, Figure]:
    """Return what the replays of a time cost, by model; models without a known time are left out, all without a price."""
    prices = Prices(currency=config.cost.currency, device_hour=config.cost.device_hour)
    costs = {
        model: cost_of_replays(time.n, seconds, prices, model=model, window=window, as_of=as_of)
        for model, time in times.items()
        if (seconds := time.seconds_of_all) is not None
    }
    return {model: cost for model, cost in costs.items() if cost is not None}
