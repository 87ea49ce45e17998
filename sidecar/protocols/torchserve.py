"""Decoder of TorchServe: `POST /predictions/NAME[/VERSION]`, whose bodies only a handler defines.

A body is one value, or a form (`multipart/form-data`) of values. The adapter configured for the model reads
them.
"""

from collections.abc import Iterable

import msgspec
from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from quantdrift.core.records import Loss, Tensor
from quantdrift.sidecar.protocols.content import check_content, check_shape
from quantdrift.sidecar.protocols.decoder import Adapter, DecodedRequest, DecodedResponse, Part, WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head

_MAX_FIELDS = 1000
_FORM = "multipart/form-data"


class TorchServe:
    """Decoder of requests `POST /predictions/NAME` and their responses."""

    def request(self, head: Head, body: bytes, wire: WireContext) -> DecodedRequest:
        """Return the request.

        Raises
        ------
        LostError
            `metadata`: no adapter is configured. `decode`: the form is malformed, or the adapter says so.
            `too_large`: too many fields.
        """
        adapter = _adapter(wire)
        return DecodedRequest(inputs=_checked(adapter.inputs(_parts(head, body), wire)))

    def response(self, head: Head, body: bytes, query: DecodedRequest, wire: WireContext) -> DecodedResponse:
        """Return the response; errors as for a request."""
        part = Part(name="body", content_type=_content_type(head)[0], data=body)
        return DecodedResponse(version="", outputs=_checked(_adapter(wire).outputs(part, wire)))


def _adapter(wire: WireContext) -> Adapter:
    if wire.adapter is None:
        raise LostError(Loss.METADATA, "the form of the model's bodies is unknown: set models.adapter")
    return wire.adapter


def _content_type(head: Head) -> tuple[str, str]:
    """Return the content type in lower case, and its boundary."""
    content_type, options = parse_options_header(head.headers.get("content-type", ""))
    return content_type, options.get("boundary", "")


def _parts(head: Head, body: bytes) -> list[Part]:
    content_type, boundary = _content_type(head)
    if content_type != _FORM:
        return [Part(name="body", content_type=content_type, data=body)]
    parts: list[Part] = []
    try:
        with PushMultipartParser(boundary, len(body), max_segment_count=_MAX_FIELDS, strict=True) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    parts.append(Part(name=event.name, content_type=event.content_type or "", data=b""))
                elif event is not None:  # None ends a field; its content is in one piece, as the body was
                    parts[-1] = msgspec.structs.replace(parts[-1], data=event)
    except ParserLimitReached as error:
        raise LostError(Loss.TOO_LARGE, "a form with too many or too long fields") from error
    except MultipartError as error:
        raise LostError(Loss.DECODE, "the form is malformed") from error
    if not parts:
        raise LostError(Loss.DECODE, "a form without fields")
    return parts


def _checked(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Check and return the tensors of an adapter, which may be wrong."""
    checked = tuple(tensors)
    for tensor in checked:
        check_shape(tensor.datatype, tensor.shape)
        check_content(tensor.datatype, tensor.shape, tensor.data)
    return checked
