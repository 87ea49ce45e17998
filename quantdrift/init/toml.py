"""The text of a proposed configuration: what differs from the defaults, each line with its reason."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from quantdrift.core.tasks import Task
from quantdrift.init.proposal import RARE, Proposal, slice_names
from quantdrift.init.traffic import Source

_WIDTH = 44
_RECORDED = {Source.HEADER: "headers", Source.PARAMETER: "parameters", Source.JSON: "json"}


def text_of(proposal: Proposal) -> str:
    """Return the configuration as a TOML file with comments."""
    return "\n".join(_lines(proposal)).strip() + "\n"


def differences(before: str, proposed: str) -> list[str]:
    """Return what a proposed configuration has that the present one lacks, or has otherwise, an option a line.

    Raises
    ------
    tomllib.TOMLDecodeError
        One of them is no TOML.
    """
    old, new = (dict(_flat(tomllib.loads(text))) for text in (before, proposed))
    lines = []
    for option, value in new.items():
        if option not in old:
            lines.append(f"{option} = {_value(value)}  (not in the file)")
        elif old[option] != value:
            lines.append(f"{option} = {_value(value)}  (in the file: {_value(old[option])})")
    return lines


def toml_text(document: Mapping[str, Any]) -> str:
    """Return a document as TOML: what `tomllib` reads of it is equal."""
    return "\n".join(_tables(document, "")).strip() + "\n"


def _tables(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the options of a table, then its tables and its lists of tables; `name` is dotted."""
    nested = {key: value for key, value in table.items() if _is_nested(value)}
    yield from (f"{_key(key)} = {_value(value)}" for key, value in table.items() if key not in nested)
    for key, value in nested.items():
        dotted = f"{name}.{_key(key)}" if name else _key(key)
        for entry in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{dotted}]]" if isinstance(value, list) else f"[{dotted}]"
            yield from _tables(entry, dotted)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


def _lines(proposal: Proposal) -> Iterator[str]:
    yield "# Written by `quantdrift init`. `quantdrift config check` says what each line does; all options are in"
    yield "# docs/reference/configuration.md, and whatever is left out has its default."
    yield ""
    yield from _ways(proposal)
    if proposal.groups:
        yield ""
        yield "[capture]"
        for source, option in _RECORDED.items():
            if recorded := sorted(name for kind, name in proposal.groups if kind is source):
                yield _option(option, recorded, "recorded, because slices are made of them")
    elif proposal.tap:
        yield ""
        yield "[capture]"
        yield _option("headers", [], "names of Tap.record(headers=...) that make slices: see [[slices]]")
    if proposal.secretive:
        yield f"# Not recorded, since too many values came: {', '.join(sorted(proposal.secretive))}"
    yield ""
    yield "[sampling]"
    seen = proposal.requests_per_s
    why = (
        f"of {seen:.3g} requests a second" if seen is not None else "share of the requests that are replayed"
    )
    yield _option("rate", proposal.rate, why)
    if proposal.person:
        yield _option(
            "sticky_header",
            proposal.person,
            "requests of one person are one observation; hashed, not recorded",
        )
    for header, value in proposal.rare:
        yield ""
        yield f"[[sampling.header_strata]]    # less than {RARE:.0%} of the requests: all of them are replayed"
        yield f"name = {_value(f'{header}={value}')}"
        yield f"headers = {{ {_key(header)} = {_value(value)} }}"
        yield "rate = 1.0"
    yield ""
    yield "[telemetry]"
    yield _option("otlp_endpoint", proposal.otlp, "your OpenTelemetry collector: alerts and gauges go there")
    yield from _model(proposal)
    yield from _slices(proposal)


def _ways(proposal: Proposal) -> Iterator[str]:
    """Yield how exchanges come in."""
    yield "[sidecar]"
    if proposal.tap:
        yield _option("listen", "", "no relay: the server reports its exchanges itself")
    else:
        yield _option("listen", proposal.listen, "clients connect here from now on")
        yield _option("backend", proposal.backend, "the inference server behind it")
    if proposal.max_exchange_bytes:
        yield _option(
            "max_exchange_bytes",
            proposal.max_exchange_bytes,
            "larger than the largest exchange that came; costs memory",
        )
    if proposal.tap:
        yield ""
        yield "[intake]"
        yield _option("tap", proposal.tap, "QUANTDRIFT_TAP of the server")


def _model(proposal: Proposal) -> Iterator[str]:
    choice = proposal.choice
    yield ""
    yield "[[models]]"
    yield _option("name", proposal.name, "as in requests")
    yield _option("task", choice.task.value, choice.why)
    if choice.output:
        yield _option("output", choice.output, "")
    if choice.output_kind is not None:
        yield _option("output_kind", choice.output_kind.value, "")
    if choice.embedding:
        yield _option(
            f"# embedding = {_value(choice.embedding)}",
            None,
            "clusters of similar inputs become slices; 5 % of its vectors are stored",
        )
    yield from (f"# Look at this: {doubt}" for doubt in choice.doubts)
    if (
        choice.task is not Task.GENERATION
    ):  # an answer of many tokens changes somewhere under any quantisation
        yield ""
        yield "[models.budget]"
        yield _option("flip", proposal.flip, "accepted share of changed answers")
    tables: dict[str, dict[str, Any]] = {}
    for option, value in choice.options.items():
        table, _, name = option.partition(".")
        tables.setdefault(table, {})[name] = value
    for table, options in tables.items():
        yield ""
        yield f"[models.{table}]"
        yield from (_option(name, value, "") for name, value in options.items())
    yield from _reference(proposal)


def _reference(proposal: Proposal) -> Iterator[str]:
    yield ""
    yield "[[models.references]]"
    if proposal.url:
        yield _option("url", proposal.url, "the server of the model before quantisation")
    elif proposal.reference:
        yield _option("path", proposal.reference, "the model before quantisation")
    else:
        yield '# path = "model-fp32.onnx"     # the model before quantisation: nothing is compared without it'
    if proposal.runtime:
        yield _option("runtime", proposal.runtime, "")
    if proposal.served_as:
        yield _option("model", proposal.served_as, "its name there")
    if proposal.digest:
        yield _option("digest", proposal.digest, "the file is code: another one is refused")
    yield _option("versions", ["*"], "candidate versions that were made from it")


def _slices(proposal: Proposal) -> Iterator[str]:
    names = slice_names(proposal.groups)
    for (source, attribute), shares in proposal.groups.items():
        common = ", ".join(f"{value} {share:.2g}" for value, share in list(shares.items())[:4])
        more = f" and {len(shares) - 4} more" if len(shares) > 4 else ""
        yield ""
        yield "[[slices]]"
        yield f"name = {_value(names[source, attribute])}"
        yield _option(source.value, attribute, f"shares: {common}{more}")
    for rule in proposal.features:
        yield ""
        yield "[[slices]]"
        yield f"name = {_value(rule.name)}"
        yield _option("feature", rule.feature, "of the first input")
        if rule.column is None:
            yield _option("edges", list(rule.edges), "a tenth of the items is below, a tenth above")
        else:
            yield _option("column", rule.column, "counted from 0")
            yield _option("values", list(rule.values), "those that came")


def _option(name: str, value: Any, comment: str) -> str:
    text = name if value is None else f"{name} = {_value(value)}"
    return f"{text:<{_WIDTH}}  # {comment}" if comment else text


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each option by its dotted name; entries of lists of tables are named by their `name`."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and key != "headers":
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for number, entry in enumerate(value):
                yield from _flat(entry, f"{name}[{entry.get('name', number)}].")
        else:
            yield name, value
