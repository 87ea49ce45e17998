"""The table of baselines: what drift is measured against, since when, by whose decision and from which rows."""

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.columns import Base, BigInt, Int, Str, Time


class Baseline(Base):
    """What a signal is measured against, from one fold on."""

    __tablename__ = "baseline"
    __table_args__ = (
        CheckConstraint(
            "source in ('learned', 'inherited', 'accepted', 'imported', 'frozen', 'kept')", name="source"
        ),
        Index("ix_baseline_signal", "model_version_id", "slice_id", "metric", "kind", "id"),
        Index("ix_baseline_unfolded", "id", postgresql_where=text("fold_seq is null")),
        {
            "comment": "What each signal is measured against, and every decision about it: rows stay, their content goes in time."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of decisions.")
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference that it holds for."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), comment="Slice.")
    metric: Mapped[Str] = mapped_column(comment="Metric.")
    kind: Mapped[Str] = mapped_column(comment="Detector: budget, change or tail.")
    source: Mapped[Str] = mapped_column(
        comment="learned or inherited (by the monitor); accepted, imported, frozen or kept (by a person)."
    )
    made_by: Mapped[Str] = mapped_column(comment="Who decided: a user name, or monitor.")
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When.")
    reason: Mapped[Str] = mapped_column(comment="Why, in the words of who decided; may be empty.")
    from_at: Mapped[Time | None] = mapped_column(comment="Capture time of the first row it was made from.")
    to_at: Mapped[Time | None] = mapped_column(comment="Of the last.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Groups it was made from.")
    from_version_id: Mapped[Int | None] = mapped_column(
        ForeignKey("model_version.id"), comment="Version whose rows these were, where it is another."
    )
    content: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="The baseline itself, or an imported budget. Null: a decision about the one in force, or in force no more"
        " for longer than storage.superseded_days.",
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="In force from this fold on; null until the monitor took it."
    )
