"""Files that are generated from the code."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def _pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, str] = module.pages()
    return pages


def test_generated_files_are_what_the_code_says() -> None:
    """`make docs` would change nothing."""
    for path, text in _pages().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path} is stale: run `make docs`"
