"""The table of true labels: which side was right about an item."""

from sqlalchemy import ForeignKey, Index, true
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, Int, SmallInt, Str, Time, Uuid


class LabelTable(Base):
    """Which side was right about one compared item, by its true label."""

    __tablename__ = "label"
    __table_args__ = (
        Index("ix_label_model_version_id", "model_version_id", "captured_at"),
        {
            "comment": "Which side was right about a compared item, by the true label that somebody loaded with"
            " `quantdrift labels load`. One row per labelled item."
        },
    )
    captured_at: Mapped[Time] = mapped_column(primary_key=True, comment="Of the item, as in comparison.")
    exchange_id: Mapped[Uuid] = mapped_column(primary_key=True, comment="Of the item, as in comparison.")
    item: Mapped[SmallInt] = mapped_column(
        primary_key=True, comment="Index of the item in the exchange, from 0."
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="model_version it belongs to."
    )
    label: Mapped[Str | None] = mapped_column(
        comment="The true class, by its number or its name in models.labels, as loaded; null where the file said which side was"
        " right."
    )
    candidate_right: Mapped[bool] = mapped_column(comment="Whether the candidate's answer was right.")
    reference_right: Mapped[bool] = mapped_column(comment="Whether the reference's answer was right.")
    loaded_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was loaded.")
    drawn_for: Mapped[Int | None] = mapped_column(
        comment="Slice of which `quantdrift labels wanted` drew it among the changed answers; null: it was not drawn."
    )
    as_it_came: Mapped[bool] = mapped_column(
        server_default=true(), comment="Whether it was loaded from a file that says nothing of a draw."
    )
