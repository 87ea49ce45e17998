"""Plots in a real browser: their labels as they are drawn, at the widths of phones and of large screens."""

from datetime import UTC, datetime, timedelta
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser

from quantdrift.show.charts import LETTER, Point, VerticalLine, bars, line

pytestmark = pytest.mark.browser

BEGIN = datetime(2026, 9, 28, 21, 4, 30, tzinfo=UTC)
_LETTERS = """() => [...document.querySelectorAll("svg.plot")].flatMap((plot, n) => {
  const card = plot.closest("figure").getBoundingClientRect();
  return [...plot.querySelectorAll("text")].map((text) => {
    const box = text.getBoundingClientRect();
    return {plot: n, text: text.textContent, left: box.left, right: box.right, top: box.top, bottom: box.bottom,
      inside: box.left >= card.left && box.right <= card.right};
  }).filter((box) => box.right > box.left);
})"""


def _plots() -> str:
    parts = []
    for span in (
        timedelta(minutes=5),
        timedelta(hours=26),
        timedelta(days=7),
        timedelta(days=92),
        timedelta(days=400),
    ):
        width = span / 40
        points = [Point(BEGIN + n * width, 0.002 + 0.0003 * (n % 7), 0.001, 0.01) for n in range(40)]
        marks = [
            VerticalLine(
                at=BEGIN + span * n / 9,
                kind=("release", "onset", "alert", "decision")[n % 4],
                text=f"int8-{n} released",
            )
            for n in range(9)
        ]
        parts.append(
            line(
                points,
                BEGIN,
                BEGIN + span,
                title="flips",
                width=width,
                budget=0.01,
                baseline=0.001,
                marks=marks,
            )
        )
    parts.append(bars([1.0] * 64, [2.0] * 64, title="divergence"))
    return "".join(f'<figure class="card">{part}</figure>' for part in parts)


def _overlap(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return bool(
        first["left"] < second["right"]
        and second["left"] < first["right"]
        and first["top"] < second["bottom"]
        and second["top"] < first["bottom"]
    )


@pytest.mark.parametrize(
    "width", [320, *(pytest.param(width, marks=pytest.mark.release) for width in (390, 640, 900, 1600)), 1280]
)
async def test_no_label_of_a_plot_covers_another_one_or_leaves_its_card(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    """Letters as the browser draws them: as large on a phone as on a wide screen, and never narrower than the text needs."""
    style = files("quantdrift.show").joinpath("style.css").read_text("utf-8")
    page_file = tmp_path / "plots.html"
    page_file.write_text(
        f"<!doctype html><meta name=viewport content='width=device-width'><style>{style}</style><main>{_plots()}</main>"
    )
    page = await browser.new_page(viewport={"width": width, "height": 900})
    await page.goto(page_file.as_uri())
    boxes = await page.evaluate(_LETTERS)
    assert len(boxes) > 6 * 5
    assert [box["text"] for box in boxes if not box["inside"]] == []
    sizes = {box["text"]: box["right"] - box["left"] for box in boxes}
    assert {text: size for text, size in sizes.items() if size > LETTER * len(text) + 1} == {}
    for _, group in groupby(boxes, key=lambda box: box["plot"]):
        ordered = sorted(group, key=lambda box: (box["top"], box["left"]))
        assert [(a["text"], b["text"]) for a, b in pairwise(ordered) if _overlap(a, b)] == []
