"""`quantdrift plan --fleet --measure` with real processes and servers."""

import msgspec
import pytest

from quantdrift.cli.decide import fleet_measure
from quantdrift.monitor.planning.fleet import COSTS

pytestmark = pytest.mark.integration


@pytest.mark.release
def test_costs_are_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part did something, a comparison has the size of a row, and what takes weeks to see stays as shipped."""
    monkeypatch.setattr(fleet_measure, "_LEAD", 100)
    monkeypatch.setattr(fleet_measure, "_N", 400)
    monkeypatch.setattr(fleet_measure, "_SLOW_S", 1.0)
    said: list[str] = []
    costs = fleet_measure.measure(5, said.append)
    for name in ("worker_us", "nats_us", "postgres_us", "leader_us", "leader_batch_us"):
        assert 1 < getattr(costs, name) < 100_000, name
    assert 100 < costs.comparison_bytes < 10_000
    assert costs.tally_bytes == COSTS.tally_bytes
    fast, slow = (line for line in said if line.startswith("measured "))
    assert fast.startswith("measured 400 exchanges in batches of ")
    assert slow.startswith("measured 30 exchanges in batches of ")


@pytest.mark.parametrize("of_slice", [50.0, 900.0])
def test_a_slice_is_told_apart_from_an_exchange(of_slice: float) -> None:
    """From what two kinds of traffic took, whatever the machine's speed is; where both touch as many slices the shipped proportion stays."""
    half = {name: 0.5 * value for name, value in msgspec.structs.asdict(COSTS).items() if name.endswith("us")}
    true = msgspec.structs.replace(COSTS, **{**half, "leader_slice_us": of_slice})

    def phase(batch: float, slices: float, seconds: float) -> fleet_measure.Phase:
        of = msgspec.structs.asdict(true)
        us = {
            part: of[f"{part}_us"]
            + of[f"{part}_batch_us"] / batch
            + of.get(f"{part}_slice_us", 0.0) * slices
            + of[f"{part}_second_us"] * seconds
            for part in fleet_measure.PARTS
        }
        return fleet_measure.Phase(n=1_000, batch=batch, slices=slices, seconds=seconds, us=us)

    found = fleet_measure.measured_costs([phase(60.0, 0.3, 0.002), phase(15.0, 4.0, 0.04)], 1_000.0)
    for name in half:
        assert getattr(found, name) == pytest.approx(getattr(true, name)), name
    alike = fleet_measure.measured_costs([phase(60.0, 2.0, 0.002), phase(60.0, 2.0, 0.002)], 1_000.0)
    assert alike.leader_slice_us / alike.leader_us == pytest.approx(COSTS.leader_slice_us / COSTS.leader_us)
