"""The words of a learned slice: what its inputs have in common, as far as there is evidence."""

from collections.abc import Mapping
from typing import Any

from quantdrift.core.notation import listed, number, percent
from quantdrift.core.text import plain

_ALMOST_ALL = 0.995


def sets_apart(cluster: Mapping[str, Any]) -> str:
    """Return what sets a cluster apart, as its fit described it; empty: there is no evidence of anything.

    Parameters
    ----------
    cluster
        As stored in `clustering.clusters`: `traits` are declared slices and attributes that a test found more frequent in it, `apart`
        features that formed it.
    """
    traits = [
        f"{plain(trait['label'])} ({'all' if trait['share'] >= _ALMOST_ALL else percent(trait['share'])} of them,"
        f" {number(round(trait['lift'], 1))} times its share of all traffic)"
        for trait in cluster["traits"]
        if trait.get("p_adjusted") is not None  # before, no test was made
    ]
    means = [
        f"{plain(mean['feature'])} {number(mean['inside'])} on average (elsewhere {number(mean['elsewhere'])})"
        for mean in cluster.get("apart", [])
    ]
    return listed([*traits, *means])


def mostly(cluster: Mapping[str, Any]) -> str:
    """Return the one thing that sets a cluster apart the most, for a headline; empty: there is none, or less than half of it has it."""
    for trait in cluster["traits"][:1]:
        if trait.get("p_adjusted") is not None and trait["share"] > 1 / 2:
            return plain(trait["label"])
    return ""
