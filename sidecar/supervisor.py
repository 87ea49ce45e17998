"""The supervisor: the first process of the sidecar.

It owns sockets, counters and children, and answers probes. The admin port is served by a child, so that strangers'
requests are parsed in a process whose end costs nothing.

It is not on the serving path, because relay workers accept from the listening socket themselves. It ends
last.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import secrets as random
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Role, Secrets, load_secrets
from quantdrift.core.config.address import Address, read_address
from quantdrift.core.config.schema import MIB, Config
from quantdrift.core.config.state import changed_options, config_digest, config_state
from quantdrift.core.errors import OperatorError
from quantdrift.core.passed_secrets import variables, without_secrets
from quantdrift.core.process.child import Child
from quantdrift.core.process.heartbeat import LOOK_S
from quantdrift.core.process.kept_config import keep
from quantdrift.core.process.probes import Probes
from quantdrift.core.process.run import Stop, supervise
from quantdrift.core.text import in_one_line, plain
from quantdrift.sidecar.intake.server_tls import ServerTls
from quantdrift.sidecar.state.config import FileWatch, LiveConfig, reload, write_live_config
from quantdrift.sidecar.state.counters import Gauge, Slot
from quantdrift.sidecar.state.counts_file import CountsFile
from quantdrift.sidecar.state.orphans import ORPHANED, Adoption, adopt
from quantdrift.sidecar.state.process_start import ProcessStart, source_of
from quantdrift.sidecar.state.readiness import (
    CAPTURE_HUNG_S,
    N_OTHER_SLOTS,
    WORKER_HUNG_S,
    ChildWatch,
    Readiness,
    supervisor_slot,
)
from quantdrift.sidecar.state.restarts import Restarts
from quantdrift.sidecar.state.shutdown import Deadlines
from quantdrift.sidecar.state.traffic_warnings import TrafficWarnings

_LOG = logging.getLogger(__name__)
# By default glibc returns freed buffers of this size to the system; faulting their pages in again costs more
# than copying the data.
_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(4 * MIB), "MALLOC_TRIM_THRESHOLD_": str(16 * MIB)}
_POLL_S = 1.0
_MOST_CHARACTERS = 500  # of the names of options in a log line
_SALT = "QUANTDRIFT_SAMPLING_SALT"
_HMAC_KEY = "QUANTDRIFT_HMAC_KEY"
_TOKEN = "QUANTDRIFT_INTAKE_TOKEN"  # noqa: S105 - the name of a variable
_SECRETS = frozenset({_SALT, _HMAC_KEY, _TOKEN})
_IN_MEMORY = "/dev/shm"  # noqa: S108 - a directory of its own is made there
_STATE_BYTES = 16 * 1024  # the configuration of a few models, to begin with
_ADOPTED_POLL_S = 0.05
_RESOLVE_S = 2.0
_RELAY = "quantdrift.sidecar.relay.worker"
_INTAKE = "quantdrift.sidecar.intake.process"
_CAPTURE = "quantdrift.sidecar.capture.process"
_ADMIN = "quantdrift.sidecar.admin"
_TIME_SLICE_NS: Final = 100_000  # the kernel's least
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call, for which the C library has no function before glibc 2.41."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, slice, deadline, period."""


def missing_packages(config: Config) -> list[str]:
    """Return a sentence with the install command for each missing package that the configuration needs."""
    if config.intake.ext_proc and find_spec("grpc") is None:
        return ["intake.ext_proc needs grpcio, which is not installed: pip install 'quantdrift[ext-proc]'"]
    return []


_BACKLOG = 4096  # connections that the kernel holds until they are accepted: Linux's own limit, `somaxconn`


async def serve(config: Config, secrets: Secrets | None, stop: Stop, path: Path | None = None) -> int:
    """Run the sidecar until `stop`; return the exit code.

    Parameters
    ----------
    config, secrets
        Configuration and secrets of the sidecar; its children get the same configuration, even if the file changes.
        Secrets None: their files cannot be read yet. The relay serves, and the rest starts once they can.
    stop
        Asks for the end: the relay workers drain, then the capture process publishes what it has.
    path
        Main file of the configuration, which is watched for changes; None: the configuration never changes.

    Raises
    ------
    OperatorError
        A port or a file cannot be opened, the backend is this sidecar itself, or a needed package is not
        installed.
    """
    if missing := missing_packages(config):
        raise OperatorError("; ".join(missing))
    with ExitStack() as stack:
        relay = intake = kserve = tap = None
        adoption = Adoption()
        if config.sidecar.listen:
            adoption = await adopt(config.sidecar.listen)
            stack.callback(adoption.close)
            relay = stack.enter_context(adoption.listener or _listen("sidecar.listen", config.sidecar.listen))
        if config.intake.listen:
            intake = stack.enter_context(_listen("intake.listen", config.intake.listen))
        if config.intake.kserve_logger:
            kserve = stack.enter_context(_listen("intake.kserve_logger", config.intake.kserve_logger))
        ServerTls.of(config.intake)  # for a clear error
        if config.intake.ext_proc:
            # The intake process opens this port with gRPC; checking it here gives a clear error.
            _listen("intake.ext_proc", config.intake.ext_proc, 1).close()
        await _refuse_itself(config)
        directory = _state_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        handoff = stack.enter_context(
            _listen_unix(directory / "handoff", "Set TMPDIR to a short, writable path.")
        )
        if config.intake.tap:
            tap = _listen_tap(Path(config.intake.tap), stack)
        admin = stack.enter_context(_listen("sidecar.admin", config.sidecar.admin))
        probes = None
        if config.sidecar.probes:
            probes = stack.enter_context(_listen("sidecar.probes", config.sidecar.probes))
        sockets = _Sockets(relay, intake, kserve, tap, handoff, admin, probes)
        supervisor = _Supervisor(LiveConfig.of(config), secrets, directory, sockets, adoption)
        return await supervisor.run(stop, None if path is None else FileWatch(path))


class _Sockets(NamedTuple):
    """The listening sockets, open before the first child starts and after a child dies."""

    relay: socket.socket | None
    intake: socket.socket | None
    kserve: socket.socket | None
    tap: socket.socket | None
    handoff: socket.socket
    admin: socket.socket
    probes: socket.socket | None


class _Supervisor:
    def __init__(
        self,
        live_config: LiveConfig,
        secrets: Secrets | None,
        directory: Path,
        sockets: _Sockets,
        adoption: Adoption,
    ) -> None:
        config = live_config.config
        self._adoption = adoption
        self._config = config
        self._live_config = live_config
        self._secrets = secrets
        self._directory = directory
        self._sockets = sockets
        self._n_relays = config.sidecar.workers if sockets.relay is not None else 0
        boot = random.token_hex(16)
        self._counts_file = CountsFile.create(
            config.stream,
            source=source_of(os.environ),
            boot=boot,
            n_slots=self._n_relays + N_OTHER_SLOTS,
            rows=live_config.rows,
        )
        self._counters = self._counts_file.counters
        self._own_slot = supervisor_slot(self._counters)
        self._readiness = Readiness(self._counters)
        self._restarts = Restarts(directory)
        self._traffic_warnings = TrafficWarnings(self._counters, lambda: self._live_config, SystemClock())
        self._environment = {
            **_ALLOCATION,
            **without_secrets(os.environ),
            **_secret_environment(secrets or _without_files()),
        }
        self._slots: dict[Child, Slot] = {}
        self._config_path = str(_write_for_children(live_config, directory))
        self._workers = []
        if sockets.relay is not None:
            self._workers = [
                self._child(f"relay {index}", _RELAY, index, sockets.relay) for index in range(self._n_relays)
            ]
        ways = (config.intake.listen, config.intake.kserve_logger, config.intake.ext_proc, config.intake.tap)
        if any(ways):
            self._workers.append(
                self._child(
                    "intake", _INTAKE, self._n_relays, sockets.intake, tap=sockets.tap, kserve=sockets.kserve
                )
            )
        self._admin = self._child("admin", _ADMIN, self._n_relays + 1, sockets.admin)
        self._capture = self._child("capture", _CAPTURE, self._n_relays + 2, sockets.handoff, boot=boot)
        hung_s = dict.fromkeys(self._workers, WORKER_HUNG_S)
        self._watches = {
            child: ChildWatch(child, slot, hung_s.get(child, CAPTURE_HUNG_S))
            for child, slot in self._slots.items()
        }

    async def run(self, stop: Stop, watch: FileWatch | None) -> int:
        probes = None
        if self._sockets.probes is not None:
            probes = Probes(self._sockets.probes, ready=self._readiness.ready, live=self._readiness.live)
            await probes.start()
        admin = asyncio.create_task(self._admin.run())
        capture = asyncio.create_task(self._run_with_secrets(self._capture, stop))
        workers = [
            asyncio.create_task(
                worker.run() if worker.name.startswith("relay") else self._run_with_secrets(worker, stop)
            )
            for worker in self._workers
        ]
        if self._sockets.relay is not None:
            _LOG.info("relaying %s to %s", _address_of(self._sockets.relay), self._config.sidecar.backend)
        if self._sockets.intake is not None:
            _LOG.info("accepting exchanges at %s (intake.listen)", _address_of(self._sockets.intake))
        if self._sockets.kserve is not None:
            _LOG.info(
                "accepting events of KServe's logger at %s (intake.kserve_logger)",
                _address_of(self._sockets.kserve),
            )
        if self._sockets.tap is not None:
            _LOG.info("accepting taps at %s (intake.tap)", self._config.intake.tap)
        if self._config.intake.ext_proc:
            _LOG.info(
                "accepting Envoy's external processing at %s (intake.ext_proc)", self._config.intake.ext_proc
            )
        watching = asyncio.gather(
            self._watch(watch, stop),
            self._poll_traffic_warnings(stop),
            self._watch_heartbeats(stop),
            self._release_adopted(stop),
        )
        try:
            await stop.wait()
            self._own_slot.set(Gauge.STOPPING, 1)
            await self._end(workers, capture)
        finally:
            watching.cancel()
            for child in (*self._workers, self._capture, self._admin):
                child.kill()
            await asyncio.gather(watching, capture, admin, *workers, return_exceptions=True)
            if probes is not None:
                probes.stop()
        return 0

    async def _release_adopted(self, stop: Stop) -> None:
        """Let the workers of a killed predecessor drain once this supervisor's own serve."""
        while not self._readiness.ready() and not stop.is_set():
            await stop.wait(_ADOPTED_POLL_S)
        self._adoption.release()

    async def _run_with_secrets(self, child: Child, stop: Stop) -> int:
        """Run a child that needs the secrets, once their files can be read."""
        while self._secrets is None:
            if await stop.wait(_POLL_S):
                return 0
            with contextlib.suppress(OperatorError):
                self._secrets = await asyncio.to_thread(load_secrets, self._config, Role.SIDECAR)
                salt = self._environment[_SALT]  # the relay workers have it already
                self._environment |= _secret_environment(self._secrets) | {_SALT: salt}
                _LOG.info("the secret files can be read")
        child.environment = _allowed(self._environment, _INTAKE if child.name == "intake" else _CAPTURE)
        return await child.run()

    async def _watch_heartbeats(self, stop: Stop) -> None:
        loop = asyncio.get_running_loop()
        looked_s = loop.time()

        async def look() -> None:
            nonlocal looked_s
            await stop.wait(LOOK_S)
            elapsed_s, looked_s = loop.time() - looked_s, loop.time()
            for child, watch in self._watches.items():
                if (why := watch.look(elapsed_s)) and not stop.is_set():
                    child.replace(f"{why}, and was killed")

        await supervise("watching the heartbeats", look, stop)

    async def _poll_traffic_warnings(self, stop: Stop) -> None:
        async def poll() -> None:
            await stop.wait(_POLL_S)
            self._traffic_warnings.poll()

        await supervise("checking the traffic", poll, stop)

    async def _watch(self, watch: FileWatch | None, stop: Stop) -> None:
        if watch is None:
            return

        async def poll() -> None:
            await stop.wait(_POLL_S)
            try:
                live_config = await asyncio.to_thread(
                    reload, watch, self._live_config, self._secrets or Secrets()
                )
                if live_config is None:
                    return
                await asyncio.to_thread(keep, watch.path)
                self._own_slot.set(Gauge.CONFIG_REFUSED, 0)
                if live_config == self._live_config:
                    return
                self._counts_file.describe(live_config.rows)
                _write_for_children(live_config, self._directory)
            except OperatorError as error:
                _LOG.error(
                    "the changed configuration is refused, the previous one stays in effect: %s",
                    in_one_line(str(error)),
                )
                self._own_slot.adjust(Gauge.RELOADS_REFUSED)
                self._own_slot.set(Gauge.CONFIG_REFUSED, 1)
                return
            before, after = config_state(self._live_config.config), config_state(live_config.config)
            self._live_config = live_config
            self._own_slot.adjust(Gauge.RELOADS)
            _LOG.info(
                "the changed configuration is in effect: digest %s, changed options: %s",
                config_digest(after)[:16],
                plain(", ".join(changed_options(before, after)), _MOST_CHARACTERS),
            )

        await supervise("watching the configuration", poll, stop)

    async def _end(self, workers: list[asyncio.Task[int]], capture: asyncio.Task[int]) -> None:
        deadlines = Deadlines.of(self._config.sidecar)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for worker in self._workers:
            worker.terminate()
        # The workers' own copies stay open for the drain delay. After that clients must be refused instead of
        # waiting.
        sockets = self._sockets
        for listener in (sockets.relay, sockets.intake, sockets.kserve, sockets.tap):
            if listener is not None:
                listener.close()
        await asyncio.wait(workers, timeout=began_s + deadlines.relay_s - loop.time())
        for worker in self._workers:
            worker.kill()
        self._slots[self._capture].set(Gauge.ENDS, 1)
        self._capture.terminate()
        await asyncio.wait([capture], timeout=began_s + deadlines.capture_s - loop.time())

    def _child(
        self,
        name: str,
        module: str,
        index: int,
        listener: socket.socket | None,
        *,
        tap: socket.socket | None = None,
        kserve: socket.socket | None = None,
        boot: str = "",
    ) -> Child:
        start = ProcessStart(
            name=name,
            config=self._config_path,
            counters_fd=self._counters.fd,
            n_slots=self._counters.n_slots,
            slot=index,
            handoff=self._sockets.handoff.getsockname(),
            listen_fd=None if listener is None else listener.fileno(),
            tap_fd=None if tap is None else tap.fileno(),
            kserve_fd=None if kserve is None else kserve.fileno(),
            boot=boot,
            counts=str(self._counts_file.path or "") if boot else "",
            supervisor=os.getpid(),
            listen=self._config.sidecar.listen if module == _RELAY else "",
        )
        slot = self._counters.slot(index)

        def died(reason: str) -> None:
            slot.set(Gauge.SERVING, 0)
            slot.set(Gauge.BEATS, 0)
            self._restarts.add(name.partition(" ")[0], reason)

        child = Child(
            name,
            module,
            [start.argument],
            fds=start.fds,
            environment=_allowed(self._environment, module),
            orphan=ORPHANED if module == _RELAY else signal.SIGKILL,  # others would keep ports in use
            on_death=died,
            on_start=give_short_slice if module == _RELAY else lambda _: None,
        )
        self._slots[child] = slot
        return child


def _state_directory() -> Path:
    """Return a new directory with room for the state of this sidecar: on a disk, or in memory where that is full.

    Raises
    ------
    OperatorError
        There is none.
    """
    problem: OSError | None = None
    for parent in (None, _IN_MEMORY):
        try:
            directory = Path(tempfile.mkdtemp(prefix="quantdrift-", dir=parent))
        except OSError as error:
            problem = problem or error
            continue
        try:
            (directory / "room").write_bytes(bytes(_STATE_BYTES))
            (directory / "room").unlink()
        except OSError as error:
            problem = problem or error
            shutil.rmtree(directory, ignore_errors=True)
        else:
            return directory
    raise OperatorError(
        f"no directory for temporary files has room ({problem}): free some, or set TMPDIR to a writable path"
    )


def _write_for_children(live_config: LiveConfig, directory: Path) -> Path:
    # Children also get the secrets as they were read at the start, because the files may be gone when a child is restarted.
    try:
        return write_live_config(live_config, directory)
    except OSError as error:
        raise OperatorError(
            f"{directory} cannot be written to: {error}. Set TMPDIR to a writable path."
        ) from error


def _allowed(environment: Mapping[str, str], module: str) -> dict[str, str]:
    """Return the environment of a child without the secrets that it does not need; the rest it gets by a descriptor."""
    hidden = {_ADMIN: _SECRETS, _RELAY: _SECRETS - {_SALT}, _INTAKE: {_HMAC_KEY}}.get(module, frozenset())
    return {name: value for name, value in environment.items() if name not in hidden}


def _without_files() -> Secrets:
    """Return the secrets of a sidecar that are not in files."""
    return Secrets(salt=variables().get(_SALT, "").encode())


def _secret_environment(secrets: Secrets) -> dict[str, str]:
    """Return the environment variables with the secrets.

    Without a configured salt, the salt is a random one for this start.
    """
    return {
        _SALT: secrets.salt.decode() or random.token_hex(16),
        _HMAC_KEY: secrets.hmac_key.decode(),
        _TOKEN: secrets.intake_token,
    }


async def _refuse_itself(config: Config) -> None:
    """Refuse a backend that resolves to an address of this machine on the port that the relay listens on.

    `quantdrift.core.config.check` refuses the cases that need no resolving. A name that cannot be resolved
    yet is not an error.
    """
    sidecar = config.sidecar
    if not sidecar.listen:
        return
    backend, listen = read_address(sidecar.backend), read_address(sidecar.listen)
    if backend.port != listen.port:
        return
    try:
        async with asyncio.timeout(_RESOLVE_S):
            addresses = await asyncio.get_running_loop().getaddrinfo(backend.host, backend.port)
    except OSError:
        return
    for _, _, _, _, where in addresses:
        host = str(where[0])
        if _is_own(host) and Address(host, backend.port).reaches(listen, is_own=True):
            raise OperatorError(
                f"sidecar.backend {backend} is this machine's own {host}, where the sidecar itself listens "
                f"(sidecar.listen {listen}): give the address of the inference server, on another port"
            )


def _is_own(host: str) -> bool:
    """Return whether an IP address belongs to this machine: the system would send from it to itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # on a datagram socket this sends nothing
            return bool(probe.getsockname()[0] == host)
    except OSError:
        return False


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def _listen(option: str, address: str, backlog: int = _BACKLOG) -> socket.socket:
    requested = read_address(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            requested.host, requested.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit it. Keep-alive probes of the backend reach only the relay, not a
            # vanished client.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.bind(where)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OperatorError(f"{option} {address} cannot be opened: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _listen_unix(path: Path, advice: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise OperatorError(f"{path} cannot be opened: {error}. {advice}") from error
    listener.setblocking(False)
    return listener


def _listen_tap(path: Path, stack: ExitStack) -> socket.socket:
    with contextlib.suppress(OSError):
        if path.is_socket():
            path.unlink()  # left by a killed sidecar; a running one keeps its connected taps
    listener = stack.enter_context(
        _listen_unix(path, "Set intake.tap to a short path in an existing, writable directory.")
    )
    stack.callback(_remove_socket, path, path.stat().st_ino)
    path.chmod(0o660)  # members of the group may connect
    return listener


def _remove_socket(path: Path, inode: int) -> None:
    """Remove a socket file, unless a successor has created its own."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def give_short_slice(pid: int) -> bool:
    """Give a child that has just begun, and the threads that it starts, a short time slice; return whether the kernel took it.

    Linux 6.12 and later divide a processor by deadlines (EEVDF): of the processes that have waited for their share, the one
    whose slice ends first runs first. A relay worker runs for some 50 us for each message, far less than the usual slice of about 3 ms.
    With a short slice it comes before processes that compute all the time, such as the model, capture or a busy
    neighbour. Its share of the processor stays the same: it takes nothing from them, and needs no right. Older kernels ignore it.

    Nothing depends on it: on other systems, and where a sandbox forbids the call, nothing changes. The supervisor does it,
    so that a relay worker need not load what it takes.

    Source: sched_setattr(2); Stoica and Abdel-Wahab, Earliest eligible virtual deadline first, 1995.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return False
    try:
        policy, nice = os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:  # it has ended already
        return False
    if policy != os.SCHED_OTHER:
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, _TIME_SLICE_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, pid, attributes, 0) == 0)
