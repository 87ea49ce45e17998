"""The damaged slice that a diagnosis or a repair is about: that of an alert, or a named one, with its model, reference and exemplars."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from quantdrift.core.clusters import OTHER_ID, cluster_slice, novel_input
from quantdrift.core.config.schema import Config, Model, Reference, Slice
from quantdrift.core.diagnosable import slice_problem
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Exemplar, ExemplarKind
from quantdrift.core.slices import ALL, SliceKey
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.exemplars import kept_exemplars
from quantdrift.core.stream.rights import NatsRole
from quantdrift.core.text import plain
from quantdrift.release.blocking import wait_for
from quantdrift.release.chosen_model import chosen_reference, model_named, rules_of, slices_named
from quantdrift.release.diagnose.exemplars import exemplars, opener
from quantdrift.release.progress import Watch
from quantdrift.release.setting import Setting
from quantdrift.storage.alerts.alerts import AlertFact, find_alert
from quantdrift.storage.database import Database
from quantdrift.storage.gate import watched_slices


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """A slice, with what is needed to look at it.

    Parameters
    ----------
    rules
        The slice rules of the model.
    version
        The version of the alert; empty: there is no alert.
    problems
        Why exemplars and exchanges cannot be read, so far.
    """

    setting: Setting
    watch: Watch
    config: Config
    model: Model
    slice: SliceKey
    reference: Reference
    rules: tuple[Slice, ...]
    version: str = ""
    problems: list[str] = []

    def exemplars(
        self, *, client_name: str, is_wanted: Callable[[str], bool]
    ) -> tuple[list[Exemplar], list[Exemplar], str]:
        """Return the exemplars of the slice, and random ones of others, all of one version, with this version.

        Parameters
        ----------
        client_name
            The command, as NATS is told.
        is_wanted
            Whether exemplars of another slice are wanted, by its name.
        """
        inside, elsewhere = wait_for(self._read(client_name, is_wanted))
        version = self.version or _most_frequent(inside)
        n_kept = len(inside)
        inside, elsewhere = (
            [exemplar for exemplar in side if exemplar.exchange.stored_version == version]
            for side in (inside, elsewhere)
        )
        if len(inside) < n_kept:
            self.watch.note(
                f"{n_kept - len(inside)} exemplars of other versions are left out: only {plain(version)} counts"
            )
        return inside, elsewhere, version

    def note_unreadable(self) -> None:
        """Tell how many exemplars or exchanges cannot be read, and why the first one cannot."""
        if self.problems:
            self.watch.note(
                f"{len(self.problems)} exemplars or exchanges cannot be read, the first: {plain(self.problems[0])}"
            )

    async def _read(
        self, client_name: str, is_wanted: Callable[[str], bool]
    ) -> tuple[list[Exemplar], list[Exemplar]]:
        config = self.setting.with_stream(self.config, NatsRole.SHADOW)
        opened = opener(config.stream)
        queue = await Queue.connect(config.stream, client_name=client_name, role=NatsRole.SHADOW)

        async def read(name: str, kind: ExemplarKind | None = None) -> list[Exemplar]:
            kept = exemplars(
                queue, self.model.name, name, opened=opened, kind=kind, unreadable=self.problems.append
            )
            return [exemplar async for exemplar in kept]

        try:
            listed = [kept async for kept in kept_exemplars(queue, model=self.model.name)]
            inside = await read(self.slice.name)
            elsewhere = []
            for name in dict.fromkeys(kept.slice for kept in listed):
                if name != self.slice.name and is_wanted(name):
                    elsewhere += await read(name, ExemplarKind.RANDOM)
        finally:
            await queue.close()
        return inside, elsewhere


def damaged(
    setting: Setting,
    watch: Watch,
    *,
    alert: int | None,
    model: str,
    slice_name: str,
    number: int | None,
    is_recorded: bool,
) -> Damaged:
    """Return the slice of an alert, or the named one.

    Parameters
    ----------
    alert
        The number of an alert; None: `model` and `slice_name` are given, an empty model is the only one.
    number
        That of the reference, from 1; None: the only one.
    is_recorded
        Whether recorded inputs are looked at; exemplars know their slice.

    Raises
    ------
    OperatorError
        There is no such slice, or recorded inputs cannot tell it.
    """
    if (alert is None) == (not slice_name):
        raise OperatorError("give either ALERT, the number of an alert, or --slice")
    config, version = setting.config(), ""
    if alert is not None:
        fact, watched = wait_for(_of_alert(setting, config, alert))
        chosen, version = model_named(config, fact.model), fact.version
        key = next((key for key in watched if key.name == fact.slice), None) or _named(
            config, chosen, fact.slice
        )
    else:
        chosen = model_named(config, model)
        key = _named(config, chosen, slice_name)
    if is_recorded and (problem := slice_problem(config, key.where, key.name)):
        raise OperatorError(f"{problem}. Leave --inputs out: exemplars of it, where they are kept, tell")
    _, reference = chosen_reference(chosen, number)
    return Damaged(
        setting=setting,
        watch=watch,
        config=config,
        model=chosen,
        slice=key,
        reference=reference,
        rules=tuple(rules_of(config, chosen)),
        version=version,
    )


def _most_frequent(kept: Sequence[Exemplar]) -> str:
    counts = Counter(exemplar.exchange.stored_version for exemplar in kept)
    return counts.most_common(1)[0][0] if counts else ""


def _named(config: Config, model: Model, name: str) -> SliceKey:
    """Return the slice that `--slice` names: a declared one, or that of a value."""
    keys = slices_named(config, model, rules_of(config, model), name)
    learned = list(_learned(model, name)) if model.embedding else []
    for key in [*keys, *learned]:
        if key.name == name:
            return key
    listed = ", ".join(f"`{key.name}`" for key in keys if key.name != ALL) or "none is declared"
    raise OperatorError(f"--slice {name}: model `{model.name}` has no such slice; known are: {listed}")


def _learned(model: Model, name: str) -> Iterator[SliceKey]:
    """Yield the learned slices that a name may mean."""
    yield novel_input(model.name)
    number = name.partition("=")[2]
    yield cluster_slice(model.name, int(number) if number.isdecimal() else OTHER_ID)


async def _of_alert(setting: Setting, config: Config, alert: int) -> tuple[AlertFact, Sequence[SliceKey]]:
    """Return an alert, and the slices that are watched of its model."""
    async with Database(setting.secrets(config).dsn) as database:
        async with database.begin() as connection:
            fact = await find_alert(connection, alert)
        return fact, await watched_slices(database, fact.model)
