"""The command `quantdrift reference`: record canaries, and check references against them."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, emit
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config, Model, Reference
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.text import columns
from quantdrift.release.chosen_model import chosen_reference, model_named

if TYPE_CHECKING:
    from quantdrift.models.runtimes.canaries.canaries import Deviation
    from quantdrift.models.runtimes.protocol import ReferenceRuntime
    from quantdrift.models.tensors.arrays import Array

_MAY_PASS, _MUST_ACT = 1, 2
REFERENCE = click.option(
    "--reference", "number", type=click.IntRange(min=1), help="Number of the reference of the model, from 1."
)


class CheckOutcome(StrEnum):
    """Outcome of checking a reference against its canaries."""

    REPRODUCED = "reproduced"
    FAILED = "failed"
    AWAY = "away"  # its server does not answer
    NONE = "no canaries"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """Result of checking one reference.

    Parameters
    ----------
    tolerance
        Highest allowed deviation.
    deviations
        By output: largest difference divided by largest magnitude; null if it is not finite.
    detail
        What was wrong, in words.
    """

    model: str
    number: int
    where: str
    outcome: CheckOutcome
    tolerance: float
    deviations: dict[str, float] = {}
    detail: str = ""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded canaries of one reference.

    Parameters
    ----------
    inputs, outputs
        Type and shape by name.
    """

    model: str
    number: int
    where: str
    file: str
    inputs: dict[str, str]
    outputs: dict[str, str]


@click.group("reference")
def reference_() -> None:
    """Record canaries (inputs with expected outputs) of references, and check references against them."""


@reference_.command("record")
@CONFIG
@click.argument("name", metavar="MODEL")
@REFERENCE
@click.option(
    "--inputs",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Inputs by name, .safetensors or .npz; for a language model prompts and answers, .jsonl.  [default: random]",
)
@click.option("--seed", default=1, show_default=True, help="Seed of random inputs.")
@click.option(
    "--items", default=8, show_default=True, help="Number of random items.", type=click.IntRange(min=1)
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The .safetensors file to write.",
)
@JSON
def record_(
    config_path: Path,
    name: str,
    number: int | None,
    inputs: Path | None,
    seed: int,
    items: int,
    out: Path,
    as_json: bool,
) -> None:
    """Record canaries: inputs and the outputs that the reference of MODEL gives for them.

    Record them from a reference that you trust, such as the FP32 file, and not from the server that they shall check.
    Random inputs are standard normal numbers, integers 0 or 1, or random words for a language model. Real inputs test
    more of a model.

    \b
    Example:
      quantdrift reference record digits --out digits-canaries.safetensors
    """
    from quantdrift.models.runtimes.canaries.canaries import record, write_canaries

    config = load(config_path)
    model = model_named(config, name)
    number_used, reference = chosen_reference(model, number)
    from quantdrift.models.runtimes.registry import opened_reference

    runtime = opened_reference(config, model, reference)
    try:
        canaries = record(runtime, _given(runtime, inputs, n_items=items, seed=seed))
        about = {
            "reference": runtime.artefact.digest,
            "precision": runtime.artefact.precision,
            "runtime": f"{runtime.provenance.runtime} {runtime.provenance.version}",
            "device": runtime.provenance.device,
        }
    finally:
        runtime.close()
    write_canaries(canaries, out, about)
    recorded = Recorded(
        model=name,
        number=number_used,
        where=reference.where(name),
        file=str(out),
        inputs={name: f"{array.dtype}{list(array.shape)}" for name, array in canaries.inputs.items()},
        outputs={name: f"{array.dtype}{list(array.shape)}" for name, array in canaries.outputs.items()},
    )
    if as_json:
        emit(recorded)
        return
    click.echo(f"recorded {recorded.where}: {_listed(recorded.inputs)} -> {_listed(recorded.outputs)}")
    named = os.path.relpath(out, config_path.parent)  # as the configuration names its files
    click.echo(f'To check a reference against them, set canaries = "{named}" in its [[models.references]]')


@reference_.command("check")
@CONFIG
@click.argument("name", metavar="[MODEL]", required=False)
@REFERENCE
@JSON
def check(config_path: Path, name: str | None, number: int | None, as_json: bool) -> None:
    """Check references against their canaries: all references, or those of MODEL.

    Exit code 2 if a reference does not reproduce them or cannot be opened, 1 if a server is unavailable.

    \b
    Example:
      quantdrift reference check digits --reference 2
    """
    config = load(config_path)
    if number is not None and name is None:
        raise OperatorError("--reference needs MODEL: it is the number of one of its references")
    models = [model_named(config, name)] if name else config.models
    checked = [
        _checked(config, model, reference, own_number)
        for model in models
        for own_number, reference in enumerate(model.references, start=1)
        if number in {None, own_number}
    ]
    if number is not None and not checked:
        raise OperatorError(f"model `{name}` has {len(models[0].references)} references")
    if as_json:
        emit({"references": checked})
    else:
        click.echo(columns(("model", "reference", "canaries", "off by"), map(_row, checked)))
    outcomes = {result.outcome for result in checked}
    if outcomes & {CheckOutcome.FAILED, CheckOutcome.AWAY}:
        sys.exit(_MUST_ACT if CheckOutcome.FAILED in outcomes else _MAY_PASS)


def _checked(config: Config, model: Model, reference: Reference, number: int) -> Checked:
    result = Checked(
        model=model.name,
        number=number,
        where=reference.where(model.name),
        outcome=CheckOutcome.NONE,
        tolerance=reference.canary_tolerance,
    )
    if not reference.canaries:
        return result
    try:
        deviations = _deviations(config, model, reference)
    except RetryError as error:
        return msgspec.structs.replace(result, outcome=CheckOutcome.AWAY, detail=str(error))
    except (OperatorError, QuarantineError) as error:
        return msgspec.structs.replace(result, outcome=CheckOutcome.FAILED, detail=str(error))
    reproduced = all(deviation.ratio <= result.tolerance for deviation in deviations)
    return msgspec.structs.replace(
        result,
        outcome=CheckOutcome.REPRODUCED if reproduced else CheckOutcome.FAILED,
        deviations={deviation.output: deviation.ratio for deviation in deviations},
        detail="" if reproduced else max(deviations, key=lambda deviation: deviation.ratio).worst,
    )


def _given(runtime: "ReferenceRuntime", path: Path | None, *, n_items: int, seed: int) -> "dict[str, Array]":
    """Return the inputs in a file, or random ones."""
    from quantdrift.models.runtimes.canaries.canaries import random_inputs, read_inputs
    from quantdrift.models.runtimes.canaries.text import (
        is_of_text,
        random_texts,
        read_texts,
        tokenised_canaries,
    )

    if path is not None and path.suffix == ".jsonl":
        return tokenised_canaries(runtime, read_texts(path))
    if path is not None:
        return read_inputs(path)
    if is_of_text(runtime):
        return tokenised_canaries(runtime, random_texts(n_items=n_items, seed=seed))
    return random_inputs(runtime.inputs, n_items=n_items, seed=seed)


def _deviations(config: Config, model: Model, reference: Reference) -> "list[Deviation]":
    from quantdrift.models.runtimes.canaries.canaries import deviations, read_canaries

    canaries = read_canaries(Path(reference.canaries))
    from quantdrift.models.runtimes.registry import opened_reference

    runtime = opened_reference(config, model, reference)
    try:
        return deviations(runtime, canaries)
    finally:
        runtime.close()


def _row(result: Checked) -> tuple[str, str, str, str]:
    worst = max(result.deviations.values(), default=None)
    deviation = [] if worst is None else [f"{worst:.2g}, allowed is {result.tolerance:g}"]
    deviation += [result.detail] if result.detail else []
    return result.model, f"{result.number}: {result.where}", result.outcome.value, ": ".join(deviation)


def _listed(tensors: dict[str, str]) -> str:
    return ", ".join(f"{name} {what}" for name, what in tensors.items())
