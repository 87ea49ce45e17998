"""Alerts, reasons and sentences by case, for the page of texts that is reviewed: `tests/unit/alert_texts.txt`.

`python -m tests.support.monitor.alert_texts` writes that page again. Read it as somebody who is woken at three, and who learned
English at school.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Monitor
from quantdrift.core.records import UNVERIFIED, Metric, Side, Suspect, Verdict
from quantdrift.core.slices import ALL
from quantdrift.core.tasks import MEASURES, Task
from quantdrift.core.text import plain_lines
from quantdrift.drift.detectors.protocol import CHANGE
from quantdrift.drift.watch import Phase
from quantdrift.facts.estimate import Change, Estimate
from quantdrift.facts.events import AlertEvent, NoiseEvent
from quantdrift.facts.explanation import Explanation
from quantdrift.facts.figures import Figure, FigureName, Subject, period
from quantdrift.facts.incidents import Incident, IncidentState, Mitigation, StoryEvent, StoryKind
from quantdrift.facts.speed import ItemTimes, Times
from quantdrift.facts.status import said
from quantdrift.facts.words import first_screen
from quantdrift.facts.words.alert import RETURNED, text_of
from quantdrift.facts.words.cluster import mostly, sets_apart
from quantdrift.facts.words.comparison import compared
from quantdrift.facts.words.first_screen import SliceShare
from quantdrift.facts.words.happened import happened
from quantdrift.facts.words.incident import headline, mitigated_sentence, story_sentence, unknown_sentence
from quantdrift.facts.words.labels import accuracy, lost, not_labelled, outcome
from quantdrift.facts.words.noise import advice, noise_line
from quantdrift.facts.words.size import size
from quantdrift.facts.words.speed import speed
from quantdrift.facts.words.steps import Ways
from quantdrift.facts.words.verdict import fewer_samples, too_noisy
from quantdrift.monitor.fold.loss import RecentCounts
from quantdrift.monitor.fold.verdict import SliceStatus, judge
from tests.support.monitor.alert_cases import alert, event_with
from tests.support.monitor.fold_stream import ALL_ID

PAGE: Final = Path(__file__).parents[2] / "unit" / "alert_texts.txt"
WAYS: Final = Ways(
    alert_id=12,
    diagnose="quantdrift diagnose 12 --candidate FILE --inputs FOLDER",
    repair="quantdrift repair 12 --candidate FILE --inputs FOLDER --out REPAIRED",
)
"""What can be done in an installation with an ONNX file and a slice by header."""
CLUSTER: Final = {
    "id": 7,
    "traits": [
        {"label": "microphone=m3", "lift": 10.9, "share": 1.0, "count": 54, "p_adjusted": 1e-9},
        {"label": "length>=100", "lift": 2.04, "share": 0.41, "count": 22, "p_adjusted": 1e-3},
    ],
    "apart": [{"feature": "norm", "inside": 9.1, "elsewhere": 1.02}],
}
PAGED: dict[str, Any] = {
    "changed": 0.053,
    "changed_low": 0.031,
    "changed_high": 0.083,
    "n_answers": 254,
    "requests_per_day": 3_400.0,
    "basis": "at the rate of the last 7 minutes",
}
PEOPLE: dict[str, Any] = {**PAGED, "n_answers": 395, "n_people": 204}
COMPARED = Explanation(
    compared_with="the week before the onset without its last hour",
    n_window_before=400,
    n_window_after=254,
    **PAGED,
)
DAMAGE = msgspec.structs.replace(
    COMPARED,
    cause="damage",
    damage=0.049,
    damage_se=0.008,
    shift=0.0004,
    shift_se=0.002,
    low_margin_before=0.08,
    low_margin_after=0.09,
    divergence_damage=0.09,
    divergence_damage_se=0.01,
    divergence_shift=3.68e-11,
    divergence_shift_se=0.001,
    aggregate_cause="undecided",
    aggregate_move=0.0007,
    aggregate_move_se=0.001,
    aggregate_within=0.0002,
    aggregate_within_se=0.0005,
    aggregate_mix=-7.75e-05,
    aggregate_mix_se=0.0001,
    moved=("box_shift", "topk_overlap", "same"),
    moved_before=(0.105, 0.99999, 1.0),
    moved_after=(0.305, 0.99949, 1.0 - 1e-12),
    n_measures=1,
)
SHIFT = msgspec.structs.replace(
    COMPARED,
    cause="input_shift",
    damage=0.0002,
    damage_se=0.003,
    shift=0.048,
    shift_se=0.009,
    low_margin_before=0.08,
    low_margin_after=0.41,
)
UNSEEN = msgspec.structs.replace(
    COMPARED,
    cause="unseen",
    damage=0.0,
    damage_se=0.003,
    shift=0.001,
    shift_se=0.002,
    unseen=0.047,
    unseen_se=0.008,
    changes=("sidecar pod-7, first seen 2026-03-01 11:58 UTC, 92 % of the slice since",),
)
BOTH = msgspec.structs.replace(
    COMPARED,
    cause="both",
    damage=0.031,
    damage_se=0.006,
    shift=0.018,
    shift_se=0.005,
    not_finite=0.02,
    explains=("all",),
)
TOO_FEW = Explanation(
    begin="first_seen",
    cause="too_few",
    aggregate_cause="too_few",
    n_window_before=9,
    n_window_after=261,
    compared_with="the week before the onset",
)
RELEASED = Explanation(
    begin="new_version",
    cause="undecided",
    changes=("candidate version 1 (this one), first seen 2026-03-01 11:40 UTC",),
    compared_version="fp8-0",
    **PAGED,
)
TAIL_LEVEL: dict[str, Any] = {
    "detector": "tail",
    "metric": "divergence",
    "unit": "nat",
    "measure": "KL",
    "before": 0.4,
    "after": 1.1,
    "tail_level": 0.5,
    "tail_before": 0.01,
    "tail_after": 0.031,
    "budget": 0.04,
    "aggregate_mean": 0.0055,
    "aggregate_accepted": 0.04,
    "changed": 0.004,
    "changed_low": 0.001,
    "n_answers": 254,
    "requests_per_day": 3_400.0,
}
ENDED: dict[str, Any] = {
    "from_verdict": "firing",
    "verdict": "ok",
    "onset": None,
    "evidence": 12_345.0,
    "threshold": 10_000.0,
}
REPLACED: dict[str, Any] = {
    "verdict": "unknown",
    "ended": "replaced",
    "last_seen": "2026-03-01T13:04:00+00:00",
    "serving": ["3"],
}


def read(**flat: Any) -> AlertEvent:
    """Return an alert of flips from 2026-03-01 12:00 UTC on, in its flat form, with `flat` in place of its own values."""
    usual: dict[str, Any] = {
        "after": 0.053,
        "before": 0.004,
        "onset": "2026-03-01T12:00:00+00:00",
        "n_since_onset": 254,
        "n_history": 400,
        "begin": "changed",
        "aggregate_mean": 0.0058,
        "aggregate_accepted": 0.01,
        "evidence": 16.2,
        **PAGED,
    }
    return event_with(**usual | flat)


def _divergence(**flat: Any) -> AlertEvent:
    return read(
        **{
            "metric": "divergence",
            "unit": "",
            "after": 0.098,
            "before": 0.01,
            "budget": 0.04,
            "aggregate_mean": 0.0055,
            "aggregate_accepted": 0.04,
            "changed": 0.012,
            "changed_low": 0.006,
        }
        | flat
    )


def _slow(suspect: Suspect, **flat: Any) -> AlertEvent:
    return alert(
        metric=Metric.LATENCY,
        verdict=Verdict.WARNING,
        before=0.002,
        after=0.12,
        n_after=84,
        suspect=suspect,
        found=Explanation(**flat),
    ).alert


def _without(flat: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if key != name}


def _replace(event: AlertEvent, **more: Any) -> AlertEvent:
    return AlertEvent.read(event.attributes() | more)


_DAMAGE = alert(found=DAMAGE).alert
CASES: dict[str, tuple[AlertEvent, Ways]] = {
    "damage in a slice with a history": (_DAMAGE, WAYS),
    "people are known": (alert(found=msgspec.structs.replace(DAMAGE, **PEOPLE)).alert, WAYS),
    "one person": (read(**PAGED | {"n_answers": 12, "n_people": 1, "n_since_onset": 1}), WAYS),
    "a proxy cannot recognise the slice": (_DAMAGE, msgspec.structs.replace(WAYS, can_route=False)),
    "no command can look into the model": (_DAMAGE, Ways(alert_id=12)),
    "a name that a terminal would not show as it is": (_replace(_DAMAGE, slice="scanner=\x1b[31m"), WAYS),
    "a name with spaces": (_replace(_DAMAGE, slice="customer=fir & oak"), WAYS),
    "a learned slice": (
        _replace(
            _DAMAGE,
            slice="cluster=7",
            predicate="cluster 7",
            sets_apart=sets_apart(CLUSTER),
            mostly=mostly(CLUSTER),
        ),
        msgspec.structs.replace(WAYS, can_route=False),
    ),
    "input shift": (alert(found=SHIFT).alert, WAYS),
    "new traffic": (alert(found=UNSEEN).alert, WAYS),
    "several causes": (alert(found=BOTH).alert, WAYS),
    "causes that cannot be told apart": (
        alert(found=msgspec.structs.replace(DAMAGE, cause="undecided")).alert,
        WAYS,
    ),
    "bad since it was first seen": (alert(n_before=8, before=1.0, found=TOO_FEW).alert, WAYS),
    "bad since it was first seen, and another version served before": (
        alert(n_before=0, before=None, found=TOO_FEW).alert,
        msgspec.structs.replace(WAYS, previous="fp8-0"),
    ),
    "a new version": (
        alert(n_before=0, before=None, found=RELEASED).alert,
        msgspec.structs.replace(WAYS, previous="fp8-0"),
    ),
    "a new version, and none is known before it": (
        alert(n_before=0, before=None, found=RELEASED).alert,
        WAYS,
    ),
    "too little known": (
        alert(n_after=12, found=Explanation(cause="too_few", n_window_before=31, n_window_after=6)).alert,
        WAYS,
    ),
    "a page that could not be explained": (
        alert(found=Explanation(unexplained="the database did not answer in time")).alert,
        WAYS,
    ),
    "a ticket": (alert(verdict=Verdict.WARNING, found=DAMAGE).alert, WAYS),
    "a ticket that could not be explained": (
        alert(
            verdict=Verdict.WARNING, found=Explanation(unexplained="the database did not answer in time")
        ).alert,
        WAYS,
    ),
    "a ticket about senders that nobody checked": (
        _replace(alert(verdict=Verdict.WARNING, found=DAMAGE).alert, version=f"1{UNVERIFIED}"),
        WAYS,
    ),
    "explained by a smaller slice": (
        alert(
            slice_id=ALL_ID,
            aggregate=Verdict.FIRING,
            found=Explanation(explained_by="scanner=faint", **PAGED),
        ).alert,
        WAYS,
    ),
    "an alert about all traffic": (
        alert(slice_id=ALL_ID, aggregate=Verdict.FIRING, found=Explanation(**PAGED)).alert,
        WAYS,
    ),
    "all traffic is unknown": (alert(aggregate=Verdict.UNKNOWN, found=COMPARED).alert, WAYS),
    "all traffic is above its budget, too": (
        alert(
            aggregate_mean=0.058,
            budget=0.05,
            after=0.2,
            found=Explanation(**PAGED | {"changed": 0.2, "changed_low": 0.14}),
        ).alert,
        WAYS,
    ),
    "all traffic alerts, too": (
        alert(aggregate=Verdict.FIRING, aggregate_mean=0.03, found=COMPARED).alert,
        WAYS,
    ),
    "the mean of all traffic is not known": (alert(aggregate_mean=None, found=COMPARED).alert, WAYS),
    "noise is allowed for": (read(noise=0.003), WAYS),
    "above the budget for a part of the time": (read(after=0.009, changed=0.009, changed_low=0.006), WAYS),
    "the least share is below the budget": (read(after=0.013, changed=0.013, changed_low=0.008), WAYS),
    "less than one answer a day": (read(requests_per_day=4.0, basis="at the rate of the last 5 hours"), WAYS),
    "a day and more is known": (AlertEvent.read(_without(_DAMAGE.attributes(), "basis")), WAYS),
    "outputs that are no numbers": (
        alert(found=msgspec.structs.replace(DAMAGE, not_finite=0.02, not_finite_before=0.0)).alert,
        WAYS,
    ),
    "the configuration is in doubt": (
        alert(found=msgspec.structs.replace(DAMAGE, doubt="they are probabilities")).alert,
        WAYS,
    ),
    "a learned baseline decided": (
        alert(
            kind=CHANGE.kind,
            after=0.009,
            found=msgspec.structs.replace(COMPARED, changed=0.009, changed_low=0.006),
        ).alert,
        WAYS,
    ),
    "the mean divergence decided, and answers changed, too": (
        alert(
            metric=Metric.DIVERGENCE,
            after=0.098,
            aggregate_mean=0.0055,
            found=Explanation(**PAGED | {"changed": 0.44, "changed_low": 0.38, "requests_per_day": 900.0}),
        ).alert,
        WAYS,
    ),
    "the worst outputs decided": (read(**TAIL_LEVEL), WAYS),
    "the worst outputs decided, and no level is known": (
        read(**TAIL_LEVEL | {"tail_level": None, "tail_before": None, "tail_after": None}),
        WAYS,
    ),
    "an object detector": (_divergence(task="detection", measure="quality loss", build="network"), WAYS),
    "a regression": (_divergence(task="regression", measure="relative error", build="network"), WAYS),
    "an embedding": (_divergence(task="embedding", measure="cosine distance", build="network"), WAYS),
    "a ranking": (read(task="ranking", build="network"), WAYS),
    **{f"slow, and the suspect is: {suspect}": (_slow(suspect), WAYS) for suspect in Suspect},
    "slow, and a pod is new": (
        _slow(Suspect.ENGINE, changes=("sidecar: pod-7, since 2026-03-01 11:40 (before: pod-6)",)),
        WAYS,
    ),
    "slower than learned": (
        _replace(
            _slow(Suspect.TRAFFIC, items_before=1.0, items_after=6.0, slow_elsewhere=0.01, n_elsewhere=900),
            detector="growth",
        ),
        WAYS,
    ),
    "trees": (alert(found=msgspec.structs.replace(DAMAGE, build="trees")).alert, Ways(alert_id=12)),
    "a language model": (
        _replace(alert(found=msgspec.structs.replace(DAMAGE, build="language")).alert, task="generation"),
        Ways(alert_id=12),
    ),
    **{
        f"generated text, of which is known: {name}": (
            _divergence(
                task="generation",
                measure="divergence per token",
                unit="nat",
                build="language",
                divergence_is=MEASURES[Task.GENERATION].of(n).name,
            ),
            Ways(alert_id=12),
        )
        for name, n in (("KL", {"kl": 40}), ("regret", {"regret": 40}), ("both", {"kl": 10, "regret": 30}))
    },
    "a model that only a server has": (
        alert(found=msgspec.structs.replace(DAMAGE, build="other")).alert,
        Ways(alert_id=12),
    ),
    "recovered": (read(**ENDED), WAYS),
    "recovered from a mean divergence": (
        read(**ENDED | {"metric": "divergence", "measure": "KL", "unit": "nat"}),
        WAYS,
    ),
    "recovered to its learned baseline": (read(**ENDED | {"detector": "change"}), WAYS),
    "fast again": (read(**ENDED | {"metric": "latency", "latency_budget_s": 0.25}), WAYS),
    "recovered in its worst outputs": (read(**ENDED | {"metric": "divergence", "detector": "tail"}), WAYS),
    "not compared any more": (read(**ENDED | {"verdict": "unknown", "ended": "retired"}), WAYS),
    "its version was replaced": (read(**ENDED | REPLACED), WAYS),
    "its version was replaced by two": (read(**ENDED | REPLACED | {"serving": ["3", "4"]}), WAYS),
    "its version is compared with another reference": (read(**ENDED | REPLACED | {"serving": ["1"]}), WAYS),
    "a person closed it": (
        read(
            **ENDED
            | {"verdict": "unknown", "ended": "closed", "reason": "closed by ada: goes to FP32 since 03:20"}
        ),
        WAYS,
    ),
    "its version serves again": (read(from_verdict="unknown", reason=RETURNED), WAYS),
}


_COUNTS: Final = RecentCounts(offered=1000, taken=400, lost=0)
_WELL: Final = SliceStatus(
    phase=Phase.WATCHING, evidence_ratio=0.0, n_groups=5000, silent_s=1.0, counts=_COUNTS
)
_STATUSES: dict[str, dict[str, Any]] = {
    "OK": {},
    "OK, and its baseline is learned": {"n_missing": 1234},
    "replaced": {"replaced": True},
    "firing, and sampling was paused": {
        "phase": Phase.FIRING,
        "alarm": "the share of changed answers is above the budget",
        "paused": "by ada since 2026-03-01 12:10 UTC",
    },
    "paused": {"paused": "by ada since 2026-03-01 12:10 UTC"},
    "closed": {"closed": "closed by ada: goes to FP32 since 03:20"},
    "not measured": {"n_items": 80, "n_unmeasured": 70},
    "sampled texts": {"n_items": 80, "n_unmeasured": 70, "task": Task.GENERATION},
    "too few": {"n_groups": 260},
    "undeclared sessions": {"session_attribute": "header.x-user"},
    "undeclared sessions that no header has": {"session_attribute": "json.user"},
    "samples are lost": {"counts": msgspec.structs.replace(_COUNTS, lost=90)},
    "samples expire": {"counts": msgspec.structs.replace(_COUNTS, expired=90)},
    "a sidecar was lost": {"counts": msgspec.structs.replace(_COUNTS, unaccounted=90)},
    "samples cannot be compared": {
        "counts": msgspec.structs.replace(_COUNTS, quarantined=90, quarantined_for="shape")
    },
    "stale": {"silent_s": 1e6},
    "undecided": {"evidence_ratio": 0.5},
    "its share fell": {"fallen": fewer_samples(0.04, 0.01, 0.12, 0.75)},
    "noise": {"noise": too_noisy("reference", "flip", proved=True)},
    "noise that may be": {
        "noise": too_noisy("candidate", "divergence", proved=False, where=" in this slice")
    },
    "people are counted": {"n_groups": 260, "has_people": True},
    "OK, and its baseline lacks people": {"n_missing": 1234, "has_people": True},
    "firing, and the signal was not recorded": {"phase": Phase.FIRING},
}


_AT: Final = datetime(2026, 3, 1, 12, tzinfo=UTC)


def _figure(name: FigureName, value: float, low: float | None = None, high: float | None = None) -> Figure:
    return Figure(
        name=name,
        value=value,
        low=low,
        high=high,
        n=254,
        window=period(_AT, _AT + timedelta(days=1)),
        of=Subject(model="digits", version="int8-7", slice="scanner=faint"),
        as_of=_AT,
    )


_SHARE: Final = Estimate(mean=0.053, low=0.031, high=0.083)
_FAINT: Final = SliceShare(
    where="scanner=faint",
    share=_SHARE,
    n_answers=254,
    budget=0.01,
    changed=_figure(FigureName.CHANGED_PER_DAY, 180.0),
    n_people=146,
    traffic=0.04,
)
_ALL: Final = SliceShare(
    where="all traffic", share=Estimate(mean=0.004, low=0.003, high=0.0052), n_answers=20_000
)
_BARE: Final = SliceShare(where="scanner=faint", share=None, n_answers=0)
_TITLE: Final = "digits int8-7"
_LOSS: Final = Estimate(mean=0.041, low=0.02, high=0.06)
_TIMES: Final = Times(part="answer", n=1_234, median=0.1, p99=0.4, slower=0.013)
_ITEM: Final = ItemTimes(
    model="digits", version="int8-7", device="cpu", items=400, reference=0.02, candidate=0.005
)
_FINE, _BETTER, _WORSE = Change.UNCLEAR, Change.BETTER, Change.WORSE


def _compared(changes: Sequence[Change], whole: Change | None, **more: Any) -> str:
    slices = [(f"scanner={name}", change) for name, change in zip("abcdef", changes, strict=False)]
    return compared(_TITLE, "int8-6", slices, whole, **{"shares": (0.01, 0.024)} | more)


def _answer(verdict: Verdict, names: Sequence[str] = (), **more: Any) -> str:
    return first_screen.answer(verdict, _TITLE, names, **more)


def _ended(**more: Any) -> str:
    usual: dict[str, Any] = {
        "version": "int8-7",
        "where": "scanner=faint",
        "metric": Metric.FLIP,
        "begin": _AT,
        "end": None,
        "ended": "",
        "share": _figure(FigureName.CHANGED_SHARE, 0.053, 0.031, 0.083),
    }
    return first_screen.alert_line(**usual | more)


def incident(state: IncidentState = IncidentState.OPEN, **more: Any) -> Incident:
    """Return an incident of a slice."""
    usual: dict[str, Any] = {
        "id": 3,
        "model": "digits",
        "version": "int8-7",
        "version_id": 1,
        "severity": "firing",
        "slices": ("scanner=faint",),
        "slice_ids": (ALL_ID,),
        "state": state,
        "mitigation": None,
        "said_by": "",
        "reason": "",
        "began_at": _AT,
        "opened_at": _AT + timedelta(minutes=7),
        "ended_at": None if state is IncidentState.OPEN else _AT + timedelta(days=1),
        "changed": _figure(FigureName.CHANGED, 1_900.0, 1_500.0, 2_300.0),
        "people": _figure(FigureName.PEOPLE_AFFECTED, 146.0, 146.0),
        "alerts": (12,),
    }
    return Incident(**usual | more)


_BY_ADA: Final = {"said_by": "ada", "reason": "scanner=faint goes to the FP32 model"}
_MITIGATED: Final = IncidentState.MITIGATED
_NOISE: Final = NoiseEvent(
    model="digits",
    version="int8-7",
    reference="d" * 64,
    side=Side.REFERENCE,
    metric=Metric.FLIP,
    measure="changed answers",
    unit="",
    exceeds=True,
    mean=0.012,
    low=0.008,
    high=0.017,
    n_recent=900,
    budget=0.01,
    limit=0.005,
    added=0.01,
    advice="",
)


SENTENCES: dict[str, str] = {
    **{
        f"an incident: {name}": headline(incident)
        for name, incident in {
            "open": incident(),
            "open, and nobody is named": incident(people=None),
            "open, and nothing is counted yet": incident(changed=None, people=None),
            "open, and requests have a price": incident(
                cost=msgspec.structs.replace(_figure(FigureName.COST, 3_800.0, 3_000.0, 4_600.0), unit="EUR")
            ),
            "its version was replaced": incident(
                _MITIGATED, mitigation=Mitigation.REPLACED, serving=("int8-8",)
            ),
            "its version was replaced by two": incident(
                _MITIGATED, mitigation=Mitigation.REPLACED, serving=("int8-8", "int8-9")
            ),
            "its slice was routed away": incident(_MITIGATED, mitigation=Mitigation.ROUTED),
            "a person mitigated it": incident(_MITIGATED, mitigation=Mitigation.REPORTED, **_BY_ADA),
            "recovered": incident(IncidentState.RECOVERED),
            "a person closed it": incident(IncidentState.CLOSED, **_BY_ADA),
            "its slice is not compared any more": incident(IncidentState.CLOSED),
        }.items()
    },
    "an incident without labels": unknown_sentence(incident()),
    "an alert of a mitigated incident: routed away": mitigated_sentence("int8-7", "scanner=faint", "routed"),
    "an alert of a mitigated incident: a person says so": mitigated_sentence(
        "int8-7", "scanner=faint", "reported", "ada: scanner=faint goes to the FP32 model"
    ),
    **{
        f"in the story of an incident: {kind}": story_sentence(
            StoryEvent(at=_AT, kind=kind, who=who, text=what, alert=alert_id)
        )
        for kind, who, what, alert_id in (
            (StoryKind.ONSET, "", "scanner=faint", 12),
            (StoryKind.RELEASE, "", "int8-8", None),
            (StoryKind.ACK, "ada", "I look at it", 12),
        )
    },
    **{
        f"noise: {name}": f"{noise_line(event)}\n{advice(event.side, exceeds=event.exceeds, of_slice=event.slice != ALL)}"
        for name, event in {
            "of the reference": _NOISE,
            "of the candidate in a slice": msgspec.structs.replace(
                _NOISE, side=Side.CANDIDATE, slice="scanner=faint"
            ),
            "it is over": msgspec.structs.replace(_NOISE, exceeds=False, mean=0.002, low=0.001, high=0.004),
        }.items()
    },
    **{
        f"is it good enough: {metric} {'above its budget' if by_budget else 'above its baseline'}": _answer(
            Verdict.FIRING, ["scanner=faint"], what=first_screen.wrong(_TITLE, (metric, by_budget))
        )
        for metric in (Metric.FLIP, Metric.DIVERGENCE, Metric.LATENCY)
        for by_budget in (True, False)
    },
    "is it good enough: above its budget for a part of the time": _answer(
        Verdict.FIRING,
        ["scanner=faint"],
        what=first_screen.wrong(_TITLE, (Metric.FLIP, True), part_of_time=True),
    ),
    "is it good enough: several slices": _answer(Verdict.FIRING, ["scanner=faint", "all traffic"]),
    "is it good enough: a ticket": _answer(Verdict.WARNING, ["scanner=faint"]),
    "is it good enough: yes": _answer(Verdict.OK),
    "is it good enough: yes, as far as it is known": _answer(Verdict.OK, n_unknown=1),
    "is it good enough: not known of some slices": _answer(Verdict.UNKNOWN, n_unknown=7),
    "is it good enough: not known at all": _answer(
        Verdict.UNKNOWN, n_unknown=7, why="needs 40 more exchanges"
    ),
    "is it good enough: nothing compared": _answer(Verdict.UNKNOWN, why=first_screen.NOTHING_COMPARED),
    **{f"first step: {said(verdict)}": first_screen.first_step(verdict) for verdict in Verdict},
    "how many answers": first_screen.affected([_FAINT, _ALL]),
    "how large: when it paged, and now": size(
        _figure(FigureName.CHANGED_SHARE, 0.33), _figure(FigureName.CHANGED_SHARE, 0.19)
    ),
    "how large: when it paged": size(_figure(FigureName.CHANGED_SHARE, 0.33), None),
    "how large: a ticket that is over": size(
        _figure(FigureName.CHANGED_SHARE, 0.33),
        _figure(FigureName.CHANGED_SHARE, 0.19),
        is_page=False,
        is_over=True,
    ),
    "how large: now": size(None, _figure(FigureName.CHANGED_SHARE, 0.19)),
    "how large: not known": size(None, None),
    "how many answers so far": first_screen.affected(
        [msgspec.structs.replace(_FAINT, changed=_figure(FigureName.CHANGED, 12.0))]
    ),
    "how many answers: too many slices": first_screen.affected([_FAINT, *[_ALL] * 4]),
    "how many answers: not known": first_screen.affected([_BARE]),
    "confidence: an alert": first_screen.confidence(_FAINT, alerts=True),
    "confidence: no alert": first_screen.confidence(_ALL, alerts=False),
    "confidence: too little": first_screen.confidence(_BARE, alerts=False),
    "people": first_screen.people(146),
    "people: one": first_screen.people(1),
    "people: none is known": first_screen.people(0),
    "not known": first_screen.not_known(
        "int8-7",
        n_unknown=2,
        unlabelled=not_labelled("int8-7"),
        n_gaps=1,
        gaps=timedelta(hours=3),
        n_lost=12,
        lost=0.004,
    ),
    "not known: nothing": first_screen.not_known("int8-7"),
    "what to do: the owners": first_screen.owners(
        [("digits", "scanner=faint", "Route scanner=faint to the FP32 model.")], n_unknown=0
    ),
    "what to do: more must be compared": first_screen.owners([], n_unknown=3),
    "what to do: nothing": first_screen.owners([], n_unknown=0),
    "an alert of the period, still open": _ended(),
    "an alert of the period that ended the same day": _ended(end=_AT + timedelta(hours=2), ended="replaced"),
    "an alert of the period that ended another day": _ended(end=_AT + timedelta(days=2), ended="recovered"),
    "an alert of the period about a divergence": _ended(metric=Metric.DIVERGENCE, share=None),
    "an alert of the period about a latency": _ended(metric=Metric.LATENCY, share=None),
    "another version": first_screen.other(_SHARE, ["scanner=faint", "all traffic"]),
    "another version that was not compared": first_screen.other(None, []),
    "a comparison: worse in one slice": _compared([_WORSE, _FINE, _BETTER], _FINE),
    "a comparison: worse in many": _compared([_WORSE] * 5, _WORSE),
    "a comparison: worse over all traffic alone": _compared([_FINE] * 3, _WORSE),
    "a comparison: better": _compared([_FINE, _BETTER], _FINE),
    "a comparison: better over all traffic alone": _compared([_FINE], _BETTER),
    "a comparison: no difference": _compared([_FINE] * 6, _FINE),
    "a comparison: shares that are not known": _compared([_FINE], _FINE, shares=None),
    "a comparison: no traffic in common": _compared([], None),
    "labels: accuracy was lost": lost([("scanner=faint", 310, _LOSS), ("all", 900, _LOSS)]),
    "labels: nothing is clear": lost([("all", 900, Estimate(mean=0.002, low=-0.01, high=0.014))]),
    "labels: a loss that may be chance": accuracy(Estimate(mean=0.002, low=-0.01, high=0.014)),
    "labels: a gain": accuracy(Estimate(mean=-0.02, low=-0.03, high=-0.01)),
    "labels: too few": accuracy(Estimate(mean=0.1, low=None, high=None)),
    **{
        f"labels in a cell: {mean:+}": outcome(Estimate(mean=mean, low=mean - 0.01, high=mean + 0.01))
        for mean in (0.02, 0.0, -0.02)
    },
    "speed": speed(_TIMES, [], 0.0),
    "speed: with a budget, a learned time and both sides": speed(_TIMES, [_ITEM], 0.25, 0.11),
    "happened: a release": happened("release", "int8-7"),
    "happened: an onset": happened("onset", "alert 5"),
    "happened: an alert": happened("alert", "alert 5"),
    "happened: an acknowledgement": happened("alert ack", "alert 5"),
    "happened: a gate": happened("gate", "gate 1"),
    "happened: a note": happened("alert note", "alert 5"),
    "happened: a budget": happened("budget", "models.digits.budget.flip", None, "0.02"),
    "happened: a baseline": happened("baseline learned", "flip change"),
    "happened: another decision": happened("slices retire", "scanner=faint"),
}


def written() -> str:
    """Return the page."""
    texts = {name: plain_lines(text_of(event, ways).plain()) for name, (event, ways) in CASES.items()}
    for name, status in _STATUSES.items():
        verdict, reason = judge(msgspec.structs.replace(_WELL, **status), Monitor())
        texts[f"the verdict on a slice: {name}"] = f"{said(verdict)}: {reason}"
    texts |= SENTENCES
    return "\n\n".join(f"=== {name} ===\n{text}" for name, text in texts.items()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
