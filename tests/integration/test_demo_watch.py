"""The demo's view of what runs."""

from pathlib import Path

import pytest

from quantdrift.demo.services import Ports, Services
from quantdrift.demo.watch import DemoWatch, Moment

pytestmark = pytest.mark.integration


async def test_what_does_not_answer_is_shown_as_the_last_known_state(tmp_path: Path) -> None:
    """With everything down a look gives what was known, marked as stale, and does not raise."""
    nothing = Services(ports=Ports.free(), config=tmp_path / "config.toml", data=tmp_path, environment={})
    async with DemoWatch(nothing) as watch:
        assert await watch.look() == Moment(stale=True)
