"""A seeded stream with all that the fold can meet, small enough to fold in a few seconds.

Two models, a version that another one replaces and one without a reference; exchanges of several items in slices that
overlap, single and in sessions, whose sampling differs, fits its policy or does not; values that are missing, infinite
or no numbers; noise, losses, decisions about baselines, slices that are retired and restored, days of silence.
"""

import math
import random

import msgspec
import numpy as np

from quantdrift.core.config.schema import Budget, Config, Model, Monitor
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate, Side
from quantdrift.drift.detectors.change.baseline import Baseline
from quantdrift.drift.detectors.tail.pooled_histogram import TailBaseline
from quantdrift.drift.detectors.tail.quantile import tail_bin
from quantdrift.storage.fold_rows import (
    BaselineRow,
    BatchRows,
    Catalog,
    ComparisonRow,
    NoiseRow,
    SliceChange,
    SliceRow,
    Source,
    TallyRow,
    VersionRow,
)

BEGIN_US = 1_772_000_000_000_000
SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
CONFIG = Config(
    models=(Model(name="one", budget=Budget(flip=0.02, divergence=0.05, cap=0.5)), Model(name="two")),
    monitor=Monitor(min_groups=50, pages_per_30_days=0.2, tickets_per_30_days=5.0, session_s=20.0),
)
BOOSTED = "boosted"
OLD, NEW, OTHER, BARE = 1, 2, 3, 4
# Lognormal divergences, as they come.
_TAIL = np.bincount(tail_bin(np.random.default_rng(3).lognormal(-6.0, 1.0, 12_000)), minlength=64)
_SLICES = {"one": (1, 2, 3, 4, 5, 6), "two": (7, 8, 9)}


def _policy(epoch: str, default: float, boost: float) -> Policy:
    return Policy(
        epoch=epoch,
        header_strata=(
            HeaderStratum(name="rare", rate=1.0, headers={"x-kind": "2"}),
            HeaderStratum(name="default", rate=default),
        ),
        body_strata=(
            BodyStratum(
                name="close", rate=boost, where=(Predicate(key="feature.candidate_margin", high=0.1),)
            ),
            BodyStratum(name="default", rate=0.5),
        ),
    )


def _slice(number: int, model: str) -> SliceRow:
    first = number == _SLICES[model][0]
    where = () if first else (Predicate(key="header.x-kind", equals=str(number)),)
    name, predicate = ("all", "true") if first else (f"kind={number}", f'header.x-kind = "{number}"')
    return SliceRow(id=number, model=model, name=name, predicate=predicate, where=where)


CATALOG = Catalog(
    versions={
        number: VersionRow(
            id=number,
            model=model,
            candidate_version=str(number),
            reference_digest=digest,
            # Stored long after it was captured, as in a backlog: begins of its sessions are shown.
            first_seen_us=BEGIN_US + (100 * 24 * HOUR_US if number == NEW else 0),
        )
        for number, model, digest in (
            (OLD, "one", "d" * 64),
            (NEW, "one", "e" * 64),
            (OTHER, "two", "f" * 64),
            (BARE, "two", ""),
        )
    },
    slices={number: _slice(number, model) for model, numbers in _SLICES.items() for number in numbers},
    policies={1: _policy("even", 0.5, 0.5), 2: _policy(BOOSTED, 0.25, 0.9)},
)


def mixed(n: int, *, n_noise: int = 6, seed: int = 11) -> list[BatchRows]:
    """Return `n` batches; those after the first third have `n_noise` measurements of noise each."""
    rng = random.Random(seed)
    found = []
    at_us = BEGIN_US
    for number in range(1, n + 1):
        part = number / n
        if number % 97 == 0:
            at_us += rng.choice((HOUR_US, 26 * HOUR_US))
        if number == n * 9 // 10:
            at_us += 31 * 24 * HOUR_US
        rows: list[ComparisonRow] = []
        for _ in range(rng.choice((0, 3, 24, 64))):
            at_us += rng.choice((0, SECOND_US // 20, SECOND_US))
            rows += _exchange(rng, at_us + rng.choice((0, 0, 0, -SECOND_US, 5 * SECOND_US)), part)
        noise = [_noise(rng, at_us) for _ in range(n_noise if part > 0.3 else 0)]
        rows.sort(key=lambda row: (row.exchange_id, row.item))
        found.append(
            BatchRows(
                fold_seq=number,
                stored_us=at_us + SECOND_US,
                comparisons=tuple(rows),
                tallies=_tallies(rng, number, at_us) if number % 5 == 0 else (),
                decisions=_decisions(number, n),
                slices=_changes(number, n),
                unreferenced=(BARE,) if number % 50 == 0 else (),
                noise=tuple(noise),
            )
        )
    return found


def _noise(rng: random.Random, at_us: int) -> NoiseRow:
    return NoiseRow(
        exchange_id=f"{rng.getrandbits(128):032x}",
        side=rng.choice((Side.REFERENCE, Side.CANDIDATE)),
        captured_us=at_us,
        model_version_id=rng.choice((OLD, NEW)),
        policy_id=1,
        pi=0.5,
        flip=float(rng.random() < 0.03),
        divergence=rng.expovariate(200.0),
    )


def _exchange(rng: random.Random, captured_us: int, part: float) -> list[ComparisonRow]:
    model = rng.choice(("one", "one", "two"))
    version = OTHER if model == "two" else NEW if part > 0.6 or (part > 0.5 and rng.random() < 0.3) else OLD
    policy_id = 2 if part > 0.25 and rng.random() < 0.5 else 1
    everything, *others = _SLICES[model]
    drifted = 0.4 < part < 0.55 and model == "one"
    exchange_id = f"{rng.getrandbits(128):032x}"
    session = f"user{rng.randrange(30)}" if rng.random() < 0.15 else ""
    found = []
    for item in range(rng.choice((1, 1, 1, 2, 5))):
        kinds = rng.sample(others, rng.choice((0, 1, 1, 2)))
        margin = rng.choice((None, math.nan, rng.random(), rng.random() ** 4, rng.random()))
        divergence = rng.choice(
            (None, math.inf, math.nan, -1e-12, *(rng.lognormvariate(-6.0, 1.0) for _ in range(16)))
        )
        flip = (
            None if rng.random() < 0.02 else float(rng.random() < (0.2 if drifted and 3 in kinds else 0.012))
        )
        pi1 = 1.0 if 2 in kinds else (0.5, 0.25)[policy_id - 1]
        pi2 = (1.0, 0.9)[policy_id - 1] if rng.random() < 0.3 else 0.5 / pi1 if pi1 > 0.5 else 1.0
        if rng.random() < 0.01:
            pi1 = 0.01  # its sidecar follows another policy than it says
        found.append(
            ComparisonRow(
                exchange_id=exchange_id,
                item=item,
                captured_us=captured_us,
                model_version_id=version,
                policy_id=policy_id,
                slice_ids=tuple(rng.sample((everything, *kinds), 1 + len(kinds)))
                if rng.random() < 0.97
                else (),
                group_key=session,
                pi1=pi1,
                pi2=pi2,
                u1=rng.random() * pi1,
                u2=rng.random() * pi2,
                candidate_margin=margin,
                flip=flip,
                topk=rng.choice((None, 0.0, 1.0)),
                js=None if divergence is None else rng.random() * 0.01,
                divergence=divergence,
                margin=rng.choice((None, 0.01, 0.3)),
            )
        )
    return found


def _tallies(rng: random.Random, number: int, at_us: int) -> tuple[TallyRow, ...]:
    lost = number * 4 if rng.random() < 0.2 else number // 50
    return tuple(
        TallyRow(
            source="pod",
            boot="b" * 32,
            stratum=stratum,
            sequence=number,
            at_us=at_us,
            offered=number * 100,
            taken=number * 50,
            lost=lost,
            models={"one": (number * 30, lost // 2)},
        )
        for stratum in ("default", "rare")
    )


def _decisions(number: int, n: int) -> tuple[BaselineRow, ...]:
    def decided(slice_id: int, metric: str, kind: str, source: Source, content: object = None) -> BaselineRow:
        return BaselineRow(
            model_version_id=OLD,
            slice_id=slice_id,
            metric=metric,
            kind=kind,
            source=source,
            made_by="somebody",
            reason="said so",
            from_us=None,
            to_us=None,
            n_groups=0,
            from_version_id=None,
            content=msgspec.to_builtins(content),
            fold_seq=number,
        )

    learned = Baseline(
        share=tuple(np.linspace(100.0, 900.0, 16).tolist()),
        total=tuple(np.linspace(5.0, 9.0, 16).tolist()),
        n_groups=8000,
    ).settled()
    tail = TailBaseline(counts=tuple(_TAIL.tolist()), n_groups=round(_TAIL.sum()))
    if number == n * 2 // 10:
        return (
            decided(3, "flip", "change", Source.ACCEPTED, learned),
            decided(1, "divergence", "tail", Source.ACCEPTED, tail),
            decided(4, "flip", "budget", Source.IMPORTED, {"budget": 0.03}),
        )
    if number == n * 48 // 100:
        return (decided(3, "flip", "change", Source.KEPT), decided(1, "flip", "change", Source.FROZEN))
    if number == n * 55 // 100:
        return (decided(4, "flip", "budget", Source.IMPORTED, {}), decided(99, "flip", "change", Source.KEPT))
    return ()


def _changes(number: int, n: int) -> tuple[SliceChange, ...]:
    if number == n * 35 // 100:
        return (SliceChange(slice_id=5, watched=False, made_by="monitor", reason="quiet"),)
    if number == n * 45 // 100:
        return (SliceChange(slice_id=5, watched=True, made_by="somebody", reason="again"),)
    return ()
