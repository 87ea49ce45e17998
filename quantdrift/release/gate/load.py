"""The speed of a candidate: latency and throughput of a load run, measured here or read from the file of another program.

Measured: the candidate gets recorded inputs, one item in each request and one request after the other, in a random order. Nothing else is in
the time but the model's runtime. The file of a route is measured like the candidate, each on the inputs that it would serve. Two questions, each of one mean, with the bounds of the other questions (`quantdrift.drift.gate`):

- *p99 below the budget* is the same as "less than 1 % of the requests take the budget or longer".
- *Throughput at least the budget*: in less than half of the rounds of `ROUND` requests it is smaller, so the median round keeps it.

Assumption: given those before, a request is slow with a probability of at least (pass) or at most (fail) 1 %, as on a machine whose other
load does not change. Looked at once, at the end. The bounds that are shown are order statistics: with the most slow requests, k, at which a
pass is still certain, the k-th largest latency is the upper bound of the p99, and the lower one likewise (as for any quantile: David and
Nagaraja, Order Statistics, 2003, section 7.1, with the bound of `few_values` in place of the binomial one).

A file of another program has figures and no single requests, so its verdict is a comparison of two numbers, without a statement of probability. That of
`quantdrift load` has 95 % intervals of the figures at its sustained load: a pass needs the whole interval within the budget, a failure the whole interval
outside of it.
"""

import csv
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np

from quantdrift.core.config.models import Budget
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.slices import ALL
from quantdrift.drift.evidence.few_values import lower_bound, upper_bound
from quantdrift.drift.evidence.observations import FloatArray, IntArray
from quantdrift.drift.gate import Question, Trial
from quantdrift.facts.gate import Kind, Load, LoadRun, Outcome, SliceAnswer
from quantdrift.facts.load_test import FORMAT, LEAST_P95, LEAST_P99, Interval, LoadTest, without_path
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.arrays import Array

ROUND: Final = 20
"""Requests of one round."""
MOST_REQUESTS: Final = 2000
LONGEST_S: Final = 60.0
_WARM_UP: Final = 20
_SLOW: Final = 0.01
_SLOWER: Final = 0.05
_MOST_BYTES: Final = 2**20
_LINE: Final = re.compile(r"\s*(.+?)\s*:\s*(\S.*?)\s*")
# Of a summary of MLPerf's load generator, by scenario; a server's load is given, so what was completed counts.
_THROUGHPUT: Final = ("Completed samples per second", "Samples per second", "QPS w/ loadgen overhead")


class LoadBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate must keep; None: not asked.

    Parameters
    ----------
    latency_p95_s, latency_p99_s
        The p95 and the p99 of the latency must be below them, in seconds.
    throughput_per_s
        The least number of requests per second.
    error_share
        The share of the requests without an answer must be below it. Only a file tells it.
    """

    latency_p95_s: float | None = None
    latency_p99_s: float | None = None
    throughput_per_s: float | None = None
    error_share: float | None = None

    @classmethod
    def of_model(cls, budget: Budget) -> Self:
        """Return what the owner of a model asks of a load test."""
        return cls(
            latency_p95_s=budget.latency_p95_s or None,
            latency_p99_s=budget.latency_p99_s or None,
            throughput_per_s=budget.throughput_per_s or None,
            error_share=budget.error_share or None,
        )

    @property
    def limits(self) -> dict[Kind, float]:
        """What is asked, each with its limit."""
        limits = {
            Kind.LATENCY_P95: self.latency_p95_s,
            Kind.LATENCY: self.latency_p99_s,
            Kind.THROUGHPUT: self.throughput_per_s,
            Kind.ERRORS: self.error_share,
        }
        return {kind: limit for kind, limit in limits.items() if limit is not None}

    @property
    def n(self) -> int:
        """Number of questions."""
        return len(self.limits)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON form of a load run."""

    latency_p50_s: float | None = None
    latency_p95_s: float | None = None
    latency_p99_s: float | None = None
    throughput_per_s: float | None = None
    error_share: float | None = None
    requests: int = 0


class _Read(msgspec.Struct, frozen=True, kw_only=True):
    """A load run as its file says it, with the 95 % intervals of its figures; a figure without one is compared as it is."""

    load: Load
    intervals: dict[Kind, Interval] = {}
    missing: dict[Kind, int] = {}
    """Requests that a figure has too few of to have an interval."""


def measured(
    runtime: ReferenceRuntime,
    inputs: Sequence[dict[str, Array]],
    budget: LoadBudget,
    *,
    items: IntArray,
    of: str = ALL,
    batched: bool,
    pass_level: float,
    fail_level: float,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadRun:
    """Return the speed of a model on recorded inputs, of at most `MOST_REQUESTS` requests or `LONGEST_S`.

    Parameters
    ----------
    inputs
        Of each file, by name : (items, ...).
    items
        Numbers of the items that it serves, counted through all files; without any, nothing can be said of its speed.
    of
        The slice that it serves, of a route.
    batched
        The model's inputs have a dimension of items.
    pass_level, fail_level
        As of `Trial`.
    clock
        Seconds.

    Raises
    ------
    OperatorError
        The candidate cannot compute an item alone.
    """
    ends = np.cumsum([len(next(iter(arrays.values()))) for arrays in inputs])
    rng, n_requests = np.random.default_rng(0), (_WARM_UP + MOST_REQUESTS) if len(items) else 0
    order = items[rng.integers(max(len(items), 1), size=n_requests)]
    wall, cpu = [], []
    began = clock()
    for number, drawn in enumerate(order.tolist()):
        file = int(np.searchsorted(ends, drawn, side="right"))
        item = drawn - int(ends[file])  # from the end of its file
        row = {
            spec.name: inputs[file][spec.name][[item]] if batched else inputs[file][spec.name][item]
            for spec in runtime.inputs
        }
        cpu_at, at = time.process_time(), clock()
        try:
            runtime.run(row)
        except QuarantineError as error:
            raise OperatorError(
                f"the candidate {runtime.artefact.path} cannot compute one item alone, so its latency cannot be measured:"
                f" {error.detail}. Give the file of a load run with --load"
            ) from error
        ended = clock()
        if number >= _WARM_UP:
            wall.append(ended - at)
            cpu.append(time.process_time() - cpu_at)
        if ended - began > LONGEST_S:
            break
    return judged(
        np.array(wall),
        np.array(cpu),
        budget,
        Load(source=runtime.provenance.device, file=str(runtime.artefact.path), slice=of),
        pass_level=pass_level,
        fail_level=fail_level,
    )


def judged(
    wall: FloatArray, cpu: FloatArray, budget: LoadBudget, run: Load, *, pass_level: float, fail_level: float
) -> LoadRun:
    """Return the answers to measured requests.

    Parameters
    ----------
    wall, cpu
        Seconds by the clock and of the processor : (requests,).
    run
        What ran them, without the figures.
    pass_level, fail_level
        As of `Trial`.
    """
    rounds = wall[: len(wall) // ROUND * ROUND].reshape(-1, ROUND)
    rates = ROUND / rounds.sum(axis=1)
    load = msgspec.structs.replace(
        run,
        n=len(wall),
        p50_s=_quantile(wall, 0.5),
        p95_s=_quantile(wall, 0.95),
        p99_s=_quantile(wall, 0.99),
        cpu_p50_s=_quantile(cpu, 0.5),
        cpu_p99_s=_quantile(cpu, 0.99),
        throughput_per_s=_quantile(rates, 0.5),
    )
    answers = []
    for kind, share, value, limit in (
        (Kind.LATENCY_P95, _SLOWER, load.p95_s, budget.latency_p95_s),
        (Kind.LATENCY, _SLOW, load.p99_s, budget.latency_p99_s),
    ):
        if limit is None:
            continue
        trial = _trial(wall >= limit, share, pass_level, fail_level)
        low, high = _bounds(wall, share, pass_level, fail_level)
        answers.append(_answer(run.slice, kind, trial, (value, max(low, 0.0), high), limit))
    if budget.throughput_per_s is not None:
        trial = _trial(rates < budget.throughput_per_s, 0.5, pass_level, fail_level)
        slow, fast = _bounds(-rates, 0.5, pass_level, fail_level)
        figures = (load.throughput_per_s, max(-fast, 0.0), -slow)
        answers.append(
            _answer(run.slice, Kind.THROUGHPUT, trial, figures, budget.throughput_per_s, each=ROUND)
        )
    return LoadRun(load=load, answers=tuple(answers))


def _trial(missed: Array, share: float, pass_level: float, fail_level: float) -> Trial:
    """Return the trial of "is less than `share` missed?"."""
    groups = np.stack((~missed, missed), axis=1).astype(np.float64)
    return Trial(question=Question.flips(share), pass_level=pass_level, fail_level=fail_level).at_once(groups)


def _answer(
    of: str,
    kind: Kind,
    trial: Trial,
    figures: tuple[float | None, float, float],
    limit: float,
    *,
    each: int = 1,
) -> SliceAnswer:
    answer, (mean, low, high) = trial.answer(), figures
    return SliceAnswer(
        slice=of,
        question=kind,
        verdict=answer.outcome,
        n=trial.n * each,
        mean=mean,
        low=low,
        high=high,
        limit=limit,
        more=None if answer.more is None else answer.more * each,
    )


def _bounds(values: FloatArray, share: float, pass_level: float, fail_level: float) -> tuple[float, float]:
    """Return the bounds of the value that a share of `share` exceeds; infinite where there are too few."""
    n, ordered = len(values), np.sort(values)[::-1]
    each = np.array([0.0, 1.0])

    def certain(k: int) -> bool:
        return upper_bound(np.array([n - k, k], dtype=np.float64), each, pass_level) < share

    def impossible(k: int) -> bool:
        return lower_bound(np.array([n - k, k], dtype=np.float64), each, fail_level) > share

    most = _first(lambda k: not certain(k), n) - 1  # as many may be missed
    least = _first(impossible, n)
    high = float(ordered[most]) if 0 <= most < n else math.inf
    low = float(ordered[least - 1]) if 1 <= least <= n and impossible(least) else -math.inf
    return low, high


def _first(holds: Callable[[int], bool], n: int) -> int:
    """Return the first k in 0...n from which on a condition holds; n if it never does."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _quantile(values: FloatArray, share: float) -> float | None:
    return float(np.quantile(values, share, method="higher")) if len(values) else None


def read_load(path: Path, budget: LoadBudget, *, file: str, of: str = ALL) -> LoadRun:
    """Return a finished load run: JSON of `quantdrift load`, a CSV of perf_analyzer, a summary of MLPerf's load generator, or other JSON.

    Of a CSV with several loads it is the row with the highest throughput among those that keep the latency; if none keeps it, that with the
    lowest p99.

    Parameters
    ----------
    path
        Where it is.
    budget
        What is asked of it.
    file, of
        The model's file or address, and the slice that it serves.

    Raises
    ------
    OperatorError
        It cannot be read, is none of these, lacks a figure that a budget asks for, is of another endpoint, or is of a run that was not valid.
    """
    run = _read(path, budget, file)
    load = msgspec.structs.replace(run.load, file=file, slice=of)
    answers = []
    for kind, limit in budget.limits.items():
        value = _value_of(load, kind)
        if value is None:
            raise OperatorError(
                f"--load {path} has no {_NAMED[kind]}: leave that budget out, or give a file that has it"
            )
        missing = run.missing.get(kind, 0)
        bounds = run.intervals.get(kind, Interval(value=value, low=value, high=value))
        verdict = Outcome.INSUFFICIENT if missing else _verdict(kind, bounds, limit)
        answers.append(
            SliceAnswer(
                slice=of,
                question=kind,
                verdict=verdict,
                n=load.n,
                mean=value,
                low=0.0 if missing else bounds.low,
                high=math.inf if missing else bounds.high,
                limit=limit,
                more=(missing or _more(bounds, limit, load.n)) if verdict is Outcome.INSUFFICIENT else 0,
            )
        )
    return LoadRun(load=load, answers=tuple(answers))


def _value_of(load: Load, kind: Kind) -> float | None:
    return {
        Kind.LATENCY_P95: load.p95_s,
        Kind.LATENCY: load.p99_s,
        Kind.THROUGHPUT: load.throughput_per_s,
        Kind.ERRORS: load.error_share,
    }[kind]


def _verdict(kind: Kind, bounds: Interval, limit: float) -> Outcome:
    keeps = (
        (bounds.low >= limit, bounds.high >= limit)
        if kind is Kind.THROUGHPUT
        else (bounds.high < limit, bounds.low < limit)
    )
    return Outcome.PASS if keeps[0] else Outcome.INSUFFICIENT if keeps[1] else Outcome.FAIL


def _more(bounds: Interval, limit: float, n: int) -> int | None:
    """Return about how many more requests it takes until the interval is on one side of the limit; None: the figure is at it."""
    wide = bounds.high - bounds.value if limit > bounds.value else bounds.value - bounds.low
    distance = abs(limit - bounds.value)
    if not distance or wide / distance > _MOST_LONGER:
        return None
    return max(1, math.ceil(n * ((wide / distance) ** 2 - 1)))


_MOST_LONGER: Final = 100.0  # times the width of an interval, that is 10,000 times the requests
_NAMED: Final = {
    Kind.LATENCY_P95: "p95 of the latency",
    Kind.LATENCY: "p99 of the latency",
    Kind.THROUGHPUT: "throughput",
    Kind.ERRORS: "share of errors",
}


def _read(path: Path, budget: LoadBudget, file: str) -> _Read:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise OperatorError(
                f"--load {path} has more than a MiB: give the summary of the load run, not its log"
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"--load {path} cannot be read: {error}") from error
    if text.lstrip().startswith("{"):
        read = _of_test(text, path, file)
        if read is not None:
            return read
        loads = [_of_json(text, path)]
    elif "MLPerf Results Summary" in text:
        loads = [_of_mlperf(text, path)]
    elif "Inferences/Second" in text.partition("\n")[0]:
        loads = _of_csv(text, path)
    else:
        raise OperatorError(
            f"--load {path} is no CSV of perf_analyzer (-f), no mlperf_log_summary.txt, and no JSON of quantdrift load, and no JSON object with"
            " latency_p99_s and throughput_per_s"
        )
    below = {kind: limit for kind, limit in budget.limits.items() if kind is not Kind.THROUGHPUT}
    if below:
        kept = [
            load
            for load in loads
            if all(
                (value := _value_of(load, kind)) is not None and value < limit
                for kind, limit in below.items()
            )
        ]
        loads = kept or [min(loads, key=lambda load: math.inf if load.p99_s is None else load.p99_s)]
    return _Read(load=max(loads, key=lambda load: load.throughput_per_s or 0.0))


def _of_test(text: str, path: Path, file: str) -> _Read | None:
    """Return the sustained load of a load test; None: the JSON is of another program."""
    try:
        document = msgspec.json.decode(text)
        if "format" not in document:
            return None
        if document["format"] != FORMAT:
            raise OperatorError(
                f"--load {path} has the format {document['format']}, and this version reads {FORMAT}: use the same version for both"
            )
        test = msgspec.convert(document, LoadTest)
    except msgspec.MsgspecError as error:
        raise OperatorError(f"--load {path} is no load run: {error}") from error
    if "://" in file and without_path(file) != without_path(test.target):
        raise OperatorError(
            f"--load {path} is of {test.target}, and not of {file}: give the load test of that endpoint"
        )
    sustained = test.sustained
    if sustained is None:
        raise OperatorError(
            f"--load {path} has no sustained load: it was stopped before ({test.stopped or 'of another cause'}). Run quantdrift load again"
        )
    step = sustained.step
    if not step.is_on_schedule:
        raise OperatorError(
            f"--load {path}: the client sent up to {1000 * step.late_p99_s:.3g} ms late (p99), so its figures are partly its own: run quantdrift load on"
            " a machine where nothing else runs, or with a lower --sustain-at"
        )
    if step.mean_s is None:
        raise OperatorError(f"--load {path}: no request of the sustained load was answered")
    intervals = {Kind.THROUGHPUT: sustained.throughput_per_s, Kind.ERRORS: sustained.error_share}
    missing = {}
    for kind, interval, least in (
        (Kind.LATENCY_P95, sustained.p95_s, LEAST_P95),
        (Kind.LATENCY, sustained.p99_s, LEAST_P99),
    ):
        if interval is not None:
            intervals[kind] = interval
        else:
            missing[kind] = max(1, least - step.n)
    load = Load(
        source=f"quantdrift load at {step.offered_per_s:,.4g} per second for {step.seconds:.0f} s",
        n=step.n,
        p50_s=step.p50_s,
        p95_s=step.p95_s,
        p99_s=step.p99_s,
        throughput_per_s=step.throughput_per_s,
        error_share=step.error_share,
    )
    return _Read(load=load, intervals=intervals, missing=missing)


def _of_json(text: str, path: Path) -> Load:
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise OperatorError(f"--load {path} is no load run: {error}") from error
    return _checked(
        Load(
            source=str(path),
            n=file.requests,
            p50_s=file.latency_p50_s,
            p95_s=file.latency_p95_s,
            p99_s=file.latency_p99_s,
            throughput_per_s=file.throughput_per_s,
            error_share=file.error_share,
        )
    )


def _of_mlperf(text: str, path: Path) -> Load:
    fields = {match[1]: match[2] for line in text.splitlines() if (match := _LINE.fullmatch(line))}
    if fields.get("Mode") != "PerformanceOnly":
        raise OperatorError(
            f"--load {path} is of the mode {fields.get('Mode', 'unknown')}: run the load generator with PerformanceOnly"
        )
    if fields.get("Result is") != "VALID":
        raise OperatorError(
            f"--load {path} says that its result is {fields.get('Result is', 'unknown')}: follow its recommendations, and run it again"
        )
    latency = {
        share: _number(fields.get(f"{share}.00 percentile latency (ns)"), path) for share in (50, 95, 99)
    }
    rate = next((fields[name] for name in _THROUGHPUT if name in fields), None)
    return _checked(
        Load(
            source=str(path),
            p50_s=None if latency[50] is None else latency[50] / 1e9,
            p95_s=None if latency[95] is None else latency[95] / 1e9,
            p99_s=None if latency[99] is None else latency[99] / 1e9,
            throughput_per_s=_number(rate, path),
        )
    )


def _of_csv(text: str, path: Path) -> list[Load]:
    """Return a load run for each row; latencies are microseconds."""
    loads = []
    for row in csv.DictReader(text.split("\n\n", maxsplit=1)[0].splitlines()):
        p50, p95, p99 = (_number(row.get(f"p{share} latency"), path) for share in (50, 95, 99))
        loads.append(
            _checked(
                Load(
                    source=str(path),
                    p50_s=None if p50 is None else p50 / 1e6,
                    p95_s=None if p95 is None else p95 / 1e6,
                    p99_s=None if p99 is None else p99 / 1e6,
                    throughput_per_s=_number(row["Inferences/Second"], path),
                )
            )
        )
    if not loads:
        raise OperatorError(f"--load {path} has a head and no row: the load run has not finished")
    return loads


def _number(text: str | None, path: Path) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise OperatorError(f"--load {path}: `{text[:40]}` is no number") from error


def _checked(load: Load) -> Load:
    figures = (load.p50_s, load.p95_s, load.p99_s, load.throughput_per_s)
    if load.n < 0 or any(figure is not None and not 0 < figure < math.inf for figure in figures):
        raise OperatorError(f"--load {load.source}: latencies and throughput are numbers above 0")
    if load.error_share is not None and not 0 <= load.error_share <= 1:
        raise OperatorError(f"--load {load.source}: error_share is a share, from 0 to 1")
    return load
