"""Packages as pip installs them, in a directory of a test: the example in examples/plugin, and toys."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"


def install_toy(
    directory: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]
) -> None:
    """Install a package with these entry points by group and name, and these modules by their text."""
    metadata = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, of_group in entry_points.items():
        lines += [f"[{group}]", *(f"{entry} = {value}" for entry, value in of_group.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    for module, text in modules.items():
        (directory / f"{module}.py").write_text(text)


def link_example(directory: Path) -> None:
    """Install the example into a directory of `sys.path` without pip: its metadata, and a link to its package."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install_toy(directory, project["name"], project["entry-points"], {})
    (directory / "quantdrift_forecast").symlink_to(EXAMPLE / "quantdrift_forecast")


def install_example(directory: Path) -> Path:
    """Install the example with pip into a directory for `PYTHONPATH`, and return that."""
    source, target = directory / "source", directory / "site"
    # pip builds in the source directory.
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, timeout=150)
    return target
