"""Real text for `python -m benchmarks.models`."""

from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.transformer.passages import AREAS, Form, gather, prose, written

pytestmark = pytest.mark.unit

_WORDS = " ".join(["word"] * 60)
SOURCE = f'''
"""Explain in one sentence what all of this module is for.

{_WORDS}

{_WORDS}

>>> 1 + 1
2
"""


def compute(first, second):
    """Short."""
    total = first + second
    for step in range(10):
        total = total * step + first * second - total // 7
        print("the total is now", total, "after step", step)
    return total
'''


def test_prose_is_what_is_neither_example_nor_table() -> None:
    """Paragraphs come on one line; examples, rules and formulas are left out."""
    text = "One\n  line.\n\n>>> f(1)\n\n---- ----\n\nx = (1 + 2) * 3 / 4 ** 5 - 6 % 7\n\nAnother line."
    assert prose(text) == ["One line.", "Another line."]


def test_a_module_gives_passages_of_every_form() -> None:
    """Sentence, encoded sentence, section and code; what has too few words for a form is left out."""
    found: dict[Form, list[str]] = {}
    for form, text in written(SOURCE):
        found.setdefault(form, []).append(text)
    assert found[Form.SENTENCE] == ["Explain in one sentence what all of this module is for."]
    assert [unquote(text) for text in found[Form.ENCODED]] == found[Form.SENTENCE]
    assert [len(text.split()) for text in found[Form.SECTION]] == [100]
    assert Form.LONG not in found
    assert found[Form.CODE][0].startswith("total = first + second")
    assert "Short." not in found[Form.CODE][0]


def test_what_is_no_python_gives_nothing() -> None:
    """Templates and old dialects are installed beside modules."""
    assert list(written("print 'hello'")) == []


def test_parts_share_no_passage_and_are_the_same_every_time(tmp_path: Path) -> None:
    """Areas have equal shares, and the seed decides."""
    for area in AREAS:
        (tmp_path / area).mkdir()
        for number in range(8):
            sentence = f"Explain in one sentence what module {number} about {area} is for."
            (tmp_path / area / f"m{number}.py").write_text(f'"""{sentence}"""\n', encoding="utf-8")
    gathered = partial(gather, {Form.SENTENCE: 12}, n_parts=2, folder_of=tmp_path.joinpath)
    first, second = gathered(seed=1)
    assert sorted(passage.area for passage in first) == [area for area in range(6) for _ in range(2)]
    assert not {passage.text for passage in first} & {passage.text for passage in second}
    assert gathered(seed=1) == [first, second]
    assert gathered(seed=2) != [first, second]
