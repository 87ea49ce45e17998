"""The tables of what expired in the stream."""

from sqlalchemy import BigInteger, ForeignKey, Integer, text
from sqlalchemy.dialects.postgresql import INT8MULTIRANGE
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Int, Str, Time, Uuid


class Arrival(Base):
    """What workers are done with, of one row of one sidecar's table of counts."""

    __tablename__ = "arrival"
    __table_args__ = (
        {
            "comment": "What the workers are done with, of one header stratum and model of one sidecar: what is missing"
            " here and in the stream has expired."
        },
    )
    boot: Mapped[Uuid] = mapped_column(primary_key=True, comment="Start of the sidecar, as in tally.")
    counts_row: Mapped[Int] = mapped_column(
        Integer, primary_key=True, comment="Row of the sidecar's table of counts, as the numbers name it."
    )
    source: Mapped[Str | None] = mapped_column(comment="Sidecar; null until its tally has come.")
    stratum: Mapped[Str | None] = mapped_column(comment="Header stratum; null until its tally has come.")
    model: Mapped[Str | None] = mapped_column(comment="Model; null until its tally has come.")
    numbers: Mapped[object] = mapped_column(
        INT8MULTIRANGE,
        server_default=text("'{}'"),
        comment="Numbers of the exchanges that were compared, set aside or skipped.",
    )
    closed: Mapped[BigInt] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="Numbers in there that never came: gaps are closed when they are too many. Negative: exchanges that a"
        " worker of an earlier release was done with.",
    )
    expired: Mapped[BigInt] = mapped_column(
        BigInteger, server_default=text("0"), comment="Exchanges that expired, as of the tally in checked."
    )
    checked: Mapped[BigInt] = mapped_column(
        BigInteger, server_default=text("0"), comment="Number of the tally that it was held against last."
    )
    due: Mapped[bool] = mapped_column(
        server_default=text("true"), comment="Whether there is something new to hold it against."
    )
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was first heard of.")


class Expiry(Base):
    """Exchanges that were found to have expired."""

    __tablename__ = "expiry"
    __table_args__ = (
        {
            "comment": "Exchanges that expired in the stream before they were replayed, each count by what it grew. Kept"
            " as long as its batch."
        },
    )
    batch_id: Mapped[BigInt] = mapped_column(
        ForeignKey("batch.id", ondelete="CASCADE"),
        primary_key=True,
        comment="batch it came with, of kind tally.",
    )
    boot: Mapped[Uuid] = mapped_column(primary_key=True, comment="Start of the sidecar, as in tally.")
    counts_row: Mapped[Int] = mapped_column(
        Integer, primary_key=True, comment="Row of the sidecar's table of counts."
    )
    source: Mapped[Str] = mapped_column(comment="Sidecar.")
    stratum: Mapped[Str] = mapped_column(comment="Header stratum.")
    model: Mapped[Str] = mapped_column(comment="Model.")
    n: Mapped[BigInt] = mapped_column(
        comment="Exchanges that expired; negative where a worker had them in hand and was done with them later."
    )
