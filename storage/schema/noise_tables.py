"""Tables of noise: repeated computations, the noise estimated from them, what it explains, and when it was too high."""

from sqlalchemy import ARRAY, Boolean, CheckConstraint, Double, ForeignKey, Identity, Index, Integer, text
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import Base, BigInt, Float, Int, Json, SmallInt, Str, Time, Uuid

SIDES = "('reference', 'candidate')"


class NoiseTable(Base):
    """The divergence of one item from itself."""

    __tablename__ = "noise"
    __table_args__ = (
        Index("ix_noise_batch_id", "batch_id"),
        CheckConstraint(f"side in {SIDES}", name="side"),
        CheckConstraint("pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name="inclusion_probability"),
        {
            "comment": "The divergence of one item from itself: the reference replayed it again in another batch, or the"
            " candidate answered it again. Deleted with its batch."
        },
    )
    exchange_id: Mapped[Uuid] = mapped_column(
        primary_key=True, comment="Id of the exchange, as in comparison."
    )
    item: Mapped[SmallInt] = mapped_column(
        primary_key=True, comment="Index of the item in the exchange, from 0."
    )
    side: Mapped[Str] = mapped_column(
        primary_key=True, comment="reference or candidate: which of them was repeated."
    )
    captured_at: Mapped[Time] = mapped_column(comment="When the response was complete, as in comparison.")
    batch_id: Mapped[BigInt] = mapped_column(
        ForeignKey("batch.id", ondelete="CASCADE"),
        comment="batch that stored it: one after that of its comparison.",
    )
    model_version_id: Mapped[Int] = mapped_column(comment="model_version it belongs to.")
    policy_id: Mapped[Int] = mapped_column(comment="policy in effect when it was sampled.")
    pi1: Mapped[Float] = mapped_column(comment="First-phase inclusion probability.")
    pi2: Mapped[Float] = mapped_column(
        comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2)."
    )
    flip: Mapped[bool | None] = mapped_column(Boolean, comment="Whether the two decisions differ.")
    divergence: Mapped[Float | None] = mapped_column(
        comment="Graded divergence of the second output from the first, as in comparison; infinity is kept."
    )
    slice_ids: Mapped[list[int] | None] = mapped_column(
        ARRAY(Integer),
        comment="Slices that it counts for, which are some of those of its comparison; null from an older worker: the"
        " slice of all traffic alone.",
    )


class NoiseFloorTable(Base):
    """The estimated noise of one side."""

    __tablename__ = "noise_floor"
    __table_args__ = (
        CheckConstraint(f"side in {SIDES}", name="side"),
        {
            "comment": "Estimated noise of a reference or candidate over all traffic, as of its last fold. Values are divided"
            " by `scale`."
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    side: Mapped[Str] = mapped_column(primary_key=True, comment="reference or candidate.")
    metric: Mapped[Str] = mapped_column(primary_key=True, comment="flip or divergence.")
    scale: Mapped[Float] = mapped_column(comment="One unit of the values below, in the metric's own unit.")
    older_n: Mapped[Int] = mapped_column(comment="Exchanges in the window in use.")
    older_weight: Mapped[Float] = mapped_column(comment="Sum of their weights.")
    older_total: Mapped[Float] = mapped_column(comment="Sum of their weighted values.")
    newer_n: Mapped[Int] = mapped_column(comment="Exchanges in the next window.")
    newer_weight: Mapped[Float] = mapped_column(comment="Sum of their weights.")
    newer_total: Mapped[Float] = mapped_column(comment="Sum of their weighted values.")
    low: Mapped[Float] = mapped_column(comment="Time-uniform lower bound of the mean.")
    high: Mapped[Float] = mapped_column(comment="Time-uniform upper bound of the mean.")
    added: Mapped[Float] = mapped_column(
        comment="Amount added to the budget of the slice of all traffic, and of each slice without a figure of its own."
    )
    budget: Mapped[Float] = mapped_column(comment="Accepted mean that the noise is compared with.")
    exceeds: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether noise exceeds half of the budget: the slice of all traffic, and each slice without a figure of its"
        " own, are then unknown.",
    )
    updated_at: Mapped[Time] = mapped_column(comment="Event time of the fold that wrote this.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Number of that fold.")


class NoiseSliceTable(Base):
    """The estimated noise of one side in one slice."""

    __tablename__ = "noise_slice"
    __table_args__ = (
        CheckConstraint(f"side in {SIDES}", name="side"),
        {
            "comment": "Estimated noise of a reference or candidate in one slice, as of its last fold; that of the slice of all"
            " traffic is in noise_floor. Values are divided by `scale`. Deleted when the slice is retired."
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), primary_key=True, comment="Slice.")
    side: Mapped[Str] = mapped_column(primary_key=True, comment="reference or candidate.")
    metric: Mapped[Str] = mapped_column(primary_key=True, comment="flip or divergence.")
    scale: Mapped[Float] = mapped_column(comment="One unit of the values below, in the metric's own unit.")
    older_n: Mapped[Int] = mapped_column(comment="Exchanges in the window in use.")
    older_weight: Mapped[Float] = mapped_column(comment="Sum of their weights.")
    older_total: Mapped[Float] = mapped_column(comment="Sum of their weighted values.")
    newer_n: Mapped[Int] = mapped_column(comment="Exchanges in the next window.")
    newer_weight: Mapped[Float] = mapped_column(comment="Sum of their weights.")
    newer_total: Mapped[Float] = mapped_column(comment="Sum of their weighted values.")
    low: Mapped[Float] = mapped_column(comment="Time-uniform lower bound of the mean.")
    high: Mapped[Float] = mapped_column(comment="Time-uniform upper bound of the mean.")
    own: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether the slice uses the two figures below; if not, it uses those of its version in noise_floor.",
    )
    added: Mapped[Float] = mapped_column(comment="Amount added to the budget of the slice.")
    budget: Mapped[Float] = mapped_column(comment="Accepted mean that the noise is compared with.")
    exceeds: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether noise exceeds half of the budget, or is not yet shown to be below: the slice is then unknown.",
    )
    announced: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether a noise_change says that it exceeds; there is none while the noise of the version exceeds too.",
    )
    updated_at: Mapped[Time] = mapped_column(comment="Event time of the fold that wrote this.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Number of that fold.")


class NoiseTestTable(Base):
    """The test of whether the noise of the reference explains what is measured of a metric of a slice."""

    __tablename__ = "noise_test"
    __table_args__ = (
        {
            "comment": "Whether the noise of the reference explains what is measured of a slice: the test on exchanges that were"
            " replayed twice, as of its last fold. Means are divided by the cap. A row of the slice of all traffic stays: it says that"
            " exchanges of the version are replayed twice.",
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id", ondelete="CASCADE"),
        primary_key=True,
        comment="Candidate and reference.",
    )
    slice_id: Mapped[Int] = mapped_column(
        ForeignKey("slice.id", ondelete="CASCADE"), primary_key=True, comment="Slice."
    )
    metric: Mapped[Str] = mapped_column(primary_key=True, comment="flip or divergence.")
    suspect: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether workers replay all exchanges of the slice twice, as far as their time allows.",
    )
    budget: Mapped[Float] = mapped_column(comment="Mean that the test is against.")
    since: Mapped[Time] = mapped_column(comment="Exchanges that were captured later count.")
    n: Mapped[Int] = mapped_column(comment="Exchanges that were replayed twice since.")
    wealth: Mapped[list[float]] = mapped_column(ARRAY(Double), comment="Evidence of each bet.")
    shown: Mapped[bool] = mapped_column(
        Boolean, comment="Whether noise was shown not to explain it: the slice may page."
    )
    explained: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether noise explains it, as far as is known: the allowance for noise is added to the budget.",
    )
    unpaired: Mapped[bool] = mapped_column(
        Boolean,
        comment="Whether second replays did not come although they were waited for: the slice may page.",
    )
    enough_at: Mapped[Time | None] = mapped_column(
        comment="Event time since which the evidence would be enough for a page; null while it is not."
    )
    enough_groups: Mapped[Int] = mapped_column(comment="Exchanges compared until then.")
    enough_n: Mapped[Int] = mapped_column(comment="n then.")
    paired_at: Mapped[Time | None] = mapped_column(
        comment="Fold's time when an exchange that was replayed twice last came, for the slice of all traffic one of the version;"
        " null before the first."
    )
    fold_seq: Mapped[BigInt] = mapped_column(comment="Fold that wrote this.")


class NoiseChangeTable(Base):
    """The start or end of too much noise."""

    __tablename__ = "noise_change"
    __table_args__ = (
        Index("ix_noise_change_at", "at"),
        CheckConstraint(f"side in {SIDES}", name="side"),
        {"comment": "When noise was shown to exceed half of the budget, and when to be below it again."},
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference."
    )
    side: Mapped[Str] = mapped_column(comment="reference or candidate.")
    metric: Mapped[Str] = mapped_column(comment="flip or divergence.")
    exceeds: Mapped[bool] = mapped_column(Boolean, comment="Whether it exceeds the bound from here on.")
    at: Mapped[Time] = mapped_column(comment="Event time.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Fold that made it.")
    details: Mapped[Json] = mapped_column(
        server_default=text("'{}'"), comment="Attributes of the event that is sent."
    )
    slice_id: Mapped[Int | None] = mapped_column(
        ForeignKey("slice.id"), comment="Slice; null: all traffic of the version."
    )
