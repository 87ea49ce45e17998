"""The example's inference server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import onnx
import onnx.helper as oh
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray

from quantdrift.demo.oip_server import JSON_LENGTH, InferenceServer, OnnxModel
from quantdrift.demo.traffic import decode, encode

pytestmark = pytest.mark.integration


def _write_model(path: Path) -> None:
    """Write a model with two inputs and two outputs: total = image + offset, and rounded = its integer part."""
    image = oh.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 4])
    offset = oh.make_tensor_value_info("offset", onnx.TensorProto.INT64, [1])
    total = oh.make_tensor_value_info("total", onnx.TensorProto.FLOAT, ["n", 4])
    rounded = oh.make_tensor_value_info("rounded", onnx.TensorProto.INT32, ["n", 4])
    nodes = [
        oh.make_node("Cast", ["offset"], ["shift"], to=onnx.TensorProto.FLOAT),
        oh.make_node("Add", ["image", "shift"], ["total"]),
        oh.make_node("Cast", ["total"], ["rounded"], to=onnx.TensorProto.INT32),
    ]
    graph = oh.make_graph(nodes, "sum", [image, offset], [total, rounded])
    onnx.save(oh.make_model(graph, opset_imports=[oh.make_opsetid("", 18)], ir_version=10), path)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[InferenceServer]:
    """Serve the model `sum` in version 7."""
    _write_model(tmp_path / "sum.onnx")
    running = InferenceServer([OnnxModel("sum", "7", tmp_path / "sum.onnx")])
    await running.start()
    yield running
    await running.stop()


async def _ask(server: InferenceServer, question: Callable[[Any], Any]) -> Any:
    """Ask with a client that knows nothing of asyncio."""

    def blocking() -> Any:
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            return question(client)

    return await asyncio.to_thread(blocking)


def _inputs(*, binary: bool, rows: int = 3) -> tuple[list[Any], NDArray[np.float32]]:
    image = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) / np.float32(8)
    tensors = [triton.InferInput("image", [rows, 4], "FP32"), triton.InferInput("offset", [1], "INT64")]
    tensors[0].set_data_from_numpy(image, binary_data=binary)
    tensors[1].set_data_from_numpy(np.array([2], dtype=np.int64), binary_data=binary)
    return tensors, image


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
async def test_a_foreign_client_gets_the_same_numbers_as_json_and_binary(
    server: InferenceServer, *, binary_in: bool, binary_out: bool
) -> None:
    """All four ways to carry tensors give the same answer, with the version and the id in it."""
    inputs, image = _inputs(binary=binary_in)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("total", "rounded")]
    result = await _ask(server, lambda c: c.infer("sum", inputs, outputs=outputs, request_id="r-1"))
    np.testing.assert_array_equal(result.as_numpy("total"), image + 2)
    np.testing.assert_array_equal(result.as_numpy("rounded"), (image + 2).astype(np.int32))
    assert result.get_response()["model_version"] == "7"
    assert result.get_response()["id"] == "r-1"


async def test_json_and_binary_tensors_may_be_mixed_in_one_message(server: InferenceServer) -> None:
    """One input travels as JSON, the other as bytes; one output comes back either way."""
    inputs, image = _inputs(binary=False)
    inputs[0].set_data_from_numpy(image, binary_data=True)
    outputs = [
        triton.InferRequestedOutput("rounded", binary_data=False),
        triton.InferRequestedOutput("total", binary_data=True),
    ]
    result = await _ask(server, lambda c: c.infer("sum", inputs, outputs=outputs))
    np.testing.assert_array_equal(result.as_numpy("total"), image + 2)
    np.testing.assert_array_equal(result.as_numpy("rounded"), (image + 2).astype(np.int32))


async def test_only_the_outputs_that_were_asked_for_come_back(server: InferenceServer) -> None:
    """A request for one output gets that one."""
    inputs, _ = _inputs(binary=True)
    outputs = [triton.InferRequestedOutput("total")]
    result = await _ask(server, lambda c: c.infer("sum", inputs, model_version="7", outputs=outputs))
    assert result.as_numpy("rounded") is None
    assert result.as_numpy("total") is not None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_bodies_may_be_compressed_in_both_directions(server: InferenceServer, algorithm: str) -> None:
    """Compression changes nothing in what is answered."""
    inputs, image = _inputs(binary=True, rows=100)
    result = await _ask(
        server,
        lambda c: c.infer(
            "sum", inputs, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
        ),
    )
    np.testing.assert_array_equal(result.as_numpy("total"), image + 2)


async def test_health_and_metadata_are_served(server: InferenceServer) -> None:
    """A client can find out what is served and in which version."""

    def question(client: Any) -> Any:
        ready = client.is_model_ready("sum"), client.is_model_ready("sum", "7")
        absent = client.is_model_ready("sum", "8"), client.is_model_ready("other")
        return (
            client.is_server_live(),
            client.is_server_ready(),
            ready,
            absent,
            client.get_model_metadata("sum"),
        )

    live, ready, present, absent, metadata = await _ask(server, question)
    assert live
    assert ready
    assert present == (True, True)
    assert absent == (False, False)
    assert metadata["versions"] == ["7"]
    assert metadata["inputs"][0] == {"name": "image", "datatype": "FP32", "shape": [-1, 4]}


_SOUND = {"name": "image", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
_OFFSET = {"name": "offset", "datatype": "INT64", "shape": [1], "data": [1]}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("sum", b"{", {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND | {"shape": [2, 4]}, _OFFSET]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND | {"datatype": "FP64"}, _OFFSET]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND | {"datatype": "BYTES"}, _OFFSET]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND | {"data": None}, _OFFSET]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND | {"shape": [1, 2, 2]}, _OFFSET]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND, _OFFSET], "outputs": [{"name": "x"}]}), {}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND, _OFFSET]}), {JSON_LENGTH: "0"}, 400),
        ("sum", msgspec.json.encode({"inputs": [_SOUND, _OFFSET]}), {JSON_LENGTH: "x"}, 400),
        ("other", msgspec.json.encode({"inputs": [_SOUND, _OFFSET]}), {}, 404),
        ("sum/versions/8", msgspec.json.encode({"inputs": [_SOUND, _OFFSET]}), {}, 404),
        ("sum/versions/7", msgspec.json.encode({"inputs": [_SOUND, _OFFSET]}), {}, 200),
    ],
)
async def test_what_it_cannot_serve_is_refused_with_a_reason(
    server: InferenceServer, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    """Bad requests get 400 and unknown models 404, each with a JSON error; nothing ends the server."""
    url = f"http://127.0.0.1:{server.port}/v2/models/{path}/infer"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        assert response.status == status
        assert ("error" in await response.json()) == (status != 200)


@pytest.mark.parametrize("binary", [True, False])
async def test_the_demos_clients_speak_the_protocol(tmp_path: Path, *, binary: bool) -> None:
    """What the demo sends is understood, and it reads the answer as it was computed."""
    image = oh.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["n", 1, 8, 8])
    logits = oh.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 64])
    graph = oh.make_graph([oh.make_node("Flatten", ["image"], ["logits"])], "flat", [image], [logits])
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "flat.onnx")
    server = InferenceServer([OnnxModel("digits", "1", tmp_path / "flat.onnx")])
    await server.start()
    scan = np.random.default_rng(1).random((1, 8, 8), dtype=np.float32)
    body, headers = encode(scan, binary=binary)
    url = f"http://127.0.0.1:{server.port}/v2/models/digits/infer"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        answer = decode(await response.read(), response.headers)
    await server.stop()
    np.testing.assert_array_equal(answer, scan.ravel())


async def test_a_loaded_file_answers_in_place_of_the_one_before(
    server: InferenceServer, tmp_path: Path
) -> None:
    """The answers carry its version from then on, and the name stays."""
    inputs, _ = _inputs(binary=True)
    status, _ = await _load(server, {"version": "8", "file": str(tmp_path / "sum.onnx")})
    assert status == 200
    result = await _ask(server, lambda c: c.infer("sum", inputs))
    assert result.get_response()["model_version"] == "8"


async def test_what_cannot_be_loaded_changes_nothing(server: InferenceServer, tmp_path: Path) -> None:
    """A file that is not there, and a body that says something else: 400 with the reason."""
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    for parameters in (
        {"version": "8", "file": str(tmp_path / "absent.onnx")},
        {"version": "8", "file": str(tmp_path / "broken.onnx")},
        {"version": "8", "path": "x"},
    ):
        status, said = await _load(server, parameters)
        assert (status, "error" in said) == (400, True)
    inputs, _ = _inputs(binary=True)
    result = await _ask(server, lambda c: c.infer("sum", inputs))
    assert result.get_response()["model_version"] == "7"


async def test_a_route_gives_requests_with_a_header_a_file_of_their_own(tmp_path: Path) -> None:
    """Others are computed by the model itself."""
    x, y = (oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in ("x", "y"))
    for kind in ("Neg", "Identity"):
        graph = oh.make_graph([oh.make_node(kind, ["x"], ["y"])], kind, [x], [y])
        model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 18)], ir_version=10)
        onnx.save(model, tmp_path / f"{kind}.onnx")
    server = InferenceServer([OnnxModel("m", "1", tmp_path / "Identity.onnx")])
    await server.start()
    route = {"header": "x-scanner", "value": "archive", "file": str(tmp_path / "Neg.onnx")}
    status, _ = await _load(
        server, {"version": "2", "file": str(tmp_path / "Identity.onnx"), "routes": [route]}, name="m"
    )
    assert status == 200
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}
    url = f"http://127.0.0.1:{server.port}/v2/models/m/infer"
    answers = {}
    async with aiohttp.ClientSession() as session:
        for scanner in ("archive", "office"):
            async with session.post(url, json=body, headers={"x-scanner": scanner}) as response:
                answers[scanner] = (await response.json())["outputs"][0]["data"]
    await server.stop()
    assert answers == {"archive": [-3.0], "office": [3.0]}


async def _load(
    server: InferenceServer, parameters: dict[str, Any], name: str = "sum"
) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{server.port}/v2/repository/models/{name}/load"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"parameters": parameters}) as response,
    ):
        text = await response.text()
        return response.status, json.loads(text) if text else {}
