"""Every table of the first release.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "batch",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("kind", sa.Text(), nullable=False, comment="comparison or tally: which rows belong to it."),
        sa.Column("worker", sa.Text(), nullable=False, comment="Shadow worker that wrote it."),
        sa.Column(
            "stored_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="Start of the transaction.",
        ),
        sa.Column(
            "captured_from",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Earliest capture time in it.",
        ),
        sa.Column(
            "captured_to", sa.DateTime(timezone=True), nullable=False, comment="Latest capture time in it."
        ),
        sa.Column("n_rows", sa.Integer(), nullable=False, comment="Rows that belong to it."),
        sa.Column(
            "provenance",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Runtime, its version, provider and device that replayed it.",
        ),
        sa.Column(
            "skipped",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Exchanges read but not compared, number by reason: no_reference (counted as often as they are"
            " delivered) and the quarantine reasons (counted once).",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="Place in the fold; null until the monitor took it.",
        ),
        sa.CheckConstraint("kind in ('comparison', 'tally')", name=op.f("ck_batch_kind")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
        sa.UniqueConstraint("fold_seq", name=op.f("uq_batch_fold_seq")),
        comment="One transaction of a shadow worker; the monitor numbers batches and folds them in that order.",
    )
    op.create_index("ix_batch_stored_at", "batch", ["stored_at"], unique=False)
    op.create_index(
        "ix_batch_unfolded", "batch", ["id"], unique=False, postgresql_where=sa.text("fold_seq is null")
    )
    op.create_table(
        "comparison",
        sa.Column(
            "captured_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="When the response was complete, at the sidecar; immutable partition key.",
        ),
        sa.Column(
            "exchange_id", sa.UUID(as_uuid=False), nullable=False, comment="Exchange, minted at capture."
        ),
        sa.Column("item", sa.SmallInteger(), nullable=False, comment="Row of the exchange, from 0."),
        sa.Column("batch_id", sa.BigInteger(), nullable=False, comment="batch that stored it."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version it belongs to."),
        sa.Column("policy_id", sa.Integer(), nullable=False, comment="policy in force when it was taken."),
        sa.Column(
            "slice_ids", postgresql.ARRAY(sa.Integer()), nullable=False, comment="Every slice it belongs to."
        ),
        sa.Column(
            "n_items",
            sa.SmallInteger(),
            nullable=False,
            comment="Items of its exchange; they are one group in the statistics.",
        ),
        sa.Column("source", sa.Text(), nullable=False, comment="Sidecar that took it."),
        sa.Column("header_stratum", sa.Text(), nullable=False, comment="First-phase stratum."),
        sa.Column("body_stratum", sa.Text(), nullable=False, comment="Second-phase stratum."),
        sa.Column("pi1", sa.Double(), nullable=False, comment="First-phase inclusion probability."),
        sa.Column(
            "pi2",
            sa.Double(),
            nullable=False,
            comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2).",
        ),
        sa.Column(
            "u1", sa.Double(), nullable=False, comment="First phase's draw in [0, 1): taken since u1 < pi1."
        ),
        sa.Column(
            "u2",
            sa.Double(),
            nullable=False,
            comment="Second phase's draw; thin with it to a constant probability.",
        ),
        sa.Column(
            "group_key",
            sa.Text(),
            nullable=False,
            comment="Session (hashed) that is one observation, or empty.",
        ),
        sa.Column("flip", sa.Boolean(), nullable=True, comment="Top class differs."),
        sa.Column("topk", sa.Boolean(), nullable=True, comment="Set of the k top classes differs."),
        sa.Column("js", sa.Double(), nullable=True, comment="Jensen-Shannon divergence, nats, 0 to ln 2."),
        sa.Column(
            "kl",
            sa.Double(),
            nullable=True,
            comment="Kullback-Leibler divergence KL(reference || candidate), nats; infinity is kept.",
        ),
        sa.Column(
            "margin",
            sa.Double(),
            nullable=True,
            comment="Absolute change of the gap of the two top probabilities.",
        ),
        sa.Column(
            "candidate_margin", sa.Double(), nullable=True, comment="That gap in the candidate's output."
        ),
        sa.Column(
            "reference_margin", sa.Double(), nullable=True, comment="That gap in the reference's output."
        ),
        sa.Column(
            "detail",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="What else the comparator says, e.g. top classes.",
        ),
        sa.Column(
            "attributes",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Recorded headers, parameters and JSON values.",
        ),
        sa.Column(
            "features",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Input features that slices use.",
        ),
        sa.Column(
            "trace", sa.Text(), nullable=False, comment="traceparent of the production request, or empty."
        ),
        sa.Column(
            "stored_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was stored.",
        ),
        sa.CheckConstraint(
            "pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name=op.f("ck_comparison_inclusion_probability")
        ),
        sa.PrimaryKeyConstraint("captured_at", "exchange_id", "item", name=op.f("pk_comparison")),
        comment="The divergence of one item: candidate output against reference output. One row per item.",
        postgresql_partition_by="RANGE (captured_at)",
    )
    op.create_index("ix_comparison_batch_id", "comparison", ["batch_id"], unique=False)
    op.create_table(
        "fold",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last batch folded."),
        sa.Column(
            "event_time",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Running maximum of capture times: the fold's clock.",
        ),
        sa.Column(
            "mass",
            sa.Double(),
            nullable=False,
            comment="Lambda: integral of dt / (30 days * live detectors).",
        ),
        sa.Column("n_detectors", sa.Integer(), nullable=False, comment="Live detectors."),
        sa.Column(
            "folded_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When, by the database's clock.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_fold_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_fold")),
        comment="How far the monitor has come: one row.",
    )
    op.create_table(
        "model_version",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model name on the wire."),
        sa.Column(
            "candidate_version",
            sa.Text(),
            nullable=False,
            comment="Version of the quantised model that serves.",
        ),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference file; empty where the version has no reference (always unknown).",
        ),
        sa.Column(
            "reference",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Provenance of the reference: path, precision, opset, producer.",
        ),
        sa.Column(
            "first_seen_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its first exchange was stored.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_version")),
        sa.UniqueConstraint(
            "model",
            "candidate_version",
            "reference_digest",
            name=op.f("uq_model_version_model_candidate_version_reference_digest"),
        ),
        comment="A candidate version with the reference it is measured against; the key of everything else.",
    )
    op.create_table(
        "policy",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("epoch", sa.Text(), nullable=False, comment="Identifies rates and salt together."),
        sa.Column(
            "definition",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Header strata and body strata with their rates, in order.",
        ),
        sa.Column(
            "first_seen_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When its first exchange was stored.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy")),
        sa.UniqueConstraint("epoch", name=op.f("uq_policy_epoch")),
        comment="Sampling rates of one epoch, as the sidecars stated them with their exchanges.",
    )
    op.create_table(
        "quarantine",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column(
            "stream_sequence",
            sa.BigInteger(),
            nullable=False,
            comment="Sequence in the stream, which begins anew when the stream is made anew.",
        ),
        sa.Column(
            "digest",
            sa.LargeBinary(),
            nullable=False,
            comment="SHA-256 of the message; the same message under the same sequence counts once per reason.",
        ),
        sa.Column(
            "exchange_id", sa.UUID(as_uuid=False), nullable=True, comment="Exchange, where it could be read."
        ),
        sa.Column("model", sa.Text(), nullable=False, comment="Model, where it could be read, else empty."),
        sa.Column(
            "captured_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Capture time, where it could be read.",
        ),
        sa.Column(
            "quarantined_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was set aside.",
        ),
        sa.Column("reason", sa.Text(), nullable=False, comment="One of the closed set that is counted."),
        sa.Column("detail", sa.Text(), nullable=False, comment="What was wrong, without any payload."),
        sa.Column(
            "payload", sa.LargeBinary(), nullable=True, comment="The message itself; deleted by retention."
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quarantine")),
        sa.UniqueConstraint(
            "stream_sequence", "digest", "reason", name=op.f("uq_quarantine_stream_sequence_digest_reason")
        ),
        comment="Exchanges that could not be compared, with their reason; payloads are deleted after a day.",
    )
    op.create_index("ix_quarantine_quarantined_at", "quarantine", ["quarantined_at"], unique=False)
    op.create_table(
        "report_run",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("kind", sa.Text(), nullable=False, comment="week, day or range."),
        sa.Column("from_at", sa.DateTime(timezone=True), nullable=False, comment="Begin of the period."),
        sa.Column(
            "to_at", sa.DateTime(timezone=True), nullable=False, comment="End of the period, exclusive."
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was written.",
        ),
        sa.Column("path", sa.Text(), nullable=False, comment="File it was written to."),
        sa.Column(
            "figures",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="What it says, for machines.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_report_run")),
        comment="Reports that were written, with the figures they show.",
    )
    op.create_table(
        "rollup_day",
        sa.Column("day", sa.DateTime(timezone=True), nullable=False, comment="Start of the day, UTC."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="slice."),
        sa.Column("n_items", sa.BigInteger(), nullable=False, comment="Items compared."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Exchanges compared."),
        sa.Column(
            "weight",
            sa.Double(),
            nullable=False,
            comment="Sum of weights 1 / pi over groups: estimated exchanges offered.",
        ),
        sa.Column(
            "weight_sq",
            sa.Double(),
            nullable=False,
            comment="Sum of squared weights; n_eff = weight^2 / weight_sq.",
        ),
        sa.Column(
            "flip",
            sa.Double(),
            nullable=False,
            comment="Weighted sum of flip over items; divide by flip_weight.",
        ),
        sa.Column("topk", sa.Double(), nullable=False, comment="The same of topk."),
        sa.Column("js", sa.Double(), nullable=False, comment="The same of js, nats."),
        sa.Column(
            "kl",
            sa.Double(),
            nullable=False,
            comment="The same of kl, each item capped at the model's kl_cap, nats.",
        ),
        sa.Column("margin", sa.Double(), nullable=False, comment="The same of margin."),
        sa.Column(
            "flip_weight",
            sa.Double(),
            nullable=False,
            comment="The part of weight that has a flip: items share the weight of their exchange.",
        ),
        sa.Column("topk_weight", sa.Double(), nullable=False, comment="The same of topk."),
        sa.Column("js_weight", sa.Double(), nullable=False, comment="The same of js."),
        sa.Column("kl_weight", sa.Double(), nullable=False, comment="The same of kl."),
        sa.Column("margin_weight", sa.Double(), nullable=False, comment="The same of margin."),
        sa.Column("n_kl_infinite", sa.BigInteger(), nullable=False, comment="Items whose KL was infinite."),
        sa.Column(
            "kl_bins",
            postgresql.ARRAY(sa.Double()),
            nullable=False,
            comment="Weighted histogram of kl: 64 log-spaced bins from 1e-6 to 10 nats, ends open.",
        ),
        sa.PrimaryKeyConstraint("day", "model_version_id", "slice_id", name=op.f("pk_rollup_day")),
        comment="Divergence per slice and day of capture; written by the monitor alone.",
    )
    op.create_table(
        "rollup_hour",
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False, comment="Start of the hour, UTC."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="slice."),
        sa.Column("n_items", sa.BigInteger(), nullable=False, comment="Items compared."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Exchanges compared."),
        sa.Column(
            "weight",
            sa.Double(),
            nullable=False,
            comment="Sum of weights 1 / pi over groups: estimated exchanges offered.",
        ),
        sa.Column(
            "weight_sq",
            sa.Double(),
            nullable=False,
            comment="Sum of squared weights; n_eff = weight^2 / weight_sq.",
        ),
        sa.Column(
            "flip",
            sa.Double(),
            nullable=False,
            comment="Weighted sum of flip over items; divide by flip_weight.",
        ),
        sa.Column("topk", sa.Double(), nullable=False, comment="The same of topk."),
        sa.Column("js", sa.Double(), nullable=False, comment="The same of js, nats."),
        sa.Column(
            "kl",
            sa.Double(),
            nullable=False,
            comment="The same of kl, each item capped at the model's kl_cap, nats.",
        ),
        sa.Column("margin", sa.Double(), nullable=False, comment="The same of margin."),
        sa.Column(
            "flip_weight",
            sa.Double(),
            nullable=False,
            comment="The part of weight that has a flip: items share the weight of their exchange.",
        ),
        sa.Column("topk_weight", sa.Double(), nullable=False, comment="The same of topk."),
        sa.Column("js_weight", sa.Double(), nullable=False, comment="The same of js."),
        sa.Column("kl_weight", sa.Double(), nullable=False, comment="The same of kl."),
        sa.Column("margin_weight", sa.Double(), nullable=False, comment="The same of margin."),
        sa.Column("n_kl_infinite", sa.BigInteger(), nullable=False, comment="Items whose KL was infinite."),
        sa.Column(
            "kl_bins",
            postgresql.ARRAY(sa.Double()),
            nullable=False,
            comment="Weighted histogram of kl: 64 log-spaced bins from 1e-6 to 10 nats, ends open.",
        ),
        sa.PrimaryKeyConstraint("hour", "model_version_id", "slice_id", name=op.f("pk_rollup_hour")),
        comment="Divergence per slice and hour of capture; written by the monitor alone.",
    )
    op.create_table(
        "slice",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False, comment="Stable id."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model whose items it takes."),
        sa.Column(
            "predicate",
            sa.Text(),
            nullable=False,
            comment='Canonical text, e.g. header.x-scanner = "faint"; the identity.',
        ),
        sa.Column("name", sa.Text(), nullable=False, comment="Short name shown in alerts; may change."),
        sa.Column(
            "definition",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="The predicate for machines: list of conditions under `where`.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was first met.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slice")),
        sa.UniqueConstraint("model", "predicate", name=op.f("uq_slice_model_predicate")),
        comment="One input sub-distribution: a readable predicate with an id that stays.",
    )
    op.create_table(
        "alert",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice that drifted."),
        sa.Column(
            "severity",
            sa.Text(),
            nullable=False,
            comment="Highest so far: warning opens a ticket, firing pages.",
        ),
        sa.Column(
            "metric", sa.Text(), nullable=False, comment="Metric with the most evidence when it opened."
        ),
        sa.Column(
            "onset_at", sa.DateTime(timezone=True), nullable=False, comment="Estimated begin of the drift."
        ),
        sa.Column(
            "opened_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Event time of the first warning or page.",
        ),
        sa.Column(
            "resolved_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Event time of the resolution; null while it lasts.",
        ),
        sa.Column(
            "details",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="What moved from what to what, as shown to on-call.",
        ),
        sa.CheckConstraint("severity in ('warning', 'firing')", name=op.f("ck_alert_severity")),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_alert_model_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_alert_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert")),
        comment="An episode of drift on one slice, from the first warning or page to its resolution.",
    )
    op.create_index(
        "uq_alert_open",
        "alert",
        ["model_version_id", "slice_id"],
        unique=True,
        postgresql_where=sa.text("resolved_at is null"),
    )
    op.create_table(
        "detector",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice it watches."),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric it watches."),
        sa.Column(
            "kind", sa.Text(), nullable=False, comment="budget, change (against a learned baseline) or tail."
        ),
        sa.Column(
            "state",
            sa.LargeBinary(),
            nullable=False,
            comment="Versioned, checked binary state; bit-exact resume.",
        ),
        sa.Column(
            "budget", sa.Double(), nullable=False, comment="Accepted mean, in the metric's unit over its cap."
        ),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Groups folded since the last reset."),
        sa.Column(
            "evidence",
            sa.Double(),
            nullable=False,
            comment="Evidence for paging; the slice's signals are summed.",
        ),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last fold that changed it."),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), nullable=False, comment="Event time of its first group."
        ),
        sa.Column(
            "last_at", sa.DateTime(timezone=True), nullable=False, comment="Event time of its last group."
        ),
        sa.Column(
            "retired_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Not counted as live from here on.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_detector_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_detector_slice_id_slice")),
        sa.PrimaryKeyConstraint("model_version_id", "slice_id", "metric", "kind", name=op.f("pk_detector")),
        comment="A sequential detector of one metric on one slice, as of its last fold.",
    )
    op.create_table(
        "tally",
        sa.Column("source", sa.Text(), nullable=False, comment="Sidecar."),
        sa.Column(
            "boot",
            sa.UUID(as_uuid=False),
            nullable=False,
            comment="Start of its supervisor; counts begin anew.",
        ),
        sa.Column("stratum", sa.Text(), nullable=False, comment="Header stratum."),
        sa.Column(
            "sequence", sa.BigInteger(), nullable=False, comment="Number of the tally within the boot."
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, comment="When the counts were read."),
        sa.Column("batch_id", sa.BigInteger(), nullable=False, comment="batch it came in."),
        sa.Column("offered", sa.BigInteger(), nullable=False, comment="Inference requests seen on the wire."),
        sa.Column("taken", sa.BigInteger(), nullable=False, comment="Of these, chosen by the first phase."),
        sa.Column(
            "thinned",
            sa.BigInteger(),
            nullable=False,
            comment="Of the taken, let go by the second phase; no loss.",
        ),
        sa.Column(
            "published", sa.BigInteger(), nullable=False, comment="Of the taken, acknowledged by the stream."
        ),
        sa.Column(
            "lost",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Of the taken, lost, number by reason.",
        ),
        sa.Column(
            "blind_connections",
            sa.BigInteger(),
            nullable=False,
            comment="Connections of the whole sidecar that went unseen.",
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_tally_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("source", "boot", "stratum", "sequence", name=op.f("pk_tally")),
        comment="Exact counts of one header stratum of one sidecar, cumulative since its boot.",
    )
    op.create_index("ix_tally_at", "tally", ["at"], unique=False)
    op.create_index("ix_tally_batch_id", "tally", ["batch_id"], unique=False)
    op.create_table(
        "transition",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("alert_id", sa.BigInteger(), nullable=True, comment="Episode it belongs to, if any."),
        sa.Column("from_verdict", sa.Text(), nullable=False, comment="Verdict before."),
        sa.Column("to_verdict", sa.Text(), nullable=False, comment="Verdict after."),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, comment="Event time."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Fold that made it."),
        sa.Column(
            "details",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Attributes of the event that is sent.",
        ),
        sa.CheckConstraint(
            "from_verdict in ('ok', 'warning', 'firing', 'unknown') and to_verdict in ('ok', 'warning', 'firing', 'unknown')",
            name=op.f("ck_transition_verdict"),
        ),
        sa.ForeignKeyConstraint(["alert_id"], ["alert.id"], name=op.f("fk_transition_alert_id_alert")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_transition_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_transition_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_transition")),
        comment="Every change of verdict of a slice, in the order of the fold.",
    )
    op.create_index("ix_transition_at", "transition", ["at"], unique=False)
    op.create_table(
        "verdict",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("verdict", sa.Text(), nullable=False, comment="ok, warning, firing or unknown."),
        sa.Column("reason", sa.Text(), nullable=False, comment="Why, in words; for unknown what is missing."),
        sa.Column(
            "since", sa.DateTime(timezone=True), nullable=False, comment="Event time of the last change."
        ),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Exchanges compared so far."),
        sa.Column(
            "evidence",
            sa.Double(),
            nullable=False,
            comment="Summed evidence; pages at the threshold. While firing: what it was at the alarm.",
        ),
        sa.Column(
            "threshold",
            sa.Double(),
            nullable=False,
            comment="What it must reach now: at least 1 / q, q the expected false pages per 30 days of the fleet.",
        ),
        sa.Column(
            "estimate",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Per metric: mean with its time-uniform 95 % interval over the recent window, and the budget.",
        ),
        sa.Column("alert_id", sa.BigInteger(), nullable=True, comment="Open episode, if any."),
        sa.Column(
            "last_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Capture time of its last comparison.",
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Event time of the fold that wrote this.",
        ),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="That fold."),
        sa.CheckConstraint(
            "verdict in ('ok', 'warning', 'firing', 'unknown')", name=op.f("ck_verdict_verdict")
        ),
        sa.ForeignKeyConstraint(["alert_id"], ["alert.id"], name=op.f("fk_verdict_alert_id_alert")),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_verdict_model_version_id_model_version")
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_verdict_slice_id_slice")),
        sa.PrimaryKeyConstraint("model_version_id", "slice_id", name=op.f("pk_verdict")),
        comment="What is said of one slice of one candidate version now. Read it through slice_now.",
    )
    op.create_table(
        "outbox",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of sending."
        ),
        sa.Column("transition_id", sa.BigInteger(), nullable=False, comment="What it tells of."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was written.",
        ),
        sa.Column(
            "attempts",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="How often the collector refused it while it took others.",
        ),
        sa.Column("last_error", sa.Text(), nullable=True, comment="Why the last one failed."),
        sa.Column(
            "sent_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When the collector took it; null until then.",
        ),
        sa.ForeignKeyConstraint(
            ["transition_id"], ["transition.id"], name=op.f("fk_outbox_transition_id_transition")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        comment="Events to be exported by OTLP at least once; written with the transition.",
    )
    op.create_index(
        "ix_outbox_unsent", "outbox", ["id"], unique=False, postgresql_where=sa.text("sent_at is null")
    )
    op.create_table(
        "baseline",
        sa.Column(
            "id",
            sa.BigInteger(),
            sa.Identity(always=True),
            nullable=False,
            comment="Order of decisions.",
        ),
        sa.Column(
            "model_version_id",
            sa.Integer(),
            nullable=False,
            comment="Candidate and reference that it holds for.",
        ),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("metric", sa.Text(), nullable=False, comment="Metric."),
        sa.Column("kind", sa.Text(), nullable=False, comment="Detector: budget, change or tail."),
        sa.Column(
            "source",
            sa.Text(),
            nullable=False,
            comment="learned or inherited (by the monitor); accepted, imported, frozen or kept (by a person).",
        ),
        sa.Column("made_by", sa.Text(), nullable=False, comment="Who decided: a user name, or monitor."),
        sa.Column(
            "made_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When.",
        ),
        sa.Column(
            "reason", sa.Text(), nullable=False, comment="Why, in the words of who decided; may be empty."
        ),
        sa.Column(
            "from_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Capture time of the first row it was made from.",
        ),
        sa.Column("to_at", sa.DateTime(timezone=True), nullable=True, comment="Of the last."),
        sa.Column("n_groups", sa.BigInteger(), nullable=False, comment="Groups it was made from."),
        sa.Column(
            "from_version_id",
            sa.Integer(),
            nullable=True,
            comment="Version whose rows these were, where it is another.",
        ),
        sa.Column(
            "content",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="The baseline itself, or an imported budget; null for a decision about the one in force.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="In force from this fold on; null until the monitor took it.",
        ),
        sa.CheckConstraint(
            "source in ('learned', 'inherited', 'accepted', 'imported', 'frozen', 'kept')",
            name=op.f("ck_baseline_source"),
        ),
        sa.ForeignKeyConstraint(
            ["from_version_id"],
            ["model_version.id"],
            name=op.f("fk_baseline_from_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_baseline_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_baseline_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_baseline")),
        comment="What each signal is measured against, and every decision about it; rows are never changed.",
    )
    op.create_index(
        "ix_baseline_signal", "baseline", ["model_version_id", "slice_id", "metric", "kind", "id"]
    )
    op.create_index("ix_baseline_unfolded", "baseline", ["id"], postgresql_where=sa.text("fold_seq is null"))
    op.create_table(
        "session",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column(
            "policy_id",
            sa.Integer(),
            nullable=False,
            comment="policy in force: a new epoch is a new session.",
        ),
        sa.Column("group_key", sa.Text(), nullable=False, comment="comparison.group_key."),
        sa.Column(
            "opened_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Event time of its first item; it closes session_s later.",
        ),
        sa.Column("items", sa.LargeBinary(), nullable=False, comment="What its items showed, MessagePack."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Last fold that added to it."),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_session_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["policy_id"], ["policy.id"], name=op.f("fk_session_policy_id_policy")),
        sa.PrimaryKeyConstraint("model_version_id", "policy_id", "group_key", name=op.f("pk_session")),
        comment="Sessions that are still open: what was seen of them counts when they close.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("session")
    op.drop_table("baseline")
    op.drop_table("outbox")
    op.drop_table("verdict")
    op.drop_table("transition")
    op.drop_table("tally")
    op.drop_table("detector")
    op.drop_table("alert")
    op.drop_table("slice")
    op.drop_table("rollup_hour")
    op.drop_table("rollup_day")
    op.drop_table("report_run")
    op.drop_table("quarantine")
    op.drop_table("policy")
    op.drop_table("model_version")
    op.drop_table("fold")
    op.drop_table("comparison")
    op.drop_table("batch")
