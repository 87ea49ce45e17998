"""MLServer, asked by Triton's clients: v2 as JSON and gRPC, through the relay and into the record."""

import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from quantdrift.core.records import Protocol
from tests.servers.oip_clients import ask_grpc, ask_http, grpc_input, http_input, serialised
from tests.servers.passage import Passage, passage
from tests.servers.server import Server
from tests.servers.tensors import X, tensor

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800), pytest.mark.release]

TEXTS = np.array([b"plain", "größe".encode()], dtype=np.object_)
MODELS = [{"name": "linear"}, {"name": "words"}]
JSON = {"Content-Type": "application/json"}  # without it MLServer refuses a body


@pytest.fixture(scope="module")
def http(mlserver: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before the HTTP port."""
    with passage(tmp_path_factory.mktemp("relay"), mlserver.http_port, nats_url, MODELS) as made:
        yield made


@pytest.fixture(scope="module")
def grpc(mlserver: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before the gRPC port."""
    with passage(tmp_path_factory.mktemp("relay"), mlserver.grpc_port, nats_url, MODELS) as made:
        yield made


def test_numbers_as_json_pass_and_are_captured(http: Passage) -> None:
    """A request whose version is in the answer alone."""
    mark = secrets.token_hex(8)
    request = ("linear", [http_input("x", "FP32", X, binary=False)])
    direct = ask_http(http.direct, mark, *request, headers=JSON, request_id="7")
    relayed = ask_http(http.port, mark, *request, headers=JSON, request_id="7")
    assert relayed.get_response() == direct.get_response()
    assert http.check()
    (exchange,) = http.captured(mark)
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.OIP_REST, "linear", "v4")
    assert exchange.inputs == (tensor("x", "FP32", X),)
    assert exchange.outputs == (tensor("scores", "FP32", relayed.as_numpy("scores")),)


def test_texts_as_json_pass_and_are_captured(http: Passage) -> None:
    """BYTES elements that are text."""
    mark = secrets.token_hex(8)
    relayed = ask_http(
        http.port, mark, "words", [http_input("text", "BYTES", TEXTS, binary=False)], headers=JSON
    )
    assert http.check()
    (exchange,) = http.captured(mark)
    assert exchange.inputs == (tensor("text", "BYTES", TEXTS),)
    assert exchange.outputs == (tensor("loud", "BYTES", relayed.as_numpy("loud")),)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_grpc_passes_and_is_captured(grpc: Passage, compression: str | None) -> None:
    """The message is the server's own, and its tensors are in the record."""
    mark = secrets.token_hex(8)
    request = ("linear", [grpc_input("x", "FP32", X)])
    direct = ask_grpc(grpc.direct, mark, *request, request_id="7", compression_algorithm=compression)
    relayed = ask_grpc(grpc.port, mark, *request, request_id="7", compression_algorithm=compression)
    assert serialised(relayed.get_response()) == serialised(direct.get_response())
    assert grpc.check()
    (exchange,) = grpc.captured(mark)
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.OIP_GRPC, "linear", "v4")
    assert exchange.inputs == (tensor("x", "FP32", X),)
    assert exchange.outputs == (tensor("scores", "FP32", relayed.as_numpy("scores")),)
