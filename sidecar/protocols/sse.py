"""Parser of server-sent events, as the HTML standard defines them, for complete streams."""

import io
from collections.abc import Iterator

import msgspec

from quantdrift.core.records import Loss
from quantdrift.sidecar.protocols.cost import check
from quantdrift.sidecar.protocols.errors import LostError

_MAX_EVENTS = 200_000
_MAX_LINES = 4 * _MAX_EVENTS
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event.

    Parameters
    ----------
    kind
        The value of `event:`, or empty.
    data
        The `data:` lines, joined with line feeds.
    """

    kind: bytes
    data: bytes


def read_events(body: bytes, last: bytes) -> Iterator[Event]:
    """Yield the events in `body`.

    Lines end with CRLF, LF or CR. Comments, ids and unknown fields are ignored.

    Parameters
    ----------
    body
        The whole stream.
    last
        Data of the event that ends a stream; some servers leave out the empty line after it.

    Raises
    ------
    LostError
        `too_large`: too many events or lines. `truncated`: the stream ends within an event.
    """
    unified = body.removeprefix(_BYTE_ORDER_MARK).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if unified.count(b"\n") > _MAX_LINES:
        raise LostError(Loss.TOO_LARGE, f"a stream of more than {_MAX_LINES} lines")
    kind, data, n_events, ended = b"", [], 0, b""
    for ended in io.BytesIO(unified):  # a list of all lines could be many times as large
        line = ended.removesuffix(b"\n")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif name == b"event":
                kind = value.removeprefix(b" ")
            continue
        if data:
            n_events += 1
            if n_events > _MAX_EVENTS:
                raise LostError(Loss.TOO_LARGE, f"a stream of more than {_MAX_EVENTS} events")
            check()
            yield Event(kind=kind, data=b"\n".join(data))
        kind, data = b"", []
    if data == [last]:
        yield Event(kind=kind, data=last)
    elif data or (ended and not ended.endswith(b"\n") and not ended.startswith(b":")):
        raise LostError(Loss.TRUNCATED, "a stream ends within an event")
