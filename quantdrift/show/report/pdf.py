"""A report as PDF: Chromium prints the page."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from quantdrift.core.errors import OperatorError

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LONGEST_S: Final = 120.0


def browser() -> str:
    """Return the path of Chromium.

    Raises
    ------
    OperatorError
        It is not installed.
    """
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        raise OperatorError(
            "a PDF needs Chromium, and there is none in PATH: install it (`apt-get install chromium`), or open the HTML page"
            " in a browser and print it"
        )
    return path


def write_pdf(page: Path, chromium: str) -> Path:
    """Print a page to a PDF beside it, and return its path.

    The page loads nothing and runs no script, and Chromium has a profile of its own that is removed afterwards.

    Raises
    ------
    OperatorError
        Chromium failed or took too long.
    """
    pdf = page.with_suffix(".pdf")
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--no-pdf-header-footer",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # its sandbox refuses root
            f"--user-data-dir={profile}",
            f"--print-to-pdf={pdf.resolve()}",
        ]
        try:
            done = subprocess.run(  # noqa: S603 - a path that was looked up, and options of our own
                [chromium, *options, page.resolve().as_uri()],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LONGEST_S,
            )
        except subprocess.TimeoutExpired:
            raise OperatorError(f"{chromium} did not print {page} within {_LONGEST_S:.0f} s") from None
    if done.returncode or not pdf.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OperatorError(f"{chromium} could not print {page}: {last}")
    return pdf
