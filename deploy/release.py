"""Builds a release: sdist and wheel of a commit, the versions that it was tested with, their SBOM, and checksums.

`make release` runs it in the checkout. Uncommitted changes are not in what it builds, and it is the same byte by byte whoever builds it.
`--sign KEY` signs the checksums with an SSH key, which may be in an agent or on a token: whoever has the public half knows whose files these are.
"""

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "quantdrift-release"  # a signature for something else is none of a release
_BUILD = "import setuptools.build_meta as backend, sys; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def build_sdist(source: Path, out: Path, epoch_s: int) -> Path:
    """Build the source distribution of a directory.

    Parameters
    ----------
    epoch_s
        The time that every file in it gets, in seconds since 1970.
    """
    with tempfile.TemporaryDirectory() as directory:
        built = _build("build_sdist", source, Path(directory), epoch_s)
        path = out / built.name
        _same_for_everybody(built, path, epoch_s)
    return path


def build_wheel(sdist: Path, out: Path, epoch_s: int) -> Path:
    """Build the wheel from a source distribution, as everybody does who installs that."""
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(sdist) as archive:
            archive.extractall(directory, filter="data")
        (source,) = Path(directory).iterdir()
        return _build("build_wheel", source, out, epoch_s)


def write_sbom(source: Path, path: Path) -> None:
    """Write the SBOM of a release in CycloneDX: the versions in constraints.txt, with which it was tested."""
    subprocess.run(
        [
            *(sys.executable, "-P", "-W", "ignore", "-m", "cyclonedx_py", "requirements", "constraints.txt"),
            *("--pyproject", "pyproject.toml", "--mc-type", "application"),
            *("--output-reproducible", "--output-file", str(path)),
        ],
        cwd=source,
        check=True,
    )


def sign(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key; return the file of the signature, beside it."""
    signature = path.with_name(f"{path.name}.sig")
    signature.unlink(missing_ok=True)
    program = shutil.which("ssh-keygen") or "ssh-keygen"
    subprocess.run([program, "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(path)], check=True)
    return signature


def _build(hook: str, source: Path, out: Path, epoch_s: int) -> Path:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BUILD, hook, str(out)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        umask=0o022,
    )
    return out / done.stdout.splitlines()[-1]


def _same_for_everybody(built: Path, path: Path, epoch_s: int) -> None:
    """Write an archive again without what differs between machines: owners, times, and order."""
    with (
        tarfile.open(built) as old,
        path.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch_s, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def version() -> str:
    """Return the version that pyproject.toml states: nothing else states it."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(document["project"]["version"])


def changes(text: str, of: str) -> str:
    """Return what CHANGELOG.md says of a version; empty if it has no section `## [VERSION] - DATE`."""
    found = re.search(
        rf"^## \[{re.escape(of)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return found[1].strip() if found else ""


def main(arguments: Sequence[str]) -> None:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument(
        "--sign", type=Path, metavar="KEY", help="an SSH key, its public half where an agent has the other"
    )
    options = parser.parse_args(arguments)
    git = ["git", "-C", str(ROOT)]
    command = [*git, "show", "--no-patch", "--format=%ct", options.commit]
    epoch_s = int(subprocess.run(command, check=True, capture_output=True).stdout)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "source.tar"
        subprocess.run([*git, "archive", "--output", str(archive), options.commit], check=True)
        source = Path(directory) / "source"
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        sdist = build_sdist(source, options.out, epoch_s)
        wheel = build_wheel(sdist, options.out, epoch_s)
        versions, sbom = options.out / "constraints.txt", options.out / f"quantdrift-{version()}.cdx.json"
        shutil.copyfile(source / versions.name, versions)
        write_sbom(source, sbom)
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in (sdist, wheel, versions, sbom)
    )
    (options.out / "SHA256SUMS").write_text(sums, encoding="utf-8")
    if options.sign is not None:
        sign(options.out / "SHA256SUMS", options.sign)
    print(sums, end="")
    if not changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version()):
        print(
            f"not to be published yet: CHANGELOG.md has no section [{version()}] with a date", file=sys.stderr
        )


if __name__ == "__main__":
    main(sys.argv[1:])
