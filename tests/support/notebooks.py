"""Running the notebooks of `examples/`."""

from pathlib import Path
from typing import TYPE_CHECKING

from quantdrift.release.result import Result

if TYPE_CHECKING:
    import nbformat


def executed(path: Path, directory: Path) -> "nbformat.NotebookNode":
    """Return a notebook with its outputs, run in `directory`; a cell that raises ends the test."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call] # nbformat has no types for it
    assert not any(cell.get("outputs") for cell in notebook.cells), "keep outputs out of the repository"
    resources = {"metadata": {"path": str(directory)}}
    return nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    ).execute()


def html_of(result: Result) -> str:
    """Return what a notebook shows."""
    html = result._repr_html_()
    assert html is not None
    return html
