"""HTTP/2 connections as peers write them: frames by hand, header blocks by another library's encoder."""

import struct
from collections.abc import Iterable

import msgspec
from hpack import Encoder

from quantdrift.sidecar.relay.http2.frames import PREFACE

INFER = "/inference.GRPCInferenceService/ModelInfer"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack("!IBI", len(content) << 8 | kind, flags, stream) + content


def data(
    stream: int, content: bytes, *, ends: bool = False, pad: int | None = None, size: int = 16_384
) -> bytes:
    """Return content in as many frames as it takes, each padded if asked for."""
    parts = [content[pos : pos + size] for pos in range(0, len(content), size)] or [b""]
    wire = b""
    for index, part in enumerate(parts):
        flags = END_STREAM if ends and index == len(parts) - 1 else 0
        if pad is None:
            wire += frame(DATA, flags, stream, part)
        else:
            wire += frame(DATA, flags | PADDED, stream, bytes([pad]) + part + bytes(pad))
    return wire


def headers(
    stream: int,
    block: bytes,
    *,
    ends: bool = False,
    cuts: Iterable[int] = (),
    pad: int | None = None,
    prioritised: bool = False,
) -> bytes:
    """Return a header block in HEADERS and, where it is cut, CONTINUATION."""
    parts, before = [], 0
    for cut in sorted(cuts):
        parts.append(block[before:cut])
        before = max(before, cut)
    parts.append(block[before:])
    first, flags = parts[0], END_STREAM if ends else 0
    if prioritised:
        first, flags = struct.pack("!IB", 0, 9) + first, flags | PRIORITISED
    if pad is not None:
        first, flags = bytes([pad]) + first + bytes(pad), flags | PADDED
    wire = frame(HEADERS, flags | (END_HEADERS if len(parts) == 1 else 0), stream, first)
    for index, part in enumerate(parts[1:], start=2):
        wire += frame(CONTINUATION, END_HEADERS if index == len(parts) else 0, stream, part)
    return wire


def settings(*pairs: tuple[int, int]) -> bytes:
    """Return a frame of settings."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack("!HI", *pair) for pair in pairs))


def reset(stream: int, code: int = 8) -> bytes:
    """Return the frame that ends a stream at once."""
    return frame(RST_STREAM, 0, stream, struct.pack("!I", code))


def goaway(last: int) -> bytes:
    """Return the frame that says that nothing newer is answered."""
    return frame(GOAWAY, 0, 0, struct.pack("!II", last, 0) + b"bye")


OPENING = PREFACE + settings((4, 1 << 20)) + frame(WINDOW, 0, 0, struct.pack("!I", 1))
"""What a client begins with."""
ANSWER = settings((3, 100)) + frame(SETTINGS, ACK, 0)
"""What a server begins with."""


class Ends(msgspec.Struct):
    """The encoders of both ends of a connection."""

    client: Encoder = msgspec.field(default_factory=Encoder)
    server: Encoder = msgspec.field(default_factory=Encoder)

    def request(self, *extra: tuple[str, str], path: str = INFER, method: str = "POST") -> bytes:
        """Return the header block of a request."""
        return self.client.encode(
            [
                (":method", method),
                (":scheme", "http"),
                (":path", path),
                (":authority", "h:1"),
                ("content-type", "application/grpc"),
                *extra,
            ]
        )

    def response(self, *extra: tuple[str, str], status: str = "200") -> bytes:
        """Return the header block of a response."""
        return self.server.encode([(":status", status), ("content-type", "application/grpc"), *extra])

    def trailers(self, status: str = "0", *extra: tuple[str, str]) -> bytes:
        """Return the header block that ends a response."""
        return self.server.encode([("grpc-status", status), *extra])
