"""What a diagnosis says: the damage, its cause, what that means, and what to do."""

from typing import Any, Final

import msgspec

from quantdrift.core.notation import part
from quantdrift.core.text import Table, plain
from quantdrift.facts.diagnosis import (
    DAMAGED,
    FEWEST_DAMAGED,
    FEWEST_ITEMS,
    Blamed,
    Clipping,
    Diagnosis,
    DiagnosisVerdict,
    HalfUse,
    OffTensor,
    OffValues,
    WeightFault,
    WeightsOrigin,
)

_MOST_CLIPPED: Final = 5  # ranges that clip, in the text
_KINDS: Final = {"A": "activation ranges", "W": "weights", "L": "layers", "T": "thresholds", "V": "leaves"}
_RECALIBRATE: Final = "Calibrate this range again, with inputs of every slice"
# What each cause means, and what to do about it.
_MEANING: Final = {
    "saturation": (
        "Values of this slice lie outside the range that the quantised model can represent, and are cut off.",
        "Calibrate again, with inputs of this slice among the others; then run quantdrift gate on every slice.",
    ),
    "resolution": (
        "Values of this slice use a small part of a range, so few distinct levels are left for them.",
        (
            "Calibrating again seldom helps enough where other slices need the wide range. Leave the named sites unquantised, or serve the slice"
            " by a copy that is calibrated on it."
        ),
    ),
    "layer": (
        "The layer computes something else than the reference's; its weights and what goes into it cannot be told apart.",
        "Leave the named layers unquantised, or quantise them by channel.",
    ),
    "thresholds": (
        "The trees compare the named columns with other thresholds than the reference, and this slice lies between them.",
        (
            "Keep the thresholds of the named columns in FP32, or set their grid with inputs of this slice among the data: `quantdrift repair`"
            " builds and measures it. Until then serve the slice by the reference."
        ),
    ),
    "leaves": (
        "The leaves of the trees are not the reference's, and their sum decides otherwise.",
        "Keep the leaves in FP32: `quantdrift repair` builds and measures it. Until then serve the slice by the reference.",
    ),
    "input of trees": (
        "No column restores more than other rounding of the thresholds does.",
        (
            "Round thresholds and leaves more finely: `quantdrift repair` builds the trees with all of them in FP32 and measures it. Compare the"
            " preparation of inputs on both sides, too."
        ),
    ),
    "resolution found": (
        "The range is that of the largest values, found while the model runs, so few distinct levels are left for all others.",
        "There is nothing to calibrate. Leave the named sites unquantised: for ONNX files `quantdrift repair` builds and measures it.",
    ),
    "spread": ("No single site is the cause: several sites together do the damage.", ""),
    "input": (
        "No site restores more than chance does.",
        (
            "Look at the inputs: answers at a small margin change with any rounding. Compare the preparation of inputs on both sides, too."
            " If all activation ranges together heal most, `quantdrift repair` measures whether new ones help."
        ),
    ),
    "clipping": (
        "Values of this slice lie outside several ranges, which are too narrow together: what one lets pass the next one cuts off.",
        (
            "Calibrate again, with inputs of this slice among the others: for ONNX files `quantdrift repair` does that and measures it. Then"
            " run quantdrift gate on every slice."
        ),
    ),
    "clipping elsewhere": ("Other slices are damaged, too: calibrate with inputs of all slices.", ""),
    "within budget": (
        "On these inputs the slice is within its budget: there is no damage to explain.",
        "If an alert is open, these inputs do not show its damage: record newer ones.",
    ),
}
_AGAIN: Final = "Quantise it again from the reference, or leave it unquantised."
_OF_WEIGHTS: Final = {
    "channels": ("Some channels of the weight of {site} are not the reference's, rounded.", _AGAIN),
    "bias": (
        "The bias of {site} is not the reference's, rounded.",
        "Write the bias again from the reference, with the scale of the layer's input times that of its weight.",
    ),
    "zero point": ("All values of the weight of {site} are shifted alike: its zero point is wrong.", _AGAIN),
    "values": (
        "The weight of {site} is not the reference's, rounded: something else was done to it.",
        _AGAIN,
    ),
    "moved": (
        "The weight of {site} was moved by whole steps, as methods such as GPTQ do on purpose; here that changes answers.",
        "Leave it unquantised, or let the method see inputs of this slice.",
    ),
    "rounded in blocks": (
        "The rounding of the weight of {site} changes the answers, though every {size} values have a scale of their own.",
        (
            "Leave it unquantised (nodes_to_exclude), or give it more bits or smaller blocks. For ONNX files `quantdrift repair` builds it in FP32 and"
            " measures it."
        ),
    ),
    "rounded by channel": (
        "The rounding of the weight of {site} changes the answers, though each channel has a scale of its own.",
        "Leave it unquantised, or give it more bits.",
    ),
    "rounded": (
        "The rounding of the weight of {site} changes the answers: all channels share one scale.",
        "Quantise it by channel, or leave it unquantised.",
    ),
    "unknown": (
        "The weight of {site} in the candidate changes the answers.",
        "Quantise it again from the reference, by channel, or leave it unquantised.",
    ),
}


# What 16 bits do to the results of an operator, and what to do about it.
_OF_HALVES: Final = {
    "above": (
        "Results of {site} reach {largest:.3g}; the largest number in {kind} is {most:,.0f}, so larger ones become infinite.",
        "Keep this operator in FP32 ({option}), or use BF16, which has the range of FP32. {repair}",
    ),
    "below": (
        "{below} of the results of {site} are smaller than the smallest normal number in {kind}: they lose digits, or become 0.",
        "Keep this operator in FP32 ({option}). {repair}",
    ),
    "rounded": (
        "{kind} keeps {bits} bits of a number, and the answers depend on more than these of what {site} reads or computes.",
        "Keep this operator in FP32 ({option}). {repair}",
    ),
}
_OPTION: Final = "node_block_list of ONNX Runtime's converter"
_REPAIR: Final = "`quantdrift repair` builds it and measures it."
_MANY: Final = 0.01  # of the results


def fault_words(tensor: OffTensor) -> str:
    """Return what is wrong with a tensor, in words."""
    share = f"{part(tensor.share)} of its values are off by more than rounding explains"
    if tensor.fault is WeightFault.CHANNELS:
        shown = ", ".join(map(str, tensor.channels[:3])) + (", ..." if len(tensor.channels) > 3 else "")
        which = f"channel {shown} differs" if len(tensor.channels) == 1 else f"channels {shown} differ"
        return f"{which} from the reference's by more than rounding"
    if tensor.fault is WeightFault.BIAS:
        return f"the bias is not the reference's: {share}"
    if tensor.fault is WeightFault.SHIFT:
        return "all values are shifted by the same amount: the zero point is wrong"
    return share


def diagnosed(diagnosis: Diagnosis, *, model: str, slice_name: str) -> list[str | Table]:
    """Return the diagnosis of a slice in paragraphs and tables."""
    others = f", elsewhere {part(diagnosis.elsewhere)}" if diagnosis.elsewhere is not None else ""
    damage = f"{part(diagnosis.flips)} of {diagnosis.n_items:,} answers change"
    copied = (
        f"The copy rounds each result to {diagnosis.emulated}, as the file says; kernels on a processor round less often, and a GPU can lose more."
        if diagnosis.emulated
        else f"The copy of the candidate reproduces {part(diagnosis.reproduced)} of its answers."
    )
    if diagnosis.rounding:
        copied += f" The rest is rounding: scales that differ by a ten-thousandth change {part(diagnosis.rounding)}."
    if diagnosis.one_off:
        copied += f" {diagnosis.n_sites} sites were tried on {diagnosis.n_damaged} inputs whose answer changes and {diagnosis.n_random} others."
    lines: list[str | Table] = [
        f"{plain(model)}, {plain(slice_name)}: {damage}; the budget is {part(diagnosis.budget)}{others}.",
        copied,
        *_of_files(diagnosis),
        "",
    ]
    if diagnosis.verdict is DiagnosisVerdict.TOO_FEW:
        return [*lines, _too_few(diagnosis)]
    lines.append(f"Cause: {cause_of(diagnosis)}.")
    lines += [f"  {meaning}" for meaning, _ in _meanings(diagnosis) if meaning]
    if diagnosis.together:
        parts = [f"all {_KINDS[kind]} {part(max(share, 0.0))}" for kind, share in diagnosis.together.items()]
        lines.append(f"  Together in FP32 they heal: {', '.join(parts)} of the changed answers.")
    if diagnosis.clipping is not None:
        lines += [
            f"  {_clipping(diagnosis.clipping, is_beside=bool(diagnosis.blamed))}",
            "",
            *_clipped(diagnosis.clipping),
        ]
    if diagnosis.blamed:
        head = ("site", "heals", "changed answers left", "why", "multiplications in FP32")
        n_columns = len(head) - diagnosis.is_of_trees  # trees multiply nothing
        rows = tuple(_row(blamed)[:n_columns] for blamed in diagnosis.blamed)
        lines += ["", Table(head[:n_columns], rows), ""]
        random_changes = _random_changes(diagnosis)
        measured_on = (
            "measured on the inputs that found the cause, for lack of others"
            if diagnosis.fresh_flips is None
            else "measured on inputs that nothing was chosen by"
        )
        lines += [
            f"heals: share of the changed answers that heal when the site is in FP32, beside the sites above it; {measured_on}.",
            f"Each site restores more than {random_changes} do, on inputs on which it was not chosen.",
        ]
        if all(blamed.used is not None for blamed in diagnosis.blamed) and any(
            site.startswith("W:") for site in diagnosis.one_off
        ):
            lines.append("No weight is named.")
    lines += _left(diagnosis)
    if (
        diagnosis.one_off
        and not (diagnosis.is_of_trees or diagnosis.emulated)
        and not any(site.startswith("A:") for site in diagnosis.one_off)
    ):
        lines.append("The candidate has no activation range that can be switched, so none can be named.")
    if diagnosis.unmatched:
        lines.append(
            f"{len(diagnosis.unmatched)} weights could not be found in the reference and stayed quantised: {', '.join(diagnosis.unmatched[:3])}"
        )
    return [*lines, "", f"What to do: {_to_do(diagnosis)}"]


def _random_changes(diagnosis: Diagnosis) -> str:
    """Return what a placebo changes."""
    if diagnosis.is_of_trees or diagnosis.emulated:
        return "other roundings of the same size"
    has_ranges = any(site.startswith("A:") for site in diagnosis.one_off)
    return "random changes of the ranges" if has_ranges else "random changes of the steps"


def _of_files(diagnosis: Diagnosis) -> list[str]:
    """Return what the two files alone say of the weights."""
    lines = [f"By the files alone, {off.site}: {fault_words(off.tensor)}." for off in diagnosis.off]
    if diagnosis.origin is WeightsOrigin.MOVED:
        lines.append(
            f"{diagnosis.n_moved} of {diagnosis.n_tensors} weights were moved by whole steps, as methods such as GPTQ do on purpose: their answers judge"
            " them."
        )
    return lines


def _left(diagnosis: Diagnosis) -> list[str]:
    """Return whether what is named is all of the damage."""
    if diagnosis.left is None:
        return []
    if diagnosis.left > diagnosis.budget:
        is_left = f"{part(diagnosis.left)} of the answers still change (budget: {part(diagnosis.budget)})"
        return [
            f"Another cause is left: with all that is named in FP32 {is_left}. Mend what is named, and diagnose again."
        ]
    return [
        f"With all that is named in FP32 {part(diagnosis.left)} of the answers change, which is within the budget."
    ]


def sentence_of(diagnosis: Diagnosis) -> str:
    """Return the cause and what to do, for a person who reads the alert."""
    sites = f" at {', '.join(blamed.site for blamed in diagnosis.blamed)}" if diagnosis.blamed else ""
    clips = (
        f"{_clipping(diagnosis.clipping, is_beside=bool(diagnosis.blamed))} "
        if diagnosis.clipping is not None
        else ""
    )
    return f"Cause: {cause_of(diagnosis)}{sites}. {clips}{_to_do(diagnosis)}"


def details_of(diagnosis: Diagnosis, candidate: str) -> dict[str, Any]:
    """Return the figures of a diagnosis that an alert keeps."""
    names = ("causes", "flips", "budget", "elsewhere", "n_items", "n_sites", "fresh_flips", "left")
    return {
        "candidate": candidate,
        **msgspec.to_builtins({name: getattr(diagnosis, name) for name in names}),
        "sites": msgspec.to_builtins(diagnosis.blamed),
        "clipping": msgspec.to_builtins(diagnosis.clipping),
    }


def _to_do(diagnosis: Diagnosis) -> str:
    meanings = dict(zip(_words(diagnosis), _meanings(diagnosis), strict=True))
    words = list(meanings)
    first = words[-1] if words[-1] == "not this slice" else words[0]
    chosen = [first, *(word for word in words if word == "clipping" and word != first)]
    return " ".join(meanings[word][1] for word in chosen)


def _meanings(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return what each of the causes means, and what to do about it, in the order of `_words`."""
    return [
        _of_weight(diagnosis)
        if word == "weights"
        else _of_others(diagnosis)
        if word == "not this slice"
        else _of_half(diagnosis)
        if word == "precision"
        else _MEANING[word]
        for word in _words(diagnosis)
    ]


def _of_weight(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return what is wrong with the first weight that is named."""
    first = next(blamed for blamed in diagnosis.blamed if blamed.cause.value == "weights")
    if diagnosis.origin is WeightsOrigin.MOVED and first.off:
        word = "moved"
    elif first.off:
        word = max(first.off, key=lambda tensor: tensor.share).fault.value
    elif not diagnosis.n_tensors:
        word = "unknown"
    elif first.block_size:
        word = "rounded in blocks"
    else:
        word = "rounded by channel" if first.is_by_channel else "rounded"
    meaning, remedy = _OF_WEIGHTS[word]
    return meaning.format(site=first.site, size=first.block_size), remedy


def _of_half(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return what 16 bits do to the first operator that is named for them."""
    blamed, half = next((each, each.half) for each in diagnosis.blamed if each.cause.value == "precision")
    assert half is not None
    word = "above" if half.above else "below" if half.below > _MANY else "rounded"
    meaning, remedy = _OF_HALVES[word]
    if half.kind != "FP16":
        remedy = remedy.replace(", or use BF16, which has the range of FP32", "")
    figures = {"largest": half.largest, "most": half.most, "kind": half.kind, "bits": half.bits}
    return (
        meaning.format(site=blamed.site, below=part(half.below), **figures),
        remedy.format(option=_OPTION, repair=_REPAIR),
    )


def _of_others(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return what the damage of other slices means, measured with the named sites in FP32."""
    first, last = diagnosis.blamed[0], diagnosis.blamed[-1]
    elsewhere = part(diagnosis.elsewhere or 0.0)
    if diagnosis.is_of_every_slice:
        remedy = (
            _of_weight(diagnosis)[1]
            if first.cause.value == "weights"
            else f"{_RECALIBRATE}, or leave it unquantised."
        )
        healed = (
            f"{first.site} is the cause for every slice: elsewhere {elsewhere} of the answers change, and"
            f" {part(first.elsewhere_left or 0.0)} with this site in FP32."
        )
        return healed, f"{remedy} A route for one slice does not help the others."
    left = (
        ""
        if last.elsewhere_left is None
        else f", and {part(last.elsewhere_left)} with the named sites in FP32"
    )
    return (
        f"Other slices are damaged, too: elsewhere {elsewhere} of the answers change{left}.",
        (
            "A route for this slice alone does not help the others. Leave the named sites unquantised, and diagnose a slice that stays"
            " damaged."
        ),
    )


def _words(diagnosis: Diagnosis) -> list[str]:
    """Return the causes by their key in `_MEANING`: ranges that clip together have keys of their own."""
    words = [cause.value for cause in diagnosis.causes]
    if diagnosis.is_of_trees:
        words = ["input of trees" if word == "input" else word for word in words]
    if diagnosis.blamed and diagnosis.blamed[0].is_dynamic:
        words = ["resolution found" if word == "resolution" else word for word in words]
    if diagnosis.clipping is None:
        return words
    own = {"saturation": "clipping"}
    if not diagnosis.blamed:
        own["not this slice"] = "clipping elsewhere"
    return list(dict.fromkeys(own.get(word, word) for word in words))


def _clipping(clipping: Clipping, *, is_beside: bool) -> str:
    """Return which ranges clip, in a sentence or two."""
    worst = clipping.ranges[0]
    elsewhere = "" if worst.elsewhere is None else f", and {part(worst.elsewhere)} elsewhere"
    n, more = len(clipping.ranges), " more" if is_beside else ""
    left = (
        f"; {part(clipping.flips_left)} of the answers then change" if clipping.flips_left is not None else ""
    )
    return (
        f"{n}{more} of {clipping.n_ranges} activation ranges cut values off. The worst, {worst.site}, cuts off {part(worst.outside)} of the"
        f" values of inputs whose answer changes{elsewhere}. Together in FP32 these {n} heal {part(max(clipping.heals, 0.0))} of the changed"
        f" answers, and restore more than random changes of the ranges do{left}."
    )


def _clipped(clipping: Clipping) -> list[str | Table]:
    """Return a table of the ranges that clip most."""
    rows = tuple(
        (
            clipped.site,
            part(clipped.outside),
            "unknown" if clipped.elsewhere is None else part(clipped.elsewhere),
            f"[{clipped.low:.3g}, {clipped.high:.3g}]" if clipped.low is not None else "by channel",
        )
        for clipped in clipping.ranges[:_MOST_CLIPPED]
    )
    table = Table(("range that clips", "values outside", "elsewhere", "from, to"), rows)
    more = len(clipping.ranges) - len(rows)
    return [table, f"... and {more} more, with --json"] if more else [table]


def _too_few(diagnosis: Diagnosis) -> str:
    if diagnosis.n_items < FEWEST_ITEMS:
        return f"Too few inputs: there are {diagnosis.n_items} of this slice, and {FEWEST_ITEMS} are needed: {FEWEST_ITEMS - diagnosis.n_items} more."
    more = f"Record more of this slice: some {_needed(diagnosis):,}."
    if diagnosis.n_damaged < FEWEST_DAMAGED:
        return f"Too few damaged inputs: the answer of {diagnosis.n_damaged} changes, and {FEWEST_DAMAGED} are needed. {more}"
    return (
        f"Too few damaged inputs: no site restores more than chance does on the {diagnosis.n_damaged} whose answer changes. With fewer than"
        f" {DAMAGED} the right site is often missed. {more}"
    )


def _needed(diagnosis: Diagnosis) -> int:
    # Half of them are kept for the estimate of what a site heals.
    return max(round(2 * DAMAGED / diagnosis.flips), FEWEST_ITEMS) if diagnosis.flips else 200 * DAMAGED


def cause_of(diagnosis: Diagnosis) -> str:
    """Return the cause in words."""
    if not diagnosis.causes:
        return diagnosis.verdict.value
    first, *others = (cause.value for cause in diagnosis.causes)
    words = {
        "spread": f"spread over {len(diagnosis.blamed)} of {diagnosis.n_sites} sites",
        "not this slice": "for every slice" if diagnosis.is_of_every_slice else "not only on this slice",
        "input": "none of the sites",
    }
    if diagnosis.clipping is not None and not diagnosis.blamed:
        n = len(diagnosis.clipping.ranges)
        words["saturation"] = f"saturation of {n} of {diagnosis.clipping.n_ranges} activation ranges together"
    return ", ".join([words.get(first, first), *(words.get(other, other) for other in others)])


def _row(blamed: Blamed) -> tuple[str, ...]:
    return (
        blamed.site,
        part(blamed.heals),
        "unknown" if blamed.flips_left is None else part(blamed.flips_left),
        _why(blamed),
        "unknown" if blamed.cost is None else part(blamed.cost),
    )


def _why(blamed: Blamed) -> str:
    if blamed.off:
        return fault_words(max(blamed.off, key=lambda tensor: tensor.share))
    if blamed.half is not None:
        return _of_results(blamed.half)
    if blamed.weight_error is not None:
        return f"weights are off by {part(blamed.weight_error)}"
    if blamed.values is not None:
        return _of_values(blamed.values)
    return _of_range(blamed)


def _of_range(blamed: Blamed) -> str:
    """Return how an activation range is used."""
    if blamed.used is None or blamed.levels is None:
        return "weights and what goes in together"
    of = f" of [{blamed.low:.3g}, {blamed.high:.3g}]" if blamed.low is not None else ""
    if blamed.cause.value == "saturation":
        return f"{part(blamed.outside or 0.0)} of the values are outside{of}"
    elsewhere = ""
    if blamed.elsewhere_used is not None:
        elsewhere = f" (elsewhere {part(blamed.elsewhere_used)}, {blamed.elsewhere_levels:.0f})"
    return f"uses {part(blamed.used)}{of}, {blamed.levels:.0f} levels{elsewhere}"


def _of_results(half: HalfUse) -> str:
    """Return how the results of an operator fit into 16 bits."""
    if half.above:
        return f"{part(half.above)} of its results are above {half.most:,.0f}"
    if half.below > _MANY:
        return f"{part(half.below)} of its results lose digits: they are too small"
    return f"{half.bits} bits of a number; results up to {half.largest:.3g}"


def _of_values(values: OffValues) -> str:
    """Return how thresholds or leaves of trees differ from the reference's."""
    if not values.n_far:
        return f"{values.n_off:,} of {values.n:,} are rounded, by up to {values.rounding:.3g}"
    return (
        f"{values.n_far:,} of {values.n:,} are cut off: they lie in [{values.low:.6g}, {values.high:.6g}], the reference's in"
        f" [{values.reference_low:.6g}, {values.reference_high:.6g}]"
    )
