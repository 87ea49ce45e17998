"""The capture pipeline: every raw exchange is published, thinned or lost, and counted in any case."""

import difflib
import logging
from collections.abc import Callable, Sequence

import msgspec

from quantdrift.core import plugins
from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import count_of
from quantdrift.core.recheck_mark import HEADER
from quantdrift.core.records import Exchange, Loss
from quantdrift.sidecar.capture.policy_watch import PolicyWatcher
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import (
    ExchangeHeads,
    ExchangeRequest,
    RecheckKind,
    Recorder,
    SidecarIdentity,
)
from quantdrift.sidecar.handoff.frame import RawMeta
from quantdrift.sidecar.handoff.receiver import FrameReceiver
from quantdrift.sidecar.protocols import cost
from quantdrift.sidecar.protocols.errors import LostError, UnknownModelError
from quantdrift.sidecar.sampling.second_phase import keeps_all
from quantdrift.sidecar.state.config import LiveConfigFile
from quantdrift.sidecar.state.counters import Count, Counters, Gauge, Row, Slot
from quantdrift.sidecar.state.pause import Paused
from quantdrift.sidecar.state.policy import PolicyFile, PolicyHistory

_LOG = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0
MAX_NAMES = 16
MAX_LENGTH = 64
_MAX_SHOWN = 3
_MAX_CONFIGURED = 10


class _End(msgspec.Struct, kw_only=True):
    """What becomes of an exchange, as far as it is known; without any of these it is left out by the second draw.

    Parameters
    ----------
    model
        The model that it names: losses are counted by model. Empty until it is known.
    refusal
        The limit because of which it is not decoded.
    loss
        Why it is lost.
    no_traffic
        The counter of what is no traffic.
    exchanges
        The records: one, or one for each pair of a stream that is no batch.
    """

    model: str = ""
    refusal: Loss | None = None
    loss: Loss | None = None
    no_traffic: Gauge | None = None
    exchanges: tuple[Exchange, ...] = ()


class CapturePipeline:
    """Processes raw exchanges one after the other.

    Parameters
    ----------
    recorder
        Decodes an exchange and draws the second sample.
    publisher
        Sends records to the stream.
    slot
        Counters of the capture process.
    rows
        The stratum and model of each row of the table of counts.
    on_unknown
        Called with the name of each model that is not configured, and the header stratum.

    Attributes
    ----------
    paused : Paused
        The pause in effect; paused exchanges count as thinned.
    """

    def __init__(
        self,
        recorder: Recorder,
        publisher: Publisher,
        slot: Slot,
        rows: Sequence[Row],
        on_unknown: Callable[[str, str], object] | None = None,
    ) -> None:
        self._on_unknown = on_unknown or (lambda _name, _stratum: None)
        self._publisher = publisher
        self._slot = slot
        self._n_errors = self._n_forged = self._n_models_denied = 0
        self.paused = Paused()
        self.reconfigure(recorder, rows)

    def reconfigure(self, recorder: Recorder, rows: Sequence[Row]) -> None:
        """Use another recorder and its rows from now on."""
        self._recorder = recorder
        self._rows = tuple(rows)
        self._known = {row: index for index, row in enumerate(rows)}

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Use a longer list of rows with the same recorder."""
        self._recorder.set_rows(rows)
        self.reconfigure(self._recorder, rows)

    def handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        """Publish, thin or lose one exchange.

        Raises
        ------
        ValueError
            The stratum does not exist: the frames are out of step.
        """
        if not 0 <= meta.stratum < len(self._rows):
            raise ValueError(f"no row {meta.stratum} in the table of counts")
        self._slot.add(meta.stratum, Count.HANDED)
        if self.paused.everything:
            self._slot.add(meta.stratum, Count.THINNED)
            return
        end = _End()
        try:
            with cost.limited():
                self._read(meta, request, response, end)
        except LostError as error:
            self._lose(meta, end, error)
        except Exception:  # noqa: BLE001 - one bad exchange must not end the process
            self._log_error(meta)
            end.loss, end.no_traffic = Loss.CAPTURE_ERROR, None
        if end.no_traffic is not None:
            self._leave_out(meta, end.no_traffic)
            return
        row = self._row(meta.stratum, end.model)
        if end.refusal is not None:
            self._publisher.refuse(row, end.refusal)
        elif end.loss is not None:
            self._publisher.lose(row, end.model, end.loss)
        elif not end.exchanges:
            self._slot.add(row, Count.THINNED)
        else:
            self._publish(meta, end.exchanges, row)

    def _read(self, meta: RawMeta, request: memoryview, response: memoryview, end: "_End") -> None:
        """Note in `end` what becomes of an exchange, step by step: an error may end it at each.

        Raises
        ------
        LostError
            It cannot be used.
        """
        heads = self._recorder.read_heads(meta, request, response)
        end.model = heads.model_name
        if end.model and not meta.origin.allows(end.model):
            end.no_traffic = self._deny(meta, end.model)
            return
        if heads.lost is None:
            end.refusal = self._refusal(meta, heads)
        if end.refusal is not None or end.model in self.paused.models:
            return
        if heads.lost is not None and end.model:
            end.loss = heads.lost
            return
        asked = self._recorder.read_request(meta, heads, request)
        end.model = asked.model.name
        end.no_traffic = self._no_traffic(meta, asked)
        if end.no_traffic is None and end.model not in self.paused.models:
            end.exchanges = self._recorder.record(meta, asked, response)

    def _leave_out(self, meta: RawMeta, gauge: Gauge) -> None:
        """Take a request out of the counts of its row, and count it under `gauge`."""
        self._slot.adjust(gauge)
        for count in (Count.OFFERED, Count.TAKEN, Count.HANDED):
            self._slot.add(meta.stratum, count, -1)

    def _no_traffic(self, meta: RawMeta, asked: ExchangeRequest) -> Gauge | None:
        """Return the counter of a request that is not traffic of its model, and None if it is traffic."""
        if not meta.origin.allows(asked.model.name):
            return self._deny(meta, asked.model.name)
        recheck = self._recorder.recheck(meta, asked)
        if recheck is RecheckKind.FORGED:
            self._slot.adjust(Gauge.FORGED_MARKS)
            self._n_forged += 1
            if _is_power_of_two(self._n_forged):
                _LOG.warning(
                    "a request for model %s has the header %s and no valid mark: it is recorded as traffic (%d so far). If the"
                    " shadow sent it: give shadow and sidecar the same QUANTDRIFT_SAMPLING_SALT, and check their clocks",
                    asked.model.name,
                    HEADER,
                    self._n_forged,
                )
        return Gauge.RECHECKS if recheck is RecheckKind.YES else None

    def _deny(self, meta: RawMeta, model: str) -> Gauge:
        """Log an exchange of a model that its sender may not report on, and return its counter.

        It is not a loss, which would let this caller make the verdicts on another's model `unknown`.
        """
        self._n_models_denied += 1
        if _is_power_of_two(self._n_models_denied):
            _LOG.warning(
                "an exchange of %s is refused, because intake.token_file does not allow this caller to report on"
                " model %s (%d so far)",
                meta.origin.caller,
                model,
                self._n_models_denied,
            )
        return Gauge.MODEL_DENIED

    def _lose(self, meta: RawMeta, end: _End, error: LostError) -> None:
        """Note why an exchange is lost; report a model that is not configured, if its sender may report on it."""
        _LOG.debug("exchange %s is lost: %s", meta.id, error)
        if isinstance(error, UnknownModelError):
            if not meta.origin.allows(error.model):
                end.no_traffic = self._deny(meta, error.model)
                return
            self._on_unknown(error.model, self._rows[meta.stratum].stratum)
        end.loss = error.loss

    def _refusal(self, meta: RawMeta, heads: ExchangeHeads) -> Loss | None:
        """Return why an exchange that would be kept cannot be published, else None.

        It is not decoded for that. While models are paused it must be known not to be of one of them.
        """
        refusal = self._publisher.refusal(meta.captured_at_ns / 1e9)
        paused = self.paused.models
        if refusal is None or (paused and (not heads.model_name or heads.model_name in paused)):
            return None
        return refusal if self._recorder.surely_keeps(meta, heads) else None

    def _publish(self, meta: RawMeta, exchanges: Sequence[Exchange], row: int) -> None:
        """Publish the records of a request. Each counts as a request of its own, so that none is published that was not offered."""
        for count in (Count.OFFERED, Count.TAKEN, Count.HANDED):
            self._slot.add(row, count, len(exchanges) - 1)
        for exchange in exchanges:
            try:
                self._publisher.put(exchange, row)
            except Exception:  # noqa: BLE001 - a record that cannot be encoded
                self._log_error(meta)
                self._slot.lose(row, Loss.CAPTURE_ERROR)

    def _row(self, row: int, model: str) -> int:
        """Return the row of an exchange whose model is known now, and move its counts there."""
        stratum, model_of_row = self._rows[row]
        model_row = self._known.get(Row(stratum, model), row) if not model_of_row else row
        if model_row != row:
            self._slot.move(row, model_row, Count.TAKEN, Count.HANDED)
        return model_row

    def _log_error(self, meta: RawMeta) -> None:
        self._n_errors += 1
        if _is_power_of_two(self._n_errors):
            _LOG.exception(
                "exchange %s is lost because of an internal error (%d so far)", meta.id, self._n_errors
            )


def _is_power_of_two(n: int) -> bool:
    """Return whether to log the n-th of its kind: what comes with each exchange must not flood the log."""
    return n & (n - 1) == 0


class CaptureService:
    """The parts of the capture process that change with the configuration.

    Parameters
    ----------
    live_config_file
        The configuration in effect.
    identity
        This sidecar.
    policy_file
        The file from which the other processes read the policy.
    counters
        Counters of all processes; the last slot belongs to the capture process.
    clock
        Times limits, policies and log lines.

    Attributes
    ----------
    publisher, policy_watcher, receiver
        The parts that the process runs.
    unknown_models
        The models that exchanges name and that are not configured.
    """

    def __init__(
        self,
        live_config_file: LiveConfigFile,
        identity: SidecarIdentity,
        policy_file: PolicyFile,
        counters: Counters,
        clock: Clock,
    ) -> None:
        slot = counters.slot(counters.n_slots - 1)
        live_config = live_config_file.current
        config = live_config.config
        self._live_config_file = live_config_file
        self._identity = identity
        self._policy_history = PolicyHistory(config.sampling)
        self._counters = counters
        self._clock = clock
        self.publisher = Publisher(config, slot, clock, identity.boot)
        self.policy_watcher = PolicyWatcher(config, self._policy_history, policy_file, slot, clock)
        plugins.use(config.plugins)
        recorder = Recorder(live_config, identity, self._policy_history)
        self.unknown_models = UnknownModels(clock)
        self._pipeline = CapturePipeline(
            recorder, self.publisher, slot, live_config.rows, self.unknown_models.count
        )
        self._senders = [counters.slot(index) for index in range(counters.n_slots - 1)]
        self.receiver = FrameReceiver(config.sidecar, self._handle, self._count_arrived)
        self._epoch = ""

    def set_paused(self, paused: Paused) -> None:
        """Apply a pause; it also covers exchanges that were drawn before."""
        self._pipeline.paused = paused

    def publish_refusal_share(self) -> None:
        """Publish the share of drawn requests that the relay workers must refuse.

        Called several times a second.
        """
        policy = self._policy_history.at(self._clock.now().timestamp())
        is_paused = self._pipeline.paused.everything or bool(self._pipeline.paused.models)
        drawn, refused = self._counters.drawn(len(self._live_config_file.current.rows))
        self.publisher.caps.publish_refusal_share(
            drawn, refused, keeps_all=not is_paused and keeps_all(policy)
        )

    def log_unknown_models(self) -> None:
        """Log the models that were seen but are not configured. Called about once a second."""
        self.unknown_models.log([model.name for model in self._live_config_file.current.config.models])

    def refresh_config(self) -> None:
        """Apply the configuration if it has changed. Called about once a second."""
        if not self._live_config_file.refresh():
            return
        live_config = self._live_config_file.current
        try:
            plugins.use(live_config.config.plugins)
            recorder = Recorder(live_config, self._identity, self._policy_history)
        except OperatorError:  # for example an adapter or a plug-in that cannot be imported
            _LOG.exception(
                "the models of the new configuration cannot be captured; the earlier models stay in effect"
            )
            self._pipeline.set_rows(live_config.rows)  # the relay workers use the new rows all the same
        else:
            self._pipeline.reconfigure(recorder, live_config.rows)
        self._policy_history.reconfigure(live_config.config.sampling)
        self.publisher.reconfigure(live_config.config)
        self.receiver.reconfigure(live_config.config.sidecar)
        self.policy_watcher.reconfigure(live_config.config)

    def _count_arrived(self, sender: int, row: int) -> None:
        """Count a frame for its sender, which reads the count when this process has ended."""
        if sender >= len(self._senders) or not 0 <= row < self._counters.n_rows:
            raise ValueError(f"no slot {sender} or no row {row} in the table of counts")
        self._senders[sender].add(row, Count.ARRIVED)

    def _handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        is_new = meta.epoch != self._epoch and not self._policy_history.knows(meta.epoch)
        self._epoch = meta.epoch
        if is_new or meta.stratum >= len(self._live_config_file.current.rows):
            self.refresh_config()  # a relay worker has read a new configuration first
        self._pipeline.handle(meta, request, response)


class UnknownModels:
    """Counts a bounded number of models that the configuration does not name, mostly misspelt, and logs them at most once in `LOG_INTERVAL_S`.

    Their exchanges are counted as lost (`unknown_model`) in any case. The names are in the log, and in the tallies, from
    where `quantdrift status` shows them. Metrics contain no names that clients choose.

    Parameters
    ----------
    clock
        Times the log lines.

    Attributes
    ----------
    totals
        Exchanges by header stratum and name since the name got its counter, for at most `MAX_NAMES` names. In
        the names, what cannot be printed or stored in Postgres is escaped.

    Notes
    -----
    Clients choose the names, so invented ones must not keep the places of misspelt ones: the names are those of a
    Misra-Gries summary with `MAX_NAMES` counters. A name in more than 1 / (`MAX_NAMES` + 1) of these exchanges is always
    among them.
    """

    def __init__(self, clock: Clock) -> None:
        self.totals: dict[tuple[str, str], int] = {}
        self._clock = clock
        self._counters: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._n_other = 0
        self._since_s = 0.0  # when the first name was seen since the last line
        self._logged_s: float | None = None

    def count(self, name: str, stratum: str) -> None:
        """Count an exchange of a header stratum whose model is not configured."""
        if not self._seen:
            self._since_s = self._clock.monotonic_s()
        name = name[:MAX_LENGTH]
        if self._has_counter(name):
            key = stratum, _quote(name)
            self.totals[key] = self.totals.get(key, 0) + 1
        if name in self._seen or len(self._seen) < MAX_NAMES:
            self._seen[name] = self._seen.get(name, 0) + 1
        else:
            self._n_other += 1

    def _has_counter(self, name: str) -> bool:
        """Count a name in the summary; return whether it has a counter."""
        counters = self._counters
        if name in counters or len(counters) < MAX_NAMES:
            counters[name] = counters.get(name, 0) + 1
            return True
        for counted in list(counters):
            counters[counted] -= 1
            if not counters[counted]:
                del counters[counted]
                for key in [key for key in self.totals if key[1] == _quote(counted)]:
                    del self.totals[key]
        return False

    def log(self, configured: Sequence[str]) -> None:
        """Log the names seen since the last line. Called about once a second.

        Parameters
        ----------
        configured
            Names of the configured models.
        """
        now_s = self._clock.monotonic_s()
        for name in self._seen.keys() & set(configured):  # corrected meanwhile
            del self._seen[name]
        if not self._seen or (self._logged_s is not None and now_s - self._logged_s < LOG_INTERVAL_S):
            return
        seen = sorted(self._seen.items(), key=lambda item: -item[1])
        others = sum(n for _, n in seen[_MAX_SHOWN:]) + self._n_other
        _LOG.warning(
            "no such model is configured: saw %s%s in the sampled requests of the last %.0f s, and compared none of "
            "them. Configured: %s. Correct models.name, or add a [[models]]",
            ", ".join(_describe(name, n, configured) for name, n in seen[:_MAX_SHOWN]),
            f" and other names {count_of(others, 'time')}" if others else "",
            max(1.0, now_s - self._since_s),
            _join_names(configured),
        )
        self._seen, self._n_other, self._logged_s = {}, 0, now_s


def _describe(name: str, n: int, configured: Sequence[str]) -> str:
    matches = difflib.get_close_matches(
        name.lower(),
        {
            configured_name.lower(): configured_name
            for configured_name in configured
            if len(configured_name) <= 2 * MAX_LENGTH
        },
        n=1,
        cutoff=0.5,
    )
    meant = next(
        (
            configured_name
            for configured_name in configured
            if matches and configured_name.lower() == matches[0]
        ),
        "",
    )
    hint = f" (did you mean `{meant}`?)" if meant else ""
    return f"model `{_quote(name)}` {count_of(n, 'time')}{hint}"


def _quote(name: str) -> str:
    """Return a name chosen by a client in a form that is safe in a log line."""
    return repr(name)[1:-1].replace("`", "'")


def _join_names(configured: Sequence[str]) -> str:
    more = len(configured) - _MAX_CONFIGURED
    names = ", ".join(configured[:_MAX_CONFIGURED]) or "none"
    return f"{names} and {more} more" if more > 0 else names
