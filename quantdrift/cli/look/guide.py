"""The first ten minutes as steps: what is done, what comes next, and when a verdict can be expected. Pure.

The steps are read from the facts of `quantdrift status`; nothing is measured for them. The time until a verdict is the number of
exchanges that a slice lacks, divided by its share of those that its model compares a second at present. With `sampling.sticky_header`
a verdict needs sessions, and a session counts when it is over: `monitor.session_s` after its first request. In a new version every second
one counts sooner, by its begin alone.
"""

import math
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from quantdrift.cli.look.blockers import StatusFacts, signs
from quantdrift.core.config.schema import Config, Model
from quantdrift.core.notation import count_of, duration, listed
from quantdrift.facts.status import RANK, said

if TYPE_CHECKING:
    from quantdrift.storage.account.flow import AwaitedSlice, ModelFlow

_SHOWN: Final = 3  # slices of a model whose verdict is expected next
_MINUTE_S: Final = 60.0  # and the shortest begin of a session that counts
_POINTS: Final = 200  # at which sessions begin, of those that are open and of those to come
_EVERYTHING: Final = "all traffic"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step from nothing to a verdict.

    Parameters
    ----------
    name
        As in `--json`.
    is_done
        Whether nothing is left of it.
    text
        What was done, or what to do.
    n
        How many requests, samples or comparisons there were; None: the step counts nothing.
    """

    name: str
    is_done: bool
    text: str
    n: int | None = None


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that has too few exchanges for a verdict.

    Parameters
    ----------
    n_needed
        Exchanges, or sessions, after which it has one.
    n_compared
        Those that it has.
    expected_s
        Seconds until then, at the rate at which its model is compared at present; None: nothing is compared at present.
    session_s
        How long a session is; None: each exchange counts by itself.
    by_begin
        Whether sessions can count sooner, by their begin.
    """

    version: str
    slice: str
    n_needed: int
    n_compared: int
    expected_s: float | None
    session_s: float | None = None
    by_begin: bool = False

    @property
    def words(self) -> str:
        """As people read it: `300 exchanges are needed for scanner=archive, 120 were compared: some 4 minutes at the present rate`."""
        whose = _EVERYTHING if self.slice == "all" else self.slice
        were = "was" if self.n_compared == 1 else "were"
        if self.session_s is not None:
            were = "counts" if self.n_compared == 1 else "count"
            return f"{_sessions_needed(self.n_needed, whose, self.session_s, by_begin=self.by_begin)}; {self.n_compared:,} {were}: {_when(self.expected_s)}"
        return (
            f"{_needed(self.n_needed, whose)}, {self.n_compared:,} {were} compared: {_when(self.expected_s)}"
        )


def expected(config: Config, model: "ModelFlow") -> tuple[Expected, ...]:
    """Return the slices of a model that lack exchanges for a verdict, those with the most first."""
    return tuple(
        Expected(
            version=awaited.version,
            slice=awaited.slice,
            n_needed=config.monitor.min_groups,
            n_compared=awaited.n_groups,
            expected_s=_expected_s(config, model, awaited),
            session_s=_session_s(config),
            by_begin=_by_begin(config, model),
        )
        for awaited in model.awaited
    )


def expected_lines(config: Config, model: "ModelFlow") -> Iterator[str]:
    """Yield a line for each slice of a model whose verdict is expected next, and how many there are besides."""
    slices = expected(config, model)
    for slice_ in slices[:_SHOWN]:
        yield f"next verdict: {slice_.words}"
    if len(slices) > _SHOWN:
        yield f"and {count_of(len(slices) - _SHOWN, 'slice')} with less traffic"


def steps(config: Config, facts: StatusFacts) -> tuple[Step, ...]:
    """Return the steps from nothing to a verdict, in the order in which they are taken."""
    return (
        _configured(config),
        _running(config, facts),
        _requested(config, facts),
        _sampled(config, facts),
        _compared(config, facts),
        _judged(config, facts),
        _alerting(config),
    )


def guide(taken: tuple[Step, ...], facts: StatusFacts) -> Iterator[tuple[str, str]]:
    """Yield the steps as rows, as long as there is no verdict yet: whether each is done, and its text."""
    if next(step.is_done for step in taken if step.name == "verdict") or _has_worked(facts):
        return
    following = next(step.name for step in taken if not step.is_done)
    for step in taken:
        yield "done" if step.is_done else "next" if step.name == following else "then", step.text


def _has_worked(facts: StatusFacts) -> bool:
    """Return whether the database, which knows of verdicts, is away from parts that have worked: nothing begins here."""
    return facts.flow is None and any(any(port.counts.values()) for port in facts.ports.values())


def _configured(config: Config) -> Step:
    names = [f"`{model.name}`" for model in config.models]
    lacking = [f"`{model.name}`" for model in config.models if not model.references]
    if not names:
        text = "describe a model and its reference: `quantdrift init MODEL.onnx` writes the configuration"
    elif lacking:
        text = f"give {listed(lacking)} a reference: [[models.references]]"
    else:
        text = f"configuration: {count_of(len(names), 'model')}, {listed(names, 3)}"
    return Step(name="configuration", is_done=bool(names) and not lacking, text=text)


def _running(config: Config, facts: StatusFacts) -> Step:
    runs = {
        "Postgres": facts.flow is not None,
        "NATS": facts.waiting is not None,
        **{
            role: bool(sign) or (role in facts.ports and facts.ports[role].answers)
            for role, sign in signs(config, facts).items()
        },
    }
    away = [part for part, works in runs.items() if not works]
    text = (
        f"{listed([*runs])} run"
        if not away
        else f"start `quantdrift up`: {listed(away)} cannot be seen to run"
    )
    return Step(name="parts", is_done=not away, text=text)


def _requested(config: Config, facts: StatusFacts) -> Step:
    n = 0 if facts.flow is None else facts.flow.offered.total
    target = (
        f" to {config.sidecar.listen} (sidecar.listen)"
        if config.sidecar.listen
        else " through the tap or the intake"
    )
    text = f"{count_of(n, 'request')} came in" if n else f"send requests{target}"
    return Step(name="requests", is_done=n > 0, text=text, n=n)


def _sampled(config: Config, facts: StatusFacts) -> Step:
    lacking = [
        f"`{model.name}`"
        for model in config.models
        if not (flow := _flow(facts, model)) or not flow.captured.total
    ]
    n = 0 if facts.flow is None else facts.flow.captured.total
    is_done = bool(config.models) and not lacking
    text = f"{n:,} of them {'was' if n == 1 else 'were'} sampled"
    if not is_done:
        text = f"a sample of {listed(lacking) or 'a model'} is taken, as large as sampling.rate says"
    return Step(name="samples", is_done=is_done, text=text, n=n)


def _compared(config: Config, facts: StatusFacts) -> Step:
    flows = [_flow(facts, model) for model in config.models]
    n = sum(flow.compared.total for flow in flows if flow is not None)
    is_done = bool(flows) and all(flow is not None and flow.compared.total for flow in flows)
    text = f"{count_of(n, 'answer')} {'was' if n == 1 else 'were'} compared with the reference"
    return Step(
        name="comparisons",
        is_done=is_done,
        text=text if is_done else "a shadow worker replays each sample through the reference and compares",
        n=n,
    )


def _judged(config: Config, facts: StatusFacts) -> Step:
    """Return the step of the verdict: done where each model has a slice that has one."""
    flows = {model.name: _flow(facts, model) for model in config.models}
    lacking = {
        name: flow
        for name, flow in flows.items()
        if flow is None or sum(flow.verdicts.values()) <= len(flow.awaited)
    }
    if lacking or not flows:
        texts = [_first_verdict(config, name, flow) for name, flow in lacking.items()]
        return Step(
            name="verdict", is_done=False, text=f"first verdict: {'; '.join(texts) or 'it needs a model'}"
        )
    verdicts = sum((Counter(flow.verdicts) for flow in flows.values() if flow is not None), Counter[str]())
    counts = ", ".join(f"{verdicts[verdict]} {said(verdict)}" for verdict in RANK if verdict in verdicts)
    return Step(name="verdict", is_done=True, text=f"verdicts: {counts}")


def _first_verdict(config: Config, name: str, flow: "ModelFlow | None") -> str:
    """Return what a model lacks for its first verdict: that of its slice with the most exchanges."""
    model = f"`{name}`: " if len(config.models) > 1 else ""
    if flow is not None and flow.awaited:
        return f"{model}{expected(config, flow)[0].words}"
    n, session_s = config.monitor.min_groups, _session_s(config)
    if session_s is not None:
        seconds = None if flow is None else _sessions_over_s(flow, n, 1.0, session_s)
        return f"{model}{_sessions_needed(n, _EVERYTHING, session_s, by_begin=_by_begin(config, flow))}: {_when(seconds)}"
    per_s = 0.0 if flow is None else flow.rates.leaving
    return f"{model}{_needed(n, _EVERYTHING)}: {_when(n / per_s if per_s else None)}"


def _alerting(config: Config) -> Step:
    to = [
        name
        for name, is_set in (
            ("the OpenTelemetry collector", config.telemetry.otlp_endpoint),
            ("Alertmanager", config.notify.alertmanager),
            ("the webhook", config.notify.webhook_url),
        )
        if is_set
    ]
    return Step(
        name="alerts",
        is_done=bool(to),
        text=f"alerts go to {listed(to)}"
        if to
        else "say where alerts go: notify.webhook_url, notify.alertmanager or telemetry.otlp_endpoint",
    )


def _flow(facts: StatusFacts, model: Model) -> "ModelFlow | None":
    return None if facts.flow is None else facts.flow.models.get(model.name)


def _expected_s(config: Config, model: "ModelFlow", awaited: "AwaitedSlice") -> float | None:
    n_lacking = config.monitor.min_groups - awaited.n_groups
    if (session_s := _session_s(config)) is not None:
        return _sessions_over_s(model, n_lacking, awaited.share, session_s)
    per_s = model.rates.leaving * awaited.share
    return n_lacking / per_s if per_s > 0 else None


def _session_s(config: Config) -> float | None:
    return config.monitor.session_s if config.sampling.sticky_header else None


def _sessions_over_s(model: "ModelFlow", n: int, share: float, session_s: float) -> float | None:
    """Return in how many seconds so many more sessions of a slice count.

    Those that are open began at even distances; others are taken to begin as often as these did. Of either, one half counts as a whole,
    and the other by its begin where the version is new.
    """
    begun = model.sessions
    if begun is None or share <= 0:
        return None
    n_open = begun.n * share
    per_s = n_open / max(begun.oldest_s, _MINUTE_S)
    opened_s = [
        (-begun.oldest_s + (begun.oldest_s - begun.newest_s) * (i + 1) / _POINTS, n_open / _POINTS)
        for i in range(_POINTS)
    ]
    opened_s += [((i + 1) * n / per_s / _POINTS, n / _POINTS) for i in range(_POINTS)]
    times_s = sorted(
        (at_s + length_s, weight / 2)
        for at_s, weight in opened_s
        for length_s in (session_s, _begin_s(begun.version_s + at_s, session_s))
    )
    counted = 0.0
    for at_s, weight in times_s:
        counted += weight if at_s > 0 else 0.0
        if counted >= n * (1 - 1e-9):
            return at_s
    return None


def _begin_s(age_s: float, session_s: float) -> float:
    """Return after how long a session counts that began when its version was so old, if the budgets are shown its begin."""
    return min(max(age_s, _MINUTE_S), session_s)


def _by_begin(config: Config, model: "ModelFlow | None") -> bool:
    """Return whether the model has a version that is new: sessions that begin now can count by their begin."""
    session_s = _session_s(config)
    if session_s is None or session_s <= _MINUTE_S:
        return False
    return model is None or model.sessions is None or model.sessions.version_s < session_s


def _sessions_needed(n: int, whose: str, session_s: float, *, by_begin: bool) -> str:
    over = duration(timedelta(seconds=session_s))
    begin = ". In a new version every second one counts sooner, from a minute on" if by_begin else ""
    return (
        f"{count_of(n, 'session')} {'is' if n == 1 else 'are'} needed for {whose}, and one counts {over} after its first request"
        f" (monitor.session_s){begin}"
    )


def _needed(n: int, whose: str) -> str:
    return f"{count_of(n, 'exchange')} {'is' if n == 1 else 'are'} needed for {whose}"


def _when(seconds: float | None) -> str:
    if seconds is None:
        return "nothing is compared at present"
    whole = timedelta(seconds=_MINUTE_S * math.ceil(seconds / _MINUTE_S))
    return f"{'a minute' if whole <= timedelta(minutes=1) else f'some {duration(whole)}'} at the present rate"
