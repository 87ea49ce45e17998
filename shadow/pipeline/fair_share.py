"""Whose batch is replayed next: deficit round robin over models, by the time that their replays take.

Shreedhar & Varghese, "Efficient fair queueing using deficit round robin", IEEE/ACM Transactions on Networking 4(3), 1996,
with one change: what a batch costs is known only afterwards. A model is served while it has no debt, what it took is
then subtracted, and a debt is paid off over the next rounds. While a batch is on its way it is charged what batches of
its model took lately.

Between two models that always have something waiting, replay time divides as their shares, to within one round and one
batch of each; one that has little gets all it asks for. Nothing is lost to a model that has nothing waiting.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from quantdrift.core.config.schema import Model

QUANTUM_S: Final = 0.05
_BURST_S: Final = 1.0
_ROUNDING_S: Final = 1e-9
_FORGET: Final = 0.25  # weight of the newest batch in what a batch is expected to take


class ShareTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is entitled to.

    Parameters
    ----------
    share
        Its weight, > 0.
    max_ratio
        Most seconds of replay per second; 0: no limit.
    """

    share: float = 1.0
    max_ratio: float = 0.0


def terms_of(models: Iterable[Model]) -> dict[str, ShareTerms]:
    """Return what each configured model is entitled to."""
    return {model.name: ShareTerms(share=model.share, max_ratio=model.max_replay_ratio) for model in models}


class ReadyBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that may be replayed.

    Parameters
    ----------
    lane
        Whose.
    expected_s
        What was charged for it already.
    """

    lane: str
    expected_s: float


class _Account:
    def __init__(self, terms: ShareTerms) -> None:
        self.terms = terms
        self.credit_s = 0.0
        self.allowance_s = terms.max_ratio * _BURST_S
        self.at_s = -math.inf
        self.expected_s = 0.0

    def refill(self, now_s: float) -> None:
        if self.at_s > -math.inf:
            self.allowance_s += (now_s - self.at_s) * self.terms.max_ratio
        self.allowance_s = min(self.allowance_s, self.terms.max_ratio * _BURST_S)
        self.at_s = now_s

    def charge(self, spent_s: float) -> None:
        self.credit_s -= spent_s
        self.allowance_s -= spent_s

    def wait_s(self) -> float:
        """Return how long until its budget allows another batch; 0 where it has none, or it does now."""
        if not self.terms.max_ratio or self.allowance_s > 0:
            return 0.0
        return -self.allowance_s / self.terms.max_ratio + 1e-6


class FairShare:
    """Decides; the caller hands in the time.

    Parameters
    ----------
    terms
        Of each lane; one that is not named has the default.
    """

    def __init__(self, terms: Mapping[str, ShareTerms]) -> None:
        self._accounts = {lane: _Account(one) for lane, one in terms.items()}
        self._waiting: dict[str, None] = {}  # in the order of the round

    def put(self, lane: str) -> None:
        """Note that a batch of `lane` waits."""
        self._accounts.setdefault(lane, _Account(ShareTerms()))
        self._waiting.setdefault(lane)

    def take(self, now_s: float, *, among: Collection[str], within: bool = True) -> ReadyBatch | None:
        """Return whose batch is next, or None where none may be replayed now.

        Parameters
        ----------
        now_s
            Monotonic time.
        among
            Lanes that may have their turn, of those with a batch that waits.
        within
            Keep to the budgets.
        """
        allowed = []
        for lane in self._waiting:
            account = self._accounts[lane]
            account.refill(now_s)
            if lane in among and (not within or not account.wait_s()):
                allowed.append(lane)
        if not allowed:
            return None
        # As many rounds as it takes until somebody has no debt, and from there in order.
        rounds = min(self._rounds(lane) for lane in allowed)
        for lane in allowed:
            self._accounts[lane].credit_s += rounds * QUANTUM_S * self._accounts[lane].terms.share
        lane = next(lane for lane in allowed if self._accounts[lane].credit_s >= -_ROUNDING_S)
        account = self._accounts[lane]
        del self._waiting[lane]
        account.charge(account.expected_s)
        return ReadyBatch(lane=lane, expected_s=account.expected_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return how long until a budget allows a batch that waits; None where none waits."""
        for lane in self._waiting:
            self._accounts[lane].refill(now_s)
        return min((self._accounts[lane].wait_s() for lane in self._waiting), default=None)

    def settle(self, turn: ReadyBatch, spent_s: float) -> None:
        """Charge what a batch really took."""
        account = self._accounts[turn.lane]
        account.charge(spent_s - turn.expected_s)
        account.expected_s += _FORGET * (spent_s - account.expected_s)

    def rest(self) -> None:
        """Forget credit and debts: nothing waits, and nothing is on its way."""
        for account in self._accounts.values():
            account.credit_s = 0.0

    def _rounds(self, lane: str) -> int:
        account = self._accounts[lane]
        return max(math.ceil(-account.credit_s / (QUANTUM_S * account.terms.share)), 0)
