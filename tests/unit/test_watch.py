"""The configuration's files are looked at: whatever changes, and whenever, is found once it rests."""

from pathlib import Path

import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.sidecar.state.config import FileWatch

pytestmark = pytest.mark.unit


def test_a_change_before_the_first_look_is_found(tmp_path: Path) -> None:
    """The configuration of the start was read earlier: ports and children come in between."""
    path = tmp_path / "config.toml"
    path.write_text("[sampling]\nrate = 0.5\n")
    watch = FileWatch(path)
    assert watch.poll() is None
    found = watch.poll()
    assert found is not None
    assert found.sampling.rate == 0.5
    assert watch.poll() is None


def test_a_file_that_is_none_is_told_of_once_and_left(tmp_path: Path) -> None:
    """The next change is looked at again."""
    path = tmp_path / "config.toml"
    path.write_text("no [toml")
    watch = FileWatch(path)
    assert watch.poll() is None
    with pytest.raises(OperatorError):
        watch.poll()
    assert watch.poll() is None
    path.write_text("[sampling]\nrate = 0.25\n")
    assert watch.poll() is None
    assert watch.poll() is not None
