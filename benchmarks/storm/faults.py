"""The faults: who is killed, stopped or taken away, for how long, and how the storm sees that it is over."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import Final

import asyncpg
import msgspec
import psutil

from benchmarks.storm.stack import Stack
from benchmarks.storm.traffic import Traffic

_POLL_S: Final = 0.2
_LOOK_S: Final = 0.5
_MEND_S: Final = 60.0
_AFTER_S: Final = 1.0
"""A request that fails so soon after a fault is over is still put down to it."""
Victims = Callable[[Stack], list[psutil.Process]]


class Kind(StrEnum):
    """What is done."""

    KILL = "kill"  # kill -9
    STOP = "stop"  # SIGSTOP, and SIGCONT later if it is still there
    AWAY = "away"  # killed as often as it comes back, for some time
    DISK = "disk"  # the disk is full for some time
    BREAK = "break"  # the configuration is broken for some time


_CHOSEN: Final = frozenset({Kind.AWAY, Kind.DISK, Kind.BREAK})  # whoever breaks it says how long


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault.

    Parameters
    ----------
    kind, part
        What is done to whom: together the name.
    victims
        Returns the processes; one of them is chosen for a kill or a stop, unless `all_of_them`.
    weight
        How often, beside the others, in a long run.
    all_of_them
        Every process that `victims` returns, at once.
    patience
        How many times as long as others it is stopped or away: what replaces it takes its time.
    may_fail
        Whether requests may fail, and how: `""` none, `connection` at most one for each connection, `gap` while the
        port is away.
    """

    kind: Kind
    part: str
    victims: Victims
    weight: int = 1
    all_of_them: bool = False
    patience: float = 1.0
    may_fail: str = ""

    @property
    def name(self) -> str:
        """As the table and `--only` have it."""
        return f"{self.kind} {self.part}"


def _first(*words: str) -> Victims:
    return lambda stack: stack.victims(*words)[:1]


def _any(*words: str) -> Victims:
    return lambda stack: stack.victims(*words)


def _postmaster(stack: Stack) -> list[psutil.Process]:
    return [process for process in stack.victims("postgres", "-D") if "initdb" not in process.name()][:1]


def _sessions(stack: Stack) -> list[psutil.Process]:
    return [
        child
        for process in _postmaster(stack)
        for child in process.children()
        if "quantdrift" in " ".join(child.cmdline())
    ]


def _database(stack: Stack) -> list[psutil.Process]:
    return [every for process in _postmaster(stack) for every in (process, *process.children())]


def _shadows(stack: Stack) -> list[psutil.Process]:
    return stack.role("shadow") + stack.role("shadow2")


def _reference(stack: Stack) -> list[psutil.Process]:
    process = stack.kept("reference").process
    return [] if process is None else [process]


def _up(stack: Stack) -> list[psutil.Process]:
    process = stack.kept("up").process
    return [] if process is None else [process]


def _none(_stack: Stack) -> list[psutil.Process]:
    return []


_RELAY: Final = _any("quantdrift.sidecar.relay.worker")
_CAPTURE: Final = _first("quantdrift.sidecar.capture.process")
_INTAKE: Final = _first("quantdrift.sidecar.intake.process")
_NATS: Final = _first("nats-server", "nats.conf")
FAULTS: Final = (
    Fault(kind=Kind.KILL, part="relay worker", victims=_RELAY, weight=4, may_fail="connection"),
    Fault(kind=Kind.KILL, part="capture process", victims=_CAPTURE, weight=4),
    Fault(kind=Kind.KILL, part="intake process", victims=_INTAKE, weight=2),
    Fault(kind=Kind.KILL, part="admin process", victims=_first("quantdrift.sidecar.admin"), weight=2),
    Fault(
        kind=Kind.KILL,
        part="sidecar supervisor",
        victims=lambda stack: stack.role("sidecar"),
        weight=3,
        may_fail="gap",
    ),
    Fault(kind=Kind.KILL, part="shadow", victims=_shadows, weight=4),
    Fault(
        kind=Kind.KILL, part="leading monitor", victims=lambda stack: stack.monitors(leading=True), weight=4
    ),
    Fault(
        kind=Kind.KILL, part="standby monitor", victims=lambda stack: stack.monitors(leading=False), weight=2
    ),
    Fault(kind=Kind.KILL, part="nats", victims=_NATS, weight=4),
    Fault(
        kind=Kind.KILL, part="nats keeper", victims=_first("quantdrift.cli.run.embedded", "nats"), weight=2
    ),
    Fault(kind=Kind.KILL, part="postgres", victims=_postmaster, weight=4),
    Fault(kind=Kind.KILL, part="postgres session", victims=_sessions, weight=4),
    Fault(
        kind=Kind.KILL,
        part="postgres keeper",
        victims=_first("quantdrift.cli.run.embedded", "postgres"),
        weight=2,
    ),
    Fault(kind=Kind.STOP, part="relay worker", victims=_RELAY, weight=2, patience=2.5, may_fail="connection"),
    Fault(kind=Kind.STOP, part="capture process", victims=_CAPTURE, weight=2),
    Fault(kind=Kind.STOP, part="intake process", victims=_INTAKE),
    Fault(
        kind=Kind.STOP, part="sidecar supervisor", victims=lambda stack: stack.role("sidecar"), may_fail="gap"
    ),
    Fault(kind=Kind.STOP, part="shadow", victims=_shadows, weight=2),
    Fault(
        kind=Kind.STOP,
        part="leading monitor",
        victims=lambda stack: stack.monitors(leading=True),
        weight=2,
        patience=3.0,
    ),
    Fault(kind=Kind.STOP, part="nats", victims=_NATS, weight=2),
    Fault(kind=Kind.STOP, part="postgres", victims=_database, weight=2, all_of_them=True),
    Fault(kind=Kind.STOP, part="up", victims=_up),
    Fault(kind=Kind.AWAY, part="nats", victims=_NATS),
    Fault(kind=Kind.AWAY, part="postgres", victims=_postmaster),
    Fault(kind=Kind.AWAY, part="collector", victims=_none),
    Fault(kind=Kind.AWAY, part="reference", victims=_reference),
    Fault(kind=Kind.DISK, part="full", victims=_none),
    Fault(kind=Kind.BREAK, part="configuration", victims=_none, may_fail="gap"),
    Fault(kind=Kind.KILL, part="up", victims=_up, may_fail="gap"),
)
"""`kill up` ends the whole container, the serving port with it: it comes last."""


class Strike(msgspec.Struct, kw_only=True):
    """One fault that was done.

    Parameters
    ----------
    fault
        Its kind.
    began_s, ended_s
        On the monotonic clock: when it was done, and when the victim went on, was gone, or was let back.
    served_s, recovered_s
        When a request was answered that was sent after `began_s`, and when one was compared and folded; inf: never.
    over_s
        When the storm went on: failures until then are put down to this fault.
    note
        What was special.
    """

    fault: Fault
    began_s: float
    ended_s: float = float("inf")
    served_s: float = float("inf")
    recovered_s: float = float("inf")
    over_s: float = float("inf")
    note: str = ""

    @property
    def recovery_s(self) -> float:
        """From its begin to the recovery, or from its end where something was away for a chosen time."""
        begin_s = self.ended_s if self.fault.kind in _CHOSEN else self.began_s
        return max(0.0, self.recovered_s - begin_s)

    def covers(self, began_s: float, ended_s: float) -> bool:
        """Return whether it was in force at some time of this interval."""
        return began_s <= self.over_s and ended_s >= self.began_s


class Storm:
    """Does faults one after another to a stack under traffic.

    Parameters
    ----------
    hold_s
        How long something is stopped or away.
    patience_s
        How long the storm waits for a recovery before it goes on.
    """

    def __init__(
        self, stack: Stack, traffic: Traffic, *, random: Random, hold_s: float, patience_s: float
    ) -> None:
        self._stack = stack
        self._traffic = traffic
        self._random = random
        self._hold_s = hold_s
        self._patience_s = patience_s
        self.strikes: list[Strike] = []

    async def strike(self, fault: Fault) -> Strike | None:
        """Do one fault and wait for the recovery; return None if there is nobody to do it to."""
        if fault.kind is Kind.DISK and self._stack.disk_problem:
            return None
        found = await asyncio.to_thread(fault.victims, self._stack)
        if not found and fault.victims is not _none:
            return None
        if found and not fault.all_of_them and fault.kind is not Kind.AWAY:
            found = [self._random.choice(found)]
        strike = Strike(fault=fault, began_s=time.monotonic())
        began_at = time.time()
        self.strikes.append(strike)
        does = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.AWAY: self._away,
            Kind.DISK: self._disk,
            Kind.BREAK: self._break,
        }
        doing = asyncio.create_task(does[fault.kind](strike, found))
        try:
            await self._recovery(strike, began_at, doing)
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            strike.ended_s = min(strike.ended_s, time.monotonic())
        await asyncio.sleep(_AFTER_S)
        strike.over_s = time.monotonic()
        return strike

    async def _kill(self, strike: Strike, found: list[psutil.Process]) -> None:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        strike.ended_s = time.monotonic()

    async def _stop(self, strike: Strike, found: list[psutil.Process]) -> None:
        try:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            until = time.monotonic() + self._hold_s * strike.fault.patience
            while time.monotonic() < until:
                if not any(process.is_running() for process in found):
                    strike.note = f"ended by others after {time.monotonic() - strike.began_s:.1f} s"
                    break
                await asyncio.sleep(_POLL_S)
        finally:
            for process in reversed(found):
                with contextlib.suppress(psutil.Error):
                    process.resume()
            strike.ended_s = time.monotonic()

    async def _away(self, strike: Strike, found: list[psutil.Process]) -> None:
        part = strike.fault.part
        try:
            if part == "collector":
                await asyncio.to_thread(self._stack.collector.stop)
            if part == "reference":
                await asyncio.to_thread(self._stack.kept("reference").away)
            until, n = time.monotonic() + self._hold_s, 0
            while time.monotonic() < until:
                for process in found:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                        n += 1
                await asyncio.sleep(_POLL_S)
                if part not in {"collector", "reference"}:
                    found = await asyncio.to_thread(strike.fault.victims, self._stack)
            strike.note = f"killed {n} times" if n > 1 else ""
        finally:
            if part == "collector":
                self._stack.collector.start()
            if part == "reference":
                self._stack.kept("reference").start()
            strike.ended_s = time.monotonic()

    async def _disk(self, strike: Strike, _found: list[psutil.Process]) -> None:
        try:
            until, n_bytes = time.monotonic() + self._hold_s, 0
            while time.monotonic() < until:
                n_bytes += await asyncio.to_thread(self._stack.fill)
                await asyncio.sleep(_POLL_S)
            strike.note = f"{n_bytes >> 20} MiB"
        finally:
            self._stack.make_room()
            strike.ended_s = time.monotonic()

    async def _break(self, strike: Strike, _found: list[psutil.Process]) -> None:
        """Break the configuration, and kill the sidecar's supervisor beside it: it must serve with the one before."""
        config = self._stack.config
        text = config.read_text(encoding="utf-8")
        try:
            config.write_text("[sidecar\n" + text, encoding="utf-8")
            await asyncio.sleep(self._hold_s / 2)
            for process in await asyncio.to_thread(self._stack.role, "sidecar"):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            await asyncio.sleep(self._hold_s / 2)
        finally:
            config.write_text(text, encoding="utf-8")
            strike.ended_s = time.monotonic()

    async def _recovery(self, strike: Strike, began_at: float, doing: "asyncio.Task[None]") -> None:
        """Wait until the fault is over and a request that was sent after it has been answered, compared and folded."""
        chosen = strike.fault.kind in _CHOSEN
        latest_s = (
            time.monotonic()
            + self._patience_s
            + (0 if strike.fault.kind is Kind.KILL else self._hold_s * strike.fault.patience)
        )
        ended_at = float("inf")
        while time.monotonic() < latest_s:
            await asyncio.sleep(_LOOK_S)
            if strike.served_s == float("inf") and self._traffic.served_from_s > strike.began_s:
                strike.served_s = self._traffic.last_answered_s
            if doing.done() and ended_at == float("inf"):
                ended_at = time.time()
            if strike.recovered_s == float("inf"):
                since = ended_at if chosen else began_at
                if since < float("inf") and await self._folded_since(since):
                    strike.recovered_s = time.monotonic()
            elif (
                doing.done()
                and await self._folded_since(ended_at if strike.fault.kind is not Kind.KILL else began_at)
                and await asyncio.to_thread(self._whole)
            ):
                return
        strike.note = f"{strike.note}; not whole after {time.monotonic() - strike.began_s:.0f} s".strip("; ")
        await self._mend(strike)

    async def _mend(self, strike: Strike) -> None:
        """Kill one server after the other, and `up` at last, until everything works: the next fault needs a sound stack."""
        for name, victims in (
            ("nats", _NATS),
            ("postgres", _postmaster),
            ("reference", _reference),
            ("up", _up),
        ):
            for process in await asyncio.to_thread(victims, self._stack):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            killed_at, until = time.time(), time.monotonic() + _MEND_S
            while time.monotonic() < until:
                await asyncio.sleep(_LOOK_S)
                if await self._folded_since(killed_at) and await asyncio.to_thread(self._whole):
                    strike.note += f"; whole again after a kill of {name}"
                    return
        strike.note += "; nothing repairs it"

    async def _folded_since(self, at: float) -> bool:
        """Return whether a batch was folded whose exchanges were all captured after a time."""
        try:
            rows = await self._stack.rows(
                "select 1 from batch join fold on batch.fold_seq <= fold.fold_seq"
                " where kind = 'comparison' and captured_from > to_timestamp($1) limit 1",
                at,
            )
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        return bool(rows)

    def _whole(self) -> bool:
        """Return whether every role is ready again, so that the next fault finds a victim."""
        stack = self._stack
        return stack.all_ready() and len(stack.victims("quantdrift.sidecar.relay.worker")) >= 2
