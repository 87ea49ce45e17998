"""The records that a shadow worker passes to the writer: one per compared exchange, not one per column."""

from datetime import datetime

import msgspec

from quantdrift.core.errors import QuarantineReason
from quantdrift.core.records import Exchange, Policy, Side
from quantdrift.core.slices import SliceKey
from quantdrift.core.stream.numbering import Numbered


class VersionKey(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate version with its reference.

    Parameters
    ----------
    model, candidate_version
        As the exchange names them.
    reference_digest
        Empty where the version has no reference.
    """

    model: str
    candidate_version: str
    reference_digest: str


class ComparedItem(msgspec.Struct, frozen=True, kw_only=True):
    """The divergence of one item; None where it is undefined.

    Parameters
    ----------
    slices
        Every slice it belongs to.
    features
        Input features that slices use, finite ones only; of items whose vector is kept also those that describe clusters.
    flip, divergence
        Whether the decision differs, and the graded divergence of the model's task, which may be infinite.
    tie
        Whether the decision differs by equal top scores alone.
    topk, js, margin, candidate_margin, reference_margin
        Of classifiers: whether the set of the k top classes differs, JS in nats, the change of the gap of the two top
        probabilities, and that gap on either side.
    detail
        Other measures of the comparator, as the text of a JSON object, or None.
    """

    slices: tuple[SliceKey, ...]
    features: dict[str, float]
    flip: bool | None
    topk: bool | None
    js: float | None
    divergence: float | None
    margin: float | None
    candidate_margin: float | None
    reference_margin: float | None
    detail: str | None
    tie: bool | None = None


class ComparedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange that was replayed.

    Parameters
    ----------
    stream_sequence, payload
        Its place in the stream and its wire form, in case it has to be quarantined.
    exchange
        As captured.
    version
        Candidate and reference.
    items
        One entry per item, in order.
    """

    stream_sequence: int
    payload: bytes
    exchange: Exchange
    version: VersionKey
    items: tuple[ComparedItem, ...]


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A quarantined message.

    Parameters
    ----------
    stream_sequence, payload
        Its place in the stream and the message itself, which the writer may leave out.
    reason, detail
        The reason, and a text without any payload.
    exchange_id, model, captured_at
        Id, model and capture time of the exchange, if they could be read.
    numbered
        Its number at its sidecar, if any.
    """

    stream_sequence: int
    payload: bytes
    reason: QuarantineReason
    detail: str
    exchange_id: str | None = None
    model: str = ""
    captured_at: datetime | None = None
    numbered: Numbered | None = None


class Unreferenced(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange whose candidate version has no reference: it is counted, not compared.

    Parameters
    ----------
    version
        With an empty digest.
    captured_at
        When it was captured.
    """

    version: VersionKey
    captured_at: datetime


class VectorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of the sample that learned slices are fitted to.

    Parameters
    ----------
    captured_at, exchange_id, item
        The item, as in `comparison`.
    model, reference_digest, space
        Model, reference and space of the vector.
    pi
        Total inclusion probability of the item.
    vector
        Float32, little-endian.
    """

    captured_at: datetime
    exchange_id: str
    item: int
    model: str
    reference_digest: str
    space: str
    pi: float
    vector: bytes


class NoiseItem(msgspec.Struct, frozen=True, kw_only=True):
    """The divergence of an item's output from a second computation of it; None where it is undefined.

    Parameters
    ----------
    captured_at, exchange_id, item
        The item, as in `comparison`.
    side
        Whose output was computed again.
    version, policy, pi1, pi2
        As of its comparison.
    flip, divergence
        Flip and divergence of the second output from the first.
    slices
        Slices that it counts for: those of its comparison for which it was chosen.
    """

    captured_at: datetime
    exchange_id: str
    item: int
    side: Side
    version: VersionKey
    policy: Policy
    pi1: float
    pi2: float
    flip: bool | None
    divergence: float | None
    slices: tuple[SliceKey, ...]


class ConfigWarningRow(msgspec.Struct, frozen=True, kw_only=True):
    """The check whether a reference's outputs agree with the configuration.

    Parameters
    ----------
    model, reference_digest
        Whose.
    option, doubt
        The option that may be wrong, and what seems to be wrong, as text; empty where nothing does.
    """

    model: str
    reference_digest: str
    option: str
    doubt: str


class StoreBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that one transaction stores.

    Parameters
    ----------
    worker
        The shadow worker.
    at
        When it was read from the stream: used where nothing in it has a capture time.
    compared, quarantined, unreferenced
        The exchanges by their outcome.
    references
        Per reference digest what the reference is, as the text of a JSON object.
    provenance
        Description of the reference that replayed the batch, as the text of a JSON object.
    vectors
        Some of its items' vectors. They are stored after the transaction, and may be lost.
    noise
        Items of earlier batches that were computed again meanwhile.
    doubts
        Warnings about references that were checked meanwhile.
    numbered
        The numbers of its exchanges, as far as they have some.
    replay_s
        Seconds in which the reference computed it; None: it computed nothing.
    known_by_number
        Whether the number of each compared exchange tells that it was stored before.
    """

    worker: str
    at: datetime
    compared: tuple[ComparedExchange, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    unreferenced: tuple[Unreferenced, ...] = ()
    references: dict[str, str] = {}
    provenance: str = "{}"
    vectors: tuple[VectorRow, ...] = ()
    noise: tuple[NoiseItem, ...] = ()
    doubts: tuple[ConfigWarningRow, ...] = ()
    numbered: tuple[Numbered, ...] = ()
    replay_s: float | None = None
    known_by_number: bool = False

    @property
    def combinations(self) -> dict[int, tuple[SliceKey, ...]]:
        """The combinations of slices of its items by their `id`, in the order in which they come.

        Equal ones may be there twice: to compare them would cost more than what is done for each.
        """
        return {id(item.slices): item.slices for compared in self.compared for item in compared.items}


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a transaction.

    Parameters
    ----------
    n_rows
        Number of new rows.
    unplaced
        Indices into `compared` of exchanges that fit into no partition, with the reason of their quarantine.
    n_other
        By model, how many items were stored under a slice `(other)`, because their value has no place.
    without_place
        The slices of these items, by model and predicate.
    """

    n_rows: int
    unplaced: dict[int, QuarantineReason] = {}
    n_other: dict[str, int] = {}
    without_place: frozenset[tuple[str, str]] = frozenset()
