"""asyncpg's connection, without its one way of waiting for ever."""

import asyncio
from typing import Any

import asyncpg


def connection_class(copy_timeout_s: float | None) -> type[asyncpg.Connection]:
    """Return the class of the connections of an engine.

    In asyncpg (0.32) a COPY whose rows do not fit the socket's buffer waits for leave to write. When the server is
    gone by then, nobody gives it, and no timeout of the driver covers this wait. Here the end of the connection,
    or a deadline of our own, ends it with `TimeoutError`.

    Parameters
    ----------
    copy_timeout_s
        Longest COPY; None has no deadline, and only the end of the connection counts.
    """

    class Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg publishes no types
        __slots__ = ()

        async def copy_records_to_table(self, table_name: str, **options: Any) -> str:
            """Copy rows as asyncpg does; raise `TimeoutError` when the server does not take them any more."""
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(copy_timeout_s) as deadline:

                def lost(_connection: object) -> None:
                    # Next to the driver's own error, if it has one: that says more.
                    if not deadline.expired():
                        deadline.reschedule(loop.time() + 0.05)

                self.add_termination_listener(lost)
                try:
                    status: str = await super().copy_records_to_table(table_name, **options)
                finally:
                    self.remove_termination_listener(lost)
            return status

    return Connection
