"""Process that runs one embedded server, and ends it when it hangs.

`quantdrift up` starts one for Postgres and one for NATS. Creating a data directory, a slow start or a hanging disk then
blocks only this process. The server ends when this process ends, and this process ends when the server does not answer:
`quantdrift up` starts both again, with the data as they are.

    python -m quantdrift.cli.run.embedded postgres DIRECTORY PORT
    python -m quantdrift.cli.run.embedded nats DIRECTORY PORT STREAM

It writes a `Report` to stdout once the server answers, and whenever the server begins or ceases to work. Errors go to
stderr. SIGTERM stops both in order.
"""

import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import msgspec

from quantdrift.core.config.schema import MIB
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.passed_secrets import variables
from quantdrift.core.process.heartbeat import Heartbeat
from quantdrift.core.process.log_file import keep_small
from quantdrift.core.process.nats_server import MAX_PAYLOAD_BYTES, NatsServer

if TYPE_CHECKING:
    from quantdrift.cli.run.embedded_nats import ExemplarRoom
    from quantdrift.storage.server.postgres import PostgresServer

HUNG_S: Final = 30.0
"""Time after which a server that does not answer, or says that it cannot work, is ended and started again."""
ROOM_BYTES: Final = 4 * MAX_PAYLOAD_BYTES
"""Free disk that a server needs to be started again after the disk was full: a few of the largest messages."""
_POLL_S = 0.1
_CHECK_S = 5.0  # between two checks
_ANSWER_S = 5.0
_N_BAD: Final = (
    3  # checks in a row: after a pause of the whole machine, a server may answer a moment later than we ask
)
_STOP_S = 10.0  # then it is stopped without a checkpoint: no committed data is lost


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A line that this process writes to stdout.

    Parameters
    ----------
    address
        The address of the server.
    problem
        Why the server works only in part, and when it is started again; empty: it works.
    """

    address: str
    problem: str = ""


class _EndedError(Exception):
    """SIGTERM was received."""


class _HungError(Exception):
    """The server must be started again; the message says why."""


def main(arguments: Sequence[str]) -> int:
    """Run a server until it ends, hangs, or SIGTERM; return the exit code."""

    def on_sigterm(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the stop
        raise _EndedError

    signal.signal(signal.SIGTERM, on_sigterm)
    kind, directory, port, *stream = arguments
    variables()  # closes the descriptor of the secrets, before there are children
    heartbeat = Heartbeat.of_parent()
    server: NatsServer | PostgresServer | None = None
    try:
        server = _server(kind, Path(directory), *stream)
        server.start(int(port))
        watch = _Watch(server, Path(directory), *stream)
        while server.alive():
            if heartbeat is not None:
                heartbeat.beat()
            watch.check()
            time.sleep(_POLL_S)
            keep_small(server.log)
    except _EndedError:
        return 0
    except (QuantdriftError, OSError, _HungError) as error:
        sys.stderr.write(f"quantdrift: {error}\n")
        return 2 if isinstance(error, OperatorError) else 1
    else:
        sys.stderr.write(f"quantdrift: {server.last_error()}\n")
        return 1
    finally:
        if server is not None:
            server.stop()


class _Watch:
    """Asks a server every few seconds whether it works, and reports when that changes.

    Parameters
    ----------
    server
        It has been started.
    directory
        Holds its data: the disk that may be full.
    stream
        Of NATS: `stream.name`.
    """

    def __init__(self, server: "NatsServer | PostgresServer", directory: Path, stream: str = "") -> None:
        self._server = server
        self._directory = directory
        self._room = _room(directory, stream) if stream else None
        self._is_reported_bad = False
        self._n_bad = 0
        self._worked_at_s = time.monotonic()
        self._next_s = self._worked_at_s + _CHECK_S
        self._report("")

    def check(self) -> None:
        """Ask the server if it is time to.

        Raises
        ------
        _HungError
            It must be ended and started again.
        """
        if time.monotonic() < self._next_s:
            return
        is_silent = False
        self._make_room()
        try:
            problem = self._server.health_problem(_ANSWER_S)
        except OSError as error:
            is_silent, problem = True, f"it does not answer ({error.strerror or 'no reply'})"
        now_s = time.monotonic()
        self._next_s = now_s + _CHECK_S
        self._n_bad = self._n_bad + 1 if problem else 0
        if not problem:
            self._worked_at_s = now_s
            if self._is_reported_bad:
                self._report("")
        elif self._n_bad >= _N_BAD and now_s - self._worked_at_s >= HUNG_S:
            self._mend(f"{problem}, for {now_s - self._worked_at_s:.0f} s", is_silent=is_silent)

    def _make_room(self) -> None:
        """Let exemplars go before the disk is full."""
        if self._room is None or not isinstance(self._server, NatsServer):
            return
        done = self._room.look(self._server.port, shutil.disk_usage(self._directory).free)
        if done:
            sys.stderr.write(f"nats: {done}\n")
            sys.stderr.flush()

    def _mend(self, problem: str, *, is_silent: bool) -> None:
        """Have the server started again, unless it answers and the disk is full: until then it can be read."""
        free = shutil.disk_usage(self._directory).free
        if is_silent or free >= ROOM_BYTES:
            raise _HungError(f"{problem}, and was ended")
        if not self._is_reported_bad:
            self._report(
                f"{problem}. The disk of {self._directory} has {free // MIB} MiB left: it is started again once"
                f" {ROOM_BYTES // MIB} MiB are free"
            )

    def _report(self, problem: str) -> None:
        self._is_reported_bad = bool(problem)
        address = self._server.url if isinstance(self._server, NatsServer) else self._server.dsn
        sys.stdout.buffer.write(msgspec.json.encode(Report(address=address, problem=problem)) + b"\n")
        sys.stdout.buffer.flush()


def _room(directory: Path, stream: str) -> "ExemplarRoom":
    from quantdrift.cli.run.embedded_nats import ExemplarRoom

    return ExemplarRoom(directory, stream)


def _server(kind: str, directory: Path, stream: str = "") -> "NatsServer | PostgresServer":
    if kind == "nats":
        from quantdrift.cli.run.embedded_nats import access

        return NatsServer(directory, access=access(directory, stream))
    from quantdrift.storage.server.postgres import PostgresServer

    return PostgresServer(directory, stop_timeout_s=_STOP_S)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
