"""Texts from outside never change how a terminal, a log or a page shows what is around them, and errors quote no values."""

import io
import logging
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quantdrift.core.codec import encode
from quantdrift.core.logs import setup_logs
from quantdrift.core.text import in_one_line, plain, plain_lines, traceparent, unmarked
from quantdrift.models.runtimes.protocol import failure_text
from quantdrift.shadow.pipeline.validate import read_exchange
from quantdrift.sidecar.capture.attributes import cut
from tests.support.shadow.onnx_models import exchange_of

pytestmark = pytest.mark.unit

HOSTILE = "a\x1b[2J\x9b31m\u202eb\u2066c\nd\x00\u2028e"
SECRET = "DE89 3704 0044 0532 0130 00"
INPUTS = np.zeros((1, 4), dtype=np.float32)


def is_safe(text: str) -> bool:
    """Return whether a text has no character that changes what is around it."""
    return not any(character in text for character in "\x00\x1b\x9b\r\u202e\u2066\u2028")


def test_a_trace_is_a_traceparent_or_nothing() -> None:
    """Clients may write anything into the header, and it is stored and becomes a part of links in alerts."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert traceparent(trace) == trace
    assert traceparent(f"{trace}-of a later version") == trace
    for text in ("", SECRET, f"00-{SECRET}-b-01", trace.upper(), f"{trace}9", f" {trace}", "00-ab-cd-01"):
        assert not traceparent(text)
    forged = exchange_of(INPUTS)
    assert not read_exchange(encode(msgspec.structs.replace(forged, trace=f"00-{SECRET}-b-01"))).trace


def test_control_characters_and_direction_marks_are_replaced() -> None:
    """Letters of every script stay, and so do joiners within words."""
    assert plain(HOSTILE) == "a\ufffd[2J\ufffd31m\ufffdb\ufffdc\ufffdd\ufffd\ufffde"
    assert plain("Zürich 東京 עברית\u200d") == "Zürich 東京 עברית\u200d"
    assert plain("\ud800") == "\ufffd"
    assert plain("abcdef", 3) == "abc…"
    assert plain_lines("a\n\tb\x1b") == "a\n\tb\ufffd"


def test_only_links_below_our_own_address_stay_links() -> None:
    """Also beside those that begin as ours do and lead elsewhere."""
    own = "https://drift.example.com"
    text = f"see {own}/alert/12, {own}@evil.example, {own}.evil.example/x and a@b.example"
    broken = own.replace("://", ":\u2215\u2215")
    assert (
        unmarked(text, own)
        == f"see {own}/alert/12, {broken}@evil.example, {broken}.evil.example/x and a@b.example"
    )
    assert (
        unmarked("<https://e|ack> [a](https://e) @here")
        == "\u2039https:\u2215\u2215e|ack\u203a [a] (https:\u2215\u2215e) \uff20here"
    )


def test_an_attribute_is_recorded_without_them() -> None:
    """They are left out before anything is published."""
    assert cut(HOSTILE, 100) == "a[2J31mbcde"


def test_a_twin_that_looks_like_another_slice_is_the_same_slice() -> None:
    """What has no width is left out at capture; joiners stay in the scripts that are written with them."""
    twins = (
        "office\u200b",
        "\ufeffoffice",
        "of\u00adfice",
        "of\u200dfice",
        "office\u2060",
        "off\u3164ice",
        "office\ufe0f",
    )
    assert {cut(twin, 100) for twin in twins} == {"office"}
    persian = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert cut(persian, 100) == persian


def test_what_comes_from_the_stream_is_made_safe_before_it_is_stored() -> None:
    """Whoever can publish to the stream cannot put escape sequences into a name."""
    forged = exchange_of(INPUTS, version=HOSTILE, attributes={"header.x": HOSTILE, HOSTILE: "y"})
    read = read_exchange(encode(msgspec.structs.replace(forged, model=HOSTILE)))
    assert all(map(is_safe, (read.model, read.version, *read.attributes, *read.attributes.values())))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_line_has_none_of_them_and_no_message_of_an_exception(
    monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    """A traceback says where it was raised; the message of the exception may quote a request."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        setup_logs("info", as_json=as_json, role="capture")
        try:
            float(SECRET)
        except ValueError:
            logging.getLogger("t").exception("model %s failed", HOSTILE)
    finally:
        root.handlers[:], root.level = handlers, level
    text = written.getvalue()
    assert is_safe(text)
    assert SECRET not in text
    assert "ValueError" in text
    assert Path(__file__).stem in text


def test_a_failure_of_a_library_is_described_without_its_message() -> None:
    """The class, and the line or the node that failed, are enough to find the cause."""
    try:
        float(SECRET)
    except ValueError as error:
        text = failure_text(error)
    assert SECRET not in text
    assert text.startswith(f"ValueError in {Path(__file__).name}:")
    of_onnx = RuntimeError(
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running Gather node."
        f" Name:'/emb/Gather' Status Message: indices element out of data bounds, idx={SECRET}"
    )
    assert failure_text(of_onnx) == "RuntimeError INVALID_ARGUMENT in the node Gather `/emb/Gather`"


def test_an_error_of_several_lines_becomes_one() -> None:
    """The line of a file that a parser shows, with a mark below it, and a list of mistakes."""
    shown = "c.toml cannot be read: Expected ']' (at line 1, column 9)\n    [sidecar\n            ^"
    assert in_one_line(shown) == "c.toml cannot be read: Expected ']' (at line 1, column 9): `[sidecar`"
    assert (
        in_one_line("the configuration is wrong:\n  - one\n  - two") == "the configuration is wrong: one; two"
    )
