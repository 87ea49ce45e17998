"""What reference and candidate say of exchanges of live traffic, a batch at a time: both answers, compared with the reference's.

The reference replays a batch as a shadow worker does. A candidate gets each exchange by itself, as it was sent: what it answers can depend on what
it computes together, since quantisers that scale activations by their range do that over the whole batch.

A language model reads what was served (teacher forcing), as on recorded prompts (`quantdrift.release.gate.prompts`): its tokens do not depend on
its batch, so candidate and reference score a batch each.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from quantdrift.core.config.schema import Model
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.slices import holds
from quantdrift.models.comparators.protocol import Divergences, Values
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import ANSWER, REQUEST, SCORES, objects, without_free_answer
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.text.candidate_replica import CandidateReplica
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.codec import decode
from quantdrift.release.gate.offline import SliceRoute, answered, capped, computed
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, assemble, compare, replay


class ItemValues(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the items of an exchange, as of `Compared` : (items,) each."""

    flip: Values
    served_flip: Values
    divergence: Values
    changed_tokens: Values

    @classmethod
    def refused(cls, served_flip: Values, cap: float) -> "ItemValues":
        """Return what counts where the candidate has no answer: the worst, else it would pass by failing on what is hard."""
        flip = np.where(np.isnan(served_flip), np.nan, 1.0)
        return cls(
            flip=flip, served_flip=served_flip, divergence=cap * flip, changed_tokens=np.ones(len(flip))
        )


class JudgedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange with both answers.

    Parameters
    ----------
    entry, outputs
        The exchange, and what the reference answers.
    served
        What was served, compared with it.
    values
        What is known of its items.
    judged
        The exchange with the candidate's answer; None where it has none, or of a language model.
    problem
        Why the candidate has no answer; empty: it has one.
    """

    entry: PreparedExchange
    outputs: dict[str, Array]
    served: ReplayResult
    values: ItemValues
    judged: PreparedExchange | None = None
    problem: str = ""


class LiveJudge(Protocol):
    """Answers exchanges with one signature."""

    def judged(self, batch: Sequence[PreparedExchange]) -> list[JudgedExchange | str]:
        """Return what was found of each, or why it cannot be used: its reference or its served answer is of no use."""


class ArrayJudge:
    """Judges a candidate whose outputs are arrays.

    Parameters
    ----------
    model
        With its cap.
    candidate, routes
        The models that are judged: the first route whose slice an exchange is in, else the candidate.
    most_items
        Most items in one call of the reference.
    """

    def __init__(
        self, model: Model, candidate: ReferenceRuntime, routes: Sequence[SliceRoute], most_items: int
    ) -> None:
        self._model, self._candidate, self._routes = model, candidate, tuple(routes)
        self._most_items = most_items

    def judged(self, batch: Sequence[PreparedExchange]) -> list[JudgedExchange | str]:
        """Return what was found of each, or why it cannot be used."""
        outputs = replay(assemble(batch), most_items=self._most_items)
        served = compare(batch, outputs)
        answers = [
            self._answered(entry) if isinstance(of_served, ReplayResult) else str(of_served)
            for entry, of_served in zip(batch, served, strict=True)
        ]
        places = [place for place, answer in enumerate(answers) if not isinstance(answer, str)]
        compared = dict(
            zip(
                places,
                compare(
                    [entry for entry in answers if not isinstance(entry, str)],
                    [outputs[place] for place in places],
                ),
                strict=True,
            )
        )
        found: list[JudgedExchange | str] = []
        for place, (entry, of_reference, of_served, answer) in enumerate(
            zip(batch, outputs, served, answers, strict=True)
        ):
            if isinstance(of_reference, QuarantineError) or not isinstance(of_served, ReplayResult):
                found.append(str(of_served))
                continue
            flip, outcome = of_served.divergences.flip, compared.get(place)
            if isinstance(outcome, ReplayResult) and not isinstance(answer, str):
                values = _values(outcome.divergences, flip, self._model.budget.cap)
                found.append(
                    JudgedExchange(
                        entry=entry, outputs=of_reference, served=of_served, values=values, judged=answer
                    )
                )
                continue
            found.append(
                JudgedExchange(
                    entry=entry,
                    outputs=of_reference,
                    served=of_served,
                    values=ItemValues.refused(flip, self._model.budget.cap),
                    problem=answer if isinstance(answer, str) else str(outcome),
                )
            )
        return found

    def _answered(self, entry: PreparedExchange) -> PreparedExchange | str:
        """Return the exchange with the answer of the candidate, or of the model of its route; or why it has none."""
        attributes = entry.exchange.attributes
        runtime = next(
            (
                route.runtime
                for route in self._routes
                if all(holds(p, attributes, {}) for p in route.slice.where)
            ),
            self._candidate,
        )
        try:
            arrays = {tensor.name: decode(tensor) for tensor in entry.exchange.inputs}
            if not self._model.batched:
                arrays = {name: array[np.newaxis] for name, array in arrays.items()}
            return answered(entry, runtime, arrays, "an exchange", "candidate")
        except (QuarantineError, OperatorError) as error:
            return str(error)


class TextJudge:
    """Judges a language model.

    Parameters
    ----------
    model
        With its cap.
    candidate
        The model that is judged.
    most_items
        Most answers in one call.
    """

    def __init__(self, model: Model, candidate: ReferenceRuntime, most_items: int) -> None:
        self._cap, self._candidate, self._most_items = model.budget.cap, candidate, most_items
        self._both: dict[int, VersionReference] = {}

    def judged(self, batch: Sequence[PreparedExchange]) -> list[JudgedExchange | str]:
        """Return what was found of each, or why it cannot be used."""
        alone = [msgspec.structs.replace(entry, inputs=without_free_answer(entry.inputs)) for entry in batch]
        scored = replay(
            assemble([self._with_candidate(entry) for entry in alone]), most_items=self._most_items
        )
        return [
            self._found(entry, outputs)
            if not isinstance(outputs, QuarantineError)
            else self._without_candidate(entry, outputs)
            for entry, outputs in zip(alone, scored, strict=True)
        ]

    def _with_candidate(self, entry: PreparedExchange) -> PreparedExchange:
        """Return an exchange that reference and candidate score."""
        of_reference = entry.version_reference
        both = self._both.get(id(of_reference))
        if both is None:
            runtime = CandidateReplica(of_reference.runtime, self._candidate, "")
            both = self._both[id(of_reference)] = msgspec.structs.replace(of_reference, runtime=runtime)
        asked = [
            msgspec.structs.replace(request, ask_replica=True) for request in entry.inputs[REQUEST].tolist()
        ]
        return msgspec.structs.replace(
            entry, version_reference=both, inputs={**entry.inputs, REQUEST: objects(asked)}
        )

    def _found(self, entry: PreparedExchange, outputs: dict[str, Array]) -> JudgedExchange | str:
        scores = outputs[SCORES].tolist()
        of_reference = {
            **outputs,
            SCORES: objects([msgspec.structs.replace(score, copy=None) for score in scores]),
        }
        texts = [request.served or "" for request in entry.inputs[REQUEST].tolist()]
        side = {
            SCORES: objects([None] * len(scores)),
            ANSWER: objects([Answer(text=text) for text in texts]),
        }
        (served,) = compare([entry], [of_reference])
        (judged,) = compare([msgspec.structs.replace(entry, candidate=side)], [outputs])
        if not isinstance(served, ReplayResult) or not isinstance(judged, ReplayResult):
            return str(served if isinstance(served, QuarantineError) else judged)
        values = _values(judged.divergences, served.divergences.flip, self._cap)
        is_empty = judged.divergences.detail["n_scored"] == 0  # there was nothing to read
        values = msgspec.structs.replace(
            values,
            flip=np.where(is_empty, np.nan, values.flip),
            divergence=np.where(is_empty, np.nan, values.divergence),
        )
        return JudgedExchange(entry=entry, outputs=of_reference, served=served, values=values)

    def _without_candidate(self, entry: PreparedExchange, error: QuarantineError) -> JudgedExchange | str:
        """Return an exchange that one of both cannot score: one that the reference can counts against the candidate."""
        try:
            outputs = computed(entry, "an exchange", "reference", step=self._most_items)
        except (QuarantineError, OperatorError) as of_reference:
            return str(of_reference)
        (served,) = compare([entry], [outputs])
        if not isinstance(served, ReplayResult):
            return str(served)
        values = ItemValues.refused(np.zeros(entry.n_items), self._cap)
        return JudgedExchange(
            entry=entry, outputs=outputs, served=served, values=values, problem=error.detail
        )


def _values(found: Divergences, served_flip: Values, cap: float) -> ItemValues:
    changed = found.detail.get("changed_tokens")
    return ItemValues(
        flip=found.flip,
        served_flip=served_flip,
        divergence=capped(found, cap),
        changed_tokens=np.full(len(found.flip), np.nan)
        if changed is None
        else np.asarray(changed, dtype=np.float64),
    )
