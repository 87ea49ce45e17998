"""The file in which the capture process tells the relay workers which policy to follow.

It lies next to the hand-off socket, in a directory of this sidecar alone, and is replaced whole: a reader sees the
last one or the one before. A relay worker needs no NATS for it, and a capture process that is started anew finds
what its predecessor had told.
"""

import logging
from pathlib import Path

import msgspec

from quantdrift.core.directive import RefusedError, decode_directive, encode
from quantdrift.sidecar.directives import Directives

NAME = "policy"
_LOG = logging.getLogger(__name__)


class _Notice(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Directives as on the wire, the latest first, and whether that one is to be followed."""

    follow: bool
    directives: tuple[bytes, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Notice)


class Notice:
    """One process's view of the file.

    Parameters
    ----------
    path
        The file; it need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def post(self, directives: Directives, *, follow: bool) -> None:
        """Replace it.

        Raises
        ------
        OSError
            It cannot be written; readers go on with what they have, for as long as that is valid.
        """
        notice = _Notice(follow=follow, directives=tuple(encode(known) for known in directives.known))
        new = self._path.with_suffix(".new")
        new.write_bytes(_ENCODER.encode(notice))
        new.replace(self._path)

    def read(self, directives: Directives, *, whole: bool = False) -> None:
        """Have `directives` follow what it says, if it has changed since the last call.

        Parameters
        ----------
        directives
            Of this process.
        whole
            Remember the earlier ones too: a relay worker draws and never looks back.
        """
        try:
            status = self._path.stat()
        except OSError:
            seen = None
        else:
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
        if seen == self._seen:
            return
        raw = b""
        if seen is not None:
            try:
                raw = self._path.read_bytes()
            except OSError as error:  # too many open files, say: the next call tries again
                _LOG.warning("the policy cannot be read, what was followed goes on: %s", error)
                return
        self._seen = seen
        directives.follow(None)
        if seen is not None:
            self._take(raw, directives, whole=whole)

    def _take(self, raw: bytes, directives: Directives, *, whole: bool) -> None:
        try:
            notice = _DECODER.decode(raw)
            if whole:
                for wire in reversed(notice.directives):
                    directives.remember(decode_directive(wire))
            if notice.follow and notice.directives:
                directives.follow(decode_directive(notice.directives[0]))
        except (msgspec.MsgspecError, RefusedError):
            _LOG.exception("%s is unreadable: the configuration's rates hold", self._path)
