"""The gate: is a candidate good enough on every slice? Pass, fail, or insufficient evidence with what is missing.

A slice is asked one or more questions (`Question`), each "is the mean of y below a limit?":

| question | y of an item | passes |
|---|---|---|
| `flips` | 1 where candidate and reference decide differently, else 0 | mean < the budget |
| `harm` | flip of the candidate - flip of what is serving: 1 newly flipped, -1 healed, else 0 | mean < the margin |
| `accuracy` | ratio * right(reference) - right(candidate) | mean < 0 |
| `divergence` | min(divergence, cap), by weights d / cap of the value cap | mean < the budget |
| `changed-tokens` | of generated text: share of the tokens at which the first choice differs, as a weight of the value 1 | mean < the budget |
| `broken-answers` | of text that the candidate generated: 1 where the answer is broken, else 0 | mean < the budget |
| `unlikely-tokens` | of the same: share of the tokens that are among the reference's least likely, as a weight of the value 1 | mean < the budget |
| `latency` | 1 where a request takes the budget or longer (`quantdrift.release.gate.load`) | mean < 1 % |
| `throughput` | 1 where a round of requests is below the budget | mean < 50 % |

`accuracy` is MLPerf's closed division, 99 or 99.9 % of the reference's accuracy, with labels. Without labels: a decision that
agrees with the reference is as right as the reference's, so the accuracy falls by at most the flips, and `flips` with the limit
(1 - ratio) * A is sufficient (not necessary), A being a lower bound of the reference's accuracy.

The groups of a slice (exchanges or sessions, `quantdrift.drift.evidence.group`) are added up by the value that their items have. A
question passes when the upper bound of its mean has ever been below the limit, and fails when the lower bound has ever been
above it (`quantdrift.drift.evidence.few_values`); a failure outweighs a pass. Both bounds are valid at all times at once, so one may
look after every group, stop whenever one likes, and go on with more.

Levels. With alpha in all:

- *Pass*: every question of every slice must pass, each at level alpha. This needs no correction for their number. The
  null hypothesis "some question has a mean at its limit or above" is a union, and it is rejected only if all of its parts are:
  an intersection-union test. If one mean is too large, a false pass needs the bound of that one to be wrong, which has a
  probability of at most alpha. Source: Berger, Multiparameter hypothesis testing and acceptance sampling, Technometrics 24,
  1982; Berger and Hsu, Bioequivalence trials, intersection-union tests and equivalence confidence sets, Statistical Science
  11, 1996.
- *Fail*: one question is enough, so each has alpha divided by their number (Bonferroni): if all means are at most their limits, a
  false failure has a probability of at most alpha.

Assumption: given the past the mean of each group is at least (pass) or at most (fail) the limit, as for one model and traffic
that does not change; inclusion probabilities are known. A set of recorded inputs is looked at once, as a whole
(`Trial.at_once`): it may be sorted, and the sums do not depend on the order. Not counted may be what the candidate was made
from or chosen by: calibration inputs, and exchanges from before it was frozen.

Delay at alpha = 5 % and a budget of 1 %: no flip passes after 370 groups (5 %: 76, 0.1 %: 3,679); 5.4 % flips fail after 100 on
the median. At the limit itself hardly anything is ever decided, and `Trial.needed` says so.
"""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

import msgspec
import numpy as np

from quantdrift.drift.evidence.few_values import (
    Wealth,
    against_less,
    against_more,
    lower_bound,
    upper_bound,
)
from quantdrift.drift.evidence.group import ROUNDING
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.facts.gate import Decision, Kind, LoadRun, Outcome, SliceAnswer

ALPHA: Final = 0.05
MOST_NEEDED: Final = 10**7
"""More groups than that are not worth waiting for: the mean is at its limit."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a slice, whether its mean is below a limit.

    Parameters
    ----------
    kind
        What it is about.
    values
        The values that an item can have.
    quiet
        Which of them an item has if nothing is wrong: what is expected while nothing was seen.
    limit
        The mean passes below it.
    """

    kind: Kind
    values: tuple[float, ...]
    quiet: int
    limit: float

    @property
    def is_graded(self) -> bool:
        """Whether an item has a part of its second value, and not one value or the other."""
        return self.kind in {Kind.DIVERGENCE, Kind.CHANGED_TOKENS, Kind.BROKEN, Kind.UNLIKELY}

    @property
    def is_labelled(self) -> bool:
        """Whether it is asked of items whose true class is known, as of `accuracy`."""
        return self.kind is Kind.ACCURACY and len(self.values) == 4

    @classmethod
    def flips(cls, limit: float) -> "Question":
        """Return "are there fewer flips than `limit`?", in (0, 1); values: no flip, flip."""
        return cls(kind=Kind.FLIPS, values=(0.0, 1.0), quiet=0, limit=limit)

    @classmethod
    def harm(cls, margin: float) -> "Question":
        """Return "are there fewer new flips than healed ones plus `margin`?", in (0, 1); values: as before, new, healed."""
        return cls(kind=Kind.HARM, values=(0.0, 1.0, -1.0), quiet=0, limit=margin)

    @classmethod
    def divergence(cls, limit: float, cap: float) -> "Question":
        """Return "is the mean divergence below `limit`?", of divergences that count at most `cap`; values: none, `cap`.

        An item of divergence d has the weight d / cap of the value `cap`, and the rest of the value 0.
        """
        return cls(kind=Kind.DIVERGENCE, values=(0.0, cap), quiet=0, limit=limit)

    @classmethod
    def changed_tokens(cls, limit: float) -> "Question":
        """Return "is the mean share of changed tokens of an answer below `limit`?"; values: none, all of them."""
        return cls(kind=Kind.CHANGED_TOKENS, values=(0.0, 1.0), quiet=0, limit=limit)

    @classmethod
    def of_generated(cls, kind: Kind, limit: float) -> "Question":
        """Return "is the mean of what generated answers have below `limit`?", of broken answers or unlikely tokens; values: none, all."""
        return cls(kind=kind, values=(0.0, 1.0), quiet=0, limit=limit)

    @classmethod
    def accuracy_by_flips(cls, ratio: float, accuracy: float) -> "Question":
        """Return "are there so few flips that the accuracy must be above `ratio` of `accuracy`, the least of the reference?"."""
        return cls(kind=Kind.ACCURACY, values=(0.0, 1.0), quiet=0, limit=(1.0 - ratio) * accuracy)

    @classmethod
    def accuracy(cls, ratio: float) -> "Question":
        """Return "is the accuracy above `ratio` of the reference's?", in (0, 1); values: both wrong, reference alone right, candidate alone right, both right."""
        return cls(kind=Kind.ACCURACY, values=(0.0, ratio, -1.0, ratio - 1.0), quiet=3, limit=0.0)


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The first moment at which a question was decided.

    Parameters
    ----------
    n
        Groups until then.
    sums
        Sums of the weights by value, until then.
    """

    n: int
    sums: tuple[float, ...]


class QuestionEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a question.

    Parameters
    ----------
    outcome
        Pass, fail or insufficient.
    n
        Groups: until it was decided, or so far.
    mean, low, high
        The mean, and its bounds, of these groups: it passes where `high`, and fails where `low` crosses the limit. None and the
        smallest and largest value without any group.
    limit
        As of the question.
    more
        Groups that are missing, about, at the rate of flips seen so far: 0 where it is decided, None where more than
        `MOST_NEEDED` are.
    """

    outcome: Outcome
    n: int
    mean: float | None
    low: float
    high: float
    limit: float
    more: int | None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One question to one slice, with what was seen so far.

    Parameters
    ----------
    question
        What is asked.
    pass_level, fail_level
        Probabilities, in (0, 1), of a false pass and of a false failure.
    n, sums
        Groups, and the sums of their weights by value; empty: nothing yet.
    passed, failed
        When it first passed, and first failed.
    """

    question: Question
    pass_level: float
    fail_level: float
    n: int = 0
    sums: tuple[float, ...] = ()
    passed: Decided | None = None
    failed: Decided | None = None

    def after(self, groups: FloatArray) -> "Trial":
        """Return the trial after more groups, looked at after each: the same to the bit however they are cut into calls.

        Parameters
        ----------
        groups
            (n, values) the weights of each group's items by their value; their sum is in [0, 1].

        Raises
        ------
        ValueError
            Weights that are negative, or above 1 together: they would break the bound.
        """
        return self._added(groups, every=True)

    def at_once(self, groups: FloatArray) -> "Trial":
        """Return the same, looked at once, after the last: for a set whose order means nothing."""
        return self._added(groups, every=False)

    def answer(self) -> QuestionEvidence:
        """Return what is known now."""
        stop = self.failed or self.passed or Decided(n=self.n, sums=self.sums)
        outcome = Outcome.INSUFFICIENT
        if self.failed or self.passed:
            outcome = Outcome.FAIL if self.failed else Outcome.PASS
        values, sums = self._values, np.array(stop.sums or [0.0] * len(self.question.values))
        total = float(sums.sum())
        return QuestionEvidence(
            outcome=outcome,
            n=stop.n,
            mean=float((sums * values).sum()) / total if total > 0 else None,
            low=lower_bound(sums, values, self.fail_level),
            high=upper_bound(sums, values, self.pass_level),
            limit=self.question.limit,
            more=self.needed() if outcome is Outcome.INSUFFICIENT else 0,
        )

    def needed(self) -> int | None:
        """Return about how many more groups decide it if they are like those so far; None: more than `MOST_NEEDED`.

        It is the power calculation of the bound itself: the sums grow by their mean with each group until a bound crosses the
        limit. That of the passes is asked where the mean is below the limit, else that of the failures.
        """
        values = self._values
        each = np.zeros(len(values))
        if self.n:
            each[:] = np.array(self.sums) / self.n
        else:
            each[self.question.quiet] = 1.0
        sums = np.array(self.sums or (0.0,) * len(values))
        limit = self.question.limit
        below = float((each * values).sum()) < limit * float(each.sum())
        wealth, level = (against_more, self.pass_level) if below else (against_less, self.fail_level)

        def decided(more: int) -> bool:
            return wealth((sums + more * each)[None], values, limit).item() >= -math.log(level)

        enough = 1
        while not decided(enough):
            enough *= 2
            if enough > MOST_NEEDED:
                return None
        too_few = enough // 2
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if decided(middle) else (middle, enough)
        return enough

    def _added(self, groups: FloatArray, *, every: bool) -> "Trial":
        if not len(groups):
            return self
        if not ((groups >= 0).all() and (groups.sum(axis=1) <= 1 + ROUNDING).all()):
            raise ValueError("the weights of a group are at least 0, and at most 1 together")
        # One after the other, starting from the sums: bitwise the same however the groups are split.
        begin = np.array([self.sums or (0.0,) * len(self.question.values)])
        path = np.cumsum(np.concatenate((begin, groups)), axis=0)[1:]
        looks = path if every else path[-1:]
        first = self.n + 1 if every else self.n + len(path)
        return msgspec.structs.replace(
            self,
            n=self.n + len(path),
            sums=tuple(path[-1].tolist()),
            passed=self.passed or self._stop(looks, against_more, self.pass_level, first),
            failed=self.failed or self._stop(looks, against_less, self.fail_level, first),
        )

    def _stop(self, looks: FloatArray, wealth: Wealth, level: float, first: int) -> Decided | None:
        crossed = np.flatnonzero(wealth(looks, self._values, self.question.limit) >= -math.log(level))
        if not len(crossed):
            return None
        at = crossed.item(0)
        return Decided(n=first + at, sums=tuple(looks[at].tolist()))

    @property
    def _values(self) -> FloatArray:
        return np.array(self.question.values)


def trials(questions: Sequence[Question], alpha: float = ALPHA, *, beside: int = 0) -> list[Trial]:
    """Return a trial for each question of each slice of one gate, with the levels that keep both errors below `alpha`.

    Parameters
    ----------
    questions
        All questions to all slices.
    beside
        Further questions of the gate, such as those about a load run.
    """
    return [
        Trial(question=question, pass_level=alpha, fail_level=alpha / (len(questions) + beside))
        for question in questions
    ]


def outcome_of(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome of all together: fail if one fails, pass if all pass, and insufficient where nothing was asked."""
    distinct = set(outcomes)
    if Outcome.FAIL in distinct:
        return Outcome.FAIL
    return Outcome.PASS if distinct == {Outcome.PASS} else Outcome.INSUFFICIENT


def decision(
    trials: Iterable[tuple[str, Trial]],
    *,
    model: str,
    candidate: str,
    at: datetime,
    run: LoadRun | None = None,
) -> Decision:
    """Return the decision that follows from the trials of one gate, each with the name of its slice, and from a load run; others as of `Decision`."""
    answers = tuple(
        SliceAnswer(
            slice=name,
            question=trial.question.kind,
            verdict=(answer := trial.answer()).outcome,
            n=answer.n,
            mean=answer.mean,
            low=answer.low,
            high=answer.high,
            limit=answer.limit,
            more=answer.more,
        )
        for name, trial in trials
    ) + (run.answers if run else ())
    verdict = outcome_of(answer.verdict for answer in answers)
    return Decision(
        verdict=verdict,
        model=model,
        candidate=candidate,
        slices=answers,
        more=more_of(answer.more for answer in answers) if verdict is Outcome.INSUFFICIENT else 0,
        checked_at=at,
        load=run.load if run else None,
        routes=run.routes if run else (),
    )


def more_of(missing: Iterable[int | None]) -> int | None:
    """Return the largest number of missing groups; None where one is unknown."""
    numbers = list(missing)
    known_numbers = [number for number in numbers if number is not None]
    return max(known_numbers, default=0) if len(known_numbers) == len(numbers) else None
