"""The requests that a load test sends: read from a file, or made of exchanges that are captured meanwhile.

A file of JSON lines has a request in each line, with its time if that is known; `quantdrift load --record` writes one. A line with `messages` or `prompt` is a
recorded prompt, as of the gate. Recorded inputs (`.npz`, `.safetensors` or a folder of them) become requests of the Open Inference Protocol, one for each item.
"""

import base64
import binascii
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import decode_exchange
from quantdrift.core.config.schema import MIB, Config, Model
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from quantdrift.core.keys import KeyFile
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.core.sealing import is_sealed, unseal
from quantdrift.core.slices import ALL, SliceAssigner, time_attributes
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.text import plain
from quantdrift.core.whole_file import write_whole
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.load_test import Arrival, Traffic
from quantdrift.release.load_test.arrivals import Arrivals, arrivals_of
from quantdrift.release.load_test.drive import HttpRequest
from quantdrift.release.load_test.requests import (
    NotRebuiltError,
    as_grpc,
    completion,
    headers_of,
    inference,
    request_of,
)
from quantdrift.release.progress import Watch

LIVE: Final = "live"
MOST_REQUESTS: Final = 5_000
MOST_BYTES: Final = 64 * MIB
_FETCH_S: Final = 0.5
_FETCHED: Final = 64
_PROMPTS: Final = ("messages", "prompt")


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request of a file of JSON lines."""

    path: str = ""
    method: str = "POST"
    headers: dict[str, str] = {}
    body: Any = msgspec.UNSET
    body_base64: str | None = None
    at_s: float | None = None
    probability: float = 1.0
    latency_s: float | None = None
    slices: tuple[str, ...] = ()


class RecordedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded requests, in the order in which they came.

    Parameters
    ----------
    source
        The file, or `live`.
    requests
        At least one.
    at_s
        When each came, in seconds; None: not recorded.
    probability
        With which each was captured : (requests,).
    latency_s
        How long it took in production; nan: not known : (requests,).
    unusable
        Captured exchanges that are not among them, by the reason.
    """

    source: str
    requests: tuple[HttpRequest, ...]
    at_s: FloatArray | None
    probability: FloatArray
    latency_s: FloatArray
    unusable: dict[str, int] = {}

    @property
    def shares(self) -> FloatArray:
        """Share of the traffic that each stands for : (requests,)."""
        weights = 1.0 / self.probability
        shares: FloatArray = weights / weights.sum()
        return shares

    def arrivals(self) -> Arrivals:
        """Return how the requests follow each other."""
        return arrivals_of(self.at_s, self._captured_share)

    @property
    def _captured_share(self) -> float:
        return float(len(self.requests) / (1.0 / self.probability).sum())

    def traffic(self, arrivals: Arrivals) -> Traffic:
        """Return what is known of the traffic."""
        sizes = [len(request.body) for request in self.requests]
        window = rate = peak = None
        if self.at_s is not None and len(self.at_s) > 1 and self.at_s[-1] > self.at_s[0]:
            span = float(self.at_s[-1] - self.at_s[0])
            window = span * len(self.at_s) / (len(self.at_s) - 1)
            rate = float((1.0 / self.probability).sum()) / window
            if arrivals.kind is Arrival.RECORDED:
                counts = np.bincount((self.at_s - self.at_s[0]).astype(np.intp))
                peak = float(counts.max())
            elif arrivals.kind is Arrival.RATES:
                peak = rate * float(arrivals.rates.max())
        known = self.latency_s[~np.isnan(self.latency_s)]
        return Traffic(
            source=self.source,
            n=len(self.requests),
            arrival=arrivals.kind,
            window_s=window,
            captured_share=self._captured_share,
            rate_per_s=rate,
            peak_per_s=peak,
            gap_cv=arrivals.gap_cv,
            in_flight=rate * float(known.mean()) if rate is not None and len(known) else None,
            body_p50_bytes=int(np.quantile(sizes, 0.5, method="higher")),
            body_p99_bytes=int(np.quantile(sizes, 0.99, method="higher")),
            unusable=self.unusable,
        )


def read_traffic(path: Path, config: Config, model: Model | None) -> RecordedTraffic:
    """Return the requests of a file or a folder; of large ones the first, up to `MOST_REQUESTS` and `MOST_BYTES`.

    Parameters
    ----------
    model
        The model that requests name where the recording does not say it; None: there is none.

    Raises
    ------
    OperatorError
        It cannot be read, or has no request.
    """
    if path.suffix == ".jsonl":
        return _of_lines(path, model)
    if model is None:
        raise OperatorError(f"--from {path}: recorded inputs are requests of a model, and --config has none")
    return _of_arrays(path, config, model)


def over_grpc(recorded: RecordedTraffic) -> RecordedTraffic:
    """Return the same requests over gRPC, without those that have none there, which `unusable` counts.

    Raises
    ------
    OperatorError
        None is left.
    """
    requests, kept, unusable = list[HttpRequest](), list[int](), Counter(recorded.unusable)
    for number, request in enumerate(recorded.requests):
        try:
            requests.append(as_grpc(request))
        except NotRebuiltError as error:
            unusable[str(error)] += 1
        else:
            kept.append(number)
    if not requests:
        reason = next(iter(unusable))
        raise OperatorError(f"--from {recorded.source}: no request can be sent over gRPC: each {reason}")
    return msgspec.structs.replace(
        recorded,
        requests=tuple(requests),
        at_s=None if recorded.at_s is None else recorded.at_s[kept],
        probability=recorded.probability[kept],
        latency_s=recorded.latency_s[kept],
        unusable=dict(unusable),
    )


def write_traffic(path: Path, recorded: RecordedTraffic) -> None:
    """Write requests as JSON lines, for the owner alone to read: they are what clients sent.

    Raises
    ------
    OperatorError
        The file cannot be written.
    """
    lines = []
    for number, request in enumerate(recorded.requests):
        line: dict[str, Any] = {
            "path": request.path,
            "method": request.method,
            "headers": request.headers,
            "slices": request.slices,
            "probability": float(recorded.probability[number]),
        }
        if recorded.at_s is not None:
            line["at_s"] = float(recorded.at_s[number] - recorded.at_s[0])
        if not np.isnan(recorded.latency_s[number]):
            line["latency_s"] = float(recorded.latency_s[number])
        try:
            line["body"] = request.body.decode()
        except UnicodeDecodeError:
            line["body_base64"] = base64.b64encode(request.body).decode()
        lines.append(msgspec.json.encode(line))
    try:
        write_whole(path, b"\n".join([*lines, b""]), mode=0o600)
    except OSError as error:
        raise OperatorError(f"--record {path} cannot be written: {error.strerror}") from error


async def watch_traffic(
    config: Config, model: Model, *, window_s: float, watch: Watch, stop: Stop
) -> RecordedTraffic:
    """Return the requests of exchanges that are captured from now on, for `window_s`.

    Raises
    ------
    OperatorError
        None came, or none can be made into a request.
    RetryError
        NATS is unavailable.
    """
    keys = KeyFile.of(config.stream.payload_key_file, "stream.payload_key_file", SystemClock())
    of_slices = _SliceNames(config, model)
    kept: list[tuple[datetime, float, Exchange, HttpRequest]] = []
    unusable = Counter[str]()
    queue = await Queue.connect(config.stream, client_name="load", role=NatsRole.SHADOW)
    try:
        async with queue.copies(model.name) as copies:
            counted = watch.counted(f"watching the traffic of model {model.name}", round(window_s))
            began, told, n_bytes = time.monotonic(), 0, 0
            while (passed := time.monotonic() - began) < window_s and not stop.is_set():
                for wire in await copies.batch(
                    min(_FETCH_S, window_s - passed), most=_FETCHED, most_bytes=MOST_BYTES
                ):
                    try:
                        exchange = decode_exchange(_opened(wire, keys, model.name))
                        request = request_of(exchange, of_slices.of_exchange(exchange))
                    except (QuarantineError, NotRebuiltError) as error:
                        unusable[str(error)] += 1
                        continue
                    n_bytes += len(request.body)
                    kept.append((exchange.captured_at, exchange.sampling.pi, exchange, request))
                counted(round(min(time.monotonic() - began, window_s)) - told)
                told = round(min(time.monotonic() - began, window_s))
                if len(kept) >= MOST_REQUESTS or n_bytes >= MOST_BYTES:
                    watch.note(f"{len(kept):,} exchanges are enough: --window ended after {passed:.0f} s")
                    break
    finally:
        await queue.close()
    if not kept and stop.is_set():
        raise KeyboardInterrupt
    if not kept:
        reasons = "; ".join(f"{n} of them {reason}" for reason, n in unusable.most_common(3))
        raise OperatorError(
            f"no exchange of model `{model.name}` within {window_s:.0f} s can be sent"
            + (f": {reasons}" if reasons else ". Check `quantdrift status`, or give a longer --window")
        )
    took = [exchange.latency.last_byte_s if exchange.latency else np.nan for _, _, exchange, _ in kept]
    began_s = [at.timestamp() - (0.0 if np.isnan(s) else s) for (at, *_), s in zip(kept, took, strict=True)]
    order = np.argsort(began_s, kind="stable")
    return RecordedTraffic(
        source=LIVE,
        requests=tuple(kept[place][3] for place in order.tolist()),
        at_s=np.array(began_s)[order],
        probability=np.array([kept[place][1] for place in order.tolist()]),
        latency_s=np.array(took)[order],
        unusable=dict(unusable),
    )


class _SliceNames:
    """The names of the slices of requests, by the rules of a model for attributes."""

    def __init__(self, config: Config, model: Model) -> None:
        self._assigner = SliceAssigner(config, model.name)
        self._zone = ZoneInfo(config.capture.time_zone)

    def of(self, attributes: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names, without that of all requests."""
        return tuple(key.name for key in self._assigner.assign(attributes, {}) if key.name != ALL)

    def of_exchange(self, exchange: Exchange) -> tuple[str, ...]:
        """Return those of an exchange."""
        return self.of({**exchange.attributes, **time_attributes(exchange.captured_at, self._zone)})


def _opened(wire: bytes, keys: KeyFile | None, model: str) -> bytes:
    if not is_sealed(wire):
        return wire
    ring = None if keys is None else keys.ring
    if ring is None:
        raise QuarantineError(QuarantineReason.ENCRYPTED, "it is encrypted: set stream.payload_key_file")
    return unseal(wire, ring, model)


def _of_lines(path: Path, model: Model | None) -> RecordedTraffic:
    requests, lines = list[HttpRequest](), list[_Line]()
    n_bytes = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                where = f"--from {path}, line {number}"
                line, request = _read_line(text, where, model)
                lines.append(line)
                requests.append(request)
                n_bytes += len(request.body)
                if len(requests) >= MOST_REQUESTS or n_bytes >= MOST_BYTES:
                    break
    except OSError as error:
        raise OperatorError(f"--from {path} cannot be read: {error.strerror}") from error
    if not requests:
        raise OperatorError(f"--from {path} has no request: write one in each line")
    times = [line.at_s for line in lines if line.at_s is not None]
    if times and len(times) < len(lines):
        raise OperatorError(
            f"--from {path}: {len(times)} of {len(lines)} lines have a time: give `at_s` to all, or to none"
        )
    order = np.argsort(times, kind="stable").tolist() if times else range(len(lines))
    return RecordedTraffic(
        source=str(path),
        requests=tuple(requests[place] for place in order),
        at_s=np.sort(times) if times else None,
        probability=np.array([lines[place].probability for place in order]),
        latency_s=np.array(
            [np.nan if (s := lines[place].latency_s) is None else s for place in order], dtype=np.float64
        ),
    )


def _read_line(text: bytes, where: str, model: Model | None) -> tuple[_Line, HttpRequest]:
    try:
        document = msgspec.json.decode(text)
        if isinstance(document, dict) and any(name in document for name in _PROMPTS):
            if model is None:
                raise OperatorError(
                    f"{where} is a prompt, and no configuration names the model that it is for"
                )
            return _Line(), completion(document, model)
        line = msgspec.convert(document, _Line)
        body = base64.b64decode(line.body_base64, validate=True) if line.body_base64 is not None else b""
    except (msgspec.MsgspecError, binascii.Error) as error:
        reason = (
            plain(str(error), 200) if isinstance(error, msgspec.MsgspecError) else "body_base64 is no Base64"
        )
        raise OperatorError(
            f'{where} is no request: {reason}. Write a line such as {{"path": "/predict", "body": {{"x": 1}}, "at_s": 0.5}}'
        ) from error
    headers = headers_of(line.headers.items(), where)
    if not 0 < line.probability <= 1:
        raise OperatorError(f"{where}: probability is {line.probability:g}: it is above 0 and at most 1")
    if line.path and not line.path.startswith("/"):
        raise OperatorError(f"{where}: path is `{plain(line.path, 80)}`: it begins with /")
    if isinstance(line.body, str):
        body = line.body.encode()
    elif line.body is not msgspec.UNSET:
        body = msgspec.json.encode(line.body)
        headers.setdefault("content-type", "application/json")
    return line, HttpRequest(
        method=line.method.upper(), path=line.path or "/", headers=headers, body=body, slices=line.slices
    )


def _of_arrays(path: Path, config: Config, model: Model) -> RecordedTraffic:
    # Recorded inputs alone need the libraries that read them.
    from quantdrift.models.runtimes.canaries.canaries import read_inputs  # noqa: PLC0415
    from quantdrift.release.recording import attribute_key_of, layout_of, parts_of  # noqa: PLC0415

    rules = [rule for rule in config.slices if rule.model in ("", model.name)]
    keys = layout_of(config, rules, ()).keys
    of_slices = _SliceNames(config, model)
    requests = list[HttpRequest]()
    n_bytes = 0
    for part in parts_of(path, "--from"):
        arrays = read_inputs(part.path)
        declared = [tensor.name for tensor in model.inputs if tensor.name in arrays]
        inputs = declared or [name for name, array in arrays.items() if array.ndim > 1 and name not in keys]
        if not inputs:
            raise OperatorError(
                f"--from {part.path}: none of its arrays {sorted(arrays)} is known as an input of model `{model.name}`: name the inputs in"
                " [[models.inputs]]"
            )
        texts = {
            attribute_key_of(keys, name): array
            for name, array in arrays.items()
            if array.ndim == 1 and name not in inputs and (name in keys or f"header.{name}" in keys)
        }
        for item in range(min(len(arrays[name]) for name in inputs)):
            attributes = {key: str(values[item]) for key, values in texts.items()}
            attributes |= {attribute_key_of(keys, name): value for name, value in part.folders.items()}
            request = inference(
                model.name,
                {name: arrays[name][[item]] if model.batched else arrays[name][item] for name in inputs},
                attributes,
                of_slices.of(attributes),
            )
            requests.append(request)
            n_bytes += len(request.body)
            if len(requests) >= MOST_REQUESTS or n_bytes >= MOST_BYTES:
                break
    n = len(requests)
    return RecordedTraffic(
        source=str(path),
        requests=tuple(requests),
        at_s=None,
        probability=np.ones(n),
        latency_s=np.full(n, np.nan),
    )
