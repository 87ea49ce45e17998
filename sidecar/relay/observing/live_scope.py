"""The first sampling phase of one process, kept up to date with configuration, policy and pause."""

from pathlib import Path

from quantdrift.core.clock import Clock
from quantdrift.sidecar.relay.observing.observer import CaptureScope, SendFrame
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.config import LiveConfig, LiveConfigFile
from quantdrift.sidecar.state.counters import Slot
from quantdrift.sidecar.state.pause import PauseFiles
from quantdrift.sidecar.state.policy import NAME, PolicyFile, PolicyHistory
from quantdrift.sidecar.state.routes import Routes


class LiveScope:
    """The capture scope of a relay worker or the intake process, refreshed from the files of the sidecar.

    Parameters
    ----------
    live_config_file
        The configuration in effect.
    secret
        Key of the salts.
    directory
        Directory of the policy file and the pause files.
    send_frame
        Called with each finished exchange.
    slot
        The counters of the process.
    load_shedding
        Refuses a share of the drawn requests; None: no request is refused.

    Attributes
    ----------
    scope : CaptureScope
        The scope that observers or gateway use.
    policy_history : PolicyHistory
        The policies received; the newest valid one is in effect.
    is_paused : bool
        Whether sampling is paused altogether, as of the last refresh.
    """

    def __init__(
        self,
        live_config_file: LiveConfigFile,
        secret: bytes,
        directory: Path,
        *,
        send_frame: SendFrame,
        slot: Slot,
        clock: Clock,
        load_shedding: LoadShedding | None = None,
    ) -> None:
        config = live_config_file.current.config
        self._live_config_file = live_config_file
        self._secret = secret
        self._clock = clock
        self._exchange_ids = ExchangeIds()
        self._policy_file, self._pauses = PolicyFile(directory / NAME), PauseFiles(directory)
        self.policy_history = PolicyHistory(config.sampling)
        self._policy_file.read(self.policy_history)
        self.scope = CaptureScope(
            config.sidecar,
            routes=Routes(config.capture.protocols),
            sampler=self._sampler(),
            send_frame=send_frame,
            slot=slot,
            clock=clock,
            load_shedding=load_shedding,
        )
        self._refresh_sampler()

    def refresh(self) -> LiveConfig | None:
        """Apply the present configuration, policy and pause; return the configuration if it has changed.

        Called about once a second.
        """
        live_config = self._live_config_file.current if self._live_config_file.refresh() else None
        if live_config is not None:
            self.policy_history.reconfigure(live_config.config.sampling)
            routes = Routes(live_config.config.capture.protocols)
            self.scope.reconfigure(live_config.config.sidecar, routes, self._sampler())
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
