"""What is said of the tokens that a grammar left no choice of."""

import pytest

from quantdrift.facts.words.tokens import of_grammar

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            {"answers": 3, "known": 3, "forced": 2, "scored": 8},
            "3 answers made under a grammar; of 3 it left no choice at 2 of 8 tokens (25 %), which are left out",
        ),
        (
            {"answers": 1, "known": 0, "forced": 0, "scored": 0},
            "1 answer made under a grammar; of 1 it is not known at which (top_logprobs of 2 or more show it)",
        ),
    ],
)
def test_answers_under_a_grammar_are_counted(counts: dict[str, int], said: str) -> None:
    """Those of which it is not known, too."""
    assert of_grammar(**counts) == said
