"""The root file system of an image, and processes in it with what Kubernetes gives them: no rights, nothing to write to."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from deploy.images.build import CONTAINERFILE, FOLDER, ROOT

USER = 65532
_CHROOT = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin:/bin")
MOUNT_POINTS = ("etc/quantdrift/main", "models", "run/quantdrift", "tmp", "proc", "dev")


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage of the Containerfile, those of the stages that it is made from first."""
    lines = (ROOT / CONTAINERFILE).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        if begins := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[begins[2]] = [*found.get(begins[1], []), line]
        elif line and found and not line.startswith("#"):
            list(found.values())[-1].append(line)
    return found


def environment(target: str) -> dict[str, str]:
    """Return the variables that an image sets."""
    pairs = [
        pair.split("=", 1)
        for line in stages()[target]
        if line.startswith("ENV ")
        for pair in shlex.split(line.removeprefix("ENV "))
    ]
    return dict(pairs)


def work_directory(target: str) -> str:
    """Return the working directory of an image."""
    return [line.split()[1] for line in stages()[target] if line.startswith("WORKDIR ")][-1]


def installed_root(root: Path, target: str, wheels: Path) -> None:
    """Install what an image has into an empty root, with this machine's Python and system libraries as its base.

    Parameters
    ----------
    wheels
        Holds the wheel of quantdrift.
    """
    for name in MOUNT_POINTS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for base in _BASES:
        (root / base.relative_to("/")).mkdir(parents=True, exist_ok=True)
    (root / "etc/quantdrift/config.toml").symlink_to("main/config.toml")
    environment, sbom = root / "opt/quantdrift", root / "usr-share-quantdrift"
    subprocess.run(
        ["sh", ROOT / FOLDER / "install.sh", target, wheels, environment, sbom],
        env={**os.environ, "BUILD": sys.prefix, "PYTHON": f"{sys.base_prefix}/bin/python3"},
        check=True,
    )


_BASES = tuple(
    dict.fromkeys([Path("/usr"), *([] if sys.base_prefix.startswith("/usr/") else [Path(sys.base_prefix)])])
)


@contextmanager
def running(
    root: Path,
    command: Sequence[str],
    *,
    variables: Mapping[str, str],
    directory: str = "/",
    config: Path | None = None,
    models: Path | None = None,
    temporary: Path | None = None,
    on_host: bool = False,
    output: TextIO | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a root that is read-only, as a user without rights, with an empty /tmp.

    Parameters
    ----------
    root
        The root; other processes do not see what is mounted here.
    variables
        The complete environment.
    directory
        The working directory.
    config, models, temporary
        Directories that are mounted at /etc/quantdrift/main, /models and /tmp.
    on_host
        The base is this machine's: its Python and libraries are mounted.
    output
        Takes stdout and stderr. None: the process has a pipe, which must be read.
    """
    at = shlex.quote(str(root))
    lines = ["set -eu", f"mount --rbind {at} {at}", f"mount -o remount,bind,ro {at}"]
    for base in _BASES if on_host else ():
        lines += [f"mount --bind {base} {at}{base}", f"mount -o remount,bind,ro {at}{base}"]
    lines += [f"mount -t proc proc {at}/proc", f"mount --rbind /dev {at}/dev"]
    lines += [f"mount -t tmpfs -o mode=1777 tmpfs {at}{place}" for place in ("/tmp", "/run/quantdrift")]
    for source, place in ((config, "/etc/quantdrift/main"), (models, "/models"), (temporary, "/tmp")):
        if source is not None:
            lines.append(f"mount --bind {shlex.quote(str(source))} {at}{place}")
    if config is not None:
        lines.append(f"mount -o remount,bind,ro {at}/etc/quantdrift/main")
    in_root = f'cd {shlex.quote(directory)} && exec "$@"'
    lines.append(
        f'exec {_CHROOT} --userspec={USER}:{USER} --groups= {at} /bin/sh -c {shlex.quote(in_root)} sh "$@"'
    )
    wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(lines), "sh", *command]
    # What a sidecar leaves in shared memory is found by its name: tests.conftest.
    environment = {"POD_NAME": os.environ.get("POD_NAME", ""), **variables}
    process = subprocess.Popen(
        wrapped, env=environment, text=True, stdout=output or subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def can_mount() -> bool:
    """Return whether this process may make mount namespaces: it needs root on Linux."""
    try:
        done = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    except OSError:
        return False
    return os.getuid() == 0 and done.returncode == 0
