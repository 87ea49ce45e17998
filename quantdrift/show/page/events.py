"""Server-sent events: all open pages follow one reader of the database."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Final

from aiohttp import web

from quantdrift.core.errors import QuantdriftError
from quantdrift.storage.database import Database
from quantdrift.storage.snapshot import data_state

MOST_FOLLOWERS: Final = 64
_POLL_S: Final = 2.0
_ALIVE_S: Final = 20.0


class Feed:
    """The one reader of the database's state, whose changes all open pages follow."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._state = ""
        self._changed = asyncio.Condition()
        self.n_followers = 0
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def follower(self) -> Iterator[None]:
        """Count one more open page inside the block; the database is read while there is any."""
        if self._task is None:
            self._task = asyncio.create_task(self._read())
        self.n_followers += 1
        try:
            yield
        finally:
            self.n_followers -= 1
            if not self.n_followers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def follow(self) -> AsyncGenerator[str, None]:
        """Return the present state and each later one; an empty text where nothing has changed for a while."""
        sent = ""
        while True:
            state = await self._next(sent)
            yield state
            sent = state or sent

    async def _next(self, known: str) -> str:
        """Return the state once it is another one, an empty text if it stays for a while."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ALIVE_S):
                    await self._changed.wait_for(lambda: self._state not in {"", known})
            return self._state if self._state != known else ""

    async def _read(self) -> None:
        while True:
            with contextlib.suppress(QuantdriftError):
                async with self._database.begin() as connection:
                    state = await data_state(connection)
                if state != self._state:
                    async with self._changed:
                        self._state = state
                        self._changed.notify_all()
            await asyncio.sleep(_POLL_S)


async def events(request: web.Request) -> web.StreamResponse:
    """Send a server-sent event whenever something that the pages show has changed."""
    feed = request.app[FEED]
    if feed.n_followers >= MOST_FOLLOWERS:
        raise web.HTTPServiceUnavailable(reason="Too many pages are open: this one is not updated by itself.")
    answer = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
    with feed.follower():
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            await answer.write(b"retry: 5000\n\n")
            async with contextlib.aclosing(feed.follow()) as states:
                async for state in states:
                    await answer.write(
                        f"event: changed\ndata: {state}\n\n".encode() if state else b": alive\n\n"
                    )
    return answer


FEED: Final = web.AppKey("feed", Feed)
