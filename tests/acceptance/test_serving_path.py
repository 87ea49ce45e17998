"""The serving path is sacred: a client nobody here wrote, and everything behind the sidecar gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray

from quantdrift.demo.model import CANDIDATE, INPUT, NAME, OUTPUT
from quantdrift.demo.services import Ports, child
from tests.support.product import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]


@asynccontextmanager
async def _sidecar_alone(models: Path, out: Path) -> AsyncIterator[Ports]:
    """Run the model and a sidecar; there is no NATS, no Postgres, no shadow and no monitor."""
    ports = Ports.free()
    environment = ports.overrides("") | {"QUANTDRIFT__STREAM__URL": "nats://127.0.0.1:9"}
    config = out / "config.toml"
    config.write_text((ROOT / "quantdrift" / "demo" / "config.toml").read_text())
    server = ["quantdrift.demo.oip_server", "--model", f"{NAME}={models / CANDIDATE}"]
    server += ["--version", "int8-1", "--listen", f"127.0.0.1:{ports.model}"]
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(child("the model", server, out / "server.log"))
        command = ["quantdrift", "sidecar", "--config", str(config)]
        sidecar = await stack.enter_async_context(child("sidecar", command, out / "sidecar.log", environment))
        await model.ready([ports.model], "/v2/health/ready")
        await sidecar.ready([ports.sidecar_admin], "/readyz")
        yield ports


def _image(seed: int, n: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((n, 1, 8, 8), dtype=np.float32)


def _infer(
    port: int, image: NDArray[np.float32], *, binary: bool
) -> tuple[dict[str, Any], NDArray[np.float32]]:
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_ready()
        assert client.is_model_ready(NAME)
        tensor = triton.InferInput(INPUT, list(image.shape), "FP32")
        tensor.set_data_from_numpy(image, binary_data=binary)
        wanted = triton.InferRequestedOutput(OUTPUT, binary_data=binary)
        result = client.infer(
            NAME, [tensor], outputs=[wanted], headers={"x-scanner": "archive"}, request_id="r1"
        )
        return result.get_response(), result.as_numpy(OUTPUT)


async def _raw(port: int, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    url = f"http://127.0.0.1:{port}/v2/models/{NAME}/infer"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as answer:
        kept = {name: value for name, value in answer.headers.items() if name != "Date"}
        return answer.status, kept, await answer.read()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
async def test_tritons_client_gets_the_same_bytes_through_the_relay(models: Path, tmp_path: Path) -> None:
    """JSON and binary, one row and many, with NATS and Postgres gone: what the server answers is what arrives."""
    async with _sidecar_alone(models, tmp_path) as ports:
        for binary in (False, True):
            for n in (1, 17):
                image = _image(n, n)
                direct = await asyncio.to_thread(_infer, ports.model, image, binary=binary)
                through = await asyncio.to_thread(_infer, ports.sidecar, image, binary=binary)
                assert through[0] == direct[0]
                assert through[1].tobytes() == direct[1].tobytes()
                tensor = triton.InferInput(INPUT, list(image.shape), "FP32")
                tensor.set_data_from_numpy(image, binary_data=binary)
                wanted = triton.InferRequestedOutput(OUTPUT, binary_data=binary)
                body, length = triton.InferenceServerClient.generate_request_body([tensor], outputs=[wanted])
                headers = {"Content-Type": "application/json"}
                if length is not None:
                    headers["Inference-Header-Content-Length"] = str(length)
                assert await _raw(ports.sidecar, body, headers) == await _raw(ports.model, body, headers)


async def test_with_nats_and_postgres_down_readiness_stays_green_and_the_loss_is_counted(
    models: Path, tmp_path: Path
) -> None:
    """Their outage takes no pod out of service; errors of the server pass through as they are."""
    async with _sidecar_alone(models, tmp_path) as ports:
        bad = b'{"inputs": [{"name": "nothing"}]}'
        kind = {"Content-Type": "application/json", "x-scanner": "archive"}
        assert await _raw(ports.sidecar, bad, kind) == await _raw(ports.model, bad, kind)
        async with aiohttp.ClientSession() as session:
            admin = f"http://127.0.0.1:{ports.sidecar_admin}"
            for path in ("/livez", "/readyz"):
                async with session.get(admin + path) as answer:
                    assert answer.status == 200
            async with asyncio.timeout(20):
                while True:
                    async with session.get(f"{admin}/metrics") as answer:
                        text = await answer.text()
                    if 'reason="error_status"' in text:
                        break
                    await asyncio.sleep(0.05)
