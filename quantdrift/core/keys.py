"""Key files: several keys with ids in one file, so that a key can be replaced without a restart and without loss.

A file is JSON with the mode 0600; `quantdrift keys` creates and changes it. The newest key whose time has come makes what is
new; every key of the file reads what is old. A new key waits for a while before it is used, so that the file can reach
all processes first, in any order.
"""

import functools
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError

_LOG = logging.getLogger(__name__)
_SECRET_BYTES: Final = 32
_POLL_S = 1.0
_MAY_BE_PUBLIC: Final = frozenset({"stream.payload_key_file", "FILE", "OTHERS"})
_ONLY_OPENS: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Id = Annotated[str, msgspec.Meta(pattern=r"^k[0-9a-f]{8}\Z")]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. Its `repr` shows no secret.

    Parameters
    ----------
    id
        `k` and eight hexadecimal digits; it is not secret, and stands beside whatever the key made.
    created, used_from
        When it was created, and when it replaces the one before.
    secret
        32 random bytes; none of a public key.
    public
        Of a key that only encrypts payloads: X25519, 32 bytes. Its secret is in the shadow's file alone.
    """

    id: _Id
    created: datetime
    used_from: datetime
    secret: bytes = b""
    public: bytes = b""

    @classmethod
    def create(cls, now: datetime, wait_s: float = 0.0) -> Self:
        """Return a new random key that is used after `wait_s` seconds."""
        return cls(
            id=f"k{secrets.token_hex(4)}",
            created=now,
            used_from=now + timedelta(seconds=wait_s),
            secret=secrets.token_bytes(_SECRET_BYTES),
        )

    def __repr__(self) -> str:
        return f"Key(id={self.id!r}, ...)"

    def derived(self, purpose: bytes) -> bytes:
        """Return 32 bytes for one purpose (HMAC-SHA256), so that no two uses of a file share a key.

        Raises
        ------
        OperatorError
            It is a public key.
        """
        if not self.secret:
            raise OperatorError(
                f"{self.id} is a public key, which only encrypts payloads: use the file that has its secret"
            )
        return _derived(self.secret, purpose)


@functools.lru_cache(maxsize=64)
def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, purpose, "sha256")


class KeyRing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of one file, oldest first."""

    keys: tuple[Key, ...]

    def current(self, now: datetime) -> Key:
        """Return the key that makes what is new: the newest whose time has come, else the first one.

        The first one is used before its time by a host whose clock is behind.
        """
        making = self.making
        used = [key for key in making if key.used_from <= now]
        return max(used, key=lambda key: key.used_from) if used else min(making, key=lambda k: k.used_from)

    @property
    def making(self) -> tuple[Key, ...]:
        """The keys that make what is new, or will: not those that were joined."""
        return tuple(key for key in self.keys if key.used_from > _ONLY_OPENS) or self.keys

    def joined(self, other: Self) -> Self:
        """Return this ring with the keys of another one, which only open what they made: this one's go on making what is new."""
        new = [key for key in other.keys if self.find(key.id) is None]
        return type(self)(
            keys=(*(msgspec.structs.replace(key, used_from=_ONLY_OPENS) for key in new), *self.keys)
        )

    def find(self, key_id: str) -> Key | None:
        """Return the key with this id, or None."""
        return next((key for key in self.keys if key.id == key_id), None)


def is_key_file(text: bytes) -> bool:
    """Return whether a text is meant as a key file: it is a JSON object."""
    return text.lstrip()[:1] == b"{"


def read_keys(text: bytes, option: str, path: str | Path) -> KeyRing:
    """Return the keys in the text of a file.

    Raises
    ------
    OperatorError
        It is not a key file. The message names `option` and `path`, and quotes nothing of the file.
    """
    try:
        ring = msgspec.json.decode(text, type=KeyRing)
    except msgspec.MsgspecError as error:
        raise OperatorError(
            f"{option}: {path} is not a key file: create one with `quantdrift keys new FILE`"
        ) from error
    if not ring.keys or len({key.id for key in ring.keys}) < len(ring.keys):
        raise OperatorError(f"{option}: {path} has no keys, or two with one id: create another key file")
    if any(
        {len(key.secret), len(key.public)} != {0, _SECRET_BYTES} or key.used_from.tzinfo is None
        for key in ring.keys
    ):
        raise OperatorError(f"{option}: {path} has a key that is not 32 bytes long, or a time without a zone")
    if option not in _MAY_BE_PUBLIC and any(key.public for key in ring.keys):
        raise OperatorError(
            f"{option}: {path} has public keys, which only encrypt payloads: create one with `quantdrift keys new FILE`"
        )
    return ring


def load_keys(path: str | Path, option: str) -> KeyRing:
    """Return the keys in a file.

    Raises
    ------
    OperatorError
        It cannot be read, or is not a key file.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise OperatorError(f"{option}: {path} cannot be read: {error.strerror}") from error
    return read_keys(text, option, path)


def write_keys(path: Path, ring: KeyRing, *, is_new: bool = False) -> None:
    """Write a key file atomically, readable by its owner only.

    Raises
    ------
    OperatorError
        It cannot be written, or `is_new` and it exists.
    """
    text = msgspec.json.format(msgspec.json.encode(ring)) + b"\n"
    try:
        if is_new:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            return
        target = path.resolve()
        owner = target.stat()
        descriptor, new = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                if (owner.st_uid, owner.st_gid) != (os.getuid(), os.getgid()):
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
                os.fsync(file.fileno())
            Path(new).replace(target)
        except BaseException:
            Path(new).unlink(missing_ok=True)
            raise
    except FileExistsError as error:
        raise OperatorError(f"{path} exists: `quantdrift keys rotate {path}` adds a key to it") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error


class KeyFile:
    """A key file as a running process sees it: it is read again when it changes, at most once a second.

    A file that cannot be read any more leaves the keys that were read before in use: nothing is made with weaker means, and
    nothing is lost while a mounted secret is being replaced.

    Parameters
    ----------
    path, option
        The file, and the option that names it.
    clock
        Chooses the current key, and times the looks at the file.
    first
        Text of the file as another process read it, for the time before this one can; empty: none.
    """

    def __init__(self, path: str, option: str, clock: Clock, first: bytes = b"") -> None:
        self._path = Path(path)
        self._option = option
        self._clock = clock
        self._ring = read_keys(first, option, path) if first else None
        self._seen: tuple[int, int, int] | None = None
        self._next_s = -_POLL_S
        self._problem = ""

    @classmethod
    def of(cls, path: str, option: str, clock: Clock) -> Self | None:
        """Return the key file that an option names, or None: it names none."""
        return cls(path, option, clock) if path else None

    @property
    def ring(self) -> KeyRing | None:
        """The keys, or None: the file could not be read so far."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_s:
            self._next_s = now_s + _POLL_S
            self._poll()
        return self._ring

    @property
    def current(self) -> Key | None:
        """The key that makes what is new, or None: the file could not be read so far."""
        ring = self.ring
        return None if ring is None else ring.current(self._clock.now())

    def _poll(self) -> None:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen == self._seen:
                return
            ring = load_keys(self._path, self._option)
        except OSError as error:
            self._report(f"{self._option}: {self._path} cannot be read: {error.strerror}")
        except OperatorError as error:
            self._report(str(error))
        else:
            if self._problem or (self._ring is not None and self._ring != ring):
                _LOG.info("%s: read the keys %s", self._option, _names(ring.keys))
            self._seen, self._ring, self._problem = seen, ring, ""

    def _report(self, problem: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        rest = "there is no key until then" if self._ring is None else "the keys read before stay in use"
        _LOG.error("%s. It is tried again every second; %s", problem, rest)


def _names(keys: Sequence[Key]) -> str:
    return ", ".join(key.id for key in keys)
