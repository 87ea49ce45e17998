"""The noise of the candidate: where its operator allows it, a replica that serves nobody is asked again.

Requests carry the mark of `quantdrift.core.records`, so that no sidecar captures them. One thread asks, one request at a
time; what it has no time for is left out, and a replica that is away, refuses or hangs costs nothing but that.
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
from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.records import MARK, Side
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.noise_items import RepeatedItems
from quantdrift.shadow.replay.replay import answered_again
from quantdrift.shadow.runtimes.registry import RuntimeRequest
from quantdrift.shadow.runtimes.remote.protocol import RefusedError, Transport
from quantdrift.shadow.tensors.arrays import Outputs
from quantdrift.storage.shadow.rows import NoiseItem

_LOG = logging.getLogger(__name__)
_WAITING: Final = 4  # exchanges; each may be as large as the stream takes
TIMEOUT_S: Final = 10.0
"""Longest wait for an answer. One that serves takes less, and nobody waits for this one but its own thread."""
_HTTP: Final = ("http://", "https://")


class RecheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange whose candidate is to be asked again.

    Parameters
    ----------
    entry
        The exchange.
    first
        What the candidate gave, by name : (items, ...) each.
    rows
        Items that are compared.
    """

    entry: PreparedExchange
    first: Outputs
    rows: tuple[int, ...]


class RecheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it: `items` where it was measured; `n_items` of `model` with `outcome` are counted."""

    model: str
    outcome: str
    n_items: int
    items: tuple[NoiseItem, ...] = ()


class Rechecker(Protocol):
    """Asks candidates again. One thread calls it; it never waits."""

    def offer(self, asked: RecheckRequest) -> None:
        """Have a candidate asked again, if its operator allows it and there is room."""
        ...

    def take(self) -> list[RecheckResult]:
        """Return what has come since the last call."""
        ...


class NoRechecks:
    """Asks nobody."""

    def offer(self, asked: RecheckRequest) -> None:
        """Do nothing."""

    def take(self) -> list[RecheckResult]:
        """Return nothing."""
        return []


class Rechecks:
    """Asks the replicas that are configured, in a thread of its own.

    Parameters
    ----------
    models
        With their `recheck`.
    clock
        For the rates.
    timeout_s
        Longest wait for an answer.
    """

    def __init__(self, models: Iterable[Model], clock: Clock, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._models = {model.name: model for model in models if model.recheck.url}
        self._clock = clock
        self._next_s = dict.fromkeys(self._models, 0.0)
        self._waiting: queue.Queue[RecheckRequest | None] = queue.Queue(maxsize=_WAITING)
        self._answered: queue.SimpleQueue[RecheckResult] = queue.SimpleQueue()
        self._transports: dict[str, Transport] = {}
        self._repeated = RepeatedItems(Side.CANDIDATE)
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="recheck", daemon=True)
        if self._models:
            self._thread.start()

    def offer(self, asked: RecheckRequest) -> None:
        """Have a candidate asked again, if its operator allows it and there is room."""
        exchange = asked.entry.exchange
        model = self._models.get(exchange.model)
        if model is None:
            return
        recheck, now_s = model.recheck, self._clock.monotonic_s()
        if not any(fnmatchcase(exchange.version, pattern) for pattern in recheck.versions):
            return
        if now_s < self._next_s[model.name]:
            return  # the rate is a bound, and what it leaves out was never meant to be asked
        try:
            self._waiting.put_nowait(asked)
        except queue.Full:
            self._note(asked, "left_out")
        else:
            self._next_s[model.name] = now_s + 1.0 / recheck.max_per_s

    def take(self) -> list[RecheckResult]:
        """Return what has come since the last call."""
        found = []
        while True:
            try:
                found.append(self._answered.get_nowait())
            except queue.Empty:
                return found

    def close(self) -> None:
        """Ask nobody any more; a request that is on its way is not waited for."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return  # the thread ends with the process

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None:
            try:
                items = self._ask(asked)
            except (RetryError, RefusedError, OperatorError, TimeoutError) as error:
                self._tell(asked.entry.exchange.model, str(error) or "no answer in time")
                items = []
            except Exception:  # noqa: BLE001 - the top of a thread: one that ended would say nothing any more
                _LOG.exception("an exchange could not be asked again")
                items = []
            if items:
                self._note(asked, "measured", items)
            else:
                self._note(asked, "failed")
        for transport in self._transports.values():
            transport.close()

    def _ask(self, asked: RecheckRequest) -> list[NoiseItem]:
        exchange, names = asked.entry.exchange, tuple(asked.first)
        transport = self._transports.get(exchange.model)
        if transport is None:
            transport = self._transports[exchange.model] = _open(
                self._models[exchange.model], self._timeout_s
            )
        answer = transport.infer(exchange.inputs, names)
        again = answered_again(asked.entry, answer, names)
        if isinstance(again, QuarantineError):
            self._tell(exchange.model, again.detail)
            return []
        self._told.discard(exchange.model)
        picked = list(asked.rows)
        return self._repeated.items(asked.entry, _rows(again, picked), _rows(asked.first, picked), asked.rows)

    def _note(self, asked: RecheckRequest, outcome: str, items: Sequence[NoiseItem] = ()) -> None:
        self._answered.put(
            RecheckResult(
                model=asked.entry.exchange.model,
                outcome=outcome,
                n_items=len(items) or len(asked.rows),
                items=tuple(items),
            )
        )

    def _tell(self, model: str, why: str) -> None:
        """Log once until it is well again."""
        if model not in self._told:
            self._told.add(model)
            _LOG.warning("the candidate of %s cannot be asked again: %s", model, why)


def _rows(outputs: Outputs, picked: list[int]) -> Outputs:
    return {name: output[picked] for name, output in outputs.items()}


def _open(model: Model, timeout_s: float) -> Transport:
    """Return what asks the replica of a model. The gRPC library is loaded only where it is asked by gRPC."""
    recheck = model.recheck
    http = recheck.url.startswith(_HTTP)
    reference = Reference(
        runtime=Runtime.OIP_HTTP if http else Runtime.OIP_GRPC,
        url=recheck.url,
        model=recheck.model,
        model_version=recheck.model_version,
        timeout_s=timeout_s,
        token_file=recheck.token_file,
    )
    opening = RuntimeRequest(model=model, reference=reference, headers={MARK: "1"})
    if http:
        transport: Transport = importlib.import_module("quantdrift.shadow.runtimes.remote.oip_http").OipHttp(
            opening
        )
    else:
        transport = importlib.import_module("quantdrift.shadow.runtimes.remote.oip_grpc").OipGrpc(opening)
    return transport
