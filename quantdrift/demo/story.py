"""The run itself: build, serve, send, wait for the alert, check it against the true labels, report, release."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quantdrift.demo.model import (
    CANDIDATE,
    INPUT,
    REFERENCE,
    SECOND_CANDIDATE,
    Built,
    DemoStep,
    Quality,
    compare,
)
from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.demo.outcome import RunOutcome, is_page, slice_of
from quantdrift.demo.phases import Phases
from quantdrift.demo.scans import Scanner, Scans
from quantdrift.demo.screen import Screen
from quantdrift.demo.services import (
    REPAIRED_VERSION,
    SECOND_VERSION,
    VERSION,
    ServiceError,
    Services,
    alone,
    background,
    child,
    command_output,
    services,
)
from quantdrift.demo.traffic import REQUEST_ID_HEADER, DemoTraffic, Page, stack
from quantdrift.demo.watch import ARCHIVE, DemoWatch, Moment

_HERE = Path(__file__).parent
_MODELS = "models"
_NOTEBOOK = Path("examples/questions.ipynb")
_REPORT = "report.html"
_REPAIRED = "repaired"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and how long anything is waited for.

    Parameters
    ----------
    rate_per_s
        Requests per second.
    healthy_share, drifted_share
        The archive's share of the traffic before and after it starts to digitise its old pages.
    healthy_s
        Shortest healthy phase; it lasts until every other slice has a verdict.
    settle_s
        Longest wait for these verdicts.
    drift_s
        Longest wait for the alert.
    after_s
        How long it goes on after the alert: long enough for another slice to fire if it were to.
    seen_s
        Longest wait for the first comparisons of the second version, in every slice.
    release_s
        Longest wait for a verdict on every slice of it afterwards.
    gate_s
        Longest wait for the gate's verdict on a repaired model; 0: nothing is repaired. The archive has some nine readers a second, and 1,860
        of them are enough in 99 of 100 runs; half of the runs need 740.
    repaired_s
        Longest time that the repaired model serves; it ends once every slice of it has a verdict.
    """

    rate_per_s: float = 300.0
    healthy_share: float = 0.005
    drifted_share: float = 0.06
    healthy_s: float = 20.0
    settle_s: float = 120.0
    drift_s: float = 120.0
    after_s: float = 10.0
    seen_s: float = 60.0
    release_s: float = 25.0
    gate_s: float = 300.0
    repaired_s: float = 60.0

    @classmethod
    def fast(cls) -> "Plan":
        """Return the plan for a machine that waits: the same story in shorter phases, without the repair."""
        return cls(healthy_s=5.0, after_s=5.0, release_s=5.0, gate_s=0.0)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for.

    Parameters
    ----------
    out
        Directory that everything is written to.
    seed
        Of training and traffic.
    plan
        What is sent.
    keep
        Leave everything running until interrupted.
    """

    out: Path
    seed: int
    plan: Plan
    keep: bool


async def run(options: Options, screen: Screen) -> int:
    """Run the demo; return 0 if the archive's slice fired, no other did, and the aggregate is fine; else 1."""
    with alone(options.out), OtlpReceiver() as receiver:
        _prepare(options.out)
        with screen.step("train an FP32 digit reader, export it, quantise it to INT8") as tell:
            built = await _build(options, tell)
        screen.quality("Both models on held-out pages, checked offline", built.quality)
        _, held_out = Scans.bundled()
        async with _started(options.out, receiver, screen) as running, DemoWatch(running) as watch:
            traffic = DemoTraffic(
                f"http://127.0.0.1:{running.ports.sidecar}",
                held_out,
                options.seed,
                rate_per_s=options.plan.rate_per_s,
                archive_share=options.plan.healthy_share,
            )
            run_ = _DemoRun(options.plan, screen, receiver, watch, traffic)
            async with background(traffic.run()):
                await run_.healthy()
                await run_.drift()
                code = await _conclude(options, screen, running, run_)
                await run_.release(running, options.out / _MODELS)
                await _compare_versions(options, screen, running, VERSION, SECOND_VERSION)
                if options.plan.gate_s:
                    await _repair(options, screen, running, run_)
                _say_what_next(options, screen, running)
                if options.keep:
                    ports = running.ports
                    await run_.until_interrupted(
                        f"  sidecar       http://127.0.0.1:{ports.sidecar}",
                        f"  the model     http://127.0.0.1:{ports.model}",
                        f"  live page     http://127.0.0.1:{ports.page}",
                        f"  metrics       sidecar http://127.0.0.1:{ports.sidecar_admin}/metrics,"
                        f" shadow :{ports.shadow_admin}, monitor :{ports.monitor_admin}",
                        f"  Postgres      address in {running.data}/dsn",
                        f"  NATS          address in {running.data / 'nats.url'}",
                    )
            return code


class _DemoRun(Phases):
    """The phases of the demo."""

    def __init__(
        self, plan: Plan, screen: Screen, receiver: OtlpReceiver, watch: DemoWatch, traffic: DemoTraffic
    ) -> None:
        super().__init__(screen, receiver, watch, traffic)
        self._plan, self.traffic = plan, traffic

    async def healthy(self) -> None:
        """Send sound traffic until every slice but the archive's has its verdict."""
        self._screen.say(
            f"\n[bold]1. Healthy:[/] {self._plan.rate_per_s:g} requests/s from five scanners,"
            f" the archive sends {self._plan.healthy_share:.1%} of them"
        )
        began = self._clock()

        def settled(snapshot: Moment) -> bool:
            others = [state for state in snapshot.slices if state.slice != ARCHIVE]
            return (
                self._clock() - began >= self._plan.healthy_s
                and len(others) == len(Scanner)
                and all(state.verdict == "ok" for state in others)
            )

        if not await self.until(settled, self._plan.settle_s, "1. healthy"):
            raise ServiceError(f"no verdict on every slice after {self._plan.settle_s:g} s of sound traffic")

    async def drift(self) -> None:
        """Send more of the archive's pages until its alert comes, and a little longer."""
        self._screen.settle()
        self._screen.say(
            f"\n[bold]2. Drift:[/] the archive digitises its old pages and now sends"
            f" {self._plan.drifted_share:.1%} of the traffic. Nothing is wrong with four scanners in five."
        )
        self.traffic.archive_share = self._plan.drifted_share
        began, sent = self._clock(), self.traffic.sent[Scanner.ARCHIVE]

        def paged(_: Moment) -> bool:
            return any(is_page(event) and slice_of(event) == ARCHIVE for event in self._receiver.events)

        if await self.until(paged, self._plan.drift_s, "2. drift"):
            self._screen.say(
                f"[bold red]Paged[/] {self._clock() - began:.0f} s and"
                f" {self.traffic.sent[Scanner.ARCHIVE] - sent:,} archive pages after the traffic changed"
            )
            await self.until(lambda _: False, self._plan.after_s, "after the alert")
        self._screen.settle()

    async def release(self, running: Services, models: Path) -> None:
        """Release a second version, and send traffic until every slice of it has a verdict."""
        self._screen.say(
            f"\n[bold]3. Release:[/] {SECOND_VERSION} has the same INT8 weights, and activations of 16 bits, which a CPU"
            " computes in floating point: slower. Are its answers better?"
        )
        await self._serve(running, SECOND_VERSION, models / SECOND_CANDIDATE)

        if not await self.until(_is_seen, self._plan.seen_s, "3. release"):
            raise ServiceError(
                f"{SECOND_VERSION} is not compared on every slice {self._plan.seen_s:g} s after its release"
            )
        await self.until(_is_judged, self._plan.release_s, "3. release")
        self._screen.settle()

    async def back(self, running: Services, models: Path) -> None:
        """Let the first version serve again."""
        await self._serve(running, VERSION, models / CANDIDATE)

    async def repaired(self, running: Services, candidate: Path, routes: Mapping[str, Path]) -> None:
        """Let the repaired model serve until every slice of it has a verdict, or for a while."""
        await self._serve(running, REPAIRED_VERSION, candidate, routes)
        await self.until(_is_judged, self._plan.repaired_s, "4. repaired")
        self._screen.settle()

    async def _serve(
        self, running: Services, version: str, file: Path, routes: Mapping[str, Path] | None = None
    ) -> None:
        self._watch.version = version
        await running.release(version, file, routes)

    def outcome(self) -> RunOutcome:
        """Return what there is to judge."""
        return RunOutcome(
            events=tuple(self._receiver.events),
            snapshot=self.snapshot,
            failed=self.traffic.failed.total(),
        )


def _is_seen(snapshot: Moment) -> bool:
    """Return whether every slice of the version was compared."""
    return len(snapshot.slices) == len(Scanner) + 1


def _is_judged(snapshot: Moment) -> bool:
    """Return whether every slice of the version has a verdict."""
    return _is_seen(snapshot) and all(state.verdict != "unknown" for state in snapshot.slices)


async def _conclude(options: Options, screen: Screen, running: Services, run_: _DemoRun) -> int:
    outcome = run_.outcome()
    await _report(options, screen, running, "write the weekly report")
    with screen.step("load the true labels of the pages that were served"):
        labels = options.out / "labels.csv"
        await asyncio.to_thread(_write_labels, labels, run_.traffic)
        key = f"header.{REQUEST_ID_HEADER}"
        await command_output(running, options.out, "labels", "load", str(labels), "--by", key)
        loss = await command_output(running, options.out, "labels", "show")
    models = options.out / _MODELS
    pages = {scanner: run_.traffic.served(scanner) for scanner in Scanner}
    served = await asyncio.to_thread(_check_served, models, models / CANDIDATE, pages)
    if alert := await _alert(running, options.out):
        screen.say("\n[bold]The alert, as on-call sees it:[/]")
        screen.plain(alert)
    screen.say("\n[bold]What the true labels say:[/]")
    screen.plain(loss)
    screen.verdicts(outcome.snapshot.slices, outcome.decided())
    screen.quality("Was the alert right? Every page that was served so far, against its true label", served)
    archive = next((row for row in served if row.scanner is Scanner.ARCHIVE), None)
    if archive is not None and (figures := outcome.figures(archive)):
        screen.say("\n[bold]The archive's changed answers, of different pages:[/]")
        screen.plain(figures)
    problems = outcome.problems()
    for problem in problems:
        screen.say(f"[bold red]Not as it must be:[/] {problem}")
    if not problems:
        screen.say(f"[bold green]{outcome.conclusion()}[/]")
    return 1 if problems else 0


async def _report(options: Options, screen: Screen, running: Services, step: str) -> None:
    with screen.step(step):
        where = ["--config", str(running.config), "--data", str(running.data)]
        command = ["quantdrift", "report", "--week", *where, "--out", str(options.out / _REPORT)]
        log = options.out / "logs" / "report.log"
        async with child("quantdrift report", command, log, running.environment) as writing:
            await writing.finish()


def _say_what_next(options: Options, screen: Screen, running: Services) -> None:
    """Say how to go on: the report, one line of SQL, the notebook."""
    programs = _programs()
    psql = f"psql \"$(cat {running.data}/dsn)\" -x -c 'table slice_now'"
    again = (
        ""
        if options.keep
        else f"{programs}quantdrift demo --keep     # the same, left running; then in another terminal:\n  "
    )
    screen.say(
        f"\n[bold]The report:[/] {options.out / _REPORT}\n"
        f"[bold]What next:[/]\n"
        f"  {again}{psql}\n"
        f"  {programs}quantdrift config check --config {running.config} --requests-per-s 300"
    )
    if _NOTEBOOK.exists():  # in a checkout
        screen.say(
            f"  {programs}pip install jupyterlab  # for the notebook that answers twelve questions:\n"
            f'  QUANTDRIFT_DSN="$(cat {running.data}/dsn)" {programs}jupyter lab {_NOTEBOOK}\n'
            f"  docs/quick-start.md       # the same with your own model"
        )


def _programs() -> str:
    """Return where the programs of this environment are, as one would type it; empty if the shell finds them."""
    directory = Path(sys.executable).parent
    if (program := shutil.which("quantdrift")) and Path(program).parent == directory:
        return ""
    return f"{directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory}/"


async def _compare_versions(
    options: Options, screen: Screen, running: Services, before: str, after: str
) -> None:
    """Show a version beside another."""
    with screen.step("compare the two versions"):
        words = ("compare", "--from", before, "--to", after)
        compared = await command_output(running, options.out, *words)
    screen.plain(compared)
    screen.say(
        "Read it slice by slice. The row `all` also moves with the mix of the traffic: the archive sent another share "
        "of it while each version served."
    )


async def _repair(options: Options, screen: Screen, running: Services, run_: _DemoRun) -> None:
    """Find the cause, build repairs, judge the best on live traffic, and serve it."""
    screen.say(
        f"\n[bold]4. Repair:[/] {SECOND_VERSION} is slow, so {VERSION} serves again. What is wrong with it, and what helps?"
        f" The pages that were sent are the recording: {len(run_.traffic.served(Scanner.ARCHIVE)):,} of the archive. The alert and the"
        " tables above counted some of them, so their shares differ a little."
    )
    models, repaired = options.out / _MODELS, options.out / _REPAIRED
    await run_.back(running, models)
    recording = options.out / "recorded.npz"
    await asyncio.to_thread(_record, recording, run_.traffic)
    alert = (await _alerts(running, options.out))[0]
    asked = (alert, f"--candidate={models / CANDIDATE}", f"--inputs={recording}")
    with screen.step("name the cause: quantdrift diagnose"):
        picture = options.out / "cause.png"
        cause = await command_output(running, options.out, "diagnose", *asked, f"--picture={picture}")
    screen.plain(cause)
    with screen.step("build repairs and measure them: quantdrift repair"):
        # 4: there are too few pages to decide it; the gate decides it on live traffic.
        built = await command_output(
            running, options.out, "repair", *asked, f"--out={repaired}", codes=(0, 3, 4)
        )
    screen.plain(built)
    best = _best(repaired)
    if best is None:
        screen.say("[bold red]No repaired model is good enough.[/]")
        return
    candidate = repaired / best["file"] if best["route"] is None else models / CANDIDATE
    routes = {} if best["route"] is None else {Scanner.ARCHIVE.value: repaired / best["file"]}
    routed = [f"--route={ARCHIVE}={file}" for file in routes.values()]
    with screen.step(
        f"judge it on every slice of the live traffic, in at most {options.plan.gate_s / 60:g} minutes"
    ):
        judged = await command_output(
            running,
            options.out,
            "gate",
            str(candidate),
            "--live",
            f"--wait={options.plan.gate_s:g}s",
            "--any-hour",  # the story is shorter than a day
            f"--note={alert}",
            *routed,
            codes=(0, 3, 4),
        )
    screen.plain(judged)
    before = len(run_.traffic.served(Scanner.ARCHIVE))
    screen.say(f"\n{REPAIRED_VERSION} serves until each slice of it has a verdict.")
    await run_.repaired(running, candidate, routes)
    pages = run_.traffic.served(Scanner.ARCHIVE)[before:]
    rows = await asyncio.to_thread(_check_served, models, repaired / best["file"], {Scanner.ARCHIVE: pages})
    screen.quality(
        "Did it help? The archive's pages that the repaired model read, against their true labels", rows
    )
    await _compare_versions(options, screen, running, VERSION, REPAIRED_VERSION)
    await _report(
        options,
        screen,
        running,
        "write the report again: it has the cause, the best repair and the gate's verdict",
    )


def _record(file: Path, traffic: DemoTraffic) -> None:
    """Write the pages that were sent, with their scanner, as somebody who records requests would have them."""
    pages = {scanner: stack(traffic.served(scanner))[0] for scanner in Scanner}
    scanners = np.concatenate([np.full(len(images), scanner.value) for scanner, images in pages.items()])
    np.savez(file, allow_pickle=False, **{INPUT: np.concatenate([*pages.values()]), "scanner": scanners})


def _best(repaired: Path) -> dict[str, Any] | None:
    """Return the first repair that has a file of its own; None: there is none."""
    record = msgspec.json.decode((repaired / "repairs.json").read_bytes())
    return next((repair for repair in record["repairs"] if repair["file"] is not None), None)


async def _alerts(running: Services, out: Path) -> list[str]:
    """Return the numbers of the archive's alerts, the newest first; that of a version that was replaced has ended."""
    listed = msgspec.json.decode(await command_output(running, out, "alerts", "list", "--all", "--json"))
    return [str(alert["id"]) for alert in listed if alert["slice"] == ARCHIVE]


async def _alert(running: Services, out: Path) -> str:
    """Return the archive's alert as on-call sees it; empty: there is none."""
    numbers = await _alerts(running, out)
    return await command_output(running, out, "alerts", "show", numbers[0]) if numbers else ""


def _write_labels(file: Path, traffic: DemoTraffic) -> None:
    """Write the digits that were on the served pages, by request id, as a user would have them from elsewhere."""
    rows = [f"{page.request_id},{page.label}" for scanner in Scanner for page in traffic.served(scanner)]
    file.write_text("\n".join([f"header.{REQUEST_ID_HEADER},label", *rows, ""]), encoding="utf-8")


def _check_served(models: Path, candidate: Path, served: Mapping[Scanner, Sequence[Page]]) -> list[Quality]:
    """Judge the answers that the clients really got, beside the reference's on the same pages."""
    rows = []
    for scanner, pages in served.items():
        if pages:
            right = sum(page.answer == page.label for page in pages) / len(pages)
            offline = compare(models / REFERENCE, candidate, scanner, *stack(pages))
            rows.append(msgspec.structs.replace(offline, candidate_accuracy=right))
    return rows


async def _build(options: Options, tell: Callable[[str, float], None]) -> Built:
    """Build in a process of its own: torch shall not stay in this one."""
    command = [
        "-m",
        "quantdrift.demo.model",
        "--out",
        str(options.out / _MODELS),
        "--seed",
        str(options.seed),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    result = None
    try:
        async for line in process.stdout:
            message = msgspec.json.decode(line, type=DemoStep | Built)
            if isinstance(message, Built):
                result = message
            else:
                tell(message.what, message.done)
        if await process.wait() or result is None:
            raise ServiceError("the models could not be built: see above")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return result


@asynccontextmanager
async def _started(out: Path, receiver: OtlpReceiver, screen: Screen) -> AsyncIterator[Services]:
    async with AsyncExitStack() as stack:
        with screen.step("start the INT8 server, Postgres, NATS, sidecar, shadow and monitor"):
            running = await stack.enter_async_context(services(out, receiver.endpoint))
        screen.say(f"The live page while it runs: http://127.0.0.1:{running.ports.page}")
        try:
            yield running
        finally:
            with screen.step("stop everything in order"):
                await stack.aclose()


def _prepare(out: Path) -> None:
    for name in ("data", "logs", _REPAIRED):
        shutil.rmtree(out / name, ignore_errors=True)
    shutil.copy(_HERE / "config.toml", out / "config.toml")
