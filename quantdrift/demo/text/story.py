"""The run with text: train, quantise, serve by llama.cpp, ask, wait for the alert, look at a token, judge the repaired model, serve it."""

import asyncio
import math
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from quantdrift.demo.otlp_receiver import OtlpReceiver
from quantdrift.demo.outcome import is_page, slice_of
from quantdrift.demo.phases import Phases
from quantdrift.demo.screen import Screen
from quantdrift.demo.services import (
    Ports,
    ServiceError,
    Services,
    alone,
    background,
    child,
    command_output,
)
from quantdrift.demo.text.model import CANDIDATE, NAME, REPAIRED, TextStep
from quantdrift.demo.text.sentences import Language
from quantdrift.demo.text.traffic import TextTraffic
from quantdrift.demo.watch import DemoWatch, Moment

GERMAN: Final = "language=de"
VERSION: Final = "q4-1"
REPAIRED_VERSION: Final = "q4-2"
_HERE: Final = Path(__file__).parent
_MODELS: Final = "models"
_IN_EFFECT: Final = "the changed configuration is in effect"
_IN_EFFECT_S: Final = 60.0
_FAILED, _INSUFFICIENT = 3, 4  # exit codes of the gate
_EXPLAINED_BY: Final = "quantdrift.explained_by"


class TextPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how long anything is waited for.

    Parameters
    ----------
    rate_per_s
        Questions per second.
    german_share, repaired_german_share
        Share of the questions in German, once there are any, and while the repaired model is judged: a verdict needs 300 of them.
    healthy_answers
        Answers that are compared before the first question in German.
    settle_s, drift_s, after_s, repaired_s
        Longest wait for these, for the alert, after it, and for the repaired model's answers.
    """

    rate_per_s: float = 20.0
    german_share: float = 0.1
    repaired_german_share: float = 0.4
    healthy_answers: int = 300
    settle_s: float = 240.0
    drift_s: float = 240.0
    after_s: float = 5.0
    repaired_s: float = 240.0


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for: the directory that is written to, the seed, the plan, and whether to go on until Ctrl-C."""

    out: Path
    seed: int
    plan: TextPlan
    keep: bool


async def run(options: TextOptions, screen: Screen) -> int:
    """Run the demo; return 0 if German paged, nothing else did, and the repaired model answers German within its budget; else 1."""
    with alone(options.out), OtlpReceiver() as receiver:
        for name in ("data", "logs"):
            shutil.rmtree(options.out / name, ignore_errors=True)
        shutil.copy(_HERE / "config.toml", options.out / "config.toml")
        with screen.step("train an FP32 model of four languages, and quantise it to 4 bits") as tell:
            await _build(options, tell)
        async with AsyncExitStack() as stack:
            with screen.step("start llama.cpp's server, Postgres, NATS, sidecar, shadow and monitor"):
                running = await stack.enter_async_context(_services(options.out, receiver.endpoint))
            watch = await stack.enter_async_context(DemoWatch(running.services))
            watch.version = VERSION
            traffic = TextTraffic(
                f"http://127.0.0.1:{running.services.ports.sidecar}",
                options.seed,
                rate_per_s=options.plan.rate_per_s,
            )
            story = _TextRun(options, screen, receiver, watch, traffic)
            async with background(traffic.run()):
                await story.healthy()
                await story.drift()
                await story.look(running.services)
                await story.gate(running.services)
                await story.repair(running)
                problems = story.problems()
                for problem in problems:
                    screen.say(f"[bold red]Not as it must be:[/] {problem}")
                if not problems:
                    screen.say(
                        f"[bold green]{GERMAN} paged, no other slice did, and the repaired model answers German as FP32 does.[/]"
                    )
                if options.keep:
                    ports = running.services.ports
                    await story.until_interrupted(
                        f"  sidecar       http://127.0.0.1:{ports.sidecar}/v1",
                        f"  llama.cpp     http://127.0.0.1:{ports.model}/v1",
                        f"  live page     http://127.0.0.1:{ports.page}",
                        f"  Postgres      address in {running.services.data}/dsn",
                    )
            return 1 if problems else 0


class _TextServices:
    """What runs, with a server whose file can be replaced."""

    def __init__(self, services: Services, stack: AsyncExitStack, out: Path) -> None:
        self.services = services
        self._stack, self._out = stack, out
        self._server = AsyncExitStack()

    async def serve(self, file: str) -> None:
        """Stop the server, if there is one, and start it with another file at the same port."""
        await self._server.aclose()
        port = self.services.ports.model
        command = [
            "quantdrift.demo.text.server",
            "--file",
            str(self._out / _MODELS / file),
            "--port",
            str(port),
        ]
        self._server = AsyncExitStack()
        self._stack.push_async_exit(self._server)
        server = await self._server.enter_async_context(
            child("llama.cpp's server", command, self._out / "logs" / f"{file}.log")
        )
        await server.ready([port], "/health")


@asynccontextmanager
async def _services(out: Path, otlp_endpoint: str) -> AsyncIterator[_TextServices]:
    ports = Ports.free()
    config, data, environment = out / "config.toml", out / "data", ports.overrides(otlp_endpoint)
    async with AsyncExitStack() as stack:
        services = Services(ports=ports, config=config, data=data, environment=environment)
        running = _TextServices(services, stack, out)
        await running.serve(CANDIDATE)
        up = ["quantdrift", "up", "--config", str(config), "--data", str(data)]
        started = await stack.enter_async_context(
            child("quantdrift up", up, out / "logs" / "quantdrift.log", environment)
        )
        await started.ready(ports.admin(), "/readyz")
        yield running


class _TextRun(Phases):
    """The phases of the demo with text."""

    def __init__(
        self,
        options: TextOptions,
        screen: Screen,
        receiver: OtlpReceiver,
        watch: DemoWatch,
        traffic: TextTraffic,
    ) -> None:
        super().__init__(screen, receiver, watch, traffic)
        self._options, self._plan, self._traffic = options, options.plan, traffic
        self._said_of_gate = ""

    async def healthy(self) -> None:
        """Ask in three languages until enough is compared."""
        self._screen.say(
            f"\n[bold]1. Healthy:[/] {self._plan.rate_per_s:g} questions a second in English, Spanish and French,"
            " half of them at temperature 0.7, without log-probabilities"
        )

        def settled(snapshot: Moment) -> bool:
            return snapshot.replayed >= self._plan.healthy_answers

        if not await self.until(settled, self._plan.settle_s, "1. healthy"):
            raise ServiceError(
                f"fewer than {self._plan.healthy_answers} answers were compared in {self._plan.settle_s:g} s"
            )
        self._screen.settle()

    async def drift(self) -> None:
        """Ask in German, too, until its alert comes, and a little longer."""
        self._screen.say(
            f"\n[bold]2. Drift:[/] {self._plan.german_share:.0%} of the questions are in German now. The vocabulary was rounded after a text"
            " that lacked it. No header says the language: the sidecar finds it out."
        )
        self._traffic.german_share = self._plan.german_share
        began, sent = self._clock(), self._traffic.sent[Language.DE]
        if await self.until(lambda _: GERMAN in self._paged(), self._plan.drift_s, "2. drift"):
            self._screen.say(
                f"[bold red]Paged[/] {self._clock() - began:.0f} s and"
                f" {self._traffic.sent[Language.DE] - sent:,} German questions after the traffic changed"
            )
            await self.until(lambda _: False, self._plan.after_s, "after the alert")
        self._screen.settle()

    async def look(self, services: Services) -> None:
        """Show the alert, and where answers left the FP32 model."""
        listed = msgspec.json.decode(
            await command_output(services, self._options.out, "alerts", "list", "--all", "--json")
        )
        numbers = [str(alert["id"]) for alert in listed if alert["slice"] == GERMAN]
        if not numbers:
            return
        self._screen.say("\n[bold]The alert, as on-call sees it:[/]")
        self._screen.plain(await command_output(services, self._options.out, "alerts", "show", numbers[0]))
        self._screen.say(
            f"\n[bold]Where answers left the FP32 model:[/] quantdrift exemplars show {NAME} {GERMAN} --kind damaged --text"
        )
        words = ("exemplars", "show", NAME, GERMAN, "--kind", "damaged", "--text")
        text = await command_output(services, self._options.out, *words)
        self._screen.plain("\n".join(text.splitlines()[:12]))
        self._screen.say(
            f"The page of the incident shows the same: http://127.0.0.1:{services.ports.page}/incidents"
        )

    async def gate(self, services: Services) -> None:
        """Judge the repaired file on what is asked now, before it serves."""
        words = ("gate", str(self._options.out / _MODELS / REPAIRED), "--live", "--any-hour", "--wait", "4m")
        self._screen.say(
            f"\n[bold]3. Gate:[/] {REPAIRED} is the same model in 4 bits, rounded after a text with all four languages. Is it good enough on every"
            f" slice? quantdrift {' '.join(words)}"
        )
        gate = asyncio.create_task(
            command_output(services, self._options.out, *words, codes=(0, _FAILED, _INSUFFICIENT))
        )
        try:
            await self.until(lambda _: gate.done(), math.inf, "3. gate")
            self._screen.settle()
            self._said_of_gate = await gate
        finally:
            gate.cancel()
        self._screen.plain(self._said_of_gate)

    async def repair(self, running: _TextServices) -> None:
        """Serve the repaired file, and ask until enough German answers of it are compared."""
        self._screen.say(
            f"\n[bold]4. Repair:[/] {REPAIRED_VERSION}, the repaired model, serves from now on, and {self._plan.repaired_german_share:.0%} of the questions are in German, until there is a verdict."
        )
        await self._traffic.pause()
        config = running.services.config
        log = self._options.out / "logs" / "quantdrift.log"
        n_before = log.read_text(encoding="utf-8", errors="replace").count(_IN_EFFECT)
        text = config.read_text(encoding="utf-8")
        config.write_text(
            text.replace(f'version = "{VERSION}"', f'version = "{REPAIRED_VERSION}"'), encoding="utf-8"
        )
        await running.serve(REPAIRED)
        deadline = self._clock() + _IN_EFFECT_S
        while log.read_text(encoding="utf-8", errors="replace").count(_IN_EFFECT) == n_before:
            if self._clock() > deadline:
                raise ServiceError(
                    f"the sidecar did not take the changed configuration in {_IN_EFFECT_S:g} s: see {log}"
                )
            await asyncio.sleep(0.2)
        self._watch.version = REPAIRED_VERSION
        self._traffic.german_share = self._plan.repaired_german_share
        self._traffic.may_send.set()

        def judged(snapshot: Moment) -> bool:
            german = snapshot.slice(GERMAN)
            return german is not None and german.verdict == "ok"

        await self.until(judged, self._plan.repaired_s, "4. repaired")
        self._screen.settle()
        compared = ("compare", "--from", VERSION, "--to", REPAIRED_VERSION)
        self._screen.plain(await command_output(running.services, self._options.out, *compared))

    def problems(self) -> list[str]:
        """Return what is not as it must be, in words."""
        lines = [] if GERMAN in self._paged() else [f"{GERMAN} did not page"]
        if others := self._paged(but_explained_by=GERMAN) - {GERMAN}:
            lines.append(f"paged without a reason: {', '.join(sorted(others))}")
        if "may be replaced by" not in self._said_of_gate:
            lines.append("the repaired model did not pass the gate")
        german = self.snapshot.slice(GERMAN)
        if self._watch.version != REPAIRED_VERSION or german is None or german.verdict != "ok":
            lines.append(
                f"{GERMAN} of {REPAIRED_VERSION} is {german.verdict if german else 'not compared'}, and must be ok"
            )
        if failed := self._traffic.failed.total():
            lines.append(f"{failed} questions got no proper answer")
        return lines

    def _paged(self, but_explained_by: str = "") -> set[str]:
        return {
            slice_of(event)
            for event in self._receiver.events
            if is_page(event)
            and not (but_explained_by and event.attributes.get(_EXPLAINED_BY) == but_explained_by)
        }


async def _build(options: TextOptions, tell: Callable[[str, float], None]) -> None:
    """Build in a process of its own: torch shall not stay in this one."""
    out = str(options.out / _MODELS)
    command = ["-m", "quantdrift.demo.text.model", "--out", out, "--seed", str(options.seed)]
    log = options.out / "logs" / "build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                step = msgspec.json.decode(line, type=TextStep)
                tell(step.what, step.done)
            if await process.wait():
                raise ServiceError(
                    f"the models could not be built:\n{log.read_text(encoding='utf-8')[-2000:]}"
                )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
