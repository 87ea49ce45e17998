"""The shared counters as a file in the memory of the machine, which outlives the processes of the sidecar.

Each start of a sidecar has two files in a directory of its user in `/dev/shm`: the table, which all its processes map,
and a description of its rows and columns. Memory, not a disk: a write to a mapped file on a disk may wait for the disk,
and relay workers must never wait.

Every process of the sidecar keeps the table open, and with it a lock. If nobody has the lock, the start is over, however
it ended: the capture process of any later start with the same stream publishes its last counts, and removes the files
once the stream has them. What such a start had taken and neither published nor lost is lost with it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import msgspec

from quantdrift.core.clock import Clock, SystemClock
from quantdrift.core.config.schema import Stream
from quantdrift.core.errors import OperatorError
from quantdrift.core.process import shared_memory
from quantdrift.core.records import Tally
from quantdrift.sidecar.state.counters import COLUMNS, MAX_ROWS, N_GAUGES, Counters, Gauge, Row, sum_strata

_LOG = logging.getLogger(__name__)

MOST_ENDED: Final = 64
"""Starts whose counts wait until the stream takes them, those of all sidecars of one user together."""
_TABLE: Final = ".counts"
_DESCRIPTION: Final = ".rows"
_NEW: Final = ".new"


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of a table: another release may have written it.

    Parameters
    ----------
    source, boot
        The sidecar and its start.
    n_slots, n_rows, n_gauges
        The layout of the table, as in `Counters`.
    gauges, columns
        Names of the gauges and of the columns of a row, in their order.
    rows
        The stratum and model of each row in use.
    """

    source: str
    boot: str
    n_slots: int
    n_rows: int
    n_gauges: int
    gauges: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


_GAUGES: Final = tuple(gauge.name for gauge in Gauge)


class CountsFile:
    """The counters of this start. Use `create`.

    Attributes
    ----------
    counters : Counters
        The counters, in a file or, where that is not possible, in anonymous memory.
    path : Path | None
        The table; None: in anonymous memory.
    """

    def __init__(self, counters: Counters, path: Path | None, description: Description) -> None:
        self.counters = counters
        self.path = path
        self._description = description

    @classmethod
    def create(cls, stream: Stream, *, source: str, boot: str, n_slots: int, rows: tuple[Row, ...]) -> Self:
        """Create the counters of a new start, and remove the oldest of too many that nobody published."""
        description = Description(
            source=source,
            boot=boot,
            n_slots=n_slots,
            n_rows=MAX_ROWS,
            n_gauges=N_GAUGES,
            gauges=_GAUGES,
            columns=COLUMNS,
            rows=rows,
        )
        try:
            directory = shared_memory.user_directory(make=True)
            _remove_oldest(directory)
            path = directory / f"{_key(stream)}-{boot}{_TABLE}"
            counters = _create_table(path, description)
        except OSError as error:
            _LOG.warning(
                "the counts cannot be kept in %s (%s): if the sidecar's supervisor is killed, what it counted since its"
                " last tally is not reported. Mount a writable /dev/shm",
                shared_memory.SHARED_MEMORY,
                error,
            )
            return cls(Counters.create(n_slots, MAX_ROWS), None, description)
        return cls(counters, path, description)

    def describe(self, rows: tuple[Row, ...]) -> None:
        """Take other rows into use, before any process does.

        Raises
        ------
        OperatorError
            There is no memory for them.
        """
        if self.path is None or rows == self._description.rows:
            return
        self._description = msgspec.structs.replace(self._description, rows=rows)
        try:
            self.counters.reserve(len(rows))
            _write(self.path.with_suffix(_DESCRIPTION), self._description)
        except OSError as error:
            raise OperatorError(
                f"{self.path} has no room for more header strata or models: {error}"
            ) from error


class EndedCounts:
    """The counts of a start that is over, in the table at `path`, locked until `close`."""

    def __init__(self, path: Path, fd: int, description: Description) -> None:
        self.path = path
        self._fd = fd
        self._description = description

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open a table; None while a process of its start, or another sidecar that publishes it, still has the lock.

        Raises
        ------
        OSError, ValueError, msgspec.MsgspecError
            It cannot be read.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # published and removed meanwhile
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == path.stat().st_ino:
                content = path.with_suffix(_DESCRIPTION).read_bytes()
                return cls(path, fd, msgspec.msgpack.decode(content, type=Description))
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def tally(self, clock: Clock) -> Tally:
        """Return the last tally of this start: what it had in memory counts as lost.

        Raises
        ------
        ValueError
            The table is shorter than its description says.
        """
        description = self._description
        width = len(description.columns)
        stride = description.n_gauges + description.n_rows * width
        content = memoryview(os.pread(self._fd, description.n_slots * stride * 8, 0)).cast("q")
        if len(content) != description.n_slots * stride:
            raise ValueError("the table is shorter than its description says")
        places = [
            description.columns.index(name) if name in description.columns else None for name in COLUMNS
        ]
        gauges = {name: sum(content[index::stride]) for index, name in enumerate(description.gauges)}

        def of_row(row: int) -> list[int]:
            starts = range(description.n_gauges + row * width, len(content), stride)
            return [0 if at is None else sum(content[start + at] for start in starts) for at in places]

        return Tally(
            source=description.source,
            boot=description.boot,
            sequence=gauges.get(Gauge.SEQUENCE.name, 0) + 1,
            at=clock.now(),
            strata=sum_strata(description.rows, map(of_row, range(len(description.rows))), ended=True),
            blind_connections=gauges.get(Gauge.BLIND.name, 0),
            final=True,
        )

    def remove(self) -> None:
        """Remove the files: the stream has the last tally."""
        remove(self.path)

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._fd)


def remove(path: Path) -> None:
    """Remove a table and its description."""
    for part in (path, path.with_suffix(_DESCRIPTION)):
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def ended(stream: Stream) -> Iterator[EndedCounts]:
    """Yield the counts of each start that is over and published to `stream`, the oldest first; one at a time is locked."""
    try:
        paths = _tables(shared_memory.user_directory(), f"{_key(stream)}-")
    except OSError:
        return
    for path in paths:
        try:
            counts = EndedCounts.open(path)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _LOG.warning("removed the unreadable counts of an earlier start, %s: %s", path, error)
            remove(path)
            continue
        if counts is not None:
            try:
                yield counts
            finally:
                counts.close()


def _create_table(path: Path, description: Description) -> Counters:
    """Create a table with its description; nobody sees it before it is locked."""
    _write(path.with_suffix(_DESCRIPTION), description)
    new = path.with_suffix(_NEW)
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            counters = Counters.create(description.n_slots, description.n_rows, fd)
            # Without reserved memory a full /dev/shm would end a process at its first write to a new page.
            counters.reserve(len(description.rows))
            new.replace(path)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        new.unlink(missing_ok=True)
        remove(path)
        raise
    return counters


def _write(path: Path, description: Description) -> None:
    new = path.with_suffix(_DESCRIPTION + _NEW)
    new.write_bytes(msgspec.msgpack.encode(description))
    new.replace(path)


def _remove_oldest(directory: Path) -> None:
    """Remove what is beyond `MOST_ENDED`, so that a sidecar that is killed for ever does not fill the memory."""
    for path in _tables(directory)[:-MOST_ENDED]:
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            counts = EndedCounts.open(path)
            if counts is None:
                continue
            try:
                n_taken = sum(stratum.taken for stratum in counts.tally(SystemClock()).strata)
                if n_taken:
                    _LOG.warning(
                        "removed the counts of an earlier start, %s, which were never published: more than %d wait. Of the %d"
                        " requests that it sampled, those since its last tally are counted nowhere",
                        path,
                        MOST_ENDED,
                        n_taken,
                    )
                counts.remove()
            finally:
                counts.close()


def _tables(directory: Path, prefix: str = "") -> list[Path]:
    """Return the tables in `directory`, the oldest first."""
    timed_paths = []
    for path in directory.glob(f"{prefix}*{_TABLE}"):
        with contextlib.suppress(FileNotFoundError):
            timed_paths.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(timed_paths)]


def _key(stream: Stream) -> str:
    """Return a name for the stream that stays the same if a password, or the port of an embedded server, changes."""
    servers = [_server(server.url, stream) for server in stream.servers]
    return hashlib.sha256("\n".join((stream.name, *sorted(servers))).encode()).hexdigest()[:16]


def _server(url: str, stream: Stream) -> str:
    # `quantdrift up` gives its embedded server another port at each start. Its keys stay where they are, and those of another
    # `quantdrift up` are in another directory. A directory that was deleted and created again has another certificate authority: what
    # the deleted one had counted was in a stream that is gone with it, and would look like a loss in the new one.
    parts = urlsplit(url)
    if not (stream.credentials_file and parts.hostname == "127.0.0.1"):
        return f"{parts.hostname}:{parts.port}"
    authority = b""
    with contextlib.suppress(OSError):
        authority = Path(stream.ca_file).read_bytes() if stream.ca_file else b""
    return f"{stream.credentials_file} {hashlib.sha256(authority).hexdigest()}"
