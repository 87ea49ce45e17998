"""Decoders of all protocols: what was written comes back, and whatever else comes is lost, never an error of our own."""

import base64
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.schema import Model, ModelTensor
from quantdrift.core.records import Protocol
from quantdrift.sidecar.protocols import DECODERS
from quantdrift.sidecar.protocols.adapters import load_adapter
from quantdrift.sidecar.protocols.decoder import Adapter
from quantdrift.sidecar.protocols.http_message import Head, read_body
from quantdrift.sidecar.protocols.kserve_v1 import KserveV1
from quantdrift.sidecar.protocols.openai import OpenAIChat, OpenAIEmbeddings
from quantdrift.testing.protocols import check_bodies
from tests.support.sidecar.decode import answer, ask, values

pytestmark = pytest.mark.property

ADAPTERS = [None, *(load_adapter(name) for name in ("bytes", "json", "scores"))]
MODELS = [
    None,
    Model(name="m", inputs=(ModelTensor(name="x", datatype="FP32", shape=(-1, 2)),), labels=("a", "b")),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)
# Documents whose members are known and whose values are anything, or nearly right.
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 2) | JSON},
    optional={
        "delta": st.dictionaries(st.sampled_from(["content", "tool_calls", "refusal"]), TEXT | JSON),
        "message": st.fixed_dictionaries({"content": TEXT | JSON}),
        "text": TEXT,
        "token_ids": st.lists(st.integers(-1, 9)),
        "logprobs": st.fixed_dictionaries(
            {"tokens": st.lists(TEXT, max_size=2), "token_logprobs": st.lists(st.floats(), max_size=2)}
        )
        | JSON,
    },
)
MEMBERS = st.sampled_from(
    ["instances", "inputs", "predictions", "outputs", "messages", "tools", "prompt", "input", "data", "model"]
)
DOCUMENTS = (
    JSON
    | st.dictionaries(MEMBERS, JSON, max_size=3)
    | st.fixed_dictionaries({"choices": st.lists(CHOICE, max_size=3)})
)
WRITTEN = st.lists(DOCUMENTS, min_size=1, max_size=4).flatmap(
    lambda documents: st.sampled_from(
        [
            json.dumps(documents[0]).encode(),
            b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in documents)
            + b"data: [DONE]\n\n",
            b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n'
            + json.dumps(documents[0]).encode()
            + b"\r\n--b--\r\n",
        ]
    )
)
BODIES = st.binary(max_size=120) | WRITTEN
TYPES = st.sampled_from(["", "application/json", "text/event-stream", "multipart/form-data; boundary=b"])


@given(st.sampled_from(sorted(DECODERS)), BODIES, TYPES, st.sampled_from(ADAPTERS), st.sampled_from(MODELS))
def test_whatever_comes_is_tensors_or_lost(
    protocol: Protocol, body: bytes, content_type: str, adapter: Adapter | None, model: Model | None
) -> None:
    """Garbage, JSON of any form, and what is nearly right: no other error, and no tensor that is none."""
    check_bodies(
        DECODERS[protocol],
        body,
        {"content-type": content_type},
        model,
        adapter,
        answers_anything=protocol is not Protocol.OIP_GRPC_STREAM,  # it answers only what it has read
    )


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
RECTANGLES = st.lists(st.integers(1, 3), min_size=1, max_size=3).flatmap(
    lambda shape: st.lists(FLOATS, min_size=math.prod(shape), max_size=math.prod(shape)).map(
        lambda flat: _nested(flat, shape)
    )
)


def _nested(flat: list[float], shape: list[int]) -> Any:
    if len(shape) == 1:
        return flat
    size = len(flat) // shape[0]
    return [_nested(flat[place * size : (place + 1) * size], shape[1:]) for place in range(shape[0])]


@given(RECTANGLES, st.lists(st.binary(max_size=5), min_size=1, max_size=4))
def test_rows_come_back_as_they_were(rows: list[Any], texts: list[bytes]) -> None:
    """Numbers nested to a rectangle, and bytes as base64."""
    found = values(answer(KserveV1(), {"predictions": rows}).outputs)
    assert found == {"predictions": rows}
    written = [{"b64": base64.b64encode(text).decode()} for text in texts]
    assert values(ask(KserveV1(), {"instances": written}).inputs) == {"instances": texts}


PIECES = st.lists(st.tuples(st.integers(0, 2), TEXT), min_size=1, max_size=12)


@given(PIECES, st.lists(st.integers(1, 60), max_size=20), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_a_stream_is_the_same_however_it_is_cut(
    pieces: list[tuple[int, str]], cuts: list[int], end: bytes
) -> None:
    """Into chunks of the transfer, into lines, into pieces per choice: joined, it is the whole answer."""
    said = {index: "".join(text for place, text in pieces if place == index) for index in range(3)}
    chunks = [{"choices": [{"index": index, "delta": {"content": ""}}]} for index in said]
    chunks += [{"choices": [{"index": index, "delta": {"content": text}}]} for index, text in pieces]
    body = (
        b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    )
    streamed = answer(OpenAIChat(), _transferred(body.replace(b"\n", end), cuts))
    whole = {"choices": [{"index": index, "message": {"content": text}} for index, text in said.items()]}
    at_once = answer(OpenAIChat(), whole)
    assert (streamed.version, streamed.outputs) == (at_once.version, at_once.outputs)
    assert streamed.is_stream
    assert not at_once.is_stream


def _transferred(body: bytes, cuts: list[int]) -> bytes:
    """Return a body that came in chunks of these lengths, read as the recorder reads it."""
    raw, rest = b"", body
    for size in [*cuts, len(body)]:
        chunk, rest = rest[:size], rest[size:]
        if chunk:
            raw += b"%x\r\n%b\r\n" % (len(chunk), chunk)
    head = Head(start=("HTTP/1.1", "200", ""), headers={"transfer-encoding": "chunked"})
    return read_body(head, raw + b"0\r\n\r\n", 10**6)


@given(st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=4))
def test_vectors_are_the_same_as_numbers_and_as_base64(vectors: list[list[float]]) -> None:
    """To the bit; not a number too, as a broken model writes it."""
    packed = [struct.pack(f"<{len(vector)}f", *vector) for vector in vectors]
    query = ask(OpenAIEmbeddings(), {"model": "m", "input": ["a"] * len(vectors)})
    texts = [base64.b64encode(one).decode() for one in packed]
    found = [
        answer(
            OpenAIEmbeddings(),
            {"data": [{"index": index, "embedding": one} for index, one in enumerate(form)]},
            query,
        )
        for form in (texts, vectors)
    ]
    assert found[0].outputs[0].data == b"".join(packed)
    packed_ones, numbers = (np.frombuffer(reply.outputs[0].data, "<f4") for reply in found)
    np.testing.assert_array_equal(packed_ones, numbers)
