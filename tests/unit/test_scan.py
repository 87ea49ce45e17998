"""The scan of locked packages for known weaknesses, from an export of OSV."""

import json
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy.scan import is_affected, main, pins

pytestmark = pytest.mark.unit

NOW = datetime.now(UTC)
# As https://osv.dev writes one.
WEAKNESS: dict[str, Any] = {
    "id": "GHSA-aaaa-bbbb-cccc",
    "modified": NOW.isoformat(),
    "aliases": ["CVE-2026-0001"],
    "summary": "Something can be read",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Some_Package"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "1.2"}, {"fixed": "1.4.1"}]}],
            "versions": ["1.3.post1"],
        }
    ],
}


def export(folder: Path, *documents: dict[str, Any]) -> Path:
    """Write an export, and a lock beside it."""
    (folder / "role.txt").write_text(
        "some-package[extra]==1.4 \\\n    --hash=sha256:00\nother==2.0 ; python_version < '4' \\\n    --hash=sha256:01\n"
    )
    path = folder / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for document in documents:
            archive.writestr(f"{document['id']}.json", json.dumps(document))
    return path


def scanned(path: Path) -> int:
    """Scan the lock beside an export."""
    return main([str(path), "--locks", str(path.parent)])


def test_a_known_weakness_of_a_locked_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the lock, the version and all names of the weakness; the exit code is 3."""
    assert scanned(export(tmp_path, WEAKNESS)) == 3
    assert capsys.readouterr().out.splitlines() == [
        "role.txt: some-package 1.4: GHSA-aaaa-bbbb-cccc, CVE-2026-0001: Something can be read",
        f"1 known weaknesses in 2 locked packages, by 1 documents of OSV up to {NOW:%Y-%m-%d}",
    ]


def test_a_withdrawn_weakness_and_one_of_another_ecosystem_are_none(tmp_path: Path) -> None:
    """The exit code is 0."""
    other = json.loads(json.dumps(WEAKNESS).replace("PyPI", "npm"))
    assert scanned(export(tmp_path, {**WEAKNESS, "withdrawn": NOW.isoformat()}, {**other, "id": "x"})) == 0


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ((), "has 0 documents"),
        (
            ({**WEAKNESS, "modified": (NOW - timedelta(days=30)).isoformat()},),
            "30 days ago: get a newer export",
        ),
    ],
)
def test_an_export_that_says_nothing_of_today_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: tuple[dict[str, Any], ...], words: str
) -> None:
    """No weakness found in an empty or old export would be no news."""
    assert scanned(export(tmp_path, *documents)) == 1
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is one that is not there."""
    (tmp_path / "all.zip").write_text("no archive")
    assert (scanned(tmp_path / "all.zip"), scanned(tmp_path / "none.zip")) == (1, 1)
    assert "is no export of OSV" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "affected"),
    [("1.1", False), ("1.2", True), ("1.4", True), ("1.4.1", False), ("2.0", False), ("1.3.post1", True)],
)
def test_a_version_is_in_a_range_or_in_the_list(version: str, *, affected: bool) -> None:
    """From where the weakness came in to where it was mended, which is outside."""
    assert is_affected(version, WEAKNESS["affected"][0]) is affected


def test_all_images_are_scanned() -> None:
    """Each lock names packages with their versions."""
    locks = pins()
    assert {"sidecar.txt", "shadow.txt", "shadow-cuda.txt", "monitor.txt", "build.txt"} <= locks.keys()
    assert all(locks.values())
    assert locks["monitor.txt"]["joserfc"]
