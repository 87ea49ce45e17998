"""The capture process: takes raw exchanges from the relay workers, and publishes records and tallies.

The supervisor starts it as `python -m quantdrift.sidecar.capture.process`. The serving path never waits for it: while it is gone or
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
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.records import Loss
from quantdrift.sidecar.capture.pipeline import CaptureService
from quantdrift.sidecar.capture.recorder import SidecarIdentity
from quantdrift.sidecar.capture.tallies import Tallies
from quantdrift.sidecar.state.config import LiveConfigFile
from quantdrift.sidecar.state.counters import MAX_ROWS, Count, Counters
from quantdrift.sidecar.state.pause import PauseFiles
from quantdrift.sidecar.state.policy import NAME, PolicyFile
from quantdrift.sidecar.state.shutdown import Deadlines

_TICK_S = 1.0
_TELL_S = 0.25
_LOG = logging.getLogger(__name__)


async def serve(
    live_config_file: LiveConfigFile,
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
    live_config_file
        What holds; looked at once a second.
    secrets
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
    config = live_config_file.current.config
    slot = counters.slot(counters.n_slots - 1)
    slot.lose_unfinished(
        len(live_config_file.current.rows),
        Count.HANDED,
        ended=(Count.THINNED, Count.PUBLISHED),
        loss=Loss.CAPTURE_ERROR,
    )
    origin = origin_of(config, secrets, boot, environment)
    directory = Path(listener.getsockname()).parent
    policy_file, pauses = PolicyFile(directory / NAME), PauseFiles(directory)
    office = CaptureService(live_config_file, origin, policy_file, counters, clock)
    publisher, follower, reception = office.publisher, office.follower, office.reception
    tallies = Tallies(
        counters=counters,
        rows=lambda: live_config_file.current.rows,
        source=origin.source,
        boot=boot,
        queue=lambda: publisher.queue,
        clock=clock,
    )

    async def tally() -> None:
        await tallies.run(config.sidecar.tally_interval_s, stop)

    async def follow() -> None:
        await follower.run(lambda: publisher.queue, stop)

    async def follow_pause() -> None:
        await follower.run_pause(lambda: publisher.queue, stop, directory)

    async def tick() -> None:
        await stop.wait(_TICK_S)
        office.pause(pauses.refresh())
        office.look()
        office.warn()
        follower.tick()

    async def tell() -> None:
        await stop.wait(_TELL_S)
        office.tell()

    ended = Stop()
    ticking = [
        asyncio.create_task(supervise("the policy's tick", tick, stop)),
        asyncio.create_task(supervise("telling what to refuse", tell, stop)),
    ]
    following = [
        asyncio.create_task(supervise("following the policy", follow, stop)),
        asyncio.create_task(supervise("following the pause", follow_pause, stop)),
    ]
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
    for task in following:
        task.cancel()
    await asyncio.gather(tallying, *ticking, *following, return_exceptions=True)
    ended.set()
    await publishing
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(time_s * 0.2):
            await tallies.publish()
    await publisher.close()
    return 0


def origin_of(config: Config, secrets: Secrets, boot: str, environment: Mapping[str, str]) -> SidecarIdentity:
    """Return what this sidecar knows of itself.

    Parameters
    ----------
    config, secrets
        Of the sidecar.
    boot
        Start of this sidecar. Takes the salt's place where none is shared: all of its processes know it.
    environment
        POD_NAME names the sidecar where the configuration does not; MODEL_VERSION the candidate's version.
    """
    return SidecarIdentity(
        source=config.sidecar.source or environment.get("POD_NAME") or socket.gethostname(),
        version=environment.get("MODEL_VERSION", ""),
        salt=secrets.salt or boot.encode(),
        hmac_key=secrets.hmac_key,
        boot=boot,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    parser = argparse.ArgumentParser(prog="quantdrift.sidecar.capture.process", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--handoff-fd", type=int, required=True)
    parser.add_argument("--n-slots", type=int, required=True)
    parser.add_argument("--boot", required=True)
    given = parser.parse_args(arguments)
    live_config_file = LiveConfigFile(given.config)
    config = live_config_file.current.config
    secrets = load_secrets(config, Role.SIDECAR)
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="capture")
    counters = Counters(given.counters_fd, given.n_slots, MAX_ROWS)
    listener = socket.socket(fileno=given.handoff_fd)

    async def process(stop: Stop) -> int:
        # Ctrl-C reaches the whole process group: the supervisor says when it is this process's turn.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return await serve(
            live_config_file,
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
