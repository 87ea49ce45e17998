"""The SBOM of an image in CycloneDX: the Python packages, the interpreter, and Debian's packages of the base."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

_STATUS = Path("/var/lib/dpkg/status")


def debian_packages(status: str) -> list[dict[str, Any]]:
    """Return the installed packages of a dpkg status file as components.

    Parameters
    ----------
    status
        The text of `/var/lib/dpkg/status`.
    """
    components = []
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " "
        )
        if fields.get("Status") == "install ok installed":
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={fields['Architecture']}"
            components.append(
                {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
            )
    return components


def main(python: str, path: Path) -> None:
    """Write the SBOM of the environment of `python`, on the base where this runs."""
    command = [sys.executable, "-P", "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    done = subprocess.run([*command, "--of", "JSON", python], check=True, capture_output=True)
    document: dict[str, Any] = json.loads(done.stdout)
    version = platform.python_version()
    purl = f"pkg:generic/python@{version}"
    interpreter = {
        "type": "platform",
        "name": "python",
        "version": version,
        "purl": purl,
        "bom-ref": purl,
    }
    packages = debian_packages(_STATUS.read_text(encoding="utf-8")) if _STATUS.exists() else []
    document["components"] = [*document["components"], interpreter, *packages]
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
