"""What `quantdrift gate --live` shows while it waits."""

from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from quantdrift.drift.gate import Question, Trial, decision
from quantdrift.facts.gate import Decision, Followed, Outcome
from quantdrift.facts.words.gate import decided, so_far
from quantdrift.facts.words.gate import followed as worded

pytestmark = pytest.mark.unit


def followed(*trials: Trial) -> Followed:
    """Return what is known after these trials, each of all traffic."""
    made = decision(
        [("all", one) for one in trials], model="digits", candidate="sha256:1", at=datetime.now(UTC)
    )
    return Followed(id=7, decision=made, seen=1000, refused=0, unusable=0, problem="", elapsed_s=100.0)


def trial(n: int) -> Trial:
    """Return the flips of so many exchanges without any; 370 pass."""
    return Trial(question=Question.flips(0.01), pass_level=0.05, fail_level=0.05).at_once(
        np.tile([[1.0, 0.0]], (n, 1))
    )


def test_it_names_the_slice_that_lacks_most() -> None:
    """With the time that it takes at this rate."""
    shown = so_far(followed(trial(400), trial(100)))
    assert (
        shown
        == "gate 7: 1,000 exchanges, 1 of 2 questions decided; all: about 270 more, 4.5 min at this rate"
    )


def test_a_look_at_the_moment_of_the_verdict_shows_that_all_is_decided() -> None:
    """The last exchange may decide the last question just before a look."""
    assert so_far(followed(trial(400))) == "gate 7: 1,000 exchanges, all questions decided"


def test_a_pass_waits_for_the_hours_that_were_not_seen() -> None:
    """Only a pass does: what fails or lacks evidence says so as before."""
    passed = Decision(
        verdict=Outcome.PASS,
        model="digits",
        candidate="sha256:0",
        slices=(),
        more=0,
        checked_at=datetime.now(UTC),
    )
    waiting = passed.without_hours({3, 1, 2, 23})
    assert (waiting.verdict, waiting.missing_hours) == (Outcome.INSUFFICIENT, (1, 2, 3, 23))
    assert "1-3, 23" in str(decided(waiting)[-1])
    assert passed.without_hours(set()) is passed
    failed = msgspec.structs.replace(passed, verdict=Outcome.FAIL)
    assert failed.without_hours({3}) is failed


@pytest.mark.parametrize(
    ("attribute", "declares"),
    [("header.x-camera", 'set sampling.sticky_header = "x-camera"'), ("", "name the header that says whose")],
)
def test_answers_in_bursts_are_said_with_what_to_declare(attribute: str, declares: str) -> None:
    """How many exchanges count as how many independent ones; without bursts nothing is said."""
    live = followed(trial(400))
    assert "bursts" not in str(worded(live))
    decided_in_bursts = msgspec.structs.replace(live.decision, burst=20, burst_of=attribute)
    live = msgspec.structs.replace(live, decision=decided_in_bursts, in_bursts=8_000, observations=400)
    (said,) = [line for line in worded(live) if "bursts" in str(line)]
    assert "of some 20: 8,000 exchanges count as 400 independent ones" in str(said)
    assert declares in str(said)
