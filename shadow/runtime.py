"""The seam to whatever runs a reference: what it takes, what it gives, and what it says of itself."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.errors import QuantdriftError

Array = npt.NDArray[Any]


class BrokenRuntimeError(QuantdriftError):
    """The reference fails or hangs whatever it is given: its worker must end, and samples wait for the next one."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a reference says of one of its inputs or outputs.

    Parameters
    ----------
    name
        The tensor's name in the reference.
    dtype
        Element type; `object` holds text.
    shape
        Dimensions; None where any length will do.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        kind = "text" if self.dtype == np.dtype(object) else self.dtype.name
        return f"{self.name}: {kind}[{dims}]"


class Artefact(msgspec.Struct, frozen=True, kw_only=True):
    """The file or files that a reference was loaded from.

    Parameters
    ----------
    path
        As configured.
    digest
        `digest_of` the files: the identity of the reference everywhere.
    precision
        `float32`, or the reduced element types that were allowed by name.
    opset
        Version of the default operator set, 0 where there is none.
    producer
        What wrote the file, with its version.
    """

    path: str
    digest: str
    precision: str
    opset: int
    producer: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What replays a reference.

    Parameters
    ----------
    runtime, version
        Name and version of the library.
    provider
        The back end that was really taken, not the one that was asked for.
    device
        The device, in words.
    """

    runtime: str
    version: str
    provider: str
    device: str


class ReferenceRuntime(Protocol):
    """One loaded reference. `run` is called from one thread at a time."""

    @property
    def artefact(self) -> Artefact:
        """What was loaded."""
        ...

    @property
    def provenance(self) -> Provenance:
        """What replays it."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input that must be given."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every output, in the reference's order; an inner tensor that is the embedding comes last."""
        ...

    @property
    def embedding(self) -> str:
        """The output whose vectors make learned slices; empty: none was asked for."""
        ...

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return every output by name.

        Parameters
        ----------
        inputs
            One array per entry of `inputs`, of its dtype and a shape that fits.

        Raises
        ------
        QuarantineError
            Reason `replay`: the reference cannot compute this. The caller tries smaller batches, down to one
            exchange.
        """
        ...


def digest_of(path: Path, external: Iterable[str] = ()) -> str:
    """Return the SHA-256 of a reference, in hexadecimal.

    Of a single file it is what `sha256sum` prints. With external data it is the SHA-256 of the lines that
    `sha256sum MODEL EXTERNAL...` prints in the model's directory, external files sorted by name.

    Parameters
    ----------
    path
        The model file.
    external
        Names of further files, relative to the model's directory.
    """
    digests = [(path.name, _sha256(path))]
    digests += [(name, _sha256(path.parent / name)) for name in sorted(set(external))]
    if len(digests) == 1:
        return digests[0][1]
    listing = "".join(f"{digest}  {name}\n" for name, digest in digests)
    return hashlib.sha256(listing.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
