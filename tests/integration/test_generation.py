"""A language model and its INT8 copy: served, captured, scored by the reference, compared, stored and folded.

The candidate is served by `VllmLike`: a real model, and not vLLM.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest
import torch

from quantdrift.core.clock import SystemClock
from quantdrift.core.codec import encode
from quantdrift.core.config.schema import Budget, Capture, Config, Generation, Slice
from quantdrift.core.records import Exchange, Latency, TextAttribute
from quantdrift.core.token_histogram import bin_of, counts_of
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.tensors.codec import decode
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity
from quantdrift.sidecar.state.config import LiveConfig
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from tests.support.monitor.monitor_processes import connected, running_monitor, until
from tests.support.shadow.language_models import loaded, opening, remote_opening, rounded
from tests.support.shadow.openai_exchanges import exchange, prepared
from tests.support.shadow.vllm_like import VllmLike, serving
from tests.support.sidecar.raw_exchanges import raw_exchange, recorded_by

pytestmark = pytest.mark.integration

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUEST = ("what is a slice?", "how does the relay forward bytes?", "what pages at night?", "größe", "x" * 60)
GREEDY = {"temperature": 0, "max_tokens": 24}
LISTS = {"logprobs": True, "top_logprobs": 5}
IDS = {"return_token_ids": True}
_N_OF_ONE_LANGUAGE = 60  # of a monitor that judges from 50 on
LENGTHS = (
    (Path(__file__).resolve().parents[2] / "docs" / "reference" / "comparators" / "generation.md")
    .read_text(encoding="utf-8")
    .split("## Where answers grew longer")[1]
    .split("```sql")[1]
    .split("```")[0]
)
WAYS: dict[str, dict[str, Any]] = {
    "ids and lists": {**LISTS, **IDS},
    "named lists": {**LISTS, "return_tokens_as_token_ids": True},
    "spelt lists": LISTS,
    "ids": IDS,
    "text": {},
}


def chats(server: VllmLike, **more: Any) -> list[Exchange]:
    """Return exchanges in which each was asked."""
    found = []
    for text in REQUEST:
        asked = {"model": "digits", "messages": [{"role": "user", "content": text}], **GREEDY, **more}
        status, answered = server.answer(CHAT, asked)
        assert status == 200
        found.append(exchange(CHAT, asked, answered))
    return found


@contextmanager
def _opened(way: str, folder: Path, fp32: VllmLike) -> Iterator[RuntimeRequest]:
    if way == "transformers":
        yield opening(folder)
        return
    with serving(fp32) as url:
        told = remote_opening(url)
        reference = msgspec.structs.replace(told.reference, model="digits")
        yield msgspec.structs.replace(told, reference=reference)


def replayed(exchanges: Sequence[Exchange], told: RuntimeRequest) -> list[ReplayResult]:
    """Return what comes of these exchanges."""
    runtime = open_reference(told)
    outcomes = compare_batch(
        [prepared(one, told.model, runtime) for one in exchanges], most_items=len(exchanges)
    )
    runtime.close()
    assert all(isinstance(one, ReplayResult) for one in outcomes), outcomes
    return [one for one in outcomes if isinstance(one, ReplayResult)]


def _column(found: Sequence[ReplayResult], name: str) -> Any:
    return np.concatenate([one.divergences.detail[name] for one in found])


def _is_read_as_it_was_made(one: Exchange, folder: Path) -> bool:
    """Return whether the text makes the tokens again that made it: a model may take two where its tokenizer takes one."""
    tensors = {tensor.name: decode(tensor).tolist() for tensor in one.outputs}
    _, tokenizer = loaded(folder)
    ids = tensors["token_ids.0"]
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    again: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return again == [token for token in ids if token not in tokenizer.all_special_ids]


@pytest.mark.parametrize(
    ("way", "reference"),
    [
        ("ids and lists", "transformers"),
        ("text", "openai"),
        *(
            pytest.param(way, reference, marks=pytest.mark.release)
            for way, reference in itertools.product(WAYS, ("transformers", "openai"))
            if (way, reference) not in {("ids and lists", "transformers"), ("text", "openai")}
        ),
    ],
)
def test_a_model_does_not_diverge_from_itself(
    way: str, reference: str, language_folder: Path, fp32: VllmLike
) -> None:
    """However its tokens are told, and whoever scores them."""
    asked = [
        one
        for one, of_ids in zip(chats(fp32, **WAYS[way]), chats(fp32, **IDS), strict=True)
        if way != "spelt lists" or _is_read_as_it_was_made(of_ids, language_folder)
    ]
    assert asked
    with _opened(reference, language_folder, fp32) as told:
        found = replayed(asked, told)
    divergence = np.concatenate([one.divergences.divergence for one in found])
    np.testing.assert_allclose(divergence, 0, atol=1e-5)
    assert not np.concatenate([one.divergences.flip for one in found]).any()
    lists = "lists" in way
    assert set(_column(found, "measure")) == {"kl" if lists else "regret"}
    assert set(_column(found, "logprobs")) == {"wire" if lists else "unavailable"}
    np.testing.assert_array_equal(_column(found, "top1_share"), 1.0)
    if lists:
        np.testing.assert_array_equal(_column(found, "same_top1"), 1.0)
        np.testing.assert_allclose(_column(found, "perplexity_ratio").astype(float), 1.0, atol=1e-4)


@pytest.mark.release
def test_an_int8_copy_diverges_by_what_the_two_models_say(
    language_folder: Path, int8: VllmLike, fp32: VllmLike
) -> None:
    """Lists of the whole vocabulary give KL as it is; shorter ones a part of it."""
    named = {"logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 5}
    n_tokens = len(fp32.places([0, 1])[1])
    whole = chats(int8, top_logprobs=n_tokens, **named)
    told = replayed(whole, opening(language_folder, top=n_tokens))
    listed = replayed(chats(int8, top_logprobs=20, **named), opening(language_folder))
    for one, of_all, of_some in zip(whole, told, listed, strict=True):
        tensors = {tensor.name: decode(tensor) for tensor in one.outputs}
        ids = [[int(text.removeprefix(b"token_id:")) for text in row] for row in tensors["top_tokens.0"]]
        q = np.take_along_axis(tensors["top_logprobs.0"], np.argsort(ids, axis=1), axis=1)
        prompt, served = _prompt(fp32, one), tensors["token_ids.0"].tolist()
        places = fp32.places(prompt + served)[len(prompt) :]
        p = np.array([[place[token][0] for token in range(n_tokens)] for place in places])
        kl = float((np.exp(p) * (p - q)).sum(axis=1).mean())
        assert of_all.divergences.divergence[0] == pytest.approx(kl, abs=1e-6)
        assert kl / 5 < of_some.divergences.divergence[0] < kl
        assert of_all.divergences.detail["kl_tail"][0] < 1e-6 < of_some.divergences.detail["kl_tail"][0]


def _prompt(server: VllmLike, one: Exchange) -> list[int]:
    (messages,) = (decode(tensor).tolist()[0] for tensor in one.inputs if tensor.name == "messages")
    _, answered = server.answer("/tokenize", {"messages": msgspec.json.decode(messages)})
    return list(answered["tokens"])


def test_greedy_answers_of_an_int4_copy_flip_where_its_tokens_are_not_the_references(
    language_folder: Path, fp32: VllmLike
) -> None:
    """Without lists the tokens alone tell: the same answers that differ from what the reference says itself."""
    model, tokenizer = loaded(language_folder)
    int4 = VllmLike(rounded(model), tokenizer, name="digits")
    exchanges = chats(int4, **IDS)
    found = replayed(exchanges, opening(language_folder, tie=0.0))
    flips = [bool(one.divergences.flip[0]) for one in found]
    own = chats(fp32, **IDS)
    differ = [one.outputs[0].data != other.outputs[0].data for one, other in zip(exchanges, own, strict=True)]
    assert flips == differ
    assert any(flips)
    for one in found:
        assert (one.divergences.divergence[0] > 0) == bool(one.divergences.flip[0])


def test_broken_json_is_a_flip_whoever_scores_it(language_folder: Path, fp32: VllmLike) -> None:
    """The model never learned JSON."""
    (one, *_) = replayed(
        chats(fp32, response_format={"type": "json_object"}, **IDS), opening(language_folder)
    )
    assert one.divergences.flip.tolist() == [1.0]
    assert one.divergences.detail["json_valid"].tolist() == [False]
    assert np.isnan(one.divergences.divergence[0])  # what forbids tokens leaves no greedy choice


def test_completions_of_several_prompts_are_items(language_folder: Path, int8: VllmLike) -> None:
    """With OpenAI's older lists, which have the served token beside the likeliest."""
    asked = {"model": "digits", "prompt": ["A relay", "A slice"], "logprobs": 3, **GREEDY, **IDS}
    _, answered = int8.answer(COMPLETIONS, asked)
    (found,) = replayed([exchange(COMPLETIONS, asked, answered)], opening(language_folder))
    n_tokens = found.divergences.detail["n_tokens"].tolist()
    assert len(n_tokens) == 2
    assert sum(n_tokens) == answered["usage"]["completion_tokens"]
    assert set(found.divergences.detail["logprobs"]) == {"wire"}
    assert (found.divergences.divergence > 0).all()


@pytest.mark.parametrize("reference", ["transformers", "openai"])
def test_a_model_answers_as_it_does_itself(reference: str, language_folder: Path, fp32: VllmLike) -> None:
    """Greedily, of the same length, for the same reason; what is watched does not depend on it."""
    exchanges = chats(fp32, **IDS)
    with _opened(reference, language_folder, fp32) as told:
        before = replayed(exchanges, told)
        asking = Generation(own_share=1.0, own_tokens=16)
        found = replayed(
            exchanges,
            msgspec.structs.replace(told, model=msgspec.structs.replace(told.model, generation=asking)),
        )
    assert set(_column(found, "own")) == {"done"}
    assert set(_column(before, "own")) == {None}
    np.testing.assert_array_equal(_column(found, "length_ratio"), 1.0)
    np.testing.assert_array_equal(
        _column(found, "own_n_tokens"), np.minimum(_column(before, "n_tokens").astype(int), 16)
    )
    assert not any(_column(found, "finish_changed"))
    for one, other in zip(found, before, strict=True):
        np.testing.assert_array_equal(one.divergences.flip, other.divergences.flip)
        np.testing.assert_array_equal(one.divergences.divergence, other.divergences.divergence)


def test_an_answer_that_goes_on_too_long_is_reported(language_folder: Path, fp32: VllmLike) -> None:
    """A candidate that does not take the reference's end: it is longer, and the reference had long ended on its path."""
    (text, *_) = REQUEST
    prompt = fp32.answer("/tokenize", {"messages": [{"role": "user", "content": text}]})[1]["tokens"]
    asked = {"model": "digits", "messages": [{"role": "user", "content": text}], **GREEDY, **IDS}
    model, tokenizer = loaded(language_folder)
    endless = VllmLike(
        model, tokenizer, name="digits", end_id=tokenizer.pad_token_id
    )  # it never learned that
    _, answered = endless.answer(CHAT, asked)
    ids = answered["choices"][0]["token_ids"]
    assert len(ids) == 24
    end = ids[3]
    server = VllmLike(model, tokenizer, name="digits", end_id=end)
    _, healthy = server.answer(CHAT, asked)
    told = opening(language_folder, end_ids=(end,), own_share=1.0, own_tokens=24)
    good, bad = replayed([exchange(CHAT, asked, one) for one in (healthy, answered)], told)
    place = ids.index(end)
    p_end = math.exp(fp32.places([*prompt, *ids])[len(prompt) + place][end][0])
    fine, babbled = (
        {name: column[0] for name, column in one.divergences.detail.items()} for one in (good, bad)
    )
    assert (fine["length_ratio"], fine["finish_changed"], fine["own_finish_reason"]) == (1.0, False, "stop")
    assert fine["end_p"] == pytest.approx(p_end, rel=1e-4)
    assert fine["early_end"] < babbled["early_end"]
    assert babbled["early_end"] > p_end
    assert babbled["kept_share"] < 1 - p_end / 2
    assert (babbled["length_ratio"], babbled["finish_changed"]) == (24 / (place + 1), True)
    assert np.isnan(babbled["end_p"])


async def test_answers_are_stored_and_folded(
    language_folder: Path, int8: VllmLike, database: Database, postgres_dsn: str, tmp_path: Path
) -> None:
    """From messages of the stream to the roll-ups, with slices by the prompt's length."""
    torch.set_num_threads(1)
    told = opening(language_folder, own_share=1.0, own_tokens=8)
    model = msgspec.structs.replace(
        told.model,
        name="digits",
        batched=False,
        budget=Budget(first_token_p99_s=0.4, per_token_p99_s=60.0, divergence_p99=1e-3),
    )  # a chat is several items all the same
    rule = Slice(name="prompt", feature="length", edges=(20.0,))
    config = Config(models=(model,), slices=(rule,))
    references = References(config.models, lambda *_: open_reference(told))
    streamed = Latency(
        last_byte_s=2.5, first_token_s=0.5
    )  # the server has not said how many tokens there are
    cases = [
        classify(
            encode(msgspec.structs.replace(one, latency=streamed)),
            sequence=n,
            n_delivered=1,
            max_deliveries=3,
            references=references,
        )
        for n, one in enumerate(chats(int8, **LISTS, **IDS), start=1)
    ]
    batch = Assessor(config, "worker").assess(cases, datetime.now(UTC))
    assert not batch.quarantined
    await Writer(database, SystemClock()).store(batch)
    async with (
        running_monitor(postgres_dsn, tmp_path),
        connected(postgres_dsn) as record,
    ):
        rows = await record.fetch("select * from comparison order by captured_at")
        details = [msgspec.json.decode(row["detail"]) for row in rows]
        assert [detail["measure"] for detail in details] == ["kl"] * len(REQUEST)
        assert all(
            row["divergence"] == pytest.approx(detail["kl"], rel=5e-6)
            for row, detail in zip(rows, details, strict=True)
        )
        assert {detail["own"] for detail in details} == {"done"}
        per_token = [2.0 / (detail["n_scored"] - 1) for detail in details]
        assert [row["per_token_s"] for row in rows] == pytest.approx(per_token)
        slow = {(detail["slow_start"], detail["slow_tokens"]) for detail in details}
        assert slow == {(1, 0)}  # the first token took 0.5 s of 0.4, and each further one less than a minute
        for detail in details:
            bins = counts_of(detail["divergence_bins"])
            beyond = sum(n for number, n in bins.items() if number >= bin_of(1e-3))
            assert detail["far_tokens"] == pytest.approx(beyond / bins.total(), rel=1e-5)
        (own,) = await record.fetch(LENGTHS.replace("assistant", "digits"))
        assert own["n"] == len(REQUEST)
        assert own["finish_changes"] == np.mean([detail["finish_changed"] for detail in details])
        ratios = [detail["length_ratio"] for detail in details]
        assert own["length_ratio"] == pytest.approx(np.exp(np.mean(np.log(ratios))))
        lengths = [msgspec.json.decode(row["features"])["feature.length"] for row in rows]
        assert lengths == [len(text) for text in REQUEST]
        await until(lambda: _is_folded(record), "folding")
        (total,) = await record.fetch(
            "select n_items, divergence from rollup_hour join slice on slice.id = slice_id where slice.name = 'all'"
        )
    assert total["n_items"] == len(REQUEST)
    assert total["divergence"] > 0


async def test_damage_of_one_language_is_found_without_any_header(
    language_folder: Path, fp32: VllmLike, database: Database, postgres_dsn: str, tmp_path: Path
) -> None:
    """German prompts get the answers of a copy at four bits, all others those of the FP32 model; nothing but the text says which they are."""
    torch.set_num_threads(1)
    model, tokenizer = loaded(language_folder)
    damaged = VllmLike(rounded(model), tokenizer, name="digits")
    asked = {
        "de": (damaged, ("Was ist die Hauptstadt von Peru?", "Erzähle mir etwas über Italien.")),
        "en": (fp32, ("What is the capital of Peru?", "Tell me something about Italy, please.")),
    }
    bodies = [
        (request, server.answer(CHAT, request)[1])
        for server, texts in asked.values()
        for text in texts
        for request in [{"model": "digits", "messages": [{"role": "user", "content": text}], **GREEDY}]
    ]
    told = opening(language_folder, embedding="prompt_state")
    config = Config(
        models=(msgspec.structs.replace(told.model, name="digits", embedding="prompt_state"),),
        capture=Capture(text=(TextAttribute.LANGUAGE, TextAttribute.TURNS)),
        slices=(Slice(name="language", text="language"),),
    )
    identity = SidecarIdentity(source="pod-1", version="int4", salt=b"salt", hmac_key=b"")
    recorder = Recorder(LiveConfig.of(config), identity)
    references = References(config.models, lambda *_: open_reference(told))
    cases = []
    for n in range(_N_OF_ONE_LANGUAGE * 2):
        request, answered = bodies[n % len(bodies)]
        raw = raw_exchange(path=CHAT, request=request, response=answered, exchange_id=f"{n:032x}", pi1=1.0)
        recorded = recorded_by(recorder, *raw)
        assert recorded is not None
        cases.append(
            classify(encode(recorded), sequence=n + 1, n_delivered=1, max_deliveries=3, references=references)
        )
    batch = Assessor(config, "worker").assess(cases, datetime.now(UTC))
    assert not batch.quarantined
    assert batch.vectors  # of which clusters of prompts are learned
    await Writer(database, SystemClock()).store(batch)
    # Four bits alone are no damage by the budgets of text: here every changed answer is.
    more = 'task = "generation"\n[models.budget]\nwatch = ["flip", "divergence"]\ndivergence = 0.02\n[capture]\ntext = ["language", "turns"]\n[[slices]]\nname = "language"\ntext = "language"\n'
    async with (
        running_monitor(postgres_dsn, tmp_path, notify=more),
        connected(postgres_dsn) as record,
    ):

        async def is_found() -> bool:
            return (await _verdicts(record)).get("language=de") == "firing"

        await until(is_found, "an alert of language=de")
        verdicts = await _verdicts(record)
        rows = await record.fetch("select attributes from comparison")
    assert verdicts["language=en"] not in {"warning", "firing"}
    attributes = [msgspec.json.decode(row["attributes"]) for row in rows]
    assert {one["text.language"] for one in attributes} == {"de", "en"}
    assert {one["text.turns"] for one in attributes} == {"1"}


async def _verdicts(record: asyncpg.Connection) -> dict[str, str]:
    """Return the verdict on each slice."""
    rows = await record.fetch("select slice.name, verdict from verdict join slice on slice.id = slice_id")
    return {row["name"]: row["verdict"] for row in rows}


async def _is_folded(record: asyncpg.Connection) -> bool:
    """Return whether answers are in the sums: their batch has its number some seconds before."""
    return bool(await record.fetchval("select exists (select from rollup_hour)"))
