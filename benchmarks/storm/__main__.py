"""What survives a storm: every process killed and stopped, disks filled and servers away, under load.

    python -m benchmarks.storm [--quick] [--minutes 60] [--seed 1] [--only "kill nats"] [--rate 40] [--keep DIRECTORY]

It runs `quantdrift up` with two relay workers, a second shadow and a second monitor that stands by, all of it on a small
disk that can be filled; a candidate's server, a reference's server and a collector of its own. Clients keep their HTTP/1.1
connections, send at a constant rate and try nothing twice. Midway one slice begins to flip.

First a quiet run, then the storm: one fault after another, in an order that the seed decides, each until a request that
was sent after it is answered, compared and folded. Every fault comes once before one comes again.

- **Failed requests** are put down to the fault that was in force while they were under way; what failed at another time
  has a line of its own.
- **Accounting**, at the end: `offered = not taken + thinned + lost by reason + expired + waiting + compared + quarantined`,
  where the clients know what was offered, and the product's tables the rest.
- **Alerts** are those of the quiet run: the same slice pages, no other, once.
- **Time to recover**: from a kill or a stop until a request that was captured after it is folded; of what is away for a
  chosen time, from its return.

`--quick` does each fault once and takes some ten minutes; `--minutes` says how long the storm is. The full run is an hour
of storm. `--only` does the named faults alone, again and again; `--list` names them. `--keep` copies the logs. Without the
right to mount a file system the full disk is left out, and the table says so.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from benchmarks.result import finish
from benchmarks.storm.account import read_account, read_alerts
from benchmarks.storm.faults import FAULTS, Fault, Kind, Storm
from benchmarks.storm.stack import Stack, running
from benchmarks.storm.table import SLICE, Outcome, goals_of, show
from benchmarks.storm.traffic import Traffic
from quantdrift.core.config.schema import Config, Sidecar
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import QuantdriftError
from quantdrift.core.stream.backlog import read_waiting
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.storage.fold.reading_order import MOST_HORIZON_US

_N_CONNECTIONS: Final = 8
_POLL_S: Final = 1.0
_LONGEST_HELD_S: Final = 1.5 * MOST_HORIZON_US / 1e6
"""After faults the fold holds the last exchanges back for so long that late ones can still come before them."""
_INTERRUPTED: Final = "it was interrupted"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done, and how long it takes.

    Parameters
    ----------
    rate_per_s, seed
        Requests per second, and what the traffic and the order of the faults are drawn from.
    quiet_s
        Length of the quiet run; the drift begins after a third of it.
    storm_s
        Length of the storm; 0: each fault once.
    hold_s
        How long something is stopped or away.
    patience_s
        Longest wait for a recovery.
    drain_s
        Longest wait at the end until everything is counted.
    spare_s
        How much longer than planned the faults may take in all, recoveries that never come included.
    """

    rate_per_s: float = 40.0
    seed: int = 1
    quiet_s: float = 300.0
    storm_s: float = 3600.0
    hold_s: float = 45.0
    patience_s: float = 180.0
    drain_s: float = 240.0
    spare_s: float = 1200.0


QUICK: Final = Plan(quiet_s=75.0, storm_s=0.0, hold_s=8.0, patience_s=60.0, drain_s=90.0, spare_s=1500.0)


def main() -> int:
    """Run it and print the figures; return 1 if the storm itself broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, help="length of the storm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="may be repeated")
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--no-quiet", action="store_true", help="leave out the quiet run")
    parser.add_argument("--no-mount", action="store_true", help="mount nothing: no full disk")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="copy the logs there")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(fault.name for fault in FAULTS))
        return 0
    unknown = set(given.only) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; see --list")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything is ended and printed as at Ctrl-C
    plan = QUICK if given.quick else Plan()
    if given.minutes is not None:
        plan = msgspec.structs.replace(plan, storm_s=60 * given.minutes)
    faults = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    plan = msgspec.structs.replace(plan, rate_per_s=given.rate, seed=given.seed)
    began_s = time.monotonic()
    quiet = Outcome()
    if not given.no_quiet:
        _say("a quiet run")
        quiet = _run(plan, [], may_mount=not given.no_mount, keep=given.keep and given.keep / "quiet")
    _say("the storm")
    storm = (
        Outcome(problem="it was not begun")
        if quiet.problem == _INTERRUPTED
        else _run(plan, faults, may_mount=not given.no_mount, keep=given.keep and given.keep / "storm")
    )
    figures = show(quiet, storm) | {"seconds": round(time.monotonic() - began_s)}
    finish("storm", figures, goals_of(quiet, storm))
    return 1 if storm.problem else 0


def _run(plan: Plan, faults: Sequence[Fault], *, may_mount: bool, keep: Path | None) -> Outcome:
    outcome = Outcome()
    try:
        with running(may_mount=may_mount, keep=keep) as stack:
            asyncio.run(_storm(stack, plan, faults, outcome))
    except (KeyboardInterrupt, asyncio.CancelledError):
        outcome.problem = outcome.problem or _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever broke, what was seen so far is printed
        outcome.problem = f"{type(error).__name__}: {error}"
        if isinstance(error, ExceptionGroup):
            outcome.problem += "; " + "; ".join(f"{type(one).__name__}: {one}" for one in error.exceptions)
    if outcome.problem:
        _say(f"this run broke: {outcome.problem}")
    return outcome


async def _storm(stack: Stack, plan: Plan, faults: Sequence[Fault], outcome: Outcome) -> None:
    await stack.start()
    traffic = Traffic(
        stack.ports["relay"], seed=plan.seed, rate_per_s=plan.rate_per_s, n_connections=_N_CONNECTIONS
    )
    outcome.failures = traffic.failures
    clients = asyncio.create_task(traffic.run())
    keeper = asyncio.create_task(stack.keep())
    try:
        if faults:
            try:
                async with asyncio.timeout(plan.storm_s + plan.spare_s):
                    await _strikes(stack, traffic, plan, faults, outcome)
            except TimeoutError:
                outcome.problem = f"the faults took more than {plan.storm_s + plan.spare_s:g} s"
        else:
            await asyncio.sleep(plan.quiet_s / 3)
            _drift(traffic, outcome)
            await asyncio.sleep(plan.quiet_s * 2 / 3)
        traffic.end()
        await clients
        waiting = await _drained(stack, traffic, plan, outcome)
        outcome.account = await read_account(stack, traffic, waiting)
        outcome.alerts = await read_alerts(stack)
    finally:
        outcome.n_sent, outcome.longest_s = traffic.n_sent, traffic.longest_s
        for one in (clients, keeper):
            one.cancel()
        await asyncio.gather(clients, keeper, return_exceptions=True)


async def _strikes(
    stack: Stack, traffic: Traffic, plan: Plan, faults: Sequence[Fault], outcome: Outcome
) -> None:
    random = Random(plan.seed)
    storm = Storm(stack, traffic, random=random, hold_s=plan.hold_s, patience_s=plan.patience_s)
    outcome.strikes = storm.strikes
    began_s = time.monotonic()
    order = _shuffled(faults, random)
    if plan.storm_s:
        weighted = [fault for fault in faults for _ in range(fault.weight)]
    n = 0
    while order:
        fault = order.pop(0)
        part = (time.monotonic() - began_s) / plan.storm_s if plan.storm_s else n / len(faults)
        if part >= 0.5 and outcome.drifted_at is None:
            _drift(traffic, outcome)
        if plan.storm_s and part >= 1:
            break
        await asyncio.sleep(random.uniform(0.5, 2.5))
        strike, n = await storm.strike(fault), n + 1
        if strike is None:
            outcome.skipped[fault.name] = (
                stack.disk_problem if fault.kind is Kind.DISK else "nobody to do it to"
            )
            _say(f"{fault.name}: left out, {outcome.skipped[fault.name]}")
        else:
            failed = sum(strike.covers(one.began_s, one.ended_s) for one in traffic.failures)
            note = f", {strike.note}" if strike.note else ""
            _say(f"{fault.name}: recovered in {strike.recovery_s:.1f} s, {failed} requests failed{note}")
        if not order and plan.storm_s:
            order = _shuffled(weighted, random)
    if outcome.drifted_at is None:
        _drift(traffic, outcome)
    await _alert(stack, traffic, plan)


async def _alert(stack: Stack, traffic: Traffic, plan: Plan) -> None:
    """Wait until a slice fires, for no longer than the quiet run had."""
    until = time.monotonic() + plan.quiet_s
    while time.monotonic() < until and traffic.drifts_from_s < float("inf"):
        with contextlib.suppress(Exception):  # the database may be gone for good
            if (await read_alerts(stack)).fired:
                return
        await asyncio.sleep(_POLL_S)


def _shuffled(faults: Sequence[Fault], random: Random) -> list[Fault]:
    """Return the faults in another order; what ends the container comes last."""
    order = random.sample(list(faults), len(faults))
    return sorted(order, key=lambda fault: fault.name == "kill up")


def _drift(traffic: Traffic, outcome: Outcome) -> None:
    _say(f"{SLICE} drifts from now on")
    traffic.drifts_from_s, outcome.drifted_at = time.monotonic(), time.time()


async def _drained(stack: Stack, traffic: Traffic, plan: Plan, outcome: Outcome) -> int:
    """Wait until every request is accounted for, or nothing changes any more; return how many wait in the stream."""
    began_s = time.monotonic()
    waiting, before, since_s = -1, None, began_s
    settled_s = 1.5 * Sidecar().tally_interval_s
    while (now_s := time.monotonic()) - began_s < plan.drain_s:
        with contextlib.suppress(Exception):  # the stack may still recover
            waiting = await _waiting(stack)
            account = await read_account(stack, traffic, waiting)
            if account != before:
                before, since_s = account, now_s
            elif waiting == 0 and now_s - since_s > (_LONGEST_HELD_S if account.unfolded else settled_s):
                break
        await asyncio.sleep(_POLL_S)
    outcome.drained_s = since_s - began_s
    if waiting < 0:
        raise TimeoutError(f"the database or NATS does not answer for {plan.drain_s:g} s after the storm")
    return waiting


async def _waiting(stack: Stack) -> int:
    stream = at_data(Config(), stack.data).stream
    queue = await Queue.connect(stream, client_name="storm", role=NatsRole.OPERATOR)
    try:
        return sum(one.n_messages for one in (await read_waiting(queue, ())).values())
    finally:
        with contextlib.suppress(QuantdriftError):
            await queue.close()


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} ... {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
