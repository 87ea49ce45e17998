"""The check of a candidate's weights against those of a reference, by the two files alone."""

from pathlib import Path

from quantdrift.core.config.schema import Reference, Runtime
from quantdrift.core.errors import OperatorError


def check_origin(candidate: Path, reference: Reference, *, remedy: str = "") -> list[str]:
    """Return which weights of a candidate are faulty, in sentences; none where the files are not ONNX files in QDQ form.

    Parameters
    ----------
    candidate
        The file.
    reference
        The reference that it should have been made from.
    remedy
        A further sentence of the refusal.

    Raises
    ------
    OperatorError
        The candidate was made from another checkpoint.
    """
    from quantdrift.shadow.repair.origin import Origin, fault_words, origins_of_files

    if reference.runtime is not Runtime.ONNX or not Path(reference.path).is_file():
        return []
    try:
        compared = origins_of_files(candidate, Path(reference.path))
    except OperatorError:  # who opens it says what is wrong
        return []
    if compared is None:
        return []
    origins, faults = compared
    if origins.origin is Origin.OTHER:
        raise OperatorError(f"{candidate}: {origins.refusal}.{remedy}")
    return [f"{candidate}: {fault.site}: {fault_words(fault.tensor)}" for fault in faults]
