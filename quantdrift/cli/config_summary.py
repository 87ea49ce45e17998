"""The effects of a configuration in numbers, for `quantdrift config check` and for sizing a pod."""

import msgspec

from quantdrift.core.config.connections import ConfiguredConnection, connections
from quantdrift.core.config.schema import KIB, MIB, Config, Runtime
from quantdrift.core.config.strata import header_strata
from quantdrift.core.records import TextAttribute
from quantdrift.core.sampling.rates import POLICY_VALID_S
from quantdrift.core.slices import SliceAssigner
from quantdrift.core.tasks import Task

# Resident memory of the idle processes (43, 47, 31 and 58 MiB measured on Linux x86-64 with CPython 3.11), rounded up. The
# rest of the limit is computed from the bounds.
SUPERVISOR_BYTES = 48 * MIB
ADMIN_BYTES = 64 * MIB  # with the heads that its callers may leave unfinished
WORKER_BYTES = 40 * MIB
# Memory of an observed connection: its buffers, and its share of the memory of the observers.
CONNECTION_BYTES = (8 + 16) * KIB
# Data in a relay worker that waits for peers that do not read, however many there are.
WAITING_BYTES = 64 * MIB
CAPTURE_BYTES = 96 * MIB
LANGUAGE_BYTES = 106 * MIB  # of the capture process that knows languages, measured
INTAKE_BYTES = 96 * MIB
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
# Data being received from a relay worker: one frame and the buffer of the stream.
RECEIVE_BYTES = 4 * MIB


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
        pages_per_30_days=config.monitor.pages_per_30_days,
        notes=_notes(config),
        connections=connections(config),
    )


def memory_bytes(config: Config) -> int:
    """Return a memory limit for the sidecar's container.

    Neither sampling nor clients that do not read can exceed it. More connections can: add 8 KiB for each one beyond
    `sidecar.max_connections`, and 32 KiB if it does not read.
    """
    sidecar = config.sidecar
    observing = sidecar.max_connections * CONNECTION_BYTES + sidecar.max_held_bytes + sidecar.handoff_bytes
    workers = bool(sidecar.listen) * sidecar.workers * (WORKER_BYTES + WAITING_BYTES + observing)
    receiving = sidecar.workers * (sidecar.max_exchange_bytes + RECEIVE_BYTES)
    capture = CAPTURE_BYTES + sidecar.queue_bytes + DECODE_COPIES * sidecar.max_exchange_bytes + receiving
    capture += (TextAttribute.LANGUAGE in config.capture.text) * LANGUAGE_BYTES
    return SUPERVISOR_BYTES + ADMIN_BYTES + workers + _intake_bytes(config) + capture


def _intake_bytes(config: Config) -> int:
    intake = config.intake
    if not (intake.listen or intake.kserve_logger or intake.ext_proc or intake.tap):
        return 0
    receiving = 4 * config.sidecar.max_exchange_bytes  # one body as text and decoded
    receiving += (bool(intake.listen) + bool(intake.kserve_logger)) * HTTP_BYTES + bool(
        intake.tap
    ) * TAP_BYTES
    receiving += bool(intake.ext_proc) * (GRPC_BYTES + config.sidecar.max_exchange_bytes)
    return INTAKE_BYTES + intake.max_pending_bytes + config.sidecar.handoff_bytes + receiving


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
