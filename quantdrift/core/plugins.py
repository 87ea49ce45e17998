"""Plug-ins: installed packages that add tasks, signals, runtimes and protocols, if the configuration names them in `plugins`.

A package says what it adds by entry points, `quantdrift.tasks`, `.signals`, `.runtimes` and `.protocols`. The entry
points of a named package are read as text when the configuration is loaded; the record behind one is imported when a process
first needs it. So a sidecar never imports a comparator.
"""

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec

from quantdrift.core.errors import OperatorError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_GROUP: Final = "quantdrift."
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*")
_LONGEST: Final = 64
Record = TypeVar("Record")

_named: dict[
    tuple[str, str], "EntryPoint"
] = {}  # by group and name, of the packages that `use` was called with


class Extensible(StrEnum):
    """An enum to which plug-ins add members: `Task`, `Metric`, `Runtime` and `Protocol`.

    Every well-formed name is a member, also where no plug-in adds it: a stored record can be read without the package that it
    came from. Only `names` are valid in a configuration. Iteration gives the built-in members.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str) or len(value) > _LONGEST or not _NAME.fullmatch(value):
            return None
        member = str.__new__(cls, value)
        member._name_ = re.sub(r"\W", "_", value).upper()
        member._value_ = value
        cls._value2member_map_[value] = member
        return member

    @classmethod
    def group(cls) -> str:
        """Return the group of entry points that adds members."""
        return f"{_GROUP}{cls.__name__.lower()}s"

    @classmethod
    def names(cls) -> list[str]:
        """Return the built-in names, and those of the plug-ins that the configuration names."""
        return [*(member.value for member in cls), *(name for group, name in _named if group == cls.group())]

    @property
    def is_built_in(self) -> bool:
        """Whether it is quantdrift's own."""
        return self.name in type(self).__members__


class NoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a plug-in that has none."""


def use(packages: Iterable[str]) -> Callable[[], None]:
    """Make the entry points of these packages known to this process, in place of earlier ones; import nothing.

    Returns
    -------
    restore
        Makes those known that were before, for a configuration that turns out to be wrong.

    Raises
    ------
    OperatorError
        A package is not installed, adds nothing, or adds a name that is taken. Nothing has changed then.
    """
    entry_points: dict[tuple[str, str], EntryPoint] = {}
    for package in packages:
        for entry_point in _entry_points(package):
            key = (entry_point.group, entry_point.name)
            if key in entry_points or _is_taken(*key):
                raise OperatorError(
                    f"plugins: `{package}` adds `{entry_point.name}` to {entry_point.group}, and that name is taken: rename it in the"
                    " package, or name only one of the packages"
                )
            entry_points[key] = entry_point
    before = dict(_named)
    _replace(entry_points)
    return lambda: _replace(before)


def _replace(entry_points: "dict[tuple[str, str], EntryPoint]") -> None:
    _named.clear()
    _named.update(entry_points)


def _entry_points(package: str) -> "list[EntryPoint]":
    from importlib.metadata import (  # noqa: PLC0415 - without plug-ins a relay worker does not load it
        PackageNotFoundError,
        distribution,
    )

    try:
        installed = distribution(package)
    except (PackageNotFoundError, ValueError) as error:  # an empty name raises the second
        raise OperatorError(
            f"plugins: the package `{package}` is not installed here: install it where this process runs, or remove it from plugins"
        ) from error
    groups = {kind.group() for kind in Extensible.__subclasses__()}
    entry_points = [entry_point for entry_point in installed.entry_points if entry_point.group in groups]
    if not entry_points:
        raise OperatorError(
            f"plugins: the package `{package}` adds nothing to quantdrift: it has no entry points in"
            f" {', '.join(f'`{group}`' for group in sorted(groups))}"
        )
    for entry_point in entry_points:
        if len(entry_point.name) > _LONGEST or not _NAME.fullmatch(entry_point.name):
            raise OperatorError(
                f"plugins: `{package}` adds `{entry_point.name[:_LONGEST]}`: a name has small letters, digits and `-`, `_` or `.`"
                f" between them, at most {_LONGEST}"
            )
    return entry_points


def _is_taken(group: str, name: str) -> bool:
    return any(kind.group() == group and name in list(kind) for kind in Extensible.__subclasses__())


def record_of(member: Extensible, kind: type[Record]) -> Record | None:
    """Return the record by which a plug-in adds a member; None: no plug-in of the configuration adds it.

    Its module is imported at the first call.

    Raises
    ------
    OperatorError
        Importing it fails, or it is no `kind`.
    """
    entry_point = _named.get((member.group(), member.value))
    if entry_point is None:
        return None
    try:
        record = entry_point.load()
    except Exception as error:
        raise OperatorError(
            f"the plug-in `{member}` ({entry_point.value}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(record, kind):
        raise OperatorError(
            f"{entry_point.value} is a {type(record).__name__}; an entry point of {entry_point.group} must be a {kind.__name__}"
        )
    return record


def plugin_record(member: Extensible, kind: type[Record]) -> Record:
    """Return the record of a member that is not built in; raises `OperatorError` also if no plug-in of the configuration adds it."""
    record = record_of(member, kind)
    if record is None:
        raise OperatorError(
            f"no package that `plugins` names adds `{member}` to {member.group()}: name its package there"
        )
    return record
