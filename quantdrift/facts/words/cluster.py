"""The words of a learned slice: what its inputs have in common, as far as there is evidence."""

import re
from collections.abc import Mapping
from typing import Any

from quantdrift.core.notation import listed, number, percent
from quantdrift.core.text import plain

_ALMOST_ALL = 0.995
_OF_INPUT = re.compile(r"input\.(\w+)\((.+)\)", re.DOTALL)  # `quantdrift.core.slices.describing_key`
_SHARES = {"zeros": "share of zeros", "missing": "share of missing values"}


def sets_apart(cluster: Mapping[str, Any]) -> str:
    """Return what sets a cluster apart, as its fit described it; empty: there is no evidence of anything.

    Parameters
    ----------
    cluster
        As stored in `clustering.clusters`: `traits` are declared slices and attributes that a test found more frequent in it, `apart`
        features that formed it, or of the inputs of an embedding.
    """
    traits = [
        f"{plain(trait['label'])} ({'all' if trait['share'] >= _ALMOST_ALL else percent(trait['share'])} of them,"
        f" {number(round(trait['lift'], 1))} times its share of all traffic)"
        for trait in cluster["traits"]
        if trait.get("p_adjusted") is not None  # before, no test was made
    ]
    means = [
        f"{feature_words(mean['feature'])} {number(mean['inside'])} on average (elsewhere {number(mean['elsewhere'])})"
        for mean in cluster.get("apart", [])
    ]
    return listed([*traits, *means])


def feature_words(key: str) -> str:
    """Return a feature as people read it: `mean of image` for `input.mean(image)`; a key of a slice as it is."""
    found = _OF_INPUT.fullmatch(key)
    if found is None:
        return plain(key)
    return f"{_SHARES.get(found[1], found[1])} of {plain(found[2])}"


def mostly(cluster: Mapping[str, Any]) -> str:
    """Return the one thing that sets a cluster apart the most, for a headline; empty: there is none, or less than half of it has it."""
    for trait in cluster["traits"][:1]:
        if trait.get("p_adjusted") is not None and trait["share"] > 1 / 2:
            return plain(trait["label"])
    return ""
