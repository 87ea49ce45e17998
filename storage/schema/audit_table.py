"""The table of the audit: who changed what, and when."""

from typing import Any

from sqlalchemy import LargeBinary
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import Base, BigInt, Str, Time


class AuditTable(Base):
    """One action of a person or a process."""

    __tablename__ = "audit"
    __table_args__ = (
        {
            "comment": "Who changed what and when, in a chain of hashes. Only the function `audit_add` writes it; rows are never"
            " changed or deleted."
        },
    )
    seq: Mapped[BigInt] = mapped_column(
        primary_key=True, autoincrement=False, comment="1, 2, 3, ... without a gap."
    )
    at: Mapped[Time] = mapped_column(comment="When it was written, by the database's clock.")
    actor: Mapped[Str] = mapped_column(comment="Who: the user that Postgres authenticated (session_user).")
    action: Mapped[Str] = mapped_column(comment="What was done, as the command is called.")
    model: Mapped[Str] = mapped_column(comment="Model; empty: no single one.")
    subject: Mapped[Str] = mapped_column(
        comment="What was changed: `slice 12`, `discovery 3`, `revision 7` of the bucket of pauses, or a process; may be"
        " empty."
    )
    before: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="The former state; null: there was none, or it is unknown."
    )
    after: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="The new state; null: there is none."
    )
    note: Mapped[Str] = mapped_column(comment="Reason that the person gave; may be empty.")
    hash: Mapped[bytes] = mapped_column(
        LargeBinary,
        comment="SHA-256 of the hash of the entry before and of all other columns; `quantdrift audit verify` computes it"
        " again.",
    )
