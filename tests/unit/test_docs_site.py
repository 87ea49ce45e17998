"""The site of the pages: what its menu has, and where its links lead."""

import pytest

from docs.site import INDEX, ROOT, navigation, page, pages

pytestmark = pytest.mark.unit


def test_every_page_is_behind_a_door() -> None:
    """The index is the one place that lists pages: its sections are the menu, the doors of the four readers first."""
    known = pages()
    menu = navigation(known)
    titles = [title for entry in menu[1:] for title in entry]
    assert titles[:4] == ["Platform", "On call", "Data science", "Model owner"]
    assert menu[0] == known[INDEX] == "README.md"
    listed = [path for entry in menu[1:] for paths in entry.values() for path in paths]
    assert sorted([*listed, menu[0]]) == sorted(known.values()), "each page once"


def test_links_lead_from_page_to_page_and_what_is_no_page_is_named() -> None:
    """Also out of `docs` and back, and in code nothing is a link."""
    known = pages()
    assert "](../quick-start.md)" in page("docs/how-to/install.md", known)
    assert known["CONTRIBUTING.md"] == "more/CONTRIBUTING.md"
    assert "](../how-to/install.md#without-a-gpu)" in page("CONTRIBUTING.md", known)
    assert "](more/SECURITY.md)" in page(INDEX, known)
    assert "](../../deploy" not in page("docs/how-to/report.md", known)


def test_servers_and_kinds_of_models_can_be_found() -> None:
    """Whoever searches for the name of a server, or for tabular models, finds a page."""
    known = pages()
    text = "\n".join(
        (ROOT / path).read_text(encoding="utf-8") for path in known if path.startswith("docs/")
    ).lower()
    for word in (
        *("tabular", "scikit-learn", "LightGBM", "XGBoost"),
        *("Triton", "KServe", "MLServer", "OpenVINO", "TorchServe", "TensorFlow Serving", "FastAPI", "Envoy"),
        *("vLLM", "TGI", "llama.cpp"),
    ):
        assert word.lower() in text, word
