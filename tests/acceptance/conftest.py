"""Acceptance tests share one worker and one pair of trained models."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantdrift.demo.model import CANDIDATE
from tests.support.product import ROOT


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that the demo writes to."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="session")
def models(demo_directory: Path) -> Path:
    """Return a directory with the demo's FP32 and INT8 models: those of the demo if it ran before, else trained now."""
    directory = demo_directory / "models"
    if not (directory / CANDIDATE).exists():
        command = [sys.executable, "-m", "quantdrift.demo.model", "--seed", "2", "--out", str(directory)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return directory
