"""What anybody can see of a running quantdrift: the sidecar's and shadow's /metrics, and the view slice_now."""

from collections.abc import Iterable
from typing import Any, Self

import aiohttp
import asyncpg
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from quantdrift.demo.services import VERSION, Services

ALL = "all"
ARCHIVE = "scanner=archive"

_AWAY = (aiohttp.ClientError, OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
_SLICES = """
    select slice, verdict, reason, n_groups, evidence_ratio, flip_mean, flip_low, flip_high, flip_budget,
        divergence_mean, divergence_budget
    from slice_now where reference_digest <> '' and candidate_version = $1 order by slice <> 'all', slice
"""


class ShownSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `slice_now`; the means are None until there is something to tell.

    Parameters
    ----------
    slice, verdict, reason
        As in the database.
    n_groups
        Readers compared: those of one slice who sent a sampled page.
    evidence_ratio
        Evidence over its threshold: pages at 1.
    flip_mean, flip_low, flip_high, flip_budget
        Share of changed answers, its 95 % interval and what is accepted.
    divergence_mean, divergence_budget
        Mean divergence in nats and what is accepted.
    """

    slice: str
    verdict: str
    reason: str
    n_groups: int
    evidence_ratio: float | None
    flip_mean: float | None
    flip_low: float | None
    flip_high: float | None
    flip_budget: float | None
    divergence_mean: float | None
    divergence_budget: float | None


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown of one moment.

    Parameters
    ----------
    offered, taken, published, lost
        Requests seen by the sidecar, chosen, handed to the stream, and chosen but lost.
    replayed
        Exchanges compared and stored by the shadow.
    slices
        `all` first.
    stale
        Something did not answer: this is the last that is known.
    """

    offered: int = 0
    taken: int = 0
    published: int = 0
    lost: int = 0
    replayed: int = 0
    slices: tuple[ShownSlice, ...] = ()
    stale: bool = False

    def slice(self, name: str) -> ShownSlice | None:
        """Return the slice called `name`, or None while nothing is known of it."""
        return next((state for state in self.slices if state.slice == name), None)


class DemoWatch:
    """Looks at a running quantdrift; used as an asynchronous context manager.

    Parameters
    ----------
    services
        Where to look.

    Attributes
    ----------
    version
        The version of the model whose slices are looked at.
    """

    def __init__(self, services: Services) -> None:
        self.version = VERSION
        self._services = services
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5))
        self._postgres: Any = None
        self._last = Moment()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        self._disconnect()

    async def look(self) -> Moment:
        """Return the state of this moment; while something is being started again, the last known one."""
        try:
            self._last = await self._look()
        except _AWAY:
            self._disconnect()
            return msgspec.structs.replace(self._last, stale=True)
        return self._last

    async def _look(self) -> Moment:
        ports = self._services.ports
        sidecar = await self._metrics(ports.sidecar_admin)
        shadow = await self._metrics(ports.shadow_admin)
        if self._postgres is None:
            self._postgres = await asyncpg.connect(self._services.dsn, timeout=5, command_timeout=5)
        rows = await self._postgres.fetch(_SLICES, self.version)
        return Moment(
            offered=_total(sidecar, "quantdrift_sidecar_offered"),
            taken=_total(sidecar, "quantdrift_sidecar_taken"),
            published=_total(sidecar, "quantdrift_sidecar_published"),
            lost=_total(sidecar, "quantdrift_sidecar_lost"),
            replayed=_total(shadow, "quantdrift_shadow_compared"),
            slices=tuple(ShownSlice(**row) for row in rows),
        )

    def _disconnect(self) -> None:
        if self._postgres is not None:
            self._postgres.terminate()
            self._postgres = None

    async def _metrics(self, port: int) -> str:
        async with self._session.get(f"http://127.0.0.1:{port}/metrics") as response:
            return await response.text()


def _total(text: str, name: str) -> int:
    return round(sum(_values(text, name)))


def _values(text: str, name: str) -> Iterable[float]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{name}_total":
                yield sample.value
