"""What stops exchanges between the client's socket and the fold, in words. Pure."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuarantineReason
from quantdrift.core.notation import count_of, listed, number, percent
from quantdrift.core.process.states import PartState
from quantdrift.core.records import UNANSWERED, Loss
from quantdrift.core.sampling.pause import Pause
from quantdrift.core.tasks import Task
from quantdrift.facts.words.losses import from_standby, lowered

if TYPE_CHECKING:
    from quantdrift.core.stream.backlog import Waiting
    from quantdrift.storage.account.flow import Flow, FlowStep, ModelFlow

IDLE: Final = timedelta(seconds=60)
"""Longest time in which a part that has work may do nothing."""
LATE: Final = timedelta(minutes=2)
"""Longest time that an exchange may wait in the stream. A shadow worker that keeps up takes seconds, one that begins a minute."""
_MUCH: Final = 0.5
"""Share of the exchanges of a step whose failure blocks the next step."""
_FEW_POSTS: Final = 10
"""Requests of unknown paths that nobody needs to hear of."""
_ROLES: Final = ("sidecar", "shadow", "monitor")
_SEE: Final = re.compile("[:;] see `quantdrift status`$")
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_UNMEASURED: Final = {
    True: (
        "they were sampled with penalties, biases or a grammar, and have no log-probabilities. Let clients ask for top_logprobs, or give a copy of the candidate in"
        " models.references.copy"
    ),
    False: "the reference gave numbers that are not finite. See the log of the shadow",
}
"""What to do about answers that nothing was measured of: whether they are texts."""
_HINTS: Final = {
    Loss.HELD_BYTES: "raise sidecar.max_held_bytes, or sample less",
    Loss.TRUNCATED: "a peer closed the connection during them; check that the server at sidecar.backend answers",
    Loss.CAPTURE_DOWN: "the capture process of the sidecar was down: the sidecar's log says since when, and why",
    Loss.CAPTURE_BEHIND: "the capture process is too slow: sample less, or give the sidecar more processor time",
    Loss.ERROR_STATUS: "the model's server answered with errors",
    Loss.DECODE: "the sidecar's log at level DEBUG says why requests or answers cannot be decoded; of calls of a tap the log of its server says it",
    Loss.SHARED_MEMORY: "clients pass tensors in shared memory, which the sidecar cannot read",
    Loss.TOO_LARGE: "they are above sidecar.max_exchange_bytes, or max_payload of NATS: raise it",
    Loss.RATE_CAP: "raise sampling.max_exchanges_per_s, or sample less",
    Loss.BYTE_CAP: "raise sampling.max_bytes_per_s, or sample less",
    Loss.QUEUE_FULL: "NATS is too slow: sample less",
    Loss.STREAM_FULL: "the stream is full: start more shadow workers, sample less, or raise stream.max_bytes",
    Loss.PUBLISH: "NATS did not store them: see the sidecar's log; one whose disk was full must be restarted",
    Loss.PROCESS_ENDED: "processes of the sidecar were killed, or crashed: see its log, and its memory limit",
    Loss.METADATA: "neither the wire nor the configuration gives names or shapes of the tensors: see models.inputs",
    Loss.TOO_COSTLY: "decoding an exchange takes more than 5 s of processor time: send fewer values, or as binary tensors",
    Loss.UNOBSERVED: "the relay cannot read their connections: they use TLS, are not HTTP, or too many are busy at a time"
    " (sidecar.max_connections)",
    Loss.NO_KEY: "the sidecar cannot read the key that encrypts them: check the file stream.payload_key_file beside it",
    Loss.CLIENT_ABORT: "clients closed the connection before the answer was complete: the server may be too slow for them",
}


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """The admin port of a process.

    Parameters
    ----------
    address
        HOST:PORT as it was called.
    answers, ready
        Whether anything answered, and whether it was ready.
    counts
        Sums of its counters by name on `/metrics`, since its start.
    digest
        Of the options that all parts must have alike; empty: it does not say.
    """

    address: str
    answers: bool = False
    ready: bool = False
    counts: dict[str, float] = {}
    digest: str = ""


class StatusFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the status was made from.

    Parameters
    ----------
    now, begin
        The time, and the begin of the period; aware.
    span
        The period as the person gave it.
    flow
        What the database knows; None if it does not answer: `database_problem` says why.
    waiting
        What waits in the stream, by model; None if NATS does not answer: `nats_problem` says why.
    oldest_s
        Age of the oldest exchange in the stream.
    pause
        What is paused in the whole fleet.
    ports
        Admin ports of `sidecar`, `shadow` and `monitor`, as the running processes or the configuration have them.
    processes
        The processes of `quantdrift up`, by name.
    up_missing
        The data directory, if no `quantdrift up` runs with it; else empty.
    full_disk
        The data directory, if its file system has no room; else empty.
    missing
        Files of references that do not exist on this machine, by model.
    config_problem
        Why the configuration files are refused, where this is made with the configuration that was accepted last; else empty.
    digest
        As of `Port`, of the configuration that this is made with.
    """

    now: datetime
    begin: datetime
    span: str
    flow: "Flow | None" = None
    database_problem: str = ""
    waiting: "dict[str, Waiting] | None" = None
    nats_problem: str = ""
    oldest_s: float = 0.0
    pause: Pause = Pause()
    ports: dict[str, Port] = {}
    processes: dict[str, PartState] = {}
    up_missing: str = ""
    full_disk: str = ""
    missing: dict[str, tuple[str, ...]] = {}
    config_problem: str = ""
    digest: str = ""


def ago(span: timedelta) -> str:
    """Return a duration in whole units of one size: `12 s`, `14 min`, `3 h`, `2 d`."""
    seconds = max(0.0, span.total_seconds())
    size, name = next(
        ((size, name) for size, name in _UNITS if seconds >= (size if size == 1 else 2 * size)), (1, "s")
    )
    return f"{int(seconds // size)} {name}"


def blockers(config: Config, facts: StatusFacts) -> tuple[str, ...]:
    """Return what blocks exchanges, a sentence or two each, in the order in which exchanges pass the parts."""
    steps = (
        *_parts(config, facts),
        *_sidecars(config, facts),
        *_late(facts),
        *_models(config, facts),
        *_shards(facts),
        *_unseen(config, facts),
    )
    return tuple(dict.fromkeys(steps))


def notes(config: Config, facts: StatusFacts) -> tuple[str, ...]:
    """Return what blocks nothing and should be known: parts that do not answer here, and contradictions."""
    lines = [*_configurations(facts)]
    if facts.flow is not None and facts.flow.standby_s is not None:
        lines.append(from_standby(facts.flow.standby_s))
    if facts.flow is not None and facts.flow.lag_factor < 1:
        lines.append(lowered(facts.flow.lag_factor))
    lines += [
        f"the {role} does not answer at {facts.ports[role].address} ({role}.admin), and {sign}: it runs elsewhere, or has"
        " another address"
        for role, sign in signs(config, facts).items()
        if sign and _is_silent(facts, role) and not _is_to_come(facts, role)
    ]
    lines += [
        f"the {role} at {port.address} answers, but is not ready: see its log"
        for role, port in facts.ports.items()
        if port.answers and not port.ready
    ]
    lines += _undecoded(facts)
    flows = facts.flow.models if facts.flow is not None else {}
    lines += [
        line
        for model in config.models
        if model.name in flows
        for line in _unread_media(flows[model.name], facts)
    ]
    lines += [
        f"figures of model `{model.name}` may mislead: {contradiction}"
        for model in config.models
        if model.name in flows
        for contradiction in flows[model.name].contradictions
    ]
    return tuple(lines)


def _undecoded(facts: StatusFacts) -> Iterator[str]:
    """Yield how many POST requests pass beside those that are decoded."""
    port = facts.ports.get("sidecar", Port(address=""))
    n_unknown, n_offered = (int(port.counts.get(name, 0)) for name in ("unknown_posts", "offered"))
    if n_offered and n_unknown >= _FEW_POSTS:
        share = n_unknown / (n_unknown + n_offered)
        yield (
            f"{count_of(n_unknown, 'POST request')} ({percent(share)}) since the start of the sidecar at {port.address} had paths that no"
            " protocol of capture.protocols decodes: they are not watched. Compare with the paths that your clients request"
        )


def _unread_media(model: "ModelFlow", facts: StatusFacts) -> Iterator[str]:
    """Yield how many exchanges had images or the like that the reference does not read, where they do not block the model."""
    reason = QuarantineReason.MEDIA.value
    step = model.quarantined.get(reason)
    if step is not None and step.recent and not _is_set_aside(model):
        yield (
            f"{count_of(step.recent, 'exchange')} of model `{model.model}` in the last {facts.span} had more than text in"
            f" {'its' if step.recent == 1 else 'their'} messages, and {'was' if step.recent == 1 else 'were'} not compared:"
            f" {model.details.get(reason, '')}"
        )


def _configurations(facts: StatusFacts) -> Iterator[str]:
    """Yield that the files are refused, and which parts do not have the configuration that the others have."""
    sidecar = facts.ports.get("sidecar")
    is_refused = sidecar is not None and bool(sidecar.counts.get("config_refused"))
    digests = {role: port.digest for role, port in facts.ports.items() if port.digest}
    stale = [role for role, digest in digests.items() if digest != facts.digest]
    differ = len(set(digests.values())) > 1
    if facts.config_problem:
        yield facts.config_problem
    elif is_refused:
        others = [role for role in digests if role not in stale] if differ else []
        unlike = f", unlike {listed(others)}" if others else ""
        yield (
            f"the sidecar refuses the changed configuration and goes on with the one before{unlike}: its log says why"
        )
    if not differ:
        return
    what = "([sampling], [capture], [[models]] or [[slices]] differ)"
    if len(stale) == len(digests):
        yield f"{listed(stale)} run with different configurations {what}, and none with that of this command: give them one file"
        return
    if stale := [role for role in stale if not (role == "sidecar" and is_refused)]:
        command = f"quantdrift up {' '.join(f'--restart {role}' for role in stale)}"
        yield (
            f"{listed(stale)} {'runs' if len(stale) == 1 else 'run'} with another configuration than the file {what}:"
            f" {f'`{command}`' if facts.processes else 'restart ' + listed(stale)}"
        )


def _is_silent(facts: StatusFacts, role: str) -> bool:
    port = facts.ports.get(role)
    return port is not None and not port.answers


def _is_to_come(facts: StatusFacts, role: str) -> bool:
    """Return whether `quantdrift up` has not come to starting a part: something before it does not work yet."""
    return role not in facts.processes and any(not state.works for state in facts.processes.values())


def signs(config: Config, facts: StatusFacts) -> dict[str, str]:
    """Return by what else than its port each role is known to work; nothing where it is not known."""
    signed = dict.fromkeys(_ROLES, "")
    flow = facts.flow
    if flow is not None and flow.tallied_at is not None and not _is_stale(facts, config):
        signed["sidecar"] = "counts of a sidecar come"
    waiting = (facts.waiting or {}).values()
    if any(
        backlog.is_read or (backlog.read_at is not None and facts.now - backlog.read_at <= LATE)
        for backlog in waiting
    ):
        signed["shadow"] = "a shadow worker reads from NATS"
    if flow is not None and flow.is_led:
        signed["monitor"] = "a monitor leads"
    return signed


def _unseen(config: Config, facts: StatusFacts) -> Iterator[str]:
    """Yield the parts that nothing shows to work, where no other line names them already."""
    signed = signs(config, facts)
    models = [model.name for model in config.models]
    flows = [facts.flow.models[name] for name in models if name in facts.flow.models] if facts.flow else []
    is_said = {
        "shadow": bool(facts.nats_problem) or any(_unread(facts, name) is not None for name in models),
        "monitor": facts.flow is None or any(any(_folded(flow, facts)) for flow in flows),
    }
    sign_of = {"shadow": "none reads from NATS", "monitor": "none leads"}
    for role, sign in sign_of.items():
        if _is_silent(facts, role) and not (
            signed[role] or is_said[role] or _is_down(facts, role) or _is_to_come(facts, role)
        ):
            yield (
                f"no {role} answers at {facts.ports[role].address} ({role}.admin), and {sign}: start `quantdrift {role}`"
            )


def _late(facts: StatusFacts) -> Iterator[str]:
    """Yield what waits in the stream for too long, although it is read."""
    waiting = {
        model: of_model.n_messages for model, of_model in (facts.waiting or {}).items() if of_model.n_messages
    }
    oldest = timedelta(seconds=facts.oldest_s)
    if not waiting or oldest <= LATE or any(_unread(facts, model) is not None for model in waiting):
        return
    n = sum(waiting.values())
    names = " and ".join(f"`{model}`" for model in sorted(waiting))
    text = f"{count_of(n, 'exchange')} of {names} {'waits' if n == 1 else 'wait'} in the stream, the oldest for {ago(oldest)}"
    if facts.flow is None:
        yield text
        return
    rates = [facts.flow.models[model].rates for model in waiting if model in facts.flow.models]
    coming, leaving = (
        math.fsum(of_model.coming for of_model in rates),
        math.fsum(of_model.leaving for of_model in rates),
    )
    if not leaving:
        yield f"{text}, and none was compared in the last {ago(LATE)}: see the log of the shadow"
        return
    text += f": {number(leaving)} a second are compared, {number(coming)} a second come"
    if leaving > coming:
        left = timedelta(seconds=n / (leaving - coming))
        yield f"{text}. None is left in some {ago(left)}; until then verdicts are late"
    else:
        yield (
            f"{text}. They become more, and expire after stream.max_age_s: start more shadow workers, or lower sampling.rate. The"
            f" monitor lowers all rates itself before they expire{_lowered(facts)}. `quantdrift stream drop` drops what waits"
        )


def _lowered(facts: StatusFacts) -> str:
    factor = 1.0 if facts.flow is None else facts.flow.lag_factor
    return f" (now to {number(factor)} of what is configured)" if factor < 1 else ""


def _parts(config: Config, facts: StatusFacts) -> Iterator[str]:
    if facts.up_missing:
        yield f"no `quantdrift up` runs with the data directory {facts.up_missing}: start it"
    if facts.full_disk:
        yield f"the disk of {facts.full_disk} is full, so that NATS and Postgres store nothing: free some of it"
    for name, state in facts.processes.items():
        if not state.works:
            down = f" since {state.since:%H:%M:%S} UTC" if state.since else ""
            yield (
                f"{name} is down{down}: {state.why}"
                if state.why
                else f"{name} is still starting: see the log"
            )
    if facts.database_problem:
        yield facts.database_problem
    yield from _nats(config, facts)
    for model, paths in facts.missing.items():
        if _unread(facts, model) is not None and not _is_down(facts, "shadow"):
            yield (
                f"the reference of model `{model}` cannot be loaded: {', '.join(paths)} does not exist on this machine"
                " (models.references.path)"
            )
    if facts.flow is not None and facts.flow.n_unsent and config.telemetry.otlp_endpoint:
        since = facts.flow.unsent_since
        if since is not None and facts.now - since > IDLE:
            error = f": {facts.flow.unsent_error}" if facts.flow.unsent_error else ""
            yield (
                f"{count_of(facts.flow.n_unsent, 'alert event')} waited {ago(facts.now - since)} for the collector at"
                f" {config.telemetry.otlp_endpoint} (telemetry.otlp_endpoint){error}"
            )


def _nats(config: Config, facts: StatusFacts) -> Iterator[str]:
    if facts.nats_problem:
        yield facts.nats_problem
        return
    sidecar = facts.ports.get("sidecar")
    unstored = timedelta(seconds=sidecar.counts.get("stream_unstored_seconds", 0.0) if sidecar else 0.0)
    if unstored > IDLE:
        yield (
            f"NATS at {config.stream.address} has stored no exchange for {ago(unstored)}, though it is connected: its disk is"
            " full, or was. Free some, and restart it: until then it stores nothing (its log and /healthz say so)"
        )


def _sidecars(config: Config, facts: StatusFacts) -> Iterator[str]:
    paused = facts.pause.everything
    if paused is not None:
        yield f"sampling is paused for all models {paused.in_words()}: `quantdrift resume` ends it"
    flow, port = facts.flow, facts.ports.get("sidecar")
    for source, order in () if flow is None else flow.paused_here:
        yield (
            f"sampling is paused at sidecar {source} alone, {order.in_words()}: `quantdrift resume --local` in its container, or remove its"
            " sidecar.pause_file"
        )
    answers = port is not None and port.answers
    if (flow is None or flow.tallied_at is None) and not answers:
        address = port.address if port is not None else config.sidecar.admin
        yield (
            f"no sidecar answers at {address} (sidecar.admin)"
            + ("" if flow is None else ", and none has ever sent its counts")
            + ": start `quantdrift sidecar`, or call this command where it runs"
        )
        return
    n_offered = 0 if port is None else port.counts.get("offered", 0)
    if flow is not None and flow.tallied_at is not None:
        n_offered = max(flow.offered.recent, 0 if flow.offered.total else n_offered)
    if not n_offered:
        yield _nothing_offered(config, facts)
        return
    if flow is None:
        return
    if not flow.captured.recent and flow.offered.recent and paused is None:
        yield (
            f"none of {count_of(flow.offered.recent, 'request')} was sampled in the last {facts.span}: raise"
            " sampling.rate, or wait"
        )
    nameless = flow.models.get("")
    if nameless is not None and flow.captured.recent:
        yield from _lost(nameless, flow.captured.recent, "of any model")
    yield from _unknown(config, flow, facts.span)
    is_explained = bool(facts.nats_problem) or _is_down(facts, "shadow")
    if flow.tallied_at is not None and _is_stale(facts, config) and not is_explained:
        yield (
            f"no sidecar has sent counts for {ago(facts.now - flow.tallied_at)}: none runs, or no shadow worker does, which stores them"
        )


def _is_stale(facts: StatusFacts, config: Config) -> bool:
    flow = facts.flow
    if flow is None or flow.tallied_at is None:
        return False
    return facts.now - flow.tallied_at > max(timedelta(seconds=6 * config.sidecar.tally_interval_s), 2 * IDLE)


def _nothing_offered(config: Config, facts: StatusFacts) -> str:
    port = facts.ports.get("sidecar", Port(address=""))
    last = ""
    if facts.flow is not None and facts.flow.offered.total:
        last = f" in the last {facts.span} ({facts.flow.offered.total:,} before)"
    if n := port.counts.get("backend_failures"):
        return (
            f"the sidecar has seen no inference request{last}; the backend {config.sidecar.backend} (sidecar.backend)"
            f" did not accept {count_of(int(n), 'connection')}: start the server there, or correct the option"
        )
    if n := port.counts.get("blind_connections"):
        return (
            f"the sidecar has seen no inference request{last}; it cannot read {count_of(int(n), 'connection')}, which"
            " use TLS or are not HTTP"
        )
    if n := port.counts.get("ignored"):
        return (
            f"the sidecar has seen no inference request{last}; {count_of(int(n), 'other request')} passed, which no"
            " protocol of capture.protocols takes for a prediction"
        )
    ways = "; or ".join(_ways_in(config, port))
    return (
        f"no sidecar has seen an inference request{last}: {ways or 'set sidecar.listen or one of [intake]'}"
    )


def _ways_in(config: Config, port: Port) -> Iterator[str]:
    """Yield for each way in that is configured what to do, and what the sidecar that answers has counted on it since its start."""
    sidecar, intake = config.sidecar, config.intake
    n = {name: int(count) for name, count in port.counts.items()}
    if sidecar.listen:
        to = f"send the traffic to {sidecar.listen} (sidecar.listen)"
        if port.answers and not n.get("connections"):
            to += f", not to the server's own address {sidecar.backend}: no client has connected to the sidecar since its start"
        elif port.answers:
            to += f": {count_of(n['connections'], 'connection')} came, without a request that was read to its end"
        yield to
    if intake.tap:
        yield f"record calls with the tap at {intake.tap} (intake.tap)" + (
            _of_taps(n) if port.answers else ""
        )
    for option, address in (
        ("listen", intake.listen),
        ("kserve_logger", intake.kserve_logger),
        ("ext_proc", intake.ext_proc),
    ):
        if address:
            yield f"let exchanges come in at {address} (intake.{option})"
    if refused := n.get("intake_refused"):
        yield f"correct the callers: {count_of(refused, 'call')} had no valid token, no certificate of a caller, or a model that theirs may not report on"


def _of_taps(n: Mapping[str, int]) -> str:
    """Return what taps have done since the start of the sidecar."""
    if not (connected := n.get("tap_connections", 0)):
        return (
            ": none has connected since the sidecar's start. Set QUANTDRIFT_TAP to this path where the server runs, and look for lines of"
            " `quantdrift` in its log"
        )
    counts = f": {count_of(connected, 'connection')} of taps came, and no recorded call"
    if errors := n.get("observer_errors"):
        return f"{counts}; {count_of(errors, 'call')} failed: the server's log says why"
    if early := n.get("early"):
        return f"{counts} but {early:,} before the tap knew its rates: later ones count"
    return f"{counts}: the server must call `record` for each answer"


def _unknown(config: Config, flow: "Flow", span: str) -> Iterator[str]:
    configured = [model.name for model in config.models]
    for name, model in sorted(flow.models.items(), key=lambda item: -item[1].unknown.recent):
        if model.unknown.recent and name not in configured:
            meant = difflib.get_close_matches(name, configured, n=1, cutoff=0.5)
            hint = f" (did you mean `{meant[0]}`?)" if meant else ""
            yield (
                f"saw model `{name}` {count_of(model.unknown.recent, 'time')} in the last {span}, which is not"
                f" configured{hint}; configured: {', '.join(f'`{model_name}`' for model_name in configured) or 'none'}. Correct"
                " models.name, or add a [[models]]"
            )


def _models(config: Config, facts: StatusFacts) -> Iterator[str]:
    flow = facts.flow
    if not config.models:
        yield "no model is configured: add a [[models]]"
    for configured in config.models:
        if (order := facts.pause.models.get(configured.name)) is not None:
            yield f"sampling of model `{configured.name}` is paused {order.in_words()}: `quantdrift resume` ends it"
        yield from _reading(facts, configured.name)
        if not configured.references:
            yield f"model `{configured.name}` has no reference, so nothing is compared: add a [[models.references]]"
        if flow is None:
            continue
        model = flow.models.get(configured.name)
        if model is None or not model.captured.recent:
            is_paused = facts.pause.everything is not None or configured.name in facts.pause.models
            is_misspelt = any(other.unknown.recent for other in flow.models.values())
            if flow.captured.recent and not is_paused and not is_misspelt:
                yield (
                    f"no sampled request named model `{configured.name}` in the last {facts.span}"
                    f" ({count_of(flow.captured.recent, 'request')} sampled in all)"
                )
            if model is None:
                continue
        yield from _lost(model, model.captured.recent - model.thinned.recent, f"of model `{configured.name}`")
        yield from _lossy(model, facts)
        yield from _misnamed(model, facts)
        yield from _compared(model, configured.task)
        yield from _folded(model, facts)


def _lost(model: "ModelFlow", n: int, whose: str) -> Iterator[str]:
    lost = {reason: step.recent for reason, step in model.lost.items() if step.recent}
    n_lost = sum(lost.values())
    if n > 0 and n_lost >= _MUCH * n:
        reason = max(lost, key=lambda name: lost[name])
        if reason == Loss.UNKNOWN_MODEL:
            return
        hint = f": {_HINTS[Loss(reason)]}" if reason in _HINTS else ""
        yield (
            f"{percent(min(1.0, n_lost / n))} of the sampled exchanges {whose} were lost before the stream, most of them"
            f" as `{reason}`{hint}"
        )


def _lossy(model: "ModelFlow", facts: StatusFacts) -> Iterator[str]:
    """Yield that slices are `unknown` because of losses, with what was lost."""
    if not model.n_lossy:
        return
    losses = {
        **{reason: step.recent for reason, step in model.lost.items() if reason not in UNANSWERED},
        **{
            f"{reason} (model not known)": step.recent
            for reason, step in nameless(model, facts.flow).items()
            if reason not in UNANSWERED
        },
        "expired in the stream": model.expired.recent,
        "dropped from the stream": model.dropped.recent,
        "named where it is not configured": model.unknown.recent,
        **{f"quarantined: {reason}": step.recent for reason, step in model.quarantined.items()},
    }
    counts = sorted(((n, reason) for reason, n in losses.items() if n > 0), reverse=True)
    what = ", ".join(f"{n:,} {reason}" for n, reason in counts)
    top = next((reason.partition(" ")[0] for _, reason in counts), "")
    hint = f"; {_HINTS[Loss(top)]}" if top in _HINTS else ""
    n_slices = sum(model.verdicts.values())
    yield (
        f"{model.n_lossy} of {count_of(n_slices, 'slice')} of model `{model.model}` {'is' if model.n_lossy == 1 else 'are'}"
        f" `unknown`: {_SEE.sub('', model.loss)}"
        + (f". Of the last {facts.span}: {what}{hint}" if what else "")
    )


def nameless(model: "ModelFlow", flow: "Flow | None") -> "dict[str, FlowStep]":
    """Return what was lost without a model and may be of this one, by reason."""
    steps = dict(model.nameless)
    of_anyone = flow.models.get("") if flow is not None else None
    for reason, step in (of_anyone.nameless if of_anyone is not None else {}).items():
        steps[reason] = steps[reason] + step if reason in steps else step
    steps.pop(Loss.UNKNOWN_MODEL, None)  # they named another one
    return steps


def _misnamed(model: "ModelFlow", facts: StatusFacts) -> Iterator[str]:
    """Yield that a sidecar does not know a configured model, if it saw it so just now."""
    last = model.unknown.last
    if last is not None and facts.now - last <= IDLE:
        yield (
            f"a sidecar saw model `{model.model}` {count_of(model.unknown.recent, 'time')} in the last {facts.span}, the last"
            f" time {ago(facts.now - last)} ago, while its own configuration did not have it: if this goes on, give all"
            " sidecars the same [[models]]"
        )


def _unread(facts: StatusFacts, model: str) -> "Waiting | None":
    """Return what waits of a model, if no shadow worker reads it."""
    waiting = (facts.waiting or {}).get(model)
    if waiting is None or waiting.n_messages <= waiting.n_delivered or waiting.is_read:
        return None
    if waiting.read_at is not None and facts.now - waiting.read_at <= IDLE:
        return None
    return waiting


def _reading(facts: StatusFacts, model: str) -> Iterator[str]:
    waiting = _unread(facts, model)
    if waiting is None:
        return
    n = count_of(waiting.n_messages, "exchange")
    waits = "waits" if waiting.n_messages == 1 else "wait"
    if waiting.read_at is None:
        yield f"no shadow worker reads model `{model}` from the stream: {n} {waits}. Start `quantdrift shadow`"
    else:
        yield (
            f"no shadow worker has read model `{model}` from the stream for {ago(facts.now - waiting.read_at)}: {n}"
            f" {waits}. Start `quantdrift shadow`, or see its log"
        )


def _compared(model: "ModelFlow", task: Task) -> Iterator[str]:
    for version in model.unreferenced:
        yield (
            f"version {version} of model `{model.model}` has no reference: add it to models.references.versions"
        )
    if model.expired.recent > 0:
        yield (
            f"{count_of(model.expired.recent, 'exchange')} of model `{model.model}` expired in the stream before a shadow"
            " worker read them: start more workers, or sample less"
        )
    if 2 * model.n_unmeasured > model.n_items:
        yield (
            f"{model.n_unmeasured:,} of {count_of(model.n_items, 'answer')} of model `{model.model}` could not be measured:"
            f" {_UNMEASURED[task is Task.GENERATION]}"
        )
    if _is_set_aside(model):
        quarantined = {reason: step.recent for reason, step in model.quarantined.items()}
        n = sum(quarantined.values())
        reason = max(quarantined, key=lambda name: quarantined[name])
        yield (
            f"{n:,} of {count_of(n + model.compared.recent, 'exchange')} of model `{model.model}` could not be compared,"
            f" most of them because of `{reason}`: {model.details.get(reason, '')}"
        )


def _is_set_aside(model: "ModelFlow") -> bool:
    """Return whether so many exchanges are quarantined that it blocks the model."""
    n = sum(step.recent for step in model.quarantined.values())
    return n > 0 and n >= _MUCH * (n + model.compared.recent)


def _shards(facts: StatusFacts) -> Iterator[str]:
    """Say which shards no monitor folds, although batches wait for it."""
    for shard in facts.flow.shards if facts.flow else ():
        if not shard.holder and shard.oldest is not None and facts.now - shard.oldest > IDLE:
            n = count_of(shard.n_unfolded, "batch", "batches")
            yield (
                f"no monitor folds shard {shard.number} of the models: {n} {'waits' if shard.n_unfolded == 1 else 'wait'}, the oldest"
                f" for {ago(facts.now - shard.oldest)}. Start a `quantdrift monitor`, or see the logs of those that run"
            )


def _folded(model: "ModelFlow", facts: StatusFacts) -> Iterator[str]:
    flow, since = facts.flow, model.unfolded.last
    if flow is None or not model.unfolded.total or since is None or facts.now - since <= IDLE:
        return
    folded = flow.folded_at
    if folded is not None and facts.now - folded <= IDLE:
        return
    port = facts.ports.get("monitor")
    hint = "start `quantdrift monitor`"
    if port is not None and port.answers:
        hint = "see the monitor's log"
        if not port.ready:
            hint = "the monitor is not ready yet (its first start on a machine compiles for some seconds); see its log"
    n = count_of(model.unfolded.total, "comparison")
    what = (
        "no monitor has folded anything yet"
        if folded is None
        else f"the monitor last folded {ago(facts.now - folded)} ago"
    )
    yield f"{what}; {n} of model `{model.model}` {'waits' if model.unfolded.total == 1 else 'wait'}: {hint}"


def _is_down(facts: StatusFacts, name: str) -> bool:
    state: PartState | None = facts.processes.get(name)
    return state is not None and not state.works


def models_of(config: Config, flow: "Flow | None", waiting: "Mapping[str, Waiting] | None") -> list[str]:
    """Return the models to show: the configured ones first, then those that traffic named."""
    configured = [model.name for model in config.models]
    seen = {*(flow.models if flow else ()), *(waiting or ())} - {*configured, ""}
    return [*configured, *sorted(seen)]
