"""The configuration in effect in a sidecar.

The supervisor reloads it, and the other processes read it from one file.

Only the supervisor reads the user's files, which may change under a running pod; a configuration that it
cannot accept changes nothing. Children read the file that it writes, also when they are restarted months
later. A header stratum keeps its rows in the table of counts, one for each model, as long as the sidecar
lives, whatever the order of strata in later configurations.

A mounted ConfigMap is replaced without a signal, so the files are polled. Ports, the stream and the number of
processes stay as they were at the start. Options that decide what is captured, how much of it and for which
models are reloaded.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from quantdrift.core.config.load import Secrets, load
from quantdrift.core.config.parts import Signature, signature
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.records import Protocol
from quantdrift.core.sampling.rates import policy_of
from quantdrift.sidecar.state.counters import MAX_ROWS, Row
from quantdrift.sidecar.state.routes import plugin_paths
from quantdrift.sidecar.state.state_file import StateFile

_NAME = "config"
_LOG = logging.getLogger(__name__)


class RowsError(QuantdriftError):
    """The table of counts has no row left for another stratum."""


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in effect, and the rows of the table of counts.

    Parameters
    ----------
    rows
        The stratum and model of each row of the table of counts: all that there have been since the start.
    paths
        The paths of protocols that plug-ins add. The supervisor imports their records; a process that serves does not.
    """

    config: Config
    rows: tuple[Row, ...]
    paths: dict[Protocol, str] = {}

    @classmethod
    def of(cls, config: Config, before: Iterable[Row] = ()) -> Self:
        """Return `config` with its rows, which follow the rows in use before.

        Raises
        ------
        RowsError
            There would be too many rows.
        """
        strata = [stratum.name for stratum in policy_of(config.sampling, "").header_strata]
        models = ["", *(model.name for model in config.models)]
        rows = dict.fromkeys([*before, *(Row(stratum, model) for model in models for stratum in strata)])
        if len(rows) > MAX_ROWS:
            raise RowsError(
                f"more than {MAX_ROWS} header strata times models since the start: restart the sidecar, or use fewer"
            )
        return cls(config=config, rows=tuple(rows), paths=plugin_paths(config.capture.protocols))

    @property
    def rows_by_model(self) -> dict[str, tuple[int, ...]]:
        """By model, the row of each header stratum in the order of the policy.

        `""` stands for an unknown model. Another name of a model has its rows.
        """
        strata = [stratum.name for stratum in policy_of(self.config.sampling, "").header_strata]
        index_by_row = {row: index for index, row in enumerate(self.rows)}
        names = {"": "", **names_of_models(self.config)}
        return {
            name: tuple(index_by_row[Row(stratum, model)] for stratum in strata)
            for name, model in names.items()
        }


def names_of_models(config: Config) -> dict[str, str]:
    """Return the models' names by each name that requests may have."""
    return {name: model.name for model in config.models for name in (model.name, *model.aliases)}


def write_live_config(live_config: LiveConfig, directory: Path) -> Path:
    """Write the configuration into the directory of this sidecar atomically.

    Return the path of the file.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    file = StateFile(directory / _NAME, LiveConfig)
    file.write(live_config)
    return file.path


class LiveConfigFile:
    """The configuration in effect, as a child process reads it from the supervisor's file.

    Parameters
    ----------
    path
        The file that `write_live_config` has written.

    Attributes
    ----------
    current : LiveConfig
        The configuration as of the last refresh.

    Raises
    ------
    OSError, ValueError, msgspec.MsgspecError
        The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path, LiveConfig, required=True)
        self.current = self._file.read()

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether the configuration differs."""
        if not self._file.refresh():
            return False
        before, self.current = self.current, self._file.record or self.current
        return self.current != before


# By section, the options that can change without a restart. `_SECTIONS` are reloaded whole; a sidecar ignores
# others.
_LIVE = {
    "sidecar": ("max_connections", "max_exchange_bytes", "max_held_bytes"),
    "intake": ("pair_window_s", "max_pending_bytes"),
    "stream": (),
    "telemetry": (),
}
_SECTIONS = ("plugins", "capture", "sampling", "models", "slices")


class FileWatch:
    """Polls the configuration files; a change is loaded once they are unchanged for one poll.

    The first load is always due.

    Parameters
    ----------
    path
        The main file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # None, not the present files: they may have changed since the configuration was read at the start.
        self._loaded: Signature | None = None
        self._seen: Signature | None = None

    def poll(self) -> Config | None:
        """Return the configuration if the files have changed, and have not changed since the last poll.

        Raises
        ------
        OperatorError
            The files are not a valid configuration. They are read again after the next change.
        """
        now = signature(self.path)
        is_unchanged, self._seen = now == self._seen, now
        if now == self._loaded or not is_unchanged:
            return None
        self._loaded = now
        return load(self.path)


def merge(before: Config, new: Config) -> tuple[Config, list[str]]:
    """Return the configuration to put into effect, and the changed options of `new` that need a restart.

    Parameters
    ----------
    before
        The configuration in effect.
    new
        The configuration in the files.
    """
    merged = msgspec.structs.replace(before, **{name: getattr(new, name) for name in _SECTIONS})
    needs_restart = []
    for section, live in _LIVE.items():
        old, new_section = getattr(before, section), getattr(new, section)
        changed = [name for name in old.__struct_fields__ if getattr(old, name) != getattr(new_section, name)]
        needs_restart += [f"{section}.{name}" for name in changed if name not in live]
        taken = msgspec.structs.replace(old, **{name: getattr(new_section, name) for name in live})
        merged = msgspec.structs.replace(merged, **{section: taken})
    keys = ("hmac_key_file",)
    needs_restart += [
        f"capture.{name}" for name in keys if getattr(before.capture, name) != getattr(new.capture, name)
    ]
    return merged, needs_restart


def reload(watch: FileWatch, before: LiveConfig, secrets: Secrets) -> LiveConfig | None:
    """Poll the files and return the configuration to put into effect, or None if there is no new one.

    Parameters
    ----------
    watch
        The files.
    before
        The configuration in effect.
    secrets
        As read at the start; they are not read again.

    Raises
    ------
    OperatorError
        The configuration in the files is invalid or cannot be put into effect; the one in effect stays.
    """
    new = watch.poll()
    if new is None:
        return None
    merged, needs_restart = merge(before.config, new)
    if merged.capture.hmac and not secrets.hmac_key:
        raise OperatorError("capture.hmac needs a key: set capture.hmac_key_file and restart the sidecar")
    if needs_restart:
        _LOG.warning(
            "changed options that take effect after a restart of the sidecar: %s", ", ".join(needs_restart)
        )
    try:
        return LiveConfig.of(merged, before.rows)
    except RowsError as error:
        raise OperatorError(str(error)) from error
