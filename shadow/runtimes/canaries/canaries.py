"""Canaries: inputs whose outputs were recorded, which a reference must reproduce to be taken for what it says.

A set is a safetensors file, so reading one runs nothing. It holds `input.NAME` and `output.NAME` by the reference's names,
exactly as one call takes and gives them; of a language model what `text_canaries` makes of them.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from zipfile import BadZipFile

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.shadow.runtimes.canaries.text import is_of_text, scored
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime, SuspectInputError, check_given
from quantdrift.shadow.tensors.arrays import Array, TensorSpec

_INPUT: Final = "input."
_OUTPUT: Final = "output."
_TEXT: Final = np.dtype(object)
_VARYING: Final = 8  # what a dimension that varies is drawn with, beside that of items
# Types that numpy has not, an archive that was cut off, an empty file, and a `.npy` that is called `.npz`.
_UNREADABLE: Final = (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile, SafetensorError)


class Canaries(msgspec.Struct, frozen=True, kw_only=True):
    """A set.

    Parameters
    ----------
    inputs, outputs
        By the reference's names; outputs are finite numbers.
    digest
        SHA-256 of the file, in hexadecimal.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    digest: str = ""


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """How far an output is from what was recorded.

    Parameters
    ----------
    output
        Its name.
    ratio
        Largest absolute difference over the largest recorded magnitude, in [0, inf]; infinite where the shape is another
        one or a number is not finite.
    worst
        Where that is, the first place being that of the canary, and both numbers, in words; empty where nothing differs.
    """

    output: str
    ratio: float
    worst: str = ""


def record(runtime: ReferenceRuntime, inputs: dict[str, Array]) -> Canaries:
    """Return inputs with what a reference gives for them.

    Parameters
    ----------
    runtime
        The reference.
    inputs
        By name, as `ReferenceRuntime.run` takes them; of a language model as `tokens_of` gives them.

    Raises
    ------
    OperatorError
        It does not take these inputs, or gives no numbers or none that are finite: those could not be held against
        anything.
    RetryError
        What computes is away for now.
    """
    try:
        found = _run(runtime, inputs)
    except QuarantineError as error:
        raise OperatorError(f"the reference does not compute these canaries: {error.detail}") from error
    outputs = {
        name: np.ascontiguousarray(array) for name, array in found.items() if array.dtype.kind in "biuf"
    }
    if not outputs:
        raise OperatorError(f"the reference gives no numbers for these canaries: {sorted(found)}")
    for name, array in outputs.items():
        if not np.isfinite(array).all():
            raise OperatorError(
                f"the reference's `{name}` is not finite for these canaries: take other inputs"
            )
    return Canaries(inputs=inputs, outputs=outputs)


def deviations(runtime: ReferenceRuntime, canaries: Canaries) -> list[Deviation]:
    """Return how far a reference is from each recorded output, in their order.

    Raises
    ------
    QuarantineError
        It does not compute them.
    RetryError
        What computes is away for now.
    """
    found = _run(runtime, canaries.inputs)
    return [
        Deviation(
            output=name, ratio=_ratio(found.get(name), recorded), worst=_worst(found.get(name), recorded)
        )
        for name, recorded in canaries.outputs.items()
    ]


def trouble(runtime: ReferenceRuntime, canaries: Canaries, tolerance: float) -> str:
    """Return how a reference fails to reproduce its canaries, in words; empty where it does.

    Parameters
    ----------
    runtime, canaries
        As for `deviations`.
    tolerance
        Largest `Deviation.ratio` that is accepted.

    Raises
    ------
    RetryError
        What computes is away for now.
    """
    try:
        off = [one for one in deviations(runtime, canaries) if not one.ratio <= tolerance]
    except QuarantineError as error:
        return f"it does not compute them: {error.detail}"
    except SuspectInputError as error:  # no exchange is to blame
        raise RetryError(str(error)) from error
    return "; ".join(
        f"`{one.output}` is off by {one.ratio:.2g}, allowed is {tolerance:g}: {one.worst}" for one in off
    )


def drawn(specs: tuple[TensorSpec, ...], *, n_items: int, seed: int) -> dict[str, Array]:
    """Return random inputs: standard normal numbers, and integers that are 0 or 1, which are ids as well as masks.

    Parameters
    ----------
    specs
        The reference's inputs.
    n_items
        Length of a first dimension that varies; other dimensions that vary are 8 long.
    seed
        Gives the same again.

    Raises
    ------
    OperatorError
        An input is text.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for spec in specs:
        if spec.dtype == _TEXT:
            raise OperatorError(f"the reference takes `{spec.name}` as text: canaries hold numbers alone")
        shape = [
            (n_items if place == 0 else _VARYING) if dim is None else dim
            for place, dim in enumerate(spec.shape)
        ]
        numbers = rng.normal(size=shape) if spec.dtype.kind == "f" else rng.integers(0, 2, size=shape)
        found[spec.name] = np.asarray(numbers).astype(spec.dtype)
    return found


def read_inputs(path: Path) -> dict[str, Array]:
    """Return the arrays of a `.safetensors` or `.npz` file by name; nothing in it is run.

    Raises
    ------
    OperatorError
        It cannot be read, or holds what is no array.
    """
    try:
        if path.suffix != ".npz":
            return dict(load(path.read_bytes()))
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except _UNREADABLE as error:
        raise OperatorError(f"{path} cannot be read as safetensors or npz: {error}") from error


def write_canaries(canaries: Canaries, path: Path, about: Mapping[str, str]) -> None:
    """Write a set, whole or not at all.

    Parameters
    ----------
    canaries
        The set.
    path
        Where to.
    about
        What it was recorded with, for people: it is not checked.

    Raises
    ------
    OperatorError
        It cannot be written.
    """
    arrays = {_INPUT + name: np.ascontiguousarray(array) for name, array in canaries.inputs.items()}
    arrays |= {_OUTPUT + name: array for name, array in canaries.outputs.items()}
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_bytes(save(arrays, dict(about)))
        unfinished.replace(path)
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error


def read_canaries(path: Path) -> Canaries:
    """Return the set that `write_canaries` wrote.

    Raises
    ------
    OperatorError
        It cannot be read, or is no such set.
    """
    try:
        content = path.read_bytes()
        arrays = load(content)
    except OSError as error:
        raise OperatorError(f"models.references.canaries {path} cannot be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise OperatorError(f"models.references.canaries {path} is no safetensors file: {error}") from error
    inputs, outputs = (
        {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
        for kind in (_INPUT, _OUTPUT)
    )
    if not outputs or len(inputs) + len(outputs) < len(arrays):
        raise OperatorError(
            f"models.references.canaries {path} is no set of canaries: make one with `quantdrift reference record`"
        )
    return Canaries(inputs=inputs, outputs=outputs, digest=hashlib.sha256(content).hexdigest())


def _run(runtime: ReferenceRuntime, inputs: dict[str, Array]) -> dict[str, Array]:
    if is_of_text(runtime):
        return scored(runtime, inputs)
    check_given(inputs, runtime.inputs)
    return runtime.run(inputs)


def _worst(found: Array | None, recorded: Array) -> str:
    if found is None or found.dtype.kind not in "biuf":
        return "it gives no such numbers"
    if found.shape != recorded.shape:
        return f"it gives {list(found.shape)}, recorded is {list(recorded.shape)}"
    difference = np.abs(found.astype(np.float64) - recorded.astype(np.float64))
    if not difference.any():
        return ""
    # What is not a number is as far as can be.
    place = np.unravel_index(np.argmax(np.where(np.isnan(difference), np.inf, difference)), difference.shape)
    at = ", ".join(map(str, map(int, place)))
    return f"at [{at}] it gives {float(found[place]):.8g}, recorded is {float(recorded[place]):.8g}"


def _ratio(found: Array | None, recorded: Array) -> float:
    if found is None or found.shape != recorded.shape or found.dtype.kind not in "biuf":
        return float("inf")
    difference = np.abs(found.astype(np.float64) - recorded.astype(np.float64))
    if not difference.size:
        return 0.0
    worst = float(difference.max())
    largest = float(np.abs(recorded.astype(np.float64)).max())
    if worst == 0:
        return 0.0
    ratio = worst / largest if largest else float("inf")
    return ratio if ratio == ratio else float("inf")  # noqa: PLR0124 - not a number is as far as can be
