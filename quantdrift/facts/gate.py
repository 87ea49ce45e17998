"""The decision of the gate about a candidate: records that are shown, stored and sent."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum

import msgspec

from quantdrift.core.slices import ALL
from quantdrift.core.token_histogram import TokenQuantiles


class Outcome(StrEnum):
    """What the gate says of a question, a slice or a candidate."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    INSUFFICIENT = "insufficient"


class Kind(StrEnum):
    """What a question is about."""

    FLIPS = "flips"
    HARM = "harm"
    ACCURACY = "accuracy"
    DIVERGENCE = "divergence"
    CHANGED_TOKENS = "changed-tokens"
    BROKEN = "broken-answers"
    UNLIKELY = "unlikely-tokens"
    LATENCY = "latency"
    LATENCY_P95 = "latency-p95"
    THROUGHPUT = "throughput"
    ERRORS = "errors"


class SliceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question about one slice, as it is shown, stored and sent.

    Parameters
    ----------
    slice
        Name of the slice.
    question
        What was asked.
    verdict, n, mean, low, high, limit, more
        As of `Answer`.
    """

    slice: str
    question: Kind
    verdict: Outcome
    n: int
    mean: float | None
    low: float
    high: float
    limit: float
    more: int | None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a load run of one model.

    Parameters
    ----------
    source
        The file of the figures, or the device that ran the model.
    file
        The model's file.
    slice
        The slice that it serves: of a route; `all`: of the candidate itself.
    n
        Requests; 0: the file does not say.
    p50_s, p95_s, p99_s
        Latency by the clock, in seconds; None: not in the file.
    cpu_p50_s, cpu_p99_s
        Processor time of a request, of all threads of the command; None: it was not measured here.
    throughput_per_s
        Requests per second, of the median round; None: not in the file.
    error_share
        Share of the requests without an answer; None: not in the file.
    """

    source: str
    file: str = ""
    slice: str = ALL
    n: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    cpu_p50_s: float | None = None
    cpu_p99_s: float | None = None
    throughput_per_s: float | None = None
    error_share: float | None = None


class LoadRun(msgspec.Struct, frozen=True, kw_only=True):
    """The load runs of a candidate and of its routes, with the answers to the questions about them.

    Parameters
    ----------
    load
        The figures of the candidate.
    answers
        For all requests that a model serves: those of the candidate are of the slice `all`, those of a route of its slice. `mean`,
        `low`, `high` and `limit` are seconds, or requests per second.
    routes
        The figures of the routes.
    """

    load: Load
    answers: tuple[SliceAnswer, ...]
    routes: tuple[Load, ...] = ()

    @classmethod
    def joined(cls, runs: "Sequence[LoadRun]") -> "LoadRun":
        """Return the runs of a candidate, which is the first, and of its routes as one."""
        return cls(
            load=runs[0].load,
            answers=tuple(answer for run in runs for answer in run.answers),
            routes=tuple(run.load for run in runs[1:]),
        )


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a candidate.

    Parameters
    ----------
    verdict
        Pass, fail or insufficient.
    model
        The model's name.
    candidate
        Digest of the candidate: `sha256:...`.
    more
        About how many more groups the slice needs that needs the most: 0 where it is decided, None: more than anybody can wait for.
    checked_at
        When it was judged; aware, UTC.
    load
        Figures of the candidate's load run; None: none was asked for.
    routes
        Those of the routes' load runs.
    not_judged
        Slices that were left out, and why, in words.
    n_copies, n_calibrated
        Recorded items that are copies of others, which count once, and that do not count because the candidate was calibrated on them.
    burst
        How many items in a row, or exchanges of live traffic, are one observation, because they are alike; 1: they are not.
    burst_of
        The attribute whose values tell bursts apart; empty: their order does.
    missing_hours
        Hours of the day whose traffic was not seen and that hold up a pass; empty: none do.
    tokens
        Of a language model: tokens that were scored, by the name of the slice.
    divergence_of_tokens
        Quantiles of the divergence over them, by the name of the slice.
    """

    verdict: Outcome
    model: str
    candidate: str
    slices: tuple[SliceAnswer, ...]
    more: int | None
    checked_at: datetime
    load: Load | None = None
    routes: tuple[Load, ...] = ()
    not_judged: tuple[str, ...] = ()
    n_copies: int = 0
    n_calibrated: int = 0
    burst: int = 1
    burst_of: str = ""
    missing_hours: tuple[int, ...] = ()
    tokens: dict[str, int] = {}
    divergence_of_tokens: dict[str, TokenQuantiles] = {}

    def without_hours(self, hours: Iterable[int]) -> "Decision":
        """Return the decision where the traffic of some hours of the day was not seen: a pass waits for them."""
        missing = tuple(sorted(hours))
        if self.verdict is not Outcome.PASS or not missing:
            return self
        return msgspec.structs.replace(self, verdict=Outcome.INSUFFICIENT, missing_hours=missing)


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate on live traffic knows.

    Parameters
    ----------
    id
        Number of the gate.
    decision
        The decision so far.
    seen, refused, unusable, problem
        Exchanges that were judged, of these those that the candidate could not answer, those that could not be used, and why the last
        one could not.
    elapsed_s
        Time since it began.
    unlabelled, forgotten
        Exchanges that wait for a label, and that were forgotten meanwhile, where labels are asked for.
    interrupted
        Somebody stopped it before there was a verdict.
    hours
        Hours of the day of which exchanges were counted.
    in_bursts, observations
        Exchanges that come in bursts, and how many observations they count as; 0: they do not.
    """

    id: int
    decision: Decision
    seen: int
    refused: int
    unusable: int
    problem: str
    elapsed_s: float
    unlabelled: int = 0
    forgotten: int = 0
    interrupted: bool = False
    hours: tuple[int, ...] = ()
    in_bursts: int = 0
    observations: int = 0
