"""The search for slices, on traffic whose truth is known."""

from collections.abc import Mapping

import numpy as np
import pytest

from quantdrift.core.records import Metric, Predicate
from quantdrift.drift.discovery.conditions import edges_of
from quantdrift.drift.discovery.items import MOST_KEYS, MOST_VALUES, Gathering, SearchItems
from quantdrift.drift.discovery.search import (
    FoundSlice,
    GivenUpError,
    SearchLimits,
    SearchResult,
    overlap,
    search,
)

pytestmark = pytest.mark.unit

N = 8000
FAINT = Predicate(key="header.x-scanner", equals="faint")


class Traffic:
    """Items with three attributes and two features, drawn from one seed."""

    def __init__(self, seed: int = 5, n: int = N) -> None:
        self.rng = np.random.default_rng(seed)
        self.scanner = self.rng.choice(["clean", "gain", "faint"], n, p=[0.6, 0.3, 0.1])
        self.site = self.rng.choice([f"s{place}" for place in range(12)], n)
        self.contrast = self.rng.normal(1.0, 0.3, n)
        self.length = self.rng.integers(1, 400, n).astype(np.float64)
        self.rate = np.full(n, 0.005)
        self.pi = np.ones(n)

    def items(self) -> SearchItems:
        """Return the items, two in each exchange, with flips and KL at their rates."""
        flips = self.rng.random(len(self.rate)) < self.rate
        divergence = np.minimum(self.rng.lognormal(-8, 1, len(flips)) + 0.02 * flips, 1.0)
        gathering = Gathering()
        for index in range(len(flips)):
            gathering.add(
                f"e{index // 2}",
                float(self.pi[index]),
                {
                    "header.x-scanner": str(self.scanner[index]),
                    "header.x-site": str(self.site[index]),
                    "header.x-request-id": f"r{index}",
                },
                {
                    "feature.contrast": float(self.contrast[index]),
                    "feature.length": float(self.length[index]),
                },
                {Metric.FLIP: float(flips[index]), Metric.DIVERGENCE: float(divergence[index])},
            )
        return gathering.items()


def found_in(
    items: SearchItems, bounds: Mapping[Metric, float] | None = None, **limits: float
) -> SearchResult:
    """Search with the defaults but for `limits`."""
    return search(items, bounds or {Metric.FLIP: 0.01, Metric.DIVERGENCE: 0.01}, SearchLimits(**limits))  # type: ignore[arg-type]


def test_nothing_is_found_where_divergence_concentrates_nowhere() -> None:
    """Flips at 0.5 % everywhere against a bound of 1 %: of some 2,000 slices none stands out far enough."""
    result = found_in(Traffic().items(), {Metric.FLIP: 0.0125})
    assert result.found == ()
    assert result.n_scored > 1000


def test_a_bad_attribute_value_is_found_as_itself_and_once() -> None:
    """Not as one of the many slices that lie inside it, nor as the bins that happen to hold more of it."""
    traffic = Traffic()
    traffic.rate[traffic.scanner == "faint"] = 0.06
    found = found_in(traffic.items(), {Metric.FLIP: 0.02}).found
    assert [one.where for one in found] == [(FAINT,)]
    assert found[0].metric is Metric.FLIP
    assert found[0].mean == pytest.approx(0.06, abs=0.02)
    assert found[0].share == pytest.approx(0.1, abs=0.02)
    assert found[0].low < found[0].mean


def test_two_causes_are_two_findings_and_a_conjunction_is_found_as_one() -> None:
    """A site that is bad whatever it sends, and a scanner that is bad at low contrast alone."""
    traffic = Traffic(n=2 * N)
    traffic.rate[traffic.site == "s3"] = 0.08
    traffic.rate[(traffic.scanner == "gain") & (traffic.contrast < 0.8)] = 0.1
    found = found_in(traffic.items(), {Metric.FLIP: 0.02}, most_found=2).found
    assert {tuple(condition.key for condition in one.where) for one in found} == {
        ("header.x-site",),
        ("feature.contrast", "header.x-scanner"),
    }
    both = next(one for one in found if len(one.where) == 2)
    assert both.where[1].equals == "gain"
    assert both.where[0].high == pytest.approx(0.8, abs=0.08)


@pytest.mark.slow
def test_depth_bounds_the_number_of_conditions() -> None:
    """What needs two conditions is found at depth 2, and three at depth 3, but no deeper than asked."""
    traffic = Traffic(n=2 * N)
    bad = (traffic.scanner != "faint") & (traffic.contrast < 0.9) & (traffic.length < 160)
    traffic.rate[bad & (traffic.scanner == "clean")] = 0.15
    items = traffic.items()
    for depth in (1, 2, 3):
        found = found_in(items, {Metric.FLIP: 0.02}, depth=depth).found
        assert max(len(one.where) for one in found) == depth
        assert all(len({condition.key for condition in one.where}) == len(one.where) for one in found)


def test_weights_undo_the_sampling() -> None:
    """Oversampled low-contrast traffic of one scanner, which is no worse: unweighted it would look worse."""
    traffic = Traffic(n=2 * N)
    low = traffic.contrast < 0.7
    traffic.rate[low] = 0.03
    boosted = low & (traffic.scanner == "gain")
    traffic.pi[~boosted] = 0.1
    keep = boosted | (traffic.rng.random(len(low)) < 0.5)
    for name in ("scanner", "site", "contrast", "length", "rate", "pi"):
        setattr(traffic, name, getattr(traffic, name)[keep])
    gain = Predicate(key="header.x-scanner", equals="gain")

    def mean_of_gain(items: SearchItems) -> float:
        inside = items.members((gain,))
        return float(np.average(items.signals[Metric.FLIP][inside], weights=items.weight[inside]))

    state = traffic.rng.bit_generator.state
    weighted = mean_of_gain(traffic.items())
    traffic.pi[:] = 1.0
    traffic.rng.bit_generator.state = state
    assert weighted < 0.8 * mean_of_gain(traffic.items())


def test_an_exchange_counts_once_however_many_items_it_has() -> None:
    """Weights are shared by the items of an exchange."""
    gathering = Gathering()
    for exchange, n_items in (("a", 1), ("b", 4)):
        for _ in range(n_items):
            gathering.add(exchange, 0.5, {}, {}, {Metric.FLIP: 0.0})
    items = gathering.items()
    assert items.weight.tolist() == [2.0, 0.5, 0.5, 0.5, 0.5]
    assert items.group.tolist() == [0, 1, 1, 1, 1]


def test_small_slices_are_not_found() -> None:
    """Neither below the smallest share nor with fewer items than asked for."""
    traffic = Traffic()
    traffic.rate[traffic.scanner == "faint"] = 0.2
    items = traffic.items()
    assert found_in(items, least_share=0.2).found == ()
    assert found_in(items, least_items=2000).found == ()


@pytest.mark.slow
def test_limits_leave_out_and_count() -> None:
    """Fewer conditions and fewer findings than there are: what was left out is told."""
    traffic = Traffic()
    traffic.rate[traffic.scanner == "faint"] = 0.06
    traffic.rate[traffic.site == "s3"] = 0.06
    items = traffic.items()
    everything = found_in(items)
    few = found_in(items, most_conditions=4)
    assert few.n_left_out > everything.n_left_out
    assert few.n_scored < everything.n_scored
    assert found_in(items, most_found=1).n_left_out == everything.n_left_out + 1
    assert len(found_in(items, most_found=1).found) == 1


def test_a_request_id_cannot_blow_it_up() -> None:
    """Distinct values and attributes beyond the caps are counted and forgotten."""
    gathering = Gathering()
    for index in range(MOST_VALUES + 10):
        gathering.add(str(index), 1.0, {"header.x-request-id": str(index)}, {}, {Metric.FLIP: 0.0})
    gathering.add("last", 1.0, {f"json.{key}": "v" for key in range(MOST_KEYS + 5)}, {}, {Metric.FLIP: 0.0})
    items = gathering.items()
    assert len(items.levels["header.x-request-id"]) == MOST_VALUES
    assert len(items.levels) == MOST_KEYS
    assert items.n_left_out == 10 + 6
    assert not items.members((Predicate(key="json.70", equals="v"),)).any()


def test_a_search_ends_when_it_is_cancelled() -> None:
    """At the next of many points, and finds nothing then."""
    asked = iter(range(10_000))
    with pytest.raises(GivenUpError):
        search(Traffic().items(), {Metric.FLIP: 0.01}, SearchLimits(), lambda: next(asked) > 40)


def test_without_items_or_signals_nothing_is_found() -> None:
    """An empty record, outputs that have no divergence, and one constant item are no error."""
    assert found_in(Gathering().items()).found == ()
    gathering = Gathering()
    for index in range(300):
        gathering.add(
            str(index), 1.0, {"a": "b"}, {"feature.x": 1.0}, {Metric.FLIP: None, Metric.DIVERGENCE: None}
        )
    assert found_in(gathering.items(), least_items=1).found == ()
    assert found_in(gathering.items(), {Metric.JS: 0.1}).found == ()


def test_edges_are_short_numbers_that_stay_when_the_data_move_a_little() -> None:
    """What a person reads is what is tested; most edges are the same on the next day's data."""
    rng = np.random.default_rng(8)
    one, other = (edges_of(rng.normal(1, 0.3, 50_000), 10) for _ in range(2))
    assert one == sorted(one)
    assert all(float(f"{edge:g}") == edge for edge in one)
    assert max(len(f"{edge:g}") for edge in one) <= 4
    assert len(set(one) & set(other)) >= 5
    assert edges_of(np.full(100, 3.0), 10) == []
    assert edges_of(np.array([np.nan] * 50), 10) == []
    assert edges_of(np.array([1.0, 2.0]), 10) == []


@pytest.mark.parametrize("odd", [[5e-324], [1.7e308, -1.7e308]])
def test_one_odd_number_of_a_client_does_not_end_the_search(odd: list[float]) -> None:
    """Numbers that differ by less than a step can be, or by more than a float can say, have no edges."""
    assert edges_of(np.array([0.0] * 98 + odd), 10) == []
    assert edges_of(np.linspace(-1.0, 1.0, 50) * odd[0], 10) == []


def test_overlap_is_the_share_of_either_in_both() -> None:
    """1 for the same items, 0 for none in common."""
    one = np.array([True, True, False, False])
    assert overlap(one, one) == 1.0
    assert overlap(one, ~one) == 0.0
    assert overlap(one, np.array([True, False, False, False])) == 0.5


def test_findings_come_in_the_order_they_were_taken() -> None:
    """The worst first; each is a record that says what it saw."""
    traffic = Traffic()
    traffic.rate[traffic.scanner == "faint"] = 0.2
    traffic.rate[traffic.site == "s3"] = 0.05
    found: tuple[FoundSlice, ...] = found_in(traffic.items(), {Metric.FLIP: 0.02}).found
    assert found[0].where == (FAINT,)
    assert found[0].score > found[1].score
    assert {one.bound for one in found} == {0.02}
