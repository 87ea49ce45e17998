"""The sampling policy: the leading monitor computes it, lowers it when the shadow lags, and publishes it.

A policy is computed every `POLICY_S`, and sooner when the evidence against a slice has surged; the lag is checked
every 15 seconds. Without a replay budget (`sampling.replays_per_s` 0) the policy is the configured rates, and it is published
only while these must be lowered: else the sidecars know them themselves. A policy message is published when its rates have changed, and again when half of its validity is over:
sidecars drop a policy that is not renewed. The salt changes with the epoch, which the sidecars put before its name, so a
new day needs no new message.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import msgspec

from quantdrift.core.clock import Clock, is_due
from quantdrift.core.config.schema import Config
from quantdrift.core.process.run import TURN_S, Stop
from quantdrift.core.records import Policy
from quantdrift.core.sampling.policy_message import (
    POLICY_KEY,
    SUMMARY_KEY,
    PolicyMessage,
    PolicyRefusedError,
    PolicySummary,
    decode_policy_message,
    decode_policy_summary,
    encode,
    name_of,
)
from quantdrift.core.sampling.rates import POLICY_S, POLICY_VALID_S, lowered, policy_of
from quantdrift.core.stream.backlog import read_backlog
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.errors import ChangedError
from quantdrift.core.stream.keyvalue import KeyValue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.telemetry import (
    LAG_FACTOR,
    POLICY_PUBLISHED,
    REPLAYS_MEASURED,
    REPLAYS_PLANNED,
    STREAM_LOAD,
    Labels,
    Telemetry,
)
from quantdrift.monitor.sampling.demands import draft, summary_of, surged
from quantdrift.monitor.sampling.lag import LOOK_S, Lag, LagLimits, advance, lag_of
from quantdrift.storage.database import Database
from quantdrift.storage.sampling import note_lag, read_evidence, read_traffic, replayed_per_s

_SOONER = 0.2  # of POLICY_S: the shortest time to the next policy after a surge
_WINDOW_S = 3600.0  # age up to which items count as recent
_LOG = logging.getLogger(__name__)


class PolicyMaker:
    """The publisher of the policy. One task calls `turn` repeatedly, and `close` at the end.

    Parameters
    ----------
    config
        With `sampling.replays_per_s` 0 its rates are published, lowered, while the shadow lags.
    leads
        Returns whether this process leads.
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
        self._limits = LagLimits(max_bytes=config.stream.max_bytes, max_age_s=config.stream.max_age_s)
        self._queue: Queue | None = None
        self._bucket: KeyValue | None = None
        self._policy: Policy | None = None  # not lowered by any lag
        self._summary: PolicySummary | None = None
        self._evidence: dict[int, float] = {}
        self._made_at: datetime | None = None
        self._published_message: PolicyMessage | None = None
        self._revisions: dict[str, int] = {}  # of what is in the bucket, as far as this monitor knows
        self._lag: Lag | None = None
        self._noted_factor: float | None = None  # as the database has it
        self._measured: float | None = None
        self._published = telemetry.counter(POLICY_PUBLISHED)
        telemetry.observe(LAG_FACTOR, lambda: self._shown(self._lag.factor if self._lag else None))
        telemetry.observe(STREAM_LOAD, lambda: self._shown(self._lag.load if self._lag else None))
        telemetry.observe(REPLAYS_PLANNED, lambda: self._shown(self._planned()))
        telemetry.observe(REPLAYS_MEASURED, lambda: self._shown(self._measured))

    async def turn(self) -> None:
        """Look once, publish what has changed, and wait for `look_s`.

        Raises
        ------
        RetryError
            Postgres or NATS is not available.
        OperatorError
            This program cannot read a detector state in the database.
        """
        if not self._leads():
            self._lag = self._published_message = self._policy = self._summary = self._made_at = None
            self._noted_factor = None
            await self._stop.wait(TURN_S)
            return
        await self.look()
        await self._stop.wait(self._look_s)

    async def look(self) -> None:
        """Look once, and publish what has changed."""
        bucket = await self._connected()
        assert self._queue is not None
        if self._lag is None:
            self._lag = await self._resume(bucket)
        backlog = await read_backlog(self._queue)
        before, self._lag = self._lag, advance(self._lag, backlog, self._limits, self._clock.monotonic_s())
        if self._lag.steps != before.steps:
            _LOG.warning(
                "the stream is at %.0f %% of its limits: every sampling rate is now multiplied by %g%s",
                100 * self._lag.load,
                self._lag.factor,
                ""
                if self._lag.steps < before.steps
                else "; start more shadow workers, or lower sampling.rate",
            )
        if self._lag.factor != self._noted_factor and await note_lag(self._database, self._lag.factor):
            self._noted_factor = self._lag.factor
        if self._config.sampling.replays_per_s:
            await self._compute()
        else:
            self._policy, self._summary = policy_of(self._config.sampling, ""), None
        await self._publish(bucket, self._lag.factor)

    async def close(self) -> None:
        """Disconnect."""
        if self._queue is not None:
            await self._queue.close()

    async def _connected(self) -> KeyValue:
        if self._bucket is None:
            self._queue = await Queue.connect(
                self._config.stream, client_name="quantdrift-monitor", role=NatsRole.MONITOR
            )
            self._bucket = KeyValue(self._queue, self._config.stream, POLICY_VALID_S)
        return self._bucket

    async def _resume(self, bucket: KeyValue) -> Lag:
        """Continue from the previous leader's policy message, if there is one that can be read."""
        self._revisions = {key: await bucket.revision(key) for key in (POLICY_KEY, SUMMARY_KEY)}
        entry, summary_entry = await bucket.get(POLICY_KEY), await bucket.get(SUMMARY_KEY)
        try:
            if entry is None:
                return Lag()
            published = decode_policy_message(entry.value)
            summary = decode_policy_summary(summary_entry.value) if summary_entry else None
        except PolicyRefusedError as error:
            _LOG.warning("the policy in the bucket cannot be read and is replaced: %s", error)
            return Lag()
        if not 0 < published.lag_factor <= 1:
            return Lag()
        if (
            summary is not None and summary.epoch == published.policy.epoch
        ):  # else only one of the two was written
            self._summary = summary
        self._published_message = published
        self._policy = lowered(published.policy, 1.0 / published.lag_factor)
        return lag_of(published.lag_factor)

    async def _compute(self) -> None:
        now, monitor = self._clock.now(), self._config.monitor
        evidence = await read_evidence(self._database, now - timedelta(seconds=monitor.stale_after_s))
        if self._made_at is not None:
            every_s = POLICY_S
            if surged(self._evidence, evidence):
                every_s *= _SOONER
            if not is_due(self._made_at, timedelta(seconds=every_s), now):
                return
        traffic = await read_traffic(
            self._database,
            now,
            window_s=_WINDOW_S,
            tally_s=self._config.sidecar.tally_interval_s,
            stale_s=monitor.stale_after_s,
        )
        self._measured = await replayed_per_s(self._database, now, POLICY_S)
        self._made_at, self._evidence = now, evidence
        computed = await asyncio.to_thread(draft, self._config, traffic, self._policy)
        if computed is None:
            _LOG.info("too little recent traffic for a new policy: the current policy stays")
            return
        self._policy = computed.allocation.policy
        self._summary = summary_of(
            computed,
            epoch=name_of(self._policy),
            made_at=now,
            budget_per_s=self._config.sampling.replays_per_s,
        )

    async def _publish(self, bucket: KeyValue, factor: float) -> None:
        """Publish the policy message, if it has changed or has to be renewed."""
        if self._policy is None:
            return
        before = 1.0 if self._published_message is None else self._published_message.lag_factor
        if not self._config.sampling.replays_per_s and factor == before == 1.0:
            return
        now = self._clock.now()
        policy = lowered(self._policy, factor)
        policy = msgspec.structs.replace(policy, epoch=name_of(policy))
        valid_s, published = POLICY_VALID_S, self._published_message
        changed = published is None or published.policy != policy or published.lag_factor != factor
        issued_at = None if published is None else published.issued_at
        if not changed and not is_due(issued_at, timedelta(seconds=valid_s / 2), now):
            return
        message = PolicyMessage(policy=policy, issued_at=now, valid_s=valid_s, lag_factor=factor)
        if self._summary is not None:
            summary = msgspec.structs.replace(self._summary, epoch=policy.epoch)
            await self._put(bucket, SUMMARY_KEY, encode(summary))
        await self._put(bucket, POLICY_KEY, encode(message))
        self._published_message = message
        self._published.add(1)
        if changed:
            _LOG.info("published policy %s to the sidecars", policy.epoch)

    async def _put(self, bucket: KeyValue, key: str, value: bytes) -> None:
        """Replace a value, unless another monitor has: a former leader that wakes up must not overwrite a newer policy.

        Raises
        ------
        ChangedError
            Another monitor has published, or the value has expired; the next look continues from what is there.
        """
        try:
            self._revisions[key] = await bucket.put(key, value, after=self._revisions[key])
        except ChangedError:
            self._lag = self._published_message = None
            raise

    def _planned(self) -> float | None:
        if self._summary is None or self._lag is None:
            return None
        return self._summary.replays_per_s * self._lag.factor

    def _shown(self, value: float | None) -> Iterator[tuple[float, Labels]]:
        if value is not None and self._leads():
            yield value, {}
