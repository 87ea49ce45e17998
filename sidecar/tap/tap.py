"""The tap object of a Python server: its sampling, and the encoding of values as Open Inference tensors."""

import atexit
import contextlib
import functools
import logging
import os
import random
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from quantdrift.core.errors import QuantdriftError
from quantdrift.core.records import HeaderStratum, Loss
from quantdrift.core.sampling.rates import uniform
from quantdrift.sidecar.handoff.frame import RawMeta, frame
from quantdrift.sidecar.handoff.http_head import request_head, response_head
from quantdrift.sidecar.tap.client import TapClient
from quantdrift.sidecar.tap.wire import Rates

_LOG = logging.getLogger(__name__)
_NOTHING: Mapping[str, str] = {}
_JSON_LENGTH = b"inference-header-content-length"


_METHOD = "POST"
_Lookup = tuple[str, dict[str | None, list[tuple[str, tuple[tuple[str, str], ...]]]]]
_LENGTH = struct.Struct("<I")
_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}


class SampledCall(NamedTuple):
    """A sampled call: its stratum and row, the probability, the draw, the epoch, and its new identifier."""

    stratum: str
    row: int
    pi1: float
    u1: float
    epoch: str
    id: str


class TapSampler:
    """Draws the calls of one model by the rates of one epoch.

    Parameters
    ----------
    rates
        As received from the intake.
    path
        The path that a client would have requested.
    chance
        Returns numbers in [0, 1), uniform and independent.
    connection_id
        The connection that sent the rates; their rows belong to the sidecar at its other end.
    """

    __slots__ = ("_chance", "_lookups", "_rates", "_rows", "connection_id", "default_stratum", "strata_rates")

    def __init__(
        self, rates: Rates, path: str, chance: Callable[[], float] = random.random, connection_id: int = 0
    ) -> None:
        self._rates = rates
        self._chance = chance
        self.connection_id = connection_id
        self._rows = {stratum.name: row for row, stratum in zip(rates.rows, rates.strata, strict=True)}
        self.strata_rates = {stratum.name: stratum.rate for stratum in rates.strata}
        possible = [stratum for stratum in rates.strata if _may_match(stratum, path)]
        self._lookups = _lookups(possible)
        self.default_stratum = next(stratum.name for stratum in possible if not stratum.headers)

    def stratum(self, headers: Mapping[str, str]) -> str:
        """Return the stratum of a call with these headers, whose names are in lower case."""
        for name, by_value in self._lookups:
            for candidate, others in by_value.get(headers.get(name), ()):
                if not others or all(headers.get(key) == value for key, value in others):
                    return candidate
        return self.default_stratum

    def draw(self, stratum: str, headers: Mapping[str, str]) -> SampledCall | None:
        """Return the draw of a call if it is taken, else None."""
        rate = self.strata_rates[stratum]
        if rate <= 0.0:
            return None
        sticky = headers.get(self._rates.sticky) if self._rates.sticky else None
        u1 = uniform(sticky.encode(errors="replace"), self._rates.salt) if sticky else self._chance()
        if u1 >= rate:
            return None
        # Random bytes of the system, unique over threads and after a fork.
        return SampledCall(stratum, self._rows[stratum], rate, u1, self._rates.epoch, os.urandom(16).hex())

    @property
    def max_exchange_bytes(self) -> int:
        """Longest exchange that the intake accepts."""
        return self._rates.max_exchange_bytes


def _lookups(possible: list[HeaderStratum]) -> list[_Lookup]:
    """Return the strata with headers that precede the first one without; neighbours share one lookup."""
    lookups: list[_Lookup] = []
    for stratum in possible:
        if not stratum.headers:
            break
        (name, value), *others = stratum.headers.items()
        if not lookups or lookups[-1][0] != name:
            lookups.append((name, {}))
        lookups[-1][1].setdefault(value, []).append((stratum.name, tuple(others)))
    return lookups


def _may_match(stratum: HeaderStratum, path: str) -> bool:
    return stratum.method in ("", _METHOD) and path.startswith(stratum.path_prefix)


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
        if not self._path:
            _LOG.warning("no socket was given and QUANTDRIFT_TAP is not set: the tap records nothing")
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
            sender.lose(draw.stratum, Loss.TOO_LARGE)
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


class TensorError(QuantdriftError):
    """A value cannot be encoded as a tensor."""


class TensorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the binary tensor extension.

    Parameters
    ----------
    document
        The JSON part.
    buffers
        The bytes of the tensors, in the order of the document. They are copies, so the caller may change its
        values.
    """

    document: bytes
    buffers: list[bytes]


def encode_tensors(kind: str, values: Mapping[str, Any], members: Mapping[str, Any]) -> TensorMessage:
    """Return the message with `values` as tensors.

    Parameters
    ----------
    kind
        `inputs` or `outputs`.
    values
        By name: numpy arrays, CPU tensors of torch, text, bytes, numbers, or lists of these.
    members
        Further members of the document.

    Raises
    ------
    TensorError
        They have no names, or a value is of another kind, or is on a device, because fetching it would delay the caller.
    """
    if not isinstance(values, Mapping):
        raise TensorError(f"{kind} are no dictionary of tensors by name")
    tensors: list[dict[str, Any]] = []
    buffers = []
    for name, value in values.items():
        datatype, shape, data = _read(value)
        parameters = {"binary_data_size": len(data)}
        tensors.append({"name": name, "shape": shape, "datatype": datatype, "parameters": parameters})
        buffers.append(data)
    return TensorMessage(document=msgspec.json.encode({**members, kind: tensors}), buffers=buffers)


def _read(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, str | bytes):
        value = [value]
    if hasattr(value, "detach"):
        return _from_torch(value)
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | bytes) for item in value):
        return "BYTES", [len(value)], _pack_strings(value)
    import numpy as np  # noqa: PLC0415 - a server without arrays need not load it

    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        flat = array.ravel().tolist()
        if not all(isinstance(item, str | bytes) for item in flat):
            raise TensorError("an array of objects that are not text")
        return "BYTES", list(array.shape), _pack_strings(flat)
    datatype = _DATATYPES.get(array.dtype.name)
    if datatype is None:
        raise TensorError(f"no Open Inference datatype for {array.dtype.name}")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return datatype, list(array.shape), array.tobytes()


def _from_torch(value: Any) -> tuple[str, list[int], bytes]:
    if value.device.type != "cpu":
        raise TensorError("a tensor on a device: pass a copy on the host, `tensor.cpu()`")
    name = str(value.dtype).removeprefix("torch.")
    datatype = _DATATYPES.get(name)
    if datatype is None:
        raise TensorError(f"no Open Inference datatype for {name}")
    host = value.detach()
    if datatype == "BF16":
        host = host.view(sys.modules["torch"].int16)  # numpy has no such type; only the bits are needed
    return datatype, list(value.shape), host.numpy().tobytes()


def _pack_strings(values: Any) -> bytes:
    data = bytearray()
    for item in values:
        raw = item.encode() if isinstance(item, str) else item
        data += _LENGTH.pack(len(raw))
        data += raw
    return bytes(data)
