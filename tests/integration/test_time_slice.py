"""The time slice of processes on the serving path, as the kernel says it."""

import os
import subprocess
import sys

import pytest

from quantdrift.sidecar.supervisor import give_short_slice
from tests.support.sidecar.time_slices import time_slice_ns

pytestmark = pytest.mark.integration

_CHILD = "import os; os.nice(3); print(flush=True); input()"


def test_the_kernel_takes_a_short_slice_and_leaves_the_niceness_as_it_is() -> None:
    """Without any right; every other process has a longer one. A process that has ended is none."""
    usual_ns = time_slice_ns(os.getpid())
    if usual_ns is None:
        pytest.skip("this kernel is older than 6.12, or does not show time slices")
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests run with another scheduling policy")
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 3
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        assert give_short_slice(process.pid)
        assert time_slice_ns(process.pid) == 100_000 < usual_ns
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == niceness
        process.stdin.write("\n")
    assert not give_short_slice(process.pid)
