"""Body strata of one model: slices of two models with the same conditions are sampled apart."""

import itertools

import msgspec
import pytest

from quantdrift.core.config.check import problems
from quantdrift.core.config.schema import Capture, Config, Model, SamplingOptions
from quantdrift.core.config.strata import MODEL
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import largest_rate, of_model, smallest_rate
from quantdrift.monitor.fold.inclusion import RememberedRates
from quantdrift.monitor.sampling.demands import draft
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity
from quantdrift.sidecar.sampling.second_phase import SecondPhase
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.storage.fold_rows import Catalog, SliceRow
from quantdrift.storage.sampling import (
    Offered,
    RecentItems,
    SignalEvidence,
    SliceWeight,
    TrafficRecord,
)
from tests.support.sidecar.policy_messages import CONFIG, evidence
from tests.support.sidecar.raw_exchanges import raw_exchange, recorded_by

pytestmark = pytest.mark.unit

FAINT = Predicate(key="header.x-scanner", equals="faint")
MODELS = ("digits", "letters")
POLICY = Policy(
    epoch="e",
    header_strata=(HeaderStratum(name="default", rate=0.8),),
    body_strata=(
        BodyStratum(name="letters", rate=0.3, where=of_model((), "letters")),
        BodyStratum(name="faint digits", rate=0.5, where=of_model((FAINT,), "digits")),
        BodyStratum(name="faint", rate=0.2, where=(FAINT,)),
        BodyStratum(name="default", rate=0.1),
    ),
)


def total(model: str, *, faint: bool) -> float:
    """Return the inclusion probability that a sidecar gives an exchange."""
    attributes = {MODEL: model} | ({FAINT.key: "faint"} if faint else {})
    return 0.8 * SecondPhase(POLICY.body_strata, b"s").draw("k", 0.8, attributes, None).pi2


def test_a_stratum_of_a_model_takes_nothing_of_another() -> None:
    """The largest rate of what holds counts, as ever."""
    given = {(model, faint): total(model, faint=faint) for model in MODELS for faint in (True, False)}
    assert given == pytest.approx(
        {
            ("digits", True): 0.5,
            ("digits", False): 0.1,
            ("letters", True): 0.3,
            ("letters", False): 0.3,
        }
    )


def test_the_bounds_of_a_slice_hold_and_its_model_makes_them_sharp() -> None:
    """For every slice of either model 0 < c <= pi <= most; without the model c is below what it could be."""
    for model, faint in itertools.product(MODELS, (True, False)):
        pi = total(model, faint=faint)
        for where in ((), (FAINT,)) if faint else ((),):
            for told in (where, of_model(where, model)):
                assert 0 < smallest_rate(told, POLICY) <= pi + 1e-12
                assert pi <= largest_rate(told, POLICY) + 1e-12
    assert smallest_rate(of_model((FAINT,), "digits"), POLICY) == 0.5
    assert smallest_rate((FAINT,), POLICY) == 0.2


def test_the_fold_knows_the_model_of_a_slice() -> None:
    """The same conditions, two models, two probabilities; no weights where it is one."""
    slices = {
        place: SliceRow(id=place, model=model, name="faint", predicate="p", where=(FAINT,))
        for place, model in enumerate(MODELS)
    }
    catalog = Catalog(versions={}, slices=slices, policies={1: POLICY})
    found = [RememberedRates().of(catalog, place, 1) for place in slices]
    assert [(one.smallest, one.weighted) for one in found] == [(0.5, False), (0.3, False)]


def record(signals: tuple[SignalEvidence, ...], models: tuple[str, ...] = MODELS) -> TrafficRecord:
    """Return a record of models that are asked alike: every fifth scan of each is faint."""
    n = 1_000
    kinds = [(number % len(models), number % 5 == 0) for number in range(n)]
    return TrafficRecord(
        items=RecentItems(
            slice_ids=tuple(
                (10 * model, 10 * model + 1) if faint else (10 * model,) for model, faint in kinds
            ),
            n_items=(1,) * n,
            header_stratum=tuple("x-scanner=faint" if faint else "default" for _, faint in kinds),
            pi=(0.25,) * n,
            margin=(None,) * n,
            flip=(False,) * n,
        ),
        offered=Offered(per_s={"x-scanner=faint": 20.0, "default": 80.0}, n_sources=2),
        slices=tuple(
            SliceWeight(
                id=10 * place + len(where),
                model=model,
                name="faint" if where else "all",
                where=where,
                everything=not where,
                weight=200.0 if where else 1000.0,
            )
            for place, model in enumerate(models)
            for where in ((), (FAINT,))
        ),
        signals=signals,
    )


def test_evidence_against_a_slice_of_one_model_boosts_that_alone() -> None:
    """The slice of the other model with the same conditions gets no more than it would."""
    made = draft(CONFIG, record((evidence(11, 1.0),)), None)
    calm = draft(CONFIG, record(()), None)
    assert made
    assert calm
    names = [one.name for one in made.slices]
    assert names == ["all", "faint", "all", "faint"]
    suspected, other = made.allocation.per_slice_per_s[3], made.allocation.per_slice_per_s[1]
    assert suspected > 1.5 * other
    assert other <= calm.allocation.per_slice_per_s[1] * 1.01
    strata = {one.name: one.where for one in made.allocation.policy.body_strata}
    assert strata["letters: faint"] == (FAINT, Predicate(key=MODEL, equals="letters"))


def test_of_one_model_no_stratum_names_it() -> None:
    """It would tell nothing apart, and every exchange carries the policy."""
    made = draft(CONFIG, record((), ("digits",)), None)
    assert made
    conditions = [one for stratum in made.allocation.policy.body_strata for one in stratum.where]
    assert conditions
    assert MODEL not in {one.key for one in conditions}


def test_the_capture_process_knows_the_model_and_the_configuration_may_ask_for_it() -> None:
    """A rate of 0 but for one model: its exchanges are kept, and none of another's. A typo is told at start."""
    config = Config(
        models=(Model(name="digits"), Model(name="letters")),
        capture=Capture(headers=("x-scanner",)),
        sampling=SamplingOptions(
            body_rate=0.0, body_strata=(BodyStratum(name="one", rate=1.0, where=of_model((), "digits")),)
        ),
    )
    origin = SidecarIdentity(source="pod-1", version="", salt=b"salt", hmac_key=b"")
    kept = [
        recorded_by(Recorder(LiveConfig.of(config), origin), *raw_exchange(path=f"/v2/models/{model}/infer"))
        for model in MODELS
    ]
    assert kept[0] is not None
    assert kept[0].sampling.body_stratum == "one"
    assert MODEL not in kept[0].attributes
    assert kept[1] is None
    assert problems(config) == []
    wrong = BodyStratum(name="one", rate=1.0, where=of_model((), "digit"))
    sampling = msgspec.structs.replace(config.sampling, body_strata=(wrong,))
    (told,) = problems(msgspec.structs.replace(config, sampling=sampling))
    assert "there is no model `digit`" in told
