"""The table of what sidecars and shadow workers report of themselves, for the audit."""

from typing import Any

from sqlalchemy import text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, Json, Str, Time


class ProcessReportTable(Base):
    """The newest report of one process."""

    __tablename__ = "process_report"
    __table_args__ = (
        {
            "comment": "Configuration and local pause of each sidecar and shadow worker, as it reported them last, and as the"
            " audit has them. One row per process."
        },
    )
    role: Mapped[Str] = mapped_column(primary_key=True, comment="sidecar or shadow.")
    source: Mapped[Str] = mapped_column(primary_key=True, comment="Pod, or host.")
    reported_at: Mapped[Time] = mapped_column(comment="When the stream took the newest report of a change.")
    seen_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When its last report was stored, to the hour."
    )
    stored_by: Mapped[Str] = mapped_column(
        server_default=text("session_user"), comment="Database user who stored the first report."
    )
    digest: Mapped[Str] = mapped_column(comment="SHA-256 of its options.")
    options: Mapped[Json] = mapped_column(
        comment="Options that differ from their default, without credentials.",
    )
    pause: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="What is paused at this process alone; null: nothing."
    )
    audited_digest: Mapped[Str | None] = mapped_column(comment="digest, as the audit has it; null: not yet.")
    audited_options: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="options, as the audit has them."
    )
    audited_pause: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True), comment="pause, as the audit has it."
    )
