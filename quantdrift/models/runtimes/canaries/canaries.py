"""Canaries: inputs with recorded outputs, which a reference must reproduce.

A set is a safetensors file, so reading one runs no code. It holds `input.NAME` and `output.NAME` by the reference's names,
exactly as one call takes and returns them; for a language model the tensors of `canaries.text`.
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
from quantdrift.core.whole_file import write_whole
from quantdrift.models.runtimes.canaries.text import is_of_text, scored
from quantdrift.models.runtimes.protocol import ReferenceRuntime, SuspectInputError, check_inputs
from quantdrift.models.tensors.arrays import Array, TensorSpec

_INPUT: Final = "input."
_OUTPUT: Final = "output."
_TEXT: Final = np.dtype(object)
_VARYING: Final = 8  # length of random inputs along a dimension that varies, other than that of items
# Types that numpy does not have, a truncated archive, an empty file, and a `.npy` file named `.npz`.
_UNREADABLE: Final = (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile, SafetensorError)


class Canaries(msgspec.Struct, frozen=True, kw_only=True):
    """A set of canaries.

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
    """The deviation of an output from the recorded one.

    Parameters
    ----------
    ratio
        Largest absolute difference over the largest recorded magnitude, in [0, inf]; infinite if the shapes differ or a
        number is not finite.
    worst
        The position of that difference (its first index is the canary) and both numbers, in words; empty if they are equal.
    """

    output: str
    ratio: float
    worst: str = ""


def record(runtime: ReferenceRuntime, inputs: dict[str, Array]) -> Canaries:
    """Return a set of the inputs and the reference's outputs for them.

    Parameters
    ----------
    inputs
        By name, as `ReferenceRuntime.run` takes them; for a language model as `tokenised_canaries` returns them.

    Raises
    ------
    OperatorError
        The reference does not take these inputs, or its outputs are not finite numbers, which cannot be compared.
    RetryError
        Its server is unreachable.
    """
    try:
        recorded = _run(runtime, inputs)
    except QuarantineError as error:
        raise OperatorError(f"the reference does not compute these canaries: {error.detail}") from error
    outputs = {
        name: np.ascontiguousarray(array) for name, array in recorded.items() if array.dtype.kind in "biuf"
    }
    if not outputs:
        raise OperatorError(
            f"the reference returns no numeric outputs for these canaries: {sorted(recorded)}"
        )
    for name, array in outputs.items():
        if not np.isfinite(array).all():
            raise OperatorError(
                f"the reference's `{name}` is not finite for these canaries: use other inputs"
            )
    return Canaries(inputs=inputs, outputs=outputs)


def deviations(runtime: ReferenceRuntime, canaries: Canaries) -> list[Deviation]:
    """Return the deviation from each recorded output, in their order.

    Raises
    ------
    QuarantineError
        The reference does not compute the canaries.
    RetryError
        Its server is unreachable.
    """
    outputs = _run(runtime, canaries.inputs)
    return [
        Deviation(
            output=name, ratio=_ratio(outputs.get(name), recorded), worst=_worst(outputs.get(name), recorded)
        )
        for name, recorded in canaries.outputs.items()
    ]


def canary_problem(runtime: ReferenceRuntime, canaries: Canaries, tolerance: float) -> str:
    """Return how a reference fails to reproduce its canaries, in words; empty if it reproduces them.

    Parameters
    ----------
    tolerance
        Largest accepted `Deviation.ratio`.

    Raises
    ------
    RetryError
        Its server is unreachable.
    """
    try:
        wrong = [deviation for deviation in deviations(runtime, canaries) if not deviation.ratio <= tolerance]
    except QuarantineError as error:
        return f"it does not compute them: {error.detail}"
    except SuspectInputError as error:  # not caused by an exchange
        raise RetryError(str(error)) from error
    return "; ".join(
        f"`{deviation.output}` is off by {deviation.ratio:.2g}, allowed is {tolerance:g}: {deviation.worst}"
        for deviation in wrong
    )


def random_inputs(specs: tuple[TensorSpec, ...], *, n_items: int, seed: int) -> dict[str, Array]:
    """Return random inputs: standard normal numbers, and integers that are 0 or 1, which are valid ids and masks.

    Parameters
    ----------
    n_items
        Length of a first dimension that varies; other dimensions that vary are 8 long.
    seed
        The same seed returns the same inputs.

    Raises
    ------
    OperatorError
        An input is text.
    """
    rng = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for spec in specs:
        if spec.dtype == _TEXT:
            raise OperatorError(f"the reference takes `{spec.name}` as text: canaries hold only numbers")
        shape = [
            (n_items if axis == 0 else _VARYING) if dim is None else dim
            for axis, dim in enumerate(spec.shape)
        ]
        numbers = rng.normal(size=shape) if spec.dtype.kind == "f" else rng.integers(0, 2, size=shape)
        inputs[spec.name] = np.asarray(numbers).astype(spec.dtype)
    return inputs


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
            arrays = {name: archive[name] for name in archive.files}
    except (*_UNREADABLE, MemoryError) as error:
        raise OperatorError(f"{path} cannot be read as safetensors or npz: {error}") from error
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise OperatorError(f"{path} cannot be read as npz: `{others[0]}` in it is no array")
    return arrays


def write_canaries(canaries: Canaries, path: Path, about: Mapping[str, str]) -> None:
    """Write a set, whole or not at all.

    Parameters
    ----------
    canaries
        The set.
    path
        The file to write.
    about
        Description of the recording, for people: it is not checked.

    Raises
    ------
    OperatorError
        It cannot be written.
    """
    arrays = {_INPUT + name: np.ascontiguousarray(array) for name, array in canaries.inputs.items()}
    arrays |= {_OUTPUT + name: array for name, array in canaries.outputs.items()}
    try:
        write_whole(path, save(arrays, dict(about)))
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error


def read_canaries(path: Path) -> Canaries:
    """Return the set that `write_canaries` wrote.

    Raises
    ------
    OperatorError
        It cannot be read, or is not a set of canaries.
    """
    try:
        content = path.read_bytes()
        arrays = load(content)
    except OSError as error:
        raise OperatorError(f"models.references.canaries {path} cannot be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise OperatorError(
            f"models.references.canaries {path} is not a safetensors file: {error}"
        ) from error
    inputs, outputs = (
        {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
        for kind in (_INPUT, _OUTPUT)
    )
    if not outputs or len(inputs) + len(outputs) < len(arrays):
        raise OperatorError(
            f"models.references.canaries {path} is not a set of canaries: make one with `quantdrift reference record`"
        )
    return Canaries(inputs=inputs, outputs=outputs, digest=hashlib.sha256(content).hexdigest())


def _run(runtime: ReferenceRuntime, inputs: dict[str, Array]) -> dict[str, Array]:
    if is_of_text(runtime):
        return scored(runtime, inputs)
    check_inputs(inputs, runtime.inputs)
    return runtime.run(inputs)


def _worst(output: Array | None, recorded: Array) -> str:
    if output is None or output.dtype.kind not in "biuf":
        return "it gives no such numbers"
    if output.shape != recorded.shape:
        return f"it gives {list(output.shape)}, recorded is {list(recorded.shape)}"
    difference = np.abs(output.astype(np.float64) - recorded.astype(np.float64))
    if not difference.any():
        return ""
    # NaN counts as an infinite difference.
    position = np.unravel_index(
        np.argmax(np.where(np.isnan(difference), np.inf, difference)), difference.shape
    )
    at = ", ".join(map(str, map(int, position)))
    return f"at [{at}] it gives {float(output[position]):.8g}, recorded is {float(recorded[position]):.8g}"


def _ratio(output: Array | None, recorded: Array) -> float:
    if output is None or output.shape != recorded.shape or output.dtype.kind not in "biuf":
        return float("inf")
    difference = np.abs(output.astype(np.float64) - recorded.astype(np.float64))
    if not difference.size:
        return 0.0
    worst = float(difference.max())
    largest = float(np.abs(recorded.astype(np.float64)).max())
    if worst == 0:
        return 0.0
    ratio = worst / largest if largest else float("inf")
    return ratio if ratio == ratio else float("inf")  # noqa: PLR0124 - NaN counts as an infinite difference
