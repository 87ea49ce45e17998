"""The protocol of reference runtimes, and the records that describe a loaded reference."""

import hashlib
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from quantdrift.core.errors import OperatorError, QuantdriftError, QuarantineError, QuarantineReason
from quantdrift.models.tensors.arrays import Array, TensorSpec

_ALGORITHM = "sha256:"


class BrokenRuntimeError(QuantdriftError):
    """The reference fails or hangs on every input: the worker must end, and samples wait for the next worker."""


class SuspectInputError(QuantdriftError):
    """A server worked just before this input, and has failed on every input since.

    The batch is released: its exchanges are delivered again one by one, and one that does this too often is quarantined as
    poison.
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
        `float32`, followed by the reduced element types that the configuration allows.
    opset
        Version of the default operator set, 0 if there is none.
    producer
        The program that wrote the file, with its version.
    canaries
        Digest of the canaries that it has reproduced; empty if it has none.
    """

    path: str
    digest: str
    precision: str
    opset: int
    producer: str
    canaries: str = ""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The software and the device that run a reference.

    Parameters
    ----------
    runtime, version
        Name and version of the library.
    provider
        The back end in use, which may differ from the configured one.
    device
        The device, in words.
    driver
        Version of the device's driver; empty if there is none.
    copy, copy_precision, copy_runtime
        Of the candidate's replica next to the reference: its digest, its precision as far as known, and its runtime, in
        words. Empty if there is none.
    build
        What the reference is made of, if that is no network: `trees`.
    """

    runtime: str
    version: str
    provider: str
    device: str
    driver: str = ""
    copy: str = ""
    copy_precision: str = ""
    copy_runtime: str = ""
    build: str = ""


class Replayed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of the reference that replayed a batch, as stored with the batch.

    Parameters
    ----------
    runtime, version, provider, device, driver, copy, copy_precision, copy_runtime, build
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
    build: str = ""


class ReferenceRuntime(Protocol):
    """One loaded reference. `run` is called from one thread at a time."""

    @property
    def artefact(self) -> Artefact:
        """The files that it was loaded from."""
        ...

    @property
    def provenance(self) -> Provenance:
        """The software and the device that run it."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input; all are required."""
        ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every output, in the reference's order; an inner tensor that is the embedding comes last."""
        ...

    @property
    def embedding(self) -> str:
        """The output whose vectors make learned slices; empty if none is configured."""
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
            Reason `replay`: the reference cannot compute this input. The caller tries smaller batches, down to one
            exchange.
        RetryError
            The server is unreachable; nothing is wrong with the input.
        """
        ...

    def close(self) -> None:
        """Free memory, device and connections. `run` must not be called afterwards."""
        ...


def replayed_by(runtime: ReferenceRuntime) -> Replayed:
    """Return the description of a reference that is stored with its batches."""
    provenance, artefact = runtime.provenance, runtime.artefact
    return Replayed(
        **msgspec.structs.asdict(provenance), digest=artefact.digest, precision=artefact.precision
    )


def check_inputs(given: Mapping[str, Array], wanted: Sequence[TensorSpec]) -> None:
    """Check inputs against a reference's specification, for libraries that would also compute others.

    Raises
    ------
    QuarantineError
        Reason `replay`: a name, type or shape does not fit; the detail names both sides.
    """
    if set(given) != {spec.name for spec in wanted}:
        raise QuarantineError(
            QuarantineReason.REPLAY,
            f"the reference takes {sorted(spec.name for spec in wanted)}, but got {sorted(given)}",
        )
    for spec in wanted:
        array = given[spec.name]
        fits = len(array.shape) == len(spec.shape) and all(
            want in {None, have} for have, want in zip(array.shape, spec.shape, strict=True)
        )
        if array.dtype != spec.dtype or not fits:
            got = TensorSpec(name=spec.name, dtype=array.dtype, shape=array.shape)
            raise QuarantineError(QuarantineReason.REPLAY, f"the reference takes {spec}, but got {got}")


_STATUS = re.compile(r": (?:NOT_IMPLEMENTED|[A-Z]+(?:_[A-Z]+)*) :")  # of ONNX Runtime
_NODE = re.compile(r"while running (\w{1,64}) node\. Name:'([\w./:\-]{0,200})'")


def failure_text(error: BaseException) -> str:
    """Return where a library failed on an exchange, without its message: that may quote the exchange.

    It has the class of the error, the status and the node that ONNX Runtime names, and the innermost line of Python.
    """
    message, parts = str(error)[:1000], [type(error).__name__]
    if (status := _STATUS.search(message)) and "ONNXRuntimeError" in message:
        parts.append(status[0].strip(": "))
    if "memory" in message.lower():
        parts.append("for lack of memory")
    if node := _NODE.search(message):
        parts.append(f"in the node {node[1]} `{node[2]}`" if node[2] else f"in a node {node[1]}")
    elif frames := traceback.extract_tb(error.__traceback__, limit=-1):
        parts.append(f"in {Path(frames[-1].filename).name}:{frames[-1].lineno}")
    return " ".join(parts)


def error_text(error: BaseException, n_lines: int = 1) -> str:
    """Return the first lines of a library's error message where no exchange is involved, such as while loading."""
    return f"{type(error).__name__}: {' '.join(str(error).splitlines()[:n_lines])[:300]}"


def check_pin(path: Path | str, digest: str, pin: str) -> None:
    """Check an artefact's digest against the one that the configuration pins; an empty pin accepts any.

    Raises
    ------
    OperatorError
        They differ.
    """
    if pin and pin != _ALGORITHM + digest:
        raise OperatorError(
            f"the reference {path} is {_ALGORITHM}{digest}, but `models.references.digest` pins {pin}: restore the pinned "
            "artefact, or pin this one if it is the one you want"
        )


def require_pin(path: Path | str, digest: str, pin: str, what: str) -> None:
    """Check that the configuration pins an artefact that contains code.

    Parameters
    ----------
    path, digest, pin
        As for `check_pin`.
    what
        The kind of artefact, in words.

    Raises
    ------
    OperatorError
        It is not pinned, or another one is.
    """
    if not pin:
        raise OperatorError(
            f"the reference {path} is {what}: loading it runs that code. If you trust it, pin it: "
            f'digest = "{_ALGORITHM}{digest}" in [[models.references]]'
        )
    check_pin(path, digest, pin)


def digest_of(path: Path, external: Iterable[str] = ()) -> str:
    """Return the SHA-256 of a reference, in hexadecimal.

    For a single file it is what `sha256sum` prints. With external data it is the SHA-256 of the lines that
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
    """Return the SHA-256 of the lines `DIGEST  NAME`, in hexadecimal; for a single part its own digest.

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
    """Base class of runtimes that wrap another one: it passes everything on, and subclasses define `run`."""

    def __init__(self, runtime: ReferenceRuntime) -> None:
        self._runtime = runtime

    @property
    def artefact(self) -> Artefact:
        """The files that the wrapped reference was loaded from."""
        return self._runtime.artefact

    @property
    def provenance(self) -> Provenance:
        """The software and the device that run it."""
        return self._runtime.provenance

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input; all are required."""
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
        """Close the wrapped runtime."""
        self._runtime.close()
