"""The slices that no rule declares, at the gate."""

import pytest

from quantdrift.core.clusters import cluster_slice, novel_input
from quantdrift.release.gate.found import left_out_live

pytestmark = pytest.mark.unit


def test_the_gate_on_live_traffic_names_what_it_leaves_out() -> None:
    """What is new, unless it has a route, and a cluster that no clustering has any more; what is judged is not named."""
    one, gone, novel = cluster_slice("digits", 1), cluster_slice("digits", 9), novel_input("digits")
    watched, judged = [one, gone, novel], [one, novel]
    assert left_out_live(watched, judged, ()) == (
        "novel=input: it has little ordinary traffic by design; --alert on an alert of it judges it",
        "cluster=9: neither the configuration nor the newest clustering tells who is in it",
    )
    assert left_out_live(watched[::2], judged, {"novel=input"}) == ()
