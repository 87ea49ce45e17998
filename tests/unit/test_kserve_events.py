"""CloudEvents of the KServe logger: parsed, or refused with a reason."""

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from cloudevents.core.bindings.http import to_binary_event
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from tritonclient.http import InferenceServerClient, InferInput

from quantdrift.sidecar.intake.kserve_events import (
    EventError,
    Half,
    KserveEvent,
    json_end,
    read_event,
    target_of,
    with_json_length,
)

pytestmark = pytest.mark.unit

KIND = "org.kubeflow.serving.inference.request"


def headers_of(**attributes: Any) -> CIMultiDict[str]:
    """Return the headers of an event as a client library writes them."""
    told = {"type": KIND, "source": "http://localhost:9081/", "id": "1", "specversion": "1.0", **attributes}
    return CIMultiDict(to_binary_event(CloudEvent(told, b"{}")).headers)


def event(kind: str = "application/json", service: str = "iris") -> KserveEvent:
    """Return a request's event."""
    found = read_event(headers_of(inferenceservicename=service, datacontenttype=kind))
    assert found is not None
    return found


def test_an_event_has_its_key_and_the_forwarded_headers() -> None:
    """The id alone is the client's: namespace, service and component belong to the key; metadata holds the headers."""
    metadata = json.dumps({"X-Scanner": ["faint", "old"], "X-User": "ü"})
    found = read_event(
        headers_of(
            inferenceservicename="iris",
            namespace="prod",
            component="predictor",
            metadata=metadata,
            datacontenttype="application/json",
        )
    )
    assert found is not None
    assert found.half is Half.REQUEST
    assert found.key == ("prod", "iris", "predictor", "1")
    assert dict(found.headers) == {
        "x-scanner": "faint, old",
        "x-user": "ü",
        "content-type": "application/json",
    }


def test_metadata_that_is_not_percent_encoded_is_read_too() -> None:
    """Not every logger follows the binding."""
    raw = headers_of(inferenceservicename="iris")
    raw["Ce-Metadata"] = '{"X-Scanner":["faint"]}'
    found = read_event(raw)
    assert found is not None
    assert found.headers["x-scanner"] == "faint"


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '{"a": [1]}', "x" * 70_000, "%zz"])
def test_invalid_metadata_is_ignored(text: str) -> None:
    """It is the client's, and costs nothing else."""
    raw = headers_of(inferenceservicename="iris")
    raw["Ce-Metadata"] = text
    found = read_event(raw)
    assert found is not None
    assert "a" not in found.headers


def test_other_events_are_ignored_and_one_without_a_name_is_refused() -> None:
    """Outlier detectors send to the same sink."""
    assert read_event(headers_of(type="org.kubeflow.serving.inference.outlier")) is None
    assert read_event(CIMultiDict({"Content-Type": "text/plain"})) is None
    with pytest.raises(EventError, match="inferenceservicename"):
        read_event(headers_of())


@pytest.mark.parametrize(
    ("document", "target"),
    [
        ({"instances": [[1, 2]]}, "/v1/models/iris:predict"),
        ({"inputs": {"a": [1]}}, "/v1/models/iris:predict"),
        (
            {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]},
            "/v2/models/iris/infer",
        ),
        ({"model": "m", "messages": []}, "/v1/chat/completions"),
        ({"model": "m", "prompt": "a"}, "/v1/completions"),
        ({"model": "m", "input": "a"}, "/v1/embeddings"),
    ],
)
def test_the_protocol_follows_from_the_body(document: Any, target: str) -> None:
    """The path is gone."""
    assert target_of(event(), json.dumps(document).encode()) == target


def test_a_name_is_quoted_and_grpc_has_one_path() -> None:
    """What comes out is a path whatever the service is called."""
    assert target_of(event(service="a b/c"), b'{"instances":[1]}') == "/v1/models/a%20b%2Fc:predict"
    assert target_of(event("application/grpc"), b"\0\0\0\0\0") == "/inference.GRPCInferenceService/ModelInfer"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"x", b'{"a":1}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_in_no_protocol_is_refused(body: bytes) -> None:
    """It is never guessed."""
    with pytest.raises(EventError):
        target_of(event(), body)


def test_the_end_of_the_json_part_is_found_and_checked() -> None:
    """The length header is not forwarded, and a stale one is not believed; multi-byte characters do not shift it."""
    made = InferInput("größe", [4], "FP32")
    made.set_data_from_numpy(np.arange(4, dtype="<f4"), binary_data=True)
    body, length = InferenceServerClient.generate_request_body([made])
    assert json_end(body) == length
    assert target_of(event(), body) == "/v2/models/iris/infer"
    told = with_json_length({"a": "b", "inference-header-content-length": "1"}, body)
    assert told == {"a": "b", "inference-header-content-length": str(length)}
    with pytest.raises(EventError):
        with_json_length({}, body + b"\0")
    assert with_json_length({}, b'{"inputs":[]} \n') == {}


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_a_document_that_is_nested_too_deep_is_refused_like_any_other(depth: int) -> None:
    """Whoever has taken its request must hear of it, and count it."""
    body = b'{"inputs":' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(EventError):
        target_of(event(), body)
    with contextlib.suppress(EventError):
        with_json_length({}, body)


@given(
    document=st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=3), max_size=3),
    rest=st.binary(min_size=1, max_size=20).filter(lambda rest: rest.strip() != b""),
    is_ascii=st.booleans(),
)
def test_the_end_is_found_whatever_is_in_strings_and_follows(
    document: dict[str, Any], rest: bytes, *, is_ascii: bool
) -> None:
    """Brackets, quotes and backslashes in text are text."""
    part = json.dumps(document, ensure_ascii=is_ascii).encode(errors="replace")
    assert json_end(part + rest) == len(part)


def test_what_never_ends_is_given_up() -> None:
    """Without building what was read so far, and without looking at anything twice."""
    for body in (b"{" + b"[]," * 1_000_000, b'{"' + b'\\"' * 1_000_000, b'{"a\\', b"[]x", b"x"):
        assert json_end(body) == 0
