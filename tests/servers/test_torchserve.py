"""TorchServe, asked over HTTP: raw, multipart and JSON bodies, through the relay and into the record."""

import asyncio
import json
import secrets
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from quantdrift.core.records import Exchange, Protocol
from tests.servers.passage import MARK, Passage, passage
from tests.servers.server import Server
from tests.servers.tensors import tensor

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800), pytest.mark.release]

ROW = np.array([1, 2, 3, 4], dtype=np.float32)
SCORES = (ROW @ (np.arange(12, dtype=np.float32).reshape(4, 3) / np.float32(8))).tolist()
# One archive under two names: what its bodies are is for the configuration to say.
MODELS: list[dict[str, Any]] = [
    {"name": "blobs", "adapter": "bytes"},
    {
        "name": "numbers",
        "adapter": "json",
        "inputs": [{"name": "x", "datatype": "FP32"}],
        "outputs": [{"name": "scores", "datatype": "FP32"}],
    },
]


@pytest.fixture(scope="module")
def way(torchserve: Server, tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Passage]:
    """Return a relay before TorchServe's inference port."""
    with passage(tmp_path_factory.mktemp("relay"), torchserve.http_port, nats_url, MODELS) as made:
        yield made


def body(kind: str) -> dict[str, Any]:
    """Return a request of this kind, for the client."""
    if kind == "raw":
        return {"data": ROW.tobytes()}
    if kind == "json":
        return {"json": ROW.tolist()}
    form = aiohttp.FormData()
    form.add_field("data", ROW.tobytes(), filename="row", content_type="application/octet-stream")
    return {"data": form}


def ask(port: int, mark: str, path: str, kind: str) -> tuple[int, bytes]:
    """Ask with aiohttp's client, and return status and body."""

    async def asking() -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{port}/predictions/{path}"
        async with (
            aiohttp.ClientSession(headers={MARK: mark}) as session,
            session.post(url, **body(kind)) as response,
        ):
            return response.status, await response.read()

    return asyncio.run(asking())


def both(way: Passage, path: str, kind: str) -> tuple[Exchange, bytes]:
    """Ask with the relay and without it, and return what was captured and answered."""
    mark = secrets.token_hex(8)
    direct, relayed = ask(way.direct, mark, path, kind), ask(way.port, mark, path, kind)
    assert relayed == direct
    assert relayed[0] == 200
    assert json.loads(relayed[1]) == SCORES
    assert way.check()
    (exchange,) = way.captured(mark)
    assert exchange.protocol == Protocol.TORCHSERVE
    return exchange, relayed[1]


@pytest.mark.parametrize(("kind", "name"), [("raw", "body"), ("multipart", "data")])
def test_bodies_are_captured_as_they_are(way: Passage, kind: str, name: str) -> None:
    """The adapter `bytes` keeps a raw body, or each field of a form, and the answer."""
    exchange, answer = both(way, "blobs", kind)
    assert exchange.model == "blobs"
    assert exchange.inputs == (tensor(name, "BYTES", np.array([ROW.tobytes()], dtype=np.object_)),)
    assert exchange.outputs == (tensor("body", "BYTES", np.array([answer], dtype=np.object_)),)


def test_json_is_captured_as_tensors(way: Passage) -> None:
    """The adapter `json` reads numbers; names and types come from the configuration, the version from the path."""
    exchange, _ = both(way, "numbers/1.0", "json")
    assert (exchange.model, exchange.version) == ("numbers", "1.0")
    assert exchange.inputs == (tensor("x", "FP32", ROW),)
    assert exchange.outputs == (tensor("scores", "FP32", np.array(SCORES, dtype=np.float32)),)
