"""The table of sessions that are still open: one observation each, once they close."""

from sqlalchemy import ForeignKey, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.columns import Base, BigInt, Int, Str, Time


class Session(Base):
    """A session whose time is not over."""

    __tablename__ = "session"
    __table_args__ = (
        {"comment": "Sessions that are still open: what was seen of them counts when they close."},
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    policy_id: Mapped[Int] = mapped_column(
        ForeignKey("policy.id"), primary_key=True, comment="policy in force: a new epoch is a new session."
    )
    group_key: Mapped[Str] = mapped_column(primary_key=True, comment="comparison.group_key.")
    opened_at: Mapped[Time] = mapped_column(
        comment="Event time of its first item; it closes session_s later."
    )
    items: Mapped[bytes] = mapped_column(LargeBinary, comment="What its items showed, MessagePack.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Last fold that added to it.")
