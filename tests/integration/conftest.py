"""What several tests with real models share."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.shadow.vllm_like import VllmLike


@pytest.fixture(scope="module")
def fp32(language_folder: Path) -> "VllmLike":
    """Return a candidate that is its own reference."""
    from tests.support.shadow.language_models import loaded
    from tests.support.shadow.vllm_like import VllmLike

    return VllmLike(*loaded(language_folder), name="digits")


@pytest.fixture(scope="module")
def int8(language_folder: Path) -> "VllmLike":
    """Return a candidate that was quantised."""
    from tests.support.shadow.language_models import loaded, quantised
    from tests.support.shadow.vllm_like import VllmLike

    model, tokenizer = loaded(language_folder)
    return VllmLike(quantised(model), tokenizer, name="digits")
