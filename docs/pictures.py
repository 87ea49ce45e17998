"""Makes every picture of the pages from a run of the demo: an alert, a report, the live page, and the cause of the damage.

    python -m docs.pictures    # or `make pictures`; as long as the demo, some five minutes

The live page is photographed while the alert is open, the rest when the run is over. Needs Chromium on the PATH.
"""

import argparse
import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

_IMAGES: Final = Path(__file__).parent / "images"
_N_COLOURS: Final = 128
_ALERT_SIZE: Final = (1290, 920)
_REPORT_SIZES: Final = {"report.png": (1100, 735), "report-first-screen.png": (1100, 600)}
_OVERVIEW_SIZE: Final = (1280, 900)
_SLICE_SIZE: Final = (1280, 1560)
_PHONE_SIZE: Final = (390, 844)
_PAGE: Final = re.compile(r"(?<=The live page while it runs: )\S+")  # of the demo
_ALERT_IS_SHOWN: Final = (
    "The alert, as on-call sees it"  # of the demo: from then on it is open, until the next version serves
)
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


def photograph(page: Page, name: str, size: tuple[int, int]) -> None:
    """Write the upper left part of a page, `size` pixels wide and high, as a small PNG."""
    picture = _IMAGES / name
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.screenshot(path=picture)
    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(_N_COLOURS, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


def photograph_live(browser: Browser, address: str) -> None:
    """Write the pictures of the live page: the overview, the slice of the first alert, and that alert on a phone."""
    page = browser.new_page()
    page.goto(address)
    photograph(page, "live-overview.png", _OVERVIEW_SIZE)
    page.goto(f"{address.rstrip('/')}/alerts")
    page.locator("tbody th a").first.click()
    photograph(page, "live-alert.png", _PHONE_SIZE)
    page.get_by_role("link", name="Look at the slice").click()
    photograph(page, "live-slice.png", _SLICE_SIZE)


def photograph_results(browser: Browser, log: str, out: Path) -> None:
    """Write the pictures of what a run leaves: its alert, its report, and the cause of the damage."""
    page, alert = browser.new_page(), out / "alert.html"
    alert.write_text(alert_page(log), encoding="utf-8")
    page.goto(alert.resolve().as_uri())
    photograph(page, "alert.png", _ALERT_SIZE)
    page.goto((out / "report.html").resolve().as_uri())
    for name, size in _REPORT_SIZES.items():
        photograph(page, name, size)
    with Image.open(out / "cause.png") as cause:
        page.goto((out / "cause.png").resolve().as_uri())
        photograph(page, "diagnosis.png", cause.size)


def lines_of(demo: "subprocess.Popen[str]") -> Iterator[str]:
    """Yield what a run prints, line by line, and print it."""
    assert demo.stdout is not None
    for line in demo.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        yield line


def main() -> int:
    """Run the demo, and write the pictures; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/pictures"), help="where the demo writes")
    out: Path = parser.parse_args().out
    command = [sys.executable, "-m", "quantdrift", "demo", "--out", str(out)]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with (
        sync_playwright() as playwright,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as demo,  # noqa: S603 - the demo of this tree
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        log, address = "", ""
        for line in lines_of(demo):
            log += line
            if named := _PAGE.search(line):
                address = named[0]
            if _ALERT_IS_SHOWN in line:
                photograph_live(browser, address)
        if not demo.wait():
            photograph_results(browser, log, out)
        browser.close()
    return demo.returncode


if __name__ == "__main__":
    sys.exit(main())
