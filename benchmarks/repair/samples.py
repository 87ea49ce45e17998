"""The outputs that the guides to diagnose and repair show, of one run: the demo's models and 60,000 of its pages, a tenth of the archive.

    python -m benchmarks.repair.samples FOLDER

The folder gets the models, the recording and the configuration, the picture and the repaired models; the outputs are printed.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.repair.demo import CONFIG
from quantdrift.demo.model import CANDIDATE, INPUT
from quantdrift.demo.scans import Scanner, Scans

_SEED: Final = 2  # the demo's default
_PAGES: Final = {
    Scanner.OFFICE: 30_000,
    Scanner.LAB: 12_000,
    Scanner.MICROFILM: 6_000,
    Scanner.MOBILE: 6_000,
    Scanner.ARCHIVE: 6_000,
}
_ASKED: Final = (
    "--slice",
    f"scanner={Scanner.ARCHIVE.value}",
    "--candidate",
    f"models/{CANDIDATE}",
    "--inputs",
    "recorded.npz",
)


def main() -> None:
    """Make the files, and run both commands as a user does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True)
    build = [sys.executable, "-m", "quantdrift.demo.model", "--seed", str(_SEED)]
    subprocess.run([*build, "--out", str(folder / "models")], check=True, stdout=subprocess.DEVNULL)
    (folder / "config.toml").write_text(CONFIG.read_text(encoding="utf-8"), encoding="utf-8")
    _, scans = Scans.bundled()
    rng = np.random.default_rng(_SEED)
    pages = {scanner: scans.draw(scanner, n, rng)[0] for scanner, n in _PAGES.items()}
    np.savez(
        folder / "recorded.npz",
        allow_pickle=False,
        scanner=np.repeat([scanner.value for scanner in pages], [*_PAGES.values()]),
        **{INPUT: np.concatenate([*pages.values()]).astype(np.float32)},
    )
    for words in (
        ("diagnose", *_ASKED, "--picture", "cause.svg"),
        ("repair", *_ASKED, "--out", "repaired"),
    ):
        print(f"$ quantdrift {' '.join(words)}", flush=True)
        program = "from quantdrift.__main__ import main; main()"
        subprocess.run([sys.executable, "-c", program, *words], check=False, cwd=folder)
        print(flush=True)


if __name__ == "__main__":
    main()
