"""The size of a fleet, by calculation, and the pages that say what it calculates with."""

import re
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.fleet_plan import CASES, PARTS, Case, Live, fitted, plan_said
from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config.schema import GIB, Config, Stream
from quantdrift.monitor.fold_turn import LONGEST_UNWRITTEN_S
from quantdrift.monitor.planning.fleet import (
    COSTS,
    Costs,
    Fleet,
    FleetSize,
    fleet_size,
    planned_fleet,
    slices_touched,
)
from tests.support.commands import invoked

pytestmark = pytest.mark.unit

DOCS = Path(__file__).resolve().parents[2] / "docs"
FLEET = Fleet(pods=500, requests_per_s=200.0, models=20, slices=200)


def _size(fleet: Fleet, config: Config | None = None, costs: Costs = COSTS) -> FleetSize:
    config = config or Config()
    return fleet_size(fleet, config, memory_bytes(config), costs)


def _too_small(size: FleetSize) -> list[str]:
    return [bound.name for bound in size.bounds if bound.ratio > 1]


def test_the_pages_say_what_is_calculated_with() -> None:
    """The table of costs is the record, the printed plan is what the command prints, and the capacity page agrees with both."""
    performance = (DOCS / "explanation/performance.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| [^|]+ \| `(\w+)` \| ([\d,.]+) \|$", performance, re.MULTILINE))
    told = {name: float(value.replace(",", "")) for name, value in table.items()}
    costs = msgspec.structs.asdict(COSTS)
    assert told == {
        name: costs[name] for name in costs if name not in {"sidecar_bytes", "monitor_bytes", "slice_bytes"}
    }
    page = (DOCS / "how-to/plan.md").read_text(encoding="utf-8")
    fleet, printed = re.findall(
        r"```(?:toml|console)\n(pods = .*?|\$ quantdrift plan --fleet fleet.toml\n.*?)\n```", page, re.DOTALL
    )
    planned = msgspec.convert(tomllib.loads(fleet), Fleet)
    assert planned == FLEET
    assert printed.partition("\n")[2] == planned_fleet(_size(planned), planned)
    rows = {
        match[1]: match
        for match in re.finditer(
            r"^\| database: ([\w ]+) \| ([\d.]+) kB(?: \(([\d.]+) kB)?",
            (DOCS / "how-to/operate.md").read_text(),
            re.MULTILINE,
        )
    }
    for name, n_bytes in (
        ("comparisons", COSTS.comparison_bytes),
        ("hourly sums", COSTS.sum_bytes),
        ("detectors", COSTS.detector_bytes),
    ):
        assert 1000 * float(rows[name][2]) == n_bytes
    assert 1000 * float(rows["tallies"][3]) == COSTS.tally_bytes


@pytest.mark.parametrize("pods", [500, 5_000, 20_000, 100_000])
def test_the_table_of_fleets_is_what_is_calculated(pods: int) -> None:
    """Each column of the performance page."""
    text = (DOCS / "explanation/performance.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.partition("**Calculated**")[2].splitlines()
        if line.startswith("| ")
    ]
    column = rows[0].index(f"{pods:,}")
    cells = {row[0]: row[column] for row in rows[:8]}
    size = _size(msgspec.structs.replace(FLEET, pods=pods))
    assert cells["shadow workers"] == f"{size.workers:,}"
    assert float(cells["fold, cores; monitors"].split(";")[0]) == pytest.approx(size.leader_cores, rel=0.01)
    operations, cores = cells["its disk, operations a second; cores"].replace(",", "").split(";")
    assert (float(operations), float(cores)) == pytest.approx(
        (size.postgres_iops, size.postgres_cores), rel=0.01
    )
    assert cells["exchanges a second"] == f"{size.exchanges_per_s:,.0f}"


def test_what_is_too_small_comes_first_with_what_to_turn() -> None:
    """The stream for this fleet, and the monitors for ten times as many pods; with longer batches and a larger stream everything holds."""
    assert _too_small(_size(FLEET)) == ["the stream, in an outage"]
    many = msgspec.structs.replace(FLEET, pods=5_000)
    size = _size(many)
    assert _too_small(size)[:2] == ["the stream, in an outage", "the monitors that fold"]
    assert f"set monitor.shards = {size.leaders}, and run {size.leaders} monitors" in planned_fleet(
        size, many
    )
    shared = _size(many, Config(monitor=msgspec.structs.replace(Config().monitor, shards=size.leaders)))
    assert "the monitors that fold" not in _too_small(shared)
    one_model = _size(msgspec.structs.replace(FLEET, pods=6_000, models=1))
    assert one_model.leaders == 1
    assert "the fold of one model" in _too_small(one_model)
    slower = Config(
        shadow=msgspec.structs.replace(Config().shadow, batch_delay_s=8.0, batch_items=256),
        stream=Stream(max_bytes=18 * GIB),
    )
    held = _size(msgspec.structs.replace(FLEET, reference_ms=0.5), slower)
    assert held.batch > 100
    assert _too_small(held) == []
    assert "Everything holds. The first that traffic makes too small" in planned_fleet(held, FLEET)


def test_blocks_from_the_workers_need_full_batches() -> None:
    """The option takes a fifth of the bytes, and nothing off batches of three; without it the plan says what it would take."""
    longer = msgspec.structs.replace(Config().shadow, batch_delay_s=8.0, batch_items=256)
    stored = msgspec.structs.replace(Config().storage, write_blocks=True)
    rows, blocks = _size(FLEET, Config(shadow=longer)), _size(FLEET, Config(shadow=longer, storage=stored))
    assert blocks.postgres_bytes == rows.blocks_bytes < 0.3 * rows.postgres_bytes
    assert "with storage.write_blocks = true" in planned_fleet(rows, FLEET)
    assert "storage.write_blocks" not in planned_fleet(blocks, FLEET)
    short = msgspec.structs.replace(Config().shadow, batch_delay_s=0.05)
    small = _size(FLEET, Config(shadow=short))
    assert _size(FLEET, Config(shadow=short, storage=stored)).postgres_bytes == small.postgres_bytes
    assert "storage.write_blocks" not in planned_fleet(small, FLEET)


def test_everything_grows_with_the_pods() -> None:
    """Twice the pods are twice the bytes and exchanges; cheaper comparisons take less."""
    one, two = _size(FLEET), _size(msgspec.structs.replace(FLEET, pods=1000))
    for name in ("comparisons", "tallies"):
        assert two.postgres_bytes_per_day[name] == 2 * one.postgres_bytes_per_day[name]
    assert two.nats_bytes == 2 * one.nats_bytes
    assert two.sidecar_bytes == 2 * one.sidecar_bytes
    smaller = _size(FLEET, costs=msgspec.structs.replace(COSTS, comparison_bytes=250.0))
    assert smaller.postgres_bytes_per_day["comparisons"] == one.postgres_bytes_per_day["comparisons"] / 4
    assert smaller.month["total"] < one.month["total"]


def test_the_command_takes_a_file_and_names_its_mistakes(tmp_path: Path) -> None:
    """Without a configuration the defaults apply; an unknown option is refused with the nearest name."""
    file = tmp_path / "fleet.toml"
    file.write_text("pods = 3\nrequest_per_s = 10\nmodels = 0\n")
    refused = invoked("plan", "--fleet", str(file), directory=tmp_path)
    assert refused.returncode == 2
    assert "requests_per_s" in refused.stderr
    assert "models" in refused.stderr
    file.write_text("pods = 3\n[prices]\ncore = 0\nmemory_gib = 0\ndisk_gib = 0\n")
    printed = invoked("plan", "--fleet", str(file), "--json", directory=tmp_path)
    assert printed.returncode == 0, printed.stderr
    size = msgspec.json.decode(printed.stdout)["size"]
    assert (size["exchanges_per_s"], size["month"]["total"]) == (3.0, 0.0)


@pytest.mark.parametrize("exchanges", [1.0, 5.0, 40.0, 1_000.0])
def test_slices_that_exchanges_share_are_touched_once(exchanges: float) -> None:
    """As drawn: each exchange is in `all` and has one of 28 values of seven headers; the error of the mean of 400 draws is below 2 %, five of them are allowed."""
    rng = np.random.default_rng(1)
    touched = []
    for n in rng.poisson(exchanges, 400):
        values = rng.integers(28, size=(n, 7)) + 28 * np.arange(7)
        touched.append(len(np.unique(values)) + (n > 0))
    fleet = Fleet(slices=1 + 7 * 28)
    # Values of one header exclude each other, so a few more are touched than where all are drawn alike.
    assert slices_touched(exchanges, fleet) == pytest.approx(np.mean(touched), rel=0.1)
    assert slices_touched(exchanges, Fleet(slices=1)) <= 1
    assert slices_touched(1e6, fleet) == pytest.approx(fleet.slices)


def test_many_slices_at_little_traffic_cost_more_each() -> None:
    """Each exchange then has the states of its slices written for it alone; more traffic, or one model, shares them."""
    little = _size(msgspec.structs.replace(FLEET, pods=50))
    more = _size(FLEET)
    one = _size(msgspec.structs.replace(FLEET, pods=50, models=1))
    assert little.touched_per_exchange > 4
    assert more.touched_per_exchange < 0.7 * little.touched_per_exchange
    assert one.touched_per_exchange < 2
    for size in (more, one):
        of_little = little.leader_cores / little.exchanges_per_s
        assert size.leader_cores / size.exchanges_per_s < of_little
    assert 1.0 <= one.written_s < little.written_s <= LONGEST_UNWRITTEN_S


def test_costs_are_found_in_what_fleets_took() -> None:
    """From the fleets of the benchmark, each 5 % off at random: what is planned with them is at most 25 % off, and they are printed as they are entered."""
    true = msgspec.structs.replace(COSTS, worker_us=100.0, leader_slice_us=90.0, postgres_batch_us=1_500.0)
    rng = np.random.default_rng(2)
    lives = []
    for case in CASES:
        size = case.size(true)
        exact = {each.name: each.planned for each in _live(case, size).checked(true)}
        us = {part: exact[part] * rng.uniform(0.95, 1.05) for part in PARTS}
        lives.append(msgspec.structs.replace(_live(case, size), us=us))
    found = fitted(lives)
    assert all(0.8 < each.ratio < 1.25 for live in lives for each in live.checked(found))
    said = plan_said(lives)
    assert f"    leader_slice_us: _Number = {found.leader_slice_us:_.1f}" in said
    assert f"| fold, us a slice that is written | `leader_slice_us` | {found.leader_slice_us:,.0f} |" in said


def test_an_axis_bends_where_it_costs_twice_the_least() -> None:
    """On either side of its cheapest point, on a line of logarithms; an axis that never does has no bend."""
    from benchmarks.plots import bend

    assert bend([1, 4, 16, 64], [800.0, 400.0, 100.0, 100.0]) == pytest.approx(8.0)
    assert bend([10, 1_000, 100_000], [100.0, 100.0, 400.0]) == pytest.approx(10_000.0)
    assert bend([1, 2], [100.0, 150.0]) is None


def _live(case: Case, size: FleetSize) -> Live:
    return Live(
        case=case,
        stored_per_s=case.per_s,
        batch=size.batch,
        slices=size.touched_per_exchange,
        us=dict.fromkeys(PARTS, 1.0),
        comparison_bytes=1_000.0,
        n_waiting=0,
        load=1.0,
    )
