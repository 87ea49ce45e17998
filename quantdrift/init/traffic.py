"""A minute of traffic through a relay in this process: models, headers and inputs that came, and some exchanges to replay."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import numpy as np

from quantdrift.core.clock import SystemClock
from quantdrift.core.config.address import read_address
from quantdrift.core.config.schema import MIB, Model, SamplingOptions, Sidecar
from quantdrift.core.config.strata import MAX_VALUE_BYTES
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Protocol
from quantdrift.core.text import plain
from quantdrift.sidecar.capture.attributes import as_text, cut
from quantdrift.sidecar.handoff.frame import HEAD_BYTES, RawMeta, lengths, parse
from quantdrift.sidecar.protocols import DECODERS
from quantdrift.sidecar.protocols.decoder import WireContext
from quantdrift.sidecar.protocols.errors import LostError
from quantdrift.sidecar.protocols.http_message import Head, parse_head, read_body
from quantdrift.sidecar.relay.connection import Relay
from quantdrift.sidecar.relay.listener import Listener
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.state.counters import Counters
from quantdrift.sidecar.state.routes import Routes

MOST_VALUES: Final = 64
"""Most values that are kept of a header; with more it is no group of requests."""
_MOST_NAMES: Final = 64  # of each source
_MOST_DEPTH: Final = 4
# Members of bodies that name the request or the model, or are parameters already.
_OF_PROTOCOL: Final = frozenset({"id", "model", "model_name", "model_version", "parameters"})
_MOST_MODELS: Final = 64
_MOST_VERSIONS: Final = 64
_MOST_REASONS: Final = 32
_WAITING_BYTES: Final = 64 * MIB
_MOST_KEPT: Final = 256
_KEPT_BYTES: Final = 64 * MIB
_MOST_FILES: Final = 512
_SIDECAR: Final = Sidecar(max_exchange_bytes=16 * MIB)
"""Larger exchanges than a sidecar's default are read, too: what comes says how large its limit must be."""
_DRAIN_S: Final = 5.0
_TICK_S: Final = 0.5


class Kept(msgspec.Struct, frozen=True):
    """An exchange as it came: the model that it names, its metadata, and the bytes of request and response."""

    model: str
    meta: RawMeta
    request: bytes
    response: bytes


class Source(StrEnum):
    """Where an attribute of a request stands; the value is the option of `[[slices]]`."""

    HEADER = "header"
    PARAMETER = "parameter"
    JSON = "json"


class SeenAttribute(msgspec.Struct, frozen=True, kw_only=True):
    """A header, a parameter or a value of the JSON that requests had.

    Parameters
    ----------
    name
        Of a value of the JSON its path, with dots.
    values
        How often each value came; none if there were more than `MOST_VALUES`.
    n
        Requests with it.
    n_values
        Different values, counted up to `MOST_VALUES` + 1.
    """

    source: Source
    name: str
    values: dict[str, int]
    n: int
    n_values: int


class SeenModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that requests named.

    Parameters
    ----------
    protocol, name
        As on the wire.
    versions
        Of the answers that could be read, the most frequent first.
    n
        Requests.
    attributes
        In the order of their sources and names.
    """

    protocol: Protocol
    name: str
    versions: tuple[str, ...]
    n: int
    attributes: tuple[SeenAttribute, ...]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What came while it was watched.

    Parameters
    ----------
    seconds
        How long.
    models
        Those with the most requests first.
    kept
        Exchanges with an answer, of any model, as they came; bounded in number and bytes.
    largest_bytes
        Request and response of the largest exchange, together with their heads.
    unread
        How often a request or an answer could not be read, by the reason.
    """

    seconds: float
    models: tuple[SeenModel, ...]
    kept: tuple[Kept, ...]
    largest_bytes: int
    unread: dict[str, int]


async def watch(
    listen: str,
    backend: str,
    seconds: float,
    most_requests: int = 0,
    show: Callable[[int, float], None] = lambda _n, _s: None,
) -> Traffic:
    """Relay requests, unchanged, and look at each of them; end after `seconds`, or when it is cancelled.

    Parameters
    ----------
    listen, backend
        HOST:PORT.
    most_requests
        End sooner, once so many inference requests came; 0: do not.
    show
        Called twice a second with the number of inference requests so far, and the seconds.

    Raises
    ------
    OperatorError
        The port cannot be opened.
    """
    loop = asyncio.get_running_loop()
    watcher = _Watcher()
    scope = CaptureScope(
        _SIDECAR,
        routes=Routes(DECODERS),
        sampler=Sampler(SamplingOptions(rate=1.0), b"", ExchangeIds(), time.time()),
        send_frame=watcher.add,
        slot=Counters.create(1, 1).slot(0),
        clock=SystemClock(),
    )
    server = read_address(backend)
    relay = Relay(server.host, server.port, scope, loop)
    listener = Listener(_socket(listen), relay, _MOST_FILES)
    began = loop.time()
    reading = asyncio.create_task(watcher.read_all())
    listener.open()
    try:
        while (left := began + seconds - loop.time()) > 0 and not 0 < most_requests <= watcher.n:
            await asyncio.sleep(min(_TICK_S, left))
            relay.tick()
            show(watcher.n, loop.time() - began)
    finally:
        listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await relay.drain()
        relay.abort()
        watcher.end()
    await reading
    return watcher.seen(loop.time() - began)


def _socket(listen: str) -> socket.socket:
    address = read_address(listen)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        opened = socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise OperatorError(f"--listen {listen} cannot be opened: {error.strerror or error}") from error
    opened.setblocking(False)
    return opened


class _Watcher:
    """Counts what the relay observed, in bounded memory and in a thread of its own: requests do not wait for it.

    Frames that come faster than they are read are counted as requests, and not looked at.
    """

    def __init__(self) -> None:
        self.n = 0
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._n_waiting_bytes = 0
        self._routes = Routes(DECODERS)
        self._models: dict[tuple[Protocol, str], _Model] = {}
        self._unread: Counter[str] = Counter()
        self._kept: list[Kept] = []
        self._n_bytes = 0
        self._largest_bytes = 0

    def add(self, _: int, buffers: Sequence[bytes | memoryview]) -> None:
        """Add the frame of an exchange; called by the observers, on the loop that relays."""
        self.n += 1
        n_bytes = sum(map(len, buffers))
        if self._n_waiting_bytes + n_bytes > _WAITING_BYTES:
            self._count_unread("came faster than it could be read")
            return
        self._n_waiting_bytes += n_bytes
        self._waiting.put_nowait(b"".join(buffers))

    def end(self) -> None:
        """Add no more: `read_all` returns once it has read what waits."""
        self._waiting.put_nowait(None)

    async def read_all(self) -> None:
        """Read frames until the end."""
        while (frame := await self._waiting.get()) is not None:
            await asyncio.to_thread(self._read, frame)
            self._n_waiting_bytes -= len(frame)

    def _read(self, frame: bytes) -> None:
        content = memoryview(frame)
        _, n_meta = lengths(content[:HEAD_BYTES])
        meta, request, response = parse(n_meta, content[HEAD_BYTES:])
        self._largest_bytes = max(self._largest_bytes, len(request) + len(response))
        try:
            self._read_exchange(meta, bytes(request), bytes(response))
        except LostError as error:
            self._count_unread(str(error))

    def _count_unread(self, reason: str) -> None:
        known = reason in self._unread or len(self._unread) < _MOST_REASONS
        self._unread[reason if known else "other reasons"] += 1

    def seen(self, seconds: float) -> Traffic:
        """Return what was seen so far."""
        models = sorted(self._models.items(), key=lambda entry: -entry[1].n)
        return Traffic(
            seconds=seconds,
            models=tuple(model.seen(protocol, name) for (protocol, name), model in models),
            kept=tuple(self._kept),
            largest_bytes=self._largest_bytes,
            unread=dict(self._unread.most_common()),
        )

    def _read_exchange(self, meta: RawMeta, request: bytes, response: bytes) -> None:
        head = parse_head(request[: meta.request_head_bytes])
        route = self._routes.route(head.method, head.path)
        if route is None:
            return
        body = read_body(head, request[meta.request_head_bytes :], _SIDECAR.max_exchange_bytes)
        decoder, wire = (
            DECODERS[route.protocol],
            WireContext(max_bytes=_SIDECAR.max_exchange_bytes, models=_AnyModel()),
        )
        try:
            query = decoder.request(head, body, wire)
        except LostError:
            self._model(route.protocol, unquote(route.model)).count(head)
            raise
        name = query.model or unquote(route.model)
        model = self._model(route.protocol, name)
        model.count(head)
        model.count_values(Source.PARAMETER, query.parameters)
        scalars = itertools.islice(_scalars(query.document, set(query.parameters)), _MOST_NAMES)
        model.count_values(Source.JSON, dict(scalars))
        if meta.lost is not None:
            raise LostError(meta.lost, "there is no whole answer")
        answer = parse_head(response[: meta.response_head_bytes])
        if not 200 <= answer.status < 300:
            self._count_unread(f"error_status: HTTP {answer.status}")
            return
        content = read_body(answer, response[meta.response_head_bytes :], _SIDECAR.max_exchange_bytes)
        reply = decoder.response(
            answer, content, query, msgspec.structs.replace(wire, model=Model(name=name or "-"))
        )
        model.count_version(reply.version or query.version or unquote(route.version))
        n_bytes = len(request) + len(response)
        if len(self._kept) < _MOST_KEPT and self._n_bytes + n_bytes <= _KEPT_BYTES:
            self._n_bytes += n_bytes
            self._kept.append(Kept(plain(name), meta, request, response))

    def _model(self, protocol: Protocol, name: str) -> "_Model":
        key = (protocol, plain(name))
        if key not in self._models and len(self._models) >= _MOST_MODELS:
            key = (protocol, "")
        return self._models.setdefault(key, _Model())


class _Model:
    """The counts of one model."""

    def __init__(self) -> None:
        self.n = 0
        self._versions: Counter[str] = Counter()
        self._values: dict[tuple[Source, str], Counter[str]] = {}
        self._n: Counter[tuple[Source, str]] = Counter()

    def count(self, head: Head) -> None:
        """Count a request and its headers."""
        self.n += 1
        self.count_values(Source.HEADER, head.headers)

    def count_values(self, source: Source, values: Mapping[str, Any]) -> None:
        """Count what a request had of one source, a value a name."""
        for name, value in values.items():
            key = (source, name)
            if key not in self._values and sum(kind is source for kind, _ in self._values) >= _MOST_NAMES:
                continue
            seen = self._values.setdefault(key, Counter())
            self._n[key] += 1
            text = cut(as_text(value), MAX_VALUE_BYTES)
            if text in seen or len(seen) <= MOST_VALUES:
                seen[text] += 1

    def count_version(self, version: str) -> None:
        """Count the version of an exchange that could be read."""
        if version and (version in self._versions or len(self._versions) < _MOST_VERSIONS):
            self._versions[version] += 1

    def seen(self, protocol: Protocol, name: str) -> SeenModel:
        """Return the counts."""
        return SeenModel(
            protocol=protocol,
            name=name,
            versions=tuple(plain(version) for version, _ in self._versions.most_common()),
            n=self.n,
            attributes=tuple(
                SeenAttribute(
                    source=source,
                    name=attribute,
                    values=dict(values.most_common()) if len(values) <= MOST_VALUES else {},
                    n=self._n[source, attribute],
                    n_values=len(values),
                )
                for (source, attribute), values in sorted(self._values.items())
            ),
        )


def _scalars(document: Mapping[str, Any], parameters: Container[str]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the texts, whole numbers and truth values of a body that are in no list.

    Parameters
    ----------
    parameters
        Names that count as parameters already.
    """
    waiting: list[tuple[str, Mapping[str, Any], int]] = [("", document, _MOST_DEPTH)]
    while waiting:
        prefix, table, depth = waiting.pop()
        for name, value in table.items():
            if not name or "." in name or (not prefix and (name in parameters or name in _OF_PROTOCOL)):
                continue
            if isinstance(value, Mapping) and depth > 1:
                waiting.append((f"{prefix}{name}.", value, depth - 1))
            elif isinstance(value, str | int):
                yield f"{prefix}{name}", value


class _AnyModel(Mapping[str, Model]):
    """A configuration of every model that a body names: nothing is known of any of them yet."""

    def __getitem__(self, name: str) -> Model:
        return Model(name=name or "-")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def quantiles(values: Any, shares: Sequence[float]) -> list[float]:
    """Return quantiles of an array, of two digits, each once, rising."""
    rounded = (float(f"{value:.2g}") for value in np.quantile(values, shares))
    return sorted(dict.fromkeys(rounded))
