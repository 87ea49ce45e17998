"""Access to the embedded NATS server: TLS, and a key with rights of its own for each process of `quantdrift up`."""

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from quantdrift.cli.run.certificates import server_certificate
from quantdrift.cli.run.setup import configuration, keys
from quantdrift.core.config.schema import MIB, Stream
from quantdrift.core.data_directory import at_server, authority, certificates, key, key_directory
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.process.nats_server import ENCRYPTION, Access, server_url
from quantdrift.core.stream.rights import NatsRole

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quantdrift.core.stream.connection import Queue

LEAST_FREE_BYTES: Final = 64 * MIB
"""Free disk below which an embedded server keeps no exemplars: twice what it needs to be started again after a full disk."""
_CHANGE_S: Final = 5.0
Done = TypeVar("Done")


def access(directory: Path, name: str) -> Access:
    """Return who may do what at the server; keys and certificate are made if they are missing.

    Parameters
    ----------
    directory
        The server's.
    name
        `stream.name`.

    Raises
    ------
    OperatorError
        The keys cannot be written or read, or a package is missing.
    OSError
        The certificate cannot be written.
    """
    return Access(
        users=configuration(name, keys(key_directory(directory))),
        certificate=server_certificate(certificates(directory)),
    )


def nats_variables(directory: Path, url: str, role: NatsRole | None = None) -> dict[str, str]:
    """Return the environment variables of a process that uses the server.

    Parameters
    ----------
    role
        Whose key it gets; None: no key.
    """
    variables = {
        "QUANTDRIFT__STREAM__URL": url,
        "QUANTDRIFT__STREAM__CA_FILE": str(authority(directory).absolute()),
    }
    if role is not None:
        variables["QUANTDRIFT__STREAM__CREDENTIALS_FILE"] = str(key(directory, role).absolute())
    return variables


class ExemplarRoom:
    """Keeps exemplars off a disk that is almost full: exchanges, and so comparisons, need it more.

    A server whose disk is full stores nothing until it is started again. Exemplars are the only part of it that nobody misses
    at once, so they go first.

    Parameters
    ----------
    directory, name
        The directory of the server, and `stream.name`.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._mark = directory / "exemplars-refused"  # also for the next process of this server

    def look(self, port: int, free_bytes: int) -> str:
        """Delete exemplars if the disk is almost full, and accept new ones once there is room again; say what was done, if anything."""
        if not (self._directory / ENCRYPTION).exists():  # no model has ever kept exemplars
            return ""
        if free_bytes < LEAST_FREE_BYTES:
            return self._refuse(port, free_bytes)
        if self._mark.exists():
            return self._accept(port, free_bytes)
        return ""

    def _refuse(self, port: int, free_bytes: int) -> str:
        deleted = self._at_server(port, lambda queue: queue.refuse_exemplars())
        if deleted is None:
            return ""
        n, limit = deleted
        with contextlib.suppress(OSError):
            self._mark.write_text(str(limit), "ascii")
        return (
            f"{n:,} exemplars were deleted, and none is kept: the disk of {self._directory} has {free_bytes // MIB} MiB left, and"
            f" exchanges need it more. Exemplars are kept again once {(LEAST_FREE_BYTES + limit) // MIB} MiB are free"
        )

    def _accept(self, port: int, free_bytes: int) -> str:
        text = self._mark.read_text("ascii")
        limit = int(text) if text.isdecimal() else Stream().exemplar_bytes

        async def accept(queue: "Queue") -> bool:
            await queue.ensure_exemplars()
            return True

        if free_bytes < LEAST_FREE_BYTES + limit or not self._at_server(port, accept, limit):
            return ""
        self._mark.unlink(missing_ok=True)
        return "exemplars are kept again"

    def _at_server(
        self, port: int, change: "Callable[[Queue], Awaitable[Done]]", limit: int | None = None
    ) -> "Done | None":
        """Change the stream as the administrator; return None if the server does not answer: the next look tries it again."""
        from quantdrift.core.stream.connection import Queue

        wanted = Stream(name=self._name, exemplar_bytes=limit or Stream().exemplar_bytes)
        stream = at_server(wanted, self._directory, server_url(port), NatsRole.ADMIN)

        async def done() -> Done:
            async with asyncio.timeout(_CHANGE_S):
                queue = await Queue.connect(stream, client_name="quantdrift exemplars", role=NatsRole.ADMIN)
                try:
                    return await change(queue)
                finally:
                    await queue.close()

        try:
            return asyncio.run(done())
        except (QuantdriftError, TimeoutError):
            return None
