"""Routes of a slice for Istio and Envoy."""

import pytest

from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceKey
from quantdrift.release.repair.repair import route_of

pytestmark = pytest.mark.unit


def _slice(*where: Predicate) -> SliceKey:
    return SliceKey(model="digits", name="scanner=archive", predicate="", where=where)


def test_a_slice_of_headers_is_a_match_on_all_of_them() -> None:
    """Values are quoted, so that none of them changes the file."""
    key = _slice(
        Predicate(key="header.x-scanner", equals='ar"chive'), Predicate(key="header.x-site", equals="yes")
    )
    route = route_of(key, "digits-own-copy")
    assert route is not None
    assert route.count("digits-own-copy") == 4
    assert '        "x-scanner": {exact: "ar\\"chive"}\n        "x-site": {exact: "yes"}\n' in route
    assert '      - {name: "x-site", string_match: {exact: "yes"}}\n' in route


@pytest.mark.parametrize(
    "where",
    [(), (Predicate(key="json.lang", equals="de"),), (Predicate(key="feature.mean(x)", low=0.0),)],
    ids=["all traffic", "a value of the body", "a feature"],
)
def test_what_a_proxy_cannot_see_has_no_route(where: tuple[Predicate, ...]) -> None:
    """It returns None."""
    assert route_of(_slice(*where), "x") is None
