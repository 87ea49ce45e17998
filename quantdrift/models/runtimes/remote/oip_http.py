"""The Open Inference Protocol v2 over HTTP/1.1, with binary tensors and one kept connection."""

import http
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from quantdrift.core.records import Tensor
from quantdrift.core.tensors import DTYPES
from quantdrift.core.text import misfit
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.http_client import HttpServer, refuse
from quantdrift.models.runtimes.remote.protocol import (
    NO_HEADERS,
    Metadata,
    Refusal,
    RefusedError,
    RemoteRuntime,
    ServerMetadata,
)
from quantdrift.models.tensors.codec import encode

_JSON_LENGTH: Final = "Inference-Header-Content-Length"

Response = TypeVar("Response")


class _Output(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class _InferAnswer(msgspec.Struct, frozen=True, kw_only=True):
    outputs: tuple[_Output, ...]


class OipHttp:
    """The transport over HTTP."""

    def __init__(self, request: RuntimeRequest) -> None:
        reference = request.reference
        model = f"/v2/models/{quote(reference.model or request.model.name, safe='')}"
        version = quote(reference.model_version, safe="")
        self._model = model + (f"/versions/{version}" if version else "")
        self._server = HttpServer(request)

    def server(self) -> ServerMetadata:
        """Return what `GET /v2` answers."""
        return self._read("/v2", ServerMetadata)

    def ready(self) -> bool:
        """Return whether the model's `/ready` answers 200."""
        status, _, _ = self._server.ask("GET", f"{self._model}/ready")
        return status == http.HTTPStatus.OK

    def metadata(self) -> Metadata:
        """Return what `GET /v2/models/MODEL` answers."""
        return self._read(self._model, Metadata)

    def infer(
        self, inputs: Sequence[Tensor], outputs: Sequence[str], headers: Mapping[str, str] = NO_HEADERS
    ) -> list[Tensor]:
        """Return the outputs."""
        document = {
            "id": uuid.uuid4().hex,  # optional, and yet some servers fail without it
            "parameters": {"binary_data_output": True},  # for servers that look here, and not at each output
            "inputs": [
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": tensor.shape,
                    "parameters": {"binary_data_size": len(tensor.data)},
                }
                for tensor in inputs
            ],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        }
        head = msgspec.json.encode(document)
        fields = {**headers, "Content-Type": "application/octet-stream", _JSON_LENGTH: str(len(head))}
        body = b"".join([head, *(tensor.data for tensor in inputs)])
        status, response_headers, answer = self._server.ask("POST", f"{self._model}/infer", body, fields)
        refuse(status, answer)
        return _tensors(response_headers.get(_JSON_LENGTH), answer)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _read(self, path: str, kind: type[Response]) -> Response:
        status, _, body = self._server.ask("GET", path)
        refuse(status, body)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise RefusedError(
                f"{path} answers what is not the protocol: {misfit(error)}", Refusal.ACCESS
            ) from error


def open_reference(request: RuntimeRequest) -> RemoteRuntime:
    """Return the reference at a server; errors as of `RemoteRuntime`."""
    transport = OipHttp(request)
    try:
        return RemoteRuntime(request, transport)
    except BaseException:
        transport.close()
        raise


def _tensors(json_length: str | None, body: bytes) -> list[Tensor]:
    """Return the tensors of an answer; a server may send each one as bytes or as JSON."""
    length = int(json_length) if json_length and json_length.isdecimal() else len(body)
    tail, tensors = memoryview(body)[length:], []
    try:
        for output in msgspec.json.decode(body[:length], type=_InferAnswer).outputs:
            size = (output.parameters or {}).get("binary_data_size")
            if output.data is None and isinstance(size, int) and 0 <= size <= len(tail):
                data = bytes(tail[:size])
                tail = tail[size:]
                tensors.append(
                    Tensor(name=output.name, datatype=output.datatype, shape=output.shape, data=data)
                )
            else:
                tensors.append(_from_json(output))
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError) as error:
        raise RefusedError(
            f"an answer that is not the protocol: {type(error).__name__}", Refusal.INPUT
        ) from error
    return tensors


def _from_json(output: _Output) -> Tensor:
    if output.datatype == "BYTES":
        return encode(output.name, "BYTES", np.array(output.data, dtype=object).reshape(output.shape))
    values = np.array(output.data, dtype=DTYPES.get(output.datatype)).reshape(output.shape)
    return encode(output.name, output.datatype, values)
