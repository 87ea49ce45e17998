"""The site of the pages, as `make docs-site` builds it."""

import json
from pathlib import Path

import pytest

from docs.site import build

pytestmark = [pytest.mark.integration, pytest.mark.release]


def test_it_is_built_strictly_and_can_be_searched(tmp_path: Path) -> None:
    """No link, heading or page is missing, nothing is loaded from elsewhere, and the search knows tabular models."""
    build(tmp_path / "site")
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {
        entry["location"].partition("#")[0] for entry in index["docs"] if "tabular" in entry["text"].lower()
    }
    assert {"index.html", "how-to/slices.html"} & found
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert all(door in home for door in ("Platform", "On call", "Data science", "Model owner"))
    assert 'src="http' not in home
    assert 'rel="stylesheet" href="http' not in home
