"""The files by which the processes of a sidecar share state."""

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Config
from quantdrift.core.sampling.pause import Order, Pause
from quantdrift.sidecar.state.config import LiveConfig, LiveConfigFile, write_live_config
from quantdrift.sidecar.state.pause import Paused, PauseFiles, PauseSource, write_pause
from quantdrift.sidecar.state.state_file import StateFile

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 22, tzinfo=UTC)


class Thing(msgspec.Struct, frozen=True):
    """A record of this test."""

    name: str


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that does not exist yet."""
    return tmp_path / "thing"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings so far."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_reader_sees_each_new_record_once(path: Path) -> None:
    """There is no record before the first write; a refresh without a change says so."""
    reader, writer = StateFile(path, Thing), StateFile(path, Thing)
    assert not reader.refresh()
    assert reader.record is None
    for name in ("a", "b", "c"):  # of one length: the time or the inode must tell
        writer.write(Thing(name))
        assert reader.refresh()
        assert reader.record == Thing(name)
        assert not reader.refresh()


def test_an_unchanged_file_is_not_read_again(path: Path) -> None:
    """A refresh looks at the status only: the content, spoilt behind its back, is not looked at."""
    reader = StateFile(path, Thing)
    reader.write(Thing("a"))
    assert reader.refresh()
    times = path.stat()
    with path.open("r+b") as file:
        file.write(b"\xc1")

    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not reader.refresh()
    assert reader.record == Thing("a")


@pytest.mark.parametrize(
    "damage", [b"", b"\x81\xa4na", b"\xc1", b"\x81\xa4name\x07", b"\x81\xa4name\xa1\xff"]
)
def test_a_half_written_file_keeps_the_last_record_until_it_is_whole(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the file; the whole file is read as soon as it is there."""
    reader = StateFile(path, Thing)
    reader.write(Thing("a"))
    reader.refresh()
    path.write_bytes(damage)
    assert not reader.refresh()
    assert reader.record == Thing("a")
    assert [str(path) in line for line in warnings(caplog)] == [True]
    reader.write(Thing("b"))
    assert reader.refresh()
    assert reader.record == Thing("b")


def test_a_file_that_cannot_be_read_is_named_every_ten_minutes_only(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every process polls once a second: a warning each would be 86,400 lines a day."""
    clock = ManualClock(NOW)
    reader = StateFile(path, Thing, clock=clock)
    path.mkdir()  # it exists, and cannot be read
    for _ in range(1200):
        assert not reader.refresh()
        clock.advance(1.0)
    assert len(warnings(caplog)) == 2


def test_a_missing_file_means_no_record_unless_it_is_required(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy or pause ends with its file; a configuration does not."""
    reader, required = StateFile(path, Thing), StateFile(path, Thing, required=True)
    reader.write(Thing("a"))
    reader.refresh()
    required.refresh()
    path.unlink()
    assert reader.refresh()
    assert reader.record is None
    assert not reader.refresh()
    assert warnings(caplog) == []
    assert not required.refresh()
    assert required.record == Thing("a")
    assert [str(path) in line for line in warnings(caplog)] == [True]


def test_a_damaged_configuration_is_logged_once_and_not_every_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A child process keeps the configuration in effect, and its log names the file."""
    path = write_live_config(LiveConfig.of(Config()), tmp_path)
    file = LiveConfigFile(path)
    path.write_bytes(b"half")
    assert [file.refresh() for _ in range(60)] == [False] * 60
    assert file.current == LiveConfig.of(Config())
    assert [str(path) in line for line in warnings(caplog)] == [True]


def test_a_damaged_pause_file_keeps_the_pause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sampling that a person has paused does not go on because a disk is full."""
    write_pause(tmp_path, PauseSource.HERE, Pause(everything=Order(by="me", at=NOW)))
    files = PauseFiles(tmp_path)
    assert files.refresh() == Paused(everything=True)
    (tmp_path / PauseSource.HERE).write_bytes(b"")
    assert [files.refresh() for _ in range(60)] == [Paused(everything=True)] * 60
    assert len(warnings(caplog)) == 1
