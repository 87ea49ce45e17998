"""The tap object of a Python server."""

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

from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.frame import RawMeta, frame
from quantdrift.sidecar.handoff.http_head import request_head, response_head
from quantdrift.sidecar.tap.client import TapClient
from quantdrift.sidecar.tap.sampler import SampledCall, TapSampler
from quantdrift.sidecar.tap.tensors import TensorError, encode_tensors
from quantdrift.sidecar.tap.wire import Rates

_LOG = logging.getLogger(__name__)
_NOTHING: Mapping[str, str] = {}
_JSON_LENGTH = b"inference-header-content-length"


class Tap:
    """Records the exchanges of this process, for the share of calls that sampling takes.

    `record` never waits, never raises and holds a bounded amount of memory, from any thread, under asyncio
    and after a fork. One thread of its own does everything else: connecting, sending, and receiving the
    rates. Until it has received rates, and while the sidecar is down, calls are counted and not recorded.

    Parameters
    ----------
    path
        Unix socket of the sidecar's intake (`intake.tap`). None: the environment variable QUANTDRIFT_TAP;
        without either the tap does nothing.
    model
        Name of the model, as in `[[models]]`.
    version
        Version of the candidate. Empty: the sidecar's configuration has it.
    limit_bytes
        Most bytes that wait to be sent.

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
        self._sampler: TapSampler | None = None
        self._n_errors = 0
        self._sender = self._new_sender()
        self._sender.start()
        os.register_at_fork(
            after_in_child=functools.partial(_call, weakref.WeakMethod(self._restart_after_fork))
        )
        atexit.register(_call, weakref.WeakMethod(self.close))

    def record(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        headers: Mapping[str, str] = _NOTHING,
        parameters: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """Record one exchange.

        Parameters
        ----------
        inputs, outputs
            Tensors by name: numpy arrays, CPU tensors of torch, text, bytes, numbers or lists of them; the
            first dimension counts items. They are copied if the call is sampled, and not read if it is not.
        headers
            Headers of the client's request, names in lower case: those that sampling strata and slices use, and
            `traceparent`.
        parameters
            Parameters of the request.
        """
        try:
            sender, sampler = self._sender, self._sampler
            try:
                counts = sender.local.counts
            except AttributeError:
                counts = sender.thread_counts()
            if sampler is None:
                counts.early += 1
                sender.start()  # a child of the process that made the tap has no thread at first
                return
            stratum = sampler.stratum(headers) if headers else sampler.default_stratum
            counts.offered[stratum] += 1
            if sampler.strata_rates[stratum] > 0.0:
                call_sample = sampler.draw(stratum, headers)
                if call_sample is not None:
                    self._take(sender, sampler, call_sample, (inputs, outputs, headers, parameters))
        except Exception as error:  # noqa: BLE001 - inside the serving process
            self._count_error(error)

    @property
    def is_ready(self) -> bool:
        """Whether it has received rates; until then no call is recorded."""
        return self._sampler is not None

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is queued, for at most `timeout_s`, and stop recording."""
        self._sender.close(timeout_s)

    def _restart_after_fork(self) -> None:
        """Start a thread and a connection in a forked child, which has none of its parent's threads."""
        old_client, self._sender = self._sender, self._new_sender()
        self._sampler = None
        old_client.close_after_fork()
        if old_client.is_ending:
            self._sender.close(0.0)

    def _new_sender(self) -> TapClient:
        # The thread must not keep the tap alive, so that a server can drop a tap without closing it.
        return TapClient(
            self._path, self._limit_bytes, functools.partial(_call, weakref.WeakMethod(self._set_rates))
        )

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending, or `__init__` failed
            self._sender.is_dropped = True

    def _set_rates(self, rates: Rates, connection_id: int) -> None:
        self._sampler = TapSampler(rates, self._target, connection_id=connection_id)

    def _take(
        self, sender: TapClient, sampler: TapSampler, draw: SampledCall, call: tuple[Mapping[str, Any], ...]
    ) -> None:
        if (refusal := sender.refusal()) is not None:
            sender.lose(draw.stratum, refusal)
            return
        try:
            self._send(sender, sampler, draw, call)
        except TensorError as error:
            sender.lose(draw.stratum, Loss.DECODE)
            self._log_error(error)
        except Exception:
            sender.lose(
                draw.stratum, Loss.CAPTURE_ERROR
            )  # it was sampled, so its stratum must count the loss
            raise

    def _send(
        self, sender: TapClient, sampler: TapSampler, draw: SampledCall, call: tuple[Mapping[str, Any], ...]
    ) -> None:
        inputs, outputs, headers, parameters = call
        request = encode_tensors("inputs", inputs, {"parameters": dict(parameters)} if parameters else {})
        response = encode_tensors("outputs", outputs, {})
        fields = [
            (name.encode(errors="replace"), value.encode(errors="replace")) for name, value in headers.items()
        ]
        lengths = [(_JSON_LENGTH, b"%d" % len(message.document)) for message in (request, response)]
        head = request_head(b"POST", self._target.encode(), [*fields, lengths[0]])
        head_of_response = response_head(200, [lengths[1]])
        request_bytes = len(head) + len(request.document) + sum(map(len, request.buffers))
        response_bytes = len(head_of_response) + len(response.document) + sum(map(len, response.buffers))
        if request_bytes + response_bytes > sampler.max_exchange_bytes:
            sender.lose(draw.stratum, Loss.HELD_BYTES)
            return
        meta = RawMeta(
            id=draw.id,
            stratum=draw.row,
            pi1=draw.pi1,
            u1=draw.u1,
            epoch=draw.epoch,
            captured_at_ns=time.time_ns(),
            request_head_bytes=len(head),
            request_bytes=request_bytes,
            response_head_bytes=len(head_of_response),
            response_bytes=response_bytes,
        )
        contents = [
            head,
            request.document,
            *request.buffers,
            head_of_response,
            response.document,
            *response.buffers,
        ]
        sender.send(draw.stratum, frame(meta, contents), sampler.connection_id)

    def _count_error(self, error: Exception) -> None:
        try:
            self._sender.thread_counts().errors += 1
            self._log_error(error)
        except Exception:  # noqa: BLE001, S110 - nothing more can be done here
            pass

    def _log_error(self, error: Exception) -> None:
        self._n_errors += 1
        if (
            self._n_errors & (self._n_errors - 1) == 0
        ):  # 1, 2, 4, 8: an error in each call must not flood the log
            # A message of another library may quote a value, and values must not be logged.
            what = error if isinstance(error, TensorError) else type(error).__name__
            _LOG.warning("an exchange could not be recorded (%d so far): %s", self._n_errors, what)


def _call(method: "weakref.WeakMethod[Any]", *arguments: Any) -> None:
    called = method()
    if called is not None:
        called(*arguments)
