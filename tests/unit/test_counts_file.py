"""The files that keep the counts of a sidecar beyond its processes."""

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import OperatorError
from quantdrift.core.process import shared_memory
from quantdrift.core.records import Loss, Tally
from quantdrift.sidecar.state import counts_file
from quantdrift.sidecar.state.counters import COLUMNS, Count, Gauge, Row
from quantdrift.sidecar.state.counts_file import CountsFile, Description, ended
from tests.support.sidecar.left_counts import remove_left_counts

pytestmark = pytest.mark.unit

STREAM = Stream(url="nats://nats:4222", name="s")
ROWS = (Row("default"), Row("default", "digits"))
CLOCK = ManualClock(datetime(2026, 11, 22, tzinfo=UTC))


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the files in a directory of the test's own."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return tmp_path / f"quantdrift-{os.geteuid()}"


def start(boot: str, stream: Stream = STREAM) -> CountsFile:
    """Return the counters of a new start with two processes."""
    return CountsFile.create(stream, source="pod", boot=boot * 32, n_slots=2, rows=ROWS)


def end(started: CountsFile) -> None:
    """End the only process that has the counters open, in whatever way."""
    fcntl.flock(started.counters.fd, fcntl.LOCK_UN)
    os.close(started.counters.fd)


def last_tally() -> Tally:
    """Return the last tally of the only start that is over."""
    (tally,) = [found.tally(CLOCK) for found in ended(STREAM)]
    return tally


def published(stream: Stream = STREAM) -> list[str]:
    """Return the boots whose counts wait to be published."""
    return [found.tally(CLOCK).boot[0] for found in ended(stream)]


def test_the_last_tally_of_a_start_that_is_over_counts_the_rest_as_lost() -> None:
    """While a process runs nobody takes its counts; then one does, and the files are removed."""
    started = start("a")
    relay, capture = started.counters.slot(0), started.counters.slot(1)
    relay.add(0, Count.OFFERED, 20)
    relay.add(0, Count.TAKEN, 10)
    relay.lose(0, Loss.HELD_BYTES)
    for _ in range(6):
        capture.move(0, 1, Count.TAKEN)
    capture.add(1, Count.PUBLISHED, 4)
    capture.set(Gauge.SEQUENCE, 7)
    assert published() == []
    end(started)
    assert published(Stream(url="nats://nats:4222", name="other")) == []
    tally = last_tally()
    assert (tally.source, tally.boot, tally.sequence, tally.final) == ("pod", "a" * 32, 8, True)
    (count,) = tally.strata
    assert (count.offered, count.taken, count.published) == (20, 10, 4)
    assert count.lost == {Loss.HELD_BYTES: 1, Loss.PROCESS_ENDED: 5}
    assert (count.models["digits"].taken, count.models["digits"].lost) == (6, {Loss.PROCESS_ENDED: 2})
    for found in ended(STREAM):
        found.remove()
    assert published() == []


def test_the_counts_of_another_release_are_read_by_the_names_of_their_columns(memory: Path) -> None:
    """It may have fewer columns, others, and another order of them."""
    started = start("a")
    end(started)
    (table,) = memory.glob("*.counts")
    names = ("TAKEN", "a_new_one", "decode", "OFFERED")
    description = Description(
        source="pod",
        boot="a" * 32,
        n_slots=1,
        n_rows=2,
        n_gauges=1,
        gauges=("SEQUENCE",),
        columns=names,
        rows=ROWS,
    )
    cells = [3, *(5, 100, 1, 9), *(2, 100, 2, 0)]
    table.write_bytes(b"".join(cell.to_bytes(8, "little") for cell in cells))
    table.with_suffix(".rows").write_bytes(msgspec.msgpack.encode(description))
    tally = last_tally()
    (count,) = tally.strata
    assert (tally.sequence, count.offered, count.taken) == (4, 9, 7)
    assert count.lost == {Loss.DECODE: 3, Loss.PROCESS_ENDED: 4}
    assert "PUBLISHED" in COLUMNS


def test_rows_that_are_added_later_are_in_the_last_tally() -> None:
    """A reloaded configuration adds them before any process counts in them."""
    started = start("a")
    started.describe((*ROWS, Row("faint", "digits")))
    started.counters.slot(0).add(2, Count.OFFERED, 3)
    end(started)
    assert {one.stratum: one.offered for one in last_tally().strata} == {"default": 0, "faint": 3}


def test_without_room_for_more_rows_the_new_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that wrote to memory that is not there would be ended by the system."""
    started = start("a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OperatorError, match=r"no room for more header strata or models: .*No space left"):
        started.describe((*ROWS, Row("faint")))


@pytest.mark.parametrize("fault", ["missing", "full", "foreign"])
def test_without_shared_memory_counts_work_as_before_and_the_log_says_so(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """No directory, no room in it, or one that others can write to."""
    if fault == "missing":
        monkeypatch.setattr(shared_memory, "SHARED_MEMORY", memory / "none")
    elif fault == "foreign":
        memory.mkdir()
        memory.chmod(0o777)
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    started = start("a")
    assert started.path is None
    started.counters.slot(1).add(1, Count.TAKEN)
    started.describe((*ROWS, Row("faint")))
    assert started.counters.strata(ROWS)[0].taken == 1
    (record,) = caplog.records
    assert (
        "if the sidecar's supervisor is killed, what it counted since its last tally is not reported"
        in record.message
    )
    assert not list(memory.glob("*"))
    end(started)


def test_the_oldest_of_too_many_starts_are_removed_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sidecar that is killed again and again while NATS is away does not fill the memory; one that runs stays."""
    monkeypatch.setattr(counts_file, "MOST_ENDED", 3)
    running = start("a")
    for number, boot in enumerate("bcde"):
        started = start(boot)
        started.counters.slot(0).add(0, Count.TAKEN, number)
        os.utime(started.counters.fd, ns=(number, number))
        end(started)
    last = start("f")
    assert published() == ["d", "e"]
    (record,) = caplog.records  # nothing is lost with the first
    assert (
        "Of the 1 requests that it sampled, those since its last tally are counted nowhere" in record.message
    )
    end(running)
    end(last)
    assert set(published()) == set("adef")


def test_an_embedded_server_keeps_its_counts_when_its_port_changes() -> None:
    """`quantdrift up` gives it a new port and the same keys; elsewhere a new password changes nothing.

    Another `quantdrift up` of the same user has other keys, and its counts are not taken for those of this one.
    """
    end(start("a", Stream(url="tls://127.0.0.1:1", name="s", credentials_file="/one/sidecar.nk")))
    assert published(Stream(url="tls://127.0.0.1:2", name="s", credentials_file="/one/sidecar.nk")) == ["a"]
    assert published(Stream(url="tls://127.0.0.1:1", name="s", credentials_file="/two/sidecar.nk")) == []
    end(start("b", Stream(url="nats://u:old@nats:4222", name="s")))
    assert published(Stream(url="nats://u:new@nats:4222", name="s")) == ["b"]


def test_a_data_directory_that_was_deleted_and_made_anew_does_not_get_the_counts_of_the_old_one(
    tmp_path: Path,
) -> None:
    """Its server has a certificate authority of its own, although every path is the same."""
    authority = tmp_path / "authority.pem"
    stream = Stream(
        url="tls://127.0.0.1:1", name="s", credentials_file="/one/sidecar.nk", ca_file=str(authority)
    )
    authority.write_text("the first", "ascii")
    end(start("a", stream))
    assert published(stream) == ["a"]
    authority.write_text("the second", "ascii")
    assert published(stream) == []


def test_unreadable_counts_are_removed_and_one_that_another_sidecar_publishes_is_left(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever lies there, the next tally is not held up."""
    end(start("a"))
    end(start("b"))
    first, second = sorted(memory.glob("*.counts"))
    first.with_suffix(".rows").write_bytes(b"no MessagePack")
    with second.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert published() == []
    assert "removed the unreadable counts" in caplog.text
    assert published() == ["b"]


def test_the_tests_remove_what_their_own_sidecars_left_and_nothing_else(memory: Path) -> None:
    """A start that runs, and one of another sidecar, keep their files."""
    left, running = start("a"), start("b")
    other = CountsFile.create(STREAM, source="another", boot="c" * 32, n_slots=2, rows=ROWS)
    end(left)
    end(other)
    assert remove_left_counts("pod") == 1
    assert published() == ["c"]
    assert len(list(memory.glob("*.counts"))) == 2
    end(running)
    assert remove_left_counts("pod") == 1
    assert published() == ["c"]
