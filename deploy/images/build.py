"""Builds the images with podman, docker or buildah, and writes SBOM and provenance of each to out/images.

Run it from the checkout: `make images`, or `python deploy/images/build.py shadow --tool podman`. It needs Python alone.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("deploy/images")
CONTAINERFILE = FOLDER / "Containerfile"
TOOLS = ("podman", "docker", "buildah")
SBOM = "/usr/share/quantdrift/sbom.cdx.json"


class Image(NamedTuple):
    """What is built, and the extras of pyproject.toml that it has."""

    name: str
    extras: tuple[str, ...]


IMAGES = {
    "sidecar": Image("quantdrift-sidecar", ("language",)),
    "shadow": Image("quantdrift-shadow", ("cpu",)),
    "shadow-cuda": Image("quantdrift-shadow-cuda", ("shadow",)),
    "monitor": Image("quantdrift-monitor", ("monitor", "report", "web", "ext-proc")),
}


def version() -> str:
    """Return the version that pyproject.toml states: it is the tag of every image."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(document["project"]["version"])


def default_base() -> str:
    """Return the base image with its digest, as the Containerfile states it."""
    found = re.search(r"^ARG BASE=(\S+)$", (ROOT / CONTAINERFILE).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def lock_command(name: str, uv: str) -> list[str]:
    """Return the command that writes the lock file of an image, or `build.txt`.

    The versions are those of constraints.txt. The file names no index: the installer's own configuration does.
    """
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--generate-hashes"]
    command += [
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--only-binary",
        ":all:",
        "--no-binary",
        "nkeys",
    ]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--output-file", str(FOLDER / f"{name}.txt")]
    if name == "build":
        return [*command, str(FOLDER / "build.in")]
    extras = [part for extra in IMAGES[name].extras for part in ("--extra", extra)]
    return [*command, "--constraints", "constraints.txt", "pyproject.toml", *extras]


def provenance(image: str, image_id: str, base: str, tool: str, times: tuple[str, str]) -> dict[str, Any]:
    """Return an in-toto statement with the SLSA provenance of an image that was built on this machine.

    It says what was built from what. Nobody signs it, and no service that builders cannot influence wrote it: that is
    level 1 of SLSA's build track.

    Parameters
    ----------
    image_id
        `sha256:` and the digest of the image's configuration, as the tool wrote it.
    times
        Start and end.
    """
    target = next(target for target, one in IMAGES.items() if image.startswith(f"{one.name}:"))
    files = [
        CONTAINERFILE,
        FOLDER / "install.sh",
        FOLDER / "sbom.py",
        FOLDER / "build.txt",
        FOLDER / f"{target}.txt",
    ]
    commit = _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    reference, _, digest = base.partition("@sha256:")
    materials: list[dict[str, Any]] = [
        {"uri": str(path), "digest": {"sha256": hashlib.sha256((ROOT / path).read_bytes()).hexdigest()}}
        for path in files
    ]
    if commit:
        materials.append({"uri": "git+checkout", "digest": {"gitCommit": commit}})
    materials.append(
        {"uri": f"oci:{reference}", "digest": {"sha256": digest}} if digest else {"uri": f"oci:{base}"}
    )
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": image, "digest": {"sha256": image_id.removeprefix("sha256:")}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:quantdrift:image:1",
                "externalParameters": {"containerfile": str(CONTAINERFILE), "target": target, "base": base},
                "internalParameters": {"tool": tool, "uncommittedChanges": changed},
                "resolvedDependencies": materials,
            },
            "runDetails": {
                "builder": {"id": "local:unsigned"},
                "metadata": {"startedOn": times[0], "finishedOn": times[1]},
            },
        },
    }


def build(target: str, tool: str, base: str, out: Path, options: Sequence[str] = ()) -> str:
    """Build one image, write `NAME.sbom.cdx.json` and `NAME.provenance.json`, and return its tag.

    Parameters
    ----------
    options
        More options for the tool's `build`, such as `--volume` for a certificate.
    """
    name = IMAGES[target].name
    image = f"{name}:{version()}"
    started = datetime.now(tz=UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as directory:
        id_file = Path(directory) / "id"
        command = [tool, "build", "--file", str(CONTAINERFILE), "--target", target, "--tag", image]
        command += ["--build-arg", f"BASE={base}", "--iidfile", str(id_file), *options, "."]
        if tool != "docker":  # which finds Containerfile.dockerignore by its name
            command[2:2] = ["--ignorefile", f"{CONTAINERFILE}.dockerignore", "--layers"]
        subprocess.run(command, cwd=ROOT, check=True)
        image_id = id_file.read_text(encoding="utf-8").strip()
    ended = datetime.now(tz=UTC).isoformat(timespec="seconds")
    out.mkdir(parents=True, exist_ok=True)
    _copy_out(tool, image, out / f"{name}.sbom.cdx.json")
    statement = provenance(image, image_id, base, tool, (started, ended))
    path = out / f"{name}.provenance.json"
    path.write_text(json.dumps(statement, indent=1) + "\n", encoding="utf-8")
    return image


def _copy_out(tool: str, image: str, path: Path) -> None:
    """Copy the SBOM out of an image without running it."""
    container = _output(tool, "from", image) if tool == "buildah" else _output(tool, "create", image)
    try:
        if tool == "buildah":
            path.write_bytes(Path(_output(tool, "mount", container) + SBOM).read_bytes())
        else:
            subprocess.run([tool, "cp", f"{container}:{SBOM}", str(path)], check=True)
    finally:
        subprocess.run([tool, "rm", container], check=True, stdout=subprocess.DEVNULL)


def _works(tool: str) -> bool:
    """Return whether a builder is installed and, in case of docker, its daemon answers."""
    if shutil.which(tool) is None:
        return False
    return subprocess.run([tool, "info"], check=False, capture_output=True).returncode == 0


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _git(*arguments: str) -> str:
    """Return what git says of the checkout; empty outside one."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str]) -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", help=f"of {', '.join(IMAGES)}; all of them by default")
    parser.add_argument("--tool", choices=TOOLS, help="the first that is installed by default")
    parser.add_argument("--base", default=default_base(), help="another base image, with its digest")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "images")
    parser.add_argument("--option", action="append", default=[], help="passed to the tool's build")
    parser.add_argument("--lock", action="store_true", help="write the lock files with uv, and build nothing")
    options = parser.parse_args(arguments)
    targets = options.target or list(IMAGES)
    if unknown := set(targets) - set(IMAGES):
        parser.error(f"no such image: {', '.join(sorted(unknown))}")
    if options.lock:
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        if uv is None:
            parser.error("uv is not installed: pip install uv")
        for name in ("build", *targets):
            subprocess.run(lock_command(name, uv), cwd=ROOT, check=True)
        return
    tool = options.tool or next((tool for tool in TOOLS if _works(tool)), None)
    if tool is None:
        parser.error(
            f"no builder works here: install podman or buildah, or start the docker daemon (of {TOOLS})"
        )
    for target in targets:
        print(build(target, tool, options.base, options.out, options.option))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as failed:
        sys.exit(
            f"{' '.join(failed.cmd[:2])} ended with exit code {failed.returncode}: its own lines say why"
        )
