"""The refit of learned slices: the leader runs it at intervals, in a thread, while the fold continues."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from quantdrift.core.clock import Clock, is_due
from quantdrift.core.clusters import (
    CLUSTER_KEY,
    ENOUGH_VECTORS,
    LEAST_VECTORS,
    MOST_IDS,
    MOST_VECTORS,
    NOVELTY_KEY,
    NOVELTY_QUANTILE,
    Clustering,
    space_of,
)
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.logs import of_model
from quantdrift.core.process.run import TURN_S, Stop
from quantdrift.core.slices import attribute_key
from quantdrift.drift.clusters.fit import ClusterSample, Fitted, Naming, fit_clusters
from quantdrift.storage.address import Dsn
from quantdrift.storage.audit import Action, add, who
from quantdrift.storage.database import Database
from quantdrift.storage.slices.clusters import (
    Space,
    Vectors,
    load_vectors,
    newest_clusterings,
    prune,
    spaces,
    store_clustering,
    used,
)

LOOK_EVERY: Final = timedelta(minutes=10)
REFIT_EVERY: Final = timedelta(days=7)
"""Time between two fits of the monitor to enough vectors: a whole week, so that no day of the week counts more than another."""
MONITOR: Final = "monitor"
_CONNECTIONS: Final = 2
_LOG = logging.getLogger(__name__)


class ClusterFits:
    """The periodic refit of learned slices, which also limits the stored sample of vectors.

    One task calls `turn` repeatedly. The work is done in a thread with its own event loop and connections: the fold
    never waits for it.

    Parameters
    ----------
    config
        Models, slices and the section `clusters`.
    dsn
        Address of the database.
    leads
        Returns whether this process leads.
    least_vectors
        With fewer vectors nothing is fitted.
    """

    def __init__(
        self,
        *,
        config: Config,
        dsn: Dsn,
        clock: Clock,
        stop: Stop,
        leads: Callable[[], bool],
        least_vectors: int = LEAST_VECTORS,
    ) -> None:
        self._least_vectors = least_vectors
        self._config = config
        self._dsn = dsn
        self._clock = clock
        self._stop = stop
        self._leads = leads
        self._looked_at: datetime | None = None

    async def turn(self) -> None:
        """Refit what is due, at most every `LOOK_EVERY`, then wait for `TURN_S`.

        Raises
        ------
        RetryError, OperatorError
            As `refit_due`.
        """
        now = self._clock.now()
        if self._leads() and is_due(self._looked_at, LOOK_EVERY, now):
            self._looked_at = now  # set first: after an error the database must not be read in a tight loop
            try:
                await asyncio.to_thread(self._in_thread, now)
            except RetryError:
                self._looked_at = None
                raise
        await self._stop.wait(TURN_S)

    def _in_thread(self, now: datetime) -> None:
        async def in_own_loop() -> None:
            async with Database(self._dsn, pool_size=_CONNECTIONS) as database:
                await refit_due(self._config, database, now, least_vectors=self._least_vectors)

        asyncio.run(in_own_loop())


async def refit_due(
    config: Config, database: Database, now: datetime, *, least_vectors: int = LEAST_VECTORS
) -> list[Fitted]:
    """Delete old vectors, then refit the spaces that are due; return the new fits.

    A space that cannot be fitted is logged and left as it is.

    Raises
    ------
    RetryError
        Postgres is not available; what was done before stays done.
    """
    before = now - timedelta(days=config.storage.retention_days)
    await prune(database, before=before, most=MOST_VECTORS)
    async with database.begin() as connection:
        known_spaces = await spaces(connection)
    fits = []
    for space in due(config, known_spaces, now, least_vectors=least_vectors):
        try:
            fits.append(await refit(config, database, space))
        except OperatorError as error:
            _LOG.error(
                "the learned slices of %s were not refitted: %s",
                space.model,
                error,
                extra=of_model(space.model),
            )
    return fits


def configured(config: Config, known_spaces: Sequence[Space]) -> Iterator[Space]:
    """Yield the spaces that the configuration names, of those that have vectors."""
    wanted = {model.name: space_of(config, model)[0] for model in config.models}
    for space in known_spaces:
        if space.space and wanted.get(space.model) == space.space:
            yield space


def due(
    config: Config, known_spaces: Sequence[Space], now: datetime, *, least_vectors: int = LEAST_VECTORS
) -> list[Space]:
    """Return the spaces to be fitted: enough vectors, the last fit long enough ago or of half as many, and new vectors since.

    Parameters
    ----------
    known_spaces
        Spaces with vectors.
    now
        Aware.
    least_vectors
        With fewer vectors nothing is fitted.
    """
    return [
        space
        for space in configured(config, known_spaces)
        if space.n_vectors >= least_vectors
        and (
            space.fitted_at is None
            or now - space.fitted_at >= REFIT_EVERY
            or (space.fitted_n < ENOUGH_VECTORS and space.n_vectors >= 2 * space.fitted_n)
        )
        and (space.fitted_to is None or space.last_at > space.fitted_to)
    ]


async def refit(
    config: Config,
    database: Database,
    space: Space,
    *,
    by_person: bool = False,
    anew: bool = False,
    dry_run: bool = False,
    most_ids: int = MOST_IDS,
    quantile: float = NOVELTY_QUANTILE,
) -> Fitted:
    """Fit a space and store the clustering; no transaction is open during the fit, which blocks its event loop.

    Parameters
    ----------
    by_person
        Whether a person asked for the fit: it is stored under the name of the database's user, with an entry in the audit.
    anew
        Ignore the previous clustering and keep no id.
    dry_run
        Store nothing.
    most_ids
        Largest id that may be given to a cluster.
    quantile
        Quantile of the distances to a cluster beyond which an input is novel.

    Raises
    ------
    OperatorError
        There is no vector of finite numbers, or the previous clustering cannot be read.
    RetryError
        Postgres is not available, or another process stored a clustering meanwhile.
    """
    previous: Clustering | None = None
    if not anew:
        stored = await newest_clusterings(
            database, space.model, digest=space.reference_digest, space=space.space
        )
        previous = stored[0].clustering if stored else None
    async with database.begin() as connection:
        vectors = await load_vectors(connection, space, most=MOST_VECTORS, learned=(CLUSTER_KEY, NOVELTY_KEY))
        version, next_id = await used(connection, space.model)
    naming = _naming(config, space, version + 1, next_id, most_ids)
    try:
        fitted = _fit(vectors, naming, previous, n_clusters=config.monitor.n_clusters, quantile=quantile)
    except ValueError as error:
        raise OperatorError(
            f"the learned slices of {space.model} cannot be fitted in `{space.space}`: {error}"
        ) from error
    if not dry_run:
        async with database.begin() as connection:
            await store_clustering(
                connection,
                fitted.clustering,
                msgspec.json.encode(fitted.clusters).decode(),
                vectors=vectors,
                made_by=await who(connection) if by_person else MONITOR,
            )
            if by_person:
                await add(
                    connection,
                    Action.SLICES_FIT,
                    model=space.model,
                    before={"version": version or None},
                    after={"version": fitted.clustering.version, "n_vectors": fitted.n_vectors},
                )
        _LOG.info(
            "learned slices of %s: version %d from %d vectors, clusters %s",
            space.model,
            fitted.clustering.version,
            fitted.n_vectors,
            ", ".join(str(cluster.id) for cluster in fitted.clusters),
        )
    return fitted


def _naming(config: Config, space: Space, version: int, next_id: int, most_ids: int) -> Naming:
    model = config.model(space.model)
    attributes = [
        attribute_key(rule)
        for rule in config.slices
        if not (rule.feature or rule.cross or rule.edges) and rule.model in {"", space.model}
    ]
    return Naming(
        model=space.model,
        reference_digest=space.reference_digest,
        version=version,
        space=space.space,
        columns=() if model is None else space_of(config, model)[1],
        next_id=next_id,
        most_ids=most_ids,
        attributes=tuple(dict.fromkeys(attributes)),
    )


def _fit(
    vectors: Vectors, naming: Naming, previous: Clustering | None, *, n_clusters: int, quantile: float
) -> Fitted:
    return fit_clusters(
        ClusterSample(
            vectors=vectors.vectors,
            weights=1.0 / vectors.pi,
            exchanges=vectors.exchanges,
            labels=vectors.slices,
            attributes=vectors.attributes,
            features=vectors.features,
        ),
        naming,
        n_clusters=n_clusters,
        quantile=quantile,
        previous=previous,
        seed=naming.version,
    )
