"""A small inference server: the Open Inference Protocol v2 over REST, ONNX Runtime underneath.

It stands for the inference pod in the demo, the tests and the benchmarks, and knows nothing of sidecars. It
speaks JSON and the binary tensor extension, in both directions and mixed.

    python -m quantdrift.demo.oip_server --model digits=digits-int8.onnx --version int8-1 --listen 127.0.0.1:8001

`POST /v2/repository/models/NAME/load`, as of Triton, puts another file in the place of a model, while it serves. The body is
`{"parameters": {"version": "int8-2", "file": "other.onnx"}}`; with `"routes": [{"header": "x-scanner", "value": "archive", "file":
"archive.onnx"}]` requests with that header are computed by a file of their own, which elsewhere a proxy would do.
"""

import argparse
import asyncio
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
from aiohttp import web
from numpy.typing import NDArray

from quantdrift.core.tensors import DTYPES

JSON_LENGTH = "Inference-Header-Content-Length"
MAX_BODY_BYTES = 64 * 1024 * 1024

_OF_ONNX = {
    "tensor(bool)": "BOOL",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    **{f"tensor(int{bits})": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"tensor(uint{bits})": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}
Arrays = dict[str, NDArray[Any]]


class TensorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Name, datatype and shape of a model's input or output; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class InputTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a request; its elements are `data`, or `binary_data_size` bytes behind the JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] = {}
    data: Any = None


class RequestedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """An output that the client asks for."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON part of an inference request."""

    inputs: tuple[InputTensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    id: str | None = None
    parameters: dict[str, Any] = {}


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Requests with this value of a header, and the file that computes them."""

    header: str
    value: str
    file: str


class LoadParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served from now on."""

    version: str
    file: str
    routes: tuple[Routed, ...] = ()


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request to load a model."""

    parameters: LoadParameters


class OnnxModel:
    """An ONNX model under the name and version that clients know.

    Parameters
    ----------
    name, version
        As they stand in paths and responses.
    path
        ONNX file.
    threads
        CPU threads of one inference.
    routes
        Requests that files of their own compute.
    """

    def __init__(
        self, name: str, version: str, path: Path, threads: int = 1, routes: Iterable[Routed] = ()
    ) -> None:
        self.name, self.version, self.threads = name, version, threads
        self._routes = [
            (route.header, route.value, OnnxModel(name, version, Path(route.file), threads))
            for route in routes
        ]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = [_metadata(node) for node in self._session.get_inputs()]
        self.outputs = [_metadata(node) for node in self._session.get_outputs()]

    def of(self, headers: Mapping[str, str]) -> "OnnxModel":
        """Return the model that computes a request with these headers."""
        models = (model for header, value, model in self._routes if headers.get(header) == value)
        return next(models, self)

    def run(self, inputs: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Arrays:
        """Return the outputs named in `wanted`, or all of them.

        Raises
        ------
        ValueError
            The tensors are not the model's.
        """
        tensors = {tensor.name: tensor for tensor in self.inputs}
        if set(inputs) != set(tensors):
            raise ValueError(f"model {self.name} takes the inputs {sorted(tensors)}, got {sorted(inputs)}")
        for name, array in inputs.items():
            expected = DTYPES[tensors[name].datatype]
            if array.dtype != expected:
                raise ValueError(f"input {name} is {tensors[name].datatype}")
        names = list(wanted) or [tensor.name for tensor in self.outputs]
        if unknown := set(names) - {tensor.name for tensor in self.outputs}:
            raise ValueError(f"model {self.name} has no output {sorted(unknown)}")
        try:
            return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))
        except Exception as error:  # the runtime's own errors share no public root
            raise ValueError(f"model {self.name} refused the input: {error}") from error


class InferenceServer:
    """Serves models over HTTP.

    Parameters
    ----------
    models
        One per name.
    host, port
        Where to listen; port 0 takes a free one, which `port` says after `start`.
    """

    def __init__(self, models: Iterable[OnnxModel], host: str = "127.0.0.1", port: int = 0) -> None:
        self._models = {model.name: model for model in models}
        self._host, self.port = host, port
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inference")
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        model = "/v2/models/{name}"
        routes = [web.get("/v2", self._server), web.get("/v2/health/{state:live|ready}", self._health)]
        for path in (model, model + "/versions/{version}"):
            routes += [
                web.get(path, self._metadata),
                web.get(path + "/ready", self._ready),
                web.post(path + "/infer", self._infer),
            ]
        routes.append(web.post("/v2/repository/models/{name}/load", self._load))
        app.add_routes(routes)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Open the port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Finish what is being answered and close the port."""
        await self._runner.cleanup()
        self._pool.shutdown()

    async def _server(self, _: web.Request) -> web.Response:
        return _json({"name": "oip_server", "version": "1", "extensions": ["binary_tensor_data"]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return _error(404, "no such model") if self._model(request) is None else web.Response()

    async def _metadata(self, request: web.Request) -> web.Response:
        model = self._model(request)
        if model is None:
            return _error(404, "no such model")
        return _json(
            {
                "name": model.name,
                "versions": [model.version],
                "platform": "onnxruntime_onnx",
                "inputs": model.inputs,
                "outputs": model.outputs,
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        """Serve other files; what is being answered is answered by the former ones."""
        former = self._models.get(request.match_info["name"])
        if former is None:
            return _error(404, "no such model")
        try:
            asked = msgspec.json.decode(await request.read(), type=LoadRequest).parameters
            loaded = await asyncio.to_thread(
                OnnxModel, former.name, asked.version, Path(asked.file), former.threads, asked.routes
            )
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        except Exception as error:  # noqa: BLE001 - the runtime's own errors share no public root
            return _error(400, f"cannot be loaded: {error}")
        self._models[loaded.name] = loaded
        return web.Response()

    async def _infer(self, request: web.Request) -> web.Response:
        model = self._model(request)
        if model is None:
            return _error(404, "no such model")
        try:
            asked, inputs = read_request(await request.read(), request.headers.get(JSON_LENGTH))
            wanted = [output.name for output in asked.outputs]
            run = model.of(request.headers).run
            outputs = await asyncio.get_running_loop().run_in_executor(self._pool, run, inputs, wanted)
        except ValueError as error:  # msgspec's errors are of this kind too
            return _error(400, str(error))
        response = _answer(model, asked, outputs)
        if "Accept-Encoding" in request.headers:
            response.enable_compression()
        return response

    def _model(self, request: web.Request) -> OnnxModel | None:
        model = self._models.get(request.match_info["name"])
        version = request.match_info.get("version")
        return model if model is not None and version in {None, model.version} else None


def read_request(body: bytes, json_length: str | None) -> tuple[InferRequest, Arrays]:
    """Return a request and its tensors by name.

    Parameters
    ----------
    body
        The whole body, decompressed.
    json_length
        The header `Inference-Header-Content-Length`, if there is one.

    Raises
    ------
    ValueError
        The body is not what the protocol says.
    """
    at = len(body) if json_length is None else int(json_length)
    if not 0 < at <= len(body):
        raise ValueError(f"{JSON_LENGTH} must be between 1 and the body's length")
    asked = msgspec.json.decode(body[:at], type=InferRequest)
    arrays: Arrays = {}
    for tensor in asked.inputs:
        dtype = DTYPES.get(tensor.datatype)
        if dtype is None:
            raise ValueError(f"datatype {tensor.datatype} is not supported")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            if tensor.data is None or tensor.datatype == "FP16":
                raise ValueError(f"tensor {tensor.name} has no data that JSON can carry")
            array = np.asarray(tensor.data, dtype=dtype)
        else:
            array = np.frombuffer(body[at : at + size], dtype=dtype)
            at += size
        arrays[tensor.name] = array.reshape(tensor.shape)
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes behind the last tensor")
    return asked, arrays


def _answer(model: OnnxModel, asked: InferRequest, outputs: Arrays) -> web.Response:
    by_default = bool(asked.parameters.get("binary_data_output", False))
    binary = {output.name: bool(output.parameters.get("binary_data", by_default)) for output in asked.outputs}
    tails: list[bytes] = []
    described = []
    for tensor in model.outputs:
        if tensor.name not in outputs:
            continue
        array = np.ascontiguousarray(outputs[tensor.name], dtype=DTYPES[tensor.datatype])
        entry: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": array.shape,
        }
        if binary.get(tensor.name, by_default):
            tails.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": array.nbytes}
        else:
            entry["data"] = array.ravel().tolist()
        described.append(entry)
    head = {"model_name": model.name, "model_version": model.version, "outputs": described}
    if asked.id is not None:
        head["id"] = asked.id
    if not tails:
        return _json(head)
    text = msgspec.json.encode(head)
    return web.Response(
        body=b"".join((text, *tails)),
        headers={"Content-Type": "application/octet-stream", JSON_LENGTH: str(len(text))},
    )


def _json(document: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": text}), content_type="application/json"
    )


def _metadata(node: Any) -> TensorMetadata:
    if node.type not in _OF_ONNX:
        raise ValueError(f"{node.name} is a {node.type}, which this server does not speak")
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape)
    return TensorMetadata(name=node.name, datatype=_OF_ONNX[node.type], shape=shape)


async def _serve(server: InferenceServer) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    print(f"ready: port {server.port}", flush=True)
    await stop.wait()
    await server.stop()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m quantdrift.demo.oip_server", description="A small Open Inference Protocol v2 server."
    )
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FILE.onnx")
    parser.add_argument("--version", default="1", help="version that all models are reported with")
    parser.add_argument("--listen", default="127.0.0.1:8001", help="HOST:PORT; port 0 takes a free one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one inference")
    arguments = parser.parse_args()

    pairs = (text.partition("=") for text in arguments.model)
    models = [OnnxModel(name, arguments.version, Path(path), arguments.threads) for name, _, path in pairs]
    host, _, port = arguments.listen.rpartition(":")
    server = InferenceServer(models, host, int(port))
    asyncio.run(_serve(server))


if __name__ == "__main__":
    main()
