"""Load the configuration: file, then environment, then checks; secrets apart and per role."""

import contextlib
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from quantdrift.core import plugins
from quantdrift.core.config.address import is_loopback, read_address
from quantdrift.core.config.callers import ALL_SCOPES, check_length, read_callers
from quantdrift.core.config.check import problems
from quantdrift.core.config.cost import read_values
from quantdrift.core.config.parts import Parts, read_parts
from quantdrift.core.config.schema import Config, Slice
from quantdrift.core.config.serving import Intake
from quantdrift.core.config.strata import with_strata
from quantdrift.core.config.web import TOKEN_VARIABLE, is_open
from quantdrift.core.config.wrong_values import Key, Mistake, allowed, mistakes, nearest, struct_in, without
from quantdrift.core.errors import OperatorError
from quantdrift.core.keys import is_key_file, read_keys
from quantdrift.core.passed_secrets import variables

PREFIX = "QUANTDRIFT__"


class Role(StrEnum):
    """A process, which decides which secrets it may read."""

    SIDECAR = "sidecar"
    SHADOW = "shadow"
    MONITOR = "monitor"
    REPORT = "report"
    WEB = "web"
    MIGRATE = "migrate"


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Values that must never be logged or written in a configuration file. Their `repr` shows nothing.

    A secret that comes from a file can be replaced while a process runs: `current_dsn` and `current_otlp_headers` read
    the file again. A value that comes from a variable stays until the process is restarted.
    """

    dsn: str = ""
    dsn_file: str = ""
    hmac_key: bytes = b""
    intake_token: str = ""
    salt: bytes = b""
    otlp_headers: dict[str, str] = {}
    otlp_headers_file: str = ""
    reference_token: str = ""
    web_token: str = ""
    oidc_secret: str = ""
    gate_token: str = ""
    operator_dsn_file: str = ""

    def __repr__(self) -> str:
        return "Secrets(...)"

    def current_dsn(self) -> str:
        """Return the Postgres address that its file contains now; without a file, the one that was read at the start.

        Raises
        ------
        OperatorError
            The file cannot be read, or is empty.
        """
        return _address(self.dsn_file, "storage.dsn_file") if self.dsn_file else self.dsn

    def operator_dsn(self) -> str:
        """Return the Postgres address of the page's operator that its file contains now.

        Raises
        ------
        OperatorError
            The file cannot be read, or is empty.
        """
        return _address(self.operator_dsn_file, "web.operator_dsn_file")

    def current_otlp_headers(self) -> dict[str, str]:
        """Return the collector's headers that their file contains now, with names in lower case as gRPC needs them.

        If the file cannot be read any more, the headers that were read at the start are returned.
        """
        headers = self.otlp_headers
        if self.otlp_headers_file:
            with contextlib.suppress(OperatorError):
                headers = read_headers(self.otlp_headers_file)
        return {name.lower(): value for name, value in headers.items()}


class UnreadableSecretError(OperatorError):
    """A secret file cannot be read at the moment."""


def load(path: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration in `path` and the directory `models.d/` next to it, with overrides from the environment.

    `QUANTDRIFT__SECTION__OPTION=value` overrides one option; lists and tables are given as JSON. Relative paths
    of files stay relative to the configuration file and are resolved here. Slices by header add header strata where
    the monitor makes policies (`quantdrift.core.config.strata`).

    Raises
    ------
    OperatorError
        A file cannot be read, or the configuration has mistakes: unknown keys, values of the wrong type or out of
        bounds, options that contradict each other. One error lists all of them, each with the file or the environment
        variable that must change.
    """
    return config_of(read_parts(path), path, environment)


def config_of(parts: Parts, path: Path, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration that `load` returns, from files that are read already; `path` is the main one.

    Raises
    ------
    OperatorError
        As `load`.
    """
    document = parts.document
    overridden, lines = _override(document, variables() if environment is None else environment)

    def source(keys: tuple[Key, ...]) -> str:
        variable = next((name for name, option in overridden.items() if keys[: len(option)] == option), "")
        return variable or str(parts.origins.get(keys[:2], path))

    restore = _use_plugins(document, source)
    wrong = list(mistakes(document, Config))
    lines += [f"{source(mistake.keys)}: {mistake.text}" for mistake in wrong]
    names = [model.get("name") if isinstance(model, dict) else None for model in _models(document)]
    config = _with_recorded_headers(_with_columns(msgspec.convert(without(document, wrong), Config)))
    for problem in problems(config):
        if not any(_follows(problem, mistake, names) for mistake in wrong):
            lines.append(f"{_source(problem, path, parts, overridden, names)}: {problem}")
    if lines:
        restore()
        raise OperatorError("the configuration is wrong:\n" + "\n".join(f"  - {line}" for line in lines))
    return with_strata(_resolve(config, path.resolve().parent))


def _use_plugins(document: Mapping[str, Any], source: Callable[[tuple[Key, ...]], str]) -> Callable[[], None]:
    """Make the plug-ins that a document names known, and return what undoes it."""
    packages = document.get("plugins", [])
    if not isinstance(packages, list) or not all(isinstance(package, str) for package in packages):
        packages = []  # a mistake, which is reported with the others
    try:
        return plugins.use(packages)
    except OperatorError as error:
        # Alone, because what the package would add is unknown to the rest of the check.
        raise OperatorError(f"the configuration is wrong:\n  - {source(('plugins',))}: {error}") from error


def _with_columns(config: Config) -> Config:
    """Return `config` with the numbers of columns that slices name, as far as the models that they apply to agree on one."""

    def numbered(rule: Slice) -> Slice:
        numbers = {
            model.columns.index(rule.column)
            for model in config.models
            if rule.model in ("", model.name) and rule.column in model.columns
        }
        return msgspec.structs.replace(rule, column=numbers.pop()) if len(numbers) == 1 else rule

    return msgspec.structs.replace(config, slices=tuple(map(numbered, config.slices)))


def _with_recorded_headers(config: Config) -> Config:
    """Return `config` with the headers of slices, hashes and body strata as `capture.headers` spells them: their case does not matter."""
    spelled = {name.lower(): name for name in reversed(config.capture.headers)}

    def header(name: str) -> str:
        return name if name in config.capture.headers else spelled.get(name.lower(), name)

    def key(name: str) -> str:
        kind, dot, rest = name.partition(".")
        return f"{kind}.{header(rest)}" if dot and kind == "header" else name

    slices = tuple(msgspec.structs.replace(rule, header=header(rule.header)) for rule in config.slices)
    capture = msgspec.structs.replace(config.capture, hmac=tuple(key(name) for name in config.capture.hmac))
    strata = tuple(
        msgspec.structs.replace(
            stratum,
            where=tuple(
                msgspec.structs.replace(condition, key=key(condition.key)) for condition in stratum.where
            ),
        )
        for stratum in config.sampling.body_strata
    )
    sampling = msgspec.structs.replace(config.sampling, body_strata=strata)
    return msgspec.structs.replace(config, slices=slices, capture=capture, sampling=sampling)


def _models(document: Mapping[str, Any]) -> list[Any]:
    models = document.get("models")
    return list(models) if isinstance(models, list) else []


def _follows(problem: str, mistake: Mistake, names: Sequence[Any]) -> bool:
    """Return whether a contradiction may exist only because of a value that is reported already."""
    is_listed = mistake.keys[:1] in {("models",), ("slices",)}
    if is_listed and not problem.startswith(("models", "slices")):
        return False  # it shares a common word such as `time` with an option of a list, and nothing else
    section = "" if is_listed else "".join(f"{key}." for key in mistake.keys[:-1])
    if not any(re.search(rf"\b{re.escape(section + name)}\b", problem) for name in mistake.names):
        return False
    model = re.match(r"models `([^`]*)`", problem)
    return not (model and mistake.keys[0] == "models") or names[int(mistake.keys[1])] == model[1]


def _source(
    problem: str,
    path: Path,
    parts: Parts,
    overridden: Mapping[str, tuple[Key, ...]],
    names: Sequence[Any],
) -> str:
    """Return the environment variables, the part or else the main file that set the options in a problem."""
    variables = [
        name
        for name, option in overridden.items()
        if re.search(rf"\b{re.escape('.'.join(map(str, option)))}\b", problem)
    ]
    if variables:
        return ", ".join(variables)
    model = re.match(r"models `([^`]*)`", problem)
    if model and model[1] in names:
        return str(parts.origins.get(("models", names.index(model[1])), path))
    return str(path)


def load_secrets(config: Config, role: Role, environment: Mapping[str, str] | None = None) -> Secrets:
    """Return the secrets that `role` may read, from files or the environment.

    Raises
    ------
    UnreadableSecretError
        A named file cannot be read.
    OperatorError
        A secret that the role needs is not given.
    """
    env = variables() if environment is None else environment
    if role is Role.SIDECAR:
        key = hmac_key(config, env).decode()
        if config.capture.hashed and not key:
            option = (
                "capture.hmac is set but" if config.capture.hmac else "capture.text names `system`, which"
            )
            raise OperatorError(f"{option} has no key: set QUANTDRIFT_HMAC_KEY or capture.hmac_key_file")
        check_length(key, "the key of capture.hmac")
        if is_key_file(key.encode()):
            try:
                read_keys(key.encode(), "capture.hmac_key_file", config.capture.hmac_key_file)
            except OperatorError as error:  # the relay needs no key, and serves meanwhile
                raise UnreadableSecretError(str(error)) from error
        token = _intake_token(env, config.intake)
        salt = env.get("QUANTDRIFT_SAMPLING_SALT", "").encode()
        return Secrets(hmac_key=key.encode(), intake_token=token, salt=salt)
    dsn = _secret(env, "QUANTDRIFT_DSN", config.storage.dsn_file)
    if not dsn:
        raise OperatorError(
            "no Postgres address: set QUANTDRIFT_DSN or storage.dsn_file, or give --data of a running `quantdrift up`"
        )
    web_token = _web_token(env, config) if role is Role.WEB else ""
    if config.cost.values_file and role in {Role.WEB, Role.REPORT}:
        read_values(config.cost.values_file)
    headers_file = config.telemetry.otlp_headers_file if role in {Role.MONITOR, Role.SHADOW} else ""
    token = env.get("QUANTDRIFT_REFERENCE_TOKEN", "").strip() if role is Role.SHADOW else ""
    return Secrets(
        dsn=dsn,
        dsn_file=config.storage.dsn_file,
        otlp_headers=read_headers(headers_file) if headers_file else {},
        otlp_headers_file=headers_file,
        reference_token=token,
        web_token=web_token,
        oidc_secret=_oidc_secret(config) if role is Role.WEB else "",
        gate_token=_gate_token(config) if role is Role.MONITOR else "",
        operator_dsn_file=config.web.operator_dsn_file if role is Role.WEB else "",
        salt=env.get("QUANTDRIFT_SAMPLING_SALT", "").encode() if role is Role.SHADOW else b"",
    )


def hmac_key(config: Config, environment: Mapping[str, str] | None = None) -> bytes:
    """Return the key of hashed attributes, empty if there is none.

    Raises
    ------
    UnreadableSecretError
        Its file cannot be read.
    """
    env = variables() if environment is None else environment
    return _secret(env, "QUANTDRIFT_HMAC_KEY", config.capture.hmac_key_file).encode()


def read_headers(file: str) -> dict[str, str]:
    """Return the headers in a file with `name=value` lines.

    Raises
    ------
    UnreadableSecretError
        It cannot be read.
    """
    lines = _read(file).splitlines()
    return {
        name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines) if value
    }


def _intake_token(env: Mapping[str, str], intake: Intake) -> str:
    if not (intake.listen or intake.kserve_logger or intake.ext_proc or intake.tap):
        return ""
    token = _secret(env, "QUANTDRIFT_INTAKE_TOKEN", intake.token_file)
    where = f"intake.token_file {intake.token_file}" if intake.token_file else "QUANTDRIFT_INTAKE_TOKEN"
    check_length(token, where)
    if any(caller.scopes != ALL_SCOPES for caller in read_callers(token, where)):
        raise OperatorError(
            f"{where} has `may=`, which is for web.token_file and monitor.gate_token_file: remove it"
        )
    asking = []
    if intake.kserve_logger:
        asking.append("intake.kserve_logger")
    if intake.ext_proc and not _is_loopback(intake.ext_proc):
        asking.append(f"intake.ext_proc at {intake.ext_proc}, no loopback address")
    if asking and not token:
        raise OperatorError(
            f"a token is required with {' and with '.join(asking)}: set QUANTDRIFT_INTAKE_TOKEN or "
            "intake.token_file"
        )
    return token


def _web_token(env: Mapping[str, str], config: Config) -> str:
    file = config.web.token_file
    token = _secret(env, TOKEN_VARIABLE, file)
    where = f"web.token_file {file}" if file else TOKEN_VARIABLE
    if file and not token:
        raise OperatorError(f"{where} is empty: write a token in it, or remove the option")
    check_length(token, where)
    if any(caller.models for caller in read_callers(token, where)):
        raise OperatorError(f"{where} names models, but the page shows all models: remove their names")
    if is_open(config.web, token):
        raise OperatorError(
            f"web.listen is `{config.web.listen}`, which other machines can reach, and nobody would have to log in: set"
            f" web.token_file or {TOKEN_VARIABLE}, web.oidc, or web.identity_header with web.proxies, or listen on 127.0.0.1"
        )
    return token


def _oidc_secret(config: Config) -> str:
    file = config.web.oidc.client_secret_file
    secret = _read(file) if file else ""
    if file and not secret:
        raise OperatorError(
            f"web.oidc.client_secret_file {file} is empty: write the client's secret in it, or remove the option"
        )
    return secret


def _gate_token(config: Config) -> str:
    file = config.monitor.gate_token_file
    token = _read(file) if file else ""
    if file and not token:
        raise OperatorError(
            f"monitor.gate_token_file {file} is empty: write a token in it, or remove the option"
        )
    check_length(token, f"monitor.gate_token_file {file}")
    read_callers(token, f"monitor.gate_token_file {file}")
    return token


def _is_loopback(address: str) -> bool:
    # Not `Address.is_loopback`: that is where a client comes to, and a listener on 0.0.0.0 is reached from everywhere.
    return is_loopback(read_address(address).host)


def _secret(env: Mapping[str, str], name: str, file: str) -> str:
    return _read(file) if file else env.get(name, "")


def _address(file: str, option: str) -> str:
    dsn = _read(file)
    if not dsn:
        raise OperatorError(f"{option}: {file} is empty: write the Postgres address in it")
    return dsn


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UnreadableSecretError(f"the secret file {file} cannot be read: {error.strerror}") from error


def _override(
    document: dict[str, Any], env: Mapping[str, str]
) -> tuple[dict[str, tuple[Key, ...]], list[str]]:
    """Set what the environment sets; return the options by the names of their variables, and the mistakes."""
    overridden: dict[str, tuple[Key, ...]] = {}
    wrong = []
    for name, text in env.items():
        if not name.startswith(PREFIX):
            if meant := _options_with_one_mark().get(name):
                wrong.append(f"{name}: this variable sets nothing; did you mean `{meant}`?")
            continue
        *parents, option = name.removeprefix(PREFIX).lower().split("__")
        try:
            _set(document, parents, option, text)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
        else:
            overridden[name] = (*parents, option)
    return overridden, wrong


@cache
def _options_with_one_mark() -> Mapping[str, str]:
    """Return the right names of variables by those with `_` in place of `__`."""
    names = (
        (section.name, option.name)
        for section in msgspec.structs.fields(Config)
        if isinstance(section.default, msgspec.Struct)
        for option in msgspec.structs.fields(type(section.default))
    )
    return {f"QUANTDRIFT_{'_'.join(name)}".upper(): f"{PREFIX}{'__'.join(name)}".upper() for name in names}


def _set(document: dict[str, Any], parents: Sequence[str], option: str, text: str) -> None:
    """Set one option from the text of an environment variable; raises `ValueError` with what is wrong."""
    table, kind = document, Config
    for parent in parents:
        hints = typing.get_type_hints(kind, include_extras=True)
        inner = struct_in(hints.get(parent))
        if inner is None:
            raise ValueError(f"there is no section `{parent}`: {nearest(parent, list(hints))}")
        table, kind = table.setdefault(parent, {}), typing.cast("type[Config]", inner)
        if not isinstance(table, dict):
            raise ValueError(f"`{parent}` is a list: give the whole list as JSON")  # noqa: TRY004 - a person's text
    hints = typing.get_type_hints(kind)
    hint = hints.get(option)
    if hint is None:
        raise ValueError(f"there is no option `{option}`: {nearest(option, list(hints))}")
    if hint is str or (isinstance(hint, type) and issubclass(hint, StrEnum)):
        table[option] = text
        return
    try:
        table[option] = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"`{text[:64]}` is not JSON, and it must be {allowed(hint)}") from error


def _resolve(config: Config, base: Path) -> Config:
    def absolute(text: str) -> str:
        return str(base / text) if text else text

    models = tuple(
        msgspec.structs.replace(
            model,
            references=tuple(
                msgspec.structs.replace(
                    r,
                    path=absolute(r.path),
                    token_file=absolute(r.token_file),
                    canaries=absolute(r.canaries),
                    copy=msgspec.structs.replace(
                        r.copy, path=absolute(r.copy.path), token_file=absolute(r.copy.token_file)
                    ),
                )
                for r in model.references
            ),
            recheck=msgspec.structs.replace(model.recheck, token_file=absolute(model.recheck.token_file)),
        )
        for model in config.models
    )
    return msgspec.structs.replace(
        config,
        models=models,
        shadow=msgspec.structs.replace(
            config.shadow,
            engine_cache=absolute(config.shadow.engine_cache),
            ca_file=absolute(config.shadow.ca_file),
            certificate_file=absolute(config.shadow.certificate_file),
            key_file=absolute(config.shadow.key_file),
        ),
        stream=msgspec.structs.replace(
            config.stream,
            url_file=absolute(config.stream.url_file),
            credentials_file=absolute(config.stream.credentials_file),
            ca_file=absolute(config.stream.ca_file),
            certificate_file=absolute(config.stream.certificate_file),
            key_file=absolute(config.stream.key_file),
            payload_key_file=absolute(config.stream.payload_key_file),
        ),
        storage=msgspec.structs.replace(
            config.storage,
            dsn_file=absolute(config.storage.dsn_file),
        ),
        capture=msgspec.structs.replace(config.capture, hmac_key_file=absolute(config.capture.hmac_key_file)),
        sidecar=msgspec.structs.replace(config.sidecar, pause_file=absolute(config.sidecar.pause_file)),
        intake=msgspec.structs.replace(
            config.intake,
            token_file=absolute(config.intake.token_file),
            tap=absolute(config.intake.tap),
            certificate_file=absolute(config.intake.certificate_file),
            key_file=absolute(config.intake.key_file),
            client_ca_file=absolute(config.intake.client_ca_file),
        ),
        monitor=msgspec.structs.replace(
            config.monitor, gate_token_file=absolute(config.monitor.gate_token_file)
        ),
        web=msgspec.structs.replace(
            config.web,
            token_file=absolute(config.web.token_file),
            operator_dsn_file=absolute(config.web.operator_dsn_file),
            oidc=msgspec.structs.replace(
                config.web.oidc,
                client_secret_file=absolute(config.web.oidc.client_secret_file),
                ca_file=absolute(config.web.oidc.ca_file),
            ),
        ),
        cost=msgspec.structs.replace(config.cost, values_file=absolute(config.cost.values_file)),
        telemetry=msgspec.structs.replace(
            config.telemetry,
            otlp_headers_file=absolute(config.telemetry.otlp_headers_file),
            ca_file=absolute(config.telemetry.ca_file),
            certificate_file=absolute(config.telemetry.certificate_file),
            key_file=absolute(config.telemetry.key_file),
        ),
        notify=msgspec.structs.replace(
            config.notify,
            **{
                name: absolute(getattr(config.notify, name))
                for name in config.notify.__struct_fields__
                if name.endswith("_file")
            },
        ),
    )
