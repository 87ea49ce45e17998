"""What a process reports of its configuration and its pause: bounded, without secrets, and read with care."""

from datetime import UTC, datetime

import msgspec
import pytest

from quantdrift.core.codec import decode_tally, encode
from quantdrift.core.config.schema import Config, Model, Stream
from quantdrift.core.errors import QuarantineError
from quantdrift.core.process_state import MOST_BYTES, StateReports, bounded, read_state
from quantdrift.core.records import ProcessState, Tally
from quantdrift.core.sampling.pause import Order, Pause
from quantdrift.core.stream.tallies import read_tally

pytestmark = pytest.mark.unit

AT = datetime(2026, 1, 1, tzinfo=UTC)
STATE = ProcessState(digest="d" * 64, options={"sampling.rate": 0.5})
TALLY = Tally(source="pod", boot="b" * 32, sequence=1, at=AT, strata=(), blind_connections=0, state=STATE)


def test_a_report_has_the_options_in_effect_and_the_pause_and_no_credentials() -> None:
    """It follows a configuration that is reloaded, and a pause that ends."""
    configs = [Config(stream=Stream(url="nats://u:canary@h:1"))]
    pauses = [Pause(everything=Order(by="the admin port", at=AT))]
    reports = StateReports(lambda: configs[-1], lambda: pauses[-1])
    first = reports.take()
    assert first.options == {"stream.url": "nats://(not shown)"}
    assert first.pause is not None
    assert first.pause["everything"]["by"] == "the admin port"
    assert reports.take() == first
    configs.append(msgspec.structs.replace(configs[0], models=(Model(name="digits", share=0.5),)))
    pauses.append(Pause())
    second = reports.take()
    assert second.options["models.digits.share"] == 0.5
    assert second.pause is None
    assert second.digest != first.digest


def test_a_report_is_small_however_large_the_configuration_is() -> None:
    """Long values are replaced by their hash, then all values, then all options together: a change still shows."""
    assert bounded({"a": "x" * 2000, "b": 1})["b"] == 1
    many = {f"models.m{number}.share": "x" * 100 for number in range(300)}
    hashed = bounded({name: value * 8 for name, value in list(many.items())[:50]})
    assert len(hashed) == 50
    for options in ({"a": "x" * 2000}, many, {name * 9: 1 for name in many}):
        assert len(msgspec.json.encode(bounded(options))) <= MOST_BYTES // 4
        assert "xxxx" not in str(bounded({name: str(value) * 20 for name, value in options.items()}))
    assert bounded(many) != bounded(many | {"models.m7.share": "y"})


def test_what_comes_from_a_process_is_safe_to_store_and_to_show() -> None:
    """Control characters are replaced in names and values; what is too large, or has no digest, is refused."""
    dirty = ProcessState(digest="d" * 64, options={"a\x1b": ["\x00", {"b\u202e": 1.5}]}, pause={"c": None})
    clean = read_state(dirty)
    assert clean.options == {"a\ufffd": ["\ufffd", {"b\ufffd": 1.5}]}
    assert clean.pause == {"c": None}
    for bad in (
        ProcessState(digest="not one", options={}),
        ProcessState(digest="d" * 64, options={"a": "x" * MOST_BYTES}),
        ProcessState(digest="d" * 64, options={}, pause={"a": "x" * MOST_BYTES}),
    ):
        with pytest.raises(QuarantineError):
            read_tally(encode(msgspec.structs.replace(TALLY, state=bad)))


def test_a_tally_of_a_sidecar_that_reports_nothing_is_read() -> None:
    """A release before this field sends none; one that does not know it skips it."""
    wire = encode(TALLY)
    assert read_tally(wire).state == STATE
    fields = msgspec.msgpack.decode(wire[2:])
    del fields["state"]
    old = wire[:2] + msgspec.msgpack.encode(fields)
    assert read_tally(old) == msgspec.structs.replace(TALLY, state=None)
    assert decode_tally(wire[:2] + msgspec.msgpack.encode(fields | {"a_later_field": 1})).state is None
