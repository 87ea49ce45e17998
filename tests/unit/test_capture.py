"""The capture process without its sockets."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config import Config, Model, Secrets
from quantdrift.core.config.schema import SamplingOptions, Sidecar
from quantdrift.core.records import Loss, ModelCount, Way
from quantdrift.core.sampling.rates import policy_at
from quantdrift.sidecar.capture.pipeline import CapturePipeline, CaptureService
from quantdrift.sidecar.capture.process import Tallies, identity_of
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.protocols import cost
from quantdrift.sidecar.state.config import LiveConfig, LiveConfigFile, write_live_config
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from quantdrift.sidecar.state.pause import Paused
from quantdrift.sidecar.state.policy import PolicyFile
from tests.support.sidecar.raw_exchanges import raw_exchange

SECRETS = Secrets()
CLOCK = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))


def desk_of(config: Config) -> tuple[CapturePipeline, Counters]:
    """Return a desk whose publisher is not connected, and its counters."""
    counters = Counters.create(2, 1)
    slot = counters.slot(1)
    recorder = Recorder(LiveConfig.of(config), identity_of(SECRETS, "b" * 32, {}))
    return CapturePipeline(recorder, Publisher(config, slot, CLOCK), slot, (Row("default"),)), counters


def handle(desk: CapturePipeline, n: int = 1, **given: object) -> None:
    """Hand `n` exchanges over."""
    for _ in range(n):
        meta, request, response = raw_exchange(**given)  # type: ignore[arg-type]
        desk.handle(meta, memoryview(request), memoryview(response))


MODELS = (Model(name="digits"),)


@pytest.mark.integration
def test_the_capture_process_loads_no_runtime_and_no_database() -> None:
    """A sidecar holds no torch, onnxruntime, scipy or SQLAlchemy in its memory."""
    code = "import sys, quantdrift.sidecar.capture.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "msgspec" in loaded
    assert not loaded & {"torch", "onnxruntime", "onnx", "scipy", "sqlalchemy", "asyncpg", "alembic", "numba"}


@pytest.mark.unit
def test_an_error_of_our_own_costs_one_exchange(caplog: pytest.LogCaptureFixture) -> None:
    """A recorder that raises is counted, and the next exchange is handled."""
    desk, counters = desk_of(Config(models=MODELS))
    meta, request, response = raw_exchange()
    beyond = msgspec.structs.replace(meta, captured_at_ns=10**24)  # no calendar has that day
    desk.handle(beyond, memoryview(request), memoryview(response))
    handle(desk)
    assert counters.slot(1).lost_count(0, Loss.CAPTURE_ERROR) == 1
    assert counters.slot(1).gauge(Gauge.QUEUE_BYTES) > 0
    assert "an internal error" in caplog.text


@pytest.mark.unit
def test_exchanges_that_cannot_be_read_are_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A body that is cut short is a loss that an operator can act on, and a flood of them is one line."""
    desk, counters = desk_of(Config(models=MODELS))
    meta, request, response = raw_exchange()
    head, _, body = request.partition(b"\r\n\r\n")
    broken = memoryview(head + b"\r\n\r\n" + b"x" * len(body))
    for _ in range(100):
        desk.handle(meta, broken, memoryview(response))
    assert counters.slot(1).lost_count(0, Loss.DECODE) == 100
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("model digits: lost 1 captured exchanges (decode): they cannot be read")


@pytest.mark.unit
def test_errors_of_our_own_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is no text reaches the record: each one is counted, and the log tells of every doubling."""
    desk, counters = desk_of(Config(models=MODELS))
    broken = b'{"inputs":[{"name":"\\ud800","shape":[1],"datatype":"FP32","data":[NaN]}]}'
    handle(desk, 20, request=broken)
    assert counters.slot(1).lost_count(0, Loss.CAPTURE_ERROR) == 20
    assert len(caplog.records) == 5


@pytest.mark.slow
@pytest.mark.unit
def test_an_exchange_that_costs_too_much_is_lost_and_the_next_one_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand small tensors are left undone as soon as the time is used up; it is counted by its own reason."""
    desk, counters = desk_of(Config(models=MODELS))
    tensor = '{"name":"x","shape":[1],"datatype":"FP32","data":[1]}'
    many = ('{"inputs":[' + ",".join([tensor] * 20_000) + "]}").encode()
    handle(desk, request=many)
    assert counters.slot(1).lost_count(0, Loss.TOO_COSTLY) == 0
    monkeypatch.setattr(cost, "LIMIT_S", 1e-4)
    handle(desk, request=many)
    assert counters.slot(1).lost_count(0, Loss.TOO_COSTLY) == 1
    monkeypatch.undo()
    handle(desk)
    assert counters.slot(1).gauge(Gauge.QUEUE_BYTES) > 0


@pytest.mark.unit
def test_a_successor_counts_what_died_with_the_process() -> None:
    """What was received and neither published, thinned nor lost is gone; doing it again finds nothing."""
    slot = Counters.create(1, 2).slot(0)
    slot.add(1, Count.HANDED, 10)
    slot.add(1, Count.PUBLISHED, 3)
    slot.add(1, Count.THINNED, 2)
    slot.lose(1, Loss.DECODE)
    for _ in range(2):
        slot.lose_unfinished(2, Count.HANDED, ended=(Count.THINNED, Count.PUBLISHED), loss=Loss.CAPTURE_ERROR)
        assert slot.lost_count(1, Loss.CAPTURE_ERROR) == 4
    assert slot.lost_count(0, Loss.CAPTURE_ERROR) == 0


@pytest.mark.unit
def test_a_frame_of_no_known_stratum_is_out_of_step() -> None:
    """It cannot be counted anywhere: its connection is to be closed."""
    desk, _ = desk_of(Config(models=MODELS))
    for stratum in (1, -1):
        with pytest.raises(ValueError, match="no row"):
            handle(desk, stratum=stratum)


@pytest.mark.unit
def test_losses_and_thinned_exchanges_are_counted_in_the_last_slot() -> None:
    """Each exchange ends in one count."""
    desk, counters = desk_of(Config(models=MODELS, sampling=SamplingOptions(body_rate=0.0)))
    handle(desk, 2)
    handle(desk, 3, status="503 No")
    assert counters.slot(1).count(0, Count.THINNED) == 2
    assert counters.slot(1).lost_count(0, Loss.ERROR_STATUS) == 3


@pytest.mark.unit
@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (Loss.RATE_CAP, Config(models=MODELS, sampling=SamplingOptions(max_exchanges_per_s=5))),
        (Loss.BYTE_CAP, Config(models=MODELS, sampling=SamplingOptions(max_bytes_per_s=2000))),
        (Loss.QUEUE_FULL, Config(models=MODELS, sidecar=Sidecar(max_held_bytes=2 * 2000))),
    ],
)
def test_local_bounds_hold_and_are_counted(loss: Loss, config: Config) -> None:
    """What is above a cap, or does not fit into the queue, is lost by that name; the rest waits."""
    desk, counters = desk_of(config)
    handle(desk, 20)
    slot = counters.slot(1)
    n_lost = slot.lost_count(0, loss)
    assert 10 <= n_lost < 20
    assert slot.gauge(Gauge.QUEUE_BYTES) <= 5000
    assert sum(slot.lost_count(0, other) for other in Loss) == n_lost


@pytest.mark.unit
def test_a_restarted_process_goes_on_counting_its_tallies() -> None:
    """The sequence lives in the shared counters, and a tally sums every process's counts."""
    counters = Counters.create(3, 2)
    counters.slot(0).add(1, Count.OFFERED, 5)
    counters.slot(1).add(1, Count.OFFERED, 7)
    counters.slot(1).adjust(Gauge.BLIND, 2)
    counters.slot(0).set(Gauge.RELAY_CPU_US, 1_000_000)
    counters.slot(1).set(Gauge.RELAY_CPU_US, 500_000)
    counters.slot(2).lose(0, Loss.DECODE)
    for sequence in (1, 2):
        tallies = Tallies(
            counters=counters,
            rows=lambda: [Row("a"), Row("default")],
            unknown={},
            source="pod",
            boot="b",
            queue=lambda: None,
            clock=CLOCK,
        )
        tally = tallies.take()
        assert (tally.sequence, tally.at, tally.blind_connections) == (sequence, CLOCK.now(), 2)
        assert [stratum.offered for stratum in tally.strata] == [0, 12]
        assert tally.relay_cpu_s == 1.5
        assert tally.strata[0].lost == {Loss.DECODE: 1}


@pytest.mark.unit
def test_a_sidecar_is_named_by_its_pod_or_host() -> None:
    """The first that is given counts; without a shared salt the boot takes its place."""
    pod = {"POD_NAME": "p", "MODEL_VERSION": "3"}
    origin = identity_of(SECRETS, "b", pod)
    assert (origin.source, origin.version, origin.salt) == ("p", "3", b"b")
    assert identity_of(Secrets(salt=b"x"), "b", {}).salt == b"x"
    assert identity_of(SECRETS, "b", {}).source


@pytest.mark.unit
def test_losses_are_counted_by_model_once_it_is_known() -> None:
    """A path tells the relay, a body the capture process, which moves the count; an unknown model has no row."""
    settled = LiveConfig.of(Config(models=(Model(name="digits"), Model(name="words"))))
    counters = Counters.create(2, len(settled.rows))
    relay, slot = counters.slot(0), counters.slot(1)
    recorder = Recorder(settled, identity_of(SECRETS, "b" * 32, {}))
    desk = CapturePipeline(recorder, Publisher(settled.config, slot, CLOCK), slot, settled.rows)
    digits = settled.rows.index(Row("default", "digits"))
    relay.add(digits, Count.TAKEN, 2)
    relay.add(0, Count.TAKEN, 3)
    handle(desk, stratum=digits, request=b"{")
    handle(desk, stratum=digits, status="500 Oops")
    handle(desk, path="/v1/completions", request={"model": "words", "prompt": "a"}, response=b"{")
    handle(desk, path="/v1/completions", request={"model": "none", "prompt": "a"})
    desk.paused = Paused(models=frozenset({"words"}))
    handle(desk, path="/v1/completions", request={"model": "words", "prompt": "a"}, response={})
    (count,) = counters.strata(settled.rows)
    assert (count.taken, count.thinned) == (5, 1)
    assert count.lost == {Loss.ERROR_STATUS: 1, Loss.UNKNOWN_MODEL: 1, Loss.DECODE: 2}
    assert count.models == {
        "digits": ModelCount(taken=2, lost={Loss.ERROR_STATUS: 1, Loss.DECODE: 1}, configured=True),
        "words": ModelCount(taken=2, lost={Loss.DECODE: 1}, thinned=1, configured=True),
    }
    slot.lose_unfinished(
        len(settled.rows), Count.HANDED, ended=(Count.THINNED, Count.PUBLISHED), loss=Loss.PUBLISH
    )
    (count,) = counters.strata(settled.rows)
    assert Loss.PUBLISH not in count.lost


@pytest.mark.unit
def test_what_has_no_answer_is_lost_by_the_model_that_its_body_names() -> None:
    """Errors, aborts and what the relay lost; where the body names none it stays without a model, unless it is another's."""
    settled = LiveConfig.of(Config(models=(Model(name="words"), Model(name="idle"))))
    counters = Counters.create(2, len(settled.rows))
    slot = counters.slot(1)
    recorder = Recorder(settled, identity_of(SECRETS, "b" * 32, {}))
    unknown: list[str] = []
    desk = CapturePipeline(
        recorder,
        Publisher(settled.config, slot, CLOCK),
        slot,
        settled.rows,
        lambda name, _: unknown.append(name),
    )
    counters.slot(0).add(0, Count.TAKEN, 11)
    words: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "request": {"model": "words", "messages": [{"content": "a"}]},
    }
    handle(desk, status="429 Too Many", **words)
    handle(desk, status="500 Oops", **words)
    handle(desk, 3, lost=Loss.CLIENT_ABORT, **words)
    handle(desk, lost=Loss.HELD_BYTES, **words)
    for lost in (Loss.CLIENT_ABORT, Loss.TRUNCATED):
        handle(desk, lost=lost, path="/v1/completions", request=b"{")
        handle(desk, lost=lost, path="/v1/completions", request={"model": "other", "prompt": "a"})
    handle(desk, status="404 No", path="/v2/models/other/infer")
    (count,) = counters.strata(settled.rows)
    assert count.lost == {
        Loss.HELD_BYTES: 1,
        Loss.TRUNCATED: 1,
        Loss.ERROR_STATUS: 3,
        Loss.UNKNOWN_MODEL: 1,
        Loss.CLIENT_ABORT: 5,
    }
    of_words = {Loss.HELD_BYTES: 1, Loss.ERROR_STATUS: 2, Loss.CLIENT_ABORT: 3}
    assert count.models == {
        "words": ModelCount(taken=6, lost=of_words, configured=True),
        "idle": ModelCount(taken=0, configured=True),
    }
    assert unknown == ["other"]
    assert count.taken - sum(count.lost.values()) == 0


@pytest.mark.unit
def test_a_paused_model_loses_nothing_and_a_sender_reports_on_its_own_models_alone() -> None:
    """What is paused is left out, and what a sender says of another's model is no traffic, whether or not it is configured."""
    settled = LiveConfig.of(Config(models=(Model(name="words"),)))
    counters = Counters.create(2, len(settled.rows))
    slot = counters.slot(1)
    recorder = Recorder(settled, identity_of(SECRETS, "b" * 32, {}))
    desk = CapturePipeline(recorder, Publisher(settled.config, slot, CLOCK), slot, settled.rows)
    counters.slot(0).add(0, Count.TAKEN, 3)
    desk.paused = Paused(models=frozenset({"words"}))
    handle(desk, lost=Loss.TRUNCATED, path="/v1/completions", request={"model": "words", "prompt": "a"})
    mine = Origin(way=Way.INTAKE, caller="team-a", models=("a-*",))
    for name in ("words", "other"):
        meta, request, _ = raw_exchange(
            lost=Loss.UNPAIRED, path="/v1/completions", request={"model": name, "prompt": "a"}
        )
        desk.handle(msgspec.structs.replace(meta, origin=mine), memoryview(request), memoryview(b""))
    (count,) = counters.strata(settled.rows)
    assert (count.taken, count.thinned, count.lost) == (1, 1, {})
    assert slot.gauge(Gauge.MODEL_DENIED) == 2


@pytest.mark.unit
@pytest.mark.parametrize("adapter", ["", "nowhere:adapter"])
async def test_a_worker_may_be_the_first_to_know_of_a_model(tmp_path: Path, adapter: str) -> None:
    """Its frames are in step: a row that is new is looked up, and counted, also where its model cannot be captured."""
    config = Config(models=MODELS)
    settled = LiveConfig.of(config)
    counters = Counters.create(2, 8)
    origin = identity_of(SECRETS, "b" * 32, {})
    office = CaptureService(
        LiveConfigFile(write_live_config(settled, tmp_path)),
        origin,
        PolicyFile(tmp_path / "policy"),
        counters,
        CLOCK,
    )
    meta, request, response = raw_exchange(epoch=policy_at(config.sampling, CLOCK.now().timestamp()).epoch)
    office._handle(meta, memoryview(request), memoryview(response))
    more = msgspec.structs.replace(config, models=(*MODELS, Model(name="new", adapter=adapter)))
    new = LiveConfig.of(more, settled.rows)
    write_live_config(new, tmp_path)
    there = msgspec.structs.replace(meta, stratum=new.rows_by_model["new"][0])
    office._handle(there, memoryview(request), memoryview(response))
    slot = counters.slot(1)
    assert slot.count(there.stratum, Count.HANDED) == 1
    with pytest.raises(ValueError, match="no row 7"):
        office._handle(msgspec.structs.replace(meta, stratum=7), memoryview(request), memoryview(response))


@pytest.mark.unit
def test_a_limit_is_not_refilled_by_a_configuration_that_keeps_it() -> None:
    """A file that is touched every second must not let more through than the cap says."""
    config = Config(models=MODELS, sampling=SamplingOptions(max_exchanges_per_s=1))
    counters = Counters.create(1, 1)
    publisher = Publisher(config, counters.slot(0), CLOCK)
    recorder = Recorder(LiveConfig.of(config), identity_of(SECRETS, "b" * 32, {}))
    desk = CapturePipeline(recorder, publisher, counters.slot(0), (Row("default"),))
    handle(desk)
    publisher.reconfigure(config)
    handle(desk)
    assert counters.slot(0).lost_count(0, Loss.RATE_CAP) == 1
