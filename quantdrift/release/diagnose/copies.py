"""What a diagnosis needs of a copy of a candidate whose sites can be switched to FP32."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from quantdrift.core.errors import OperatorError
from quantdrift.models.comparators.protocol import Divergences, Flags
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.sites import Site, Weight

_MASK: Final = "attention_mask"
_TINY: Final = 1e-30
AGREEMENT: Final = 0.999
"""Smallest share of equal decisions of copy and candidate with which the copy says anything about the candidate."""
CLOSENESS: Final = 1e-4
"""Largest difference of the copy in FP32 from the reference, relative to the largest output."""


class Copy(Protocol):
    """A copy of a candidate in which each site can be switched to FP32.

    With all sites in FP32 it must compute what the reference computes; with none what the candidate's own kernels do.
    """

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites; everywhere else they have the numbers of this order."""

    @property
    def file(self) -> Path | None:
        """The candidate's ONNX file; None: it is of another kind."""

    @property
    def weights(self) -> Sequence[Weight]:
        """The quantised weights whose values are known on both sides."""

    @property
    def unmatched(self) -> tuple[str, ...]:
        """What the reference does not have: it stays as it is."""

    @property
    def costs(self) -> Sequence[float | None]:
        """Share of multiplications that each site has a part in; None: unknown."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""

    @property
    def everywhere(self) -> range:
        """The numbers of all sites."""

    def run(
        self, inputs: Mapping[str, Array], restored: Iterable[int] = (), factors: Array | None = None
    ) -> dict[str, Array]:
        """Return the outputs with some sites in FP32; each scale is multiplied by its factor before it is used."""

    def raw(self, inputs: Mapping[str, Array], restored: Iterable[int] = ()) -> dict[int, Array]:
        """Return the values before quantisation of each activation site : (items, ...) by site."""

    def served(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the candidate's own kernels compute."""

    def expected(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the reference computes."""


class RepairableCopy(Copy, Protocol):
    """A copy of a candidate that can compute repaired ones, too."""

    def runner(self, model: bytes) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """Return what computes a repaired candidate."""


def changed(found: Divergences) -> Flags:
    """Return which answers changed : (items,). One with NaN or infinity where the reference has none is another answer."""
    flags: Flags = (np.nan_to_num(found.flip) > 0) | (found.reference_finite & ~found.candidate_finite)
    return flags


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the items of several parts, one after the other, by the name of the input.

    Texts of different lengths are filled up with zeros, tokens and mask alike, where there is an attention mask: a model reads nothing there.

    Raises
    ------
    OperatorError
        Items have different shapes, and no mask says what is filled up.
    """
    by_name = {name: [part[name] for part in parts if len(part[name])] for name in parts[0]}
    if any(len({array.shape[1:] for array in arrays}) > 1 for arrays in by_name.values()):
        masked = any(_MASK in name for name in by_name)
        if not masked or any(array.ndim != 2 for arrays in by_name.values() for array in arrays):
            raise OperatorError(
                "the inputs have different shapes: give inputs of one shape. Texts may have different lengths where the model has an input"
                f" `{_MASK}`, and all of its inputs are one number for each token"
            )
        longest = {name: max(array.shape[1] for array in arrays) for name, arrays in by_name.items()}
        by_name = {
            name: [np.pad(array, ((0, 0), (0, longest[name] - array.shape[1]))) for array in arrays]
            for name, arrays in by_name.items()
        }
    return {name: np.concatenate(arrays) if arrays else parts[0][name] for name, arrays in by_name.items()}


def difference_of(copy: Copy, inputs: Mapping[str, Array], expected: Mapping[str, Any]) -> float:
    """Return the largest difference of the copy in FP32 from the reference, relative to the largest output."""
    whole = copy.run(inputs, copy.everywhere)
    differences = [0.0]
    for name in copy.outputs:
        largest = float(np.abs(expected[name]).max(initial=_TINY))
        differences.append(float(np.abs(whole[name] - expected[name]).max(initial=0.0)) / largest)
    return max(differences)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """How well the copy stands for both models.

    Parameters
    ----------
    difference
        Largest difference between the copy with all sites in FP32 and the reference, relative to the reference's largest output.
    agreement
        Share of items on which the copy with no site in FP32 and the candidate's own kernels have the same largest output.
    """

    difference: float
    agreement: float

    @property
    def holds(self) -> bool:
        """Whether the copy may be used."""
        return self.difference <= CLOSENESS and self.agreement >= AGREEMENT


def check(copy: Copy, inputs: Mapping[str, Array]) -> Check:
    """Compare the copy with the reference (all sites in FP32) and with the candidate (none)."""
    served, own = copy.served(inputs), copy.run(inputs)
    same = np.ones(len(next(iter(inputs.values()))), dtype=bool)
    for name in copy.outputs:
        rows = (side[name].reshape(len(same), -1).argmax(axis=1) for side in (served, own))
        same &= np.equal(*rows)
    return Check(difference=difference_of(copy, inputs, copy.expected(inputs)), agreement=float(same.mean()))
