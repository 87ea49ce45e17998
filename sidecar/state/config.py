"""The configuration that holds in a sidecar, for its children: also for one that is started anew months later.

They do not load the files themselves. Who edits one, or a ConfigMap that is mounted, changes it under a running pod:
the supervisor alone reads it, and what it cannot accept changes nothing. A stratum keeps its rows in the table of
counts, one for each model, for the sidecar's life, whatever later configurations call first.

Watches the configuration's files, and says what of a new configuration may hold without a restart.

A mounted ConfigMap is replaced without a signal, so files are looked at. Ports, the stream and what processes are made
of stay as they were at the start; everything that says what is taken, how much, and of what, is taken over.
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
from quantdrift.core.sampling.rates import policy_of
from quantdrift.sidecar.state.counters import MOST_ROWS, Row

_NAME = "config"
_LOG = logging.getLogger(__name__)


class RowsError(QuantdriftError):
    """The table of counts has no row left for another stratum."""


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What holds.

    Parameters
    ----------
    config
        The configuration.
    rows
        What each row of the table of counts is for: all strata and models that there have been.
    """

    config: Config
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, config: Config, before: Iterable[Row] = ()) -> Self:
        """Return what holds with `config`, after rows that were there before.

        Raises
        ------
        RowsError
            There are too many.
        """
        strata = [stratum.name for stratum in policy_of(config.sampling, "").header_strata]
        models = ["", *(model.name for model in config.models)]
        rows = dict.fromkeys([*before, *(Row(stratum, model) for model in models for stratum in strata)])
        if len(rows) > MOST_ROWS:
            raise RowsError(
                f"more than {MOST_ROWS} header strata times models since the start: restart the sidecar, or use fewer"
            )
        return cls(config=config, rows=tuple(rows))

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """The row of each header stratum of the policy, in the policy's order, by model; `""` for none told."""
        strata = [stratum.name for stratum in policy_of(self.config.sampling, "").header_strata]
        known = {row: index for index, row in enumerate(self.rows)}
        return {
            model: tuple(known[Row(stratum, model)] for stratum in strata)
            for model in ("", *(model.name for model in self.config.models))
        }


def settle(settled: LiveConfig, directory: Path) -> Path:
    """Write into a directory of this sidecar alone, whole, and return where.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = directory / _NAME
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode(settled))
    new.replace(path)
    return path


class LiveConfigFile:
    """A child's view of what holds.

    Parameters
    ----------
    path
        Where `settle` wrote.

    Attributes
    ----------
    settled : LiveConfig
        What held at the last look.

    Raises
    ------
    OSError
        It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._signature()
        self.settled = _read(path)

    def refresh(self) -> bool:
        """Look again; return whether something else holds now. What cannot be read changes nothing."""
        try:
            seen = self._signature()
            if seen == self._seen:
                return False
            settled = _read(self._path)
        except (OSError, msgspec.MsgspecError) as error:
            _LOG.warning("the configuration cannot be read, what held goes on: %s", error)
            return False
        self._seen = seen
        is_new = settled != self.settled
        self.settled = settled
        return is_new

    def _signature(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: Path) -> LiveConfig:
    return msgspec.msgpack.decode(path.read_bytes(), type=LiveConfig)


# By section: options that hold at once. Of sections that are not named all do, or none where a sidecar does not ask.
_LIVE = {
    "sidecar": ("max_connections", "max_exchange_bytes", "max_held_bytes"),
    "intake": ("pair_window_s", "max_pending_bytes"),
    "stream": (),
    "telemetry": (),
}
_SECTIONS = ("capture", "sampling", "models", "slices")


class FileWatch:
    """Tells when the files have changed and have rested since; once more at the start, whether they have or not.

    Parameters
    ----------
    path
        The main file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Not those of now: the files may have changed since the configuration of the start was read.
        self._loaded: Signature | None = None
        self._seen: Signature | None = None

    def look(self) -> Config | None:
        """Return the configuration if the files have changed, and have rested for one look.

        Raises
        ------
        OperatorError
            It is none. The next change is looked at again.
        """
        now = signature(self._path)
        rests, self._seen = now == self._seen, now
        if now == self._loaded or not rests:
            return None
        self._loaded = now
        return load(self._path)


def taken_over(before: Config, new: Config) -> tuple[Config, list[str]]:
    """Return what holds now, and which options of `new` need a restart.

    Parameters
    ----------
    before
        What held.
    new
        What the files say.
    """
    merged = msgspec.structs.replace(before, **{name: getattr(new, name) for name in _SECTIONS})
    waiting = []
    for section, live in _LIVE.items():
        held, wanted = getattr(before, section), getattr(new, section)
        changed = [name for name in held.__struct_fields__ if getattr(held, name) != getattr(wanted, name)]
        waiting += [f"{section}.{name}" for name in changed if name not in live]
        taken = msgspec.structs.replace(held, **{name: getattr(wanted, name) for name in live})
        merged = msgspec.structs.replace(merged, **{section: taken})
    keys = ("hmac_key_file",)
    waiting += [
        f"capture.{name}" for name in keys if getattr(before.capture, name) != getattr(new.capture, name)
    ]
    return merged, waiting


def follow(watch: FileWatch, before: LiveConfig, secrets: Secrets) -> LiveConfig | None:
    """Return what holds from now on if the files say something else that can be taken over.

    Parameters
    ----------
    watch
        Looks at the files.
    before
        What held.
    secrets
        Of the start: they are not read again.

    Raises
    ------
    OperatorError
        The files say what cannot be; what held goes on.
    """
    new = watch.look()
    if new is None:
        return None
    merged, waiting = taken_over(before.config, new)
    if merged.capture.hmac and not secrets.hmac_key:
        raise OperatorError("capture.hmac has no key: that needs a restart")
    if waiting:
        _LOG.warning("needs a restart of the sidecar: %s", ", ".join(waiting))
    try:
        return LiveConfig.of(merged, before.rows)
    except RowsError as error:
        raise OperatorError(str(error)) from error
