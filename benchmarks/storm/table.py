"""The table of a storm: faults, failed requests, accounts, alerts and goals."""

import statistics
from collections import Counter, defaultdict
from typing import Final

import msgspec

from benchmarks.result import Goal
from benchmarks.storm.account import Account, Alerts
from benchmarks.storm.exchanges import DRIFTING
from benchmarks.storm.faults import FAULTS, Kind, Strike
from benchmarks.storm.traffic import Cause, Failure

SLICE: Final = f"scanner={DRIFTING}"
_UNATTRIBUTED: Final = "no fault in force"
_PORT_S: Final = 1.0
Figures = dict[str, float | int | str | None]


class Outcome(msgspec.Struct, kw_only=True):
    """What one run has shown; it is filled in as the run goes on, so that a run that breaks shows something too."""

    strikes: list[Strike] = []
    skipped: dict[str, str] = {}
    failures: list[Failure] = []
    n_sent: int = 0
    longest_s: float = 0.0
    drained_s: float | None = None
    account: Account | None = None
    alerts: Alerts | None = None
    drifted_at: float | None = None
    problem: str = ""

    @property
    def alert_s(self) -> float | None:
        """From the onset of the drift to the first page."""
        if self.alerts is None or self.alerts.first_s is None or self.drifted_at is None:
            return None
        return self.alerts.first_s - self.drifted_at


def _blame(storm: Outcome) -> dict[str, list[Failure]]:
    """Return the failed requests by the fault that was in force: the latest one, where there were two."""
    found: dict[str, list[Failure]] = defaultdict(list)
    for failure in storm.failures:
        names = [one.fault.name for one in storm.strikes if one.covers(failure.began_s, failure.ended_s)]
        found[names[-1] if names else _UNATTRIBUTED].append(failure)
    return found


def _port_gap_s(storm: Outcome, name: str) -> float:
    """Return for how long connections were refused after such a fault, in the worst case."""
    gaps = [
        failure.ended_s - strike.began_s
        for strike in storm.strikes
        if strike.fault.name == name
        for failure in storm.failures
        if failure.cause is Cause.REFUSED and strike.covers(failure.began_s, failure.ended_s)
    ]
    return max(gaps, default=0.0)


def _most_per_connection(storm: Outcome) -> int:
    """Return the most failures of one connection in one fault that may cost one for each connection."""
    counts = Counter(
        (number, failure.connection)
        for number, strike in enumerate(storm.strikes)
        if strike.fault.may_fail == "connection"
        for failure in storm.failures
        if strike.covers(failure.began_s, failure.ended_s)
    )
    return max(counts.values(), default=0)


def show(quiet: Outcome, storm: Outcome) -> Figures:
    """Print everything but the goals, and return the figures."""
    _show_faults(storm)
    figures = _figures(quiet, storm)
    for title, outcome in (("quiet", quiet), ("storm", storm)):
        if outcome.problem:
            print(f"the {title} run broke: {outcome.problem}")
        if outcome.account is not None:
            print(f"\naccount, {title}:")
            for name, value in _lines(outcome.account).items():
                print(f"  {name:<28} {value}")
                if isinstance(value, int):
                    figures[f"{title}_{name}"] = value
        if outcome.alerts is not None:
            print(f"alerts, {title}: fired {outcome.alerts.fired}, alerts {outcome.alerts.opened},")
            print(f"  pages at the collector {outcome.alerts.pages}; verdicts at the end:")
            for name, verdict in outcome.alerts.verdicts.items():
                print(f"  {name:<28} {verdict}")
    print()
    for name, figure in figures.items():
        print(f"  {name:<28} {figure:.4g}" if isinstance(figure, float) else f"  {name:<28} {figure}")
    return figures


def _show_faults(storm: Outcome) -> None:
    blame = _blame(storm)
    by_name: dict[str, list[Strike]] = defaultdict(list)
    for strike in storm.strikes:
        by_name[strike.fault.name].append(strike)
    print(f"\n{'fault':<28} {'times':>5} {'failed':>6} {'recover s, median':>18} {'worst':>7}  causes, notes")
    for name, strikes in sorted(by_name.items()):
        times = [strike.recovery_s for strike in strikes]
        causes = Counter(failure.cause.value for failure in blame.get(name, ()))
        notes = [f"{n} {cause}" for cause, n in causes.most_common()]
        notes += [strike.note for strike in strikes if strike.note][:2]
        print(
            f"{name:<28} {len(strikes):>5} {len(blame.get(name, ())):>6} {statistics.median(times):>18.1f}"
            f" {max(times):>7.1f}  {'; '.join(notes)}"
        )
    for name, why in storm.skipped.items():
        print(f"{name:<28} {'-':>5} {'-':>6} {'-':>18} {'-':>7}  left out: {why}")
    print(f"{_UNATTRIBUTED:<28} {'':>5} {len(blame.get(_UNATTRIBUTED, ())):>6}")


def _figures(quiet: Outcome, storm: Outcome) -> Figures:
    kinds = Counter(strike.fault.kind.value for strike in storm.strikes)
    times = [strike.recovery_s for strike in storm.strikes]
    return {
        **{f"n_{kind.value}": kinds[kind.value] for kind in Kind},
        "requests": storm.n_sent,
        "requests_failed": len(storm.failures),
        "longest_answer_s": storm.longest_s,
        "recovery_median_s": statistics.median(times) if times else None,
        "recovery_worst_s": max(times, default=None),
        "drained_s": storm.drained_s,
        "alert_s_quiet": quiet.alert_s,
        "alert_s_storm": storm.alert_s,
    }


def _lines(account: Account) -> dict[str, int | dict[str, int]]:
    fields: dict[str, int | dict[str, int]] = {
        name: getattr(account, name) for name in account.__struct_fields__
    }
    own = ("counted", "uncounted", "overcounted", "missing", "doubled", "unfolded")
    return fields | {name: int(getattr(account, name)) for name in own}


def goals_of(quiet: Outcome, storm: Outcome) -> list[Goal]:
    """Return the goals of a storm beside its quiet run."""
    blame = _blame(storm)
    may_fail = {fault.name: fault.may_fail for fault in FAULTS}
    refused = sum(len(found) for name, found in blame.items() if not may_fail.get(name))
    supervisor = [name for name in blame if name.endswith("sidecar supervisor")]
    other = sum(failure.cause is Cause.DIFFERENT for failure in storm.failures)

    def goal(name: str, value: float, bound: float, unit: str) -> Goal:
        return Goal(name=name, value=value, bound=bound, unit=unit)

    goals = [
        goal("runs_broken", bool(storm.problem) + bool(quiet.problem), 0, "{run}"),
        goal("failed_where_none_may", refused, 0, "{request}"),
        goal("failed_per_connection_relay_worker", _most_per_connection(storm), 1, "{request}"),
        goal(
            "port_closed_supervisor",
            max((_port_gap_s(storm, name) for name in supervisor), default=0.0),
            _PORT_S,
            "s",
        ),
        goal("served_other_bytes", other, 0, "{request}"),
        goal(
            "faults_without_recovery", sum(s.recovered_s == float("inf") for s in storm.strikes), 0, "{fault}"
        ),
    ]
    if (account := storm.account) is not None:
        goals += [
            goal("comparisons_lost", account.missing + account.unfolded, 0, "{exchange}"),
            goal("comparisons_doubled", account.doubled, 0, "{exchange}"),
            goal("counted_twice", account.overcounted, 0, "{request}"),
            goal("uncounted", account.uncounted + account.unknown_requests, 0, "{request}"),
        ]
    if storm.alerts is not None:
        expected = set(quiet.alerts.fired) if quiet.alerts is not None else {SLICE}
        goals += [
            goal("slices_fired_otherwise", len(expected ^ set(storm.alerts.fired)), 0, "{slice}"),
            goal("pages_not_delivered", len(set(storm.alerts.fired) - set(storm.alerts.pages)), 0, "{page}"),
            goal(
                "alerts_beyond_one",
                sum(storm.alerts.opened.values()) - len(storm.alerts.opened),
                0,
                "{alert}",
            ),
        ]
    return goals
