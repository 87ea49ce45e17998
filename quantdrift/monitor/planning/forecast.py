"""The forecast of a policy before it is deployed: samples, expected detection delays and replays per slice.

The first part computes how the requests of a slice are sampled: inclusion probabilities and weights.
"""

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from quantdrift.core.config.schema import Config
from quantdrift.core.notation import number
from quantdrift.core.records import HeaderStratum, Policy, Predicate
from quantdrift.core.sampling.inclusion import largest_rate, of_model, reachable_strata, smallest_rate
from quantdrift.core.signals import BUILT_IN, SignalForm, budget_of, simulated_signal
from quantdrift.core.slices import SliceAssigner, SliceKey, everything
from quantdrift.drift.delay import Allowance, flips, optimum, simulate
from quantdrift.drift.evidence.clock import DAY_US, MICROSECONDS, MONTH_US
from quantdrift.drift.evidence.observations import BoolArray, FloatArray, IntArray
from quantdrift.drift.sampling.allocation import Allocation, Demand, Recent, SamplingBudget, allocate
from quantdrift.drift.sampling.boosts import Layout
from quantdrift.facts.plan import MOST_SAMPLES, Delay, Forecast, SliceForecast

N_REQUESTS = 20_000


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling of a slice's requests.

    Parameters
    ----------
    rate, most
        Mean inclusion probability at the base rates, and at the largest.
    mix
        Weights with their share of the samples; empty where nothing is taken.
    weighted
        Whether inclusion probabilities differ within the slice.
    """

    rate: float
    most: float
    mix: tuple[tuple[float, float], ...]
    weighted: bool


def mixture_of(key: SliceKey, policy: Policy, strata: Mapping[str, float]) -> Mixture:
    """Return how the requests of a slice are sampled, as far as the policy alone determines it.

    Boosts by body strata that contain only a part of the slice do not count: they add samples of little weight. Header
    strata are assumed to be as frequent inside the slice as elsewhere, unless one excludes the other.

    Parameters
    ----------
    strata
        Share of all requests by header stratum.
    """
    where = of_model(key.where, key.model)
    reachable = reachable_strata(where, policy)
    share = {stratum.name: strata[stratum.name] for stratum in reachable}
    if not sum(share.values()):
        share = {stratum.name: float(stratum is reachable[-1]) for stratum in reachable}
    total = sum(share.values())
    rates = {stratum.name: _rates(where, policy, stratum) for stratum in reachable}
    smallest = min((low for low, _ in rates.values() if low > 0), default=1.0)
    sampled = {name: share[name] / total * low for name, (low, _) in rates.items()}
    rate = sum(sampled.values())
    return Mixture(
        rate=rate,
        most=sum(share[name] / total * high for name, (_, high) in rates.items()),
        mix=tuple((smallest / rates[name][0], part / rate) for name, part in sampled.items() if part > 0),
        weighted=largest_rate(where, policy) > smallest_rate(where, policy),
    )


def _rates(where: tuple[Predicate, ...], policy: Policy, stratum: HeaderStratum) -> tuple[float, float]:
    """Return the smallest and the largest inclusion probability of a slice's items in one header stratum."""
    one_stratum = msgspec.structs.replace(policy, header_strata=(stratum,))
    high = largest_rate(where, one_stratum)
    return (smallest_rate(where, one_stratum), high) if high > 0 else (0.0, 0.0)


def stratum_shares(
    policy: Policy, slices: tuple[tuple[SliceKey, float], ...], known: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """Return the share of the requests by header stratum, and notes on assumptions.

    A stratum's share is the given one, or that of the slice with the same condition; the last stratum has the rest.
    """
    shares: dict[str, float] = {}
    notes = []
    *named, last = policy.header_strata
    for stratum in named:
        share = known.get(stratum.name)
        if share is None:
            same = alike(stratum, slices)
            share = None if same is None else slices[same][1]
        if share is None:
            notes.append(
                f"header stratum `{stratum.name}`: its share of the traffic is not known and assumed to be 0; "
                f"give --stratum {stratum.name}=SHARE"
            )
        shares[stratum.name] = share or 0.0
    shares[last.name] = known.get(last.name, max(0.0, 1.0 - sum(shares.values())))
    return shares, notes


_DAY_S = DAY_US / MICROSECONDS
_MONTH_S = MONTH_US / MICROSECONDS
_ROUNDS = 4  # the wanted rate depends on itself through the logarithm of the time between samples alone


class ModelTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of one model.

    Parameters
    ----------
    requests_per_s
        Over the whole fleet.
    slices
        Share of the requests by slice, in [0, 1]; `all` is not among them.
    strata
        The same by name of header stratum, as far as it is known.
    n_detectors
        Live detectors of the fleet, over all models; None: derived from the slices.
    """

    model: str
    requests_per_s: float
    slices: tuple[tuple[SliceKey, float], ...] = ()
    strata: Mapping[str, float] = {}
    n_detectors: int | None = None


class ForecastQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The shift to detect, the time allowed, and the resources.

    Parameters
    ----------
    shift
        Flip rate after the shift, as a multiple of the budget; above 1.
    horizon_days
        A slice is observable if nine of ten such shifts page within this time.
    quiet_days
        How long there was no drift before the shift: the evidence must outweigh the allowance of that time.
    replays_per_s
        Capacity of the shadow; None: as much as the policy asks for.
    allocate
        Distribute the capacity as the monitor's allocation would, instead of by the policy's rates.
    replay_ms
        GPU time per replay, or None where it is not known.
    pods
        Sidecars: each has its own hard cap.
    """

    shift: float = 3.0
    horizon_days: float = 30.0
    quiet_days: float = 30.0
    replays_per_s: float | None = None
    allocate: bool = False
    replay_ms: float | None = None
    pods: int = 1


def forecast(
    config: Config,
    policy: Policy,
    traffic: ModelTraffic,
    question: ForecastQuestion,
    progress: Callable[[str], None] = lambda _: None,
) -> Forecast:
    """Return the forecast of `policy` for `traffic`.

    Parameters
    ----------
    config
        Budgets and limits; it must have the model.
    progress
        Called with one readable line per simulated slice.

    Raises
    ------
    KeyError
        The configuration does not have the model.
    """
    model = config.model(traffic.model)
    if model is None:
        raise KeyError(traffic.model)
    shares = ((everything(model.name), 1.0), *traffic.slices)
    strata, notes = stratum_shares(policy, traffic.slices, traffic.strata)
    replays: float | None = None
    if question.allocate and question.replays_per_s is not None:
        population = Population(
            slices=traffic.slices,
            strata=policy.header_strata,
            shares=tuple(strata[stratum.name] for stratum in policy.header_strata),
        )
        allotment = allotted(policy, population, traffic.requests_per_s, question.replays_per_s)
        policy, replays = allotment.policy, allotment.replays_per_s
    sampled = {key.predicate: mixture_of(key, policy, strata) for key, _ in shares}
    all_traffic = sampled[shares[0][0].predicate]
    most = traffic.requests_per_s * all_traffic.most if replays is None else replays
    if replays is None:
        replays = traffic.requests_per_s * all_traffic.rate
    granted = _granted(config, question, replays, most, notes)
    # At most: some are watched only where they are asked for.
    n_signals = sum(len(signal.kinds) for signal in BUILT_IN if signal.column)
    n_signals += sum(budget > 0 for budget in model.budget.signals.values())
    others = sum(
        len(SliceAssigner(config, other.name).declared()) for other in config.models if other is not model
    )
    n_detectors = traffic.n_detectors or n_signals * (len(shares) + others)
    threshold = 1.0 / config.monitor.pages_per_30_days
    signal = simulated_signal(model.budget)
    budget = budget_of(signal.metric, model.budget)
    shifted = min(question.shift * budget, 1.0)
    if signal.form is not SignalForm.CHANGED:
        notes.append(
            "an answer counts by how much of it differs; simulated are answers that differ wholly or not at all, which takes longest to see"
        )
    slices = []
    for key, share in shares:
        progress(f"simulating {key.name}")
        study = _Study(
            budget=budget,
            shifted=shifted,
            sampled=sampled[key.predicate],
            allowance=Allowance(
                gamma=1.0 / (_MONTH_S * n_detectors),  # per second; per sample once the rate is known
                threshold=threshold,
                mass_before=n_signals * question.quiet_days * _DAY_S / (_MONTH_S * n_detectors),
                n_signals=n_signals,
            ),
            horizon_s=question.horizon_days * _DAY_S,
        )
        requests = traffic.requests_per_s * share
        slices.append(_slice(key, share, requests, granted, study))
    if all_traffic.rate == 0:
        notes.append("nothing is sampled: check sampling.rate and sampling.body_rate")
    return Forecast(
        model=model.name,
        requests_per_s=traffic.requests_per_s,
        allocated=question.allocate,
        budget=budget,
        shifted=shifted,
        what=signal.name,
        horizon_days=question.horizon_days,
        quiet_days=question.quiet_days,
        n_detectors=n_detectors,
        pages_per_30_days=config.monitor.pages_per_30_days,
        replays_per_s=replays,
        replays_per_s_most=most,
        granted=granted,
        gpu_share=None if question.replay_ms is None else granted * replays * question.replay_ms / 1000,
        slices=tuple(slices),
        notes=tuple(notes),
    )


class _Study(msgspec.Struct, frozen=True, kw_only=True):
    """Simulations of one slice. `allowance.gamma` is per second."""

    budget: float
    shifted: float
    sampled: Mixture
    allowance: Allowance
    horizon_s: float

    def delay(self, samples_per_s: float) -> Delay:
        """Return the delay in samples at this rate."""
        return simulate(
            flips(self.shifted, self.sampled.mix or ((1.0, 1.0),)),
            budget=self.budget,
            allowance=self._at(samples_per_s),
            weighted=self.sampled.weighted,
            most=MOST_SAMPLES,
        )

    def optimum(self, samples_per_s: float) -> int:
        """Return the delay of the best possible detector at this rate."""
        allowance = self._at(samples_per_s)
        return round(optimum(self.budget, self.shifted, allowance.threshold / allowance.gamma))

    def needed(self) -> float | None:
        """Return the samples per second with which nine of ten shifts page within the horizon."""
        rate, delay_s = 1.0, None
        for _ in range(_ROUNDS):
            delay_s = self.delay(rate).p90
            if delay_s is None:
                return None
            rate = delay_s / self.horizon_s
        return rate

    def _at(self, samples_per_s: float) -> Allowance:
        return msgspec.structs.replace(self.allowance, gamma=self.allowance.gamma / samples_per_s)


def _slice(
    key: SliceKey, share: float, requests_per_s: float, granted: float, study: _Study
) -> SliceForecast:
    rate = requests_per_s * study.sampled.rate * granted
    samples = study.delay(rate) if rate > 0 else Delay(p10=None, p50=None, p90=None)
    p10, p50, p90 = (None if n is None else n / rate / 3600 for n in (samples.p10, samples.p50, samples.p90))
    observable = p90 is not None and 3600 * p90 <= study.horizon_s
    needed = None if observable else study.needed()
    return SliceForecast(
        slice=key.name,
        predicate=key.predicate,
        share=share,
        requests_per_s=requests_per_s,
        samples_per_s=rate,
        samples=samples,
        hours=(p10, p50, p90),
        optimum_samples=study.optimum(rate or 1.0),
        observable=observable,
        needed_per_s=needed,
        needed_rate=None if needed is None or requests_per_s == 0 else needed / requests_per_s,
    )


def _granted(
    config: Config, question: ForecastQuestion, replays_per_s: float, most_per_s: float, notes: list[str]
) -> float:
    """Return the part of the replays that is possible, and add notes on what limits it."""
    granted = 1.0
    if question.replays_per_s is not None:
        if replays_per_s > question.replays_per_s:
            granted = question.replays_per_s / replays_per_s
            notes.append(
                f"the policy asks for {number(replays_per_s, 3)} replays/s and {number(question.replays_per_s, 3)} are possible: "
                f"every figure assumes all rates times {number(granted, 3)}; lower the rates accordingly, or samples are lost"
            )
        elif most_per_s > question.replays_per_s:
            notes.append(
                f"boosts by body strata may ask for up to {number(most_per_s, 3)} replays/s, which is more than possible"
            )
    cap = question.pods * config.sampling.max_exchanges_per_s
    if granted * replays_per_s > cap:
        granted = cap / replays_per_s
        notes.append(
            f"sampling.max_exchanges_per_s allows {number(cap, 3)}/s over {question.pods} sidecar(s): exchanges above it are "
            "lost, and slices with more than monitor.max_loss_ratio lost are `unknown`"
        )
    if most_per_s > replays_per_s:
        notes.append(
            "boosts by body strata are not counted: their share of the traffic is not known in advance"
        )
    return granted


class Population(msgspec.Struct, frozen=True, kw_only=True):
    """The expected requests of one model.

    Parameters
    ----------
    slices
        With their shares; `all` is not among them.
    strata
        Header strata, in order.
    shares
        Their shares; the sum is 1.
    """

    slices: tuple[tuple[SliceKey, float], ...]
    strata: tuple[HeaderStratum, ...]
    shares: tuple[float, ...]

    def sample(self, requests_per_s: float, seed: int = 1) -> Recent:
        """Return requests of one item each, without margins and flips, that have these shares.

        Slices of one attribute or feature exclude each other, those of different ones are independent. A header
        stratum with the same condition as a slice has that slice's requests.
        """
        rng = np.random.default_rng(seed)
        inside = self._memberships(rng)
        item, row = np.nonzero(np.column_stack((np.ones(N_REQUESTS, dtype=bool), inside)))
        unknown = np.full(N_REQUESTS, np.nan)
        ones = np.ones(N_REQUESTS)
        return Recent(
            weight=ones,
            n_items=ones,
            header=self._headers(inside, rng),
            margin=unknown,
            flip=unknown,
            item=item,
            slice=row,
            offered_per_s=requests_per_s * np.array(self.shares),
        )

    def _memberships(self, rng: np.random.Generator) -> BoolArray:
        inside = np.zeros((N_REQUESTS, len(self.slices)), dtype=bool)
        families: dict[tuple[str, ...], list[int]] = {}
        for index, (key, _) in enumerate(self.slices):
            families.setdefault(tuple(condition.key for condition in key.where), []).append(index)
        for members in families.values():
            borders = np.cumsum([self.slices[index][1] for index in members])
            drawn = np.searchsorted(borders, _spread(rng), side="right")
            for position, index in enumerate(members):
                inside[:, index] = drawn == position
        return inside

    def _headers(self, inside: BoolArray, rng: np.random.Generator) -> IntArray:
        shares = np.array(self.shares)
        header = np.full(N_REQUESTS, -1, dtype=np.intp)
        free = []
        for index, stratum in enumerate(self.strata):
            column = alike(stratum, self.slices)
            if column is None:
                free.append(index)
            else:
                header[inside[:, column] & (header < 0)] = index
        cumulative: FloatArray = np.cumsum(shares[free] / max(shares[free].sum(), np.finfo(np.float64).tiny))
        drawn = np.array(free)[
            np.minimum(np.searchsorted(cumulative, _spread(rng), side="right"), len(free) - 1)
        ]
        return np.where(header < 0, drawn, header)


def allotted(
    policy: Policy, population: Population, requests_per_s: float, replays_per_s: float
) -> Allocation:
    """Return the allocation of a replay budget when there is no evidence against any slice.

    Parameters
    ----------
    policy
        Its header strata are kept; their rates are computed.
    replays_per_s
        The budget.
    """
    shares = ((everything(""), 1.0), *population.slices)
    demands = [
        Demand(name=key.name, where=key.where, traffic_per_s=requests_per_s * share) for key, share in shares
    ]
    return allocate(
        population.sample(requests_per_s),
        demands,
        Layout(header_strata=policy.header_strata, edges=()),
        SamplingBudget(replays_per_s=replays_per_s, taken_per_s=requests_per_s),
        epoch=policy.epoch,
    )


def alike(stratum: HeaderStratum, slices: tuple[tuple[SliceKey, float], ...]) -> int | None:
    """Return the index of the slice that has the condition of a header stratum, or None."""
    if stratum.method or stratum.path_prefix or not stratum.headers:
        return None
    wanted = {Predicate(key=f"header.{name}", equals=value) for name, value in stratum.headers.items()}
    return next((index for index, (key, _) in enumerate(slices) if set(key.where) == wanted), None)


def _spread(rng: np.random.Generator) -> FloatArray:
    """Return evenly spaced numbers in [0, 1) in a random order, so that shares are exact."""
    return rng.permutation((np.arange(N_REQUESTS) + 0.5) / N_REQUESTS)
