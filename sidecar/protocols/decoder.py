"""What every protocol's decoder is: from the content of two messages to named tensors. No I/O."""

import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from quantdrift.core.config.schema import Model
from quantdrift.core.records import Tensor
from sidecar.protocols.message import Head

# A JSON value of two bytes on the wire takes up to 75 in memory: a body's length alone bounds nothing.
MAX_JSON_VALUES = 2_000_000


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder is told beside the messages.

    Parameters
    ----------
    max_bytes
        Longest content after decompression.
    max_values
        Most values that a JSON document may hold.
    model
        The model's configuration; None where only the body names the model.
    """

    max_bytes: int
    max_values: int = MAX_JSON_VALUES
    model: Model | None = None


class Query(msgspec.Struct, frozen=True, kw_only=True):
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


class Reply(msgspec.Struct, frozen=True, kw_only=True):
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

    def request(self, head: Head, body: bytes, wire: Wire) -> Query:
        """Return the request.

        Raises
        ------
        LostError
            It cannot be used; the reason is in it.
        """

    def response(self, head: Head, body: bytes, query: Query, wire: Wire) -> Reply:
        """Return the response to `query`, which comes without its document; errors as for a request."""
