"""Where a call finds its configuration, its database and its stream: as the commands do."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from quantdrift.core.config.load import Role, Secrets, load
from quantdrift.core.config.schema import Config
from quantdrift.core.data_directory import at_data, default_data, secrets_at
from quantdrift.core.errors import OperatorError
from quantdrift.core.stream.rights import NatsRole

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

Answer = TypeVar("Answer")
File: TypeAlias = str | os.PathLike[str]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file, and the data directory of a running `quantdrift up`; None: there is none."""

    path: Path
    data: Path | None

    @classmethod
    def of(cls, config: File, data: File | None) -> "Setting":
        """Return the setting of a call; without `data` that of `quantdrift up` in this folder, as for a command."""
        path = Path(config)
        return cls(path=path, data=default_data(path) if data is None else Path(data))

    def config(self) -> Config:
        """Return the configuration."""
        return load(self.path)

    def secrets(self, config: Config) -> Secrets:
        """Return what is needed to read the database."""
        return secrets_at(config, Role.REPORT, self.data)

    def with_stream(self, config: Config, role: NatsRole) -> Config:
        """Return the configuration with the stream of the data directory, with the rights of a role."""
        return at_data(config, self.data, role)

    async def in_transaction(self, ask: "Callable[[AsyncConnection], Awaitable[Answer]]") -> Answer:
        """Return what one transaction returns."""
        from quantdrift.storage.database import Database  # noqa: PLC0415 - where there is no database, nobody needs its driver

        secrets = self.secrets(self.config())
        async with Database(secrets.dsn) as database, database.begin() as connection:
            return await ask(connection)


def existing(path: File, what: str) -> Path:
    """Return a path, which must be there.

    Parameters
    ----------
    what
        The parameter.
    """
    if not Path(path).exists():
        raise OperatorError(f"{what}: there is no file {os.fspath(path)}")
    return Path(path)
