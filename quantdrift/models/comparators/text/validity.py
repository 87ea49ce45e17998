"""The validity of an answer: JSON that can be parsed, and calls of tools that were offered.

Of a JSON schema only `type: object`, `properties` and `required` are checked, at every depth: a missing property breaks the
client. Types of values, enumerations and formats are not checked.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from quantdrift.models.language.answer import Answer, ToolCall

_BROKEN: Final = object()
_DEEPEST: Final = 32


def json_valid(answer: Answer) -> bool | None:
    """Return whether the requested JSON is valid; None if none was requested, or a tool is called instead."""
    if not answer.wants_json or answer.calls:
        return None
    return _fits(answer.schema, _read(answer.text))


def calls_valid(answer: Answer) -> bool | None:
    """Return whether each call names an offered tool and has its required arguments; None without a call."""
    if not answer.calls:
        return None
    return all(_is_valid(call, answer.tools) for call in answer.calls)


def is_broken(answer: Answer) -> bool:
    """Return whether an answer is unusable: invalid JSON or tool calls, or cut off while still empty."""
    cut_off = answer.is_empty and answer.finish_reason == "length"
    return json_valid(answer) is False or calls_valid(answer) is False or cut_off


def _is_valid(call: ToolCall, tools: Mapping[str, dict[str, Any]]) -> bool:
    arguments = _read(call.arguments or "{}")
    return call.name in tools and isinstance(arguments, dict) and _fits(tools[call.name], arguments)


def _read(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _BROKEN


def _fits(schema: Mapping[str, Any], value: Any, depth: int = 0) -> bool:
    if value is _BROKEN:
        return False
    properties, required = schema.get("properties"), schema.get("required")
    if depth > _DEEPEST or (schema.get("type") != "object" and not isinstance(properties, dict)):
        return True
    if not isinstance(value, dict):
        return (
            schema.get("type") != "object"
        )  # of several types, or of none, `properties` say nothing of what is no object
    if isinstance(required, list) and any(name not in value for name in required if isinstance(name, str)):
        return False
    inner = properties if isinstance(properties, dict) else {}
    return all(
        _fits(of_value, value[name], depth + 1)
        for name, of_value in inner.items()
        if name in value and isinstance(of_value, dict)
    )
