"""Text of the annotated `config.toml` and of the configuration reference page, from the options' own descriptions."""

import re
import textwrap
import typing
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import msgspec

from quantdrift.core.config.load import PREFIX
from quantdrift.core.config.schema import (
    Budget,
    CandidateCopy,
    Config,
    Model,
    ModelTensor,
    Recheck,
    Reference,
    ReferenceInput,
    Slice,
)
from quantdrift.core.config.tasks import SECTIONS
from quantdrift.core.config.web import Oidc
from quantdrift.core.records import BodyStratum, HeaderStratum

_FIRST = """\
# THE TEN THAT EVERYBODY SETS
#
# Without the leading `#` these lines are a complete configuration. Put them into a file of your own; whatever is
# left out has the default below.
#
# [sidecar]
# listen = "0.0.0.0:8000"             # where clients connect
# backend = "127.0.0.1:8001"          # the inference server behind it
#
# [stream]
# url = "tls://nats:4222"             # NATS with JetStream
#
# [storage]
# dsn_file = "/etc/quantdrift/dsn"    # holds postgresql://user:password@host/name?sslmode=verify-full
#
# [telemetry]
# otlp_endpoint = "https://otel-collector:4317"   # where alerts and gauges go
#
# [sampling]
# rate = 0.01                         # share of requests that are captured
#
# [capture]
# headers = ["x-scanner"]             # what the slices below are made of
#
# [[models]]
# name = "digits"                     # as on the wire: /v2/models/digits/infer
#
# [models.budget]
# flip = 0.01                         # accepted share of exchanges whose top class changes
# divergence = 0.02                   # accepted mean divergence: of a classifier KL in nats
# latency_p99_s = 0.25                # at most 1 % of the exchanges may take longer, in seconds
#
# [[models.references]]
# path = "digits-fp32.onnx"           # the model before quantisation
# versions = ["int8-*"]               # candidate versions that were made from it
#
# [[slices]]
# name = "scanner"                    # each value of the header is watched as a slice
# header = "x-scanner"
"""

_EXAMPLES = """\
# Models, slices and sampling strata are lists, with one [[...]] block for each entry. More examples:
#
# [[models]]
# name = "scores"
# task = "regression"                 # the default is "classification"
#
# [[slices]]
# name = "contrast"
# feature = "contrast"
# edges = [0.05, 0.2]                 # three slices: below, between, above
#
# [[sampling.header_strata]]
# name = "rare-scanner"
# headers = { x-scanner = "archive" }
# rate = 1.0                          # rare, so every request is captured
"""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One option, as documented.

    Parameters
    ----------
    section
        Dotted name of its table.
    name
        Its key.
    default
        TOML text of its default; empty where it must be given.
    unit
        UCUM unit or word, or empty.
    bounds
        What the schema enforces, in words.
    text
        What it does and why one would change it.
    """

    section: str
    name: str
    default: str
    unit: str
    bounds: str
    text: str

    @property
    def environment(self) -> str:
        """Name of the environment variable that overrides it."""
        return PREFIX + "__".join([*filter(None, self.section.split(".")), self.name]).upper()


def default_toml() -> str:
    """Return the annotated default configuration; loading it gives exactly the code's defaults."""
    lines = [
        "# The configuration of quantdrift: one file for the sidecar, the shadow workers and the monitor.",
        "# An environment variable QUANTDRIFT__SECTION__OPTION overrides an option. Secrets are in files of their own:",
        "# see the options that end in _file.",
        "",
        _FIRST,
        "# EVERY OPTION WITH ITS DEFAULT. Units are in brackets. docs/reference/configuration.md says more of each: its",
        "# bounds, and what an empty value or 0 means.",
        "",
    ]
    lines += [*_annotated(_of_no_section()), ""]
    for section, kind in _sections():
        lines += [f"# {_first_line(kind)}", f"[{section}]", *_annotated(_options(section, kind)), ""]
    return "\n".join([*lines, _EXAMPLES])


def _annotated(options: Iterable[Option]) -> Iterator[str]:
    for option in options:
        unit = f" [{option.unit}]" if option.unit else ""
        text = f"{_first_sentence(option.text)}{unit}"
        yield from textwrap.wrap(text, 108, initial_indent="# ", subsequent_indent="# ")
        yield f"{option.name} = {option.default}"


def reference_markdown() -> str:
    """Return the configuration reference page."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the code by `make docs`; a test keeps it equal. Units are given where there are any.",
        "",
        "One TOML file serves every role (`--config`, default `config.toml`). Each option is overridden by the",
        "environment variable `QUANTDRIFT__SECTION__OPTION`; lists and tables are given there as JSON. Relative file",
        "names are relative to the configuration file. Unknown keys are refused.",
        "",
        "[config.toml](../../config.toml) begins with the ten options that everybody sets, as a configuration to copy.",
        "What no operator can decide is a constant: [decision 0037](../decisions/0037-options-and-constants.md).",
        "",
        "All mistakes of a configuration are listed at once, each with its file or environment variable, by every command:",
        "`quantdrift config check` first, with exit code 2.",
        "",
        "Two variables of OpenTelemetry apply too: `OTEL_RESOURCE_ATTRIBUTES` (attributes of everything that is exported, such as",
        "`deployment.environment.name=prod`) and `OTEL_METRIC_EXPORT_INTERVAL` (time between two exports of the gauges in",
        "milliseconds; 15,000 if it is not set).",
        "",
        "Secrets come from the environment or from files, per role: `QUANTDRIFT_DSN` (never read by a sidecar),",
        "`QUANTDRIFT_HMAC_KEY` and `QUANTDRIFT_SAMPLING_SALT` (read only by a sidecar; give all sidecars the same salt",
        "where a sticky sample must hold across pods), `QUANTDRIFT_REFERENCE_TOKEN` (read only by a shadow).",
        "",
    ]
    lines += ["## Before the first section", "", *_table(list(_of_no_section())), ""]
    for section, kind in _sections():
        lines += _page(f"`[{section}]`", section, kind)
    lines += _page("`[[models]]`", "models", Model)
    lines += _page("`[models.budget]`", "models.budget", Budget)
    lines += _page("`[models.recheck]`", "models.recheck", Recheck)
    for name, (_, kind) in SECTIONS.items():
        lines += _page(f"`[models.{name}]`", f"models.{name}", kind)
    lines += _page("`[[models.references]]`", "models.references", Reference)
    lines += _page("`[[models.references.inputs]]`", "models.references.inputs", ReferenceInput)
    lines += _page("`[models.references.copy]`", "models.references.copy", CandidateCopy)
    lines += _page("`[[models.inputs]]` and `[[models.outputs]]`", "models.inputs", ModelTensor)
    lines += _page("`[[slices]]`", "slices", Slice)
    lines += _page("`[[sampling.header_strata]]`", "sampling.header_strata", HeaderStratum)
    lines += _page("`[[sampling.body_strata]]`", "sampling.body_strata", BodyStratum)
    return "\n".join(lines).rstrip() + "\n"


def _page(title: str, section: str, kind: type[msgspec.Struct]) -> list[str]:
    lines = [f"## {title}", "", _first_line(kind), ""]
    options = list(_options(section, kind))
    if any(option.text for option in options):
        lines += _table(options)
    else:  # a record: its docstring holds the meanings
        lines += ["| option | what it does |", "|---|---|"]
        lines += [f"| `{names}` | {text} |" for names, text in _parameters(kind)]
    return [*lines, ""]


def _table(options: list[Option]) -> list[str]:
    lines = ["| option | default | unit | bounds | what it does |", "|---|---|---|---|---|"]
    for option in options:
        default = f"`{option.default}`" if option.default else "required"
        lines.append(f"| `{option.name}` | {default} | {option.unit} | {option.bounds} | {option.text} |")
    return lines


def _of_no_section() -> list[Option]:
    return [option for option in _options("", Config) if option.text]


def _sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for field in msgspec.structs.fields(Config):
        if isinstance(field.default, msgspec.Struct):
            yield field.name, type(field.default)
            for inner in msgspec.structs.fields(type(field.default)):
                if isinstance(inner.default, msgspec.Struct):
                    yield f"{field.name}.{inner.name}", type(inner.default)


def _options(section: str, kind: type[msgspec.Struct]) -> Iterator[Option]:
    for field in msgspec.structs.fields(kind):
        metas = [meta for meta in getattr(field.type, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
        inner = typing.get_args(field.type)[0] if metas else field.type
        if not metas and _is_table(inner):
            continue  # has a section of its own
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield Option(
            section=section,
            name=field.name,
            default="" if default is msgspec.NODEFAULT else _toml(default),
            unit=next((m.extra["unit"] for m in metas if m.extra and "unit" in m.extra), ""),
            bounds=", ".join(bound for meta in metas for bound in _bounds(meta)),
            text=next((m.description for m in metas if m.description), ""),
        )


def _is_table(kind: Any) -> bool:
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    tables = {Budget, CandidateCopy, Oidc, Recheck, Reference, *(kind for _, kind in SECTIONS.values())}
    return isinstance(inner, type) and issubclass(inner, msgspec.Struct) and inner in tables


def _bounds(meta: msgspec.Meta) -> Iterator[str]:
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        if (bound := getattr(meta, name)) is not None:
            yield f"{sign} {bound:g}"


def _toml(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{}" if not value else "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, int):
        return f"{value:_}"
    return msgspec.json.encode(value).decode()


def _first_line(kind: type[msgspec.Struct]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)(?<!e\.g\.)\s", text, maxsplit=1)[0]


def _parameters(kind: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    """Read a numpydoc `Parameters` section."""
    body = textwrap.dedent("    " + (kind.__doc__ or "")).split("Parameters\n", 1)[-1].splitlines()[1:]
    names = ""
    words: list[str] = []
    for line in body:
        if line and not line.startswith(" "):
            if names:
                yield names, " ".join(words)
            names, words = line.strip(), []
        elif line.strip():
            words.append(line.strip())
    if names:
        yield names, " ".join(words)
