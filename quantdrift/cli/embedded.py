"""Process that runs one embedded server.

`quantdrift up` starts one for Postgres and one for NATS. Creating a data directory, a slow start or a hanging disk then
blocks only this process. The server ends when this process ends.

    python -m quantdrift.cli.embedded postgres|nats DIRECTORY PORT

It writes the server's address to stdout once the server answers, and errors to stderr. SIGTERM stops both in order.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.process.log_file import keep_small
from quantdrift.core.process.nats_server import NatsServer

if TYPE_CHECKING:
    from quantdrift.storage.server.postgres import PostgresServer

TOKEN: Final = "QUANTDRIFT_NATS_TOKEN"  # noqa: S105 - the name of a variable
_POLL_S = 0.1
_STOP_S = 10.0  # then it is stopped without a checkpoint: no committed data is lost


class _EndedError(Exception):
    """SIGTERM was received."""


def main(arguments: Sequence[str]) -> int:
    """Run a server until it ends or SIGTERM; return the exit code."""

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the stop
        raise _EndedError

    signal.signal(signal.SIGTERM, on_sigterm)
    kind, directory, port = arguments
    server = _server(kind, Path(directory))
    try:
        server.start(int(port))
        sys.stdout.write(f"{server.dsn if kind == 'postgres' else server.url}\n")  # type: ignore[union-attr]
        sys.stdout.flush()
        while server.alive():
            time.sleep(_POLL_S)
            keep_small(server.log)
    except _EndedError:
        return 0
    except (QuantdriftError, OSError) as error:
        sys.stderr.write(f"quantdrift: {error}\n")
        return 2 if isinstance(error, OperatorError) else 1
    else:
        sys.stderr.write(f"quantdrift: {server.last_error()}\n")
        return 1
    finally:
        server.stop()


def _server(kind: str, directory: Path) -> "NatsServer | PostgresServer":
    if kind == "nats":
        return NatsServer(directory, token=os.environ.get(TOKEN))
    from quantdrift.storage.server.postgres import PostgresServer

    return PostgresServer(directory, stop_timeout_s=_STOP_S)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
