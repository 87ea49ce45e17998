"""The scheduler that picks the next batch to replay: deficit round robin over models, by replay time.

Shreedhar & Varghese, "Efficient fair queueing using deficit round robin", IEEE/ACM Transactions on Networking 4(3), 1996,
with one change: the cost of a batch is known only after its replay. A model is served while it has no debt. The time that
its batch took is then subtracted, and a debt is paid off over the next rounds. Until a batch has been replayed, the model
is charged the recent average of its batches.

Between two models that always have a batch waiting, replay time divides in proportion to their shares, to within one
round and one batch of each. A model with little traffic gets all the time that it needs, and a model without a waiting
batch reserves none.

Two budgets of a model are hard limits on top of that: seconds of replay, and tokens that a language model reads. Each is refilled
at its rate, and a model whose budget is spent waits.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from quantdrift.core.config.schema import Model

QUANTUM_S: Final = 0.05
_BURST_S: Final = 1.0
_ROUNDING_S: Final = 1e-9
_FORGET: Final = 0.25  # weight of the newest batch in the expected duration


class ShareTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The share of replay time that a model is entitled to.

    Parameters
    ----------
    share
        Weight, > 0.
    max_ratio
        Most seconds of replay per second; 0: no limit.
    max_tokens_per_s
        Most tokens of prompts and answers per second; 0: no limit.
    """

    share: float = 1.0
    max_ratio: float = 0.0
    max_tokens_per_s: float = 0.0


def terms_of(models: Iterable[Model]) -> dict[str, ShareTerms]:
    """Return the terms of each configured model."""
    return {
        model.name: ShareTerms(
            share=model.share,
            max_ratio=model.max_replay_ratio,
            max_tokens_per_s=model.generation.max_replay_tokens_per_s,
        )
        for model in models
    }


class ReadyBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The permission to replay one batch of a model.

    Parameters
    ----------
    expected_s
        The time already charged for it.
    """

    model: str
    expected_s: float


class _Budget:
    """What may be spent of a quantity, refilled at `rate` per second up to what one second brings; rate 0: no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left = rate * _BURST_S
        self._at_s = -math.inf

    def refill(self, now_s: float) -> None:
        if self._at_s > -math.inf:
            self._left += (now_s - self._at_s) * self._rate
        self._left = min(self._left, self._rate * _BURST_S)
        self._at_s = now_s

    def charge(self, spent: float) -> None:
        self._left -= spent

    def wait_s(self) -> float:
        """Return the time until another batch is allowed; 0 if one is allowed now, or there is no limit."""
        return 0.0 if not self._rate or self._left > 0 else -self._left / self._rate + 1e-6


class _Account:
    def __init__(self, terms: ShareTerms) -> None:
        self.terms = terms
        self.credit_s = 0.0
        self.time = _Budget(terms.max_ratio)
        self.tokens = _Budget(terms.max_tokens_per_s)
        self.expected_s = 0.0
        self.item_s = math.inf

    def refill(self, now_s: float) -> None:
        self.time.refill(now_s)
        self.tokens.refill(now_s)

    def charge(self, spent_s: float) -> None:
        self.credit_s -= spent_s
        self.time.charge(spent_s)

    def wait_s(self) -> float:
        """Return the time until both budgets allow another batch; 0 if they allow one now, or there are none."""
        return max(self.time.wait_s(), self.tokens.wait_s())


class FairShare:
    """Picks the model whose batch is replayed next. It does no I/O: the caller passes the time.

    Parameters
    ----------
    terms
        By model; a model without an entry gets the default.
    """

    def __init__(self, terms: Mapping[str, ShareTerms]) -> None:
        self._accounts = {model: _Account(share) for model, share in terms.items()}
        self._waiting: dict[str, None] = {}  # in the order of the round

    def put(self, model: str) -> None:
        """Note that a batch of `model` waits."""
        self._accounts.setdefault(model, _Account(ShareTerms()))
        self._waiting.setdefault(model)

    def take(self, now_s: float, *, among: Collection[str], keep_budgets: bool = True) -> ReadyBatch | None:
        """Return the next batch to replay, or None if none may be replayed now.

        Parameters
        ----------
        now_s
            Monotonic time.
        among
            Models to choose from, of those with a waiting batch.
        keep_budgets
            Whether `max_ratio` and `max_tokens_per_s` apply.
        """
        allowed = []
        for model in self._waiting:
            account = self._accounts[model]
            account.refill(now_s)
            if model in among and (not keep_budgets or not account.wait_s()):
                allowed.append(model)
        if not allowed:
            return None
        # Skip ahead to the first round in which a model has no debt, and serve in order from there.
        rounds = min(self._rounds(model) for model in allowed)
        for model in allowed:
            self._accounts[model].credit_s += rounds * QUANTUM_S * self._accounts[model].terms.share
        model = next(model for model in allowed if self._accounts[model].credit_s >= -_ROUNDING_S)
        account = self._accounts[model]
        del self._waiting[model]
        account.charge(account.expected_s)
        return ReadyBatch(model=model, expected_s=account.expected_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return the time until a budget allows a waiting batch; None if no batch waits."""
        for model in self._waiting:
            self._accounts[model].refill(now_s)
        return min((self._accounts[model].wait_s() for model in self._waiting), default=None)

    def correct_charge(self, ready: ReadyBatch, spent_s: float, n_items: int, n_tokens: int = 0) -> None:
        """Replace the expected time of a replayed batch by the time that its items took, and charge the tokens that were read."""
        account = self._accounts[ready.model]
        account.charge(spent_s - ready.expected_s)
        account.tokens.charge(n_tokens)
        account.expected_s += _FORGET * (spent_s - account.expected_s)
        if n_items:
            item_s = spent_s / n_items
            known = math.isfinite(account.item_s)
            account.item_s = account.item_s + _FORGET * (item_s - account.item_s) if known else item_s

    def items_within(self, model: str, seconds: float) -> int:
        """Return about how many items of `model` are replayed in so much time; 0 while nothing is known."""
        account = self._accounts.get(model)
        return (
            0
            if account is None or account.item_s == math.inf
            else int(seconds / max(account.item_s, _ROUNDING_S))
        )

    def reset(self) -> None:
        """Clear credits and debts. Called when no batch waits or is in flight."""
        for account in self._accounts.values():
            account.credit_s = 0.0

    def _rounds(self, model: str) -> int:
        account = self._accounts[model]
        return max(math.ceil(-account.credit_s / (QUANTUM_S * account.terms.share)), 0)
