"""Compiled loops give the results of their source, and the cache never serves older code."""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.evidence.numba_cache import dot, folder_for, user_cache

SCRIPT = """
import pickle, sys
from tests.unit.test_numba_cache import courses
sys.stdout.buffer.write(pickle.dumps(courses()))
"""


def courses() -> dict[str, list[Any]]:
    """Return what live, alerting and learning signals of every kind go through, and where that leaves them."""
    from tests.support.monitor.detectors import given, mixed, phases

    found = {}
    for kind, detector in DETECTORS.items():
        states = phases(kind)
        path = detector.run(states, given(kind, mixed(1, len(states))))
        every = path.stopped(np.full(len(states), len(path.page) - 1))
        found[kind] = [path.page, path.page_mass, path.ticket, path.ticket_mass, path.recovery, every]
    return found


@pytest.mark.integration
def test_compiled_code_does_what_its_source_does_in_the_interpreter() -> None:
    """Every detector, in every stage, in a process that compiles nothing: the same to the rounding of a sum."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, check=True)
    interpreted = pickle.loads(done.stdout)
    for kind, parts in courses().items():
        for one, other in zip(parts, interpreted[kind], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-15)


@pytest.mark.unit
def test_a_sum_in_lanes_misses_nothing() -> None:
    """Of any length, also one that the lanes do not divide."""
    for n in range(12):
        values = np.arange(1.0, n + 1)
        assert dot(values, values) == (values**2).sum()


@pytest.mark.unit
def test_machine_code_is_kept_by_the_digest_of_its_sources(tmp_path: Path) -> None:
    """In one folder as long as no source changes; where there can be none it is not kept."""
    place = folder_for(tmp_path / "new")
    assert place is not None
    assert place.parent == tmp_path / "new"
    assert place == folder_for(tmp_path / "new")
    (tmp_path / "file").touch()
    assert folder_for(tmp_path / "file") is None


@pytest.mark.unit
def test_what_an_image_holds_is_used_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a copy that nobody else may write to."""
    held = folder_for(tmp_path)
    assert held is not None
    (held / "code").write_bytes(b"\x90")

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", refuse)
        copy = folder_for(tmp_path)
    assert copy is not None
    assert copy != held
    assert (copy / "code").read_bytes() == b"\x90"
    assert copy.parent.stat().st_mode & 0o077 == 0


@pytest.mark.unit
def test_code_that_others_may_have_written_is_not_loaded(tmp_path: Path) -> None:
    """What is kept is loaded as it lies there: a folder that is open to others holds nothing for us."""
    held = folder_for(tmp_path)
    assert held is not None
    held.chmod(0o777)
    assert folder_for(tmp_path) is None
    held.chmod(0o700)
    assert folder_for(tmp_path) == held


@pytest.mark.unit
def test_where_the_sources_belong_to_another_user_the_code_is_kept_in_the_cache_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody else could put another folder in its place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert user_cache() == tmp_path / "cache" / "quantdrift"
    tmp_path.chmod(0o777)
    assert user_cache() is None
    tmp_path.chmod(0o1777)
    assert user_cache() == tmp_path / "cache" / "quantdrift"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "quantdrift"
