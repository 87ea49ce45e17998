"""The command `quantdrift gate`, which judges a candidate on every slice."""

import asyncio
import math
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode
from xml.etree import ElementTree as ET

import click
import msgspec

from quantdrift.cli.alerts import NO_NOTE, add_note
from quantdrift.cli.calibration import calibration_of
from quantdrift.cli.embedded_nats import at_data
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare, span_of
from quantdrift.cli.output import Steps, columns
from quantdrift.cli.reference import REFERENCE, chosen_reference, model_named, opened_reference
from quantdrift.core.config.load import Role, load
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.diagnosable import gate_problem
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, attribute_key

if TYPE_CHECKING:
    from quantdrift.drift.gate import Decision, Load, LoadRun, Question, SliceAnswer
    from quantdrift.shadow.gate.follow import Followed
    from quantdrift.shadow.gate.found import FoundSlices
    from quantdrift.shadow.gate.judge import Asked, Observed
    from quantdrift.shadow.gate.load import Budget
    from quantdrift.shadow.gate.offline import Compared, Sides
    from quantdrift.storage.monitor.alerts import AlertFact

_EXIT: Final = {"pass": 0, "fail": 3, "insufficient": 4}
_RATIOS: Final = {"99": 0.99, "99.9": 0.999}
_SHOWN: Final = 1e-5  # a share below it is shown as 0
_SECTION: Final = "quantdrift.gate"
_DIGEST: Final = re.compile(r" (.+?)=(sha256:[0-9a-f]+)")
_READABLE: Final = len("sha256:") + 12  # characters of a digest
_LOADED: Final = "loaded"  # the labels are those of the database, not an array
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
@click.option("--wait", default="1d", show_default=True, help="With --live: longest time: 30m, 2h, 1d.")
@click.option(
    "--any-hour",
    is_flag=True,
    help="With --live: pass without having seen every hour of the day, of which the traffic may differ.",
)
@click.option(
    "--route",
    "routes",
    multiple=True,
    metavar="SLICE=FILE",
    help="FILE serves this slice, and CANDIDATE the rest. Repeatable.",
)
@DATA
@click.option(
    "--against",
    type=_FILE,
    help="The model that is serving: the candidate must not be worse. With --route it may be CANDIDATE itself, with --live it must be: then the"
    " routes alone change answers, and of the slices that they do not serve only harm is asked.",
)
@click.option(
    "--calibration",
    "calibration",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="What the candidate was calibrated on: recorded inputs, or repairs.json. Such rows do not count. Repeatable. The repairs.json beside a"
    " file is read without it.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="With --against or --live: most flips, new minus healed, as a share.  [default: half of the budget]",
)
@click.option(
    "--mlperf",
    type=click.Choice([*_RATIOS]),
    help="Require this percentage of the reference's accuracy, over all inputs or all traffic.",
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
    help="Judge only the slices of this rule, and all inputs together; `all`: only these; `cluster`, `novel`, `discovered`: learned and"
    " discovered ones. Repeatable.  [default: every rule, and what the database knows]",
)
@click.option(
    "--divergence",
    is_flag=True,
    help="Ask for the divergence, too: its mean must be below models.budget.divergence.",
)
@click.option(
    "--latency-p99",
    "latency",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="The p99 of the candidate's latency must be below it: measured on the inputs, or from --load.",
)
@click.option(
    "--throughput",
    type=click.FloatRange(0, min_open=True),
    metavar="PER_S",
    help="The candidate must answer at least so many requests per second: measured on the inputs, or from --load.",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    metavar="FILE",
    help="A finished load run: perf_analyzer's CSV, MLPerf's mlperf_log_summary.txt, or JSON. With --route also SLICE=FILE for"
    " each route.",
)
@click.option(
    "--alert",
    type=click.IntRange(min=1),
    metavar="ALERT",
    help="Judge only the slice of this alert, and all inputs together: in place of --model and --slice.",
)
@click.option(
    "--note",
    type=click.IntRange(min=1),
    metavar="ALERT",
    help="Write the verdict on every slice to this alert as a note. --alert does it itself.",
)
@REFERENCE
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
@click.option(
    "--other-weights",
    is_flag=True,
    help="The weights are not those of the reference, rounded, on purpose: of a model that was trained further. Its answers judge it.",
)
@NO_NOTE
@JSON
def gate(
    candidate: Path,
    config_path: Path,
    name: str,
    inputs: Path | None,
    live: bool,
    wait: str,
    any_hour: bool,
    routes: tuple[str, ...],
    data: Path | None,
    against: Path | None,
    calibration: tuple[Path, ...],
    margin: float | None,
    mlperf: str | None,
    labels: str,
    reference_accuracy: float | None,
    chosen: tuple[str, ...],
    divergence: bool,
    latency: float | None,
    throughput: float | None,
    loads: tuple[str, ...],
    alert: int | None,
    note: int | None,
    number: int | None,
    alpha: float,
    junit: Path | None,
    other_weights: bool,
    no_note: bool,
    as_json: bool,
) -> None:
    """Judge whether CANDIDATE, an ONNX file, is good enough on every slice, before it is deployed.

    It runs the reference and the candidate on recorded inputs, compares their outputs like the shadow, and asks whether each slice
    is within the budget of the model. Inputs that the candidate was calibrated with do not count as evidence: leave them out. Learned and
    discovered slices are judged, too, where the command can read the database; else it says that they are not.

    With --live it records the candidate in the database, and judges it on samples that are captured from then on. It is compared with
    what was served, too. `/gate/ID` at the monitor's admin port has the verdict, for a day.

    Exit code 0 if every slice passes, 3 if one fails, 4 if there is not enough evidence, with how many inputs are missing; 1 and 2 are
    errors, 130 Ctrl-C and 143 SIGTERM: no verdict.

    \b
    Examples:
      quantdrift gate digits-int8.onnx --inputs recorded.npz
      quantdrift gate repaired.onnx --inputs recorded/ --against digits-int8.onnx --junit gate.xml
      quantdrift gate digits-int8.onnx --inputs recorded.npz --mlperf 99.9 --labels class
      quantdrift gate repaired.onnx --inputs recorded.npz --alert 7
      quantdrift gate repaired.onnx --live --route scanner=archive=archive-int8.onnx
    """
    from quantdrift.shadow.gate.judge import judge, n_questions, observed
    from quantdrift.shadow.gate.load import Budget

    if live == (inputs is not None):
        raise OperatorError("give either --inputs, recorded inputs, or --live")
    _check_alert(alert, note, name=name, chosen=chosen, no_note=no_note)
    _check_writable(junit)
    budget = Budget(latency_p99_s=latency, throughput_per_s=throughput)
    run = _load_run(loads, budget, candidate, routes, live=live)
    fact = None if alert is None else _alert(config_path, data, alert)
    noted = fact if note is None else _alert(config_path, data, note)
    name = _model_of(noted, name) if noted else name
    note = None if no_note or noted is None else noted.id
    if live:
        other = None if _is_same(against, candidate, routes) else against
        given = {"--against": other, "--slice": chosen, "--reference": number, "--calibration": calibration}
        if unused := [option for option, value in given.items() if value]:
            raise OperatorError(
                f"{unused[0]} is for --inputs: live traffic is judged on all watched slices, against what serves"
            )
        if labels:
            raise OperatorError(
                "--labels is for --inputs: true classes come later than the traffic. Leave it out, and load them with `quantdrift labels"
                " load` while the gate runs; or give --reference-accuracy, a lower bound of the reference's accuracy"
            )
        sys.exit(
            _live(
                config_path,
                data,
                candidate,
                name=name,
                only=fact.slice if fact else "",
                run=run,
                mlperf=mlperf,
                accuracy=reference_accuracy,
                divergence=divergence,
                routes=routes,
                against=against,
                margin=margin,
                alpha=alpha,
                wait=wait,
                any_hour=any_hour,
                junit=junit,
                note=note,
                other_weights=other_weights,
                as_json=as_json,
            )
        )
    assert inputs is not None
    config = load(config_path)
    model = _model(config, name)
    _check_options(
        model, against=against, margin=margin, mlperf=mlperf, labels=labels, accuracy=reference_accuracy
    )
    rules, kinds = _judged_slices(config, model, fact, chosen)
    asked = _asked(
        model,
        against=against,
        margin=margin,
        mlperf=mlperf,
        labels=labels,
        accuracy=reference_accuracy,
        divergence=divergence,
    )
    _check_origins(candidate, routes, model, number, other_weights=other_weights)
    sides = _sides(config, model, rules, routes, number=number, candidate=candidate, against=against)
    try:
        more = _found_slices(
            config_path, data, config, model, sides, rules=rules, chosen=chosen, kinds=kinds, alert=fact
        )
        found = _compared(config, model, sides, inputs, rules, more, labels, quiet=as_json)
        _check_attributes(inputs, rules, found)
        more = more.told_by({key for one in found for key in one.items.attributes})
        known = calibration_of(calibration, [candidate, *(file for _, file in _routes(routes))], sides.inputs)
        items = observed(
            msgspec.structs.replace(config, slices=tuple(rules)), model.name, found, more, calibration=known
        )
        items = _of_alert(items, fact, inputs, more.left_out) if fact else items
        asked = _with_routes(asked, routes, candidate, against)
        _note(inputs, rules, found, items)
        beside = 0 if run else budget.n * (1 + len(routes))
        if beside:
            fail_level = alpha / (n_questions(asked, items) + beside)
            run = _measured(model, sides, found, budget, levels=(alpha, fail_level), quiet=as_json)
    finally:
        sides.close()
    made = judge(
        asked,
        items,
        model=model.name,
        candidate=sides.digest,
        at=datetime.now(UTC),
        alpha=alpha,
        run=run,
        beside=beside,
    )
    _add_note(config_path, data, note, made := msgspec.structs.replace(made, not_judged=more.left_out))
    _tell(made, junit, as_json=as_json)
    sys.exit(_EXIT[made.verdict.value])


def _check_origins(
    candidate: Path, routes: Sequence[str], model: Model, number: int | None, *, other_weights: bool
) -> None:
    """Refuse a candidate that was made from another checkpoint, before anything runs; say which weights are faulty."""
    from quantdrift.cli.candidate_origin import check_origin

    if other_weights or not model.references:
        return
    _, reference = chosen_reference(model, number)
    for file in (candidate, *(file for _, file in _routes(routes))):
        for note in check_origin(
            file, reference, remedy=" For a model that was trained further: --other-weights"
        ):
            click.echo(f"quantdrift: {note}", err=True)


def _tell(made: "Decision", junit: Path | None, *, as_json: bool) -> None:
    """Print a decision, and write it for CI."""
    if as_json:
        emit(made)
    else:
        click.echo(text_of(made))
    _write_junit(junit, made)


def _live(
    config_path: Path,
    data: Path | None,
    candidate: Path,
    *,
    name: str,
    only: str,
    run: "LoadRun | None",
    mlperf: str | None,
    accuracy: float | None,
    divergence: bool,
    routes: Sequence[str],
    against: Path | None,
    margin: float | None,
    alpha: float,
    wait: str,
    any_hour: bool,
    junit: Path | None,
    note: int | None,
    other_weights: bool,
    as_json: bool,
) -> int:
    """Judge a candidate on live traffic, and return the exit code."""
    from quantdrift.core.clock import SystemClock
    from quantdrift.core.process.run import SignalStop
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.rights import NatsRole
    from quantdrift.shadow.gate.follow import Followed, Job, follow
    from quantdrift.shadow.gate.offline import check_task_of_labels, open_candidate
    from quantdrift.shadow.replay.references import References
    from quantdrift.storage.database import Database

    longest = span_of("--wait", wait)
    config, secrets = prepare(config_path, Role.REPORT, data)
    config = at_data(config, data, NatsRole.SHADOW)
    model = _model(config, name)
    if len(model.references) == 1:
        _check_origins(candidate, routes, model, None, other_weights=other_weights)
    labels = _LOADED if mlperf is not None and accuracy is None else ""
    _check_options(model, against=candidate, margin=margin, mlperf=mlperf, labels=labels, accuracy=accuracy)
    if labels:
        check_task_of_labels(model)
    asked = _asked(
        model,
        against=candidate,
        margin=margin,
        mlperf=mlperf,
        labels=labels,
        accuracy=accuracy,
        divergence=divergence,
    )
    provider, threads = config.shadow.provider, config.shadow.threads
    files = _routes(routes)
    job = Job(
        config=config,
        model=model,
        only=only,
        run=run,
        references=References([model], lambda model, reference: opened_reference(config, model, reference)),
        candidate=open_candidate(candidate, what="candidate", provider=provider, threads=threads),
        routes=tuple(
            (of, open_candidate(file, what="candidate", provider=provider, threads=threads))
            for of, file in files
        ),
        asked=_with_routes(asked, routes, candidate, against),
        every_hour=not any_hour,
        alpha=alpha,
        wait=longest,
    )

    async def follow_it() -> tuple[Followed, int]:
        async with Database(secrets.dsn) as database:
            queue = await Queue.connect(config.stream, client_name="gate", role=NatsRole.SHADOW)
            try:
                stop = SignalStop()
                with Steps(quiet=as_json) as step:
                    step(f"waiting for exchanges of model {model.name}")
                    found = await follow(
                        job,
                        database=database,
                        queue=queue,
                        clock=SystemClock(),
                        look=lambda found: step(_progress(found)),
                        stop=stop,
                    )
                    return found, stop.exit_code
            finally:
                await queue.close()

    found, interrupted_code = asyncio.run(follow_it())
    made = found.decision
    if not found.interrupted:
        _add_note(config_path, data, note, made)
    _show(found, as_json=as_json)
    if found.interrupted:
        return interrupted_code
    _write_junit(junit, made)
    return _EXIT[made.verdict.value]


def _show(found: "Followed", *, as_json: bool) -> None:
    """Print what a gate on live traffic has found."""
    if as_json:
        emit(
            {
                "id": found.id,
                "exchanges": found.seen,
                "refused": found.refused,
                "unusable": found.unusable,
                "problem": found.problem,
                "unlabelled": found.unlabelled,
                "forgotten": found.forgotten,
                "interrupted": found.interrupted,
                "hours": found.hours,
                **msgspec.structs.asdict(found.decision),
            }
        )
    else:
        click.echo(
            f"gate {found.id}: {found.seen:,} exchanges in {_span(found.elapsed_s)}{_seen_hours(found)}"
        )
        if found.refused:
            click.echo(
                f"{found.refused:,} of them the candidate could not answer; they count as flips ({found.problem})"
            )
        if found.unusable:
            click.echo(f"{found.unusable:,} more could not be used and do not count ({found.problem})")
        if found.unlabelled:
            click.echo(
                f"{found.unlabelled:,} have no label: `quantdrift labels load` gives them one while the gate runs"
            )
        if found.forgotten:
            click.echo(f"{found.forgotten:,} were forgotten before they had a label: load labels more often")
        click.echo(text_of(found.decision, found.elapsed_s))
        if found.decision.verdict.value == "pass":
            asked = urlencode({"candidate": found.decision.candidate}, safe=":=", quote_via=quote)
            click.echo(f"In a rollout: POST /gate/{found.id}/promote?{asked}")
        if found.interrupted:
            click.echo(f"Interrupted: gate {found.id} has ended without a verdict.")


def _seen_hours(found: "Followed") -> str:
    return f", of the hours {_hours(found.hours)} of the day" if found.hours else ""


def _add_note(config_path: Path, data: Path | None, alert: int | None, made: "Decision") -> None:
    """Write the verdict to an alert, if there is one."""
    if alert is None:
        return
    bad = [answer.slice for answer in made.slices if answer.verdict.value != "pass"]
    details = {"candidate": made.candidate, "verdict": made.verdict.value, "slices": list(dict.fromkeys(bad))}
    add_note(config_path, data, alert, "gate", f"Gate: {_sentence(made)}", details)


def _load_run(
    given: Sequence[str], budget: "Budget", candidate: Path, routes: Sequence[str], *, live: bool
) -> "LoadRun | None":
    """Return the load runs of the files that `--load` names, or None where there is none."""
    from quantdrift.drift.gate import LoadRun
    from quantdrift.shadow.gate.load import read_load

    if not given:
        if live and budget.n:
            raise OperatorError(
                "--latency-p99 and --throughput need --load with --live: measure the candidate where it will serve, and give the file"
            )
        return None
    if not budget.n:
        raise OperatorError("--load needs a budget: --latency-p99 or --throughput")
    models = {ALL: candidate, **dict(_routes(routes))}
    files: dict[str, Path] = {}
    for one in given:
        named, _, file = ("", "", one) if Path(one).is_file() else one.rpartition("=")
        of = named or ALL
        if not Path(file).is_file():
            raise OperatorError(f"--load {one}: there is no file {file}")
        if of not in models:
            raise OperatorError(f"--load {one}: there is no --route {of}=FILE whose load run this could be")
        if of in files:
            raise OperatorError(f"--load {one}: {models[of]} has two load runs: give one")
        files[of] = Path(file)
    if absent := [of for of in models if of not in files]:
        option = "--load FILE" if absent[0] == ALL else f"--load {absent[0]}=FILE"
        raise OperatorError(
            f"the load run of {models[absent[0]]} is missing, and every file must keep the budget: give {option}, too"
        )
    return LoadRun.joined([read_load(files[of], budget, file=model, of=of) for of, model in models.items()])


def _measured(
    model: Model,
    sides: "Sides",
    found: "Sequence[Compared]",
    budget: "Budget",
    *,
    levels: tuple[float, float],
    quiet: bool,
) -> "LoadRun":
    """Return the speed of the candidate, and of each route, on the recorded inputs that it serves."""
    from quantdrift.drift.gate import LoadRun
    from quantdrift.shadow.gate.load import measured
    from quantdrift.shadow.gate.offline import served_items

    models = [(ALL, sides.candidate), *((route.slice.name, route.runtime) for route in sides.routes)]
    inputs, runs = [one.items.inputs for one in found], []
    with Steps(quiet=quiet) as step:
        for (of, runtime), items in zip(models, served_items(sides, found), strict=True):
            step(f"measuring the latency of {runtime.artefact.path}, one request after the other")
            runs.append(
                measured(
                    runtime,
                    inputs,
                    budget,
                    items=items,
                    of=of,
                    batched=model.batched,
                    pass_level=levels[0],
                    fail_level=levels[1],
                )
            )
    return LoadRun.joined(runs)


def _alert(config_path: Path, data: Path | None, number: int) -> "AlertFact":
    """Return the alert that `--alert` names."""
    from quantdrift.storage.database import Database
    from quantdrift.storage.monitor.alerts import find_alert

    _, secrets = prepare(config_path, Role.REPORT, data)

    async def run() -> "AlertFact":
        async with Database(secrets.dsn) as database, database.begin() as connection:
            return await find_alert(connection, number)

    return asyncio.run(run())


def _check_alert(
    alert: int | None, note: int | None, *, name: str, chosen: Sequence[str], no_note: bool
) -> None:
    if alert is not None and (name or chosen):
        raise OperatorError("--alert gives the model and the slice: leave out --model and --slice")
    if note is not None and (no_note or alert is not None):
        raise OperatorError("--note is in place of --alert, which writes a note itself, and of --no-note")


def _model_of(alert: "AlertFact", name: str) -> str:
    """Return the model of an alert, which must be the one that was named, if any was."""
    if name not in ("", alert.model):
        raise OperatorError(f"alert {alert.id} is about model `{alert.model}`, and not about `{name}`")
    return alert.model


def _judged_slices(
    config: Config, model: Model, alert: "AlertFact | None", chosen: Sequence[str]
) -> tuple[list[Slice], tuple[str, ...]]:
    """Return the slice rules that are judged, and the kinds of learned and discovered slices that `--slice` names.

    No kind: all of them without `--slice`, else none.
    """
    from quantdrift.shadow.gate.found import KINDS

    if alert:
        return _rules_of(config, model, alert), ()
    rules = {rule.name for rule in _rules(config, model, ())}
    kinds = tuple(kind for kind in KINDS if kind in chosen and kind not in rules)
    named = [name for name in chosen if name not in kinds]
    return _rules(config, model, named or ([ALL] if kinds else ())), kinds


def _rules_of(config: Config, model: Model, alert: "AlertFact") -> list[Slice]:
    """Return the slice rules that make the slice of an alert; none where it is all inputs, learned or discovered."""
    if alert.slice == ALL:
        return []
    rules = _rules(config, model, ())
    for rule in rules:
        needed = [one for one in rules if one is rule or one.name in rule.cross]
        if any(key.name == alert.slice for key in _slices_named(config, model, needed, alert.slice)):
            return _rules(config, model, [one.name for one in needed])
    return []


def _found_slices(
    config_path: Path,
    data: Path | None,
    config: Config,
    model: Model,
    sides: "Sides",
    *,
    rules: Sequence[Slice],
    chosen: Sequence[str],
    kinds: Sequence[str],
    alert: "AlertFact | None",
) -> "FoundSlices":
    """Return the learned and discovered slices that are judged, of which the database knows.

    Where nobody has asked for one by name, a database that does not answer is a reason to leave them out, and to say so.
    """
    from quantdrift.shadow.gate.found import NONE_FOUND, FoundSlices, found_slices
    from quantdrift.storage.database import Database

    if (alert and (rules or alert.slice == ALL)) or (chosen and not kinds):
        return NONE_FOUND

    async def read() -> FoundSlices:
        _, secrets = prepare(config_path, Role.REPORT, data)
        async with Database(secrets.dsn) as database:
            return await found_slices(database, config, model, sides.reference.runtime.artefact.digest)

    try:
        found = asyncio.run(read())
    except (OperatorError, RetryError) as error:
        if alert or kinds:
            raise
        return FoundSlices(
            left_out=(
                f"learned and discovered slices: the database, which knows them, cannot be read: {error}",
            )
        )
    if alert:
        return _one_found(found, alert)
    if absent := [kind for kind in kinds if not found.only([kind]).keys]:
        reasons = "; ".join(found.left_out) or "none had traffic within the last day"
        raise OperatorError(f"--slice {absent[0]}: there is no such slice to judge ({reasons})")
    return found.only(kinds) if kinds else found


def _one_found(found: "FoundSlices", alert: "AlertFact") -> "FoundSlices":
    """Return the learned or discovered slice of an alert alone."""
    if all(key.name != alert.slice for key in found.keys):
        raise OperatorError(
            f"alert {alert.id} is about the slice `{alert.slice}`, which no rule of [[slices]] makes, and which is neither a discovered slice nor"
            " one of the newest clustering with traffic within the last day. Leave --alert out to judge the other slices"
        )
    return msgspec.structs.replace(
        found,
        learned=tuple(key for key in found.learned if key.name == alert.slice),
        discovered=tuple(key for key in found.discovered if key.name == alert.slice),
        left_out=(),
    )


def _of_alert(items: "Observed", alert: "AlertFact", inputs: Path, left_out: Sequence[str]) -> "Observed":
    """Return the items with the slice of an alert, and with all inputs, as the only slices."""
    if alert.slice not in items.members:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise OperatorError(
            f"--inputs {inputs}: no item is in the slice `{alert.slice}` of alert {alert.id}{why}: record inputs of this slice"
        )
    kept = {name: members for name, members in items.members.items() if name in {ALL, alert.slice}}
    return msgspec.structs.replace(items, members=kept)


def _routes(routes: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the slice and the file of each `--route`; names of slices have equals signs, too."""
    found: dict[str, Path] = {}
    for route in routes:
        name, _, file = route.rpartition("=")
        if not name or not Path(file).is_file():
            raise OperatorError(
                f"--route {route}: write SLICE=FILE, such as scanner=archive=archive.onnx, with a file that is there"
            )
        if name in found:
            raise OperatorError(
                f"--route {route}: {found[name]} serves this slice already: give one --route for each slice"
            )
        found[name] = Path(file)
    return list(found.items())


def _progress(found: "Followed") -> str:
    waiting = [answer for answer in found.decision.slices if answer.verdict.value == "insufficient"]
    if not waiting:
        return f"gate {found.id}: {found.seen:,} exchanges, all questions decided"
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
            _limit(answer),
            _missing(answer, elapsed_s),
        )
        for answer in made.slices
    ]
    head = ("slice", "question", "verdict", "n", "mean [low, high]", "limit", "missing")
    speed = [_speed(load) for load in (made.load, *made.routes) if load]
    left_out = [f"Not judged: {reason}." for reason in made.not_judged]
    return "\n".join([columns(head, rows), "", *speed, *left_out, _sentence(made)])


def junit_of(made: "Decision") -> bytes:
    """Return the decision as JUnit XML: a test case for each question of each slice; what is insufficient is an error."""
    cases = [(answer, _case(made, answer)) for answer in made.slices]
    suite = ET.Element(
        "testsuite",
        name=_SECTION,
        tests=str(len(cases)),
        failures=str(sum(answer.verdict.value == "fail" for answer, _ in cases)),
        errors=str(sum(answer.verdict.value == "insufficient" for answer, _ in cases)),
        timestamp=made.checked_at.isoformat(timespec="seconds"),
    )
    properties = ET.SubElement(suite, "properties")
    named = (("model", made.model), ("candidate", made.candidate), ("verdict", made.verdict.value))
    for key, value in (*named, *(("not judged", reason) for reason in made.not_judged)):
        ET.SubElement(properties, "property", name=key, value=value)
    suite.extend(case for _, case in cases)
    ET.indent(suite)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(suite, encoding="unicode")}\n'.encode()


_ASKED: Final = {
    "flips": "flips",
    "harm": "new - healed",
    "accuracy": "accuracy lost",
    "divergence": "divergence",
    "latency": "latency p99",
    "throughput": "throughput",
}
_OF_LOAD: Final = ("latency", "throughput")


def _case(made: "Decision", answer: "SliceAnswer") -> ET.Element:
    case = ET.Element(
        "testcase",
        classname=_SECTION,
        name=f"{answer.slice}: {_ASKED[answer.question.value]}{_of_file(made, answer)}",
    )
    text = f"{_mean(answer)} of {answer.n}, limit {_limit(answer)}"
    if answer.verdict.value == "fail":
        ET.SubElement(case, "failure", type="fail", message=text)
    elif answer.verdict.value == "insufficient":
        ET.SubElement(case, "error", type="insufficient", message=f"{text}; missing: {_missing(answer)}")
    return case


def _shown(candidate: str) -> str:
    """Return the digests of a candidate and of its routes, short enough to be read."""
    texts = [f"{digest[:_READABLE]} for {name}" for name, digest in _DIGEST.findall(candidate)]
    return candidate.partition(" ")[0][:_READABLE] + (f", with {' and '.join(texts)}" if texts else "")


def _sentence(made: "Decision") -> str:
    named = {verdict: _named(made, verdict) for verdict in ("fail", "insufficient")}
    if made.verdict.value == "pass":
        return f"pass: {made.model} may be replaced by {_shown(made.candidate)}"
    if made.verdict.value == "fail":
        failed = [
            f"{_ASKED[one.question.value]}{_of_file(made, one)}"
            for one in made.slices
            if one.verdict.value == "fail" and _is_load(one)
        ]
        parts = [f"above the limit in {named['fail']}"] if named["fail"] else []
        parts += [f"the load run does not keep its budget: {', '.join(failed)}"] if failed else []
        return f"fail: {'; '.join(parts)}"
    if made.missing_hours:
        return (
            f"insufficient evidence: every question passes, but the traffic of these hours was not seen: {_hours(made.missing_hours)}. Let it run on,"
            " or give --any-hour"
        )
    more = "more than anybody can wait for" if made.more is None else f"about {made.more:,} more"
    return f"insufficient evidence: {named['insufficient']}; the slice that lacks most needs {more}"


def _hours(hours: Sequence[int]) -> str:
    """Return hours of the day as spans: `0-6, 9, 22-23`."""
    spans: list[list[int]] = []
    for hour in hours:
        if spans and hour == spans[-1][-1] + 1:
            spans[-1].append(hour)
        else:
            spans.append([hour])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _named(made: "Decision", verdict: str) -> str:
    names = dict.fromkeys(
        f"{_ASKED[answer.question.value]}{_of_file(made, answer)}"
        if _is_load(answer) and verdict != "fail"
        else answer.slice
        for answer in made.slices
        if answer.verdict.value == verdict and not (_is_load(answer) and verdict == "fail")
    )
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
    return f"{_figure(answer, answer.mean)} [{_figure(answer, answer.low)}, {_figure(answer, answer.high)}]"


def _limit(answer: "SliceAnswer") -> str:
    return f"{'>=' if answer.question.value == 'throughput' else '<'} {_figure(answer, answer.limit)}"


def _figure(answer: "SliceAnswer", value: float) -> str:
    if answer.question.value == "divergence":
        return f"{value:.3g}"
    if answer.question.value == "latency":
        return _milliseconds(value)
    return f"{value:,.3g} /s" if answer.question.value == "throughput" else _share(value)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms"


def _is_load(answer: "SliceAnswer") -> bool:
    return answer.question.value in _OF_LOAD


def _of_file(made: "Decision", answer: "SliceAnswer") -> str:
    """Return ` of FILE` for an answer about speed where several files serve; else nothing."""
    if not made.routes or not made.load or not _is_load(answer):
        return ""
    return next(f" of {load.file}" for load in (made.load, *made.routes) if load.slice == answer.slice)


def _speed(load: "Load") -> str:
    """Return the figures of a load run in a sentence."""
    if not (load.n or load.p99_s or load.throughput_per_s):
        return f"load run of {load.file}: no input is in its slice, so its speed was not measured"
    times = [
        f"{name} p50 {_milliseconds(p50)}, p99 {_milliseconds(p99)}"
        for name, p50, p99 in (
            ("latency", load.p50_s, load.p99_s),
            ("processor time", load.cpu_p50_s, load.cpu_p99_s),
        )
        if p50 is not None and p99 is not None
    ]
    rate = [] if load.throughput_per_s is None else [f"{load.throughput_per_s:,.0f} requests per second"]
    requests = f"{load.n:,} requests, " if load.n else ""
    return f"load run of {load.file}, {requests}{load.source}: {'; '.join([*times, *rate])}"


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
    if problem := gate_problem(model):
        raise OperatorError(problem)
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
    divergence: bool = False,
) -> "Asked":
    from quantdrift.drift.gate import Question
    from quantdrift.shadow.gate.judge import Asked

    questions = [Question.flips(model.budget.flip)]
    if against is not None:
        questions.append(Question.harm(model.budget.flip / 2 if margin is None else margin))
    if divergence:
        questions.append(_divergence(model))
    together = []
    if mlperf is not None:
        ratio = _RATIOS[mlperf]
        together.append(
            Question.accuracy(ratio) if labels else Question.accuracy_by_flips(ratio, accuracy or 0.0)
        )
    return Asked(slices=tuple(questions), all=tuple(together))


def _is_same(against: Path | None, candidate: Path, routes: Sequence[str]) -> bool:
    """Return whether what serves is the candidate itself, so that its routes alone change answers."""
    if against is None or not routes:
        return False
    return against.samefile(candidate) or against.read_bytes() == candidate.read_bytes()


def _with_routes(asked: "Asked", routes: Sequence[str], candidate: Path, against: Path | None) -> "Asked":
    """Return what is asked where routes alone change answers: everything of the slices that they serve, and harm of the others."""
    if not _is_same(against, candidate, routes):
        return asked
    harm = tuple(question for question in asked.slices if question.kind.value == "harm")
    return msgspec.structs.replace(asked, routed=frozenset(of for of, _ in _routes(routes)), unrouted=harm)


def _divergence(model: Model) -> "Question":
    """Return the question about the mean divergence."""
    from quantdrift.drift.gate import Question

    budget = model.budget
    if budget.divergence >= budget.cap:
        raise OperatorError(
            f"model `{model.name}`: models.budget.divergence is {budget.divergence:g}, which no mean exceeds, because a divergence counts at"
            f" most models.budget.cap ({budget.cap:g}): lower the former"
        )
    return Question.divergence(budget.divergence, budget.cap)


def _rules(config: Config, model: Model, chosen: Sequence[str]) -> list[Slice]:
    """Return the slice rules that are judged."""
    from quantdrift.shadow.gate.found import KINDS

    rules = [rule for rule in config.slices if rule.model in ("", model.name)]
    if not chosen:
        return rules
    known = {rule.name: rule for rule in rules}
    if unknown := [name for name in chosen if name not in {ALL, *known}]:
        named = unknown[0].partition("=")[0]
        if named in known:
            raise OperatorError(
                f"--slice {unknown[0]}: give the name of the rule, --slice {named}, which judges all of its slices"
            )
        raise OperatorError(
            f"--slice {unknown[0]}: model `{model.name}` has no such rule in [[slices]]; it has {_listed([ALL, *known])}, and"
            f" learned and discovered slices are called {_listed(KINDS)}"
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
        (route_slice(_slices_named(config, model, rules, name), name), file) for name, file in _routes(routes)
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
    config: Config,
    model: Model,
    sides: "Sides",
    inputs: Path,
    rules: Sequence[Slice],
    more: "FoundSlices",
    labels: str,
    *,
    quiet: bool,
) -> "list[Compared]":
    from quantdrift.shadow.gate.found import LearnedItems
    from quantdrift.shadow.gate.offline import compared
    from quantdrift.shadow.gate.recording import layout_of, parts_of

    parts = parts_of(inputs)
    layout = layout_of(config, rules, sides.inputs, labels, more.attributes)
    layout = msgspec.structs.replace(layout, takers=sides.takers)
    if more.keys:  # their conditions, and the space of a clustering, may be of any feature
        rules = [*rules, *(rule for rule in _rules(config, model, ()) if rule not in rules and rule.feature)]
    length = sum(part.n_bytes for part in parts)
    with click.progressbar(length=length, label="comparing", hidden=quiet, file=sys.stderr) as bar:
        return list(
            compared(
                sides,
                parts,
                layout,
                rules,
                LearnedItems(config, model, more, sides.reference.runtime.artefact.digest),
                step=config.shadow.batch_items,
                progress=bar.update,
            )
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


def _note(inputs: Path, rules: Sequence[Slice], found: "Sequence[Compared]", items: "Observed") -> None:
    """Say what people should know of the recording, beside the verdict."""
    from quantdrift.shadow.gate.judge import notes_of, said_of

    for note in (*notes_of(rules, found), *said_of(items)):
        click.echo(f"quantdrift: --inputs {inputs}: {note}", err=True)


def _check_writable(path: Path | None) -> None:
    """Check that the JUnit file can be written, before what may take hours; a file that is there stays as it is."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OperatorError(f"--junit {path} cannot be written: {error.strerror}") from error


def _write_junit(path: Path | None, made: "Decision") -> None:
    if path is None:
        return
    try:
        path.write_bytes(junit_of(made))
    except OSError as error:
        raise OperatorError(f"--junit {path} cannot be written: {error.strerror}") from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
