"""Files that are written completely or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from quantdrift.core.whole_file import write_whole

pytestmark = pytest.mark.unit


def test_a_new_file_has_the_mode_that_was_asked_for_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    """Its folder is made, and no draft stays."""
    path = tmp_path / "folder" / "file"
    write_whole(path, b"one", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    write_whole(path, b"two", mode=0o600)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"two", 0o640)
    assert list(path.parent.iterdir()) == [path]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As a device is: replaced by a file, /dev/null would be gone for every program of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"content")
    reader.join()
    assert read == [b"content"]
    assert pipe.is_fifo()


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The folder's name is taken by a file."""
    (tmp_path / "taken").write_text("before")
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "taken" / "file", b"content")
    assert (tmp_path / "taken").read_text() == "before"
