"""The intake process: takes in exchanges that do not pass the relay, and hands them over as a relay worker does.

The supervisor starts it as `python -m quantdrift.sidecar.intake.process` where a way in is configured. Whatever happens to it,
no request waits for it: those who tell of exchanges have been answered before, or are answered at once.

The ways in that are configured.
"""

import argparse
import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Secrets
from quantdrift.core.logs import setup_logs
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.records import HeaderStratum, Loss
from quantdrift.core.sampling.rates import epoch_salt
from quantdrift.sidecar.handoff.sender import FrameSender
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.http import HttpIntake
from quantdrift.sidecar.intake.tap_server import TapServer
from quantdrift.sidecar.relay.observing.live_scope import LiveScope
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.config import LiveConfig, LiveConfigFile
from quantdrift.sidecar.state.counters import MAX_ROWS, Count, Counters, Gauge
from quantdrift.sidecar.state.shutdown import Deadlines
from quantdrift.sidecar.tap.wire import Rates


class Sockets(NamedTuple):
    """What listens already: the HTTP ways' port and the taps' Unix socket, or None where there is none."""

    http: socket.socket | None
    tap: socket.socket | None


class Way(Protocol):
    """One way in: entered, it takes exchanges in."""

    async def __aenter__(self) -> Self:
        """Begin."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no more in, and end."""

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Go over to another configuration's bounds."""


def ways(
    live_config: LiveConfig, secrets: Secrets, entrance: Gateway, sockets: Sockets, rates: Callable[[], Rates]
) -> Iterator[Way]:
    """Return each way in that the configuration asks for.

    Parameters
    ----------
    live_config, secrets
        Of the sidecar.
    entrance
        Where exchanges go.
    sockets
        What listens.
    rates
        Returns what holds now, for those who draw themselves.
    """
    config = live_config.config
    if sockets.http is not None:
        yield HttpIntake(config, secrets.intake_token, entrance, sockets.http)
    if sockets.tap is not None:
        yield TapServer(entrance, sockets.tap, rates, live_config)
    if config.intake.ext_proc:
        from quantdrift.sidecar.intake.envoy import ExtProc  # noqa: PLC0415 - grpcio is absent in a base install

        yield ExtProc(config, secrets.intake_token, entrance)


_TICK_S = 1.0


async def serve(
    live_config_file: LiveConfigFile,
    secrets: Secrets,
    stop: Stop,
    *,
    counters: Counters,
    index: int,
    sockets: Sockets,
    handoff: str,
) -> int:
    """Take exchanges in until `stop`; return the exit code.

    Parameters
    ----------
    live_config_file
        What holds; looked at once a second.
    secrets
        Of the sidecar.
    stop
        Asks for the end. Pairs that are not complete by then are lost, and counted.
    counters
        Of all processes of the sidecar.
    index
        This process's slot of them.
    sockets
        What listens.
    handoff
        Path of the Unix socket that the capture process listens on; beside it lies what the monitor wants followed.
    """
    loop = asyncio.get_running_loop()
    slot = counters.slot(index)
    clock = SystemClock()
    config = live_config_file.current.config
    for gauge in (Gauge.HELD_BYTES, Gauge.QUEUE_BYTES):
        slot.set(gauge, 0)  # a predecessor may have been killed
    slot.lose_unfinished(
        len(live_config_file.current.rows), Count.TAKEN, ended=(Count.HANDED,), loss=Loss.TRUNCATED
    )
    sender = FrameSender(handoff, config.sidecar.handoff_bytes, slot, loop)
    sender.connect()
    live_scope = LiveScope(
        live_config_file,
        secrets.salt,
        Path(handoff).parent,
        send_frame=sender.send,
        slot=slot,
        clock=clock,
        load_shedding=LoadShedding(counters.slot(counters.n_slots - 1), clock),
    )
    entrance = Gateway(live_scope.scope)

    def rates() -> Rates:
        policy = live_scope.policy_history.at(clock.now().timestamp())
        live_config = live_config_file.current
        return Rates(
            epoch=policy.epoch,
            salt=epoch_salt(secrets.salt, policy.epoch, 1),
            sticky=live_config.config.sampling.sticky_header.lower(),
            strata=_paused(policy.header_strata) if live_scope.is_paused else policy.header_strata,
            places=live_config.rows_by_model[""],
            max_exchange_bytes=live_config.config.sidecar.max_exchange_bytes,
        )

    async def tick() -> None:
        await ended.wait(_TICK_S)
        if (live_config := live_scope.refresh()) is not None:
            for way in entered:
                way.reconfigure(live_config)

    ended = Stop()
    entered: list[Way] = []
    ticking = asyncio.create_task(supervise("the tick", tick, ended))
    deadlines = Deadlines.of(config.sidecar)
    async with AsyncExitStack() as stack:
        for way in ways(live_config_file.current, secrets, entrance, sockets, rates):
            await stack.enter_async_context(way)
            entered.append(way)
        slot.set(Gauge.SERVING, 1)
        await stop.wait()
        await asyncio.sleep(deadlines.accept_s)
        slot.set(Gauge.SERVING, 0)
    await sender.finish(deadlines.handoff_s - deadlines.drain_s)
    ended.set()
    await ticking
    return 0


def _paused(strata: Iterable[HeaderStratum]) -> tuple[HeaderStratum, ...]:
    return tuple(msgspec.structs.replace(stratum, rate=0.0) for stratum in strata)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    parser = argparse.ArgumentParser(prog="quantdrift.sidecar.intake.process", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--listen-fd", type=int)
    parser.add_argument("--tap-fd", type=int)
    parser.add_argument("--counters-fd", type=int, required=True)
    parser.add_argument("--n-slots", type=int, required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--handoff", required=True)
    given = parser.parse_args(arguments)
    live_config_file = LiveConfigFile(given.config)
    config = live_config_file.current.config
    secrets = Secrets(
        salt=os.environ.get("QUANTDRIFT_SAMPLING_SALT", "").encode(),
        intake_token=os.environ.get("QUANTDRIFT_INTAKE_TOKEN", ""),
    )
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="intake")
    counters = Counters(given.counters_fd, given.n_slots, MAX_ROWS)
    sockets = Sockets(
        http=None if given.listen_fd is None else socket.socket(fileno=given.listen_fd),
        tap=None if given.tap_fd is None else socket.socket(fileno=given.tap_fd),
    )

    async def process(stop: Stop) -> int:
        return await serve(
            live_config_file,
            secrets,
            stop,
            counters=counters,
            index=given.slot,
            sockets=sockets,
            handoff=given.handoff,
        )

    return run(process, grace_s=Deadlines.of(config.sidecar).relay_s)


if __name__ == "__main__":
    raise SystemExit(main())
