"""The tables of gates: candidates that were judged on live traffic, and the verdicts on them."""

from typing import Any

from sqlalchemy import CheckConstraint, Double, ForeignKey, Identity, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Float, Json, Str, Time


class GateRunTable(Base):
    """A candidate that is judged on live traffic."""

    __tablename__ = "gate_run"
    __table_args__ = (
        CheckConstraint("verdict in ('pass', 'fail', 'insufficient')", name="verdict"),
        {
            "comment": "A candidate that `quantdrift gate --live` judges, on exchanges that were captured after this row was"
            " written. One row per run."
        },
    )
    id: Mapped[BigInt] = mapped_column(
        Identity(always=True), primary_key=True, comment="Number of the gate, as in `GET /gate/ID`."
    )
    model: Mapped[Str] = mapped_column(comment="Model.")
    candidate: Mapped[Str] = mapped_column(comment="Digest of the candidate's file: sha256:...")
    made_by: Mapped[Str] = mapped_column(
        server_default=text("session_user"), comment="User of the database that ran it."
    )
    alpha: Mapped[Float] = mapped_column(
        Double, comment="Probability of a false pass, and of a false failure, at most."
    )
    begun_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When the digest was recorded: only later exchanges count."
    )
    checked_at: Mapped[Time | None] = mapped_column(
        comment="When the answers were computed; null: nothing was judged yet."
    )
    ended_at: Mapped[Time | None] = mapped_column(
        comment="When the command ended; null: it runs, or was killed."
    )
    verdict: Mapped[Str] = mapped_column(
        server_default=text("'insufficient'"),
        comment="Not used: whoever wrote it was not checked. The verdict is in `gate_verdict`.",
    )
    more: Mapped[BigInt | None] = mapped_column(
        comment="About how many exchanges are missing to the slice that lacks most; null: unknown."
    )
    answers: Mapped[list[dict[str, Any]]] = mapped_column(
        JSONB,
        server_default=text("'[]'"),
        comment="The answer to each question about each slice: slice, question, verdict, n, mean, low, high, limit, more.",
    )


class GateVerdictTable(Base):
    """The verdict of a gate that has ended."""

    __tablename__ = "gate_verdict"
    __table_args__ = (
        CheckConstraint("verdict in ('pass', 'fail', 'insufficient')", name="verdict"),
        {
            "comment": "The verdict of a gate that has ended. Only the function `gate_end` writes it, once, for the user that began"
            " the gate, together with an entry of the audit; rows are never changed."
        },
    )
    gate_id: Mapped[BigInt] = mapped_column(
        ForeignKey("gate_run.id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
        comment="Gate.",
    )
    verdict: Mapped[Str] = mapped_column(comment="pass, fail or insufficient.")
    slice: Mapped[Str] = mapped_column(
        comment="Slice that was judged alone, beside all traffic (`--alert`); empty: every slice with traffic."
    )
    configuration: Mapped[Json] = mapped_column(
        comment="Options of the model by which it was judged, as in the audit: those that differ from their default."
    )
    made_by: Mapped[Str] = mapped_column(comment="Who ran it: the user that Postgres authenticated.")
    made_at: Mapped[Time] = mapped_column(comment="When it ended, by the clock of the database.")
