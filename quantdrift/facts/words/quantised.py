"""What a search for a quantised model says: what was tried, a table of cost and changed answers, and what to do next."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Final

from quantdrift.core.notation import capital, count_of, listed, part
from quantdrift.core.slices import ALL
from quantdrift.core.text import Table, plain
from quantdrift.facts.gate import Decision, Outcome
from quantdrift.facts.quantised import CostKind, Family, Quantised, Ranges, Recipe, TriedRecipe

_HEAD: Final = ("recipe", "size", "time", "worst slice", "changed answers", "all traffic", "gate")
_MOST_STOPPING: Final = 4
_VERDICTS: Final = {
    Outcome.PASS: "pass",
    Outcome.FAIL: "fail",
    Outcome.INSUFFICIENT: "more inputs needed",
}


def name_of(recipe: Recipe) -> str:
    """Return a recipe in words: `INT8 static, per channel, 99.9 %, Conv and MatMul, 2 layers in FP32`."""
    if recipe.family is Family.FP32:
        return "FP32"
    words = []
    if recipe.family is Family.FP16:
        words = ["FP16"]
    elif recipe.family is Family.BLOCKS:
        words = [f"INT{recipe.bits} weights in blocks of {recipe.block}"]
    else:
        words = [f"INT8 {recipe.family.value}", "per channel" if recipe.per_channel else "per tensor"]
        if recipe.bits != 8:
            words.append(f"weights of {recipe.bits} bits")
    if recipe.symmetric:
        words.append("symmetric")
    if recipe.ranges is not Ranges.ALL:
        words.append(
            f"ranges by {recipe.ranges.value}"
            if recipe.ranges is Ranges.ENTROPY
            else f"ranges of {recipe.ranges.value}"
        )
    if recipe.operators:
        words.append(f"{listed(recipe.operators)} only")
    if recipe.left_out:
        words.append(f"{count_of(len(recipe.left_out), 'layer')} in FP{recipe.left_bits}")
    return ", ".join(words)


def quantised(found: Quantised) -> list[str | Table]:
    """Return what was found in paragraphs and a table."""
    n_tried = len(found.tried) - 1
    lines: list[str | Table] = [
        (
            f"{plain(found.model)}: {count_of(n_tried, 'recipe')} tried on {plain(found.reference)}; the budget is {part(found.budget)} changed answers in"
            " each slice."
        ),
        f"Calibrated on {found.n_calibration:,} recorded inputs, chosen by {found.n_choosing:,} others, judged on {found.n_judging:,} that chose nothing.",
        "",
        Table(_HEAD, tuple(_row(found, each) for each in _shown(found))),
        "",
        (
            "Size and processor time: relative to the reference, on this machine's processor. Changed answers: on the inputs that choose; gate: on those"
            " that judge."
        ),
    ]
    lines += [f"Not tried: {text}." for text in found.not_tried]
    if found.ended:
        lines.append(f"The search ended {found.ended}: others may be cheaper.")
    if failed := [each for each in found.tried if each.problem]:
        lines.append(
            f"{count_of(len(failed), 'recipe')} gave no model that answers, such as {name_of(failed[0].recipe)}: {plain(failed[0].problem)}"
        )
    lines += [f"{capital(remark)}." for remark in found.remarks]
    return [*lines, "", *_advice(found)]


def _shown(found: Quantised) -> list[TriedRecipe]:
    """Return the curve, what was judged, the best of each family, and the reference, the cheapest first."""
    shown = [*found.front(), *(found.tried[number] for number in found.sequence)]
    for family in Family:
        of_family = [each for each in found.usable if each.recipe.family is family]
        if of_family and not any(each.recipe.family is family for each in shown):
            shown.append(min(of_family, key=lambda each: (each.worst[1].share, each.cost(found.prefer))))
    kept = [each for each in found.tried if any(each is other for other in shown)]
    return sorted(kept, key=lambda each: each.cost(found.prefer))


def _row(found: Quantised, tried: TriedRecipe) -> tuple[str, ...]:
    name, change = tried.worst
    every = tried.changes.get(ALL)
    return (
        name_of(tried.recipe),
        part(tried.n_bytes / found.n_bytes, 2),
        f"{tried.time_ratio:.2f} x",
        plain(name),
        part(change.share),
        part(every.share) if every else "-",
        _gate(found, tried),
    )


def _gate(found: Quantised, tried: TriedRecipe) -> str:
    if tried.recipe.family is Family.FP32:
        return "the reference"
    if tried.decision is not None:
        chosen = found.chosen is not None and found.tried[found.chosen] is tried
        return "pass, the cheapest" if chosen else _VERDICTS[tried.decision.verdict]
    return "not judged" if tried.within else "above the budget"


def _advice(found: Quantised) -> list[str]:
    """Return what to do next."""
    if found.chosen is not None:
        best = found.tried[found.chosen]
        what = "smallest" if found.prefer is CostKind.SIZE else "fastest"
        lines = [
            (
                f"The {what} that passes on every slice: {name_of(best.recipe)}, with {part(best.n_bytes / found.n_bytes, 2)} of the size and"
                f" {best.time_ratio:.2f} times the processor time of the reference."
            ),
            *(
                f"In FP{best.recipe.left_bits}: {listed(best.recipe.left_out, 8)}."
                for _ in best.recipe.left_out[:1]
            ),
            f"Written: {plain(found.file)}",
        ]
        stopped = next(
            (found.tried[number] for number in found.sequence[::-1] if not _passed(found.tried[number])), None
        )
        if stopped is not None and stopped.decision is not None:
            lines.append(f"{name_of(stopped.recipe)} would be cheaper. {_stopped(stopped.decision)}")
    elif found.verdict is Outcome.INSUFFICIENT:
        best = found.tried[found.sequence[0]]
        assert best.decision is not None
        lines = [
            f"Not enough inputs to pass any. Closest: {name_of(best.recipe)}. {_stopped(best.decision)}",
            f"Written, to be judged with more inputs: {plain(found.file)}",
        ]
    else:
        return [
            *_damage(found),
            f"Everything that was measured: {Path(found.out) / 'quantised.json'}. No model was written.",
        ]
    command = shlex.join(["quantdrift", "gate", found.file, "--live", *found.gate_options])
    return [*lines, f"Next, judge it on live traffic: {command}"]


def _passed(tried: TriedRecipe) -> bool:
    return tried.decision is not None and tried.decision.verdict is Outcome.PASS


def _stopped(decision: Decision) -> str:
    """Return which slice stops a recipe: by damage, or because inputs are missing."""
    failed = [answer for answer in decision.slices if answer.verdict is Outcome.FAIL]
    if failed:
        worst = max(failed, key=lambda answer: answer.mean or 0.0)
        return f"{plain(worst.slice)} stops it by damage: {part(worst.mean or 0.0)} of its answers change."
    lacking = [answer for answer in decision.slices if answer.verdict is Outcome.INSUFFICIENT]
    open_ended = [answer for answer in lacking if answer.more is None]
    if open_ended:
        return f"{plain(open_ended[0].slice)} stops it: its share of changed answers is at the limit, and no number of inputs decides it."
    worst = max(lacking, key=lambda answer: answer.more or 0)
    return (
        f"{plain(worst.slice)} stops it: about {worst.more:,} more inputs of it to judge by are missing. Record twice as many: one half chooses, the"
        " other judges."
    )


def _damage(found: Quantised) -> list[str]:
    """Return which slices stop the recipes, where none is good enough."""
    tried = [each for each in found.usable if each.recipe.family is not Family.FP32]
    if not tried:
        return ["No recipe gives a model that answers."]
    stopping = Counter(each.worst[0] for each in tried if not each.within)
    named = listed(
        [f"{plain(name)} stops {count_of(n, 'recipe')}" for name, n in stopping.most_common(_MOST_STOPPING)]
    )
    best = min(tried, key=lambda each: (each.worst[1].share, each.cost(found.prefer)))
    name, change = best.worst
    lines = ["No recipe is good enough on every slice" + (f": {named}." if named else ".")]
    if best.decision is not None and best.decision.verdict is not Outcome.PASS:
        lines.append(f"Closest: {name_of(best.recipe)}. {_stopped(best.decision)}")
    else:
        lines.append(
            f"Closest: {name_of(best.recipe)}, with {part(change.share)} changed answers in {plain(name)}."
        )
    return [
        *lines,
        f"What is left: serve {plain(name)} by the reference or by a copy of its own (`quantdrift gate --route`, `quantdrift repair`), or a larger budget.",
    ]
