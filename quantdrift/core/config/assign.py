"""Changes of single options of a loaded configuration, e.g. `monitor.pages_per_30_days=1`, `models.digits.budget.flip=0.02`."""

from collections.abc import Iterable
from typing import Any

import msgspec

from quantdrift.core.config.check import problems
from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import mistakes, nearest
from quantdrift.core.errors import OperatorError

_WANTED = {bool: "true or false", int: "a number", float: "a number"}


def assign(config: Config, assignments: Iterable[str]) -> Config:
    """Return `config` with each `KEY=VALUE` set.

    Parameters
    ----------
    config
        A checked configuration.
    assignments
        KEY is a path of names separated by dots; an entry of a list is given by its `name`. VALUE is JSON, or plain
        text if the option is text.

    Raises
    ------
    OperatorError
        A key is unknown (the error gives the nearest known name), a value is invalid, or options contradict each
        other.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise OperatorError(f"`{assignment}` has no value: write KEY=VALUE")
        document = msgspec.to_builtins(config)
        table, option = _place(document, key)
        try:
            table[option] = text if isinstance(table[option], str) else _value(text, table[option])
        except msgspec.DecodeError as error:
            raise OperatorError(f"`{assignment}` does not fit: {error}") from error
        for mistake in mistakes(document, Config):
            raise OperatorError(f"`{assignment}` does not fit: {mistake.text}")
        config = msgspec.convert(document, Config)
    if contradictions := problems(config):
        raise OperatorError(
            "with these options:\n" + "\n".join(f"  - {problem}" for problem in contradictions)
        )
    return config


def _value(text: str, before: Any) -> Any:
    """Return the JSON value of `text`; `before` is the old value, for the error."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        wanted = _WANTED.get(type(before), "a list or table as JSON")
        raise msgspec.DecodeError(f"`{text}` is not {wanted}") from error


def _place(document: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the table of an option, and the option's name in it."""
    *parents, option = key.split(".")
    table: Any = document
    for depth, name in enumerate(parents):
        table = _entry(table, name, ".".join(parents[:depth]))
    if not isinstance(table, dict) or option not in table:
        _entry(table, option, ".".join(parents))
        raise OperatorError(f"`{key}` is not a single option: name one inside it")
    return table, option


def _entry(table: Any, name: str, where: str) -> Any:
    if isinstance(table, list | tuple):
        entries = {entry["name"]: entry for entry in table if isinstance(entry, dict) and "name" in entry}
    else:
        entries = table if isinstance(table, dict) else {}
    if name in entries:
        return entries[name]
    path = f"{where}.{name}" if where else name
    raise OperatorError(f"unknown option `{path}`: {nearest(name, list(entries))}")
