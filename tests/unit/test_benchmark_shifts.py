"""The traffic of `python -m benchmarks.models`: what is drawn, where it falls, and what is said of it."""

import numpy as np
import pytest

from benchmarks.models import Labels, diverges, verdict
from benchmarks.pools import Pool, Quality, balance, compare, quality
from benchmarks.shifts import (
    BEGIN_US,
    PER_BATCH,
    RATE_PER_S,
    SAMPLED,
    SECOND_US,
    Case,
    Items,
    Source,
    Stage,
    World,
    batches,
    same_law,
)
from quantdrift.core.config.schema import Config, Model, Slice

pytestmark = pytest.mark.unit

SLICES = (
    Slice(name="client", header="x-client", values=("a", "b")),
    Slice(name="length", feature="length", edges=(10.0,)),
)


def pool(name: str, *, step: float = 0.0, n: int = 20) -> Pool:
    """Return items of two classes, half of them short; the candidate's logits are off by `step`."""
    rng = np.random.default_rng(1)
    reference = rng.standard_normal((n, 2))
    candidate = reference + step * np.array([1.0, -1.0])
    lengths = [{"feature.length": 5.0 if i % 2 else 15.0} for i in range(n)]
    return compare(name, candidate, reference, reference.argmax(axis=1), lengths)


SOUND, BAD, WORSE = pool("sound"), pool("bad", step=0.5), pool("worse", step=2.0)


def source(client: str, share: float, *pools: tuple[Pool, float]) -> Source:
    """Return a client that draws from `pools`."""
    return Source(attributes={"header.x-client": client}, share=share, pools=pools)


BEFORE = Stage(version="1", sources=(source("a", 0.75, (SOUND, 1.0)), source("b", 0.25, (SOUND, 1.0))))
AFTER = Stage(
    version="1", sources=(source("a", 0.75, (SOUND, 1.0)), source("b", 0.25, (SOUND, 3.0), (BAD, 1.0)))
)
MIXED = Stage(version="2", sources=(source("a", 0.5, (SOUND, 1.0)), source("b", 0.5, (SOUND, 1.0))))
WORLD = World(
    model="toy",
    config=Config(models=(Model(name="toy"),), slices=SLICES),
    before=BEFORE,
    cases=(
        Case(name="bad", told="b gets worse", after=AFTER, shifted=("client=b",)),
        Case(name="mix", told="b sends more", after=MIXED, shifted=()),
    ),
)
NUMBERS = WORLD.slices()


def test_slices_have_the_shares_that_were_asked_for() -> None:
    """An item's slices come from its client and its features, as the shadow assigns them."""
    items = Items(WORLD, AFTER)
    assert items.share(NUMBERS["all"]) == pytest.approx(1.0)
    assert items.share(NUMBERS["client=b"]) == pytest.approx(0.25)
    assert items.share(NUMBERS["length<10"]) == pytest.approx(0.5)


def test_a_slice_is_untouched_only_where_its_items_come_as_before() -> None:
    """What shares items with the shifted slice is touched; the other client is not, nor is it by another mix."""
    before, after, mixed = Items(WORLD, BEFORE), Items(WORLD, AFTER), Items(WORLD, MIXED)
    assert same_law(before, after, NUMBERS["client=a"])
    assert not same_law(before, after, NUMBERS["client=b"])
    assert not same_law(before, after, NUMBERS["length<10"])
    assert all(same_law(before, mixed, NUMBERS[name]) for name in ("client=a", "client=b", "length<10"))


def test_the_quality_of_a_slice_weighs_its_pools() -> None:
    """Three parts sound and one part bad diverge by a quarter of what the bad part does."""
    found = Items(WORLD, AFTER).quality(NUMBERS["client=b"])
    assert found is not None
    assert found.divergence == pytest.approx(float(np.minimum(BAD.found.divergence, 2.0).mean()) / 4)
    assert found.reference_accuracy == pytest.approx(1.0)
    assert found.gap == pytest.approx(float(BAD.candidate_right.mean() - 1) / 4)


def test_batches_are_the_record_of_a_shadow_at_the_stated_rate() -> None:
    """They follow each other, are ordered by exchange, and lie inside their time; the same seed gives the same."""
    items = Items(WORLD, AFTER)
    found = list(batches(items, n=200, begin_us=BEGIN_US, first_seq=7, seed=1))
    assert [batch.rows.fold_seq for batch in found] == [7, 8, 9, 10]
    length_us = PER_BATCH / RATE_PER_S * SECOND_US
    for number, batch in enumerate(found):
        rows = batch.rows.comparisons
        assert len(rows) == PER_BATCH
        assert [row.exchange_id for row in rows] == sorted(batch.margins)
        assert all(
            number * length_us <= row.captured_us - BEGIN_US <= (number + 1) * length_us for row in rows
        )
        assert all(
            row.pi == SAMPLED and 0 <= row.u1 < SAMPLED and NUMBERS["all"] in row.slice_ids for row in rows
        )
    assert found[0].rows.tallies
    assert found == list(batches(items, n=200, begin_us=BEGIN_US, first_seq=7, seed=1))
    assert found != list(batches(items, n=200, begin_us=BEGIN_US, first_seq=7, seed=2))


def test_what_is_drawn_has_the_chances_of_the_stage() -> None:
    """Of 6,400 exchanges a quarter are b's; 0.05 off is nine standard errors."""
    items = Items(WORLD, AFTER)
    rows = [
        row
        for batch in batches(items, n=6_400, begin_us=BEGIN_US, first_seq=1, seed=3)
        for row in batch.rows.comparisons
    ]
    assert np.mean([NUMBERS["client=b"] in row.slice_ids for row in rows]) == pytest.approx(0.25, abs=0.05)


def test_a_case_of_its_own_version_gets_a_number_of_its_own() -> None:
    """Versions are numbered as they occur, and all of them have a reference."""
    assert WORLD.versions() == {"1": 1, "2": 2}
    assert all(version.reference_digest for version in WORLD.catalog().versions.values())


def test_a_balanced_mixture_has_the_mean_that_it_replaces() -> None:
    """The share is solved for; outside the two means there is none."""
    share = balance(BAD, SOUND, WORSE)
    means = [float(np.minimum(one.found.divergence, 2.0).mean()) for one in (SOUND, BAD, WORSE)]
    assert (1 - share) * means[0] + share * means[2] == pytest.approx(means[1])
    with pytest.raises(ValueError, match="does not lie between"):
        balance(WORSE, SOUND, BAD)


def test_quality_counts_by_chance() -> None:
    """Means, accuracy and the gap's error are weighted; the quantile is where 99 % of the chance lies below."""
    found = quality(
        np.array([2.0, 1.0, 1.0]),
        np.array([0.0, 1.0, 0.0]),
        np.array([0.1, 0.5, 0.3]),
        np.array([1.0, 1.0, 0.0]),
        np.array([1.0, 0.0, 0.0]),
    )
    assert (found.flip, found.divergence, found.kl_p99) == pytest.approx((0.25, 0.25, 0.5))
    assert (found.reference_accuracy, found.candidate_accuracy, found.gap) == (0.75, 0.5, -0.25)
    assert found.gap_se == pytest.approx(np.sqrt(0.25 * 0.0625 + 0.0625 * 0.5625 + 0.0625 * 0.0625))


def made(
    *, gap: float = 0.0, se: float = 0.01, divergence: float = 0.01, flip: float = 0.01, p99: float = 0.1
) -> Quality:
    """Return what a slice is like."""
    return Quality(
        flip=flip,
        divergence=divergence,
        kl_p99=p99,
        reference_accuracy=0.9,
        candidate_accuracy=0.9 + gap,
        gap=gap,
        gap_se=se,
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (made(), made(gap=-0.05), Labels.WORSE),
        (made(), made(gap=0.05), Labels.BETTER),
        (made(gap=-0.05), made(gap=-0.05), Labels.SAME),
        (made(), made(gap=-0.02), Labels.SAME),  # 1.4 standard errors
        (None, made(gap=-0.05), Labels.WORSE),
        (made(gap=-0.05), None, Labels.SAME),
    ],
)
def test_the_labels_compare_what_the_candidate_lost_after_and_before(
    before: Quality | None, after: Quality | None, expected: Labels
) -> None:
    """A gap that was there before is no news, and one within two standard errors is not seen."""
    assert verdict(before, after) is expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (made(), False),
        (made(flip=0.0124, divergence=0.0124, p99=0.124), False),
        (made(flip=0.0126), True),
        (made(divergence=0.0126), True),
        (made(p99=0.126), True),
        (None, False),
    ],
)
def test_a_slice_diverges_beyond_the_tolerance_only(after: Quality | None, *, expected: bool) -> None:
    """25 % is what learned baselines let pass."""
    assert diverges(made(), after) is expected
