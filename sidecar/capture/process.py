"""The capture process: it receives raw exchanges from relay and intake, and publishes records and tallies.

The supervisor starts it as `python -m quantdrift.sidecar.capture.process`. The serving path never waits for
it: while it is down or behind, the relay workers drop their samples and count them.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config import Role, Secrets, load_secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.keys import KeyFile, is_key_file
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.process_state import StateReports
from quantdrift.core.records import Loss, ModelCount, StratumCount, Tally
from quantdrift.core.stream.connection import Queue
from quantdrift.sidecar.capture.pipeline import CaptureService
from quantdrift.sidecar.capture.recorder import SidecarIdentity
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from quantdrift.sidecar.state.counts_file import EndedCounts, remove
from quantdrift.sidecar.state.counts_file import ended as ended_counts
from quantdrift.sidecar.state.pause import PauseFiles, PauseSource
from quantdrift.sidecar.state.policy import NAME, PolicyFile
from quantdrift.sidecar.state.process_start import ChildProcess, source_of
from quantdrift.sidecar.state.shutdown import Deadlines

_TICK_S = 1.0
_REFUSAL_SHARE_S = 0.25
_LOG = logging.getLogger(__name__)


async def serve(child: ChildProcess, secrets: Secrets, stop: Stop, *, environment: Mapping[str, str]) -> int:
    """Capture until `stop`, then publish what is queued and the last tally; return the exit code.

    Parameters
    ----------
    child
        This process. Its listening socket is the one that relay workers connect to.
    secrets
        Salt and key of hashed attributes.
    stop
        Asks for the end.
    environment
        POD_NAME and MODEL_VERSION are read from it.
    """
    child.beat()
    clock = SystemClock()
    live_config_file, counters, boot = child.live_config_file, child.counters, child.start.boot
    config = live_config_file.current.config
    child.slot.lose_unfinished(
        len(live_config_file.current.rows),
        Count.HANDED,
        ended=(Count.THINNED, Count.PUBLISHED),
        loss=Loss.PROCESS_ENDED,
    )
    identity = msgspec.structs.replace(
        identity_of(secrets, boot, environment), hmac_keys=_hmac_keys(config, secrets, clock)
    )
    directory = child.start.directory
    policy_file, pauses = PolicyFile(directory / NAME), PauseFiles(directory)
    service = CaptureService(live_config_file, identity, policy_file, counters, clock)
    publisher, policy_watcher, receiver = service.publisher, service.policy_watcher, service.receiver
    tallies = Tallies(
        counters=counters,
        rows=lambda: live_config_file.current.rows,
        unknown=service.unknown_models.totals,
        source=identity.source,
        boot=boot,
        queue=lambda: publisher.queue,
        clock=clock,
        ended=lambda: ended_counts(config.stream),
        states=StateReports(
            lambda: live_config_file.current.config, lambda: pauses.of(PauseSource.HERE).at(clock.now())
        ),
    )

    async def tally() -> None:
        await tallies.run(config.sidecar.tally_interval_s, stop)

    async def follow() -> None:
        await policy_watcher.run(lambda: publisher.queue, stop)

    async def follow_pause() -> None:
        await policy_watcher.run_pause(lambda: publisher.queue, stop, directory)

    async def tick() -> None:
        await stop.wait(_TICK_S)
        service.set_paused(pauses.refresh())
        service.refresh_config()
        service.log_unknown_models()
        publisher.tick()
        policy_watcher.tick()

    async def publish_refusal_share() -> None:
        await stop.wait(_REFUSAL_SHARE_S)
        service.publish_refusal_share()

    ended = Stop()
    tick_tasks = [
        asyncio.create_task(supervise("the policy's tick", tick, stop)),
        asyncio.create_task(supervise("publishing the refusal share", publish_refusal_share, stop)),
    ]
    watch_tasks = [
        asyncio.create_task(supervise("following the policy", follow, stop)),
        asyncio.create_task(supervise("following the pause", follow_pause, stop)),
    ]
    publishing = asyncio.create_task(publisher.run(ended))
    tallying = asyncio.create_task(supervise("the tally", tally, stop))
    await receiver.start(socket.socket(fileno=child.start.listen_fd))
    _LOG.info("capturing as %s", identity.source)
    await stop.wait()
    deadlines = Deadlines.of(config.sidecar)
    time_s = deadlines.capture_s - deadlines.relay_s
    await receiver.finish(time_s * 0.25)
    if not await publisher.drained(time_s * 0.5):
        _LOG.warning(
            "ending before the stream has accepted all exchanges: the remaining ones are counted as lost"
        )
    for task in watch_tasks:
        task.cancel()
    await asyncio.gather(tallying, *tick_tasks, *watch_tasks, return_exceptions=True)
    ended.set()
    await publishing
    await _publish_last_tally(child, tallies, time_s * 0.2)
    await publisher.close()
    return 0


def _hmac_keys(config: Config, secrets: Secrets, clock: Clock) -> KeyFile | None:
    """Return the key file of hashed attributes, or None: their key is a plain text."""
    if not is_key_file(secrets.hmac_key):
        return None
    return KeyFile(config.capture.hmac_key_file, "capture.hmac_key_file", clock, first=secrets.hmac_key)


class Tallies:
    """Reads the shared counters and publishes them.

    The sequence number is one of the counters, so that a restarted capture process continues it.

    Parameters
    ----------
    counters
        Counters of all processes of this sidecar.
    rows
        Returns the stratum and model of each row.
    unknown
        Exchanges of models that are not configured, by header stratum and name; it grows.
    source, boot
        This sidecar and its start.
    queue
        Returns the connection to NATS, or None while there is none.
    clock
        Stamps the tallies.
    ended
        Returns the counts of earlier starts that are to be published.
    states
        Configuration and pause of this sidecar, for the audit; None: they are not reported.
    """

    def __init__(
        self,
        *,
        counters: Counters,
        rows: Callable[[], Sequence[Row]],
        unknown: Mapping[tuple[str, str], int],
        source: str,
        boot: str,
        queue: Callable[[], Queue | None],
        clock: Clock,
        ended: Callable[[], Iterable[EndedCounts]] = tuple,
        states: StateReports | None = None,
    ) -> None:
        self._counters = counters
        self._slot = counters.slot(counters.n_slots - 1)
        self._rows = rows
        self._unknown = unknown
        self._source = source
        self._boot = boot
        self._queue = queue
        self._clock = clock
        self._ended = ended
        self._states = states

    def take(self, *, final: bool = False) -> Tally:
        """Return the present counts with the next sequence number.

        Parameters
        ----------
        final
            Whether no other process of this sidecar is left, and nothing more will be published.
        """
        self._slot.adjust(Gauge.SEQUENCE)
        return Tally(
            source=self._source,
            boot=self._boot,
            sequence=self._slot.gauge(Gauge.SEQUENCE),
            at=self._clock.now(),
            strata=tuple(
                self._with_unknown(stratum) for stratum in self._counters.strata(self._rows(), ended=final)
            ),
            blind_connections=self._counters.gauge(Gauge.BLIND),
            final=final,
            state=None if self._states is None else self._states.take(),
            relay_cpu_s=self._counters.gauge(Gauge.RELAY_CPU_US) / 1e6,
        )

    def _with_unknown(self, count: StratumCount) -> StratumCount:
        named = {
            name: msgspec.structs.replace(count.models.get(name) or ModelCount(taken=0), unknown=n)
            for (stratum, name), n in self._unknown.items()
            if stratum == count.stratum
        }
        return msgspec.structs.replace(count, models=count.models | named) if named else count

    async def publish(self, *, final: bool = False) -> bool:
        """Publish the counts once; return whether the stream has acknowledged them. Parameter as for `take`."""
        queue = self._queue()
        if queue is None:
            return False
        return await self._publish(queue, self.take(final=final))

    async def publish_ended(self) -> None:
        """Publish the last counts of earlier starts, and forget those that the stream has acknowledged."""
        queue = self._queue()
        if queue is None:
            return
        for counts in self._ended():
            try:
                tally = counts.tally(self._clock)
            except (OSError, ValueError) as error:
                _LOG.warning("removed the unreadable counts of an earlier start, %s: %s", counts.path, error)
                counts.remove()
                continue
            if not await self._publish(queue, tally):
                return
            counts.remove()
            _LOG.info(
                "published the last counts of this sidecar's start %s, which ended without doing so: %d requests sampled",
                tally.boot,
                sum(stratum.taken for stratum in tally.strata),
            )

    async def _publish(self, queue: Queue, tally: Tally) -> bool:
        try:
            await queue.publish_tally(tally.source, tally.boot, tally.sequence, encode(tally))
        except QuantdriftError as error:
            _LOG.info(
                "tally %d was not published, the next one includes its counts: %s", tally.sequence, error
            )
            return False
        return True

    async def run(self, interval_s: float, stop: Stop) -> None:
        """Publish every `interval_s` until `stop`."""
        while not await stop.wait(interval_s):
            if await self.publish():
                await self.publish_ended()


async def _publish_last_tally(child: ChildProcess, tallies: Tallies, timeout_s: float) -> None:
    """Publish the last counts; once the stream has them, remove the file from which the next start would publish them."""
    is_final = bool(child.slot.gauge(Gauge.ENDS))  # if not, the other processes are still running
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            if await tallies.publish(final=is_final) and is_final and child.start.counts:
                remove(Path(child.start.counts))


def identity_of(secrets: Secrets, boot: str, environment: Mapping[str, str]) -> SidecarIdentity:
    """Return the identity of this sidecar.

    Parameters
    ----------
    secrets
        Secrets of the sidecar.
    boot
        Identifier of this start. It replaces the salt where none is configured, since all processes know it.
    environment
        POD_NAME, or else the host name, names the sidecar; MODEL_VERSION is the version of the
        candidate.
    """
    return SidecarIdentity(
        source=source_of(environment),
        version=environment.get("MODEL_VERSION", ""),
        salt=secrets.salt or boot.encode(),
        hmac_key=secrets.hmac_key,
        boot=boot,
        mark_salt=secrets.salt,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    child = ChildProcess.begin(arguments)
    config = child.live_config_file.current.config
    # The files may be gone by now: the supervisor has read them, and this process does not need the token.
    without_files = msgspec.structs.replace(
        config,
        intake=msgspec.structs.replace(config.intake, token_file=""),
        capture=msgspec.structs.replace(config.capture, hmac_key_file=""),
    )
    secrets = load_secrets(without_files, Role.SIDECAR)

    async def process(stop: Stop) -> int:
        # Ctrl-C reaches the whole process group, but this process must end after the relay: the supervisor
        # tells it when.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return await serve(child, secrets, stop, environment=os.environ)

    return run(process, grace_s=config.sidecar.grace_s)


if __name__ == "__main__":
    raise SystemExit(main())
