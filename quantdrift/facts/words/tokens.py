"""What is said of the divergence of single tokens."""

from quantdrift.core.notation import count_of, percent
from quantdrift.core.token_histogram import TokenQuantiles


def of_tokens(found: TokenQuantiles) -> str:
    """Return the quantiles in words."""
    return f"median {found.median:.2g}, 99 % {found.p99:.2g}, 99.9 % {found.p999:.2g} nat over {found.tokens:,} tokens"


def of_grammar(*, answers: int, known: int, forced: int, scored: int) -> str:
    """Return how many tokens a grammar left no choice of, and of how many answers that is not known."""
    text = f"{count_of(answers, 'answer')} made under a grammar"
    if known:
        share = f" ({percent(forced / scored)})" if scored else ""
        text += f"; of {known:,} it left no choice at {forced:,} of {count_of(scored, 'token')}{share}, which are left out"
    if known < answers:
        text += f"; of {answers - known:,} it is not known at which (top_logprobs of 2 or more show it)"
    return text
