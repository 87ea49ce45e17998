"""The command `quantdrift diagnose`, which names the quantised sites that damage a slice."""

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from quantdrift.cli.alerts import NO_NOTE, add_note
from quantdrift.cli.damaged import MODEL, SLICE, Damaged, damaged, exemplars_of, say_unreadable
from quantdrift.cli.embedded_nats import at_data
from quantdrift.cli.options import CONFIG, DATA, JSON, emit
from quantdrift.cli.output import Steps, columns
from quantdrift.cli.reference import REFERENCE
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import part
from quantdrift.core.slices import SliceKey
from quantdrift.core.text import plain

if TYPE_CHECKING:
    from quantdrift.core.records import Exchange
    from quantdrift.shadow.repair.blame import Blamed, Clipping, Diagnosis
    from quantdrift.shadow.repair.copies import Copy
    from quantdrift.shadow.repair.samples import Samples

_EXIT: Final = {"named": 0, "no cause found": 3, "too few exemplars": 4}
_PICTURES: Final = (".svg", ".png")
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_MOST_CLIPPED: Final = 5  # ranges that clip, in the text

_KINDS: Final = {"A": "activation ranges", "W": "weights", "L": "layers"}
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


@click.command()
@click.argument("alert_id", metavar="[ALERT]", type=click.IntRange(min=1), required=False)
@click.option(
    "--candidate",
    type=_FILE,
    required=True,
    help="The quantised model that serves: an ONNX file in QDQ form, an exported program (.pt2), or with --factory a file of weights.",
)
@click.option(
    "--factory",
    metavar="MODULE:FUNCTION",
    default="",
    help="In PyTorch: the function that makes the candidate. It gets the path of CANDIDATE if it takes an argument; else its module is"
    " filled with the safetensors there.",
)
@click.option(
    "--digest",
    metavar="sha256:HEX",
    default="",
    help="Of a candidate that is an exported program, which is code: without it the digest is printed, and nothing is loaded.",
)
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded inputs: a .npz or .safetensors file, or a folder of them, as for quantdrift gate.  [default: the exemplars of the slice, or what waits in the stream]",
)
@CONFIG
@DATA
@MODEL
@SLICE
@REFERENCE
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a picture of the sites and ranges: a .svg or .png file.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of what is drawn at random.")
@NO_NOTE
@JSON
def diagnose(
    alert_id: int | None,
    candidate: Path,
    factory: str,
    digest: str,
    inputs: Path | None,
    config_path: Path,
    data: Path | None,
    name: str,
    slice_name: str,
    number: int | None,
    picture: Path | None,
    seed: int,
    *,
    no_note: bool,
    as_json: bool,
) -> None:
    """Name the quantised sites of the candidate that damage a slice: that of ALERT, or the one of --slice.

    A site is an activation range, the weight of a layer, or a layer as a whole where these cannot be told apart. Each is put into FP32 alone and with others, on inputs of the slice; a site
    is named only if it restores more than 39 placebos do, on inputs on which it was not chosen. Where several activation ranges are too narrow
    together, the ranges that cut values off are named as a group, by the same rules. A healthy candidate is accused in at
    most 5 % of diagnoses. Without --inputs it works on the exemplars of the slice, or, if none of them was drawn at random, on what
    waits in the stream of samples. With ALERT the result becomes a note of the alert.

    Exit code 0 if a site is named, or ranges that clip together, 3 if none is to blame, 4 if there are too few inputs of the slice, or too few that are damaged; 1
    and 2 are errors, 2 also where this candidate cannot be diagnosed.

    \b
    Examples:
      quantdrift diagnose 12 --candidate models/digits-int8.onnx
      quantdrift diagnose 12 --candidate models/digits-int8.onnx --inputs recorded/
      quantdrift diagnose --slice scanner=archive --candidate digits-int8.onnx --inputs recorded.npz --picture cause.svg
      quantdrift diagnose 12 --candidate digits.safetensors --factory digits_models:int8
    """
    from quantdrift.shadow.repair.blame import diagnose as found_by
    from quantdrift.shadow.repair.opening import open_copy
    from quantdrift.shadow.repair.samples import check_served, comparison, recorded

    if picture is not None and picture.suffix not in _PICTURES:
        raise OperatorError(f"--picture {picture}: pictures are .svg or .png files")
    case = damaged(config_path, data, alert_id=alert_id, name=name, slice_name=slice_name, number=number)
    config, model, chosen = case.config, case.model, case.slice
    copy = open_copy(
        model, case.reference, candidate, factory=factory, digest=digest, threads=config.shadow.threads
    )
    compare = comparison(model, copy)
    if inputs is None:
        samples = _kept(case, data, copy, quiet=as_json)
        check_served(samples, copy, compare)
    else:
        samples = _samples(config, case.rules, copy.inputs, inputs, chosen, recorded, quiet=as_json)
    with click.progressbar(length=1000, label="switching sites", hidden=as_json, file=sys.stderr) as bar:
        found = found_by(
            copy,
            compare,
            samples.inside,
            elsewhere=samples.elsewhere,
            damaged=samples.damaged,
            budget=model.budget.flip,
            seed=seed,
            progress=lambda done, total: bar.update(1000 * done // total - bar.pos),
        )
    if picture is not None and found.one_off:
        from quantdrift.shadow.repair.picture import write

        write(found, picture, title=f"{model.name}, {chosen.name}: {cause_of(found)}")
    served = f"sha256:{hashlib.sha256(candidate.read_bytes()).hexdigest()}"
    if alert_id is not None and not no_note and found.verdict.value != "too few exemplars":
        add_note(config_path, data, alert_id, "cause", sentence_of(found), details_of(found, served))
    if as_json:
        emit(
            {
                "alert": alert_id,
                "model": model.name,
                "slice": chosen.name,
                "candidate": served,
                **msgspec.to_builtins(found),
            }
        )
    else:
        if inputs is None:
            n_chosen = len(next(iter(samples.damaged.values()))) if samples.damaged else 0
            click.echo(
                f"Inputs: {found.n_items} that nobody has chosen, and {n_chosen} that are kept because they are damaged; these count in no share."
            )
        else:
            click.echo(f"Inputs: {found.n_items:,} of {plain(chosen.name)} in {inputs}.")
        click.echo(text_of(found, model=model.name, slice_name=chosen.name))
        if picture is not None:
            click.echo(
                f"Picture: {picture}" if found.one_off else "No picture was written: no site was tried."
            )
    sys.exit(_EXIT[found.verdict.value])


def text_of(found: "Diagnosis", *, model: str, slice_name: str) -> str:
    """Return the diagnosis for the terminal."""
    others = f", elsewhere {part(found.elsewhere)}" if found.elsewhere is not None else ""
    damage = f"{part(found.flips)} of {found.n_items:,} answers change"
    lines = [
        f"{plain(model)}, {plain(slice_name)}: {damage}; the budget is {part(found.budget)}{others}.",
        f"The copy of the candidate reproduces {part(found.reproduced)} of its answers.",
    ]
    if found.rounding:
        lines[-1] += (
            f" The rest is rounding: scales that differ by a ten-thousandth change {part(found.rounding)}."
        )
    if found.one_off:
        lines[-1] += (
            f" {found.n_sites} sites were tried on {found.n_damaged} inputs whose answer changes and {found.n_random} others."
        )
    lines += _of_files(found)
    lines.append("")
    if found.verdict.value == "too few exemplars":
        return "\n".join([*lines, _too_few(found)])
    lines.append(f"Cause: {cause_of(found)}.")
    lines += [f"  {meaning}" for meaning, _ in _meanings(found) if meaning]
    if found.together:
        parts = [f"all {_KINDS[kind]} {part(max(share, 0.0))}" for kind, share in found.together.items()]
        lines.append(f"  Together in FP32 they heal: {', '.join(parts)} of the changed answers.")
    if found.clipping is not None:
        lines += [
            f"  {_clipping(found.clipping, is_beside=bool(found.blamed))}",
            "",
            _clipped(found.clipping),
        ]
    if found.blamed:
        head = ("site", "heals", "changed answers left", "why", "multiplications in FP32")
        lines += ["", columns(head, [_row(blamed) for blamed in found.blamed]), ""]
        measured_on = (
            "measured on the inputs that found the cause, for lack of others"
            if found.fresh_flips is None
            else "measured on inputs that nothing was chosen by"
        )
        lines += [
            f"heals: share of the changed answers that heal when the site is in FP32, beside the sites above it; {measured_on}.",
            "Each site restores more than random changes of the ranges do, on inputs on which it was not chosen.",
        ]
        if all(blamed.used is not None for blamed in found.blamed):
            lines.append("No weight is named.")
    lines += _left(found)
    if found.one_off and not any(site.startswith("A:") for site in found.one_off):
        lines.append("The candidate has no activation range that can be switched, so none can be named.")
    if found.unmatched:
        lines.append(
            f"{len(found.unmatched)} weights could not be found in the reference and stayed quantised: {', '.join(found.unmatched[:3])}"
        )
    lines += ["", f"What to do: {_to_do(found)}"]
    return "\n".join(lines)


def _of_files(found: "Diagnosis") -> list[str]:
    """Return what the two files alone say of the weights."""
    from quantdrift.shadow.repair.origin import fault_words

    lines = [f"By the files alone, {off.site}: {fault_words(off.tensor)}." for off in found.off]
    if found.origin.value == "moved by whole steps":
        lines.append(
            f"{found.n_moved} of {found.n_tensors} weights were moved by whole steps, as methods such as GPTQ do on purpose: their answers judge"
            " them."
        )
    return lines


def _left(found: "Diagnosis") -> list[str]:
    """Return whether what is named is all of the damage."""
    if found.left is None:
        return []
    if found.left > found.budget:
        is_left = f"{part(found.left)} of the answers still change (budget: {part(found.budget)})"
        return [
            f"Another cause is left: with all that is named in FP32 {is_left}. Mend what is named, and diagnose again."
        ]
    return [
        f"With all that is named in FP32 {part(found.left)} of the answers change, which is within the budget."
    ]


def sentence_of(found: "Diagnosis") -> str:
    """Return the cause and what to do, for a person who reads the alert."""
    sites = f" at {', '.join(blamed.site for blamed in found.blamed)}" if found.blamed else ""
    clips = (
        f"{_clipping(found.clipping, is_beside=bool(found.blamed))} " if found.clipping is not None else ""
    )
    return f"Cause: {cause_of(found)}{sites}. {clips}{_to_do(found)}"


def details_of(found: "Diagnosis", candidate: str) -> dict[str, Any]:
    """Return the figures of a diagnosis that an alert keeps."""
    names = ("causes", "flips", "budget", "elsewhere", "n_items", "n_sites", "fresh_flips", "left")
    return {
        "candidate": candidate,
        **msgspec.to_builtins({name: getattr(found, name) for name in names}),
        "sites": msgspec.to_builtins(found.blamed),
        "clipping": msgspec.to_builtins(found.clipping),
    }


def _to_do(found: "Diagnosis") -> str:
    meanings = dict(zip(_words(found), _meanings(found), strict=True))
    words = list(meanings)
    first = words[-1] if words[-1] == "not this slice" else words[0]
    chosen = [first, *(word for word in words if word == "clipping" and word != first)]
    return " ".join(meanings[word][1] for word in chosen)


def _meanings(found: "Diagnosis") -> list[tuple[str, str]]:
    """Return what each of the causes means, and what to do about it, in the order of `_words`."""
    return [
        _of_weight(found)
        if word == "weights"
        else _of_others(found)
        if word == "not this slice"
        else _MEANING[word]
        for word in _words(found)
    ]


def _of_weight(found: "Diagnosis") -> tuple[str, str]:
    """Return what is wrong with the first weight that is named."""
    first = next(blamed for blamed in found.blamed if blamed.cause.value == "weights")
    if found.origin.value == "moved by whole steps" and first.off:
        word = "moved"
    elif first.off:
        word = max(first.off, key=lambda tensor: tensor.share).fault.value
    elif not found.n_tensors:
        word = "unknown"
    else:
        word = "rounded by channel" if first.is_by_channel else "rounded"
    meaning, remedy = _OF_WEIGHTS[word]
    return meaning.format(site=first.site), remedy


def _of_others(found: "Diagnosis") -> tuple[str, str]:
    """Return what the damage of other slices means, measured with the named sites in FP32."""
    first, last = found.blamed[0], found.blamed[-1]
    elsewhere = part(found.elsewhere or 0.0)
    if found.is_of_every_slice:
        remedy = (
            _of_weight(found)[1]
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


def _words(found: "Diagnosis") -> list[str]:
    """Return the causes by their key in `_MEANING`: ranges that clip together have keys of their own."""
    words = [cause.value for cause in found.causes]
    if found.clipping is None:
        return words
    own = {"saturation": "clipping"}
    if not found.blamed:
        own["not this slice"] = "clipping elsewhere"
    return list(dict.fromkeys(own.get(word, word) for word in words))


def _clipping(clipping: "Clipping", *, is_beside: bool) -> str:
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


def _clipped(clipping: "Clipping") -> str:
    """Return a table of the ranges that clip most."""
    rows = [
        (
            clipped.site,
            part(clipped.outside),
            "unknown" if clipped.elsewhere is None else part(clipped.elsewhere),
            f"[{clipped.low:.3g}, {clipped.high:.3g}]" if clipped.low is not None else "by channel",
        )
        for clipped in clipping.ranges[:_MOST_CLIPPED]
    ]
    table = columns(("range that clips", "values outside", "elsewhere", "from, to"), rows)
    more = len(clipping.ranges) - len(rows)
    return f"{table}\n... and {more} more, with --json" if more else table


def _too_few(found: "Diagnosis") -> str:
    from quantdrift.shadow.repair.blame import DAMAGED, FEWEST_DAMAGED, FEWEST_ITEMS

    if found.n_items < FEWEST_ITEMS:
        return f"Too few inputs: there are {found.n_items} of this slice, and {FEWEST_ITEMS} are needed: {FEWEST_ITEMS - found.n_items} more."
    more = f"Record more of this slice: some {_needed(found):,}."
    if found.n_damaged < FEWEST_DAMAGED:
        return f"Too few damaged inputs: the answer of {found.n_damaged} changes, and {FEWEST_DAMAGED} are needed. {more}"
    return (
        f"Too few damaged inputs: no site restores more than chance does on the {found.n_damaged} whose answer changes. With fewer than"
        f" {DAMAGED} the right site is often missed. {more}"
    )


def _needed(found: "Diagnosis") -> int:
    from quantdrift.shadow.repair.blame import DAMAGED, FEWEST_ITEMS

    # Half of them are kept for the estimate of what a site heals.
    return max(round(2 * DAMAGED / found.flips), FEWEST_ITEMS) if found.flips else 200 * DAMAGED


def cause_of(found: "Diagnosis") -> str:
    """Return the cause in words."""
    if not found.causes:
        return found.verdict.value
    first, *others = (cause.value for cause in found.causes)
    words = {
        "spread": f"spread over {len(found.blamed)} of {found.n_sites} sites",
        "not this slice": "for every slice" if found.is_of_every_slice else "not only on this slice",
        "input": "none of the sites",
    }
    if found.clipping is not None and not found.blamed:
        n = len(found.clipping.ranges)
        words["saturation"] = f"saturation of {n} of {found.clipping.n_ranges} activation ranges together"
    return ", ".join([words.get(first, first), *(words.get(other, other) for other in others)])


def _row(blamed: "Blamed") -> tuple[str, ...]:
    return (
        blamed.site,
        part(blamed.heals),
        "unknown" if blamed.flips_left is None else part(blamed.flips_left),
        _why(blamed),
        "unknown" if blamed.cost is None else part(blamed.cost),
    )


def _why(blamed: "Blamed") -> str:
    from quantdrift.shadow.repair.origin import fault_words

    if blamed.off:
        return fault_words(max(blamed.off, key=lambda tensor: tensor.share))
    if blamed.weight_error is not None:
        return f"weights are off by {part(blamed.weight_error)}"
    if blamed.used is None or blamed.levels is None:
        return "weights and what goes in together"
    of = f" of [{blamed.low:.3g}, {blamed.high:.3g}]" if blamed.low is not None else ""
    if blamed.cause.value == "saturation":
        return f"{part(blamed.outside or 0.0)} of the values are outside{of}"
    elsewhere = ""
    if blamed.elsewhere_used is not None:
        elsewhere = f" (elsewhere {part(blamed.elsewhere_used)}, {blamed.elsewhere_levels:.0f})"
    return f"uses {part(blamed.used)}{of}, {blamed.levels:.0f} levels{elsewhere}"


def _kept(case: Damaged, data: Path | None, copy: "Copy", *, quiet: bool) -> "Samples":
    """Return the exemplars of the slice, and random ones of its neighbours; without any, what waits in the stream."""
    from quantdrift.shadow.repair.samples import of_exemplars, of_waiting

    problems: list[str] = []
    rule = case.slice.name.partition("=")[0]
    with Steps(quiet=quiet) as step:
        step(f"reading exemplars of {case.slice.name}")
        found, others, version = exemplars_of(
            case,
            data,
            problems,
            client_name="quantdrift diagnose",
            is_wanted=lambda name: name.startswith(f"{rule}="),
        )
        if any(one.kind.value == "random" for one in found):
            step(f"{len(found)} exemplars of {version}")
            say_unreadable(problems)
            return of_exemplars(found, others, copy)
        step("reading what waits in the stream")
        exchanges = asyncio.run(_waiting(case, data, problems))
        if case.version:
            exchanges = [one for one in exchanges if one.stored_version == case.version]
        say_unreadable(problems)
        return of_waiting(exchanges, case.slice, copy)


async def _waiting(case: Damaged, data: Path | None, problems: list[str]) -> "list[Exchange]":
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.rights import NatsRole
    from quantdrift.shadow.repair.exemplars import opener, waiting

    config = at_data(case.config, data, NatsRole.ADMIN)
    queue = await Queue.connect(config.stream, client_name="quantdrift diagnose", role=NatsRole.ADMIN)
    try:
        found = waiting(queue, case.model.name, opened=opener(config.stream), unreadable=problems.append)
        return [one async for one in found]
    finally:
        await queue.close()


def _samples(
    config: Config,
    rules: Sequence[Any],
    names: Sequence[str],
    inputs: Path,
    chosen: SliceKey,
    recorded: Any,
    *,
    quiet: bool,
) -> Any:
    """Return the recorded items of the slice, and others."""
    from quantdrift.shadow.gate.recording import layout_of, parts_of

    parts = parts_of(inputs)
    layout = layout_of(config, rules, names)
    length = sum(part.n_bytes for part in parts)
    with click.progressbar(length=length, label="reading inputs", hidden=quiet, file=sys.stderr) as bar:
        return recorded(parts, layout, rules, chosen, progress=bar.update)
