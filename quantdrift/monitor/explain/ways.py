"""What can be done about an alert in this installation: which traffic a proxy can route away, and which commands work."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from quantdrift.core.config.schema import Config
from quantdrift.core.diagnosable import NextCommands, next_commands
from quantdrift.core.records import Predicate
from quantdrift.core.signals import signal_of
from quantdrift.core.slices import TIME
from quantdrift.facts.events import AlertEvent
from quantdrift.facts.words.steps import Ways
from quantdrift.storage.alerts.alerts import AlertFact
from quantdrift.storage.fold_rows import Catalog, TransitionRow

_AT_A_PROXY: Final = ("header.", "parameter.", TIME)


def ways_with(config: Config, catalog: Catalog) -> Callable[[TransitionRow, int], Ways]:
    """Return the function that returns the ways of an alert by its event and its number."""
    return partial(_ways, config, catalog)


def _ways(config: Config, catalog: Catalog, row: TransitionRow, alert_id: int) -> Ways:
    event, where = row.alert, catalog.slices[row.slice_id].where
    commands = {
        command.text.split()[1]: command.text
        for command in _commands(config, alert_id, event, where).commands
    }
    return Ways(
        alert_id=alert_id,
        can_route=can_route(where),
        previous=event.explanation.compared_version or "",
        diagnose=commands.get("diagnose", ""),
        repair=commands.get("repair", ""),
    )


def can_route(where: Sequence[Predicate]) -> bool:
    """Return whether a proxy can recognise the requests of a slice: by headers, parameters and the time, not by a rest of values."""
    return all(
        part.key.startswith(_AT_A_PROXY) and (part.equals, part.low, part.high) != (None, None, None)
        for part in where
    )


def commands_of(
    config: Config,
    alert: AlertFact,
    where: Sequence[Predicate],
    known: Collection[str],
    options: str = "",
) -> NextCommands:
    """Return the commands that work for an alert; parameters as in `quantdrift.core.diagnosable.next_commands`."""
    if alert.event is None:
        return NextCommands()
    return _commands(config, alert.id, alert.event, where, known=known, options=options)


def _commands(
    config: Config,
    alert_id: int,
    event: AlertEvent,
    where: Sequence[Predicate],
    *,
    known: Collection[str] = (),
    options: str = "",
) -> NextCommands:
    if signal_of(event.evidence.metric).is_about_speed:
        return NextCommands()  # they look at answers
    return next_commands(
        config,
        alert_id=alert_id,
        model=event.slice.model,
        version=event.slice.version,
        slice_name=event.slice.name,
        where=where,
        build=event.build,
        known=known,
        options=options,
    )
