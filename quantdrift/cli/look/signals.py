"""The tables of signals and noise that `quantdrift slices show` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantdrift.core.notation import count_of, number
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.text import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantdrift.drift.evidence.interval import WeightedEstimate
    from quantdrift.monitor.baselines.signal_view import Quantile, SelfNoise, SignalView

_NOISE_HEAD = ("noise", "mean", "exchanges", "added to the budget")
_HEAD = ("signal", "compared with", "evidence", "recent mean, or tail")


def signal_lines(signals: Sequence[SignalView], *, verdict: str | None, unit: str) -> list[str]:
    """Return the signals of one slice as a table: what each is compared with, evidence, mean; a tail has more lines.

    Parameters
    ----------
    verdict
        Verdict on the slice. While it fires the evidence is left out, because it restarted from zero at the alarm.
    unit
        Unit of the model's graded divergence.
    """
    if not signals:
        return []
    rows: list[tuple[str, ...]] = []
    for signal in signals:
        idle = verdict == Verdict.FIRING.value or signal.missing
        evidence = "-" if idle else number(signal.evidence, 3)
        mean = None if signal.tail else signal.recent
        recent = "" if mean is None else _recent(signal.metric, unit, mean)
        rows.append((f"{signal.metric} {signal.kind}", _against(signal, unit), evidence, recent))
        rows += [
            (f"  {figure.name}", "", "", _quantile(signal.metric, unit, figure)) for figure in signal.tail
        ]
    return ["", *(f"  {line}" for line in columns(_HEAD, rows).splitlines())]


def noise_lines(noises: Sequence[SelfNoise], *, unit: str) -> list[str]:
    """Return the noise of reference and candidate in a slice as a table, with the part that is added to its budgets.

    Parameters
    ----------
    noises
        Noise of one slice.
    unit
        Unit of the model's graded divergence.
    """
    from quantdrift.facts.words.amount import amount

    if not noises:
        return []
    rows = []
    for noise in noises:
        state = amount(Metric(noise.metric), noise.added, unit) if noise.added else "nothing"
        rows.append(
            (
                f"{noise.metric} {noise.side.value}",
                "not measured yet"
                if noise.mean is None
                else _measured(noise.metric, unit, noise.mean, noise.low, noise.high),
                f"{noise.n_groups:,}",
                state
                + (", too much" if noise.exceeds else "")
                + ("" if noise.own else ", as over all traffic: too few exchanges of this slice"),
            )
        )
    return ["", *(f"  {line}" for line in columns(_NOISE_HEAD, rows).splitlines())]


def _against(signal: SignalView, unit: str) -> str:
    from quantdrift.facts.words.amount import amount

    if signal.budget is not None:
        noise = f" and noise of {amount(Metric(signal.metric), signal.noise, unit)}" if signal.noise else ""
        return f"a budget of {amount(Metric(signal.metric), signal.budget, unit)}{noise}"
    if signal.missing:
        return f"learning; needs about {count_of(signal.missing, 'more exchange')}"
    limit = "" if signal.limit_s is None else f": 1 % may take longer than {number(signal.limit_s)} s"
    return f"a baseline of {count_of(signal.n_learned or 0, 'exchange')}{limit}"


def _quantile(metric: str, unit: str, figure: Quantile) -> str:
    from quantdrift.facts.words.amount import amount

    if figure.value is None:
        return "too few exchanges"
    if figure.low is None or figure.high is None:
        return f"{amount(Metric(metric), figure.value, unit)}, extrapolated"
    return _measured(metric, unit, figure.value, figure.low, figure.high)


def _recent(metric: str, unit: str, recent: WeightedEstimate) -> str:
    """Return mean and interval; where the interval would hold every value, how much is missing for one."""
    if not recent.missing:
        return _measured(metric, unit, recent.mean, recent.low, recent.high)
    from quantdrift.facts.words.amount import amount

    needed = f"{count_of(recent.missing, 'more exchange')} {'is' if recent.missing == 1 else 'are'} needed"
    return f"{amount(Metric(metric), recent.mean, unit)}; {needed} for an interval"


def _measured(metric: str, unit: str, mean: float, low: float, high: float) -> str:
    from quantdrift.facts import estimate
    from quantdrift.facts.words.amount import measured

    return measured(Metric(metric), estimate.Estimate(mean=mean, low=low, high=high), unit)
