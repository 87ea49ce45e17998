"""The whole loop on real input: from a client's request to the alert, on this machine alone.

    python -m benchmarks.end_to_end [--quick] [--rate 300]

Serves the demo's INT8 model behind the sidecar with `quantdrift up`, and measures three things one after another:

1. **A steady run and a drift**: offered and sampled rate, replays per second, the time from capture to stored
   comparison, losses by reason, and how many of the drifted slice's samples lie between onset and alert, beside what
   the shipped detector needs on independent flips of the same rate (simulated).
2. **Capacity**: the shadow is stopped, exchanges are put into the stream, and it is let go: replays per second with a
   backlog, over the bare runtime on the same inputs in batches of the same size.
3. **The hop**: requests one after another, through the relay over direct.
"""

import argparse
import asyncio
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import aiohttp
import asyncpg
import msgspec
import numpy as np
import onnxruntime as ort
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.result import Goal, finish
from quantdrift.core.codec import encode as encode_record
from quantdrift.core.config import Config, load
from quantdrift.core.data_directory import at_data
from quantdrift.core.records import Exchange, Sampling, Tensor
from quantdrift.core.sampling.rates import policy_of
from quantdrift.core.stream.connection import Queue
from quantdrift.core.stream.rights import NatsRole
from quantdrift.demo.model import CANDIDATE, INPUT, NAME, OUTPUT, REFERENCE
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.demo.scans import Scanner, Scans
from quantdrift.demo.services import VERSION, Services, services
from quantdrift.demo.traffic import DemoTraffic, encode
from quantdrift.drift.delay import Allowance, flips, simulate

_DEMO = Path(__file__).parents[1] / "quantdrift" / "demo" / "config.toml"
_ARCHIVE = "scanner=archive"
_HEALTHY_SHARE, _DRIFTED_SHARE = 0.005, 0.04


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How long it takes.

    Parameters
    ----------
    healthy_s, drift_s
        Length of the healthy phase, and the longest wait for the alert.
    n_backlog
        Exchanges put into the stream for the capacity.
    n_hops
        Requests per way for the hop.
    """

    healthy_s: float = 60.0
    drift_s: float = 120.0
    n_backlog: int = 20_000
    n_hops: int = 3_000


QUICK = Scale(healthy_s=5.0, drift_s=30.0, n_backlog=3_000, n_hops=500)
Figures = dict[str, float | int | str | None]


def main(scale: Scale, rate_per_s: float, share: float) -> None:
    """Run all of it and print the figures."""
    with tempfile.TemporaryDirectory(prefix="quantdrift-bench-") as directory:
        out = Path(directory)
        out.chmod(0o755)  # the database server may run as somebody else
        _say("train and quantise the model")
        command = [sys.executable, "-m", "quantdrift.demo.model", "--out", str(out / "models")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.copy(_DEMO, out / "config.toml")
        config = load(out / "config.toml", {})
        figures = asyncio.run(_measure(out, config, scale, rate_per_s, share))
    for name, value in figures.items():
        print(f"  {name:<38} {value:.4g}" if isinstance(value, float) else f"  {name:<38} {value}")
    finish("end_to_end", figures, _goals(figures, config))


async def _measure(out: Path, config: Config, scale: Scale, rate_per_s: float, share: float) -> Figures:
    with OtlpReceiver() as receiver:
        async with services(out, receiver.endpoint) as running:
            figures = await _loop(running, config, scale, rate_per_s, share)
            figures |= await _capacity(running, out / "models", config, scale)
            figures |= await _hop(running, scale)
            return figures


def _goals(figures: Figures, config: Config) -> list[Goal]:
    def value(name: str) -> float:
        found = figures[name]
        return float("inf") if found is None else float(found)

    return [
        # By simulation 400 to 730 of the slice's samples at 5 % flips, production threshold.
        Goal(
            name="slice_samples_to_alert", value=value("slice_samples_to_alert"), bound=730, unit="{sample}"
        ),
        Goal(name="other_slices_alerted", value=value("other_slices_alerted"), bound=0, unit="{slice}"),
        Goal(name="loss_ratio", value=value("loss_ratio"), bound=0.001, unit="1"),
        Goal(
            name="staleness_p99_s",
            value=value("staleness_p99_s"),
            bound=4 * config.shadow.batch_delay_s,
            unit="s",
        ),
    ]


async def _loop(running: Services, config: Config, scale: Scale, rate_per_s: float, share: float) -> Figures:
    _, held_out = Scans.bundled()
    url = f"http://127.0.0.1:{running.ports.sidecar}"
    traffic = DemoTraffic(url, held_out, 1, rate_per_s=rate_per_s, archive_share=_HEALTHY_SHARE)
    connection = await asyncpg.connect(running.dsn)
    task = asyncio.create_task(traffic.run())
    try:
        _say(f"{scale.healthy_s:g} s of sound traffic at {rate_per_s:g} requests/s")
        before, began = await _counters(running), time.monotonic()
        await asyncio.sleep(scale.healthy_s)
        onset = datetime.now(UTC)
        traffic.archive_share = share
        _say(f"drift: the archive's share rises to {share:.0%}")
        deadline = time.monotonic() + scale.drift_s
        alert = None
        while alert is None and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            alert = await connection.fetchval(_ALERT, _ARCHIVE)
        seconds = time.monotonic() - began
        after = await _counters(running)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    stored = await connection.fetchrow(_STORED)
    slice_ = await connection.fetchrow(_SLICE, _ARCHIVE, onset, alert or datetime.now(UTC))
    others = await connection.fetchval(_OTHERS, _ARCHIVE)
    await connection.close()
    lost = {name.removeprefix("lost."): n for name, n in moved.items() if name.startswith("lost.") and n}
    detection = _detection(slice_, config, alert is not None, rate_per_s * share)
    return {
        "offered_per_s": moved["offered"] / seconds,
        "sampled_per_s": moved["taken"] / seconds,
        "replays_per_s": stored["n"] / seconds,
        "staleness_p50_s": float(stored["p50"]),
        "staleness_p99_s": float(stored["p99"]),
        "requests_failed": traffic.failed.total(),
        "loss_ratio": sum(lost.values()) / max(moved["taken"], 1.0),
        **{f"lost_{reason}": int(n) for reason, n in lost.items()},
        "other_slices_alerted": int(others),
        **detection,
    }


def _detection(row: asyncpg.Record, config: Config, fired: bool, samples_per_s: float) -> Figures:  # noqa: FBT001
    model = config.models[0]
    # Live detectors: two metrics on each slice and on `all`.
    n_detectors = 2 * (1 + len(Scanner))
    gamma = 1.0 / samples_per_s / (30 * 86_400) / n_detectors
    threshold = 1.0 / config.monitor.pages_per_30_days
    flip = float(row["flip"] or 0.0)
    expected = simulate(
        flips(flip),
        budget=model.budget.flip,
        allowance=Allowance(gamma=gamma, threshold=threshold, n_signals=2),
    )
    return {
        "slice_samples_to_alert": int(row["n"]) if fired else None,
        "slice_flip_rate": flip,
        "slice_kl_nats": float(row["divergence"] or 0.0),
        "expected_samples_flips_only_p10": expected.p10,
        "expected_samples_flips_only_p50": expected.p50,
        "expected_samples_flips_only_p90": expected.p90,
    }


async def _capacity(running: Services, models: Path, config: Config, scale: Scale) -> Figures:
    _say(f"capacity: {scale.n_backlog:,} exchanges wait for the shadow")
    _, held_out = Scans.bundled()
    images, _ = held_out.draw(Scanner.OFFICE, scale.n_backlog, np.random.default_rng(2))
    logits, _ = _bare(models / CANDIDATE, images, 64)
    _, bare_per_s = _bare(models / REFERENCE, images, config.shadow.batch_items)
    shadow = _process(running, "shadow")
    connection = await asyncpg.connect(running.dsn)
    shadow.send_signal(signal.SIGSTOP)
    try:
        await _publish(running, config, images, logits)
        n_before = await connection.fetchval("select count(*) from comparison")
    finally:
        shadow.send_signal(signal.SIGCONT)
    began = time.monotonic()
    while await connection.fetchval("select count(*) from comparison") < n_before + scale.n_backlog:
        if time.monotonic() - began > 300:
            raise TimeoutError("the backlog is not worked off after 300 s")
        await asyncio.sleep(0.1)
    seconds = time.monotonic() - began
    await connection.close()
    capacity = scale.n_backlog / seconds
    return {
        "capacity_replays_per_s": capacity,
        "bare_runtime_replays_per_s": bare_per_s,
        "capacity_over_bare_ratio": capacity / bare_per_s,
    }


def _bare(path: Path, images: np.ndarray, batch: int) -> tuple[np.ndarray, float]:
    """Return the outputs of the bare runtime and how many items it did per second."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    parts = [images[i : i + batch] for i in range(0, len(images), batch)]
    session.run([OUTPUT], {INPUT: parts[0]})
    began = time.monotonic()
    outputs = [session.run([OUTPUT], {INPUT: part})[0] for part in parts]
    return np.concatenate(outputs), len(images) / (time.monotonic() - began)


async def _publish(running: Services, config: Config, images: np.ndarray, logits: np.ndarray) -> None:
    stream = at_data(config, running.data, NatsRole.SIDECAR).stream
    queue = await Queue.connect(stream, client_name="benchmark", role=NatsRole.SIDECAR)
    policy = policy_of(config.sampling, "benchmark")
    sampling = Sampling(
        policy=policy,
        header_stratum="default",
        body_stratum="default",
        pi1=config.sampling.rate,
        pi2=config.sampling.body_rate,
        u1=0.0,
        u2=0.0,
    )

    async def put(i: int) -> None:
        exchange = Exchange(
            id=uuid4().hex,
            captured_at=datetime.now(UTC),
            source="benchmark",
            model=NAME,
            version=VERSION,
            protocol="oip-v2-rest",
            inputs=(Tensor(name=INPUT, datatype="FP32", shape=(1, 1, 8, 8), data=images[i].tobytes()),),
            outputs=(Tensor(name=OUTPUT, datatype="FP32", shape=(1, 10), data=logits[i].tobytes()),),
            attributes={"header.x-scanner": Scanner.OFFICE.value},
            sampling=sampling,
        )
        await queue.publish_exchange(NAME, exchange.id, encode_record(exchange))

    for start in range(0, len(images), 256):
        await asyncio.gather(*(put(i) for i in range(start, min(start + 256, len(images)))))
    await queue.close()


async def _hop(running: Services, scale: Scale) -> Figures:
    _say(f"the hop: {scale.n_hops:,} requests one after another, direct and through the relay in turn")
    _, held_out = Scans.bundled()
    images, _ = held_out.draw(Scanner.OFFICE, 1, np.random.default_rng(3))
    body, headers = encode(images[0], binary=True)
    took: dict[str, list[float]] = {"direct": [], "relay": []}
    ports = {"direct": running.ports.model, "relay": running.ports.sidecar}
    async with aiohttp.ClientSession() as session:
        for i in range(2 * scale.n_hops):
            way = "relay" if i % 2 else "direct"
            began = time.perf_counter()
            url = f"http://127.0.0.1:{ports[way]}/v2/models/{NAME}/infer"
            async with session.post(url, data=body, headers=headers) as answer:
                await answer.read()
            took[way].append(time.perf_counter() - began)
    p50 = {way: statistics.median(times) for way, times in took.items()}
    p99 = {way: statistics.quantiles(times, n=100)[98] for way, times in took.items()}
    return {
        "hop_p50_added_ms": 1e3 * (p50["relay"] - p50["direct"]),
        "hop_p99_added_ms": 1e3 * (p99["relay"] - p99["direct"]),
        "hop_p50_ratio": p50["relay"] / p50["direct"],
    }


async def _counters(running: Services) -> dict[str, float]:
    url = f"http://127.0.0.1:{running.ports.sidecar_admin}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    counts: dict[str, float] = {"offered": 0.0, "taken": 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("quantdrift_sidecar_").removesuffix("_total")
            if name in {"offered", "taken"}:
                counts[name] += sample.value
            elif name == "lost":
                key = f"lost.{sample.labels['reason']}"
                counts[key] = counts.get(key, 0.0) + sample.value
    return counts


def _process(running: Services, role: str) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if role in line and str(running.config) in line and "quantdrift" in line:
            return process
    raise LookupError(f"{role} does not run")


def _say(text: str) -> None:
    print(f"... {text}", flush=True)


_ALERT = """
    select min(transition.at) from transition join slice on slice.id = slice_id
    where to_verdict = 'firing' and slice.name = $1
"""
_OTHERS = """
    select count(distinct slice_id) from transition join slice on slice.id = slice_id
    where to_verdict in ('warning', 'firing') and slice.name <> $1
"""
_STORED = """
    select count(*) n,
        coalesce(percentile_cont(0.5) within group (order by extract(epoch from stored_at - captured_at)), 0) p50,
        coalesce(percentile_cont(0.99) within group (order by extract(epoch from stored_at - captured_at)), 0) p99
    from comparison
"""
_SLICE = """
    select count(*) n, avg(flip::int) flip, avg(least(divergence, 2)) divergence from comparison
    where slice_ids @> (select array_agg(id) from slice where name = $1) and captured_at between $2 and $3
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="within about a minute; figures are rougher")
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second")
    chosen = parser.parse_args()
    main(QUICK if chosen.quick else Scale(), chosen.rate, 0.1 if chosen.quick else _DRIFTED_SHARE)
