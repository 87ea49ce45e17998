r"""The comparator for generated text: the likelihood of the served tokens under the reference, per answer, in float64.

The reference gets the prompt and the served tokens, and returns the log-probability of each (teacher forcing). With p the
reference's and q the candidate's distribution at a position, t the token served there:

- `nll` = mean of -ln p(t), nats per token; `perplexity` = exp(nll). `rank_mean`, `rank_max` of t under p, where 1 is the
  most likely; `top1_share` = share of positions where no token has a higher p than t.
- `regret` = mean of max ln p - ln p(t), nats per token: 0 if each token is the reference's most likely one.

If the client asked for log-probabilities, or a replica of the candidate scored the same tokens, q is known for the served
token and for the k most likely ones. Each token with known p and q is a cell, and all other tokens together are one more
cell, the tail. For the two distributions over the cells, as means over the positions:

- `kl` = sum p ln(p / q), nats per token. Lumping outcomes never raises a divergence (data processing inequality: Cover
  and Thomas, Elements of Information Theory, 2.8), so it is a lower bound of KL over the vocabulary, exact where the
  reference leaves the tail nothing. It has no upper bound: q may be next to zero on a token of the tail. `kl_tail` is the
  reference's mass there.
- `tv` = sum |p - q| / 2, a lower bound in the same way, and `tv_upper`: |p - q| adds up to at most p + q over the tail.
- `js` as of classifiers, a lower bound, and `js_upper` = js + mean of (P + Q) / 2 h(P / (P + Q)), P and Q being the
  tail's masses and h the binary entropy: by the chain rule that is the most that the tail can hide.
- `same_top1` = share of positions whose most likely token is the same, `first_change` the first position (from 0) where it
  is not. `perplexity_ratio` = exp of the mean of ln q(t) - ln p(t): the reference's perplexity over the candidate's.

Two tokens are equally likely if ln p differs by at most `tie`. `divergence` is `kl`; without log-probabilities it is
`regret` for an answer that had to be greedy, else undefined. `flip` is 1 if

- the candidate's most likely token is not among the reference's most likely ones at some position; without
  log-probabilities, for a greedy answer, some served token is not;
- tool calls, or requested JSON, are another value than in the reference's own answer (`free_answer`), where the request is repeatable:
  it decides in place of the tokens;
- requested JSON, or a tool call, is not valid, or an answer was cut off while still empty, or repeated itself until it was cut off;
- the candidate's log-probabilities are above zero, or it returned nothing at all.

It is 0 only if something decided: the answer had to be greedy, or the candidate's most likely token is known at nine tenths of
its positions at least, or there was JSON or a tool call to be checked. Else it is undefined, also for an empty answer: were
those alone counted, every such answer that counts would have flipped, whatever their share. What a check alone decided has no
`divergence`, so the answer counts as not measured (`quantdrift.core.tasks`).

- `changed_tokens` = share of the positions at which the candidate's most likely token is known, or had to be served, and is not one
  of the reference's most likely ones; `divergence_median`, `divergence_p99` and `divergence_max` are quantiles of the divergence over the positions, and
  `divergence_bins` is its histogram, which can be added up over answers (`quantdrift.core.token_histogram`).
- `far_tokens` = share of the positions whose divergence is above `models.budget.divergence_p99`, where that is set.
- `broken` is 1 where the answer is not valid as JSON or a tool call, cut off while empty, repeats itself, not finite, or another value than the
  reference's; 0 where anything was scored or checked.

- `unlikely` = mean of how far a sampled token is among the least likely ones of the reference (`quantdrift.models.language.unlikely`),
  with or without log-probabilities: 0.05 for equal models. It is watched where the answer was drawn at a known temperature and
  without penalties or grammar, and then the answer counts as measured.

The end of answers. With e_i the reference's probability of a token that ends the answer at position i, given the prompt and all served tokens
before it, and m the number of positions at which the candidate went on (all of them if a limit cut it):

- `end_p` = e_m, its probability of ending where the candidate ended itself, in [0, 1]: low if the candidate stopped too
  early.
- `early_end` = 1 - prod (1 - e_i) over i < m, in [0, 1]: the probability that it would have ended earlier on the same
  tokens. High if the candidate's answer goes on for too long.
- `kept_share` = (1 / m) sum over i = 1..m of prod (1 - e_j) over j < i, in [0, 1]: E min(L, m) / m, where L is the length at
  which it ends on that path (the restricted mean survival time: Royston and Parmar, BMC Medical Research Methodology 13:152,
  2013).

Under a grammar. A position at which it left one token says nothing of the model, so it is in none of the measures that compare p with q,
nor in `changed_tokens` and `first_change`. `n_forced` is how many there are, where the served lists show it: else it is null, and `grammar` says that there
was one.

All of it is at temperature 1, before filters. A server lists only the most likely tokens: an unlisted end token has at most
the probability of the least likely listed one. `early_end` is then a lower bound, `early_end_upper` and `kept_share` are
upper bounds; for a model in a folder they are exact, and `early_end_upper` equals `early_end`.

All measures but those of the end are about the first `max_tokens` tokens. The reference's free-running answers are compared
in `free_answer`.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from quantdrift.core.config.schema import Generation
from quantdrift.core.token_histogram import histogram
from quantdrift.models.comparators.protocol import Divergences, Flags, Values
from quantdrift.models.comparators.text.free_answer import changed_structure, compare_free_answers
from quantdrift.models.comparators.text.validity import calls_valid, is_broken, is_stuck, json_valid
from quantdrift.models.language.answer import Answer
from quantdrift.models.language.scoring import ANSWER, NO_SCORES, SCORES, Scores
from quantdrift.models.language.unlikely import is_drawn, unlikely_tokens
from quantdrift.models.tensors.arrays import Outputs, output_error

Codes = npt.NDArray[np.int64]

LN2: Final = float(np.log(2.0))
_ABOVE_ONE: Final = 1e-3  # a log-probability may be rounded to a little more than zero
_SAME: Final = 1e-6
_LEAST_TAIL: Final = 1e-7  # the size of a tail's rounding error; a larger q only lowers the bound
_NO_TOKEN: Final = -1
_UNKNOWN: Final = -2
_MOST: Final = (
    0.9  # spellings are ambiguous at some positions; without a list of tokens far more are not known
)
_EMPTY_ANSWER: Final = Answer(text="")
_REPLACED: Final = "\N{REPLACEMENT CHARACTER}".encode()


class _Side(msgspec.Struct, frozen=True, kw_only=True):
    """One model's scores at all positions of a batch: the served token in the first row, the most likely ones below.

    Parameters
    ----------
    codes
        (1 + k, positions), the token; negative if there is none, or if its spelling is ambiguous.
    logprobs
        (1 + k, positions), NaN if there is none.
    """

    codes: Codes
    logprobs: Values


class GenerationComparator:
    """Compares answers.

    Parameters
    ----------
    options
        `models.generation`.
    far
        `models.budget.divergence_p99`: what a token may diverge by, nats; 0: nobody asks.
    """

    outputs: tuple[str, ...] = (SCORES,)

    def __init__(self, options: Generation, far: float = 0.0) -> None:
        self._far = far
        self._tie = options.tie

    def compare(self, candidate: Outputs, reference: Outputs) -> Divergences:
        """Return the divergence of each answer.

        Parameters
        ----------
        candidate
            `scores`, a `Scores` each or None where none were served, and `answer`, an `Answer` each : (items,).
            Without `answer` only the scores are compared, as for a reference with itself.
        reference
            `scores`, a `Scores` each : (items,); the replica's scores in them replace those that were not served.

        Raises
        ------
        QuarantineError
            Reason `output`: the sides differ in number of items.
        """
        on_wire: list[Scores | None] = candidate[SCORES].tolist()
        answers: list[Answer] = (
            candidate[ANSWER].tolist() if ANSWER in candidate else [_EMPTY_ANSWER] * len(on_wire)
        )
        reference_scores: list[Scores] = reference[SCORES].tolist()
        if not len(answers) == len(on_wire) == len(reference_scores):
            raise output_error(
                f"the candidate returned {len(on_wire)} answers, but {len(reference_scores)} were scored"
            )
        candidate_scores = [
            of.copy if served is None else served
            for served, of in zip(on_wire, reference_scores, strict=True)
        ]
        n_items = len(answers)
        owner = np.repeat(np.arange(n_items), [len(score.logprobs) for score in reference_scores])
        usable = [
            score if score is not None and _is_finite(score) and _aligned(score, of) else None
            for score, of in zip(candidate_scores, reference_scores, strict=True)
        ]
        p, q = _sides([score if _is_finite(score) else _unknown(score) for score in reference_scores], usable)
        lag = _highest(p.logprobs) - p.logprobs[0]
        likeliest = lag <= self._tie
        cells = _cells(p, q)
        is_free, n_forced = _free_positions(answers, reference_scores)
        has_logprob = ~np.isnan(q.logprobs[0]) & is_free
        same, has_top = self._same_top(p, q, cells)
        has_top &= is_free
        greedy = np.array(
            [
                answer.is_greedy and _is_of(answer, len(of.logprobs))
                for answer, of in zip(answers, reference_scores, strict=True)
            ]
        ) & np.array(
            [
                score is None or use is not None or score.ids[: len(of.ids)] == of.ids
                for score, use, of in zip(candidate_scores, usable, reference_scores, strict=True)
            ]
        )
        listed = has_logprob & ~np.isnan(q.logprobs[1:]).all(axis=0)
        own_top = _highest(q.logprobs) - q.logprobs[0] <= self._tie
        decided = np.where(has_top, ~same, ~likeliest & greedy[owner]) & is_free

        def mean(values: Values, where: Flags | None = None) -> Values:
            return mean_of_items(values, owner, n_items, where)

        q_finite = np.array([_is_finite(score) for score in on_wire]) & np.array(
            [
                not (answer.is_empty and not len(of.logprobs))
                for answer, of in zip(answers, reference_scores, strict=True)
            ]
        )
        p_finite = np.array(
            [_is_finite(score) and not np.isnan(score.logprobs).any() for score in reference_scores]
        )
        undefined = np.where(p_finite, 0.0, np.nan)
        nll = mean(-p.logprobs[0]) + undefined
        lags = mean(lag) + undefined
        over_cells = {name: mean(values, has_logprob) + undefined for name, values in cells.figures.items()}
        with_logprobs = ~np.isnan(over_cells["kl"])
        divergence = np.where(with_logprobs, over_cells["kl"], np.where(greedy, lags, np.nan))
        stuck = [
            is_stuck(answer, of.free_answer) for answer, of in zip(answers, reference_scores, strict=True)
        ]
        broken = np.array([is_broken(answer) for answer in answers]) | stuck
        changed = np.bincount(owner, decided, n_items) > 0
        n_free = np.bincount(owner, is_free, n_items)
        known_top = (n_free > 0) & (np.bincount(owner, has_top, n_items) >= _MOST * n_free)
        has_positions = np.bincount(owner, minlength=n_items) > 0
        not_logprobs = np.array([not _is_finite(score) for score in on_wire])
        checked = np.array(
            [json_valid(answer) is not None or calls_valid(answer) is not None for answer in answers]
        )
        decides = greedy | (has_positions & known_top) | not_logprobs | checked
        own = compare_free_answers(answers, reference_scores)
        structure = np.array(
            [
                changed_structure(answer, score, same=same)
                for answer, score, same in zip(
                    answers, reference_scores, own["own_same"].tolist(), strict=True
                )
            ]
        )
        by_value = ~np.isnan(structure)
        changed = np.where(by_value, structure == 1, changed)
        flip = np.where(p_finite & (decides | by_value), changed | broken | ~q_finite, np.nan)
        of_form = np.where(
            p_finite & (decides | by_value | has_positions),
            broken | ~q_finite | (by_value & (structure == 1)),
            np.nan,
        )
        at_positions = np.where(
            with_logprobs[owner],
            np.where(has_logprob, cells.figures["kl"], np.nan),
            np.where(greedy[owner], lag, np.nan),
        )
        with np.errstate(over="ignore", invalid="ignore"):
            ratio, perplexity = np.exp([mean(q.logprobs[0] - p.logprobs[0], has_logprob) + undefined, nll])
        ranks = np.concatenate([*(score.ranks for score in reference_scores), np.empty(0)])
        return Divergences(
            flip=flip,
            divergence=np.where(q_finite, divergence, np.nan),
            candidate_finite=q_finite,
            reference_finite=p_finite,
            detail={
                "broken": of_form,
                "candidate_top1": mean(own_top.astype(np.float64), listed) + undefined,
                "changed_tokens": mean(decided.astype(np.float64), has_top | greedy[owner]) + undefined,
                **quantiles_of_items(at_positions, owner, n_items),
                "divergence_bins": _column(bins_of_items(at_positions, owner, n_items)),
                **(self._far_tokens(at_positions, owner, n_items) if self._far else {}),
                "finish_reason": _column(answer.finish_reason or None for answer in answers),
                "grammar": _column(answer.has_grammar or None for answer in answers),
                "first_change": first_of_items(decided, owner, n_items) + undefined,
                "json_valid": _column(json_valid(answer) for answer in answers),
                "logprobs": _column(map(_source, on_wire, candidate_scores, usable)),
                "measure": _column(np.select([with_logprobs, greedy], ["kl", "regret"], "none").tolist()),
                "n_forced": _column(n_forced),
                "n_scored": np.array([len(score.logprobs) for score in reference_scores]),
                "n_tokens": _column(answer.n_tokens for answer in answers),
                "nll": nll,
                "perplexity": perplexity,
                "perplexity_ratio": ratio,
                "rank_max": largest_of_items(ranks, owner, n_items) + undefined,
                "rank_mean": mean(ranks, ~np.isnan(ranks)) + undefined,
                "regret": lags,
                "repeats": _column(is_so or None for is_so in stuck),
                "same_top1": mean(same.astype(np.float64), has_top) + undefined,
                "tool_calls_valid": _column(calls_valid(answer) for answer in answers),
                "top1_share": mean(likeliest.astype(np.float64)) + undefined,
                "unlikely": np.array(list(map(_unlikely, answers, reference_scores))) + undefined,
                **over_cells,
                **{name: values + undefined for name, values in endings(reference_scores).items()},
                **own,
            },
        )

    def _far_tokens(self, at_positions: Values, owner: Codes, n_items: int) -> dict[str, Values]:
        """Return the share of each item's positions that diverge by more than the budget allows; NaN if no divergence is known."""
        far = (at_positions > self._far).astype(np.float64)
        return {"far_tokens": mean_of_items(far, owner, n_items, ~np.isnan(at_positions))}

    def _same_top(self, p: _Side, q: _Side, cells: "_Cells") -> tuple[Flags, Flags]:
        """Return whether the most likely token is the same, up to ties, and at which positions that is known."""
        tops = q.logprobs >= _highest(q.logprobs) - self._tie
        # A token that the reference does not list is at most as likely as the last listed one.
        least = np.min(np.where(np.isnan(p.logprobs), np.inf, p.logprobs), axis=0)
        highest = _highest(p.logprobs)
        fits = highest - np.where(np.isnan(cells.p), least, cells.p) <= self._tie
        unclear = (tops & (q.codes == _UNKNOWN)).any(axis=0)
        unclear |= ((p.logprobs == highest) & (p.codes == _UNKNOWN)).any(axis=0)
        # vLLM adds the served token to a chat's list and cuts the list after it: alone it need not be the most likely one.
        listed = ~np.isnan(q.logprobs[1:])
        other = (q.codes[1:] != q.codes[0]) | (np.abs(q.logprobs[1:] - q.logprobs[0]) > _SAME)
        shows_top = (listed & other).any(axis=0) | (listed.any(axis=0) & (q.logprobs[0] >= -LN2))
        has_top = ~np.isnan(q.logprobs[0]) & shows_top & ~unclear
        return np.asarray((tops & fits).any(axis=0)), np.asarray(has_top)


class _Cells(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of both sides over the tokens that the candidate lists.

    Parameters
    ----------
    p
        (1 + k, positions), the reference's ln p of them; NaN where unknown.
    figures
        By name : (positions,).
    """

    p: Values
    figures: dict[str, Values]


def _cells(p: _Side, q: _Side) -> _Cells:
    of_q = np.full(q.codes.shape, np.nan)
    for codes, logprobs in zip(p.codes, p.logprobs, strict=True):
        of_q = np.where((q.codes == codes) & (codes >= 0), logprobs, of_q)
    # Teacher forcing: the first row is the served token, on both sides.
    of_q[0] = p.logprobs[0]
    in_both = ~np.isnan(of_q) & ~np.isnan(q.logprobs)
    in_both[1:] &= (q.codes[1:] >= 0) & (q.codes[1:] != q.codes[0])
    mass_p = np.where(in_both, np.exp(np.where(in_both, of_q, 0.0)), 0.0)
    mass_q = np.where(in_both, np.exp(np.where(in_both, q.logprobs, 0.0)), 0.0)
    tail_p = np.maximum(1.0 - mass_p.sum(axis=0), 0.0)
    tail_q = np.maximum(1.0 - mass_q.sum(axis=0), 0.0)
    p_all, q_all = np.vstack([mass_p, tail_p]), np.vstack([mass_q, tail_q])
    with np.errstate(divide="ignore", invalid="ignore"):
        by_logs = np.where(mass_p > 0, mass_p * (of_q - q.logprobs), 0.0)
        of_tail = np.where(tail_p > 0, tail_p * np.log(tail_p / np.maximum(tail_q, _LEAST_TAIL)), 0.0)
        halves = [
            np.where(probabilities > 0, probabilities * np.log(2 * probabilities / (p_all + q_all)), 0.0).sum(
                axis=0
            )
            for probabilities in (p_all, q_all)
        ]
        both = tail_p + tail_q
        hidden = sum(np.where(tail > 0, tail * np.log(both / tail), 0.0) for tail in (tail_p, tail_q)) / 2
    js = np.clip((halves[0] + halves[1]) / 2, 0.0, LN2)
    tv = np.abs(p_all - q_all).sum(axis=0) / 2
    tv_upper = (np.abs(mass_p - mass_q).sum(axis=0) + both) / 2
    figures = {
        "kl": np.maximum(by_logs.sum(axis=0) + of_tail, 0.0),
        "kl_tail": tail_p,
        "tv": tv,
        "tv_upper": np.clip(tv_upper, tv, 1.0),
        "js": js,
        "js_upper": np.minimum(js + hidden, LN2),
    }
    return _Cells(p=of_q, figures=figures)


def _sides(reference_scores: Sequence[Scores], usable: Sequence[Scores | None]) -> tuple[_Side, _Side]:
    """Return both sides at all positions. Each token has a code: its id, or a number for its spelling."""
    codes_by_spelling: dict[bytes, int] = {}
    sides: tuple[list[_Side], list[_Side]] = ([], [])
    for of_p, of_q in zip(reference_scores, usable, strict=True):
        n_positions = len(of_p.logprobs)
        by_id = of_q is None or not of_q.tokens
        p_side, q_side = (
            _unambiguous(_side(side or NO_SCORES, n_positions, None if by_id else codes_by_spelling))
            for side in (of_p, of_q)
        )
        if (p_side.codes[1:] < 0).all():  # the reference has only spellings, the candidate ids
            q_side = _Side(codes=q_side.codes[:1], logprobs=q_side.logprobs[:1])
        sides[0].append(p_side)
        sides[1].append(q_side)
    return _joined(sides[0]), _joined(sides[1])


def _side(scores: Scores, n_positions: int, codes_by_spelling: dict[bytes, int] | None) -> _Side:
    """Return the scores of one answer : (1 + k, `n_positions`)."""
    n_known = min(len(scores.logprobs), n_positions)
    width = scores.top_logprobs.shape[1]
    codes = np.full((1 + width, n_positions), _NO_TOKEN, dtype=np.int64)
    logprobs = np.full((1 + width, n_positions), np.nan)
    logprobs[0, :n_known] = scores.logprobs[:n_known]
    logprobs[1:, :n_known] = scores.top_logprobs[:n_known].T
    if n_known and codes_by_spelling is None:
        codes[0, :n_known] = scores.ids[:n_known]
        codes[1:, :n_known] = scores.top_ids[:n_known].T
    elif n_known and codes_by_spelling is not None:
        codes[0, :n_known] = [_code(token, codes_by_spelling) for token in scores.tokens[:n_known]]
        rows = [[_code(token, codes_by_spelling) for token in row] for row in scores.top_tokens[:n_known]]
        codes[1:, :n_known] = np.array(rows, dtype=np.int64).reshape(n_known, width).T
    codes[np.isnan(logprobs)] = _NO_TOKEN
    return _Side(codes=codes, logprobs=logprobs)


def _code(token: bytes, codes_by_spelling: dict[bytes, int]) -> int:
    return _UNKNOWN if is_part(token) else codes_by_spelling.setdefault(token, len(codes_by_spelling))


def _unambiguous(side: _Side) -> _Side:
    """Remove the codes of different tokens with the same spelling."""
    codes = side.codes.copy()
    for row in range(len(codes)):
        for other in range(row):
            alike = (side.codes[row] == side.codes[other]) & (side.codes[row] >= 0)
            if other == 0:  # the served token is mostly listed as well
                alike &= np.abs(side.logprobs[row] - side.logprobs[other]) > _SAME
            codes[row, alike] = codes[other, alike] = _UNKNOWN
    return _Side(codes=codes, logprobs=side.logprobs)


def _joined(sides: Sequence[_Side]) -> _Side:
    width = max((len(side.codes) for side in sides), default=1)
    return _Side(
        codes=np.concatenate([_filled(side.codes, width, _NO_TOKEN) for side in sides], axis=1),
        logprobs=np.concatenate([_filled(side.logprobs, width, np.nan) for side in sides], axis=1),
    )


def _filled(rows: npt.NDArray[Any], width: int, filler: float) -> npt.NDArray[Any]:
    return np.pad(rows, ((0, width - len(rows)), (0, 0)), constant_values=filler)


def _aligned(candidate_scores: Scores, reference_scores: Scores) -> bool:
    """Return whether both scored the same tokens. The candidate may also have the end token, which texts do not contain."""
    n_scored = len(reference_scores.logprobs)
    if len(candidate_scores.logprobs) < n_scored:
        return False
    if candidate_scores.ids:
        return candidate_scores.ids[:n_scored] == reference_scores.ids and (
            not candidate_scores.tokens
            or spelt_alike(candidate_scores.tokens[:n_scored], reference_scores.tokens)
        )
    return same_tokens(candidate_scores.tokens[:n_scored], reference_scores.tokens)


def _is_of(answer: Answer, n_scored: int) -> bool:
    """Return whether `n_scored` tokens can be the served ones, and not another tokenisation of the text.

    An end token is not part of the text, and a client's stop sequence removes any number of tokens.
    """
    if answer.n_tokens is None:
        return True
    n_less = answer.n_tokens - n_scored
    if answer.is_cut:
        return n_less >= 0
    return n_less == 0 or (n_less == 1 and answer.finish_reason != "length")


def _free_positions(
    answers: Sequence[Answer], reference_scores: Sequence[Scores]
) -> tuple[Flags, list[int | None]]:
    """Return which positions of all answers had a choice, as far as it is known, and how many of each answer had none; None: it is not known."""
    forced_of = [_forced(answer, of) for answer, of in zip(answers, reference_scores, strict=True)]
    is_free = [
        np.ones(len(of.logprobs), dtype=np.bool_) if forced is None else ~forced
        for forced, of in zip(forced_of, reference_scores, strict=True)
    ]
    n_forced = [None if forced is None else int(forced.sum()) for forced in forced_of]
    return np.concatenate([*is_free, np.empty(0, dtype=np.bool_)]), n_forced


def _forced(answer: Answer, scores: Scores) -> Flags | None:
    """Return at which positions a grammar left no choice; None: there was none, or it is not known of the tokens that were scored."""
    n_scored = len(scores.logprobs)
    if answer.forced is None or len(answer.forced) < n_scored:
        return None
    if answer.forced_tokens and not same_tokens(answer.forced_tokens[:n_scored], scores.tokens):
        return None
    return np.array(answer.forced[:n_scored], dtype=np.bool_)


def _unlikely(answer: Answer, scores: Scores) -> float:
    """Return the mean of x over the tokens of an answer; NaN if it was not drawn, or others were scored than were served."""
    if (
        not len(scores.logprobs)
        or not is_drawn(answer.temperature)
        or not _is_of(answer, len(scores.logprobs))
    ):
        return math.nan
    return float(unlikely_tokens(scores, answer.temperature).mean())


def _is_finite(scores: Scores | None) -> bool:
    if scores is None:
        return True
    highest = np.concatenate([scores.logprobs, scores.top_logprobs.ravel()])
    return not bool((highest > _ABOVE_ONE).any())


def _unknown(scores: Scores) -> Scores:
    """Return scores of the same tokens without a log-probability."""
    return msgspec.structs.replace(
        scores,
        logprobs=np.full_like(scores.logprobs, np.nan),
        top_logprobs=np.full_like(scores.top_logprobs, np.nan),
    )


def _source(on_wire: Scores | None, candidate_scores: Scores | None, usable: Scores | None) -> str:
    if candidate_scores is None:
        return "unavailable"
    if usable is None:
        return "misaligned"
    return "copy" if on_wire is None else "wire"


def _highest(logprobs: Values) -> Values:
    highest: Values = np.max(np.where(np.isnan(logprobs), -np.inf, logprobs), axis=0)
    return highest


def _column(values: Iterable[Any]) -> npt.NDArray[Any]:
    column_values = list(values)
    column = np.empty(len(column_values), dtype=object)
    column[:] = column_values
    return column


def is_part(token: bytes) -> bool:
    """Return whether a token is spelt as part of a character, or not at all."""
    return not token or _REPLACED in token


def spelt_alike(tokens: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Return whether tokens of the same ids are spelt alike; if not, lists cannot be matched by spelling."""
    return all(a == b or is_part(a) or is_part(b) for a, b in zip(tokens, others, strict=True))


def same_tokens(tokens: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Return whether tokens are the same by their spelling, for sides without ids.

    vLLM spells a character completely at its last part, and its earlier parts as nothing; a tokenizer marks each part.
    """
    after = (False, False)  # whether a part came before, on either side
    for a, b in zip(tokens, others, strict=True):
        parts = (is_part(a), is_part(b))
        is_end = any(parts) and not all(parts) and after[parts.index(False)]
        if a != b and not all(parts) and not is_end:
            return False
        after = parts
    return True


def endings(scores: Sequence[Scores]) -> dict[str, Values]:
    """Return the measures of each answer's end, by name : (items,); NaN where unknown.

    Parameters
    ----------
    scores
        The reference's scores.
    """
    end_p = np.array([score.end_p for score in scores], dtype=np.float64)
    # Without positions either the answer ended at once, and could not end earlier, or its end is unknown.
    has_ends = [len(score.ends) > 0 or not np.isnan(score.end_p) for score in scores]
    survived = [_survived(score.ends) for score in scores]
    at_least = np.array([1 - steps[-1] for steps in survived])
    at_most = np.array([1 - _survived(score.ends_upper)[-1] for score in scores])
    return {
        "end_p": end_p,
        "early_end": np.where(has_ends, at_least, np.nan),
        "early_end_upper": np.where(has_ends, at_most, np.nan),
        "kept_share": np.array([steps[1:].mean() if len(steps) > 1 else np.nan for steps in survived]),
    }


def _survived(ends: Values) -> Values:
    """Return the probability of not having ended before each position, and after the last one : (positions + 1,)."""
    return np.concatenate([[1.0], np.cumprod(1 - ends)])


def mean_of_items(values: Values, owner: Codes, n_items: int, where: Flags | None = None) -> Values:
    """Return the mean over each item's positions, added up in their order; NaN if it has none."""
    if where is not None:
        values, owner = values[where], owner[where]
    counts = np.bincount(owner, minlength=n_items)
    with np.errstate(invalid="ignore"):
        total = np.bincount(owner, values, n_items)
        mean: Values = np.divide(total, counts, out=np.full(n_items, np.nan), where=counts > 0)
    return mean


def quantiles_of_items(values: Values, owner: Codes, n_items: int) -> dict[str, Values]:
    """Return of each item's positions the median, the 99 % quantile and the largest divergence, by name : (items,); NaN without any.

    The quantiles are values that occurred, so that an infinite one leaves the others as they are.
    """
    ends = np.searchsorted(owner, np.arange(n_items + 1)).tolist()
    parts = [values[begin:end] for begin, end in itertools.pairwise(ends)]
    kept = [np.sort(part[~np.isnan(part)]) for part in parts]
    return {
        name: np.array([part[math.ceil(q * len(part)) - 1] if len(part) else np.nan for part in kept])
        for name, q in (("divergence_median", 0.5), ("divergence_p99", 0.99), ("divergence_max", 1.0))
    }


def bins_of_items(values: Values, owner: Codes, n_items: int) -> list[str | None]:
    """Return the histogram of each item's positions; None without any."""
    ends = np.searchsorted(owner, np.arange(n_items + 1)).tolist()
    return [histogram(values[begin:end].tolist()) or None for begin, end in itertools.pairwise(ends)]


def first_of_items(flags: Flags, owner: Codes, n_items: int) -> Values:
    """Return the first flagged position of each item, from 0; NaN if none is flagged."""
    starts = np.searchsorted(owner, np.arange(n_items))
    positions = np.flatnonzero(flags)
    first = np.full(n_items, np.nan)
    items, index = np.unique(owner[positions], return_index=True)
    first[items] = positions[index] - starts[items]
    return first


def largest_of_items(values: Values, owner: Codes, n_items: int) -> Values:
    """Return the largest of each item's values; NaN if all are NaN."""
    largest = np.full(n_items, -np.inf)
    present = ~np.isnan(values)
    np.maximum.at(largest, owner[present], values[present])
    return np.where(np.isinf(largest), np.nan, largest)
