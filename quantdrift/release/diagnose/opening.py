"""The choice of the copy that fits a candidate: an ONNX file, a PyTorch factory, or an exported program."""

import importlib
import re
from pathlib import Path
from typing import Any, Final

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.diagnosable import reference_problem
from quantdrift.core.errors import OperatorError
from quantdrift.release.diagnose.copies import Copy
from quantdrift.release.sites import SwitchableCopy

_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PACKAGE: Final = "quantdrift.release.diagnose.pytorch"


def open_copy(
    model: Model, reference: Reference, candidate: Path, *, factory: str, digest: str, threads: int
) -> Copy:
    """Return the copy of a candidate in which each site can be switched to FP32.

    Parameters
    ----------
    model, reference
        The model, and its reference.
    candidate
        The file of the candidate.
    factory
        `package.module:function` of a candidate in PyTorch; empty: it has none.
    digest
        `sha256:...` of a candidate that is an exported program; else empty.
    threads
        CPU threads, 0 for one per core.

    Raises
    ------
    OperatorError
        Candidate and reference are not of one kind, a file cannot be read, or no site can be named.
    """
    if factory and not _FACTORY.fullmatch(factory):
        raise OperatorError(f"--factory {factory}: it must be `package.module:function`")
    if reference.runtime is Runtime.ONNX:
        if factory or digest:
            raise OperatorError(
                f"--factory and --digest are of candidates in PyTorch, and the reference of model `{model.name}` is an ONNX file: give the"
                " reference in PyTorch, too"
            )
        return SwitchableCopy(candidate, Path(reference.path), threads=threads)
    if problem := reference_problem(model, reference):
        raise OperatorError(problem)
    if factory:
        copy: Copy = _imported("modules").copy_of_modules(model, reference, candidate, factory, threads)
    elif candidate.suffix == ".pt2":
        copy = _imported("program").copy_of_program(model, reference, candidate, digest, threads)
    else:
        raise OperatorError(
            f"the reference of model `{model.name}` is in PyTorch, and the candidate {candidate} is no exported program (.pt2): give the"
            " function that makes the candidate of this file with --factory package.module:function"
        )
    return copy


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise OperatorError("a candidate in PyTorch needs PyTorch here: pip install torch") from error
