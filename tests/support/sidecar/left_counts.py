"""The counts files in shared memory that the sidecars of tests leave: a sidecar that is killed leaves them for its successor."""

import contextlib

import msgspec

from quantdrift.core.process import shared_memory
from quantdrift.sidecar.state.counts_file import Description, EndedCounts


def remove_left_counts(source: str) -> int:
    """Remove the counts of each start of a sidecar with this name that is over; return how many there were."""
    n_removed = 0
    for path in shared_memory.SHARED_MEMORY.glob("quantdrift-*/*.rows"):
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            if msgspec.msgpack.decode(path.read_bytes(), type=Description).source != source:
                continue
            found = EndedCounts.open(path.with_suffix(".counts"))
            if found is not None:
                found.remove()
                found.close()
                n_removed += 1
    return n_removed
