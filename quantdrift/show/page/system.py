"""How far exchanges come, what is lost, and who changed what."""

from datetime import UTC, datetime, timedelta

from aiohttp import web

from quantdrift.facts.figures import Window, WindowName
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE
from quantdrift.storage import queries
from quantdrift.storage.account.flow import flow
from quantdrift.storage.audit import latest
from quantdrift.storage.cost import replay_costs
from quantdrift.storage.snapshot import reading
from quantdrift.storage.speed import item_times_quickly, relays_since, replay_times_quickly, replays_since


async def system(request: web.Request) -> web.Response:
    """Show how far exchanges come, what is lost, and who changed what."""
    now = datetime.now(UTC)
    hour = Window(name=WindowName.PERIOD, begin=now - timedelta(hours=1), end=now)
    config = request.app[CONFIG]
    async with reading(request.app[DATABASE]) as connection:
        counts = await flow(connection, hour.begin)
    async with reading(request.app[DATABASE]) as connection:
        changes = await latest(connection, 50)
        replays = await replays_since(connection, hour.begin)
        timed = await item_times_quickly(connection, hour.begin, now)
        times = await replay_times_quickly(connection, hour.begin, now)
        relays = await relays_since(connection, hour.begin)
    return render(
        request,
        "system.html",
        flow=counts,
        changes=changes,
        replays=replays,
        times=times,
        has_price=bool(config.cost.device_hour),
        costs=replay_costs(times, config, hour, now),
        relays=relays,
        replays_sql=queries.REPLAYS.strip(),
        timed=timed,
        timed_sql=queries.filled(queries.ITEM_TIMES, begin=hour.begin, end=now),
        changes_sql=queries.CHANGES.strip(),
        now=now,
    )
