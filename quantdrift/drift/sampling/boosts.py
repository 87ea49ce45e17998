"""Boosts: slices that are sampled above the base rate, as numbers and as a policy's body strata.

A boost is a slice's conditions with one rate per margin bin, never rising with the margin. It is written as nested
strata, `margin < e1`, `margin < e2`, ... and, last, any margin or none: the largest rate that matches counts, so
they say the same as a table of bins, and an exchange with items on both sides of an edge is covered too.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from quantdrift.core.config.strata import MARGIN
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import known_at_capture, reachable_strata
from quantdrift.drift.evidence.observations import BoolArray, FloatArray


class PolicyRates(msgspec.Struct, frozen=True, kw_only=True):
    """A policy as numbers.

    Parameters
    ----------
    base
        Base rate.
    boost
        (boosts, bins) rates, never rising along a row.
    envelope
        (header strata,) first-phase rates.
    """

    base: float
    boost: FloatArray
    envelope: FloatArray


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The strata that a policy distinguishes, besides the slices.

    Parameters
    ----------
    header_strata
        Header strata of the first phase, in order; `default` is the last. Of their rates only 0 (take nothing) is read.
    edges
        Rising edges of the margin bins: those of the baseline, so that unweighted detectors lose no samples, else
        `stratification.margin_edges`. Empty: margins do not count.
    """

    header_strata: tuple[HeaderStratum, ...]
    edges: tuple[float, ...]

    @property
    def n_bins(self) -> int:
        """Number of margin bins."""
        return len(self.edges) + 1


class Boosts(msgspec.Struct, frozen=True, kw_only=True):
    """The slices that a policy may boost.

    Parameters
    ----------
    names
        Per boost, for people; the names of its strata begin with it.
    wheres
        Per boost, the conditions, on attributes alone.
    layout
        Header strata and margin bins.
    """

    names: tuple[str, ...]
    wheres: tuple[tuple[Predicate, ...], ...]
    layout: Layout

    def reach(self) -> BoolArray:
        """Return which header strata the items of each boost may fall into, (boosts, header strata)."""
        skeleton = Policy(epoch="", header_strata=self.layout.header_strata, body_strata=())
        reached = np.zeros((len(self.wheres), len(self.layout.header_strata)), dtype=bool)
        for row, where in enumerate(self.wheres):
            reachable = reachable_strata(where, skeleton)
            reached[row] = [
                any(stratum is candidate for candidate in reachable) for stratum in self.layout.header_strata
            ]
        return reached

    def strata(self, row: int, rates: PolicyRates) -> list[BodyStratum]:
        """Return the body strata of one boost, without those that the base rate or a wider stratum covers."""
        strata = []
        own = rates.boost[row]
        for h in range(self.layout.n_bins):
            last = h == len(self.layout.edges)
            if own[h] <= rates.base or (not last and own[h] <= own[h + 1]):
                continue
            name, where = self.names[row], self.wheres[row]
            if not last:
                name = f"{name} margin<{self.layout.edges[h]:g}"
                where = (*where, Predicate(key=MARGIN, high=self.layout.edges[h]))
            strata.append(BodyStratum(name=name, rate=float(own[h]), where=where))
        return strata

    def policy(self, rates: PolicyRates, epoch: str) -> Policy:
        """Return `rates` as the policy of an epoch."""
        body = [stratum for row in range(len(self.wheres)) for stratum in self.strata(row, rates)]
        return Policy(
            epoch=epoch,
            header_strata=tuple(
                msgspec.structs.replace(stratum, rate=float(rate))
                for stratum, rate in zip(self.layout.header_strata, rates.envelope, strict=True)
            ),
            body_strata=(*body, BodyStratum(name="default", rate=rates.base)),
        )

    def read(self, policy: Policy) -> PolicyRates | None:
        """Return a policy's rates on these boosts and bins, or None where it distinguishes other strata.

        Also where one of policy and layout samples a header stratum and the other does not:
        sidecars refuse what their configuration bars, and what is never taken is never seen to be missing.
        """
        if _unrated(policy.header_strata) != _unrated(self.layout.header_strata):
            return None
        pairs = zip(policy.header_strata, self.layout.header_strata, strict=True)
        if any((own.rate > 0) != (laid.rate > 0) for own, laid in pairs):
            return None
        rows = {where: row for row, where in enumerate(self.wheres)}
        bins = {edge: h + 1 for h, edge in enumerate(self.layout.edges)}
        boost = np.zeros((len(self.wheres), self.layout.n_bins))
        *boosted, base = policy.body_strata
        for stratum in boosted:
            row = rows.get(tuple(p for p in stratum.where if p.key != MARGIN))
            margins = [p for p in stratum.where if p.key == MARGIN]
            stop = self.layout.n_bins
            if margins:
                stop = bins.get(margins[0].high, 0) if margins[0].high is not None else 0
            if row is None or stop == 0 or len(margins) > 1 or any(p.low is not None for p in margins):
                return None
            boost[row, :stop] = np.maximum(boost[row, :stop], stratum.rate)
        envelope = np.array([stratum.rate for stratum in policy.header_strata])
        return PolicyRates(base=base.rate, boost=boost, envelope=envelope)


def boostable(where: Sequence[Predicate]) -> bool:
    """Return whether a slice is known at capture: by values of attributes, or as everything."""
    return all(p.equals is not None and known_at_capture(p) for p in where)


def _unrated(strata: Sequence[HeaderStratum]) -> list[HeaderStratum]:
    return [msgspec.structs.replace(stratum, rate=0.0) for stratum in strata]
