"""Tables that the monitor writes: its progress, detectors, baselines, open sessions, verdicts, events and roll-ups.

People also add decisions to `baseline`, and what they do about alerts to `alert_action`.
"""

from typing import Any, Final

from sqlalchemy import (
    CheckConstraint,
    Double,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from quantdrift.storage.schema.columns import NOW, Base, BigInt, Float, Int, Json, SmallInt, Str, Time

VERDICTS = "('ok', 'warning', 'firing', 'unknown')"
# The monitor updates such rows when it takes them over. A role that does not exist refuses nobody: before `setup postgres` has made
# that of the page, its user is an operator's.
_OF_THE_PAGE = (
    "identity = '' or pg_has_role(session_user, to_regrole('quantdrift_page'), 'member')"
    " or pg_has_role(session_user, to_regrole('quantdrift_monitor'), 'member')"
)
# The fold writes these rows again and again. With room in a page a new version of a row stays there, and no index changes.
_REWRITTEN: Final = {"fillfactor": 50}


class DetectorTable(Base):
    """A sequential detector's state."""

    __tablename__ = "detector"
    __table_args__ = (
        {
            "comment": "State of a sequential detector of one metric on one slice, as of its last fold. Kept for"
            " 90 days, or storage.retention_days if that is longer, after it is retired.",
            "postgresql_with": _REWRITTEN,
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    slice_id: Mapped[Int] = mapped_column(
        ForeignKey("slice.id"), primary_key=True, comment="Slice it watches."
    )
    metric: Mapped[Str] = mapped_column(primary_key=True, comment="Metric it watches.")
    kind: Mapped[Str] = mapped_column(
        primary_key=True,
        comment="Kind of detector: budget, change (against a learned baseline), tail or growth (of the latency).",
    )
    state: Mapped[bytes] = mapped_column(
        LargeBinary, comment="Binary state with version and checksum; a restart resumes bit for bit."
    )
    budget: Mapped[Float] = mapped_column(comment="Accepted mean, divided by the metric's cap.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Groups folded since the last reset.")
    evidence: Mapped[Float] = mapped_column(
        comment="Evidence towards a page; the evidence of a slice's detectors is summed."
    )
    fold_seq: Mapped[BigInt] = mapped_column(comment="Last fold that changed it.")
    created_at: Mapped[Time] = mapped_column(comment="Event time of its first group.")
    last_at: Mapped[Time] = mapped_column(comment="Event time of its last group.")
    retired_at: Mapped[Time | None] = mapped_column(
        comment="When it was retired, and no longer counted as live; null while it is live."
    )
    noise: Mapped[Float] = mapped_column(
        server_default=text("0"),
        comment="Part of `budget` that covers noise; the owner accepts the rest.",
    )


class BaselineTable(Base):
    """A decision about the baseline of a signal."""

    __tablename__ = "baseline"
    __table_args__ = (
        CheckConstraint(
            "source in ('learned', 'inherited', 'accepted', 'imported', 'frozen', 'kept')", name="source"
        ),
        Index("ix_baseline_signal", "model_version_id", "slice_id", "metric", "kind", "id"),
        Index("ix_baseline_unfolded", "id", postgresql_where=text("fold_seq is null")),
        {
            "comment": "Baselines of signals, and every decision about them. Content that is no longer in effect is deleted"
            " after 90 days, or storage.retention_days if that is longer, and its row after storage.history_days."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of decisions.")
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference that it applies to."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), comment="Slice.")
    metric: Mapped[Str] = mapped_column(comment="Metric.")
    kind: Mapped[Str] = mapped_column(comment="Detector: budget, change, tail or growth.")
    source: Mapped[Str] = mapped_column(
        comment="learned or inherited (by the monitor); accepted, imported, frozen or kept (by a person)."
    )
    made_by: Mapped[Str] = mapped_column(comment="Who decided: the user of the database, or monitor.")
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When it was decided.")
    reason: Mapped[Str] = mapped_column(comment="Reason that the person gave; may be empty.")
    from_at: Mapped[Time | None] = mapped_column(comment="Capture time of the first row it was made from.")
    to_at: Mapped[Time | None] = mapped_column(comment="Capture time of the last row it was made from.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Groups it was made from.")
    from_version_id: Mapped[Int | None] = mapped_column(
        ForeignKey("model_version.id"), comment="Version whose rows these were, if another one."
    )
    content: Mapped[dict[str, Any] | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="The baseline, or an imported budget. Null: a decision about the baseline in effect, or not in effect"
        " for longer than 90 days, or storage.retention_days if that is longer.",
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="In effect from this fold on; null until the monitor has taken it over."
    )


class IncidentTable(Base):
    """Alerts that explain each other."""

    __tablename__ = "incident"
    __table_args__ = (
        CheckConstraint("state in ('open', 'mitigated', 'recovered', 'closed', 'merged')", name="state"),
        CheckConstraint("mitigation in ('replaced', 'routed', 'reported')", name="mitigation"),
        Index("ix_incident_model_version_id", "model_version_id"),
        Index(
            "ix_incident_open",
            "id",
            postgresql_where=text("state = 'open' or mitigation in ('routed', 'reported')"),
        ),
        {
            "comment": "Alerts of one version that explain each other, as one thing with a state. Read it through incidents. The log of"
            " its states is incident_change."
        },
    )
    id: Mapped[BigInt] = mapped_column(
        Identity(always=True), primary_key=True, comment="Number of the incident."
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference."
    )
    began_at: Mapped[Time] = mapped_column(
        comment="Estimated start of the drift: the earliest of its alerts."
    )
    opened_at: Mapped[Time] = mapped_column(comment="Event time of its first warning or page.")
    state: Mapped[Str] = mapped_column(
        comment="open; mitigated: nobody gets its answers any more; recovered: by evidence; closed: by a person, or its slices are not"
        " compared any more; merged: its alerts belong to merged_into."
    )
    mitigation: Mapped[Str | None] = mapped_column(
        comment="Of mitigated: replaced (another version serves), routed (no request of its slices reaches the version) or reported (by a"
        " person)."
    )
    ended_at: Mapped[Time | None] = mapped_column(
        comment="Since when it is not open any more; null while it is."
    )
    merged_into: Mapped[BigInt | None] = mapped_column(
        ForeignKey("incident.id"), comment="The older incident of the same cause; null: it stands for itself."
    )
    n_answers: Mapped[BigInt | None] = mapped_column(
        comment="Answers of its slices that were compared from its beginning to its end; null: not counted yet, or not by answers."
    )
    n_people: Mapped[BigInt | None] = mapped_column(
        comment="People with at least one changed answer among these; null where sampling.sticky_header says nothing of them, or not"
        " counted."
    )
    changed: Mapped[Float | None] = mapped_column(
        comment="Estimated changed answers of all traffic of its slices in this time; null: not counted yet."
    )
    changed_low: Mapped[Float | None] = mapped_column(comment="Lower end of its 95 % interval; null: none.")
    changed_high: Mapped[Float | None] = mapped_column(comment="Upper end of its 95 % interval; null: none.")
    counted_until: Mapped[Time | None] = mapped_column(comment="Event time up to which the figures count.")


class IncidentChangeTable(Base):
    """A state that an incident got."""

    __tablename__ = "incident_change"
    __table_args__ = (
        CheckConstraint("state in ('open', 'mitigated', 'recovered', 'closed', 'merged')", name="state"),
        CheckConstraint("mitigation in ('replaced', 'routed', 'reported')", name="mitigation"),
        CheckConstraint(_OF_THE_PAGE, name="identity"),
        Index("ix_incident_change_incident_id", "incident_id", "id"),
        {"comment": "The states of each incident, in order: who said so, when and why."},
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of changes.")
    incident_id: Mapped[BigInt] = mapped_column(
        ForeignKey("incident.id", ondelete="CASCADE"), comment="Incident that it is about."
    )
    state: Mapped[Str] = mapped_column(comment="From then on, as incident.state.")
    mitigation: Mapped[Str | None] = mapped_column(comment="As incident.mitigation.")
    at: Mapped[Time] = mapped_column(comment="Event time.")
    made_by: Mapped[Str] = mapped_column(
        server_default=text("session_user"),
        comment="Database user who wrote it: the monitor's, or a person's.",
    )
    identity: Mapped[Str] = mapped_column(
        server_default=text("''"),
        comment="Person that the web server has authenticated, or who closed the last alert; empty: the database user acted.",
    )
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When it was written.")
    reason: Mapped[Str] = mapped_column(
        server_default=text("''"), comment="Reason that a person gave; empty: the evidence says so."
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="The fold that wrote it, or took it over from a person; null until then."
    )
    counts: Mapped[Json | None] = mapped_column(
        comment="Of routed: by slice, what had been compared of it, and of its version, and the share that it had of the traffic."
    )


class AlertTable(Base):
    """An episode of drift."""

    __tablename__ = "alert"
    __table_args__ = (
        Index(
            "uq_alert_open",
            "model_version_id",
            "slice_id",
            unique=True,
            postgresql_where=text("resolved_at is null"),
        ),
        CheckConstraint("severity in ('warning', 'firing')", name="severity"),
        CheckConstraint("ended in ('recovered', 'replaced', 'retired', 'closed')", name="ended"),
        Index("ix_alert_incident_id", "incident_id"),
        {"comment": "An episode of drift on one slice, from the first warning or page to its resolution."},
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), comment="Slice that drifted.")
    severity: Mapped[Str] = mapped_column(comment="Highest so far: warning opens a ticket, firing pages.")
    metric: Mapped[Str] = mapped_column(comment="Metric with the most evidence when it opened.")
    onset_at: Mapped[Time] = mapped_column(comment="Estimated start of the drift.")
    opened_at: Mapped[Time] = mapped_column(comment="Event time of the first warning or page.")
    resolved_at: Mapped[Time | None] = mapped_column(
        comment="Event time of the resolution; null while it lasts."
    )
    details: Mapped[Json] = mapped_column(
        comment="How it is related to other alerts: explained_by, incident, explains. What it is about is in the newest row of"
        " transition that opened it or made it worse."
    )
    ended: Mapped[Str | None] = mapped_column(
        comment="Why it is over: recovered (by evidence), replaced (its version serves no more; null again if it does), retired (its slice"
        " is not compared any more) or closed (by a person). Null while it lasts."
    )
    incident_id: Mapped[BigInt | None] = mapped_column(
        ForeignKey("incident.id"),
        comment="Incident that it belongs to, with the alerts that explain it or that it explains; null: the monitor has not looked yet.",
    )


class AlertActionTable(Base):
    """What a person did about an alert, or its escalation."""

    __tablename__ = "alert_action"
    __table_args__ = (
        CheckConstraint("action in ('ack', 'unack', 'note', 'escalate', 'close')", name="action"),
        CheckConstraint(_OF_THE_PAGE, name="identity"),
        Index(
            "ix_alert_action_unfolded", "id", postgresql_where=text("action = 'close' and fold_seq is null")
        ),
        Index("ix_alert_action_alert_id", "alert_id", "id"),
        {
            "comment": "What people did about alerts, and escalations that ended an acknowledgement. An alert is acknowledged if"
            " the newest row that is no note is `ack`."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of actions.")
    alert_id: Mapped[BigInt] = mapped_column(
        ForeignKey("alert.id", ondelete="CASCADE"), comment="Alert that it is about."
    )
    action: Mapped[Str] = mapped_column(
        comment="ack, unack, note or close (by a person); escalate: the alert has become worse, and is not acknowledged any more."
    )
    made_by: Mapped[Str] = mapped_column(
        server_default=text("session_user"),
        comment="Database user who wrote it; nobody can give another one.",
    )
    identity: Mapped[Str] = mapped_column(
        server_default=text("''"),
        comment="Person that the web server has authenticated; empty: the database user acted.",
    )
    made_at: Mapped[Time] = mapped_column(server_default=text("now()"), comment="When.")
    reason: Mapped[Str] = mapped_column(
        comment="Reason or note that the person gave; for an escalation, what became worse."
    )
    severity: Mapped[Str | None] = mapped_column(comment="Of ack and escalate: the alert's severity then.")
    level: Mapped[Float | None] = mapped_column(
        comment="Of ack: the alert escalates once the lower end of the 95 % interval of its metric is above this; null: unknown."
    )
    finding: Mapped[Json | None] = mapped_column(
        comment="Of a note that a command wrote: what it found, with `kind` cause, repair or gate; null: a person wrote the note."
    )
    fold_seq: Mapped[BigInt | None] = mapped_column(
        comment="Of close: in effect from this fold on; null until the monitor has taken it over."
    )


class ServingTable(Base):
    """Whether a candidate version serves."""

    __tablename__ = "serving"
    __table_args__ = (
        {
            "comment": "Whether each candidate version serves, as the monitor sees it: another version of its model replaces it once nothing"
            " of it was seen for ten times its usual gap, at least two minutes, or half a minute where that version began when this one ended."
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    last_at: Mapped[Time] = mapped_column(comment="Capture time of its newest exchange.")
    gap_s: Mapped[Float] = mapped_column(
        comment="Usual gap between its exchanges in seconds: their mean over the last hour, weighted by their lengths."
    )
    gaps_s: Mapped[Float] = mapped_column(comment="Seconds that gap_s is a mean of, at most an hour.")
    replaced_at: Mapped[Time | None] = mapped_column(
        comment="Event time at which it was found that another version serves instead; null while it serves."
    )
    back_at: Mapped[Time | None] = mapped_column(
        comment="Of a version that was replaced: since when its exchanges are seen again; it serves again after two minutes, or half a minute where the other one ended."
    )


class VerdictTable(Base):
    """The current verdict on a slice."""

    __tablename__ = "verdict"
    __table_args__ = (
        CheckConstraint(f"verdict in {VERDICTS}", name="verdict"),
        {
            "comment": "Current verdict on each slice of each candidate version. Read it through slice_now.",
            "postgresql_with": _REWRITTEN,
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), primary_key=True, comment="Slice.")
    verdict: Mapped[Str] = mapped_column(comment="ok, warning, firing or unknown.")
    reason: Mapped[Str] = mapped_column(comment="Reason in words; for unknown, what is missing.")
    since: Mapped[Time] = mapped_column(comment="Event time of the last change.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Exchanges compared so far.")
    evidence: Mapped[Float] = mapped_column(
        comment="Summed evidence; it pages at the threshold. While firing: the value at the alarm."
    )
    threshold: Mapped[Float] = mapped_column(
        comment="Evidence that pages now: at least 1 / q, where q is the expected number of false pages per 30 days of"
        " the fleet."
    )
    estimate: Mapped[Json] = mapped_column(
        comment="Per metric: mean with its time-uniform 95 % interval over the recent window, and the budget."
    )
    alert_id: Mapped[BigInt | None] = mapped_column(ForeignKey("alert.id"), comment="Open episode, if any.")
    last_at: Mapped[Time] = mapped_column(comment="Capture time of its last comparison.")
    updated_at: Mapped[Time] = mapped_column(comment="Event time of the fold that wrote this.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Number of that fold.")


class TransitionTable(Base):
    """A change of verdict."""

    __tablename__ = "transition"
    __table_args__ = (
        CheckConstraint(f"from_verdict in {VERDICTS} and to_verdict in {VERDICTS}", name="verdict"),
        Index("ix_transition_at", "at"),
        Index("ix_transition_alert_id", "alert_id", "id", postgresql_where=text("alert_id is not null")),
        {"comment": "Every change of verdict of a slice, in the order of the fold."},
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Surrogate key.")
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), comment="Candidate and reference."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), comment="Slice.")
    alert_id: Mapped[BigInt | None] = mapped_column(
        ForeignKey("alert.id"), comment="Episode it belongs to, if any."
    )
    from_verdict: Mapped[Str] = mapped_column(comment="Verdict before.")
    to_verdict: Mapped[Str] = mapped_column(comment="Verdict after.")
    at: Mapped[Time] = mapped_column(comment="Event time.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Fold that made it.")
    details: Mapped[Json] = mapped_column(comment="Attributes of the event that is sent.")
    text: Mapped[Json | None] = mapped_column(
        comment="What it says, worded when it was written: headline, lines, do_now, tomorrow, details. Null: no alert changed."
    )


class OutboxTable(Base):
    """An event waiting to be exported."""

    __tablename__ = "outbox"
    __table_args__ = (
        Index("ix_outbox_unsent", "id", postgresql_where=text("sent_at is null")),
        Index("ix_outbox_webhook", "webhook_due_at", postgresql_where=text("webhook_due_at is not null")),
        CheckConstraint("num_nonnulls(transition_id, noise_change_id) = 1", name="event"),
        {
            "comment": "Events to be sent by OTLP and to the webhook at least once; written with the transition."
        },
    )
    id: Mapped[BigInt] = mapped_column(Identity(always=True), primary_key=True, comment="Order of sending.")
    transition_id: Mapped[BigInt | None] = mapped_column(
        ForeignKey("transition.id"), comment="Change of verdict that it reports."
    )
    created_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it was written.")
    attempts: Mapped[Int] = mapped_column(
        server_default=text("0"), comment="How often the collector refused it while it accepted other events."
    )
    last_error: Mapped[Str | None] = mapped_column(comment="Error of the last failed attempt.")
    sent_at: Mapped[Time | None] = mapped_column(comment="When the collector accepted it; null until then.")
    noise_change_id: Mapped[BigInt | None] = mapped_column(
        ForeignKey("noise_change.id"),
        comment="Change of noise that it reports, if it reports no change of verdict.",
    )
    escalation_id: Mapped[BigInt | None] = mapped_column(
        ForeignKey("alert_action.id"),
        comment="Escalation of an acknowledged alert that it reports; `transition_id` is then the last change before it.",
    )
    webhook_due_at: Mapped[Time | None] = mapped_column(
        comment="When it is sent to the webhook next; null: it was accepted, or is not for the webhook."
    )
    webhook_attempts: Mapped[Int] = mapped_column(
        server_default=text("0"), comment="How often sending it to the webhook failed."
    )
    webhook_error: Mapped[Str | None] = mapped_column(comment="Why the webhook did not accept it last.")
    incident_change_id: Mapped[BigInt | None] = mapped_column(
        ForeignKey("incident_change.id"),
        comment="Change of its alert's incident that it reports; `transition_id` is then the last change of the alert before it.",
    )


class FoldTable(Base):
    """The monitor's progress."""

    __tablename__ = "fold"
    __table_args__ = (
        CheckConstraint("id = 1", name="singleton"),
        {"comment": "The monitor's progress over all models: one row."},
    )
    id: Mapped[SmallInt] = mapped_column(primary_key=True, autoincrement=False, comment="Always 1.")
    fold_seq: Mapped[BigInt] = mapped_column(
        comment="Last batch that has a number; model_fold has how far each model is folded."
    )
    event_time: Mapped[Time | None] = mapped_column(
        comment="Running maximum of the times of exchanges and tallies: the fold's time."
    )
    mass: Mapped[Float] = mapped_column(comment="Largest mass of model_fold.")
    n_detectors: Mapped[Int] = mapped_column(comment="Live detectors.")
    folded_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When it was folded, by the database's clock."
    )
    exchange_time: Mapped[Time | None] = mapped_column(
        comment="Running maximum of capture times of exchanges: the clock of the allowance."
    )
    lag_factor: Mapped[Float] = mapped_column(
        server_default=text("1"),
        comment="Factor on every sampling rate because the shadow does not keep up; 1: it does. Of the monitor that leads.",
    )
    model_seq: Mapped[BigInt | None] = mapped_column(
        comment="fold_seq as of the last monitor that keeps model_fold; another value: a release before it has folded since."
    )
    shards: Mapped[SmallInt] = mapped_column(
        server_default=text("1"),
        comment="monitor.shards of the monitor that leads: models are folded in so many shards.",
    )
    newest_capture: Mapped[Time | None] = mapped_column(
        comment="Latest capture of the batches with a number: where the span of a new model begins."
    )


class ModelFoldTable(Base):
    """How far each model is folded."""

    __tablename__ = "model_fold"
    __table_args__ = (
        UniqueConstraint("number"),
        {
            "comment": "How far each model is folded. Who folds it locks its row, so that no two monitors fold it at a time."
        },
    )
    model: Mapped[Str] = mapped_column(primary_key=True, comment="Model name, as in requests.")
    number: Mapped[Int] = mapped_column(
        comment="From 0, in the order in which models began: a model is in the shard number modulo fold.shards."
    )
    fold_seq: Mapped[BigInt] = mapped_column(comment="Last batch that was folded or does not concern it.")
    event_time: Mapped[Time | None] = mapped_column(
        comment="Running maximum of the times of its exchanges and of tallies: its time."
    )
    exchange_time: Mapped[Time | None] = mapped_column(
        comment="Running maximum of capture times of its exchanges: the clock of its allowance."
    )
    mass: Mapped[Float] = mapped_column(
        comment="Lambda: integral of dt / (30 days * models * its live detectors) until exchange_time."
    )
    n_detectors: Mapped[Int | None] = mapped_column(
        comment="Its live detectors; null: they are counted when it is next folded."
    )
    folded_at: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When it was folded, by the database's clock."
    )


class ModelSpanTable(Base):
    """When each model shares the allowance for false alerts."""

    __tablename__ = "model_span"
    __table_args__ = (
        {
            "comment": "When each model shares the fleet's allowance for false alerts: from its first batch until 30 days after its last."
        },
    )
    model: Mapped[Str] = mapped_column(primary_key=True, comment="Model name, as in requests.")
    from_at: Mapped[Time] = mapped_column(
        primary_key=True, comment="Latest capture of the batches before its first one: its share begins."
    )
    last_at: Mapped[Time] = mapped_column(comment="Its latest capture: its share ends 30 days later.")


class ShardTable(Base):
    """The monitor that folds each shard of the models."""

    __tablename__ = "shard"
    __table_args__ = (
        {"comment": "The monitor that folds each shard of the models, where fold.shards is more than one."},
    )
    number: Mapped[SmallInt] = mapped_column(
        primary_key=True,
        autoincrement=False,
        comment="From 0; a model is in the shard model_fold.number modulo fold.shards.",
    )
    holder: Mapped[Str] = mapped_column(
        comment="name of monitor_process; one that is not there folds it no more."
    )
    since: Mapped[Time] = mapped_column(server_default=NOW, comment="When it took it.")


class MonitorProcessTable(Base):
    """The monitors that share the shards."""

    __tablename__ = "monitor_process"
    __table_args__ = (
        {
            "comment": "The monitors that share the shards: each for 20 s after it last said that it runs, and as long as its session lasts."
        },
    )
    name: Mapped[Str] = mapped_column(
        primary_key=True, comment="Host name, process id and a random number of its start."
    )
    pid: Mapped[Int | None] = mapped_column(
        comment="Server process of its session; null: not known, since a pooler is between."
    )
    seen_at: Mapped[Time] = mapped_column(server_default=NOW, comment="When it said last that it runs.")


class LeaderTable(Base):
    """The monitor that leads."""

    __tablename__ = "leader"
    __table_args__ = (
        CheckConstraint("id = 1", name="singleton"),
        {
            "comment": "The monitor that leads: one row. Its transactions lock the row for share and compare the term."
        },
    )
    id: Mapped[SmallInt] = mapped_column(primary_key=True, autoincrement=False, comment="Always 1.")
    term: Mapped[BigInt] = mapped_column(
        comment="Number of the present lead; it rises whenever a monitor takes the lead."
    )
    holder: Mapped[Str] = mapped_column(comment="Host name and process id of the monitor that leads.")
    since: Mapped[Time] = mapped_column(
        server_default=NOW, comment="When it took the lead, by the database's clock."
    )


class _Rollup:
    """Columns that hourly and daily roll-ups share: sums over groups, weighted by 1 / pi."""

    model_version_id: Mapped[Int] = mapped_column(primary_key=True, comment="model_version.")
    slice_id: Mapped[Int] = mapped_column(primary_key=True, comment="slice.")
    n_items: Mapped[BigInt] = mapped_column(comment="Items compared.")
    n_groups: Mapped[BigInt] = mapped_column(comment="Exchanges compared.")
    weight: Mapped[Float] = mapped_column(
        comment="Sum of weights 1 / pi over groups: estimated exchanges offered."
    )
    weight_sq: Mapped[Float] = mapped_column(
        comment="Sum of squared weights, of a closed session the square of their sum; n_eff = weight^2 / weight_sq."
    )
    flip: Mapped[Float] = mapped_column(comment="Weighted sum of flip over items; divide by flip_weight.")
    topk: Mapped[Float] = mapped_column(comment="Weighted sum of topk; divide by topk_weight.")
    js: Mapped[Float] = mapped_column(comment="Weighted sum of js, nats; divide by js_weight.")
    divergence: Mapped[Float] = mapped_column(
        comment="Weighted sum of divergence, each item capped at the model's budget.cap; divide by divergence_weight."
    )
    margin: Mapped[Float] = mapped_column(comment="Weighted sum of margin; divide by margin_weight.")
    flip_weight: Mapped[Float] = mapped_column(
        comment="Part of weight whose items have a flip; items share the weight of their exchange."
    )
    topk_weight: Mapped[Float] = mapped_column(comment="Part of weight whose items have a topk.")
    js_weight: Mapped[Float] = mapped_column(comment="Part of weight whose items have a js.")
    divergence_weight: Mapped[Float] = mapped_column(comment="Part of weight whose items have a divergence.")
    margin_weight: Mapped[Float] = mapped_column(comment="Part of weight whose items have a margin.")
    n_infinite: Mapped[BigInt] = mapped_column(comment="Items whose divergence was infinite.")
    divergence_bins: Mapped[list[float]] = mapped_column(
        ARRAY(Double),
        comment="Weighted histogram of divergence: 64 log-spaced bins from 1e-6 to 10; the outer two are open.",
    )
    tie: Mapped[Float] = mapped_column(
        server_default=text("0"), comment="Weighted sum of tie; divide by tie_weight."
    )
    tie_weight: Mapped[Float] = mapped_column(
        server_default=text("0"), comment="Part of weight whose items have a tie."
    )
    n_unmeasured: Mapped[BigInt] = mapped_column(
        server_default=text("0"),
        comment="Items that nothing was measured of, for instance sampled answers without log-probabilities.",
    )
    cap: Mapped[float | None] = mapped_column(Double, comment="The budget.cap of divergence.")
    flip_weight_sq: Mapped[float | None] = mapped_column(
        Double,
        comment="Sum over exchanges of w^2, w being the weight of the items that have a flip.",
    )
    flip_sq: Mapped[float | None] = mapped_column(
        Double, comment="Sum over exchanges of y^2, y being the weighted sum of flip over the items."
    )
    flip_cross: Mapped[float | None] = mapped_column(Double, comment="Sum over exchanges of w y.")
    divergence_weight_sq: Mapped[float | None] = mapped_column(
        Double, comment="As flip_weight_sq, of divergence."
    )
    divergence_sq: Mapped[float | None] = mapped_column(Double, comment="As flip_sq, of divergence.")
    divergence_cross: Mapped[float | None] = mapped_column(Double, comment="As flip_cross, of divergence.")
    heaviest: Mapped[float | None] = mapped_column(Double, comment="Largest weight of an exchange.")
    people: Mapped[list[float] | None] = mapped_column(
        ARRAY(Double),
        comment="Of flip, then of divergence, 67 numbers: w and y, each summed in 32 random groups of people (hashed), and the sums of"
        " w^2, y^2 and w y over the exchanges of people. Null: no exchange names a person. For intervals, by mean_interval().",
    )


class RollupHour(_Rollup, Base):
    """Hourly sums."""

    __tablename__ = "rollup_hour"
    __table_args__ = ({"comment": "Divergence per slice and hour of capture; written by the monitor alone."},)
    hour: Mapped[Time] = mapped_column(primary_key=True, comment="Start of the hour, UTC.")


class RollupDay(_Rollup, Base):
    """Daily sums."""

    __tablename__ = "rollup_day"
    __table_args__ = (
        {
            "comment": "Divergence per slice and day of capture; written by the monitor alone.",
            "postgresql_with": _REWRITTEN,
        },
    )
    day: Mapped[Time] = mapped_column(primary_key=True, comment="Start of the day, UTC.")


class SessionTable(Base):
    """An open session."""

    __tablename__ = "session"
    __table_args__ = ({"comment": "Open sessions: each counts as one observation when it closes."},)
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    policy_id: Mapped[Int] = mapped_column(
        ForeignKey("policy.id"),
        primary_key=True,
        comment="policy of its first item.",
    )
    group_key: Mapped[Str] = mapped_column(primary_key=True, comment="comparison.group_key.")
    opened_at: Mapped[Time] = mapped_column(
        comment="Event time of its first item; it closes session_s later."
    )
    items: Mapped[bytes] = mapped_column(LargeBinary, comment="Measurements of its items, MessagePack.")
    fold_seq: Mapped[BigInt] = mapped_column(comment="Last fold that added to it.")


class UndeclaredSessionTable(Base):
    """The evidence that requests with one value of an attribute are alike in a slice."""

    __tablename__ = "undeclared_session"
    __table_args__ = (
        {
            "comment": "Evidence that requests with one value of an attribute come in bursts and have alike outcomes, although"
            " the attribute is not sampling.sticky_header. From `found_at` on the slice is unknown, and its alerts are tickets."
        },
    )
    model_version_id: Mapped[Int] = mapped_column(
        ForeignKey("model_version.id"), primary_key=True, comment="Candidate and reference."
    )
    slice_id: Mapped[Int] = mapped_column(ForeignKey("slice.id"), primary_key=True, comment="Slice.")
    attribute: Mapped[Str] = mapped_column(
        primary_key=True, comment="Recorded attribute, for instance header.x-user."
    )
    n_exchanges: Mapped[BigInt] = mapped_column(comment="Exchanges tested so far.")
    log_evidence: Mapped[Float] = mapped_column(comment="Logarithm of the evidence so far.")
    log_threshold: Mapped[Float] = mapped_column(comment="Evidence from which on it counts as found.")
    tested_at: Mapped[Time] = mapped_column(comment="Time of the newest exchange that was tested.")
    found_at: Mapped[Time | None] = mapped_column(
        comment="Time of the newest exchange when the evidence reached the threshold; it stays."
    )
    comes_back: Mapped[bool] = mapped_column(
        server_default=false(),
        comment="Whether values come back, as those of sources do: bursts of a value are compared with its other bursts.",
    )
