"""Leader election: an advisory lock on a direct connection, which the server releases when the connection ends."""

import asyncio
from typing import Any, Final, Self

from quantdrift.core.errors import RetryError
from quantdrift.storage.address import Connector, Dsn
from quantdrift.storage.database import translated

_LOCK: Final = 0x7175616E666F6C64  # "quanfold" as a number
_TIMEOUT_S: Final = 5.0


class Leadership:
    """The monitor's lock on one database. At most one monitor holds it; the others try again.

    The connection does not come from a pool: a pooler that reassigns the session would reassign the lock.

    Parameters
    ----------
    dsn
        `postgresql://user:password@host:port/name`, or a function that reads it for each connection; never logged.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._connector = Connector(dsn)
        self._connection: Any = None
        self._held = False

    async def acquire(self) -> bool:
        """Return whether this process leads now; repeated calls are cheap and check that it still does.

        Raises
        ------
        RetryError
            Postgres is not available; if this process led, it does not any more.
        OperatorError
            Postgres refuses the connection, or its certificate is not accepted; the message says what to do.
        """
        try:
            async with translated(), asyncio.timeout(_TIMEOUT_S):
                if self._connection is None:
                    self._connection = await self._connector.connect(
                        timeout=_TIMEOUT_S,
                        server_settings={
                            "application_name": "quantdrift leader",
                            # A leader whose machine is gone is noticed within half a minute.
                            "tcp_keepalives_idle": "10",
                            "tcp_keepalives_interval": "5",
                            "tcp_keepalives_count": "4",
                        },
                    )
                    self._held = False
                if self._held:
                    await self._connection.execute("select 1")
                else:
                    self._held = await self._connection.fetchval("select pg_try_advisory_lock($1)", _LOCK)
        except RetryError:
            await self.release()
            raise
        return bool(self._held)

    async def release(self) -> None:
        """Give up leadership."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()
