"""The tables of learned slices: what was fitted, and the sample of vectors it was fitted to."""

from typing import Any

from sqlalchemy import CheckConstraint, Identity, Index, LargeBinary, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.columns import Base, Float, Int, SmallInt, Str, Time, Uuid


class Clustering(Base):
    """Learned slices of a model, as fitted once."""

    __tablename__ = "clustering"
    __table_args__ = (
        UniqueConstraint("model", "version"),
        {
            "comment": "Learned slices of a model, one row per fit; the newest of a reference and space is in force."
        },
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Order of the fits.")
    model: Mapped[Str] = mapped_column(comment="Model whose inputs it divides.")
    version: Mapped[Int] = mapped_column(
        comment="Rises by one with each fit of the model; comparison.detail names it under `clustering`."
    )
    reference_digest: Mapped[Str] = mapped_column(comment="SHA-256 of the reference that embeds the inputs.")
    space: Mapped[Str] = mapped_column(
        comment="The reference's output or layer, or features with their names."
    )
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When.")
    made_by: Mapped[Str] = mapped_column(comment="Who asked for it: a user name, or monitor.")
    from_at: Mapped[Time] = mapped_column(comment="Capture time of the first vector it was fitted to.")
    to_at: Mapped[Time] = mapped_column(comment="Of the last.")
    n_vectors: Mapped[Int] = mapped_column(comment="Vectors it was fitted to.")
    next_id: Mapped[Int] = mapped_column(comment="First cluster id that the model had not used by then.")
    clusters: Mapped[list[dict[str, Any]]] = mapped_column(
        JSONB,
        comment="Per cluster: id, n, estimated share of the traffic, radius, over-represented declared slices with"
        " their lift, and the exchanges nearest to its centroid.",
    )
    content: Mapped[bytes] = mapped_column(
        LargeBinary, comment="Centroids, radii, scaling and known attribute values: versioned and checked."
    )


class Embedding(Base):
    """A vector of the bounded sample that clusterings are fitted to."""

    __tablename__ = "embedding"
    __table_args__ = (
        Index("ix_embedding_space", "model", "reference_digest", "space", "captured_at"),
        CheckConstraint("pi > 0 and pi <= 1", name="inclusion_probability"),
        {
            "comment": "A bounded sample of vectors that learned slices are fitted to; the oldest go first."
            " Vectors may tell much of an input: readers see all but those."
        },
    )
    captured_at: Mapped[Time] = mapped_column(primary_key=True, comment="As in comparison.")
    exchange_id: Mapped[Uuid] = mapped_column(primary_key=True, comment="As in comparison.")
    item: Mapped[SmallInt] = mapped_column(primary_key=True, comment="As in comparison.")
    model: Mapped[Str] = mapped_column(comment="Model.")
    reference_digest: Mapped[Str] = mapped_column(comment="SHA-256 of the reference that embedded it.")
    space: Mapped[Str] = mapped_column(
        comment="The reference's output or layer, or features with their names."
    )
    pi: Mapped[Float] = mapped_column(
        comment="Total inclusion probability of the item; that of this sample, equal for all, is not in it."
    )
    vector: Mapped[bytes] = mapped_column(LargeBinary, comment="Float32, little-endian.")
