"""The gate on live traffic: exchanges that were captured after the candidate was recorded, in the order in which they came.

The served outputs come with the exchange. The reference and the candidate compute theirs (`quantdrift.release.gate.live_answers`); both
answers are compared with the reference's. An exchange is one observation; with a session key, all of its exchanges within `monitor.session_s` are. Each is weighted
by c / pi, c being the smallest inclusion probability of the slice under the policy that the exchange was sampled with, so the means are
those of the traffic, however it is sampled (`quantdrift.drift.evidence.group`). Without a session key bursts are looked for before there is a
verdict, and count once (`quantdrift.release.gate.live_trials`).
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import numpy as np

from quantdrift.core.clusters import Clustering
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.errors import QuarantineError
from quantdrift.core.records import Policy
from quantdrift.core.sampling.inclusion import (
    of_model,
    reachable_strata,
    smallest_rate,
    sure_rate,
)
from quantdrift.core.slices import SliceKey, holds, time_attributes
from quantdrift.core.tasks import Task
from quantdrift.drift.evidence.group import ROUNDING
from quantdrift.drift.evidence.observations import BoolArray, FloatArray
from quantdrift.drift.gate import Question, Trial, trials
from quantdrift.facts.gate import Kind, Outcome
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.features import features_of
from quantdrift.release.gate.found import is_of_clustering
from quantdrift.release.gate.judge import Asked
from quantdrift.release.gate.labels import NO_CLASS, Answers, ExpectedLabels
from quantdrift.release.gate.live_answers import (
    ArrayJudge,
    ItemValues,
    JudgedExchange,
    LiveJudge,
    TextJudge,
)
from quantdrift.release.gate.live_trials import Bursts, LiveTrials, SeenExchange
from quantdrift.release.gate.observations import Projections
from quantdrift.release.gate.offline import SliceRoute, top_classes
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.slices.clusters import ClusterSlices
from quantdrift.storage.gate import TrueLabel

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
        The slices that are judged, of which `is_told` or `is_learned` is true.
    asked
        To each slice: kinds `flips`, `harm`, `divergence` and `changed-tokens`. To all traffic together: of the kind `accuracy`, by flips or by labels that
        come later (`take_labels`).
    candidate, routes
        The models that are judged: the first route whose slice an exchange is in, else the candidate.
    begun_at
        Exchanges that were captured before do not count.
    clusterings
        Those by which items belong to learned slices, from the beginning to the end of the gate.

    Attributes
    ----------
    seen, refused, unusable
        Exchanges that were counted; those of them that the candidate could not answer, which count as wrong: else it would pass by
        failing on what is hard; and those that were not counted, because the reference or the served answer cannot be used.
    problem
        The last reason for one of the latter two; empty: there was none.
    expected
        The exchanges that wait for labels.
    hours
        Hours of the day, by `capture.time_zone`, of which exchanges were counted.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        *,
        slices: Sequence[SliceKey],
        asked: Asked,
        candidate: ReferenceRuntime,
        routes: Sequence[SliceRoute],
        begun_at: datetime,
        alpha: float,
        clusterings: Sequence[Clustering] = (),
    ) -> None:
        self.seen = self.refused = self.unusable = 0
        self.problem = ""
        self.hours: set[int] = set()
        self._model = model
        self._rules: list[Slice] = [
            rule for rule in config.slices if rule.feature and rule.model in ("", model.name)
        ]
        self._zone = ZoneInfo(config.capture.time_zone)
        self._session_s = timedelta(seconds=config.monitor.session_s)
        self._slices = list(slices)
        self._begun_at = begun_at
        most = config.shadow.batch_items
        self._judge: LiveJudge = (
            TextJudge(model, candidate, most)
            if model.task is Task.GENERATION
            else ArrayJudge(model, candidate, routes, most)
        )
        questions = [(key, question) for key in self._slices for question in asked.of(key.name)]
        self._questions = questions
        self._trials = LiveTrials(trials([question for _, question in questions], alpha))
        self._labelled = [number for number, (_, question) in enumerate(questions) if question.is_labelled]
        self._projections = Projections()
        self._has_sessions = False
        self._learned = ClusterSlices(config)
        self._learned.sample_share = 0.0  # the shadow keeps the vectors of the next fit
        self._learned.use_clusterings(clusterings)
        self._newest_at = begun_at
        self.expected = ExpectedLabels(model.labels, self._session_s)
        self._sessions: dict[str, _Session] = {}
        self._rates: dict[tuple[str, str], tuple[float, float, float]] = {}

    @property
    def trials(self) -> list[tuple[str, Trial]]:
        """The trials, each with the name of its slice."""
        return [
            (key.name, trial) for (key, _), trial in zip(self._questions, self._trials.current, strict=True)
        ]

    @property
    def bursts(self) -> Bursts | None:
        """What exchanges come in that nobody declared, and that count once; None: no bursts were found."""
        return self._trials.bursts

    @property
    def outcome(self) -> Outcome:
        """The verdict so far."""
        return self._trials.outcome

    def see(self, entries: Sequence[PreparedExchange]) -> None:
        """Count exchanges that were captured after the gate began, in this order; those with one signature are replayed together.

        Raises
        ------
        BrokenRuntimeError, RetryError
            A model computes nothing any more, or its server is unreachable.
        """
        of_signature: dict[tuple[object, ...], list[int]] = {}
        for place, entry in enumerate(entries):
            if entry.exchange.captured_at > self._begun_at and entry.exchange.is_verified:
                of_signature.setdefault(entry.signature, []).append(place)
        found: dict[int, JudgedExchange | str] = {}
        for places in of_signature.values():
            found |= zip(places, self._judge.judged([entries[place] for place in places]), strict=True)
        for _, judged in sorted(found.items()):
            if isinstance(judged, str):
                self.skip(judged)
            else:
                self._see(judged)

    def _see(self, found: JudgedExchange) -> None:
        exchange = found.entry.exchange
        if found.problem:
            self.refused += 1
            self.problem = found.problem
        self.seen += 1
        self.hours.add(exchange.captured_at.astimezone(self._zone).hour)
        self._newest_at = max(self._newest_at, exchange.captured_at)
        if self._labelled:
            self._expect(found.entry, found.judged, found.outputs)
        self._count(found.entry, found.values, self._inside(found.entry, found.served.embedding))

    def skip(self, problem: str) -> None:
        """Note an exchange that cannot be used, and why."""
        self.unusable += 1
        self.problem = problem

    def take_labels(self, labels: Sequence[TrueLabel], *, is_end: bool = False) -> None:
        """Count the exchanges that these labels are of; of sessions those that are over, or at the end all."""
        self.expected.give(labels)
        for shares in self.expected.taken(None if is_end else self._newest_at):
            for number in self._labelled:
                self._trials.add(number, shares, is_session=self._has_sessions)

    def finish(self) -> None:
        """Count the sessions that are still open."""
        self._close(None)
        self._trials.finish()

    def _inside(self, entry: PreparedExchange, embedding: Array | None) -> dict[str, BoolArray]:
        """Return which items are in each slice, by its predicate : (items,)."""
        exchange = entry.exchange
        attributes = {**exchange.attributes, **time_attributes(exchange.captured_at, self._zone)}
        features = features_of(self._rules, entry.inputs) if self._rules else [{}] * entry.n_items
        learned = self._learned.assign(
            model=self._model,
            exchange=exchange,
            digest=entry.version_reference.runtime.artefact.digest,
            embedding=embedding,
            features=features,
            at=exchange.captured_at,
        )
        of_items = [{key.predicate for key in keys} for keys in learned.slices]
        return {
            key.predicate: np.array(
                [
                    key.predicate in own
                    if is_of_clustering(key)
                    else all(holds(p, attributes, feature) for p in key.where)
                    for feature, own in zip(features, of_items, strict=True)
                ],
                dtype=np.bool_,
            )
            for key in self._slices
        }

    def _count(self, entry: PreparedExchange, values: ItemValues, inside: dict[str, BoolArray]) -> None:
        """Advance all trials but those that wait for labels."""
        exchange, sampling = entry.exchange, entry.exchange.sampling
        if exchange.group:
            self._has_sessions = True
            self._close(exchange.captured_at)
        weighted: dict[int, FloatArray] = {}
        for number, (key, question) in enumerate(self._questions):
            shares = _shares(question, values, inside[key.predicate])
            if shares is None or number in self._labelled:
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
                weighted[number] = min(weight, 1.0) * shares
        if weighted:
            divergence = np.where(np.isnan(values.divergence), values.flip, values.divergence)
            self._trials.see(
                SeenExchange(
                    slices=tuple(predicate for predicate, items in inside.items() if items.any()),
                    measures=(float(np.nan_to_num(divergence).mean()), *self._projections.of(entry.inputs)),
                    attributes=exchange.attributes,
                    shares=weighted,
                )
            )

    def _expect(
        self, entry: PreparedExchange, judged: PreparedExchange | None, outputs: dict[str, Array]
    ) -> None:
        """Wait for the labels of an exchange; `judged` is None where the candidate has no answer."""
        exchange, sampling = entry.exchange, entry.exchange.sampling
        try:
            reference, served = top_classes(entry, outputs)
            candidate = np.full_like(reference, NO_CLASS)
            if judged is not None:
                _, candidate = top_classes(judged, outputs)
        except QuarantineError as error:
            self.problem = str(error)
            return
        key, _ = self._questions[self._labelled[0]]
        smallest, sure, session = self._rates_of(key, sampling.policy)
        weight = session if exchange.group else smallest / sampling.pi
        if weight > 1 + ROUNDING:
            return
        self.expected.expect(
            UUID(exchange.id),
            Answers(reference=reference, candidate=candidate, served=served),
            at=exchange.captured_at,
            weight=min(weight, 1.0),
            part=min(sampling.pi1, sure) if exchange.group else 1.0,
            session=exchange.group,
        )

    def _rates_of(self, key: SliceKey, policy: Policy) -> tuple[float, float, float]:
        """Return c of the slice's exchanges, the lower bound of its body rates, and c of a session's parts."""
        rates = self._rates.get((key.predicate, policy.epoch))
        if rates is None:
            where = of_model(key.where, key.model)
            sure = sure_rate(where, policy)
            parts = sorted(
                {min(stratum.rate, sure) for stratum in reachable_strata(where, policy) if stratum.rate > 0}
            )
            session = (
                parts[0] if len(parts) == 1 else 1.0 / sum(1.0 / part for part in parts) if parts else 1.0
            )
            rates = self._rates[key.predicate, policy.epoch] = (smallest_rate(where, policy), sure, session)
        return rates

    def _of_session(
        self, group: str, at: datetime, number: int, *, part: float, least: float, shares: FloatArray
    ) -> None:
        session = self._sessions.get(group)
        if session is None:
            session = self._sessions[group] = _Session(
                began_at=at, parts=[{} for _ in self._questions], least=[1.0] * len(self._questions)
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
                    self._trials.add(number, total, is_session=True)


def _shares(question: Question, values: ItemValues, inside: BoolArray) -> FloatArray | None:
    """Return the shares of the items in the slice by value; None where none is known."""
    value = values.flip
    if question.kind is Kind.HARM:
        value = values.flip - values.served_flip
    if question.kind is Kind.DIVERGENCE:
        value = values.divergence
    if question.kind is Kind.CHANGED_TOKENS:
        value = values.changed_tokens
    value = value[inside & ~np.isnan(value)]
    if not len(value):
        return None
    if question.is_graded:
        share = float(np.mean(value)) / question.values[1]
        return np.array([1.0 - share, share])
    return np.array([np.mean(value == possible_value) for possible_value in question.values])
