"""The damaged slice that a command is about: that of an alert, or the one of `--slice`, with its model and reference."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.embedded_nats import at_data
from quantdrift.cli.options import prepare
from quantdrift.cli.reference import chosen_reference, model_named
from quantdrift.core.config.load import Role, load
from quantdrift.core.config.schema import Config, Model, Reference, Slice
from quantdrift.core.diagnosable import repair_problem, slice_problem
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, attribute_key
from quantdrift.core.text import plain

if TYPE_CHECKING:
    from quantdrift.core.records import Exemplar

MODEL = click.option("--model", "name", default="", help="Without ALERT: the model.  [default: the only one]")
SLICE = click.option(
    "--slice", "slice_name", default="", help="Without ALERT: the slice, such as scanner=archive."
)


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """A slice, with what is needed to look at it.

    Parameters
    ----------
    config
        The configuration.
    model
        The model.
    slice
        The slice.
    reference
        The model's reference.
    rules
        The slice rules of the model.
    version
        The version of the alert; empty: there is no alert.
    """

    config: Config
    model: Model
    slice: SliceKey
    reference: Reference
    rules: tuple[Slice, ...]
    version: str = ""

    @property
    def onnx(self) -> Path:
        """The ONNX file of the reference.

        Raises
        ------
        OperatorError
            It is not an ONNX file.
        """
        if problem := repair_problem(self.model, self.reference):
            raise OperatorError(problem)
        return Path(self.reference.path)


def damaged(
    config_path: Path,
    data: Path | None,
    *,
    alert_id: int | None,
    name: str,
    slice_name: str,
    number: int | None,
) -> Damaged:
    """Return the slice of an alert, or of the options of a command.

    Parameters
    ----------
    config_path, data
        As given.
    alert_id
        The number of an alert; None: not given.
    name, slice_name
        The options `--model` and `--slice`; empty: not given.
    number
        The option `--reference`; None: not given.

    Raises
    ------
    OperatorError
        There is no such slice, or recorded inputs cannot tell it.
    """
    if (alert_id is None) == (not slice_name):
        raise OperatorError("give either ALERT, the number of an alert, or --slice")
    if alert_id is not None:
        config, model, chosen, version = _of_alert(config_path, data, alert_id)
    else:
        config = load(config_path)
        model, version = _model(config, name), ""
        chosen = _named(config, model, slice_name)
    if problem := slice_problem(config, chosen.where, chosen.name):
        raise OperatorError(problem)
    _, reference = chosen_reference(model, number)
    rules = tuple(rule for rule in config.slices if rule.model in ("", model.name))
    return Damaged(
        config=config, model=model, slice=chosen, reference=reference, rules=rules, version=version
    )


def exemplars_of(
    case: Damaged,
    data: Path | None,
    problems: list[str],
    *,
    client_name: str,
    is_wanted: Callable[[str], bool],
) -> "tuple[list[Exemplar], list[Exemplar], str]":
    """Return the exemplars of the slice, and random ones of others, all of one version, with this version.

    Parameters
    ----------
    case, data
        The slice, and the data directory as given.
    problems
        Gets why exemplars cannot be read.
    client_name
        The command, as NATS is told.
    is_wanted
        Whether exemplars of another slice are wanted, by its name.
    """
    found, others = asyncio.run(_read_exemplars(case, data, problems, client_name, is_wanted))
    version = case.version or _most_frequent(found)
    n_kept = len(found)
    found, others = (
        [one for one in side if one.exchange.stored_version == version] for side in (found, others)
    )
    if len(found) < n_kept:
        click.echo(
            f"{n_kept - len(found)} exemplars of other versions are left out: only {plain(version)} counts",
            err=True,
        )
    return found, others, version


def say_unreadable(problems: Sequence[str]) -> None:
    """Say how many exemplars or exchanges cannot be read, and why the first one cannot."""
    if problems:
        click.echo(
            f"{len(problems)} exemplars or exchanges cannot be read, the first: {plain(problems[0])}",
            err=True,
        )


def _most_frequent(found: "Sequence[Exemplar]") -> str:
    counts = Counter(one.exchange.stored_version for one in found)
    return counts.most_common(1)[0][0] if counts else ""


async def _read_exemplars(
    case: Damaged,
    data: Path | None,
    problems: list[str],
    client_name: str,
    is_wanted: Callable[[str], bool],
) -> "tuple[list[Exemplar], list[Exemplar]]":
    from quantdrift.core.records import ExemplarKind
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.exemplars import kept_exemplars
    from quantdrift.core.stream.rights import NatsRole
    from quantdrift.shadow.repair.exemplars import exemplars, opener

    config = at_data(case.config, data, NatsRole.SHADOW)
    opened = opener(config.stream)
    queue = await Queue.connect(config.stream, client_name=client_name, role=NatsRole.SHADOW)
    try:
        listed = [one async for one in kept_exemplars(queue, model=case.model.name)]
        names = dict.fromkeys(one.slice for one in listed)
        found = exemplars(queue, case.model.name, case.slice.name, opened=opened, unreadable=problems.append)
        inside = [one async for one in found]
        elsewhere = []
        for name in names:
            if name != case.slice.name and is_wanted(name):
                others = exemplars(
                    queue,
                    case.model.name,
                    name,
                    opened=opened,
                    kind=ExemplarKind.RANDOM,
                    unreadable=problems.append,
                )
                elsewhere += [one async for one in others]
        return inside, elsewhere
    finally:
        await queue.close()


def _model(config: Config, name: str) -> Model:
    if name:
        return model_named(config, name)
    if len(config.models) != 1:
        raise OperatorError(f"the configuration has {len(config.models)} models: choose one with --model")
    return config.models[0]


def _named(config: Config, model: Model, name: str) -> SliceKey:
    """Return the slice that `--slice` names: a declared one, or that of a value."""
    rules = tuple(rule for rule in config.slices if rule.model in ("", model.name))
    assigner = SliceAssigner(msgspec.structs.replace(config, slices=rules), model.name)
    of, _, value = name.partition("=")
    attributes = {
        attribute_key(rule): value for rule in rules if rule.name == of and not (rule.feature or rule.cross)
    }
    known = dict.fromkeys([*assigner.declared(), *assigner.assign(attributes, {})])
    for key in known:
        if key.name == name:
            return key
    listed = ", ".join(f"`{key.name}`" for key in known if key.name != ALL) or "none is declared"
    raise OperatorError(f"--slice {name}: model `{model.name}` has no such slice; known are: {listed}")


def _of_alert(config_path: Path, data: Path | None, alert_id: int) -> tuple[Config, Model, SliceKey, str]:
    """Return the model, the slice and the version of an alert."""
    from quantdrift.storage.database import Database
    from quantdrift.storage.gate import watched_slices
    from quantdrift.storage.monitor.alerts import AlertFact, find_alert

    config, secrets = prepare(config_path, Role.REPORT, data)

    async def ask() -> tuple[AlertFact, Sequence[SliceKey]]:
        async with Database(secrets.dsn) as database:
            async with database.begin() as connection:
                alert = await find_alert(connection, alert_id)
            return alert, await watched_slices(database, alert.model)

    alert, watched = asyncio.run(ask())
    model = model_named(config, alert.model)
    chosen = next((key for key in watched if key.name == alert.slice), None)
    return config, model, chosen or _named(config, model, alert.slice), alert.version
