"""Faults that a test plants where they would happen."""

from collections.abc import Callable
from typing import Any


def failing(
    original: Callable[..., Any], nth: int, error: type[BaseException] = RuntimeError
) -> Callable[..., Any]:
    """Return `original`, but its `nth` call and every later one raises."""
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= nth:
            raise error("planted")
        return original(*arguments, **named)

    return call
