"""TF32 switched off for the whole process, for libraries that take no other word for it: TensorRT."""

import os
from pathlib import Path
from typing import Final

from quantdrift.core.errors import OperatorError

OVERRIDE: Final = "NVIDIA_TF32_OVERRIDE"
_OFF: Final = "0"
# What reads the variable, once, when it is loaded.
_READERS: Final = ("libcublas", "libcudnn", "libnvinfer")
_MAPS: Final = Path("/proc/self/maps")


def refuse_tf32(maps: Path = _MAPS) -> None:
    """Set `NVIDIA_TF32_OVERRIDE=0`, before NVIDIA's libraries read it.

    Parameters
    ----------
    maps
        What tells which libraries are loaded.

    Raises
    ------
    OperatorError
        It says otherwise, or they are loaded already and have not read it.
    """
    told = os.environ.get(OVERRIDE)
    if told == _OFF:
        return
    if told is not None:
        raise OperatorError(
            f"{OVERRIDE} is {told!r}: TensorRT would compute in TF32. Set it to {_OFF}, or take it away"
        )
    if loaded := loaded_readers(maps):
        raise OperatorError(
            f"{', '.join(loaded)} was loaded before {OVERRIDE} could be set: set {OVERRIDE}={_OFF} in the environment"
        )
    os.environ[OVERRIDE] = _OFF


def loaded_readers(maps: Path) -> tuple[str, ...]:
    """Return which of NVIDIA's libraries that read the variable are in this process; none where that is not told."""
    try:
        names = {Path(line.rpartition(" ")[2]).name for line in maps.read_text().splitlines()}
    except OSError:
        return ()
    return tuple(reader for reader in _READERS if any(name.startswith(reader) for name in names))
