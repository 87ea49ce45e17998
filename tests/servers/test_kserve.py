"""KServe's model server, asked by KServe's own clients: v1, v2 and gRPC through the relay and into the record."""

import base64
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quantdrift.core.records import Protocol, Tensor
from tests.servers.passage import MARK, Passage, passage, talk, without_date
from tests.servers.server import Server
from tests.servers.tensors import tensor

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900), pytest.mark.release]

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4) / np.float32(4)
TEXTS = np.array([b"plain", "größe".encode()], dtype=np.object_)
INPUTS = {"linear": (tensor("x", "FP32", ROWS),), "words": (tensor("text", "BYTES", TEXTS),)}
MODELS = [{"name": "linear"}, {"name": "words"}]


@pytest.fixture(scope="module")
def http(kserve: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before the HTTP port."""
    with passage(tmp_path_factory.mktemp("relay"), kserve.http_port, nats_url, MODELS) as made:
        yield made


@pytest.fixture(scope="module")
def grpc(kserve: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before the gRPC port."""
    with passage(tmp_path_factory.mktemp("relay"), kserve.grpc_port, nats_url, MODELS) as made:
        yield made


class Asked:
    """What KServe's clients got, and under which mark they asked through the relay."""

    def __init__(self, kserve: Server, http: Passage, grpc: Passage) -> None:
        self.mark = secrets.token_hex(8)
        ask = kserve.environment.script("ask.py")
        self.direct = kserve.environment.run(ask, str(http.direct), str(grpc.direct), MARK, "direct")
        self.relayed = kserve.environment.run(ask, str(http.port), str(grpc.port), MARK, self.mark)

    def outputs(self, way: str) -> tuple[Tensor, ...]:
        """Return the tensors that a client got through the relay."""
        return tuple(
            Tensor(
                name=output["name"],
                datatype=output["datatype"],
                shape=tuple(output["shape"]),
                data=base64.b64decode(output["data"]),
            )
            for output in self.relayed[way]
        )


@pytest.fixture(scope="module")
def asked(kserve: Server, http: Passage, grpc: Passage) -> Asked:
    """Return what was asked in every way; no byte changed on the way."""
    made = Asked(kserve, http, grpc)
    assert len(http.check()) == 3  # v1, and v2 each way
    assert len(grpc.check()) == 2
    return made


def test_clients_get_through_the_relay_what_they_get_without_it(asked: Asked) -> None:
    """In every protocol and coding."""
    assert asked.relayed == asked.direct


@pytest.mark.parametrize("model", ["linear", "words"])
@pytest.mark.parametrize("coding", ["json", "binary"])
def test_v2_is_captured(asked: Asked, http: Passage, coding: str, model: str) -> None:
    """As JSON and with the binary extension, numbers and texts."""
    way = f"v2-{coding}-{model}"
    (exchange,) = http.captured(f"{asked.mark}-{way}")
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.OIP_REST, model, "3")
    assert exchange.inputs == INPUTS[model]
    assert exchange.outputs == asked.outputs(way)


@pytest.mark.parametrize("model", ["linear", "words"])
@pytest.mark.parametrize("coding", ["json", "binary"])
def test_grpc_is_captured(asked: Asked, grpc: Passage, coding: str, model: str) -> None:
    """With typed contents and with raw ones."""
    way = f"grpc-{coding}-{model}"
    (exchange,) = grpc.captured(f"{asked.mark}-{way}")
    assert (exchange.protocol, exchange.model, exchange.version) == (Protocol.OIP_GRPC, model, "3")
    assert exchange.inputs == INPUTS[model]
    assert exchange.outputs == asked.outputs(way)


def test_v1_is_captured(asked: Asked, http: Passage) -> None:
    """Instances and predictions, which have no type on the wire."""
    (exchange,) = http.captured(f"{asked.mark}-v1")
    assert (exchange.protocol, exchange.model) == (Protocol.KSERVE_V1, "linear")
    (sent,), (got,) = exchange.inputs, exchange.outputs
    assert _values(sent) == ROWS.tolist()
    assert _values(got) == asked.relayed["v1"]["predictions"]


def test_the_response_is_the_servers_byte_for_byte(http: Passage) -> None:
    """A request written by hand gets the same bytes, but for the second in the header Date."""
    body = b'{"id":"7","inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    head = (
        b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    direct = talk(http.direct, head + body)
    assert direct.startswith(b"HTTP/1.1 200 OK\r\n")
    assert without_date(talk(http.port, head + body)) == without_date(direct)
    http.check()


def _values(held: Tensor) -> Any:
    types = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8"}
    return np.frombuffer(held.data, types[held.datatype]).reshape(held.shape).tolist()
