"""Makes the README's pictures of an alert and of a report from a run of the demo.

    make demo | tee out/demo.log
    python docs/pictures.py out/demo.log out/demo/report.html

Needs Chromium on the PATH.
"""

import argparse
import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from PIL import Image

_IMAGES: Final = Path(__file__).parent / "images"
_N_COLOURS: Final = 128
_ALERT_SIZE: Final = (1290, 545)
_REPORT_SIZE: Final = (1100, 768)
_SHOWN: Final = (
    *(
        "model",
        "version",
        "slice",
        "verdict",
        "onset",
        "after",
        "budget",
        "n_since_onset",
        "aggregate_verdict",
    ),
)
_STYLE: Final = """
body { margin: 0; background: #11151c; color: #d7dde5; font: 15px/1.45 "DejaVu Sans Mono", monospace }
header { background: #232a36; padding: 9px 16px; color: #9fb0c3 }
pre { margin: 0; padding: 16px 18px; font: inherit }
i { color: #7f93ab; font-style: normal }
"""


def alert_page(log: str) -> str:
    """Return a page with the first alert that the demo printed: its text and the attributes in `_SHOWN`, unchanged."""
    lines = log.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("╭"))
    end = next(place for place, line in enumerate(lines) if place > begin and line.startswith("╰"))
    title = lines[begin].strip("╭╮─ ")
    rows = [line.strip("│")[1:].rstrip() for line in lines[begin + 1 : end]]
    begin_of_attributes = next(place for place, row in enumerate(rows) if row.startswith("quantdrift."))
    text = [html.escape(row) for row in rows[:begin_of_attributes]]
    n_first = next(place for place, row in enumerate(text) if row.startswith(("How many:", "Confidence:")))
    text[:n_first] = [f"<b>{row}</b>" for row in text[:n_first]]  # the first line, which may be wrapped
    shown, n_left_out, is_shown = [], 0, False
    for row in rows[begin_of_attributes:]:
        if name := re.match(r"quantdrift\.(\S+)", row):
            is_shown = name[1] in _SHOWN
            n_left_out += not is_shown
        if is_shown:
            shown.append(re.sub(r"^(quantdrift\.\S+)", r"<i>\1</i>", html.escape(row)))
    body = "\n".join([*text, *shown, f"<i>… {n_left_out} more attributes</i>"])
    return (
        f"<meta charset=utf-8><style>{_STYLE}</style><header>{html.escape(title)}</header><pre>{body}</pre>"
    )


def photograph(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Write the upper left part of a page, `size` pixels wide and high, as a small PNG."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("there is no `chromium` on the PATH")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    window = [f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run([chromium, *flags, *window], check=True, capture_output=True)  # noqa: S603 - our own pages
    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(_N_COLOURS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("log", type=Path, help="what the demo printed")
    parser.add_argument("report", type=Path, help="the report that it wrote")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "alert.html"
        page.write_text(alert_page(given.log.read_text(encoding="utf-8")), encoding="utf-8")
        photograph(page, _IMAGES / "alert.png", _ALERT_SIZE)
    photograph(given.report, _IMAGES / "report.png", _REPORT_SIZE)


if __name__ == "__main__":
    main()
