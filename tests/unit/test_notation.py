"""Numbers as texts show them."""

import pytest

from quantdrift.core.notation import count_of, from_to, listed, number, percent

pytestmark = pytest.mark.unit


def test_a_noun_is_in_the_singular_only_after_one() -> None:
    """`1 exchanges` is read by everybody who is woken."""
    assert [count_of(n, "exchange") for n in (0, 1, 2, 1042)] == [
        "0 exchanges",
        "1 exchange",
        "2 exchanges",
        "1,042 exchanges",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.68e-11, "0"),
        (-3.68e-11, "0"),
        (0.00092, "0.00092"),
        (-0.0123, "-0.012"),
        (12345.0, "12,345"),
        (1e300, "more than 1,000,000,000,000,000"),
        (-1e300, "less than -1,000,000,000,000,000"),
    ],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    """However small or large it is."""
    assert number(value) == text
    assert "e" not in percent(value).replace("more", "").replace("less", "")


def test_two_numbers_are_printed_with_enough_digits_to_differ() -> None:
    """`from 1 to 1` says nothing; what six digits do not show is no move."""
    assert from_to(0.105, 0.305) == ("0.105", "0.305")
    assert from_to(0.99999, 0.9998) == ("1", "0.9998")
    assert from_to(1.0, 1.0 - 1e-12) is None


def test_names_are_listed_as_in_a_sentence() -> None:
    """With commas, and one `and`."""
    assert [listed(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
