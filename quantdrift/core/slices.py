"""Slices as predicates: their canonical text and name, and the assignment of items to slices.

The id of a slice in the database belongs to the pair (model, canonical text), so it stays the same when slices are
renamed or reordered, and after restarts.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

import msgspec

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.records import Predicate
from quantdrift.core.text import number_of

ALL = "all"
EVERYTHING = "true"  # the predicate of the slice `all`
TIME: Final = "time."
"""Prefix of the attributes that the time of capture gives: no client sends them, and no exchange stores them."""
TEXT: Final = "text."
"""Prefix of what a sidecar says of texts."""
CAPTURED: Final = ("header.", "parameter.", "json.", TEXT, TIME)
"""Prefixes of what is known of an exchange when it is captured."""
MOST_DISCOVERED = 20
"""Most discovered slices of a model that are monitored; as many as a person can still look through."""
OTHER: Final = "(other)"
"""Name of what has no place of its own: values of a slice, and versions of a model."""
_REMEMBERED: Final = 8192  # slices whose rule is not searched for again
_CROSSED: Final = ": "  # ends the prefix in the names of a crossed rule's slices
_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_FIRST_DAY_OF_WEEKEND: Final = 5
_HOURS: Final = 6  # in a part of the day
_DESCRIBING: Final = "input."
_SAME: Final = 1e-6  # relative: numbers so near are one value of a column; in FP32 they are some 1e-7 apart


class SliceKey(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of one model.

    Parameters
    ----------
    model
        The model's name.
    name
        Short name for people: `all`, `scanner=faint`, `contrast[0.05,0.2)`.
    predicate
        Canonical text, which identifies the slice: `header.x-scanner = "faint"`.
    where
        The predicate as conditions. Empty: every item.
    """

    model: str
    name: str
    predicate: str
    where: tuple[Predicate, ...] = ()


def everything(model: str) -> SliceKey:
    """Return the slice that every item of `model` belongs to."""
    return SliceKey(model=model, name=ALL, predicate=EVERYTHING)


class ValueRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule whose slices are made of values that clients choose, or of combinations of them.

    Parameters
    ----------
    model
        The model's name.
    name
        The rule's name.
    source
        What the values are of: the key of an attribute, or the name of a crossed rule with `: `.
    most
        Most slices.
    parts
        Names of the rules that are crossed.
    """

    model: str
    name: str
    source: str
    most: int
    parts: tuple[str, ...] = ()

    def other(self, key: SliceKey) -> SliceKey:
        """Return the slice of the items whose slice `key` of this rule has no place."""
        if self.parts:
            return SliceKey(
                model=self.model,
                name=f"{self.source}{OTHER}",
                predicate=f"any other of {' x '.join(sorted(self.parts))}",
                where=tuple(Predicate(key=condition.key) for condition in key.where),
            )
        return SliceKey(
            model=self.model,
            name=f"{self.name}={OTHER}",
            predicate=f"{self.source} is any other",
            where=(Predicate(key=self.source),),
        )


class ValueRules:
    """The rules of a configuration whose slices are admitted by share; see `quantdrift.core.admission`."""

    def __init__(self, config: Config) -> None:
        self._slices = config.slices
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._find)

    def of(self, key: SliceKey) -> ValueRule | None:
        """Return the rule that a slice belongs to; None for one that the configuration declares, or that was found."""
        return self._remembered(key)

    def _find(self, key: SliceKey) -> ValueRule | None:
        if len(key.where) == 1 and (value := key.where[0].equals) is not None:
            rules = [
                rule
                for rule in self._slices
                if rule.model in ("", key.model)
                and not (rule.feature or rule.cross or rule.edges)
                and attribute_key(rule) == key.where[0].key
            ]
            if any(value in rule.values for rule in rules):
                return None
            open_rules = [rule for rule in rules if not rule.values]
            if not open_rules:
                return None
            rule = max(open_rules, key=lambda rule: rule.max_values)
            return ValueRule(
                model=key.model, name=rule.name, source=attribute_key(rule), most=rule.max_values
            )
        for rule in self._slices:
            if rule.cross and rule.model in ("", key.model) and key.name.startswith(_prefix(rule)):
                return ValueRule(
                    model=key.model,
                    name=rule.name,
                    source=_prefix(rule),
                    most=rule.max_values,
                    parts=rule.cross,
                )
        return None


class SliceAssigner:
    """Assigns items of one model to its slices, by the configured rules.

    Each value of an attribute without declared `values`, and each combination of crossed rules, has a slice of its own
    here. Which of them are stored as slices is decided where they are stored, for all shadow workers together.

    Attributes
    ----------
    extra
        Additional slices without a rule, such as discovered ones: an item that meets all conditions belongs to them.
    """

    def __init__(self, config: Config, model: str) -> None:
        self.model = model
        self._all = everything(model)
        self.extra: tuple[SliceKey, ...] = ()
        rules = [rule for rule in config.slices if rule.model in ("", model)]
        self._rules = [rule for rule in rules if not rule.cross]
        self._crossed = [rule for rule in rules if rule.cross]
        self._bins = {rule.name: _bins(model, rule) for rule in self._rules if is_binned(rule)}
        self._sources = [
            (rule, bin_key(rule) if is_binned(rule) else attribute_key(rule), self._bins.get(rule.name))
            for rule in self._rules
        ]
        self._met: dict[tuple[str, str], SliceKey] = {}
        self._combined: dict[tuple[int, ...], tuple[SliceKey, ...]] = {}
        self._attribute = {
            (rule.name, value): _attribute_slice(model, rule, value)
            for rule in self._rules
            if not is_binned(rule)
            for value in rule.values
        }

    def declared(self) -> list[SliceKey]:
        """Return every slice that is known before the first item, `all` first."""
        return [self._all, *self._attribute.values(), *(key for bins in self._bins.values() for key in bins)]

    @property
    def reads_time(self) -> bool:
        """Whether a slice depends on `time_attributes`."""
        return any(rule.time for rule in self._rules) or any(
            condition.key.startswith(TIME) for key in self.extra for condition in key.where
        )

    def assign(self, attributes: Mapping[str, str], features: Mapping[str, float]) -> tuple[SliceKey, ...]:
        """Return the slices of an item, `all` first. Items of the same slices get the same object, nearly always.

        Parameters
        ----------
        attributes
            As recorded with the exchange, and `time_attributes` if `reads_time`.
        features
            Keyed by `feature_key(rule)`; without the feature, or with NaN, the item is in no bin.
        """
        keys: dict[str, SliceKey] = {}
        for rule, source, bins in self._sources:
            if bins is not None:
                key = _bin_of(_value_of(source, attributes, features), bins, rule)
            else:
                text = attributes.get(source)
                key = None if text is None else self._attribute_of(rule, text)
            if key is not None:
                keys[rule.name] = key
        extra = [key for key in self.extra if all(holds(p, attributes, features) for p in key.where)]
        # By identity, which is quicker than by content: an entry keeps its slices alive, so that no other object gets their ids.
        combination = tuple(map(id, (*keys.values(), *extra)))
        slices = self._combined.get(combination)
        if slices is None:
            crossed = [
                self._cross_of(rule, [keys[name] for name in rule.cross])
                for rule in self._crossed
                if keys.keys() >= set(rule.cross)
            ]
            if len(self._combined) >= _REMEMBERED:
                self._combined.clear()
            slices = self._combined[combination] = (self._all, *keys.values(), *crossed, *extra)
        return slices

    def _attribute_of(self, rule: Slice, value: str) -> SliceKey | None:
        key = self._attribute.get((rule.name, value)) or self._met.get((rule.name, value))
        if key is not None or rule.values:
            return key
        if len(self._met) >= _REMEMBERED:
            self._met.clear()
        key = self._met[rule.name, value] = _attribute_slice(self.model, rule, value)
        return key

    def _cross_of(self, rule: Slice, parts: list[SliceKey]) -> SliceKey:
        return SliceKey(
            model=self.model,
            name=_prefix(rule) + " & ".join(part.name for part in parts),
            predicate=conjunction(part.predicate for part in parts),
            where=tuple(condition for part in parts for condition in part.where),
        )


def time_attributes(captured_at: datetime, zone: ZoneInfo) -> dict[str, str]:
    """Return the attributes of a time of capture: part of the week, day of the week, and part of the day.

    Parameters
    ----------
    captured_at
        Aware.
    zone
        That of `capture.time_zone`, in which days and hours are counted.

    Examples
    --------
    >>> time_attributes(datetime.fromisoformat("2026-11-21T23:30:00Z"), ZoneInfo("UTC"))
    {'time.week': 'weekend', 'time.day': 'saturday', 'time.hours': '18-24'}
    """
    local = captured_at.astimezone(zone)
    day, begin = local.weekday(), local.hour - local.hour % _HOURS
    return {
        f"{TIME}week": "weekend" if day >= _FIRST_DAY_OF_WEEKEND else "weekday",
        f"{TIME}day": _DAYS[day],
        f"{TIME}hours": f"{begin:02}-{begin + _HOURS:02}",
    }


def attribute_key(rule: Slice) -> str:
    """Return the key of the attribute that `rule` slices by, as recorded or as `time_attributes` returns it."""
    if rule.time:
        return f"{TIME}{rule.time}"
    if rule.header:
        return f"header.{rule.header}"
    if rule.text:
        return f"{TEXT}{rule.text}"
    return f"parameter.{rule.parameter}" if rule.parameter else f"json.{rule.json}"


def is_binned(rule: Slice) -> bool:
    """Return whether a rule puts numbers into bins: those of a feature, or at a JSON path with `edges`."""
    return bool(rule.feature or (rule.json and rule.edges))


def bin_key(rule: Slice) -> str:
    """Return the key of the numbers that `rule` puts into bins."""
    return feature_key(rule) if rule.feature else attribute_key(rule)


def describing_key(feature: str, name: str) -> str:
    """Return the key of a feature of the input `name` that clusters are described with: `input.NAME(INPUT)`."""
    return f"{_DESCRIBING}{feature}({name})"


def is_describing(key: str) -> bool:
    """Return whether the key of a feature is a `describing_key`: only some of the items have it, and no slice is made of it."""
    return key.startswith(_DESCRIBING)


def feature_key(rule: Slice) -> str:
    """Return the key of the feature that `rule` slices by: `feature.NAME` or `feature.NAME(INPUT)`; of a column `feature.NAME[COLUMN]`."""
    column = "" if rule.column is None else f"[{rule.column}]"
    return f"feature.{rule.feature}{column}" + (f"({rule.input})" if rule.input else "")


def conjunction(predicates: Iterable[str]) -> str:
    """Return the canonical text of several conditions; their order does not matter."""
    return " and ".join(sorted(predicates))


def holds(condition: Predicate, attributes: Mapping[str, str], features: Mapping[str, float]) -> bool:
    """Return whether an item meets a condition that has a value or an interval."""
    if condition.equals is not None:
        return attributes.get(condition.key) == condition.equals
    value = _value_of(condition.key, attributes, features)
    if math.isnan(value) or (condition.low is None and condition.high is None):
        return False
    return (condition.low is None or value >= condition.low) and (
        condition.high is None or value < condition.high
    )


def _value_of(key: str, attributes: Mapping[str, str], features: Mapping[str, float]) -> float:
    """Return a feature, or an attribute that is a number; NaN: there is none."""
    value = features.get(key)
    return number_of(attributes.get(key, "")) if value is None else value


def _bin_of(value: float, bins: Sequence[SliceKey], rule: Slice) -> SliceKey | None:
    if math.isnan(value):
        return None
    if rule.values:
        return next(
            (key for key in bins if all(holds(part, {}, {part.key: value}) for part in key.where)), None
        )
    return bins[bisect_right(rule.edges, value)]


def _prefix(rule: Slice) -> str:
    return f"{rule.name}{_CROSSED}"


def _attribute_slice(model: str, rule: Slice, value: str) -> SliceKey:
    key = attribute_key(rule)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return SliceKey(
        model=model,
        name=f"{rule.name}={value}",
        predicate=f'{key} = "{quoted}"',
        where=(Predicate(key=key, equals=value),),
    )


def _bins(model: str, rule: Slice) -> list[SliceKey]:
    key = bin_key(rule)
    if rule.values:
        return [_equal(model, rule.name, key, number_of(text)) for text in rule.values]
    bounds = [None, *rule.edges, None]
    bins = []
    for low, high in itertools.pairwise(bounds):
        if low is None:
            text, label = f"{key} < {high:g}", f"<{high:g}"
        elif high is None:
            text, label = f"{key} >= {low:g}", f">={low:g}"
        else:
            text, label = f"{low:g} <= {key} < {high:g}", f"[{low:g},{high:g})"
        where = (Predicate(key=key, low=low, high=high),)
        bins.append(SliceKey(model=model, name=f"{rule.name}{label}", predicate=text, where=where))
    return bins


def _equal(model: str, name: str, key: str, value: float) -> SliceKey:
    """Return the slice of a column's value: the interval around it that FP32 cannot tell apart."""
    slack = _SAME * (abs(value) or 1.0)
    where = (Predicate(key=key, low=value - slack, high=value + slack),)
    return SliceKey(model=model, name=f"{name}={value:g}", predicate=f"{key} = {value:g}", where=where)


def slice_of(model: str, where: Sequence[Predicate]) -> SliceKey:
    """Return the slice of `model` whose items meet every condition of `where`.

    Parameters
    ----------
    where
        At least one condition with a value or an interval; their order does not matter.
    """
    ordered = tuple(sorted(where, key=_text))
    return SliceKey(
        model=model,
        name=" & ".join(_name(condition) for condition in ordered),
        predicate=conjunction(_text(condition) for condition in ordered),
        where=ordered,
    )


def is_declared(config: Config, key: SliceKey) -> bool:
    """Return whether the configuration declares this slice, whose conditions have a value or an interval."""
    attributes = {condition.key: condition.equals for condition in key.where if condition.equals is not None}
    features = {
        condition.key: math.nextafter(condition.high, -math.inf)
        for condition in key.where
        if condition.high is not None
    }
    features |= {condition.key: condition.low for condition in key.where if condition.low is not None}
    inside = SliceAssigner(config, key.model).assign(attributes, features)
    return key.predicate in {attribute.predicate for attribute in inside}


def _text(condition: Predicate) -> str:
    key, low, high = condition.key, condition.low, condition.high
    if condition.equals is not None:
        quoted = condition.equals.replace("\\", "\\\\").replace('"', '\\"')
        return f'{key} = "{quoted}"'
    if low is None:
        return f"{key} < {high:g}"
    return f"{key} >= {low:g}" if high is None else f"{low:g} <= {key} < {high:g}"


def _name(condition: Predicate) -> str:
    short = condition.key.partition(".")[2]
    low, high = condition.low, condition.high
    if condition.equals is not None:
        return f"{short}={condition.equals}"
    if low is None:
        return f"{short}<{high:g}"
    return f"{short}>={low:g}" if high is None else f"{short}[{low:g},{high:g})"
