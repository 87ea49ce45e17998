"""The seam to whatever runs a reference: what it takes, what it gives, and what it says of itself.

What a runtime around another one says of itself: what the other one says.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from quantdrift.core.errors import OperatorError, QuantdriftError, QuarantineError, QuarantineReason
from quantdrift.shadow.tensors.arrays import Array, TensorSpec

_ALGORITHM = "sha256:"


class BrokenRuntimeError(QuantdriftError):
    """The reference fails or hangs whatever it is given: its worker must end, and samples wait for the next one."""


class SuspectInputError(QuantdriftError):
    """A server failed at everything after this input, though it was well just before.

    The batch is let go: it comes again, exchange by exchange, and what does so too often is quarantined as poison.
    """


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
    canaries
        Digest of the canaries that it has reproduced; empty where it has none.
    """

    path: str
    digest: str
    precision: str
    opset: int
    producer: str
    canaries: str = ""


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
    driver
        Version of the device's driver; empty where there is none.
    copy, copy_precision, copy_runtime
        Of a copy of the candidate beside it: its digest, what it computes in as far as that is told, and what computes
        it, in words. Empty where there is none.
    """

    runtime: str
    version: str
    provider: str
    device: str
    driver: str = ""
    copy: str = ""
    copy_precision: str = ""
    copy_runtime: str = ""


class Replayed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What replayed a batch, as it is stored with it.

    Parameters
    ----------
    runtime, version, provider, device, driver, copy, copy_precision, copy_runtime
        As of `Provenance`.
    digest, precision
        As of `Artefact`.
    """

    runtime: str
    version: str
    provider: str
    device: str
    driver: str
    digest: str
    precision: str
    copy: str = ""
    copy_precision: str = ""
    copy_runtime: str = ""


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
        RetryError
            What computes is away for now; nothing is wrong with the input.
        """
        ...

    def close(self) -> None:
        """Let go of memory, device and connections; `run` is not called any more."""
        ...


def replayed_by(runtime: ReferenceRuntime) -> Replayed:
    """Return what a batch says of the reference that replayed it."""
    told, artefact = runtime.provenance, runtime.artefact
    return Replayed(**msgspec.structs.asdict(told), digest=artefact.digest, precision=artefact.precision)


def check_given(given: Mapping[str, Array], wanted: Sequence[TensorSpec]) -> None:
    """Check inputs against what a reference takes, where the library itself would compute on with others.

    Raises
    ------
    QuarantineError
        Reason `replay`: a name, type or shape does not fit; the detail names both sides.
    """
    if set(given) != {spec.name for spec in wanted}:
        raise QuarantineError(
            QuarantineReason.REPLAY,
            f"given were {sorted(given)}, the reference takes {sorted(spec.name for spec in wanted)}",
        )
    for spec in wanted:
        array = given[spec.name]
        fits = len(array.shape) == len(spec.shape) and all(
            want in {None, have} for have, want in zip(array.shape, spec.shape, strict=True)
        )
        if array.dtype != spec.dtype or not fits:
            told = TensorSpec(name=spec.name, dtype=array.dtype, shape=array.shape)
            raise QuarantineError(QuarantineReason.REPLAY, f"given was {told}, the reference takes {spec}")


def said_by(error: BaseException, n_lines: int = 1) -> str:
    """Return what a library's error says in its first lines: the rest may quote values."""
    return f"{type(error).__name__}: {' '.join(str(error).splitlines()[:n_lines])[:300]}"


def check_pin(path: Path | str, digest: str, pin: str) -> None:
    """Check an artefact's digest against the one that the configuration pins; empty: nothing is pinned.

    Raises
    ------
    OperatorError
        It is another one.
    """
    if pin and pin != _ALGORITHM + digest:
        raise OperatorError(
            f"the reference {path} is {_ALGORITHM}{digest}, but `models.references.digest` pins {pin}: put the pinned "
            "artefact there, or pin this one if it is the one you want"
        )


def require_pin(path: Path | str, digest: str, pin: str, what: str) -> None:
    """Check that an artefact that is code is the one that the configuration pins.

    Parameters
    ----------
    path, digest, pin
        As for `check_pin`.
    what
        The kind of artefact, in words.

    Raises
    ------
    OperatorError
        It is not pinned, or is another one.
    """
    if not pin:
        raise OperatorError(
            f"the reference {path} is {what}: loading it runs what it holds. If you trust it, pin it: "
            f'digest = "{_ALGORITHM}{digest}" in [[models.references]]'
        )
    check_pin(path, digest, pin)


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
    return digest_of_parts(digests)


def digest_of_parts(parts: Sequence[tuple[str, str]]) -> str:
    """Return the SHA-256 of the lines `DIGEST  NAME`, in hexadecimal; of a single part its own digest.

    Parameters
    ----------
    parts
        Name and digest of each part, in order.
    """
    if len(parts) == 1:
        return parts[0][1]
    listing = "".join(f"{digest}  {name}\n" for name, digest in parts)
    return hashlib.sha256(listing.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WrappedRuntime:
    """A reference that stands before another one; whoever derives from it says how it runs.

    Parameters
    ----------
    runtime
        What computes.
    """

    def __init__(self, runtime: ReferenceRuntime) -> None:
        self._runtime = runtime

    @property
    def artefact(self) -> Artefact:
        """What was loaded."""
        return self._runtime.artefact

    @property
    def provenance(self) -> Provenance:
        """What replays it."""
        return self._runtime.provenance

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input that must be given."""
        return self._runtime.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every output, in the reference's order."""
        return self._runtime.outputs

    @property
    def embedding(self) -> str:
        """The output whose vectors make learned slices, or empty."""
        return self._runtime.embedding

    def close(self) -> None:
        """Let go of what the runtime holds."""
        self._runtime.close()
