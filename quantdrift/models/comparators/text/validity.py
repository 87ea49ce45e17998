"""The structure of an answer: whether JSON can be parsed and calls are of tools that were offered, and whether two answers say the same in it.

Of a JSON schema only `type: object`, `properties` and `required` are checked, at every depth: a missing property breaks the
client. Types of values, enumerations and formats are not checked.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from quantdrift.models.language.answer import Answer, ToolCall
from quantdrift.models.language.free_running_answer import FreeAnswer

_BROKEN: Final = object()
_DEEPEST: Final = 32
_TIMES: Final = 4
_LEAST_READ: Final = 100  # characters
_MOST_READ: Final = 4_096


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


def is_stuck(answer: Answer, own: FreeAnswer | None) -> bool:
    """Return whether an answer repeats itself, and an equal model's would not.

    The reference's own answer to the same request says that, if there is one that no lower limit ended. Without one it is said of an
    answer that was drawn: where nothing is drawn by chance a sound model may repeat itself, too, and a small one often does.
    """
    if not repeats_itself(answer.text, answer.finish_reason):
        return False
    if own is None or not own.is_there:
        return not answer.is_repeatable
    is_shorter = own.finish_reason == "length" and own.max_tokens < (answer.n_tokens or math.inf)
    return not is_shorter and not repeats_itself(own.text, own.finish_reason)


def repeats_itself(text: str, finish_reason: str) -> bool:
    """Return whether an answer went on with the same piece again and again until a limit ended it.

    A limit ended it (`length`), and the second half of its text, 100 characters at least and its last 4,096 at most, is one piece four times or
    more.
    """
    n_last = min(len(text) // 2, _MOST_READ)
    if finish_reason != "length" or n_last < _LEAST_READ:
        return False
    last = text[-n_last:]
    longest = n_last // _TIMES
    begin = last[: n_last - longest]
    piece = last.find(begin, 1)
    while 0 < piece <= longest:
        if last.startswith(last[piece:]):
            return True
        piece = last.find(begin, piece + 1)
    return False


def same_structure(answer: Answer, other: Answer) -> bool | None:
    """Return whether two answers to a request call the same tools with the same arguments, or are the same JSON value.

    The order of keys and of calls, white space, and the form of a number (`1`, `1.0`, `1e0`) make no difference. None if neither calls a
    tool and no JSON was requested, or if one of them cannot be read.
    """
    if answer.calls or other.calls:
        calls = [
            sorted((call.name, _canonical(call.arguments or "{}") or "") for call in side.calls)
            for side in (answer, other)
        ]
        is_readable = all(arguments for side in calls for _, arguments in side)
        return calls[0] == calls[1] if is_readable else None
    values = [_canonical(side.text) for side in (answer, other)]
    return values[0] == values[1] if answer.wants_json and None not in values else None


def _canonical(text: str) -> str | None:
    """Return the text that all spellings of a JSON value share; None if it is none."""
    try:
        return json.dumps(_whole(msgspec.json.decode(text)), sort_keys=True)
    except (msgspec.DecodeError, RecursionError):
        return None


def _whole(value: Any) -> Any:
    """Return a JSON value whose whole numbers are integers; truth values stay what they are."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


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
