"""The command `quantdrift gate`, which judges a candidate on every slice."""

import asyncio
import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

import click
import msgspec

from quantdrift.cli.embedded_nats import at_data
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare, span_of
from quantdrift.cli.output import Steps, columns
from quantdrift.cli.reference import chosen_reference, model_named, opened_reference
from quantdrift.core.config.load import Role, load
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, attribute_key
from quantdrift.core.tasks import Task

if TYPE_CHECKING:
    from quantdrift.drift.gate import Decision, SliceAnswer
    from quantdrift.shadow.gate.follow import Followed
    from quantdrift.shadow.gate.judge import Asked
    from quantdrift.shadow.gate.offline import Compared, Sides

_EXIT: Final = {"pass": 0, "fail": 3, "insufficient": 4}
_RATIOS: Final = {"99": 0.99, "99.9": 0.999}
_SHOWN: Final = 1e-5  # a share below it is shown as 0
_SECTION: Final = "quantdrift.gate"
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("candidate", type=_FILE)
@CONFIG
@click.option("--model", "name", default="", help="The model.  [default: the only one of the configuration]")
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded inputs: a .npz or .safetensors file, or a folder of them.",
)
@click.option("--live", is_flag=True, help="Judge on the live traffic from now on, in place of --inputs.")
@click.option("--wait", default="1h", show_default=True, help="With --live: longest time: 30m, 2h, 1d.")
@click.option(
    "--route",
    "routes",
    multiple=True,
    metavar="SLICE=FILE",
    help="FILE serves this slice, and CANDIDATE the rest. Repeatable.",
)
@DATA
@click.option("--against", type=_FILE, help="The model that is serving: the candidate must not be worse.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="With --against or --live: most flips, new minus healed, as a share.  [default: half of the budget]",
)
@click.option(
    "--mlperf",
    type=click.Choice([*_RATIOS]),
    help="Require this percentage of the reference's accuracy, over all inputs.",
)
@click.option("--labels", default="", metavar="NAME", help="With --mlperf: the array with the true classes.")
@click.option(
    "--reference-accuracy",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --mlperf, without labels: a lower bound of the reference's accuracy, as a share.",
)
@click.option(
    "--slice",
    "chosen",
    multiple=True,
    metavar="RULE",
    help="Judge only the slices of this rule, and all inputs together; `all`: only these. Repeatable.  [default: every rule]",
)
@click.option(
    "--reference", "number", type=click.IntRange(min=1), help="Number of the reference of the model, from 1."
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Probability of a wrong pass, at most, and of a wrong failure. For one of K candidates: 0.05 / K.",
)
@click.option(
    "--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write the answers as JUnit XML, too."
)
@JSON
def gate(
    candidate: Path,
    config_path: Path,
    name: str,
    inputs: Path | None,
    live: bool,
    wait: str,
    routes: tuple[str, ...],
    data: Path | None,
    against: Path | None,
    margin: float | None,
    mlperf: str | None,
    labels: str,
    reference_accuracy: float | None,
    chosen: tuple[str, ...],
    number: int | None,
    alpha: float,
    junit: Path | None,
    as_json: bool,
) -> None:
    """Judge whether CANDIDATE, an ONNX file, is good enough on every slice, before it is deployed.

    It runs the reference and the candidate on recorded inputs, compares their outputs like the shadow, and asks whether each slice
    is within the budget of the model. Inputs that the candidate was calibrated with do not count as evidence: leave them out.

    With --live it records the candidate in the database, and judges it on samples that are captured from then on. It is compared with
    what was served, too. `GET /gate/ID` at the monitor's admin port has the verdict.

    Exit code 0 if every slice passes, 3 if one fails, 4 if there is not enough evidence, with how many inputs are missing; 1 and 2 are
    errors.

    \b
    Examples:
      quantdrift gate digits-int8.onnx --inputs recorded.npz
      quantdrift gate repaired.onnx --inputs recorded/ --against digits-int8.onnx --junit gate.xml
      quantdrift gate digits-int8.onnx --inputs recorded.npz --mlperf 99.9 --labels class
      quantdrift gate repaired.onnx --live --wait 2h --route scanner=archive=archive-int8.onnx
    """
    from quantdrift.shadow.gate.judge import judge, observed

    if live == (inputs is not None):
        raise OperatorError("give either --inputs, recorded inputs, or --live")
    if live:
        given = {"--against": against, "--mlperf": mlperf, "--slice": chosen, "--reference": number}
        if unused := [option for option, value in given.items() if value]:
            raise OperatorError(
                f"{unused[0]} is for --inputs: live traffic is judged on all watched slices, against what serves"
            )
        sys.exit(
            _live(
                config_path,
                data,
                candidate,
                name=name,
                routes=routes,
                margin=margin,
                alpha=alpha,
                wait=wait,
                junit=junit,
                as_json=as_json,
            )
        )
    assert inputs is not None
    config = load(config_path)
    model = _model(config, name)
    _check_options(
        model, against=against, margin=margin, mlperf=mlperf, labels=labels, accuracy=reference_accuracy
    )
    rules = _rules(config, model, chosen)
    asked = _asked(
        model, against=against, margin=margin, mlperf=mlperf, labels=labels, accuracy=reference_accuracy
    )
    sides = _sides(config, model, rules, routes, number=number, candidate=candidate, against=against)
    try:
        found = _compared(config, sides, inputs, rules, labels, quiet=as_json)
    finally:
        sides.close()
    _check_attributes(inputs, rules, found)
    sliced = msgspec.structs.replace(config, slices=tuple(rules))
    made = judge(
        asked,
        observed(sliced, model.name, found),
        model=model.name,
        candidate=sides.digest,
        at=datetime.now(UTC),
        alpha=alpha,
    )
    if junit is not None:
        _write(junit, junit_of(made))
    if as_json:
        emit(made)
    else:
        click.echo(text_of(made))
    sys.exit(_EXIT[made.verdict.value])


def _live(
    config_path: Path,
    data: Path | None,
    candidate: Path,
    *,
    name: str,
    routes: Sequence[str],
    margin: float | None,
    alpha: float,
    wait: str,
    junit: Path | None,
    as_json: bool,
) -> int:
    """Judge a candidate on live traffic, and return the exit code."""
    from quantdrift.core.clock import SystemClock
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.rights import NatsRole
    from quantdrift.drift.gate import Question
    from quantdrift.shadow.gate.follow import Followed, Job, follow
    from quantdrift.shadow.gate.offline import open_candidate
    from quantdrift.shadow.replay.references import References
    from quantdrift.storage.database import Database

    longest = span_of("--wait", wait)
    config, secrets = prepare(config_path, Role.REPORT, data)
    config = at_data(config, data, NatsRole.SHADOW)
    model = _model(config, name)
    _check_options(model, against=candidate, margin=margin, mlperf=None, labels="", accuracy=None)
    provider, threads = config.shadow.provider, config.shadow.threads
    files = [_route(route) for route in routes]
    job = Job(
        config=config,
        model=model,
        references=References([model], lambda model, reference: opened_reference(config, model, reference)),
        candidate=open_candidate(candidate, what="candidate", provider=provider, threads=threads),
        routes=tuple(
            (of, open_candidate(file, what="candidate", provider=provider, threads=threads))
            for of, file in files
        ),
        questions=(
            Question.flips(model.budget.flip),
            Question.harm(model.budget.flip / 2 if margin is None else margin),
        ),
        alpha=alpha,
        wait=longest,
    )

    async def run() -> Followed:
        async with Database(secrets.dsn) as database:
            queue = await Queue.connect(config.stream, client_name="gate", role=NatsRole.SHADOW)
            try:
                with Steps(quiet=as_json) as step:
                    step(f"waiting for exchanges of model {model.name}")
                    return await follow(
                        job,
                        database=database,
                        queue=queue,
                        clock=SystemClock(),
                        look=lambda found: step(_progress(found)),
                    )
            finally:
                await queue.close()

    found = asyncio.run(run())
    made = found.decision
    if junit is not None:
        _write(junit, junit_of(made))
    if as_json:
        emit(
            {
                "id": found.id,
                "exchanges": found.seen,
                "refused": found.refused,
                "unusable": found.unusable,
                "problem": found.problem,
                **msgspec.structs.asdict(made),
            }
        )
    else:
        click.echo(f"gate {found.id}: {found.seen:,} exchanges in {_span(found.elapsed_s)}")
        if found.refused:
            click.echo(
                f"{found.refused:,} of them the candidate could not answer; they count as flips ({found.problem})"
            )
        if found.unusable:
            click.echo(f"{found.unusable:,} more could not be used and do not count ({found.problem})")
        click.echo(text_of(made, found.elapsed_s))
    return _EXIT[made.verdict.value]


def _route(route: str) -> tuple[str, Path]:
    """Return the slice and the file of `--route`; names of slices have equals signs, too."""
    name, _, file = route.rpartition("=")
    if not name or not Path(file).is_file():
        raise OperatorError(
            f"--route {route}: write SLICE=FILE, such as scanner=archive=archive.onnx, with a file that is there"
        )
    return name, Path(file)


def _progress(found: "Followed") -> str:
    waiting = [answer for answer in found.decision.slices if answer.verdict.value == "insufficient"]
    lacks = max(waiting, key=lambda answer: math.inf if answer.more is None else answer.more)
    n_asked = len(found.decision.slices)
    return (
        f"gate {found.id}: {found.seen:,} exchanges, {n_asked - len(waiting)} of {n_asked} questions decided; {lacks.slice}:"
        f" {_missing(lacks, found.elapsed_s)}"
    )


def _span(seconds: float) -> str:
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def text_of(made: "Decision", elapsed_s: float | None = None) -> str:
    """Return the decision for the terminal: a table with a row for each question of each slice, and a sentence.

    Parameters
    ----------
    made
        The decision.
    elapsed_s
        Time in which the exchanges came, for the time that is missing; None: they were recorded.
    """
    rows = [
        (
            answer.slice,
            _ASKED[answer.question.value],
            answer.verdict.value,
            f"{answer.n:,}",
            _mean(answer),
            f"< {_share(answer.limit)}",
            _missing(answer, elapsed_s),
        )
        for answer in made.slices
    ]
    head = ("slice", "question", "verdict", "n", "mean [low, high]", "limit", "missing")
    return "\n".join([columns(head, rows), "", _sentence(made)])


def junit_of(made: "Decision") -> bytes:
    """Return the decision as JUnit XML: a test case for each question of each slice; what is insufficient is an error."""
    cases = [(answer, _case(answer)) for answer in made.slices]
    suite = ET.Element(
        "testsuite",
        name=_SECTION,
        tests=str(len(cases)),
        failures=str(sum(answer.verdict.value == "fail" for answer, _ in cases)),
        errors=str(sum(answer.verdict.value == "insufficient" for answer, _ in cases)),
        timestamp=made.checked_at.isoformat(timespec="seconds"),
    )
    properties = ET.SubElement(suite, "properties")
    for key, value in (("model", made.model), ("candidate", made.candidate), ("verdict", made.verdict.value)):
        ET.SubElement(properties, "property", name=key, value=value)
    suite.extend(case for _, case in cases)
    ET.indent(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(suite, encoding="unicode")}\n'.encode()


_ASKED: Final = {"flips": "flips", "harm": "new - healed", "accuracy": "accuracy lost"}


def _case(answer: "SliceAnswer") -> ET.Element:
    case = ET.Element("testcase", classname=_SECTION, name=f"{answer.slice}: {_ASKED[answer.question.value]}")
    text = f"{_mean(answer)} of {answer.n}, limit {_share(answer.limit)}"
    if answer.verdict.value == "fail":
        ET.SubElement(case, "failure", type="fail", message=text)
    elif answer.verdict.value == "insufficient":
        ET.SubElement(case, "error", type="insufficient", message=f"{text}; missing: {_missing(answer)}")
    return case


def _sentence(made: "Decision") -> str:
    named = {verdict: _named(made, verdict) for verdict in ("fail", "insufficient")}
    if made.verdict.value == "pass":
        return f"pass: {made.model} may be replaced by {made.candidate}"
    if made.verdict.value == "fail":
        return f"fail: above the limit in {named['fail']}"
    more = "more than anybody can wait for" if made.more is None else f"about {made.more:,} more"
    return f"insufficient evidence: {named['insufficient']}; the slice that lacks most needs {more}"


def _named(made: "Decision", verdict: str) -> str:
    names = dict.fromkeys(answer.slice for answer in made.slices if answer.verdict.value == verdict)
    return ", ".join(names)


def _missing(answer: "SliceAnswer", elapsed_s: float | None = None) -> str:
    if answer.verdict.value != "insufficient":
        return ""
    if answer.more is None:
        return "cannot be told: the mean is at the limit"
    time = ""
    if elapsed_s is not None:
        time = (
            f", {_span(answer.more * elapsed_s / answer.n)} at this rate" if answer.n else ", and none came"
        )
    return f"about {answer.more:,} more{time}"


def _mean(answer: "SliceAnswer") -> str:
    if answer.mean is None:
        return "-"
    return f"{_share(answer.mean)} [{_share(answer.low)}, {_share(answer.high)}]"


def _share(value: float) -> str:
    return f"{100 * value:.3g} %" if abs(value) >= _SHOWN else "0 %"


def _model(config: Config, name: str) -> Model:
    if name:
        return model_named(config, name)
    if len(config.models) != 1:
        raise OperatorError(f"the configuration has {len(config.models)} models: choose one with --model")
    return config.models[0]


def _check_options(
    model: Model,
    *,
    against: Path | None,
    margin: float | None,
    mlperf: str | None,
    labels: str,
    accuracy: float | None,
) -> None:
    if model.task is Task.GENERATION:
        raise OperatorError(
            f"model `{model.name}` has the task `generation`, whose answers depend on the server that generates them:"
            " recorded inputs cannot show them"
        )
    if margin is not None and against is None:
        raise OperatorError("--margin needs --against, the model that is serving, or --live")
    if mlperf is None and (labels or accuracy is not None):
        raise OperatorError("--labels and --reference-accuracy need --mlperf 99 or --mlperf 99.9")
    if mlperf is not None and bool(labels) == (accuracy is not None):
        raise OperatorError(
            "--mlperf needs either --labels, the array with the true classes, or without labels --reference-accuracy, a lower"
            " bound of the reference's accuracy, of which the flips can take away at most their share"
        )


def _asked(
    model: Model,
    *,
    against: Path | None,
    margin: float | None,
    mlperf: str | None,
    labels: str,
    accuracy: float | None,
) -> "Asked":
    from quantdrift.drift.gate import Question
    from quantdrift.shadow.gate.judge import Asked

    questions = [Question.flips(model.budget.flip)]
    if against is not None:
        questions.append(Question.harm(model.budget.flip / 2 if margin is None else margin))
    together = []
    if mlperf is not None:
        ratio = _RATIOS[mlperf]
        together.append(
            Question.accuracy(ratio) if labels else Question.accuracy_by_flips(ratio, accuracy or 0.0)
        )
    return Asked(slices=tuple(questions), all=tuple(together))


def _rules(config: Config, model: Model, chosen: Sequence[str]) -> list[Slice]:
    """Return the slice rules that are judged."""
    rules = [rule for rule in config.slices if rule.model in ("", model.name)]
    if not chosen:
        return rules
    known = {rule.name: rule for rule in rules}
    if unknown := [name for name in chosen if name not in {ALL, *known}]:
        raise OperatorError(
            f"--slice {unknown[0]}: model `{model.name}` has no such rule in [[slices]]; it has {_listed([ALL, *known])}"
        )
    kept = [rule for name, rule in known.items() if name in chosen]
    for rule in kept:
        if absent := [part for part in rule.cross if part not in chosen]:
            raise OperatorError(f"--slice {rule.name} is a cross: give --slice {absent[0]}, too")
    return kept


def _sides(
    config: Config,
    model: Model,
    rules: Sequence[Slice],
    routes: Sequence[str],
    *,
    number: int | None,
    candidate: Path,
    against: Path | None,
) -> "Sides":
    from quantdrift.shadow.comparators.registry import comparator_of
    from quantdrift.shadow.gate.offline import Route, Sides, open_candidate, route_slice
    from quantdrift.shadow.replay.references import VersionReference
    from quantdrift.shadow.runtimes.registry import check_mapping

    named = [
        (route_slice(_slices_named(config, model, rules, name), name), file)
        for name, file in map(_route, routes)
    ]
    if not model.references:
        raise OperatorError(
            f"model `{model.name}` has no [[models.references]]: there is nothing to compare with"
        )
    _, reference = chosen_reference(model, number)
    provider, threads = config.shadow.provider, config.shadow.threads
    runtime = opened_reference(config, model, reference)
    comparator = comparator_of(model)
    check_mapping(model, reference, runtime, comparator.outputs)
    served = None
    if against is not None:
        served = open_candidate(against, what="served model", provider=provider, threads=threads)
    return Sides(
        reference=VersionReference(model=model, runtime=runtime, comparator=comparator, reference=reference),
        candidate=open_candidate(candidate, what="candidate", provider=provider, threads=threads),
        served=served,
        routes=tuple(
            Route(
                slice=key, runtime=open_candidate(file, what="candidate", provider=provider, threads=threads)
            )
            for key, file in named
        ),
    )


def _slices_named(config: Config, model: Model, rules: Sequence[Slice], name: str) -> list[SliceKey]:
    """Return the declared slices of the rules, and that of the value in `name` for a rule without declared values."""
    assigner = SliceAssigner(msgspec.structs.replace(config, slices=tuple(rules)), model.name)
    of, _, value = name.partition("=")
    attributes = {
        attribute_key(rule): value for rule in rules if rule.name == of and not (rule.feature or rule.cross)
    }
    return list(dict.fromkeys([*assigner.declared(), *assigner.assign(attributes, {})]))


def _compared(
    config: Config, sides: "Sides", inputs: Path, rules: Sequence[Slice], labels: str, *, quiet: bool
) -> "list[Compared]":
    from quantdrift.shadow.gate.offline import compared
    from quantdrift.shadow.gate.recording import layout_of, parts_of

    parts = parts_of(inputs)
    layout = layout_of(config, rules, sides.inputs, labels)
    length = sum(part.n_bytes for part in parts)
    with click.progressbar(length=length, label="comparing", hidden=quiet, file=sys.stderr) as bar:
        return list(
            compared(sides, parts, layout, rules, step=config.shadow.batch_items, progress=bar.update)
        )


def _check_attributes(inputs: Path, rules: Sequence[Slice], found: "Sequence[Compared]") -> None:
    from quantdrift.shadow.gate.judge import missing_attributes

    if missing := missing_attributes(rules, found):
        rule, key = next(iter(missing.items()))
        crossed = {one.name for one in rules if missing.keys() & {*one.cross}}
        others = [one.name for one in rules if one.name not in {*missing, *crossed}] or [ALL]
        raise OperatorError(
            f"--inputs {inputs} has no attribute for the slices `{rule}`: give it an array `{rule}` or `{key}` with one text for"
            f" each item, or folders {rule}=VALUE; or judge without these slices: "
            + " ".join(f"--slice {name}" for name in others)
        )


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OperatorError(f"--junit {path} cannot be written: {error.strerror}") from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
