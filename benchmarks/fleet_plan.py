"""Fleets that are run beside their plan: what was measured, the costs that fit it best, and how far the plan is off."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from scipy.optimize import nnls

from quantdrift.cli.config_summary import memory_bytes
from quantdrift.core.config.schema import Config
from quantdrift.monitor.planning.fleet import COSTS, Costs, Fleet, FleetSize, fleet_size

WITHIN: Final = 0.25
"""What is planned may differ from what is measured by as much."""
_SLICES_OF_EXCHANGE: Final = 8


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the plan beside the one that was measured."""

    name: str
    unit: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        """What was measured over what was planned."""
        return self.measured / self.planned


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that is run live.

    Parameters
    ----------
    fleet
        Its references cost next to nothing.
    batch_delay_s
        Of its workers.
    """

    fleet: Fleet
    batch_delay_s: float = 0.5

    @property
    def per_s(self) -> float:
        """Exchanges a second."""
        return self.fleet.pods * self.fleet.requests_per_s * self.fleet.sampled

    def size(self, costs: Costs = COSTS) -> FleetSize:
        """Return what is planned for it."""
        plain = Config()
        config = msgspec.structs.replace(
            plain, shadow=msgspec.structs.replace(plain.shadow, batch_delay_s=self.batch_delay_s)
        )
        return fleet_size(self.fleet, config, memory_bytes(config), costs)

    def __str__(self) -> str:
        return f"{self.fleet.models} models of {self.fleet.slices:,} slices, {self.per_s:g}/s in {self.batch_delay_s:g} s"


def _case(pods: int, models: int, slices: int, batch_delay_s: float = 0.5) -> Case:
    fleet = Fleet(
        pods=pods,
        requests_per_s=200.0,
        sampled=0.01,
        models=models,
        slices=slices,
        slices_of_exchange=_SLICES_OF_EXCHANGE,
        reference_ms=0.0,
    )
    return Case(fleet=fleet, batch_delay_s=batch_delay_s)


CASES: Final = (
    _case(10, 20, 200),
    _case(50, 20, 200, 0.1),
    _case(50, 20, 200),
    _case(100, 20, 200),
    _case(50, 1, 200),
    _case(50, 20, 50),
    _case(100, 1, 1_000),
    _case(100, 4, 1_000, 0.25),
)
"""Batches of 1.3, 3, 6, 12 and 50, with 200 to 4,000 slices, few and many of which are touched by one turn."""
QUICK_CASES: Final = (CASES[0], CASES[2], CASES[4], CASES[5])
PARTS: Final = ("worker", "nats", "postgres", "leader")
_KINDS: Final = {
    "worker": ("us", "batch_us", "second_us"),
    "nats": ("us", "batch_us", "second_us"),
    "postgres": ("us", "batch_us", "slice_us", "second_us"),
    "leader": ("us", "batch_us", "slice_us", "second_us"),
}
_ROWS: Final = {
    "us": "us an exchange",
    "batch_us": "us a batch",
    "slice_us": "us a slice that is written",
    "second_us": "us a second",
}
_NAMES: Final = {"worker": "shadow worker", "nats": "NATS", "postgres": "Postgres", "leader": "fold"}


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that was run: what came of it, and what each part took.

    Parameters
    ----------
    stored_per_s
        Exchanges a second that were stored.
    batch, slices
        Exchanges of a batch, and slices that a turn touched, for each exchange.
    us
        Processor time of each part, microseconds an exchange.
    comparison_bytes
        Of a row with its indexes.
    n_waiting
        Batches that waited to be folded at the end.
    load
        The machine's load average at the end.
    """

    case: Case
    stored_per_s: float
    batch: float
    slices: float
    us: dict[str, float]
    comparison_bytes: float
    n_waiting: int
    load: float

    def kinds(self, part: str) -> list[float]:
        """Return how many there were for each exchange, of each kind of cost of a part; the fleets have one worker and one monitor."""
        of = {
            "us": 1.0,
            "batch_us": 1 / self.batch,
            "slice_us": self.slices,
            "second_us": 1 / self.stored_per_s,
        }
        return [of[kind] for kind in _KINDS[part]]

    def fits(self, part: str, costs: Costs) -> Checked:
        """Return what a part took beside what costs give for what was stored."""
        of = msgspec.structs.asdict(costs)
        sums = zip(_KINDS[part], self.kinds(part), strict=True)
        given = math.fsum(of[f"{part}_{kind}"] * n for kind, n in sums)
        return Checked(name=part, unit="us an exchange", planned=given, measured=self.us[part])

    def checked(self, costs: Costs) -> list[Checked]:
        """Return what is planned with costs beside what was measured."""
        size, per_s = self.case.size(costs), self.case.per_s
        planned = {
            "worker": size.worker_us,
            "nats": 1e6 * size.nats_cores / per_s,
            "postgres": 1e6 * size.postgres_cores / per_s,
            "leader": 1e6 * size.leader_cores / per_s,
        }
        return [
            *(
                Checked(name=part, unit="us an exchange", planned=planned[part], measured=self.us[part])
                for part in PARTS
            ),
            Checked(name="batch", unit="exchanges", planned=size.batch, measured=self.batch),
            Checked(
                name="slices", unit="an exchange", planned=size.touched_per_exchange, measured=self.slices
            ),
        ]


def fitted(lives: Sequence[Live]) -> Costs:
    """Return the costs that are least off, by their shares, in fleets that were run; none is negative."""
    found: dict[str, float] = {}
    for part, kinds in _KINDS.items():
        of_one = np.array([live.kinds(part) for live in lives])
        measured = np.array([live.us[part] for live in lives])
        costs, _ = nnls(of_one / measured[:, None], np.ones(len(lives)))
        found |= {f"{part}_{kind}": _two_digits(cost) for kind, cost in zip(kinds, costs, strict=True)}
        found[f"{part}_us"] = max(found[f"{part}_us"], 1.0)
    return msgspec.structs.replace(COSTS, **found)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def run_said(live: Live) -> str:
    """Return what was measured of a fleet, as a line."""
    parts = ", ".join(f"{_NAMES[part]} {us:,.0f}" for part, us in live.us.items())
    return (
        f"[load {live.load:.1f}] {live.case}: us an exchange: {parts}; batches of {live.batch:.1f}, {live.slices:.2f} slices an exchange; "
        f"{live.stored_per_s:,.0f}/s were stored, {live.n_waiting} batches wait for the fold"
    )


def median(lives: Sequence[Live]) -> Live:
    """Return the medians of runs of one fleet."""

    def of(value: Callable[[Live], float]) -> float:
        return statistics.median(value(live) for live in lives)

    return msgspec.structs.replace(
        lives[-1],
        stored_per_s=of(lambda live: live.stored_per_s),
        batch=of(lambda live: live.batch),
        slices=of(lambda live: live.slices),
        us={part: statistics.median(live.us[part] for live in lives) for part in PARTS},
        comparison_bytes=of(lambda live: live.comparison_bytes),
    )


def plan_said(lives: Sequence[Live]) -> str:
    """Return the plan with the costs of this tree, and with those that fit best; and these as they are entered."""
    found = fitted(lives)
    lines = []
    for title, costs in (("with the costs of the code", COSTS), ("with the costs that fit best", found)):
        lines += ["", f"Measured (planned {title}), us an exchange; * is more than {WITHIN:.0%} off"]
        lines.append(f"{'':<46}" + "".join(f"{name:>18}" for name in (*_NAMES.values(), "batch", "slices")))
        lines += [
            f"{live.case!s:<46}" + "".join(f"{_cell(each):>18}" for each in live.checked(costs))
            for live in lives
        ]
    lines += ["", "Measured (by these costs, with the batches and slices that there were), us an exchange"]
    lines += [
        f"{live.case!s:<46}" + "".join(f"{_cell(live.fits(part, found)):>18}" for part in PARTS)
        for live in lives
    ]
    rows = [(f"{part}_{kind}", part, kind) for kind in _ROWS for part in PARTS if kind in _KINDS[part]]
    values = msgspec.structs.asdict(found)
    lines += ["", "For Costs in quantdrift/monitor/planning/fleet.py:"]
    lines += [
        f"    {name}: {'_Positive' if kind == 'us' else '_Number'} = {values[name]:_.1f}"
        for name, _, kind in rows
    ]
    lines += ["", "For the table of docs/explanation/performance.md:"]
    lines += [
        f"| {_NAMES[part]}, {_ROWS[kind]} | `{name}` | {values[name]:,.0f} |" for name, part, kind in rows
    ]
    of_bytes = statistics.median(live.comparison_bytes for live in lives)
    lines += ["", f"A comparison takes {of_bytes:,.0f} bytes ({COSTS.comparison_bytes:,.0f} are planned)."]
    return "\n".join(lines)


def _cell(each: Checked) -> str:
    far = "" if 1 / (1 + WITHIN) <= each.ratio <= 1 + WITHIN else " *"
    if each.name in PARTS:
        return f"{each.measured:,.0f} ({each.planned:,.0f}){far}"
    return f"{each.measured:.2f} ({each.planned:.2f}){far}"


def worst_ratio(lives: Sequence[Live]) -> float:
    """Return the processor time that is furthest from the plan, over what is planned."""
    ratios = [each.ratio for live in lives for each in live.checked(COSTS) if each.name in PARTS]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))
