"""The noise of the candidate, measured by repeating requests at a replica that serves no traffic (`models.recheck`).

Requests carry the mark of `quantdrift.core.recheck_mark`, so that no sidecar records them as traffic. One thread sends one request at a
time and skips what it has no time for. A replica that is unreachable, refuses or hangs delays nothing else.
"""

import importlib
import logging
import queue
import threading
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, Protocol

import msgspec

from quantdrift.core.clock import Clock
from quantdrift.core.config.address import without_mark
from quantdrift.core.config.schema import Model, Reference, Runtime, Shadow
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.logs import of_model
from quantdrift.core.recheck_mark import RecheckMarks
from quantdrift.core.records import Side
from quantdrift.core.slices import SliceKey
from quantdrift.core.tls import Tls
from quantdrift.models.runtimes.registry import RuntimeRequest
from quantdrift.models.runtimes.remote.protocol import RefusedError, Transport
from quantdrift.models.tensors.arrays import Outputs
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.noise_items import RepeatedItems
from quantdrift.shadow.replay.replay import recheck_outputs
from quantdrift.storage.comparisons.rows import NoiseItem

_LOG = logging.getLogger(__name__)
_WAITING: Final = 4  # exchanges; each may be as large as the stream takes
EVERY_S: Final = 5.0
"""Least time between two requests to a replica: 500 exchanges, which a mean needs, take most of an hour, and a replica
of any size has room for them."""
TIMEOUT_S: Final = 10.0
"""Longest wait for an answer. A working replica takes less; only the thread of this class waits for it."""
_HTTP: Final = ("http://", "https://")


class RecheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange to repeat at the replica of its candidate.

    Parameters
    ----------
    first
        The candidate's served outputs, by name : (items, ...) each.
    rows
        The items to compare.
    slices
        The slices of each of them.
    """

    entry: PreparedExchange
    first: Outputs
    rows: tuple[int, ...]
    slices: tuple[tuple[SliceKey, ...], ...]


class RecheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a recheck: `items` if it succeeded; `n_items` of `model` are counted under `outcome`."""

    model: str
    outcome: str
    n_items: int
    items: tuple[NoiseItem, ...] = ()


class Rechecker(Protocol):
    """Repeats requests at replicas. One thread calls it; no call waits."""

    def offer(self, request: RecheckRequest) -> None:
        """Queue a recheck, if `models.recheck` allows it and the queue is not full."""
        ...

    def take(self) -> list[RecheckResult]:
        """Return the results since the last call."""
        ...


class NoRechecks:
    """Rechecks nothing."""

    def offer(self, request: RecheckRequest) -> None:
        """Do nothing."""

    def take(self) -> list[RecheckResult]:
        """Return nothing."""
        return []


class Rechecks:
    """Repeats requests at the configured replicas, in a thread of its own.

    Parameters
    ----------
    models
        Those with a `recheck.url` are rechecked.
    clock
        For the rate of requests.
    salt
        The sampling salt, from which the key of the mark is derived.
    timeout_s
        Longest wait for an answer.
    tls
        Certificates for the connections to replicas.
    """

    def __init__(
        self,
        models: Iterable[Model],
        clock: Clock,
        salt: bytes = b"",
        *,
        timeout_s: float = TIMEOUT_S,
        tls: Tls = Tls.of_shadow(Shadow()),  # noqa: B008 - it is frozen
    ) -> None:
        self._timeout_s = timeout_s
        self._tls = tls
        self._marks = RecheckMarks(salt)
        self._models = {model.name: model for model in models if model.recheck.url}
        self._clock = clock
        self._next_s = dict.fromkeys(self._models, 0.0)
        self._waiting: queue.Queue[RecheckRequest | None] = queue.Queue(maxsize=_WAITING)
        self._answered: queue.SimpleQueue[RecheckResult] = queue.SimpleQueue()
        self._transports: dict[str, Transport] = {}
        self._repeated = RepeatedItems(Side.CANDIDATE)
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="recheck", daemon=True)
        if self._models:
            self._thread.start()
            if not salt:
                _LOG.warning(
                    "rechecks of %s carry no mark: a sidecar in front of models.recheck.url would record them as traffic. "
                    "Give the shadow the QUANTDRIFT_SAMPLING_SALT of the sidecars",
                    ", ".join(sorted(self._models)),
                )

    def offer(self, request: RecheckRequest) -> None:
        """Queue a recheck, if `models.recheck` allows it and the queue is not full."""
        exchange = request.entry.exchange
        model = self._models.get(exchange.model)
        if model is None:
            return
        recheck, now_s = model.recheck, self._clock.monotonic_s()
        if not any(fnmatchcase(exchange.version, pattern) for pattern in recheck.versions):
            return
        if not exchange.is_verified:
            return  # nobody knows who wrote it: it is sent to no server
        if now_s < self._next_s[model.name]:
            return  # not counted as left out: the rate limit is intended
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self._report(request, "left_out")
        else:
            self._next_s[model.name] = now_s + EVERY_S

    def take(self) -> list[RecheckResult]:
        """Return the results since the last call."""
        results = []
        while True:
            try:
                results.append(self._answered.get_nowait())
            except queue.Empty:
                return results

    def close(self) -> None:
        """Stop the thread; a request in flight is not waited for."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return  # the thread ends with the process

    def _run(self) -> None:
        while (request := self._waiting.get()) is not None:
            try:
                items = self._ask(request)
            except (RetryError, RefusedError, OperatorError, TimeoutError) as error:
                # The server's words may quote the request.
                why = error.brief if isinstance(error, RefusedError) else str(error)
                self._warn(request.entry.exchange.model, why or "no answer within models.recheck.timeout_s")
                items = []
            except Exception:  # noqa: BLE001 - the top of a thread, which must go on
                _LOG.exception("model %s: a recheck failed", request.entry.exchange.model)
                items = []
            if items:
                self._report(request, "measured", items)
            else:
                self._report(request, "failed")
        for transport in self._transports.values():
            transport.close()

    def _ask(self, request: RecheckRequest) -> list[NoiseItem]:
        exchange, names = request.entry.exchange, tuple(request.first)
        transport = self._transports.get(exchange.model)
        if transport is None:
            transport = self._transports[exchange.model] = _open(
                self._models[exchange.model], self._timeout_s, self._tls
            )
        headers = self._marks.headers(exchange.inputs, self._clock.now().timestamp())
        answer = transport.infer(exchange.inputs, names, headers)
        again = recheck_outputs(request.entry, answer, names)
        if isinstance(again, QuarantineError):
            self._warn(exchange.model, again.detail)
            return []
        self._warned.discard(exchange.model)
        picked = list(request.rows)
        return self._repeated.items(
            request.entry, _rows(again, picked), _rows(request.first, picked), request.rows, request.slices
        )

    def _report(self, request: RecheckRequest, outcome: str, items: Sequence[NoiseItem] = ()) -> None:
        self._answered.put(
            RecheckResult(
                model=request.entry.exchange.model,
                outcome=outcome,
                n_items=len(items) or len(request.rows),
                items=tuple(items),
            )
        )

    def _warn(self, model: str, why: str) -> None:
        """Log the first failure, and no further ones until a recheck has succeeded."""
        if model not in self._warned:
            self._warned.add(model)
            _LOG.warning(
                "model %s: its candidate's noise is not measured, check models.recheck: %s",
                model,
                why,
                extra=of_model(model),
            )


def _rows(outputs: Outputs, picked: list[int]) -> Outputs:
    return {name: output[picked] for name, output in outputs.items()}


def _open(model: Model, timeout_s: float, tls: Tls) -> Transport:
    """Return the transport to the replica of a model. The gRPC library is imported only if it is needed."""
    recheck = model.recheck
    http = without_mark(recheck.url).startswith(_HTTP)
    reference = Reference(
        runtime=Runtime.OIP_HTTP if http else Runtime.OIP_GRPC,
        url=recheck.url,
        model=recheck.model,
        model_version=recheck.model_version,
        timeout_s=timeout_s,
        token_file=recheck.token_file,
    )
    request = RuntimeRequest(model=model, reference=reference, tls=tls)
    if http:
        transport: Transport = importlib.import_module("quantdrift.models.runtimes.remote.oip_http").OipHttp(
            request
        )
    else:
        transport = importlib.import_module("quantdrift.models.runtimes.remote.oip_grpc").OipGrpcTransport(
            request
        )
    return transport
