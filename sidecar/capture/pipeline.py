"""Where raw exchanges end: each is published, thinned or lost, and counted in any case."""

import logging
from collections.abc import Callable, Sequence

from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Exchange, Loss
from quantdrift.sidecar.capture.policy_watch import PolicyWatcher
from quantdrift.sidecar.capture.publisher import Publisher
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity
from quantdrift.sidecar.capture.unknown_models import UnknownModels
from quantdrift.sidecar.handoff.frame import RawMeta
from quantdrift.sidecar.handoff.receiver import FrameReceiver
from quantdrift.sidecar.protocols.errors import LostError, UnknownModelError
from quantdrift.sidecar.sampling.second_phase import keeps_all
from quantdrift.sidecar.state.config import LiveConfigFile
from quantdrift.sidecar.state.counters import Count, Counters, Row, Slot
from quantdrift.sidecar.state.pause import Paused
from quantdrift.sidecar.state.policy import PolicyFile, PolicyHistory

_LOG = logging.getLogger(__name__)


class Pipeline:
    """Records one raw exchange after the other: published, thinned or lost, and counted in any case.

    Parameters
    ----------
    recorder
        Makes the record.
    publisher
        Takes it.
    slot
        Counts.
    rows
        What the rows of the table of counts are for.
    on_unknown
        Called with the name of a model that is not configured.

    Attributes
    ----------
    paused : Paused
        What is let go of; it counts as thinned.
    """

    def __init__(
        self,
        recorder: Recorder,
        publisher: Publisher,
        slot: Slot,
        rows: Sequence[Row],
        on_unknown: Callable[[str], object] | None = None,
    ) -> None:
        self._on_unknown = on_unknown or (lambda _: None)
        self._publisher = publisher
        self._slot = slot
        self._n_errors = 0
        self.paused = Paused()
        self.reconfigure(recorder, rows)

    def reconfigure(self, recorder: Recorder, rows: Sequence[Row]) -> None:
        """Go over to another recorder."""
        self._recorder = recorder
        self._rows = tuple(rows)
        self._known = {row: index for index, row in enumerate(rows)}

    def know(self, rows: Sequence[Row]) -> None:
        """Go over to a longer list of what rows are for, with the same recorder."""
        self._recorder.know(rows)
        self.reconfigure(self._recorder, rows)

    def handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        """Deal with one exchange.

        Raises
        ------
        ValueError
            There is no such stratum: the frames are out of step.
        """
        if not 0 <= meta.stratum < len(self._rows):
            raise ValueError(f"there is no stratum with row {meta.stratum}")
        self._slot.add(meta.stratum, Count.HANDED)
        exchange = loss = refusal = None
        self._recorder.model = ""
        try:
            if not self.paused.everything:
                refusal = self._refusal(meta, request, response)
            if not self.paused.everything and refusal is None:
                exchange = self._recorder.record(meta, request, response, self.paused.models)
        except LostError as error:
            _LOG.debug("exchange %s is lost: %s", meta.id, error)
            loss = error.loss
            if isinstance(error, UnknownModelError):
                self._on_unknown(error.model)
        except Exception:  # noqa: BLE001 - an observer: one bad exchange must not end it
            self._note_error(meta)
            loss = Loss.CAPTURE_ERROR
        row = self._row(meta.stratum)
        if refusal is not None:
            self._publisher.refuse(row, refusal)
        elif loss is not None:
            self._slot.lose(row, loss)
        elif exchange is None:
            self._slot.add(row, Count.THINNED)
        else:
            self._publish(meta, exchange, row)

    def _refusal(self, meta: RawMeta, request: memoryview, response: memoryview) -> Loss | None:
        """Return why an exchange that would be published cannot be, before it is decoded for nothing."""
        refusal = self._publisher.refusal()
        if refusal is None:
            return None
        keeps = self._recorder.surely_keeps(meta, request, response, self.paused.models)
        return refusal if keeps else None

    def _publish(self, meta: RawMeta, exchange: Exchange, row: int) -> None:
        try:
            self._publisher.put(exchange, row)
        except Exception:  # noqa: BLE001 - a record that cannot be written
            self._note_error(meta)
            self._slot.lose(row, Loss.CAPTURE_ERROR)

    def _row(self, row: int) -> int:
        """Return the row that an exchange belongs to now that it has been read, and move its counts there."""
        stratum, model = self._rows[row]
        known = self._known.get(Row(stratum, self._recorder.model), row) if not model else row
        if known != row:
            self._slot.move(row, known, Count.TAKEN, Count.HANDED)
        return known

    def _note_error(self, meta: RawMeta) -> None:
        self._n_errors += 1
        if self._n_errors & (self._n_errors - 1) == 0:  # 1, 2, 4, 8: one in each must not flood the log
            _LOG.exception("exchange %s is lost to an error of our own (%d so far)", meta.id, self._n_errors)


class CaptureService:
    """What of the capture process follows the configuration.

    Parameters
    ----------
    live_config_file
        What holds.
    origin
        This sidecar.
    policy_file
        Where the relay workers look for the policy.
    counters
        Of all processes; the last slot is the capture process's.
    clock
        Tells the time.

    Attributes
    ----------
    publisher, follower, reception
        Its parts.
    """

    def __init__(
        self,
        live_config_file: LiveConfigFile,
        origin: SidecarIdentity,
        policy_file: PolicyFile,
        counters: Counters,
        clock: Clock,
    ) -> None:
        slot = counters.slot(counters.n_slots - 1)
        live_config = live_config_file.current
        config = live_config.config
        self._live_config_file = live_config_file
        self._origin = origin
        self._policy_history = PolicyHistory(config.sampling)
        self._counters = counters
        self._clock = clock
        self.publisher = Publisher(config, slot, clock, origin.boot)
        self.follower = PolicyWatcher(config, self._policy_history, policy_file, slot, clock)
        recorder = Recorder(live_config, origin, self._policy_history)
        self._strangers = UnknownModels(clock)
        self._desk = Pipeline(recorder, self.publisher, slot, live_config.rows, self._strangers.saw)
        self.reception = FrameReceiver(config.sidecar, self._handle)
        self._epoch = ""

    def pause(self, paused: Paused) -> None:
        """Let go of what is paused from now on: also of what was drawn before."""
        self._desk.paused = paused

    def tell(self) -> None:
        """Tell the relay workers which share of what they draw to refuse at once. Called some times a second."""
        policy = self._policy_history.at(self._clock.now().timestamp())
        is_paused = self._desk.paused.everything or bool(self._desk.paused.models)
        drawn, refused = self._counters.drawn(len(self._live_config_file.current.rows))
        self.publisher.caps.tell(drawn, refused, keeps_all=not is_paused and keeps_all(policy))

    def warn(self) -> None:
        """Say which models were seen that are not configured. Called about once a second."""
        self._strangers.tell([model.name for model in self._live_config_file.current.config.models])

    def look(self) -> None:
        """Go over to another configuration, if another one holds. Called about once a second."""
        if not self._live_config_file.refresh():
            return
        live_config = self._live_config_file.current
        try:
            recorder = Recorder(live_config, self._origin, self._policy_history)
        except OperatorError:  # an adapter that cannot be imported, say
            _LOG.exception("the new configuration's models cannot be captured, the earlier ones are")
            self._desk.know(live_config.rows)  # the relay workers tell of new ones all the same
        else:
            self._desk.reconfigure(recorder, live_config.rows)
        self._policy_history.reconfigure(live_config.config.sampling)
        self.publisher.reconfigure(live_config.config)
        self.reception.reconfigure(live_config.config.sidecar)
        self.follower.reconfigure(live_config.config)

    def _handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        is_new = meta.epoch != self._epoch and not self._policy_history.knows(meta.epoch)
        self._epoch = meta.epoch
        if is_new or meta.stratum >= len(self._live_config_file.current.rows):
            self.look()  # a relay worker was the first to look: at other rates, or at a model that has come
        self._desk.handle(meta, request, response)
