"""One turn of the fold of some models: read what waits, fold it, write what comes of it, in one transaction."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

from quantdrift.core.clock import Clock
from quantdrift.core.config import Config
from quantdrift.core.logs import of_model
from quantdrift.core.process.processor_time import ProcessorTime
from quantdrift.core.telemetry import EXPLANATIONS, FOLD_TIME, FOLDED, Telemetry
from quantdrift.facts.status import Serving
from quantdrift.monitor.explain.explain import Explainer
from quantdrift.monitor.explain.ways import ways_with
from quantdrift.monitor.fold.models import ModelFolds
from quantdrift.monitor.gauges import SliceGauges
from quantdrift.storage.alerts.evidence import Evidence
from quantdrift.storage.database import Connection
from quantdrift.storage.fold.circumstances import read_circumstances, read_share_hours
from quantdrift.storage.fold.models import lock_positions, read_spans
from quantdrift.storage.fold.read import load_catalog, next_batches, resume
from quantdrift.storage.fold.write import write_models
from quantdrift.storage.fold_rows import TransitionRow
from quantdrift.storage.incidents.incidents import mitigated_slices
from quantdrift.storage.serving import servings

BATCHES_AT_ONCE: Final = 1_024
ROWS_AT_ONCE: Final = 4_096
"""A fold takes batches until one of the two is reached: what it costs besides, above all to write states, is then little for each exchange,
however small the batches are."""
_CIRCUMSTANCES_S: Final = (
    5.0  # pauses show within seconds, and what was quarantined need not be counted with each batch
)
_SHARES_S: Final = 60.0  # the looks that the bound of `quantdrift.drift.share` counts
# What a batch costs, whatever it contains, is in all three: fewer and larger ones cost less.
_LARGER: Final = "let the shadow store larger batches (shadow.batch_delay_s)"
_HINTS: Final = {
    "read": _LARGER,
    "fold": f"use fewer slices, or {_LARGER}",
    "write": f"use fewer slices, or {_LARGER}",
}
_LOG = logging.getLogger(__name__)


class FoldTurn:
    """The fold of the models that this process is to fold, turn after turn.

    Parameters
    ----------
    gauges
        Get what it knows after each turn.
    progress
        Called whenever the work has gone on.
    """

    def __init__(
        self,
        *,
        config: Config,
        telemetry: Telemetry,
        clock: Clock,
        gauges: SliceGauges,
        progress: Callable[[], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._gauges = gauges
        self._progress = progress
        self._folds = ModelFolds(config)
        self._circumstances_due_s = 0.0
        self._shares_due_s = 0.0
        self._servings: Mapping[tuple[str, str], Serving] = {}
        self._processor_time = ProcessorTime(_HINTS)
        explanations = telemetry.counter(EXPLANATIONS)
        self._explainer = Explainer(config, clock, lambda outcome: explanations.add(1, {"outcome": outcome}))
        self._folded = telemetry.counter(FOLDED)
        self._fold_time = telemetry.histogram(FOLD_TIME)

    def forget(self) -> None:
        """Forget all that is folded and not stored: the next turn starts from the database."""
        self._folds = ModelFolds(self._config)

    async def fold(self, connection: Connection, models: Collection[str], last: int) -> Callable[[], bool]:
        """Fold what waits of models, up to a limit, inside a transaction.

        Parameters
        ----------
        last
            Last batch that has a number.

        Returns
        -------
        function
            To be called once the transaction is committed: it shows what has changed, and returns whether more may wait.
        """
        begun_s = self._clock.monotonic_s()
        positions = await lock_positions(connection, models)
        for model in (new := self._folds.keep(positions)):
            self._folds.begin(model, await resume(connection, model, positions[model]))
            self._circumstances_due_s = self._shares_due_s = begun_s
            self._progress()
        if not positions:
            return self._show_nothing
        folds = self._folds
        after = min(position.fold_seq for position in positions.values())
        with self._processor_time.part("read"):
            batches, until = await next_batches(
                connection, models, after, last, BATCHES_AT_ONCE, most_rows=ROWS_AT_ONCE
            )
        wanted = folds.policies() | {row.policy_id for rows in batches for row in rows.comparisons}
        wanted |= {row.policy_id for rows in batches for row in rows.noise}
        folds.learn(
            await load_catalog(connection, wanted=wanted, known=folds.catalog, models=models),
            await read_spans(connection),
        )
        await self._look(connection, begun_s)
        for batch in batches:
            with self._processor_time.part("fold"):
                folds.batch(batch)
            self._progress()
            # A probe of the admin port, and the renewal of the lease, wait for one batch at most.
            await asyncio.sleep(0)
        folds.skip(until)
        outcomes = {
            model: await self._explainer.explain(Evidence(connection), outcome, folds.catalog)
            for model, outcome in folds.take().items()
        }
        self._progress()
        # Positions, too, where others' batches were passed over: a fold that is ahead of what is stored counts as lost.
        if batches or new or until > after or any(outcome.verdicts for outcome in outcomes.values()):
            with self._processor_time.part("write"):
                await write_models(
                    connection,
                    outcomes,
                    positions,
                    self._config.telemetry.trace_url,
                    webhook=bool(self._config.notify.webhook_url),
                    ways=ways_with(self._config, folds.catalog),
                )
        mitigated = await mitigated_slices(connection)

        def committed() -> bool:
            self._gauges.show(folds.current(), folds.catalog, folds.floors(), mitigated, self._servings)
            for outcome in outcomes.values():
                self._say(outcome.transitions)
            self._processor_time.answered(sum(len(batch.comparisons) for batch in batches))
            if batches:
                self._folded.add(len(batches))
                self._fold_time.record(self._clock.monotonic_s() - begun_s)
            return until < last

        return committed

    def _show_nothing(self) -> bool:
        self._gauges.clear()
        return False

    async def _look(self, connection: Connection, now_s: float) -> None:
        """Let the folds know what is so now, beside the batches, where that is due."""
        max_ratio = self._config.monitor.max_loss_ratio
        if now_s >= self._circumstances_due_s:
            self._folds.note(await read_circumstances(connection, max_ratio))
            self._servings = await servings(connection, max_ratio)
            self._circumstances_due_s = now_s + _CIRCUMSTANCES_S
        if now_s >= self._shares_due_s:
            for fold in self._folds.folds():
                fold.note_shares(await read_share_hours(connection, fold.share_question()))
            self._shares_due_s = now_s + _SHARES_S

    def _say(self, transitions: Collection[TransitionRow]) -> None:
        catalog = self._folds.catalog
        for transition in transitions:
            _LOG.info(
                "%s -> %s: %s",
                transition.from_verdict,
                transition.to_verdict,
                catalog.slices[transition.slice_id].name,
                extra=of_model(catalog.versions[transition.model_version_id].model),
            )
