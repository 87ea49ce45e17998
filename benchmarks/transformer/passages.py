"""Real text with a known subject: what the authors of installed packages wrote about their own code.

Docstrings and source code of Python's standard library (PSF licence), numpy, scipy, scikit-learn, torch (BSD) and
SQLAlchemy (MIT), read from where they are installed; nothing is downloaded and nothing of it is stored in this
repository. The label of a passage is the package that it comes from.
"""

import ast
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

import msgspec

AREAS = ("system", "arrays", "science", "learning", "tensors", "database")
_PACKAGES = {
    "arrays": "numpy",
    "science": "scipy",
    "learning": "sklearn",
    "tensors": "torch",
    "database": "sqlalchemy",
}
_PASSED_OVER = {"test", "tests", "testing", "_vendor", "site-packages", "idlelib", "lib2to3"}
_MOST_BYTES = 200_000  # a file that is longer was generated
_LEAST_LETTERS = 0.7  # of a paragraph that is prose: less is a table, a formula or an example


class Form(StrEnum):
    """What a passage looks like."""

    SENTENCE = "sentence"  # the first paragraph of a docstring
    SECTION = "section"  # paragraphs that follow each other, 40 to 100 words
    LONG = "long"  # the same, 150 to 250 words
    CODE = "code"  # the beginning of a function's source
    ENCODED = "encoded"  # a sentence, percent-encoded


_WORDS = {Form.SENTENCE: (6, 40), Form.SECTION: (40, 100), Form.LONG: (150, 250)}
_CODE_CHARACTERS = (120, 480)


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of text.

    Parameters
    ----------
    form
        What it looks like.
    text
        The text.
    area
        What it is about, a place in `AREAS`.
    """

    form: Form
    text: str
    area: int


def written(source: str) -> Iterator[tuple[Form, str]]:
    """Yield the passages in the source code of one module; of source that is none, nothing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = prose(ast.get_docstring(node) or "")
        if said and _fits(Form.SENTENCE, said[0]):
            yield Form.SENTENCE, said[0]
            encoded = quote(" ".join(said[0].split()[:15]), safe="")
            yield Form.ENCODED, encoded
        for form in (Form.SECTION, Form.LONG):
            if (text := _joined(said[1:], _WORDS[form][1])) and _fits(form, text):
                yield form, text
        if isinstance(node, ast.FunctionDef):
            code = _without_docstring(node)
            if len(code) >= _CODE_CHARACTERS[0]:
                yield Form.CODE, code[: _CODE_CHARACTERS[1]]


def prose(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring that are sentences, each on one line."""
    found = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        text = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c.isspace() for c in text)
        if text and ">>>" not in text and "---" not in text and letters >= _LEAST_LETTERS * len(text):
            found.append(text)
    return found


def installed(area: str) -> Path:
    """Return the folder of the installed modules that are about an area."""
    paths = sysconfig.get_paths()
    return Path(paths["purelib"]) / _PACKAGES[area] if area in _PACKAGES else Path(paths["stdlib"])


def gather(
    n: dict[Form, int], *, seed: int, n_parts: int, folder_of: Callable[[str], Path] = installed
) -> list[list[Passage]]:
    """Return `n_parts` sets of passages, no file in two of them, each with `n[form]` of every form, areas in turn.

    Where an area has too few of a form, fewer come.
    """
    parts: list[list[Passage]] = [[] for _ in range(n_parts)]
    rng = random.Random(seed)
    for area, name in enumerate(AREAS):
        files = sorted(_files(folder_of(name)))
        rng.shuffle(files)
        each = {form: -(-count // len(AREAS)) for form, count in n.items()}
        for part, taken in enumerate(parts):
            left = dict(each)
            seen: set[str] = set()
            for path in files[part::n_parts]:
                if not any(left.values()):
                    break
                found = list(written(path.read_text(encoding="utf-8", errors="replace")))
                rng.shuffle(found)
                # A few of each file, or the longest would be all there is.
                room = dict.fromkeys(n, 12)
                for form, text in found:
                    if left.get(form, 0) and room[form] and text not in seen:
                        taken.append(Passage(form=form, text=text, area=area))
                        left[form] -= 1
                        room[form] -= 1
                        seen.add(text)
    for taken in parts:
        rng.shuffle(taken)
    return parts


def _files(root: Path) -> Iterable[Path]:
    for path in root.rglob("*.py"):
        if not _PASSED_OVER & set(path.relative_to(root).parts) and path.stat().st_size <= _MOST_BYTES:
            yield path


def _joined(paragraphs: Iterable[str], most: int) -> str:
    words: list[str] = []
    for paragraph in paragraphs:
        words += paragraph.split()
        if len(words) >= most:
            break
    return " ".join(words[:most])


def _fits(form: Form, text: str) -> bool:
    low, high = _WORDS[form]
    return low <= len(text.split()) <= high


def _without_docstring(node: ast.FunctionDef) -> str:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return "\n".join(ast.unparse(statement) for statement in body)
