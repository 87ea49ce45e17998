"""The decoder reads back whatever can be written, and fails in one way only."""

import contextlib
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head, parse_head, read_body
from tests.support.sidecar.oip_messages import decode_request, decode_response

pytestmark = pytest.mark.property

DTYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
FORMS = ("flat", "nested", "binary")


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, npt.NDArray[Any], str]:
    """Return a datatype, values of it, and the form in which they travel."""
    datatype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    values = draw(hnp.arrays(np.dtype(DTYPES[datatype]), shape))
    return datatype, values, draw(st.sampled_from(FORMS))


def written(name: str, datatype: str, values: npt.NDArray[Any], form: str) -> dict[str, Any]:
    """Return the tensor's JSON."""
    tensor: dict[str, Any] = {"name": name, "shape": list(values.shape), "datatype": datatype}
    if form == "binary":
        return {**tensor, "parameters": {"binary_data_size": values.nbytes}}
    return {**tensor, "data": values.tolist() if form == "nested" else values.ravel().tolist()}


@given(st.lists(tensors(), max_size=4))
def test_tensors_come_back_as_they_were(given_tensors: list[tuple[str, npt.NDArray[Any], str]]) -> None:
    """Any mix of types, shapes and forms is decoded to the bytes it was made of."""
    part = json.dumps(
        {"inputs": [written(f"t{i}", *tensor) for i, tensor in enumerate(given_tensors)]}
    ).encode()
    tail = b"".join(values.tobytes() for _, values, form in given_tensors if form == "binary")
    decoded = decode_request(str(len(part)), part + tail).inputs
    assert len(decoded) == len(given_tensors)
    for tensor, (datatype, values, _) in zip(decoded, given_tensors, strict=True):
        assert (tensor.datatype, tensor.shape) == (datatype, values.shape)
        np.testing.assert_array_equal(
            np.frombuffer(tensor.data, DTYPES[datatype]).reshape(values.shape), values
        )


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_strings_come_back_as_they_were(texts: list[str]) -> None:
    """Strings as JSON decode to the same bytes as in the binary form."""
    raw = b"".join(len(t.encode()).to_bytes(4, "little") + t.encode() for t in texts)
    tensor = {"name": "x", "shape": [len(texts)], "datatype": "BYTES"}
    plain = json.dumps({"inputs": [{**tensor, "data": texts}]}).encode()
    binary = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    assert decode_request(None, plain).inputs[0].data == raw
    assert decode_request(str(len(binary)), binary + raw).inputs[0].data == raw


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
TENSOR_LIKE = st.fixed_dictionaries(
    {
        "name": st.text() | JSON,
        "shape": st.lists(st.integers(-2, 4)) | JSON,
        "datatype": st.sampled_from([*DTYPES, "BYTES", "BF16"]) | JSON,
    },
    optional={"data": JSON, "parameters": st.dictionaries(st.just("binary_data_size"), JSON) | JSON},
)


@given(st.lists(TENSOR_LIKE, max_size=3), st.binary(max_size=64))
def test_what_looks_like_a_message_decodes_or_is_lost(wires: list[Any], tail: bytes) -> None:
    """Tensors of arbitrary JSON give tensors that fill their shapes, or the decoder's own error."""
    for kind, decode in (("inputs", decode_request), ("outputs", decode_response)):
        part = json.dumps({kind: wires}).encode()
        with contextlib.suppress(LostError):
            found = decode(str(len(part)), part + tail)
            for tensor in getattr(found, kind):
                if tensor.datatype in DTYPES:
                    size = np.dtype(DTYPES[tensor.datatype]).itemsize
                    assert len(tensor.data) == math.prod(tensor.shape) * size


@given(st.binary(max_size=200), st.none() | st.text(max_size=8))
def test_garbage_is_lost_and_nothing_else(body: bytes, length: str | None) -> None:
    """Arbitrary bytes raise the decoder's own error or nothing."""
    for decode in (decode_request, decode_response):
        with contextlib.suppress(LostError):
            decode(length, body)


@given(
    st.binary(max_size=200),
    st.sampled_from(["", "chunked", "gzip, chunked"]),
    st.sampled_from(["", "gzip", "deflate", "br"]),
)
def test_garbage_messages_are_lost_and_nothing_else(raw: bytes, transfer: str, content: str) -> None:
    """Arbitrary heads and bodies raise the reader's own error or nothing."""
    with contextlib.suppress(LostError):
        parse_head(raw)
    fields = {"transfer-encoding": transfer, "content-encoding": content}
    with contextlib.suppress(LostError):
        read_body(Head(start=("POST", "/", ""), headers=fields), raw, 100)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6))
def test_chunked_bodies_come_back_as_they_were(chunks: list[bytes]) -> None:
    """However the content was cut into chunks, it comes out whole."""
    raw = b"".join(f"{len(c):x}\r\n".encode() + c + b"\r\n" for c in chunks) + b"0\r\n\r\n"
    head = Head(start=("POST", "/", ""), headers={"transfer-encoding": "chunked"})
    assert read_body(head, raw, 10_000) == b"".join(chunks)
