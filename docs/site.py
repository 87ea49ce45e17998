"""Build the pages as a site with a search: `python -m docs.site`, or `make docs-site`.

`docs/README.md` is the one index: its sections are the doors of the navigation, and a page that it does not link is an error, except
those of the folders in `_LISTED`. Pages outside of `docs` that it links come along. Links are followed from file to file, as in a
checkout; a link to a file that is no page becomes its name.

Each version has a folder of its own, so that several are kept side by side: build the tag of a release into the folder that has the
others. Every page lets its reader choose among those that are there; the address without a version leads to the newest release.
"""

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
INDEX: Final = "docs/README.md"
_LISTED: Final = {"docs/decisions": "Decisions", "docs/runbooks": "Runbooks"}
"""Folders with an index of their own, by their title: each of their pages is in the navigation."""
_OUTSIDE: Final = "more"  # where pages from outside of `docs` are
_LINK: Final = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
_CODE: Final = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$)", re.MULTILINE | re.DOTALL)
_THEME: Final = {
    "name": "material",
    "font": False,  # nothing is loaded from elsewhere
    "features": [
        "navigation.tabs",
        "navigation.indexes",
        "navigation.top",
        "search.suggest",
        "content.code.copy",
        "toc.follow",
    ],
    "palette": [
        {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "teal"},
        {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "teal"},
    ],
}


def pages() -> dict[str, str]:
    """Return the path of each page in the site by its path in the repository."""
    inside = {path: path.removeprefix("docs/") for path in _markdown(ROOT / "docs")}
    linked = {target for path in inside for target in _targets(path) if target.endswith(".md")}
    outside = {path: f"{_OUTSIDE}/{path}" for path in sorted(linked - {*inside})}
    return inside | outside


def navigation(known: dict[str, str]) -> list[Any]:
    """Return the navigation: the sections of the index with their pages, and the folders that have an index of their own.

    Raises
    ------
    ValueError
        A page of `docs` is nowhere.
    """
    sections: list[Any] = [known[INDEX]]
    seen = {INDEX}
    for part in (ROOT / INDEX).read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        own = [
            target
            for target in dict.fromkeys(_resolved(INDEX, link) for _, link in _LINK.findall(text))
            if target in known and target not in seen and str(PurePosixPath(target).parent) not in _LISTED
        ]
        seen.update(own)
        sections.append({title: [known[path] for path in own]})
    for folder, title in _LISTED.items():
        own = sorted(
            (path for path in known if path.startswith(f"{folder}/")),
            key=lambda path: (not path.endswith("README.md"), path),
        )
        seen.update(own)
        sections.append({title: [known[path] for path in own]})
    if lost := sorted(path for path in known if path.startswith("docs/") and path not in seen):
        raise ValueError(f"{INDEX} links none of {', '.join(lost)}: put each behind the door of its reader")
    rest = [known[path] for path in known if path not in seen]
    return [*sections, *([{"More": rest}] if rest else [])]


def page(path: str, known: dict[str, str]) -> str:
    """Return the text of a page with its links as they are in the site."""
    parts = _CODE.split((ROOT / path).read_text(encoding="utf-8"))
    parts[::2] = [_LINK.sub(lambda link: _rewritten(path, link, known), part) for part in parts[::2]]
    return "".join(parts)


def version() -> str:
    """Return the version of this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def build(out: Path, name: str) -> None:
    """Build the site of a version into the folder of that name in `out`, beside those that are there; a link that leads nowhere, or a page that is in no menu, is an error.

    Raises
    ------
    SystemExit
        There is one, and a warning names it.
    """
    from mkdocs.commands.build import build as make  # noqa: PLC0415 - not installed where nobody builds the site
    from mkdocs.config import load_config  # noqa: PLC0415

    known = pages()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "docs"
        for path, target in known.items():
            (source / target).parent.mkdir(parents=True, exist_ok=True)
            (source / target).write_text(page(path, known), encoding="utf-8")
        for picture in {target for path in known for target in _targets(path) if _is_picture(target)}:
            target_path = source / _place(picture, known)
            target_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / picture, target_path)
        (Path(folder) / "mkdocs.yml").write_text("", encoding="utf-8")
        config = _config(source, out / name, navigation(known))
        make(load_config(str(Path(folder) / "mkdocs.yml"), **config))
    list_versions(out)


def list_versions(out: Path) -> None:
    """Write which versions a site has, as the theme reads it, and the page that leads to the newest release, or else to the newest of all."""
    from packaging.version import Version  # noqa: PLC0415 - comes with mkdocs

    names = sorted((path.parent.name for path in out.glob("*/index.html")), key=Version, reverse=True)
    shown = [{"version": name, "title": name, "aliases": []} for name in names]
    (out / "versions.json").write_text(json.dumps(shown), encoding="utf-8")
    newest = next((name for name in names if not Version(name).is_prerelease), names[0])
    (out / "index.html").write_text(
        f'<!doctype html><meta charset=utf-8><title>quantdrift</title><meta http-equiv=refresh content="0; url={newest}/index.html">'
        f'<a href="{newest}/index.html">quantdrift {newest}</a>\n',
        encoding="utf-8",
    )


def _config(source: Path, out: Path, nav: list[Any]) -> dict[str, Any]:
    from pymdownx.slugs import slugify  # noqa: PLC0415

    return {
        "site_name": "quantdrift",
        "docs_dir": str(source),
        "site_dir": str(out.resolve()),
        "strict": True,
        "use_directory_urls": False,  # from a disk it can be read, and not searched: browsers forbid that
        "nav": nav,
        "theme": _THEME,
        "extra": {
            "version": {"provider": "mike"}
        },  # the theme's own choice of versions, from `versions.json`
        "plugins": ["search"],
        "markdown_extensions": [
            "tables",
            "attr_list",
            "pymdownx.superfences",
            "pymdownx.highlight",
            # As in a checkout: links to headings are written for its way to name them.
            {"toc": {"slugify": slugify(case="lower"), "permalink": True, "toc_depth": 3}},
        ],
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"},
        },
    }


def _markdown(folder: Path) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in folder.rglob("*.md"))


def _targets(path: str) -> Iterator[str]:
    """Yield the files that a page links, by their paths in the repository."""
    text = "".join(_CODE.split((ROOT / path).read_text(encoding="utf-8"))[::2])
    for _, link in _LINK.findall(text):
        target = _resolved(path, link)
        if target and (ROOT / target).is_file():
            yield target


def _resolved(path: str, link: str) -> str:
    """Return the path in the repository that a link of a page leads to; empty: it leads out of it."""
    target = link.partition("#")[0]
    if "://" in link or link.startswith("mailto:"):
        return ""
    return path if not target else ((ROOT / path).parent / target).resolve().relative_to(ROOT).as_posix()


def _rewritten(path: str, link: re.Match[str], known: dict[str, str]) -> str:
    words, target = link[1], _resolved(path, link[2])
    if not target or not (ROOT / target).exists():
        return link[0]
    if not (target in known or _is_picture(target)):
        return words.removeprefix("!")[1:-1]  # no page: its words alone
    mark = link[2].partition("#")[2]
    up = "../" * _place(path, known).count("/")
    return f"{words}({up}{_place(target, known)}{f'#{mark}' if mark else ''})"


def _place(path: str, known: dict[str, str]) -> str:
    return known.get(path) or (
        path.removeprefix("docs/") if path.startswith("docs/") else f"{_OUTSIDE}/{path}"
    )


def _is_picture(path: str) -> bool:
    return PurePosixPath(path).suffix in {".png", ".svg"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "site", help="Folder to build into.")
    logging.basicConfig(format="%(message)s")
    parser.add_argument(
        "--version",
        default=version(),
        help="Name of the version, such as 1.2.0.  [default: that of pyproject.toml]",
    )
    asked = parser.parse_args()
    folder = asked.out
    build(folder, asked.version)
    sys.stdout.write(
        f"{folder} has the pages: `python -m http.server -d {folder}` shows them with their search\n"
    )
