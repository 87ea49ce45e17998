"""Histograms of the divergence over the tokens of answers, which can be added up: quantiles over all tokens of many answers.

The quantiles of answers do not give those of all their tokens: half of the answers may have a 99 % quantile of 1 nat, and 0.5 % of the tokens more
than that. So each answer has the number of its tokens in each of 50 bins, which are the same for all: six to a factor of ten between 1e-6 and
100 nats, one below and one above. A quantile of a sum is wrong by 22 % of its value at most. A histogram is a text, `0:40 23:2`, as it is stored: 30
bins take some 150 bytes, and as an object four times as many.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

_LEAST: Final = 1e-6
_PER_DECADE: Final = 6
_TOP: Final = 8 * _PER_DECADE + 1
SHARES: Final = (0.5, 0.99, 0.999)


class TokenQuantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of the divergence over all tokens of many answers, in nats.

    Parameters
    ----------
    tokens
        How many tokens they are of.
    """

    median: float
    p99: float
    p999: float
    tokens: int


class TokenBins(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the histograms of many answers.

    Parameters
    ----------
    weights
        The weight of the tokens in each bin.
    tokens
        How many tokens there are.
    """

    weights: dict[int, float]
    tokens: int

    @property
    def quantiles(self) -> TokenQuantiles | None:
        """Quantiles over all tokens; None without any."""
        return quantiles_of(self.weights, self.tokens)

    @property
    def above(self) -> list[tuple[float, float]]:
        """The share of the tokens at or above the lower edge of each bin, with that edge in nats, while there are any."""
        total, found = sum(self.weights.values()), []
        for number in range(1, max(self.weights, default=0) + 1):
            share = sum(weight for of, weight in self.weights.items() if of >= number) / total
            found.append((_LEAST * 10 ** ((number - 1) / _PER_DECADE), share))
        return found


def histogram(divergences: Iterable[float]) -> str:
    """Return the bins that have tokens, each with their number: `BIN:N`, with spaces between; NaN is in none."""
    counts = Counter(bin_of(value) for value in divergences if not math.isnan(value))
    return " ".join(f"{number}:{n}" for number, n in sorted(counts.items()))


def counts_of(text: str) -> Counter[int]:
    """Return the number of tokens by bin of what `histogram` returned."""
    return Counter({int(number): int(n) for number, n in (pair.split(":") for pair in text.split())})


def quantiles_of(weights: Mapping[int, float], n_tokens: int) -> TokenQuantiles | None:
    """Return the quantiles of a sum of histograms; None of an empty one.

    Parameters
    ----------
    weights
        The weight of the tokens in each bin.
    n_tokens
        How many tokens there are.
    """
    total = sum(weights.values())
    if not total > 0.0:
        return None
    median, p99, p999 = (_quantile(weights, share * total) for share in SHARES)
    return TokenQuantiles(median=median, p99=p99, p999=p999, tokens=n_tokens)


def bin_of(value: float) -> int:
    """Return the bin of a divergence that is a number."""
    if value < _LEAST:
        return 0
    return min(1 + math.floor(_PER_DECADE * math.log10(value / _LEAST)), _TOP) if value < math.inf else _TOP


def _quantile(weights: Mapping[int, float], wanted: float) -> float:
    """Return the middle of the bin in which the sum of the weights reaches `wanted`; of the lowest 0, of the highest where it begins."""
    reached, last = 0.0, 0
    for number in sorted(weights):
        reached, last = reached + weights[number], number
        if reached >= wanted * (1.0 - 1e-12):
            break
    middle = 0.0 if last == _TOP else 0.5
    return 0.0 if last == 0 else float(_LEAST * 10 ** ((last - 1 + middle) / _PER_DECADE))
