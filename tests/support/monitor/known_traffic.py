"""A little world of exchanges that everything is known of, for the tests of sampling."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.drift.sampling.allocation import Demand, Recent
from quantdrift.drift.sampling.boosts import Layout
from quantdrift.sidecar.sampling.second_phase import SecondPhase

HEADERS = (
    HeaderStratum(name="a is 1", rate=1.0, headers={"x-a": "1"}),
    HeaderStratum(name="off", rate=0.0, headers={"x-a": "off"}),
    HeaderStratum(name="default", rate=1.0),
)
EDGES = (0.05, 0.3)
LAYOUT = Layout(header_strata=HEADERS, edges=EDGES)
WHERES: dict[str, tuple[Predicate, ...]] = {
    "all": (),
    "a=1": (Predicate(key="header.x-a", equals="1"),),
    "a=2": (Predicate(key="header.x-a", equals="2"),),
    "k=1": (Predicate(key="json.k", equals="1"),),
    "a=2 & k=1": (Predicate(key="header.x-a", equals="2"), Predicate(key="json.k", equals="1")),
    "mean<0": (Predicate(key="feature.mean", high=0.0),),
}


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Exchanges of one item each.

    Parameters
    ----------
    attributes
        Per exchange.
    mean
        (exchanges,) a feature that sampling cannot see.
    margin
        (exchanges,); not a number where there is none.
    flip
        (exchanges,) 0 or 1.
    """

    attributes: tuple[Mapping[str, str], ...]
    mean: FloatArray
    margin: FloatArray
    flip: FloatArray

    @property
    def header(self) -> IntArray:
        """Index of each exchange's header stratum."""
        index = {"1": 0, "off": 1}
        return np.array([index.get(one.get("header.x-a", ""), 2) for one in self.attributes], dtype=np.intp)

    def inside(self, where: Sequence[Predicate]) -> FloatArray:
        """Return 1 for each exchange that meets the conditions, else 0."""
        found = np.ones(len(self.attributes))
        for one in where:
            if one.equals is None:
                found *= self.mean < (np.inf if one.high is None else one.high)
            else:
                found *= [attributes.get(one.key) == one.equals for attributes in self.attributes]
        return found

    def recent(self, weight: FloatArray, offered_per_s: float) -> Recent:
        """Return all of it as a sample of recent items."""
        member = np.stack([self.inside(where) for where in WHERES.values()], axis=1)
        item, slice_ = np.nonzero(member)
        n = len(self.attributes)
        per_header = np.bincount(self.header, minlength=len(HEADERS)) / n
        return Recent(
            weight=weight,
            n_items=np.ones(n),
            header=self.header,
            margin=self.margin,
            flip=self.flip,
            item=item,
            slice=slice_,
            offered_per_s=offered_per_s * per_header,
        )

    def demands(self, offered_per_s: float, evidence: Mapping[str, float]) -> list[Demand]:
        """Return the slices with their true traffic."""
        return [
            Demand(
                name=name,
                where=where,
                traffic_per_s=offered_per_s * float(self.inside(where).mean()),
                evidence=evidence.get(name, 0.0),
            )
            for name, where in WHERES.items()
        ]

    def totals(self, policy: Policy) -> FloatArray:
        """Return what the sidecar gives each exchange: its total inclusion probability."""
        found = []
        for attributes, margin, header in zip(self.attributes, self.margin, self.header, strict=True):
            pi1 = policy.header_strata[header].rate
            known = None if np.isnan(margin) else float(margin)
            thinned = SecondPhase(policy.body_strata, b"salt").draw("key", pi1, attributes, known)
            found.append(pi1 * thinned.pi2)
        return np.array(found)


def world(seed: int, n: int = 400, *, close: bool = True) -> World:
    """Return a world; `close` puts most flips at small margins."""
    rng = np.random.default_rng(seed)
    attributes: list[dict[str, str]] = []
    for a, k in zip(
        rng.choice(["1", "2", "3", "off"], n, p=[0.1, 0.3, 0.55, 0.05]), rng.random(n) < 0.2, strict=True
    ):
        attributes.append({"header.x-a": str(a)} | ({"json.k": "1"} if k else {}))
    margin = rng.random(n)
    flip = rng.random(n) < (0.3 * np.exp(-margin / 0.1) if close else 0.03)
    return World(
        attributes=tuple(attributes),
        mean=rng.normal(size=n),
        margin=np.where(rng.random(n) < 0.05, np.nan, margin),
        flip=flip.astype(np.float64),
    )
