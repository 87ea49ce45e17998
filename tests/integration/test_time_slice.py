"""The time slice of processes on the serving path, as the kernel says it."""

import os
import subprocess
import sys

import pytest

from tests.support.sidecar.time_slices import time_slice_ns

pytestmark = pytest.mark.integration

_ASK = """
import os
from quantdrift.sidecar.state.time_slice import ask_for_short_slice
os.nice(3)
print(ask_for_short_slice(), os.getpriority(os.PRIO_PROCESS, 0), flush=True)
input()
"""


def test_the_kernel_takes_a_short_slice_and_leaves_the_niceness_as_it_is() -> None:
    """Without any right; a process that did not ask has a longer one."""
    usual_ns = time_slice_ns(os.getpid())
    if usual_ns is None:
        pytest.skip("this kernel is older than 6.12, or does not show time slices")
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("the tests run with another scheduling policy")
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + 3
    with subprocess.Popen(
        [sys.executable, "-c", _ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["True", str(niceness)]
        assert time_slice_ns(process.pid) == 100_000 < usual_ns
        process.stdin.write("\n")
