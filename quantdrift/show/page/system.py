"""How far exchanges come, what is lost, and who changed what."""

from datetime import UTC, datetime, timedelta

from aiohttp import web

from quantdrift.facts.figures import Window, WindowName
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE
from quantdrift.storage.account.flow import flow
from quantdrift.storage.cost import replay_costs
from quantdrift.storage.page import history as past
from quantdrift.storage.page import now as present
from quantdrift.storage.page import queries


async def system(request: web.Request) -> web.Response:
    """Show how far exchanges come, what is lost, and who changed what."""
    now = datetime.now(UTC)
    hour = Window(name=WindowName.PERIOD, begin=now - timedelta(hours=1), end=now)
    config = request.app[CONFIG]
    async with present.reading(request.app[DATABASE]) as connection:
        counts = await flow(connection, hour.begin)
    async with present.reading(request.app[DATABASE]) as connection:
        changes = await past.audit(connection, 50)
        replays = await present.replays(connection, hour.begin)
        timed = await present.item_times_quickly(connection, hour.begin, now)
        times = await present.replay_times(connection, hour.begin, now)
        relays = await present.relays(connection, hour.begin)
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
