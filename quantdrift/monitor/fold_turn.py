"""One turn of the fold of some models: read what waits and fold it; write what has come of it where that is due, in one transaction.

A turn that is not written costs only what its exchanges cost; the states of many slices are then written once for several turns. All rows
of a model are written together with its position. So whoever begins anew, after a kill or in another process, folds what was not written
again, with the same result. What is sent is never held back: an alert that opens, changes or ends is written with its turn.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
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
from quantdrift.storage.fold_rows import BatchRows, FoldResult, Position, TransitionRow
from quantdrift.storage.incidents.incidents import mitigated_slices
from quantdrift.storage.serving import servings

BATCHES_AT_ONCE: Final = 1_024
ROWS_AT_ONCE: Final = 4_096
"""A turn takes batches until one of the two is reached: what it costs besides is then little for each exchange, however small the batches are."""
TURNS_UNWRITTEN: Final = 4
"""Turns of that size whose result waits in memory, while more batches wait: a monitor that was killed folds them again within seconds."""
_SUMS_UNWRITTEN: Final = 32_768  # what a turn of eight slices an exchange can have at most
LONGEST_UNWRITTEN_S: Final = 5.0
"""States, and verdicts that nothing is sent of, are written after so long at the latest, by a monitor that keeps up."""
WRITING_SHARE: Final = 0.05
"""Of its time that a monitor that keeps up spends on writing, at most: with few slices each turn is written."""
_WRITING_SHARE_OF_BACKLOG: Final = 0.2
"""Of its time in a backlog: on a busy machine one turn can take five seconds, and would be written each time."""
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


class _Unwritten:
    """How much was folded since the last writing.

    Attributes
    ----------
    anything
        Whether anything is to be written of it.
    looked
        Whether something was looked at beside the batches, which may have changed verdicts.
    """

    def __init__(self) -> None:
        self.n_batches = 0
        self.n_rows = 0
        self.anything = False
        self.looked = False

    def add(self, batches: Sequence[BatchRows], *, anything: bool) -> None:
        """Add what was folded in one turn."""
        self.n_batches += len(batches)
        self.n_rows += sum(rows.n_rows for rows in batches)
        self.anything |= anything


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
        self._unwritten = _Unwritten()
        self._written_s = clock.monotonic_s()
        self._writing_s = 0.0
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
        self._unwritten = _Unwritten()

    async def fold(
        self, connection: Connection, models: Collection[str], last: int, *, more: bool = False
    ) -> Callable[[], bool]:
        """Fold what waits of models, up to a limit, inside a transaction.

        Parameters
        ----------
        last
            Last batch that has a number.
        more
            Whether further batches wait for a number.

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
        after = folds.after
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
        looked = await self._look(connection, begun_s)
        for batch in batches:
            with self._processor_time.part("fold"):
                folds.batch(batch)
            self._progress()
            # A probe of the admin port, and the renewal of the lease, wait for one batch at most.
            await asyncio.sleep(0)
        folds.skip(until)
        # Positions, too, where others' batches were passed over: a fold that is ahead of what is stored counts as lost.
        came = bool(batches or new or until > after)
        self._unwritten.add(batches, anything=came)
        self._unwritten.looked |= looked
        decided = any(rows.decisions or rows.slices or rows.closes for rows in batches)
        writes = bool(new) or decided or folds.has_news or self._is_due(waits=more or until < last)
        transitions = await self._write(connection, positions) if writes else ()
        # While a result waits to be written, the gauges show what is stored.
        shows = writes or (not self._unwritten.anything and (came or looked))
        mitigated = await mitigated_slices(connection) if shows else {}

        def committed() -> bool:
            if writes:
                folds.stored()
            if shows:
                self._gauges.show(folds.current(), folds.catalog, folds.floors(), mitigated, self._servings)
            self._say(transitions)
            self._processor_time.answered(sum(len(batch.comparisons) for batch in batches))
            if batches:
                self._folded.add(len(batches))
                self._fold_time.record(self._clock.monotonic_s() - begun_s)
            return until < last

        return committed

    async def finish(self, connection: Connection) -> None:
        """Write what was folded and is not written yet, inside a transaction, before the process ends.

        A release that knows one position for all models goes on behind the last number.
        """
        if not self._unwritten.anything:
            return
        positions = await lock_positions(connection, self._folds.models)
        self._folds.keep(positions)
        if self._folds.models:
            await self._write(connection, positions)

    def _is_due(self, *, waits: bool) -> bool:
        """Return whether what was folded is to be written now, although nothing is to be sent.

        Parameters
        ----------
        waits
            Whether more batches wait to be folded.
        """
        unwritten = self._unwritten
        if not (unwritten.anything or unwritten.looked):
            return False
        if (
            unwritten.n_batches >= TURNS_UNWRITTEN * BATCHES_AT_ONCE
            or unwritten.n_rows >= TURNS_UNWRITTEN * ROWS_AT_ONCE
            or self._folds.n_sums >= _SUMS_UNWRITTEN
        ):
            return True
        if waits:
            longest_s = max(LONGEST_UNWRITTEN_S, self._writing_s / _WRITING_SHARE_OF_BACKLOG)
        else:
            longest_s = min(LONGEST_UNWRITTEN_S, self._writing_s / WRITING_SHARE)
        return self._clock.monotonic_s() - self._written_s >= longest_s

    async def _write(
        self, connection: Connection, positions: Mapping[str, Position]
    ) -> Sequence[TransitionRow]:
        """Write what has come of all that was folded since the last time; return the changes of verdict.

        Parameters
        ----------
        positions
            As they are stored.
        """
        begun_s = self._clock.monotonic_s()
        folds = self._folds
        outcomes: dict[str, FoldResult] = {}
        for model, outcome in folds.take():
            outcomes[model] = await self._explainer.explain(Evidence(connection), outcome, folds.catalog)
            self._progress()
            await asyncio.sleep(0)
        if self._unwritten.anything or any(outcome.verdicts for outcome in outcomes.values()):
            with self._processor_time.part("write"):
                await write_models(
                    connection,
                    outcomes,
                    positions,
                    self._config.telemetry.trace_url,
                    webhook=bool(self._config.notify.webhook_url),
                    ways=ways_with(self._config, folds.catalog),
                )
        self._progress()
        self._unwritten = _Unwritten()
        self._written_s = self._clock.monotonic_s()
        self._writing_s = self._written_s - begun_s
        return [row for outcome in outcomes.values() for row in outcome.transitions]

    def _show_nothing(self) -> bool:
        self._gauges.clear()
        return False

    async def _look(self, connection: Connection, now_s: float) -> bool:
        """Let the folds know what is so now, beside the batches, where that is due; return whether it was."""
        is_due = now_s >= min(self._circumstances_due_s, self._shares_due_s)
        max_ratio = self._config.monitor.max_loss_ratio
        if now_s >= self._circumstances_due_s:
            self._folds.note(await read_circumstances(connection, max_ratio))
            self._servings = await servings(connection, max_ratio)
            self._circumstances_due_s = now_s + _CIRCUMSTANCES_S
        if now_s >= self._shares_due_s:
            for fold in self._folds.folds():
                fold.note_shares(await read_share_hours(connection, fold.share_question()))
            self._shares_due_s = now_s + _SHARES_S
        return is_due

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
