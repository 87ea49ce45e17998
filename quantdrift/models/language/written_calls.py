"""Tool calls as a language model writes them into its text, read in the forms that chat templates have.

A server's parser takes calls out of the text; a model in a folder has no server. Its chat template says how calls are written:

| form | written as | by templates with |
|---|---|---|
| Hermes, Qwen | `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number of them | `<tool_call>` |
| Mistral | `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]` | `[TOOL_CALLS]` |
| Llama 3 | the whole text is `{"name": ..., "parameters": ...}` | `"parameters"`, and none of the others |
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from quantdrift.models.language.answer import ToolCall

_HERMES, _HERMES_END, _MISTRAL, _LLAMA, _PYTHON = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    '"parameters"',
    "<|python_tag|>",
)
_HERMES_CALL: Final = re.compile(rf"{_HERMES}(.*?)(?:{_HERMES_END}|\Z)", re.DOTALL)


class WrittenCalls(msgspec.Struct, frozen=True, kw_only=True):
    """An answer with its calls apart.

    Parameters
    ----------
    text
        What is not a call.
    calls
        In order; none where it calls nothing.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()


def written_calls(text: str, template: str) -> WrittenCalls | None:
    """Return an answer with its calls apart; None where a call cannot be read, or the template writes them in no form that is known.

    Parameters
    ----------
    text
        All that was generated but its end, special tokens included.
    template
        The chat template, as Jinja.
    """
    read = next((read for marker, read in _FORMS.items() if marker in template), None)
    return None if read is None else read(text)


def has_written_call(text: str) -> bool:
    """Return whether a text holds a call in one of these forms: its server took none out of it."""
    return _HERMES in text or _MISTRAL in text or bool((found := _llama(text)) and found.calls)


def _hermes(text: str) -> WrittenCalls | None:
    calls = [_call(_object(written)) for written in _HERMES_CALL.findall(text)]
    return _whole(_HERMES_CALL.sub("", text), calls)


def _mistral(text: str) -> WrittenCalls | None:
    said, marker, written = text.partition(_MISTRAL)
    try:
        calls = msgspec.json.decode(written, type=list[dict[str, Any]]) if marker else []
    except (msgspec.DecodeError, RecursionError):
        return None
    return _whole(said, [_call(call) for call in calls])


def _llama(text: str) -> WrittenCalls | None:
    bare = text.strip()
    written = _object(bare.removeprefix(_PYTHON))
    call = _call(written, arguments="parameters") if written is not None else None
    if call is not None:
        return WrittenCalls(text="", calls=(call,))
    return None if bare.startswith(_PYTHON) else WrittenCalls(text=text)


_FORMS: Final[Mapping[str, Callable[[str], WrittenCalls | None]]] = {
    _HERMES: _hermes,
    _MISTRAL: _mistral,
    _LLAMA: _llama,
}
"""How each form is read, by what shows it in a template; the first that fits."""


def _whole(text: str, calls: list[ToolCall | None]) -> WrittenCalls | None:
    read = tuple(call for call in calls if call is not None)
    return WrittenCalls(text=text.strip(), calls=read) if len(read) == len(calls) else None


def _object(written: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _call(written: dict[str, Any] | None, *, arguments: str = "arguments") -> ToolCall | None:
    if written is None or not isinstance(written.get("name"), str) or arguments not in written:
        return None
    value = written[arguments]
    return ToolCall(
        name=written["name"],
        arguments=value if isinstance(value, str) else msgspec.json.encode(value).decode(),
    )
