"""The options that a process uses, as the audit stores them: without what is a default, and without credentials."""

import hashlib
import re
from typing import Any

import msgspec
from msgspec.structs import replace

from quantdrift.core.config.schema import (
    Capture,
    Config,
    Generation,
    Model,
    Monitor,
    Recheck,
    Reference,
    SamplingOptions,
)

_SHARED = ("sampling.", "capture.", "models.", "slices.")
# An address with a user, a password or parameters: only its scheme is shown, because a wrong cut would show a secret.
_ADDRESS = re.compile(r"^([a-z+]{1,20}://).*[@?]", re.DOTALL | re.IGNORECASE)


def config_state(config: Config) -> dict[str, Any]:
    """Return every option that differs from its default, by its name with dots.

    Of an address with credentials or parameters there is only the scheme, of that of a webhook the host and a short hash of the rest. Models and other tables with a
    name have it in the place of their number.
    """
    state: dict[str, Any] = {}
    _collect("", _without_path(config), Config(), state)
    return state


def shown_config(config: Config) -> dict[str, Any]:
    """Return the whole configuration, without secrets as `config_state`; of NATS' addresses everything but the credentials."""
    stream = replace(config.stream, url="")
    shown: dict[str, Any] = _without_credentials(
        msgspec.json.decode(msgspec.json.encode(_without_path(replace(config, stream=stream))))
    )
    shown["stream"]["url"] = config.stream.address
    return shown


def judged_by(config: Config, model: Model) -> dict[str, Any]:
    """Return the options by which a gate judges `model`, as `config_state`: those on which its verdict depends.

    Without names of files and addresses, which differ between the machines that have the configuration, and without the names of
    versions, which a release adds.
    """
    references = tuple(
        Reference(
            inputs=reference.inputs,
            output=reference.output,
            output_scale=reference.output_scale,
            output_zero_point=reference.output_zero_point,
            digest=reference.digest,
        )
        for reference in model.references
    )
    judged = replace(
        model,
        version="",
        adapter="",
        exemplars=False,
        share=1.0,
        max_replay_ratio=0.0,
        generation=replace(
            model.generation, batch_tokens=Generation().batch_tokens, max_replay_tokens_per_s=0.0
        ),
        value_per_request=None,
        recheck=Recheck(),
        references=references,
    )
    return config_state(
        Config(
            capture=Capture(time_zone=config.capture.time_zone),
            sampling=SamplingOptions(sticky_header=config.sampling.sticky_header),
            monitor=Monitor(session_s=config.monitor.session_s),
            models=(judged,),
            slices=tuple(rule for rule in config.slices if rule.model in ("", model.name)),
        )
    )


def config_digest(state: dict[str, Any]) -> str:
    """Return the SHA-256 of what `config_state` returns, in hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(state, order="sorted")).hexdigest()


def shared_digest(config: Config) -> str:
    """Return the digest of the options that sidecar, shadow and monitor must have alike, and take while they run or at a start."""
    state = config_state(config)
    state.pop("capture.hmac_key_file", None)
    return config_digest({name: value for name, value in state.items() if name.startswith(_SHARED)})[:16]


def changed_options(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the options that differ, sorted; one that is missing has its default."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _collect(name: str, value: Any, default: Any, state: dict[str, Any]) -> None:
    if value == default:
        return
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            of_struct = getattr(default, field.name, None) if default is not None else _default(field)
            _collect(f"{name}.{field.name}".lstrip("."), getattr(value, field.name), of_struct, state)
    elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        for index, entry in enumerate(value):
            _collect(f"{name}.{getattr(entry, 'name', '') or index}", entry, None, state)
    else:
        state[name] = _without_credentials(msgspec.json.decode(msgspec.json.encode(value)))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _without_path(config: Config) -> Config:
    """Return a configuration without the path of its webhook, which most receivers take for a password."""
    url = config.notify.webhook_url
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not (separator and slash and path):
        return config
    short = hashlib.sha256(url.encode()).hexdigest()[
        :8
    ]  # says that it changed, and is too short to tell a guess from others
    return replace(
        config, notify=replace(config.notify, webhook_url=f"{scheme}://{host}/(not shown, {short})")
    )


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        match = _ADDRESS.match(value)
        return value if match is None else f"{match[1]}(not shown)"
    if isinstance(value, list):
        return [_without_credentials(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _without_credentials(entry) for key, entry in value.items()}
    return value
