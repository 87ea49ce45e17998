"""What the capture intake is sent: batches of requests with their responses, in the words of any known protocol."""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec

from quantdrift.core.errors import QuantdriftError

MOST_EXCHANGES = 1000
_OLDEST = timedelta(days=1)
_EARLIEST = timedelta(minutes=5)
_NONE = msgspec.Raw()


class BatchError(QuantdriftError):
    """A body is no batch at all."""


class SubmittedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange of a batch.

    Parameters
    ----------
    target
        The path that the client asked for.
    headers
        Of the request, names in lower case.
    request, response
        Contents.
    status, response_headers
        Of the response.
    captured_at
        When the response was complete; aware.
    """

    target: str
    headers: Mapping[str, str]
    request: bytes
    response: bytes
    status: int
    response_headers: Mapping[str, str]
    captured_at: datetime


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was read.

    Parameters
    ----------
    exchanges
        Those that are well formed.
    rejected
        Place and fault of the others.
    """

    exchanges: list[SubmittedExchange]
    rejected: list[tuple[int, str]]


class _Sent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exchange as it is sent; a content is a JSON document, or any bytes as base64."""

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
    exchanges: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_EXCHANGES)]


_ENVELOPE = msgspec.json.Decoder(_Envelope)
_SENT = msgspec.json.Decoder(_Sent)


def read_batch(body: bytes, now: datetime | None = None) -> Batch:
    """Return the batch in `body`; what is wrong with one exchange costs the others nothing.

    Parameters
    ----------
    body
        JSON.
    now
        Aware; stamps exchanges that tell no time, and bounds those that do: a day back, five minutes ahead.

    Raises
    ------
    BatchError
        It is no JSON, or no batch.
    """
    try:
        envelope = _ENVELOPE.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError(str(error)) from error
    at = now or datetime.now(UTC)
    batch = Batch(exchanges=[], rejected=[])
    for index, raw in enumerate(envelope.exchanges):
        try:
            batch.exchanges.append(_told(_SENT.decode(raw), at))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            batch.rejected.append((index, str(error)))
    return batch


def _told(sent: _Sent, now: datetime) -> SubmittedExchange:
    at = now if isinstance(sent.captured_at, msgspec.UnsetType) else sent.captured_at
    if not now - _OLDEST <= at <= now + _EARLIEST:
        raise ValueError("captured_at is more than a day ago, or ahead")
    return SubmittedExchange(
        target=sent.target,
        headers={name.lower(): value for name, value in sent.headers.items()},
        request=_content("request", sent.request, sent.request_base64),
        response=_content("response", sent.response, sent.response_base64),
        status=sent.status,
        response_headers={name.lower(): value for name, value in sent.response_headers.items()},
        captured_at=at,
    )


def _content(name: str, document: msgspec.Raw, text: str | msgspec.UnsetType) -> bytes:
    given = bytes(document)
    if bool(given) == isinstance(text, str):
        raise ValueError(f"give either {name} or {name}_base64")
    if isinstance(text, msgspec.UnsetType):
        return given
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}_base64 is not base64") from error
