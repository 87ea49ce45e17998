"""Clocks of real processes that jump by minutes to days, of one host and of all: nothing is lost, and nothing has to be restarted."""

import asyncio
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import asyncpg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.shifted_clock import ShiftedClock
from benchmarks.storm.account import Account, read_account
from benchmarks.storm.stack import Kept, Stack, ended, new_directory
from benchmarks.storm.traffic import Traffic
from quantdrift.cli.run.embedded_nats import nats_variables
from quantdrift.core.process.states import STATES, read_states
from quantdrift.core.sampling.rates import POLICY_S
from quantdrift.core.stream.rights import NatsRole
from quantdrift.monitor.sampling.demands import LEAST_ITEMS
from tests.support.monitor.monitor_processes import until

pytestmark = [
    pytest.mark.fault,
    pytest.mark.release,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the shifted clock is made by a C compiler"),
]
VARIABLES = {
    "QUANTDRIFT__SIDECAR__TALLY_INTERVAL_S": "1",
    "QUANTDRIFT__SAMPLING__REPLAYS_PER_S": "30",
    "QUANTDRIFT__MONITOR__DISCOVERY": "false",
}


HOURS_AHEAD = (0.7, 3.0, 30.0, 28.0, 0.0)
"""Of the real time: three leaps forward, then two back."""
ROWS = """
    select count(*) as n, max(captured_at) as last, now() as now from comparison
    where split_part(attributes ->> 'header.x-request-id', '-', 1)::int >= $1
"""


class Clients:
    """Clients of a stack, whose every request is accounted for."""

    def __init__(self, stack: Stack, port: int) -> None:
        self._stack = stack
        self.traffic = Traffic(port, seed=1, rate_per_s=40.0, n_connections=2)
        self.account: Account

    async def send(self, n: int = 25) -> None:
        """Send some requests, and wait until the database says what became of each, and the monitor has folded it."""
        wanted = self.traffic.n_sent + n
        sending = asyncio.create_task(self.traffic.run())
        await until(lambda: self._has_sent(wanted), "the requests are sent")
        self.traffic.end()
        await sending
        await until(self._all_counted, "all are accounted for", 60)

    async def _has_sent(self, n: int) -> bool:
        return self.traffic.n_sent >= n

    async def _all_counted(self) -> bool:
        account = self.account = await read_account(self._stack, self.traffic, 0)
        assert not account.doubled
        return account.offered == account.answered and not account.missing and not account.unfolded


@asynccontextmanager
async def running(*, is_shifted: bool) -> AsyncIterator[tuple[Stack, ShiftedClock]]:
    """Run `quantdrift up`, by the clock that is returned if `is_shifted`."""
    with new_directory() as directory:
        shifted = ShiftedClock(directory)
        own = shifted.environment if is_shifted else {}
        (directory / "stack").mkdir()
        stack = Stack(directory / "stack", may_mount=False, has_spares=False, variables={**VARIABLES, **own})
        with ended(stack):
            await stack.start()
            yield stack, shifted


def metric(stack: Stack, name: str, *, port: str = "sidecar") -> float:
    """Return the sum of a metric of a part."""
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.ports[port]}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


async def test_the_clocks_of_all_hosts_jump_forward_and_back() -> None:
    """Each request is compared and folded after each jump, the sampling policy is renewed, and no process ends."""
    async with running(is_shifted=True) as (stack, clock):
        clients = Clients(stack, stack.ports["relay"])

        async def has_policy() -> bool:
            return metric(stack, "quantdrift_sidecar_policy_central") == 1

        await clients.send(2 * LEAST_ITEMS)
        while not await has_policy():  # it is made every five minutes, from recent traffic
            clock.shift += timedelta(seconds=POLICY_S)
            assert clock.shift < timedelta(hours=2)
            await clients.send(100)
        for hours in HOURS_AHEAD:
            clock.shift, first = timedelta(hours=hours), clients.traffic.n_sent
            await clients.send()
            await until(has_policy, f"the monitor's policy is in effect {hours} hours ahead", 60)
            sent = (await stack.rows(ROWS, first))[0]
            assert sent["n"] > 5
            assert timedelta(0) <= sent["now"] - sent["last"] < timedelta(minutes=2)
            assert abs(sent["now"] - clock.now()) < timedelta(seconds=10)
        account = clients.account
        assert clients.traffic.failures == []
        assert account.quarantined == {}
        assert account.expired == 0
        assert account.uncounted == account.overcounted == 0
        assert all(not part.restarts for part in read_states(stack.data / STATES).values())


async def test_the_clock_of_one_sidecar_jumps() -> None:
    """An hour ahead is compared, more is set aside with the reason, behind is compared with its wrong time; then it goes on."""
    async with running(is_shifted=False) as (stack, clock):
        sidecar = Kept(
            "sidecar2",
            ["quantdrift", "sidecar", "--config", str(stack.config)],
            stack.kept("up").environment
            | nats_variables(
                stack.data / "nats", (stack.data / "nats.url").read_text().strip(), NatsRole.SIDECAR
            )
            | clock.environment
            | {
                "QUANTDRIFT__SIDECAR__LISTEN": f"127.0.0.1:{stack.ports['shadow2']}",
                "QUANTDRIFT__SIDECAR__ADMIN": f"127.0.0.1:{stack.ports['monitor2']}",
                "QUANTDRIFT__INTAKE__LISTEN": "",
            },
            stack.logs / "sidecar2.log",
        )
        sidecar.start()
        try:
            await stack.until(lambda: stack.is_ready("monitor2"), 60)
            process = sidecar.process
            clients = Clients(stack, stack.ports["shadow2"])

            async def ahead(by: timedelta) -> asyncpg.Record:
                """Move the clock, send, and return how many of these requests have a row, and how the rows are dated."""
                clock.shift, first = by, clients.traffic.n_sent
                await clients.send()
                return (await stack.rows(ROWS, first))[0]

            assert (await ahead(timedelta(0)))["n"] > 5
            early = await ahead(timedelta(minutes=40))
            assert early["n"] > 5
            assert timedelta(minutes=39) < early["last"] - early["now"] < timedelta(minutes=41)
            assert clients.account.quarantined == {}

            assert (await ahead(timedelta(hours=3)))["n"] == 0
            assert list(clients.account.quarantined) == ["too_early"]
            n_early = clients.account.quarantined["too_early"]

            late = await ahead(timedelta(hours=-3))
            assert late["n"] > 5
            assert timedelta(hours=2.9) < late["now"] - late["last"] < timedelta(hours=3.1)

            right = await ahead(timedelta(0))
            assert right["n"] > 5
            assert right["now"] - right["last"] < timedelta(minutes=1)
            assert clients.account.quarantined == {"too_early": n_early}
            assert clients.account.uncounted == clients.account.overcounted == 0
            assert clients.traffic.failures == []
            assert sidecar.process == process
        finally:
            with suppress(OSError):
                sidecar.stop(20.0)
