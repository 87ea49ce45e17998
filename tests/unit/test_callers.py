"""The file of the intake's callers: names, hashes of tokens, models and expiry; and how it changes while it is used."""

import hashlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from quantdrift.core.clock import ManualClock, SystemClock
from quantdrift.core.config import Config, Model, Secrets
from quantdrift.core.config.callers import (
    ALL_SCOPES,
    THE_TOKEN,
    TokenScope,
    find_caller,
    find_certificate,
    find_user,
    read_callers,
)
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Way
from quantdrift.core.sampling.rates import policy_at
from quantdrift.sidecar.capture.pipeline import CapturePipeline
from quantdrift.sidecar.capture.process import identity_of
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.handoff.frame import RELAYED, Origin, frame
from quantdrift.sidecar.intake.callers import CallersFile
from quantdrift.sidecar.intake.gateway import Gateway
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row
from tests.support.shadow.onnx_models import exchange_of, inputs_of, logits_of
from tests.support.sidecar.raw_exchanges import raw_exchange
from tests.support.sidecar.relay_rig import Bench

pytestmark = pytest.mark.unit

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def line(name: str, token: str, *rest: str) -> str:
    """Return a line of the file."""
    return " ".join([name, "sha256:" + hashlib.sha256(token.encode()).hexdigest(), *rest])


def test_a_file_with_one_word_is_a_token_for_all_models() -> None:
    """As before there were names: an end of line does not belong to it."""
    callers = read_callers("t0ken\n", "file")
    found = find_caller(callers, "t0ken", NOW)
    assert found is not None
    assert (found.name, found.models, found.until) == (THE_TOKEN, (), None)
    assert find_caller(callers, "t0ke", NOW) is None
    assert find_caller(callers, "", NOW) is None
    assert read_callers("", "file") == ()


def test_callers_have_models_and_may_have_several_tokens() -> None:
    """An old and a new token are valid at once, until the old one expires."""
    callers = read_callers(
        "\n".join(
            [
                "# gateways",
                "",
                line("gateway", "old", "until=2026-01-01T01:00+01:00", "digits", "words-*"),
                line("gateway", "new", "digits"),
                line("batch", "other"),
            ]
        ),
        "file",
    )
    before = NOW - timedelta(seconds=1)
    old = find_caller(callers, "old", before)
    assert old is not None
    assert (old.name, old.models) == ("gateway", ("digits", "words-*"))
    assert find_caller(callers, "old", NOW) is None
    new, other = find_caller(callers, "new", NOW), find_caller(callers, "other", NOW)
    assert new is not None
    assert new.name == "gateway"
    assert other is not None
    assert other.models == ()
    assert "sha256" not in repr(callers)


def test_a_token_may_be_for_some_things_only() -> None:
    """Without `may=` it is for all; a word that is unknown is refused."""
    callers = read_callers(
        line("a", "x", "until=2026-02-01T00:00Z", "may=read,labels", "digits") + "\n" + line("b", "y"), "file"
    )
    assert [caller.scopes for caller in callers] == [{TokenScope.READ, TokenScope.LABELS}, ALL_SCOPES]
    assert callers[0].models == ("digits",)
    with pytest.raises(
        OperatorError, match="line 1: may= names something unknown: write one or more of read,"
    ):
        read_callers(line("a", "x", "may=everything") + "\n" + line("b", "y"), "file")


def test_a_caller_may_be_a_certificate_or_a_user_of_a_tap() -> None:
    """Each is bound to models and may expire; neither is a token, and an empty name or token matches no line."""
    callers = read_callers(
        "server uid:1000 until=2026-01-01T00:00Z digits\nbatch uid:1001\n"
        "gateway cert:gateway.example words-*\nmesh cert:spiffe://example/ns/a/sa/b digits\n",
        "file",
    )
    before = NOW - timedelta(seconds=1)
    server, batch = find_user(callers, 1000, before), find_user(callers, 1001, NOW)
    assert server is not None
    assert batch is not None
    assert (server.name, server.models, batch.name, batch.models) == ("server", ("digits",), "batch", ())
    assert find_user(callers, 1000, NOW) is None
    assert find_user(callers, 0, NOW) is None
    mesh = find_certificate(callers, {"other", "spiffe://example/ns/a/sa/b"}, NOW)
    assert mesh is not None
    assert (mesh.name, mesh.models) == ("mesh", ("digits",))
    assert find_certificate(callers, {"", "gateway.example.evil"}, NOW) is None
    assert find_caller(callers, "", NOW) is None
    assert find_caller(callers, "gateway.example", NOW) is None


def test_a_certificate_of_a_caller_counts_until_it_expires() -> None:
    """A connection may stay open for longer. The common name counts only where there is no other name."""
    clock = ManualClock(NOW)
    file = CallersFile("gateway cert:gateway digits\nmesh cert:spiffe://a/b", "", clock)
    subject = ((("commonName", "gateway"),),)
    by_name = {"notAfter": "Jan  1 00:00:01 2026 GMT", "subject": subject}
    found = file.find_certificate(by_name)
    assert found is not None
    assert found.models == ("digits",)
    named = by_name | {"subjectAltName": (("DNS", "other"),)}
    assert file.find_certificate(named) is None
    other = file.find_certificate(named | {"subjectAltName": (("DNS", "other"), ("URI", "spiffe://a/b"))})
    assert other is not None
    assert other.name == "mesh"
    assert file.find_certificate(by_name | {"subjectAltName": (("IP Address", "gateway"),)}) is not None
    clock.advance(1.0)
    assert file.find_certificate(by_name) is None
    assert file.find_certificate({}) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gateway s3cret digits", "no hash of a token"),
        ("gateway sha256:abc", "no hash of a token"),
        ("server uid:root digits", "no hash of a token"),
        ("server uid: digits", "no hash of a token"),
        ("gateway cert: digits", "no hash of a token"),
        (line("ga$teway", "s3cret"), "a caller's name"),
        (line("gateway", "s3cret", "until=soon"), "until= is no time"),
        (line("gateway", "s3cret", "until=2027-01-01T00:00"), "offset from UTC"),
        (line("gateway", "s3cret", *["m" * 100] * 11), "more than 1024 bytes"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_by_its_number_alone(text: str, said: str) -> None:
    """What is in it may be a token."""
    with pytest.raises(OperatorError, match=f"file, line 2: .*{said}") as error:
        read_callers(f"# callers\n{text}", "file")
    assert "s3cret" not in str(error.value)


def test_a_changed_file_is_used_within_a_second_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CallersFile that were taken away are refused, new ones are valid; the log says why a file is refused."""
    file, clock = tmp_path / "callers", ManualClock(NOW)
    tokens = CallersFile(line("a", "first"), str(file), clock)

    def valid() -> set[str]:
        clock.advance(1.0)
        return {token for token in ("first", "second") if tokens.find(token)}

    assert valid() == {"first"}  # there is no file any more
    file.write_text(f"{line('a', 'first')}\n{line('a', 'second')}\n")
    assert valid() == {"first", "second"}
    file.write_text(line("a", "second"))
    assert valid() == {"second"}
    file.write_text("a no-hash")
    assert valid() == {"second"}
    assert "line 1" in caplog.text
    file.write_text("")
    assert valid() == {"second"}


@pytest.mark.parametrize(
    ("models", "is_allowed"), [(("digits",), False), (("wor*", "digits"), True), ((), True)]
)
def test_a_model_that_only_the_body_names_is_checked_by_the_capture_process(
    models: tuple[str, ...], *, is_allowed: bool
) -> None:
    """An exchange that its sender may not report is no traffic of that model: neither offered nor lost."""
    config = Config(models=(Model(name="words"),))
    counters, rows = Counters.create(2, 1), (Row("default"),)
    for count in (Count.OFFERED, Count.TAKEN):
        counters.slot(0).add(0, count)
    slot = counters.slot(1)
    recorder = Recorder(LiveConfig.of(config), identity_of(Secrets(), "b" * 32, {}))
    pipeline = CapturePipeline(recorder, Publisher(config, slot, SystemClock()), slot, rows)
    meta, request, response = raw_exchange(
        path="/v1/completions",
        request={"model": "words", "prompt": "a"},
        response={"model": "words", "choices": [{"index": 0, "text": "b"}]},
        epoch=policy_at(config.sampling, time.time()).epoch,
    )
    meta = msgspec.structs.replace(meta, origin=Origin(Way.INTAKE, "gateway", models))
    pipeline.handle(meta, memoryview(request), memoryview(response))
    assert slot.gauge(Gauge.MODEL_DENIED) == (not is_allowed)
    (stratum,) = counters.strata(rows)
    assert (stratum.offered, stratum.taken, stratum.lost) == (is_allowed, is_allowed, {})
    assert (slot.gauge(Gauge.QUEUE_BYTES) > 0) is is_allowed


def test_what_a_tap_writes_about_itself_is_not_believed() -> None:
    """It makes its frames itself, and could say that the relay saw them."""
    bench = Bench()
    meta, request, response = raw_exchange()
    assert meta.origin == RELAYED
    Gateway(bench.scope).forward_frame(b"".join(frame(meta, [request, response])), 1, Origin(Way.TAP))
    (taken,) = bench.taken
    assert taken.meta == msgspec.structs.replace(meta, origin=Origin(Way.TAP))
    assert (taken.request, taken.response) == (request, response)


@pytest.mark.parametrize(
    ("way", "caller", "version", "stored"),
    [
        (Way.RELAY, "", "7", "7"),
        (Way.RELAY, "", "7 (unverified) (unverified)", "7"),
        (Way.INTAKE, "gateway", "7", "7"),
        (Way.TAP, "uid 1000", "7", "7"),
        (Way.TAP, "", "7", "7 (unverified)"),
        (Way.EXT_PROC, "", "7 (unverified)", "7 (unverified)"),
    ],
)
def test_the_way_in_and_the_caller_decide_which_version_an_exchange_counts_for(
    way: Way, caller: str, version: str, stored: str
) -> None:
    """A client that names a version in its path can neither page for another one nor leave the one that can page."""
    exchange = exchange_of(inputs_of(1), logits_of(inputs_of(1)), version=version)
    assert msgspec.structs.replace(exchange, way=way, caller=caller).stored_version == stored
