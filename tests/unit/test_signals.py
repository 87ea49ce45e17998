"""Signals: the records of quantdrift's own, and those that a package adds, from its entry point to the text of an alert."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from quantdrift.core import plugins
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Budget, Model
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.signals import (
    BUILT_IN,
    OF_STREAMS,
    DetectorKind,
    SignalForm,
    SignalPlugin,
    named_signals,
    signal_of,
)
from quantdrift.core.tasks import Task
from quantdrift.drift.detectors.protocol import DETECTORS
from quantdrift.drift.watch import SignalKey
from quantdrift.monitor.fold.fold import Fold
from quantdrift.storage.fold_rows import BatchRows, Episode
from quantdrift.storage.signals import named_values
from tests.support.monitor.alert_cases import page
from tests.support.monitor.fold_stream import ALL_ID, CATALOG, CONFIG, FAINT_ID, batches
from tests.support.monitor.folds import EMPTY, fold_all, verdict_of
from tests.support.plugin_packages import install_toy

pytestmark = pytest.mark.unit

TEXT = """
from quantdrift.plugins.signals import SignalPlugin
MISSED = SignalPlugin(detail="missed", things="intervals", verb="miss the reference's", pages={pages})
"""
WATCHED = msgspec.structs.replace(
    CONFIG, models=(Model(name="digits", budget=Budget(signals={"missed-intervals": 0.02})),)
)


@pytest.fixture(autouse=True)
def _no_plugins_afterwards() -> Iterator[None]:
    yield
    plugins.use(())


def _install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, pages: bool = True) -> None:
    """Install a package with a signal, and name it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    module = f"toy_signal_{pages}".lower()
    entry_points = {"quantdrift.signals": {"missed-intervals": f"{module}:MISSED"}}
    install_toy(site, "toy", entry_points, {module: TEXT.format(pages=pages)})
    plugins.use(["toy"])


def _missing(stream: list[BatchRows], *, after: int) -> list[BatchRows]:
    """Return the stream with the signal's value: a quarter of each interval of one slice in every second item of it after a batch."""
    return [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(
                    row,
                    signals={
                        "missed-intervals": 0.5 * (place % 2)
                        if number > after and FAINT_ID in row.slice_ids
                        else 0.0
                    },
                )
                for place, row in enumerate(rows.comparisons)
            ),
        )
        for number, rows in enumerate(stream)
    ]


def test_every_detector_of_a_built_in_signal_exists() -> None:
    """A record names kinds of detectors; each has its words, and the options that it reads are options."""
    for signal in BUILT_IN:
        assert signal_of(signal.metric.value) is signal
        for kind, watched in signal.kinds.items():
            assert kind.value in DETECTORS
            assert watched.reason.format(is_="is")
            assert watched.wrong.format(title="m 1")
            assert not watched.option or hasattr(Budget(), watched.option)
    assert {kind.value for signal in BUILT_IN for kind in signal.kinds} == set(DETECTORS)


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "verdict"), [(True, Verdict.FIRING), (False, Verdict.WARNING)])
def test_a_signal_of_a_package_alerts_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, pages: bool, verdict: Verdict
) -> None:
    """A quarter of the intervals of a slice miss after batch 300, where 2 % may: it is found, with the plug-in's sentence."""
    _install(tmp_path, monkeypatch, pages=pages)
    stream = _missing(batches(700, faint_flips=0.0), after=300)
    fold, outcome = fold_all(stream, config=WATCHED)
    opened = [
        row for row in outcome.transitions if row.slice_id == FAINT_ID and row.episode is not Episode.NONE
    ]
    assert opened
    assert {row.metric for row in opened} == {Metric("missed-intervals")}
    assert opened[-1].to_verdict is verdict
    assert verdict_of(fold, FAINT_ID)[0] is verdict
    event = opened[-1].alert
    assert event.change.reason.startswith("the share of intervals that miss the reference's ")
    assert event.evidence.unit == "share of intervals"
    assert event.evidence.budget == 0.02
    lines = page(event).splitlines()
    assert "% of intervals in scanner=faint miss the reference's (budget: 2 %)" in lines[0]
    assert any("never pages" in line for line in lines) is not pages
    estimate = next(row for row in outcome.verdicts if row.slice_id == FAINT_ID).estimate["missed-intervals"]
    assert estimate["budget"] == 0.02
    assert 0.2 < estimate["mean"] < 0.3
    quiet = next(row for row in outcome.verdicts if row.slice_id == ALL_ID).estimate["missed-intervals"]
    assert quiet["mean"] < estimate["mean"]


def test_a_signal_is_watched_where_it_has_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one its values change nothing, and what was watched ends when the budget goes."""
    _install(tmp_path, monkeypatch)
    stream = _missing(batches(60), after=0)
    key = SignalKey("missed-intervals", "budget")
    plain, unwatched = fold_all(batches(60)), fold_all(stream)
    assert unwatched[1].detectors == plain[1].detectors
    fold, outcome = fold_all(stream, config=WATCHED)
    assert key in fold.state.slices[1, FAINT_ID].watch.states
    assert not fold.state.not_asked()
    stored = {name: getattr(outcome, name) for name in ("position", "detectors", "verdicts")}
    fold = Fold(CONFIG, msgspec.structs.replace(EMPTY, **stored))
    fold.learn(CATALOG)
    assert key not in fold.state.slices[1, FAINT_ID].watch.states
    assert {row.metric for row in fold.take().detectors if row.retired_us} == {"missed-intervals"}


def test_values_beyond_0_and_1_are_clipped_and_missing_ones_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on false alarms is that of values in [0, 1]."""
    _install(tmp_path, monkeypatch)
    for value, mean in ((7.0, 1.0), (-3.0, 0.0), (float("nan"), None)):
        stream = [
            msgspec.structs.replace(
                rows,
                comparisons=tuple(
                    msgspec.structs.replace(row, signals={"missed-intervals": value})
                    for row in rows.comparisons
                ),
            )
            for rows in batches(10)
        ]
        _, outcome = fold_all(stream, config=WATCHED)
        estimate = next(row for row in outcome.verdicts if row.slice_id == ALL_ID).estimate
        assert estimate.get("missed-intervals", {}).get("mean") == mean


def _drawn(stream: list[BatchRows], *, after: int, unlikely: float | None = 0.05) -> list[BatchRows]:
    """Return the stream as sampled text without log-probabilities; after a batch a slice has four times as many unlikely tokens."""
    return [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(
                    row,
                    flip=None,
                    divergence=None,
                    signals={}
                    if unlikely is None
                    else {"unlikely-tokens": 4 * unlikely}
                    if number > after and FAINT_ID in row.slice_ids
                    else {"unlikely-tokens": unlikely},
                )
                for row in rows.comparisons
            ),
        )
        for number, rows in enumerate(stream)
    ]


def test_sampled_text_is_judged_by_its_unlikely_tokens() -> None:
    """Without them nothing of it is measured, and that is the verdict; with them it is `ok`, and the slice that is damaged pages."""
    text = msgspec.structs.replace(CONFIG, models=(Model(name="digits", task=Task.GENERATION),))
    fold, _ = fold_all(_drawn(batches(400), after=400, unlikely=None), config=text)
    of_all = [row for row in fold.verdicts() if row.slice_id == ALL_ID]
    assert {row.verdict for row in of_all} == {Verdict.UNKNOWN}
    assert any("not measured" in row.reason for row in of_all)
    fold, outcome = fold_all(_drawn(batches(400), after=200), config=text)
    assert verdict_of(fold, ALL_ID)[0] is Verdict.OK
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.FIRING
    opened = [row for row in outcome.transitions if row.slice_id == FAINT_ID and row.event]
    assert "of sampled tokens in scanner=faint are among the 5 %" in page(opened[-1].alert)


@pytest.mark.slow
def test_more_unlikely_tokens_than_before_page_though_they_are_within_their_budget() -> None:
    """A slice that goes from 2.25 to 9 %, where 10 % are allowed, is found by what it learned."""
    text = msgspec.structs.replace(CONFIG, models=(Model(name="digits", task=Task.GENERATION),))
    more = _drawn(batches(600, faint_share=0.8), after=450, unlikely=0.0225)
    fold, outcome = fold_all(more, config=text)
    assert (FAINT_ID, "unlikely-tokens", "change") in {
        (row.slice_id, row.metric, row.kind) for row in outcome.learned
    }
    assert verdict_of(fold, FAINT_ID)[0] is Verdict.FIRING
    opened = next(row for row in outcome.transitions if row.slice_id == FAINT_ID and row.event)
    assert opened.alert.evidence.detector == "change"
    first = page(opened.alert).splitlines()[0]
    assert "of sampled tokens in scanner=faint are among the 5 %" in first
    assert "before (budget: 10 %)" in first


def test_the_budget_of_unlikely_tokens_is_the_owners() -> None:
    """It has one without being told where text is generated, and 0 turns it off."""
    budgets = {
        task: msgspec.convert({"name": "m", "task": task}, Model).budget.signals
        for task in ("generation", "classification")
    }
    of_text = {"changed-tokens": 0.15, "broken-answers": 0.01, "unlikely-tokens": 0.1}
    assert budgets == {"generation": of_text, "classification": {}}
    off = Model(name="m", task=Task.GENERATION, budget=Budget(signals={"unlikely-tokens": 0.0}))
    assert not signal_of("unlikely-tokens").is_asked(DetectorKind.BUDGET, off.budget)


def _changed(stream: list[BatchRows]) -> list[BatchRows]:
    """Return the stream as greedy text of a sound model: each answer has another token somewhere, one in a hundred of its tokens."""
    return [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(
                    row, flip=True, divergence=0.002, signals={"changed-tokens": 0.01, "broken-answers": 0.0}
                )
                for row in rows.comparisons
            ),
        )
        for rows in stream
    ]


def test_the_divergence_of_text_has_a_budget_of_its_own_unless_one_is_given() -> None:
    """Also one that is given with the value of the general default is the owner's."""
    of = {"name": "m", "task": "generation"}
    assert msgspec.convert(of, Model).budget.divergence == 0.1
    assert msgspec.convert({**of, "budget": {"flip": 0.1}}, Model).budget.divergence == 0.1
    assert msgspec.convert({**of, "budget": {"divergence": 0.02}}, Model).budget.divergence == 0.02
    assert msgspec.convert({"name": "m"}, Model).budget.divergence == Budget().divergence == 0.02


def test_long_answers_that_all_change_somewhere_do_not_page_unless_that_is_asked_for() -> None:
    """Text is judged by token; `watch` names `flip` where an owner wants answers to be counted."""
    text = Model(name="digits", task=Task.GENERATION)
    fold, outcome = fold_all(_changed(batches(400)), config=msgspec.structs.replace(CONFIG, models=(text,)))
    assert verdict_of(fold, ALL_ID)[0] is Verdict.OK
    assert not [row for row in outcome.transitions if row.event]
    assert not signal_of("flip").is_asked(DetectorKind.BUDGET, text.budget)
    assert signal_of("flip").is_asked(DetectorKind.CHANGE, Budget())
    by_answer = Model(name="digits", task=Task.GENERATION, budget=Budget(watch=("flip", "divergence")))
    fold, _ = fold_all(_changed(batches(400)), config=msgspec.structs.replace(CONFIG, models=(by_answer,)))
    assert verdict_of(fold, ALL_ID)[0] is Verdict.FIRING


def _streamed(stream: list[BatchRows], *, seed: int, measured: bool) -> list[BatchRows]:
    """Return the stream as sound streamed text; in its second half one answer in ten of a slice begins late, and one in 500 elsewhere."""
    rng = Random(seed)

    def late(number: int, slices: Sequence[int]) -> float:
        return float(rng.random() < (0.1 if FAINT_ID in slices and number > len(stream) // 2 else 0.002))

    tokens = {"changed-tokens": 0.01, "broken-answers": 0.0} if measured else {}
    return [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(
                    row,
                    flip=False if measured else None,
                    divergence=0.002 if measured else None,
                    signals={**tokens, "slow-starts": late(number, row.slice_ids)},
                )
                for row in rows.comparisons
            ),
        )
        for number, rows in enumerate(stream)
    ]


@pytest.mark.slow
def test_streams_that_begin_late_open_a_ticket_that_sends_nobody_to_the_model() -> None:
    """With a seed; no other slice alerts, nothing pages, and how fast an answer began is no measurement of it."""
    budget = Budget(first_token_p99_s=0.5)
    config = msgspec.structs.replace(
        CONFIG, models=(Model(name="digits", task=Task.GENERATION, budget=budget),)
    )
    fold, outcome = fold_all(_streamed(batches(700, faint_share=0.23), seed=5, measured=True), config=config)
    opened = [row for row in outcome.transitions if row.episode is not Episode.NONE]
    assert [(row.slice_id, row.metric, row.to_verdict) for row in opened] == [
        (FAINT_ID, Metric.SLOW_START, Verdict.WARNING)
    ]
    text = page(opened[0].alert)
    late = "of streamed answers in scanner=faint begin later than models.budget.first_token_p99_s allows (budget: 1 %)"
    assert late in text
    assert "Its answers have not drifted, and all traffic together is fast enough." in text
    assert "unquantised" not in text
    fold, _ = fold_all(_streamed(batches(100), seed=6, measured=False), config=config)
    assert verdict_of(fold, ALL_ID)[0] is Verdict.UNKNOWN


def test_broken_answers_page_though_answers_are_not_counted() -> None:
    """Broken JSON is no matter of tokens: it has a budget of its own, and is no measurement of the tokens."""
    stream = [
        msgspec.structs.replace(
            rows,
            comparisons=tuple(
                msgspec.structs.replace(
                    row, flip=True, divergence=None, signals={"broken-answers": float(place % 4 == 0)}
                )
                for place, row in enumerate(rows.comparisons)
            ),
        )
        for rows in batches(200)
    ]
    text = msgspec.structs.replace(CONFIG, models=(Model(name="digits", task=Task.GENERATION),))
    fold, outcome = fold_all(stream, config=text)
    assert verdict_of(fold, ALL_ID)[0] is Verdict.FIRING
    opened = [row for row in outcome.transitions if row.slice_id == ALL_ID and row.event]
    assert "are broken" in page(opened[-1].alert)


def test_a_budget_of_a_signal_that_nobody_adds_is_an_error(tmp_path: Path) -> None:
    """It names the option, and what to do."""
    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname = "m"\n[models.budget.signals]\nmissed = 0.1\n')
    with pytest.raises(
        OperatorError, match=r"budget.signals names `missed`, and no package that `plugins` names"
    ):
        load(path, {})


def test_a_budget_below_what_equal_models_have_is_an_error(tmp_path: Path) -> None:
    """It would page whatever serves."""
    path = tmp_path / "config.toml"
    path.write_text(
        '[[models]]\nname = "m"\ntask = "generation"\n[models.budget.signals]\nunlikely-tokens = 0.04\n'
    )
    with pytest.raises(OperatorError, match=r"is 0.04, but where candidate and reference agree it is 0.05"):
        load(path, {})
    path.write_text(path.read_text().replace("0.04", "0.0"))
    load(path, {})


def test_unlikely_tokens_of_what_is_no_text_are_an_error(tmp_path: Path) -> None:
    """They would never be measured, and the slice would be `ok` all the same."""
    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname = "m"\n[models.budget.signals]\nunlikely-tokens = 0.1\n')
    with pytest.raises(OperatorError, match="which only models with the task `generation` have"):
        load(path, {})
    path.write_text('[[models]]\nname = "m"\n[models.budget]\nper_token_p99_s = 0.1\n')
    with pytest.raises(OperatorError, match="per_token_p99_s is for generated text"):
        load(path, {})


def test_a_stored_signal_is_read_without_its_package() -> None:
    """Its words are general, and name it."""
    signal = signal_of("elsewhere")
    assert (signal.form, signal.name) == (SignalForm.SHARE, "answers that show elsewhere")
    of_text = [Metric.CHANGED_TOKENS, Metric.FAR_TOKENS, Metric.BROKEN, *OF_STREAMS, Metric.UNLIKELY]
    assert [of.metric for of in named_signals()] == of_text
    assert "elsewhere" not in named_values()


def test_values_are_read_by_name_and_only_where_they_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query has the plug-in's names alone, and a name that would not fit into it is refused."""
    _install(tmp_path, monkeypatch)
    assert "'missed-intervals', case when jsonb_typeof(c.detail -> 'missed') = 'number'" in named_values()
    with pytest.raises(ValueError, match="a name has letters"):
        SignalPlugin(detail="x' or '1", things="a", verb="b")
    with pytest.raises(ValueError, match="must not be empty"):
        SignalPlugin(detail="x", things=" ", verb="b")


def test_what_a_budget_asks_for_is_watched() -> None:
    """The latency only with its options; flips and the divergence always."""
    latency = signal_of("latency")
    assert not latency.is_asked(DetectorKind.BUDGET, Budget())
    assert latency.is_asked(DetectorKind.BUDGET, Budget(latency_p99_s=1.0))
    assert not latency.is_asked(DetectorKind.GROWTH, Budget(latency_p99_s=1.0))
    assert all(signal_of(name).is_asked(DetectorKind.BUDGET, Budget()) for name in ("flip", "divergence"))
    assert not signal_of("elsewhere").is_asked(DetectorKind.BUDGET, Budget())
