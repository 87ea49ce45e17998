"""What a policy will see of the traffic, without a database."""

import msgspec
import pytest

from quantdrift.core.config.schema import Budget, Capture, Config, Model, SamplingOptions, Slice
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.rates import policy_of
from quantdrift.core.slices import SliceKey
from quantdrift.facts.plan import Forecast, SliceForecast
from quantdrift.monitor.planning.forecast import (
    N_REQUESTS,
    ForecastQuestion,
    ModelTraffic,
    Population,
    forecast,
)

pytestmark = pytest.mark.unit

CONFIG = Config(
    capture=Capture(headers=("x-scanner",)),
    sampling=SamplingOptions(
        rate=0.05, header_strata=(HeaderStratum(name="archive", rate=1.0, headers={"x-scanner": "archive"}),)
    ),
    models=(Model(name="digits"),),
    slices=(Slice(name="scanner", header="x-scanner"),),
)


def _slice(value: str) -> SliceKey:
    where = (Predicate(key="header.x-scanner", equals=value),)
    return SliceKey(model="digits", name=f"scanner={value}", predicate=f"is {value}", where=where)


TRAFFIC = ModelTraffic(
    model="digits",
    requests_per_s=100.0,
    slices=((_slice("archive"), 0.01), (_slice("faint"), 0.02)),
)
WITH_RARE = ModelTraffic(model="digits", requests_per_s=100.0, slices=((_slice("ghost"), 0.000_01),))


def _forecast(
    question: ForecastQuestion | None = None, config: Config = CONFIG, traffic: ModelTraffic = TRAFFIC
) -> tuple[Forecast, dict[str, SliceForecast]]:
    found = forecast(config, policy_of(config.sampling, "plan"), traffic, question or ForecastQuestion())
    return found, {one.slice: one for one in found.slices}


def test_each_slice_is_sampled_at_the_rate_of_its_header_stratum() -> None:
    """A stratum's share is that of the slice with its condition; the rest falls into the default one."""
    found, by_name = _forecast()
    assert by_name["scanner=archive"].samples_per_s == pytest.approx(1.0)
    assert by_name["scanner=faint"].samples_per_s == pytest.approx(0.1)
    assert found.replays_per_s == pytest.approx(100 * (0.01 + 0.99 * 0.05))
    assert by_name["all"].samples_per_s == pytest.approx(found.replays_per_s)
    assert not found.notes
    assert (found.budget, found.shifted) == (0.01, 0.03)


def test_time_is_samples_over_rate_and_the_quantiles_are_in_order() -> None:
    """A slice sampled ten times as densely is found sooner in time, if not in samples."""
    _, by_name = _forecast()
    faint, archive = by_name["scanner=faint"], by_name["scanner=archive"]
    assert faint.samples.p50 is not None
    assert faint.hours[1] == pytest.approx(faint.samples.p50 / 0.1 / 3600)
    assert faint.hours[0] < faint.hours[1] < faint.hours[2]  # type: ignore[operator]
    assert archive.hours[1] < faint.hours[1]  # type: ignore[operator]
    assert faint.optimum_samples < faint.samples.p50


def test_a_shift_to_flips_all_the_time_is_found_within_a_few_samples() -> None:
    """Three times a budget of 40 % is more than all: it is cut there, and the optimum is some samples too."""
    for shift, budget in ((100.0, 0.01), (3.0, 0.4)):
        model = Model(name="digits", budget=Budget(flip=budget))
        config = msgspec.structs.replace(CONFIG, models=(model,))
        found, by_name = _forecast(ForecastQuestion(shift=shift), config=config)
        assert found.shifted == 1.0
        median = by_name["all"].samples.p50
        assert median is not None
        assert 1 <= by_name["all"].optimum_samples <= median < 100


@pytest.mark.slow
def test_a_slice_that_cannot_be_observed_is_named_with_the_rate_that_it_needs() -> None:
    """Sampled at that rate it is observable, and at nine tenths of it is not.

    A twentieth more is for the noise of the simulation: of its 90 % quantile some 4 %.
    """
    _, by_name = _forecast(traffic=WITH_RARE)
    ghost = by_name["scanner=ghost"]
    assert not ghost.observable
    assert ghost.needed_rate is not None
    assert 0.05 < ghost.needed_rate < 1
    for factor, observable in ((1.05, True), (0.9, False)):
        stratum = HeaderStratum(name="g", rate=ghost.needed_rate * factor, headers={"x-scanner": "ghost"})
        strata = (*CONFIG.sampling.header_strata, stratum)
        sampling = msgspec.structs.replace(CONFIG.sampling, header_strata=strata)
        config = msgspec.structs.replace(CONFIG, sampling=sampling)
        assert _forecast(config=config, traffic=WITH_RARE)[1]["scanner=ghost"].observable is observable


@pytest.mark.slow
def test_too_little_traffic_and_too_small_a_shift_are_different_answers() -> None:
    """More than every request would be needed; or no number of samples that is worth simulating."""
    traffic = msgspec.structs.replace(WITH_RARE, slices=((_slice("ghost"), 1e-7),))
    ghost = _forecast(traffic=traffic)[1]["scanner=ghost"]
    assert ghost.needed_rate is not None
    assert ghost.needed_rate > 1
    tiny = _forecast(ForecastQuestion(shift=1.02), traffic=traffic)[1]["scanner=ghost"]
    assert tiny.needed_per_s is None
    assert not tiny.observable


def test_a_replay_budget_scales_every_rate_and_says_so() -> None:
    """The GPU share is that of what is granted."""
    found, by_name = _forecast(ForecastQuestion(replays_per_s=2.0, replay_ms=10.0))
    assert found.granted == pytest.approx(2.0 / found.replays_per_s)
    assert by_name["all"].samples_per_s == pytest.approx(2.0)
    assert found.gpu_share == pytest.approx(0.02)
    assert "2 are possible" in found.notes[0]


def test_the_sidecars_own_cap_counts() -> None:
    """What is above it is lost."""
    sampling = msgspec.structs.replace(CONFIG.sampling, max_exchanges_per_s=1.0)
    config = msgspec.structs.replace(CONFIG, sampling=sampling)
    found, by_name = _forecast(ForecastQuestion(pods=2), config)
    assert by_name["all"].samples_per_s == pytest.approx(2.0)
    assert "max_exchanges_per_s" in found.notes[0]


@pytest.mark.slow
def test_the_allocation_finds_a_rare_slice_at_a_cost_that_it_keeps_to() -> None:
    """With the same replays the slice that the configuration leaves in the dark is observable."""
    assert not _forecast(ForecastQuestion(replays_per_s=2.0), traffic=WITH_RARE)[1][
        "scanner=ghost"
    ].observable
    found, by_name = _forecast(ForecastQuestion(replays_per_s=2.0, allocate=True), traffic=WITH_RARE)
    assert found.replays_per_s <= 2.0
    assert found.granted == 1.0
    assert by_name["scanner=ghost"].observable
    assert found.allocated


@pytest.mark.slow
def test_a_long_quiet_time_and_many_detectors_cost_samples() -> None:
    """The evidence must outweigh what was allowed before; the allowance is shared."""
    usual = _forecast()[1]["all"].samples.p50
    fresh = _forecast(ForecastQuestion(quiet_days=0.0))[1]["all"].samples.p50
    crowd = _forecast(traffic=msgspec.structs.replace(TRAFFIC, n_detectors=40_000))[1]["all"].samples.p50
    assert fresh < usual < crowd  # type: ignore[operator]


@pytest.mark.slow
def test_other_models_share_the_false_pages() -> None:
    """Their slices are counted among the detectors."""
    config = msgspec.structs.replace(CONFIG, models=(*CONFIG.models, Model(name="other")))
    alone, both = _forecast()[0].n_detectors, _forecast(config=config)[0].n_detectors
    assert both == alone * 4 // 3


@pytest.mark.slow
def test_what_is_not_known_is_noted() -> None:
    """The share of a stratum that no slice describes, boosts by what is known after decoding, and a pause."""
    strata = (HeaderStratum(name="batch", rate=0.5, path_prefix="/batch"),)
    body = (BodyStratum(name="b", rate=1.0, where=(Predicate(key="feature.candidate_margin", high=0.1),)),)
    sampling = SamplingOptions(rate=0.5, header_strata=strata, body_strata=body, body_rate=0.1)
    config = msgspec.structs.replace(CONFIG, sampling=sampling)
    found, by_name = _forecast(config=config)
    assert any("--stratum batch=SHARE" in note for note in found.notes)
    assert any("boosts by body strata are not counted" in note for note in found.notes)
    assert found.replays_per_s_most == pytest.approx(50.0)
    assert by_name["all"].samples_per_s == pytest.approx(10.0)
    known = msgspec.structs.replace(TRAFFIC, strata={"batch": 0.25})
    assert not any("--stratum" in note for note in _forecast(config=config, traffic=known)[0].notes)
    none = msgspec.structs.replace(sampling, rate=0.0, header_strata=())
    found, by_name = _forecast(config=msgspec.structs.replace(CONFIG, sampling=none))
    assert by_name["all"].samples.p50 is None
    assert any("nothing is sampled" in note for note in found.notes)


def test_a_population_has_the_shares_that_it_was_given() -> None:
    """By slice and by header stratum, and a stratum's requests are those of the slice with its condition."""
    policy = Policy(
        epoch="e",
        header_strata=(
            HeaderStratum(name="archive", rate=1.0, headers={"x-scanner": "archive"}),
            HeaderStratum(name="batch", rate=1.0, path_prefix="/batch"),
            HeaderStratum(name="default", rate=0.1),
        ),
        body_strata=(BodyStratum(name="default", rate=1.0),),
    )
    population = Population(slices=TRAFFIC.slices, strata=policy.header_strata, shares=(0.01, 0.3, 0.69))
    recent = population.sample(100.0)
    assert (recent.slice == 0).sum() == N_REQUESTS
    archive = recent.item[recent.slice == 1]
    assert len(archive) == 0.01 * N_REQUESTS
    assert set(recent.header[archive]) == {0}
    assert (recent.header == 0).sum() == len(archive)
    assert (recent.header == 1).mean() == pytest.approx(0.3, abs=0.001)
    assert not set(archive) & set(recent.item[recent.slice == 2])
