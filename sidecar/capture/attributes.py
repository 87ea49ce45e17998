"""Attributes of an exchange: allow-listed headers, parameters and JSON values, cut or hashed.

No value that the configuration does not name leaves the pod.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from quantdrift.core.config.schema import Capture
from quantdrift.core.config.strata import MAX_VALUE_BYTES
from quantdrift.core.keys import KeyFile, KeyRing
from quantdrift.core.text import visible

_HMAC_DIGITS = 32
_PURPOSE = b"quantdrift attribute 1"


class Attributes:
    """Picks the attributes of exchanges.

    Parameters
    ----------
    capture
        Which headers, parameters and JSON paths are recorded, and which of them only as a keyed hash.
    max_value_bytes
        Longer values are cut.
    """

    def __init__(
        self, capture: Capture, keyed_hash: "KeyedHash", *, max_value_bytes: int = MAX_VALUE_BYTES
    ) -> None:
        self._max_value_bytes = max_value_bytes
        self._capture = capture
        self._hashed = frozenset(capture.hmac)
        self._keyed_hash = keyed_hash

    def pick(
        self, headers: Mapping[str, str], parameters: Mapping[str, Any], document: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return the values that are present, keyed `header.NAME`, `parameter.NAME`, `json.PATH`.

        Parameters
        ----------
        headers
            Headers of the request, names in lower case.
        parameters
            Parameters of the request.
        document
            The JSON part of the request.
        """
        values: dict[str, Any] = {}
        for name in self._capture.headers:
            values[f"header.{name}"] = headers.get(name.lower())
        for name in self._capture.parameters:
            values[f"parameter.{name}"] = parameters.get(name)
        for path in self._capture.json:
            values[f"json.{path}"] = _value_at(document, path)
        return {key: self._redact(key, as_text(value)) for key, value in values.items() if value is not None}

    def _redact(self, key: str, text: str) -> str:
        if key in self._hashed:
            return self._keyed_hash(text)
        return cut(text, self._max_value_bytes)


class KeyedHash:
    """The hash of personal values: the first 32 hexadecimal digits of HMAC-SHA256.

    Equal texts have equal hashes as long as the key stays. With a key file the id of the key precedes the hash (`ID:HASH`): a
    hash by the next key is another value, and can be told from one by this key.

    Parameters
    ----------
    key
        The key, if it is a plain text.
    keys
        The key file in its place; None: there is none.
    """

    def __init__(self, key: bytes, keys: KeyFile | None = None) -> None:
        self._key = key
        self._keys = keys

    def __call__(self, text: str) -> str:
        """Return the hash of a text."""
        key = None if self._keys is None else self._keys.current
        if key is None:
            return _digest(self._key, text)
        return f"{key.id}:{_digest(key.derived(_PURPOSE), text)}"


def every_hash(text: str, key: bytes, ring: KeyRing | None = None) -> tuple[str, ...]:
    """Return all that a text can be stored as: hashed with a plain key, and with each key of a key file.

    Parameters
    ----------
    key
        The plain key; empty: there is none.
    """
    with_plain = [_digest(key, text)] if key else []
    keys = () if ring is None else ring.keys
    return (*with_plain, *(f"{ring_key.id}:{_digest(ring_key.derived(_PURPOSE), text)}" for ring_key in keys))


def _digest(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:_HMAC_DIGITS]


def cut(text: str, max_bytes: int) -> str:
    """Return the longest prefix of `text` within `max_bytes`, without what nobody sees: Postgres refuses NUL, too."""
    return visible(text).encode(errors="ignore")[:max_bytes].decode(errors="ignore")


def as_text(value: Any) -> str:
    """Return a string unchanged and any other JSON value as compact JSON; lone surrogates are kept."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # JSON may contain "\\ud800", which UTF-8 cannot encode
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _value_at(document: Any, path: str) -> Any:
    for step in path.split("."):
        if isinstance(document, Mapping):
            document = document.get(step)
        elif isinstance(document, list) and step.isdecimal() and int(step) < len(document):
            document = document[int(step)]
        else:
            return None
    return document
