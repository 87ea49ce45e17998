"""Whether the bound on false pages holds in production's order: batches by shape, sessions, sources, releases, noise.

    python -m benchmarks.production_order [LAW ...] [--quick]

Each law is a kind of healthy traffic that breaks an assumption of the detectors if it reaches them as it comes, or a fault that
must be found all the same. It goes through the shipped batcher, reading order, sessions and detectors on a virtual clock. Figures
named `ratio` are false alarms over the proven bound: at most 1.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks import batch_order, latency_limits, noisy_references, releases, session_cuts, sessions
from benchmarks.result import Goal, finish

# What each law measures; those of its figures that have a goal are below.
LAWS: Final[Mapping[str, Callable[..., dict[str, float]]]] = {
    "shapes": batch_order.measure,
    "sessions": session_cuts.measure,
    "sources": sessions.measure,
    "releases": releases.measure,
    "noise": noisy_references.measure,
    "latency": latency_limits.measure,
}
# By figure: its bound, and whether it should be at most that.
GOALS: Final[Mapping[str, tuple[float, bool]]] = {
    "shape_ratio": (1.0, True),
    "session_cut_ratio": (1.0, True),
    "healthy_sources_flagged": (0.01, True),
    "sessions_found": (0.95, False),
    "deep_sessions_found": (0.95, False),
    "source_fault_paged": (0.95, False),
    "canary_delay_ratio": (1.3, True),
    "release_delay_ratio": (1.3, True),
    "noise_pages": (0.05, True),
    "noise_delay_ratio": (1.5, True),
    "growth_over_named": (1.5, True),
}


def main(names: list[str], *, quick: bool) -> None:
    """Measure the laws, print them, and end with one line of JSON."""
    figures: dict[str, float | int | str | None] = {}
    for name in names or list(LAWS):
        begin = time.process_time()
        print(f"== {name}", flush=True)
        figures |= LAWS[name](quick=quick)
        figures[f"{name}_cpu_s"] = round(time.process_time() - begin)
    goals = []
    for name, (bound, at_most) in GOALS.items():
        if isinstance(value := figures.get(name), float):
            goals.append(Goal(name=name, value=value, bound=bound, unit="1", at_most=at_most))
    finish("production_order", figures, goals)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("laws", nargs="*", choices=[[], *LAWS], metavar="LAW")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    options = parser.parse_args()
    main(options.laws, quick=options.quick)
