"""Compare the locked packages of all images with the known weaknesses of a dated export of OSV: `make scan OSV=all.zip`.

It needs no network. The export is the file of <https://osv.dev> for PyPI, `https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip`, which
somebody brings: a ZIP archive with one JSON document for each weakness (<https://ossf.github.io/osv-schema/>). Its date is that of the newest
change in it. What was published later cannot be found, so an export that is too old is refused.

Exit codes: 0 no known weakness, 1 the export cannot be used or is too old, 3 a locked package has one.
"""

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

LOCKS: Final = Path(__file__).resolve().parent / "images"
MOST_AGE: Final = timedelta(days=14)
_PIN: Final = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", re.MULTILINE)
_FOUND: Final = 3


class Weakness(NamedTuple):
    """A known weakness of a locked package."""

    lock: str
    package: str
    version: str
    id: str
    aliases: tuple[str, ...]
    summary: str


class ScanError(Exception):
    """The export cannot be used; the message says why."""


def pins(folder: Path = LOCKS) -> dict[str, dict[str, str]]:
    """Return the versions of each lock, by the package's normalised name."""
    return {
        path.name: {
            canonicalize_name(name): version for name, version in _PIN.findall(path.read_text("utf-8"))
        }
        for path in sorted(folder.glob("*.txt"))
    }


def documents(archive: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of an export.

    Raises
    ------
    ScanError
        It is none.
    """
    try:
        with zipfile.ZipFile(archive) as export:
            for name in export.namelist():
                if name.endswith(".json"):
                    yield json.loads(export.read(name))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ScanError(f"{archive} is no export of OSV: {error}") from error


def scan(
    locks: Mapping[str, Mapping[str, str]], found: Iterator[dict[str, Any]]
) -> tuple[list[Weakness], datetime, int]:
    """Return the known weaknesses of locked packages, the time of the newest change in the export, and the number of its documents."""
    weaknesses, newest, n = [], datetime.min.replace(tzinfo=UTC), 0
    for document in found:
        n += 1
        newest = max(newest, datetime.fromisoformat(document["modified"]))
        if "withdrawn" in document:
            continue
        for affected in document.get("affected", ()):
            package = affected.get("package", {})
            if package.get("ecosystem") != "PyPI":
                continue
            name = canonicalize_name(package["name"])
            weaknesses += [
                Weakness(
                    lock,
                    name,
                    versions[name],
                    document["id"],
                    tuple(document.get("aliases", ())),
                    document.get("summary", ""),
                )
                for lock, versions in locks.items()
                if name in versions and is_affected(versions[name], affected)
            ]
    return weaknesses, newest, n


def is_affected(version: str, affected: Mapping[str, Any]) -> bool:
    """Return whether a version is in the list or in a range of what is affected; a version that cannot be ordered counts by the list alone."""
    if version in affected.get("versions", ()):
        return True
    try:
        number = Version(version)
    except InvalidVersion:
        return False
    ranges = [of for of in affected.get("ranges", ()) if of.get("type") == "ECOSYSTEM"]
    return any(_is_within(number, of.get("events", ())) for of in ranges)


def _is_within(version: Version, events: Sequence[Mapping[str, str]]) -> bool:
    within = False
    for event in sorted(events, key=_number):
        number = _number(event)
        if "introduced" in event and version >= number:
            within = True
        elif ("fixed" in event and version >= number) or ("last_affected" in event and version > number):
            within = False
    return within


def _number(event: Mapping[str, str]) -> Version:
    text = next(iter(event.values()))
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")  # of a package with other numbers: it counts as affected from the first one on


def main(arguments: Sequence[str] | None = None) -> int:
    """Scan, and print what was found; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("export", type=Path, help="the export of OSV for PyPI, all.zip")
    parser.add_argument("--most-age-days", type=float, default=MOST_AGE / timedelta(days=1))
    parser.add_argument("--locks", type=Path, default=LOCKS, help="folder with the locks")
    options = parser.parse_args(arguments)
    locks = pins(options.locks)
    n_pins = len({pair for versions in locks.values() for pair in versions.items()})
    try:
        weaknesses, newest, n = scan(locks, documents(options.export))
        age = datetime.now(UTC) - newest
        if not n or not n_pins:
            raise ScanError(f"{options.export} has {n} documents, and the locks name {n_pins} packages")  # noqa: TRY301 - said below
        if age > timedelta(days=options.most_age_days):
            raise ScanError(  # noqa: TRY301 - said below
                f"the newest change in {options.export} is of {newest:%Y-%m-%d}, {age.days} days ago: get a newer export"
            )
    except (ScanError, KeyError, TypeError, ValueError) as error:
        print(f"the scan was not made: {error}", file=sys.stderr)
        return 1
    for weakness in sorted(weaknesses):
        names = ", ".join((weakness.id, *weakness.aliases))
        print(f"{weakness.lock}: {weakness.package} {weakness.version}: {names}: {weakness.summary}")
    what = f"{len(weaknesses)} known weaknesses" if weaknesses else "no known weakness"
    print(f"{what} in {n_pins} locked packages, by {n} documents of OSV up to {newest:%Y-%m-%d}")
    return _FOUND if weaknesses else 0


if __name__ == "__main__":
    sys.exit(main())
