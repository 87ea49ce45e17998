"""The file of the intake's callers: who may send exchanges, how a caller is recognised, of which models, and until when.

A file with one word is a token with which all models may be reported. Otherwise each line is an identity of a caller:

    NAME  sha256:HEX|cert:IDENTITY|uid:NUMBER  [until=TIME]  [may=SCOPE,...]  [MODEL ...]

HEX is the SHA-256 hash of the token. IDENTITY is a name in the certificate of a client: a DNS name or URI among its subject's
alternative names, or its common name where it has none of these. NUMBER is the user that a tap runs as. TIME is in ISO 8601
with its offset from UTC; from then on the line is not valid. Each SCOPE is something that the page or the monitor lets a caller do: `read`,
`acknowledge`, `labels`, `gate`; without `may=` all of them. Each MODEL is a name or a pattern with `*` and `?`; without any, all
models may be reported. A caller may have several lines, so that an old and a new token are valid at once. Empty lines and lines
that begin with `#` are ignored.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import msgspec

from quantdrift.core.errors import OperatorError

THE_TOKEN: Final = "token"  # noqa: S105 - the name of a caller
"""Name of every caller where the file has a single token."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_USER: Final = re.compile(r"uid:([0-9]{1,10})")
_CERTIFICATE: Final = re.compile(r"cert:(\S{1,256})")
_UNTIL: Final = "until="
_MAY: Final = "may="
LEAST_SECRET: Final = 16
"""Characters of a token or key that somebody has written: a shorter one can be guessed."""
_MODELS_BYTES: Final = 1024  # they travel with each exchange from the intake to the capture process


class TokenScope(StrEnum):
    """What a token of the page or of the monitor's port is for."""

    READ = "read"  # pages and API
    ACKNOWLEDGE = "acknowledge"  # what people do about alerts and incidents
    LABELS = "labels"  # send labels
    GATE = "gate"  # ask for the verdict of a gate


ALL_SCOPES: Final = frozenset(TokenScope)


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """An identity of a caller: one of token, certificate and user.

    Parameters
    ----------
    name
        Of the caller.
    token_hash
        SHA-256 of the token; empty: none.
    certificate
        A name in the certificate; empty: none.
    user
        Id of the user that a tap runs as; None: none.
    until
        From when on this line is not valid; aware. None: never.
    models
        Names or patterns of the models that it may report on; none: all models.
    scopes
        What it may do at the page and at the monitor's port.
    """

    name: str
    token_hash: bytes = b""
    certificate: str = ""
    user: int | None = None
    until: datetime | None = None
    models: tuple[str, ...] = ()
    scopes: frozenset[TokenScope] = ALL_SCOPES

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


def check_length(secret: str, where: str) -> None:
    """Refuse a single token or a key that can be guessed; lines with hashes say nothing of their tokens.

    Raises
    ------
    OperatorError
        It is too short. The error does not show it.
    """
    if len(secret.split()) == 1 and len(secret.strip()) < LEAST_SECRET:
        raise OperatorError(
            f"{where} has fewer than {LEAST_SECRET} characters, so that it can be guessed: make another one with `openssl rand -hex 32`"
        )


def find_caller(callers: tuple[Caller, ...], token: str, now: datetime) -> Caller | None:
    """Return the caller whose token this is, or None; it takes the same time for every wrong token."""
    token_hash = _hash(token)
    return _last_valid(callers, lambda caller: hmac.compare_digest(caller.token_hash, token_hash), now)


def find_certificate(callers: tuple[Caller, ...], names: Collection[str], now: datetime) -> Caller | None:
    """Return the caller that one of the names in a client's certificate belongs to, or None."""
    return _last_valid(callers, lambda caller: bool(caller.certificate) and caller.certificate in names, now)


def find_user(callers: tuple[Caller, ...], user: int, now: datetime) -> Caller | None:
    """Return the caller whose tap runs as this user, or None."""
    return _last_valid(callers, lambda caller: caller.user == user, now)


def _last_valid(
    callers: tuple[Caller, ...], is_meant: Callable[[Caller], bool], now: datetime
) -> Caller | None:
    last = None
    for caller in callers:
        if is_meant(caller) and (caller.until is None or now < caller.until):
            last = caller
    return last


def _read_line(words: list[str], where: str) -> Caller:
    form = "write NAME sha256:HEX [until=TIME] [may=SCOPE,...] [MODEL ...], or cert:IDENTITY or uid:NUMBER in place of sha256:HEX"
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise OperatorError(
            f"{where}: a caller's name has up to 64 letters, digits, dots, dashes and slashes: {form}"
        )
    identity = rest[0] if rest else ""
    token, certificate, user = (form_.fullmatch(identity) for form_ in (_HASH, _CERTIFICATE, _USER))
    if token is None and certificate is None and user is None:
        raise OperatorError(
            f"{where}: there is no hash of a token after the name: {form}; `printf %s TOKEN | sha256sum` prints HEX"
        )
    until = None
    models = rest[1:]
    if models and models[0].startswith(_UNTIL):
        until = _time(models.pop(0).removeprefix(_UNTIL), where)
    scopes = ALL_SCOPES
    if models and models[0].startswith(_MAY):
        scopes = _scopes(models.pop(0).removeprefix(_MAY), where)
    if sum(len(model.encode()) for model in models) > _MODELS_BYTES:
        raise OperatorError(
            f"{where}: the names of the models have more than {_MODELS_BYTES} bytes: use patterns"
        )
    return Caller(
        name=name,
        token_hash=b"" if token is None else bytes.fromhex(token[1]),
        certificate="" if certificate is None else certificate[1],
        user=None if user is None else int(user[1]),
        until=until,
        models=tuple(models),
        scopes=scopes,
    )


def _scopes(text: str, where: str) -> frozenset[TokenScope]:
    try:
        return frozenset(map(TokenScope, text.split(",")))
    except ValueError as error:
        raise OperatorError(
            f"{where}: may= names something unknown: write one or more of {','.join(TokenScope)}"
        ) from error


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
