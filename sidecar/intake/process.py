"""The intake process: it takes in exchanges that do not pass the relay.

It hands them over as a relay worker does. The supervisor starts it as `python -m
quantdrift.sidecar.intake.process` if an intake is configured. Whatever happens to it, no request waits for
it: callers have served their request already, or get a response at once.
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
    """The listening sockets: HTTP port and Unix socket of taps, or None if not configured."""

    http: socket.socket | None
    tap: socket.socket | None


class Intake(Protocol):
    """An intake: it takes in exchanges while it is entered."""

    async def __aenter__(self) -> Self:
        """Start."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop taking in exchanges."""

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Apply another configuration."""


def configured_intakes(
    live_config: LiveConfig, secrets: Secrets, gateway: Gateway, sockets: Sockets, rates: Callable[[], Rates]
) -> Iterator[Intake]:
    """Yield each intake that is configured.

    Parameters
    ----------
    live_config, secrets
        Configuration and secrets of the sidecar.
    gateway
        Receives the exchanges.
    sockets
        The listening sockets.
    rates
        Returns the rates in effect, for taps, which draw themselves.
    """
    config = live_config.config
    if sockets.http is not None:
        yield HttpIntake(config, secrets.intake_token, gateway, sockets.http)
    if sockets.tap is not None:
        yield TapServer(gateway, sockets.tap, rates, live_config)
    if config.intake.ext_proc:
        from quantdrift.sidecar.intake.envoy import ExtProc  # noqa: PLC0415 - grpcio is absent in a base install

        yield ExtProc(config, secrets.intake_token, gateway)


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
    """Run the configured intakes until `stop`; return the exit code.

    Parameters
    ----------
    live_config_file
        The configuration in effect; read again once a second when it has changed.
    secrets
        Salt and token are used.
    stop
        Asks for the end. Pairs that are incomplete then are counted as lost.
    counters
        Shared by all processes of the sidecar.
    index
        This process's slot.
    sockets
        The listening sockets.
    handoff
        Path of the Unix socket that the capture process listens on. Policy and pause files are in the same
        directory.
    """
    loop = asyncio.get_running_loop()
    slot = counters.slot(index)
    clock = SystemClock()
    config = live_config_file.current.config
    for gauge in (Gauge.HELD_BYTES, Gauge.QUEUE_BYTES):
        slot.set(gauge, 0)  # a predecessor in this slot may have been killed
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
    gateway = Gateway(live_scope.scope)

    def rates() -> Rates:
        policy = live_scope.policy_history.at(clock.now().timestamp())
        live_config = live_config_file.current
        return Rates(
            epoch=policy.epoch,
            salt=epoch_salt(secrets.salt, policy.epoch, 1),
            sticky=live_config.config.sampling.sticky_header.lower(),
            strata=_without_rates(policy.header_strata) if live_scope.is_paused else policy.header_strata,
            rows=live_config.rows_by_model[""],
            max_exchange_bytes=live_config.config.sidecar.max_exchange_bytes,
        )

    async def tick() -> None:
        await ended.wait(_TICK_S)
        if (live_config := live_scope.refresh()) is not None:
            sender.limit_bytes = live_config.config.sidecar.handoff_bytes
            for intake in intakes:
                intake.reconfigure(live_config)

    ended = Stop()
    intakes: list[Intake] = []
    tick_task = asyncio.create_task(supervise("the tick", tick, ended))
    deadlines = Deadlines.of(config.sidecar)
    async with AsyncExitStack() as stack:
        for intake in configured_intakes(live_config_file.current, secrets, gateway, sockets, rates):
            await stack.enter_async_context(intake)
            intakes.append(intake)
        slot.set(Gauge.SERVING, 1)
        await stop.wait()
        await asyncio.sleep(deadlines.accept_s)
        slot.set(Gauge.SERVING, 0)
    await sender.finish(deadlines.handoff_s - deadlines.drain_s)
    ended.set()
    await tick_task
    return 0


def _without_rates(strata: Iterable[HeaderStratum]) -> tuple[HeaderStratum, ...]:
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
    args = parser.parse_args(arguments)
    live_config_file = LiveConfigFile(args.config)
    config = live_config_file.current.config
    secrets = Secrets(
        salt=os.environ.get("QUANTDRIFT_SAMPLING_SALT", "").encode(),
        intake_token=os.environ.get("QUANTDRIFT_INTAKE_TOKEN", ""),
    )
    setup_logs(config.telemetry.log_level, as_json=config.telemetry.log_json, role="intake")
    counters = Counters(args.counters_fd, args.n_slots, MAX_ROWS)
    sockets = Sockets(
        http=None if args.listen_fd is None else socket.socket(fileno=args.listen_fd),
        tap=None if args.tap_fd is None else socket.socket(fileno=args.tap_fd),
    )

    async def process(stop: Stop) -> int:
        return await serve(
            live_config_file,
            secrets,
            stop,
            counters=counters,
            index=args.slot,
            sockets=sockets,
            handoff=args.handoff,
        )

    return run(process, grace_s=Deadlines.of(config.sidecar).relay_s)


if __name__ == "__main__":
    raise SystemExit(main())
