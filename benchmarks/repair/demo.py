"""The demo's digit reader of nine sites: faults that are injected into it, and the command on its archive's real damage."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.repair.faults import Patient
from quantdrift.demo.model import CALIBRATED_ON, CANDIDATE, INPUT, REFERENCE
from quantdrift.demo.scans import Scanner, Scans

_SEED: Final = 2  # the demo's default
CONFIG: Final = Path(__file__).parents[2] / "quantdrift" / "demo" / "config.toml"
_LIMIT_S: Final = 600


class Reader:
    """The demo's models in a folder, which are made if they are not there."""

    def __init__(self, models: Path) -> None:
        self.models = models
        build = [sys.executable, "-m", "quantdrift.demo.model", "--seed", str(_SEED)]
        if not models.exists():
            subprocess.run(
                [*build, "--out", str(models)], check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL
            )
        self._reference, self._candidate = models / REFERENCE, models / CANDIDATE
        _, self._scans = Scans.bundled()
        self._rng = np.random.default_rng(_SEED)

    def patient(self, n_pages: int, folder: Path) -> Patient:
        """Return it for faults, which are written into a folder, with pages of the scanners that it was calibrated with."""
        each = n_pages // len(CALIBRATED_ON)
        images = [self._scans.draw(scanner, each, self._rng)[0] for scanner in CALIBRATED_ON]
        return Patient(self._reference, self._candidate, np.concatenate(images).astype(np.float32), folder)

    def command(self, n_pages: int, folder: Path) -> dict[str, float]:
        """Run `quantdrift diagnose` on pages of the archive, on one core; return its seconds and what it restores."""
        recording = folder / "recorded.npz"
        pages = {scanner: self._scans.draw(scanner, n_pages, self._rng)[0] for scanner in Scanner}
        np.savez(
            recording,
            allow_pickle=False,
            scanner=np.repeat([scanner.value for scanner in pages], n_pages),
            **{INPUT: np.concatenate([*pages.values()]).astype(np.float32)},
        )
        config = folder / "config.toml"
        config.write_text(CONFIG.read_text(encoding="utf-8"), encoding="utf-8")
        program = "from quantdrift.__main__ import main; main()"
        asked = [
            f"--slice=scanner={Scanner.ARCHIVE.value}",
            f"--candidate={self._candidate}",
            f"--inputs={recording}",
            f"--config={config}",
            "--json",
        ]
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", program, "diagnose", *asked],
            check=True,
            timeout=_LIMIT_S,
            stdout=subprocess.PIPE,
            preexec_fn=_on_one_core,
        )
        seconds = time.monotonic() - begin
        found = msgspec.json.decode(done.stdout)
        left = found["blamed"][-1]["flips_left"] if found["blamed"] else found["fresh_flips"]
        return {
            "diagnose_s": seconds,
            "archive_named": float(len(found["blamed"])),
            "archive_restored": 1.0 - left / found["fresh_flips"],
        }


def _on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
