"""The gate: its false passes and failures are within their bounds, and it needs no more groups than it says.

Seeds are fixed: each test states with which probability another seed would fail.
"""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import numpy as np
import pytest

from quantdrift.drift.evidence.bound import lower_bound, upper_bound
from quantdrift.drift.evidence.few_values import against_more
from quantdrift.drift.evidence.few_values import lower_bound as lower_of_few
from quantdrift.drift.evidence.few_values import upper_bound as upper_of_few
from quantdrift.drift.evidence.observations import FloatArray
from quantdrift.drift.gate import ALPHA, MOST_NEEDED, Question, Trial, more_of, outcome_of, trials
from quantdrift.facts.gate import Load, Outcome
from quantdrift.release.gate.labels import Answers, ExpectedLabels
from quantdrift.release.gate.load import LoadBudget, judged
from quantdrift.storage.gate import TrueLabel

pytestmark = pytest.mark.statistical

BUDGET = 0.01
SLACK = 4  # standard errors
DRAWN = Load(source="drawn")


def trial(question: Question | None = None, *, n_questions: int = 1) -> Trial:
    """Return a new trial, of the flips by default, as one of so many questions."""
    return trials([question or Question.flips(BUDGET)] * n_questions)[0]


def groups_of(chosen: FloatArray, n_values: int, weight: FloatArray | float = 1.0) -> FloatArray:
    """Return groups of one item each: (n, n_values), all of the weight on the value with the chosen number."""
    groups = np.zeros((len(chosen), n_values))
    groups[np.arange(len(chosen)), chosen.astype(int)] = weight
    return groups


def drawn(
    rng: np.random.Generator, chances: tuple[float, ...], steps: int, weight: FloatArray | float = 1.0
) -> FloatArray:
    """Return groups of one item each, with the values at these chances."""
    return groups_of(rng.choice(len(chances), steps, p=chances).astype(float), len(chances), weight)


def most(share: float, streams: int) -> float:
    """Return the share of streams that a true share exceeds with a probability below 1e-4."""
    return share + SLACK * float(np.sqrt(share * (1 - share) / streams))


def test_a_candidate_at_its_budget_passes_with_a_probability_of_at_most_alpha() -> None:
    """2,000 streams at the budget, looked at after each of 2,000 groups: at most 5 % pass, and 5 % fail.

    Found are some 3 %; more than 5 % plus four standard errors with probability below 1e-4. A mutant that takes the mean for the
    bound passes nearly always.
    """
    rng, streams = np.random.default_rng(1), 2000
    ended = [trial().after(drawn(rng, (1 - BUDGET, BUDGET), 2000)) for _ in range(streams)]
    assert np.mean([one.passed is not None for one in ended]) <= ALPHA
    assert np.mean([one.failed is not None for one in ended]) <= ALPHA


@pytest.mark.parametrize("kind", ["weights", "sessions", "harm", "accuracy"])
def test_no_kind_of_question_passes_at_its_limit_more_often(kind: str) -> None:
    """400 streams of 1,500 groups at the limit of a question: at most 5 % pass, at most 5 % fail.

    More than 5 % plus four standard errors with probability below 1e-4 if the bound were attained.
    """
    rng, streams, steps = np.random.default_rng(2), 400, 1500
    question, wrong = Question.flips(BUDGET), np.zeros(2)
    if kind == "harm":
        question = Question.harm(0.02)
    if kind == "accuracy":
        question = Question.accuracy(0.9)
    for _ in range(streams):
        if kind == "weights":
            groups = drawn(rng, (1 - BUDGET, BUDGET), steps, rng.choice([0.25, 1.0], steps, p=[0.2, 0.8]))
        elif (
            kind == "sessions"
        ):  # of one to five items, of which all flip in one session of a hundred, and a part in others
            share = rng.choice([0.0, 0.2, 1.0], steps, p=[0.96, 0.0375, 0.0025])
            groups = np.stack((1 - share, share), axis=1)
        elif kind == "harm":
            groups = drawn(rng, (0.92, 0.05, 0.03), steps)
        else:  # 0.9 * (0.87 + 0.03) = 0.81 = 0.87 - 0.06: candidate alone right, reference alone right, both
            both, reference_alone, candidate_alone = 0.78, 0.12, 0.03
            rest = 1 - both - reference_alone - candidate_alone
            groups = drawn(rng, (rest, reference_alone, candidate_alone, both), steps)
            assert both + candidate_alone == pytest.approx(0.9 * (both + reference_alone))
        after = trial(question).after(groups)
        wrong += (after.passed is not None, after.failed is not None)
    assert (wrong / streams <= most(ALPHA, streams)).all()


@pytest.mark.parametrize(("budget", "n"), [(0.05, 76), (0.02, 186), (0.01, 370), (0.005, 738), (0.001, 3679)])
def test_groups_without_flips_pass_as_soon_as_the_docs_say(budget: float, n: int) -> None:
    """After exactly so many groups; a trial that has seen nothing says the same."""
    fresh = trial(Question.flips(budget))
    assert fresh.needed() == n
    passed = fresh.after(drawn(np.random.default_rng(0), (1.0, 0.0), n + 50)).passed
    assert passed is not None
    assert passed.n == n


def test_a_broken_candidate_fails_soon() -> None:
    """5.4 % flips at a budget of 1 %: half of 400 streams fail by 110, and 90 % by 250; none passes."""
    rng, ended = np.random.default_rng(3), []
    for _ in range(400):
        after = trial().after(drawn(rng, (0.946, 0.054), 1000))
        assert after.passed is None
        assert after.failed is not None
        ended.append(after.failed.n)
    assert np.quantile(ended, 0.5) <= 110
    assert np.quantile(ended, 0.9) <= 250


def test_sound_slices_are_rarely_called_broken_however_many_there_are() -> None:
    """Twenty slices, all at the limit: in at most 5 % of 100 gates any of them fails.

    More than 5 % plus four standard errors with probability below 1e-4. With alpha for each slice some 30 % would.
    """
    rng, gates = np.random.default_rng(4), 100
    wrong = 0
    for _ in range(gates):
        slices = [trial(n_questions=20).after(drawn(rng, (1 - BUDGET, BUDGET), 600)) for _ in range(20)]
        wrong += any(one.failed for one in slices)
    assert wrong / gates <= most(ALPHA, gates)


@pytest.mark.parametrize("question", [Question.flips(BUDGET), Question.harm(0.005), Question.accuracy(0.99)])
def test_the_answer_is_the_same_to_the_bit_wherever_batches_are_cut(question: Question) -> None:
    """One call, calls at random places, and one call for each group."""
    rng = np.random.default_rng(5)
    chances: tuple[float, ...] = {2: (0.9, 0.1), 3: (0.955, 0.04, 0.005), 4: (0.02, 0.03, 0.005, 0.945)}[
        len(question.values)
    ]
    groups = drawn(rng, chances, 700, rng.choice([0.3, 0.7, 1.0], 700)) / np.float64(1.0)
    whole = trial(question).after(groups)
    for cuts in ([], sorted(rng.choice(700, 9)), list(range(1, 700))):
        part = trial(question)
        for piece in np.split(groups, cuts):
            part = part.after(piece)
        assert part == whole
        assert part.answer() == whole.answer()
    assert trial(question).at_once(groups).sums == whole.sums


def test_the_values_0_and_1_give_the_lower_bound_that_the_detectors_use() -> None:
    """That of the module of bounds, to ten digits, with and without weights; the upper one is where the wealth is 1 / delta."""
    values = np.array([0.0, 1.0])
    for total, n in [(0.0, 373.0), (1.0, 90.0), (3.5, 812.25), (40.0, 41.0), (5.0, 5.0)]:
        sums = np.array([n - total, total])
        high = upper_of_few(sums, values, 0.05)
        if high < 1:
            assert against_more(sums[None], values, high).item() == pytest.approx(np.log(20), abs=1e-9)
            assert high < upper_bound(total, n, 0.001)
        assert lower_of_few(sums, values, 0.01) == pytest.approx(lower_bound(total, n, 0.01), rel=1e-10)


def test_what_is_missing_is_what_decides() -> None:
    """If the groups go on as before, the bound crosses the limit at the number that was said, and not one before."""
    for flips, n, outcome in [(0, 100, Outcome.PASS), (1, 500, Outcome.PASS), (4, 150, Outcome.FAIL)]:
        seen = np.zeros((n, 2))
        seen[:, 0] = 1 - flips / n
        seen[:, 1] = flips / n
        before = trial().at_once(seen)
        more = before.answer().more
        assert before.answer().outcome is Outcome.INSUFFICIENT
        assert more is not None
        like = np.repeat(seen[:1], more, axis=0)
        assert before.at_once(like).answer().outcome is outcome
        assert before.at_once(like[1:]).answer().outcome is Outcome.INSUFFICIENT
        assert before.at_once(like).answer().more == 0


def test_a_mean_at_the_limit_is_said_to_be_undecidable() -> None:
    """No number of groups is promised where more than ten million would be missing."""
    groups = np.tile([[1 - BUDGET, BUDGET]], (400, 1))
    answer = trial().at_once(groups).answer()
    assert (answer.outcome, answer.more) == (Outcome.INSUFFICIENT, None)
    assert more_of([answer.more, trial().answer().more]) is None
    assert MOST_NEEDED == 10**7


def test_all_slices_must_pass_and_one_failure_is_enough() -> None:
    """A failure outweighs everything; an insufficient slice holds up a pass; nothing asked is not a pass."""
    good, bad, open_ = Outcome.PASS, Outcome.FAIL, Outcome.INSUFFICIENT
    assert outcome_of([good, good]) is good
    assert outcome_of([good, open_]) is open_
    assert outcome_of([good, open_, bad]) is bad
    assert outcome_of([]) is open_


def test_a_slice_that_breaks_after_it_has_passed_fails() -> None:
    """The failure outweighs the pass, and its figures are those of the moment of the failure."""
    clean, broken = groups_of(np.zeros(400), 2), groups_of(np.ones(60), 2)
    passed = trial().after(clean)
    assert passed.answer().outcome is Outcome.PASS
    assert passed.answer().n == 370
    answer = passed.after(broken).answer()
    assert (answer.outcome, answer.n > 400) == (Outcome.FAIL, True)
    assert answer.low > BUDGET


def test_groups_that_would_break_the_bound_are_refused() -> None:
    """Weights below 0, or above 1 together."""
    for group in ([-0.1, 0.5], [0.8, 0.3]):
        with pytest.raises(ValueError, match="weights of a group"):
            trial().after(np.array([group]))


@pytest.mark.release
def test_a_candidate_whose_latency_is_at_the_budget_passes_with_a_probability_of_at_most_alpha() -> None:
    """400 load runs of 2,000 requests, p99 and median throughput at their budgets: at most 5 % pass and 5 % fail, and no bound is wrong more often.

    A verdict by the measured p99 alone passes half of them. Seconds are exponential, so the p99 is log 100, and the sum of a
    round is a gamma variable, whose median is taken from many draws.
    """
    rng, runs = np.random.default_rng(5), 400
    p99 = float(np.log(100))
    rate = 20 / float(np.median(rng.gamma(20, size=400_000)))
    budget = LoadBudget(latency_p99_s=p99, throughput_per_s=rate)
    found = []
    for _ in range(runs):
        wall = rng.exponential(size=2000)
        run = judged(wall, wall, budget, DRAWN, pass_level=ALPHA, fail_level=ALPHA)
        found.append(run.answers)
    for number, limit in ((0, p99), (1, rate)):
        answers = [run[number] for run in found]
        assert np.mean([one.verdict is Outcome.PASS for one in answers]) <= most(ALPHA, runs)
        assert np.mean([one.verdict is Outcome.FAIL for one in answers]) <= most(ALPHA, runs)
        assert np.mean([one.high < limit for one in answers]) <= most(ALPHA, runs)
        assert np.mean([one.low > limit for one in answers]) <= most(ALPHA, runs)
    naive = np.mean([run[0].mean is not None and run[0].mean < p99 for run in found])
    assert naive > 0.3


def test_the_bounds_of_a_latency_say_the_same_as_the_verdict() -> None:
    """It passes exactly where the upper bound is below the budget, and fails exactly where the lower one is not; few requests say nothing."""
    wall = np.random.default_rng(6).exponential(size=1500)
    for limit in (2.0, 3.5, 4.0, 5.0, 6.0, 8.0):
        run = judged(wall, wall, LoadBudget(latency_p99_s=limit), DRAWN, pass_level=ALPHA, fail_level=ALPHA)
        (answer,) = run.answers
        wanted = Outcome.INSUFFICIENT
        if answer.high < limit:
            wanted = Outcome.PASS
        elif answer.low >= limit:
            wanted = Outcome.FAIL
        assert answer.verdict is wanted
    few = judged(
        wall[:100], wall[:100], LoadBudget(latency_p99_s=50.0), DRAWN, pass_level=ALPHA, fail_level=ALPHA
    )
    assert few.answers[0].verdict is Outcome.INSUFFICIENT
    assert (few.answers[0].high, few.answers[0].more) == (np.inf, 270)


def test_a_candidate_whose_mean_divergence_is_at_the_budget_passes_with_a_probability_of_at_most_alpha() -> (
    None
):
    """400 streams of 1,500 clipped divergences with a mean at the budget, most of them 0 and some at the cap: at most 5 % pass and 5 % fail."""
    rng, streams, steps, cap = np.random.default_rng(7), 400, 1500, 2.0
    ended = []
    for _ in range(streams):
        kind = rng.random(steps)
        share = np.where(kind < 0.01, 1.0, np.where(kind < 0.11, rng.random(steps), 0.0))  # mean 0.06
        groups = np.stack((1 - share, share), axis=1)
        ended.append(trial(Question.divergence(0.06 * cap, cap)).after(groups))
    assert np.mean([one.passed is not None for one in ended]) <= most(ALPHA, streams)
    assert np.mean([one.failed is not None for one in ended]) <= most(ALPHA, streams)


def test_a_language_model_whose_changed_tokens_are_at_the_budget_passes_with_a_probability_of_at_most_alpha() -> (
    None
):
    """400 streams of 400 answers with a mean share at the budget, most of them sound and some wholly other: at most 5 % pass and 5 % fail.

    More than 5 % plus four standard errors with probability below 1e-4 if the bound were attained. The same check fails for a budget that is
    half of the mean, where nearly all fail.
    """
    rng, streams, steps, limit = np.random.default_rng(9), 400, 400, 0.15
    ended, wrong = [], []
    for _ in range(streams):
        share = np.where(
            rng.random(steps) < 0.05, 1.0, rng.beta(0.5, 4.25, steps)
        )  # mean 0.05 + 0.95 * 0.105
        groups = np.stack((1 - share, share), axis=1)
        ended.append(trial(Question.changed_tokens(limit)).after(groups))
        wrong.append(trial(Question.changed_tokens(limit / 2)).after(groups))
    assert np.mean([one.passed is not None for one in ended]) <= most(ALPHA, streams)
    assert np.mean([one.failed is not None for one in ended]) <= most(ALPHA, streams)
    assert np.mean([one.failed is not None for one in wrong]) > 0.9


@pytest.mark.release
def test_a_candidate_that_loses_too_much_accuracy_passes_by_late_labels_with_a_probability_of_at_most_alpha() -> (
    None
):
    """100 streams of 600 exchanges at the limit, of which 70 % get a label, much later and in any order: at most 5 % pass and 5 % fail.

    More than 5 % plus four standard errors with probability below 1e-4 if the bound were attained. Here it does not depend on who is
    right whether a label comes, as is assumed.
    """
    rng, streams, steps = np.random.default_rng(8), 100, 600
    question, wrong, at = Question.accuracy(0.9), np.zeros(2), datetime(2026, 11, 23, tzinfo=UTC)
    # The true class is 0: both right, reference alone, candidate alone, and neither; 0.9 * (0.78 + 0.12) = 0.78 + 0.03.
    kinds = [
        Answers(reference=np.array([r]), candidate=np.array([c]), served=np.array([r]))
        for r, c in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for _ in range(streams):
        expected, after = ExpectedLabels((), timedelta(minutes=30)), trial(question)
        for number, kind in enumerate(rng.choice(4, steps, p=(0.78, 0.12, 0.03, 0.07)).tolist()):
            expected.expect(UUID(int=number), kinds[kind], at=at, weight=1.0)
        labels = [
            TrueLabel(
                exchange=UUID(int=number), item=0, label="0", candidate_right=False, reference_right=False
            )
            for number in rng.permutation(steps)[: int(0.7 * steps)].tolist()
        ]
        for begin in range(0, len(labels), 70):
            expected.give(labels[begin : begin + 70])
            for weights in expected.taken(at):
                after = after.after(weights[None])
        assert after.n == len(labels)
        wrong += (after.passed is not None, after.failed is not None)
    assert (wrong / streams <= most(ALPHA, streams)).all()
