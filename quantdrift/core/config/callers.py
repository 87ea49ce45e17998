"""The file of the intake's callers: who may send exchanges, with which token, of which models, and until when.

A file with one word is a token with which all models may be reported. Otherwise each line is a token of a caller:

    NAME  sha256:HEX  [until=TIME]  [MODEL ...]

HEX is the SHA-256 hash of the token. TIME is in ISO 8601 with its offset from UTC; from then on the token is refused. Each
MODEL is a name or a pattern with `*` and `?`; without any, all models may be reported. A caller may have several lines, so that
an old and a new token are valid at once. Empty lines and lines that begin with `#` are ignored.
"""

import hashlib
import hmac
import re
from datetime import UTC, datetime
from typing import Final

import msgspec

from quantdrift.core.errors import OperatorError

THE_TOKEN: Final = "token"  # noqa: S105 - the name of a caller
"""Name of every caller where the file has a single token."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_UNTIL: Final = "until="
_MODELS_BYTES: Final = 1024  # they travel with each exchange from the intake to the capture process


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a caller.

    Parameters
    ----------
    name
        Of the caller.
    token_hash
        SHA-256 of the token.
    until
        When the token expires; aware. None: never.
    models
        Names or patterns of the models that it may report on; none: all models.
    """

    name: str
    token_hash: bytes
    until: datetime | None = None
    models: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Caller({self.name})"


def read_callers(text: str, where: str) -> tuple[Caller, ...]:
    """Return the callers in the content of the file; none if it is empty.

    Parameters
    ----------
    where
        The file or variable, for the error.

    Raises
    ------
    OperatorError
        A line cannot be read. The error has its number and not its content.
    """
    if len(text.split()) == 1:
        return (Caller(name=THE_TOKEN, token_hash=_hash(text.strip())),)
    lines = enumerate(text.splitlines(), start=1)
    return tuple(
        _read_line(line.split(), f"{where}, line {number}")
        for number, line in lines
        if line.strip() and not line.lstrip().startswith("#")
    )


def find_caller(callers: tuple[Caller, ...], token: str, now: datetime) -> Caller | None:
    """Return the caller whose token this is, or None; it takes the same time for every wrong token."""
    given, found = _hash(token), None
    for caller in callers:
        if hmac.compare_digest(caller.token_hash, given) and (caller.until is None or now < caller.until):
            found = caller
    return found


def _read_line(words: list[str], where: str) -> Caller:
    form = "write NAME sha256:HEX [until=TIME] [MODEL ...]"
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise OperatorError(
            f"{where}: a caller's name has up to 64 letters, digits, dots, dashes and slashes: {form}"
        )
    token = _HASH.fullmatch(rest[0]) if rest else None
    if token is None:
        raise OperatorError(
            f"{where}: there is no hash of a token after the name: {form}; `printf %s TOKEN | sha256sum` prints HEX"
        )
    until = None
    models = rest[1:]
    if models and models[0].startswith(_UNTIL):
        until = _time(models.pop(0).removeprefix(_UNTIL), where)
    if sum(len(model.encode()) for model in models) > _MODELS_BYTES:
        raise OperatorError(
            f"{where}: the names of the models have more than {_MODELS_BYTES} bytes: use patterns"
        )
    return Caller(name=name, token_hash=bytes.fromhex(token[1]), until=until, models=tuple(models))


def _time(text: str, where: str) -> datetime:
    try:
        until = datetime.fromisoformat(text)
    except ValueError as error:
        raise OperatorError(
            f"{where}: until= is no time: write for example until=2027-01-31T00:00Z"
        ) from error
    if until.tzinfo is None:
        raise OperatorError(
            f"{where}: until= has no offset from UTC: write for example until=2027-01-31T00:00Z"
        )
    return until.astimezone(UTC)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
