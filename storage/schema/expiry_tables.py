"""Tables of the exchanges that expired in the stream before a worker read them."""

from sqlalchemy import BigInteger, ForeignKey, Integer, text
from sqlalchemy.dialects.postgresql import INT8MULTIRANGE
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Int, Str, Time, Uuid


class ArrivalTable(Base):
    """Numbers of the exchanges that workers have finished, for one row of a sidecar's table of counts."""

    __tablename__ = "arrival"
    __table_args__ = (
        {
            "comment": "Exchanges that the workers have finished, per header stratum and model of one sidecar. A published"
            " exchange that is missing here and in the stream has expired."
        },
    )
    boot: Mapped[Uuid] = mapped_column(primary_key=True, comment="Start of the sidecar, as in tally.")
    counts_row: Mapped[Int] = mapped_column(
        Integer,
        primary_key=True,
        comment="Row of the sidecar's table of counts, as in the message header Quantdrift-Number.",
    )
    source: Mapped[Str | None] = mapped_column(comment="Sidecar; null until its first tally is stored.")
    stratum: Mapped[Str | None] = mapped_column(
        comment="Header stratum; null until its first tally is stored."
    )
    model: Mapped[Str | None] = mapped_column(comment="Model; null until its first tally is stored.")
    numbers: Mapped[object] = mapped_column(
        INT8MULTIRANGE,
        server_default=text("'{}'"),
        comment="Numbers of the exchanges that were compared, quarantined or skipped.",
    )
    closed: Mapped[BigInt] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="Numbers in `numbers` that never arrived: gaps are closed when there are too many.",
    )
    expired: Mapped[BigInt] = mapped_column(
        BigInteger, server_default=text("0"), comment="Exchanges that expired, as of the tally in `checked`."
    )
    checked: Mapped[BigInt] = mapped_column(
        BigInteger,
        server_default=text("0"),
        comment="Sequence of the last tally that the numbers were compared with.",
    )
    due: Mapped[bool] = mapped_column(
        server_default=text("true"), comment="Whether new numbers or a new tally wait to be compared."
    )
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When this row was created.")


class ExpiryTable(Base):
    """An increase of the number of expired exchanges."""

    __tablename__ = "expiry"
    __table_args__ = (
        {
            "comment": "Exchanges that expired in the stream before they were replayed: one row per increase of a count."
            " Deleted with its batch."
        },
    )
    batch_id: Mapped[BigInt] = mapped_column(
        ForeignKey("batch.id", ondelete="CASCADE"),
        primary_key=True,
        comment="batch it belongs to, of kind tally.",
    )
    boot: Mapped[Uuid] = mapped_column(primary_key=True, comment="Start of the sidecar, as in tally.")
    counts_row: Mapped[Int] = mapped_column(
        Integer, primary_key=True, comment="Row of the sidecar's table of counts."
    )
    source: Mapped[Str] = mapped_column(comment="Sidecar.")
    stratum: Mapped[Str] = mapped_column(comment="Header stratum.")
    model: Mapped[Str] = mapped_column(comment="Model.")
    n: Mapped[BigInt] = mapped_column(
        comment="Exchanges that expired; negative where a worker still had some in progress and finished them later."
    )
