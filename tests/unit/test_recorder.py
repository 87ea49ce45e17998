"""From a raw exchange to its record, or to the reason why there is none."""

import gzip
import json
import zlib
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from quantdrift.core.config.schema import Capture, Config, Model, SamplingOptions, Sidecar
from quantdrift.core.records import BodyStratum, Exchange, HeaderStratum, Latency, Loss, Predicate, Way
from quantdrift.core.sampling.rates import policy_of
from quantdrift.core.tasks import Task
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity, latency_of
from quantdrift.sidecar.handoff.frame import Origin
from quantdrift.sidecar.protocols.decoder import DecodedResponse
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.policy import PolicyHistory
from tests.support.sidecar.policy_messages import directive
from tests.support.sidecar.raw_exchanges import ID, REQUEST, RESPONSE, raw_exchange, recorded_by

pytestmark = pytest.mark.unit

CONFIG = Config(
    models=(Model(name="digits"),),
    capture=Capture(headers=("x-scanner",), parameters=("tenant",)),
    sidecar=Sidecar(max_exchange_bytes=4096),
    sampling=SamplingOptions(
        header_strata=(HeaderStratum(name="faint", rate=1.0, headers={"x-scanner": "faint"}),),
        body_rate=0.0,
        body_strata=(
            BodyStratum(
                name="unsure", rate=1.0, where=(Predicate(key="feature.candidate_margin", high=0.99),)
            ),
        ),
    ),
)
ORIGIN = SidecarIdentity(source="pod-1", version="", salt=b"salt", hmac_key=b"")


def record(config: Config = CONFIG, origin: SidecarIdentity = ORIGIN, **given: Any) -> Exchange | None:
    """Return what the recorder makes of a raw exchange."""
    meta, request, response = raw_exchange(**given)
    return recorded_by(Recorder(LiveConfig.of(config), origin), meta, request, response)


def recorded(config: Config = CONFIG, origin: SidecarIdentity = ORIGIN, **given: Any) -> Exchange:
    """Return the record of a raw exchange that is kept."""
    exchange = record(config, origin, **given)
    assert exchange is not None
    return exchange


def test_a_record_says_what_was_exchanged_and_how_it_was_taken() -> None:
    """Tensors, attributes, times, trace and the whole sampling history are in it."""
    exchange = recorded(
        headers={
            "X-Scanner": "faint",
            "Cookie": "secret",
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        },
        request={**REQUEST, "parameters": {"tenant": "t", "other": "u"}},
        pi1=0.5,
        epoch="e9",
    )
    assert (exchange.id, exchange.source, exchange.model, exchange.protocol) == (
        ID,
        "pod-1",
        "digits",
        "oip-v2-rest",
    )
    assert exchange.attributes == {"header.x-scanner": "faint", "parameter.tenant": "t"}
    assert exchange.trace == "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert abs((datetime.now(UTC) - exchange.captured_at).total_seconds()) < 60
    assert exchange.inputs[0].shape == (1, 2)
    assert exchange.outputs[0].name == "y"
    sampling = exchange.sampling
    assert sampling.policy == policy_of(CONFIG.sampling, "e9")
    assert (sampling.header_stratum, sampling.body_stratum) == ("faint", "unsure")
    assert (sampling.pi1, sampling.pi2, sampling.u1) == (0.5, 1.0, 0.25)
    assert 0 <= sampling.u2 < sampling.pi2


def test_the_second_phase_lets_exchanges_go() -> None:
    """A base rate of 0 keeps nothing but what a stratum by the candidate's margin asks for."""
    sure = {"outputs": [{**RESPONSE["outputs"][0], "data": [0, 0, 99]}]}  # type: ignore[dict-item]
    unsure = {"outputs": [{**RESPONSE["outputs"][0], "data": [0, 0, 0]}]}  # type: ignore[dict-item]
    assert record(response=sure) is None
    assert record(response=unsure) is not None


def test_bodies_are_read_through_their_codings() -> None:
    """A compressed request and a response that is compressed and chunked are understood."""
    body = zlib.compress(json.dumps(RESPONSE).encode())
    exchange = recorded(
        request=gzip.compress(json.dumps(REQUEST).encode(), mtime=0),
        headers={"Content-Encoding": "gzip"},
        response=f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n",
        response_headers={"Transfer-Encoding": "chunked", "Content-Encoding": "deflate"},
    )
    assert exchange.outputs[0].shape == (1, 3)


def test_the_version_is_the_first_one_given() -> None:
    """Response, path, configuration, environment, in this order; else `unversioned`."""
    answered = {**RESPONSE, "model_version": "7"}
    path = "/v2/models/digits/versions/6/infer"
    configured = msgspec.structs.replace(CONFIG, models=(Model(name="digits", version="5"),))
    origin = msgspec.structs.replace(ORIGIN, version="4")
    assert recorded(configured, origin, path=path, response=answered).version == "7"
    assert recorded(configured, origin, path=path).version == "6"
    assert recorded(configured, origin).version == "5"
    assert recorded(CONFIG, origin).version == "4"
    assert recorded().version == "unversioned"


def test_recorded_attributes_can_be_stored() -> None:
    """A version comes from the wire: Postgres takes no NUL, and no key of a megabyte."""
    answered = {**RESPONSE, "model_version": "7\0" + "x" * 5000}
    config = msgspec.structs.replace(CONFIG, sidecar=Sidecar())
    exchange = recorded(config, response=answered, headers={"traceparent": "00-a\0b"})
    assert exchange.version == "7" + "x" * 127
    assert not exchange.trace
    assert recorded(path="/v2/models/digits/versions/%00/infer").version == "unversioned"


def test_requests_of_one_user_are_one_group() -> None:
    """With a sticky header the group is its keyed hash; without one an exchange stands for itself."""
    sticky = msgspec.structs.replace(
        CONFIG, sampling=msgspec.structs.replace(CONFIG.sampling, sticky_header="X-User")
    )
    first, again, other = (recorded(sticky, headers={"X-User": user}).group for user in ("a", "a", "b"))
    assert first == again != other
    assert len(first) == 32
    assert recorded(sticky).group == ""
    assert recorded(headers={"X-User": "a"}).group == ""


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (Loss.ERROR_STATUS, {"status": "500 Oops", "response": b"oops"}),
        (Loss.ERROR_STATUS, {"status": "302 Found"}),
        (Loss.UNKNOWN_MODEL, {"path": "/v2/models/other/infer"}),
        (Loss.DECODE, {"path": "/v2/models/digits/generate"}),
        (Loss.DECODE, {"request": b"{"}),
        (Loss.DECODE, {"response": b"{"}),
        (Loss.METADATA, {"headers": {"Inference-Header-Content-Length": "0"}}),
        (Loss.METADATA, {"path": "/predictions/digits"}),
        (Loss.DECODE, {"headers": {"Content-Encoding": "br"}}),
        (Loss.SEQUENCE, {"request": {**REQUEST, "parameters": {"sequence_id": 1}}}),
        (
            Loss.SHARED_MEMORY,
            {"request": {**REQUEST, "outputs": [{"parameters": {"shared_memory_region": "r"}}]}},
        ),
        (Loss.TOO_LARGE, {"request": b'{"inputs":[' + b"[]," * 600 + b"[]]}"}),
        (Loss.TOO_LARGE, {"response": b"{" + b'"a":[],' * 300 + b'"b":{}}'}),
        (Loss.TOO_LARGE, {"request": b" " * 2500 + json.dumps(REQUEST).encode(), "response": b" " * 2500}),
        (
            Loss.TOO_LARGE,
            {"request": gzip.compress(b" " * 5000, mtime=0), "headers": {"Content-Encoding": "gzip"}},
        ),
    ],
    ids=lambda _: "case",
)
def test_every_loss_has_its_reason(loss: Loss, given: dict[str, Any]) -> None:
    """What cannot be used is told apart."""
    with pytest.raises(LostError) as caught:
        record(**given)
    assert caught.value.loss is loss


@pytest.mark.parametrize(("zone", "kept"), [("UTC", False), ("Asia/Tokyo", True)])
def test_a_boost_of_the_weekend_takes_what_was_captured_then(zone: str, *, kept: bool) -> None:
    """Friday, 20:00 UTC, is Saturday in Tokyo; the record has no attribute for it."""
    friday_ns = int(datetime(2026, 11, 20, 20, 0, tzinfo=UTC).timestamp()) * 1_000_000_000
    boost = BodyStratum(name="weekend", rate=1.0, where=(Predicate(key="time.week", equals="weekend"),))
    config = msgspec.structs.replace(
        CONFIG,
        capture=msgspec.structs.replace(CONFIG.capture, time_zone=zone),
        sampling=msgspec.structs.replace(CONFIG.sampling, body_strata=(boost,)),
    )
    meta, request, response = raw_exchange()
    meta = msgspec.structs.replace(meta, captured_at_ns=friday_ns)
    exchange = recorded_by(Recorder(LiveConfig.of(config), ORIGIN), meta, request, response)
    assert (exchange is not None) == kept
    assert exchange is None or not any(key.startswith("time.") for key in exchange.attributes)


def test_an_epoch_of_the_monitor_has_the_rates_of_its_directive() -> None:
    """Also when another is in force by then; one that nobody knows any more costs the exchange, and is counted."""
    rates = (0.5, 0.25)
    config = msgspec.structs.replace(
        CONFIG, sampling=msgspec.structs.replace(CONFIG.sampling, body_strata=(), body_rate=0.0)
    )
    directives = PolicyHistory(config.sampling)
    drawn = directive(*rates, config=config, issued_at=datetime.now(UTC))
    directives.follow(drawn)
    directives.follow(directive(0.125, 0.125, config=config, issued_at=datetime.now(UTC)))
    recorder = Recorder(LiveConfig.of(config), ORIGIN, directives)
    meta, request, response = raw_exchange(epoch=f"4d-{drawn.policy.epoch}", pi1=rates[0])
    exchange = recorded_by(recorder, meta, request, response)
    assert exchange is not None
    assert exchange.sampling.policy.header_strata == drawn.policy.header_strata
    assert exchange.sampling.policy.epoch == meta.epoch
    assert (
        recorded_by(recorder, *raw_exchange(epoch="4d-0123456789ab", pi1=1.0)) is None
    )  # the configuration's own rates
    with pytest.raises(LostError) as caught:
        recorded_by(recorder, *raw_exchange(epoch="4d-m0123456789a"))
    assert caught.value.loss is Loss.CAPTURE_ERROR


def test_an_empty_sticky_header_groups_nothing() -> None:
    """The relay draws such a request for itself, so it is an observation of its own."""
    sampling = msgspec.structs.replace(CONFIG.sampling, sticky_header="x-user")
    config = msgspec.structs.replace(CONFIG, sampling=sampling)
    assert recorded(config, headers={"x-user": ""}).group == ""
    assert recorded(config, headers={"x-user": "u"}).group != ""


def test_each_protocol_is_read_by_its_decoder() -> None:
    """The path tells which; a model's adapter is the one that is configured, and OpenAI's model is in the body."""
    config = Config(models=(Model(name="digits", adapter="bytes"), Model(name="a/b")))
    v1 = recorded(
        config, path="/v1/models/digits:predict", request={"instances": [1]}, response={"predictions": [2]}
    )
    assert (v1.protocol, v1.inputs[0].name, v1.outputs[0].name) == ("kserve-v1", "instances", "predictions")
    served = recorded(config, path="/predictions/digits/7", request=b"a", response=b"b")
    assert (served.protocol, served.version) == ("torchserve", "7")
    assert served.inputs[0].data == b"\x01\0\0\0a"
    said = recorded(
        config,
        path="/v1/completions",
        request={"model": "a/b", "prompt": "p", "user": "u"},
        response={"choices": [{"index": 0, "text": "t"}]},
    )
    assert (said.protocol, said.model) == ("openai-completions", "a/b")
    assert [tensor.name for tensor in said.inputs] == ["prompt", "options"]


def test_the_latency_of_a_stream_has_its_first_token_and_the_time_of_the_others() -> None:
    """Of a whole answer only the last byte says anything, and only what the relay measured counts."""
    meta, _, _ = raw_exchange()
    timed = msgspec.structs.replace(meta, latency_s=2.5, first_byte_s=0.5)
    whole = DecodedResponse(version="", outputs=(), n_tokens=5)
    stream = msgspec.structs.replace(whole, is_stream=True)
    assert latency_of(timed, whole) == Latency(last_byte_s=2.5)
    assert latency_of(timed, stream) == Latency(last_byte_s=2.5, first_token_s=0.5, per_token_s=0.5)
    assert latency_of(timed, msgspec.structs.replace(stream, n_tokens=1)) == Latency(
        last_byte_s=2.5, first_token_s=0.5
    )
    assert latency_of(meta, stream) is None
    tapped = msgspec.structs.replace(timed, origin=Origin(way=Way.TAP))
    assert latency_of(tapped, stream) is None


CHAT = {"model": "assistant-latest", "messages": [{"role": "user", "content": "what drifts?"}]}
ANSWERED = {
    "model": "assistant",
    "system_fingerprint": "vllm-0.32.0-1e161342",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a mean"}, "finish_reason": "stop"}],
}


@pytest.mark.parametrize(
    ("source", "version"),
    [
        ("", "configured"),
        ("system_fingerprint", "vllm-0.32.0-1e161342"),
        ("header.X-Model-Version", "2026-11-27"),
        ("header.x-absent", "configured"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_version_is_named_by_what_the_configuration_says(
    source: str, version: str, *, streamed: bool
) -> None:
    """A server that is deployed anew under the same name says so in its fingerprint or in a header alone."""
    model = Model(
        name="assistant",
        task=Task.GENERATION,
        version="configured",
        aliases=("assistant-latest",),
        version_from=source,
    )
    piece = msgspec.json.encode(ANSWERED).replace(b'"message"', b'"delta"')
    exchange = recorded(
        Config(models=(model,)),
        request=CHAT,
        response=b"data: %b\n\ndata: [DONE]\n\n" % piece if streamed else ANSWERED,
        path="/v1/chat/completions",
        response_headers={"X-Model-Version": "2026-11-27"},
    )
    assert (exchange.model, exchange.version) == ("assistant", version)


def test_a_model_has_other_names() -> None:
    """In the path and in the relay's table of counts, too."""
    config = Config(models=(Model(name="numbers", aliases=("digits", "ziffern")),))
    assert recorded(config).model == "numbers"
    rows = LiveConfig.of(config).rows_by_model
    assert rows["digits"] == rows["ziffern"] == rows["numbers"] != rows[""]
