"""What several tests with real models share, and the release that others install."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.release import build_sdist, build_wheel
from tests.support.shared import made_once

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


EPOCH_S = 1_780_000_000
_ROOT = Path(__file__).resolve().parents[2]


def copied_checkout(place: Path) -> Path:
    """Copy what a release is made of, as git would, and return where."""
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(_ROOT / name, place / name)
    for name in ("quantdrift", "sidecar", "shadow", "storage", "migrations"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            _ROOT / name, place / name, symlinks=True, ignore=ignored, copy_function=shutil.copyfile
        )
    return place


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution of this checkout."""

    def build(place: Path) -> Path:
        return build_sdist(copied_checkout(place / "source"), place, EPOCH_S)

    return made_once(tmp_path_factory, "sdist", build)


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel that is built from the source distribution."""
    return made_once(tmp_path_factory, "wheel", lambda place: build_wheel(sdist, place, EPOCH_S))
