"""`quantdrift plan --fleet --measure` with real processes and servers."""

import pytest

from quantdrift.cli.decide import fleet_measure
from quantdrift.monitor.planning.fleet import COSTS

pytestmark = pytest.mark.integration


@pytest.mark.release
def test_costs_are_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part did something, a comparison has the size of a row, and what takes weeks to see stays as shipped."""
    monkeypatch.setattr(fleet_measure, "_LEAD", 100)
    monkeypatch.setattr(fleet_measure, "_N", 400)
    said: list[str] = []
    costs = fleet_measure.measure(5, said.append)
    for name in ("worker_us", "nats_us", "postgres_us", "leader_us", "leader_batch_us"):
        assert 1 < getattr(costs, name) < 100_000, name
    assert 100 < costs.comparison_bytes < 10_000
    assert costs.tally_bytes == COSTS.tally_bytes
    assert said[-1].startswith("measured 400 exchanges in batches of ")
