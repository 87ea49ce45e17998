"""The size of a fleet: workers, leader, Postgres, NATS and sidecars for so many pods and requests, and what is too small first.

No I/O. Everything is proportional: costs of an exchange, of a batch and of a slice whose states the fold writes, times how many there are in a
second. The costs are `COSTS`, measured once, or what `quantdrift plan --measure` finds on a machine.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from quantdrift.core.config.schema import GIB, KIB, MIB, Config
from quantdrift.core.config.section import Section
from quantdrift.core.text import columns
from quantdrift.monitor.fold_turn import LONGEST_UNWRITTEN_S, ROWS_AT_ONCE, TURNS_UNWRITTEN, WRITING_SHARE
from quantdrift.storage.comparisons.blocks import LEAST

_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]
_Number = Annotated[float, Meta(ge=0)]
_DAY_S: Final = 86_400
_MONTH_DAYS: Final = 30
_PAGE_BYTES: Final = 8 * KIB
_TALLIES_A_DAY: Final = _DAY_S / 10
_CONDENSE_AFTER_DAYS: Final = 3
_KEPT_TALLIES: Final = 1 / 18
"""Share of the tallies that stays: one of every three minutes."""
_SIGNALS: Final = 4
_ROUNDS: Final = 20
_MARK_S: Final = 1.0
"""The fold of a model goes on once in as long."""
_PAUSE_S: Final = (0.5, 2.0)
"""The next turn of a fold begins after as long as this one took, but not sooner and not later."""
_EASY: Final = 0.7
"""Share of a core that a process may fill: bursts and the work of housekeeping need the rest."""
_FOLD_LESS: Final = "sample less (sampling.rate), or have larger batches (shadow.batch_delay_s)"
MONITOR_LIMIT_BYTES: Final = 2 * GIB
"""Memory of a monitor in the manifests."""


class Costs(Section, frozen=True, kw_only=True):
    """What one of each costs: microseconds of processor time, and bytes.

    Parameters
    ----------
    worker_us, nats_us, postgres_us, leader_us
        Of a small exchange of live traffic, without the reference: of the worker and all its threads, of NATS for all who use it, of
        Postgres for worker and monitors, and of the monitors that fold.
    worker_batch_us, nats_batch_us, postgres_batch_us, leader_batch_us
        Of each batch that a worker stores, whatever it has.
    postgres_slice_us, leader_slice_us
        Of each slice whose states are written, once for all exchanges since the last writing.
    worker_second_us, nats_second_us, postgres_second_us, leader_second_us
        Of each second, whatever comes: of a worker, of NATS, of Postgres, and of a monitor.
    comparison_bytes, condensed_bytes, tally_bytes, sum_bytes, detector_bytes
        Rows with their indexes: a comparison, and one in a block, of a day that is condensed or with `storage.write_blocks`; the counts of a sidecar and header stratum for ten seconds; the sums of a slice for an
        hour; a signal of a slice.
    message_bytes
        Of an exchange in NATS, beside its tensors.
    sidecar_bytes
        Memory of a sidecar that works.
    monitor_bytes, slice_bytes
        Memory of a monitor, and for each slice of each version of the last 30 days.
    """

    worker_us: _Positive = 520.0
    nats_us: _Positive = 320.0
    postgres_us: _Positive = 200.0
    leader_us: _Positive = 60.0
    worker_batch_us: _Number = 6_100.0
    nats_batch_us: _Number = 1_300.0
    postgres_batch_us: _Number = 1_700.0
    leader_batch_us: _Number = 1_300.0
    postgres_slice_us: _Number = 100.0
    leader_slice_us: _Number = 100.0
    worker_second_us: _Number = 0.0
    nats_second_us: _Number = 6_300.0
    postgres_second_us: _Number = 35_000.0
    leader_second_us: _Number = 57_000.0
    comparison_bytes: _Positive = 1_000.0
    condensed_bytes: _Positive = 200.0
    tally_bytes: _Positive = 960.0
    sum_bytes: _Positive = 800.0
    detector_bytes: _Positive = 800.0
    message_bytes: _Positive = 800.0
    sidecar_bytes: _Positive = 160 * MIB
    monitor_bytes: _Positive = 400e6
    slice_bytes: _Positive = 28e3


COSTS: Final = Costs()
"""Measured: the table "What a fleet costs" in docs/explanation/performance.md says how, and a test compares both."""


class Prices(Section, frozen=True, kw_only=True):
    """Prices of a month in one currency. The defaults are assumptions: usual list prices of large clouds, in dollars."""

    core: _Number = 25.0
    memory_gib: _Number = 3.0
    disk_gib: _Number = 0.1


class Fleet(Section, frozen=True, kw_only=True):
    """What is to be watched.

    Parameters
    ----------
    pods, requests_per_s
        Pods with a sidecar, and the requests of each.
    sampled
        Share of the requests that is replayed.
    models, slices, versions
        Models, slices of each, and versions of each within 30 days.
    slices_of_exchange
        Slices that an exchange lies in, `all` among them.
    strata
        Header strata.
    tensor_bytes
        Inputs and outputs of an exchange, as numbers: an image of 3 x 224 x 224 in FP32 has 602,112 bytes.
    reference_ms
        Processor time of one replay through the reference; 0: a GPU does it.
    outage_hours
        For how long workers may be away without a loss.
    postgres_iops
        Operations a second that the disk of Postgres allows.
    server_cores
        Cores of NATS, and of Postgres.
    """

    pods: _Count = 1
    requests_per_s: _Positive = 100.0
    sampled: Annotated[float, Meta(gt=0, le=1)] = 0.01
    models: _Count = 1
    slices: _Count = 50
    slices_of_exchange: Annotated[float, Meta(ge=1)] = 8.0
    versions: _Count = 4
    strata: _Count = 1
    tensor_bytes: _Positive = 4_000.0
    reference_ms: _Number = 5.0
    outage_hours: _Positive = 1.0
    postgres_iops: _Positive = 3_000.0
    server_cores: _Positive = 8.0
    prices: Prices = Prices()


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has an end.

    Parameters
    ----------
    name, used, limit
        What it is, and how much of it the fleet uses, in words.
    ratio
        Used over the limit: above 1 it is too small.
    remedy
        What to turn.
    grows
        Whether it grows with the traffic.
    """

    name: str
    used: str
    limit: str
    ratio: float
    remedy: str
    grows: bool = True


class FleetSize(msgspec.Struct, frozen=True, kw_only=True):
    """The size of everything.

    Parameters
    ----------
    batch
        Exchanges that a worker stores in one transaction, in the mean.
    workers
        Shadow workers of one core each.
    worker_us
        What an exchange takes of them, without the reference.
    written_s, touched_per_exchange
        Time from one writing of a model's states to the next, and slices that it writes, for each of its exchanges.
    leader_cores
        Of the monitors that fold, together.
    leaders
        Monitors of one core each that are needed for it, at most one for each model.
    postgres_bytes_per_day, postgres_bytes, condensed_bytes, blocks_bytes
        What is kept of a day, what it grows to, and what it grows to where old days are condensed, and where workers store blocks; without
        Postgres' log.
    bounds
        What has an end, the nearest first.
    month
        Money by part; `total` is their sum.
    """

    exchanges_per_s: float
    batch: float
    workers: int
    worker_us: float
    written_s: float
    touched_per_exchange: float
    leader_cores: float
    leaders: int
    monitor_bytes: float
    nats_cores: float
    nats_bytes: float
    postgres_cores: float
    postgres_bytes_per_day: dict[str, float]
    postgres_bytes: float
    condensed_bytes: float
    blocks_bytes: float
    postgres_iops: float
    sidecar_bytes: float
    sidecar_limit_bytes: float
    bounds: list[Bound]
    month: dict[str, float]


def fleet_size(fleet: Fleet, config: Config, sidecar_limit_bytes: int, costs: Costs = COSTS) -> FleetSize:
    """Return the size of a fleet.

    Parameters
    ----------
    config
        Its times of retention, limits of the stream and caps apply.
    sidecar_limit_bytes
        The memory limit of one sidecar.
    """
    per_s = fleet.pods * fleet.requests_per_s * fleet.sampled
    workers, readers, batch = _workers(fleet, config, costs)
    worker_us = costs.worker_us + costs.worker_batch_us / batch + costs.worker_second_us * workers / per_s
    n_slices = fleet.models * fleet.slices
    # A batch of fewer is stored in rows, whatever the option says.
    comparison_bytes = (
        costs.condensed_bytes if config.storage.write_blocks and batch >= LEAST else costs.comparison_bytes
    )
    tallies = fleet.pods * fleet.strata * _TALLIES_A_DAY * costs.tally_bytes
    a_day = {
        "comparisons": per_s * _DAY_S * comparison_bytes,
        "tallies": tallies * _KEPT_TALLIES,
        "hourly sums": 24 * n_slices * costs.sum_bytes,
    }
    storage = config.storage

    def kept_bytes(condense_after_days: int) -> float:
        """Return the bytes of comparisons; a day is condensed once it is older than so many days as a whole."""
        days = (
            min(condense_after_days + 1, storage.retention_days)
            if condense_after_days
            else storage.retention_days
        )
        old = (storage.retention_days - days) * costs.condensed_bytes / comparison_bytes
        return (days + old) * a_day["comparisons"]

    others = (
        storage.retention_days * a_day["tallies"]
        + max(storage.history_days, storage.retention_days) * a_day["hourly sums"]
        + n_slices * fleet.versions * _SIGNALS * costs.detector_bytes
    )
    leaders, leader_cores, written_s, touched = _leaders(
        fleet, config, costs, config.shadow.batch_delay_s / readers, batch
    )
    # Of each batch, the transaction of its worker and that of the leader; of each ten seconds, one of each sidecar. Pages
    # are written twice, to the log and to the table.
    iops = 2 * per_s / batch + fleet.pods / 10 + 2 * (sum(a_day.values()) + tallies) / _DAY_S / _PAGE_BYTES
    size = FleetSize(
        exchanges_per_s=per_s,
        batch=batch,
        workers=workers,
        worker_us=worker_us,
        written_s=written_s,
        touched_per_exchange=touched,
        leader_cores=leader_cores,
        leaders=leaders,
        # Where models are folded in shards, the largest has some model more than the mean.
        monitor_bytes=costs.monitor_bytes
        + math.ceil(fleet.models / config.monitor.shards) * fleet.slices * fleet.versions * costs.slice_bytes,
        nats_cores=(per_s * (costs.nats_us + costs.nats_batch_us / batch) + costs.nats_second_us) / 1e6,
        nats_bytes=per_s
        * 3600
        * fleet.outage_hours
        * (fleet.tensor_bytes + costs.message_bytes)
        * config.stream.replicas,
        postgres_cores=(
            per_s * (costs.postgres_us + costs.postgres_batch_us / batch + costs.postgres_slice_us * touched)
            + costs.postgres_second_us
        )
        / 1e6,
        postgres_bytes_per_day=a_day,
        postgres_bytes=kept_bytes(storage.condense_after_days) + others,
        condensed_bytes=kept_bytes(storage.condense_after_days or _CONDENSE_AFTER_DAYS) + others,
        blocks_bytes=others
        + storage.retention_days
        * per_s
        * _DAY_S
        * (costs.condensed_bytes if batch >= LEAST else costs.comparison_bytes),
        postgres_iops=iops,
        sidecar_bytes=fleet.pods * costs.sidecar_bytes,
        sidecar_limit_bytes=float(fleet.pods * sidecar_limit_bytes),
        bounds=[],
        month={},
    )
    bounds = sorted(_bounds(fleet, config, size), key=lambda bound: -bound.ratio)
    return msgspec.structs.replace(size, bounds=bounds, month=_month(fleet, size))


def _workers(fleet: Fleet, config: Config, costs: Costs) -> tuple[int, int, float]:
    """Return how many workers it takes, how many of them read a model at once, and the exchanges of a batch: one reads a model while it can."""
    per_s = fleet.pods * fleet.requests_per_s * fleet.sampled
    room = _room(costs.worker_second_us)
    readers = 1
    for _ in range(_ROUNDS):
        # Each reader reads once in each delay; where nothing has come there is no batch.
        mean = per_s / fleet.models / readers * config.shadow.batch_delay_s
        batch = min(float(config.shadow.batch_items), mean / -math.expm1(-mean))
        us = costs.worker_us + costs.worker_batch_us / batch + 1e3 * fleet.reference_ms
        needed = max(1, math.ceil(per_s / fleet.models * us / 1e6 / room))
        if needed <= readers:
            break
        readers = needed
    return max(readers, math.ceil(per_s * us / 1e6 / room)), readers, batch


def _room(second_us: float) -> float:
    """Return the share of a core that a process may fill, without what each second takes; never nothing."""
    return max(_EASY - second_us / 1e6, _EASY / 10)


def slices_touched(exchanges: float, fleet: Fleet) -> float:
    """Return how many slices of a model so many of its exchanges lie in, in the mean: `all`, and others that are as frequent as each other."""
    others = fleet.slices - 1
    if not others:
        return -math.expm1(-exchanges)
    of_exchange = min(fleet.slices_of_exchange - 1, others)
    return -math.expm1(-exchanges) - others * math.expm1(-exchanges * of_exchange / others)


def _leaders(
    fleet: Fleet, config: Config, costs: Costs, read_every_s: float, batch: float
) -> tuple[int, float, float, float]:
    """Return how many monitors it takes, their cores together, the time from one writing to the next, and the slices that it writes for each exchange.

    Parameters
    ----------
    read_every_s
        Time from one look of any worker for exchanges of a model to the next.
    batch
        Exchanges that it finds, where there are any.
    """
    per_s = fleet.pods * fleet.requests_per_s * fleet.sampled
    of_model = per_s / fleet.models
    # A model goes on with its first batch after a second.
    least_s = max(_MARK_S, read_every_s) + max(batch / of_model - read_every_s, 0.0)
    leaders = 1
    for _ in range(_ROUNDS):
        at_once = max(leaders, config.monitor.shards)
        written_s, touched = _turn(fleet, costs, least_s, per_s / at_once, batch)
        cores = per_s * _leader_us(costs, batch, touched) / 1e6
        needed = min(fleet.models, max(1, math.ceil(cores / _room(costs.leader_second_us))))
        if needed <= leaders:
            break
        leaders = needed
    return leaders, cores + leaders * costs.leader_second_us / 1e6, written_s, touched


def _turn(
    fleet: Fleet, costs: Costs, least_s: float, folded_per_s: float, batch: float
) -> tuple[float, float]:
    """Return the time from one writing of a model's states to the next, where a monitor folds so much, and the slices that it writes for each exchange."""
    of_model = fleet.pods * fleet.requests_per_s * fleet.sampled / fleet.models
    most_s = max(least_s, ROWS_AT_ONCE / folded_per_s)
    turn_s, written_s, touched = least_s, least_s, 0.0
    slice_us = costs.leader_slice_us + costs.postgres_slice_us
    for _ in range(_ROUNDS):
        touched = slices_touched(of_model * written_s, fleet) / (of_model * written_s)
        us = _leader_us(costs, batch, touched) + costs.postgres_slice_us * touched
        took_s = turn_s * folded_per_s * us / 1e6
        turn_s = min(max(least_s, took_s + min(max(took_s, _PAUSE_S[0]), _PAUSE_S[1])), most_s)
        writing_s = written_s * folded_per_s * touched * slice_us / 1e6
        due_s = min(
            LONGEST_UNWRITTEN_S, writing_s / WRITING_SHARE, TURNS_UNWRITTEN * ROWS_AT_ONCE / folded_per_s
        )
        written_s = max(turn_s, due_s)
    return written_s, touched


def _leader_us(costs: Costs, batch: float, touched: float) -> float:
    """Return what an exchange takes of the monitors that fold."""
    return costs.leader_us + costs.leader_batch_us / batch + costs.leader_slice_us * touched


def _bounds(fleet: Fleet, config: Config, size: FleetSize) -> Iterator[Bound]:
    """Yield what has an end; each ratio grows with the traffic, or with the slices."""
    shards, of_model = config.monitor.shards, size.leader_cores / fleet.models
    yield Bound(
        name="the monitors that fold",
        used=f"{size.leader_cores:.2f} cores",
        limit=f"{shards * _EASY:g} of {shards} (monitor.shards)",
        ratio=size.leader_cores / _EASY / shards,
        remedy=f"set monitor.shards = {size.leaders}, and run {size.leaders} monitors of one core each"
        if size.leaders > shards
        else _FOLD_LESS,
    )
    yield Bound(
        name="the fold of one model",
        used=f"{of_model:.2f} cores",
        limit=f"{_EASY:g} of 1",
        ratio=of_model / _EASY,
        remedy=f"{_FOLD_LESS}: a model is not divided",
    )
    one = size.nats_bytes / config.stream.replicas
    yield Bound(
        name="the stream, in an outage",
        used=_bytes(one),
        limit=f"{_bytes(config.stream.max_bytes)} (stream.max_bytes)",
        ratio=one / config.stream.max_bytes,
        remedy=f"set stream.max_bytes = {math.ceil(one / GIB) * GIB:_}, with as much disk at NATS",
    )
    yield Bound(
        name="the age of exchanges, in an outage",
        used=f"{fleet.outage_hours:g} h",
        limit=f"{config.stream.max_age_s / 3600:g} h (stream.max_age_s)",
        ratio=3600 * fleet.outage_hours / config.stream.max_age_s,
        remedy=f"set stream.max_age_s = {math.ceil(3600 * fleet.outage_hours)}",
        grows=False,
    )
    yield Bound(
        name="Postgres' disk",
        used=f"{size.postgres_iops:,.0f} operations/s",
        limit=f"{fleet.postgres_iops:,.0f} (postgres_iops)",
        ratio=size.postgres_iops / fleet.postgres_iops,
        remedy="take a faster disk, sample less, or let batches grow (shadow.batch_delay_s)",
    )
    for name, used in (("Postgres' processor", size.postgres_cores), ("NATS' processor", size.nats_cores)):
        yield Bound(
            name=name,
            used=f"{used:.2f} cores",
            limit=f"{_EASY * fleet.server_cores:g} of {fleet.server_cores:g} (server_cores)",
            ratio=used / _EASY / fleet.server_cores,
            remedy="sample less, or give it more cores",
        )
    each = fleet.requests_per_s * fleet.sampled
    yield Bound(
        name="what one sidecar sends",
        used=f"{each:g} exchanges/s",
        limit=f"{config.sampling.max_exchanges_per_s:g} (sampling.max_exchanges_per_s)",
        ratio=each / config.sampling.max_exchanges_per_s,
        remedy="sample less, or raise sampling.max_exchanges_per_s",
    )
    yield Bound(
        name="the memory of a monitor",
        used=_bytes(size.monitor_bytes),
        limit=f"{_bytes(MONITOR_LIMIT_BYTES)} of its manifest",
        ratio=size.monitor_bytes / MONITOR_LIMIT_BYTES,
        grows=False,
        remedy="raise the limit in its manifest, or watch fewer slices",
    )


def _month(fleet: Fleet, size: FleetSize) -> dict[str, float]:
    """Return the price of a month by part."""
    prices = fleet.prices
    month = {
        "sidecars' memory": size.sidecar_bytes / GIB * prices.memory_gib,
        "shadow workers": size.workers * prices.core,
        "monitors": size.leaders * (prices.core + size.monitor_bytes / GIB * prices.memory_gib),
        "Postgres": math.ceil(size.postgres_cores / _EASY) * prices.core
        + 2 * size.postgres_bytes / GIB * prices.disk_gib,  # its log and room for vacuum
        "NATS": math.ceil(size.nats_cores / _EASY) * prices.core + size.nats_bytes / GIB * prices.disk_gib,
    }
    return {**month, "total": sum(month.values())}


def planned_fleet(size: FleetSize, fleet: Fleet, costs: Costs = COSTS) -> str:
    """Return the size as text, and first what is too small."""
    whose = (
        "of the project's benchmarks (docs/explanation/performance.md)" if costs == COSTS else "measured here"
    )
    too_small = [bound for bound in size.bounds if bound.ratio > 1]
    head = (
        f"{fleet.pods:,} pods of {fleet.requests_per_s:g} requests/s, {fleet.sampled:.2%} replayed: "
        f"{size.exchanges_per_s:,.0f} exchanges/s; costs are {whose}"
    )
    lines = [head, ""]
    if too_small:
        lines += ["Too small for this:", *(f"  - {_said(bound)}: {bound.remedy}" for bound in too_small), ""]
    if nearest := next((bound for bound in size.bounds if bound.grows and bound.ratio <= 1), None):
        whole = "The next" if too_small else "Everything holds. The first"
        lines += [
            f"{whole} that traffic makes too small, at {1 / nearest.ratio:.1f} times this: {_said(nearest)}",
            "",
        ]
    per_day = " + ".join(f"{name} {_bytes(n_bytes)}" for name, n_bytes in size.postgres_bytes_per_day.items())
    rows = [
        ("shadow workers, one core each", f"{size.workers:,}", f"batches of {size.batch:.0f} exchanges"),
        (
            "monitors that fold",
            f"{size.leaders:,}",
            f"{size.leader_cores:.2f} cores together; {_bytes(size.monitor_bytes)} of memory each; with one more, one can be missing",
        ),
        ("Postgres", f"{_bytes(sum(size.postgres_bytes_per_day.values()))}/day", per_day),
        (
            "",
            _bytes(size.postgres_bytes),
            "in all, at the configured times of retention; twice that with its log",
        ),
        *(
            [("", _bytes(size.condensed_bytes), f"with storage.condense_after_days = {_CONDENSE_AFTER_DAYS}")]
            if size.condensed_bytes < size.postgres_bytes
            else []
        ),
        *(
            [("", _bytes(size.blocks_bytes), "with storage.write_blocks = true")]
            if size.blocks_bytes < size.postgres_bytes
            else []
        ),
        (
            "",
            f"{size.postgres_iops:,.0f}/s",
            f"operations of its disk; {size.postgres_cores:.2f} cores",
        ),
        (
            "NATS",
            _bytes(size.nats_bytes),
            f"disk for an outage of {fleet.outage_hours:g} h; {size.nats_cores:.2f} cores",
        ),
        (
            "sidecars",
            _bytes(size.sidecar_bytes),
            f"of memory requested; {_bytes(size.sidecar_limit_bytes)} if each took its limit",
        ),
    ]
    lines += [columns(("part", "size", ""), rows), ""]
    lines.append(
        columns(("a month", "price"), [(name, f"{price:,.0f}") for name, price in size.month.items()])
    )
    if fleet.prices == Prices():
        prices = fleet.prices
        lines.append(
            f"Prices are an assumption: {prices.core:g} for a core, {prices.memory_gib:g} for a GiB of memory, {prices.disk_gib:g} of disk."
            " Give yours in [prices]."
        )
    return "\n".join(lines)


def _said(bound: Bound) -> str:
    return f"{bound.name} ({bound.used}; limit: {bound.limit})"


def _bytes(n_bytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes / 1e3:.3g} kB"
