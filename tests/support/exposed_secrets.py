"""Where other processes of the same user, and a core dump, could find a secret of a process."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def exposed(processes: Iterable[psutil.Process], secrets: Iterable[str]) -> list[str]:
    """Return each place in /proc where a secret of these processes can be read: environment, arguments, open secret files."""
    found = []
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-80:]
            for part in ("environ", "cmdline"):
                text = (folder / part).read_bytes()
                found += [f"{part} of {name}: {secret}" for secret in secrets if secret.encode() in text]
            for entry in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if "quantdrift-secrets" in str(entry.readlink()):
                        found.append(f"an open file of {name}")
    return found
