"""The local limits of a sidecar, and the requests that it refuses to sample because of them."""

import heapq
from datetime import UTC, datetime

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config import Config, Model, SamplingOptions, Secrets
from quantdrift.core.records import BodyStratum, HeaderStratum, Loss, Predicate
from quantdrift.core.sampling.rates import policy_of
from quantdrift.sidecar.capture.pipeline import CapturePipeline
from quantdrift.sidecar.capture.process import identity_of
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.rate_limits import HEADROOM, VALID_S, RateLimits
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.sampling.second_phase import keeps_all
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from quantdrift.sidecar.state.pause import Paused
from tests.support.sidecar.raw_exchanges import raw_exchange

pytestmark = pytest.mark.unit

KINDS = {"short": 0.001, "long": 0.7}  # seconds that an exchange takes
BYTES = {"short": 100, "long": 5000}
DRAWN_PER_S = 500  # of each kind
SECONDS = 40


class Flood:
    """Exchanges drawn evenly, in simulated time: refused at once, or judged when they have ended."""

    def __init__(self, sampling: SamplingOptions) -> None:
        self.clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.slot = Counters.create(1, 1).slot(0)
        self.caps = RateLimits(sampling, self.slot, self.clock)
        self.gate = LoadShedding(self.slot, self.clock)
        self.n_drawn = self.n_refused = 0
        self.refused: set[Loss] = set()
        self.passed = dict.fromkeys(KINDS, 0)
        self._ends: list[tuple[float, str]] = []

    def run(self, seconds: int, *, tells: bool = True, keeps_all: bool = True) -> None:
        """Let time pass."""
        for _ in range(seconds):
            for step in range(DRAWN_PER_S):
                self.clock.advance(1 / DRAWN_PER_S)
                for kind in KINDS:
                    self._draw(kind)
                self._judge()
                if tells and step % (DRAWN_PER_S // 4) == 0:
                    self.caps.publish_refusal_share(self.n_drawn, self.n_refused, keeps_all=keeps_all)

    def burst(self, n_drawn: int, n_turns: int) -> None:
        """Let a second pass at whose begin so many come, in as many turns of a tenth of a second."""
        for turn in range(10):
            self.clock.advance(0.1)
            if turn < n_turns:
                for _ in range(n_drawn // n_turns + (turn < n_drawn % n_turns)):
                    self._draw("short")
                    self.clock.advance(KINDS["short"] / n_drawn)
            self._judge()
            self.caps.publish_refusal_share(self.n_drawn, self.n_refused, keeps_all=True)

    def _draw(self, kind: str) -> None:
        self.n_drawn += 1
        if loss := self.gate.refusal():
            self.refused.add(loss)
            self.n_refused += 1
        else:
            heapq.heappush(self._ends, (self.clock.monotonic_s() + KINDS[kind], kind))

    def _judge(self) -> None:
        while self._ends and self._ends[0][0] <= self.clock.monotonic_s():
            ended_s, kind = heapq.heappop(self._ends)
            captured_s = self.clock.now().timestamp() - (self.clock.monotonic_s() - ended_s)
            if self.caps.refusal(captured_s):
                self.caps.count_refusal()
            else:
                self.caps.count_passed(BYTES[kind], captured_s)
                self.passed[kind] += 1


@pytest.mark.parametrize(
    ("sampling", "loss"),
    [
        (SamplingOptions(max_exchanges_per_s=50), Loss.RATE_CAP),
        (SamplingOptions(max_exchanges_per_s=1e6, max_bytes_per_s=50 * 2550), Loss.BYTE_CAP),
    ],
)
def test_a_flood_is_cut_to_the_limit_and_most_of_it_is_never_buffered(
    sampling: SamplingOptions, loss: Loss
) -> None:
    """What passes is the cap's; what was held is little more; and a long exchange has the chance of a short one."""
    flood = Flood(sampling)
    flood.run(5)  # short ones are there first
    flood.passed = dict.fromkeys(KINDS, 0)
    flood.run(SECONDS)
    n_passed = sum(flood.passed.values())
    assert 0.9 * 50 * SECONDS <= n_passed <= 1.1 * 50 * SECONDS
    assert 0.42 < flood.passed["long"] / n_passed < 0.58
    n_held = flood.n_drawn - flood.n_refused
    assert n_held <= 1.2 * HEADROOM * 50 * (SECONDS + 5) + 3 * 2 * DRAWN_PER_S
    assert flood.refused == {loss}


def test_what_is_below_the_caps_is_never_refused() -> None:
    """Nor is anything else after a flood is over."""
    flood = Flood(SamplingOptions(max_exchanges_per_s=3 * DRAWN_PER_S))
    flood.run(5)
    assert flood.n_refused == 0


def test_a_burst_that_the_buckets_have_tokens_for_is_not_refused() -> None:
    """Below the cap in every second, far above it for a moment: the buckets would let all of it pass."""
    flood = Flood(SamplingOptions(max_exchanges_per_s=3 * DRAWN_PER_S))
    for _ in range(20):
        flood.burst(2 * DRAWN_PER_S, n_turns=3)
    assert flood.n_refused == 0
    assert sum(flood.passed.values()) == 20 * 2 * DRAWN_PER_S


def test_a_quiet_day_leaves_nothing_behind() -> None:
    """What has faded away tells no share; the next flood is judged by what it is itself."""
    flood = Flood(SamplingOptions(max_exchanges_per_s=50))
    flood.run(3)
    for _ in range(10_000):
        flood.clock.advance(8.64)
        flood.caps.publish_refusal_share(flood.n_drawn, flood.n_refused, keeps_all=True)
    assert not flood.slot.gauge(Gauge.REFUSING_UNTIL_NS)
    before = sum(flood.passed.values())
    flood.run(10)
    assert sum(flood.passed.values()) - before >= 0.9 * 50 * 10


def test_a_share_expires_with_the_process_that_set_it() -> None:
    """A capture process that died refuses nothing after some seconds, and one that starts begins without."""
    flood = Flood(SamplingOptions(max_exchanges_per_s=50))
    flood.run(3)
    flood.run(int(VALID_S), tells=False)
    before = flood.n_refused
    assert before
    flood.run(2, tells=False)
    assert flood.n_refused == before
    flood.run(2)
    assert flood.slot.gauge(Gauge.REFUSING_UNTIL_NS)
    RateLimits(SamplingOptions(), flood.slot, flood.clock)
    assert flood.gate.refusal() is None


def test_nothing_is_refused_beforehand_where_some_would_never_come_to_the_caps() -> None:
    """Thinned and paused exchanges are no losses: a policy that thins leaves all judgement to the end."""
    flood = Flood(SamplingOptions(max_exchanges_per_s=50))
    flood.run(3, keeps_all=False)
    assert flood.n_refused == 0
    flood.run(3)
    before = flood.n_refused
    assert before
    flood.run(1, keeps_all=False)
    between = flood.n_refused
    flood.run(1, keeps_all=False)
    assert flood.n_refused == between


@pytest.mark.parametrize(
    ("rate", "body_rate", "kept"), [(0.1, 1.0, True), (0.1, 0.05, False), (0.0, 0.0, True)]
)
def test_a_policy_that_keeps_all_is_distinguished_from_one_that_thins(
    rate: float, body_rate: float, *, kept: bool
) -> None:
    """The base rate is what every exchange has."""
    boosted = BodyStratum(name="b", rate=1.0, where=(Predicate(key="json.a", equals="b"),))
    sampling = SamplingOptions(rate=rate, body_rate=body_rate, body_strata=(boosted,))
    assert keeps_all(policy_of(sampling, "e")) is kept
    faint = HeaderStratum(name="f", rate=1.0, headers={"a": "b"})
    assert keeps_all(policy_of(msgspec.structs.replace(sampling, header_strata=(faint,)), "e")) is (
        kept and body_rate == 1.0
    )


def test_above_a_cap_nothing_is_decoded_that_is_surely_kept() -> None:
    """It is lost by the cap's name, whatever its body is; what may be thinned, or is an error, is judged as ever."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    for body_rate, expected in ((1.0, Loss.RATE_CAP), (0.0, Loss.DECODE)):
        config = Config(
            models=(Model(name="digits"),),
            sampling=SamplingOptions(max_exchanges_per_s=1, body_rate=body_rate),
        )
        slot = Counters.create(1, 1).slot(0)
        publisher = Publisher(config, slot, clock)
        publisher.caps.count_passed(1, clock.now().timestamp())
        recorder = Recorder(LiveConfig.of(config), identity_of(Secrets(), "b" * 32, {}))
        desk = CapturePipeline(recorder, publisher, slot, (Row("default"),))

        def lost(loss: Loss, desk: CapturePipeline = desk, slot: object = slot, **given: object) -> int:
            meta, request, response = raw_exchange(**given)  # type: ignore[arg-type]
            desk.handle(meta, memoryview(request), memoryview(response))
            return slot.lost_count(0, loss)  # type: ignore[attr-defined,no-any-return]

        assert lost(expected, request=b"{") == 1
        assert lost(Loss.ERROR_STATUS, status="500 No") == 1
        assert lost(Loss.UNKNOWN_MODEL, path="/v2/models/none/infer") == 1
        desk.paused = Paused(models=frozenset({"digits"}))
        assert lost(Loss.RATE_CAP) == (expected is Loss.RATE_CAP)
        assert slot.count(0, Count.THINNED) == 1
