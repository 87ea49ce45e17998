"""What is said of the divergence of single tokens."""

from quantdrift.core.token_histogram import TokenQuantiles


def of_tokens(found: TokenQuantiles) -> str:
    """Return the quantiles in words."""
    return f"median {found.median:.2g}, 99 % {found.p99:.2g}, 99.9 % {found.p999:.2g} nat over {found.tokens:,} tokens"
