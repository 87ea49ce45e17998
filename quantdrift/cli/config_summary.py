"""The effects of a configuration in numbers, for `quantdrift config check` and for sizing a pod."""

import msgspec

from quantdrift.core.config.connections import ConfiguredConnection, connections
from quantdrift.core.config.schema import KIB, MIB, Config, Runtime
from quantdrift.core.config.strata import header_strata
from quantdrift.core.records import TextAttribute
from quantdrift.core.sampling.rates import POLICY_VALID_S
from quantdrift.core.slices import SliceAssigner
from quantdrift.core.tasks import Task

# Memory of the idle processes, each without the pages of files that it shares with the others (19, 32, 20, 40 and 42 MiB measured on
# Linux x86-64 with CPython 3.11), and these pages (23 MiB), which count once. The rest of the limit is computed from the bounds.
SHARED_BYTES = 24 * MIB
SUPERVISOR_BYTES = 20 * MIB
ADMIN_BYTES = 37 * MIB  # with the heads that its callers may leave unfinished
WORKER_BYTES = 22 * MIB
CAPTURE_BYTES = 41 * MIB
INTAKE_BYTES = 45 * MIB
LANGUAGE_BYTES = 106 * MIB  # of the capture process that knows languages, measured
# Memory of an observed connection: its buffers, and its share of the memory of the observers.
CONNECTION_BYTES = (8 + 16) * KIB
# Data in a relay worker that waits for peers that do not read, however many there are.
WAITING_BYTES = 32 * MIB
# Connections of the intake, whose number is limited, each with the buffers of the libraries: 256 of HTTP with a head and
# 128 KiB of a body, 128 taps with 256 KiB, 256 of gRPC with 128 KiB.
HTTP_BYTES = 256 * (16 + 128) * KIB
TAP_BYTES = 128 * 256 * KIB
GRPC_BYTES = 256 * 128 * KIB
# Runtimes at a server, which may serve another model than configured; only canaries show that.
_HELD_BY_CANARIES = frozenset({Runtime.OIP_HTTP, Runtime.OIP_GRPC})
# Memory of the largest exchange while it is decoded, as a multiple of its size: frame, body, JSON values (the largest
# part; the recorder limits their number), tensors and message.
DECODE_COPIES = 16
# Copies of the body that the intake reads: as it came, and decoded.
INTAKE_COPIES = 4
# Data being received from a relay worker: the buffer of the stream; the frame is a copy of the exchange more.
RECEIVE_BYTES = 2 * MIB


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the sidecar's memory limit.

    Parameters
    ----------
    part
        What the memory is for.
    option
        The option that changes it; empty: none does.
    n_bytes
        The most that it takes.
    """

    part: str
    option: str
    n_bytes: int


class StratumPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A header stratum: the share of its requests that is replayed, lowest and highest over the body strata."""

    name: str
    rate: float
    replayed_low: float
    replayed_high: float


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its references, slices and budgets."""

    name: str
    references: dict[str, str]
    task: Task
    flip_budget: float
    divergence_budget: float
    slices: list[str]
    open_slices: list[str]
    copies: dict[str, str] = {}
    watch: tuple[str, ...] = ()
    signal_budgets: dict[str, float] = {}


class ConfigEffects(msgspec.Struct, frozen=True, kw_only=True):
    """The effects of a configuration.

    Parameters
    ----------
    max_replays_per_s
        Hard cap of one sidecar, whatever the rates are.
    expected_replays_per_s
        Of the given traffic if no header stratum matches; None if no traffic was given.
    memory_bytes
        A memory limit for the sidecar's container: idle processes plus every configured bound.
    memory
        Its parts.
    pages_per_30_days
        Expected false pages of the whole fleet: a bound.
    notes
        Settings that are allowed but may be wrong.
    connections
        Every configured connection to a server, and how it is protected.
    checked
        Precision, opset and digest of the references that were opened, by path.
    missing
        Those of the notes that tell what a process needs and this machine lacks.
    """

    models: list[ModelPlan]
    strata: list[StratumPlan]
    max_replays_per_s: float
    expected_replays_per_s: float | None
    memory_bytes: int
    pages_per_30_days: float
    notes: list[str]
    memory: list[MemoryPart] = []
    connections: list[ConfiguredConnection] = []
    checked: dict[str, str] = {}
    missing: list[str] = []


def explain(config: Config, requests_per_s: float | None = None) -> ConfigEffects:
    """Return the effects of a checked configuration.

    Parameters
    ----------
    requests_per_s
        Inference traffic of one pod, if known.
    """
    base = config.sampling.body_rate
    most = max([base, *(stratum.rate for stratum in config.sampling.body_strata)])
    rates = [(s.name, s.rate) for s in config.sampling.header_strata] + [("default", config.sampling.rate)]
    expected = None
    if requests_per_s is not None:
        expected = min(
            requests_per_s * min(config.sampling.rate, base),
            config.sampling.max_exchanges_per_s,
        )
    return ConfigEffects(
        models=[_model(config, model.name) for model in config.models],
        strata=[
            StratumPlan(name=name, rate=rate, replayed_low=min(rate, base), replayed_high=min(rate, most))
            for name, rate in rates
        ],
        max_replays_per_s=config.sampling.max_exchanges_per_s,
        expected_replays_per_s=expected,
        memory_bytes=memory_bytes(config),
        memory=memory_parts(config),
        pages_per_30_days=config.monitor.pages_per_30_days,
        notes=_notes(config),
        connections=connections(config),
    )


def memory_bytes(config: Config) -> int:
    """Return a memory limit for the sidecar's container: the sum of its parts."""
    return sum(part.n_bytes for part in memory_parts(config))


def memory_parts(config: Config) -> list[MemoryPart]:
    """Return the parts of a memory limit for the sidecar's container, with the options that change them.

    Neither sampling nor clients that do not read can exceed it. More connections can: add 8 KiB for each one beyond
    `sidecar.max_connections`, and 32 KiB if it does not read.
    """
    sidecar, intake = config.sidecar, config.intake
    n_workers = sidecar.workers if sidecar.listen else 0
    has_intake = bool(intake.listen or intake.kserve_logger or intake.ext_proc or intake.tap)
    n_ports = bool(intake.listen) + bool(intake.kserve_logger)
    n_copies = (
        DECODE_COPIES + sidecar.workers + has_intake * INTAKE_COPIES + bool(intake.ext_proc)
    )  # while it is decoded, and while it arrives
    processes = SHARED_BYTES + SUPERVISOR_BYTES + ADMIN_BYTES + CAPTURE_BYTES
    parts = [
        ("idle processes", "", processes + has_intake * INTAKE_BYTES + sidecar.workers * RECEIVE_BYTES),
        (
            "idle relay workers, and data that waits for peers",
            "sidecar.workers",
            n_workers * (WORKER_BYTES + WAITING_BYTES),
        ),
        (
            "observed connections",
            "sidecar.max_connections",
            n_workers * sidecar.max_connections * CONNECTION_BYTES,
        ),
        (
            "unfinished exchanges, and the queues behind them",
            "sidecar.max_held_bytes",
            n_workers * (sidecar.held_bytes + sidecar.handoff_bytes)
            + has_intake * sidecar.handoff_bytes
            + sidecar.queue_bytes,
        ),
        (
            "the largest exchange while it is decoded",
            "sidecar.max_exchange_bytes",
            n_copies * sidecar.max_exchange_bytes,
        ),
        ("exchanges that come in parts", "intake.max_pending_bytes", has_intake * intake.max_pending_bytes),
        (
            "connections of the intake",
            "intake",
            n_ports * HTTP_BYTES + bool(intake.tap) * TAP_BYTES + bool(intake.ext_proc) * GRPC_BYTES,
        ),
        ("languages", "capture.text", (TextAttribute.LANGUAGE in config.capture.text) * LANGUAGE_BYTES),
    ]
    return [
        MemoryPart(part=part, option=option, n_bytes=n_bytes) for part, option, n_bytes in parts if n_bytes
    ]


def _model(config: Config, name: str) -> ModelPlan:
    model = config.model(name)
    if model is None:
        raise KeyError(name)
    rules = [rule for rule in config.slices if rule.model in ("", name)]
    return ModelPlan(
        name=name,
        references={
            pattern: reference.where(name) for reference in model.references for pattern in reference.versions
        },
        flip_budget=model.budget.flip,
        task=model.task,
        divergence_budget=model.budget.divergence,
        watch=model.budget.watch,
        signal_budgets={name: accepted for name, accepted in model.budget.signals.items() if accepted},
        slices=[key.name for key in SliceAssigner(config, name).declared()],
        open_slices=[
            f"{rule.name}{': ' + ' x '.join(rule.cross) if rule.cross else '=*'} (at most {rule.max_values})"
            for rule in rules
            if rule.cross or not (rule.feature or rule.values or rule.edges)
        ],
        copies={
            pattern: reference.copy.where(name)
            for reference in model.references
            for pattern in reference.copy.versions
        },
    )


def _notes(config: Config) -> list[str]:
    notes = []
    if not config.models:
        notes.append("no [[models]]: every exchange is counted as `unknown_model`")
    notes += [
        f"model `{model.name}` has no reference: all its versions stay `unknown`"
        for model in config.models
        if not model.references
    ]
    notes += [
        f"model `{model.name}`: the reference {reference.where(model.name)} has no canaries, so nothing checks that "
        "its server has the right model: see `quantdrift reference record`"
        for model in config.models
        for reference in model.references
        if reference.runtime in _HELD_BY_CANARIES and not reference.canaries
    ]
    notes += [
        f"model `{model.name}`: answers that are sampled with penalties, biases or a grammar are not measured without log-probabilities, and"
        " slices of which most are not stay `unknown`: let clients ask for top_logprobs, or give a copy of the candidate in"
        " models.references.copy"
        for model in config.models
        if model.task is Task.GENERATION and not any(reference.copy.path for reference in model.references)
    ]
    if not config.slices:
        notes.append("no [[slices]]: only the aggregate is watched, and it can hide a bad slice")
    if not (config.telemetry.otlp_endpoint or config.notify.alertmanager or config.notify.webhook_url):
        notes.append("no telemetry.otlp_endpoint: alerts stay in Postgres and on the monitor's /metrics")
    notes += _whose_rates(config)
    if config.intake.ext_proc and not config.intake.token_file:
        notes.append(
            "intake.ext_proc: without a token in QUANTDRIFT_INTAKE_TOKEN or intake.token_file nobody checks who sends "
            "exchanges there, and they can open tickets and never page"
        )
    if any(model.recheck.url for model in config.models):
        notes.append(
            "models.recheck: give shadow workers and sidecars the same QUANTDRIFT_SAMPLING_SALT, or rechecks through a "
            "sidecar count as traffic"
        )
    if config.sampling.sticky_header:
        notes.append("sampling.sticky_header: give every sidecar the same QUANTDRIFT_SAMPLING_SALT")
        notes.append(
            "sampling.sticky_header: all requests of one user within monitor.session_s count as one observation, and "
            "boosts have no effect, because all of them must be sampled with the same probability"
        )
    zero = [s.name for s in config.sampling.header_strata if s.rate == 0]
    zero += ["default"] if config.sampling.rate == 0 else []
    if zero:
        notes.append(f"rate 0 in header stratum {', '.join(zero)}: that traffic is not measured")
    return notes


def _whose_rates(config: Config) -> list[str]:
    """Return notes that say whether the configured rates or those of the monitor apply."""
    sampling = config.sampling
    if not sampling.replays_per_s:
        return ["sampling.replays_per_s = 0: the monitor publishes no policy, so the rates above apply"]
    budget, lapse_s = sampling.replays_per_s, POLICY_VALID_S
    whose = f"sampling.replays_per_s = {budget:g}: the monitor's policy applies; the rates above apply if there is none"
    notes = [f"{whose} or it was not confirmed for {lapse_s:g} s; the caps always apply"]
    if left_out := header_strata(config).left_out:
        notes.append(
            f"no header stratum is left for {', '.join(left_out)}: the relay cannot boost these slices, only "
            "sample them at the rate of `default`"
        )
    return notes
