"""Canaries of language models."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quantdrift.core.clock import ManualClock
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.models.language.scoring import ScoringRequest
from quantdrift.models.runtimes.canaries.canaries import (
    Canaries,
    canary_problem,
    deviations,
    read_canaries,
    record,
    write_canaries,
)
from quantdrift.models.runtimes.canaries.check import CanaryOutcome, with_canary_checks
from quantdrift.models.runtimes.canaries.text import random_texts, read_texts, scored, tokenised_canaries
from quantdrift.models.runtimes.linear import LinearRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from tests.support.shadow.language_models import loaded, opening, quantised, remote_opening
from tests.support.shadow.onnx_models import BIAS, WEIGHT
from tests.support.shadow.score_streams import scored as scores_of
from tests.support.shadow.vllm_like import VllmLike, serving

pytestmark = pytest.mark.integration

SAID = ({"role": "user", "content": "what drifts?"},)
REQUEST = ScoringRequest(prompt_ids=(0, 5), served_ids=(7, 8))


@pytest.fixture(scope="module")
def runtime(language_folder: Path) -> Iterator[ReferenceRuntime]:
    """Return what canaries are recorded from."""
    runtime = open_reference(opening(language_folder))
    yield runtime
    runtime.close()


@pytest.fixture
def path(runtime: ReferenceRuntime, tmp_path: Path) -> Path:
    """Return a set that was written."""
    canaries = record(runtime, tokenised_canaries(runtime, random_texts(n_items=4, seed=3)))
    write_canaries(canaries, tmp_path / "c.safetensors", {"runtime": "transformers"})
    return tmp_path / "c.safetensors"


def _lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_a_set_is_what_the_reference_says_of_each_token(runtime: ReferenceRuntime, tmp_path: Path) -> None:
    """Of texts, chats and tokens alike, each as long as it is, in a file that holds nothing but numbers."""
    lines = (
        {"prompt": "A relay", "answer": " forwards bytes"},
        {"messages": SAID, "answer": "the mean"},
        {"prompt_ids": [0, 5], "answer_ids": [7, 8]},
    )
    asked = (
        ScoringRequest(prompt="A relay", served=" forwards bytes"),
        ScoringRequest(messages=SAID, served="the mean"),
        REQUEST,
    )
    given = tokenised_canaries(runtime, read_texts(_lines(tmp_path / "i.jsonl", *lines)))
    write_canaries(record(runtime, given), tmp_path / "c.safetensors", {})
    canaries = read_canaries(tmp_path / "c.safetensors")
    found = scores_of(runtime, *asked)
    for row, ids, scores in zip(
        canaries.outputs["logprobs"], canaries.inputs["answer_ids"], found, strict=True
    ):
        n_tokens = len(scores.ids)
        assert ids.tolist()[:n_tokens] == list(scores.ids)
        assert (ids[n_tokens:] == -1).all()
        np.testing.assert_allclose(row[:n_tokens], scores.logprobs, atol=1e-6)
        assert not row[n_tokens:].any()
    assert canaries.inputs["prompt_ids"][2].tolist()[:3] == [0, 5, -1]


def test_drawn_texts_are_the_same_again() -> None:
    """By their seed."""
    assert random_texts(n_items=3, seed=1) == random_texts(n_items=3, seed=1)
    assert random_texts(n_items=3, seed=1) != random_texts(n_items=3, seed=2)
    assert len({one.prompt for one in random_texts(n_items=50, seed=1)}) == 50


def test_one_token_that_is_off_is_named_with_both_numbers(runtime: ReferenceRuntime, path: Path) -> None:
    """The canary, the place in its answer, what it gives and what was recorded."""
    canaries = read_canaries(path)
    assert canary_problem(runtime, canaries, 1e-6) == ""
    logprobs = canaries.outputs["logprobs"].copy()
    gives = float(logprobs[2, 3])
    logprobs[2, 3] -= 0.01
    other = msgspec.structs.replace(canaries, outputs={"logprobs": logprobs})
    ratio = 0.01 / np.abs(logprobs).max()
    assert canary_problem(runtime, other, 1e-4) == (
        f"`logprobs` is off by {ratio:.2g}, allowed is 0.0001: at [2, 3] it gives {gives:.8g}, recorded is {gives - 0.01:.8g}"
    )


def test_an_answer_that_is_scored_in_part_is_infinitely_off(language_folder: Path, path: Path) -> None:
    """What is recorded is cut where it is scored."""
    short = open_reference(opening(language_folder, max_tokens=2))
    (found,) = deviations(short, read_canaries(path))
    assert found.ratio == float("inf")
    given = tokenised_canaries(short, random_texts(n_items=2, seed=3))
    assert given["answer_ids"].shape == (2, 2)
    short.close()


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo"])
def test_another_server_is_detected_in_each_mode(language_folder: Path, path: Path, way: str) -> None:
    """The same model in FP32 reproduces them; in BF16, FP16 and INT8 it does not. `echo` needs no tokenizer there."""
    canaries = read_canaries(path)
    exact = loaded(language_folder)[0]
    others = [loaded(language_folder)[0].bfloat16(), loaded(language_folder)[0].half(), quantised(exact)]
    for model, reproduces in ((exact, True), *((other, False) for other in others)):
        server = VllmLike(model, loaded(language_folder)[1], takes_prompt_logprobs=way == "prompt_logprobs")
        with serving(server) as url:
            runtime = open_reference(remote_opening(url))
            assert (not canary_problem(runtime, canaries, 1e-4)) is reproduces
            runtime.close()


class _Bench:
    """A server of a language model, held to canaries at each batch; its model may be changed."""

    def __init__(self, told: RuntimeRequest, path: Path) -> None:
        self.told: list[CanaryOutcome] = []
        reference = msgspec.structs.replace(told.reference, canaries=str(path), canary_interval_s=0.0)
        opened = open_reference(told)
        try:
            self.runtime = with_canary_checks(
                told.model,
                reference,
                opened,
                clock=ManualClock(datetime(2026, 1, 1, tzinfo=UTC)),
                on_check=lambda _, outcome: self.told.append(outcome),
            )
        except OperatorError:
            opened.close()
            raise


def test_another_model_at_the_server_stops_comparing(language_folder: Path, path: Path) -> None:
    """At the start it is refused, later exchanges wait, and go on when it is right again."""
    model, tokenizer = loaded(language_folder)
    server = VllmLike(model, tokenizer)
    with serving(server) as url:
        bench = _Bench(remote_opening(url), path)
        (good,) = scores_of(bench.runtime, REQUEST)
        server.model = quantised(model)
        with pytest.raises(
            RetryError, match=r"does not reproduce its canaries .*`logprobs` is off by.*at \[\d, \d+\]"
        ):
            scores_of(bench.runtime, REQUEST)
        with pytest.raises(OperatorError, match=r"does not reproduce its canaries .*recorded is -"):
            _Bench(remote_opening(url), path)
        server.model = model
        (again,) = scores_of(bench.runtime, REQUEST)
        np.testing.assert_array_equal(good.logprobs, again.logprobs)
        assert len(bench.runtime.artefact.canaries) == 64
        assert bench.told == [
            CanaryOutcome.REPRODUCED,
            CanaryOutcome.REPRODUCED,
            CanaryOutcome.FAILED,
            CanaryOutcome.REPRODUCED,
            CanaryOutcome.REPRODUCED,
        ]
        bench.runtime.close()


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("", "is empty"),
        ("no", "holds no prompts and answers"),
        ('{"prompt": "a"}', "line 1: give one of"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "prompt_ids": [1], "answer": "b"}', "line 2"),
        ('{"prompt": "a", "answer": "b", "system": "c"}', "unknown field `system`"),
    ],
)
def test_a_file_that_is_none_is_the_operators_to_mend(tmp_path: Path, content: str, hint: str) -> None:
    """With its name and the line."""
    path = tmp_path / "i.jsonl"
    path.write_text(content)
    with pytest.raises(OperatorError, match=hint):
        read_texts(path)
    with pytest.raises(OperatorError, match="cannot be read"):
        read_texts(tmp_path / "none.jsonl")


def test_what_holds_against_nothing_is_not_recorded(runtime: ReferenceRuntime) -> None:
    """An answer without a token, a prompt without one, tokens that are none, and tensors of another model."""
    with pytest.raises(OperatorError, match="canary 2 has an answer without a token"):
        tokenised_canaries(runtime, [REQUEST, ScoringRequest(prompt="a", served="")])
    with pytest.raises(OperatorError, match=r"does not take canary 1.*no token"):
        tokenised_canaries(runtime, [ScoringRequest(prompt="", served="b")])
    ids = np.array([[9_999]])
    with pytest.raises(OperatorError, match="does not compute these canaries: a token id is not below"):
        record(runtime, {"prompt_ids": ids, "answer_ids": ids})
    with pytest.raises(
        OperatorError, match=r"the reference takes \['answer_ids', 'prompt_ids'\], but got \['x'\]"
    ):
        record(runtime, {"x": np.ones((2, 4), np.float32)})
    with pytest.raises(
        OperatorError,
        match=r"the reference takes prompt_ids: int64\[\?, \?\], but got prompt_ids: float32\[1, 1\]",
    ):
        record(runtime, {"prompt_ids": ids.astype(np.float32), "answer_ids": ids})


def test_texts_are_none_of_a_model_of_tensors(path: Path) -> None:
    """Neither recorded, nor reproduced."""
    linear = LinearRuntime(WEIGHT, BIAS)
    with pytest.raises(OperatorError, match="takes no text"):
        tokenised_canaries(linear, [REQUEST])
    assert "does not compute them: the reference takes" in canary_problem(linear, read_canaries(path), 1e-4)


def test_scores_of_many_are_in_their_places(runtime: ReferenceRuntime) -> None:
    """Whatever the company."""
    many = tokenised_canaries(runtime, random_texts(n_items=6, seed=5))
    together = scored(runtime, many)["logprobs"]
    for n in range(6):
        alone = scored(runtime, {name: rows[n : n + 1] for name, rows in many.items()})["logprobs"]
        np.testing.assert_allclose(alone[0], together[n], atol=1e-5)
    assert isinstance(record(runtime, many), Canaries)
