"""The roll-up tables: sums per slice and hour or day, written by the monitor alone."""

from sqlalchemy import Double
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.columns import Base, BigInt, Float, Int, Time


class _Rollup:
    """Columns that hourly and daily roll-ups share: sums over groups, weighted by 1 / pi."""

    model_version_id: Mapped[Int] = mapped_column(primary_key=True, comment="model_version.")
    slice_id: Mapped[Int] = mapped_column(primary_key=True, comment="slice.")
    n_items: Mapped[BigInt] = mapped_column(comment="Items compared.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Exchanges compared.")
    weight: Mapped[Float] = mapped_column(
        comment="Sum of weights 1 / pi over groups: estimated exchanges offered."
    )
    weight_sq: Mapped[Float] = mapped_column(comment="Sum of squared weights; n_eff = weight^2 / weight_sq.")
    flip: Mapped[Float] = mapped_column(comment="Weighted sum of flip over items; divide by flip_weight.")
    topk: Mapped[Float] = mapped_column(comment="The same of topk.")
    js: Mapped[Float] = mapped_column(comment="The same of js, nats.")
    divergence: Mapped[Float] = mapped_column(
        comment="The same of divergence, each item capped at the model's budget.cap."
    )
    margin: Mapped[Float] = mapped_column(comment="The same of margin.")
    flip_weight: Mapped[Float] = mapped_column(
        comment="The part of weight that has a flip: items share the weight of their exchange."
    )
    topk_weight: Mapped[Float] = mapped_column(comment="The same of topk.")
    js_weight: Mapped[Float] = mapped_column(comment="The same of js.")
    divergence_weight: Mapped[Float] = mapped_column(comment="The same of divergence.")
    margin_weight: Mapped[Float] = mapped_column(comment="The same of margin.")
    n_infinite: Mapped[BigInt] = mapped_column(comment="Items whose divergence was infinite.")
    divergence_bins: Mapped[list[float]] = mapped_column(
        ARRAY(Double),
        comment="Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10, ends open.",
    )


class RollupHour(_Rollup, Base):
    """Hourly sums."""

    __tablename__ = "rollup_hour"
    __table_args__ = ({"comment": "Divergence per slice and hour of capture; written by the monitor alone."},)
    hour: Mapped[Time] = mapped_column(primary_key=True, comment="Start of the hour, UTC.")


class RollupDay(_Rollup, Base):
    """Daily sums."""

    __tablename__ = "rollup_day"
    __table_args__ = ({"comment": "Divergence per slice and day of capture; written by the monitor alone."},)
    day: Mapped[Time] = mapped_column(primary_key=True, comment="Start of the day, UTC.")
