"""Where raw exchanges end: each is published, thinned or lost, and counted in any case."""

import logging

from quantdrift.core.clock import Clock
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Loss
from sidecar.capture.follower import Follower
from sidecar.capture.publisher import Publisher
from sidecar.capture.reception import Reception
from sidecar.capture.recorder import Origin, Recorder
from sidecar.counters import Count, Slot
from sidecar.directives import Directives
from sidecar.handoff import RawMeta
from sidecar.notice import Notice
from sidecar.pauses import Paused
from sidecar.protocols.lost import LostError
from sidecar.settled import Settlement

_LOG = logging.getLogger(__name__)


class Desk:
    """Records one raw exchange after the other: published, thinned or lost, and counted in any case.

    Parameters
    ----------
    recorder
        Makes the record.
    publisher
        Takes it.
    slot
        Counts.
    n_rows
        Header strata in the table of counts.

    Attributes
    ----------
    paused : Paused
        What is let go of; it counts as thinned.
    """

    def __init__(self, recorder: Recorder, publisher: Publisher, slot: Slot, n_rows: int) -> None:
        self._publisher = publisher
        self._slot = slot
        self._n_errors = 0
        self.paused = Paused()
        self.reconfigure(recorder, n_rows)

    def reconfigure(self, recorder: Recorder, n_rows: int) -> None:
        """Go over to another recorder."""
        self._recorder = recorder
        self._n_rows = n_rows

    def handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        """Deal with one exchange.

        Raises
        ------
        ValueError
            There is no such stratum: the frames are out of step.
        """
        if not 0 <= meta.stratum < self._n_rows:
            raise ValueError(f"there is no stratum {meta.stratum}")
        self._slot.add(meta.stratum, Count.HANDED)
        try:
            exchange = None
            if not self.paused.everything:
                exchange = self._recorder.record(meta, request, response, self.paused.models)
            if exchange is None:
                self._slot.add(meta.stratum, Count.THINNED)
            else:
                self._publisher.put(exchange, meta.stratum)
        except LostError as error:
            _LOG.debug("exchange %s is lost: %s", meta.id, error)
            self._slot.lose(meta.stratum, error.loss)
        except Exception:  # noqa: BLE001 - an observer: one bad exchange must not end it
            self._n_errors += 1
            if (
                self._n_errors & (self._n_errors - 1) == 0
            ):  # 1, 2, 4, 8: a fault in each must not flood the log
                _LOG.exception(
                    "exchange %s is lost to an error of our own (%d so far)", meta.id, self._n_errors
                )
            self._slot.lose(meta.stratum, Loss.CAPTURE_ERROR)


class Office:
    """What of the capture process follows the configuration.

    Parameters
    ----------
    settlement
        What holds.
    origin
        This sidecar.
    notice
        Where the relay workers look for the policy.
    slot
        Counts.
    clock
        Tells the time.

    Attributes
    ----------
    publisher, follower, reception
        Its parts.
    """

    def __init__(
        self, settlement: Settlement, origin: Origin, notice: Notice, slot: Slot, clock: Clock
    ) -> None:
        settled = settlement.settled
        config = settled.config
        self._settlement = settlement
        self._origin = origin
        self._directives = Directives(config.sampling)
        self.publisher = Publisher(config, slot, clock)
        self.follower = Follower(config, self._directives, notice, slot, clock)
        self._desk = Desk(
            Recorder(settled, origin, self._directives), self.publisher, slot, len(settled.rows)
        )
        self.reception = Reception(config.sidecar, self._handle)
        self._epoch = ""

    def pause(self, paused: Paused) -> None:
        """Let go of what is paused from now on: also of what was drawn before."""
        self._desk.paused = paused

    def look(self) -> None:
        """Go over to another configuration, if another one holds. Called about once a second."""
        if not self._settlement.refresh():
            return
        settled = self._settlement.settled
        try:
            recorder = Recorder(settled, self._origin, self._directives)
        except OperatorError:  # an adapter that cannot be imported, say
            _LOG.exception("the new configuration's models cannot be captured, the earlier ones are")
        else:
            self._desk.reconfigure(recorder, len(settled.rows))
        self._directives.reconfigure(settled.config.sampling)
        self.publisher.reconfigure(settled.config)
        self.reception.reconfigure(settled.config.sidecar)
        self.follower.reconfigure(settled.config)

    def _handle(self, meta: RawMeta, request: memoryview, response: memoryview) -> None:
        if meta.epoch != self._epoch:
            self._epoch = meta.epoch
            if not self._directives.knows(meta.epoch):
                self.look()  # a relay worker was the first to look
        self._desk.handle(meta, request, response)
