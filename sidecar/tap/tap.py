"""The tap that a server holds."""

import atexit
import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from quantdrift.core.records import MARK, Loss
from quantdrift.sidecar.handoff.frame import RawMeta, frame
from quantdrift.sidecar.handoff.http_head import request_head, response_head
from quantdrift.sidecar.tap.client import TapClient
from quantdrift.sidecar.tap.sampler import SampledCall, TapSampler
from quantdrift.sidecar.tap.tensors import TensorError, write
from quantdrift.sidecar.tap.wire import Rates

_LOG = logging.getLogger(__name__)
_NOTHING: Mapping[str, str] = {}
_JSON_LENGTH = b"inference-header-content-length"


class Tap:
    """Tells quantdrift of what this process has inferred, for the share of calls that sampling takes.

    `record` never waits, never raises and holds a bounded amount of memory, from any thread, under asyncio and after a
    fork. Everything else is done by one thread of its own: connecting, sending, and hearing which rates hold. Until it
    has heard, and while the sidecar is away, calls are counted and not taken in.

    Parameters
    ----------
    path
        Unix socket of the sidecar's intake (`intake.tap`). None: QUANTDRIFT_TAP; without either the tap is closed and
        costs nothing.
    model
        Name of the model, as in `[[models]]`.
    version
        Of the candidate. Empty: the sidecar knows.
    limit_bytes
        Most that waits to be sent.

    Examples
    --------
    >>> tap = Tap("/run/quantdrift/tap", model="digits", version="int8-7")
    >>> tap.record({"x": [[0.0, 1.0]]}, {"y": [[0.1, 0.9]]}, headers={"x-scanner": "faint"})
    >>> tap.close()
    """

    def __init__(
        self, path: str | None = None, *, model: str, version: str = "", limit_bytes: int = 64 << 20
    ) -> None:
        self._path = os.environ.get("QUANTDRIFT_TAP", "") if path is None else path
        version_part = f"/versions/{quote(version, safe='')}" if version else ""
        self._target = f"/v2/models/{quote(model, safe='')}{version_part}/infer"
        self._limit_bytes = limit_bytes
        self._chooser: TapSampler | None = None
        self._n_errors = 0
        self._sender = self._new_sender()
        self._sender.start()
        os.register_at_fork(after_in_child=functools.partial(_call, weakref.WeakMethod(self._begin_anew)))
        atexit.register(_call, weakref.WeakMethod(self.close))

    def record(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        headers: Mapping[str, str] = _NOTHING,
        parameters: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """Tell of one exchange.

        Parameters
        ----------
        inputs, outputs
            Tensors by name: numpy arrays, CPU tensors of torch, text, bytes, numbers or lists of them; the first
            dimension counts items. They are copied if the call is taken, and not looked at if it is not.
        headers
            Of the client's request, names in lower case: what sampling strata and slices ask for, and `traceparent`.
        parameters
            Of the request.
        """
        try:
            sender, chooser = self._sender, self._chooser
            try:
                cells = sender.local.cells
            except AttributeError:
                cells = sender.enrol()
            if chooser is None:
                cells.early += 1
                sender.start()  # a child of the process that made the tap has no thread yet
                return
            if headers and MARK in headers:
                return  # what quantdrift asks again is no traffic
            stratum = chooser.stratum(headers) if headers else chooser.bare
            cells.offered[stratum] += 1
            if chooser.strata_rates[stratum] > 0.0:
                chosen = chooser.draw(stratum, headers)
                if chosen is not None:
                    self._take(sender, chooser, chosen, (inputs, outputs, headers, parameters))
        except Exception as error:  # noqa: BLE001 - inside the serving process
            self._fail(error)

    @property
    def is_ready(self) -> bool:
        """Whether it has heard which rates hold: until then nothing is taken in."""
        return self._chooser is not None

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what waits, at most for so long, and take no more."""
        self._sender.close(timeout_s)

    def _begin_anew(self) -> None:
        """Have threads and a connection of its own in a child of the process: it has none of its parent's threads."""
        before, self._sender = self._sender, self._new_sender()
        self._chooser = None
        before.abandon()
        if before.is_ending:
            self._sender.close(0.0)

    def _new_sender(self) -> TapClient:
        # Its thread must not keep the tap: a server that drops one has no other way to be rid of it.
        return TapClient(
            self._path, self._limit_bytes, functools.partial(_call, weakref.WeakMethod(self._hear))
        )

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending, or it was never made
            self._sender.is_released = True

    def _hear(self, rates: Rates, link: int) -> None:
        self._chooser = TapSampler(rates, self._target, link=link)

    def _take(
        self, sender: TapClient, chooser: TapSampler, draw: SampledCall, call: tuple[Mapping[str, Any], ...]
    ) -> None:
        if (refusal := sender.refusal()) is not None:
            sender.lose(draw.stratum, refusal)
            return
        try:
            self._tell(sender, chooser, draw, call)
        except TensorError as error:
            sender.lose(draw.stratum, Loss.DECODE)
            self._note(error)
        except Exception:
            sender.lose(draw.stratum, Loss.CAPTURE_ERROR)  # it was chosen: its stratum must miss it
            raise

    def _tell(
        self, sender: TapClient, chooser: TapSampler, draw: SampledCall, call: tuple[Mapping[str, Any], ...]
    ) -> None:
        inputs, outputs, headers, parameters = call
        asked = write("inputs", inputs, {"parameters": dict(parameters)} if parameters else {})
        answered = write("outputs", outputs, {})
        fields = [
            (name.encode(errors="replace"), value.encode(errors="replace")) for name, value in headers.items()
        ]
        lengths = [(_JSON_LENGTH, b"%d" % len(message.document)) for message in (asked, answered)]
        head = request_head(b"POST", self._target.encode(), [*fields, lengths[0]])
        answer = response_head(200, [lengths[1]])
        n_asked = len(head) + len(asked.document) + sum(map(len, asked.buffers))
        n_answered = len(answer) + len(answered.document) + sum(map(len, answered.buffers))
        if n_asked + n_answered > chooser.max_exchange_bytes:
            sender.lose(draw.stratum, Loss.HELD_BYTES)
            return
        meta = RawMeta(
            id=draw.id,
            stratum=draw.place,
            pi1=draw.pi1,
            u1=draw.u1,
            epoch=draw.epoch,
            captured_at_ns=time.time_ns(),
            request_head_bytes=len(head),
            request_bytes=n_asked,
            response_head_bytes=len(answer),
            response_bytes=n_answered,
        )
        contents = [head, asked.document, *asked.buffers, answer, answered.document, *answered.buffers]
        sender.send(draw.stratum, frame(meta, contents), chooser.link)

    def _fail(self, error: Exception) -> None:
        try:
            self._sender.enrol().errors += 1
            self._note(error)
        except Exception:  # noqa: BLE001, S110 - there is nobody left to tell
            pass

    def _note(self, error: Exception) -> None:
        self._n_errors += 1
        if self._n_errors & (self._n_errors - 1) == 0:  # 1, 2, 4, 8: one in each call must not flood the log
            # What another library says of a value may quote it, and values belong in no log.
            what = error if isinstance(error, TensorError) else type(error).__name__
            _LOG.warning("an exchange could not be told of (%d so far): %s", self._n_errors, what)


def _call(method: "weakref.WeakMethod[Any]", *arguments: Any) -> None:
    called = method()
    if called is not None:
        called(*arguments)
