"""The choice of exemplars, and their way into the stream, beside the replay.

A compared batch is offered once it is stored and acknowledged. One batch is worked on and one waits; a further one is counted and
left out. So neither the replay nor its memory depends on the stream of exemplars: if that is away or full, exemplars are counted as
not kept, and nothing is tried again. What is not stored `LONGEST_S` after its comparison is left out, too: an erasure waits for that time.

Random exemplars. From the exchanges of a slice each is drawn independently of all others, with a probability that depends on the
arrivals before its batch and on the size of its batch, and never on inputs, outputs or divergences. It is stored with the exchange,
and chosen so that some 64 an hour are drawn by each worker. The stream keeps the last 64 of a slice. So those that are kept are a fair
sample of the slice since the oldest of them was stored, each with a weight of 1 / (probability of sampling x probability of the draw): the
mean with these weights (Horvitz and Thompson 1952, as ratio: Hajek 1971) estimates the mean of the slice.

Damaged exemplars are those with a flip in the slice; while fewer than some 32 an hour have one, also those whose divergence is above
the budget. In a batch the worst are taken first. They are chosen and not drawn: they may rank sites, and must never estimate damage.

Generated text. A sound model at 4 bits changes something in most long answers, so a flip is no damage there unless it is judged. Damaged are
answers that are broken, or whose changed tokens or divergence are above their budgets, the furthest above first; then those with too many unlikely tokens.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from quantdrift.core.clock import Clock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.keys import Key, KeyFile
from quantdrift.core.logs import of_model
from quantdrift.core.records import Exchange, Exemplar, ExemplarItem, ExemplarKind, Metric, Tensor
from quantdrift.core.said_tokens import TOKENS
from quantdrift.core.sealing import seal
from quantdrift.core.signals import is_judged, signal_of
from quantdrift.core.stream.config import EXEMPLARS_EACH, LONGEST_S
from quantdrift.core.stream.errors import StreamFullError, TooLargeError
from quantdrift.core.tasks import Task
from quantdrift.core.tensors import DTYPES
from quantdrift.models.language.scoring import Scores, objects, said_tokens
from quantdrift.models.tensors import codec
from quantdrift.models.tensors.arrays import Array
from quantdrift.storage.comparisons.rows import ComparedExchange, ComparedItem

_LOG = logging.getLogger(__name__)
_HOUR_S: Final = 3600.0
PER_S: Final = EXEMPLARS_EACH / _HOUR_S
"""Exemplars of each kind and slice that a worker stores, on average and at most."""
_DECAY_S: Final = 600.0
_FOR_CERTAIN: Final = EXEMPLARS_EACH / 2
_OF_TEXT: Final = (Metric.BROKEN, Metric.CHANGED_TOKENS, Metric.FAR_TOKENS, Metric.UNLIKELY)
_OF_CHANCE: Final = signal_of(Metric.UNLIKELY).detail  # a short sound answer has many, now and then
_MOST_SLICES: Final = 4096
_DATATYPES: Final = {dtype: name for name, dtype in DTYPES.items()}
_ONE_MESSAGE: Final = {
    "too_large": "the message is larger than the server's `max_payload`",
    "datatype": "an output of the reference has a type that the protocol has no name for",
}
"""Why one exemplar cannot be kept while others can."""
_SAID_ONCE: Final = {*_ONE_MESSAGE, "late"}
"""What may happen again and again beside exemplars that are stored."""


class _DatatypeError(ValueError):
    """A reference has an output that no datatype of the protocol can hold."""


_OUTCOMES: Final = (
    (_DatatypeError, "datatype"),
    (TooLargeError, "too_large"),
    (StreamFullError, "full"),
    (RetryError, "unavailable"),
    (OperatorError, "refused"),
    (TimeoutError, "late"),
)
"""Why an exemplar was not stored, by the error; the first that fits."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was compared, stored and acknowledged.

    Parameters
    ----------
    compared
        Its exchanges.
    outputs
        The outputs of the reference, by number of the exchange in the stream.
    without_place
        Slices, by model and predicate, whose items count as `(other)`: they have no exemplars of their own.
    at
        When the batch was replayed.
    """

    compared: Sequence[ComparedExchange]
    outputs: Mapping[int, Mapping[str, Array]]
    without_place: frozenset[tuple[str, str]]
    at: datetime


class Sink(Protocol):
    """Where exemplars go: `Queue`."""

    async def ensure_exemplars(self) -> None:
        """Create the stream, or update its limits."""

    async def publish_exemplar(
        self, model: str, slice_name: str, kind: str, exchange_id: str, wire: bytes
    ) -> None:
        """Store an exemplar."""

    @property
    def max_payload_bytes(self) -> int:
        """Size of the longest message."""


class ChosenExemplar(NamedTuple):
    """An exchange that is to be an exemplar of a slice; `probability` is None for a damaged one."""

    kind: ExemplarKind
    slice: str
    compared: ComparedExchange
    items: tuple[ExemplarItem, ...]
    probability: float | None


class DamageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Above what an item of a model counts as damaged.

    Parameters
    ----------
    divergence
        The budget of its divergence.
    by_flip
        Whether an item with a flip is damaged.
    signals
        Budgets of further measures, by their name in `comparison.detail`.
    """

    divergence: float
    by_flip: bool = True
    signals: Mapping[str, float] = {}

    @classmethod
    def of(cls, model: Model) -> "DamageLimits":
        """Return those of a model."""
        budget = model.budget
        if model.task is not Task.GENERATION:
            return cls(divergence=budget.divergence)
        named = {signal.detail: signal.budget(budget) for signal in map(signal_of, _OF_TEXT)}
        return cls(
            divergence=budget.divergence,
            by_flip=is_judged(Metric.FLIP, budget),
            signals={name: accepted for name, accepted in named.items() if 0 < accepted < 1},
        )

    def damage(self, items: Sequence[ComparedItem]) -> tuple[bool, float]:
        """Return whether an item is damaged for certain, and how far the worst one is above its budget, as a ratio."""
        is_certain, most = False, 0.0
        for item in items:
            ratio = (item.divergence or 0.0) / self.divergence
            if self.signals and item.detail:
                measured = msgspec.json.decode(item.detail)
                for name, accepted in self.signals.items():
                    above = (measured.get(name) or 0.0) / accepted
                    if name != _OF_CHANCE:
                        ratio = max(ratio, above)
                    most = max(most, above)
            is_certain |= bool(item.flip) if self.by_flip else ratio > 1
            most = max(most, ratio)
        return is_certain, most


class _Arrivals:
    """The rate of exchanges of a slice, as a mean that forgets with `_DECAY_S`, and the damaged ones that may be stored."""

    __slots__ = ("_count", "_first_s", "_last_s", "_tokens")

    def __init__(self, now_s: float) -> None:
        self._first_s = self._last_s = now_s
        self._count = 0.0
        self._tokens = float(EXEMPLARS_EACH)

    def probability(self, n: int, now_s: float) -> float:
        """Return the probability with which to draw each of the `n` exchanges of a batch, and count them afterwards."""
        seen_s = _DECAY_S * -math.expm1(-(now_s - self._first_s) / _DECAY_S)
        self._count *= math.exp(-(now_s - self._last_s) / _DECAY_S)
        expected = self._count / seen_s if seen_s > 0 else 0.0
        self._tokens = min(self._tokens + (now_s - self._last_s) * PER_S, float(EXEMPLARS_EACH))
        self._last_s = now_s
        self._count += n
        return min(1.0, EXEMPLARS_EACH / n, PER_S / expected if expected else 1.0)

    def takes(self, *, is_certain: bool) -> bool:
        """Return whether a damaged exchange may be stored now, and count it; half is reserved for those that are damaged for certain."""
        if self._tokens < (1.0 if is_certain else _FOR_CERTAIN + 1.0):
            return False
        self._tokens -= 1.0
        return True


class Chooser:
    """Chooses exemplars. One thread uses it.

    Parameters
    ----------
    limits
        Above what an exchange counts as damaged, by the models that keep exemplars.
    draws
        Source of random numbers in [0, 1).
    """

    def __init__(
        self, limits: Mapping[str, DamageLimits], clock: Clock, draws: Callable[[], float] | None = None
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._draws = draws or random.SystemRandom().random
        self._slices: dict[tuple[str, str], _Arrivals] = {}

    def choose(
        self, compared: Sequence[ComparedExchange], without_place: frozenset[tuple[str, str]] = frozenset()
    ) -> Iterator[ChosenExemplar]:
        """Yield the exemplars of a batch."""
        by_slice: dict[tuple[str, str], dict[int, list[ExemplarItem]]] = {}
        for number, entry in enumerate(compared):
            if entry.exchange.model not in self._limits or not entry.exchange.is_verified:
                continue  # an unverified sender could fill the place of real traffic
            for index, item in enumerate(entry.items):
                exemplar_item = ExemplarItem(index=index, flip=item.flip, divergence=item.divergence)
                for key in item.slices:
                    if (key.model, key.predicate) not in without_place:
                        by_slice.setdefault((entry.exchange.model, key.name), {}).setdefault(
                            number, []
                        ).append(exemplar_item)
        for (model, name), exchanges in by_slice.items():
            yield from self._of_slice(
                model, name, [(compared[number], tuple(items)) for number, items in exchanges.items()]
            )

    def _of_slice(
        self, model: str, name: str, exchanges: list[tuple[ComparedExchange, tuple[ExemplarItem, ...]]]
    ) -> Iterator[ChosenExemplar]:
        now_s = self._clock.monotonic_s()
        arrivals = self._slices.pop((model, name), None) or _Arrivals(now_s)
        self._slices[model, name] = arrivals  # the last one: those that are not seen go first
        if len(self._slices) > _MOST_SLICES:
            del self._slices[next(iter(self._slices))]
        probability = arrivals.probability(len(exchanges), now_s)
        for compared, items in exchanges:
            if self._draws() < probability:
                yield ChosenExemplar(ExemplarKind.RANDOM, name, compared, items, probability)
        limits = self._limits[model]
        damages = [
            limits.damage([compared.items[item.index] for item in items]) for compared, items in exchanges
        ]
        for number in sorted(range(len(exchanges)), key=damages.__getitem__, reverse=True):
            is_certain, ratio = damages[number]
            if not (is_certain or ratio > 1) or not arrivals.takes(is_certain=is_certain):
                break
            yield ChosenExemplar(ExemplarKind.DAMAGED, name, *exchanges[number], None)


class ExemplarKeeper:
    """Keeps exemplars: `offer` never waits, and one task calls `keep_one` in a loop.

    Parameters
    ----------
    config
        The models that keep exemplars, and their budgets.
    sink
        The stream.
    keys
        Encrypt each exemplar for the stream; None: it is not encrypted before it gets there.
    count
        Called with model, outcome and number.
    """

    def __init__(
        self,
        config: Config,
        sink: Sink,
        clock: Clock,
        *,
        keys: KeyFile | None = None,
        count: Callable[[str, str, int], None],
        draws: Callable[[], float] | None = None,
    ) -> None:
        self._models = {model.name: DamageLimits.of(model) for model in config.models if model.exemplars}
        self._chooser = Chooser(self._models, clock, draws)
        self._sink = sink
        self._keys = keys
        self._count = count
        self._clock = clock
        self._offers: asyncio.Queue[tuple[Offer, float]] = asyncio.Queue(maxsize=1)
        self._is_ensured = False
        self._said: set[tuple[str, str]] = set()

    @classmethod
    def of(
        cls,
        config: Config,
        sink: Sink,
        clock: Clock,
        *,
        keys: KeyFile | None,
        count: Callable[[str, str, int], None],
    ) -> "ExemplarKeeper | None":
        """Return the keeper that a configuration asks for, or None."""
        if not any(model.exemplars for model in config.models):
            return None
        return cls(config, sink, clock, keys=keys, count=count)

    def wants(self, model: str) -> bool:
        """Return whether exemplars of a model are kept."""
        return model in self._models

    def offer(self, offer: Offer) -> None:
        """Take a batch, or count its exchanges as not looked at if an earlier one still waits."""
        try:
            self._offers.put_nowait((offer, self._clock.monotonic_s() + LONGEST_S))
        except asyncio.QueueFull:
            self._count(offer.compared[0].exchange.model, "busy", len(offer.compared))

    async def keep_one(self) -> None:
        """Choose from the next batch, and store what was chosen."""
        offer, until_s = await self._offers.get()
        chosen = await asyncio.to_thread(
            lambda: list(self._chooser.choose(offer.compared, offer.without_place))
        )
        while chosen:
            exemplar = chosen.pop()
            outcome, why = await self._store(exemplar, offer, until_s)
            model = exemplar.compared.exchange.model
            self._count(model, outcome, 1)
            if outcome == "stored":
                self._said = {said for said in self._said if said[1] in _SAID_ONCE}
                continue
            self._say(model, outcome, why)
            if outcome not in _ONE_MESSAGE:  # the same would happen to all others
                for left in chosen:
                    self._count(left.compared.exchange.model, outcome, 1)
                return

    async def _store(self, chosen: ChosenExemplar, offer: Offer, until_s: float) -> tuple[str, str]:
        """Store one; return the outcome, and why it was not stored."""
        exchange = chosen.compared.exchange
        outputs = offer.outputs[chosen.compared.stream_sequence]
        key = None if self._keys is None else self._keys.current
        if self._keys is not None and key is None:
            return "no_key", "stream.payload_key_file cannot be read"
        if _n_bytes(exchange, outputs) > self._sink.max_payload_bytes:
            return "too_large", _ONE_MESSAGE["too_large"]
        try:
            async with asyncio.timeout(until_s - self._clock.monotonic_s()):
                wire = await asyncio.to_thread(_wire, chosen, outputs, offer.at, key)
                if not self._is_ensured:
                    await self._sink.ensure_exemplars()
                    self._is_ensured = True
                await self._sink.publish_exemplar(
                    exchange.model, chosen.slice, chosen.kind, exchange.id, wire
                )
        except (TimeoutError, _DatatypeError, RetryError, OperatorError) as error:
            outcome = next(name for kind, name in _OUTCOMES if isinstance(error, kind))
            if outcome == "late":
                return outcome, f"they could not be stored within {LONGEST_S:g} s"
            return outcome, _ONE_MESSAGE.get(outcome, str(error))
        return "stored", ""

    def _say(self, model: str, outcome: str, why: str) -> None:
        """Log why exemplars are not kept: once until one is stored, or once for the whole process."""
        if (model, outcome) not in self._said:
            self._said.add((model, outcome))
            some = "some " if outcome in _ONE_MESSAGE else ""
            _LOG.warning(
                "model %s: %sexemplars are not kept: %s. Comparisons go on",
                model,
                some,
                why,
                extra=of_model(model),
            )


def _n_bytes(exchange: Exchange, outputs: Mapping[str, Array]) -> int:
    tensors = (*exchange.inputs, *exchange.outputs)
    return sum(len(tensor.data) for tensor in tensors) + sum(array.nbytes for array in outputs.values())


def _wire(chosen: ChosenExemplar, outputs: Mapping[str, Array], at: datetime, key: Key | None) -> bytes:
    """Return the message of an exemplar, encrypted if there is a key."""
    exchange = chosen.compared.exchange
    exemplar = Exemplar(
        kind=chosen.kind,
        slice=chosen.slice,
        exchange=exchange,
        items=chosen.items,
        reference=tuple(_tensor(name, array) for name, array in outputs.items()),
        reference_digest=chosen.compared.version.reference_digest,
        probability=chosen.probability,
        compared_at=at,
    )
    wire = encode(exemplar)
    return wire if key is None else seal(wire, key, model=exchange.model, exchange_id=exchange.id)


def _tensor(name: str, array: Array) -> Tensor:
    """Return an output of the reference as it is kept: of generated text, what was served and its own choice at each token."""
    items = array.ravel().tolist() if array.dtype == np.dtype(object) else []
    if items and all(isinstance(item, Scores) for item in items):
        said = objects([msgspec.json.encode(said_tokens(scores)) for scores in items])
        return codec.encode(TOKENS, "BYTES", said)
    return codec.encode(name, _datatype(array), array)


def _datatype(array: Array) -> str:
    if array.dtype == np.dtype(object):
        return "BYTES"
    name = _DATATYPES.get(array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype)
    if name is None:
        raise _DatatypeError(array.dtype.name)
    return name
