"""What a configuration would do, in numbers: for `quantdrift config check` and for sizing a pod."""

import msgspec

from quantdrift.core.config.schema import KIB, MIB, Config, Runtime
from quantdrift.core.config.strata import header_strata
from quantdrift.core.sampling.rates import POLICY_VALID_S
from quantdrift.core.slices import SliceAssigner
from quantdrift.core.tasks import Task

# Resident memory of the idle processes (58, 29 and 57 MiB measured on Linux x86-64 with CPython 3.11), rounded up. The
# rest of the limit is computed from the bounds.
SUPERVISOR_BYTES = 64 * MIB
WORKER_BYTES = 40 * MIB
# What a connection costs that is observed: itself, and its share of what observers hold to follow them.
CONNECTION_BYTES = (8 + 16) * KIB
# What waits in a relay worker for peers that do not read, however many they are.
WAITING_BYTES = 64 * MIB
CAPTURE_BYTES = 96 * MIB
INTAKE_BYTES = 96 * MIB
# What may hold another model than it says, and can be held to canaries.
_HELD_BY_CANARIES = frozenset({Runtime.OIP_HTTP, Runtime.OIP_GRPC})
# The largest exchange while it is decoded: its frame, its body, its JSON values (the recorder bounds their number; they
# take most), its tensors and its message.
DECODE_COPIES = 16
# What is being received from a relay worker: one frame and the stream's own buffer.
RECEIVE_BYTES = 4 * MIB


class StratumPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A header stratum: the share of its requests that is replayed, lowest and highest over the body strata."""

    name: str
    rate: float
    replayed_low: float
    replayed_high: float


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model: what it is measured against and how much divergence is accepted."""

    name: str
    references: dict[str, str]
    task: Task
    flip_budget: float
    divergence_budget: float
    slices: list[str]
    open_slices: list[str]
    copies: dict[str, str] = {}


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration would do.

    Parameters
    ----------
    models, strata
        Per model and per header stratum.
    max_replays_per_s
        Hard cap of one sidecar, whatever the rates say.
    expected_replays_per_s
        At the given traffic where no header stratum matched; None without a given traffic.
    memory_bytes
        A memory limit for the sidecar's container: idle processes plus every configured bound.
    pages_per_30_days
        Expected false pages of the whole fleet: a bound.
    notes
        What deserves a look although it is allowed.
    checked
        Reference files that were opened: precision, opset and digest by path.
    """

    models: list[ModelPlan]
    strata: list[StratumPlan]
    max_replays_per_s: float
    expected_replays_per_s: float | None
    memory_bytes: int
    pages_per_30_days: float
    notes: list[str]
    checked: dict[str, str] = {}


def explain(config: Config, requests_per_s: float | None = None) -> Explanation:
    """Return what `config` would do.

    Parameters
    ----------
    config
        A checked configuration.
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
    return Explanation(
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
    )


def memory_bytes(config: Config) -> int:
    """Return a memory limit for the sidecar's container.

    Sampling cannot make it need more, nor can clients that do not read. Connections can: add 8 KiB for each one beyond
    `sidecar.max_connections`, and 32 KiB where it does not read either.
    """
    sidecar = config.sidecar
    observing = sidecar.max_connections * CONNECTION_BYTES + sidecar.max_held_bytes + sidecar.handoff_bytes
    workers = bool(sidecar.listen) * sidecar.workers * (WORKER_BYTES + WAITING_BYTES + observing)
    receiving = sidecar.workers * (sidecar.max_exchange_bytes + RECEIVE_BYTES)
    capture = CAPTURE_BYTES + sidecar.queue_bytes + DECODE_COPIES * sidecar.max_exchange_bytes + receiving
    return SUPERVISOR_BYTES + workers + _intake_bytes(config) + capture


def _intake_bytes(config: Config) -> int:
    intake = config.intake
    if not (intake.listen or intake.ext_proc or intake.tap):
        return 0
    receiving = 4 * config.sidecar.max_exchange_bytes  # one body as text and decoded
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
        slices=[key.name for key in SliceAssigner(config, name).declared()],
        open_slices=[
            f"{rule.name}{': ' + ' x '.join(rule.cross) if rule.cross else '=*'} (at most {rule.max_values})"
            for rule in rules
            if rule.cross or (not rule.feature and not rule.values)
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
        notes.append("no [[models]]: every exchange would be counted `unknown_model`")
    notes += [
        f"model `{model.name}` has no reference: every version of it stays `unknown`"
        for model in config.models
        if not model.references
    ]
    notes += [
        f"model `{model.name}`: the reference {reference.where(model.name)} has no canaries, and nothing else would tell "
        "whether that server holds the model that you mean: see `quantdrift reference record`"
        for model in config.models
        for reference in model.references
        if reference.runtime in _HELD_BY_CANARIES and not reference.canaries
    ]
    if not config.slices:
        notes.append("no [[slices]]: only the aggregate is watched, which is what hides a bad slice")
    if not config.telemetry.otlp_endpoint:
        notes.append("no telemetry.otlp_endpoint: alerts stay in Postgres and on the monitor's /metrics")
    if config.sampling.paused:
        notes.append("sampling.paused: nothing is taken")
    notes += _whose_rates(config)
    if config.sampling.sticky_header:
        notes.append("sampling.sticky_header: give every sidecar the same QUANTDRIFT_SAMPLING_SALT")
        notes.append(
            "sampling.sticky_header: what one user sends within monitor.session_s counts as one observation, "
            "and boosts are thinned away: all of it must have been taken with one probability"
        )
    zero = [s.name for s in config.sampling.header_strata if s.rate == 0]
    zero += ["default"] if config.sampling.rate == 0 else []
    if zero:
        notes.append(f"rate 0 in header stratum {', '.join(zero)}: nothing is known about that traffic")
    return notes


def _whose_rates(config: Config) -> list[str]:
    """Say whose rates hold, the configuration's or the monitor's."""
    sampling = config.sampling
    if not sampling.central:
        return ["sampling.central = false: the rates above hold, whatever the monitor says"]
    if not sampling.replays_per_s:
        return ["sampling.replays_per_s = 0: the monitor makes no policy, and the rates above hold"]
    budget, lapse_s = sampling.replays_per_s, POLICY_VALID_S
    whose = f"sampling.replays_per_s = {budget:g}: the monitor's policy holds, and the rates above where there is none"
    notes = [f"{whose} or nobody has confirmed it for {lapse_s:g} s; the caps always hold"]
    if left_out := header_strata(config).left_out:
        notes.append(
            f"no header stratum is left for {', '.join(left_out)}: the relay boosts no such slice by itself, only what "
            "`default` takes of it"
        )
    return notes
