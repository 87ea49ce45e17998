"""The last line of every benchmark: one JSON object with machine, figures and goals."""

import os
import platform
import sys
from pathlib import Path
from typing import TypeAlias

import msgspec


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound that a figure should keep.

    Parameters
    ----------
    name
        Of the figure.
    value
        What was measured.
    bound
        What was hoped for.
    unit
        Of both; `ratio` where they are a quotient.
    at_most
        The value should be at most the bound; else at least.
    """

    name: str
    value: float
    bound: float
    unit: str
    at_most: bool = True

    @property
    def holds(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


Figures: TypeAlias = dict[str, float | int | str | None]


def finish(name: str, figures: Figures, goals: list[Goal]) -> None:
    """Print goals for people and, last, the line of JSON."""
    for goal in goals:
        sign = "<=" if goal.at_most else ">="
        print(
            f"{'holds' if goal.holds else 'FAILS'}  {goal.name} = {goal.value:.4g} {sign} {goal.bound:g} {goal.unit}"
        )
    line = {
        "benchmark": name,
        "machine": machine(),
        "figures": figures,
        "goals": [
            {"name": g.name, "value": g.value, "bound": g.bound, "unit": g.unit, "holds": g.holds}
            for g in goals
        ],
    }
    print(msgspec.json.encode(line).decode(), flush=True)


def machine() -> dict[str, str | int | float]:
    """Return what the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
    }
