"""Shifts: traffic drawn from pools of real compared items, which at a known time changes in known slices."""

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.pools import KL_CAP, Pool, Quality, quality
from quantdrift.core.config.schema import Config
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy
from quantdrift.core.slices import SliceAssigner, SliceKey
from quantdrift.storage.fold_rows import (
    BatchRows,
    Catalog,
    ComparisonRow,
    SliceRow,
    TallyRow,
    VersionRow,
    to_us,
)

BEGIN_US = to_us(datetime(2026, 3, 2, 9, tzinfo=UTC))
RATE_PER_S = 20.0  # exchanges replayed, over all slices
SAMPLED = 0.1  # of the requests: 200 a second are offered
PER_BATCH = 64
SECOND_US = 1_000_000
_TALLY_EVERY = 4  # batches
_POLICY_ID = 1
_STRATUM = "default"
SOURCE = "pod"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A client, or several of the same kind.

    Parameters
    ----------
    attributes
        Recorded with each of its exchanges: they decide its slices.
    share
        Of all exchanges.
    pools
        What it sends and how it is answered, with weights.
    """

    attributes: Mapping[str, str]
    share: float
    pools: tuple[tuple[Pool, float], ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic that does not change.

    Parameters
    ----------
    version
        The candidate version that serves it.
    sources
        Shares sum to 1.
    """

    version: str
    sources: tuple[Source, ...]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One shift.

    Parameters
    ----------
    name, told
        A few words, and a sentence.
    after
        The traffic from the onset on.
    shifted
        Names of the slices that it is injected into; empty where only shares move.
    """

    name: str
    told: str
    after: Stage
    shifted: tuple[str, ...]


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its traffic before any shift, and the shifts.

    Parameters
    ----------
    model
        Its name.
    config
        Slices and budget; everything else is the shipped default.
    before
        The traffic that all cases begin with.
    cases
        What comes after it.
    """

    model: str
    config: Config
    before: Stage
    cases: tuple[Case, ...]

    def slices(self) -> dict[str, int]:
        """Return the number of every declared slice, `all` being 1."""
        assigner = SliceAssigner(self.config, self.model)
        return {key.name: number for number, key in enumerate(assigner.declared(), start=1)}

    def versions(self) -> dict[str, int]:
        """Return the number of every candidate version."""
        names = [self.before.version, *(case.after.version for case in self.cases)]
        return {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}

    def catalog(self) -> Catalog:
        """Return what the numbers in its rows stand for."""
        keys = SliceAssigner(self.config, self.model).declared()
        return Catalog(
            versions={
                number: VersionRow(
                    id=number,
                    model=self.model,
                    candidate_version=name,
                    reference_digest="f" * 64,
                    first_seen_us=BEGIN_US,
                )
                for name, number in self.versions().items()
            },
            slices={number: _slice_row(number, key) for number, key in enumerate(keys, start=1)},
            policies={
                _POLICY_ID: Policy(
                    epoch="benchmark",
                    header_strata=(HeaderStratum(name=_STRATUM, rate=SAMPLED),),
                    body_strata=(BodyStratum(name=_STRATUM, rate=1.0),),
                )
            },
        )


def _slice_row(number: int, key: SliceKey) -> SliceRow:
    return SliceRow(id=number, model=key.model, name=key.name, predicate=key.predicate, where=key.where)


class Items:
    """Everything that a stage may send, with its chance and its slices as the shadow assigns them.

    Parameters
    ----------
    world
        For the slices.
    stage
        The traffic.
    """

    def __init__(self, world: World, stage: Stage) -> None:
        assigner, numbers = SliceAssigner(world.config, world.model), world.slices()
        self._version_id = world.versions()[stage.version]
        self._origin: list[tuple[Pool, int]] = []
        self.slices: list[tuple[int, ...]] = []
        chances = []
        for source in stage.sources:
            total = sum(weight for _, weight in source.pools)
            for pool, weight in source.pools:
                for item, features in enumerate(pool.features):
                    keys = assigner.assign(source.attributes, features)
                    self.slices.append(tuple(sorted(numbers[key.name] for key in keys)))
                    self._origin.append((pool, item))
                chances.append(np.full(len(pool), source.share * weight / total / len(pool)))
        self.chance = np.concatenate(chances)

    def draw(self, n: int, begin_us: int, rng: np.random.Generator) -> list[tuple[ComparisonRow, float]]:
        """Return `n` exchanges of one item each, with the reference's margin, as the record orders them.

        Parameters
        ----------
        n
            How many, `RATE_PER_S` a second.
        begin_us
            When the first may come.
        rng
            The only source of randomness.
        """
        cumulative = np.cumsum(self.chance)
        drawn = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
        at = begin_us + (np.sort(rng.random(n)) * n / RATE_PER_S * SECOND_US).astype(np.int64)
        u1 = rng.random(n) * SAMPLED
        found = []
        for place, at_us, u in zip(np.minimum(drawn, len(self.chance) - 1), at, u1, strict=True):
            pool, item = self._origin[place]
            row = self._row(int(place), int(at_us), float(u), rng.bytes(16).hex())
            found.append((row, float(pool.found.reference_margin[item])))
        found.sort(key=lambda one: one[0].exchange_id)
        return found

    def share(self, slice_id: int) -> float:
        """Return the share of exchanges that fall into a slice."""
        return float(self.chance[self._inside(slice_id)].sum() / self.chance.sum())

    def law(self, slice_id: int) -> dict[tuple[str, int], float]:
        """Return the chance of each item, by pool and place, among those of a slice."""
        inside = np.flatnonzero(self._inside(slice_id))
        total = float(self.chance[inside].sum())
        found: dict[tuple[str, int], float] = {}
        for place in inside:
            pool, item = self._origin[place]
            found[pool.name, item] = found.get((pool.name, item), 0.0) + float(self.chance[place]) / total
        return found

    def quality(self, slice_id: int) -> Quality | None:
        """Return what a slice is like by divergence and by the labels, or None where nothing falls into it."""
        inside = self._inside(slice_id)
        if not inside.any():
            return None
        chosen = [self._origin[place] for place in np.flatnonzero(inside)]
        return quality(
            self.chance[inside],
            np.array([pool.found.flip[item] for pool, item in chosen]),
            np.array([min(pool.found.divergence[item], KL_CAP) for pool, item in chosen]),
            np.array([pool.reference_right[item] for pool, item in chosen]),
            np.array([pool.candidate_right[item] for pool, item in chosen]),
        )

    def _inside(self, slice_id: int) -> npt.NDArray[np.bool_]:
        return np.array([slice_id in slices for slices in self.slices])

    def _row(self, place: int, at_us: int, u1: float, exchange_id: str) -> ComparisonRow:
        pool, item = self._origin[place]
        found = pool.found
        return ComparisonRow(
            exchange_id=exchange_id,
            item=0,
            captured_us=at_us,
            model_version_id=self._version_id,
            policy_id=_POLICY_ID,
            slice_ids=self.slices[place],
            group_key="",
            pi1=SAMPLED,
            pi2=1.0,
            u1=u1,
            u2=0.0,
            candidate_margin=float(found.candidate_margin[item]),
            flip=float(found.flip[item]),
            topk=float(found.topk[item]),
            js=float(found.js[item]),
            divergence=float(found.divergence[item]),
            margin=float(found.margin[item]),
        )


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What a shadow worker stores at once.

    Parameters
    ----------
    rows
        What the fold reads of it.
    margins
        Exchange to the reference's margin, which an explanation reads beside.
    """

    rows: BatchRows
    margins: dict[str, float]


def batches(items: Items, *, n: int, begin_us: int, first_seq: int, seed: int) -> Iterator[Batch]:
    """Yield at least `n` exchanges as batches the way a shadow worker stores them, with tallies in between.

    Parameters
    ----------
    items
        What is drawn from, with replacement.
    n
        Exchanges.
    begin_us
        Capture time of the first.
    first_seq
        Place of the first batch in the fold.
    seed
        Of the draws.
    """
    rng = np.random.default_rng(seed)
    length_us = round(PER_BATCH / RATE_PER_S * SECOND_US)
    for number in range(-(-n // PER_BATCH)):
        at_us = begin_us + number * length_us
        drawn = items.draw(PER_BATCH, at_us, rng)
        taken = round((at_us - BEGIN_US) / SECOND_US * RATE_PER_S)
        tally = TallyRow(
            source=SOURCE,
            boot="b" * 32,
            stratum=_STRATUM,
            sequence=first_seq + number,
            at_us=at_us,
            offered=round(taken / SAMPLED),
            taken=taken,
            lost=0,
        )
        rows = BatchRows(
            fold_seq=first_seq + number,
            stored_us=at_us + length_us + SECOND_US,
            comparisons=tuple(row for row, _ in drawn),
            tallies=(tally,) if number % _TALLY_EVERY == 0 else (),
        )
        yield Batch(rows=rows, margins={row.exchange_id: margin for row, margin in drawn})


def same_law(before: Items, after: Items, slice_id: int) -> bool:
    """Return whether a slice's items come as before: then whatever alerts there is a false alarm."""
    first, second = before.law(slice_id), after.law(slice_id)
    return first.keys() == second.keys() and all(
        math.isclose(chance, second[key], rel_tol=1e-9) for key, chance in first.items()
    )
