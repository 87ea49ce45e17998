"""Acceptance tests share one worker and one pair of trained models."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.product import ROOT


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the demo's FP32 and INT8 models, trained now."""
    directory = tmp_path_factory.mktemp("models")
    subprocess.run(
        [sys.executable, "-m", "examples.digits.model", "--out", str(directory)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return directory
