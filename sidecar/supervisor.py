"""The sidecar's first process: owns the port, the counts and the children, and serves the admin port.

It is not on the serving path: relay workers accept from the listening socket themselves. It ends last.
"""

import asyncio
import logging
import os
import secrets as random
import shutil
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quantdrift.core.admin import Admin
from quantdrift.core.child import Child
from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config, Secrets
from quantdrift.core.errors import OperatorError
from quantdrift.core.process import Stop
from quantdrift.core.telemetry import RESTARTS, Telemetry
from sidecar.counters import Counters, Gauge, Slot
from sidecar.drain import Deadlines
from sidecar.instruments import observe
from sidecar.policy import policy_of
from sidecar.settled import settle

_LOG = logging.getLogger(__name__)


async def serve(config: Config, secrets: Secrets, stop: Stop) -> int:
    """Run the sidecar until `stop`; return the exit code.

    Parameters
    ----------
    config, secrets
        Of the sidecar; its children get the same configuration, whatever becomes of the file.
    stop
        Asks for the end: the relay workers drain, then the capture process publishes what it has.

    Raises
    ------
    OperatorError
        A port or a file cannot be opened.
    """
    listener = _listen(config.sidecar.listen, config.sidecar.backlog)
    directory = Path(tempfile.mkdtemp(prefix="quantdrift-"))
    try:
        handoff = _listen_unix(directory / "handoff")
        try:
            settled = _settle(config, directory)
            return await _Supervisor(settled, config, secrets, listener, handoff).run(stop)
        finally:
            handoff.close()
    finally:
        listener.close()
        shutil.rmtree(directory, ignore_errors=True)


class _Supervisor:
    def __init__(
        self,
        settled: Path,
        config: Config,
        secrets: Secrets,
        listener: socket.socket,
        handoff: socket.socket,
    ) -> None:
        self._config = config
        self._listener = listener
        strata = [stratum.name for stratum in policy_of(config.sampling, "").header_strata]
        n_workers = config.sidecar.workers
        self._counters = Counters.create(n_workers + 1, len(strata))
        self._slots = [self._counters.slot(index) for index in range(n_workers)]
        self._telemetry = Telemetry("quantdrift-sidecar", config.telemetry.resource)
        self._restarts = self._telemetry.counter(RESTARTS)
        observe(self._telemetry, self._counters, strata, config.sidecar, SystemClock())
        environment = {**os.environ, "QUANTDRIFT_SAMPLING_SALT": _salt(secrets)}
        common = ["--config", str(settled), "--counters-fd", str(self._counters.fd)]
        common += ["--n-slots", str(self._counters.n_slots)]
        self._workers = [
            self._worker(index, slot, [*common, "--handoff", handoff.getsockname()], environment)
            for index, slot in enumerate(self._slots)
        ]
        self._capture = Child(
            "capture",
            "sidecar.capture.process",
            [*common, "--handoff-fd", str(handoff.fileno()), "--boot", random.token_hex(16)],
            fds=(self._counters.fd, handoff.fileno()),
            environment=environment,
            orphan=signal.SIGKILL,
            on_death=lambda: self._restarts.add(1, {"child": "capture"}),
        )
        self._stop = Stop()

    async def run(self, stop: Stop) -> int:
        self._stop = stop
        admin = Admin(self._config.sidecar.admin, self._is_ready)
        try:
            await admin.start()
        except OSError as error:
            raise OperatorError(
                f"sidecar.admin {self._config.sidecar.admin} cannot be opened: {error}"
            ) from error
        capture = asyncio.create_task(self._capture.run())
        workers = [asyncio.create_task(worker.run()) for worker in self._workers]
        host, port = self._listener.getsockname()[:2]
        _LOG.info("relaying %s:%d to %s", host, port, self._config.sidecar.backend)
        try:
            await stop.wait()
            await self._end(workers, capture)
        finally:
            for child in (*self._workers, self._capture):
                child.kill()
            await asyncio.gather(capture, *workers, return_exceptions=True)
            await admin.stop()
            self._telemetry.close()
        return 0

    async def _end(self, workers: list[asyncio.Task[int]], capture: asyncio.Task[int]) -> None:
        deadlines = Deadlines.of(self._config.sidecar)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for worker in self._workers:
            worker.terminate()
        await asyncio.wait(workers, timeout=deadlines.accept_s)
        self._listener.close()  # the workers close theirs now: the port is free once all have
        await asyncio.wait(workers, timeout=began_s + deadlines.relay_s - loop.time())
        for worker in self._workers:
            worker.kill()
        self._capture.terminate()
        await asyncio.wait([capture], timeout=began_s + deadlines.capture_s - loop.time())

    def _is_ready(self) -> bool:
        """Say whether clients are served. The backend, the stream and the capture process are not asked about."""
        return not self._stop.is_set() and any(slot.gauge(Gauge.SERVING) for slot in self._slots)

    def _worker(self, index: int, slot: Slot, common: list[str], environment: Mapping[str, str]) -> Child:
        def died() -> None:
            slot.set(Gauge.SERVING, 0)
            self._restarts.add(1, {"child": "relay"})

        listen = self._listener.fileno()
        return Child(
            f"relay {index}",
            "sidecar.relay.worker",
            [*common, "--listen-fd", str(listen), "--slot", str(index)],
            fds=(self._counters.fd, listen),
            environment=environment,
            orphan=signal.SIGKILL,  # an orphan would keep the port from its successor
            on_death=died,
        )


def _settle(config: Config, directory: Path) -> Path:
    try:
        return settle(config, directory)
    except OSError as error:
        raise OperatorError(
            f"{directory} cannot be written to: {error}. Set TMPDIR to a writable path."
        ) from error


def _salt(secrets: Secrets) -> str:
    """Return the salt that the children share: the configured one, or one of this start."""
    return secrets.salt.decode() or random.token_hex(16)


def _listen(address: str, backlog: int) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit it. The backend's own probes reach the relay, never a client that has vanished.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.bind(where)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OperatorError(f"sidecar.listen {address} cannot be opened: {error}") from error
    listener.setblocking(False)
    return listener


def _listen_unix(path: Path) -> socket.socket:
    handoff = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        handoff.bind(str(path))
        handoff.listen()
    except OSError as error:
        handoff.close()
        raise OperatorError(
            f"{path} cannot be opened for the hand-off: {error}. Set TMPDIR to a short, writable path."
        ) from error
    handoff.setblocking(False)
    return handoff
