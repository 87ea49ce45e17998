"""Validation of a configuration document: reports all unknown keys and invalid values at once."""

import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from quantdrift.core.errors import OperatorError
from quantdrift.core.plugins import Extensible
from quantdrift.core.text import plain

Key = str | int
Options = typing.TypeVar("Options", bound=msgspec.Struct)
_MOST_SHOWN = 64
_ALIKE = 0.65
"""How similar a name must be to be suggested, from 0 to 1."""


class Mistake(msgspec.Struct, frozen=True):
    """An error at one place of a document.

    Parameters
    ----------
    keys
        Path to the place: names of tables and options, and indices of list entries.
    text
        What is wrong, and what is allowed.
    place
        What must be left out for the rest to be a configuration: the value, or the entry that cannot be without it.
    names
        The options that have no usable value because of it: the one at the place, and for an unknown option the one
        that was probably meant.
    """

    keys: tuple[Key, ...]
    text: str
    place: tuple[Key, ...]
    names: tuple[str, ...]


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct inside `kind`, looking through Annotated and tuple, or None."""
    while typing.get_origin(kind) is typing.Annotated or typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def mistakes(document: Any, kind: type[msgspec.Struct]) -> Iterator[Mistake]:
    """Yield the errors of `document` as a `kind`: unknown and missing keys, wrong types, values out of bounds."""
    yield from _table(document, kind, (), "")


def options_of(kind: type[Options], document: Mapping[str, Any], where: str) -> Options:
    """Return the options of a plug-in as the record that it declares.

    Parameters
    ----------
    kind
        The plug-in's record.
    document
        As written in the configuration.
    where
        The table, for messages.

    Raises
    ------
    OperatorError
        Unknown or missing options, or values of the wrong type or out of bounds; one error lists all of them.
    """
    if wrong := [mistake.text for mistake in _table(document, kind, (), where)]:
        raise OperatorError("\n".join(wrong))
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:  # from `__post_init__`, which checks options against each other
        raise OperatorError(f"{where}: {error}") from error


def similar_file(path: Path) -> str:
    """Return a question whether a file beside a missing one is meant, to be put behind its name; empty: none has a similar name."""
    if not path.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in path.parent.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f": did you mean `{plain(near[0])}`?" if near else ""


def without(document: Any, wrong: Iterable[Mistake]) -> Any:
    """Return `document` without the places of `wrong`, so that the rest can be converted and checked."""
    return _kept(document, (), {mistake.place for mistake in wrong})


def _kept(value: Any, keys: tuple[Key, ...], wrong: AbstractSet[tuple[Key, ...]]) -> Any:
    if isinstance(value, dict):
        return {k: _kept(entry, (*keys, k), wrong) for k, entry in value.items() if (*keys, k) not in wrong}
    if isinstance(value, list | tuple):
        return [_kept(entry, (*keys, n), wrong) for n, entry in enumerate(value) if (*keys, n) not in wrong]
    return value


def _table(document: Any, kind: type[msgspec.Struct], keys: tuple[Key, ...], where: str) -> Iterator[Mistake]:
    if not isinstance(document, dict):
        names = tuple(key for key in keys[-1:] if isinstance(key, str))
        yield Mistake(keys, f"{where} = {_shown(document)}: it must be a table, [{where}]", keys, names)
        return
    hints = typing.get_type_hints(kind, include_extras=True)
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    for key, value in document.items():
        path = f"{where}.{key}" if where else key
        if key not in hints:
            text = f"unknown option `{path}`: {nearest(key, list(hints))}"
            yield Mistake((*keys, key), text, (*keys, key), (key, _alike(key, list(hints)) or key))
        elif inner := struct_in(hints[key]):
            yield from _inside(value, hints[key], inner, (*keys, key), path)
        else:
            for mistake in _value(value, hints[key], (*keys, key), path):
                yield msgspec.structs.replace(mistake, place=keys) if key in required else mistake
    for name in hints:
        if name in required and name not in document:
            # The entry is left out as a whole, so that nothing can refer to it.
            yield Mistake(keys, f"{where}: `{name}` is missing", keys, ("model", "cross"))


def _inside(
    value: Any, hint: Any, inner: type[msgspec.Struct], keys: tuple[Key, ...], path: str
) -> Iterator[Mistake]:
    if struct_in(hint) is hint:
        yield from _table(value, inner, keys, path)
    elif not isinstance(value, list | tuple):
        text = f"{path} = {_shown(value)}: it must be a list of tables, [[{path}]]"
        yield Mistake(keys, text, keys, (str(keys[-1]),))
    else:
        for index, entry in enumerate(value):
            name = entry.get("name") if isinstance(entry, dict) else None
            which = name if isinstance(name, str) and name else index
            yield from _table(entry, inner, (*keys, index), f"{path}[{which}]")


def _value(value: Any, hint: Any, keys: tuple[Key, ...], path: str) -> Iterator[Mistake]:
    try:
        converted = msgspec.convert(value, hint)
        entries = converted if isinstance(converted, tuple) else (converted,)
        is_allowed = all(entry in entry.names() for entry in entries if isinstance(entry, Extensible))
    except msgspec.ValidationError:
        is_allowed = False
    if not is_allowed:
        text = f"{path} = {_shown(value)}: it must be {allowed(hint)}{_meant(value, hint)}"
        yield Mistake(keys, text, keys, (str(keys[-1]),))


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a hint for a name that is not among the `known` ones."""
    near = _alike(name, known)
    return f"did you mean `{near}`?" if near else f"known are: {', '.join(sorted(known)) or 'none'}"


def _alike(name: str, known: Sequence[str]) -> str:
    """Return the name that was probably meant, or an empty string."""
    begun = [candidate for candidate in known if name and candidate.startswith(name)]
    return next(iter(begun or difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)), "")


def _meant(value: Any, hint: Any) -> str:
    """Return a hint to the word that was probably meant, of those that a type allows."""
    near = _alike(value, _words(inspect.type_info(hint))) if isinstance(value, str) else ""
    return f". Did you mean `{near}`?" if near else ""


def _words(info: inspect.Type) -> list[str]:
    match info:
        case inspect.Metadata(type=inner):
            return _words(inner)
        case inspect.EnumType(cls=cls):
            return _members(cls)
        case inspect.StrType():
            return _choices(info)
    return []


def _members(kind: type[Enum]) -> list[str]:
    return kind.names() if issubclass(kind, Extensible) else [str(member.value) for member in kind]


def allowed(hint: Any) -> str:
    """Return in words which values a type allows."""
    return _allowed(inspect.type_info(hint))


def _allowed(info: inspect.Type) -> str:
    words = "a value of another type"
    match info:
        case inspect.Metadata(type=inner):
            words = _allowed(inner)
        case inspect.EnumType(cls=cls):
            words = _one_of(_members(cls))
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
            words = " or ".join(_allowed(type_) for type_ in types if not isinstance(type_, inspect.NoneType))
    return words


def _string(info: inspect.StrType) -> str:
    if words := _choices(info):
        return f"a string, {_one_of(words)}"
    form = f" of the form {info.pattern}" if info.pattern else ""
    return f"a{' non-empty' if info.min_length else ''} string{form}"


def _choices(info: inspect.StrType) -> list[str]:
    """Return the words that a pattern lists, without the empty one; none if it describes a form."""
    words = (info.pattern or "").removeprefix("^(").removesuffix(")$").split("|")
    listed = bool(info.pattern) and all(not word or word.replace("-", "").isalnum() for word in words)
    return [word for word in words if word] if listed else []


def _one_of(words: list[str]) -> str:
    return f"one of {', '.join(f'`{word}`' for word in words)}"


def _number(info: inspect.IntType | inspect.FloatType) -> str:
    noun = "a whole number" if isinstance(info, inspect.IntType) else "a number"
    if info.ge is not None and info.le is not None:
        return f"{noun} from {info.ge:g} to {_plain(info.le)}"
    bounds = [
        f"{word} {_plain(bound)}"
        for word, bound in (
            ("above", info.gt),
            ("at least", info.ge),
            ("below", info.lt),
            ("at most", info.le),
        )
        if bound is not None
    ]
    return f"{noun} {' and '.join(bounds)}".strip()


def _plain(bound: float) -> str:
    """Return a bound as people write it: 1000000 rather than 1e+06."""
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


def _shown(value: Any) -> str:
    """Return a value as written in the file, without credentials and with a limited length."""
    text = f"{value:g}" if isinstance(value, float) else msgspec.json.encode(value).decode()
    text = re.sub(r"//[^@/,]*@", "//", text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
