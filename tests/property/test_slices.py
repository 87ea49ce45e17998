"""Slices: membership, identity, and the weight's lower bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.config.strata import MARGIN
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import largest_rate, smallest_rate
from quantdrift.core.slices import SliceAssigner, SliceKey, ValueRules, holds, is_declared
from quantdrift.sidecar.sampling.second_phase import SecondPhase

pytestmark = pytest.mark.property

NAMES = st.sampled_from(["x-a", "x-b"])
VALUES = st.sampled_from(["1", "2", "3"])
HEADERS = st.dictionaries(NAMES, VALUES)
MARGINS = st.floats(0, 1)
RATES = st.sampled_from([0.0, 0.01, 0.3, 1.0])
STRATA = st.lists(
    st.builds(
        HeaderStratum,
        name=st.just("s"),
        rate=RATES,
        headers=HEADERS,
        method=st.sampled_from(["", "POST"]),
        path_prefix=st.sampled_from(["", "/v2/models/m"]),
    ),
    max_size=5,
)


@given(
    headers=HEADERS,
    strata=STRATA,
    path=st.sampled_from(["/v2/models/m/infer", "/v2/models/n/infer"]),
    data=st.data(),
)
def test_no_item_of_a_slice_is_taken_with_less_than_its_smallest_rate(
    headers: dict[str, str], strata: list[HeaderStratum], path: str, data: st.DataObject
) -> None:
    """For any strata, any request and any slice it is in: 0 < c <= pi, so weights v = c / pi are at most 1."""
    policy = Policy(
        epoch="e",
        header_strata=(*strata, HeaderStratum(name="default", rate=0.2)),
        body_strata=(
            BodyStratum(name="a is 1", rate=0.5, where=(Predicate(key="header.x-a", equals="1"),)),
            BodyStratum(name="close", rate=data.draw(RATES), where=(Predicate(key=MARGIN, high=0.2),)),
            BodyStratum(name="default", rate=data.draw(RATES)),
        ),
    )
    item, smallest = sorted(data.draw(st.tuples(MARGINS, MARGINS)), reverse=True)
    taken_by = next(
        s
        for s in policy.header_strata
        if all(headers.get(name) == value for name, value in s.headers.items())
        and s.method in ("", "POST")
        and path.startswith(s.path_prefix)
    )
    attributes = {f"header.{name}": value for name, value in headers.items()}
    thinned = (
        SecondPhase(policy.body_strata, b"s").draw("k", taken_by.rate, attributes, smallest)
        if taken_by.rate
        else None
    )
    pi = taken_by.rate * thinned.pi2 if thinned else 0.0
    names = data.draw(st.lists(st.sampled_from(sorted(headers)), unique=True)) if headers else []
    where = tuple(Predicate(key=f"header.{name}", equals=headers[name]) for name in names)
    within = (*where, Predicate(key=MARGIN, low=item, high=item + 0.05))
    for one in (where, within):
        c = smallest_rate(one, policy)
        assert 0 < c <= 1
        if pi > 0:
            assert c <= pi * (1 + 1e-12)
            assert pi <= largest_rate(one, policy) * (1 + 1e-12)


def test_a_slice_that_has_a_stratum_of_its_own_has_its_rate() -> None:
    """A boosted slice is not weighed down by the rate of traffic that it never sees."""
    policy = Policy(
        epoch="e",
        header_strata=(
            HeaderStratum(name="faint", rate=1.0, headers={"x-scanner": "archive"}),
            HeaderStratum(name="default", rate=0.05),
        ),
        body_strata=(BodyStratum(name="default", rate=1.0),),
    )
    assert smallest_rate((Predicate(key="header.x-scanner", equals="archive"),), policy) == 1.0
    assert smallest_rate((Predicate(key="header.x-scanner", equals="office"),), policy) == 0.05
    assert smallest_rate((), policy) == 0.05
    assert smallest_rate((Predicate(key="feature.mean", low=0.0),), policy) == 0.05


CONFIG = Config(
    slices=(
        Slice(name="scanner", header="x-scanner", max_values=2),
        Slice(name="site", header="x-site", values=("a",)),
        Slice(name="mean", feature="mean", edges=(0.0, 1.0)),
    )
)


@given(value=st.floats(allow_nan=False))
def test_every_finite_or_infinite_value_is_in_exactly_one_bin(value: float) -> None:
    """Bins are half-open and cover the line."""
    found = SliceAssigner(CONFIG, "m").assign({}, {"feature.mean": value})
    assert found[0].name == "all"
    (bin_,) = found[1:]
    (where,) = bin_.where
    assert where.low is None or value >= where.low
    assert where.high is None or value < where.high


def test_not_a_number_and_an_absent_attribute_are_in_no_slice_but_all() -> None:
    """Missing is not a value."""
    assigner = SliceAssigner(CONFIG, "m")
    assert [key.name for key in assigner.assign({}, {"feature.mean": float("nan")})] == ["all"]
    assert [key.name for key in assigner.assign({"header.x-site": "b"}, {})] == ["all"]


def test_the_values_of_a_rule_without_declared_values_share_its_places() -> None:
    """Each value has a slice of its own, and all of them one slice for those without a place."""
    assigner, rules = SliceAssigner(CONFIG, "m"), ValueRules(CONFIG)
    keys = [assigner.assign({"header.x-scanner": f"v{i}"}, {})[1] for i in range(10)]
    assert len({key.predicate for key in keys}) == 10
    found = [rules.of(key) for key in keys]
    assert {(rule.source, rule.most) for rule in found if rule is not None} == {("header.x-scanner", 2)}
    others = {rule.other(key).predicate for rule, key in zip(found, keys, strict=True) if rule is not None}
    assert others == {"header.x-scanner is any other"}
    declared = assigner.assign({"header.x-site": "a"}, {"feature.mean": 2.0})
    assert [rules.of(key) for key in declared] == [None] * 3


@given(value=st.text(max_size=20), other=st.text(max_size=20))
def test_different_values_have_different_predicates(value: str, other: str) -> None:
    """The canonical text is the identity: quotes and backslashes in a value cannot make two slices one."""
    first = SliceAssigner(CONFIG, "m").assign({"header.x-scanner": value}, {})[1]
    second = SliceAssigner(CONFIG, "m").assign({"header.x-scanner": other}, {})[1]
    assert (first.predicate == second.predicate) == (value == other)


CROSSED = Config(
    slices=(
        Slice(name="scanner", header="x-scanner"),
        Slice(name="mean", feature="mean", edges=(0.0,)),
        Slice(name="both", cross=("scanner", "mean"), max_values=3),
    )
)


def test_a_cross_is_every_combination_of_its_parts() -> None:
    """An item in both parts is in their cross too; combinations without a place share one slice."""
    assigner, rules = SliceAssigner(CROSSED, "m"), ValueRules(CROSSED)
    keys = assigner.assign({"header.x-scanner": "a"}, {"feature.mean": 1.0})
    assert [key.name for key in keys] == ["all", "scanner=a", "mean>=0", "both: scanner=a & mean>=0"]
    assert len(assigner.assign({"header.x-scanner": "a"}, {})) == 2
    rule = rules.of(keys[-1])
    assert rule is not None
    assert (rule.source, rule.most) == ("both: ", 3)
    assert rule.other(keys[-1]).name == "both: (other)"
    assert rule.other(keys[-1]).predicate == "any other of mean x scanner"


@given(
    value=st.sampled_from(["a", "b"]),
    mean=st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_a_further_slice_takes_what_meets_all_of_its_conditions(value: str, mean: float | None) -> None:
    """Discovered slices are conjunctions: one condition that does not hold, or whose feature is absent, is enough."""
    key = SliceKey(
        model="m",
        name="found",
        predicate="found",
        where=(
            Predicate(key="header.x-scanner", equals="a"),
            Predicate(key="feature.mean", low=0.0, high=1.0),
        ),
    )
    assigner = SliceAssigner(CROSSED, "m")
    assigner.extra = (key,)
    found = assigner.assign({"header.x-scanner": value}, {} if mean is None else {"feature.mean": mean})
    assert (key in found) == (value == "a" and mean is not None and 0.0 <= mean < 1.0)


def test_a_boost_that_no_sidecar_can_follow_is_no_bound() -> None:
    """Clusters and features are known in the shadow alone: a stratum of theirs takes nothing at capture."""
    cluster = Predicate(key="cluster", equals="7")
    policy = Policy(
        epoch="e",
        header_strata=(HeaderStratum(name="default", rate=1.0),),
        body_strata=(
            BodyStratum(name="boost", rate=0.5, where=(cluster,)),
            BodyStratum(name="default", rate=0.01),
        ),
    )
    assert smallest_rate((cluster,), policy) == 0.01


TABLE = Config(
    slices=(
        Slice(name="region", feature="value", column=5, values=("0", "0.1", "3")),
        Slice(name="amount", json="loan.amount", edges=(100.0, 5000.0)),
    )
)


def test_values_of_a_column_are_groups_and_other_numbers_are_in_none() -> None:
    """As FP32 holds them; the canonical text has the number."""
    assigner = SliceAssigner(TABLE, "m")

    def of(value: float) -> list[str]:
        return [key.name for key in assigner.assign({}, {"feature.value[5]": value})[1:]]

    assert of(3.0) == ["region=3"]
    assert of(float(np.float32(0.1))) == ["region=0.1"]
    assert of(0.0) == ["region=0"]
    assert of(2.0) == of(3.001) == []
    assert [key.predicate for key in assigner.declared()[1:4]] == [
        f"feature.value[5] = {value}" for value in ("0", "0.1", "3")
    ]


@given(value=st.floats(allow_nan=False) | st.integers(0, 10_000))
def test_numbers_at_a_json_path_are_in_exactly_one_bin(value: float) -> None:
    """Recorded attributes are texts; each bin's own condition says the same of them."""
    attributes = {"json.loan.amount": str(value)}
    (bin_,) = SliceAssigner(TABLE, "m").assign(attributes, {})[1:]
    assert bin_.name.startswith("amount")
    assert all(holds(condition, attributes, {}) for condition in bin_.where)
    others = [
        key for key in SliceAssigner(TABLE, "m").declared() if key.where[:1] and "loan" in key.predicate
    ]
    assert sum(all(holds(part, attributes, {}) for part in key.where) for key in others) == 1
    assert is_declared(TABLE, bin_)
    assert ValueRules(TABLE).of(bin_) is None


@pytest.mark.parametrize("text", ["", "many", "nan", "1,000"])
def test_what_is_no_number_is_in_no_bin_of_a_json_path(text: str) -> None:
    """As a value that is missing."""
    assert [key.name for key in SliceAssigner(TABLE, "m").assign({"json.loan.amount": text}, {})] == ["all"]
