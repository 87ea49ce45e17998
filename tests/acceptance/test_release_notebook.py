"""`examples/release.ipynb`: gate, diagnosis and repair of a candidate without a shell."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.notebooks import executed
from tests.support.product import ROOT

if TYPE_CHECKING:
    import nbformat

pytestmark = [pytest.mark.acceptance, pytest.mark.release, pytest.mark.timeout(1500)]


def _shown(notebook: "nbformat.NotebookNode", name: str) -> tuple[str, str]:
    """Return the text and the HTML of the cell whose last line is this name."""
    cell = next(cell for cell in notebook.cells if cell.source.endswith(f"\n{name}"))
    data = next(output["data"] for output in cell.outputs if "data" in output)
    return data["text/plain"], data.get("text/html", "")


def test_the_notebook_finds_the_damage_its_cause_and_a_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive fails, and all pages with it; the repair passes, on pages that nobody has seen. Seeded throughout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("QUANTDRIFT_DSN", raising=False)
    notebook = executed(ROOT / "examples" / "release.ipynb", tmp_path)
    assert _shown(notebook, "failed")[0] == "['all', 'scanner=archive']"
    for name, words in (
        ("verdict", "fail: above the limit in all, scanner=archive"),
        ("cause", "Cause: resolution"),
        ("repairs", "a copy for the slice"),
        ("judged", "pass: digits may be replaced by sha256:"),
    ):
        _, html = _shown(notebook, name)
        assert words in html, name
        assert "<table>" in html, name
    assert (
        "('flips', 'pass', "
        in _shown(
            notebook, "[(str(answer.question), str(answer.verdict), answer.mean) for answer in archive]"
        )[0]
    )
    assert "--slice scaner: model `digits` has no such rule" in notebook.cells[-1].outputs[0]["text"]
