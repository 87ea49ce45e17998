"""The first sampling phase inside a server: the relay's, without bytes to search."""

import os
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from quantdrift.core.records import HeaderStratum
from quantdrift.core.sampling.rates import uniform
from quantdrift.sidecar.tap.wire import Rates

_METHOD = "POST"


class SampledCall(NamedTuple):
    """A call that is taken: its stratum and that one's row, the probability, the draw, the epoch, and its new identifier."""

    stratum: str
    place: int
    pi1: float
    u1: float
    epoch: str
    id: str


class TapSampler:
    """Decides on the calls of one model under one epoch's rates.

    Parameters
    ----------
    rates
        What the intake has said.
    path
        That a client would have asked for.
    chance
        Returns numbers in [0, 1), uniform and independent.
    link
        Connection on which the rates were heard: the rows are those of the sidecar at its other end.
    """

    __slots__ = ("_chance", "_looks", "_places", "_rates", "bare", "link", "strata_rates")

    def __init__(
        self, rates: Rates, path: str, chance: Callable[[], float] = random.random, link: int = 0
    ) -> None:
        self._rates = rates
        self._chance = chance
        self.link = link
        self._places = {
            stratum.name: place for place, stratum in zip(rates.places, rates.strata, strict=True)
        }
        self.strata_rates = {stratum.name: stratum.rate for stratum in rates.strata}
        possible = [stratum for stratum in rates.strata if _may_match(stratum, path)]
        self._looks = _looks(possible)
        self.bare = next(one.name for one in possible if not one.headers)

    def stratum(self, headers: Mapping[str, str]) -> str:
        """Return the name of the stratum that a call with these headers (lower-case names) is in."""
        for name, by_value in self._looks:
            for found, others in by_value.get(headers.get(name), ()):
                if not others or all(headers.get(key) == value for key, value in others):
                    return found
        return self.bare

    def draw(self, stratum: str, headers: Mapping[str, str]) -> SampledCall | None:
        """Return what becomes of a call that is taken, None of one that is not."""
        rate = self.strata_rates[stratum]
        if rate <= 0.0:
            return None
        sticky = headers.get(self._rates.sticky) if self._rates.sticky else None
        u1 = uniform(sticky.encode(errors="replace"), self._rates.salt) if sticky else self._chance()
        if u1 >= rate:
            return None
        # From the system: unique over threads, and after a fork.
        return SampledCall(stratum, self._places[stratum], rate, u1, self._rates.epoch, os.urandom(16).hex())

    @property
    def max_exchange_bytes(self) -> int:
        """Longest exchange that is taken in."""
        return self._rates.max_exchange_bytes


_Look = tuple[str, dict[str | None, list[tuple[str, tuple[tuple[str, str], ...]]]]]


def _looks(possible: list[HeaderStratum]) -> list[_Look]:
    """Return the strata that ask for headers, before the first that asks for none: one look for neighbours."""
    found: list[_Look] = []
    for stratum in possible:
        if not stratum.headers:
            break
        (name, value), *others = stratum.headers.items()
        if not found or found[-1][0] != name:
            found.append((name, {}))
        found[-1][1].setdefault(value, []).append((stratum.name, tuple(others)))
    return found


def _may_match(stratum: HeaderStratum, path: str) -> bool:
    return stratum.method in ("", _METHOD) and path.startswith(stratum.path_prefix)
