"""Text embeddings from an OpenAI-compatible server."""

from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from quantdrift.core.errors import OperatorError
from quantdrift.models.runtimes.embedding import unknown_embedding
from quantdrift.models.runtimes.protocol import check_inputs
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.text.openai_server import OpenAIServer, unreadable
from quantdrift.models.tensors.arrays import Array, TensorSpec

_INPUT: Final = "input"
_EMBEDDING: Final = "embedding"
_PROBE: Final = "text"


class _Vector(msgspec.Struct):
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float]


class _Vectors(msgspec.Struct):
    data: list[_Vector]


class EmbeddingsRuntime:
    """A reference that computes embeddings of texts at a server.

    Raises
    ------
    OperatorError
        The server does not know the model, refuses access, or has no embeddings; or `models.embedding` names another output.
    RetryError
        The server is unreachable, or does not answer.
    """

    def __init__(self, request: RuntimeRequest, server: OpenAIServer) -> None:
        if request.embedding not in {"", _EMBEDDING}:
            raise OperatorError(unknown_embedding(request.embedding, [_EMBEDDING]))
        self._server = server
        probed, self.artefact, self.provenance, _ = server.opened(lambda: self._request_vectors([_PROBE]))
        self.inputs = (TensorSpec(name=_INPUT, dtype=np.dtype(object), shape=(None,)),)
        self.outputs = (
            TensorSpec(name=_EMBEDDING, dtype=np.dtype(np.float32), shape=(None, probed.shape[1])),
        )
        self.embedding = request.embedding

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return `embedding` : (items, dimensions) of `input` : (items,), texts; errors as of `OpenAIServer.guarded`."""
        check_inputs(inputs, self.inputs)
        texts = inputs[_INPUT].tolist()
        return {_EMBEDDING: self._server.guarded(lambda: self._request_vectors(texts))}

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _request_vectors(self, texts: list[str]) -> Array:
        question = {"model": self._server.name, "input": texts, "encoding_format": "float"}
        entries = self._server.ask("POST", "/v1/embeddings", _Vectors, question).data
        entries.sort(key=lambda entry: entry.index)
        if [entry.index for entry in entries] != list(range(len(texts))):
            raise unreadable("not one vector for each text")
        if len({len(entry.embedding) for entry in entries}) != 1 or not entries[0].embedding:
            raise unreadable("vectors of different lengths, or empty ones")
        return np.array([entry.embedding for entry in entries], dtype=np.float32)
