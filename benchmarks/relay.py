"""What the serving path costs: our relay beside nginx, nginx with its mirror, a proxy of aiohttp's, and no proxy.

    python -m benchmarks.relay [--quick] [--rounds 3] [--turns 5] [--connections 1 16 128] [--out out/benchmarks]

Needs nginx, wrk and h2load (Debian: nginx, wrk, nghttp2-client). A backend that reads each request whole and
answers at once (nginx) is driven through each way in turn, each with one worker, as fast as it goes: by wrk with bodies
of 3 kB and 600 kB on 1, 16 and 128 connections, in JSON and in binary; by h2load with gRPC. Every request has a
`traceparent` of its own. The relay is `quantdrift sidecar` with its defaults and one header stratum, at sampling rates
of 0, 1 % and 100 %, with the caps that it is shipped with; and at 100 % once more without them, so that whatever is taken
is to be published to a real NATS server. nginx keeps its connections to the backend, writes no log, and has
room for every body in memory, with which it is quickest.

In a round every case has five turns of a second on each way, in an order that is turned by one each time. The middle one
by processor time counts, a ratio is that of two ways in the same round, and a figure the median over the rounds.
Processor time is what the kernel counts for the processes, its own work for them included: `cpu_us` of those on the
serving path for each request, `capture_us` of the capture process beside them for each exchange that it published. What
the backend, the mirror's target, NATS and the load generators take is not counted. A goal is the worst of its cases:
those of one size, or all over HTTP/1.1; that of gRPC counts only where the relay follows HTTP/2, and does not merely
pass it on. That of sampling is what a request costs with the default configuration and everything sampled, caps
included, once the burst has passed that full buckets allow; what an exchange costs that is published stands beside it
as `cpu_ratio_published_vs_mirror`.

`--quick`: one second each, one round, 16 connections.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

import msgspec
from nats.js.api import DiscardPolicy, StorageType

from benchmarks import ways
from benchmarks.payload import Size, Wire
from benchmarks.result import Goal, finish, machine
from benchmarks.rounds import Case, Figure, Round, Run, median, middle, ratio, run
from benchmarks.ways import Way
from quantdrift.core.config.schema import Stream
from quantdrift.core.process.nats_server import NatsServer
from quantdrift.core.stream.config import exchange_stream, tally_stream
from quantdrift.core.stream.connection import Queue

OUT = Path("out/benchmarks")
DIRECT, NGINX, MIRROR, AIOHTTP = "direct", "nginx", "nginx mirror", "aiohttp"
UNSAMPLED, SOME, CAPPED, ALL = "relay 0", "relay 1 %", "relay 100 %", "relay 100 % uncapped"
_WAYS = (DIRECT, NGINX, UNSAMPLED, SOME, MIRROR, CAPPED, ALL, AIOHTTP)
_GRPC = {way: f"grpc {way}" for way in (DIRECT, NGINX, UNSAMPLED)}
_KEPT_MESSAGES = 64  # of the stream: older ones are dropped
_START_S = 60.0
_BURST_S = 1.0  # what a full bucket of the caps lets pass at once
_FOLLOWED = 0.99  # share of the requests

_CPU: Figure = attrgetter("cpu_us")
_WHOLE: Figure = attrgetter("whole_us")
_MEAN: Figure = attrgetter("mean_us")
_P50: Figure = attrgetter("load.p50_ms")
_P99: Figure = attrgetter("load.p99_ms")


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes.

    Parameters
    ----------
    seconds
        Each turn of a case on a way.
    turns
        Of each way in a case of a round, one after the other: other work on the machine meets all alike.
    rounds
        Of all cases.
    connections
        To each way.
    n_growth
        Requests over which the growth of memory is measured.
    """

    seconds: float = 1.0
    turns: int = 5
    rounds: int = 3
    connections: tuple[int, ...] = (1, 16, 128)
    n_growth: int = 1_000_000


QUICK = Scale(turns=1, rounds=1, connections=(16,), n_growth=20_000)
Figures = dict[str, float | int | str | None]


def main(scale: Scale, out: Path) -> int:
    """Run all of it, print the figures and return the exit code."""
    if packages := ways.missing():
        print(f"not measured: install {', '.join(packages)}", file=sys.stderr)
        return 1
    figures: Figures = {"load_average_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="quantdrift-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        directory.chmod(0o755)  # nginx's worker may be somebody else
        started = _start(directory, stack)
        _warm(started, scale, directory)
        rounds = [_round(started, number, scale, directory) for number in range(scale.rounds)]
        figures |= _growth(started[SOME], scale, directory)
    figures["load_average_after"] = os.getloadavg()[0]
    goals = _goals(rounds, figures)
    table = _table(rounds)
    _print(table)
    out.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "figures": figures, "cases": table}
    (out / "relay.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    finish("relay", figures, goals)
    return 0


def _start(directory: Path, stack: ExitStack) -> dict[str, Way]:
    """Start everything and return the ways by name."""
    backends = stack.enter_context(ways.backend(directory / "backend"))
    port, grpc_port = backends["http"].port, backends["grpc"].port
    server = stack.enter_context(NatsServer(directory / "nats"))
    asyncio.run(make_stream(server.url))
    found = {DIRECT: backends["http"], _GRPC[DIRECT]: backends["grpc"]}
    found[NGINX] = stack.enter_context(ways.nginx(directory / "nginx", port))
    found[MIRROR] = stack.enter_context(ways.nginx(directory / "mirror", port, mirror=True))
    found[_GRPC[NGINX]] = stack.enter_context(ways.nginx(directory / "grpc", grpc_port, grpc=True))
    found[AIOHTTP] = stack.enter_context(ways.aiohttp_proxy(port))
    for name, rate, behind in (
        (UNSAMPLED, 0.0, port),
        (SOME, 0.01, port),
        (ALL, 1.0, port),
        (CAPPED, 1.0, port),
        (_GRPC[UNSAMPLED], 0.0, grpc_port),
    ):
        own = directory / f"sidecar-{len(found)}"
        found[name] = stack.enter_context(
            ways.sidecar(own, behind, rate=rate, capped=name != ALL, nats_url=server.url)
        )
    return found


async def make_stream(url: str) -> None:
    """Make the stream beforehand: in memory, and one that makes room by itself."""
    stream = Stream(url=url)
    wanted = exchange_stream(stream)
    wanted.max_msgs, wanted.discard, wanted.storage = _KEPT_MESSAGES, DiscardPolicy.OLD, StorageType.MEMORY
    queue = await Queue.connect(stream, client_name="benchmark")
    jetstream = (await queue.live()).jetstream()
    await jetstream.add_stream(wanted)
    await jetstream.add_stream(tally_stream(stream))
    await queue.close()


def _warm(started: dict[str, Way], scale: Scale, directory: Path) -> None:
    """Use every way once, until the capture processes publish: that they start is no part of a case."""
    for name, way in started.items():
        wire = Wire.GRPC if name in _GRPC.values() else Wire.BINARY
        case = Case(size=Size.SMALL, wire=wire, connections=scale.connections[-1])
        until = time.monotonic() + _START_S
        while run(name, way, case, 1.0, directory).n_published == 0 and name in {SOME, ALL, CAPPED}:
            if time.monotonic() > until:
                raise TimeoutError(f"{name}: nothing was published within {_START_S:g} s")


def _round(started: dict[str, Way], number: int, scale: Scale, directory: Path) -> Round:
    found: dict[tuple[Case, str], Run] = {}
    for case in _cases(scale):
        names = tuple(_GRPC.values()) if case.wire is Wire.GRPC else _WAYS
        turns: dict[str, list[Run]] = {name: [] for name in names}
        for turn in range(scale.turns):
            first = (number + turn) % len(names)
            for name in (*names[first:], *names[:first]):
                lead_s = _BURST_S if name == CAPPED else 0.0
                turns[name].append(run(name, started[name], case, scale.seconds, directory, lead_s=lead_s))
        found |= {(case, name): middle(runs) for name, runs in turns.items()}
        print(f"... round {number + 1}: {case}", flush=True)
    return found


def _cases(scale: Scale) -> list[Case]:
    found = [
        Case(size=size, wire=wire, connections=n)
        for size in Size
        for wire in (Wire.JSON, Wire.BINARY)
        for n in scale.connections
    ]
    # gRPC's clients share a connection between many calls, or have one each.
    return found + [
        Case(size=size, wire=Wire.GRPC, connections=n, streams=m)
        for size in Size
        for n, m in ((1, 16), (16, 1))
    ]


def _growth(way: Way, scale: Scale, directory: Path) -> Figures:
    """Return how resident memory grows at 1 % sampling, relay worker and capture process together."""
    case = Case(size=Size.SMALL, wire=Wire.BINARY, connections=scale.connections[-1])
    processes = (*way.serving, *way.capturing)
    run(SOME, way, case, scale.seconds, directory)
    before, n_requests = ways.rss_mb(processes), 0
    while n_requests < scale.n_growth:
        n_requests += run(SOME, way, case, 10 * scale.seconds, directory).load.requests
    after = ways.rss_mb(processes)
    growth = 1e6 * (after - before) / n_requests
    return {"rss_mb": after, "rss_requests": n_requests, "rss_growth_mb_per_million": growth}


def _goals(rounds: Sequence[Round], figures: Figures) -> list[Goal]:
    """Return the goals, and put beside the figures which case is the worst and what the median case is."""
    plain = [case for case, way in rounds[0] if way == NGINX]
    small = [case for case in plain if case.size is Size.SMALL]
    large = [case for case in plain if case.size is Size.LARGE]
    grpc = [case for case, way in rounds[0] if way == _GRPC[NGINX]]

    def worst(name: str, cases: Sequence[Case], ways_: tuple[str, str], figure: Figure) -> float:
        ratios = {case: ratio(rounds, case, *ways_, figure) for case in cases}
        figures[name] = max(ratios.values())
        figures[f"{name}_median_case"] = statistics.median(ratios.values())
        figures[f"{name}_worst_case"] = str(max(ratios, key=lambda case: ratios[case]))
        return max(ratios.values())

    goals = [
        _goal(
            "cpu_ratio_unsampled_small",
            worst("cpu_ratio_unsampled_small", small, (UNSAMPLED, NGINX), _CPU),
            1.15,
        ),
        _goal(
            "cpu_ratio_unsampled_large",
            worst("cpu_ratio_unsampled_large", large, (UNSAMPLED, NGINX), _CPU),
            1.0,
        ),
        _goal("p50_ratio_unsampled", worst("p50_ratio_unsampled", plain, (UNSAMPLED, NGINX), _P50), 1.0),
        _goal(
            "cpu_ratio_sampled_vs_mirror",
            worst("cpu_ratio_sampled_vs_mirror", plain, (CAPPED, MIRROR), _MEAN),
            1.0,
        ),
    ]
    worst("cpu_ratio_published_vs_mirror", plain, (ALL, MIRROR), _WHOLE)
    for size in Size:
        for wire in (Wire.JSON, Wire.BINARY):
            own = [case for case in plain if (case.size, case.wire) == (size, wire)]
            worst(f"cpu_ratio_sampled_vs_mirror_{size}_{wire}", own, (CAPPED, MIRROR), _MEAN)
            worst(f"cpu_ratio_published_vs_mirror_{size}_{wire}", own, (ALL, MIRROR), _WHOLE)
    of_grpc = worst("cpu_ratio_grpc", grpc, (_GRPC[UNSAMPLED], _GRPC[NGINX]), _CPU)
    relayed = [each[case, _GRPC[UNSAMPLED]] for each in rounds for case in grpc]
    followed = min(one.n_offered / one.load.requests for one in relayed)
    figures["grpc_followed"] = followed
    if followed >= _FOLLOWED:
        goals.append(_goal("cpu_ratio_grpc", of_grpc, 2.0))
    growth = figures["rss_growth_mb_per_million"]
    assert isinstance(growth, float)
    return [*goals, Goal(name="rss_growth_mb_per_million", value=growth, bound=5.0, unit="MB")]


def _goal(name: str, value: float, bound: float) -> Goal:
    return Goal(name=name, value=value, bound=bound, unit="ratio")


def _table(rounds: Sequence[Round]) -> list[dict[str, str | float]]:
    """Return a row for each case and way: medians over the rounds."""
    rows: list[dict[str, str | float]] = []
    for case, way in rounds[0]:
        is_grpc = case.wire is Wire.GRPC
        direct, nginx = (_GRPC[DIRECT], _GRPC[NGINX]) if is_grpc else (DIRECT, NGINX)

        def added(figure: Figure, case: Case = case, way: str = way, direct: str = direct) -> float:
            return statistics.median(figure(each[case, way]) - figure(each[case, direct]) for each in rounds)

        rows.append(
            {
                "case": str(case),
                "way": way,
                "requests_per_s": median(rounds, case, way, attrgetter("load.per_s")),
                "p50_ms": median(rounds, case, way, _P50),
                "p99_ms": median(rounds, case, way, _P99),
                "p50_added_ms": added(_P50),
                "p99_added_ms": added(_P99),
                "cpu_us": median(rounds, case, way, _CPU),
                "capture_us": median(rounds, case, way, attrgetter("capture_us")),
                "published": median(rounds, case, way, lambda one: one.n_published / one.load.requests),
                "cpu_over_nginx": ratio(rounds, case, way, nginx, _CPU),
                "p50_over_nginx": ratio(rounds, case, way, nginx, _P50),
            }
        )
    return sorted(rows, key=lambda row: str(row["case"]))


def _print(table: Sequence[dict[str, str | float]]) -> None:
    names = list(table[0])
    print("  ".join([f"{names[0]:<22}", f"{names[1]:<18}", *(f"{name:>14}" for name in names[2:])]))
    for row in table:
        case, way, *numbers = row.values()
        print("  ".join([f"{case:<22}", f"{way:<18}", *(f"{number:>14.4g}" for number in numbers)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="within about a minute; figures are rougher")
    parser.add_argument(
        "--rounds", type=int, help="of all cases; the more there are, the less other work counts"
    )
    parser.add_argument("--turns", type=int, help="of each way in a case of a round")
    parser.add_argument("--connections", type=int, nargs="+", help="to each way")
    parser.add_argument("--out", type=Path, default=OUT, help="where the table goes")
    chosen = parser.parse_args()
    chosen_scale = QUICK if chosen.quick else Scale()
    if chosen.rounds:
        chosen_scale = msgspec.structs.replace(chosen_scale, rounds=chosen.rounds)
    if chosen.turns:
        chosen_scale = msgspec.structs.replace(chosen_scale, turns=chosen.turns)
    if chosen.connections:
        chosen_scale = msgspec.structs.replace(chosen_scale, connections=tuple(chosen.connections))
    sys.exit(main(chosen_scale, chosen.out))
