"""The monitor's policy, from a real record to a real bucket."""

import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Stream
from quantdrift.core.process.run import Stop
from quantdrift.core.sampling.policy_message import (
    POLICY_KEY,
    SUMMARY_KEY,
    PolicyMessage,
    PolicySummary,
    decode_policy_message,
    decode_policy_summary,
    encode,
)
from quantdrift.core.sampling.rates import lowered, policy_of
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.errors import ChangedError
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.monitor.sampling.lag import LOOK_S
from quantdrift.sidecar.state.counters import POLICY_REFUSALS
from quantdrift.sidecar.state.policy import check_policy
from quantdrift.storage.database import Database
from tests.support.monitor.policy_record import (
    BUDGET_PER_S,
    CONFIG,
    N_CALM,
    after,
    calm,
    maker,
    on,
    onward,
    prepare,
    store_and_fold,
)
from tests.support.sidecar.policy_path import Pod

pytestmark = pytest.mark.integration


class Bucket:
    """What the sidecars would read."""

    def __init__(self, queue: Queue, stream: Stream) -> None:
        self.queue = queue
        self._bucket = KeyValue(queue, stream)

    async def directive(self) -> PolicyMessage:
        """Return the directive."""
        entry = await self._bucket.get(POLICY_KEY)
        assert entry is not None
        return decode_policy_message(entry.value)

    async def account(self) -> PolicySummary:
        """Return its account."""
        entry = await self._bucket.get(SUMMARY_KEY)
        assert entry is not None
        return decode_policy_summary(entry.value)

    async def is_empty(self) -> bool:
        """Return whether nothing was ever given."""
        return await self._bucket.get(POLICY_KEY) is None


@pytest.fixture
def stream(nats_url: str) -> Stream:
    """Return a stream of this test's own; it holds some hundred exchanges of a kilobyte."""
    return Stream(url=nats_url, name=f"t-{secrets.token_hex(6)}", max_bytes=200_000)


@pytest.fixture
async def bucket(stream: Stream) -> AsyncIterator[Bucket]:
    """Return the bucket of that stream."""
    queue = await Queue.connect(stream, client_name="test")
    yield Bucket(queue, stream)
    await queue.close()


@pytest.mark.parametrize(("flips", "moves"), [(0.08, True), (0.001, False)], ids=["drift", "none"])
async def test_evidence_moves_the_budget_to_its_slice(
    postgres_dsn: str, stream: Stream, bucket: Bucket, flips: float, *, moves: bool
) -> None:
    """A slice that flips oftener gets the replays before anybody is paged, and only if it does.

    Seeded: some 125 exchanges of the slice at 8 % flips against 1 % allowed. That they hold no evidence has P < 1e-3;
    that a slice at 0.1 % seems to, P < 1e-2.
    """
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock = ManualClock(after(N_CALM))
    async with maker(postgres_dsn, on(stream), clock) as made:
        await made.look()
        before, why_before = await bucket.directive(), await bucket.account()
        assert check_policy(encode(before), CONFIG.sampling, clock.now().timestamp()) == before
        assert 0 < why_before.replays_per_s <= BUDGET_PER_S
        await store_and_fold(postgres_dsn, onward(25, faint_flips=flips))
        clock.advance((after(N_CALM + 25) - after(N_CALM)).total_seconds())
        await made.look()  # by the evidence alone: the time is not over
        later, why_later = await bucket.directive(), await bucket.account()
    replays = {one.name: one.replays_per_s for one in why_before.slices}
    now = {one.name: one for one in why_later.slices}
    assert why_later.replays_per_s <= BUDGET_PER_S
    if moves:
        assert later.policy != before.policy
        assert now["scanner=faint"].evidence_share > 0.9
        assert now["scanner=faint"].replays_per_s > 1.2 * replays["scanner=faint"]
        assert now["scanner=clear"].replays_per_s < replays["scanner=clear"]
    else:
        assert later == before


async def test_a_policy_is_given_once_and_confirmed_in_time(
    postgres_dsn: str, stream: Stream, bucket: Bucket
) -> None:
    """Looks that change nothing put nothing; when half of its time is over it is confirmed under the same name."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock = ManualClock(after(N_CALM))
    async with maker(postgres_dsn, on(stream), clock) as made:
        await made.look()
        first = await bucket.directive()
        for _ in range(3):
            clock.advance(LOOK_S)
            await made.look()
        assert await bucket.directive() == first
        clock.advance(first.valid_s / 2)
        await made.look()
        second = await bucket.directive()
    assert second.policy.epoch == first.policy.epoch
    assert second.issued_at == clock.now()
    assert (await bucket.account()).epoch == first.policy.epoch


async def test_a_clock_that_was_set_back_confirms_the_policy_at_once(
    postgres_dsn: str, stream: Stream, bucket: Bucket
) -> None:
    """Sidecars whose clocks are right refuse one that was issued in the future, until its time comes."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock, set_back = ManualClock(after(N_CALM)), ManualClock(after(N_CALM) - timedelta(hours=2))
    async with maker(postgres_dsn, on(stream), clock) as made:
        await made.look()
        first = await bucket.directive()
        made._clock = set_back
        await made.look()
        second = await bucket.directive()
    assert second.issued_at == set_back.now() < first.issued_at
    assert second.policy.epoch == first.policy.epoch


async def test_without_traffic_in_the_record_no_policy_is_made(
    postgres_dsn: str, stream: Stream, bucket: Bucket
) -> None:
    """The configuration's rates go on until enough was seen."""
    await prepare(postgres_dsn)
    async with maker(postgres_dsn, on(stream), ManualClock(after(N_CALM))) as made:
        await made.look()
        assert await bucket.is_empty()


async def test_lag_lowers_every_rate_and_a_new_leader_goes_on_from_there(
    postgres_dsn: str, stream: Stream, bucket: Bucket
) -> None:
    """A stream that fills halves the rates before it is full; who leads next neither raises nor forgets them."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock, n_sent = ManualClock(after(N_CALM)), 0

    async def waiting(n: int) -> None:
        nonlocal n_sent
        for _ in range(n):
            n_sent += 1
            await bucket.queue.publish_exchange("digits", str(n_sent), bytes(1000))

    async with maker(postgres_dsn, on(stream), clock) as made:
        await made.look()
        full = await bucket.directive()
        assert full.lag_factor == 1.0
        await waiting(60)
        clock.advance(LOOK_S)
        await made.look()
        low = await bucket.directive()
        assert low.lag_factor < 1.0
        assert low.policy == msgspec.structs.replace(
            lowered(full.policy, low.lag_factor), epoch=low.policy.epoch
        )
    async with maker(postgres_dsn, on(stream), clock) as made:
        await made.look()
        assert await bucket.directive() == low
        await (await bucket.queue.live()).jetstream().purge_stream(stream.name)
        seen = []
        for _ in range(200):
            clock.advance(LOOK_S)
            await made.look()
            seen.append((await bucket.directive()).lag_factor)
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert seen.count(low.lag_factor) >= 19  # five minutes at least
    assert (await bucket.directive()).policy.epoch == full.policy.epoch


async def test_without_a_budget_the_configured_rates_are_lowered_while_the_shadow_lags(
    postgres_dsn: str, stream: Stream, bucket: Bucket, tmp_path: Path
) -> None:
    """Nothing is published before, and nothing after it keeps up again; sidecars follow, and people see it."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock, config = ManualClock(after(N_CALM)), on(stream)
    config = msgspec.structs.replace(
        config, sampling=msgspec.structs.replace(config.sampling, replays_per_s=0.0)
    )
    pod = Pod(tmp_path / "pod", config, clock)

    async def noted() -> float:
        async with Database(postgres_dsn) as database, database.begin() as connection:
            return float(await connection.scalar(text("select lag_factor from fold")))

    async with maker(postgres_dsn, config, clock) as made:
        await made.look()
        assert await bucket.is_empty()
        for number in range(60):
            await bucket.queue.publish_exchange("digits", str(number), bytes(1000))
        clock.advance(LOOK_S)
        await made.look()
        low = await bucket.directive()
        assert low.lag_factor < 1.0
        assert low.policy == lowered(policy_of(config.sampling, low.policy.epoch), low.lag_factor)
        pod.follower.handle_policy(encode(low))
        assert pod.follows(low)
        assert await noted() == low.lag_factor
        await (await bucket.queue.live()).jetstream().purge_stream(stream.name)
        for _ in range(200):
            clock.advance(LOOK_S)
            await made.look()
        last = await bucket.directive()
        assert last.lag_factor == await noted() == 1.0
        pod.follower.handle_policy(encode(last))
        assert pod.is_local()
        clock.advance(last.valid_s)
        await made.look()
        assert await bucket.directive() == last


async def test_a_sidecar_without_a_budget_takes_no_other_policy(
    postgres_dsn: str, stream: Stream, bucket: Bucket, tmp_path: Path
) -> None:
    """What a monitor with a budget makes is neither put into effect nor counted as refused."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock, config = ManualClock(after(N_CALM)), on(stream)
    async with maker(postgres_dsn, config, clock) as made:
        await made.look()
    policy = await bucket.directive()
    for rate in (config.sampling.rate, 0.0):
        sampling = msgspec.structs.replace(config.sampling, replays_per_s=0.0, rate=rate)
        pod = Pod(tmp_path / str(rate), msgspec.structs.replace(config, sampling=sampling), clock)
        for message in (policy, msgspec.structs.replace(policy, lag_factor=0.5)):
            pod.follower.handle_policy(encode(message))
            assert pod.is_local()
        assert not any(pod.slot.gauge(gauge) for gauge in POLICY_REFUSALS.values())


async def test_who_does_not_lead_or_has_no_budget_gives_nothing(
    postgres_dsn: str, stream: Stream, bucket: Bucket
) -> None:
    """A standby leaves the bucket to the leader; without a budget the configuration's rates hold."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock, stop = ManualClock(after(N_CALM)), Stop()
    stop.set()  # it is not to wait for the next turn
    config = on(stream)
    without = msgspec.structs.replace(
        config, sampling=msgspec.structs.replace(config.sampling, replays_per_s=0.0)
    )
    async with maker(postgres_dsn, config, clock, leads=False, stop=stop) as made:
        await made.turn()
    async with maker(postgres_dsn, without, clock, stop=stop) as made:
        await made.turn()
    assert await bucket.is_empty()
    async with maker(postgres_dsn, config, clock, stop=stop) as made:
        await made.turn()
    assert not await bucket.is_empty()


async def test_a_former_leader_does_not_overwrite_a_newer_policy(
    postgres_dsn: str, stream: Stream, bucket: Bucket
) -> None:
    """A monitor that wakes up with an old policy is refused; it continues from what its successor has published."""
    await prepare(postgres_dsn)
    await store_and_fold(postgres_dsn, calm())
    clock, later = ManualClock(after(N_CALM)), ManualClock(after(N_CALM))
    async with (
        maker(postgres_dsn, on(stream), clock) as former,
        maker(postgres_dsn, on(stream), later) as successor,
    ):
        await former.look()
        first = await bucket.directive()
        later.advance(first.valid_s)
        await successor.look()
        newer = await bucket.directive()
        assert newer.issued_at == later.now()
        clock.advance(first.valid_s / 2)
        with pytest.raises(ChangedError):
            await former.look()
        assert await bucket.directive() == newer
        clock.advance(first.valid_s)
        await former.look()  # it leads again
        assert (await bucket.directive()).issued_at == clock.now()
