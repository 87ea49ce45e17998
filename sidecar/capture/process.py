"""The capture process: takes raw exchanges from the relay workers, and publishes records and tallies.

The supervisor starts it as `python -m sidecar.capture.process`. The serving path never waits for it: while it is gone or
behind, the relay workers let go of their samples and count them.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config, Role, Secrets, load_secrets
from quantdrift.core.logs import setup_logs
from quantdrift.core.process import Stop, run, supervise
from quantdrift.core.records import Loss
from sidecar.capture.follower import Follower
from sidecar.capture.publisher import Publisher
from sidecar.capture.reception import Reception
from sidecar.capture.recorder import Origin, Recorder
from sidecar.capture.tallies import Tallies
from sidecar.counters import Count, Counters, Slot
from sidecar.directives import Directives
from sidecar.drain import Deadlines
from sidecar.handoff import RawMeta
from sidecar.notice import NAME, Notice
from sidecar.policy import policy_of
from sidecar.protocols.lost import LostError
from sidecar.settled import settled

_TICK_S = 1.0
_LOG = logging.getLogger(__name__)


class Desk:
    """Records one raw exchange after the other: published, thinned or lost, and counted in any case.

    Parameters
    ----------
    recorder
        Makes the record.
    publisher
        Takes it.
    slot
        Counts.
    n_strata
        Header strata of the policy.
    """

    def __init__(self, recorder: Recorder, publisher: Publisher, slot: Slot, n_strata: int) -> None:
        self._recorder = recorder
        self._publisher = publisher
        self._slot = slot
        self._n_strata = n_strata
        self._n_errors = 0

    def handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        """Deal with one exchange.

        Raises
        ------
        ValueError
            There is no such stratum: the frames are out of step.
        """
        if not 0 <= meta.stratum < self._n_strata:
            raise ValueError(f"there is no stratum {meta.stratum}")
        self._slot.add(meta.stratum, Count.HANDED)
        try:
            exchange = self._recorder.record(meta, request, response)
            if exchange is None:
                self._slot.add(meta.stratum, Count.THINNED)
            else:
                self._publisher.put(exchange, meta.stratum)
        except LostError as error:
            _LOG.debug("exchange %s is lost: %s", meta.id, error)
            self._slot.lose(meta.stratum, error.loss)
        except Exception:  # noqa: BLE001 - an observer: one bad exchange must not end it
            self._n_errors += 1
            if (
                self._n_errors & (self._n_errors - 1) == 0
            ):  # 1, 2, 4, 8: a fault in each must not flood the log
                _LOG.exception(
                    "exchange %s is lost to an error of our own (%d so far)", meta.id, self._n_errors
                )
            self._slot.lose(meta.stratum, Loss.CAPTURE_ERROR)


async def serve(
    config: Config,
    secrets: Secrets,
    stop: Stop,
    *,
    counters: Counters,
    listener: socket.socket,
    boot: str,
    environment: Mapping[str, str],
) -> int:
    """Capture until `stop`, then publish what is queued and the last tally; return the exit code.

    Parameters
    ----------
    config, secrets
        Of the sidecar.
    stop
        Asks for the end.
    counters
        Shared by the sidecar's processes; the last slot is this one's.
    listener
        Unix stream socket that relay workers connect to, already listening. Beside it they look for the policy.
    boot
        32 hexadecimal digits, minted when the supervisor started.
    environment
        POD_NAME and MODEL_VERSION are read from it.
    """
    clock = SystemClock()
    slot = counters.slot(counters.n_slots - 1)
    slot.settle(
        counters.n_strata, Count.HANDED, ended=(Count.THINNED, Count.PUBLISHED), loss=Loss.CAPTURE_ERROR
    )
    origin = origin_of(config, secrets, boot, environment)
    publisher = Publisher(config, slot, clock)
    directives = Directives(config.sampling)
    notice = Notice(Path(listener.getsockname()).with_name(NAME))
    follower = Follower(config, directives, notice, slot, clock)
    desk = Desk(Recorder(config, origin, directives), publisher, slot, counters.n_strata)
    reception = Reception(config.sidecar, desk.handle)
    tallies = Tallies(
        counters=counters,
        strata=[stratum.name for stratum in policy_of(config.sampling, "").header_strata],
        source=origin.source,
        boot=boot,
        queue=lambda: publisher.queue,
        clock=clock,
    )

    async def tally() -> None:
        await tallies.run(config.sidecar.tally_interval_s, stop)

    async def follow() -> None:
        await follower.run(lambda: publisher.queue, stop)

    async def tick() -> None:
        await stop.wait(_TICK_S)
        follower.tick()

    ended = Stop()
    ticking = asyncio.create_task(supervise("the policy's tick", tick, stop))
    following = asyncio.create_task(supervise("following the policy", follow, stop))
    publishing = asyncio.create_task(publisher.run(ended))
    tallying = asyncio.create_task(supervise("the tally", tally, stop))
    await reception.start(listener)
    _LOG.info("capturing as %s", origin.source)
    await stop.wait()
    deadlines = Deadlines.of(config.sidecar)
    time_s = deadlines.capture_s - deadlines.relay_s
    await reception.finish(time_s * 0.25)
    if not await publisher.drained(time_s * 0.5):
        _LOG.warning("ending with exchanges that the stream did not take: they are counted as lost")
    following.cancel()
    await asyncio.gather(tallying, ticking, following, return_exceptions=True)
    ended.set()
    await publishing
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(time_s * 0.2):
            await tallies.publish()
    await publisher.close()
    return 0


def origin_of(config: Config, secrets: Secrets, boot: str, environment: Mapping[str, str]) -> Origin:
    """Return what this sidecar knows of itself.

    Parameters
    ----------
    config, secrets
        Of the sidecar.
    boot
        Takes the salt's place where none is shared: all processes of this sidecar know it.
    environment
        POD_NAME names the sidecar where the configuration does not; MODEL_VERSION the candidate's version.
    """
    return Origin(
        source=config.sidecar.source or environment.get("POD_NAME") or socket.gethostname(),
        version=environment.get("MODEL_VERSION", ""),
        salt=secrets.salt or boot.encode(),
        hmac_key=secrets.hmac_key,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    parser = argparse.ArgumentParser(prog="sidecar.capture.process", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--handoff-fd", type=int, required=True)
    parser.add_argument("--n-slots", type=int, required=True)
    parser.add_argument("--boot", required=True)
    given = parser.parse_args(arguments)
    config = settled(given.config)
    secrets = load_secrets(config, Role.SIDECAR)
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="capture")
    counters = Counters(given.counters_fd, given.n_slots, len(config.sampling.header_strata) + 1)
    listener = socket.socket(fileno=given.handoff_fd)

    async def process(stop: Stop) -> int:
        # Ctrl-C reaches the whole process group: the supervisor says when it is this process's turn.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return await serve(
            config,
            secrets,
            stop,
            counters=counters,
            listener=listener,
            boot=given.boot,
            environment=os.environ,
        )

    return run(process, grace_s=config.sidecar.grace_s)


if __name__ == "__main__":
    raise SystemExit(main())
