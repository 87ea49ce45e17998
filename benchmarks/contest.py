"""The shipped detectors and the peers on the same streams, at the same measured false-alarm rate; and the plots."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.delays import Measured
from benchmarks.peers.environment import Outcome, Peer, judged, write
from benchmarks.plots import Curve, delay_against_rate
from benchmarks.streams import FLIPS, TAIL

TARGET = 2.5  # false alarms per million groups: 5 % of runs within 20,000
AFTER = 19_968
CASES = (FLIPS[0], TAIL)
MOST_MISSED = 0.05
LEAST_GROUPS = 100_000  # healthy ones; on fewer a rate cannot be told


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A method with one setting.

    Parameters
    ----------
    case, method, setting
        Which.
    delay, delay_se
        Mean over runs and its standard error; a miss counts with all of the 19,968 groups after the change.
    missed
        Share of runs without an alarm.
    rate
        False alarms per million groups.
    n_runs, n_groups
        What the delay, and the rate, were measured on.
    us_per_group
        Time.
    """

    case: str
    method: str
    setting: str
    delay: float
    delay_se: float
    missed: float
    rate: float
    n_runs: int
    n_groups: int
    us_per_group: float


class Contest(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the peers.

    Parameters
    ----------
    versions
        Of each peer, or why there is none.
    defaults, tuned
        Each method as its makers ship it, and at its best setting with at most `TARGET` false alarms.
    everything
        All settings.
    """

    versions: dict[str, str]
    defaults: list[Standing]
    tuned: list[Standing]
    everything: list[Standing]


def contest(
    measured: Sequence[Measured],
    *,
    environments: Path,
    out: Path,
    runs: int,
    seed: int,
    say: Callable[[str], None],
) -> Contest:
    """Run the peers and return and print how they compare."""
    streams = out / "streams"
    for case in CASES:
        write(streams, case, runs, AFTER, seed)
    peers: list[Peer] = []
    for peer in judged(environments, streams):
        say(f"{peer.name} {peer.version}: {len(peer.outcomes)} settings")
        peers.append(peer)
    everything = [standing(one) for peer in peers for one in peer.outcomes]
    found = Contest(
        versions={peer.name: peer.version for peer in peers},
        defaults=[one for one in everything if one.setting == "default"],
        tuned=best(everything),
        everything=everything,
    )
    _print(measured, found)
    return found


def standing(one: Outcome) -> Standing:
    """Return the summary of an outcome."""
    delay = np.array(
        [AFTER if found is None else min(found, AFTER) for found in one.delays], dtype=np.float64
    )
    return Standing(
        case=one.case,
        method=one.method,
        setting=one.setting,
        delay=float(delay.mean()),
        delay_se=float(delay.std() / np.sqrt(len(delay))),
        missed=sum(found is None for found in one.delays) / len(delay),
        rate=1e6 * one.n_false / one.n_groups if one.n_groups else 0.0,
        n_runs=len(delay),
        n_groups=one.n_groups,
        us_per_group=one.us_per_group,
    )


def best(everything: Sequence[Standing]) -> list[Standing]:
    """Return, per case and method, the setting with the least delay among those with few false alarms."""

    def key(one: Standing) -> tuple[str, str]:
        return one.case, one.method

    found = []
    for _, settings in groupby(sorted(everything, key=key), key=key):
        quiet = [one for one in settings if _quiet(one)]
        if quiet:
            found.append(min(quiet, key=lambda one: one.delay))
    return found


def _quiet(one: Standing) -> bool:
    return one.rate <= TARGET and one.missed <= MOST_MISSED and one.n_groups >= LEAST_GROUPS


def drawn(measured: Sequence[Measured], met: Contest | None, out: Path) -> list[Path]:
    """Write the plots and return their paths."""
    paths = []
    for stem, case in (("detection-flips", FLIPS[0]), ("detection-tail", TAIL)):
        curves = [one.curve for one in measured if one.case == case.name]
        if met:
            settings = [one for one in met.everything if one.case == case.name and one.n_groups]
            curves += [
                _curve(method, list(group))
                for method, group in groupby(sorted(settings, key=_method), key=_method)
            ]
        curves = [curve for curve in curves if len(curve.rates)]
        paths += delay_against_rate(f"{case.name}: delay against false alarms", curves, out, stem)
    return paths


def _curve(method: str, settings: list[Standing]) -> Curve:
    seen = [one for one in settings if one.missed <= MOST_MISSED]
    return Curve(
        label=method,
        rates=[one.rate for one in seen],
        delays=[one.delay for one in seen],
        style="x",
        least=1e6 / max(one.n_groups for one in settings),
    )


def _method(one: Standing) -> str:
    return one.method


def _print(measured: Sequence[Measured], found: Contest) -> None:
    print(f"\nat most {TARGET} false alarms per million groups, as measured")
    for case in CASES:
        print(f"  {case.name}")
        rows = []
        for one in measured:
            points = zip(one.curve.rates, one.curve.delays, strict=True)
            quiet = [(delay, rate) for rate, delay in points if rate <= TARGET]
            if one.case == case.name and quiet:
                delay, rate = min(quiet)
                rows.append((delay, rate, one.name, ""))
        rows += [
            (
                one.delay,
                one.rate,
                one.method,
                f"{one.setting}; {one.n_runs} runs, {one.us_per_group:.1f} us per group",
            )
            for one in found.tuned
            if one.case == case.name
        ]
        for delay, rate, name, remark in sorted(rows):
            print(f"    {delay:>8.0f}  {rate:>6.2f} per million  {name:<45} {remark}")
    print("\nas they are shipped")
    for each in found.defaults:
        print(
            f"    {each.case:<22}{each.method:<45}{each.delay:>8.0f} +- {each.delay_se:<5.0f} missed {each.missed:>4.0%}  "
            f"{each.rate:>8.1f} per million ({each.n_runs} runs)"
        )
