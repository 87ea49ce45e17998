"""The intake process: it takes in exchanges that do not pass the relay.

It hands them over as a relay worker does. The supervisor starts it as `python -m
quantdrift.sidecar.intake.process` if an intake is configured. Whatever happens to it, no request waits for
it: callers have served their request already, or get a response at once.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Secrets
from quantdrift.core.passed_secrets import variables
from quantdrift.core.process.run import Stop, run, supervise
from quantdrift.core.records import HeaderStratum
from quantdrift.core.sampling.rates import epoch_salt
from quantdrift.sidecar.intake.callers import CallersFile
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.intake.http import HttpIntake
from quantdrift.sidecar.intake.kserve_logger import KserveSink
from quantdrift.sidecar.intake.tap_server import TapServer
from quantdrift.sidecar.relay.observing.live_scope import LiveScope
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Gauge
from quantdrift.sidecar.state.process_start import ChildProcess
from quantdrift.sidecar.state.shutdown import Deadlines
from quantdrift.sidecar.tap.wire import Rates


class Sockets(NamedTuple):
    """The listening sockets: two ports and the Unix socket of taps, None if not configured; and a directory for others."""

    http: socket.socket | None
    kserve: socket.socket | None
    tap: socket.socket | None
    directory: Path = Path()


class RunningIntake(Protocol):
    """An intake: it takes in exchanges while it is entered."""

    async def __aenter__(self) -> Self:
        """Start."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop taking in exchanges."""

    def reconfigure(self, live_config: LiveConfig) -> None:
        """Apply another configuration."""

    def tick(self) -> None:
        """Do what has to be done from time to time. Called about once a second."""


def configured_intakes(
    live_config: LiveConfig, secrets: Secrets, gateway: Gateway, sockets: Sockets, rates: Callable[[], Rates]
) -> Iterator[RunningIntake]:
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
    if sockets.kserve is not None:
        yield KserveSink(config, secrets.intake_token, gateway, sockets.kserve)
    if sockets.tap is not None:
        callers = CallersFile(secrets.intake_token, config.intake.token_file, SystemClock())
        yield TapServer(gateway, sockets.tap, callers, rates, live_config)
    if config.intake.ext_proc:
        from quantdrift.sidecar.intake.envoy import ExtProc  # noqa: PLC0415 - grpcio is absent in a base install

        yield ExtProc(config, secrets.intake_token, gateway, sockets.directory)


_TICK_S = 1.0


async def serve(child: ChildProcess, secrets: Secrets, stop: Stop, sockets: Sockets) -> int:
    """Run the configured intakes until `stop`; return the exit code.

    Parameters
    ----------
    child
        This process.
    secrets
        Salt and token are used.
    stop
        Asks for the end. Pairs that are incomplete then are counted as lost.
    sockets
        The listening sockets.
    """
    child.beat()
    slot, clock, live_config_file = child.slot, SystemClock(), child.live_config_file
    config = live_config_file.current.config
    live_scope = LiveScope(child, secrets.salt, clock)
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
            for intake in intakes:
                intake.reconfigure(live_config)
        for intake in intakes:
            intake.tick()

    ended = Stop()
    intakes: list[RunningIntake] = []
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
    await live_scope.sender.finish(deadlines.handoff_s - deadlines.drain_s)
    ended.set()
    await tick_task
    return 0


def _without_rates(strata: Iterable[HeaderStratum]) -> tuple[HeaderStratum, ...]:
    return tuple(msgspec.structs.replace(stratum, rate=0.0) for stratum in strata)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process that the supervisor started; return its exit code."""
    child = ChildProcess.begin(arguments)
    config = child.live_config_file.current.config
    passed = variables()
    secrets = Secrets(
        salt=passed.get("QUANTDRIFT_SAMPLING_SALT", "").encode(),
        intake_token=passed.get("QUANTDRIFT_INTAKE_TOKEN", ""),
    )
    start = child.start
    http, kserve, tap = (
        None if fd is None else socket.socket(fileno=fd)
        for fd in (start.listen_fd, start.kserve_fd, start.tap_fd)
    )
    sockets = Sockets(
        http=http,
        kserve=kserve,
        tap=tap,
        directory=child.start.directory,
    )
    return run(
        lambda stop: serve(child, secrets, stop, sockets), grace_s=Deadlines.of(config.sidecar).relay_s
    )


if __name__ == "__main__":
    raise SystemExit(main())
