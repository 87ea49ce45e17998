"""Validation of a configuration document: reports all unknown keys and invalid values at once."""

import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

Key = str | int
_MOST_SHOWN = 64


class Misfit(msgspec.Struct, frozen=True):
    """An error at one place of a document.

    Parameters
    ----------
    keys
        Path to the place: names of tables and options, and indices of list entries.
    text
        What is wrong, and what is allowed.
    """

    keys: tuple[Key, ...]
    text: str


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct inside `kind`, looking through Annotated and tuple, or None."""
    while typing.get_origin(kind) is typing.Annotated or typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def misfits(document: Any, kind: type[msgspec.Struct]) -> Iterator[Misfit]:
    """Yield the errors of `document` as a `kind`: unknown and missing keys, wrong types, values out of bounds."""
    yield from _table(document, kind, (), "")


def _table(document: Any, kind: type[msgspec.Struct], keys: tuple[Key, ...], where: str) -> Iterator[Misfit]:
    if not isinstance(document, dict):
        yield Misfit(keys, f"{where} = {_shown(document)}: it must be a table, [{where}]")
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    for key, value in document.items():
        path = f"{where}.{key}" if where else key
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"known are: {', '.join(sorted(hints))}"
            yield Misfit((*keys, key), f"unknown option `{path}`: {hint}")
        elif inner := struct_in(hints[key]):
            yield from _inside(value, hints[key], inner, (*keys, key), path)
        else:
            yield from _value(value, hints[key], (*keys, key), path)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in document:
            yield Misfit(keys, f"{where}: `{field.name}` is missing")


def _inside(
    value: Any, hint: Any, inner: type[msgspec.Struct], keys: tuple[Key, ...], path: str
) -> Iterator[Misfit]:
    if struct_in(hint) is hint:
        yield from _table(value, inner, keys, path)
    elif not isinstance(value, list | tuple):
        yield Misfit(keys, f"{path} = {_shown(value)}: it must be a list of tables, [[{path}]]")
    else:
        for index, entry in enumerate(value):
            name = entry.get("name") if isinstance(entry, dict) else None
            which = name if isinstance(name, str) and name else index
            yield from _table(entry, inner, (*keys, index), f"{path}[{which}]")


def _value(value: Any, hint: Any, keys: tuple[Key, ...], path: str) -> Iterator[Misfit]:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        yield Misfit(keys, f"{path} = {_shown(value)}: it must be {allowed(hint)}")


def allowed(hint: Any) -> str:
    """Return in words which values a type allows."""
    return _allowed(inspect.type_info(hint))


def _allowed(info: inspect.Type) -> str:
    words = "a value of another type"
    match info:
        case inspect.Metadata(type=inner):
            words = _allowed(inner)
        case inspect.EnumType(cls=cls):
            words = _one_of([str(one.value) for one in cls])
        case inspect.BoolType():
            words = "true or false"
        case inspect.IntType() | inspect.FloatType():
            words = _number(info)
        case inspect.StrType():
            words = _string(info)
        case inspect.VarTupleType(item_type=item, max_length=most):
            words = f"a list, with {_allowed(item)} for each entry{f', at most {most}' if most else ''}"
        case inspect.DictType():
            words = "a table of names and values"
        case inspect.UnionType(types=types):
            words = " or ".join(_allowed(one) for one in types if not isinstance(one, inspect.NoneType))
    return words


def _string(info: inspect.StrType) -> str:
    words = (info.pattern or "").removeprefix("^(").removesuffix(")$").split("|")
    if info.pattern and all(word.replace("-", "").isalnum() for word in words):
        return f"a string, {_one_of(words)}"
    form = f" of the form {info.pattern}" if info.pattern else ""
    return f"a{' non-empty' if info.min_length else ''} string{form}"


def _one_of(words: list[str]) -> str:
    return f"one of {', '.join(f'`{word}`' for word in words)}"


def _number(info: inspect.IntType | inspect.FloatType) -> str:
    noun, kind = ("a whole number", int) if isinstance(info, inspect.IntType) else ("a number", float)
    bounds = [
        f"{sign} {kind(bound)}"
        for sign, bound in ((">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le))
        if bound is not None
    ]
    return f"{noun} {' and '.join(bounds)}".strip()


def _shown(value: Any) -> str:
    """Return a value as written in the file, without credentials and with a limited length."""
    text = f"{value:g}" if isinstance(value, float) else msgspec.json.encode(value).decode()
    text = re.sub(r"//[^@/,]*@", "//", text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
