"""The configuration that holds in a sidecar, for its children: also for one that is started anew months later.

They do not load the files themselves. Who edits one, or a ConfigMap that is mounted, changes it under a running pod:
the supervisor alone reads it, and what it cannot accept changes nothing. A stratum keeps its rows in the table of
counts, one for each model, for the sidecar's life, whatever later configurations call first.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.errors import QuantdriftError
from quantdrift.sidecar.counters import MOST_ROWS, Row
from quantdrift.sidecar.policy import policy_of

_NAME = "config"
_LOG = logging.getLogger(__name__)


class RowsError(QuantdriftError):
    """The table of counts has no row left for another stratum."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
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


def settle(settled: Settled, directory: Path) -> Path:
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


class Settlement:
    """A child's view of what holds.

    Parameters
    ----------
    path
        Where `settle` wrote.

    Attributes
    ----------
    settled : Settled
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


def _read(path: Path) -> Settled:
    return msgspec.msgpack.decode(path.read_bytes(), type=Settled)
