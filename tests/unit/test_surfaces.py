"""The collector of figures tells two numbers for one figure apart."""

import msgspec
import pytest

from tests.support.surfaces import differing, of_html, of_json, wrong_words

pytestmark = pytest.mark.unit
_FIGURE = {
    "name": "changed_share",
    "value": 0.05,
    "low": 0.04,
    "window": {"name": "period", "begin": "2031-06-15T00:00:00Z", "end": "2031-06-16T00:00:00Z"},
    "of": {"model": "m", "version": "1", "slice": "all"},
}
_PAGE = (
    '<p>Since then <data data-figure="changed_share" data-window="period" data-from="2031-06-15T00:00:00+00:00"'
    ' data-to="2031-06-16T00:00:00+00:00" data-model="m" data-version="1" data-slice="all" data-value="{}">5 %</data></p>'
)


def test_one_figure_with_two_numbers_is_found_wherever_it_stands() -> None:
    """In a document at any depth, and in the attributes of a page; another window is another figure."""
    document = list(of_json("command", {"slices": [{"changed": _FIGURE}]}))
    same, text = of_html("page", _PAGE.format(0.05))
    other, _ = of_html("page", _PAGE.format(0.06))
    later, _ = of_html("page", _PAGE.format(0.06).replace("2031-06-16", "2031-06-17"))
    assert text == "Since then 5 %"
    assert differing([*document, *same]) == differing([*document, *later]) == []
    (found,) = differing([*document, *other])
    assert "value 0.05 at command, 0.06 at page" in found
    interval = msgspec.structs.replace(document[0], low=0.03)
    assert len(differing([*document, interval])) == 1


def test_words_of_programs_are_found_in_what_people_read() -> None:
    """As words of their own."""
    assert wrong_words("page", "scanner=faint is firing") == ["page: `firing`"]
    assert wrong_words("page", "scanner=faint drifted") == []
