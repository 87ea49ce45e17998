"""What every protocol's decoder is: from the content of two messages to named tensors. No I/O."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Tensor
from quantdrift.sidecar.protocols.http_message import Head

# A JSON value of two bytes on the wire takes up to 75 in memory: a body's length alone bounds nothing.
MAX_JSON_VALUES = 2_000_000


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A body, or one field of a form.

    Parameters
    ----------
    name
        The field's name; `body` for a whole body.
    content_type
        In lower case, without parameters; empty where it is not told.
    data
        Decompressed.
    """

    name: str
    content_type: str
    data: bytes


class Adapter(typing.Protocol):
    """Reads bodies whose form is a matter between a model's handler and its clients.

    Whatever it raises costs the exchange and nothing else: a `LostError` is counted by its reason, any other error as
    `capture_error`, with its traceback in the log.
    """

    def inputs(self, parts: Sequence[Part], wire: "WireContext") -> tuple[Tensor, ...]:
        """Return the tensors of a request: of its whole body, or of its form's fields, in their order."""

    def outputs(self, part: Part, wire: "WireContext") -> tuple[Tensor, ...]:
        """Return the tensors of a response."""


class WireContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is told beside the messages.

    Parameters
    ----------
    max_bytes
        Longest content after decompression.
    max_values
        Most values that a JSON document may hold.
    model
        The model's configuration; None where only the body names the model.
    adapter
        What the configuration names for the model, or None.
    """

    max_bytes: int
    max_values: int = MAX_JSON_VALUES
    model: Model | None = None
    adapter: Adapter | None = None


class DecodedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded request.

    Parameters
    ----------
    inputs
        Its tensors. Text is BYTES, UTF-8.
    parameters
        Its parameters, as the protocol calls them, by name.
    document
        Its JSON document, empty where there is none.
    model, version
        What the body names, or empty where it names none: then the path does.
    """

    inputs: tuple[Tensor, ...]
    parameters: Mapping[str, Any] = {}
    document: Mapping[str, Any] = {}
    model: str = ""
    version: str = ""


class DecodedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded response.

    Parameters
    ----------
    version
        The version that answered, or empty where the response does not tell.
    outputs
        Its tensors.
    """

    version: str
    outputs: tuple[Tensor, ...]


class Decoder(typing.Protocol):
    """Reads the messages of one protocol. Contents come de-chunked and, by Content-Encoding, decompressed."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            It cannot be used; the reason is in it.
        """

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response to `query`, which comes without its document; errors as for a request."""
