"""Secrets of child processes: they are passed by a file descriptor, not by the environment.

The environment of a process can be read in /proc for as long as it runs, is in its core dumps, and is inherited by all
that it starts. A descriptor is read once, and closed. The names stay those of the variables: code reads `variables()`,
where it read `os.environ`.

Relay workers import this module, so it must stay light.
"""

import functools
import os
import tempfile
from collections.abc import Mapping
from typing import Final

import msgspec

VARIABLE: Final = "QUANTDRIFT_SECRETS"
"""Environment variable with the number of the descriptor; absent: the process was given no secrets."""
_SECRETS: Final = frozenset(
    {
        "QUANTDRIFT_DSN",
        "QUANTDRIFT_HMAC_KEY",
        "QUANTDRIFT_INTAKE_TOKEN",
        "QUANTDRIFT_REFERENCE_TOKEN",
        "QUANTDRIFT_SAMPLING_SALT",
        "QUANTDRIFT_WEB_TOKEN",
    }
)
_OPTIONS: Final = "QUANTDRIFT__"  # any of them may be an address with a password
_MOST_BYTES: Final = 16 * 1024 * 1024


def is_secret(name: str) -> bool:
    """Return whether a variable may hold a secret: quantdrift's own secrets, and all that override an option."""
    return name in _SECRETS or name.startswith(_OPTIONS)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that may hold a secret."""
    return {name: value for name, value in environment.items() if not is_secret(name)}


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that may hold a secret."""
    return {name: value for name, value in environment.items() if is_secret(name)}


def written(secrets: Mapping[str, str]) -> int:
    """Return a new descriptor of a file in memory with these variables; a child inherits it, and the caller closes it.

    Raises
    ------
    OSError
        There is no descriptor or no memory left.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("quantdrift-secrets")
    else:  # pragma: no cover - not Linux
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(secrets))
    except BaseException:
        os.close(fd)
        raise
    return fd


def variables() -> dict[str, str]:
    """Return the environment of this process together with the secrets that its parent passed."""
    return {**os.environ, **_received()}


@functools.cache
def _received() -> Mapping[str, str]:
    """Read the parent's descriptor once, and close it: the children of this process do not inherit it."""
    number = os.environ.pop(VARIABLE, "")
    if not number.isdecimal():
        return {}
    fd = int(number)
    try:
        return msgspec.json.decode(os.pread(fd, _MOST_BYTES, 0), type=dict[str, str])
    finally:
        os.close(fd)
