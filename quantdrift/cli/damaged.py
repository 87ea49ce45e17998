"""The damaged slice that a command is about: that of an alert, or the one of `--slice`, with its model and reference."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quantdrift.cli.options import prepare
from quantdrift.cli.reference import chosen_reference, model_named
from quantdrift.core.config.load import Role, load
from quantdrift.core.config.schema import Config, Model, Reference, Runtime, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, attribute_key


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
        if self.reference.runtime is not Runtime.ONNX:
            raise OperatorError(
                f"the reference of model `{self.model.name}` is not an ONNX file, and only ONNX files are repaired. What is left:"
                " serve the slice by the reference, or roll the candidate back"
            )
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
    from quantdrift.shadow.gate.found import is_judged

    if (alert_id is None) == (not slice_name):
        raise OperatorError("give either ALERT, the number of an alert, or --slice")
    if alert_id is not None:
        config, model, chosen, version = _of_alert(config_path, data, alert_id)
    else:
        config = load(config_path)
        model, version = _model(config, name), ""
        chosen = _named(config, model, slice_name)
    if not is_judged(config, chosen):
        raise OperatorError(
            f"recorded inputs do not tell which items belong to the slice {chosen.name}: it is learned, or has the rest of the values"
        )
    _, reference = chosen_reference(model, number)
    rules = tuple(rule for rule in config.slices if rule.model in ("", model.name))
    return Damaged(
        config=config, model=model, slice=chosen, reference=reference, rules=rules, version=version
    )


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
