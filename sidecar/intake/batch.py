"""Batches that clients post to the intake: requests with their responses, in any known protocol."""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec

from quantdrift.core.errors import QuantdriftError
from quantdrift.sidecar.state.routes import model_in

MAX_EXCHANGES = 1000
_MAX_AGE = timedelta(days=1)
_MAX_AHEAD = timedelta(minutes=5)
_NONE = msgspec.Raw()


class BatchError(QuantdriftError):
    """The body is not a batch."""


class SubmittedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of a batch.

    Parameters
    ----------
    index
        Its position in the batch.
    target
        The path that the client requested.
    model
        The model that the path or else the request names; empty: neither does.
    headers
        Headers of the request, names in lower case.
    request, response
        Contents.
    status, response_headers
        Status and headers of the response.
    captured_at
        Time when the response was complete; aware.
    """

    index: int
    target: str
    model: str
    headers: Mapping[str, str]
    request: bytes
    response: bytes
    status: int
    response_headers: Mapping[str, str]
    captured_at: datetime


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed batch.

    Parameters
    ----------
    exchanges
        The valid exchanges.
    rejected
        Index and error of each of the others.
    """

    exchanges: list[SubmittedExchange]
    rejected: list[tuple[int, str]]


class _WireExchange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exchange on the wire; a content is a JSON document, or any bytes as base64."""

    target: Annotated[str, msgspec.Meta(pattern="^/", max_length=4096)]
    headers: dict[str, str] = {}
    request: msgspec.Raw = _NONE
    request_base64: str | msgspec.UnsetType = msgspec.UNSET
    response: msgspec.Raw = _NONE
    response_base64: str | msgspec.UnsetType = msgspec.UNSET
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] = 200
    response_headers: dict[str, str] = {}
    captured_at: Annotated[datetime, msgspec.Meta(tz=True)] | msgspec.UnsetType = msgspec.UNSET


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    exchanges: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EXCHANGES)]


class _Named(msgspec.Struct, frozen=True):
    model: str = ""


_NAMED = msgspec.json.Decoder(_Named)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_EXCHANGE = msgspec.json.Decoder(_WireExchange)


def read_batch(body: bytes, now: datetime | None = None) -> Batch:
    """Return the batch in `body`; an invalid exchange does not affect the others.

    Parameters
    ----------
    body
        JSON.
    now
        Aware. It is the time of exchanges without one; a given time must be at most a day before or five
        minutes after.

    Raises
    ------
    BatchError
        It is not JSON, or not a batch.
    """
    try:
        envelope = _ENVELOPE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError(str(error)) from error
    at = now or datetime.now(UTC)
    batch = Batch(exchanges=[], rejected=[])
    for index, raw in enumerate(envelope.exchanges):
        try:
            batch.exchanges.append(_checked(index, _EXCHANGE.decode(raw), at))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            batch.rejected.append((index, str(error)))
    return batch


def _checked(index: int, wire: _WireExchange, now: datetime) -> SubmittedExchange:
    at = now if isinstance(wire.captured_at, msgspec.UnsetType) else wire.captured_at
    if not now - _MAX_AGE <= at <= now + _MAX_AHEAD:
        raise ValueError("captured_at is more than a day in the past, or in the future")
    request = _content("request", wire.request, wire.request_base64)
    path = wire.target.partition("?")[0].encode(errors="replace")
    return SubmittedExchange(
        index=index,
        target=wire.target,
        model=model_in(path) or _model_of(request),
        headers={name.lower(): value for name, value in wire.headers.items()},
        request=request,
        response=_content("response", wire.response, wire.response_base64),
        status=wire.status,
        response_headers={name.lower(): value for name, value in wire.response_headers.items()},
        captured_at=at,
    )


def _model_of(request: bytes) -> str:
    """Return the member `model` of a JSON request, as of the OpenAI protocol; empty if there is none.

    The capture process checks again, for all protocols and encodings.
    """
    try:
        return _NAMED.decode(request).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _content(name: str, document: msgspec.Raw, text: str | msgspec.UnsetType) -> bytes:
    body = bytes(document)
    if bool(body) == isinstance(text, str):
        raise ValueError(f"give either {name} or {name}_base64")
    if isinstance(text, msgspec.UnsetType):
        return body
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}_base64 is not base64") from error
