"""Raw exchanges as a relay worker hands them over, for the tests of the capture process."""

import json
import time
from collections.abc import Mapping
from typing import Any

from quantdrift.core.records import Exchange, Loss
from quantdrift.sidecar.capture.recorder import Recorder
from quantdrift.sidecar.handoff.frame import RawMeta

ID = "0123456789abcdef0123456789abcdef"
REQUEST = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}
RESPONSE = {
    "model_name": "digits",
    "outputs": [{"name": "y", "shape": [1, 3], "datatype": "FP32", "data": [0.0, 1.0, 3.0]}],
}


def message(start: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """Return a message's bytes and how many of them are its head."""
    fields = {"Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    raw = f"{start}\r\n{head}\r\n".encode()
    return raw + body, len(raw)


def raw_exchange(
    *,
    request: Any = REQUEST,
    response: Any = RESPONSE,
    path: str = "/v2/models/digits/infer",
    status: str = "200 OK",
    headers: Mapping[str, str] | None = None,
    response_headers: Mapping[str, str] | None = None,
    exchange_id: str = ID,
    stratum: int = 0,
    epoch: str = "e1",
    pi1: float = 0.5,
    lost: Loss | None = None,
) -> tuple[RawMeta, bytes, bytes]:
    """Return meta, request and response; bodies that are not bytes are sent as JSON. What is lost already has no response."""
    sent = request if isinstance(request, bytes) else json.dumps(request).encode()
    got = response if isinstance(response, bytes) else json.dumps(response).encode()
    raw_request, request_head = message(f"POST {path} HTTP/1.1", sent, headers)
    raw_response, response_head = (b"", 0) if lost else message(f"HTTP/1.1 {status}", got, response_headers)
    meta = RawMeta(
        id=exchange_id,
        stratum=stratum,
        pi1=pi1,
        u1=0.25,
        epoch=epoch,
        captured_at_ns=time.time_ns(),
        request_head_bytes=request_head,
        request_bytes=len(raw_request),
        response_head_bytes=response_head,
        response_bytes=len(raw_response),
        lost=lost,
    )
    return meta, raw_request, raw_response


def recorded_by(
    recorder: Recorder, meta: RawMeta, request: bytes | memoryview, response: bytes | memoryview
) -> Exchange | None:
    """Return what a recorder makes of a raw exchange in all its steps."""
    records = all_recorded_by(recorder, meta, request, response)
    assert len(records) <= 1
    return records[0] if records else None


def all_recorded_by(
    recorder: Recorder, meta: RawMeta, request: bytes | memoryview, response: bytes | memoryview
) -> tuple[Exchange, ...]:
    """Return the same of a stream that may be several exchanges."""
    heads = recorder.read_heads(meta, request, response)
    return recorder.record(meta, recorder.read_request(meta, heads, request), response)
