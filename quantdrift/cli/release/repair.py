"""The command `quantdrift repair`, which builds repairs of a candidate for a damaged slice, and measures them."""

import sys
from pathlib import Path
from typing import Any, Final

import click

import quantdrift
from quantdrift.cli.look.alerts import NO_NOTE
from quantdrift.cli.options import CONFIG, DATA, JSON
from quantdrift.cli.release.diagnose import FILE, MODEL, SLICE, answer
from quantdrift.cli.release.reference import REFERENCE
from quantdrift.facts.repairs import RepairKind

_KINDS: Final = tuple(kind.value for kind in RepairKind)


@click.command()
@click.argument("alert", metavar="[ALERT]", type=click.IntRange(min=1), required=False)
@click.option(
    "--candidate",
    type=FILE,
    required=True,
    help="The quantised model that serves: an ONNX file (QDQ, weights in blocks, dynamic INT8, FP16, BF16, decision trees), or with --factory a file of weights.",
)
@click.option(
    "--factory",
    metavar="MODULE:FUNCTION",
    default="",
    help="Of a candidate in PyTorch: the function that makes it. It gets the path of --candidate, or no argument: then its module is filled with safetensors.",
)
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded inputs of all traffic: a .npz or .safetensors file, or a folder of them, as for quantdrift gate.  [default: the"
    " exemplars of all slices]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="A new folder for the repaired models; nothing in it is ever overwritten.",
)
@CONFIG
@DATA
@MODEL
@SLICE
@REFERENCE
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(_KINDS),
    help="Build only these. Repeatable.  [default: all that the cause allows]",
)
@NO_NOTE
@JSON
def repair(**options: Any) -> None:
    """Build repairs of the candidate for a damaged slice, that of ALERT or the one of --slice, and measure them.

    The recorded inputs are split into halves. One finds the cause and calibrates; on the other each repair is measured on every slice,
    and judged as quantdrift gate does: any passes wrongly with a probability of at most 5 %. Repairs that work come first, the cheapest first.

    Without --inputs it works on the exemplars that the shadow keeps. Damaged ones find the cause and calibrate; only random ones measure, each
    slice by those that were drawn for it. They are too few for a pass: the gate on live traffic decides.

    The models are written to the folder --out, with repairs.json and routes for a proxy. Nothing is deployed. With ALERT the cause and the
    repairs become notes of the alert.

    \b
    recalibrate  new activation ranges, from all traffic and the slice
    own-copy     a second quantised copy with the ranges of the slice, and a route to it
    fp32-sites   the sites to blame are not quantised; of decision trees all, where none is named
    reference    a route of the slice to the reference
    roll-back    the reference serves everything

    Exit code 0 if a repaired model passes, 3 if none does, 4 if there are too few inputs to tell; 1 and 2 are errors.

    \b
    Examples:
      quantdrift repair 12 --candidate models/digits-int8.onnx --inputs recorded/ --out repaired/
      quantdrift repair --slice scanner=archive --candidate digits-int8.onnx --inputs recorded.npz --out repaired/ --only own-copy
    """
    result = answer(quantdrift.repair, **options)
    sys.exit(0 if result.passed else 4 if result.lacks_inputs else 3)
