"""What the gate says: the table of its answers, what a live gate has seen, and the verdict in a sentence."""

import math
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

from quantdrift.core.text import Table, plain
from quantdrift.facts.gate import Decision, Followed, Kind, Load, Outcome, SliceAnswer
from quantdrift.facts.words.alert import how_to_declare
from quantdrift.facts.words.tokens import of_tokens

_SHOWN: Final = 1e-5  # a share below it is shown as 0
_SECTION: Final = "quantdrift.gate"
_DIGEST: Final = re.compile(r" (.+?)=(sha256:[0-9a-f]+)")
_READABLE: Final = len("sha256:") + 12  # characters of a digest
_ASKED: Final = {
    Kind.FLIPS: "changed answers",
    Kind.HARM: "regressions - fixes",
    Kind.ACCURACY: "accuracy lost",
    Kind.DIVERGENCE: "divergence",
    Kind.CHANGED_TOKENS: "changed tokens",
    Kind.BROKEN: "broken answers",
    Kind.UNLIKELY: "unlikely tokens",
    Kind.LATENCY: "latency p99",
    Kind.LATENCY_P95: "latency p95",
    Kind.THROUGHPUT: "throughput",
    Kind.ERRORS: "errors",
}
_LATENCIES: Final = (Kind.LATENCY, Kind.LATENCY_P95)
_OF_LOAD: Final = (*_LATENCIES, Kind.THROUGHPUT, Kind.ERRORS)


def decided(decision: Decision, elapsed_s: float | None = None) -> list[str | Table]:
    """Return a decision: a table with a row for each question of each slice, and sentences.

    Parameters
    ----------
    elapsed_s
        Time in which the exchanges came, for the time that is missing; None: they were recorded.
    """
    rows = tuple(
        (
            answer.slice,
            _ASKED[answer.question],
            answer.verdict.value,
            f"{answer.n:,}",
            *([f"{decision.tokens.get(answer.slice, 0):,}"] if decision.tokens else []),
            _mean(answer),
            _limit(answer),
            _missing(answer, elapsed_s),
        )
        for answer in decision.slices
    )
    counted = ("n", "tokens") if decision.tokens else ("n",)
    head = ("slice", "question", "verdict", *counted, "mean [low, high]", "limit", "missing")
    return [
        Table(head, rows),
        "",
        *(_speed(load) for load in (decision.load, *decision.routes) if load),
        *(
            f"Divergence of tokens, {name}: {of_tokens(found)}."
            for name, found in decision.divergence_of_tokens.items()
        ),
        *(f"Not judged: {reason}." for reason in decision.not_judged),
        sentence(decision),
    ]


def followed(live: Followed) -> list[str | Table]:
    """Return what a gate on live traffic has seen, and its decision."""
    decision = live.decision
    hours = f", of the hours {_hours(live.hours)} of the day" if live.hours else ""
    lines: list[str | Table] = [f"gate {live.id}: {live.seen:,} exchanges in {_span(live.elapsed_s)}{hours}"]
    if live.refused:
        lines.append(
            f"{live.refused:,} of them the candidate could not answer; they count as changed answers ({live.problem})"
        )
    if live.unusable:
        lines.append(f"{live.unusable:,} more could not be used and do not count ({live.problem})")
    if live.unlabelled:
        lines.append(
            f"{live.unlabelled:,} have no label: `quantdrift labels load` gives them one while the gate runs"
        )
    if live.forgotten:
        lines.append(f"{live.forgotten:,} were forgotten before they had a label: load labels more often")
    if live.in_bursts:
        lines.append(_bursts(live))
    lines += decided(decision, live.elapsed_s)
    if decision.verdict is Outcome.PASS:
        query = urlencode({"candidate": decision.candidate}, safe=":=", quote_via=quote)
        lines.append(f"In a rollout: POST /gate/{live.id}/promote?{query}")
    if live.interrupted:
        lines.append(f"Interrupted: gate {live.id} has ended without a verdict.")
    return lines


def _bursts(live: Followed) -> str:
    """Return that answers come in bursts, what they count as, and how to declare them."""
    decision = live.decision
    of = f" of one {decision.burst_of}" if decision.burst_of else ""
    declared = (
        how_to_declare(decision.burst_of)
        if decision.burst_of
        else "if requests of one user or camera belong together, name the header that says whose they are in sampling.sticky_header"
    )
    return f"Answers come in bursts{of} of some {decision.burst}: {live.in_bursts:,} exchanges count as {live.observations:,} independent ones; {declared}"


def so_far(live: Followed) -> str:
    """Return how far a gate on live traffic is, and the slice that lacks most."""
    answers = live.decision.slices
    waiting = [answer for answer in answers if answer.verdict is Outcome.INSUFFICIENT]
    if not waiting:
        return f"gate {live.id}: {live.seen:,} exchanges, all questions decided"
    lacks = max(waiting, key=lambda answer: math.inf if answer.more is None else answer.more)
    return (
        f"gate {live.id}: {live.seen:,} exchanges, {len(answers) - len(waiting)} of {len(answers)} questions decided; {lacks.slice}:"
        f" {_missing(lacks, live.elapsed_s)}"
    )


def sentence(decision: Decision) -> str:
    """Return the verdict, with what fails or is missing."""
    is_load_alone = all(answer.question in _OF_LOAD for answer in decision.slices)
    if decision.verdict is Outcome.PASS and is_load_alone:
        return "pass: the load run keeps its budget"
    if decision.verdict is Outcome.PASS:
        return f"pass: {decision.model} may be replaced by {_shown(decision.candidate)}"
    if decision.verdict is Outcome.FAIL:
        failed = [answer for answer in decision.slices if answer.verdict is Outcome.FAIL]
        slices = dict.fromkeys(answer.slice for answer in failed if answer.question not in _OF_LOAD)
        loads = [_question(decision, answer) for answer in failed if answer.question in _OF_LOAD]
        parts = [f"above the limit in {', '.join(slices)}"] if slices else []
        parts += [f"the load run does not keep its budget: {', '.join(loads)}"] if loads else []
        return f"fail: {'; '.join(parts)}"
    if decision.missing_hours:
        return (
            f"insufficient evidence: every question passes, but the traffic of these hours was not seen: {_hours(decision.missing_hours)}. Let it run on,"
            " or give --any-hour"
        )
    lacking = dict.fromkeys(
        _question(decision, answer) if answer.question in _OF_LOAD else answer.slice
        for answer in decision.slices
        if answer.verdict is Outcome.INSUFFICIENT
    )
    more = "more than anybody can wait for" if decision.more is None else f"about {decision.more:,} more"
    if is_load_alone:
        return f"insufficient evidence: {', '.join(lacking)}; the load run needs {more} requests: give it a longer --sustain"
    return f"insufficient evidence: {', '.join(lacking)}; the slice that lacks most needs {more}"


def junit(decision: Decision) -> bytes:
    """Return the decision as JUnit XML: a test case for each question of each slice; what is insufficient is an error."""
    verdicts = [answer.verdict for answer in decision.slices]
    suite = ET.Element(
        "testsuite",
        name=_SECTION,
        tests=str(len(verdicts)),
        failures=str(verdicts.count(Outcome.FAIL)),
        errors=str(verdicts.count(Outcome.INSUFFICIENT)),
        timestamp=decision.checked_at.isoformat(timespec="seconds"),
    )
    properties = ET.SubElement(suite, "properties")
    named = (
        ("model", decision.model),
        ("candidate", decision.candidate),
        ("verdict", decision.verdict.value),
    )
    for key, value in (*named, *(("not judged", reason) for reason in decision.not_judged)):
        ET.SubElement(properties, "property", name=key, value=plain(value))
    suite.extend(_case(decision, answer) for answer in decision.slices)
    ET.indent(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(suite, encoding="unicode")}\n'.encode()


def _case(decision: Decision, answer: SliceAnswer) -> ET.Element:
    name = f"{answer.slice}: {_question(decision, answer)}"
    case = ET.Element("testcase", classname=_SECTION, name=plain(name))
    text = f"{_mean(answer)} of {answer.n}, limit {_limit(answer)}"
    if answer.verdict is Outcome.FAIL:
        ET.SubElement(case, "failure", type="fail", message=text)
    elif answer.verdict is Outcome.INSUFFICIENT:
        ET.SubElement(case, "error", type="insufficient", message=f"{text}; missing: {_missing(answer)}")
    return case


def _question(decision: Decision, answer: SliceAnswer) -> str:
    """Return the question of an answer, with the file where it is about speed and several files serve."""
    file = ""
    if decision.routes and decision.load and answer.question in _OF_LOAD:
        loads = (decision.load, *decision.routes)
        file = next(f" of {load.file}" for load in loads if load.slice == answer.slice)
    return f"{_ASKED[answer.question]}{file}"


def _shown(candidate: str) -> str:
    """Return the digests of a candidate and of its routes, short enough to be read."""
    texts = [f"{digest[:_READABLE]} for {name}" for name, digest in _DIGEST.findall(candidate)]
    return candidate.partition(" ")[0][:_READABLE] + (f", with {' and '.join(texts)}" if texts else "")


def _hours(hours: Sequence[int]) -> str:
    """Return hours of the day as spans: `0-6, 9, 22-23`."""
    spans: list[list[int]] = []
    for hour in hours:
        if spans and hour == spans[-1][-1] + 1:
            spans[-1].append(hour)
        else:
            spans.append([hour])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _span(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _missing(answer: SliceAnswer, elapsed_s: float | None = None) -> str:
    if answer.verdict is not Outcome.INSUFFICIENT:
        return ""
    if answer.more is None:
        return "cannot be told: the mean is at the limit"
    time = ""
    if elapsed_s is not None:
        time = (
            f", {_span(answer.more * elapsed_s / answer.n)} at this rate" if answer.n else ", and none came"
        )
    return f"about {answer.more:,} more{time}"


def _mean(answer: SliceAnswer) -> str:
    if answer.mean is None:
        return "-"
    return f"{_figure(answer, answer.mean)} [{_figure(answer, answer.low)}, {_figure(answer, answer.high)}]"


def _limit(answer: SliceAnswer) -> str:
    return f"{'>=' if answer.question is Kind.THROUGHPUT else '<'} {_figure(answer, answer.limit)}"


def _figure(answer: SliceAnswer, value: float) -> str:
    if answer.question is Kind.DIVERGENCE:
        return f"{value:.3g}"
    if answer.question in _LATENCIES:
        return _milliseconds(value)
    if answer.question is Kind.THROUGHPUT:
        return f"{value:,.3g} /s"
    return f"{100 * value:.3g} %" if abs(value) >= _SHOWN else "0 %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"


def _speed(load: Load) -> str:
    """Return the figures of a load run in a sentence."""
    if not (load.n or load.p99_s or load.throughput_per_s):
        return f"load run of {load.file}: no input is in its slice, so its speed was not measured"
    times = [
        f"{name} p50 {_milliseconds(p50)}, p99 {_milliseconds(p99)}"
        for name, p50, p99 in (
            ("latency", load.p50_s, load.p99_s),
            ("processor time", load.cpu_p50_s, load.cpu_p99_s),
        )
        if p50 is not None and p99 is not None
    ]
    rate = [] if load.throughput_per_s is None else [f"{load.throughput_per_s:,.0f} requests per second"]
    requests = f"{load.n:,} requests, " if load.n else ""
    return f"load run of {load.file}, {requests}{load.source}: {'; '.join([*times, *rate])}"
