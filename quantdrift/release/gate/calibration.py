"""What a candidate was calibrated on: recorded inputs, or the digests that `quantdrift repair` writes."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.release.gate.observations import digests_of
from quantdrift.release.recording import Layout, parts_of, read

RECORD: Final = "repairs.json"
"""What `quantdrift repair` writes beside its models."""


def calibration_of(files: Sequence[Path], models: Iterable[Path], inputs: Iterable[str]) -> frozenset[str]:
    """Return the digests of the rows that candidates were calibrated on.

    Parameters
    ----------
    files
        Recorded inputs, or records of repairs.
    models
        The candidates: what a record of repairs beside one of them says of it counts, too.
    inputs
        The names of the inputs.

    Raises
    ------
    OperatorError
        A file cannot be read.
    """
    digests: set[str] = set()
    for file in files:
        if file.suffix == ".json":
            digests.update(digest for repair in _repairs(file) for digest in repair.get("calibration") or ())
            continue
        for part in parts_of(file, "--calibration"):
            digests.update(digests_of(read(part, Layout(inputs=tuple(inputs), keys={})).inputs))
    for model in models:
        record = model.parent / RECORD
        if record.is_file():
            digest = f"sha256:{hashlib.sha256(model.read_bytes()).hexdigest()}"
            digests.update(
                each
                for repair in _repairs(record)
                if repair.get("digest") == digest
                for each in repair.get("calibration") or ()
            )
    return frozenset(digests)


def _repairs(path: Path) -> list[dict[str, Any]]:
    try:
        record: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        repairs: list[dict[str, Any]] = record["repairs"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise OperatorError(f"{path} cannot be read as a record of `quantdrift repair`: {error}") from error
    return repairs
