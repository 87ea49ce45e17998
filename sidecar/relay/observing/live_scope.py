"""The first sampling phase of one process, as configuration, policy and pause change under it."""

from pathlib import Path

from quantdrift.core.clock import Clock
from quantdrift.sidecar.relay.observing.observer import CaptureScope, Offer
from quantdrift.sidecar.sampling.first_phase import ExchangeIds, Sampler
from quantdrift.sidecar.sampling.load_shedding import LoadShedding
from quantdrift.sidecar.state.config import LiveConfig, LiveConfigFile
from quantdrift.sidecar.state.counters import Slot
from quantdrift.sidecar.state.pause import PauseFiles
from quantdrift.sidecar.state.policy import NAME, PolicyFile, PolicyHistory
from quantdrift.sidecar.state.routes import Routes


class LiveScope:
    """What a relay worker and the intake process draw by.

    Parameters
    ----------
    settlement
        The configuration that holds.
    secret
        Key of the salts.
    directory
        Where policy and pause are told.
    offer
        Takes a finished exchange.
    slot
        The process's counts.
    clock
        Tells the time.
    gate
        Refuses what was drawn; without it nothing is.

    Attributes
    ----------
    scope : CaptureScope
        What is shared by all that draw.
    directives : PolicyHistory
        Whose rates hold.
    is_paused : bool
        Whether nothing is to be taken, as of the last look.
    """

    def __init__(
        self,
        settlement: LiveConfigFile,
        secret: bytes,
        directory: Path,
        *,
        offer: Offer,
        slot: Slot,
        clock: Clock,
        gate: LoadShedding | None = None,
    ) -> None:
        config = settlement.settled.config
        self._settlement = settlement
        self._secret = secret
        self._clock = clock
        self._mint = ExchangeIds()
        self._notice, self._pauses = PolicyFile(directory / NAME), PauseFiles(directory)
        self.directives = PolicyHistory(config.sampling)
        self._notice.read(self.directives)
        self.scope = CaptureScope(
            config.sidecar,
            routes=Routes(config.capture.protocols),
            sampler=self._sampler(),
            offer=offer,
            slot=slot,
            clock=clock,
            gate=gate,
        )
        self._refresh()

    def look(self) -> LiveConfig | None:
        """Go over to what holds now; return another configuration, if there is one. Called about once a second."""
        settled = self._settlement.settled if self._settlement.refresh() else None
        if settled is not None:
            self.directives.reconfigure(settled.config.sampling)
            routes = Routes(settled.config.capture.protocols)
            self.scope.reconfigure(settled.config.sidecar, routes, self._sampler())
        self._notice.read(self.directives)
        self._refresh()
        return settled

    def _refresh(self) -> None:
        self.is_paused = self._pauses.look().everything
        self.scope.sampler.refresh(self._now_s(), paused=self.is_paused)

    def _sampler(self) -> Sampler:
        settled = self._settlement.settled
        sampling = settled.config.sampling
        return Sampler(
            sampling, self._secret, self._mint, self._now_s(), self.directives, places=settled.places
        )

    def _now_s(self) -> float:
        return self._clock.now().timestamp()
