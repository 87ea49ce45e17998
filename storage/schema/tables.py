"""Every table of the record. `migrations/` builds the same schema; a test compares the two.

`comparison` is the wide one: one row per item, metrics as columns, slices as an array, never a row per metric or
slice. It has no foreign keys, because it is written by COPY at line rate and what it points to is written first
in the same transaction.

The table of baselines: what drift is measured against, since when, by whose decision and from which rows.
"""

from typing import Any

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Float, Int, Json, SmallInt, Str, Time, Uuid
from quantdrift.storage.schema.expiry_tables import Arrival, Expiry
from quantdrift.storage.schema.monitor_tables import (
    Alert,
    Detector,
    Fold,
    Outbox,
    RollupDay,
    RollupHour,
    Session,
    Transition,
    Verdict,
)
from quantdrift.storage.schema.noise_tables import Noise, NoiseChange, NoiseFloor
from quantdrift.storage.schema.slice_tables import (
    Clustering,
    Discovery,
    DiscoveryChange,
    DiscoverySearch,
    Embedding,
)


class Baseline(Base):
    """What a signal is measured against, from one fold on."""

    __tablename__ = "baseline"
    __table_args__ = (
        CheckConstraint(
            "source in ('learned', 'inherited', 'accepted', 'imported', 'frozen', 'kept')", name="source"
        ),
        Index("ix_baseline_signal", "model_version_id", "slice_id", "metric", "kind", "id"),
        Index("ix_baseline_unfolded", "id", postgresql_where=text("fold_seq is null")),
        {
            "comment": "What each signal is measured against, and every decision about it: rows stay, their content goes in time."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of decisions.")
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference that it holds for."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), comment="Slice.")
    metric: Mapped[Str] = mapped_column(comment="Metric.")
    kind: Mapped[Str] = mapped_column(comment="Detector: budget, change or tail.")
    source: Mapped[Str] = mapped_column(
        comment="learned or inherited (by the monitor); accepted, imported, frozen or kept (by a person)."
    )
    made_by: Mapped[Str] = mapped_column(comment="Who decided: a user name, or monitor.")
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When.")
    reason: Mapped[Str] = mapped_column(comment="Why, in the words of who decided; may be empty.")
    from_at: Mapped[Time | None] = mapped_column(comment="Capture time of the first row it was made from.")
    to_at: Mapped[Time | None] = mapped_column(comment="Of the last.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Groups it was made from.")
    from_version_id: Mapped[Int | None] = mapped_column(
        ForeignKey("model_version.id"), comment="Version whose rows these were, where it is another."
    )
    content: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="The baseline itself, or an imported budget. Null: a decision about the one in force, or in force no more"
        " for longer than storage.superseded_days.",
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="In force from this fold on; null until the monitor took it."
    )


__all__ = [
    "Alert",
    "Arrival",
    "Base",
    "Baseline",
    "Batch",
    "Clustering",
    "Comparison",
    "Detector",
    "Discovery",
    "DiscoveryChange",
    "DiscoverySearch",
    "Embedding",
    "Expiry",
    "Fold",
    "ModelVersion",
    "Noise",
    "NoiseChange",
    "NoiseFloor",
    "Outbox",
    "Policy",
    "Quarantine",
    "ReportRun",
    "RollupDay",
    "RollupHour",
    "Session",
    "Slice",
    "Tally",
    "Transition",
    "Verdict",
]


class ModelVersion(Base):
    """A candidate version with the reference it is measured against."""

    __tablename__ = "model_version"
    __table_args__ = (
        UniqueConstraint("model", "candidate_version", "reference_digest"),
        {
            "comment": "A candidate version with the reference it is measured against; the key of everything else."
        },
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    model: Mapped[Str] = mapped_column(comment="Model name on the wire.")
    candidate_version: Mapped[Str] = mapped_column(comment="Version of the quantised model that serves.")
    reference_digest: Mapped[Str] = mapped_column(
        comment="SHA-256 of the reference file; empty where the version has no reference (always unknown)."
    )
    reference: Mapped[Json] = mapped_column(
        server_default=text("'{}'"), comment="Provenance of the reference: path, precision, opset, producer."
    )
    first_seen_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When its first exchange was stored."
    )


class Slice(Base):
    """One input sub-distribution."""

    __tablename__ = "slice"
    __table_args__ = (
        UniqueConstraint("model", "predicate"),
        {"comment": "One input sub-distribution: a readable predicate with an id that stays."},
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Stable id.")
    model: Mapped[Str] = mapped_column(comment="Model whose items it takes.")
    predicate: Mapped[Str] = mapped_column(
        comment='Canonical text, e.g. header.x-scanner = "faint"; the identity.'
    )
    name: Mapped[Str] = mapped_column(comment="Short name shown in alerts; may change.")
    definition: Mapped[Json] = mapped_column(
        comment="The predicate for machines: list of conditions under `where`."
    )
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was first met.")


class Policy(Base):
    """The sampling rates of one epoch."""

    __tablename__ = "policy"
    __table_args__ = (
        UniqueConstraint("epoch"),
        {"comment": "Sampling rates of one epoch, as the sidecars stated them with their exchanges."},
    )
    id: Mapped[Int] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    epoch: Mapped[Str] = mapped_column(comment="Identifies rates and salt together.")
    definition: Mapped[Json] = mapped_column(
        comment="Header strata and body strata with their rates, in order."
    )
    first_seen_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When its first exchange was stored."
    )


class Batch(Base):
    """One transaction of a shadow worker."""

    __tablename__ = "batch"
    __table_args__ = (
        UniqueConstraint("fold_seq"),
        CheckConstraint("kind in ('comparison', 'tally')", name="kind"),
        Index("ix_batch_unfolded", "id", postgresql_where=text("fold_seq is null")),
        Index("ix_batch_stored_at", "stored_at"),
        {
            "comment": "One transaction of a shadow worker; the monitor numbers batches and folds them in that order."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    kind: Mapped[Str] = mapped_column(comment="comparison or tally: which rows belong to it.")
    worker: Mapped[Str] = mapped_column(comment="Shadow worker that wrote it.")
    stored_at: Mapped[Time] = mapped_column(server_default=NOW, comment="Start of the transaction.")
    captured_from: Mapped[Time] = mapped_column(comment="Earliest capture time in it.")
    captured_to: Mapped[Time] = mapped_column(comment="Latest capture time in it.")
    n_rows: Mapped[Int] = mapped_column(comment="Rows that belong to it.")
    provenance: Mapped[Json] = mapped_column(
        server_default=text("'{}'"), comment="Runtime, its version, provider and device that replayed it."
    )
    skipped: Mapped[Json] = mapped_column(
        server_default=text("'{}'"),
        comment="Exchanges read but not compared, number by reason: no_reference (counted as often as they are"
        " delivered) and the quarantine reasons (counted once).",
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="Place in the fold; null until the monitor took it."
    )
    unreferenced: Mapped[list[int]] = mapped_column(
        ARRAY(Integer),
        server_default=text("'{}'"),
        comment="model_version of the exchanges without a reference among those skipped: these versions still serve.",
    )


class Comparison(Base):
    """The divergence of one item."""

    __tablename__ = "comparison"
    __table_args__ = (
        Index("ix_comparison_batch_id", "batch_id"),
        CheckConstraint("pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name="inclusion_probability"),
        {
            "comment": "The divergence of one item: candidate output against reference output. One row per item.",
            "postgresql_partition_by": "RANGE (captured_at)",
        },
    )
    captured_at: Mapped[Time] = mapped_column(
        primary_key=True, comment="When the response was complete, at the sidecar; immutable partition key."
    )
    exchange_id: Mapped[Uuid] = mapped_column(primary_key=True, comment="Exchange, minted at capture.")
    item: Mapped[SmallInt] = mapped_column(primary_key=True, comment="Row of the exchange, from 0.")
    batch_id: Mapped[BigInt] = mapped_column(comment="batch that stored it.")
    model_version_id: Mapped[Int] = mapped_column(comment="model_version it belongs to.")
    policy_id: Mapped[Int] = mapped_column(comment="policy in force when it was taken.")
    slice_ids: Mapped[list[int]] = mapped_column(ARRAY(Integer), comment="Every slice it belongs to.")
    n_items: Mapped[SmallInt] = mapped_column(
        comment="Items of its exchange; they are one group in the statistics."
    )
    source: Mapped[Str] = mapped_column(comment="Sidecar that took it.")
    header_stratum: Mapped[Str] = mapped_column(comment="First-phase stratum.")
    body_stratum: Mapped[Str] = mapped_column(comment="Second-phase stratum.")
    pi1: Mapped[Float] = mapped_column(comment="First-phase inclusion probability.")
    pi2: Mapped[Float] = mapped_column(
        comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2)."
    )
    u1: Mapped[Float] = mapped_column(comment="First phase's draw in [0, 1): taken since u1 < pi1.")
    u2: Mapped[Float] = mapped_column(comment="Second phase's draw; thin with it to a constant probability.")
    group_key: Mapped[Str] = mapped_column(comment="Session (hashed) that is one observation, or empty.")
    flip: Mapped[bool | None] = mapped_column(
        Boolean, comment="Decision differs: of a classifier the top class."
    )
    topk: Mapped[bool | None] = mapped_column(Boolean, comment="Set of the k top classes differs.")
    js: Mapped[Float | None] = mapped_column(comment="Jensen-Shannon divergence, nats, 0 to ln 2.")
    divergence: Mapped[Float | None] = mapped_column(
        comment="Graded divergence of the model's task, of a classifier KL(reference || candidate), nats; infinity is kept."
    )
    margin: Mapped[Float | None] = mapped_column(
        comment="Absolute change of the gap of the two top probabilities."
    )
    candidate_margin: Mapped[Float | None] = mapped_column(comment="That gap in the candidate's output.")
    reference_margin: Mapped[Float | None] = mapped_column(comment="That gap in the reference's output.")
    detail: Mapped[Json | None] = mapped_column(comment="What else was measured, e.g. top classes, by name.")
    attributes: Mapped[Json] = mapped_column(comment="Recorded headers, parameters and JSON values.")
    features: Mapped[Json] = mapped_column(comment="Input features that slices use.")
    trace: Mapped[Str] = mapped_column(comment="traceparent of the production request, or empty.")
    stored_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was stored.")


class ConfigWarning(Base):
    """Whether a reference's outputs look like what the configuration says."""

    __tablename__ = "doubt"
    __table_args__ = (
        {
            "comment": "Whether the outputs of a reference look like what the configuration says of them, as a worker saw it"
            " last."
        },
    )
    model: Mapped[Str] = mapped_column(primary_key=True, comment="Name of the model.")
    reference_digest: Mapped[Str] = mapped_column(
        primary_key=True, comment="SHA-256 of the reference that was looked at."
    )
    option: Mapped[Str] = mapped_column(comment="Option that may be wrong, or empty.")
    doubt: Mapped[Str] = mapped_column(comment="What seems to be wrong, and what to set; empty: nothing.")
    found_at: Mapped[Time] = mapped_column(comment="When a worker looked last.")


class Tally(Base):
    """Exact counts of one header stratum of one sidecar."""

    __tablename__ = "tally"
    __table_args__ = (
        Index("ix_tally_at", "at"),
        Index("ix_tally_batch_id", "batch_id"),
        {"comment": "Exact counts of one header stratum of one sidecar, cumulative since its boot."},
    )
    source: Mapped[Str] = mapped_column(primary_key=True, comment="Sidecar.")
    boot: Mapped[Uuid] = mapped_column(
        primary_key=True, comment="Start of its supervisor; counts begin anew."
    )
    stratum: Mapped[Str] = mapped_column(primary_key=True, comment="Header stratum.")
    sequence: Mapped[BigInt] = mapped_column(primary_key=True, comment="Number of the tally within the boot.")
    at: Mapped[Time] = mapped_column(comment="When the counts were read.")
    batch_id: Mapped[BigInt] = mapped_column(
        ForeignKey("batch.id", ondelete="CASCADE"), comment="batch it came in."
    )
    offered: Mapped[BigInt] = mapped_column(comment="Inference requests seen on the wire.")
    taken: Mapped[BigInt] = mapped_column(comment="Of these, chosen by the first phase.")
    thinned: Mapped[BigInt] = mapped_column(comment="Of the taken, let go by the second phase; no loss.")
    published: Mapped[BigInt] = mapped_column(comment="Of the taken, acknowledged by the stream.")
    lost: Mapped[Json] = mapped_column(comment="Of the taken, lost, number by reason.")
    blind_connections: Mapped[BigInt] = mapped_column(
        comment="Connections of the whole sidecar that went unseen."
    )
    models: Mapped[Json] = mapped_column(
        server_default=text("'{}'"),
        comment="By model, as far as requests tell theirs: taken; of these published, and lost, number by reason; row of"
        " the sidecar's table of counts, and the last number that was given to an exchange of it.",
    )
    streamed_at: Mapped[Time | None] = mapped_column(
        comment="When the stream took it, by the server's clock; null of an earlier release."
    )


class Quarantine(Base):
    """An exchange set aside."""

    __tablename__ = "quarantine"
    __table_args__ = (
        Index("ix_quarantine_quarantined_at", "quarantined_at"),
        UniqueConstraint("stream_sequence", "digest", "reason"),
        {
            "comment": "Exchanges that could not be compared, with their reason; payloads are deleted after a day."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    stream_sequence: Mapped[BigInt] = mapped_column(
        comment="Sequence in the stream, which begins anew when the stream is made anew."
    )
    digest: Mapped[bytes] = mapped_column(
        LargeBinary,
        comment="SHA-256 of the message; the same message under the same sequence counts once per reason.",
    )
    exchange_id: Mapped[Uuid | None] = mapped_column(comment="Exchange, where it could be read.")
    model: Mapped[Str] = mapped_column(comment="Model, where it could be read, else empty.")
    captured_at: Mapped[Time | None] = mapped_column(comment="Capture time, where it could be read.")
    quarantined_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was set aside.")
    reason: Mapped[Str] = mapped_column(comment="One of the closed set that is counted.")
    detail: Mapped[Str] = mapped_column(comment="What was wrong, without any payload.")
    payload: Mapped[bytes | None] = mapped_column(
        LargeBinary, comment="The message itself; deleted by retention."
    )


class ReportRun(Base):
    """A report that was written."""

    __tablename__ = "report_run"
    __table_args__ = ({"comment": "Reports that were written, with the figures they show."},)
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    kind: Mapped[Str] = mapped_column(comment="week, day or range.")
    from_at: Mapped[Time] = mapped_column(comment="Begin of the period.")
    to_at: Mapped[Time] = mapped_column(comment="End of the period, exclusive.")
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was written.")
    path: Mapped[Str] = mapped_column(comment="File it was written to.")
    figures: Mapped[Json] = mapped_column(comment="What it says, for machines.")
