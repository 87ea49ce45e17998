"""The interface of decoders: they turn the bodies of request and response into named tensors. No I/O."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Tensor
from quantdrift.sidecar.protocols.errors import UnknownModelError
from quantdrift.sidecar.protocols.http_message import Head
from quantdrift.sidecar.state.routes import ProtocolRoute

# A JSON value of two bytes on the wire takes up to 75 bytes in memory, so the length of a body is not a
# bound.
MAX_JSON_VALUES = 2_000_000


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A body, or one field of a form.

    Parameters
    ----------
    name
        The field's name; `body` for a whole body.
    content_type
        In lower case, without parameters; empty if it is missing.
    data
        Decompressed.
    """

    name: str
    content_type: str
    data: bytes


class Adapter(typing.Protocol):
    """Reads bodies whose form only the handler of a model defines.

    An error that it raises only loses the exchange: a `LostError` is counted by its reason, any other error
    as `capture_error`, with its traceback in the log.
    """

    def inputs(self, parts: Sequence[Part], wire: "WireContext") -> tuple[Tensor, ...]:
        """Return the tensors of a request, from its whole body or from the fields of its form in order."""

    def outputs(self, part: Part, wire: "WireContext") -> tuple[Tensor, ...]:
        """Return the tensors of a response."""


class WireContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context of decoding: limits and the configuration of the model.

    Parameters
    ----------
    max_bytes
        Longest content after decompression.
    max_values
        Most values in a JSON document.
    model
        Configuration of the model; None if only the body names the model.
    adapter
        The adapter configured for the model, or None.
    models
        The models of the configuration by name, for a body that names one.
    """

    max_bytes: int
    max_values: int = MAX_JSON_VALUES
    model: Model | None = None
    adapter: Adapter | None = None
    models: Mapping[str, Model] = {}

    def model_named(self, name: str) -> Model:
        """Return the configuration of the model that a body names, which types its tensors.

        Raises
        ------
        UnknownModelError
            There is no such model.
        """
        model = self.models.get(name)
        if model is None:
            raise UnknownModelError(name)
        return model


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a stream, with its response."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class DecodedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded request.

    Parameters
    ----------
    inputs
        Its tensors. Text is BYTES, UTF-8.
    parameters
        The parameters of the protocol, by name.
    document
        The JSON document; empty if there is none.
    text
        `messages`, `tools` or `prompt` in the form of OpenAI's; empty: those of `document` have it.
    model, version
        As named in the body, else empty: then the path names them.
    """

    inputs: tuple[Tensor, ...]
    parameters: Mapping[str, Any] = {}
    document: Mapping[str, Any] = {}
    text: Mapping[str, Any] = {}
    model: str = ""
    version: str = ""


class DecodedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded response.

    Parameters
    ----------
    version
        The version that answered; empty if the response does not name it.
    outputs
        Its tensors.
    pairs
        The requests of a stream with their responses, where they cannot be put together as one batch: each is an exchange of its own. Else empty.
    is_stream
        Whether it came in parts, as they were generated.
    n_tokens
        Generated tokens, of several choices those of the longest; 0: it is not known.
    response_id
        The id that the server gave it; empty: none.
    """

    version: str
    outputs: tuple[Tensor, ...]
    pairs: tuple[Pair, ...] = ()
    is_stream: bool = False
    n_tokens: int = 0
    response_id: str = ""


class Decoder(typing.Protocol):
    """Decodes the messages of one protocol.

    Bodies are already de-chunked and decompressed (Content-Encoding).
    """

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            The exchange cannot be used; the error has the reason.
        """

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response to `query`, whose document is left out; errors as for a request."""


class ProtocolPlugin(ProtocolRoute, frozen=True, kw_only=True):
    """A protocol that a package adds, as its entry point in `quantdrift.protocols` names it.

    The entry point's name is the protocol's. Supervisor and capture process import its module, which imports no heavy library.

    Parameters
    ----------
    path
        As of `ProtocolRoute`: the path of its requests.
    decoder
        It runs in the capture process. What it raises only loses the exchange: a `LostError` is counted by its reason, any other
        error as `capture_error`.
    """

    decoder: Decoder
