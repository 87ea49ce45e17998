"""What the pictures of this package share: their style, the forms that they are written in, and how they are saved."""

from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from quantdrift.core.errors import OperatorError

FORMATS: Final = (".svg", ".png")
STYLE: Final[Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "quantdrift",
}


def check_format(path: Path) -> None:
    """Check that a picture can be written in the form that the ending of its path names.

    Raises
    ------
    OperatorError
        It cannot.
    """
    if path.suffix not in FORMATS:
        raise OperatorError(f"--picture {path}: name a file that ends in {' or '.join(FORMATS)}")
    if not path.resolve().parent.is_dir():
        raise OperatorError(f"--picture {path}: there is no folder {path.parent}")


def save(figure: Figure, path: Path) -> None:
    """Write a picture as SVG or PNG, by the ending of the path; the same picture gives the same bytes.

    Raises
    ------
    OperatorError
        The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error
