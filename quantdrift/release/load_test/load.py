"""A load test of an endpoint, from its address to its result: single requests, steps of rising load, the knee, a sustained load, and a burst."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np

from quantdrift.core.config.address import AddressError, ServerUrl, read_address, read_server_url
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Verdict
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.text import Table
from quantdrift.core.tls import Tls
from quantdrift.core.whole_file import write_whole
from quantdrift.facts.load_test import Alone, Arrival, Burst, Knee, LoadStep, LoadTest, Sustained, Traffic
from quantdrift.facts.words.load_test import tested
from quantdrift.release.blocking import wait_for
from quantdrift.release.chosen_model import model_named
from quantdrift.release.load_test.drive import STOPPED, TRIES, Client, Driven
from quantdrift.release.load_test.figures import alone_of, burst_of, step_of, sustained_of
from quantdrift.release.load_test.knee import Waited, is_past, knee_of
from quantdrift.release.load_test.recording import (
    LIVE,
    RecordedTraffic,
    over_grpc,
    read_traffic,
    watch_traffic,
    write_traffic,
)
from quantdrift.release.load_test.server_time import TritonCounters
from quantdrift.release.load_test.wires import GRPC, GrpcWire, HttpWire
from quantdrift.release.progress import OnProgress, Watch
from quantdrift.release.result import Result
from quantdrift.release.setting import File, Setting, existing

AGENT: Final = "quantdrift-load"
_HTTP: Final = ("http", "https")
_PORTS: Final = {"http": 80, "https": 443}
_ALONE: Final = 200
_LEAST_ALONE: Final = 20
_WARM_UP: Final = 5
_FIRST: Final = 0.5  # of a server that does one request at a time
_MOST_SEARCH: Final = 20
_MOST_BELOW: Final = 8  # times below the first load; there a server is nearly idle
_SEARCH_RATIO: Final = 0.2  # of the time of a step
_LEAST_SEARCH: Final = 20  # requests
_LEAST_STEP: Final = 50
_AROUND: Final = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
_BELOW: Final = (0.25, 0.5, 0.75, 1.0)
_MOST_CURVES: Final = 2
_SUSTAINED: Final = 0.8
_ABOVE_BUDGET: Final = 1.1
_REFUSED: Final = 0.01


class LoadResult(Result, frozen=True, kw_only=True):
    """What a load test has found.

    Parameters
    ----------
    load_test
        The figures.
    interrupted
        Whether somebody stopped it before its time.
    """

    load_test: LoadTest
    interrupted: bool = False

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return not self.load_test.stopped

    @property
    def colour(self) -> Verdict | None:
        """Grey where it did not come to its end."""
        return None if self.finished else Verdict.UNKNOWN

    def blocks(self) -> Sequence[str | Table]:
        """Return the table of the steps, and what they say in sentences."""
        return tested(self.load_test)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command prints with `--json`, and what the gate reads."""
        record: dict[str, Any] = msgspec.to_builtins(self.load_test)
        return record


class UnwrittenError(OperatorError):
    """A file of the result cannot be written.

    Parameters
    ----------
    message
        Why.
    result
        What the test has found.
    """

    def __init__(self, message: str, result: LoadResult) -> None:
        super().__init__(message)
        self.result = result


class _Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a load test; as the parameters of `load`."""

    step_s: float
    sustain_s: float
    sustain_at: float | None
    most_requests: int
    most_s: float
    most_errors: float
    most_in_flight: int
    timeout_s: float


class _Ended(Exception):  # noqa: N818 - no error: a bound was reached
    """The test ends before its time; the message says why."""


def load(
    url: str,
    *,
    source: File,
    config: File = "config.toml",
    data: File | None = None,
    model: str = "",
    allow: Sequence[str] = (),
    window: timedelta = timedelta(minutes=1),
    record: File | None = None,
    step_s: float = 10.0,
    sustain_s: float = 60.0,
    sustain_at: float | None = None,
    most_requests: int = 200_000,
    most_time: timedelta = timedelta(minutes=15),
    most_errors: float = 0.5,
    most_in_flight: int = 1000,
    timeout_s: float = 10.0,
    metrics: str = "",
    token_file: File | None = None,
    out: File | None = None,
    picture: File | None = None,
    stop: Callable[[], Stop] | None = None,
    progress: OnProgress | None = None,
) -> LoadResult:
    """Drive an endpoint in the shape of recorded traffic, past the load at which requests begin to queue.

    Requests are sent when they are due, whether or not those before were answered, so that waiting is seen. The parameters are the options of
    `quantdrift load`, whose help explains each.

    Parameters
    ----------
    url
        The endpoint; a path replaces that of the recorded requests. `grpc://HOST:PORT` sends those of the Open Inference Protocol over gRPC.
    source
        `live`, or recorded requests: a .jsonl file, or recorded inputs as of the gate.
    config, data
        The configuration file, and the data directory of a running `quantdrift up`, whose NATS is used with `live`.
    model
        The model; empty: the only one of the configuration.
    allow
        Endpoints that may be driven beside those of `load.targets`.
    window, record
        With `live`: how long to watch, and a file to which the requests are written.
    step_s, sustain_s
        Time of each load, and of the sustained one, in seconds.
    sustain_at
        The sustained load, in requests per second; None: 1.1 times `models.budget.throughput_per_s`, or 0.8 times the knee.
    most_requests, most_time, most_in_flight
        It ends after so many requests or so long; a request that is due while so many are under way is not sent.
    most_errors
        It ends where a larger share of a step's requests has no answer.
    timeout_s
        A request without an answer after so many seconds has none.
    metrics
        Address of Triton's metrics; empty: its statistics are asked at the endpoint.
    token_file
        File with a bearer token for the endpoint.
    out
        A file for the figures as JSON, which the gate reads; None: no file.
    picture
        A .svg or .png file for a picture of latency and errors over the load; None: no picture.
    stop
        Makes the request to end it before its time, such as `quantdrift.core.process.run.SignalStop`.
    progress
        Called with each step and share of the work.

    Raises
    ------
    OperatorError
        Something must be changed by a person; the sentence is the one that the command prints. `UnwrittenError` where a file cannot be written at
        the end: its `result` is the result.
    RetryError
        The endpoint, or NATS, is away.
    """
    setting, watch = Setting.of(config, data), Watch(progress)
    is_live = source == LIVE
    _check_files(out, picture)
    if record is not None and not is_live:
        raise OperatorError("--record writes the live traffic: give --from live")
    needs_config = is_live or bool(model) or Path(source).suffix != ".jsonl"
    configured = setting.config() if needs_config or setting.path.exists() else Config()
    target = _target(url, configured, allow)
    chosen = model_named(configured, model) if needs_config or len(configured.models) == 1 else None
    headers = {"user-agent": AGENT}
    if token_file is not None:
        headers["authorization"] = f"Bearer {_token(existing(token_file, '--token-file'))}"
    limits = _Limits(
        step_s=step_s,
        sustain_s=sustain_s,
        sustain_at=sustain_at,
        most_requests=most_requests,
        most_s=most_time.total_seconds(),
        most_errors=most_errors,
        most_in_flight=most_in_flight,
        timeout_s=timeout_s,
    )
    scrape = _metrics(metrics, target, configured, allow)
    recorded = None if is_live else read_traffic(existing(source, "--from"), configured, chosen)

    async def run() -> LoadResult:
        asked = (stop or Stop)()
        traffic = recorded
        if traffic is None:
            assert chosen is not None
            stream = setting.with_stream(configured, NatsRole.SHADOW)
            traffic = await watch_traffic(
                stream, chosen, window_s=window.total_seconds(), watch=watch, stop=asked
            )
            if record is not None:
                write_traffic(Path(record), traffic)
        test = _LoadTest(
            target,
            traffic,
            chosen,
            limits,
            headers=headers,
            metrics=scrape,
            tls=Tls.of_shadow(configured.shadow),
            watch=watch,
            stop=asked,
        )
        found = await test.run()
        return LoadResult(load_test=found, interrupted=asked.is_set(), notes=tuple(watch.notes))

    result = wait_for(run())
    try:
        _write(result.load_test, out, picture)
    except OperatorError as error:  # a disk that is full by now must not cost the minutes that the test took
        raise UnwrittenError(str(error), result) from error
    return result


def _write(test: LoadTest, out: File | None, picture: File | None) -> None:
    if out is not None:
        try:
            write_whole(Path(out), msgspec.json.format(msgspec.json.encode(test), indent=2) + b"\n")
        except OSError as error:
            raise OperatorError(f"--out {out} cannot be written: {error.strerror}") from error
    if picture is not None and test.steps:
        from quantdrift.release.load_test.picture import write  # noqa: PLC0415 - matplotlib is of another extra

        write(test, Path(picture))


def _check_files(out: File | None, picture: File | None) -> None:
    """Check that the results can be written, before what takes minutes."""
    if picture is not None:
        from quantdrift.release.drawing import check_format  # noqa: PLC0415 - matplotlib is of another extra

        check_format(Path(picture))
    if out is not None and not Path(out).resolve().parent.is_dir():
        raise OperatorError(f"--out {out}: there is no folder {Path(out).parent}")


class _LoadTest:
    """One load test, and what it has found so far."""

    def __init__(
        self,
        target: ServerUrl,
        recorded: RecordedTraffic,
        model: Model | None,
        limits: _Limits,
        *,
        headers: dict[str, str],
        metrics: str,
        tls: Tls,
        watch: Watch,
        stop: Stop,
    ) -> None:
        parts = urlsplit(target.url)
        self._target, self._model, self._limits = target, model, limits
        self._recorded, self._watch, self._stop = recorded, watch, stop
        self._rng = np.random.default_rng(0)
        path = parts.path.rstrip("/") and parts.path + (f"?{parts.query}" if parts.query else "")
        base = f"{parts.scheme}://{parts.netloc}"
        self._wire: HttpWire | GrpcWire
        if target.scheme in GRPC:
            self._counters = TritonCounters("", recorded.requests[0].path, metrics, headers, tls)
            self._recorded = recorded = over_grpc(recorded)
            self._wire = GrpcWire(
                target, recorded.requests, headers=headers, tls=tls, timeout_s=limits.timeout_s
            )
        else:
            self._counters = TritonCounters(base, path or recorded.requests[0].path, metrics, headers, tls)
            self._wire = HttpWire(
                base, path, recorded.requests, headers=headers, tls=tls, timeout_s=limits.timeout_s
            )
        self._arrivals = recorded.arrivals()
        self._traffic: Traffic = recorded.traffic(self._arrivals)
        self._shares = recorded.shares
        self._more: Callable[[int], None] = lambda _n: None
        self._client = Client(
            self._wire,
            most_in_flight=limits.most_in_flight,
            most_errors=limits.most_errors,
            stop=stop,
            sent=self._count,
        )
        self._n_sent = 0
        self._began_s = time.monotonic()
        self._alone: Alone | None = None
        self._alone_s = np.empty(0)
        self._steps: list[tuple[LoadStep, Waited]] = []
        self._knee: Knee | None = None
        self._sustained: Sustained | None = None
        self._burst: Burst | None = None

    async def run(self) -> LoadTest:
        """Return what was found, up to the end or to a bound.

        Raises
        ------
        OperatorError, RetryError
            No single request was answered.
        """
        began_at, stopped = datetime.now(UTC), ""
        async with self._wire:
            try:
                await self._single()
                self._tell_traffic()
                await self._curve()
                await self._sustain()
                await self._at_once()
            except _Ended as ended:
                stopped = str(ended)
        if self._knee is None and self._steps:
            self._knee = self._knee_so_far()
        return LoadTest(
            target=self._target.shown,
            model=self._model.name if self._model else "",
            began_at=began_at,
            took_s=time.monotonic() - self._began_s,
            traffic=self._traffic,
            alone=self._alone,
            steps=tuple(step for step, _ in sorted(self._steps, key=lambda each: each[0].offered_per_s)),
            knee=self._knee,
            sustained=self._sustained,
            burst=self._burst,
            stopped=stopped,
        )

    async def _single(self) -> None:
        """Send requests one after the other."""
        self._check_bounds(_WARM_UP + _ALONE, 0.0)
        first = await self._client.alone(self._drawn(_WARM_UP), self._limits.timeout_s)
        self._check_stopped()
        if not first.is_answered.any():
            raise self._unanswered(first)
        before = await self._counters.read()
        self._more = self._watch.counted("single requests", _ALONE)
        usual = float(first.latency_s[first.is_answered].mean())
        longest = max(self._limits.step_s, _LEAST_ALONE * usual)
        driven = await self._client.alone(self._drawn(_ALONE), longest)
        if len(driven.due_s) < _ALONE:
            self._more(_ALONE - len(driven.due_s))
        after = await self._counters.read()
        self._check_stopped()
        if not driven.is_answered.any():
            raise self._unanswered(driven)
        self._alone_s = driven.latency_s[driven.is_answered]
        server = after.since(before) if before and after else None
        self._alone = alone_of(driven, server, self._rng)
        if driven.stopped:
            raise _Ended(f"single requests: {driven.stopped}{_reasons(driven.errors)}")

    def _unanswered(self, driven: Driven) -> OperatorError | RetryError:
        """Return the error where the endpoint answers nothing."""
        error = next(iter(driven.errors))
        request = self._recorded.requests[int(driven.chosen[0])]
        if error == "TLS":
            return OperatorError(f"{self._target.shown} cannot be reached: {self._wire.tls_problem}")
        if error.isdecimal() or (error.isupper() and error != "UNAVAILABLE"):
            return OperatorError(
                f"{self._target.shown} answers a recorded request ({request.method} {request.path}) with {error}: check the address, its path and the"
                " recording"
            )
        away = "cannot be reached"
        what = {"timeout": "gives no answer in time", "connection": away, "UNAVAILABLE": away}
        return RetryError(f"{self._target.shown} {what.get(error, 'breaks off its answers')}")

    def _tell_traffic(self) -> None:
        traffic = self._traffic
        for reason, n in traffic.unusable.items():
            self._watch.note(f"{n:,} recorded requests are not sent: each {reason}")
        if traffic.captured_share < 1 and traffic.arrival is not Arrival.RECORDED:
            self._watch.note(
                f"{traffic.captured_share:.1%} of the requests were captured: bursts shorter than the time of some twenty captured requests are not seen"
            )

    async def _search(self, rate: float) -> tuple[float, bool]:
        """Return about where the knee is, by doubling or halving the load, and whether it is one; False: the highest load that could be offered."""
        below, above = 0.0, math.inf
        lowest = rate / _MOST_BELOW
        self._more = lambda _n: None
        for _ in range(_MOST_SEARCH):
            step = await self._short_step(rate)
            if self._is_past(step) or not step.is_on_schedule:  # it may be that something else ran meanwhile
                step = await self._short_step(rate)
            if self._is_past(step):
                above = rate
            elif step.is_on_schedule:
                below = rate
            elif below:
                self._watch.note(
                    f"at {rate:,.4g} requests per second this client sent late: it drives this endpoint with less"
                )
                return below, False
            else:
                above = rate
            if below and math.isfinite(above):
                return math.sqrt(below * above), True
            rate = rate * 2 if math.isinf(above) else rate / 2
            if rate < lowest:
                break
        return below or above, False

    async def _short_step(self, rate: float) -> LoadStep:
        self._watch.step(f"searching for the knee: {rate:,.4g} requests per second")
        step, _ = await self._step(rate, max(self._limits.step_s * _SEARCH_RATIO, _LEAST_SEARCH / rate))
        return step

    def _is_past(self, step: LoadStep) -> bool:
        """Return whether requests wait for long, or are refused."""
        assert self._alone is not None
        return (
            step.mean_s is None
            or step.error_share > _REFUSED
            or is_past(step.mean_s, self._alone.mean_s.value)
        )

    async def _curve(self) -> None:
        """Find the knee roughly, and measure loads around it; once more where it is beyond them."""
        assert self._alone is not None
        start = _FIRST / self._alone.mean_s.value
        for _ in range(_MOST_CURVES):
            coarse, is_knee = await self._search(start)
            rates = [coarse * ratio for ratio in (_AROUND if is_knee else _BELOW)]
            for number, rate in enumerate(rates, start=1):
                step = await self._measured(rate, f"load {number} of {len(rates)}")
                if step.error_share > _REFUSED:
                    break  # higher ones only fail more
            self._knee = self._knee_so_far()
            if self._knee.per_s is not None or not is_knee or step.error_share > _REFUSED:
                return
            start = rates[0] / 2 if self._is_past(step) else rates[-1]

    def _knee_so_far(self) -> Knee:
        return knee_of(self._alone_s, [waited for _, waited in self._steps], self._rng)

    async def _measured(self, rate: float, text: str) -> LoadStep:
        """Measure one load, and keep what came of it."""
        seconds = max(self._limits.step_s, _LEAST_STEP / rate)
        self._more = self._watch.counted(
            f"{text}, {rate:,.4g} requests per second", self._n_of(rate, seconds)
        )
        step, driven = await self._step(rate, seconds)
        self._keep(step, driven)
        return step

    def _keep(self, step: LoadStep, driven: Driven) -> None:
        waited = Waited(
            offered_per_s=step.offered_per_s,
            latency_s=driven.latency_s[driven.is_answered],
            error_share=step.error_share,
            is_on_schedule=step.is_on_schedule,
        )
        self._steps.append((step, waited))

    async def _step(self, rate: float, seconds: float) -> tuple[LoadStep, Driven]:
        """Offer one load; wait for the endpoint afterwards where it did not keep up."""
        self._check_bounds(self._n_of(rate, seconds), seconds)
        due, chosen = self._arrivals.due(self._n_of(rate, seconds), rate, self._rng)
        before = await self._counters.read()
        driven = await self._client.drive(due, self._drawn(len(due)) if chosen is None else chosen)
        after = await self._counters.read()
        step = step_of(driven, rate, after.since(before) if before and after else None)
        if driven.stopped:
            if driven.stopped != STOPPED:
                self._keep(step, driven)
            self._check_stopped()
            raise _Ended(
                f"at {rate:,.4g} requests per second {driven.stopped}{_reasons(driven.errors)}, more than --most-errors"
                f" {self._limits.most_errors:g}"
            )
        assert self._alone is not None
        if self._is_past(step) or step.mean_s is None:
            self._more = lambda _n: None
            usual = 3 * self._alone.p95_s
            if not await self._client.recovered(
                int(chosen[0]) if chosen is not None else 0, usual, self._recovery_s
            ):
                self._check_stopped()
                raise _Ended(
                    f"after {rate:,.4g} requests per second the endpoint did not recover within {self._recovery_s:.0f} s"
                )
        return step, driven

    @property
    def _recovery_s(self) -> float:
        return 3 * self._limits.timeout_s

    async def _sustain(self) -> None:
        """Offer one load for a longer time."""
        rate = self._sustained_rate()
        seconds = max(self._limits.sustain_s, _LEAST_STEP / rate)
        self._more = self._watch.counted(
            f"sustained load, {rate:,.4g} requests per second", self._n_of(rate, seconds)
        )
        step, driven = await self._step(rate, seconds)
        self._sustained = sustained_of(driven, step, self._recorded.requests, self._rng)

    def _sustained_rate(self) -> float:
        if self._limits.sustain_at is not None:
            return self._limits.sustain_at
        if self._model is not None and self._model.budget.throughput_per_s:
            return _ABOVE_BUDGET * self._model.budget.throughput_per_s
        return _SUSTAINED * self._highest()

    def _highest(self) -> float:
        """Return the load up to which requests do not wait for long: the knee, or the highest that was offered without waiting."""
        if self._knee is not None and self._knee.per_s is not None:
            return self._knee.per_s.value
        fine = [
            step.offered_per_s for step, _ in self._steps if step.is_on_schedule and not self._is_past(step)
        ]
        if not fine and self._sustained is not None:
            return self._sustained.step.offered_per_s
        if not fine:
            raise _Ended(
                "no load was found that the endpoint keeps up with, so no load is sustained: name one with --sustain-at"
            )
        return max(fine)

    async def _at_once(self) -> None:
        """Send as many requests at once as come in a second."""
        n = math.ceil(max(self._traffic.peak_per_s or 0.0, self._highest()))
        n = min(n, self._limits.most_in_flight)
        self._check_bounds(n * TRIES, 0.0)
        self._more = self._watch.counted(f"a burst of {n:,} requests at once", n)
        tried, drained_s = await self._client.at_once(self._drawn(n))
        self._check_stopped()
        self._burst = burst_of(tried, drained_s)

    def _drawn(self, n: int) -> Any:
        """Return the numbers of recorded requests, drawn as often as each comes in the traffic."""
        return self._rng.choice(len(self._recorded.requests), size=n, p=self._shares)

    def _count(self, n: int) -> None:
        self._n_sent += n
        self._more(n)

    @staticmethod
    def _n_of(rate: float, seconds: float) -> int:
        return max(2, round(rate * seconds))

    def _check_stopped(self) -> None:
        if self._stop.is_set():
            raise _Ended(STOPPED)

    def _check_bounds(self, n: int, seconds: float) -> None:
        """End before a load that would exceed a bound."""
        self._check_stopped()
        limits = self._limits
        if self._n_sent + n > limits.most_requests:
            raise _Ended(f"{n:,} requests more would be more than --most-requests {limits.most_requests:,}")
        if time.monotonic() - self._began_s + seconds > limits.most_s:
            raise _Ended(f"{seconds:.0f} s more would be longer than --most-time, {limits.most_s:.0f} s")


def _target(url: str, config: Config, allow: Sequence[str]) -> ServerUrl:
    """Return the endpoint, which must be named as a target.

    Raises
    ------
    OperatorError
        It is no address, is not named, or is the sidecar's.
    """
    target = _address(url, "URL", *_HTTP, *GRPC)
    if target.scheme in GRPC and (urlsplit(target.url).port is None or urlsplit(target.url).path.strip("/")):
        raise OperatorError(f"URL {target.shown}: it must be {target.scheme}://HOST:PORT")
    if _endpoint(target) not in {_endpoint(_address(each, "--allow", *_HTTP, *GRPC)) for each in allow} | {
        _endpoint(_address(each, "load.targets", *_HTTP, *GRPC)) for each in config.load.targets
    }:
        endpoint = target.shown.partition("://")[2].partition("/")[0]
        shown = f"{target.shown.partition('://')[0]}://{endpoint}"
        raise OperatorError(
            f"{shown} may not be driven: a load test takes an endpoint beyond what it can do. If it serves nobody else, name it in the configuration,"
            f' load.targets = ["{shown}"], or give --allow {shown}'
        )
    if config.sidecar.listen and target.is_loopback:
        port = read_address(config.sidecar.listen).port
        if port == _endpoint(target)[2]:
            raise OperatorError(
                f"{target.shown} is the sidecar (sidecar.listen), which would sample the load as production: give the address of the server behind it"
            )
    return target


def _address(url: str, option: str, *schemes: str) -> ServerUrl:
    try:
        target = read_server_url(url, *(schemes or _HTTP))
    except AddressError as error:
        raise OperatorError(f"{option} {url.rpartition('@')[2]}: {error}") from error
    if problem := target.problem(option):
        raise OperatorError(problem)
    return target


def _endpoint(target: ServerUrl) -> tuple[str, str, int]:
    return target.scheme, target.host.lower(), urlsplit(target.url).port or _PORTS.get(target.scheme, 0)


def _metrics(metrics: str, target: ServerUrl, config: Config, allow: Sequence[str]) -> str:
    """Return the address of the metrics, at the host of the target."""
    if not metrics:
        return ""
    address = _address(metrics, "--metrics")
    if address.host.lower() != target.host.lower():
        _target(metrics, config, allow)
    path = urlsplit(address.url).path
    return address.url if path.strip("/") else f"{address.url.rstrip('/')}/metrics"


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"--token-file {path} cannot be read") from error
    if not token or not token.isprintable():
        raise OperatorError(f"--token-file {path} has no token")
    return token


def _reasons(errors: dict[str, int]) -> str:
    """Return the reasons of errors, the most frequent first, in brackets."""
    ordered: Iterable[tuple[str, int]] = sorted(errors.items(), key=lambda each: -each[1])
    text = ", ".join(f"{reason}: {n:,}" for reason, n in ordered)
    return f" ({text})" if text else ""
