"""Settings of the C library's heap, each tested in a process of its own: they apply to a whole process."""

import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is another one"),
]

_ARENAS = """
import ctypes, sys, threading
from quantdrift.models.runtimes.malloc import configure
if sys.argv[1] == "settled":
    configure()
together = threading.Barrier(12)
def work():
    together.wait()
    kept = [bytearray(5_000) for _ in range(200)]
    together.wait()
threads = [threading.Thread(target=work) for _ in range(12)]
[one.start() for one in threads]
[one.join() for one in threads]
c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
file = c.fopen(sys.argv[2].encode(), b"w")
c.malloc_info(0, ctypes.c_void_p(file))
c.fclose(ctypes.c_void_p(file))
print(open(sys.argv[2]).read().count("<heap nr="))
"""
_FAULTS = """
import resource, sys
from quantdrift.models.runtimes.malloc import configure
if sys.argv[1] == "settled":
    configure()
def batch():
    first, second = bytearray(9_000_000), bytearray(20_000_000)
batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_TRIMMED = """
from quantdrift.models.runtimes.malloc import trim
from tests.support.resident_memory import resident_bytes
blocks = [bytearray(50_000) for _ in range(1_000)]
kept = blocks[9::10]  # what is free lies between what is in use
del blocks
before = resident_bytes()
trim()
print(before - resident_bytes())
"""


def _told(script: str, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, check=True, text=True, timeout=60
    )
    return int(done.stdout)


def test_threads_share_two_arenas(tmp_path: object) -> None:
    """Twelve threads at once would have more of their own."""
    assert _told(_ARENAS, "settled", f"{tmp_path}/settled.xml") == 2
    assert _told(_ARENAS, "alone", f"{tmp_path}/alone.xml") > 2


def test_the_buffers_of_a_batch_serve_the_next_one() -> None:
    """Else the system has to clear their pages each time: 7,000 of 4 kB for each batch, unless it has larger ones."""
    assert _told(_FAULTS, "settled") < 100
    assert _told(_FAULTS, "alone") > 100


def test_what_is_free_is_given_back() -> None:
    """Nine tenths of fifty megabytes are free, and in pieces."""
    assert _told(_TRIMMED) > 35_000_000
