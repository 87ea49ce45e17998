"""Checks across options: what each value's own bounds cannot see."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import msgspec

from quantdrift.core.config.address import Address, AddressError, read_address
from quantdrift.core.config.connections import connection_problems
from quantdrift.core.config.cost import cost_problems
from quantdrift.core.config.runtimes import reference_problems
from quantdrift.core.config.schema import Config, Model, Slice
from quantdrift.core.config.strata import MARGIN, MODEL, MOST_STRATA, why_unmatchable
from quantdrift.core.config.tasks import SECTIONS, SHARED
from quantdrift.core.config.vision import Activation, Column
from quantdrift.core.config.web import web_problems
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.records import Metric
from quantdrift.core.signals import BUILT_IN, OF_STREAMS, signal_names
from quantdrift.core.tasks import Task
from quantdrift.core.text import number_of

_MAY_BE_EMPTY = frozenset(
    {
        "sidecar.listen",
        "sidecar.probes",
        "intake.listen",
        "intake.kserve_logger",
        "intake.ext_proc",
        "web.listen",
    }
)
_OF_COLUMNS = frozenset({"value", "missing"})
_MOST_PLACES = 100_000
_EARLIEST_CONDENSED_DAYS = 3
_MOST_SHOWN = 100  # characters of a wrong address


def problems(config: Config) -> list[str]:
    """Return every contradiction, each as a sentence that says what to change; empty when all is well."""
    return [
        *_addresses(config),
        *connection_problems(config),
        *_sidecar(config),
        *_sampling(config),
        *_header_strata(config),
        *_time_zone(config),
        *_storage(config),
        *_telemetry(config),
        *web_problems(config.web),
        *cost_problems(config.cost, {model.name: model.value_per_request for model in config.models}),
        *_models(config),
        *_slices(config),
    ]


def _addresses(config: Config) -> Iterator[str]:
    sidecar = config.sidecar
    written = {
        "sidecar.listen": sidecar.listen,
        "sidecar.backend": sidecar.backend,
        "sidecar.admin": sidecar.admin,
        "sidecar.probes": sidecar.probes,
        "intake.listen": config.intake.listen,
        "intake.kserve_logger": config.intake.kserve_logger,
        "intake.ext_proc": config.intake.ext_proc,
        "shadow.admin": config.shadow.admin,
        "monitor.admin": config.monitor.admin,
        "web.listen": config.web.listen,
    }
    addresses: dict[str, Address] = {}
    for option, text in written.items():
        if not text and option in _MAY_BE_EMPTY:
            continue
        try:
            addresses[option] = read_address(text)
        except AddressError as error:
            shown = re.sub(r"//[^@/]*@", "//", text)[:_MOST_SHOWN]
            name = option.rpartition(".")[2]
            instead = f': write {name} = "{error.instead}"' if error.instead else ""
            yield f"{option} is `{shown}`: {error}{instead}"
    backend = addresses.pop("sidecar.backend", None)
    own = [option for option in addresses if option.startswith(("sidecar.", "intake."))]
    if backend is not None and sidecar.listen:
        if not backend.port:
            yield f"sidecar.backend is `{backend}`: nobody can connect to port 0"
        yield from (
            f"sidecar.backend is `{backend}`, which is where the sidecar itself listens ({option} is `{addresses[option]}`): "
            "give the address of the inference server, on another port"
            for option in own
            if backend.reaches(addresses[option])
        )
    for option, other in itertools.combinations(own, 2):
        if addresses[option].reaches(addresses[other]) or addresses[other].reaches(addresses[option]):
            yield (
                f"{option} is `{addresses[option]}` and {other} is `{addresses[other]}`: give each of them a port of its own"
            )


def _storage(config: Config) -> Iterator[str]:
    days = config.storage.condense_after_days
    if 0 < days < _EARLIEST_CONDENSED_DAYS:
        yield (
            f"storage.condense_after_days is {days}: younger comparisons are still read one by one; set it to"
            f" {_EARLIEST_CONDENSED_DAYS} or more, or to 0 to condense none"
        )


def _sidecar(config: Config) -> Iterator[str]:
    sidecar = config.sidecar
    intake = config.intake
    if not sidecar.listen and not (intake.listen or intake.kserve_logger or intake.ext_proc or intake.tap):
        yield "sidecar.listen is empty and [intake] has no address either: nothing can be captured; set one of them"
    if bool(intake.certificate_file) != bool(intake.key_file):
        set_option, other = (
            ("certificate_file", "key_file") if intake.certificate_file else ("key_file", "certificate_file")
        )
        yield f"intake.{set_option} is set and intake.{other} is not: set both, or neither for ports without TLS"
    if intake.client_ca_file and not (intake.certificate_file and intake.token_file):
        yield (
            "intake.client_ca_file needs intake.certificate_file, since certificates travel in TLS only, and"
            " intake.token_file, which says of each certificate on which models it may report"
        )
    if sidecar.drain_delay_s >= sidecar.grace_s:
        yield "sidecar.drain_delay_s must be below sidecar.grace_s: requests need the rest of the time to finish"
    if sidecar.max_exchange_bytes > min(sidecar.handoff_bytes, sidecar.queue_bytes):
        yield "sidecar.max_exchange_bytes must be at most half of sidecar.max_held_bytes"
    if missing := set(config.capture.hmac) - _attributes(config):
        yield (
            f"capture.hmac names {', '.join(sorted(missing))}, which is not recorded: add it to capture.headers, "
            "capture.parameters or capture.json"
        )


def _sampling(config: Config) -> Iterator[str]:
    for section in ("header_strata", "body_strata"):
        strata = getattr(config.sampling, section)
        for name, count in Counter(stratum.name for stratum in strata).items():
            if count > 1:
                yield f"sampling.{section}: the name `{name}` is used {count} times"
        if any(stratum.name == "default" for stratum in strata):
            yield f"sampling.{section}: the name `default` is reserved for requests that match no stratum: choose another name"
        if any(not 0 <= stratum.rate <= 1 for stratum in strata):
            yield f"sampling.{section}: `rate` must be a number from 0 to 1"
    recorded = _attributes(config) | {MARGIN, MODEL}
    models = {model.name for model in config.models}
    for stratum in config.sampling.body_strata:
        yield from (
            f"sampling.body_strata `{stratum.name}`: there is no model `{where.equals}`"
            for where in stratum.where
            if where.key == MODEL and where.equals not in models
        )
        yield from (
            f"sampling.body_strata `{stratum.name}`: `{where.key}` is not recorded: add it to [capture]"
            for where in stratum.where
            if where.key not in recorded
        )


def _header_strata(config: Config) -> Iterator[str]:
    for stratum in config.sampling.header_strata:
        for name, value in stratum.headers.items():
            if why := why_unmatchable(name, value):
                yield f"sampling.header_strata `{stratum.name}`: {name} = {value[:64]!r}: {why}"
    if len(config.sampling.header_strata) > MOST_STRATA:
        yield f"sampling.header_strata has {len(config.sampling.header_strata)} entries, and at most {MOST_STRATA} are possible"
    hashed = {name for stratum in config.sampling.header_strata for name in stratum.headers} & {
        key.removeprefix("header.").lower() for key in config.capture.hmac
    }
    if hashed:
        yield f"sampling.header_strata: {', '.join(sorted(hashed))} is hashed by capture.hmac, so that its values cannot be matched: remove it from one of the two"


def _models(config: Config) -> Iterator[str]:
    names = Counter(name for model in config.models for name in (model.name, *model.aliases))
    for name, count in names.items():
        if count > 1:
            yield f"models: the name `{name}` is used {count} times"
    for model in config.models:
        if model.budget.divergence >= model.budget.cap:
            yield f"models `{model.name}`: budget.divergence must be below budget.cap"
        if 0 < model.budget.latency_growth < 1:
            yield f"models `{model.name}`: budget.latency_growth must be at least 1, or 0 to learn nothing"
        yield from _signals(model)
        if model.embedding == "features" and not any(
            rule.feature and rule.model in {"", model.name} for rule in config.slices
        ):
            yield f"models `{model.name}`: embedding is `features`, but no [[slices]] names a feature"
        if model.recheck.url and not model.recheck.versions:
            yield (
                f"models `{model.name}`: recheck.versions is empty: name the candidate versions that {model.recheck.url} "
                "serves, or the difference between two versions counts as noise"
            )
        if model.recheck.url and model.task is Task.GENERATION:
            yield (
                f"models `{model.name}`: recheck uses the Open Inference Protocol, which has no scores of generated text: "
                "remove [models.recheck]"
            )
        yield from _own_answers(config, model)
        yield from _tensors(model)
        yield from _task(model)
        yield from _infinite(model)
        yield from vision_problems(model)
        yield from reference_problems(model)


def _signals(model: Model) -> Iterator[str]:
    """Yield the budgets of signals that no package adds."""
    names = signal_names()
    if model.task is not Task.GENERATION:
        for metric in (
            Metric.CHANGED_TOKENS,
            Metric.FAR_TOKENS,
            Metric.BROKEN,
            Metric.UNLIKELY,
            *OF_STREAMS,
        ):
            if metric.value in model.budget.signals:
                yield f"models `{model.name}`: budget.signals names `{metric.value}`, which only models with the task `generation` have"
        for option in ("divergence_p99", "first_token_p99_s", "per_token_p99_s"):
            if getattr(model.budget, option):
                yield f"models `{model.name}`: budget.{option} is for generated text, which only models with the task `generation` have"
    for name in model.budget.signals:
        if name not in names:
            yield (
                f"models `{model.name}`: budget.signals names `{name}`, and no package that `plugins` names adds that signal: {nearest(name, names)}"
            )
    yield from _equal_models(model)


def _equal_models(model: Model) -> Iterator[str]:
    """Yield the budgets that a model would break that equals its reference."""
    for signal in BUILT_IN:
        budget = model.budget.signals.get(signal.metric.value, 0.0)
        if 0.0 < budget <= signal.equal:
            yield (
                f"models `{model.name}`: budget.signals.{signal.metric.value} is {budget:g}, but where candidate and reference agree it is "
                f"{signal.equal:g} in the mean: give more, or 0 to leave it out"
            )


def _own_answers(config: Config, model: Model) -> Iterator[str]:
    if model.generation.own_share and model.generation.own_s > config.shadow.ack_wait_s:
        yield (
            f"models `{model.name}`: generation.own_s must not be above shadow.ack_wait_s: a batch that takes longer counts as hanging"
        )


def _infinite(model: Model) -> Iterator[str]:
    """Find options that are infinite or not a number, which most bounds let through."""
    for section in ("budget", *SECTIONS):
        for name, value in msgspec.structs.asdict(getattr(model, section)).items():
            without_end = isinstance(value, float) and not math.isfinite(value)
            if without_end and (name, value) != ("padding", -math.inf):
                yield f"models `{model.name}`: {section}.{name} must be a finite number"


def _tensors(model: Model) -> Iterator[str]:
    for section in ("inputs", "outputs"):
        tensors = getattr(model, section)
        for name, count in Counter(tensor.name for tensor in tensors).items():
            if count > 1:
                yield f"models `{model.name}`: {section} names `{name}` {count} times"
        if any(size < -1 for tensor in tensors for size in tensor.shape):
            yield f"models `{model.name}`: {section}: a dimension must be its size, or -1 if it varies"
    if len(set(model.labels)) < len(model.labels):
        yield f"models `{model.name}`: labels names a class twice"


def _task(model: Model) -> Iterator[str]:
    for name, (task, section) in SECTIONS.items():
        if getattr(model, name) != section() and model.task is not task:
            yield f"models `{model.name}`: [models.{name}] belongs to task `{task}`, and this model's task is `{model.task}`"
    if model.options and model.task.is_built_in:
        yield f"models `{model.name}`: options belong to the task of a plug-in, and this model's task is `{model.task}`: remove them"
    yield from _shared(model)
    quantiles = model.regression.quantiles
    if quantiles and (
        len(quantiles) < 2
        or any(not 0 < quantile < 1 for quantile in quantiles)
        or list(quantiles) != sorted(set(quantiles))
    ):
        yield f"models `{model.name}`: regression.quantiles must be two or more numbers between 0 and 1, rising"
    if model.tensor.outputs and model.output:
        yield f"models `{model.name}`: give only one of output and tensor.outputs"
    if len(set(model.tensor.outputs)) < len(model.tensor.outputs):
        yield f"models `{model.name}`: tensor.outputs names an output twice"


def _shared(model: Model) -> Iterator[str]:
    """Check the options that belong to several tasks."""
    where = f"models `{model.name}`"
    for name, tasks in SHARED.items():
        default = next(field.default for field in msgspec.structs.fields(model) if field.name == name)
        if getattr(model, name) != default and model.task not in tasks:
            fits = " or ".join(f"`{task}`" for task in Task if task in tasks)
            yield f"{where}: {name} belongs to task {fits}, and this model's task is `{model.task}`"
    if model.tolerance is not None and not 0 <= model.tolerance < math.inf:
        yield f"{where}: tolerance = {model.tolerance:g}: it must be a number from 0"
    least = 0 if model.task is Task.RANKING else 1
    if model.top_k is not None and not least <= model.top_k <= _MOST_PLACES:
        yield f"{where}: top_k = {model.top_k}: it must be a whole number from {least} to {_MOST_PLACES}"
    yield from _threshold(model, where)
    for interest in model.interest:
        if isinstance(interest, str) and interest not in model.labels:
            yield f"{where}: interest names `{interest}`, which is not in labels"
        if isinstance(interest, int) and not 0 <= interest < (len(model.labels) or interest + 1):
            yield f"{where}: interest names {interest}, and labels are numbered from 0"


def _threshold(model: Model, where: str) -> Iterator[str]:
    if model.threshold is None:
        return
    if model.task is Task.DETECTION:
        if isinstance(model.threshold, tuple) or not 0 <= model.threshold <= 1:
            yield f"{where}: threshold of a detector must be one number from 0 to 1"
        return
    thresholds = model.thresholds
    if not thresholds or any(not 0 < threshold < 1 for threshold in thresholds):
        yield f"{where}: threshold must be a probability above 0 and below 1, or a list with one for each label"
    if model.labels and len(thresholds) not in (1, len(model.labels)):
        yield f"{where}: threshold has {len(thresholds)} entries, and labels {len(model.labels)}"


def _time_zone(config: Config) -> Iterator[str]:
    name = config.capture.time_zone
    try:
        ZoneInfo(name)
    except (
        ZoneInfoNotFoundError,
        ValueError,
        OSError,
    ):  # a name that is a path, or a folder, raises the others
        yield _unknown_zone(name)


def _telemetry(config: Config) -> Iterator[str]:
    if config.telemetry.evaluations and not config.telemetry.otlp_endpoint:
        yield "telemetry.evaluations needs telemetry.otlp_endpoint, the collector that evaluations are sent to"


def _unknown_zone(name: str) -> str:
    zones = available_timezones()
    if not zones:
        return f"capture.time_zone is `{name}`: this machine has no time zones: install its package tzdata"
    near = get_close_matches(name, sorted(zones), n=1)
    hint = f"did you mean `{near[0]}`?" if near else "write a name such as `UTC` or `Europe/Berlin`"
    return f"capture.time_zone is `{name}`, which is no time zone: {hint}"


def _slices(config: Config) -> Iterator[str]:
    models = {model.name for model in config.models}
    for name, count in Counter((rule.model, rule.name) for rule in config.slices).items():
        if count > 1:
            yield f"slices: the name `{name[1]}` is used {count} times"
    kinds_of_slice = ("header", "parameter", "json", "text", "time", "feature", "cross")
    for rule in config.slices:
        kinds = [kind for kind in kinds_of_slice if getattr(rule, kind)]
        if len(kinds) != 1:
            yield f"slices `{rule.name}`: it must have exactly one of header, parameter, json, text, time, feature and cross"
            continue
        if rule.name == "all":
            yield "slices: the name `all` is reserved for the slice of all traffic: choose another name"
        if rule.model and rule.model not in models:
            yield f"slices `{rule.name}`: there is no model `{rule.model}`"
        if rule.cross:
            yield from _cross(rule, config)
        else:
            columns = [
                name for model in config.models if rule.model in ("", model.name) for name in model.columns
            ]
            yield from _slice(rule, kinds[0], _attributes(config), columns)


def _cross(rule: Slice, config: Config) -> Iterator[str]:
    if len(set(rule.cross)) < 2 or len(set(rule.cross)) < len(rule.cross):
        yield f"slices `{rule.name}`: cross must name two or more different slices"
    for name in rule.cross:
        part = next(
            (slice_ for slice_ in config.slices if slice_.name == name and slice_.model in ("", rule.model)),
            None,
        )
        if part is None or part.cross:
            yield (
                f"slices `{rule.name}`: cross names `{name}`, which is not a slice by attribute or feature of "
                f"{f'model `{rule.model}`' if rule.model else 'every model'}"
            )
    if rule.values or rule.edges:
        yield f"slices `{rule.name}`: values and edges belong to the slices that `cross` names: remove them here"


def _slice(rule: Slice, kind: str, attributes: set[str], columns: Sequence[str]) -> Iterator[str]:
    where = f"slices `{rule.name}`"
    if list(rule.edges) != sorted(set(rule.edges)):
        yield f"{where}: `edges` must be numbers that rise"
    if kind == "feature":
        yield from _feature(rule, where, columns)
        return
    key = f"{kind}.{getattr(rule, kind)}"
    if kind != "time" and key not in attributes:
        option = f"capture.{kind}{'' if kind in {'json', 'text'} else 's'}"
        known = sorted(name for of, _, name in (part.partition(".") for part in attributes) if of == kind)
        near = get_close_matches(getattr(rule, kind).lower(), known, n=1)
        meant = f": did you mean `{near[0]}`? Or" if near else ","
        yield f"{where}: {key} is not recorded{meant} add it to {option}"
    if rule.edges and kind != "json":
        yield f"{where}: `edges` belong to a slice by feature or by JSON path: remove them"
    if rule.edges and rule.values:
        yield f"{where}: `edges` and `values` exclude each other"
    if rule.column is not None:
        yield f"{where}: `column` belongs to a slice by feature: remove it"


def _feature(rule: Slice, where: str, columns: Sequence[str]) -> Iterator[str]:
    if bool(rule.edges) == bool(rule.values) or (rule.values and rule.feature != "value"):
        either = ", or `values`" if rule.feature == "value" else ""
        yield f"{where}: a slice by feature needs `edges`, one or more numbers that rise{either}"
    for text in rule.values:
        if not math.isfinite(number_of(text)):
            yield f"{where}: `values` of a column are numbers, and `{text}` is none"
    if isinstance(rule.column, str):
        hint = nearest(rule.column, columns) if columns else "models.columns names none"
        yield f"{where}: there is no column `{rule.column}`: {hint}"
    elif rule.column is not None and rule.column < 0:
        yield f"{where}: `column` is counted from 0, not {rule.column}"
    if rule.feature == "value" and rule.column is None:
        yield f"{where}: the feature `value` needs `column`, counted from 0 or by name"
    if rule.column is not None and rule.feature not in _OF_COLUMNS:
        yield f'{where}: `column` belongs to the features `value` and `missing`: set feature = "value", or remove it'


def _attributes(config: Config) -> set[str]:
    capture = config.capture
    return {
        *(f"header.{name}" for name in capture.headers),
        *(f"parameter.{name}" for name in capture.parameters),
        *(f"json.{path}" for path in capture.json),
        *(f"text.{name}" for name in capture.text),
    }


def vision_problems(model: Model) -> Iterator[str]:
    """Return what does not go together in the options of `model`, each as a sentence that says what to change."""
    if model.output and model.detection.boxes:
        yield f"models `{model.name}`: give only one of output and detection.boxes"
    yield from (f"models `{model.name}`: {problem}" for problem in _detection(model))


def _detection(model: Model) -> Iterator[str]:
    options = model.detection
    if options.boxes:
        if not options.scores:
            yield "detection: `boxes` needs `scores`"
        if options.classes and options.activation is Activation.SOFTMAX:
            yield "detection: a softmax is over classes, but with `classes` there is one score for each box"
        return
    if alone := [name for name in ("scores", "classes", "count") if getattr(options, name)]:
        yield f"detection: `{alone[0]}` needs `boxes`"
    if options.activation is Activation.SOFTMAX:
        yield "detection: a softmax is over classes, and a row of a table has one score"
    counts = Counter(options.columns)
    if counts[Column.BOX] != 4 or counts[Column.SCORE] != 1:
        yield "detection: `columns` names `box` four times and `score` once"
    if counts[Column.CLASS] > 1 or counts[Column.ITEM] > 1:
        yield "detection: `columns` names `class` and `item` at most once"
    if counts[Column.ITEM] and not model.output:
        yield "detection: with `item` among its columns the output must be named in `models.output`"
