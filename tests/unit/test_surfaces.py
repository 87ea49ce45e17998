"""The collector of figures tells two numbers for one figure apart."""

import re

import msgspec
import pytest

from tests.support.surfaces import (
    Number,
    differing,
    nameless,
    numbers_of,
    of_html,
    of_json,
    of_rows,
    wrong_words,
)

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
    page = of_html("page", _PAGE.format(0.05))
    same = page.figures
    other = of_html("page", _PAGE.format(0.06)).figures
    later = of_html("page", _PAGE.format(0.06).replace("2031-06-16", "2031-06-17")).figures
    assert page.text == "Since then 5 %"
    assert differing([*document, *same]) == differing([*document, *later]) == []
    (found,) = differing([*document, *other])
    assert "value 0.05 at command, 0.06 at page" in found
    interval = msgspec.structs.replace(document[0], low=0.03)
    assert len(differing([*document, interval])) == 1


def test_a_number_without_a_name_is_found() -> None:
    """A number is named by its element, or by the record that the surface shows, of which it is the rounding."""
    page = of_html(
        "page",
        _PAGE.format(0.05) + "<p>4.5 % of 1,240 answers</p><p>17 % in lang=de since 2031-06-15 10:20 UTC</p>",
    )
    assert page.wrong == []
    assert [text[:6] for text in nameless(page.lines, page.named)] == ["`4.5` ", "`1,240", "`17` i"]
    assert (
        nameless(page.lines, [*page.named, *numbers_of({"low": 0.0452, "n": [1240.0], "share": 0.168})]) == []
    )
    assert nameless("some 93,000 a day", [Number("changed_per_day.value", 93_412.0)]) == []
    assert nameless("some 93,000 a day", [Number("changed_per_day.value", 91_000.0)]) != []
    assert nameless("17 of 20", [Number("n", 0.17), Number("n", 20.0)]) != [], "a count is no share"


@pytest.mark.parametrize(
    ("text", "name", "other"),
    [
        ("5 people got one", "changed_share.n_people", "slices.length"),
        ("5 answers were compared", "changed_share.n", "changed_share.n_people"),
        ("some 5 changed answers", "changed.value", "n_answers"),
        ("5 % of all", "changed_share.value", "n_answers"),
        ("some 5 a day", "changed_per_day.value", "requests.value"),
        ("5 exchanges", "n_groups", "alerts.length"),
        ("in 5 slices", "slices.length", "n_answers"),
        ("evidence 5, 9 needed", "evidence", "threshold"),
        ("(5 to 9)", "changed.low", "changed.high"),
        ("standard error 5)", "damage_se", "damage"),
        ("5.5 in a cell", "divergence.value", "n_answers"),
        ("5 in a cell", "n_answers", "divergence.value"),
    ],
)
def test_a_number_is_that_of_its_words(text: str, name: str, other: str) -> None:
    """A small whole number matches some number of nearly every record: it must be one that its words can mean."""
    number = 0.05 if "%" in text else float(re.findall(r"[\d.]+", text)[0])
    rest = [Number("threshold", 9.0), Number("changed.high", 9.0)]
    assert nameless(text, [Number(name, number), *rest]) == []
    assert nameless(text, [Number(other, number), *rest]) != []


@pytest.mark.parametrize(
    "text",
    [
        "alerts 4, 6 and 7 of int8-2 at 127.0.0.1:9466 since 27 Nov 2026, 01:57 UTC, for 3 hours",
        "needs 49 more people",
        "1. Route it.\n2. Say so.\n   quantdrift alerts ack 2 --reason x",
    ],
)
def test_dates_spans_names_and_addresses_need_no_name(text: str) -> None:
    """Each kind says why; a number beside them is found."""
    assert nameless(text, []) == []
    assert len(nameless(f"{text}\nor 12.5", [])) == 1


def test_a_figure_whose_text_is_another_number_is_found() -> None:
    """The attribute is what programs compare: it must be what people read."""
    assert len(of_html("page", _PAGE.format(0.08)).wrong) == 1


def test_a_number_of_a_table_is_named_by_its_column_and_row() -> None:
    """Two tables differ in their name."""
    row = {"model": "m", "slice": "all", "flip": 0.1, "verdict": "ok"}
    shown = list(of_rows("api", "slices", [row])) + list(of_rows("notebook", "slices", [row | {"flip": 0.2}]))
    assert len(differing(shown)) == 1
    assert differing([shown[0], *of_rows("notebook", "days", [row | {"flip": 0.2}])]) == []


def test_words_of_programs_are_found_in_what_people_read() -> None:
    """As words of their own."""
    assert wrong_words("page", "scanner=faint is firing") == ["page: `firing`"]
    assert wrong_words("page", "scanner=faint drifted") == []
