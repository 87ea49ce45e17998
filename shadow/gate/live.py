"""The gate on live traffic: exchanges that were captured after the candidate was recorded, one after the other.

The served outputs come with the exchange. The reference and the candidate compute theirs here; both answers are compared with the
reference's. An exchange is one observation; with a session key, all of its exchanges within `monitor.session_s` are. Each is weighted
by c / pi, c being the smallest inclusion probability of the slice under the policy that the exchange was sampled with, so the means are
those of the traffic, however it is sampled (`quantdrift.drift.evidence.group`).
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.records import Policy
from quantdrift.core.sampling.inclusion import (
    of_model,
    reachable_strata,
    smallest_rate,
    sure_rate,
)
from quantdrift.core.slices import TIME, SliceKey, feature_key, holds, time_attributes
from quantdrift.drift.evidence.group import ROUNDING
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.gate import Kind, Outcome, Question, Trial, trials
from quantdrift.shadow.comparators.protocol import Values
from quantdrift.shadow.gate.offline import Route, answered, computed
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.replay import ReplayResult, compare
from quantdrift.shadow.runtimes.protocol import ReferenceRuntime
from quantdrift.shadow.tensors.arrays import Array
from quantdrift.shadow.tensors.codec import decode
from quantdrift.shadow.tensors.features import features_of

_CAPTURED: Final = ("header.", "parameter.", "json.", TIME)
_MOST_SESSIONS: Final = 100_000


class _Session(msgspec.Struct, kw_only=True):
    """An open session: when it began, and for each trial the weights of its parts."""

    began_at: datetime
    parts: list[dict[float, list[FloatArray]]]
    least: list[float]


class LiveGate:
    """The trials of one candidate, advanced by exchanges. One thread calls it.

    Parameters
    ----------
    config, model
        With the slices by feature, and the time zone.
    slices
        The slices that are judged, of which `is_judged` is true.
    questions
        To each slice: kinds `flips` and `harm`.
    candidate, routes
        The models that are judged: the first route whose slice an exchange is in, else the candidate.
    begun_at
        Exchanges that were captured before do not count.

    Attributes
    ----------
    seen, refused, unusable
        Exchanges that were counted; those of them that the candidate could not answer, which count as flips: else it would pass by
        failing on what is hard; and those that were not counted, because the reference or the served answer cannot be used.
    problem
        The last reason for one of the latter two; empty: there was none.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        *,
        slices: Sequence[SliceKey],
        questions: Sequence[Question],
        candidate: ReferenceRuntime,
        routes: Sequence[Route],
        begun_at: datetime,
        alpha: float,
    ) -> None:
        self.seen = self.refused = self.unusable = 0
        self.problem = ""
        self._model = model
        self._rules: list[Slice] = [
            rule for rule in config.slices if rule.feature and rule.model in ("", model.name)
        ]
        self._zone = ZoneInfo(config.capture.time_zone)
        self._session_s = timedelta(seconds=config.monitor.session_s)
        self._slices = list(slices)
        self._candidate, self._routes, self._begun_at = candidate, tuple(routes), begun_at
        asked = [(key, question) for key in self._slices for question in questions]
        begun = trials([question for _, question in asked], alpha)
        self._trials = [(key, trial) for (key, _), trial in zip(asked, begun, strict=True)]
        self._sessions: dict[str, _Session] = {}
        self._rates: dict[tuple[str, str], tuple[float, float, float]] = {}

    @property
    def trials(self) -> list[tuple[str, Trial]]:
        """The trials, each with the name of its slice."""
        return [(key.name, trial) for key, trial in self._trials]

    @property
    def outcome(self) -> Outcome:
        """The verdict so far."""
        if any(trial.failed for _, trial in self._trials):
            return Outcome.FAIL
        return Outcome.PASS if all(trial.passed for _, trial in self._trials) else Outcome.INSUFFICIENT

    def see(self, entry: PreparedExchange) -> None:
        """Count one exchange, if it was captured after the gate began."""
        exchange = entry.exchange
        if exchange.captured_at <= self._begun_at or not exchange.is_verified:
            return
        try:
            outputs = computed(entry, "an exchange", "reference", step=entry.n_items)
            served = _flips(entry, outputs)
        except (QuarantineError, OperatorError) as error:  # of this exchange; another one may do
            self.skip(str(error))
            return
        try:
            flips = _flips(self._answered(entry), outputs)
        except (QuarantineError, OperatorError) as error:
            self.refused += 1
            self.problem = str(error)
            flips = np.where(np.isnan(served), np.nan, 1.0)
        self.seen += 1
        attributes = {**exchange.attributes, **time_attributes(exchange.captured_at, self._zone)}
        features = features_of(self._rules, entry.inputs) if self._rules else [{}] * entry.n_items
        inside = {
            key.predicate: np.array([all(holds(p, attributes, one) for p in key.where) for one in features])
            for key in self._slices
        }
        sampling = exchange.sampling
        if exchange.group:
            self._close(exchange.captured_at)
        for number, (key, trial) in enumerate(self._trials):
            shares = _shares(trial.question, flips, served, inside[key.predicate])
            if shares is None:
                continue
            smallest, sure, session = self._rates_of(key, sampling.policy)
            if exchange.group:
                part = min(sampling.pi1, sure)
                self._of_session(
                    exchange.group, exchange.captured_at, number, part=part, least=session, shares=shares
                )
                continue
            weight = smallest / sampling.pi
            if weight <= 1 + ROUNDING:  # else it was sampled under another policy than it says
                self._add(number, min(weight, 1.0) * shares)

    def skip(self, problem: str) -> None:
        """Note an exchange that cannot be used, and why."""
        self.unusable += 1
        self.problem = problem

    def finish(self) -> None:
        """Count the sessions that are still open."""
        self._close(None)

    def _add(self, number: int, shares: FloatArray) -> None:
        key, trial = self._trials[number]
        self._trials[number] = (key, trial.after(shares[None]))

    def _answered(self, entry: PreparedExchange) -> PreparedExchange:
        """Return the exchange with the answer of the candidate, or of the model of its route."""
        attributes = entry.exchange.attributes
        runtime = next(
            (
                route.runtime
                for route in self._routes
                if all(holds(p, attributes, {}) for p in route.slice.where)
            ),
            self._candidate,
        )
        arrays = {tensor.name: decode(tensor) for tensor in entry.exchange.inputs}
        if not self._model.batched:
            arrays = {name: array[np.newaxis] for name, array in arrays.items()}
        return answered(entry, runtime, arrays, "an exchange", "candidate")

    def _rates_of(self, key: SliceKey, policy: Policy) -> tuple[float, float, float]:
        """Return c of the slice's exchanges, the lower bound of its body rates, and c of a session's parts."""
        known = self._rates.get((key.predicate, policy.epoch))
        if known is None:
            where = of_model(key.where, key.model)
            sure = sure_rate(where, policy)
            parts = sorted(
                {min(stratum.rate, sure) for stratum in reachable_strata(where, policy) if stratum.rate > 0}
            )
            session = (
                parts[0] if len(parts) == 1 else 1.0 / sum(1.0 / part for part in parts) if parts else 1.0
            )
            known = self._rates[key.predicate, policy.epoch] = (smallest_rate(where, policy), sure, session)
        return known

    def _of_session(
        self, group: str, at: datetime, number: int, *, part: float, least: float, shares: FloatArray
    ) -> None:
        session = self._sessions.get(group)
        if session is None:
            session = self._sessions[group] = _Session(
                began_at=at, parts=[{} for _ in self._trials], least=[1.0] * len(self._trials)
            )
        session.parts[number].setdefault(part, []).append(shares)
        session.least[number] = least

    def _close(self, at: datetime | None) -> None:
        """Count the sessions that are over at `at`; None: all of them."""
        while self._sessions:
            group, oldest = next(iter(self._sessions.items()))
            is_over = at is None or at - oldest.began_at > self._session_s
            if not is_over and len(self._sessions) <= _MOST_SESSIONS:
                return
            session = self._sessions.pop(group)
            for number, parts in enumerate(session.parts):
                shares = [
                    session.least[number] / part * np.mean(of_part, axis=0)
                    for part, of_part in sorted(parts.items())
                ]
                if not shares:
                    continue
                total = np.sum(shares, axis=0)
                if total.sum() <= 1 + ROUNDING:
                    self._add(number, total)


def is_judged(config: Config, key: SliceKey) -> bool:
    """Return whether a slice can be told here: neither learned, nor `(other)`, which depends on what has a place."""
    features = {feature_key(rule) for rule in config.slices if rule.feature}
    return all(
        (one.key.startswith(_CAPTURED) or one.key in features)
        and (one.equals, one.low, one.high) != (None, None, None)
        for one in key.where
    )


def _flips(entry: PreparedExchange, outputs: dict[str, Array]) -> Values:
    (outcome,) = compare([entry], [outputs])
    if not isinstance(outcome, ReplayResult):
        raise outcome
    return outcome.divergences.flip


def _shares(question: Question, flips: Values, served: Values, inside: FloatArray) -> FloatArray | None:
    """Return the shares of the items in the slice by value; None where none is known."""
    value = flips if question.kind is Kind.FLIPS else flips - served
    value = value[inside.astype(bool) & ~np.isnan(value)]
    if not len(value):
        return None
    return np.array([np.mean(value == one) for one in question.values])
