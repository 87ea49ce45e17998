"""The newest release, built from its commit and unpacked, to be run beside the tree."""

import io
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Final

from deploy.release import ROOT, build_sdist, build_wheel

RELEASED: Final = ROOT / "deploy" / "released.toml"


def unpack(directory: Path) -> Path:
    """Build the wheel of the newest release's commit, and return the folder with what it installs.

    Raises
    ------
    OSError, subprocess.CalledProcessError
        There is no git here, or the history is too short.
    """
    commit = tomllib.loads(RELEASED.read_text(encoding="utf-8"))["commit"]
    git = ["git", "-C", str(ROOT), "archive", commit]
    archived = subprocess.run(git, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        archive.extractall(directory / "source", filter="data")
    wheel = build_wheel(build_sdist(directory / "source", directory, 0), directory, 0)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(directory / "code")  # noqa: S202 - a wheel that was built here
    return directory / "code"
