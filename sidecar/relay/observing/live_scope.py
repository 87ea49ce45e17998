"""The first sampling phase of one process, kept up to date with configuration, policy and pause."""

import asyncio

from quantdrift.core.clock import Clock
from quantdrift.core.records import Loss
from quantdrift.sidecar.handoff.sender import FrameSender
from quantdrift.sidecar.relay.observing.observer import CaptureScope
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.sidecar.state.counters import Count, Gauge
from quantdrift.sidecar.state.pause import PauseFiles
from quantdrift.sidecar.state.policy import NAME, PolicyFile, PolicyHistory
from quantdrift.sidecar.state.process_start import ChildProcess
from quantdrift.sidecar.state.routes import Routes


class LiveScope:
    """The capture scope of a relay worker or the intake process, refreshed from the files of the sidecar.

    It connects to the capture process. A predecessor in the slot of the process may have been killed: its gauges are
    set to 0, and the exchanges that it had not handed over are counted as lost.

    Parameters
    ----------
    child
        This process.
    secret
        Key of the salts.

    Attributes
    ----------
    scope : CaptureScope
        The scope that observers or gateway use.
    sender : FrameSender
        Sends finished exchanges to the capture process.
    policy_history : PolicyHistory
        The policies received; the newest valid one is in effect.
    is_paused : bool
        Whether sampling is paused altogether, as of the last refresh.
    """

    def __init__(self, child: ChildProcess, secret: bytes, clock: Clock) -> None:
        self._live_config_file = child.live_config_file
        live_config = self._live_config_file.current
        config, slot, directory = live_config.config, child.slot, child.start.directory
        for gauge in (Gauge.OPEN, Gauge.HELD_BYTES, Gauge.QUEUE_BYTES, Gauge.SLOW):
            slot.set(gauge, 0)
        slot.lose_unfinished(
            len(live_config.rows), Count.TAKEN, ended=(Count.HANDED,), loss=Loss.PROCESS_ENDED
        )
        self.sender = FrameSender(
            child.start.handoff,
            config.sidecar.handoff_bytes,
            slot,
            asyncio.get_running_loop(),
            number=child.start.slot,
            n_rows=len(live_config.rows),
        )
        self.sender.connect()
        self._secret = secret
        self._clock = clock
        self._exchange_ids = ExchangeIds()
        self._policy_file, self._pauses = PolicyFile(directory / NAME), PauseFiles(directory)
        self.policy_history = PolicyHistory(config.sampling)
        self._policy_file.read(self.policy_history)
        self.scope = CaptureScope(
            config.sidecar,
            routes=Routes(config.capture.protocols, live_config.paths),
            sampler=self._sampler(),
            send_frame=self.sender.send,
            slot=slot,
            clock=clock,
            load_shedding=LoadShedding(child.counters.slot(child.counters.n_slots - 1), clock),
        )
        self._refresh_sampler()

    def refresh(self) -> LiveConfig | None:
        """Apply the present configuration, policy and pause; return the configuration if it has changed.

        Called about once a second.
        """
        live_config = self._live_config_file.current if self._live_config_file.refresh() else None
        if live_config is not None:
            self.policy_history.reconfigure(live_config.config.sampling)
            routes = Routes(live_config.config.capture.protocols, live_config.paths)
            self.scope.reconfigure(live_config.config.sidecar, routes, self._sampler())
            self.sender.limit_bytes = live_config.config.sidecar.handoff_bytes
            self.sender.n_rows = len(live_config.rows)
        self._policy_file.read(self.policy_history)
        self._refresh_sampler()
        return live_config

    def _refresh_sampler(self) -> None:
        self.is_paused = self._pauses.refresh().everything
        self.scope.sampler.refresh(self._now_s(), paused=self.is_paused)

    def _sampler(self) -> Sampler:
        live_config = self._live_config_file.current
        sampling = live_config.config.sampling
        return Sampler(
            sampling,
            self._secret,
            self._exchange_ids,
            self._now_s(),
            self.policy_history,
            rows=live_config.rows_by_model,
        )

    def _now_s(self) -> float:
        return self._clock.now().timestamp()
