"""Header strata that follow from the slices."""

import msgspec
import pytest

from quantdrift.cli.config_summary import explain
from quantdrift.core.config.schema import Capture, Config, Model, SamplingOptions, Slice
from quantdrift.core.config.strata import header_strata, with_strata
from quantdrift.core.records import BodyStratum, HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import reachable_strata
from tests.support.sidecar.policy_messages import CONFIG, SAMPLING

pytestmark = pytest.mark.unit

SCANNER = Slice(name="scanner", header="x-scanner", values=("faint", "archive", "clear"))


def config(*slices: Slice, hmac: tuple[str, ...] = (), **sampling: object) -> Config:
    """Return a configuration that makes policies."""
    return Config(
        models=(Model(name="digits"),),
        capture=Capture(headers=("x-scanner", "x-site"), hmac=hmac),
        sampling=SamplingOptions(**{"rate": 0.25, "replays_per_s": 1.0, **sampling}),  # type: ignore[arg-type]
        slices=slices,
    )


def test_each_declared_value_gets_a_stratum_after_those_by_hand() -> None:
    """What a stratum by hand takes whole has one already; the others begin at the rate of `default`."""
    assert [(s.name, s.headers, s.rate) for s in CONFIG.sampling.header_strata] == [
        ("archive", {"x-scanner": "archive"}, 1.0),
        ("x-scanner=faint", {"x-scanner": "faint"}, 0.25),
        ("x-scanner=clear", {"x-scanner": "clear"}, 0.25),
    ]
    assert with_strata(CONFIG) == CONFIG


def test_nothing_is_added_where_nobody_makes_policies() -> None:
    """Without a budget, or not following, the configuration is what was written."""
    for changes in ({"replays_per_s": 0.0},):
        sampling = msgspec.structs.replace(SAMPLING, **changes)
        plain = msgspec.structs.replace(CONFIG, sampling=sampling)
        assert with_strata(plain) == plain


def test_a_stratum_that_takes_a_part_is_none_for_the_whole() -> None:
    """Restricted to a path or another header it leaves the rest of the value to the stratum of its slice."""
    by_hand = (
        HeaderStratum(name="x-scanner=faint", rate=0.5, headers={"x-scanner": "faint"}, path_prefix="/v2"),
        HeaderStratum(name="both", rate=0.5, headers={"x-scanner": "clear", "x-site": "a"}),
    )
    found = header_strata(config(SCANNER, header_strata=by_hand)).strata
    assert [s.name for s in found[2:]] == ["x-scanner=faint'", "x-scanner=archive", "x-scanner=clear"]
    assert header_strata(config(SCANNER, header_strata=(HeaderStratum(name="a", rate=1.0),))).strata[1:] == ()


@pytest.mark.parametrize(
    "rule",
    [
        Slice(name="a", header="x-scanner"),
        Slice(name="a", header="X-Scanner", values=("b",)),
        Slice(name="a", header="x-scanner", values=("", " b", "ä", "b\n", "b" * 256)),
        Slice(name="a", feature="mean", edges=(0.0,)),
    ],
)
def test_what_relay_and_decoder_might_read_differently_gets_none(rule: Slice) -> None:
    """Open rules, features, names that are not lower case, and values that are cut, stripped or not ASCII."""
    assert header_strata(config(rule)).strata == ()


def test_a_hashed_header_gets_none() -> None:
    """The relay sees the value, the slice its hash."""
    assert header_strata(config(SCANNER, hmac=("header.x-scanner",))).strata == ()


def test_more_than_63_strata_are_left_out_and_logged() -> None:
    """Strata by hand come first; `config check` names the values that found no place, once."""
    by_hand = (HeaderStratum(name="get", rate=1.0, method="GET"),)
    many = Slice(name="site", header="x-site", values=tuple(f"s{n}" for n in range(65)))
    full = config(many, msgspec.structs.replace(many, name="again"), header_strata=by_hand)
    found = header_strata(full)
    assert len(found.strata) == 63
    assert found.strata[0] == by_hand[0]
    assert found.left_out == ("x-site=s62", "x-site=s63", "x-site=s64")
    assert header_strata(with_strata(full)) == found
    assert any("x-site=s62, x-site=s63, x-site=s64" in note for note in explain(with_strata(full)).notes)


def test_a_slice_reaches_its_own_stratum_and_those_before_it_that_may_be_its() -> None:
    """The bounds of inclusion hold for them as for strata by hand."""
    rates = Policy(
        epoch="",
        header_strata=(*CONFIG.sampling.header_strata, HeaderStratum(name="default", rate=0.25)),
        body_strata=(BodyStratum(name="default", rate=1.0),),
    )
    faint = (Predicate(key="header.x-scanner", equals="faint"),)
    assert [s.name for s in reachable_strata(faint, rates)] == ["x-scanner=faint"]
    other = (Predicate(key="header.x-scanner", equals="other"),)
    assert [s.name for s in reachable_strata(other, rates)] == ["default"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replays_per_s": 0.0}, "publishes no policy"),
        ({}, "the monitor's policy applies; the rates above apply if"),
    ],
)
def test_config_check_says_whose_rates_hold(changes: dict[str, object], words: str) -> None:
    """The configuration's, or the monitor's."""
    sampling = msgspec.structs.replace(SAMPLING, **changes)
    notes = explain(with_strata(msgspec.structs.replace(CONFIG, sampling=sampling))).notes
    assert any(words in note for note in notes)
