"""The figures of driven requests: of a step, of single requests, of the sustained load and of a burst."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.load_test import (
    LEAST_P95,
    LEAST_P99,
    Alone,
    Burst,
    Interval,
    LoadStep,
    ServerTime,
    SliceLoad,
    Sustained,
)
from quantdrift.release.load_test.drive import Driven, HttpRequest, Tried
from quantdrift.release.load_test.knee import resampled

_RESAMPLED: Final = 400
_TAILS: Final = (0.025, 0.975)
_BLOCKS: Final = 20
_LATE_RATIO: Final = 0.1
_LATE_P99_RATIO: Final = 0.2
_LATE_FREE_S: Final = 0.001  # what an event loop is late by at times
_MOST_SLICES: Final = 50


def step_of(driven: Driven, offered_per_s: float, server: ServerTime | None) -> LoadStep:
    """Return the figures of a step.

    The client kept its schedule if it sent late by at most a tenth of the latency in the mean, and by at most a fifth of it in the p99, where what is late and what
    takes long are hardly the same requests. A p99 of a millisecond is no delay.
    """
    answered = driven.latency_s[driven.is_answered]
    late = driven.late_s[~np.isnan(driven.late_s)]
    late_p99 = _quantile(late, 0.99) or 0.0
    mean, p50, p95, p99 = (
        (float(answered.mean()), *(_quantile(answered, share) for share in (0.5, 0.95, 0.99)))
        if len(answered)
        else (None, None, None, None)
    )
    kept = (
        mean is None
        or p99 is None
        or late_p99 <= _LATE_FREE_S
        or (late.mean() <= _LATE_RATIO * mean and late_p99 <= _LATE_P99_RATIO * p99)
    )
    in_flight = driven.in_flight[driven.in_flight > 0]
    n = len(driven.due_s)
    return LoadStep(
        offered_per_s=offered_per_s,
        seconds=float(driven.due_s[-1]) if n else 0.0,
        n=n,
        mean_s=mean,
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        error_share=1 - len(answered) / n if n else 0.0,
        errors=driven.errors,
        throughput_per_s=len(answered) / driven.took_s if driven.took_s else 0.0,
        in_flight=float(in_flight.mean()) if len(in_flight) else 0.0,
        late_p99_s=late_p99,
        is_on_schedule=bool(kept),
        server=server,
    )


def alone_of(driven: Driven, server: ServerTime | None, rng: np.random.Generator) -> Alone:
    """Return the figures of single requests, of which one at least was answered."""
    answered = driven.latency_s[driven.is_answered]
    p50, p95, p99 = (float(np.quantile(answered, share, method="higher")) for share in (0.5, 0.95, 0.99))
    return Alone(
        n=len(answered),
        mean_s=_interval(answered, lambda values: float(values.mean()), rng),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        server=server,
    )


def sustained_of(
    driven: Driven, step: LoadStep, requests: Sequence[HttpRequest], rng: np.random.Generator
) -> Sustained:
    """Return the figures of the sustained load."""
    answered = driven.latency_s[driven.is_answered]
    failed = (~driven.is_answered).astype(np.float64)

    def quantile(share: float, least: int) -> Interval | None:
        if len(answered) < least:
            return None
        return _interval(answered, lambda values: float(np.quantile(values, share, method="higher")), rng)

    errors = _interval(failed, lambda values: float(values.mean()), rng)
    if not errors.value:  # the exact bound of a binomial share
        errors = Interval(value=0.0, low=0.0, high=float(1 - _TAILS[0] ** (1 / len(failed))))

    return Sustained(
        step=step,
        p95_s=quantile(0.95, LEAST_P95),
        p99_s=quantile(0.99, LEAST_P99),
        throughput_per_s=_throughput(driven, step, rng),
        error_share=errors,
        slices=tuple(_slices(driven, requests)),
    )


def burst_of(tried: Sequence[Tried], drained_s: float) -> Burst:
    """Return the figures of requests that were due at once."""
    answered = np.array([each.latency_s for each in tried if not each.error])
    return Burst(
        n=len(tried),
        answered_at_once=sum(not each.error and not each.retries for each in tried),
        answered_later=sum(not each.error and each.retries > 0 for each in tried),
        retries=sum(each.retries for each in tried),
        errors=dict(Counter(each.error for each in tried if each.error)),
        p50_s=_quantile(answered, 0.5),
        p99_s=_quantile(answered, 0.99),
        drained_s=drained_s,
    )


def _throughput(driven: Driven, step: LoadStep, rng: np.random.Generator) -> Interval:
    """Return the answered requests per second, with the interval of their counts in spans of time."""
    ended = (driven.due_s + driven.latency_s)[driven.is_answered]
    if not len(ended) or not step.seconds:
        return Interval(value=0.0, low=0.0, high=0.0)
    counts, _ = np.histogram(ended, bins=_BLOCKS, range=(0.0, driven.took_s))
    per_s = counts * _BLOCKS / driven.took_s
    drawn = rng.choice(per_s, size=(_RESAMPLED, _BLOCKS)).mean(axis=1)
    low, high = np.quantile(drawn, _TAILS)
    return Interval(value=step.throughput_per_s, low=float(low), high=float(high))


def _slices(driven: Driven, requests: Sequence[HttpRequest]) -> list[SliceLoad]:
    names = Counter(name for request in requests for name in request.slices)
    found = []
    for name, _ in names.most_common(_MOST_SLICES):
        inside = np.array([name in request.slices for request in requests])[driven.chosen]
        latency = driven.latency_s[inside]
        if not len(latency):
            continue
        answered = latency[~np.isnan(latency)]
        found.append(
            SliceLoad(
                slice=name,
                n=len(latency),
                p50_s=_quantile(answered, 0.5),
                p95_s=_quantile(answered, 0.95),
                p99_s=_quantile(answered, 0.99),
                error_share=1 - len(answered) / len(latency),
            )
        )
    return found


def _interval(
    values: FloatArray, figure: Callable[[FloatArray], float], rng: np.random.Generator
) -> Interval:
    drawn = [figure(resampled(values, rng)) for _ in range(_RESAMPLED)]
    low, high = np.quantile(drawn, _TAILS)
    value = figure(values)
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def _quantile(values: FloatArray, share: float) -> float | None:
    return float(np.quantile(values, share, method="higher")) if len(values) else None
