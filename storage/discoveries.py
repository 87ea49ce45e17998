"""The tables of discovered slices: what a search found, how its test goes, and when each version was last searched."""

from enum import StrEnum

from sqlalchemy import ARRAY, CheckConstraint, Double, ForeignKey, Identity, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from storage.columns import Base, BigInt, Float, Int, Json, Str, Time


class Status(StrEnum):
    """Where a discovered slice stands."""

    CANDIDATE = "candidate"  # under test on later traffic
    CONFIRMED = "confirmed"  # a monitored slice
    EXPIRED = "expired"  # not confirmed in time, or not seen any more; may be found again


class Discovery(Base):
    """A slice that a search found."""

    __tablename__ = "discovery"
    __table_args__ = (
        UniqueConstraint("model", "predicate"),
        CheckConstraint("status in ('candidate', 'confirmed', 'expired')", name="status"),
        {
            "comment": "A slice that a search found: tested on traffic captured after it was frozen, monitored once"
            " confirmed. Its id and its slice's stay when it expires and is found again."
        },
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Stable id.")
    model: Mapped[Str] = mapped_column(comment="Model whose items it takes.")
    predicate: Mapped[Str] = mapped_column(comment="Canonical text of its conditions; the identity.")
    name: Mapped[Str] = mapped_column(comment="Short name.")
    definition: Mapped[Json] = mapped_column(
        comment="The predicate for machines: list of conditions under `where`."
    )
    status: Mapped[Str] = mapped_column(
        comment="candidate: under test. confirmed: a monitored slice. expired: not confirmed in time, or unseen."
    )
    slice_id: Mapped[Int | None] = mapped_column(
        ForeignKey("slice.id"), comment="slice it became when it was first confirmed."
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Version on which it was found, and is tested."
    )
    metric: Mapped[Str] = mapped_column(comment="Metric that concentrates in it.")
    found_mean: Mapped[Float] = mapped_column(
        comment="Weighted mean there when it was found, in the metric's unit; biased upwards."
    )
    overall_mean: Mapped[Float] = mapped_column(comment="The same over everything.")
    found_share: Mapped[Float] = mapped_column(comment="Its share of the traffic then, weighted.")
    null_mean: Mapped[Float] = mapped_column(
        comment="Mean that it must be shown to be above, in the metric's unit."
    )
    scale: Mapped[Float] = mapped_column(
        comment="Cap of the metric, in its unit: the test is of values over it."
    )
    log_threshold: Mapped[Float] = mapped_column(
        comment="Natural logarithm of the evidence that confirms it: candidates of its search over the allowance."
    )
    log_evidence: Mapped[Float] = mapped_column(
        server_default=text("0"), comment="Natural logarithm of the largest evidence so far."
    )
    log_wealth: Mapped[list[float]] = mapped_column(
        ARRAY(Double), comment="Natural logarithm of each bet's wealth."
    )
    n_groups: Mapped[BigInt] = mapped_column(
        server_default=text("0"), comment="Groups tested since it was frozen."
    )
    n_found: Mapped[Int] = mapped_column(
        server_default=text("1"), comment="How often a search has frozen it."
    )
    first_found_at: Mapped[Time] = mapped_column(comment="When a search first found it.")
    frozen_at: Mapped[Time] = mapped_column(
        comment="Only what was captured from here on is tested; later than everything that was searched."
    )
    tested_at: Mapped[Time] = mapped_column(comment="Captures before this have been tested.")
    confirmed_at: Mapped[Time | None] = mapped_column(comment="When it was last confirmed.")
    expired_at: Mapped[Time | None] = mapped_column(comment="When it last expired.")


class DiscoverySearch(Base):
    """The last search of a version."""

    __tablename__ = "discovery_search"
    __table_args__ = ({"comment": "The last search of each candidate version, and what it cost."},)
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Version searched."
    )
    searched_at: Mapped[Time] = mapped_column(comment="When.")
    allowance: Mapped[Float] = mapped_column(
        comment="Expected false confirmations that this round of searches may cost, all versions together."
    )
    n_items: Mapped[Int] = mapped_column(comment="Items searched.")
    n_scored: Mapped[BigInt] = mapped_column(comment="Slices looked at.")
    n_found: Mapped[Int] = mapped_column(comment="Slices found, known ones included.")
    n_frozen: Mapped[Int] = mapped_column(comment="Of these, new candidates.")
    n_left_out: Mapped[BigInt] = mapped_column(
        comment="Attributes, values, conditions and slices that the limits left out."
    )
