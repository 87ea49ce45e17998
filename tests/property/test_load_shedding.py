"""Local limits of a sidecar: each exchange ends in one count, wherever it is refused."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.config import Config, Model, SamplingOptions, Secrets, Sidecar
from quantdrift.core.records import Loss
from quantdrift.sidecar.capture.pipeline import CapturePipeline
from quantdrift.sidecar.capture.process import identity_of
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.relay.http1.observer import Http1Observer
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge
from quantdrift.sidecar.state.pause import Paused
from tests.support.sidecar.raw_exchanges import raw_exchange
from tests.support.sidecar.relay_rig import Bench, answer, post

pytestmark = pytest.mark.property

EXCHANGES = st.fixed_dictionaries(
    {
        "exchange_id": st.integers(0, 2**64).map(lambda n: f"{n:032x}"),
        "status": st.sampled_from(["200 OK", "200 OK", "200 OK", "503 No"]),
        "path": st.sampled_from(["/v2/models/digits/infer", "/v2/models/none/infer", "/v1/completions"]),
        "request": st.sampled_from([b"{", b'{"model": "digits", "prompt": "a"}']),
        "headers": st.sampled_from([{}, {"x-user": "u"}]),
        "pi1": st.sampled_from([0.2, 1.0]),
    }
)


@given(
    steps=st.lists(st.tuples(EXCHANGES, st.floats(0, 0.5)), max_size=40),
    cap=st.sampled_from([0.5, 3.0, 1e6]),
    n_bytes=st.sampled_from([500, 1_000_000]),
    queue_bytes=st.sampled_from([2000, 1_000_000]),
    body_rate=st.sampled_from([0.0, 0.1, 1.0]),
    paused=st.sampled_from([frozenset(), frozenset({"digits"})]),
    sticky=st.sampled_from(["", "x-user"]),
)
def test_an_exchange_that_was_received_ends_in_one_count(  # noqa: PLR0917 - hypothesis names them
    steps: list[tuple[dict[str, object], float]],
    cap: float,
    n_bytes: int,
    queue_bytes: int,
    body_rate: float,
    paused: frozenset[str],
    sticky: str,
) -> None:
    """Queued, thinned or lost, under any caps, however much of it was read; and every row's counts add up."""
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    config = Config(
        models=(Model(name="digits"),),
        sidecar=Sidecar(max_held_bytes=2 * queue_bytes),
        sampling=SamplingOptions(
            max_exchanges_per_s=cap, max_bytes_per_s=n_bytes, body_rate=body_rate, sticky_header=sticky
        ),
    )
    settled = LiveConfig.of(config)
    slot = Counters.create(1, len(settled.rows)).slot(0)
    publisher = Publisher(config, slot, clock)
    desk = CapturePipeline(
        Recorder(settled, identity_of(Secrets(), "b" * 32, {})), publisher, slot, settled.rows
    )
    desk.paused = Paused(models=paused)
    for given_, seconds in steps:
        meta, request, response = raw_exchange(**given_)  # type: ignore[arg-type]
        desk.handle(meta, memoryview(request), memoryview(response))
        clock.advance(seconds)
    queued = [item.stratum for item in publisher._items]
    for row in range(len(settled.rows)):
        ended = slot.count(row, Count.THINNED) + queued.count(row)
        ended += sum(slot.lost_count(row, loss) for loss in Loss)
        assert slot.count(row, Count.HANDED) == ended
    assert sum(slot.count(row, Count.HANDED) for row in range(len(settled.rows))) == len(steps)


@given(
    share=st.integers(0, 1_000_000_000),
    gauge=st.sampled_from([Gauge.REFUSED_BY_RATE, Gauge.REFUSED_BY_BYTES]),
)
def test_a_sampled_request_is_buffered_or_lost(share: int, gauge: Gauge) -> None:
    """A relay that refuses some beforehand counts each as taken and lost, and hands the others over whole."""
    bench, clock = Bench(), SystemClock()
    told = Counters.create(1, 1).slot(0)
    told.set(gauge, share)
    told.set(Gauge.REFUSING_UNTIL_NS, int((clock.monotonic_s() + 60) * 1e9))
    bench.scope.load_shedding = LoadShedding(told, clock)
    observer = Http1Observer(bench.scope)
    for _ in range(30):
        observer.request(post(b"q"))
        observer.response(answer(b"a"))
    loss = Loss.RATE_CAP if gauge is Gauge.REFUSED_BY_RATE else Loss.BYTE_CAP
    assert bench.slot.count(0, Count.TAKEN) == len(bench.taken) + bench.lost(loss) == 30
    assert set(bench.pairs) <= {(post(b"q"), answer(b"a"))}
    assert bench.slot.gauge(Gauge.HELD_BYTES) == 0
    assert observer.is_idle
    if share in (0, 1_000_000_000):
        assert bench.lost(loss) == (30 if share else 0)
