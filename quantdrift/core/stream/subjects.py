"""Subjects of the stream; without the NATS library, which takes a command longer to import than all else."""

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

_NAMELESS: Final = "%00"


def subject_token(name: str) -> str:
    """Return `name` as one token of a subject; special characters are percent-encoded."""
    return quote(name, safe="").replace(".", "%2E") or _NAMELESS


def model_of(token: str) -> str:
    """Return the name that `subject_token` encoded."""
    return "" if token == _NAMELESS else unquote(token)


def model_set(models: Iterable[str]) -> str:
    """Return a set of models as one token of a subject."""
    return "+".join(sorted(map(subject_token, models)))


def models_of(token: str) -> frozenset[str]:
    """Return the names that `model_set` encoded."""
    return frozenset(map(model_of, token.split("+")))


def copies(name: str, token: str) -> str:
    """Return the subject at which the server sends copies of stored exchanges; `token` is that of a model, or `>`."""
    return f"{name}.copy.{token}"
