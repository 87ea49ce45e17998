"""Slices made of any conditions: their canonical text, a short name for people, and whether they are declared too."""

import math
from collections.abc import Sequence

from quantdrift.core.config.schema import Config
from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceAssigner, SliceKey, conjunction


def slice_of(model: str, where: Sequence[Predicate]) -> SliceKey:
    """Return the slice of `model` whose items meet every condition of `where`, at least one.

    The order of the conditions says nothing.

    Parameters
    ----------
    model
        The model's name.
    where
        Conditions that have a value or an interval.
    """
    ordered = tuple(sorted(where, key=_text))
    return SliceKey(
        model=model,
        name=" & ".join(_name(condition) for condition in ordered),
        predicate=conjunction(_text(condition) for condition in ordered),
        where=ordered,
    )


def is_declared(config: Config, key: SliceKey) -> bool:
    """Return whether the configuration itself makes a slice that has conditions with a value or an interval."""
    attributes = {one.key: one.equals for one in key.where if one.equals is not None}
    features = {one.key: math.nextafter(one.high, -math.inf) for one in key.where if one.high is not None}
    features |= {one.key: one.low for one in key.where if one.low is not None}
    inside = SliceAssigner(config, key.model).assign(attributes, features)
    return key.predicate in {one.predicate for one in inside}


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
