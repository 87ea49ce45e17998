"""What is said of generated text."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.special import rel_entr

from quantdrift.core.config.schema import Generation
from quantdrift.core.errors import QuarantineError
from quantdrift.core.token_histogram import counts_of
from quantdrift.models.comparators.text.generation import GenerationComparator
from quantdrift.models.language.answer import Answer, ToolCall
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome
from quantdrift.models.language.scoring import ANSWER, NO_SCORES, SCORES, Scores, objects
from tests.support.shadow.score_streams import compared, scores_of, told

pytestmark = pytest.mark.unit

P = np.log([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
Q = np.log([[0.4, 0.4, 0.10, 0.10], [0.1, 0.2, 0.3, 0.4], [0.70, 0.10, 0.10, 0.10]])
SERVED = (0, 3, 1)
GREEDY = Answer(text="said", finish_reason="stop", is_greedy=True)


def test_likelihood_perplexity_and_ranks_of_what_was_served() -> None:
    """Of the reference alone, whatever the candidate tells."""
    found = told(compared(None, scores_of(P, SERVED)))
    nll = -(math.log(0.5) + math.log(0.4) + math.log(0.25)) / 3
    assert found["nll"] == pytest.approx(nll)
    assert found["perplexity"] == pytest.approx(math.exp(nll))
    assert (found["rank_mean"], found["rank_max"], found["top1_share"]) == (1.0, 1.0, 1.0)
    assert (found["logprobs"], found["measure"]) == ("unavailable", "none")
    assert math.isnan(found["divergence"])
    assert math.isnan(found["flip"])


@pytest.mark.parametrize(
    ("n_tokens", "finish_reason", "is_cut", "flip"),
    [
        (None, "stop", False, 1),
        (3, "length", False, 1),
        (3, "stop", False, 1),
        (4, "stop", False, 1),  # the end is a token that no text holds
        (4, "length", False, 0),
        (2, "stop", False, 0),
        (5, "stop", False, 0),
        (9, "stop", True, 1),  # the stop of the client's may have been of many
        (2, "stop", True, 0),
    ],
)
def test_other_tokens_than_were_served_are_no_choice_of_the_candidate(
    n_tokens: int | None, finish_reason: str, *, is_cut: bool, flip: float
) -> None:
    """A text that makes another number of tokens than the server told is not what was generated: nobody took another turn."""
    answer = msgspec.structs.replace(GREEDY, n_tokens=n_tokens, finish_reason=finish_reason, is_cut=is_cut)
    found = told(compared(None, scores_of(P, (1, 3, 1)), answer))
    assert found["flip"] == (flip or pytest.approx(math.nan, nan_ok=True))
    assert found["measure"] == ("regret" if flip else "none")
    assert math.isnan(found["divergence"]) == (not flip)


def test_a_uniform_reference_has_the_logarithm_of_its_vocabulary() -> None:
    """And every token is as likely as the likeliest."""
    uniform = np.full((5, 40), -math.log(40))
    found = told(compared(None, scores_of(uniform, (3, 1, 4, 1, 5)), GREEDY))
    assert found["nll"] == pytest.approx(math.log(40))
    assert found["perplexity"] == pytest.approx(40)
    assert (found["divergence"], found["flip"]) == (0, 0)


def test_kl_is_that_of_the_listed_tokens_and_the_rest() -> None:
    """SciPy gives the same of the lumped distributions; all of the vocabulary gives KL itself."""
    from scipy.stats import entropy

    whole = told(compared(scores_of(Q, SERVED), scores_of(P, SERVED)))
    assert whole["divergence"] == pytest.approx(rel_entr(np.exp(P), np.exp(Q)).sum(axis=1).mean())
    assert whole["kl_tail"] == pytest.approx(0, abs=1e-12)
    listed = told(compared(scores_of(Q[:1], (0,), k=2), scores_of(P[:1], (0,))))
    assert listed["divergence"] == pytest.approx(entropy([0.5, 0.3, 0.2], [0.4, 0.4, 0.2]))
    assert listed["kl_tail"] == pytest.approx(0.2)
    assert (listed["measure"], listed["logprobs"]) == ("kl", "wire")


def test_a_copy_counts_as_the_candidate_where_nothing_was_served() -> None:
    """The same figures as from the wire, which goes first; a copy that tells no probabilities measures nothing."""
    served, reference = scores_of(Q, SERVED), scores_of(P, SERVED)
    on_wire = told(compared(served, reference))
    by_copy = told(compared(None, msgspec.structs.replace(reference, copy=served)))
    assert by_copy.pop("divergence_bins") == on_wire.pop("divergence_bins")
    assert (by_copy.pop("logprobs"), on_wire.pop("logprobs")) == ("copy", "wire")
    assert by_copy == pytest.approx(on_wire, nan_ok=True)
    assert by_copy["candidate_top1"] == pytest.approx(2 / 3)  # the last one is none of its likeliest
    both = told(compared(served, msgspec.structs.replace(reference, copy=reference)))
    assert both.pop("logprobs") == "wire"
    both.pop("divergence_bins")
    assert both == pytest.approx(on_wire, nan_ok=True)
    broken = scores_of(Q + 1, SERVED)
    found = told(compared(None, msgspec.structs.replace(reference, copy=broken)))
    assert (found["logprobs"], found["measure"]) == ("misaligned", "none")
    assert math.isnan(found["flip"])


def test_of_the_served_token_alone_a_bound_is_left() -> None:
    """Two cells: it, and all others."""
    from scipy.stats import entropy

    found = told(compared(scores_of(Q[:1], (0,), k=0), scores_of(P[:1], (0,))))
    assert found["divergence"] == pytest.approx(entropy([0.5, 0.5], [0.4, 0.6]))
    assert math.isnan(found["same_top1"])


def test_tokens_are_matched_by_spelling_where_ids_are_missing() -> None:
    """The same figures as by ids."""
    by_id = compared(
        msgspec.structs.replace(scores_of(Q, SERVED), tokens=(), top_tokens=()), scores_of(P, SERVED)
    )
    spelt = compared(scores_of(Q, SERVED, ids=False), scores_of(P, SERVED))
    for name in ("kl", "tv", "js", "same_top1", "perplexity_ratio"):
        np.testing.assert_allclose(spelt.detail[name], by_id.detail[name], rtol=1e-12)


def test_another_likeliest_token_is_a_flip_with_its_position() -> None:
    """At places where the reference is undecided nothing can differ."""
    found = told(compared(scores_of(Q, SERVED), scores_of(P, SERVED)))
    assert (found["flip"], found["same_top1"]) == (0, 1)  # 0.4 and 0.4 share the top; the last place is a tie
    turned = Q[:, ::-1]
    found = told(compared(scores_of(turned, SERVED), scores_of(P, SERVED)))
    assert (found["flip"], found["first_change"]) == (1, 0)
    assert found["same_top1"] == pytest.approx(1 / 3)
    ratio = math.exp(np.mean([turned[i, t] - P[i, t] for i, t in enumerate(SERVED)]))
    assert found["perplexity_ratio"] == pytest.approx(ratio)


def test_a_token_that_the_reference_does_not_list_is_less_likely_than_its_last() -> None:
    """So it is another one, unless all that is listed is as likely."""
    strange = np.log([[0.05, 0.05, 0.05, 0.85]])
    assert told(compared(scores_of(strange, (0,), k=2), scores_of(P[:1], (0,), k=2)))["flip"] == 1
    even = np.full((1, 4), math.log(0.25))
    assert told(compared(scores_of(strange, (0,), k=2), scores_of(even, (0,), k=2)))["flip"] == 0


def test_a_greedy_answer_without_log_probabilities_is_measured_by_regret() -> None:
    """What the reference loses by the token that was taken; with sampling it would tell nothing."""
    served = (1, 3, 0)
    found = told(compared(None, scores_of(P, served), GREEDY))
    assert found["divergence"] == pytest.approx((math.log(0.5) - math.log(0.3)) / 3)
    assert (found["flip"], found["first_change"], found["measure"]) == (1, 0, "regret")
    assert told(compared(None, scores_of(P, served), GREEDY, tie=0.6))["flip"] == 0
    sampled = told(compared(None, scores_of(P, served)))
    assert sampled["regret"] == found["regret"]
    assert math.isnan(sampled["flip"])
    assert math.isnan(sampled["divergence"])


def test_figures_of_tokens_have_the_answer_as_their_unit() -> None:
    """The share of changed tokens, and quantiles of the divergence over the positions; of sampled text there are none."""
    served = (1, 3, 0)
    found = told(compared(None, scores_of(P, served), GREEDY))
    lags = sorted(float(P[place].max() - P[place, token]) for place, token in enumerate(served))
    assert found["changed_tokens"] == pytest.approx(1 - found["top1_share"]) == pytest.approx(1 / 3)
    quantiles = [found[f"divergence_{name}"] for name in ("median", "p99", "max")]
    assert quantiles == pytest.approx([lags[1], lags[2], lags[2]])
    listed = told(compared(scores_of(Q, SERVED), scores_of(P, SERVED)))
    assert listed["changed_tokens"] == pytest.approx(1 - listed["same_top1"])
    assert listed["divergence_median"] <= listed["divergence"] <= listed["divergence_max"]
    sampled = told(compared(None, scores_of(P, served)))
    assert math.isnan(sampled["changed_tokens"])
    assert math.isnan(sampled["divergence_max"])
    assert sampled["divergence_bins"] is None
    assert counts_of(listed["divergence_bins"]).total() == listed["n_scored"]


def test_broken_is_known_of_each_answer_with_tokens() -> None:
    """Of an empty sampled one it is not: if such ones alone counted, all that count would be broken."""
    assert told(compared(None, scores_of(P, SERVED)))["broken"] == 0
    broken = Answer(text="{", finish_reason="stop", wants_json=True)
    assert told(compared(None, scores_of(P, SERVED), broken))["broken"] == 1
    assert math.isnan(told(compared(None, NO_SCORES, Answer(text="", is_empty=True)))["broken"])
    assert (
        told(compared(None, NO_SCORES, msgspec.structs.replace(GREEDY, text="", is_empty=True)))["broken"]
        == 1
    )


def test_log_probabilities_of_other_tokens_are_not_used() -> None:
    """The two sides cut the text into other tokens: what was scored was not served, and is no one's choice."""
    found = told(compared(scores_of(Q, (0, 2, 1), ids=False), scores_of(P, (1, 3, 1)), GREEDY))
    assert (found["logprobs"], found["measure"]) == ("misaligned", "none")
    assert math.isnan(found["flip"])
    assert math.isnan(found["divergence"])
    longer = scores_of(np.vstack([Q, Q[:1]]), (*SERVED, 2))  # the end, which the text does not hold
    assert told(compared(longer, scores_of(P, SERVED)))["logprobs"] == "wire"


@pytest.mark.parametrize(("likely", "flip"), [(0.3, math.nan), (0.6, 1)])
def test_a_list_of_the_served_token_alone_need_not_show_the_likeliest(likely: float, flip: float) -> None:
    """A chat of vLLM with `top_logprobs: 1`: only what more than half is on is sure to be the likeliest."""
    q = np.log([[0.9 - likely, likely, 0.05, 0.05]])
    listed = msgspec.structs.replace(
        scores_of(q, (1,)), top_tokens=((b"t1",),), top_ids=np.array([[1]]), top_logprobs=q[:, 1:2]
    )
    assert told(compared(listed, scores_of(P[:1], (1,))))["flip"] == pytest.approx(flip, nan_ok=True)


def _respelt(scores: Scores, spelling: dict[bytes, bytes]) -> Scores:
    rows = tuple(tuple(spelling.get(token, token) for token in row) for row in scores.top_tokens)
    tokens = tuple(spelling.get(token, token) for token in scores.tokens)
    return msgspec.structs.replace(scores, tokens=tokens, top_tokens=rows)


@pytest.mark.parametrize("spelling", [b"alike", "\N{REPLACEMENT CHARACTER}".encode(), b""])
def test_tokens_with_the_same_text_make_no_flip(spelling: bytes) -> None:
    """Parts of characters mostly. No flip comes of them."""
    from scipy.stats import entropy

    both = {b"t0": spelling, b"t1": spelling}
    candidate, reference = (
        _respelt(scores_of(side[:1], (2,), ids=ids), both) for side, ids in ((Q, False), (P, True))
    )
    found = told(compared(candidate, reference))
    assert found["divergence"] == pytest.approx(entropy([0.15, 0.05, 0.8], [0.10, 0.10, 0.8]))
    assert math.isnan(found["flip"])
    assert math.isnan(found["same_top1"])


def test_a_part_of_a_character_may_be_spelt_in_many_ways() -> None:
    """What one server leaves empty another one marks; the tokens are the same by their ids."""
    mark = "\N{REPLACEMENT CHARACTER}".encode()
    candidate = _respelt(scores_of(Q, SERVED), {b"t0": "ü".encode()})
    reference = _respelt(scores_of(P, SERVED), {b"t0": mark})
    found = told(compared(candidate, reference, GREEDY))
    assert (found["logprobs"], found["flip"]) == ("wire", 0)


PARTS = ["\N{REPLACEMENT CHARACTER}"] * 2


@pytest.mark.parametrize(
    ("served", "scored", "source"),
    [
        (["a", "", "ö"], ["a", *PARTS], "wire"),  # as vLLM spells it, and as a tokenizer does
        (["a", *PARTS], ["a", "", "ö"], "wire"),
        (["", "", "🙂"], ["", "", "🙂"], "wire"),
        (["a", "", "ö", "</s>"], ["a", "ö"], "misaligned"),
        (["a", "ö"], ["a", PARTS[0]], "misaligned"),
        (["a", "b", "", "ö"], ["a", *PARTS], "misaligned"),
    ],
)
def test_characters_of_several_tokens_are_found_without_ids(
    served: list[str], scored: list[str], source: str
) -> None:
    """They are the same tokens where both sides have their parts at the same places."""
    candidate, reference = (
        msgspec.structs.replace(
            scores_of(np.tile(P[:1], (len(tokens), 1)), (0,) * len(tokens), ids=ids),
            tokens=tuple(token.encode() for token in tokens),
        )
        for tokens, ids in ((served, False), (scored, True))
    )
    found = told(compared(candidate, reference))
    assert found["logprobs"] == source
    assert found["flip"] != 1


def test_lists_in_another_spelling_are_not_used() -> None:
    """Some servers leave out the space before a word: by name nothing would be found."""
    candidate = _respelt(scores_of(Q, SERVED), {b"t%d" % one: b" t%d" % one for one in range(4)})
    found = told(compared(candidate, scores_of(P, SERVED), GREEDY))
    assert (found["logprobs"], found["measure"], found["flip"]) == ("misaligned", "regret", 0)


def test_what_rounding_leaves_of_a_tail_makes_nothing_infinite() -> None:
    """Log-probabilities come in float32, and their sum is 1 to seven digits."""
    rounded = scores_of(P.astype(np.float32).astype(np.float64), SERVED)
    found = told(compared(rounded, scores_of(P, SERVED)))
    assert found["divergence"] < 1e-6


@pytest.mark.parametrize(
    ("answer", "flip", "json_valid"),
    [
        (Answer(text='{"a": 1}', wants_json=True), 0, True),
        (Answer(text='{"a": 1', wants_json=True, finish_reason="length"), 1, False),
        (Answer(text='{"b": 1}', wants_json=True, schema={"type": "object", "required": ["a"]}), 1, False),
        (
            Answer(
                text='{"a": {}}',
                wants_json=True,
                schema={"type": "object", "properties": {"a": {"type": "object", "required": ["b"]}}},
            ),
            1,
            False,
        ),
        (
            Answer(text="no", wants_json=True, calls=(ToolCall(name="f", arguments="{}"),), tools={"f": {}}),
            0,
            None,
        ),
        (
            Answer(
                text='{"a": null}',
                wants_json=True,
                schema={
                    "properties": {"a": {"type": ["object", "null"], "properties": {}, "required": ["b"]}}
                },
            ),
            0,
            True,
        ),
        (Answer(text="plain"), math.nan, None),
    ],
    ids=[
        "valid",
        "cut off",
        "lacks a key",
        "lacks a key within",
        "calls a tool instead",
        "may be null",
        "not asked for",
    ],
)
def test_json_that_was_asked_for(answer: Answer, flip: float, *, json_valid: bool | None) -> None:
    """Broken JSON is a flip, whatever the tokens say."""
    found = told(compared(None, scores_of(P, SERVED), answer))
    assert found["json_valid"] is json_valid
    assert found["flip"] == pytest.approx(flip, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("find", '{"where": "x"}', True),
        ("find", '{"what": "x"}', False),
        ("find", '{"where": ', False),
        ("find", '"x"', False),
        ("fnid", '{"where": "x"}', False),
    ],
)
def test_calls_of_tools(name: str, arguments: str, *, valid: bool) -> None:
    """Of a tool that was offered, with the arguments it requires."""
    tools = {"find": {"type": "object", "properties": {"where": {}}, "required": ["where"]}}
    answer = Answer(text="", calls=(ToolCall(name=name, arguments=arguments),), tools=tools)
    found = told(compared(None, NO_SCORES, answer))
    assert (found["tool_calls_valid"], found["flip"]) == (valid, not valid)


def test_an_answer_of_nothing_is_an_outcome() -> None:
    """No token to be scored: a greedy one flips, and has no divergence. An end that was chosen is a token.

    A sampled one is not measured, as any other of the same traffic: alone it would be all that counts.
    """
    nothing = Answer(text="", is_empty=True, finish_reason="length", is_greedy=True)
    found = compared(None, NO_SCORES, nothing)
    assert (found.flip.tolist(), found.candidate_finite.tolist()) == ([1.0], [False])
    assert math.isnan(told(found)["divergence"])
    found = compared(None, NO_SCORES, msgspec.structs.replace(nothing, is_greedy=False))
    assert (math.isnan(found.flip[0]), found.candidate_finite.tolist()) == (True, [False])
    ended = Answer(text="", is_empty=True, finish_reason="stop", is_greedy=True)
    found = compared(None, scores_of(P[:1], (0,)), ended)
    assert (found.flip.tolist(), found.divergence.tolist()) == ([0.0], [0.0])


def test_what_is_not_a_number_is_an_outcome() -> None:
    """Of the candidate a flip; of the reference nothing is said at all."""
    above = scores_of(Q, SERVED)
    above = msgspec.structs.replace(above, logprobs=above.logprobs + 3)
    found = compared(above, scores_of(P, SERVED))
    assert (found.flip.tolist(), found.candidate_finite.tolist()) == ([1.0], [False])
    assert math.isnan(told(found)["divergence"])
    spoilt = scores_of(P, SERVED)
    spoilt = msgspec.structs.replace(spoilt, logprobs=np.array([-1.0, np.nan, -1.0]))
    found = compared(scores_of(Q, SERVED), spoilt)
    assert not found.reference_finite[0]
    assert np.isnan(found.flip[0])
    assert np.isnan(found.divergence[0])


def test_a_position_without_figures_is_left_out() -> None:
    """Some servers tell none of the first."""
    some = scores_of(Q, SERVED)
    some = msgspec.structs.replace(some, logprobs=np.array([np.nan, *some.logprobs[1:]]))
    found = told(compared(some, scores_of(P, SERVED)))
    assert found["divergence"] == pytest.approx(rel_entr(np.exp(P), np.exp(Q)).sum(axis=1)[1:].mean())


def test_sides_of_another_number_of_answers_are_refused() -> None:
    """They cannot be paired."""
    one, answers = scores_of(P, SERVED), objects([GREEDY, GREEDY])
    with pytest.raises(QuarantineError, match="2 answers, but 1 were scored"):
        GenerationComparator(Generation()).compare(
            {SCORES: objects([one, one]), ANSWER: answers}, {SCORES: objects([one])}
        )


FORCED = Answer(
    text="said", finish_reason="stop", wants_json=False, has_grammar=True, forced=(True, False, True)
)


def test_positions_without_a_choice_are_left_out() -> None:
    """Of divergence and first choices; without the knowledge of them every position counts, and it is said that there was a grammar."""
    reference = msgspec.structs.replace(scores_of(P, SERVED), copy=scores_of(Q, SERVED))
    unlike = msgspec.structs.replace(FORCED, forced=(False, True, True))
    unknown = msgspec.structs.replace(FORCED, forced=None)
    left, one, whole = (told(compared(None, reference, each)) for each in (FORCED, unlike, unknown))
    assert (left["n_forced"], left["grammar"], whole["n_forced"], whole["grammar"]) == (2, True, None, True)
    assert left["divergence"] == pytest.approx(0.0, abs=1e-12)
    assert one["divergence"] == pytest.approx(rel_entr(np.exp(P[0]), np.exp(Q[0])).sum())
    assert whole["divergence"] > one["divergence"] / 3
    assert left["changed_tokens"] == 0.0
    assert counts_of(left["divergence_bins"]).total() == 1
    nothing = told(compared(None, reference, msgspec.structs.replace(FORCED, forced=(True,) * 3)))
    assert math.isnan(nothing["divergence"])
    assert math.isnan(nothing["flip"])
    assert nothing["n_forced"] == 3


def test_what_a_grammar_left_is_told_of_the_scored_tokens_alone() -> None:
    """Tokens of another text than the reference read may have had another choice."""
    reference = scores_of(P, SERVED)
    spelt = msgspec.structs.replace(FORCED, forced_tokens=reference.tokens)
    other = msgspec.structs.replace(FORCED, forced_tokens=tuple(b"-" for _ in reference.tokens))
    short = msgspec.structs.replace(FORCED, forced=(True,))
    found = [told(compared(None, reference, each))["n_forced"] for each in (spelt, other, short)]
    assert found == [2, None, None]


CUT: dict[str, Any] = {"finish_reason": "length", "max_tokens": 9}
PIECE = "the same piece, "


@pytest.mark.parametrize(
    ("text", "finish_reason", "repeats"),
    [
        (PIECE * 30, "length", True),
        ("Once there was a fox. " * 2 + PIECE * 20, "length", True),
        ("-" * 9_000, "length", True),
        (PIECE * 30, "stop", False),  # it was asked to, and ended
        (PIECE * 5, "length", False),  # too short to tell
        ("Once there was a fox, and it was quick. " * 9 + PIECE * 3, "length", False),
        (PIECE * 30 + "no more", "length", False),
        ("".join(f"{n}, " for n in range(300)), "length", False),
    ],
)
def test_an_answer_that_only_repeats_one_piece_until_its_limit_is_broken(
    text: str, finish_reason: str, *, repeats: bool
) -> None:
    """The second half of it four times the same; a list that goes on is none."""
    answer = Answer(text=text, finish_reason=finish_reason, temperature=1.0)
    found = told(compared(None, scores_of(P, SERVED), answer))
    assert found["broken"] == float(repeats)
    assert found["repeats"] == (repeats or None)


@pytest.mark.parametrize(
    ("is_repeatable", "own", "broken"),
    [
        (True, None, 0.0),  # a sound small model does so, too
        (True, FreeAnswer(outcome=FreeAnswerOutcome.DONE, text="a fox", finish_reason="stop"), 1.0),
        (True, FreeAnswer(outcome=FreeAnswerOutcome.DONE, text=PIECE * 99, **CUT), 0.0),
        (False, FreeAnswer(outcome=FreeAnswerOutcome.DONE, text=PIECE * 99, **CUT), 0.0),
        (False, FreeAnswer(outcome=FreeAnswerOutcome.DONE, text="a fox", **CUT), 1.0),
        (False, FreeAnswer(outcome=FreeAnswerOutcome.DONE, text="a", finish_reason="length", max_tokens=8), 0.0),
        (False, FreeAnswer(outcome=FreeAnswerOutcome.LATE), 1.0),
    ],
)  # fmt: skip
def test_what_the_reference_repeats_too_is_not_broken(
    own: FreeAnswer | None, broken: float, *, is_repeatable: bool
) -> None:
    """Its own answer to the same request decides; without one nothing is said of an answer that was not drawn."""
    answer = Answer(
        text=PIECE * 30,
        n_tokens=9,
        finish_reason="length",
        is_repeatable=is_repeatable,
        is_greedy=is_repeatable,
    )
    scores = msgspec.structs.replace(scores_of(P, SERVED), free_answer=own)
    assert told(compared(None, scores, answer))["broken"] == broken
