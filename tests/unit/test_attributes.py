"""Which values leave the pod, and in which form."""

import hashlib
import hmac
import json

import pytest

from quantdrift.core.config.schema import Capture
from quantdrift.sidecar.capture.attributes import Attributes, KeyedHash, cut

pytestmark = pytest.mark.unit

CAPTURE = Capture(
    headers=("x-scanner", "x-user", "x-absent"),
    parameters=("tenant", "count"),
    json=("meta.tags.1", "meta.deep", "meta.tags.9", "inputs.0.name", "meta.none"),
    hmac=("header.x-user",),
)
DOCUMENT = {
    "meta": {"tags": ["a", True], "deep": {"k": [1]}, "none": None},
    "inputs": [{"name": "x", "data": [1]}],
}


def test_only_what_is_named_is_recorded() -> None:
    """Headers, parameters and paths that are named and there are recorded; nothing else is."""
    found = Attributes(CAPTURE, KeyedHash(b"key"), max_value_bytes=8).pick(
        {"x-scanner": "faint", "x-user": "ann", "authorization": "secret"},
        {"tenant": "t", "count": 3, "other": 1},
        DOCUMENT,
    )
    assert found == {
        "header.x-scanner": "faint",
        "header.x-user": hmac.new(b"key", b"ann", hashlib.sha256).hexdigest()[:32],
        "parameter.tenant": "t",
        "parameter.count": "3",
        "json.meta.tags.1": "true",
        "json.meta.deep": '{"k":[1]',
        "json.inputs.0.name": "x",
    }


def test_a_hash_is_of_the_whole_value() -> None:
    """Values that differ only behind the cut have different hashes; the hash itself is not cut."""
    attributes = Attributes(CAPTURE, KeyedHash(b"key"), max_value_bytes=8)
    first, second = (
        attributes.pick({"x-user": "x" * 20 + tail}, {}, {})["header.x-user"] for tail in ("a", "b")
    )
    assert first != second
    assert len(first) == 32


def test_values_are_cut_between_characters_and_hold_no_control_characters() -> None:
    """A cut never leaves half a character, and Postgres gets no NUL."""
    assert cut("ab€cd", 4) == "ab"
    assert cut("ab€cd", 5) == "ab€"
    assert cut("a\ud800b", 5) == "ab"
    found = Attributes(CAPTURE, KeyedHash(b""), max_value_bytes=8).pick({"x-scanner": "a\x00b\x7fc"}, {}, {})
    assert found == {"header.x-scanner": "abc"}


def test_a_lone_surrogate_costs_itself_alone() -> None:
    """JSON can write one, UTF-8 cannot: in lists and objects, too, it is left out of the text and kept in the hash."""
    capture = Capture(json=("a", "b"), hmac=("json.b",))
    document = json.loads(rb'{"a": ["x\ud800\u00e9", {"k\udfff": 1.5}], "b": ["\ud800"]}')
    found = Attributes(capture, KeyedHash(b"key")).pick({}, {}, document)
    assert found["json.a"] == '["x\u00e9",{"k":1.5}]'
    other = Attributes(capture, KeyedHash(b"key")).pick({}, {}, {"b": ["\ud801"]})
    assert found["json.b"] != other["json.b"]
