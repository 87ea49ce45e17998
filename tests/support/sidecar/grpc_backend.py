"""A gRPC inference server of the usual kind: grpcio, with the servicer that Triton's client library ships."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype


class Doubling(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc] # it has no types
    """Answers each input with itself twice along its last axis, called `y_NAME`.

    Parameters of a request tell it to do otherwise: `wait` for `go_on`, `fail`, or answer `n_responses` in a stream. Of the model `story` it is
    decoupled: it says the words of each text of a stream in capitals, a response for each, in turns with the other texts.
    """

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.n_waiting = 0
        self.n_cancelled = 0

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - generated
        """Answer one request."""
        if "wait" in request.parameters:
            context.add_callback(self._ended)
            self.n_waiting += 1
            self.go_on.wait(30)
        if "fail" in request.parameters:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it was asked to fail: naïve")
        if "compress" in request.parameters:
            context.set_compression(grpc.Compression.Gzip)
        return answer(request)

    def ModelStreamInfer(  # noqa: N802 - generated
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Answer each request of a stream, once or as often as it says."""
        stories: list[Iterator[Any]] = []
        for request in request_iterator:
            if request.model_name == "story":
                stories.append(_story(request))
                continue
            if "fail" in request.parameters:
                yield service_pb2.ModelStreamInferResponse(error_message="it was asked to fail")
                continue
            told = request.parameters["n_responses"].int64_param if "n_responses" in request.parameters else 1
            for _ in range(told):
                yield service_pb2.ModelStreamInferResponse(infer_response=answer(request))
        while stories:
            for story in list(stories):
                if (said := next(story, None)) is None:
                    stories.remove(story)
                else:
                    yield service_pb2.ModelStreamInferResponse(infer_response=said)

    def _ended(self) -> None:
        self.n_cancelled += 1


def answer(request: Any) -> Any:
    """Return the response to a request: typed contents to typed ones, raw to raw ones."""
    response = service_pb2.ModelInferResponse(
        model_name=request.model_name, model_version=request.model_version or "7", id=request.id
    )
    for index, tensor in enumerate(request.inputs):
        shape = [*tensor.shape[:-1], 2 * tensor.shape[-1]]
        output = response.outputs.add(name=f"y_{tensor.name}", datatype=tensor.datatype, shape=shape)
        if request.raw_input_contents:
            response.raw_output_contents.append(_doubled(tensor, request.raw_input_contents[index]))
            continue
        output.contents.CopyFrom(tensor.contents)
        output.contents.MergeFrom(tensor.contents)
    return response


def _story(request: Any) -> Iterator[Any]:
    """Yield the responses to a text, and the one that says that there are no more."""
    (text,) = deserialize_bytes_tensor(request.raw_input_contents[0])
    for index, word in enumerate(text.split()):
        response = service_pb2.ModelInferResponse(model_name="story", model_version="7", id=request.id)
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        said = (b" " if index else b"") + word.decode().upper().encode()
        response.raw_output_contents.append(len(said).to_bytes(4, "little") + said)
        yield response
    farewell = service_pb2.ModelInferResponse(model_name="story", model_version="7", id=request.id)
    farewell.parameters["triton_final_response"].bool_param = True
    yield farewell


def _doubled(tensor: Any, raw: bytes) -> bytes:
    if tensor.datatype == "BYTES":
        values = deserialize_bytes_tensor(raw).reshape(tensor.shape)
        return bytes(serialize_byte_tensor(np.concatenate([values, values], axis=-1)).item())
    dtype = np.uint16 if tensor.datatype == "BF16" else triton_to_np_dtype(tensor.datatype)
    array = np.frombuffer(raw, dtype=dtype).reshape(tensor.shape)
    return np.concatenate([array, array], axis=-1).tobytes()


@contextlib.contextmanager
def running_grpc(*options: tuple[str, int]) -> Iterator[tuple[Doubling, int]]:
    """Run the server in threads of this process; yield its servicer and its port."""
    servicer = Doubling()
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, port
    finally:
        servicer.go_on.set()
        server.stop(0).wait()
