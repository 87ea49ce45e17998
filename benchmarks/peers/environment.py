"""Environments for the peers: one each, made with plain pip, and a peer that does not install or run is only named."""

import json
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.streams import BASELINE, Case, Flips, Stream

# Module here, package, and what its current release leaves out or does not bound: both fail to import without.
PEERS: Mapping[str, tuple[str, ...]] = {
    "river": ("river",),
    "mapie": ("mapie",),
    "evidently": ("evidently", "pandas<3"),
    "nannyml": ("nannyml", "pandas<3", "statsmodels"),
    "alibi": ("alibi-detect",),
}
INSTALL_S, RUN_S = 900, 1200


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer did with one setting; see `benchmarks.peers.outcome`."""

    case: str
    method: str
    setting: str
    n_false: int
    n_groups: int
    delays: list[int | None]
    us_per_group: float


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A peer and what came of it.

    Parameters
    ----------
    name
        Of its module here.
    version
        That was installed, or why there is none.
    outcomes
        Empty where it did not install or run.
    """

    name: str
    version: str
    outcomes: list[Outcome] = []


class _Printed(msgspec.Struct, frozen=True):
    version: str
    outcomes: list[Outcome]


def write(directory: Path, case: Case, runs: int, after: int, seed: int) -> None:
    """Write a case's streams where peers look for them: the same values that the race with this seed sees."""
    directory.mkdir(parents=True, exist_ok=True)
    values = Stream(case, runs, seed).values(case.change + after)
    binary = isinstance(case.before, Flips)
    stem = "flips" if binary else "tail"
    np.save(directory / f"{stem}.npy", values)
    facts = {"name": case.name, "baseline": BASELINE, "change": case.change, "binary": binary}
    (directory / f"{stem}.json").write_text(json.dumps(facts))


def judged(environments: Path, streams: Path) -> Iterator[Peer]:
    """Install and run one peer after the other."""
    for name, packages in PEERS.items():
        directory = environments / name
        failure = _install(directory, packages)
        yield Peer(name=name, version=failure) if failure else _run(directory, name, streams)


def _install(directory: Path, packages: tuple[str, ...]) -> str:
    """Return why the packages could not be installed, or nothing."""
    done = directory / ".installed"
    wanted = " ".join(packages)
    if done.exists() and done.read_text() == wanted:
        return ""
    venv.create(directory, with_pip=True, clear=True)
    command = [str(_python(directory)), "-m", "pip", "install", "--quiet", *packages]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not installed: pip took more than {INSTALL_S} s"
    if ran.returncode:
        return f"not installed: {_last_line(ran.stderr)}"
    done.write_text(wanted)
    return ""


def _run(directory: Path, name: str, streams: Path) -> Peer:
    command = [str(_python(directory)), "-m", f"benchmarks.peers.{name}", str(streams)]
    root = Path(__file__).parents[2]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
            cwd=root,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Peer(name=name, version=f"did not finish within {RUN_S} s")
    if ran.returncode:
        return Peer(name=name, version=f"did not run: {_last_line(ran.stderr)}")
    printed = msgspec.json.decode(_last_line(ran.stdout), type=_Printed)
    return Peer(name=name, version=printed.version, outcomes=printed.outcomes)


def _python(directory: Path) -> Path:
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    return directory / scripts / "python"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
