"""The first sampling phase of a tap: the same as in the relay, with headers as a mapping."""

import os
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from quantdrift.core.records import HeaderStratum
from quantdrift.core.sampling.rates import uniform
from quantdrift.sidecar.tap.wire import Rates

_METHOD = "POST"


class SampledCall(NamedTuple):
    """A sampled call: its stratum and row, the probability, the draw, the epoch, and its new identifier."""

    stratum: str
    row: int
    pi1: float
    u1: float
    epoch: str
    id: str


class TapSampler:
    """Draws the calls of one model by the rates of one epoch.

    Parameters
    ----------
    rates
        As received from the intake.
    path
        The path that a client would have requested.
    chance
        Returns numbers in [0, 1), uniform and independent.
    connection_id
        The connection that sent the rates; their rows belong to the sidecar at its other end.
    """

    __slots__ = ("_chance", "_lookups", "_rates", "_rows", "connection_id", "default_stratum", "strata_rates")

    def __init__(
        self, rates: Rates, path: str, chance: Callable[[], float] = random.random, connection_id: int = 0
    ) -> None:
        self._rates = rates
        self._chance = chance
        self.connection_id = connection_id
        self._rows = {stratum.name: row for row, stratum in zip(rates.rows, rates.strata, strict=True)}
        self.strata_rates = {stratum.name: stratum.rate for stratum in rates.strata}
        possible = [stratum for stratum in rates.strata if _may_match(stratum, path)]
        self._lookups = _lookups(possible)
        self.default_stratum = next(stratum.name for stratum in possible if not stratum.headers)

    def stratum(self, headers: Mapping[str, str]) -> str:
        """Return the stratum of a call with these headers, whose names are in lower case."""
        for name, by_value in self._lookups:
            for candidate, others in by_value.get(headers.get(name), ()):
                if not others or all(headers.get(key) == value for key, value in others):
                    return candidate
        return self.default_stratum

    def draw(self, stratum: str, headers: Mapping[str, str]) -> SampledCall | None:
        """Return the draw of a call if it is taken, else None."""
        rate = self.strata_rates[stratum]
        if rate <= 0.0:
            return None
        sticky = headers.get(self._rates.sticky) if self._rates.sticky else None
        u1 = uniform(sticky.encode(errors="replace"), self._rates.salt) if sticky else self._chance()
        if u1 >= rate:
            return None
        # Random bytes of the system, unique over threads and after a fork.
        return SampledCall(stratum, self._rows[stratum], rate, u1, self._rates.epoch, os.urandom(16).hex())

    @property
    def max_exchange_bytes(self) -> int:
        """Longest exchange that the intake accepts."""
        return self._rates.max_exchange_bytes


_Lookup = tuple[str, dict[str | None, list[tuple[str, tuple[tuple[str, str], ...]]]]]


def _lookups(possible: list[HeaderStratum]) -> list[_Lookup]:
    """Return the strata with headers that precede the first one without; neighbours share one lookup."""
    lookups: list[_Lookup] = []
    for stratum in possible:
        if not stratum.headers:
            break
        (name, value), *others = stratum.headers.items()
        if not lookups or lookups[-1][0] != name:
            lookups.append((name, {}))
        lookups[-1][1].setdefault(value, []).append((stratum.name, tuple(others)))
    return lookups


def _may_match(stratum: HeaderStratum, path: str) -> bool:
    return stratum.method in ("", _METHOD) and path.startswith(stratum.path_prefix)
