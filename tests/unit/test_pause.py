"""Paused sampling: a pause that cannot be read keeps sampling off."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from quantdrift.core.clock import SystemClock
from quantdrift.core.config import Config
from quantdrift.core.sampling.pause import MAX_BYTES, MOST_MODELS, Order, Pause, PauseError, decode, encode
from quantdrift.sidecar.capture.policy_watch import PolicyWatcher
from quantdrift.sidecar.state.counters import Counters
from quantdrift.sidecar.state.pause import Paused, PauseFiles, PauseSource, read_pause_file, write_pause
from quantdrift.sidecar.state.policy import NAME, PolicyFile, PolicyHistory

pytestmark = pytest.mark.unit

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ORDER = Order(by="ada", at=NOW)


def test_a_time_without_a_zone_is_no_pause() -> None:
    """It cannot be compared with now: every process of the fleet would stumble over it, once a second."""
    for member in ("at", "until"):
        raw = encode(Pause(everything=Order(by="ada", at=NOW, until=NOW))).replace(
            f'"{member}":"2026-01-01T00:00:00Z"'.encode(), f'"{member}":"2026-01-01T00:00:00"'.encode()
        )
        with pytest.raises(PauseError):
            decode(raw)


def test_what_a_sidecar_could_not_read_is_refused_at_once() -> None:
    """Too many words would hide every later order."""
    with pytest.raises(PauseError):
        Pause().paused(ORDER, "m" * MAX_BYTES)
    with pytest.raises(PauseError):
        Pause().paused(Order(by="ada", at=NOW, reason="r" * MAX_BYTES))


@pytest.mark.parametrize(
    "names",
    [[f"m{n}" for n in range(MOST_MODELS + 1)], ["m" * MAX_BYTES], [f"{n}" + "m" * 1000 for n in range(60)]],
    ids=["many", "long", "many and long"],
)
def test_a_file_that_names_too_much_pauses_everything(tmp_path: Path, names: list[str]) -> None:
    """More than asked is on the safe side; nothing is not."""
    file = tmp_path / "file"
    file.write_text("\n".join(names))
    write_pause(tmp_path, PauseSource.HERE, read_pause_file(file, NOW))
    assert PauseFiles(tmp_path).refresh() == Paused(everything=True)


def test_a_file_that_names_as_many_as_can_be_pauses_these(tmp_path: Path) -> None:
    """Comments and repetitions are none."""
    names = [f"model-{n}" for n in range(MOST_MODELS)]
    file = tmp_path / "file"
    file.write_text("\n".join(["# these", *names]))
    write_pause(tmp_path, PauseSource.HERE, read_pause_file(file, NOW))
    assert PauseFiles(tmp_path).refresh() == Paused(models=frozenset(names))


def test_a_bucket_that_is_away_resumes_nothing(tmp_path: Path) -> None:
    """A server that has not found it again answers as one that never had it; who resumes stores that."""
    config, slot = Config(), Counters.create(1, 1).slot(0)
    notice = PolicyFile(tmp_path / NAME)
    follower = PolicyWatcher(config, PolicyHistory(config.sampling), notice, slot, SystemClock())
    follower.handle_pause(encode(Pause(everything=ORDER)), tmp_path)
    for nothing in (None, b"no pause"):
        follower.handle_pause(nothing, tmp_path)
        assert PauseFiles(tmp_path).refresh() == Paused(everything=True)
    follower.handle_pause(encode(Pause()), tmp_path)
    assert not PauseFiles(tmp_path).refresh()
