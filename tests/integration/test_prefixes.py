"""Shared beginnings: the turns of a conversation and the samples of a prompt are computed once, with the same scores."""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quantdrift.models.language.scoring import Scores, TokenRow
from tests.support.shadow.language_models import opening

if TYPE_CHECKING:
    from quantdrift.models.runtimes.text.transformers import TransformersLanguage

pytestmark = pytest.mark.integration

N_TOKENS, N_TURNS, N_ANSWER = 400, 5, 24


@pytest.fixture(scope="module")
def alone(language_folder: Path) -> Iterator["TransformersLanguage"]:
    """Return a reference that keeps nothing."""
    from quantdrift.models.runtimes.text.transformers import TransformersLanguage

    language = TransformersLanguage(opening(language_folder, prefix_bytes=0))
    yield language
    language.close()


def sharing(folder: Path, **options: Any) -> "TransformersLanguage":
    """Return a reference that keeps what it computed."""
    from quantdrift.models.runtimes.text.transformers import TransformersLanguage

    return TransformersLanguage(opening(folder, **options))


def conversation(seed: int, n_turns: int = N_TURNS) -> list[TokenRow]:
    """Return the turns of a conversation: each prompt has all that was said before."""
    rng = random.Random(seed)
    said: tuple[int, ...] = ()
    rows = []
    for _ in range(n_turns):
        said += tuple(rng.randrange(2, N_TOKENS) for _ in range(16))
        answer = tuple(rng.randrange(2, N_TOKENS) for _ in range(N_ANSWER))
        rows.append(TokenRow(prompt=said, served=answer))
        said += answer
    return rows


def check(found: Sequence[Scores], wanted: Sequence[Scores]) -> None:
    """Demand the same scores."""
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-5)
        np.testing.assert_allclose(one.ends, other.ends, atol=1e-5)


def n_read(rows: Sequence[TokenRow]) -> int:
    """Return the tokens that are read without sharing."""
    return sum(len(row.prompt) + len(row.served) - 1 for row in rows)


@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "one after the other"])
def test_a_conversation_costs_as_much_as_its_last_turn(
    language_folder: Path, alone: "TransformersLanguage", *, together: bool
) -> None:
    """Each token but the last of an answer is read once, in whatever order the turns come in a batch."""
    language, rows = sharing(language_folder), conversation(1)
    mixed = random.Random(2).sample(rows, len(rows)) if together else rows
    found = language.score(mixed) if together else [language.score([row])[0] for row in mixed]
    check(found, alone.score(mixed))
    assert language.n_computed == n_read(rows[-1:])
    assert alone.n_computed >= n_read(rows)
    language.close()


def test_samples_of_a_prompt_share_it(language_folder: Path, alone: "TransformersLanguage") -> None:
    """The first answer is computed with the prompt, and the others from its last token on."""
    language, rng = sharing(language_folder), random.Random(3)
    prompt = tuple(rng.randrange(2, N_TOKENS) for _ in range(64))
    rows = [
        TokenRow(prompt=prompt, served=tuple(rng.randrange(2, N_TOKENS) for _ in range(n)))
        for n in (5, 9, 7, 9)
    ]
    check(language.score(rows), alone.score(rows))
    n_answers = sum(len(row.served) for row in rows)
    assert language.n_computed <= len(prompt) + n_answers
    language.close()


def test_conversations_share_in_one_batch_and_beyond(
    language_folder: Path, alone: "TransformersLanguage"
) -> None:
    """Prefixes of different lengths in one batch, next to rows without any."""
    language = sharing(language_folder)
    several = [conversation(seed) for seed in range(4, 9)]
    for turn in range(N_TURNS):
        rows = [rows[turn] for rows in several[turn:]] + [TokenRow(prompt=(0, 5), served=(7, 8 + turn))]
        check(language.score(rows), alone.score(rows))
    assert language.n_computed < 0.7 * n_read(
        [row for rows in several for row in rows[: several.index(rows) + 1]]
    )
    language.close()


def test_what_is_kept_is_bounded(language_folder: Path, alone: "TransformersLanguage") -> None:
    """The oldest go first; a row that is larger than the bound is not kept at all; scores are the same."""
    from quantdrift.models.runtimes.text.transformers import TransformersLanguage

    n_bytes = sharing(language_folder)._token_bytes
    assert n_bytes > 0
    language: TransformersLanguage = sharing(language_folder, prefix_bytes=150 * n_bytes)
    for seed in range(9, 13):
        rows = conversation(seed)
        check(language.score(rows), alone.score(rows))
        assert language._prefixes._n_bytes <= 150 * n_bytes
        assert language._prefixes._n_bytes == n_bytes * sum(map(len, language._prefixes._layers))
    language.close()


def test_rows_are_found_by_their_longest_beginning() -> None:
    """As a search through all rows finds it."""
    from quantdrift.models.runtimes.text.prefixes import LEAST_SHARED, KeptPrefixes, n_common, waves

    rng = random.Random(13)
    rows: list[tuple[int, ...]] = []
    for _ in range(200):
        begin = rng.choice(rows)[: rng.randrange(60)] if rows else ()
        rows.append(begin + tuple(rng.randrange(3) for _ in range(rng.randrange(1, 40))))
    kept = KeptPrefixes(10**9)
    empty = (torch.zeros((1, 0, 1)), torch.zeros((1, 0, 1)))
    for row in rows:
        longest = max((n_common(row, other) for other in kept._layers), default=0)
        assert kept.find(row, most=10**6).n_tokens == (longest if longest >= LEAST_SHARED else 0)
        kept.keep(row, (empty,))
        assert sorted(kept._layers) == kept._sorted
    order = waves(rows)
    assert sorted(index for wave in order for index in wave) == list(range(len(rows)))
    done: list[tuple[int, ...]] = []
    for wave in order:
        for index in wave:
            others = [rows[other] for other in range(len(rows)) if other != index]
            # What it shares with any other is there, or that other is computed from this one or beside it.
            longest = max(n_common(rows[index], other) for other in others)
            if (
                longest >= LEAST_SHARED
                and max((n_common(rows[index], row) for row in done), default=0) < longest
            ):
                assert any(
                    n_common(rows[index], rows[later]) == longest
                    for later in range(len(rows))
                    if rows[later] not in done and later != index
                )
        done += [rows[index] for index in wave]


def test_a_model_that_cannot_share_is_computed_as_before(language_folder: Path, tmp_path: Path) -> None:
    """One with a window of attention keeps only its last tokens."""
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(language_folder, local_files_only=True)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    torch.manual_seed(1)
    MistralForCausalLM(config).save_pretrained(tmp_path / "window")
    tokenizer.save_pretrained(tmp_path / "window")
    language = sharing(tmp_path / "window")
    assert language._token_bytes == 0
    (scores,) = language.score(conversation(1)[:1])
    assert math.isfinite(scores.logprobs.sum())
    language.close()
