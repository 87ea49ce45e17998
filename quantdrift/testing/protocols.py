"""What every decoder of a protocol must do.

class TestScore(ProtocolSuite):
    plugin = SCORE
    exchanges = (Exchange(model=MODEL, path="/v1/score", request=b"...", response=b"...", inputs={...}, outputs={...}),)
"""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantdrift.core.config.models import Model
from quantdrift.core.records import Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.sidecar.protocols.decoder import DecodedRequest, Decoder, ProtocolPlugin, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.state.routes import pattern_of

HEAVY: Final = ("torch", "transformers", "onnxruntime", "onnx", "scipy", "sqlalchemy", "asyncpg")
"""What no process of a sidecar imports."""
_MAX_BYTES: Final = 1_000_000
_MAX_VALUES: Final = 100_000
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange as it is on the wire, and what it means.

    Parameters
    ----------
    model
        The configuration of its model.
    request, response
        The bodies.
    inputs, outputs
        The datatype and the nested lists of values that the tensors have, by name.
    path
        Of the request.
    version
        As the response names it.
    headers
        Of both, names in lower case.
    """

    model: Model
    request: bytes
    response: bytes
    inputs: dict[str, tuple[str, Any]]
    outputs: dict[str, tuple[str, Any]]
    path: str
    version: str = ""
    headers: dict[str, str] = {}


class ProtocolSuite:
    """Derive a class `Test...` from it, and give it `plugin` and `exchanges`."""

    plugin: ClassVar[ProtocolPlugin]
    exchanges: ClassVar[Sequence[Exchange]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test with each exchange."""
        if "exchange" in metafunc.fixturenames:
            metafunc.parametrize("exchange", self.exchanges)

    def test_an_exchange_is_read_as_it_is_meant(self, exchange: Exchange) -> None:
        """Tensors have the configured types; the model is the one of path or body, and the version that of the response."""
        named, request, response = _decoded(self.plugin, exchange)
        assert named == exchange.model.name
        assert contents(request.inputs) == exchange.inputs
        assert contents(response.outputs) == exchange.outputs
        assert response.version == exchange.version

    def test_whatever_else_comes_is_tensors_or_lost(self, exchange: Exchange) -> None:
        """Each beginning of a body, and each body with one byte changed: no other error, and no tensor that is none."""
        for body in (exchange.request, exchange.response):
            for place in range(0, len(body), max(1, len(body) // 200)):
                changed = body[:place] + bytes([body[place] ^ 0x15]) + body[place + 1 :]
                check_bodies(self.plugin.decoder, body[:place], exchange.headers, exchange.model)
                check_bodies(self.plugin.decoder, changed, exchange.headers, exchange.model)

    @settings(suppress_health_check=[HealthCheck.differing_executors])  # each subclass is one
    @given(st.data())
    def test_any_body_is_tensors_or_lost(self, exchange: Exchange, data: st.DataObject) -> None:
        """Garbage, JSON of any form, and documents whose members are known and whose values are anything."""
        members = st.sampled_from(sorted({*_members(exchange.request), *_members(exchange.response), "x"}))
        documents = _JSON | st.dictionaries(members, _JSON | st.just(exchange.model.name), max_size=4)
        written = documents.map(lambda document: json.dumps(document).encode())
        body = data.draw(st.binary(max_size=120) | written)
        check_bodies(self.plugin.decoder, body, exchange.headers, exchange.model)

    def test_a_sidecar_that_imports_it_loads_no_heavy_library(self) -> None:
        """Supervisor and capture process import the module of the record."""
        module = type(self.plugin.decoder).__module__
        program = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
        environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
        ran = subprocess.run(  # noqa: S603 - this Python
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
        )
        assert ran.stdout.strip() == "[]"


def check_bodies(
    decoder: Decoder,
    body: bytes,
    headers: dict[str, str],
    model: Model | None,
    adapter: Any = None,
    *,
    answers_anything: bool = True,
) -> None:
    """Check that a body, as a request and as a response, becomes tensors or is lost.

    Parameters
    ----------
    answers_anything
        Whether the decoder takes a response to a request that it has not read.
    """
    head = Head(start=("POST", "/", ""), headers=headers)
    wire = WireContext(
        max_bytes=1000,
        max_values=100,
        model=model,
        adapter=adapter,
        models={} if model is None else {model.name: model},
    )
    query = DecodedRequest(inputs=(Tensor(name="input", datatype="BYTES", shape=(1,), data=bytes(4)),))
    with contextlib.suppress(LostError):
        query = decoder.request(head, body, wire)
        contents(query.inputs)
    if answers_anything:
        with contextlib.suppress(LostError):
            contents(decoder.response(head, body, query, wire).outputs)


def contents(tensors: Sequence[Tensor]) -> dict[str, tuple[str, Any]]:
    """Return the datatype and the nested lists of each tensor, which must hold as many bytes as it says."""
    return {tensor.name: (tensor.datatype, _values(tensor)) for tensor in tensors}


def _values(tensor: Tensor) -> Any:
    if tensor.datatype != "BYTES":
        return np.frombuffer(tensor.data, DTYPES[tensor.datatype]).reshape(tensor.shape).tolist()
    texts = np.empty(int(np.prod(tensor.shape)), dtype=object)
    position = 0
    for number in range(len(texts)):
        length = int.from_bytes(tensor.data[position : position + 4], "little")
        position += 4 + length
        texts[number] = tensor.data[position - length : position]
    assert position == len(tensor.data)
    return texts.reshape(tensor.shape).tolist()


def _decoded(plugin: ProtocolPlugin, exchange: Exchange) -> tuple[str, DecodedRequest, Any]:
    """Return the model that path or body names, the request and the response, as the capture process decodes them."""
    match = re.fullmatch(pattern_of(plugin.path), exchange.path)
    assert match, f"{exchange.path} is not a path of {plugin.path}"
    in_path = match.groupdict().get("model", "")
    wire = WireContext(
        max_bytes=_MAX_BYTES,
        max_values=_MAX_VALUES,
        model=exchange.model if in_path else None,
        models={exchange.model.name: exchange.model},
    )
    asked = Head(start=("POST", exchange.path, "HTTP/1.1"), headers=exchange.headers)
    answered = Head(start=("HTTP/1.1", "200", ""), headers=exchange.headers)
    request = plugin.decoder.request(asked, exchange.request, wire)
    query = msgspec.structs.replace(request, document={})
    wire = msgspec.structs.replace(wire, model=exchange.model)
    return (
        in_path or request.model,
        request,
        plugin.decoder.response(answered, exchange.response, query, wire),
    )


def _members(body: bytes) -> list[str]:
    with contextlib.suppress(ValueError):
        document = json.loads(body)
        if isinstance(document, dict):
            return list(document)
    return []
