"""Slices as predicates: their canonical text, and which of them an item belongs to.

A slice's id in the store belongs to the pair (model, canonical text), so it stays the same through renames,
reordering and restarts.
"""

import itertools
from collections.abc import Mapping

import msgspec

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.records import Predicate

ALL = "all"


class SliceKey(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of one model.

    Parameters
    ----------
    model
        The model's name.
    name
        For people: `all`, `scanner=faint`, `contrast[0.05,0.2)`.
    predicate
        Canonical, readable and stable: `header.x-scanner = "faint"`; the identity of the slice.
    where
        The same for machines. Empty: every item.
    """

    model: str
    name: str
    predicate: str
    where: tuple[Predicate, ...] = ()


def everything(model: str) -> SliceKey:
    """Return the slice that every item of `model` belongs to."""
    return SliceKey(model=model, name=ALL, predicate="true")


class SliceAssigner:
    """Assigns items of one model to its slices, by the configured rules.

    Values of an attribute without declared `values` become slices as they are seen, up to `max_values`; later
    ones share one slice `other`, and `overflow` counts the items that went there.

    Parameters
    ----------
    config
        The rules.
    model
        The model whose items are assigned.
    known
        Slices met before (from the store), so that a restart does not spend `max_values` anew.
    """

    def __init__(self, config: Config, model: str, known: tuple[SliceKey, ...] = ()) -> None:
        self.model = model
        self.overflow = 0
        self._all = everything(model)
        self._rules = [rule for rule in config.slices if rule.model in ("", model)]
        self._attribute: dict[tuple[str, str], SliceKey] = {}
        self._seen: dict[str, int] = {}
        self._bins = {rule.name: _bins(model, rule) for rule in self._rules if rule.feature}
        names = {key.predicate for key in known}
        for rule in self._rules:
            if not rule.feature:
                for value in rule.values:
                    self._attribute[rule.name, value] = _attribute_slice(model, rule, value)
        for key in known:
            for rule in self._rules:
                if len(key.where) == 1 and key.where[0].key == attribute_key(rule) and not rule.values:
                    seen = key.where[0].equals
                    if seen is not None and _attribute_slice(model, rule, seen).predicate in names:
                        self._remember(rule, seen)

    def declared(self) -> list[SliceKey]:
        """Return every slice that is known before any item is seen, `all` first."""
        return [self._all, *self._attribute.values(), *(key for bins in self._bins.values() for key in bins)]

    def assign(self, attributes: Mapping[str, str], features: Mapping[str, float]) -> list[SliceKey]:
        """Return the slices of an item, `all` first.

        Parameters
        ----------
        attributes
            As recorded with the exchange.
        features
            Keyed by `feature_key(rule)`; a feature that is absent or not finite puts the item in no bin.
        """
        found = [self._all]
        for rule in self._rules:
            if rule.feature:
                value = features.get(feature_key(rule))
                if value is not None and value == value:  # noqa: PLR0124 - not a number is in no bin
                    index = sum(value >= edge for edge in rule.edges)
                    found.append(self._bins[rule.name][index])
            elif (text := attributes.get(attribute_key(rule))) is not None and (
                key := self._attribute_of(rule, text)
            ):
                found.append(key)
        return found

    def _attribute_of(self, rule: Slice, value: str) -> SliceKey | None:
        key = self._attribute.get((rule.name, value))
        if key is not None or rule.values:
            return key
        if self._seen.get(rule.name, 0) < rule.max_values:
            return self._remember(rule, value)
        self.overflow += 1
        return SliceKey(
            model=self.model,
            name=f"{rule.name}=(other)",
            predicate=f"{attribute_key(rule)} is any other",
            where=(Predicate(key=attribute_key(rule)),),
        )

    def _remember(self, rule: Slice, value: str) -> SliceKey:
        key = self._attribute[rule.name, value] = _attribute_slice(self.model, rule, value)
        self._seen[rule.name] = self._seen.get(rule.name, 0) + 1
        return key


def attribute_key(rule: Slice) -> str:
    """Return the attribute that `rule` slices by, as recorded with the exchange."""
    if rule.header:
        return f"header.{rule.header}"
    return f"parameter.{rule.parameter}" if rule.parameter else f"json.{rule.json}"


def feature_key(rule: Slice) -> str:
    """Return the feature that `rule` slices by: `feature.NAME` or `feature.NAME(INPUT)`."""
    return f"feature.{rule.feature}({rule.input})" if rule.input else f"feature.{rule.feature}"


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
    key = feature_key(rule)
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
