"""What a load test says: the table of its loads, and the service time, the knee, the sustained load and the burst in sentences."""

from collections.abc import Iterator

from quantdrift.core.text import Table
from quantdrift.facts.load_test import (
    Alone,
    Arrival,
    Burst,
    Interval,
    LoadTest,
    ServerTime,
    Sustained,
    Traffic,
)

_ARRIVAL = {
    Arrival.RECORDED: "with the recorded gaps",
    Arrival.RATES: "at random, with the recorded changes of the rate",
    Arrival.POISSON: "at random, at a constant rate",
}


def tested(test: LoadTest) -> list[str | Table]:
    """Return a load test: sentences, and a table with a row for each load."""
    blocks: list[str | Table] = [f"{test.target}: {_traffic(test.traffic)}"]
    if test.alone:
        blocks.append(_alone(test.alone))
    if test.steps:
        has_server = any(step.server for step in test.steps)
        head = ("offered/s", "answered/s", "mean", "p50", "p95", "p99", "errors", "under way")
        rows = [
            (
                f"{step.offered_per_s:,.4g}",
                f"{step.throughput_per_s:,.4g}",
                *(_ms(value) for value in (step.mean_s, step.p50_s, step.p95_s, step.p99_s)),
                _share(step.error_share),
                f"{step.in_flight:,.3g}",
                *([_queue(step.server)] if has_server else []),
                ""
                if step.is_on_schedule
                else f"not judged: this client sent late (p99 {_ms(step.late_p99_s)})",
            )
            for step in test.steps
        ]
        blocks += ["", Table((*head, *(["server's queue"] if has_server else []), ""), tuple(rows)), ""]
    blocks += list(_found(test))
    if test.stopped:
        blocks.append(f"Stopped before its end: {test.stopped}.")
    return blocks


def _found(test: LoadTest) -> Iterator[str]:
    if test.knee:
        if test.knee.per_s is None:
            yield f"Knee: not found, {test.knee.why}."
        else:
            yield (
                f"Knee: {_rate(test.knee.per_s)} requests per second. There requests wait as long, on average, as a single one takes."
            )
        rate = test.traffic.rate_per_s
        if rate is not None and test.knee.per_s is not None:
            yield f"Production had {rate:,.4g} requests per second, {rate / test.knee.per_s.value:.0%} of that."
    if test.sustained:
        yield _sustained(test.sustained)
    if test.burst:
        yield _burst(test.burst)


def _traffic(traffic: Traffic) -> str:
    text = f"{traffic.n:,} recorded requests ({traffic.source}), sent {_ARRIVAL[traffic.arrival]}"
    if traffic.gap_cv is not None:
        text += f"; their gaps vary {traffic.gap_cv:.2g} times as much as at random"
    if traffic.in_flight is not None:
        text += f"; in production {traffic.in_flight:.2g} were under way at once"
    return text


def _alone(alone: Alone) -> str:
    text = f"Single requests: mean {_ms(alone.mean_s.value)} [{_ms(alone.mean_s.low)}, {_ms(alone.mean_s.high)}], p99 {_ms(alone.p99_s)}, of {alone.n:,}"
    if alone.server is not None:
        server = alone.server
        rest = max(alone.mean_s.value - server.compute_s - server.queue_s, 0.0)
        text += (
            f". Model {_ms(server.compute_s)}, queue {_ms(server.queue_s)}, front end and network {_ms(rest)}"
        )
    return text


def _sustained(sustained: Sustained) -> str:
    step = sustained.step
    figures = [
        f"{name} {_ms(figure.value)} [{_ms(figure.low)}, {_ms(figure.high)}]"
        for name, figure in (("p95", sustained.p95_s), ("p99", sustained.p99_s))
        if figure is not None
    ]
    figures.append(f"errors {_share(step.error_share)}")
    late = "" if step.is_on_schedule else " Not judged: this client sent late."
    return (
        f"Sustained for {step.seconds:.0f} s at {step.offered_per_s:,.4g} requests per second: {_rate(sustained.throughput_per_s)} answered,"
        f" {', '.join(figures)}.{late}"
    )


def _burst(burst: Burst) -> str:
    failed = sum(burst.errors.values())
    text = f"Burst of {burst.n:,} at once: {burst.answered_at_once:,} answered at the first try, {burst.answered_later:,} after {burst.retries:,} retries"
    if burst.retries == 0:
        text = f"Burst of {burst.n:,} at once: {burst.answered_at_once:,} answered at the first try"
    if failed:
        text += f", {failed:,} not"
    if burst.p99_s is not None:
        text += f"; p99 {_ms(burst.p99_s)}"
    return f"{text}; over after {_ms(burst.drained_s)}."


def _queue(server: ServerTime | None) -> str:
    return "-" if server is None else _ms(server.queue_s)


def _rate(figure: Interval) -> str:
    return f"{figure.value:,.4g} [{figure.low:,.4g}, {figure.high:,.4g}]"


def _share(share: float) -> str:
    return f"{100 * share:.2g} %" if share else "0 %"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"
