"""The page of a game day."""

from datetime import UTC, datetime

import pytest

from benchmarks.gameday import CHOSEN, Sight, as_html
from benchmarks.storm.faults import FAULTS

pytestmark = pytest.mark.unit


def test_each_fault_has_a_line_and_a_part_with_all_that_was_seen() -> None:
    """What commands and logs say is text, whatever is in it, and the page of a model is in a frame without scripts."""
    sight = Sight(
        title="kill nats",
        at=datetime(2026, 3, 1, 12, 3, 5, tzinfo=UTC),
        answers={"status": "\nnats is <away>\nmore", "alerts list": "none"},
        page="<script>alert('x')</script>",
        lines={"up": ["one", "two"]},
        events=["quantdrift.slice.transition: it drifts"],
        outcome="compared again after 1.0 s, 0 requests failed",
    )
    text = as_html([sight, Sight(title="kill up", at=sight.at)], "it broke & ended")
    assert "<td><a href='#0'>kill nats</a></td>" in text
    assert "<td>nats is &lt;away&gt;</td><td>2</td><td>1</td>" in text
    assert "<h3>quantdrift alerts list</h3><pre>none</pre>" in text
    assert "<pre>one\ntwo</pre>" in text
    assert "sandbox srcdoc='&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;'" in text
    assert "The page did not answer." in text
    assert "It broke: it broke &amp; ended" in text


def test_the_faults_of_a_game_day_are_those_of_the_storm() -> None:
    """A name that the storm does not know would be left out silently."""
    assert set(CHOSEN) <= {fault.name for fault in FAULTS}
