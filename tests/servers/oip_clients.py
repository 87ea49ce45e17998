"""Triton's client library, over HTTP and gRPC: every server of the Open Inference protocol is asked with it."""

from typing import Any

import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from numpy.typing import NDArray

from tests.servers.passage import MARK


def ask_http(
    port: int, mark: str, model: str, inputs: list[Any], outputs: list[Any] | None = None, **given: Any
) -> Any:
    """Ask, and return what the client understood."""
    headers = {MARK: mark, **given.pop("headers", {})}
    with triton_http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, inputs, outputs=outputs, headers=headers, **given)


def http_input(name: str, datatype: str, values: NDArray[Any], *, binary: bool) -> Any:
    """Return an input, to be sent as bytes or as JSON."""
    made = triton_http.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def ask_grpc(port: int, mark: str, model: str, inputs: list[Any], **given: Any) -> Any:
    """Ask, and return what the client understood."""
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, inputs, headers={MARK: mark}, **given)


def grpc_input(name: str, datatype: str, values: NDArray[Any]) -> Any:
    """Return an input, which this client sends raw."""
    made = triton_grpc.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def serialised(message: Any) -> bytes:
    """Return a protobuf message as bytes, its maps in an order of their own."""
    written: bytes = message.SerializeToString(deterministic=True)
    return written
