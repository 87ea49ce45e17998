"""The plots that benchmarks draw: `benchmarks.plots`."""

from pathlib import Path

import pytest

from benchmarks.plots import Stack, stacked

pytestmark = pytest.mark.unit


def test_costs_along_an_axis_are_drawn_part_by_part(tmp_path: Path) -> None:
    """Each axis and each part is named, and the total of one panel is its height."""
    panels = [
        Stack(
            label=label,
            values=values,
            parts=[{"worker": 100.0 / value, "NATS": 20.0} for value in values],
        )
        for label, values in (("exchanges in a batch", (1, 3, 64)), ("slices", (40, 1_000)))
    ]
    png, svg = stacked("Processor time", panels, tmp_path, "costs")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text(encoding="utf-8")
    for drawn in ("exchanges in a batch", "slices", "worker", "NATS", "1,000", "Processor time"):
        assert f"<!-- {drawn} -->" in text
