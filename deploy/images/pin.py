"""Writes the digests of pushed images into the kustomizations below deploy/kubernetes, and prints them as values of the chart.

A registry gives an image its digest when it is pushed. `podman push --digestfile out/images/NAME.digest`, and buildah likewise, writes it
down; docker prints it. Then `python deploy/images/pin.py registry.example.com/ml`. It needs Python alone.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "quantdrift-"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ENTRY = re.compile(rf"^(?:# )?(  - \{{ name: )({_PREFIX}[a-z-]+), newName: .*\}}$", re.MULTILINE)
_BEGIN = re.compile(rf"^# (images:)$(?=\n(?:# )?  - \{{ name: {_PREFIX})", re.MULTILINE)


def digests(folder: Path) -> dict[str, str]:
    """Return the digests in the files `NAME.digest` of a folder, by the name of the image.

    Raises
    ------
    ValueError
        There is none, or a file has something else.
    """
    named = {path.stem: path.read_text(encoding="utf-8").strip() for path in sorted(folder.glob("*.digest"))}
    if not named:
        raise ValueError(f"{folder} has no file NAME.digest: push with `--digestfile {folder}/NAME.digest`")
    for name, digest in named.items():
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{folder / name}.digest is no digest: it must be sha256: and 64 digits")
    return named


def pinned(text: str, registry: str, named: Mapping[str, str]) -> str:
    """Return a kustomization in which each image that it names has its digest.

    Raises
    ------
    ValueError
        It names an image without one.
    """

    def entry(match: re.Match[str]) -> str:
        begin, name = match.groups()
        if name not in named:
            raise ValueError(f"no digest of {name}")
        return f"{begin}{name}, newName: {registry}/{name}, digest: {named[name]} }}"

    return _BEGIN.sub(r"\1", _ENTRY.sub(entry, text))


def main(arguments: Sequence[str]) -> None:
    """Write all of them, or none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("registry", help="where the images were pushed to, such as registry.example.com/ml")
    parser.add_argument("--digests", type=Path, default=ROOT / "out" / "images", help="folder of NAME.digest")
    parser.add_argument("--manifests", type=Path, default=ROOT / "deploy" / "kubernetes")
    options = parser.parse_args(arguments)
    try:
        named = digests(options.digests)
        files = {}
        for path in sorted(options.manifests.glob("*/kustomization.yaml")):
            text = path.read_text(encoding="utf-8")
            if (new := pinned(text, options.registry, named)) != text:
                files[path] = new
    except ValueError as error:
        parser.error(str(error))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
        print(path, file=sys.stderr)
    print(f"images:\n  registry: {options.registry}\n  digests:")
    for name, digest in named.items():
        print(f"    {name.removeprefix(_PREFIX)}: {digest}")


if __name__ == "__main__":
    main(sys.argv[1:])
