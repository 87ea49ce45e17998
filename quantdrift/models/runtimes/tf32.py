"""The switch that turns TF32 off for the whole process; TensorRT has no other one."""

import os
from pathlib import Path
from typing import Final

from quantdrift.core.errors import OperatorError

OVERRIDE: Final = "NVIDIA_TF32_OVERRIDE"
_OFF: Final = "0"
# The libraries that read the variable, once, when they are loaded.
_READERS: Final = ("libcublas", "libcudnn", "libnvinfer")
_MAPS: Final = Path("/proc/self/maps")


def disable_tf32(maps: Path = _MAPS) -> None:
    """Set `NVIDIA_TF32_OVERRIDE=0`, before NVIDIA's libraries read it.

    Parameters
    ----------
    maps
        The file that lists the loaded libraries.

    Raises
    ------
    OperatorError
        It has another value, or the libraries were loaded before it was set.
    """
    value = os.environ.get(OVERRIDE)
    if value == _OFF:
        return
    if value is not None:
        raise OperatorError(
            f"{OVERRIDE} is {value!r}: TensorRT would compute in TF32. Set it to {_OFF}, or unset it"
        )
    if loaded := loaded_libraries(maps):
        raise OperatorError(
            f"{', '.join(loaded)} was loaded before {OVERRIDE} could be set: set {OVERRIDE}={_OFF} in the environment"
        )
    os.environ[OVERRIDE] = _OFF


def loaded_libraries(maps: Path) -> tuple[str, ...]:
    """Return the loaded libraries that read the variable; none if the system does not list them."""
    try:
        names = {Path(line.rpartition(" ")[2]).name for line in maps.read_text().splitlines()}
    except OSError:
        return ()
    return tuple(reader for reader in _READERS if any(name.startswith(reader) for name in names))
