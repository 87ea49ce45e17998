"""`python -m benchmarks.month`, in small: five days of the real processes, a rotation of keys and an upgrade from the newest release."""

import asyncio
import shutil
import subprocess

import pytest

from benchmarks.month import QUICK, month

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.release,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the shifted clock is made by a C compiler"),
]


def test_five_days_with_an_upgrade_lose_nothing_and_say_nothing_that_is_not_expected() -> None:
    """Each request is accounted for, partitions and rows are those that retention keeps, and nothing is restarted."""
    try:
        with month(QUICK, seed=1) as lived:
            asyncio.run(lived.run())
            lived.look_back()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the commit of the newest release is not here (a shallow clone): {error}")
    assert lived.problems == []
    figures = lived.figures()
    wrong = ("failed", "uncounted", "lost", "quarantined", "expired", "doubled", "unfolded", "restarts")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert len(lived.account.compared) > 20 * QUICK.days
    assert lived.days[-1].rows["comparison"] < len(lived.account.compared)  # the first days are deleted
