"""What a diagnosis of a language model says: how far its answers diverge, which layers and matrices do it, and what to do."""

from typing import Any, Final

import msgspec

from quantdrift.core.notation import count_of, number, part
from quantdrift.core.text import Table, plain
from quantdrift.facts.diagnosis import FEWEST_ITEMS, DiagnosisVerdict, WeightsOrigin
from quantdrift.facts.language_diagnosis import BlamedLayer, DifferingMatrix, LanguageDiagnosis, OffRows
from quantdrift.facts.words.diagnosis import fault_words

_MOST_SHOWN: Final = 4  # matrices of a layer
_COARSER: Final = 0.5  # of the others' distinct values
_LOUDER: Final = 2.0  # times the others' error
_ALIKE: Final = 2.0
_OPTION: Final = "`modules_to_not_convert` of transformers, `ignore` of compressed-tensors"
_GATE: Final = "Then run quantdrift gate on every slice."
# What is wrong with a matrix, and what to do about it.
_REMEDY: Final = {
    "off": f"Quantise it again from the reference, or leave it unquantised ({_OPTION}).",
    "rows": f"Quantise this table again with a text that has this slice, or leave it unquantised ({_OPTION}).",
    "coarse": f"Give it as many bits as the others, or leave it unquantised ({_OPTION}).",
    "loud": f"Quantise it again, with smaller blocks or a text that has this slice, or leave it unquantised ({_OPTION}).",
    "usual": f"Its rounding is that of the others, and the answers depend on it more: leave it unquantised ({_OPTION}), or give it more bits.",
}


def nats(value: float) -> str:
    """Return a divergence per token."""
    return f"{number(value)} nats"


def language_diagnosed(diagnosis: LanguageDiagnosis, *, model: str, slice_name: str) -> list[str | Table]:
    """Return the diagnosis of a slice in paragraphs and tables."""
    others = "" if diagnosis.elsewhere is None else f", elsewhere {nats(diagnosis.elsewhere)}"
    answers = f"{count_of(diagnosis.n_items, 'answer')} with {count_of(diagnosis.n_tokens, 'token')}"
    lines: list[str | Table] = [
        f"{plain(model)}, {plain(slice_name)}: {answers} diverge by {nats(diagnosis.divergence)} per token; the budget is {nats(diagnosis.budget)}{others}.",
        _copied(diagnosis),
        *_of_files(diagnosis),
        "",
    ]
    if diagnosis.verdict is DiagnosisVerdict.TOO_FEW:
        more = FEWEST_ITEMS - diagnosis.n_items
        return [
            *lines,
            f"Too few answers: there are {diagnosis.n_items} of this slice, and {FEWEST_ITEMS} are needed: {more} more.",
        ]
    lines.append(f"Cause: {language_cause(diagnosis)}.")
    lines.append(f"  {_meaning(diagnosis)}")
    if diagnosis.blamed:
        rows = tuple(
            (layer.layer, part(layer.heals), nats(layer.left), part(layer.share))
            for layer in diagnosis.blamed
        )
        lines += ["", Table(("layer", "heals", "divergence left", "share of the weights"), rows)]
        lines += ["", _matrices(diagnosis), ""]
        lines += [
            (
                "heals: share of the divergence that goes away with the reference's weights there, beside the lines above it; measured on"
                f" {diagnosis.n_fresh:,} answers that nothing was chosen by."
            ),
            "Each layer restores more than random changes of the steps do, on answers on which it was not chosen, and more than its share of the weights.",
            _left(diagnosis),
        ]
    if diagnosis.unmatched:
        lines.append(
            f"{count_of(len(diagnosis.unmatched), 'weight')} of the candidate could not be found in the reference: {', '.join(diagnosis.unmatched[:3])}"
        )
    return [*lines, "", f"What to do: {_to_do(diagnosis)}"]


def language_cause(diagnosis: LanguageDiagnosis) -> str:
    """Return the cause in words."""
    if diagnosis.is_within_budget:
        return "within budget"
    if not diagnosis.blamed:
        return "none of the layers"
    places = _places(diagnosis)
    kind = "matrix" if len(places) == 1 and diagnosis.blamed[0].matrices else "layer"
    if len(places) == 1:
        return f"the {kind} {places[0]}"
    return f"{', '.join(places[:-1])} and {places[-1]} together"


def language_sentence(diagnosis: LanguageDiagnosis) -> str:
    """Return the cause and what to do, for a person who reads the alert."""
    return f"Cause: {language_cause(diagnosis)}. {_to_do(diagnosis)}"


def language_details(diagnosis: LanguageDiagnosis, candidate: str) -> dict[str, Any]:
    """Return the figures of a diagnosis that an alert keeps."""
    names = ("divergence", "budget", "elsewhere", "n_items", "n_tokens", "n_layers", "fresh", "left")
    sites = [
        {"site": layer.layer, "restores": layer.restores, "placebo": layer.placebo, "heals": layer.heals}
        for layer in diagnosis.blamed
    ]
    return {
        "candidate": candidate,
        **msgspec.to_builtins({name: getattr(diagnosis, name) for name in names}),
        "sites": sites,
        "layers": msgspec.to_builtins(diagnosis.blamed),
    }


def _places(diagnosis: LanguageDiagnosis) -> list[str]:
    """Return the named matrices, and the layers of which none is named."""
    return [
        name
        for layer in diagnosis.blamed
        for name in ([matrix.name for matrix in layer.matrices] or [layer.layer])
    ]


def _copied(diagnosis: LanguageDiagnosis) -> str:
    differ = f"{count_of(diagnosis.n_weights, 'weight')} in {count_of(diagnosis.n_layers, 'layer')} differ from the reference's"
    tried = (
        f"; these were tried on {diagnosis.n_examined:,} answers drawn at random" if diagnosis.one_off else ""
    )
    return f"The reference's network with the candidate's weights diverges by {nats(diagnosis.copied)}. {differ}{tried}."


def _of_files(diagnosis: LanguageDiagnosis) -> list[str]:
    """Return what the two folders alone say of the weights."""
    lines = [
        f"By the files alone, {off.site}: {fault_words(off.tensor)}." for off in diagnosis.off[:_MOST_SHOWN]
    ]
    if len(diagnosis.off) > _MOST_SHOWN:
        lines.append(f"... and {len(diagnosis.off) - _MOST_SHOWN} more, with --json")
    if diagnosis.origin is WeightsOrigin.MOVED:
        lines.append(
            f"{diagnosis.n_moved} of {diagnosis.n_tensors} weights were moved by whole steps, as methods such as GPTQ do on purpose: their answers judge"
            " them."
        )
    return lines


def _meaning(diagnosis: LanguageDiagnosis) -> str:
    if diagnosis.is_within_budget:
        return "On these answers the slice is within its budget: there is no damage to explain."
    if not diagnosis.blamed:
        return "No layer restores more than chance and more than its share of the weights: the rounding of all together does it."
    elsewhere, last = diagnosis.elsewhere, diagnosis.blamed[-1].elsewhere_left
    if (
        elsewhere is None
        or last is None
        or elsewhere <= diagnosis.budget
        or diagnosis.divergence >= _ALIKE * elsewhere
    ):
        return "The weights there make the answers diverge."
    return (
        f"The weights there make the answers diverge. Other slices are damaged, too: {nats(elsewhere)} elsewhere, and {nats(last)} with the"
        " reference's weights there."
    )


def _matrices(diagnosis: LanguageDiagnosis) -> Table:
    """Return what the matrices of the named layers are like; of a layer the named ones, or those with the largest errors."""
    rows = []
    for layer in diagnosis.blamed:
        heals = {matrix.name: part(matrix.heals) for matrix in layer.matrices}
        shown = layer.differing[: len(heals) or _MOST_SHOWN]
        rest = part(layer.heals) if len(layer.differing) == 1 else "as a whole"
        rows += [(matrix.name, heals.get(matrix.name, rest), _why(matrix)) for matrix in shown]
    return Table(("matrix", "heals", "why"), tuple(rows))


def _why(matrix: DifferingMatrix) -> str:
    if matrix.rows is not None:
        return _of_rows(matrix.rows)
    if matrix.off is not None:
        return fault_words(matrix.off)
    off = f"off by {part(matrix.error)}"
    if _word(matrix) == "coarse":
        return f"{off}; {matrix.levels} distinct values among 32 neighbours, the others {matrix.usual_levels}"
    if _word(matrix) == "loud":
        return f"{off}, the others by {part(matrix.usual)}"
    return f"{off}, as others ({part(matrix.usual)})"


def _of_rows(rows: OffRows) -> str:
    elsewhere = "" if rows.elsewhere is None else f", elsewhere {part(rows.elsewhere)}"
    return (
        f"rows of {rows.n:,} of {rows.n_rows:,} tokens are off by {part(rows.error)}, the others by {part(rows.usual)};"
        f" {part(rows.of_slice)} of the tokens of this slice have such a row{elsewhere}"
    )


def _word(matrix: DifferingMatrix) -> str:
    """Return what is wrong with a matrix, by its key in `_REMEDY`."""
    if matrix.rows is not None:
        return "rows"
    if matrix.off is not None:
        return "off"
    if matrix.levels <= _COARSER * matrix.usual_levels:
        return "coarse"
    return "loud" if matrix.error > _LOUDER * matrix.usual else "usual"


def _left(diagnosis: LanguageDiagnosis) -> str:
    left = diagnosis.left or 0.0
    if left > diagnosis.budget:
        return (
            f"Another cause is left: with all of these the slice still diverges by {nats(left)} (budget: {nats(diagnosis.budget)}). Mend what is named,"
            " and diagnose again."
        )
    return f"With all of these the slice diverges by {nats(left)}, which is within the budget."


def _to_do(diagnosis: LanguageDiagnosis) -> str:
    if diagnosis.is_within_budget:
        return "If an alert is open, these answers do not show its damage: record newer ones."
    if not diagnosis.blamed:
        return f"Give all weights more bits or smaller blocks. {_GATE}"
    first: BlamedLayer = diagnosis.blamed[0]
    words = [_word(matrix) for matrix in first.differing[: len(first.matrices) or _MOST_SHOWN]]
    word = words[0] if first.matrices else min(words, key=list(_REMEDY).index)
    return f"{_REMEDY[word]} {_GATE}"
