"""Tables of discovered slices (candidates, tests, status, searches) and of learned slices (fits, sampled vectors)."""

from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ARRAY,
    Boolean,
    CheckConstraint,
    Double,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Float, Int, Json, SmallInt, Str, Time, Uuid


class DiscoveryStatus(StrEnum):
    """Status of a discovered slice."""

    CANDIDATE = "candidate"  # under test on later traffic
    CONFIRMED = "confirmed"  # a monitored slice
    EXPIRED = "expired"  # not confirmed in time, or no slot became free; may be found again
    RETIRED = "retired"  # no longer monitored: quiet, unseen, or removed by a person


STATUSES = "('candidate', 'confirmed', 'expired', 'retired')"


class DiscoveryTable(Base):
    """A slice that a search found."""

    __tablename__ = "discovery"
    __table_args__ = (
        UniqueConstraint("model", "predicate"),
        CheckConstraint(f"status in {STATUSES}", name="status"),
        {
            "comment": "A slice that a search found: tested on traffic captured after it was frozen, monitored once"
            " confirmed. Its id and its slice's id stay the same when it expires or is retired and is found again."
        },
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Stable id.")
    model: Mapped[Str] = mapped_column(comment="Model whose items it takes.")
    predicate: Mapped[Str] = mapped_column(
        comment="Canonical text of its conditions; it identifies the slice."
    )
    name: Mapped[Str] = mapped_column(comment="Short name.")
    definition: Mapped[Json] = mapped_column(
        comment="The predicate as JSON: a list of conditions under `where`."
    )
    status: Mapped[Str] = mapped_column(
        comment="candidate: under test. confirmed: a monitored slice. expired: not confirmed in time. retired:"
        " no longer monitored. discovery_change has the reasons."
    )
    slice_id: Mapped[Int | None] = mapped_column(
        ForeignKey("slice.id"), comment="slice that was created when it was first confirmed."
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Version on which it was found and is tested."
    )
    metric: Mapped[Str] = mapped_column(comment="Metric that is concentrated in it.")
    found_mean: Mapped[Float] = mapped_column(
        comment="Weighted mean in the slice when it was found, in the metric's unit; biased upwards."
    )
    overall_mean: Mapped[Float] = mapped_column(comment="Weighted mean over all items at that time.")
    found_share: Mapped[Float] = mapped_column(comment="Its share of the traffic at that time, weighted.")
    null_mean: Mapped[Float] = mapped_column(
        comment="Mean that the test must show it exceeds, in the metric's unit."
    )
    scale: Mapped[Float] = mapped_column(
        comment="Cap of the metric, in its unit: the test divides values by it."
    )
    log_threshold: Mapped[Float] = mapped_column(
        comment="Natural logarithm of the evidence that confirms it: number of candidates of its search / allowance."
    )
    log_evidence: Mapped[Float] = mapped_column(
        server_default=text("0"), comment="Natural logarithm of the largest evidence so far."
    )
    log_wealth: Mapped[list[float]] = mapped_column(
        ARRAY(Double), comment="Natural logarithm of each bet's wealth."
    )
    n_groups: Mapped[BigInt] = mapped_column(
        server_default=text("0"), comment="Groups tested since it was frozen."
    )
    n_found: Mapped[Int] = mapped_column(
        server_default=text("1"), comment="How many searches have frozen it."
    )
    first_found_at: Mapped[Time] = mapped_column(comment="When a search first found it.")
    frozen_at: Mapped[Time] = mapped_column(
        comment="Only traffic captured from here on is tested; it is later than all traffic that was searched."
    )
    tested_at: Mapped[Time] = mapped_column(comment="Traffic captured before this has been tested.")
    confirmed_at: Mapped[Time | None] = mapped_column(comment="When it was last confirmed.")
    expired_at: Mapped[Time | None] = mapped_column(comment="When it last expired.")
    waits_since: Mapped[Time | None] = mapped_column(
        comment="Since when it is proven and waits for one of the places of a model's discovered slices; null if it does not wait."
    )
    held: Mapped[bool] = mapped_column(
        Boolean,
        server_default=text("false"),
        comment="Whether a person retired it: no search tests it until it is restored.",
    )


class DiscoveryChangeTable(Base):
    """A change of status of a discovered slice."""

    __tablename__ = "discovery_change"
    __table_args__ = (
        CheckConstraint(f"status in {STATUSES}", name="status"),
        Index("ix_discovery_change_discovery", "discovery_id", "id"),
        Index("ix_discovery_change_unfolded", "id", postgresql_where=text("fold_seq is null")),
        {
            "comment": "Every change of status of a discovered slice, with who and why; rows are never changed."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of changes.")
    discovery_id: Mapped[Int] = mapped_column(ForeignKey("discovery.id"), comment="Discovered slice.")
    status: Mapped[Str] = mapped_column(comment="Status from here on.")
    made_by: Mapped[Str] = mapped_column(comment="Who changed it: the user of the database, or monitor.")
    made_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was changed.")
    reason: Mapped[Str] = mapped_column(comment="Reason in words.")
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="The fold applies it from here on; null until the monitor has taken it over."
    )


class DiscoverySearchTable(Base):
    """The last search of a version."""

    __tablename__ = "discovery_search"
    __table_args__ = ({"comment": "The last search of each candidate version, and what it cost."},)
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Version searched."
    )
    searched_at: Mapped[Time] = mapped_column(comment="When it ran.")
    allowance: Mapped[Float] = mapped_column(
        comment="Expected number of false confirmations that this round of searches may cost, over all versions."
    )
    n_items: Mapped[Int] = mapped_column(comment="Items searched.")
    n_scored: Mapped[BigInt] = mapped_column(comment="Slices scored.")
    n_found: Mapped[Int] = mapped_column(comment="Slices found, known ones included.")
    n_frozen: Mapped[Int] = mapped_column(comment="Of these, new candidates.")
    n_left_out: Mapped[BigInt] = mapped_column(
        comment="Attributes, values, conditions and slices that were left out because of the limits."
    )


class ValueShareTable(Base):
    """The weights of the values of one attribute, of a crossed rule's combinations, or of a model's versions."""

    __tablename__ = "value_share"
    __table_args__ = (
        {
            "comment": "How much of the recent traffic has each value of an attribute, as a sketch of bounded size: the"
            " values with the largest shares are slices, or versions, of their own."
        },
    )
    model: Mapped[Str] = mapped_column(primary_key=True, comment="Model.")
    source: Mapped[Str] = mapped_column(
        primary_key=True,
        comment="Key of the attribute, name of the crossed rule with a colon and a space, or `version`.",
    )
    places: Mapped[Int] = mapped_column(comment="Most values that have a slice, or version, of their own.")
    counted_at: Mapped[Time] = mapped_column(comment="Time of the weights: they halve every day.")
    total: Mapped[Float] = mapped_column(comment="Weight of all items.")
    error: Mapped[Float] = mapped_column(comment="What each weight in the sketch can be too low by.")
    counts: Mapped[list[dict[str, Any]]] = mapped_column(
        JSONB, comment="Per value: predicate (or version), name, conditions, weight."
    )
    reserved: Mapped[list[str]] = mapped_column(
        ARRAY(Text), comment="Versions that were given a place and have no row in model_version yet."
    )


class SliceChangeTable(Base):
    """A slice of a value gets or loses its place."""

    __tablename__ = "slice_change"
    __table_args__ = (
        CheckConstraint("status in ('admitted', 'lapsed')", name="status"),
        Index("ix_slice_change_slice", "slice_id", "id"),
        Index("ix_slice_change_unfolded", "id", postgresql_where=text("fold_seq is null")),
        {
            "comment": "When a slice made of a value lost its place or got it back, with who and why; rows are never changed."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of changes.")
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), comment="Slice.")
    status: Mapped[Str] = mapped_column(
        comment="lapsed: its items count as `(other)` from here on, and its detectors end. admitted: it is a slice again."
    )
    made_by: Mapped[Str] = mapped_column(
        comment="Who changed it: the user of the database, monitor or shadow."
    )
    made_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was changed.")
    reason: Mapped[Str] = mapped_column(comment="Reason in words.")
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="The fold applies it from here on; null until the monitor has taken it over."
    )


class ClusteringTable(Base):
    """Learned slices of a model, as fitted once."""

    __tablename__ = "clustering"
    __table_args__ = (
        UniqueConstraint("model", "version"),
        {
            "comment": "Learned slices of a model, one row per fit; the newest of a reference and space is in effect."
        },
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Order of the fits.")
    model: Mapped[Str] = mapped_column(comment="Model whose inputs it clusters.")
    version: Mapped[Int] = mapped_column(
        comment="Number of the fit, one higher with each fit of the model; comparison.detail names it under `clustering`."
    )
    reference_digest: Mapped[Str] = mapped_column(comment="SHA-256 of the reference that embeds the inputs.")
    space: Mapped[Str] = mapped_column(
        comment="Vector space: an output or layer of the reference, or named features."
    )
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When it was fitted.")
    made_by: Mapped[Str] = mapped_column(comment="Who asked for it: the user of the database, or monitor.")
    from_at: Mapped[Time] = mapped_column(comment="Capture time of the first vector it was fitted to.")
    to_at: Mapped[Time] = mapped_column(comment="Capture time of the last one.")
    n_vectors: Mapped[Int] = mapped_column(comment="Number of vectors it was fitted to.")
    next_id: Mapped[Int] = mapped_column(comment="First cluster id that the model had not used by that time.")
    clusters: Mapped[list[dict[str, Any]]] = mapped_column(
        JSONB,
        comment="Per cluster: id, n, estimated share of the traffic, radius, over-represented declared slices with"
        " their lift, and the exchanges nearest to its centroid.",
    )
    content: Mapped[bytes] = mapped_column(
        LargeBinary,
        comment="Centroids, radii, scaling and known attribute values, with version and checksum.",
    )


class EmbeddingTable(Base):
    """A vector of the bounded sample that clusterings are fitted to."""

    __tablename__ = "embedding"
    __table_args__ = (
        Index("ix_embedding_space", "model", "reference_digest", "space", "captured_at"),
        CheckConstraint("pi > 0 and pi <= 1", name="inclusion_probability"),
        {
            "comment": "A bounded sample of vectors that learned slices are fitted to; the oldest are deleted"
            " first. A vector can reveal much of an input: readers cannot see that column."
        },
    )
    captured_at: Mapped[Time] = mapped_column(primary_key=True, comment="As in comparison.")
    exchange_id: Mapped[Uuid] = mapped_column(primary_key=True, comment="As in comparison.")
    item: Mapped[SmallInt] = mapped_column(primary_key=True, comment="As in comparison.")
    model: Mapped[Str] = mapped_column(comment="Model.")
    reference_digest: Mapped[Str] = mapped_column(comment="SHA-256 of the reference that embedded it.")
    space: Mapped[Str] = mapped_column(
        comment="Vector space: an output or layer of the reference, or named features."
    )
    pi: Mapped[Float] = mapped_column(
        comment="Total inclusion probability of the item, without that of this sample, which is equal for all."
    )
    vector: Mapped[bytes] = mapped_column(LargeBinary, comment="Float32, little-endian.")
