"""The Open Inference Protocol v2 over gRPC, with raw tensor contents."""

import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import grpc
import numpy as np
from google.protobuf.message import Message

from quantdrift.core import open_inference_pb2 as wire
from quantdrift.core.errors import RetryError
from quantdrift.core.records import Tensor
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.protocol import (
    NO_HEADERS,
    Metadata,
    Refusal,
    RefusedError,
    RemoteRuntime,
    RequestHeaders,
    ServerMetadata,
    ServerTensor,
    server_of,
)
from quantdrift.models.tensors.codec import encode

_SERVICE: Final = "/inference.GRPCInferenceService/"
# Tensors can have any size; without these options both ends limit a message to 4 MiB.
_OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
# A proxy from the environment would get what is meant for this machine, in plaintext.
_NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
_SAID: Final = 200
_KINDS: Final[Mapping[grpc.StatusCode, Refusal]] = MappingProxyType(
    {
        grpc.StatusCode.UNAUTHENTICATED: Refusal.ACCESS,
        grpc.StatusCode.PERMISSION_DENIED: Refusal.ACCESS,
        grpc.StatusCode.NOT_FOUND: Refusal.ACCESS,
        grpc.StatusCode.UNIMPLEMENTED: Refusal.ACCESS,
        grpc.StatusCode.INVALID_ARGUMENT: Refusal.INPUT,
        grpc.StatusCode.FAILED_PRECONDITION: Refusal.INPUT,
        grpc.StatusCode.OUT_OF_RANGE: Refusal.INPUT,
    }
)
# Where a server writes typed contents although it was asked in bytes.
_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BOOL": "bool_contents",
        "INT8": "int_contents",
        "INT16": "int_contents",
        "INT32": "int_contents",
        "INT64": "int64_contents",
        "UINT8": "uint_contents",
        "UINT16": "uint_contents",
        "UINT32": "uint_contents",
        "UINT64": "uint64_contents",
        "FP32": "fp32_contents",
        "FP64": "fp64_contents",
        "BYTES": "bytes_contents",
    }
)

_AWAY: Final = (
    "connection refused",
    "dns resolution failed",
    "handshake",
    "certificate",
    "timeout",
    "connection reset",
    "socket closed",
    "too many pings",
    "failed to connect",
)

Answer = TypeVar("Answer", bound=Message)


class OipGrpcTransport:
    """The transport over gRPC. The channel reconnects by itself."""

    def __init__(self, request: RuntimeRequest) -> None:
        reference = request.reference
        server = server_of(request)
        self._where = server.url
        self._target = urlsplit(server.url).netloc
        self._tls = request.tls if server.is_encrypted else None
        self._model = {"name": reference.model or request.model.name, "version": reference.model_version}
        self._timeout_s = reference.timeout_s
        self._token = RequestHeaders(request)
        self._channel = self._open()
        self._is_stale = False

    def server(self) -> ServerMetadata:
        """Return what `ServerMetadata` answers."""
        answer = self._ask("ServerMetadata", wire.ServerMetadataRequest(), wire.ServerMetadataResponse)
        return ServerMetadata(name=answer.name, version=answer.version)

    def ready(self) -> bool:
        """Return what `ModelReady` answers."""
        return self._ask("ModelReady", wire.ModelReadyRequest(**self._model), wire.ModelReadyResponse).ready

    def metadata(self) -> Metadata:
        """Return what `ModelMetadata` answers."""
        answer = self._ask(
            "ModelMetadata", wire.ModelMetadataRequest(**self._model), wire.ModelMetadataResponse
        )
        inputs, outputs = (
            tuple(
                ServerTensor(name=tensor.name, datatype=tensor.datatype, shape=tuple(tensor.shape))
                for tensor in tensors
            )
            for tensors in (answer.inputs, answer.outputs)
        )
        return Metadata(
            name=answer.name,
            versions=tuple(answer.versions),
            platform=answer.platform,
            inputs=inputs,
            outputs=outputs,
        )

    def infer(
        self, inputs: Sequence[Tensor], outputs: Sequence[str], headers: Mapping[str, str] = NO_HEADERS
    ) -> list[Tensor]:
        """Return the outputs."""
        request = wire.InferRequest(
            model_name=self._model["name"],
            model_version=self._model["version"],
            id=uuid.uuid4().hex,  # optional, and yet some servers fail without it
            inputs=[
                wire.Tensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
                for tensor in inputs
            ],
            outputs=[wire.RequestedOutput(name=name) for name in outputs],
            raw_input_contents=[tensor.data for tensor in inputs],
        )
        answer = self._ask("ModelInfer", request, wire.InferResponse, headers)
        raw = answer.raw_output_contents
        if raw and len(raw) != len(answer.outputs):
            raise RefusedError(
                "an answer that is not the protocol: contents that are not those of the tensors",
                Refusal.INPUT,
            )
        return [
            Tensor(name=output.name, datatype=output.datatype, shape=tuple(output.shape), data=raw[index])
            if raw
            else _typed(output)
            for index, output in enumerate(answer.outputs)
        ]

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _open(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self._target, (*_OPTIONS, _NO_PROXY))
        return grpc.secure_channel(self._target, self._tls.grpc_credentials(), _OPTIONS)

    def _ask(
        self,
        method: str,
        request: Message,
        kind: type[Answer],
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Answer:
        if self._is_stale:  # a new channel reads the certificates again: they may have been renewed
            self._channel.close()
            self._channel = self._open()
            self._is_stale = False
        call: Any = self._channel.unary_unary(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        try:
            metadata = tuple({**headers, **self._token.headers()}.items())
            answer: Answer = call(request, timeout=self._timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            code, details = error.code(), "".join((error.details() or "").splitlines()[:1])[:_SAID]
            if code is grpc.StatusCode.UNAVAILABLE:
                # Only words of the client's own library: a server's words may quote the request.
                why = next((words for words in _AWAY if words in details.lower()), "no connection")
                if self._tls is not None:
                    self._is_stale = True
                    why = self._tls.grpc_problem(self._where) or why
                raise RetryError(f"{self._where} is away: {why}") from error
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            kind_of_refusal = _KINDS.get(code, Refusal.FAILURE)
            raise RefusedError(f"{code.name}: {details}", kind_of_refusal, code.name) from error
        return answer


def open_reference(request: RuntimeRequest) -> RemoteRuntime:
    """Return the reference at a server; errors as of `RemoteRuntime`."""
    transport = OipGrpcTransport(request)
    try:
        return RemoteRuntime(request, transport)
    except BaseException:
        transport.close()
        raise


def _typed(tensor: wire.Tensor) -> Tensor:
    field = _FIELDS.get(tensor.datatype)
    if field is None:
        raise RefusedError(
            f"an answer that is not the protocol: {tensor.datatype} comes only as bytes", Refusal.INPUT
        )
    values = np.array(list(getattr(tensor.contents, field)), dtype=object)
    try:
        return encode(tensor.name, tensor.datatype, values.reshape(tuple(tensor.shape)))
    except (ValueError, OverflowError, TypeError) as error:
        raise RefusedError(
            "an answer that is not the protocol: contents do not fill the shape", Refusal.INPUT
        ) from error
