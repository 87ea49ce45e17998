"""Links to production traces."""

import pytest

from quantdrift.core.links import trace_link

pytestmark = pytest.mark.unit

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_link_holds_the_trace_id() -> None:
    """The template's place is filled."""
    assert trace_link("https://t.example.com/{trace_id}?x", TRACE) == (
        "https://t.example.com/4bf92f3577b34da6a3ce929d0e0e4736?x"
    )


@pytest.mark.parametrize(
    ("template", "trace"),
    [
        ("", TRACE),
        ("javascript:alert('{trace_id}')", TRACE),
        ("https://t.example.com/{trace_id}", ""),
        ("https://t.example.com/{trace_id}", "00-../../evil-00f067aa0ba902b7-01"),
        ("https://t.example.com/{trace_id}", TRACE + '" onclick="x'),
    ],
)
def test_a_trace_that_is_not_one_gives_no_link(template: str, trace: str) -> None:
    """The header comes from the client: only sixteen hexadecimal bytes in a web address become a link."""
    assert trace_link(template, trace) == ""
