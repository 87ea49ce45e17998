"""Makes the sampling policy in the leading monitor, lowers it when the shadow lags, and gives it to the sidecars.

A policy is worked out every `monitor.policy_s`, and sooner when the evidence against a slice has surged; the lag is looked at
every quarter of a minute. A directive is put into the bucket when its rates have changed, and to confirm it when half
of its time is over: sidecars drop one that nobody confirms. The salt changes with the epoch, which the sidecars put
before its name, so a new day needs no new directive.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.schema import Config
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Policy
from quantdrift.core.sampling.policy_message import (
    ACCOUNT,
    DIRECTIVE,
    PolicyMessage,
    PolicySummary,
    RefusedError,
    decode_policy_message,
    decode_policy_summary,
    encode,
    name_of,
)
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.core.telemetry import (
    LAG_FACTOR,
    POLICY_PUBLISHED,
    REPLAYS_MEASURED,
    REPLAYS_PLANNED,
    STREAM_LOAD,
    Labels,
    Telemetry,
)
from quantdrift.monitor.sampling.demands import account_of, draft, lowered, surged
from quantdrift.monitor.sampling.lag import LOOK_S, Lag, Limits, advance, lag_of
from quantdrift.storage.database import Database
from quantdrift.storage.monitor.traffic import read_evidence, read_traffic, replayed_per_s

_SOONER = 0.2  # of policy_s: how soon a policy may follow another because of that
_WINDOW_S = 3600.0  # how far back recent items count
_LOG = logging.getLogger(__name__)


class PolicyMaker:
    """Makes the policy. One task calls `turn` again and again, and `close` at the end.

    Parameters
    ----------
    config
        The whole configuration. With `sampling.replays_per_s` 0, or not `central`, nothing is made.
    database
        The record.
    telemetry, clock, stop
        The process's.
    leads
        Whether this process leads.
    look_s
        Time between two looks at the lag.
    """

    def __init__(
        self,
        *,
        config: Config,
        database: Database,
        telemetry: Telemetry,
        clock: Clock,
        stop: Stop,
        leads: Callable[[], bool],
        look_s: float = LOOK_S,
    ) -> None:
        self._config = config
        self._database = database
        self._clock = clock
        self._stop = stop
        self._leads = leads
        self._look_s = look_s
        self._limits = Limits(max_bytes=config.stream.max_bytes, max_age_s=config.stream.max_age_s)
        self._queue: Queue | None = None
        self._bucket: KeyValue | None = None
        self._standing: Policy | None = None  # not lowered by any lag
        self._account: PolicySummary | None = None
        self._evidence: dict[int, float] = {}
        self._made_at: datetime | None = None
        self._given: PolicyMessage | None = None
        self._lag: Lag | None = None
        self._measured: float | None = None
        self._published = telemetry.counter(POLICY_PUBLISHED)
        telemetry.observe(LAG_FACTOR, lambda: self._shown(self._lag.factor if self._lag else None))
        telemetry.observe(STREAM_LOAD, lambda: self._shown(self._lag.load if self._lag else None))
        telemetry.observe(REPLAYS_PLANNED, lambda: self._shown(self._planned()))
        telemetry.observe(REPLAYS_MEASURED, lambda: self._shown(self._measured))

    async def turn(self) -> None:
        """Look once, give what has changed, and wait a little.

        Raises
        ------
        RetryError
            Postgres or NATS is away.
        OperatorError
            A detector state in the record cannot be read by this program.
        """
        sampling = self._config.sampling
        if not (sampling.central and sampling.replays_per_s > 0):
            await self._stop.wait()
            return
        if not self._leads():
            self._lag = self._given = self._standing = self._account = self._made_at = None
            await self._stop.wait(self._config.monitor.interval_s)
            return
        await self.look()
        await self._stop.wait(self._look_s)

    async def look(self) -> None:
        """Look once, and give what has changed."""
        bucket = await self._connected()
        assert self._queue is not None
        if self._lag is None:
            self._lag = await self._resume(bucket)
        backlog = await read_backlog(self._queue)
        before, self._lag = self._lag, advance(self._lag, backlog, self._limits, self._clock.monotonic_s())
        if self._lag.steps != before.steps:
            _LOG.warning(
                "the stream is at %.0f %% of its limits: every rate times %g",
                100 * self._lag.load,
                self._lag.factor,
            )
        await self._work_out()
        await self._give(bucket, self._lag.factor)

    async def close(self) -> None:
        """Disconnect."""
        if self._queue is not None:
            await self._queue.close()

    async def _connected(self) -> KeyValue:
        if self._bucket is None:
            self._queue = await Queue.connect(self._config.stream, client_name="quantdrift-monitor")
            self._bucket = KeyValue(self._queue, self._config.stream, self._config.monitor.policy_valid_s)
        return self._bucket

    async def _resume(self, bucket: KeyValue) -> Lag:
        """Go on from the directive of the leader before, if there is one that can be read."""
        entry, told = await bucket.get(DIRECTIVE), await bucket.get(ACCOUNT)
        try:
            if entry is None:
                return Lag()
            given = decode_policy_message(entry.value)
            account = decode_policy_summary(told.value) if told else None
        except RefusedError as error:
            _LOG.warning("the policy in the bucket is replaced: %s", error)
            return Lag()
        if not 0 < given.lag_factor <= 1:
            return Lag()
        if account is not None and account.epoch == given.policy.epoch:  # else half of a change
            self._account = account
        self._given = given
        self._standing = lowered(given.policy, 1.0 / given.lag_factor)
        return lag_of(given.lag_factor)

    async def _work_out(self) -> None:
        now, monitor = self._clock.now(), self._config.monitor
        evidence = await read_evidence(self._database, now - timedelta(seconds=monitor.stale_after_s))
        if self._made_at is not None:
            every_s = monitor.policy_s
            if surged(self._evidence, evidence):
                every_s *= _SOONER
            if now < self._made_at + timedelta(seconds=every_s):
                return
        record = await read_traffic(
            self._database,
            now,
            window_s=_WINDOW_S,
            tally_s=self._config.sidecar.tally_interval_s,
            stale_s=monitor.stale_after_s,
        )
        self._measured = await replayed_per_s(self._database, now, monitor.policy_s)
        self._made_at, self._evidence = now, evidence
        made = await asyncio.to_thread(draft, self._config, record, self._standing)
        if made is None:
            _LOG.info("too little traffic in the record for a policy: what is in force goes on")
            return
        self._standing = made.allocation.policy
        self._account = account_of(
            made,
            epoch=name_of(self._standing),
            made_at=now,
            budget_per_s=self._config.sampling.replays_per_s,
        )

    async def _give(self, bucket: KeyValue, factor: float) -> None:
        """Put the directive into the bucket, if it says something new or has to be confirmed."""
        if self._standing is None:
            return
        now = self._clock.now()
        policy = lowered(self._standing, factor)
        policy = msgspec.structs.replace(policy, epoch=name_of(policy))
        valid_s, given = self._config.monitor.policy_valid_s, self._given
        changed = given is None or given.policy != policy or given.lag_factor != factor
        if not changed and given is not None and now < given.issued_at + timedelta(seconds=valid_s / 2):
            return
        directive = PolicyMessage(policy=policy, issued_at=now, valid_s=valid_s, lag_factor=factor)
        if self._account is not None:
            await bucket.put(ACCOUNT, encode(msgspec.structs.replace(self._account, epoch=policy.epoch)))
        await bucket.put(DIRECTIVE, encode(directive))
        self._given = directive
        self._published.add(1)
        if changed:
            _LOG.info("the sidecars are given policy %s", policy.epoch)

    def _planned(self) -> float | None:
        if self._account is None or self._lag is None:
            return None
        return self._account.replays_per_s * self._lag.factor

    def _shown(self, value: float | None) -> Iterator[tuple[float, Labels]]:
        if value is not None and self._leads():
            yield value, {}
